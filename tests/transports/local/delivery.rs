// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is delivered: every byte of every message, in the order of its pair, to the rank that asked for it, and one
//! answer to all when a group agrees.
//!
//! A transport stores nothing between two calls, so there is little that a single exchange could show. Patterns are
//! drawn by the hundred instead, the same on every rank, over worlds of one to eight: rings, all pairs, neighbours,
//! several messages for a pair, messages of one byte and of many pages. What is no message at all (to oneself, of no
//! bytes, to no rank) is refused by name, and such a refusal costs the group nothing: it goes on afterwards.

use super::harness::{LONG, SHORT, exchange, label, run};
use cpattn::transport::{Message, Transport, local};
use cpattn::{Error, Result};
use fastrand::Rng;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// The byte at `at` of message `index` from `from` to `to` in round `round`.
fn content(round: usize, from: usize, to: usize, index: usize, at: usize) -> u8 {
    (round * 131 + from * 31 + to * 17 + index * 7 + at * 3 + at / 251) as u8
}

/// All ranks draw the same pattern: (from, to, bytes) in an order that both ends of a pair see alike.
fn pattern(draw: &mut Rng, world: usize, kind: usize) -> Vec<(usize, usize, usize)> {
    let size = |draw: &mut Rng| if draw.usize(..8) == 0 { 1 + draw.usize(..200_000) } else { 1 + draw.usize(..300) };
    let mut list = Vec::new();
    for from in 0..world {
        for to in 0..world {
            let messages = match kind {
                _ if from == to => 0,
                0 => usize::from(to == (from + 1) % world),
                1 => 1,
                2 => usize::from(to + 1 == from || from + 1 == to) * 2,
                _ => draw.usize(..4),
            };
            for _ in 0..messages {
                list.push((from, to, size(draw)));
            }
        }
    }
    list
}

#[test]
fn every_pattern_delivers_every_byte() {
    for world in 1..=8 {
        run(world, LONG, |rank| {
            let me = rank.rank();
            let mut draw = Rng::with_seed(world as u64);
            for round in 0..40 {
                let list = pattern(&mut draw, world, round % 4);
                let mut seen = vec![0; world * world];
                let (mut out, mut into) = (Vec::new(), Vec::new());
                for &(from, to, bytes) in &list {
                    let index = seen[from * world + to];
                    seen[from * world + to] += 1;
                    if from == me {
                        out.push((to, (0..bytes).map(|at| content(round, from, to, index, at)).collect::<Vec<_>>()));
                    }
                    if to == me {
                        into.push((from, index, vec![0_u8; bytes]));
                    }
                }
                let sends: Vec<_> = out.iter().map(|(peer, bytes)| (*peer, &bytes[..])).collect();
                let mut recvs: Vec<_> = into.iter_mut().map(|(peer, _, bytes)| (*peer, &mut bytes[..])).collect();
                exchange(&rank, label("pattern", round as u32), &sends, &mut recvs).unwrap();
                for (from, index, bytes) in &into {
                    let right = bytes.iter().enumerate().all(|(at, b)| *b == content(round, *from, me, *index, at));
                    assert!(right, "world {world}, round {round}: {from} to {me}, message {index}");
                }
            }
        });
    }
}

#[test]
fn a_ring_runs_thousands_of_steps() {
    let world = 4;
    run(world, LONG, |rank| {
        let me = rank.rank();
        let (mut held, mut next) = ([me as u8; 16], [0; 16]);
        for step in 0..5_000 {
            let (to, from) = ((me + 1) % world, (me + world - 1) % world);
            exchange(&rank, label("ring", step), &[(to, &held)], &mut [(from, &mut next)]).unwrap();
            std::mem::swap(&mut held, &mut next);
            assert_eq!(held, [((me + 4 * 5_000 - step as usize - 1) % world) as u8; 16]);
        }
    });
}

#[test]
fn messages_of_a_pair_keep_their_order_across_batches() {
    run(2, LONG, |rank| {
        if rank.rank() == 0 {
            let bytes: Vec<u8> = (0..6).collect();
            let sends: Vec<_> = bytes.chunks(1).map(|chunk| (1, chunk)).collect();
            exchange(&rank, label("all at once", 0), &sends, &mut []).unwrap();
        } else {
            let mut got = [9_u8; 6];
            for (step, pair) in got.chunks_mut(2).enumerate() {
                let (first, second) = pair.split_at_mut(1);
                exchange(&rank, label("two by two", step as u32), &[], &mut [(0, first), (0, second)]).unwrap();
            }
            assert_eq!(got, [0, 1, 2, 3, 4, 5]);
        }
    });
}

