// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks over an engine of sends and receives: what arrives, what is refused, and who is named when something fails.
//!
//! The engine is one between threads (`engine/mail.rs`). A rank that is stopped makes no call of it return, and its
//! listener gives no answer; to the others it looks like a process that was stopped or killed.

mod at_fault;
mod group;
mod mail;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cpattn::{
    Batch, Cause, Dtype, Error, Forward, Layout, Mesh, Plan, Problem, Rank, RunKind, RunName, Side, View, ViewMut,
    transport::{Label, Message, Transport, local},
};
use group::{LONG, SHORT, exchange, found, named, play, says};
use mail::{Mail, Office};

fn forward(end: impl Transport + 'static) -> Vec<f32> {
    let p = Problem::new(Batch::new(&[0, 9, 700]).unwrap(), 4, 2, 64, Dtype::F32);
    let plan = Plan::new(&p, Mesh::explicit(4, 2, 2).unwrap(), Layout::Zigzag).unwrap();
    let mut rank = Rank::new(end);
    let n = plan.local_tokens(Side::Q, rank.rank()).len();
    let numbers = |count: usize, seed: usize| -> Vec<f32> {
        (0..count).map(|i| ((i * 7 + seed + rank.rank()) % 13) as f32 * 0.1).collect()
    };
    let (q, k, v) = (numbers(n * 4 * 64, 1), numbers(n * 2 * 64, 2), numbers(n * 2 * 64, 3));
    let (mut o, mut lse) = (vec![0.0f32; n * 4 * 64], vec![0.0f32; n * 4]);
    for _ in 0..3 {
        let t = Forward {
            q: View::new(&q, n, 4, 64).unwrap(),
            k: View::new(&k, n, 2, 64).unwrap(),
            v: View::new(&v, n, 2, 64).unwrap(),
            sinks: None,
            o: ViewMut::new(&mut o, n, 4, 64).unwrap(),
            lse: ViewMut::head_major(&mut lse, n, 4).unwrap(),
            max_logit: None,
            dropout_seed: None,
        };
        rank.forward(&plan, t).unwrap();
    }
    o
}

#[test]
fn runs_have_the_bits_of_those_between_threads() {
    let all: Vec<_> = (0..4).collect();
    let got = play(4, LONG, &all, |_, end, _| {
        end.connect().unwrap();
        // Made by one, used by another.
        forward(Arc::new(end))
    });
    let want = local::run(4, LONG, |end| Ok(forward(end))).unwrap();
    assert_eq!(got.into_values().collect::<Vec<_>>(), want);
}

#[test]
fn messages_of_all_sizes_arrive_and_small_ones_travel_together() {
    let sizes = [3, 40_000, 40_000, 70_000, 1, 2, 3, 200_000, 65_536, 65_535];
    play(3, LONG, &[0, 1, 2], |rank, end, _| {
        end.connect().unwrap();
        let (next, last) = ((rank + 1) % 3, (rank + 2) % 3);
        for _ in 0..20 {
            let lists = [next, last].map(|peer| sizes.map(|bytes| (peer, bytes)));
            let received = exchange(&end, named(1), &lists[0], &lists[1]).unwrap();
            assert!(received.iter().zip(sizes).all(|(m, size)| *m == vec![last as u8 + 1; size]));
            assert_eq!(end.agree(0..3, 5), Ok(()));
        }
    });
    let posts = play(2, LONG, &[0, 1], |rank, end, office| {
        end.connect().unwrap();
        let before = office.posts.load(Ordering::Relaxed);
        end.agree(0..2, 5).unwrap();
        exchange(&end, named(1), &[(1 - rank, 10); 3], &[(1 - rank, 10); 3]).unwrap();
        end.agree(0..2, 5).unwrap();
        office.posts.load(Ordering::Relaxed) - before
    });
    // Two agreements and one exchange, of a send and a receive on both ranks each.
    assert!(posts.values().all(|&n| n <= 12) && posts.values().any(|&n| n >= 9), "{posts:?}");
}

