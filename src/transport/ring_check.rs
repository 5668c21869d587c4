// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks every link of the ring and measures its speed.
//!
//! Use it before a long job, or after a job has failed at a deadline. A list of results (the ledger) is sent from rank
//! 0 round the ring and back in the other direction, one link at a time. At each link the two ranks send a small
//! message back and forth and then a large one, stamped with its sender, which the receiver compares byte by byte; then
//! the ledger is sent on with the results. So each link is measured while nothing else uses it, and a failure has a
//! name: the link at which the ledger stopped.

use std::{
    boxed::Box,
    fmt, format,
    time::{Duration, Instant},
    vec::Vec,
};

#[cfg(feature = "cuda")]
use super::carrier::DeviceCarrier;
use super::{
    Label, Transport,
    carrier::{self, Carrier, HostCarrier, WireBuffer},
};
use crate::error::{Cause, Error, Result};

/// How often the small message is sent back and forth, and how often the large one is sent.
const SMALL: u32 = 16;
const LARGE: u32 = 3;

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
    /// The way out.
    pub fn advice(&self) -> &'static str {
        match self {
            Self::OtherBytes { .. } => {
                "the transport or what is below it loses data: test the hosts of this link alone, with another transport too"
            }
            Self::Failed { error: Error::Peer { cause: Cause::Deadline { .. }, .. }, .. } => {
                "see whether the process of that rank runs and whether its host is reached from here: firewalls, the network \
                 interface that is used, host names; if it only was slow, give a longer deadline"
            }
            Self::Failed { error: Error::Peer { cause: Cause::Size { .. } | Cause::Disagreed { .. }, .. }, .. } => {
                "give every rank the same number of bytes"
            }
            Self::Failed { error: Error::Peer { .. } | Error::Found { .. }, .. } => {
                "see whether the process of that rank still runs; where it ended by itself, read what it printed"
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
    carrier: &'a dyn Carrier,
    end: &'a dyn Transport,
    hop: usize,
    ledger: Vec<LedgerEntry>,
    /// The bytes of a large message.
    stamps: Vec<u8>,
    /// The messages: eight bytes, a large message, the ledger.
    word: Box<dyn WireBuffer>,
    large: Box<dyn WireBuffer>,
    pages: Box<dyn WireBuffer>,
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
        round(&HostCarrier(end), bytes)
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
        round(&DeviceCarrier(end), bytes)
    }
}

fn round(carrier: &dyn Carrier, bytes: usize) -> Result<Vec<Link>, RingFault> {
    let end = carrier.end();
    let (rank, world) = (end.rank(), end.world());
    let refused = |error| RingFault::Failed { link: None, error };
    if world < 2 {
        return Err(refused(Error::invalid("world", world, "at least 2 ranks, for a ring")));
    }
    if bytes == 0 {
        return Err(refused(Error::invalid("bytes", 0, "at least 1")));
    }
    let stamps = carrier::zeros(bytes).map_err(refused)?;
    let room = |bytes| carrier.room(bytes).map_err(refused);
    let (word, large, pages) = (room(8)?, room(bytes)?, room(2 * world * size_of::<LedgerEntry>())?);
    let ledger = std::vec![[0; 4]; 2 * world];
    let mut walk = LedgerRound { carrier, end, hop: 0, ledger, stamps, word, large, pages };
    let mut known = 0;
    for hop in 0..2 * world {
        walk.hop = hop;
        let (from, to) = link(world, hop);
        // With two ranks, a rank is at both ends of the ring, and each hop still has one sender.
        if rank == from {
            walk.give(to)?;
            known = hop + 1;
        } else if rank == to {
            walk.take(from)?;
            known = hop + 1;
        }
    }
    let entry = |&[from, to, latency, transfer]: &LedgerEntry| Link {
        from: from as usize,
        to: to as usize,
        latency: Duration::from_nanos(latency),
        bytes_per_second: bytes as f64 * 1e9 / transfer.max(1) as f64,
    };
    Ok(walk.ledger[..known].iter().map(entry).collect())
}

/// The buffer to send.
#[derive(Clone, Copy)]
enum Which {
    Word,
    Large,
    Pages,
}

