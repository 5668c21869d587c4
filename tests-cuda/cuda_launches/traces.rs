// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a rank on a device records: the operations that a rank on the CPU records, at times in the order of the
//! schedule.

use crate::{
    bits::{both, expected, ranks},
    counts,
    device::{Counters, Stream, enter},
    graphs::{begin, end},
    ok, plans,
    tensors::{Form, Tensors},
};
use cpattn::{
    Backward, Error, Forward, Plan, Rank, Side, View, ViewMut,
    kernel::cuda::Cuda,
    report::trace::Event,
    schedule::{Direction, Lane},
    transport::{local, peer},
};
use half::bf16;
use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

/// An operation without its times.
type What = (usize, Lane, &'static str, &'static str, u32, u64);

fn what(events: &[Event], lane: Lane) -> Vec<What> {
    let of_lane = events.iter().filter(|e| e.lane == lane);
    of_lane.map(|e| (e.rank, e.lane, e.name, e.phase, e.step, e.bytes)).collect()
}

/// What ranks on the CPU record of a forward and a backward.
fn on_the_cpu(plan: &Plan) -> Vec<Vec<Event>> {
    let run = |end| {
        let mut rank = Rank::new(end);
        let p = plan.problem();
        let [nq, nk] = [Side::Q, Side::K].map(|side| plan.local_tokens(side, rank.rank()).len());
        let (h, hk, d, dv) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim());
        let new = |n: usize| vec![bf16::from_f32(0.5); n];
        let (q, k, v, o, d_o) =
            (new(nq * h * d), new(nk * hk * d), new(nk * hk * dv), new(nq * h * dv), new(nq * h * dv));
        let (mut out, mut lse) = (o.clone(), vec![0f32; nq * h]);
        let (mut dq, mut dk, mut d_v) = (q.clone(), k.clone(), v.clone());
        let (sinks, mut dsinks) = (vec![0.25; h * p.sinks_per_head()], vec![0f32; h * p.sinks_per_head()]);
        let sinks = p.sinks().then_some(&sinks[..]);
        rank.trace().record(Instant::now(), 10_000).unwrap();
        assert_eq!(rank.trace().accuracy(), Duration::ZERO);
        let forward = Forward::new(
            View::new(&q, nq, h, d).unwrap(),
            View::new(&k, nk, hk, d).unwrap(),
            View::new(&v, nk, hk, dv).unwrap(),
            ViewMut::new(&mut out, nq, h, dv).unwrap(),
            ViewMut::new(&mut lse, nq, h, 1).unwrap(),
        )
        .sinks(sinks);
        rank.forward(plan, forward).unwrap();
        let backward = Backward::new(
            View::new(&q, nq, h, d).unwrap(),
            View::new(&k, nk, hk, d).unwrap(),
            View::new(&v, nk, hk, dv).unwrap(),
            View::new(&out, nq, h, dv).unwrap(),
            View::new(&lse, nq, h, 1).unwrap(),
            View::new(&d_o, nq, h, dv).unwrap(),
            [
                ViewMut::new(&mut dq, nq, h, d).unwrap(),
                ViewMut::new(&mut dk, nk, hk, d).unwrap(),
                ViewMut::new(&mut d_v, nk, hk, dv).unwrap(),
            ],
        )
        .sinks(sinks)
        .dsinks(p.sinks().then_some(&mut dsinks[..]));
        rank.backward(plan, backward).unwrap();
        rank.trace().events()
    };
    local::run(plan.mesh().world(), Duration::from_secs(60), |end| Ok(run(end))).unwrap()
}

/// Times of one lane do not overlap by more than the driver's resolution.
fn in_order(events: &[Event], begun_ns: u64) {
    for lane in [Lane::Compute, Lane::Communication] {
        let list: Vec<&Event> = events.iter().filter(|e| e.lane == lane).collect();
        assert!(list.iter().all(|e| e.start_ns >= begun_ns && e.end_ns >= e.start_ns), "{list:#?}");
        assert!(list.windows(2).all(|w| w[1].start_ns + 2_000 >= w[0].end_ns), "{list:#?}");
    }
    // The emulator counts instructions for time, of which every kernel has some.
    assert!(events.iter().any(|e| e.name == "attend" && e.end_ns > e.start_ns), "{events:#?}");
}

/// Every plan: the operations are those of the CPU, and results have the bits of runs that record nothing.
fn recorded(cuda: &Arc<Cuda>, world: usize) {
    for (name, plan) in &plans::of(world) {
        let (cpu, expected) = (on_the_cpu(plan), expected(cuda, plan, 8));
        ranks(cuda, world, |mut rank| {
            let (me, stream, epoch) = (rank.rank(), Stream::new(), Instant::now());
            let tensors = Tensors::new(cuda, plan, me, |_| Form::Compact);
            tensors.fill(8, me);
            assert!(rank.trace().events().is_empty() && rank.trace().accuracy().is_zero());
            let begun_ns = epoch.elapsed().as_nanos() as u64;
            rank.trace().record(epoch, 10_000).unwrap();
            let accuracy = rank.trace().accuracy();
            assert!(!accuracy.is_zero() && accuracy < Duration::from_secs(1), "{accuracy:?}");
            for round in 0..2 {
                both(&mut rank, plan, &tensors, stream);
                rank.synchronize().unwrap();
                let events = rank.trace().events();
                for lane in [Lane::Compute, Lane::Communication] {
                    let (found, wanted) = (what(&events, lane), what(&cpu[me], lane));
                    assert!(!wanted.is_empty() || lane == Lane::Communication);
                    assert_eq!(found, wanted, "{name}, round {round}, rank {me}");
                }
                in_order(&events, begun_ns);
                assert!(rank.trace().events().is_empty());
            }
            for ((tensor, found), (_, expected)) in tensors.results(name).iter().zip(&expected[me]) {
                assert!(found == expected, "{name}, rank {me}: {} has other bits", tensor.name());
            }
            rank.trace().record(epoch, 0).unwrap();
            both(&mut rank, plan, &tensors, stream);
            assert!(rank.trace().events().is_empty());
        });
    }
}

