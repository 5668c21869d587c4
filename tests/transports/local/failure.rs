// SPDX-License-Identifier: MIT OR Apache-2.0
//! What fails: every rank comes back, and every error names the rank that is to blame, what it did, and where its
//! reader was.
//!
//! Blame is the hard part. A rank that waits for a rank that waits is innocent, so an error must follow the chain to
//! the one that does not take part: through exchanges, through agreements, and round a circle, where all are to blame
//! alike and must at least tell the same story. A group that failed stays failed, except by a rank that merely left:
//! those who do not need it go on. And a rank that is let go may overwrite its memory at once, so a failure in the
//! middle of a copy must have stopped that copy before.

use super::harness::{LONG, SHORT, exchange, label, run, timed};
use cpattn::transport::{Transport, local};
use cpattn::{Cause, Error, Fault, Result};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

fn peer_error(rank: usize, operation: &'static str, step: u32, peer: usize, cause: Cause) -> Result<()> {
    Err(label(operation, step).error(rank, peer, cause))
}

/// What [`timed`] makes of an expired deadline.
fn late(bytes: u64) -> Cause {
    Cause::Deadline { ms: 400, bytes }
}

#[test]
fn sizes_that_differ_fail_on_both_sides_and_for_good() {
    let results = run(3, LONG, |rank| {
        let (me, mut three) = (rank.rank(), [7_u8; 3]);
        let first = match me {
            0 => exchange(&rank, label("offer", 4), &[(1, &[0; 5])], &mut []),
            1 => exchange(&rank, label("expect", 5), &[], &mut [(0, &mut three)]),
            _ => exchange(&rank, label("bystander", 6), &[], &mut [(1, &mut three)]),
        };
        assert_eq!(three, [7; 3], "nothing moves");
        let poll = rank.poll();
        assert_eq!(poll, first);
        (first, rank.agree(0..3, 0))
    });
    let cause = Cause::Size { ours: 3, theirs: 5 };
    assert_eq!(results[0].0, peer_error(0, "offer", 4, 1, Cause::Size { ours: 5, theirs: 3 }));
    assert_eq!(results[1].0, peer_error(1, "expect", 5, 0, cause));
    let between = Cause::Disagreed { with: 1 };
    assert_eq!(results[2].0, peer_error(2, "bystander", 6, 0, between), "neither of the sizes is its own");
    assert_eq!(results[2].1, peer_error(2, "agree", 0, 0, between), "a failed group stays failed");
}

/// Runs `world` ranks in a ring where `silent` does not take part, and returns the errors and how long they took.
fn ring_without(world: usize, silent: usize, deadline: Duration) -> Vec<(Result<()>, Duration)> {
    run(world, deadline, |rank| {
        let (me, mut got) = (rank.rank(), [0_u8; 8]);
        let start = Instant::now();
        let result = if me == silent {
            while rank.poll().is_ok() && start.elapsed() < LONG {
                thread::sleep(Duration::from_millis(1));
            }
            rank.poll()
        } else {
            let (to, from) = ((me + 1) % world, (me + world - 1) % world);
            // Each rank hands on what it gets, so that only the first in line waits for the silent one itself.
            exchange(&rank, label("take", 1), &[], &mut [(from, &mut got)])
                .and_then(|()| exchange(&rank, label("give", 2), &[(to, &got)], &mut []))
        };
        (result, start.elapsed())
    })
}

#[test]
fn the_deadline_blames_the_silent_rank_and_not_those_who_wait() {
    for silent in 0..4 {
        for (rank, (result, took)) in ring_without(4, silent, SHORT).into_iter().enumerate() {
            let label = if rank == silent { ("start", 0) } else { ("take", 1) };
            assert_eq!(timed(result), peer_error(rank, label.0, label.1, silent, late(8)));
            assert!(took < SHORT * 3, "rank {rank} returned after {took:?}");
        }
    }
}

#[test]
fn blame_follows_the_chain_from_an_agreement_through_an_exchange() {
    let results = run(3, SHORT, |rank| match rank.rank() {
        0 => rank.agree(0..2, 5),
        1 => exchange(&rank, label("give", 7), &[(2, &[1])], &mut []),
        _ => {
            while rank.poll().is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
            rank.poll()
        }
    });
    for (rank, (operation, step)) in [("agree", 0), ("give", 7), ("start", 0)].into_iter().enumerate() {
        // Either of the two that wait may be the first to lose patience.
        let found = [late(0), late(1)].map(|cause| peer_error(rank, operation, step, 2, cause));
        assert!(found.contains(&timed(results[rank].clone())), "{:?}", results[rank]);
    }
}

