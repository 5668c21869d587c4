// SPDX-License-Identifier: MIT OR Apache-2.0
//! After `prepare`, running a plan allocates nothing on any thread, and stays within the workspace it asked for.
//!
//! The workspace is lent with exactly the bytes that `workspace().bytes` names for each direction, every one of them
//! poison, between guards; a byte less is refused. The allocator counts for the whole process, so this is a program of
//! its own: the usual harness allocates on a thread of its own at moments of its own.

mod common;

use common::{
    Data,
    own::{Own, compact, gaps},
};
use cpattn::{
    Batch, Dtype, Element, Layout, Mask, Mesh, Options, Plan, Problem, Rank,
    plan::{Circulate, Gather, Wire},
    schedule::{Direction, Lane, Schedule},
    transport::local,
};
use half::bf16;
use std::{
    alloc::{GlobalAlloc, Layout as Block, System},
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

struct Counting;
static ARMED: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        if ARMED.load(Ordering::Relaxed) {
            CALLS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(block) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, block: Block) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, block) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const GUARD: usize = 4096;

/// Poisoned memory with a guard on either side of the largest workspace.
struct Memory {
    units: Vec<Unit>,
    bytes: usize,
}

#[derive(Clone, Copy)]
#[repr(align(256))]
struct Unit([u8; Schedule::ALIGNMENT as usize]);

impl Memory {
    fn new(bytes: u64) -> Self {
        let bytes = bytes as usize;
        let units = (bytes + 2 * GUARD).div_ceil(Schedule::ALIGNMENT as usize);
        Self { units: vec![Unit([0xff; Schedule::ALIGNMENT as usize]); units], bytes }
    }

    /// Lends the last `bytes` (rounded up to the alignment) before the rear guard.
    fn lend(&mut self, rank: &mut Rank, bytes: u64) {
        assert!(bytes as usize <= self.bytes);
        let start = self.units.as_mut_ptr().cast::<u8>().wrapping_add(GUARD);
        // SAFETY: the memory outlives the rank's use of it (see `one_rank`), and only its guards are read meanwhile.
        unsafe { rank.workspace().lend(start, bytes as usize) }.unwrap();
    }

    /// Whether everything outside `GUARD..GUARD + bytes` is still poison.
    fn is_guarded(&self, bytes: u64) -> bool {
        let all = self.units.iter().flat_map(|u| u.0);
        all.enumerate().all(|(i, b)| (GUARD..GUARD + bytes as usize).contains(&i) || b == 0xff)
    }
}

/// What one rank found: allocations that should not have been, results as expected, and the bytes of both directions.
struct Found {
    results: Vec<Vec<u8>>,
    bytes: [u64; 2],
}

/// Communication lanes that have a name and wait.
fn lanes_asleep() -> usize {
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|t| Some(t.ok()?.path()));
    tasks.filter(|t| read(t.join("comm")).starts_with("cpattn-comm") && read(t.join("stat")).contains(") S ")).count()
}

