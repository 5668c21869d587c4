// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks every link of the ring and measures its speed.
//!
//! Use it before a long job, or after a job has failed at a deadline. A list of results (the ledger) is sent from rank
//! 0 round the ring and back in the other direction, one link at a time. At each link the two ranks send a small
//! message back and forth and then a large one, stamped with its sender, which the receiver compares byte by byte; then
//! the ledger is sent on with the results. So each link is measured while nothing else uses it, and a failure has a
//! name: the link at which the ledger stopped.

use std::{
    fmt, format,
    time::{Duration, Instant},
    vec::Vec,
};

use super::{
    Label, Transport,
    carrier::{self, Carrier, WireBuffer},
};
use crate::error::{Cause, Error, Fault, Result};

/// How often the small message is sent back and forth, and how often the large one is sent.
const SMALL_ROUNDS: u32 = 16;
const LARGE_ROUNDS: u32 = 3;

/// One link, one way.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Link {
    /// The rank that sent.
    pub from: usize,
    /// The rank that received.
    pub to: usize,
    /// Half the shortest round trip of eight bytes.
    pub latency: Duration,
    /// Of the fastest large message, without the latency.
    pub bytes_per_second: f64,
}

/// A fault of the ring, as one rank sees it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RingFault {
    /// An exchange failed while this rank was at a link.
    Failed {
        /// The link, from and to; `None` if the fault is elsewhere and this rank was only notified.
        link: Option<(usize, usize)>,
        /// The transport's error.
        error: Error,
    },
    /// A link delivered other bytes than were sent.
    OtherBytes {
        /// From and to.
        link: (usize, usize),
        /// The first byte that differs.
        at: usize,
    },
}

impl RingFault {
    /// The fault, noticed at this link. An error that names a rank elsewhere is not of the link, nor is a refusal.
    fn at(self, (from, to): (usize, usize)) -> Self {
        match self {
            Self::Failed { error, .. } => {
                let here = match &error {
                    Error::Peer { .. } => error.peer().is_none_or(|peer| [from, to].contains(&peer)),
                    Error::Invalid { .. } => false,
                    _ => true,
                };
                Self::Failed { link: here.then_some((from, to)), error }
            }
            fault => fault,
        }
    }

    /// The way out.
    pub fn advice(&self) -> &'static str {
        match self {
            Self::OtherBytes { .. } => {
                "the transport or the network changes data: test the two hosts of this link alone, and with another transport"
            }
            Self::Failed {
                error: Error::Peer { fault: Fault::One { cause: Cause::Deadline { .. }, .. }, .. }, ..
            } => {
                "see whether the process of that rank runs and whether its host is reached from here: firewalls, the network \
                 interface that is used, host names; if it was only slow, give a longer deadline"
            }
            Self::Failed {
                error: Error::Peer { fault: Fault::One { cause: Cause::Size { .. } | Cause::Disagreed { .. }, .. }, .. },
                ..
            } => "give every rank the same number of bytes",
            Self::Failed { error: Error::Peer { fault: Fault::One { .. } | Fault::Found { .. }, .. }, .. } => {
                "see whether the process of that rank still runs; if it ended by itself, read its output"
            }
            Self::Failed { error: Error::Invalid { .. }, .. } => "give what is expected, the same on every rank",
            Self::Failed { .. } => "see the error",
        }
    }
}

impl fmt::Display for RingFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { link: Some((from, to)), error } => write!(f, "link {from} → {to} failed: {error}")?,
            Self::Failed { link: None, error: error @ Error::Invalid { .. } } => {
                write!(f, "the ring was not checked: {error}")?;
            }
            Self::Failed { link: None, error } => write!(f, "the ring failed elsewhere: {error}")?,
            Self::OtherBytes { link: (from, to), at } => {
                write!(f, "link {from} → {to} delivered other bytes than were sent, from byte {at} on")?;
            }
        }
        write!(f, "; try: {}", self.advice())
    }
}

impl std::error::Error for RingFault {}

/// An error of which it is not known yet to which link it belongs.
impl From<Error> for RingFault {
    fn from(error: Error) -> Self {
        Self::Failed { link: None, error }
    }
}