#[test]
fn a_circle_of_waiting_ranks_ends_by_the_deadline() {
    let results = run(3, SHORT, |rank| {
        let mut got = [0_u8; 8];
        exchange(&rank, label("circle", 0), &[], &mut [((rank.rank() + 1) % 3, &mut got)])
    });
    let named: Vec<usize> = results
        .iter()
        .map(|result| match result {
            Err(Error::Peer { fault: Fault::One { peer, cause: Cause::Deadline { bytes: 8, .. } }, .. }) => *peer,
            _ => panic!("{results:?}"),
        })
        .collect();
    // All name one rank, except that rank: it names the one whose deadline passed first.
    let is_named =
        |peer: usize| (0..3).all(|rank| if rank == peer { named[rank] != peer } else { named[rank] == peer });
    assert!((0..3).any(is_named), "{results:?}");
    for (rank, result) in results.into_iter().enumerate() {
        assert_eq!(timed(result), peer_error(rank, "circle", 0, named[rank], late(8)));
    }
}

#[test]
fn a_deadline_can_be_replaced_and_counts_from_the_last_move() {
    run(2, LONG, |rank| {
        rank.set_deadline(SHORT);
        // Eight messages, each within the deadline, all of them far beyond it.
        let mut got = [0_u8; 8];
        if rank.rank() == 0 {
            let mut list: Vec<_> = got.chunks_mut(1).map(|byte| (1, byte)).collect();
            exchange(&rank, label("slow", 0), &[], &mut list).unwrap();
            assert_eq!(got, [0, 1, 2, 3, 4, 5, 6, 7]);
        } else {
            for step in 0..8 {
                thread::sleep(SHORT / 4);
                exchange(&rank, label("drip", step), &[(0, &[step as u8])], &mut []).unwrap();
            }
        }
    });
}

#[test]
fn a_rank_that_leaves_fails_only_those_who_need_it() {
    let results = run(3, LONG, |rank| {
        let (me, mut got) = (rank.rank(), [0_u8; 1]);
        let (to, from) = ((me + 1) % 3, (me + 2) % 3);
        exchange(&rank, label("ring", 0), &[(to, &[1])], &mut [(from, &mut got)]).unwrap();
        match me {
            0 => Ok(()),
            // These two need only each other, long after rank 0 has left.
            1 => {
                thread::sleep(Duration::from_millis(50));
                exchange(&rank, label("pair", 1), &[(2, &[1])], &mut []).unwrap();
                exchange(&rank, label("orphan", 2), &[], &mut [(0, &mut got)])
            }
            _ => {
                exchange(&rank, label("pair", 1), &[], &mut [(1, &mut got)]).unwrap();
                exchange(&rank, label("second hand", 2), &[], &mut [(1, &mut got)])
            }
        }
    });
    assert_eq!(results[0], Ok(()));
    assert_eq!(results[1], peer_error(1, "orphan", 2, 0, Cause::Left));
    assert_eq!(results[2], peer_error(2, "second hand", 2, 0, Cause::Left));
}

#[test]
fn agree_names_who_does_not_come_and_who_left() {
    let results = run(3, SHORT, |rank| match rank.rank() {
        1 => {
            while rank.poll().is_ok() {
                thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        }
        _ => rank.agree(0..3, 5),
    });
    assert_eq!(timed(results[0].clone()), peer_error(0, "agree", 0, 1, late(0)));
    assert_eq!(timed(results[2].clone()), peer_error(2, "agree", 0, 1, late(0)));

    let results = run(3, LONG, |rank| if rank.rank() == 1 { Ok(()) } else { rank.agree(0..3, 5) });
    assert_eq!(results[0], peer_error(0, "agree", 0, 1, Cause::Left));
    assert_eq!(results[2], peer_error(2, "agree", 0, 1, Cause::Left));
}

#[test]
fn a_panic_ends_the_group() {
    let mut ranks = local::group(4, LONG).unwrap();
    let doomed = ranks.remove(2);
    let start = Instant::now();
    thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|rank| {
                scope.spawn(move || {
                    let (me, mut got) = (rank.rank(), [0_u8; 8]);
                    let result = match me {
                        0 => exchange(&rank, label("from", 1), &[], &mut [(2, &mut got)]),
                        1 => exchange(&rank, label("to", 2), &[(2, &[1])], &mut []),
                        _ => rank.agree(0..4, 1),
                    };
                    (me, result)
                })
            })
            .collect();
        let fall = scope.spawn(move || {
            let _held = doomed;
            thread::sleep(Duration::from_millis(20));
            panic!("on purpose");
        });
        for thread in threads {
            let (me, result) = thread.join().unwrap();
            let (operation, step) = [("from", 1), ("to", 2), ("", 0), ("agree", 0)][me];
            assert_eq!(result, peer_error(me, operation, step, 2, Cause::Panicked));
        }
        fall.join().unwrap_err();
    });
    assert!(start.elapsed() < LONG);
}

