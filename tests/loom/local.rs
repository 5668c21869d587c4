// SPDX-License-Identifier: MIT OR Apache-2.0
//! The synchronisation of transport `local` under loom: every interleaving of its lock and condition variables, up to
//! two preemptions. Deadlines do not expire in a model, so a rank that is never woken is a deadlock that loom reports.
//!
//! The bytes themselves are plain memory, which loom does not watch. The models check what arrives, and the transport
//! tells loom when it reads a peer's memory and when a rank gets its memory back (`sync::Lent`): in every model loom
//! proves that the two never meet. One model passes a cell that loom watches along with a message.

use cpattn::transport::{Label, Message, Transport, local, local::Local};
use cpattn::{Cause, Error, Result};
use loom::cell::UnsafeCell;
use std::sync::Arc;
use std::time::Duration;

/// A number that loom watches.
struct Watched(UnsafeCell<u32>);

// SAFETY: loom reports every access that another one does not happen before.
unsafe impl Sync for Watched {}

fn model(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(body);
}

/// Runs `body` on a loom thread per rank, the last rank on this one. What the bodies return is dropped at the end.
fn run_owned<T: Send + 'static>(world: usize, body: impl Fn(Local) -> T + Sync + Send + 'static) {
    let mut ranks = local::group(world, Duration::from_secs(1)).unwrap();
    let body = Arc::new(body);
    let here = ranks.pop().unwrap();
    let threads: Vec<_> = ranks
        .into_iter()
        .map(|rank| {
            let body = Arc::clone(&body);
            loom::thread::spawn(move || body(rank))
        })
        .collect();
    let mut kept = vec![body(here)];
    kept.extend(threads.into_iter().map(|thread| thread.join().unwrap()));
}

/// The same, and no rank leaves before all are done: a rank that leaves wakes the others, which would hide that
/// a wake-up was forgotten.
fn run(world: usize, body: impl Fn(&Local) + Sync + Send + 'static) {
    run_owned(world, move |rank| {
        body(&rank);
        rank
    });
}

fn label(step: u32) -> Label {
    Label::new("ring", step)
}

/// Both kinds of exchange of [`Local`]: each rank copies what it receives, or, as devices enqueue it, the one of two
/// that comes second copies for both.
const EXCHANGES: [Exchange; 2] = [<Local as Transport>::exchange, Local::exchange_copied];
type Exchange = unsafe fn(&Local, Label, &[Message], &[Message]) -> Result<()>;

/// Sends `out` to the next rank, and fills `into` from the one before.
fn hop(exchange: Exchange, rank: &Local, step: u32, out: &[u8; 2], into: &mut [u8; 2]) -> Result<()> {
    let (me, world) = (rank.rank(), rank.world());
    let send = Message { peer: (me + 1) % world, ptr: out.as_ptr().cast_mut(), bytes: 2 };
    let recv = Message { peer: (me + world - 1) % world, ptr: into.as_mut_ptr(), bytes: 2 };
    // SAFETY: both arrays are borrowed, the receive mutably, until the call returns.
    unsafe { exchange(rank, label(step), &[send], &[recv]) }
}

/// `Ok` or a failure for which `peer` is to blame; anything else is a bug.
fn ok_or_blames(result: &Result<()>, peer: usize, cause: Cause) {
    assert!(
        matches!(result, Ok(()) | Err(Error::Peer { .. }))
            && result.as_ref().err().is_none_or(
                |error| matches!(error, Error::Peer { fault: cpattn::Fault::One { peer: p, cause: c }, .. } if (*p, *c) == (peer, cause))
            ),
        "{result:?}"
    );
}