/// A link as it is sent: from, to, latency and transfer in nanoseconds.
type LedgerEntry = [u64; 4];

/// Byte `at` of the message that `from` sends at hop `hop`.
fn stamp(from: usize, hop: usize, at: usize) -> u8 {
    (from.wrapping_mul(167) ^ hop.wrapping_mul(29) ^ at.wrapping_mul(13) ^ (at >> 8) ^ (at >> 16).wrapping_mul(37))
        as u8
}

/// From and to of a hop: round the ring, then back.
fn link(world: usize, hop: usize) -> (usize, usize) {
    if hop < world {
        (hop, (hop + 1) % world)
    } else {
        let from = (2 * world - hop) % world;
        (from, (from + world - 1) % world)
    }
}

/// One rank's part of the check.
struct LedgerRound<'a> {
    carrier: Carrier<'a>,
    hop: usize,
    ledger: Vec<LedgerEntry>,
    /// The bytes of a large message.
    stamps: Vec<u8>,
    /// A message of eight bytes.
    word: WireBuffer,
    /// A large message.
    large: WireBuffer,
    /// The ledger as a message.
    pages: WireBuffer,
}

impl Link {
    /// Checks all links. All ranks call it with the same number of `bytes` (at least 1) for the large message. Rank 0
    /// gets all links in the order in which they were measured, other ranks those measured before their last turn.
    ///
    /// # Errors
    /// What failed, on every rank that noticed; [`RingFault::Failed`] with [`Error::Invalid`] for a ring of one rank or
    /// 0 bytes.
    ///
    /// ```
    /// use cpattn::transport::{local, ring_check::Link};
    /// use std::time::Duration;
    ///
    /// let ends = local::group(3, Duration::from_secs(10))?;
    /// std::thread::scope(|scope| {
    ///     for end in ends {
    ///         scope.spawn(move || {
    ///             let links = Link::check_all(&end, 1 << 16).unwrap();
    ///             assert!(links.iter().all(|link| link.bytes_per_second > 0.0));
    ///         });
    ///     }
    /// });
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn check_all(end: &dyn Transport, bytes: usize) -> Result<Vec<Self>, RingFault> {
        round(Carrier::Host(end), bytes)
    }

    /// The same over a transport of device memory: messages go from device to device. The figures include the time
    /// until the host sees that a message has arrived, but no copies between host and device.
    ///
    /// Over NCCL a rank notices a failure elsewhere only by its own deadline, so several ranks may name a link: the
    /// ledger stopped at the one with the lowest step.
    ///
    /// # Errors
    /// As [`Link::check_all`]; [`Error::Device`] if the device has no memory for a message.
    #[cfg(feature = "cuda")]
    pub fn check_all_on_device(end: &dyn super::DeviceTransport, bytes: usize) -> Result<Vec<Self>, RingFault> {
        round(Carrier::Device(end), bytes)
    }
}

fn round(carrier: Carrier<'_>, bytes: usize) -> Result<Vec<Link>, RingFault> {
    let end = carrier.end();
    let (rank, world) = (end.rank(), end.world());
    if world < 2 {
        return Err(Error::invalid("world", world, "at least 2 ranks, for a ring").into());
    }
    if bytes == 0 {
        return Err(Error::invalid("bytes", 0, "at least 1").into());
    }
    let mut walk = LedgerRound {
        carrier,
        hop: 0,
        ledger: std::vec![[0; 4]; 2 * world],
        stamps: carrier::zeros(bytes)?,
        word: carrier.room(8)?,
        large: carrier.room(bytes)?,
        pages: carrier.room(2 * world * size_of::<LedgerEntry>())?,
    };
    let mut known = 0;
    for hop in 0..2 * world {
        walk.hop = hop;
        let (from, to) = link(world, hop);
        // With two ranks, a rank is at both ends of the ring, and each hop still has one sender.
        let outcome = if rank == from {
            walk.give(to)
        } else if rank == to {
            walk.take(from)
        } else {
            continue;
        };
        outcome.map_err(|fault| fault.at((from, to)))?;
        known = hop + 1;
    }
    let entry = |&[from, to, latency, transfer]: &LedgerEntry| Link {
        from: from as usize,
        to: to as usize,
        latency: Duration::from_nanos(latency),
        bytes_per_second: bytes as f64 * 1e9 / transfer.max(1) as f64,
    };
    Ok(walk.ledger[..known].iter().map(entry).collect())
}

