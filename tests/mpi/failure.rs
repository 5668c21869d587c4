// SPDX-License-Identifier: MIT OR Apache-2.0
//! What must fail: on every rank, in time, with an error that names who is to blame.

use cpattn::Fault;
use cpattn::transport::Label;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    process,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cpattn::{
    Cause, Error, Result,
    transport::{Transport, mpi::Mpi},
};
use mpi::traits::*;

use crate::{
    exchange::{LONG, exchange, init, label},
    launch::FINE,
    together::{self, Alive},
    trials::do_to_me,
};

pub const SHORT: Duration = Duration::from_millis(700);

fn peer_error(rank: &Mpi, operation: &'static str, step: u32, peer: usize, cause: Cause) -> Result<()> {
    Err(label(operation, step).error(rank.rank(), peer, cause))
}

/// An expired deadline of [`SHORT`]: the peer, and the bytes that were still to move.
#[track_caller]
fn late(result: &Result<()>, label: (&str, u32)) -> (usize, u64) {
    let Err(Error::Peer {
        at: Label { operation, step, .. },
        fault: Fault::One { peer, cause: Cause::Deadline { ms, bytes } },
        ..
    }) = result
    else {
        panic!("{result:?}");
    };
    assert_eq!((*operation, *step), label);
    assert!((700..20_000).contains(ms), "{ms}");
    (*peer, *bytes)
}

pub fn sizes() {
    let (_universe, comm) = init();
    let rank = Mpi::new(&comm, LONG).unwrap();
    rank.set_piece(4);
    let mut three = [7_u8; 3];
    let first = match rank.rank() {
        0 => exchange(&rank, label("offer", 4), &[(1, &[0; 50])], &mut []),
        1 => exchange(&rank, label("expect", 5), &[], &mut [(0, &mut three)]),
        _ => exchange(&rank, label("bystander", 6), &[], &mut [(1, &mut three)]),
    };
    assert_eq!(three, [7; 3], "nothing moves");
    let (here, there) = (Cause::Size { ours: 3, theirs: 50 }, Cause::Size { ours: 50, theirs: 3 });
    match rank.rank() {
        // Small enough to leave at once, so that the next call tells.
        0 => {
            assert_eq!(first, Ok(()));
            let mut got = [0; 1];
            let next = exchange(&rank, label("next", 5), &[], &mut [(1, &mut got)]);
            assert_eq!(next, peer_error(&rank, "next", 5, 1, there));
        }
        1 => assert_eq!(first, peer_error(&rank, "expect", 5, 0, here)),
        _ => assert_eq!(first, peer_error(&rank, "bystander", 6, 0, Cause::Disagreed { with: 1 })),
    }
    if rank.rank() > 0 {
        assert_eq!(rank.poll(), first);
    }
    assert!(rank.agree(0..3, 0).is_err(), "a failed group stays failed");
    println!("{FINE}");
}