#[test]
fn sizes_that_differ_are_named_on_every_rank() {
    for (sent, expected, others) in [
        (&[50][..], &[3][..], ""),
        (&[3], &[50], ""),
        (&[200_000], &[3], ""),
        (&[3], &[200_000], ""),
        (&[300_000], &[200_000], ""),
        (&[10, 20], &[20, 10], " of other sizes"),
        (&[10, 20], &[30], ""),
        (&[60_000, 50_000], &[50_000, 60_000], " of other sizes"),
        (&[40_000, 40_000], &[80_000], ""),
    ] {
        let said = play(3, LONG, &[0, 1, 2], |rank, end, _| {
            end.connect().unwrap();
            let list = |peer| [sent, expected][rank.min(1)].iter().map(|&bytes| (peer, bytes)).collect::<Vec<_>>();
            let label = Label::new("ring", 3);
            let first = match rank {
                0 => exchange(&end, label, &list(1), &[]).map(|_| ()),
                1 => exchange(&end, label, &[], &list(0)).map(|_| ()),
                _ => exchange(&end, label, &[], &[(1, 8)]).map(|_| ()),
            };
            // A small message may leave before its sizes are compared.
            found(first.and_then(|()| exchange(&end, label, &[], &[(1, 8)]).map(|_| ())))
        });
        let counted = |sizes: &[usize]| {
            let s = if sizes.len() == 1 { "" } else { "s" };
            format!("{} bytes in {} message{s}", sizes.iter().sum::<usize>(), sizes.len())
        };
        let words = format!(
            "rank 0 sends {} and runs no plan, rank 1 expects {}{others} (ring, step 3) and runs no plan: all ranks of a group must \
             make the same calls",
            counted(sent),
            counted(expected)
        );
        for (rank, peer) in [1, 0, 0].into_iter().enumerate() {
            says(&said[&rank], Some(peer), &words);
            assert!(!said[&rank].1);
        }
    }
}

#[test]
fn plans_that_differ_are_a_disagreement() {
    for agrees in [false, true] {
        let said = play(2, SHORT, &[0, 1], |rank, end, _| {
            end.connect().unwrap();
            let peer = 1 - rank;
            if agrees && rank == 1 {
                end.announce(Some(RunName::new(RunKind::Forward, 8)));
                return found(end.agree(0..2, 8));
            }
            found(exchange(&end, named(7 + rank as u64), &[(peer, 8)], &[(peer, 8)]))
        });
        for rank in 0..2 {
            says(&said[&rank], Some(1 - rank), "of plan 0000000000000007");
            says(&said[&rank], Some(1 - rank), "of plan 0000000000000008");
            says(&said[&rank], Some(1 - rank), "must make the same calls");
            assert!(said[&rank].1, "{said:?}");
        }
    }
    let outcomes = play(3, LONG, &[0, 1, 2], |rank, end, _| {
        end.connect().unwrap();
        let differ = end.agree(0..3, u64::from(rank == 1)).unwrap_err();
        // All of them know, and may go on.
        assert_eq!((end.poll(), end.agree(0..3, 4)), (Ok(()), Ok(())));
        differ.peer()
    });
    assert_eq!(outcomes.into_values().collect::<Vec<_>>(), [Some(1), Some(0), Some(1)]);
}