#[test]
fn three_ranks_run_two_steps_of_a_ring() {
    for exchange in EXCHANGES {
        model(move || {
            run(3, move |rank| {
                let me = rank.rank() as u8;
                let (mut held, mut next) = ([me, me + 10], [0; 2]);
                for step in 0..2 {
                    hop(exchange, rank, step, &held, &mut next).unwrap();
                    std::mem::swap(&mut held, &mut next);
                    // The buffer that was sent is free again: a late copy would deliver this.
                    next = [99; 2];
                }
                let from = (me + 1) % 3;
                assert_eq!(held, [from, from + 10]);
            });
        });
    }
}

#[test]
fn a_sender_that_comes_during_a_copy_is_seen() {
    model(|| {
        run(3, |rank| {
            let me = rank.rank();
            let (out, mut into) = ([me as u8; 2], [[0_u8; 2]; 2]);
            let send = [Message { peer: 0, ptr: out.as_ptr().cast_mut(), bytes: 2 }];
            let recv = [1, 2].map(|peer| Message { peer, ptr: into[peer - 1].as_mut_ptr(), bytes: 2 });
            let (sends, recvs): (&[Message], &[Message]) = if me == 0 { (&[], &recv) } else { (&send, &[]) };
            // SAFETY: the arrays outlive the call.
            unsafe { rank.exchange(label(0), sends, recvs) }.unwrap();
            assert!(me != 0 || into == [[1; 2], [2; 2]]);
        });
    });
}

#[test]
fn three_ranks_exchange_all_to_all() {
    model(|| {
        run(3, |rank| {
            let me = rank.rank();
            let (out, mut into) = ([me as u8; 2], [[0_u8; 2]; 3]);
            let peers = [(me + 1) % 3, (me + 2) % 3];
            let sends = peers.map(|peer| Message { peer, ptr: out.as_ptr().cast_mut(), bytes: 2 });
            let recvs = peers.map(|peer| Message { peer, ptr: into[peer].as_mut_ptr(), bytes: 2 });
            // SAFETY: the arrays outlive the call.
            unsafe { rank.exchange(label(0), &sends, &recvs) }.unwrap();
            assert!(peers.iter().all(|&peer| into[peer] == [peer as u8; 2]));
        });
    });
}

#[test]
fn an_exchange_orders_the_memory_of_both_sides() {
    // The sender writes the cell before its exchange, the receiver reads it after its own.
    model(|| {
        let cell = Arc::new(Watched(UnsafeCell::new(0)));
        run(2, move |rank| {
            let me = rank.rank();
            let mut ticket = [me as u8];
            let message = Message { peer: 1 - me, ptr: ticket.as_mut_ptr(), bytes: 1 };
            if me == 0 {
                // SAFETY: loom checks what this model claims, that no other thread is at the cell.
                cell.0.with_mut(|cell| unsafe { *cell = 1 });
            }
            let (sends, recvs): (&[Message], &[Message]) = if me == 0 { (&[message], &[]) } else { (&[], &[message]) };
            // SAFETY: the ticket outlives the call.
            unsafe { rank.exchange(label(0), sends, recvs) }.unwrap();
            // SAFETY: both sides only read now.
            assert_eq!(cell.0.with(|cell| unsafe { *cell }), 1);
        });
    });
}

#[test]
fn a_rank_that_leaves_between_two_steps_stops_the_others() {
    for exchange in EXCHANGES {
        model(move || {
            run_owned(3, move |rank| {
                let me = rank.rank();
                let (held, mut next) = ([me as u8; 2], [0; 2]);
                hop(exchange, &rank, 0, &held, &mut next).unwrap();
                if me == 2 {
                    return;
                }
                let second = hop(exchange, &rank, 1, &held, &mut next);
                // The first rank to look finds rank 2 gone; the other may meet it second hand, but the first failure
                // stays.
                let cause = Cause::Left;
                assert_eq!(second, Err(label(1).error(me, 2, cause)));
            });
        });
    }
}

