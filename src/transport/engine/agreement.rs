// SPDX-License-Identifier: MIT OR Apache-2.0
//! Waits for the headers of all peers in an agreement, in whatever order they arrive.
//!
//! An engine waits for one message at a time, and each message is waited for once. In an agreement that is not enough:
//! a rank could wait for a peer that will never agree, while the header of another peer, which says why, is there. Most
//! agreements are over within milliseconds, so the calling thread waits for one header after the other. If that takes
//! longer than [`PATIENCE`], threads wait for the headers that remain, those of the nearest ranks first. The first that
//! is not of an agreement closes the engine, which ends all waits.
//!
//! A thread that cannot start is not needed: what differs is then found by the other rank, or at the deadline.

use std::{
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
    vec::Vec,
};

use super::{
    contract::Engine,
    moves::{Arriving, Moves, Stop},
};

/// How long the calling thread waits alone.
const PATIENCE: Duration = Duration::from_millis(100);

/// The most threads that wait beside it.
const THREADS: usize = 64;

/// The state that the threads share.
struct Waits<'a> {
    /// By header: whether a thread waits for it, or has.
    claimed: Vec<AtomicBool>,
    all: &'a [Arriving],
    /// The first failure of a thread beside the calling one.
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
pub(super) fn wait_for_all<E: Engine>(
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
    let outcome = thread::scope(|scope| {
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
        // The other threads wait for messages that may never come.
        outcome.inspect_err(end)
    });
    // What a thread has found is the cause; the wait of this one has then ended with the engine.
    match waits.stop.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(stop) if !matches!(outcome, Err(Stop::Differs(_))) => Err(stop),
        _ => outcome,
    }
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