/// Plans of ranks of which one runs what is new to it: every rank says so at once, whichever messages the others wait
/// for. In a causal plan over contiguous tokens nobody waits for the last rank: it finds by itself that others
/// exchange.
#[test]
fn a_new_plan_against_an_old_one_is_a_disagreement_at_once() {
    let plan = |tokens: usize, layout: Layout| {
        let p = Problem::new(Batch::from_lengths(&[tokens]).unwrap(), 4, 2, 64, Dtype::F32);
        Plan::new(&p, Mesh::ring(4).unwrap(), layout).unwrap()
    };
    let run = |rank: &mut Rank, plan: &Plan| {
        let n = plan.local_tokens(Side::Q, rank.rank()).len();
        let x = vec![0.25f32; n * 4 * 64];
        let (mut o, mut lse) = (vec![0.0f32; n * 4 * 64], vec![0.0f32; n * 4]);
        let t = Forward {
            q: View::new(&x, n, 4, 64).unwrap(),
            k: View::new(&x[..n * 2 * 64], n, 2, 64).unwrap(),
            v: View::new(&x[..n * 2 * 64], n, 2, 64).unwrap(),
            sinks: None,
            o: ViewMut::new(&mut o, n, 4, 64).unwrap(),
            lse: ViewMut::head_major(&mut lse, n, 4).unwrap(),
            max_logit: None,
            dropout_seed: None,
        };
        rank.forward(plan, t)
    };
    for (layout, tokens) in [(Layout::Zigzag, 40), (Layout::Zigzag, 2000), (Layout::Contiguous, 4000)] {
        let (old, new) = (plan(tokens, layout), plan(tokens + 8, layout));
        for odd in [0, 3] {
            let errors = play(4, LONG, &[0, 1, 2, 3], |r, end, _| {
                end.connect().unwrap();
                let mut rank = Rank::new(end);
                // The first run of all ranks ends by itself only if the others do not go on meanwhile.
                let began = Instant::now();
                let first = run(&mut rank, &old).err();
                // Ranks that need nothing of the odd one find it in a later run.
                let later = || (0..50).find_map(|_| run(&mut rank, if r == odd { &new } else { &old }).err());
                let error = first.or_else(later).unwrap();
                assert!(began.elapsed() < LONG / 2, "{error}");
                assert_eq!(rank.poll(), Err(error.clone()));
                error
            });
            for (r, error) in errors {
                let Error::Disagreement { rank, peer, ours, theirs, ref what, runs: None } = error else {
                    panic!("{layout:?}, rank {odd} is odd: {error}")
                };
                assert!(rank == r && ours != theirs && (peer == odd) != (r == odd), "rank {odd} is odd: {error}");
                assert!(what.contains(&format!("the forward of {} tokens", tokens + if r == odd { 8 } else { 0 })));
            }
        }
    }
}

/// A rank that may start no more threads says so, and the other one, which waits for it, is told at once.
#[cfg(all(target_os = "linux", not(miri)))]
#[test]
fn a_thread_that_cannot_start() {
    let status = crate::child::in_a_child(|| {
        let office = Arc::new(Office::default());
        let [first, second] = [0, 1].map(|rank| Mail::end(&office, rank, 2, LONG));
        let began = Instant::now();
        thread::scope(|scope| {
            let first = scope.spawn(move || found(first.connect()));
            let mut waits = false;
            while !waits {
                thread::sleep(Duration::from_millis(5));
                office.change(|state| waits = state.connected.contains(&0));
            }
            crate::child::limit(Some(0));
            let error = second.connect().unwrap_err();
            assert!(matches!(error, Error::Device { call: "thread spawn", .. }), "{error}");
            assert!(error.to_string().contains("the thread of a transport over an engine did not start"), "{error}");
            says(&found(second.agree(0..2, 1)), Some(1), "could not start a thread");
            says(&first.join().unwrap(), Some(1), "rank 1 could not start a thread; see its own error");
        });
        assert!(began.elapsed() < LONG / 2);
        // With more threads a new group is made.
        crate::child::limit(None);
        let office = Arc::new(Office::default());
        thread::scope(|scope| {
            for rank in 0..2 {
                let end = Mail::end(&office, rank, 2, LONG);
                scope.spawn(move || end.connect().and_then(|()| end.agree(0..2, 1)).unwrap());
            }
        });
    });
    assert_eq!(status, 0);
}

