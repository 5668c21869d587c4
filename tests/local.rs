// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transport `local` from outside: what arrives, who is blamed, and that everybody comes back.
//!
//! Deadlines are short where one is meant to expire, and long where none is: a test that hangs fails by its deadline.

use cpattn::transport::{Label, Message, Transport, local, local::Local};
use cpattn::{Cause, Error, Result};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is handed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is the one that is needed.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(400);

fn label(operation: &'static str, step: u32) -> Label {
    Label { operation, step }
}

fn send(peer: usize, bytes: &[u8]) -> Message {
    Message { peer, ptr: bytes.as_ptr().cast_mut(), bytes: bytes.len() }
}

fn recv(peer: usize, bytes: &mut [u8]) -> Message {
    Message { peer, ptr: bytes.as_mut_ptr(), bytes: bytes.len() }
}

/// Exchanges lists of (peer, bytes) and (peer, buffer).
fn exchange(rank: &Local, label: Label, sends: &[(usize, &[u8])], recvs: &mut [(usize, &mut [u8])]) -> Result<()> {
    let sends: Vec<_> = sends.iter().map(|(peer, bytes)| send(*peer, bytes)).collect();
    let recvs: Vec<_> = recvs.iter_mut().map(|(peer, bytes)| recv(*peer, bytes)).collect();
    // SAFETY: the ranges are borrowed, the receives mutably, until the call returns.
    unsafe { rank.exchange(label, &sends, &recvs) }
}