impl LedgerRound<'_> {
    fn give(&mut self, to: usize) -> Result<(), RingFault> {
        let (carrier, rank, hop) = (self.carrier, self.carrier.end().rank(), self.hop);
        let label = Label::new("ring check", hop as u32);
        let mut latency = Duration::MAX;
        self.write_bytes()?;
        for round in 0..SMALL_ROUNDS {
            let began = Instant::now();
            carrier.send(label, to, &mut self.word)?;
            carrier.receive(label, to, &mut self.word)?;
            latency = latency.min(began.elapsed() / 2);
            if round == 0
                && let Err(fault) = self.same_bytes(to)
            {
                // The receiver has found the same fault; this abort notifies the other ranks.
                carrier.end().abort(Cause::Failed);
                return Err(fault);
            }
        }
        self.stamps.iter_mut().enumerate().for_each(|(at, byte)| *byte = stamp(rank, hop, at));
        self.large.put(&self.stamps)?;
        let mut transfer = Duration::MAX;
        for _ in 0..LARGE_ROUNDS {
            let began = Instant::now();
            carrier.send(label, to, &mut self.large)?;
            carrier.receive(label, to, &mut self.word)?;
            // On a busy machine the latency is the scheduler's, and may exceed the time of a large message.
            let elapsed = began.elapsed();
            transfer = transfer.min(if elapsed > 2 * latency { elapsed - latency } else { elapsed });
        }
        self.ledger[hop] = [rank as u64, to as u64, latency.as_nanos() as u64, transfer.as_nanos() as u64];
        self.pages.put(bytemuck::cast_slice(&self.ledger))?;
        Ok(carrier.send(label, to, &mut self.pages)?)
    }

    fn take(&mut self, from: usize) -> Result<(), RingFault> {
        let (carrier, rank, hop) = (self.carrier, self.carrier.end().rank(), self.hop);
        let label = Label::new("ring check", hop as u32);
        for round in 0..SMALL_ROUNDS {
            carrier.receive(label, from, &mut self.word)?;
            if round == 0 {
                let same = self.same_bytes(from);
                self.write_bytes()?;
                carrier.send(label, from, &mut self.word)?;
                same?;
            } else {
                carrier.send(label, from, &mut self.word)?;
            }
        }
        let mut other = None;
        for _ in 0..LARGE_ROUNDS {
            self.stamps.fill(!stamp(from, hop, 0));
            self.large.put(&self.stamps)?;
            carrier.receive(label, from, &mut self.large)?;
            carrier.send(label, from, &mut self.word)?;
            self.large.get(&mut self.stamps)?;
            let differs = |(at, &byte): (usize, &u8)| byte != stamp(from, hop, at);
            other = other.or_else(|| self.stamps.iter().enumerate().position(differs));
        }
        carrier.receive(label, from, &mut self.pages)?;
        self.pages.get(bytemuck::cast_slice_mut(&mut self.ledger))?;
        if let Some(at) = other {
            // This abort notifies the other ranks.
            carrier.end().abort(Cause::Failed);
            return Err(RingFault::OtherBytes { link: (from, rank), at });
        }
        Ok(())
    }

    /// Writes the number of bytes that this rank was called with into the word to send.
    fn write_bytes(&mut self) -> Result<()> {
        self.word.put(&(self.stamps.len() as u64).to_ne_bytes())
    }

    /// Compares the received number with this rank's. Without this check each transport would report the difference of
    /// the large messages in its own words, or not at all.
    fn same_bytes(&self, peer: usize) -> Result<(), RingFault> {
        let mut word = [0; 8];
        self.word.get(&mut word)?;
        let (theirs, ours) = (u64::from_ne_bytes(word), self.stamps.len() as u64);
        if theirs == ours {
            return Ok(());
        }
        let found = format!("{ours} on rank {} and {theirs} on rank {peer}", self.carrier.end().rank());
        let expected = format!("the same number on every rank (or rank {peer} is in another call)");
        Err(Error::invalid("bytes", found, expected).into())
    }
}