#[test]
fn abort_from_another_thread_reaches_everybody() {
    let ranks: Vec<_> = local::group(3, LONG).unwrap().into_iter().map(Arc::new).collect();
    let handle = Arc::clone(&ranks[1]);
    thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|rank| {
                scope.spawn(move || {
                    let mut got = [0_u8; 1];
                    let from = (rank.rank() + 1) % 3;
                    exchange(&rank, label("wait", 9), &[], &mut [(from, &mut got)])
                })
            })
            .collect();
        thread::sleep(Duration::from_millis(20));
        handle.poll().unwrap();
        handle.abort(Cause::Aborted);
        handle.abort(Cause::Failed);
        assert!(handle.poll().is_err());
        for (rank, thread) in threads.into_iter().enumerate() {
            assert_eq!(thread.join().unwrap(), peer_error(rank, "wait", 9, 1, Cause::Aborted));
        }
    });
}

#[test]
fn failure_in_mid_copy_never_lets_go_of_memory_that_is_read() {
    // Large messages, and an abort at a random moment: a rank that returns overwrites what it sent, and a copy that
    // went on afterwards would show as a mixture.
    for round in 0..30 {
        let ranks: Vec<_> = local::group(3, LONG).unwrap().into_iter().map(Arc::new).collect();
        let handle = Arc::clone(&ranks[0]);
        thread::scope(|scope| {
            for rank in ranks {
                scope.spawn(move || {
                    let me = rank.rank();
                    let mut out = vec![1_u8; 1 << 22];
                    let (mut a, mut b) = (vec![1_u8; 1 << 22], vec![1_u8; 1 << 22]);
                    let (one, two) = ((me + 1) % 3, (me + 2) % 3);
                    let sends = [(one, &out[..]), (two, &out[..])];
                    let _ = exchange(&rank, label("large", 0), &sends, &mut [(one, &mut a), (two, &mut b)]);
                    out.fill(2);
                    assert!(a.iter().chain(&b).all(|byte| *byte == 1));
                });
            }
            thread::sleep(Duration::from_micros(300 * round));
            handle.abort(Cause::Aborted);
        });
    }
}

#[test]
fn a_run_returns_the_results_in_order_or_the_error_of_the_rank_at_fault() {
    let deadline = Duration::from_secs(10);
    assert_eq!(local::run(3, deadline, |end| Ok(end.rank() * 10)), Ok(vec![0, 10, 20]));
    // Rank 1 fails by itself; the others only learn that it left.
    let own = || Error::invalid("documents", 3, "at least 4");
    let failed = local::run(3, deadline, |end| if end.rank() == 1 { Err(own()) } else { end.agree(0..3, 7) });
    assert_eq!(failed, Err(own()));
    // No rank fails by itself: the group's failure is the result.
    let (left, rest) = (1, local::run(2, deadline, |end| if end.rank() == 1 { Ok(()) } else { end.agree(0..2, 7) }));
    assert_eq!(rest.map_err(|error| error.peer()), Err(Some(left)));
    let panic = std::panic::catch_unwind(|| {
        local::run(2, deadline, |end| if end.rank() == 1 { panic!("of rank 1") } else { end.agree(0..2, 7) })
    });
    assert_eq!(panic.unwrap_err().downcast_ref::<&str>(), Some(&"of rank 1"));
    assert!(local::run(0, deadline, |_| Ok(())).is_err());
}