fn play<T: Element>(what: &str, plan: &Plan) {
    let data = Data::<T>::random(plan.problem(), 4);
    let style = if plan.options().pack_inputs { gaps } else { compact };
    let world = plan.mesh().world();
    // Ranks and this thread, which counts and does nothing else meanwhile.
    let barrier = Barrier::new(world + 1);
    let meets = |rank: &usize| {
        [Direction::Forward, Direction::Backward].iter().any(|&direction| {
            Schedule::new(plan, *rank, direction).unwrap().operations().any(|op| op.lane == Lane::Communication)
        })
    };
    let lanes = (0..world).filter(meets).count();
    let one_rank = |end: local::Local| -> Found {
        let mut rank = Rank::new(end);
        let mut own = Own::new(plan, &data, rank.rank(), style);
        let both = [Direction::Forward, Direction::Backward];
        let bytes = both.map(|d| rank.workspace().bytes(plan, d).unwrap());
        // The smaller of the two first, so that a direction that writes too far meets a guard.
        let mut memory = [Memory::new(bytes[0]), Memory::new(bytes[1])];
        for (d, m) in both.into_iter().zip(&mut memory) {
            m.lend(&mut rank, m.bytes as u64);
            rank.prepare(plan, d).unwrap();
        }
        // One byte less is refused, and nothing is written.
        if bytes[0] > 0 {
            memory[0].lend(&mut rank, bytes[0] - 1);
            let error = own.forward(&mut rank, plan).unwrap_err().to_string();
            let expected = format!("workspace is {} bytes, expected at least {} bytes", bytes[0] - 1, bytes[0]);
            assert!(error.starts_with(&expected), "{error}");
            assert!(rank.prepare(plan, Direction::Forward).is_err());
            assert!(own.is_untouched() && memory[0].is_guarded(0));
        }
        barrier.wait();
        barrier.wait();
        let mut outcome = Ok(());
        for _ in 0..2 {
            memory[0].lend(&mut rank, bytes[0]);
            outcome = outcome.and_then(|()| own.forward(&mut rank, plan));
            memory[1].lend(&mut rank, bytes[1]);
            outcome = outcome.and_then(|()| own.backward(&mut rank, plan));
        }
        barrier.wait();
        barrier.wait();
        outcome.unwrap();
        drop(rank);
        assert!(memory[0].is_guarded(bytes[0]) && memory[1].is_guarded(bytes[1]), "{what}: wrote beyond its workspace");
        Found { results: own.results(), bytes }
    };
    let found: Vec<Found> = thread::scope(|scope| {
        let ends = local::group(world, Duration::from_secs(60)).unwrap();
        let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(|| one_rank(end))).collect();
        barrier.wait();
        // Lanes that were just started may still be on their way to their first wait.
        while lanes_asleep() < lanes {
            thread::sleep(Duration::from_millis(1));
        }
        ARMED.store(true, Ordering::SeqCst);
        barrier.wait();
        barrier.wait();
        ARMED.store(false, Ordering::SeqCst);
        barrier.wait();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(CALLS.swap(0, Ordering::SeqCst), 0, "{what}: allocations while running");

    // The same in memory of the ranks' own.
    let run = |end: local::Local| {
        let mut rank = Rank::new(end);
        let mut own = Own::new(plan, &data, rank.rank(), style);
        own.forward(&mut rank, plan).unwrap();
        own.backward(&mut rank, plan).unwrap();
        own.results()
    };
    let clean: Vec<Vec<Vec<u8>>> = local::run(world, Duration::from_secs(60), |end| Ok(run(end))).unwrap();
    for (rank, (found, clean)) in found.iter().zip(clean).enumerate() {
        assert!(found.results == clean, "{what}: rank {rank} has other bits in lent memory");
    }
    if world > 1 {
        assert!(found.iter().any(|f| f.bytes[1] > 0), "{what}: no workspace at all");
    }
}

fn main() {
    let mesh = |u, r| Mesh { replicas: 1, ring: r, ulysses: u };
    let o = Options::new;
    let forms = [
        o().circulate(Circulate::Keys),
        o().circulate(Circulate::Queries),
        o().gather(true),
        o().gather(Gather::Together),
        o().passes(2),
        o().gather(true).passes(2),
        o().reproducible(true),
        o().wire(Wire::Bf16),
        o().pack_inputs(true),
        o().circulate(Circulate::Queries).pack_inputs(true).wire(Wire::Bf16),
        // Several nodes where the ring or the all-to-alls have four ranks.
        o().ranks_per_node(2).circulate(Circulate::Keys),
        o().ranks_per_node(2).circulate(Circulate::Queries),
        o().ranks_per_node(2).gather(true),
        o().ranks_per_node(2).gather(Gather::Together),
    ];
    let batch = Batch::from_lengths(&[23, 0, 9, 40]).unwrap();
    for mesh in [mesh(1, 1), mesh(3, 1), mesh(1, 4), mesh(2, 2), mesh(4, 2)] {
        for form in forms {
            if form.ranks_per_node > 0 && mesh.ring != 4 && mesh.ulysses != 4 {
                continue;
            }
            for layout in [Layout::Zigzag, Layout::Striped { stripe: 3 }] {
                let p = |dtype| Problem::new(batch.clone(), 6, 3, 16, dtype).with_value_dim(8).with_sinks(true);
                let plan = |p| Plan::builder(&p).mesh(mesh).layout(layout).options(form).build().unwrap();
                let what = format!("{mesh}, {layout}, {form:?}");
                play::<f32>(&what, &plan(p(Dtype::F32).with_softcap(3.0)));
                play::<bf16>(&what, &plan(p(Dtype::Bf16).with_mask(Mask::window(9, 2)).with_alibi_slopes(&[0.5; 6])));
            }
        }
    }
    println!("allocation: ok");
}
