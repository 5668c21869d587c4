// SPDX-License-Identifier: MIT OR Apache-2.0
//! Is every link of the ring there, and how fast is it?
//!
//! Before a long job, or when one has ended in a deadline: a ledger goes from rank 0 all the way round the ring and back the
//! other way, one link at a time. At each link the two ranks pass a small message to and fro and then a large one, stamped
//! with its sender, which the receiver compares byte by byte; then the ledger goes on with what was measured. So each figure
//! is of a link that nothing else was using, and what fails has a name: the link at which the ledger stopped.

use std::{
    fmt,
    time::{Duration, Instant},
    vec::Vec,
};

use super::{Label, Message, Transport};
use crate::error::{Cause, Error, Result};

/// How often the small message goes to and fro, and the large one goes.
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
    /// Of the quickest large message, the latency taken off.
    pub bytes_per_second: f64,
}

/// What is wrong with the ring, as one rank saw it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Trouble {
    /// An exchange failed while this rank was at a link.
    Failed {
        /// The link, from and to; `None` when the fault lies elsewhere and this rank was only told of it.
        link: Option<(usize, usize)>,
        /// What the transport says.
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

impl Trouble {
    /// What to try.
    pub fn advice(&self) -> &'static str {
        match self {
            Self::OtherBytes { .. } => {
                "the transport or what is below it loses data: test the hosts of this link alone, with another transport too"
            }
            Self::Failed { error: Error::Peer { cause: Cause::Deadline { .. }, .. }, .. } => {
                "see whether the process of that rank runs and whether its host is reached from here: firewalls, the network \
                 interface that is used, host names; if it only was slow, give a longer deadline"
            }
            Self::Failed { error: Error::Peer { cause: Cause::Size { .. }, .. }, .. } => {
                "give every rank the same number of bytes"
            }
            Self::Failed { error: Error::Peer { .. }, .. } => {
                "see whether the process of that rank still runs; where it ended by itself, read what it printed"
            }
            Self::Failed { error: Error::Invalid { .. }, .. } => "give what is expected, the same on every rank",
            Self::Failed { .. } => "see the error",
        }
    }
}

impl fmt::Display for Trouble {
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

impl std::error::Error for Trouble {}

/// A link as it travels: from, to, latency and transfer in nanoseconds.
type LedgerEntry = [u64; 4];

/// Byte `at` of what `from` sends at hop `hop`.
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

struct LedgerRound<'a, T: ?Sized> {
    end: &'a T,
    hop: usize,
    ledger: Vec<LedgerEntry>,
    large: Vec<u8>,
}