/// Each rank waits for the next; only one waits for the silent rank itself.
pub fn silent() {
    let (_universe, comm) = init();
    for silent in 0..4 {
        let rank = Mpi::new(&comm, SHORT).unwrap();
        let (me, mut got) = (rank.rank(), [0_u8; 8]);
        let (to, from) = ((me + 1) % 4, (me + 3) % 4);
        if me == silent {
            let began = Instant::now();
            while rank.poll().is_ok() && began.elapsed() < LONG {
                thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(late(&rank.poll(), ("agree", 0)).0, silent);
        } else {
            let result = exchange(&rank, label("take", 1), &[], &mut [(from, &mut got)])
                .and_then(|()| exchange(&rank, label("give", 2), &[(to, &got)], &mut []));
            assert_eq!(late(&result, ("take", 1)), (silent, 8));
        }
    }
    println!("{FINE}");
}

/// The question which rank it waits for finds rank 1 in no call, but looking; then it waits for rank 2, which is to
/// blame.
pub fn between_calls() {
    let (_universe, comm) = init();
    let deadline = 4 * SHORT;
    let rank = Mpi::new(&comm, deadline).unwrap();
    let (me, mut got) = (rank.rank(), [0_u8; 8]);
    rank.agree(0..3, 0).unwrap();
    let began = Instant::now();
    let blamed = |error: Result<()>| match error {
        Err(Error::Peer { fault: Fault::One { peer, cause: Cause::Deadline { .. } }, .. }) => peer,
        other => panic!("rank {me}: {other:?}"),
    };
    if me == 2 {
        // In no call, and looks at nothing.
        thread::sleep(3 * deadline);
        assert_eq!(blamed(rank.poll()), 2);
        assert_eq!(blamed(exchange(&rank, label("late", 2), &[], &mut [(1, &mut got)])), 2);
    } else {
        // Rank 0 asks at its deadline, and waits half of it for an answer.
        while me == 1 && began.elapsed() < deadline + deadline / 8 {
            rank.poll().unwrap();
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(blamed(exchange(&rank, label("wait", 1), &[], &mut [(me + 1, &mut got)])), 2);
        let waited = began.elapsed();
        assert!(me == 1 || waited < 2 * deadline + deadline / 4, "{waited:?}");
    }
    println!("{FINE}");
}

pub fn circle() {
    let (_universe, comm) = init();
    let rank = Mpi::new(&comm, SHORT).unwrap();
    let mut got = [0_u8; 8];
    let result = exchange(&rank, label("circle", 0), &[], &mut [((rank.rank() + 1) % 3, &mut got)]);
    assert_eq!(late(&result, ("circle", 0)).1, 8);
    println!("{FINE}");
}

/// One rank agrees on something new while the others exchange, then the other way round: each names one on the other
/// side.
pub fn different() {
    let (_universe, comm) = init();
    for one_agrees in [true, false] {
        let rank = Mpi::new(&comm, SHORT).unwrap();
        let (me, mut got) = (rank.rank(), [0_u8; 8]);
        let agrees = (me == 2) == one_agrees;
        let result = if agrees {
            rank.agree(0..3, 9)
        } else {
            exchange(&rank, label("take", 1), &[], &mut [((me + 1) % 3, &mut got)])
        };
        let Err(Error::Peer {
            at: Label { operation, .. },
            fault: Fault::One { peer, cause: Cause::Disagreed { with } },
            ..
        }) = result
        else {
            panic!("{result:?}")
        };
        assert_eq!(operation, if agrees { "agree" } else { "take" });
        assert_eq!(peer == 2, me != 2, "rank {me} names rank {peer}");
        assert_eq!(with == 2, me == 2, "rank {me} names rank {peer} with rank {with}");
    }
    println!("{FINE}");
}

/// Every process lives, so MPI goes on working, and so does a new group.
pub fn abort() {
    let (_universe, comm) = init();
    for round in 0..3 {
        let rank = Arc::new(Mpi::new(&comm, LONG).unwrap());
        let (me, mut got) = (rank.rank(), vec![0_u8; 1 << 20]);
        let from_another_thread = (me == 0).then(|| {
            let rank = Arc::clone(&rank);
            thread::spawn(move || {
                thread::sleep(Duration::from_millis(50));
                rank.abort(Cause::Aborted);
                rank.abort(Cause::Aborted);
            })
        });
        // Rank 2 offers what rank 1 does not take.
        let result = match me {
            2 => exchange(rank.as_ref(), label("offer", round), &[(1, &[1; 1 << 20])], &mut []),
            _ => exchange(rank.as_ref(), label("wait", round), &[], &mut [((me + 1) % 2, &mut got)]),
        };
        let operation = if me == 2 { "offer" } else { "wait" };
        assert_eq!(result, peer_error(&rank, operation, round, 0, Cause::Aborted));
        if let Some(thread) = from_another_thread {
            thread.join().unwrap();
        }
    }
    let rank = Mpi::new(&comm, LONG).unwrap();
    rank.agree(0..3, 1).unwrap();
    let mut got = [0; 3];
    exchange(
        &rank,
        label("again", 0),
        &[((rank.rank() + 1) % 3, &[rank.rank() as u8; 3])],
        &mut [((rank.rank() + 2) % 3, &mut got)],
    )
    .unwrap();
    assert_eq!(got, [((rank.rank() + 2) % 3) as u8; 3]);
    println!("{FINE}");
}

pub fn panics() {
    let (_universe, comm) = init();
    let rank = Mpi::new(&comm, LONG).unwrap();
    if rank.rank() == 1 {
        thread::sleep(Duration::from_millis(300));
        std::panic::set_hook(Box::new(|_| ()));
        catch_unwind(AssertUnwindSafe(move || {
            let _rank = rank;
            panic!("expected")
        }))
        .unwrap_err();
    } else {
        let mut got = [0; 3];
        let result = exchange(&rank, label("wait", 0), &[], &mut [(1, &mut got)]);
        assert_eq!(result, peer_error(&rank, "wait", 0, 1, Cause::Panicked));
    }
    println!("{FINE}");
}

/// A rank that leaves in good order: what it sent arrives, and those that still need it say at once that it left. Then
/// all make a new group.
pub fn leaves() {
    let (_universe, comm) = init();
    let me = comm.rank() as usize;
    for round in 0..3 {
        let rank = Mpi::new(&comm, LONG).unwrap();
        let mut got = [0_u8; 3];
        let began = Instant::now();
        match me {
            1 => {
                exchange(&rank, label("give", round), &[(0, &[7; 3])], &mut []).unwrap();
                drop(rank);
                assert!(began.elapsed() < Duration::from_secs(5));
            }
            0 => {
                thread::sleep(Duration::from_millis(300));
                exchange(&rank, label("take", round), &[], &mut [(1, &mut got)]).unwrap();
                assert_eq!(got, [7; 3]);
                let result = exchange(&rank, label("more", round), &[], &mut [(1, &mut got)]);
                assert_eq!(result, peer_error(&rank, "more", round, 1, Cause::Left));
                assert_eq!(rank.agree(0..3, 1), peer_error(&rank, "agree", 0, 1, Cause::Left));
            }
            // Waits for rank 0, which waits for the one that left.
            _ => {
                let result = exchange(&rank, label("wait", round), &[], &mut [(0, &mut got)]);
                assert_eq!(result, peer_error(&rank, "wait", round, 1, Cause::Left));
            }
        }
        assert!(began.elapsed() < LONG / 4, "{:?}", began.elapsed());
    }
    // More than there are numbers of communicators, with MPICH, if none of a rank that leaves early were freed.
    for round in 0..1200 {
        let rank = Mpi::new(&comm, LONG).unwrap();
        rank.agree(0..3, round).unwrap();
        drop(rank);
        if round % 100 == me as u64 {
            thread::sleep(Duration::from_millis(40));
        }
    }
    println!("{FINE}");
}

/// A process that is stopped until just after the deadline, and then goes on: all name it, itself too.
pub fn stopped_for_a_while() {
    let (_universe, comm) = init();
    let me = comm.rank() as usize;
    for round in 0..6_u32 {
        let rank = Mpi::new(&comm, SHORT).unwrap();
        // The others ask, or have asked, when it goes on; in the first round it is in time.
        let asleep = if round == 0 { SHORT / 2 } else { SHORT + SHORT / 8 * (round - 1) };
        if me == 1 {
            do_to_me(&format!("sleep 0.1; kill -STOP ME; sleep {}; kill -CONT ME", asleep.as_secs_f64()));
        }
        // Each takes from the one before and gives to the next.
        let (to, from, mut got) = ((me + 1) % 3, (me + 2) % 3, [0_u8; 8]);
        for _ in 0..100 {
            let result = exchange(&rank, label("round", round), &[(to, &[1; 8])], &mut [(from, &mut got)]);
            if let Err(error) = result {
                let Error::Peer { fault: Fault::One { peer, cause: Cause::Deadline { .. } }, .. } = error else {
                    panic!("{error}")
                };
                assert!(peer == 1 && round > 0, "rank {me}, stopped for {asleep:?}: {error}");
                break;
            }
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(SHORT); // until it goes on, also where it is stopped late
        comm.barrier();
    }
    println!("{FINE}");
}

/// What was to be received is the caller's again when the call has returned, whatever the sender does later.
pub fn lets_go() {
    let (_universe, comm) = init();
    let rank = Mpi::new(&comm, SHORT).unwrap();
    if rank.rank() == 0 {
        // Two of three messages come, and then time passes.
        exchange(&rank, label("some", 0), &[(1, &[1; 70_000])], &mut []).unwrap();
        thread::sleep(SHORT * 3);
        let late = exchange(&rank, label("rest", 1), &[(1, &[2; 900_000])], &mut []);
        assert!(late.is_err());
    } else {
        let mut got = vec![9_u8; 1_000_000];
        let (first, rest) = got.split_at_mut(70_000);
        let result = exchange(&rank, label("all", 0), &[], &mut [(0, first), (0, &mut rest[..900_000])]);
        assert_eq!(late(&result, ("all", 0)), (0, 900_000));
        assert_eq!(&got[..70_000], &[1; 70_000]);
        got[70_000..].fill(5);
        let began = Instant::now();
        while began.elapsed() < SHORT * 3 {
            let _ = rank.poll();
            thread::sleep(Duration::from_millis(5));
        }
        assert!(got[70_000..].iter().all(|&b| b == 5), "memory was written after the call had returned");
    }
    println!("{FINE}");
}

/// Ends like a process that died in the middle of its work; MPI is not finalised, since it might wait for the dead.
pub fn killed() {
    let (universe, comm) = init();
    let rank = Mpi::new(&comm, SHORT).unwrap();
    let (me, mut got) = (rank.rank(), vec![0_u8; 1 << 20]);
    rank.agree(0..3, 7).unwrap();
    if me == 1 {
        thread::sleep(Duration::from_millis(100));
        let _ = process::Command::new("kill").args(["-9", &process::id().to_string()]).status();
        unreachable!("killed");
    }
    // Both need the dead one, rank 0 through rank 2.
    let result = exchange(&rank, label("wait", 3), &[], &mut [(if me == 0 { 2 } else { 1 }, &mut got)]);
    assert_eq!(late(&result, ("wait", 3)), (1, 1 << 20));
    println!("{FINE}");
    std::mem::forget((rank, comm, universe));
    process::exit(3);
}

/// A process that ends right after an abort, as if killed: the others are told of the abort all the same.
pub fn aborted_and_gone() {
    let (universe, comm) = init();
    let rank = Mpi::new(&comm, LONG).unwrap();
    let (me, mut got) = (rank.rank(), [0_u8; 8]);
    if me == 1 {
        thread::sleep(Duration::from_millis(100));
        rank.abort(Cause::Aborted);
        process::abort();
    }
    let result = exchange(&rank, label("wait", 3), &[], &mut [(1, &mut got)]);
    assert_eq!(result, peer_error(&rank, "wait", 3, 1, Cause::Aborted));
    println!("{FINE}");
    std::mem::forget((rank, comm, universe));
    process::exit(3);
}

/// Rank 2 is stopped, or dies, while rank 0 does something alone after the last run. `MPI_Finalize` would wait for it;
/// what the example does before that names it, on both other ranks.
fn lost_while_one_compares(script: &str) {
    let (universe, comm) = init();
    let side = Arc::new(Mpi::new(&comm, SHORT).unwrap());
    let me = side.rank();
    let parts = together::gather(&*side, &[me as u8; 5]).unwrap();
    let mut alive = None;
    if me == 0 {
        assert_eq!(parts, [[1; 5], [2; 5]]);
        alive = Some(Alive::new(Arc::clone(&side), SHORT / 4));
        // Longer than the deadline.
        thread::sleep(SHORT * 2);
    } else if me == 2 {
        do_to_me(script);
    }
    let error = together::meet(&*side, alive).unwrap_err();
    assert!(error.contains("after rank 0's comparison: ") && error.contains("rank 2 did not answer"), "{error}");
    println!("{FINE}");
    std::mem::forget((side, comm, universe));
    process::exit(3);
}

pub fn stopped_while_one_compares() {
    // Ended when the others have long had their errors. MPICH's launcher signals the whole group.
    lost_while_one_compares("sleep 0.3; trap '' USR1 TERM; kill -STOP ME; sleep 10; kill -9 ME");
}

pub fn killed_while_one_compares() {
    lost_while_one_compares("sleep 0.3; kill -9 ME");
}
