// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every kind of fault at every call of a short run on transport `local`: every rank returns, in time, and blames the
//! rank that has the fault.

use crate::through::{Fault, Faulty, Through};
use cpattn::transport::{Label, Message, Transport, local, local::Local};
use cpattn::{Cause, Error, Result};
use std::thread;
use std::time::{Duration, Instant};

const WORLD: usize = 3;
const CALLS: u64 = 4;
const DEADLINE: Duration = Duration::from_millis(300);

/// An agreement and three steps of a ring; the number of the call that failed, and its error.
fn work(rank: &Faulty<Local>) -> Result<(), (u64, Error)> {
    let me = rank.rank();
    rank.agree(0..WORLD, 1).map_err(|error| (0, error))?;
    for step in 1..CALLS {
        let (out, mut into) = ([me as u8; 32], [9_u8; 32]);
        let send = Message { peer: (me + 1) % WORLD, ptr: out.as_ptr().cast_mut(), bytes: 32 };
        let recv = Message { peer: (me + 2) % WORLD, ptr: into.as_mut_ptr(), bytes: 32 };
        let label = Label::new("ring", step as u32);
        // SAFETY: both arrays outlive the call.
        unsafe { rank.exchange(label, &[send], &[recv]) }.map_err(|error| (step, error))?;
        assert_eq!(into, [((me + 2) % WORLD) as u8; 32]);
    }
    assert_eq!(rank.calls(), CALLS);
    Ok(())
}

/// Runs [`work`] with a fault on rank `who`; by rank, its result, or that it panicked.
fn run(deadline: Duration, who: usize, at: u64, fault: Fault) -> Vec<thread::Result<Result<(), (u64, Error)>>> {
    let ranks = local::group(WORLD, deadline).unwrap();
    let start = Instant::now();
    let results = thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|rank| {
                let fault = if rank.rank() == who { fault } else { Fault::None };
                scope.spawn(move || work(&Through::faulty(rank, at, fault)))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    assert!(start.elapsed() < deadline * 4, "{fault:?} at {at} took {:?}", start.elapsed());
    results
}

/// Equal, but for the figures of an expired deadline: it took at least as long.
fn alike(found: Cause, expected: Cause) -> bool {
    match (found, expected) {
        (Cause::Deadline { ms, .. }, Cause::Deadline { ms: least, .. }) => ms >= least,
        _ => found == expected,
    }
}

/// The faulty rank ends with `own` (`None`: it panics), the others with `cause`, all in the call of the fault.
fn check(fault: Fault, own: Option<Cause>, cause: Cause) {
    // No rank waits that long where the others are told; on a busy machine a panic may take a while to be printed.
    let deadline = if matches!(fault, Fault::Delay(_)) { DEADLINE } else { DEADLINE * 20 };
    at_each_call(|at| {
        let who = at as usize % WORLD;
        for (rank, result) in run(deadline, who, at, fault).into_iter().enumerate() {
            let Ok(result) = result else {
                assert!(rank == who && own.is_none());
                continue;
            };
            let (call, error) = result.unwrap_err();
            let Error::Peer {
                rank: reporter,
                at: Label { operation, step, .. },
                fault: cpattn::Fault::One { peer, cause: found },
            } = error
            else {
                panic!("{error}")
            };
            assert_eq!((reporter, peer), (rank, who), "{fault:?} at {at}");
            assert!(
                alike(found, if rank == who { own.unwrap() } else { cause }),
                "{fault:?} at {at}, rank {rank}: {found}"
            );
            assert_eq!(step as u64, call);
            assert_eq!(operation, if call == 0 { "agree" } else { "ring" });
            // In a ring of three, both peers need the faulty one in the call of the fault. A failure that is spread at
            // once may still meet them in the call before, which the faulty one has finished.
            let at_once = matches!(fault, Fault::Fail | Fault::Panic);
            assert!(call == at || at_once && call + 1 == at, "{fault:?} at {at}, rank {rank}: call {call}");
        }
    });
}

/// All at once, since they wait for deadlines.
fn at_each_call(test: impl Fn(u64) + Sync) {
    let test = &test;
    thread::scope(|scope| (0..CALLS).for_each(|at| drop(scope.spawn(move || test(at)))));
}

#[test]
fn without_a_fault_and_with_a_delay_within_the_deadline_all_is_well() {
    for at in 0..CALLS {
        for fault in [Fault::None, Fault::Delay(DEADLINE / 10)] {
            assert!(run(DEADLINE * 20, 1, at, fault).into_iter().all(|result| result.unwrap() == Ok(())));
        }
    }
}

#[test]
fn a_delay_beyond_the_deadline() {
    let late = Cause::Deadline { ms: 300, bytes: 0 };
    check(Fault::Delay(DEADLINE * 2), Some(late), late);
}

#[test]
fn silence() {
    // A silent call never reaches the transport, so the silent rank's error carries the label of the call before.
    at_each_call(|at| {
        for (rank, result) in run(DEADLINE, 2, at, Fault::Silence).into_iter().enumerate() {
            let (call, error) = result.unwrap().unwrap_err();
            assert_eq!(call, at);
            assert!(
                matches!(error, Error::Peer { rank: r, fault: cpattn::Fault::One { peer: 2, cause: Cause::Deadline { ms: 300.., .. } }, .. } if r == rank),
                "{error}"
            );
        }
    });
}

#[test]
fn failing() {
    check(Fault::Fail, Some(Cause::Failed), Cause::Failed);
}

#[test]
fn leaving() {
    check(Fault::Leave, Some(Cause::Left), Cause::Left);
}

#[test]
fn panicking() {
    check(Fault::Panic, None, Cause::Panicked);
}