#[test]
fn an_abort_in_mid_run_reaches_all_ranks() {
    for exchange in EXCHANGES {
        model(move || {
            run(3, move |rank| {
                let me = rank.rank();
                let (held, mut next) = ([me as u8; 2], [0; 2]);
                if me == 2 {
                    rank.abort(Cause::Failed);
                    assert!(hop(exchange, rank, 0, &held, &mut next).is_err());
                } else {
                    let result = hop(exchange, rank, 0, &held, &mut next);
                    assert!(result.is_err());
                    ok_or_blames(&result, 2, Cause::Failed);
                    assert!(rank.poll().is_err());
                }
            });
        });
    }
}

#[test]
fn an_abort_while_copies_run_lets_all_ranks_return() {
    // The abort comes from a third rank that is not in the exchange: each of the two either completed or was told.
    for exchange in EXCHANGES {
        model(move || {
            run(3, move |rank| {
                let me = rank.rank();
                if me == 2 {
                    rank.abort(Cause::Aborted);
                    return;
                }
                let (out, mut into) = ([me as u8; 2], [7; 2]);
                let send = Message { peer: 1 - me, ptr: out.as_ptr().cast_mut(), bytes: 2 };
                let recv = Message { peer: 1 - me, ptr: into.as_mut_ptr(), bytes: 2 };
                // SAFETY: both arrays outlive the call.
                let result = unsafe { exchange(rank, label(0), &[send], &[recv]) };
                ok_or_blames(&result, 2, Cause::Aborted);
                assert!(into == [1 - me as u8; 2] || result.is_err() && into == [7; 2]);
            });
        });
    }
}

#[test]
fn a_sender_whose_batch_is_cut_short_waits_for_its_readers() {
    // Rank 0 sends to both others; rank 1 takes its message while rank 2 ends the run.
    model(|| {
        run(3, |rank| {
            let me = rank.rank();
            let mut bytes = [me as u8; 2];
            let ptr = bytes.as_mut_ptr();
            let with = |peer| Message { peer, ptr, bytes: 2 };
            let result = match me {
                // SAFETY: the array outlives the call.
                0 => unsafe { rank.exchange(label(0), &[with(1), with(2)], &[]) },
                // SAFETY: the array outlives the call.
                1 => unsafe { rank.exchange(label(0), &[], &[with(0)]) },
                _ => return rank.abort(Cause::Aborted),
            };
            ok_or_blames(&result, 2, Cause::Aborted);
            assert!(me == 1 || result.is_err(), "rank 2 took nothing");
        });
    });
}

#[test]
fn sizes_that_differ_stop_both_sides() {
    model(|| {
        run(2, |rank| {
            let me = rank.rank();
            let mut bytes = [0_u8; 3];
            let message = Message { peer: 1 - me, ptr: bytes.as_mut_ptr(), bytes: 2 + me };
            let (sends, recvs): (&[Message], &[Message]) = if me == 0 { (&[message], &[]) } else { (&[], &[message]) };
            // SAFETY: the array outlives the call.
            let result = unsafe { rank.exchange(label(0), sends, recvs) };
            let cause = Cause::Size { ours: 2 + me as u64, theirs: 3 - me as u64 };
            assert_eq!(result, Err(label(0).error(me, 1 - me, cause)));
        });
    });
}

#[test]
fn three_ranks_agree_twice_without_mixing() {
    model(|| {
        run(3, |rank| {
            let me = rank.rank();
            rank.agree(0..3, 5).unwrap();
            let (ours, peer, theirs) = if me == 1 { (7, 0, 6) } else { (6, 1, 7) };
            assert_eq!(rank.agree(0..3, ours), Err(Error::disagreement(me, peer, ours, theirs)));
        });
    });
}

#[test]
fn a_rank_that_leaves_stops_an_agreement() {
    model(|| {
        run_owned(3, |rank| {
            let me = rank.rank();
            if me != 0 {
                let cause = Cause::Left;
                let expected = Label::new("agree", 0).error(me, 0, cause);
                assert_eq!(rank.agree(0..3, 5), Err(expected));
            }
        });
    });
}