impl LedgerRound<'_> {
    fn give(&mut self, to: usize) -> Result<(), RingFault> {
        let (rank, hop) = (self.end.rank(), self.hop);
        let mut latency = Duration::MAX;
        self.write_bytes()?;
        for round in 0..SMALL {
            let began = Instant::now();
            self.carry(to, Which::Word, true)?;
            self.carry(to, Which::Word, false)?;
            latency = latency.min(began.elapsed() / 2);
            if round == 0
                && let Err(fault) = self.same_bytes(to)
            {
                // The receiver has found the same fault; this abort notifies the other ranks.
                self.end.abort(Cause::Failed);
                return Err(fault);
            }
        }
        self.stamps.iter_mut().enumerate().for_each(|(at, byte)| *byte = stamp(rank, hop, at));
        let filled = self.large.put(&self.stamps);
        filled.map_err(|error| self.fault(error))?;
        let mut transfer = Duration::MAX;
        for _ in 0..LARGE {
            let began = Instant::now();
            self.carry(to, Which::Large, true)?;
            self.carry(to, Which::Word, false)?;
            // On a busy machine the latency is the scheduler's, and may exceed the time of a large message.
            let elapsed = began.elapsed();
            transfer = transfer.min(if elapsed > 2 * latency { elapsed - latency } else { elapsed });
        }
        self.ledger[hop] = [rank as u64, to as u64, latency.as_nanos() as u64, transfer.as_nanos() as u64];
        let written = self.pages.put(bytemuck::cast_slice(&self.ledger));
        written.map_err(|error| self.fault(error))?;
        self.carry(to, Which::Pages, true)
    }

    fn take(&mut self, from: usize) -> Result<(), RingFault> {
        for round in 0..SMALL {
            self.carry(from, Which::Word, false)?;
            if round == 0 {
                let same = self.same_bytes(from);
                self.write_bytes()?;
                self.carry(from, Which::Word, true)?;
                same?;
            } else {
                self.carry(from, Which::Word, true)?;
            }
        }
        let (hop, mut other) = (self.hop, None);
        for _ in 0..LARGE {
            self.stamps.fill(!stamp(from, hop, 0));
            let cleared = self.large.put(&self.stamps);
            cleared.map_err(|error| self.fault(error))?;
            self.carry(from, Which::Large, false)?;
            self.carry(from, Which::Word, true)?;
            let read = self.large.get(&mut self.stamps);
            read.map_err(|error| self.fault(error))?;
            let differs = |(at, &byte): (usize, &u8)| byte != stamp(from, hop, at);
            other = other.or_else(|| self.stamps.iter().enumerate().position(differs));
        }
        self.carry(from, Which::Pages, false)?;
        let read = self.pages.get(bytemuck::cast_slice_mut(&mut self.ledger));
        read.map_err(|error| self.fault(error))?;
        if let Some(at) = other {
            // This abort notifies the other ranks.
            self.end.abort(Cause::Failed);
            return Err(RingFault::OtherBytes { link: link(self.end.world(), self.hop), at });
        }
        Ok(())
    }

    /// Writes the number of bytes that this rank was called with into the word to send.
    fn write_bytes(&mut self) -> Result<(), RingFault> {
        let written = self.word.put(&(self.stamps.len() as u64).to_ne_bytes());
        written.map_err(|error| self.fault(error))
    }

    /// Compares the received number with this rank's. Without this check each transport would report the difference of
    /// the large messages in its own words, or not at all.
    fn same_bytes(&mut self, peer: usize) -> Result<(), RingFault> {
        let mut word = [0; 8];
        self.word.get(&mut word).map_err(|error| self.fault(error))?;
        let (theirs, ours) = (u64::from_ne_bytes(word), self.stamps.len() as u64);
        if theirs == ours {
            return Ok(());
        }
        let found = format!("{ours} on rank {} and {theirs} on rank {peer}", self.end.rank());
        let expected =
            format!("the same number on every rank (or rank {peer} does something else than check the ring)");
        Err(RingFault::Failed { link: None, error: Error::invalid("bytes", found, expected) })
    }

    /// Sends bytes to `peer`, or receives them, and waits until they are there.
    fn carry(&mut self, peer: usize, which: Which, send: bool) -> Result<(), RingFault> {
        let room = match which {
            Which::Word => &mut self.word,
            Which::Large => &mut self.large,
            Which::Pages => &mut self.pages,
        };
        let label = Label::new("ring check", self.hop as u32);
        carrier::carry(self.carrier, label, peer, &mut **room, send).map_err(|error| self.fault(error))
    }

    /// The fault that an error at this hop stands for.
    fn fault(&self, error: Error) -> RingFault {
        let (from, to) = link(self.end.world(), self.hop);
        let here = match &error {
            Error::Peer { peer, .. } | Error::Found { peer: Some(peer), .. } => [from, to].contains(peer),
            _ => true,
        };
        RingFault::Failed { link: here.then_some((from, to)), error }
    }
}
