// SPDX-License-Identifier: MIT OR Apache-2.0
//! The messages of an agreement: an all-gather of one number, whose headers are waited for in whatever order they
//! arrive.
//!
//! An engine waits for one message at a time, and each message is waited for once. In an agreement that is not enough:
//! a rank could wait for a peer that will never agree, while the header of another peer, which says why, is there. Most
//! agreements are over within milliseconds, so the calling thread waits for one header after the other. If that takes
//! longer than [`PATIENCE`], threads wait for the headers that remain, those of the nearest ranks first. The first that
//! is not of an agreement closes the engine, which ends all waits.
//!
//! A thread that cannot start is not needed: what differs is then found by the other rank, or at the deadline.

use core::ops::Range;
use std::{
    string::String,
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
    vec::Vec,
};

use super::{
    contract::{Engine, MessageDirection},
    moves::{Arriving, HEADERS, Moves, Stop},
    packets::{Header, SMALL},
};

impl<E: Engine> Moves<'_, E> {
    /// An all-gather of one number over `ranks`, to `all`: each rank sends a header to every other. So a peer that
    /// exchanges instead is found by the first header of its exchange, and finds this rank by its.
    pub(super) fn gather(&mut self, ranks: Range<usize>, number: u64, all: &mut [u64]) -> Result<(), Stop> {
        let own = self.group.rank;
        let header = Header::of_agreement(number, self.label.run);
        let to = self.rooms.small();
        // SAFETY: a room with space for a header.
        unsafe { to.copy_from_nonoverlapping(header.to_bytes().as_ptr(), Header::BYTES) };
        let (mut arriving, mut sent) = (Vec::with_capacity(ranks.len()), Vec::with_capacity(ranks.len()));
        for peer in ranks.clone().filter(|&peer| peer != own) {
            let (room, bytes) = (self.rooms.small(), Header::BYTES + SMALL);
            // SAFETY: a room of these bytes, which lives until the message has moved or the engine is closed.
            let posted = unsafe { self.post(MessageDirection::Receive, peer, HEADERS, room, bytes, 8) }?;
            arriving.push(Arriving { peer, room, posted });
        }
        for peer in ranks.clone().filter(|&peer| peer != own) {
            // SAFETY: the room lives until the message has moved or the engine is closed; it is only read.
            sent.push(unsafe { self.post(MessageDirection::Send, peer, HEADERS, to, Header::BYTES, 8) }?);
        }
        let check = |one: &Arriving| match header.compare(&one.header(), own, one.peer, String::new) {
            Some(verdict) => Err(Stop::Differs(verdict)),
            None => Ok(()),
        };
        wait_for_all(self, &arriving, &check)?;
        for one in &sent {
            self.wait(one)?;
        }
        all.fill(number);
        for one in &arriving {
            all[one.peer - ranks.start] = one.header().number();
        }
        Ok(())
    }
}

/// How long the calling thread waits alone.
const PATIENCE: Duration = Duration::from_millis(100);

/// The most threads that wait beside it.
const THREADS: usize = 64;

/// The state that the threads share.
struct Waits<'a> {
    /// By header: whether a thread waits for it, or has.
    claimed: Vec<AtomicBool>,
    all: &'a [Arriving],
    /// The first failure.
    stop: Mutex<Option<Stop>>,
    over: Mutex<bool>,
    ended: Condvar,
}

impl Waits<'_> {
    fn claim(&self, at: usize) -> bool {
        !self.claimed[at].swap(true, Ordering::Relaxed)
    }
}

/// Waits for all headers, and checks each once it is there.
fn wait_for_all<E: Engine>(
    moves: &Moves<'_, E>,
    all: &[Arriving],
    check: &(dyn Fn(&Arriving) -> Result<(), Stop> + Sync),
) -> Result<(), Stop> {
    let waits = Waits {
        claimed: all.iter().map(|_| AtomicBool::new(false)).collect(),
        all,
        stop: Mutex::default(),
        over: Mutex::new(false),
        ended: Condvar::new(),
    };
    let (group, deadline, rank) = (moves.group, moves.group.deadline, moves.group.rank);
    let engine = &group.engine;
    // Other ranks must find the verdict when their messages end with the engine.
    let end = |stop: &Stop| {
        if let Stop::Differs(verdict) = stop {
            group.set_failed(&verdict.text);
            group.start_search(false, Some(verdict.clone()));
        }
        engine.close();
    };
    let beside = |at: usize| {
        let outcome = engine.wait(all[at].posted.number, deadline).map_err(Stop::from).and_then(|()| check(&all[at]));
        if let Err(stop) = outcome {
            let mut first = waits.stop.lock().unwrap_or_else(PoisonError::into_inner);
            if first.is_none() {
                end(first.insert(stop));
            }
        }
    };
    thread::scope(|scope| {
        let (waits, beside) = (&waits, &beside);
        if all.len() > 1 {
            // A thread that is not there is not needed.
            let _ = thread::Builder::new().name("cpattn agreement".into()).spawn_scoped(scope, move || {
                if waits.is_over_within(PATIENCE) {
                    return;
                }
                for at in nearest(waits.all, rank).into_iter().take(THREADS) {
                    if waits.claim(at) {
                        let wait = thread::Builder::new().name("cpattn agreement".into());
                        if wait.spawn_scoped(scope, move || beside(at)).is_err() {
                            beside(at);
                            return;
                        }
                    }
                }
            });
        }
        let outcome = all.iter().enumerate().filter(|&(at, _)| waits.claim(at)).try_for_each(|(_, one)| {
            moves.wait(&one.posted)?;
            check(one)
        });
        waits.end();
        if let Err(stop) = outcome {
            let mut first = waits.stop.lock().unwrap_or_else(PoisonError::into_inner);
            // The first failure is the cause, since the others' waits end with the engine; a difference says more.
            if first.is_none() || matches!((&*first, &stop), (Some(Stop::Failed(_)), Stop::Differs(_))) {
                // The other threads wait for messages that may never come.
                end(first.insert(stop));
            }
        }
    });
    waits.stop.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

impl Waits<'_> {
    /// Waits for the end of the calling thread's waits, at most for `time`.
    fn is_over_within(&self, time: Duration) -> bool {
        let over = self.over.lock().unwrap_or_else(PoisonError::into_inner);
        let over = self.ended.wait_timeout_while(over, time, |over| !*over);
        *over.unwrap_or_else(PoisonError::into_inner).0
    }

    fn end(&self) {
        *self.over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.ended.notify_all();
    }
}

/// The headers in the order of the distance of their ranks: neighbours of a ring exchange first.
fn nearest(all: &[Arriving], rank: usize) -> Vec<usize> {
    let mut order: Vec<_> = (0..all.len()).collect();
    order.sort_by_key(|&at| all[at].peer.abs_diff(rank));
    order
}
