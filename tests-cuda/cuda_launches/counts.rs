// SPDX-License-Identifier: MIT OR Apache-2.0
//! What runs ask of the driver and of the allocator.

use crate::{
    device::{Counters, Stream, enter},
    plans,
    tensors::{Form, Tensors, awkward},
};
use cpattn::{
    Rank,
    kernel::cuda::Cuda,
    schedule::{Direction, TensorId},
    transport::peer,
};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

/// The system's allocator, which counts while it is armed.
pub struct Counting;
static ARMED: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is handed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if ARMED.load(SeqCst) {
            CALLS.fetch_add(1, SeqCst);
        }
        // SAFETY: the caller's layout, as it came.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: what the system's allocator gave, as it came.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// What is counted; of the first nine the number is known.
const NAMES: [&str; 14] = [
    "host-to-device copies",
    "device-to-host copies",
    "allocations",
    "host waits",
    "cuEventQuery",
    "cuStreamQuery",
    "queries",
    "cuPointerGetAttribute",
    "cuStreamGetCaptureInfo",
    "event records",
    "launches",
    "fills",
    "cpattn_hopper_backward",
    "cpattn_backward_fused",
];

const BOTH: [Direction; 2] = [Direction::Forward, Direction::Backward];

/// The driver's counters by name.
pub type Found = [(&'static str, u64); 14];

/// What all ranks do between the second time and the third that they come to the barrier: the driver's counters, and
/// host allocations.
pub fn between(barrier: &Barrier, counters: Option<Counters>) -> (Option<Found>, u64) {
    barrier.wait();
    if let Some(c) = counters {
        c.reset();
    }
    CALLS.store(0, SeqCst);
    ARMED.store(true, SeqCst);
    barrier.wait();
    barrier.wait();
    ARMED.store(false, SeqCst);
    let found = counters.map(|c| NAMES.map(|name| (name, c.get(name))));
    let allocated = CALLS.load(SeqCst);
    barrier.wait();
    (found, allocated)
}

/// Runs all plans of a world on ranks that are prepared, and counts what the runs do.
fn world(cuda: &Arc<Cuda>, counters: Option<Counters>, world: usize) {
    let list = plans::of(world);
    let ends = peer::group(&vec![Arc::clone(cuda); world], Duration::from_secs(300)).unwrap();
    // Ranks and this thread, which counts and does nothing meanwhile.
    let barrier = Barrier::new(world + 1);
    let tensors = AtomicU64::new(0);
    let (found, allocated) = thread::scope(|scope| {
        for end in ends {
            let (list, barrier, tensors) = (&list, &barrier, &tensors);
            scope.spawn(move || {
                enter();
                let stream = Stream::new();
                let mut rank = Rank::on_device(end).unwrap();
                let me = rank.rank();
                let mut ready = Vec::new();
                let mut bound = 0;
                for (_, plan) in list {
                    // Nothing says before the run how tensors will lie.
                    let compact = Tensors::new(cuda, plan, me, |_| Form::Compact);
                    let other = Tensors::new(cuda, plan, me, awkward(plan));
                    for tensors in [&compact, &other] {
                        tensors.fill(1, me);
                    }
                    for direction in BOTH {
                        rank.prepare(plan, direction).unwrap();
                        bound += plan.costs(me, direction).unwrap().device_metadata;
                    }
                    ready.push((plan, compact, other));
                }
                let kept = rank.workspace().metadata_bytes();
                assert!(kept > 0 && kept <= bound, "{kept} bytes of lists, at most {bound}");
                let mut runs = Vec::new();
                for (plan, compact, other) in &ready {
                    for held in [compact, other] {
                        for direction in BOTH {
                            tensors.fetch_add(held.count(direction), SeqCst);
                            runs.push((*plan, direction, held.bindings()));
                        }
                    }
                }
                // A stream is looked at when it is new to the rank.
                // SAFETY: the tensors live until the stream was waited for, below; so they do for the runs after it.
                unsafe { rank.run(runs[0].0, runs[0].1, &runs[0].2.on(stream.raw().cast())) }.unwrap();
                stream.wait();
                barrier.wait();
                barrier.wait();
                let mut outcome = Ok(());
                for (plan, direction, bindings) in &runs {
                    // SAFETY: as above.
                    outcome =
                        outcome.and_then(|()| unsafe { rank.run(plan, *direction, &bindings.on(stream.raw().cast())) });
                }
                barrier.wait();
                barrier.wait();
                outcome.unwrap();
                stream.wait();
                assert_eq!(rank.workspace().metadata_bytes(), kept);
            });
        }
        between(&barrier, counters)
    });
    let (runs, asked) = ((list.len() * 2 * 2 * world) as u64, tensors.into_inner());
    if let Some(found) = found {
        let expected = [0, 0, 0, 0, 0, 0, asked + runs, asked, runs];
        assert_eq!(found.map(|f| f.1)[..9], expected, "world of {world}, {runs} runs of {asked} tensors: {found:?}");
        let [.., (_, launches), (_, fills), (_, hopper), (_, fused)] = found;
        assert!(launches > runs, "{launches} launches");
        // What blocks wait on in a backward is cleared before it; before no other launch is anything.
        assert!(fills > 0 && fills == hopper + fused, "{fills} fills, {} backward launches", hopper + fused);
        println!("  world of {world}: {runs} runs: {launches} launches, {fills} fills, {asked} tensors looked at");
    }
    assert_eq!(allocated, 0, "world of {world}: host allocations in {runs} runs");
}

pub fn run(cuda: &Arc<Cuda>) {
    enter();
    let counters = Counters::find();
    if counters.is_none() {
        println!("  another driver: only the allocator is counted");
    }
    // The mask of a test that never fails: a run that was not prepared does what is counted above.
    let plan = &plans::of(1)[0].1;
    let tensors = Tensors::new(cuda, plan, 0, |_: TensorId| Form::Compact);
    tensors.fill(1, 0);
    let end = peer::group(&[Arc::clone(cuda)], Duration::from_secs(300)).unwrap().remove(0);
    let (mut rank, stream) = (Rank::on_device(end).unwrap(), Stream::new());
    if let Some(c) = counters {
        c.reset();
    }
    ARMED.store(true, SeqCst);
    // SAFETY: the tensors live until the stream was waited for.
    let outcome = unsafe { rank.run(plan, Direction::Forward, &tensors.bindings().on(stream.raw().cast())) };
    ARMED.store(false, SeqCst);
    outcome.unwrap();
    stream.wait();
    assert!(CALLS.load(SeqCst) > 0);
    if let Some(c) = counters {
        assert!(c.get("host-to-device copies") > 0 && c.get("allocations") > 0);
    }
    for n in 1..=4 {
        world(cuda, counters, n);
    }
}
