// SPDX-License-Identifier: MIT OR Apache-2.0
//! Combines in a graph: refused before the call was prepared; then replays with new parts give the bits of the call
//! without a graph.

use crate::{
    device::{Stream, enter},
    graphs::{begin, behind, end},
    ok,
    refused::refused,
};
use cpattn::{
    Batch, Dtype, Layout, Mesh, Plan, Problem, Rank, Result,
    call::RawTensor,
    kernel::cuda::{Cuda, DeviceMemory},
    runtime::Bindings,
    schedule::{Combine, CombineTo, TensorId},
    transport::peer,
};
use half::bf16;
use std::{sync::Arc, thread, time::Duration};

const TOKENS: usize = 7;
const HEADS: usize = 5;
const DIM: usize = 24;
const RANKS: usize = 3;
const COMBINE: Combine = Combine { to: CombineTo::All, partial: Dtype::Bf16 };

/// A rank with its tensors: o and lse of its part, and of the result.
struct Member {
    rank: Rank,
    tensors: [(DeviceMemory, RawTensor); 4],
}

impl Member {
    fn new(cuda: &Cuda, rank: Rank) -> Self {
        let one = |dtype: Dtype, dim: usize| {
            let memory = cuda.allocate(TOKENS * HEADS * dim * dtype.size()).unwrap();
            let raw = RawTensor::compact(memory.ptr(), dtype, TOKENS as u64, HEADS as u32, dim as u32);
            (memory, raw)
        };
        let tensors = [(Dtype::Bf16, DIM), (Dtype::F32, 1), (Dtype::Bf16, DIM), (Dtype::F32, 1)];
        Self { rank, tensors: tensors.map(|(dtype, dim)| one(dtype, dim)) }
    }

    /// New parts, and NaN where the result will be.
    fn fill(&self, seed: u64) {
        let mut random = fastrand::Rng::with_seed(seed * RANKS as u64 + self.rank.rank() as u64);
        let o: Vec<bf16> = (0..TOKENS * HEADS * DIM).map(|_| bf16::from_f64(random.f64() - 0.5)).collect();
        let lse: Vec<f32> = (0..TOKENS * HEADS).map(|_| random.f32() * 4.0).collect();
        let [of_o, of_lse, to_o, to_lse] = &self.tensors;
        of_o.0.upload(bytemuck::cast_slice(&o)).unwrap();
        of_lse.0.upload(bytemuck::cast_slice(&lse)).unwrap();
        [to_o, to_lse].iter().for_each(|(memory, _)| memory.upload(&vec![0xff; memory.bytes()]).unwrap());
    }

    /// # Safety
    /// The tensors live until the run, or the last replay of a graph that captures it, is over.
    unsafe fn enqueue(&mut self, plan: &Plan, stream: Stream) -> Result<()> {
        let names = [TensorId::PartialO, TensorId::PartialLse, TensorId::O, TensorId::Lse];
        let bindings = names.iter().zip(&self.tensors).fold(Bindings::default(), |all, (&name, t)| all.with(name, t.1));
        // SAFETY: the promise of this function; a live stream.
        unsafe { self.rank.run(plan, COMBINE, &bindings.on(stream.raw())) }
    }

    fn result(&self) -> [Vec<u8>; 2] {
        [2, 3].map(|i| {
            let mut bytes = vec![0; self.tensors[i].0.bytes()];
            self.tensors[i].0.download(&mut bytes).unwrap();
            bytes
        })
    }
}

pub fn run(cuda: &Arc<Cuda>) {
    enter();
    let p = Problem::new(Batch::from_lengths(&[TOKENS]).unwrap(), HEADS, HEADS, DIM, Dtype::Bf16);
    let plan = &Plan::new(&p, Mesh::ring(RANKS).unwrap(), Layout::Contiguous).unwrap();
    let ends = peer::group(&vec![Arc::clone(cuda); RANKS], Duration::from_secs(300)).unwrap();
    let streams: [Stream; RANKS] = std::array::from_fn(|_| Stream::new());
    let mut members: Vec<_> = ends.into_iter().map(|end| Member::new(cuda, Rank::on_device(end).unwrap())).collect();
    begin(streams[0]);
    // SAFETY: refused.
    let outcome = unsafe { members[0].enqueue(plan, streams[0]) };
    refused(outcome, &["a stream that is being captured", "make the same call once before the capture begins"]);
    ok!(cuGraphExecDestroy(end(streams[0])));

    let all = |members: &mut Vec<Member>| {
        thread::scope(|scope| {
            for (member, &stream) in members.iter_mut().zip(&streams) {
                scope.spawn(move || {
                    enter();
                    // SAFETY: the tensors live until the last replay was waited for.
                    unsafe { member.enqueue(plan, stream) }.unwrap();
                });
            }
        });
    };
    let expected: Vec<Vec<[Vec<u8>; 2]>> = (0..3)
        .map(|seed| {
            members.iter().for_each(|member| member.fill(seed));
            all(&mut members);
            streams.iter().for_each(|stream| stream.wait());
            members.iter().map(Member::result).collect()
        })
        .collect();
    assert!(expected[0] != expected[1], "other parts have another result");
    begin(streams[0]);
    streams[1..].iter().for_each(|&s| behind(streams[0], s));
    all(&mut members);
    streams[1..].iter().for_each(|&s| behind(s, streams[0]));
    let exec = end(streams[0]);
    for seed in [2, 0, 1, 2] {
        members.iter().for_each(|member| member.fill(seed));
        ok!(cuGraphLaunch(exec, streams[0].0));
        streams[0].wait();
        for (me, member) in members.iter().enumerate() {
            assert!(member.result() == expected[seed as usize][me], "replay {seed}, rank {me}: other bits");
        }
    }
    members.iter().for_each(|member| member.rank.synchronize().unwrap());
    ok!(cuGraphExecDestroy(exec));
}
