// SPDX-License-Identifier: MIT OR Apache-2.0
//! What waiting and exchanging cost: no spinning while a peer is late, and no allocation after construction.

use super::harness::{LONG, exchange, label, recv, run, send};
use cpattn::transport::{Transport, local::Local};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::thread;
use std::time::Duration;

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