/// A trace has room for so many operations, and again for as many once it was taken; what is not over comes later.
fn room(cuda: &Arc<Cuda>) {
    let plan = &plans::of(1)[0].1;
    let all = on_the_cpu(plan)[0].len();
    assert!(all > 3);
    let end_of = peer::group(&[Arc::clone(cuda)], Duration::from_secs(60)).unwrap().remove(0);
    let (mut rank, stream) = (Rank::on_device(end_of).unwrap(), Stream::new());
    let tensors = Tensors::new(cuda, plan, 0, |_| Form::Compact);
    tensors.fill(1, 0);
    rank.trace().record(Instant::now(), 2).unwrap();
    for _ in 0..2 {
        both(&mut rank, plan, &tensors, stream);
        assert_eq!(rank.trace().events().len(), 2);
    }
    // Without a wait: whatever comes at once, all of it comes in the end, once.
    rank.trace().record(Instant::now(), 10 * all).unwrap();
    let mut events = Vec::new();
    for _ in 0..5 {
        for direction in [Direction::Forward, Direction::Backward] {
            // SAFETY: the tensors live until the stream was waited for.
            unsafe { rank.run(plan, direction, &tensors.bindings().on(stream.raw().cast())) }.unwrap();
        }
        events.extend(rank.trace().events());
    }
    rank.synchronize().unwrap();
    events.extend(rank.trace().events());
    assert_eq!(events.len(), 5 * all);

    // A graph would leave no times behind.
    begin(stream);
    // SAFETY: refused.
    let captured = unsafe { rank.run(plan, Direction::Forward, &tensors.bindings().on(stream.raw().cast())) };
    let Err(error @ Error::Unsupported { .. }) = captured else { panic!("{captured:?}") };
    assert!(error.to_string().contains("the rank records a trace"), "{error}");
    assert!(error.to_string().contains("record with a capacity of 0"), "{error}");
    rank.trace().record(Instant::now(), 0).unwrap();
    // SAFETY: the tensors live until the replay was waited for.
    unsafe { rank.run(plan, Direction::Forward, &tensors.bindings().on(stream.raw().cast())) }.unwrap();
    let exec = end(stream);
    ok!(cuGraphLaunch(exec, stream.0));
    stream.wait();
    assert!(rank.trace().events().is_empty());
    rank.synchronize().unwrap();
    ok!(cuGraphExecDestroy(exec));
}

/// What the backwards of two ranks ask of the driver, and how many operations their traces hold.
fn asked(cuda: &Arc<Cuda>, counters: Option<Counters>, capacity: usize) -> (Option<counts::Found>, u64) {
    let (plan, barrier, operations) = (&plans::of(2)[0].1, Barrier::new(3), AtomicU64::new(0));
    let ends = peer::group(&vec![Arc::clone(cuda); 2], Duration::from_secs(300)).unwrap();
    let found = thread::scope(|scope| {
        for end in ends {
            let (barrier, operations) = (&barrier, &operations);
            scope.spawn(move || {
                enter();
                let (mut rank, stream) = (Rank::on_device(end).unwrap(), Stream::new());
                let tensors = Tensors::new(cuda, plan, rank.rank(), |_| Form::Compact);
                tensors.fill(2, rank.rank());
                both(&mut rank, plan, &tensors, stream);
                rank.synchronize().unwrap();
                rank.trace().record(Instant::now(), capacity).unwrap();
                let bindings = tensors.bindings();
                barrier.wait();
                barrier.wait();
                // SAFETY: the tensors live until the stream was waited for.
                let outcome = unsafe { rank.run(plan, Direction::Backward, &bindings.on(stream.raw().cast())) };
                barrier.wait();
                barrier.wait();
                outcome.unwrap();
                stream.wait();
                rank.synchronize().unwrap();
                operations.fetch_add(rank.trace().events().len() as u64, SeqCst);
            });
        }
        let (found, allocated) = counts::between(&barrier, counters);
        assert_eq!(allocated, 0, "host allocations while {capacity} operations may be recorded");
        found
    });
    (found, operations.into_inner())
}

/// A run that records allocates nothing, waits for nothing and asks nothing more: it records two events more for each
/// operation.
fn counted(cuda: &Arc<Cuda>, counters: Option<Counters>) {
    let ((quiet, none), (loud, operations)) = (asked(cuda, counters, 0), asked(cuda, counters, 1000));
    assert!(none == 0 && operations > 4, "{none} and {operations} operations");
    let (Some(quiet), Some(loud)) = (quiet, loud) else { return };
    for ((name, before), (_, after)) in quiet.into_iter().zip(loud) {
        let more = if name == "event records" { 2 * operations } else { 0 };
        assert_eq!(after, before + more, "{name}, of {operations} operations");
    }
}

pub fn run(cuda: &Arc<Cuda>) {
    enter();
    room(cuda);
    for world in [1, 2, 4] {
        recorded(cuda, world);
    }
    counted(cuda, Counters::find());
}
