// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whole runs in which one rank goes wrong, at every call of its transport, in every mode.
//!
//! A good run of each mode is tapped first: what each rank returns, and which calls of its transport it makes, with
//! which peers. A trial then repeats that run and lets one rank die, leave, fail, fall silent, come late or panic at
//! one of those calls, or in its own code before or between the two directions. What must hold every time:
//!
//! - every rank returns, in time: far below the deadline when the fault is one that is noticed at once;
//! - a rank that still needed the culprit gets an error that names itself, the culprit and what it did;
//! - a rank that returns `Ok` has the very bits of the good run; there is no third way;
//! - afterwards the rank says so again, at once, and no thread or memory is left behind.
//!
//! `cargo test` tries every call with the faults that cost no waiting, and a sample of the others. With
//! `CPATTN_FAULT_TRIALS=10000 cargo test --test faults` as many trials are drawn at random.

mod act;
#[path = "../common/mod.rs"]
mod common;
mod mode;
mod rank;
mod trial;

use act::{Act, FAR, NEAR, swift};
use common::{Random, through::Fault};
use cpattn::{Layout, Mesh, Plan, Rank, transport::local};
use mode::modes;
use rank::forward;
use std::{
    sync::{Mutex, PoisonError},
    time::Instant,
};
use trial::{hush, play_all};

/// Trials count threads and bytes of the whole process, so tests of this binary take turns.
static TURN: Mutex<()> = Mutex::new(());

#[test]
fn at_every_call_of_every_rank_in_every_mode() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let modes = modes();
    let mut trials = Vec::new();
    for (m, mode) in modes.iter().enumerate() {
        assert!(mode.calls.iter().all(|c| c.len() >= 4), "{}: {:?}", mode.name, mode.calls);
        for culprit in 0..mode.world() {
            for at in 0..mode.calls[culprit].len() as u64 {
                trials.extend(swift(at).map(|act| (m, culprit, act)));
            }
            let own = [Act::Nothing, Act::DropFirst, Act::DropBetween, Act::PanicFirst, Act::PanicBetween];
            trials.extend(own.map(|act| (m, culprit, act)));
        }
    }
    play_all(&modes, &trials);
}

#[test]
fn silence_and_delays_beyond_the_deadline() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let modes = modes();
    let mut r = Random::new(1);
    let mut trials = Vec::new();
    for (m, mode) in modes.iter().enumerate() {
        for fault in [Fault::Silence, Fault::Silence, Fault::Delay(NEAR * 2)] {
            let culprit = r.below(mode.world());
            trials.push((m, culprit, Act::At(r.below(mode.calls[culprit].len()) as u64, fault)));
        }
    }
    play_all(&modes, &trials);
}

#[test]
fn an_abort_from_another_thread_at_any_moment() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let modes = modes();
    let mut r = Random::new(2);
    let draw = |i: usize| (i % modes.len(), r.below(2), Act::Abort(r.below(3000) as u64));
    let trials: Vec<_> = (0..modes.len() * 10).map(draw).collect();
    play_all(&modes, &trials);
}

#[test]
fn as_many_trials_as_are_asked_for() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let count = std::env::var("CPATTN_FAULT_TRIALS").map_or(100, |n| n.parse().expect("a number of trials"));
    let (modes, start) = (modes(), Instant::now());
    let mut r = Random::new(9);
    let trials: Vec<_> = (0..count)
        .map(|i| {
            let m = i % modes.len();
            let culprit = r.below(modes[m].world());
            let at = r.below(modes[m].calls[culprit].len()) as u64;
            // One in sixteen waits for a deadline.
            let act = match r.below(16) {
                0 if r.below(2) == 0 => Act::At(at, Fault::Silence),
                0 => Act::At(at, Fault::Delay(NEAR * 2)),
                1 => Act::DropFirst,
                2 => Act::DropBetween,
                3 => Act::PanicFirst,
                4 => Act::PanicBetween,
                5 => Act::Abort(r.below(4000) as u64),
                n => swift(at)[n % 4],
            };
            (m, culprit, act)
        })
        .collect();
    play_all(&modes, &trials);
    println!("{count} trials in {:.1} s", start.elapsed().as_secs_f64());
}

#[test]
fn new_ranks_run_after_a_failure_and_old_handles_do_not_keep_a_rank() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    hush();
    let mode = &modes()[1];
    mode.trial(2, Act::At(3, Fault::Panic));
    mode.trial(2, Act::Nothing);
    // A handle that outlives its rank does not hide that the rank has left.
    let mut ranks: Vec<Rank> = local::group(2, FAR).unwrap().into_iter().map(Rank::new).collect();
    let handle = ranks[1].handle();
    drop(ranks.pop());
    let p = mode.plan.problem();
    let plan = Plan::new(p, Mesh::ring(2).unwrap(), Layout::Contiguous).unwrap();
    let error = forward(&mut ranks[0], &plan, &mode.data).unwrap_err();
    let plan = format!("{:016x}", plan.fingerprint());
    assert_eq!(error.to_string(), format!("rank 0, agree, step 0 of the forward of plan {plan}: rank 1 left"));
    handle.abort();
    assert_eq!(handle.poll(), Ok(()));
}
