// SPDX-License-Identifier: MIT OR Apache-2.0
//! What ranks on devices do together between runs, whatever their transport: rows of the host that lie some tokens on,
//! and the trace of a run.

use cpattn::{
    Batch, Dtype, Error, Layout, Mesh, Plan, Problem, Rank, Side,
    call::RawTensor,
    report::trace::Event,
    runtime::{Bindings, SliceRows},
    schedule::{Direction, Lane, TensorId},
};
use std::time::{Duration, Instant};

/// A rank's part; all ranks of a group of `world` call it. Epochs are apart, as those of processes.
pub fn one_rank(mut rank: Rank, world: usize, began: Instant) {
    let problem = Problem::new(Batch::from_lengths(&[20, 1, 43]).unwrap(), 2, 1, 16, Dtype::Bf16);
    let plan = &Plan::new(&problem, Mesh::ring(world).unwrap(), Layout::Zigzag).unwrap();
    let r = rank.rank();
    let ids: Vec<i64> = (0..64).map(|t| 100 + t).collect();
    let mine = plan.local_tokens(Side::Q, r).shard(&ids, 1).unwrap();
    for by in [1, -2, 25, 1000] {
        assert_eq!(
            rank.shift(plan, by, SliceRows::new(&mine, 1, -100)).unwrap().into_shifted(),
            plan.local_tokens(Side::Q, r).shift(&ids, -100, by).unwrap(),
            "{by}"
        );
    }
    let error = rank.shift(plan, r.min(1) as i64, SliceRows::new(&mine, 1, -100)).unwrap_err();
    assert!(matches!(error, Error::Disagreement { .. }), "{error}");

    let epoch = began - Duration::from_secs(r as u64);
    rank.trace().record(epoch, 1000).unwrap();
    let cuda = rank.cuda().unwrap().clone();
    let n = plan.local_tokens(Side::Q, r).len() as u64;
    let memory: Vec<_> = (0..5).map(|_| cuda.allocate(n as usize * 2 * 16 * 4).unwrap()).collect();
    // All bytes 0, whatever the type.
    memory.iter().for_each(|m| m.upload(&vec![0; m.bytes()]).unwrap());
    let at = |i: usize, dtype, heads, dim| RawTensor::compact(memory[i].ptr(), dtype, n, heads, dim);
    let tensors = Bindings::default()
        .with(TensorId::Q, at(0, Dtype::Bf16, 2, 16))
        .with(TensorId::K, at(1, Dtype::Bf16, 1, 16))
        .with(TensorId::V, at(2, Dtype::Bf16, 1, 16))
        .with(TensorId::O, at(3, Dtype::Bf16, 2, 16))
        .with(TensorId::Lse, at(4, Dtype::F32, 2, 1));
    let from = began.elapsed();
    // SAFETY: the memory lives until the rank was waited for, which the gathering does, and nothing else uses it.
    unsafe { rank.run(plan, Direction::Forward, &tensors) }.unwrap();
    let events = rank.trace().gather(epoch).unwrap();
    let to = began.elapsed();
    assert_eq!(rank.trace().gather(epoch).unwrap(), [], "taken");
    rank.poll().unwrap();
    if r > 0 {
        assert_eq!(events, []);
        return;
    }
    // All events are of this run, whose ranks agreed on it, so none is before it; off by half a round trip at most.
    let slack = Duration::from_millis(300);
    for e in &events {
        let (start, end) = (Duration::from_nanos(e.start_ns), Duration::from_nanos(e.end_ns));
        assert!(from.saturating_sub(slack) <= start && end <= to + slack, "{from:?} to {to:?}: {e:?}");
    }
    let of = |rank: usize, lane: Lane| events.iter().filter(|e: &&Event| e.rank == rank && e.lane == lane).count();
    for rank in 0..world {
        assert!(of(rank, Lane::Compute) > 0 && of(rank, Lane::Communication) > 0, "rank {rank}: {events:?}");
    }
}