/// Runs `body` on a thread per rank; what it returns, by rank.
fn run<T: Send>(world: usize, deadline: Duration, body: impl Fn(Local) -> T + Sync) -> Vec<T> {
    let ranks = local::group(world, deadline).unwrap();
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(|| body(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// xorshift64*: the tests need numbers that all ranks draw alike, not good ones.
struct Draw(u64);

impl Draw {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % below
    }
}

/// The byte at `at` of message `index` from `from` to `to` in round `round`.
fn content(round: usize, from: usize, to: usize, index: usize, at: usize) -> u8 {
    (round * 131 + from * 31 + to * 17 + index * 7 + at * 3 + at / 251) as u8
}

/// All ranks draw the same pattern: (from, to, bytes) in an order that both ends of a pair see alike.
fn pattern(draw: &mut Draw, world: usize, kind: usize) -> Vec<(usize, usize, usize)> {
    let size = |draw: &mut Draw| if draw.next(8) == 0 { 1 + draw.next(200_000) } else { 1 + draw.next(300) };
    let mut list = Vec::new();
    for from in 0..world {
        for to in 0..world {
            let messages = match kind {
                _ if from == to => 0,
                0 => usize::from(to == (from + 1) % world),
                1 => 1,
                2 => usize::from(to + 1 == from || from + 1 == to) * 2,
                _ => draw.next(4),
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
            let mut draw = Draw(0x9e37_79b9 + world as u64);
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

fn peer_error(rank: usize, operation: &'static str, step: u32, peer: usize, cause: Cause) -> Result<()> {
    Err(Error::Peer { rank, operation, step, peer, cause })
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
    assert_eq!(results[2].0, peer_error(2, "bystander", 6, 0, cause));
    assert_eq!(results[2].1, peer_error(2, "agree", 0, 0, cause), "a failed group stays failed");
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
            assert_eq!(result, peer_error(rank, label.0, label.1, silent, Cause::Deadline(400)));
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
        assert_eq!(results[rank], peer_error(rank, operation, step, 2, Cause::Deadline(400)));
    }
}

#[test]
fn a_circle_of_waiting_ranks_ends_by_the_deadline() {
    let results = run(3, SHORT, |rank| {
        let mut got = [0_u8; 8];
        exchange(&rank, label("circle", 0), &[], &mut [((rank.rank() + 1) % 3, &mut got)])
    });
    let Err(Error::Peer { peer, cause: Cause::Deadline(400), .. }) = results[0] else { panic!("{results:?}") };
    for (rank, result) in results.into_iter().enumerate() {
        assert_eq!(result, peer_error(rank, "circle", 0, peer, Cause::Deadline(400)));
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
fn agree_tells_equal_from_different_and_may_be_repeated() {
    run(4, LONG, |rank| {
        let me = rank.rank();
        for round in 0..500_u64 {
            rank.agree(0..4, round).unwrap();
            let ours = if me == 2 { round + 1 } else { round };
            let (peer, theirs) = if me == 2 { (0, round) } else { (2, round + 1) };
            assert_eq!(rank.agree(0..4, ours), Err(Error::Disagreement { rank: me, peer, ours, theirs }));
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
    assert_eq!(results[0], peer_error(0, "agree", 0, 1, Cause::Deadline(400)));
    assert_eq!(results[2], peer_error(2, "agree", 0, 1, Cause::Deadline(400)));

    let results = run(3, LONG, |rank| if rank.rank() == 1 { Ok(()) } else { rank.agree(0..3, 5) });
    assert_eq!(results[0], peer_error(0, "agree", 0, 1, Cause::Left));
    assert_eq!(results[2], peer_error(2, "agree", 0, 1, Cause::Left));
}

#[test]
fn failure_in_mid_copy_never_lets_go_of_memory_that_is_read() {
    // Large messages, and an abort at a random moment: whoever returns overwrites what it sent, and a copy that went on
    // afterwards would show as a mixture.
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

/// Hundredths of a second of CPU that this thread has used: user and system time of proc(5), at the usual 100 Hz.
#[cfg(target_os = "linux")]
fn cpu_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    // The name, in parentheses, may contain anything; utime and stime are the 12th and 13th field after it.
    let fields = stat.rsplit_once(')').unwrap().1.split_whitespace().skip(11);
    fields.take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}

#[cfg(target_os = "linux")]
#[test]
fn waiting_ranks_park() {
    run(2, LONG, |rank| {
        let mut got = [0];
        if rank.rank() == 0 {
            let before = cpu_ticks();
            exchange(&rank, label("wait", 0), &[], &mut [(1, &mut got)]).unwrap();
            rank.agree(0..2, 1).unwrap();
            let used = cpu_ticks() - before;
            assert!(used <= 5, "{used} of 80 ticks");
        } else {
            thread::sleep(Duration::from_millis(400));
            exchange(&rank, label("late", 0), &[(0, &[1])], &mut []).unwrap();
            thread::sleep(Duration::from_millis(400));
            rank.agree(0..2, 1).unwrap();
        }
    });
}

#[test]
fn nothing_allocates_after_construction() {
    run(4, LONG, |rank| {
        let me = rank.rank();
        let (mine, mut theirs) = ([me as u8; 64], [0_u8; 256]);
        let round = |rank: &Local, theirs: &mut [u8; 256], step| {
            let mut sends = [send(0, &mine); 3];
            let mut recvs = [recv(0, &mut theirs[..64]); 3];
            for (at, peer) in (0..4).filter(|peer| *peer != me).enumerate() {
                sends[at] = send(peer, &mine);
                recvs[at] = recv(peer, &mut theirs[64 * peer..64 * (peer + 1)]);
            }
            // SAFETY: the ranges are disjoint parts of arrays that outlive the call.
            unsafe { rank.exchange(label("all to all", step), &sends, &recvs) }.unwrap();
            rank.agree(0..4, 1).unwrap();
            rank.poll().unwrap();
        };
        let before = ALLOCATIONS.get();
        for step in 0..1_000 {
            round(&rank, &mut theirs, step);
        }
        assert_eq!(ALLOCATIONS.get() - before, 0, "rank {me}");
        assert!((0..4).filter(|peer| *peer != me).all(|peer| theirs[64 * peer] == peer as u8));
        drop(vec![0_u8; 16]);
        assert_eq!(ALLOCATIONS.get() - before, 1, "the counter counts");
    });
}