/// Sends a ledger round the ring and back; all ranks call it with the same number of `bytes` (at least 1) for the large
/// message. Rank 0 gets all links in the order in which they were measured, other ranks those before their last turn.
///
/// # Errors
/// What failed, on every rank that noticed; [`Trouble::Failed`] with [`Error::Invalid`] for a ring of one rank or 0 bytes.
///
/// ```
/// use cpattn::transport::{local, ring_check};
/// use std::time::Duration;
///
/// let ends = local::group(3, Duration::from_secs(10))?;
/// std::thread::scope(|scope| {
///     for end in ends {
///         scope.spawn(move || {
///             let links = ring_check::check(&end, 1 << 16).unwrap();
///             assert!(links.iter().all(|link| link.bytes_per_second > 0.0));
///         });
///     }
/// });
/// # Ok::<(), cpattn::Error>(())
/// ```
pub fn check<T: Transport + ?Sized>(end: &T, bytes: usize) -> Result<Vec<Link>, Trouble> {
    let (rank, world) = (end.rank(), end.world());
    let refused = |error| Trouble::Failed { link: None, error };
    if world < 2 {
        return Err(refused(Error::invalid("world", world, "at least 2 ranks, for a ring")));
    }
    if bytes == 0 {
        return Err(refused(Error::invalid("bytes", 0, "at least 1")));
    }
    // A large message that no memory holds is refused, not the end of the program.
    let mut large = Vec::new();
    if large.try_reserve_exact(bytes).is_err() {
        return Err(refused(Error::invalid("bytes", bytes, "a number that fits into memory")));
    }
    large.resize(bytes, 0);
    let mut walk = LedgerRound { end, hop: 0, ledger: std::vec![[0; 4]; 2 * world], large };
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

impl<T: Transport + ?Sized> LedgerRound<'_, T> {
    fn give(&mut self, to: usize) -> Result<(), Trouble> {
        let (rank, hop) = (self.end.rank(), self.hop);
        let mut latency = Duration::MAX;
        let mut word = [0; 8];
        for _ in 0..SMALL {
            let began = Instant::now();
            self.move_(to, &mut word, true)?;
            self.move_(to, &mut word, false)?;
            latency = latency.min(began.elapsed() / 2);
        }
        let mut large = std::mem::take(&mut self.large);
        large.iter_mut().enumerate().for_each(|(at, byte)| *byte = stamp(rank, hop, at));
        let mut transfer = Duration::MAX;
        for _ in 0..LARGE {
            let began = Instant::now();
            self.move_(to, &mut large, true)?;
            self.move_(to, &mut word, false)?;
            // Where a latency is what the system's scheduler takes, it may exceed the time of a large message.
            let elapsed = began.elapsed();
            transfer = transfer.min(if elapsed > 2 * latency { elapsed - latency } else { elapsed });
        }
        self.large = large;
        self.ledger[hop] = [rank as u64, to as u64, latency.as_nanos() as u64, transfer.as_nanos() as u64];
        let mut ledger = std::mem::take(&mut self.ledger);
        let sent = self.move_(to, bytemuck::cast_slice_mut(&mut ledger), true);
        self.ledger = ledger;
        sent
    }

    fn take(&mut self, from: usize) -> Result<(), Trouble> {
        let mut word = [0; 8];
        for _ in 0..SMALL {
            self.move_(from, &mut word, false)?;
            self.move_(from, &mut word, true)?;
        }
        let mut large = std::mem::take(&mut self.large);
        let mut other = None;
        for _ in 0..LARGE {
            large.fill(!stamp(from, self.hop, 0));
            self.move_(from, &mut large, false)?;
            self.move_(from, &mut word, true)?;
            let hop = self.hop;
            other = other.or_else(|| large.iter().enumerate().position(|(at, &byte)| byte != stamp(from, hop, at)));
        }
        self.large = large;
        let mut ledger = std::mem::take(&mut self.ledger);
        let taken = self.move_(from, bytemuck::cast_slice_mut(&mut ledger), false);
        self.ledger = ledger;
        taken?;
        if let Some(at) = other {
            // No other rank is told of it otherwise.
            self.end.abort(Cause::Failed);
            return Err(Trouble::OtherBytes { link: link(self.end.world(), self.hop), at });
        }
        Ok(())
    }

    /// Sends bytes to `peer`, or receives them.
    fn move_(&self, peer: usize, bytes: &mut [u8], send: bool) -> Result<(), Trouble> {
        let message = [Message { peer, ptr: bytes.as_mut_ptr(), bytes: bytes.len() }];
        let (sends, recvs): (&[_], &[_]) = if send { (&message, &[]) } else { (&[], &message) };
        let label = Label { operation: "ring check", step: self.hop as u32 };
        // SAFETY: the bytes are borrowed alone until the call returns.
        let outcome = unsafe { self.end.exchange(label, sends, recvs) };
        outcome.map_err(|error| {
            let (from, to) = link(self.end.world(), self.hop);
            let here = match &error {
                Error::Peer { peer, .. } => [from, to].contains(peer),
                _ => true,
            };
            Trouble::Failed { link: here.then_some((from, to)), error }
        })
    }
}