#[test]
fn nothing_to_move_returns_at_once() {
    run(1, SHORT, |rank| {
        exchange(&rank, label("nothing", 0), &[], &mut []).unwrap();
        rank.agree(0..1, 7).unwrap();
        rank.poll().unwrap();
    });
}

#[test]
fn agree_tells_equal_from_different_and_may_be_repeated() {
    run(4, LONG, |rank| {
        let me = rank.rank();
        for round in 0..500_u64 {
            rank.agree(0..4, round).unwrap();
            let ours = if me == 2 { round + 1 } else { round };
            let (peer, theirs) = if me == 2 { (0, round) } else { (2, round + 1) };
            assert_eq!(rank.agree(0..4, ours), Err(Error::disagreement(me, peer, ours, theirs)));
        }
        rank.poll().unwrap();
    });
}

#[test]
fn groups_agree_by_themselves() {
    run(5, LONG, |rank| {
        let me = rank.rank();
        let group = if me < 2 { 0..2 } else { 2..5 };
        for round in 0..200_u64 {
            rank.agree(group.clone(), round * 8 + group.start as u64).unwrap();
            if me == 3 {
                thread::yield_now();
            }
        }
        // Groups that overlap are served one after another.
        let (first, second) = if me < 2 { (0..2, 0..5) } else { (2..5, 0..5) };
        rank.agree(first, 2).unwrap();
        rank.agree(second, 3).unwrap();
    });
}

#[test]
fn lists_that_break_the_contract_are_refused_and_nothing_fails() {
    assert!(matches!(local::group(0, LONG), Err(Error::Invalid { argument, .. }) if argument == "world"));
    run(2, LONG, |rank| {
        let (me, mut byte) = (rank.rank(), [0_u8; 1]);
        let refused = |result: Result<()>, name: &str| {
            assert!(matches!(&result, Err(Error::Invalid { argument, .. }) if argument == name), "{result:?}");
        };
        refused(exchange(&rank, label("self", 0), &[(me, &[1])], &mut []), "sends[0].peer");
        refused(exchange(&rank, label("far", 0), &[(1 - me, &[1]), (2, &[1])], &mut []), "sends[1].peer");
        refused(exchange(&rank, label("self", 0), &[], &mut [(me, &mut byte)]), "recvs[0].peer");
        refused(exchange(&rank, label("empty", 0), &[], &mut [(1 - me, &mut [])]), "recvs[0].bytes");
        refused(rank.agree(0..3, 1), "group");
        refused(rank.agree(1 - me..2 - me, 1), "group");
        rank.agree(0..2, 1).unwrap();
        let null = Message { peer: 1 - me, ptr: std::ptr::null_mut(), bytes: 1 };
        // SAFETY: the null address is refused before anything is touched.
        refused(unsafe { rank.exchange(label("null", 0), &[null], &[]) }, "sends[0].ptr");
    });
}

#[test]
fn a_second_call_on_a_rank_that_waits_is_refused() {
    let mut ranks = local::group(2, LONG).unwrap();
    let (one, zero) = (ranks.pop().unwrap(), Arc::new(ranks.pop().unwrap()));
    thread::scope(|scope| {
        let waits = Arc::clone(&zero);
        let waiting = scope.spawn(move || exchange(&waits, label("wait", 3), &[(1, &[5])], &mut []));
        let refused = loop {
            // Until the other thread has posted, this call waits for rank 1, or is itself in the way.
            match exchange(&zero, label("probe", 0), &[], &mut []) {
                Err(error) => break error,
                Ok(()) => thread::sleep(Duration::from_millis(1)),
            }
        };
        assert!(matches!(&refused, Error::Invalid { found, .. } if found.contains("wait, step 3")), "{refused}");
        let mut got = [0];
        exchange(&one, label("take", 0), &[], &mut [(0, &mut got)]).unwrap();
        waiting.join().unwrap().unwrap();
        assert_eq!(got, [5]);
    });
}