#[test]
fn what_breaks_the_contract_is_refused_and_touches_nothing() {
    play(2, LONG, &[0, 1], |rank, end, _| {
        let refused = |outcome: Result<(), Error>, words: &str| {
            let text = outcome.unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        };
        refused(end.agree(0..2, 1), "connect it first, on all ranks");
        end.connect().unwrap();
        let mut byte = 0u8;
        let good = Message { peer: 1 - rank, ptr: &raw mut byte, bytes: 1 };
        for (bad, words) in [
            (Message { peer: 2, ..good }, "peer is 2, expected a rank below 2"),
            (Message { peer: rank, ..good }, "expected another rank"),
            (Message { bytes: 0, ..good }, "bytes is 0, expected at least 1"),
            (Message { ptr: std::ptr::null_mut(), ..good }, "ptr is null"),
        ] {
            let list = [good, bad];
            // SAFETY: refused before anything moves.
            let both = unsafe { [end.exchange(named(1), &list, &[]), end.exchange(named(1), &[], &list)] };
            for (outcome, list) in both.into_iter().zip(["sends[1].", "recvs[1]."]) {
                refused(outcome, &format!("{list}{words}").replace("expected another rank", ""));
            }
        }
        for group in [0..3, 0..usize::MAX, 1 - rank..2 - rank, rank..rank] {
            refused(end.agree(group, 1), "a range within 0..2 that contains rank");
        }
        assert_eq!(exchange(&end, named(1), &[(1 - rank, 4)], &[(1 - rank, 4)]).unwrap(), [[2 - rank as u8; 4]]);
    });
    let office = Arc::new(Office::default());
    for (world, deadline) in [(0, LONG), (1, Duration::ZERO)] {
        let end = std::panic::catch_unwind(|| Mail::end(&office, 0, world, deadline));
        assert!(end.is_err());
    }
}

/// Returns when so many ranks have counted themselves, and at the latest after [`LONG`].
fn wait_for(count: &AtomicUsize, ranks: usize) {
    let end = Instant::now() + LONG;
    while count.load(Ordering::Acquire) < ranks && Instant::now() < end {
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_abort_ends_any_wait_at_once() {
    for connecting in [true, false] {
        let ended = AtomicUsize::new(0);
        let said = play(2, LONG, &[0], |rank, end, _| {
            if rank == 1 {
                if !connecting {
                    end.connect().unwrap();
                    end.agree(0..2, 1).unwrap();
                }
                wait_for(&ended, 1);
                return (None, false, String::new());
            }
            if !connecting {
                end.connect().unwrap();
                end.agree(0..2, 1).unwrap();
            }
            thread::scope(|scope| {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(300));
                    end.abort(Cause::Aborted);
                });
                let began = Instant::now();
                let outcome =
                    if connecting { end.connect() } else { exchange(&end, named(1), &[], &[(1, 16)]).map(|_| ()) };
                assert!(began.elapsed() < Duration::from_secs(15));
                ended.fetch_add(1, Ordering::Release);
                found(outcome)
            })
        });
        says(&said[&0], Some(0), "rank 0 aborted the run");
    }
}

/// An abort waits for what it tells the others, and never longer than the search for the rank at fault may take.
#[test]
fn an_abort_returns_where_nobody_can_be_told() {
    let changes: [fn(&mut mail::State); 3] = [
        |state| state.store_stopped = true,
        |state| state.store_gone = true,
        // The other rank does not answer.
        |state| state.stopped.extend([1]),
    ];
    for change in changes {
        let aborted = AtomicUsize::new(0);
        play(2, SHORT, &[0], |rank, end, office| {
            end.connect().unwrap();
            end.agree(0..2, 1).unwrap();
            if rank == 0 {
                office.change(change);
                let began = Instant::now();
                end.abort(Cause::Aborted);
                let took = began.elapsed();
                assert!(took < Duration::from_secs(2), "{took:?}");
                let again = Instant::now();
                end.abort(Cause::Aborted);
                assert!(again.elapsed() < SHORT / 2);
                aborted.fetch_add(1, Ordering::Release);
            } else {
                wait_for(&aborted, 1);
            }
        });
    }
}
