// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank of a plan: its tensors on the device, forward and backward, and its results as bytes.

use std::sync::Arc;

use cpattn::{
    Batch, Dtype, Element, Layout, Mask, Mesh, Options, Plan, Problem, Rank, Result, Side,
    kernel::cuda::Cuda,
    plan::Circulate,
    runtime::Bindings,
    schedule::{Direction, TensorId},
    transport::nccl::Nccl,
};
use half::bf16;

use crate::common::{self, Data, Results};
use crate::held::Held;

pub type T = bf16;

/// o, lse, dq, dk, dv and dsinks of one rank, as they lie in memory.
pub type Part = Vec<Vec<u8>>;

/// What every rank plans, by name.
pub fn plan(name: &str) -> Plan {
    let causal = Problem::new(Batch::from_lengths(&[29, 0, 38]).unwrap(), 4, 2, 32, Dtype::Bf16);
    let window = Problem::new(Batch::from_lengths(&[21, 40]).unwrap(), 4, 4, 32, Dtype::Bf16)
        .with_mask(Mask::window(17, 3))
        .with_sinks(true);
    let (p, ulysses, ring, layout, options) = match name {
        "ulysses 2" => (causal, 2, 1, Layout::Contiguous, Options::new()),
        "ring 2" => (window, 1, 2, Layout::Zigzag, Options::new()),
        "ulysses 4" => (window, 4, 1, Layout::Contiguous, Options::new()),
        "ring 4" => (causal, 1, 4, Layout::Zigzag, Options::new()),
        "hybrid 2 x 2" => (causal, 2, 2, Layout::ZigzagPack, Options::new().circulate(Circulate::Queries)),
        "hybrid 2 x 4" => (causal, 2, 4, Layout::Striped { stripe: 4 }, Options::new()),
        "ring 8" => (causal, 1, 8, Layout::Balanced { chunks: 2 }, Options::new().gather(true)),
        "two nodes" => {
            let options = Options::new().circulate(Circulate::Keys).ranks_per_node(2);
            (causal, 1, 4, Layout::Zigzag, options)
        }
        "two replicas" => {
            // Four ranks, of which each pair does the same work.
            let mesh = Mesh { replicas: 2, ring: 1, ulysses: 2 };
            return Plan::new(&causal, mesh, Layout::Contiguous).unwrap();
        }
        _ => panic!("no plan {name}"),
    };
    let mesh = Mesh { replicas: 1, ring, ulysses };
    Plan::builder(&p).mesh(mesh).layout(layout).options(options).build().unwrap()
}

pub fn data(plan: &Plan) -> Data<T> {
    Data::random(plan.problem(), 7)
}

/// All tensors of a rank.
pub struct Tensors {
    held: Vec<Held>,
    bindings: Bindings,
}

pub fn tensors(cuda: &Cuda, plan: &Plan, rank: usize, data: &Data<T>) -> Tensors {
    let p = plan.problem();
    let (hq, hk, d, dv) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim());
    let (tq, tk) = (plan.local_tokens(Side::Q, rank).indices(), plan.local_tokens(Side::K, rank).indices());
    let (nq, nk) = (tq.len(), tk.len());
    let gather = |all: &[T], tokens: &[usize], row: usize| -> Vec<T> {
        tokens.iter().flat_map(|&t| all[t * row..(t + 1) * row].iter().copied()).collect()
    };
    let results = [
        (TensorId::O, Held::nan::<T>(cuda, nq, hq, dv)),
        (TensorId::Lse, Held::nan::<f32>(cuda, nq, hq, 1)),
        (TensorId::Dq, Held::nan::<T>(cuda, nq, hq, d)),
        (TensorId::Dk, Held::nan::<T>(cuda, nk, hk, d)),
        (TensorId::Dv, Held::nan::<T>(cuda, nk, hk, dv)),
        (TensorId::Dsinks, Held::nan::<f32>(cuda, 1, hq, 1)),
        (TensorId::MaxLogit, Held::nan::<f32>(cuda, 1, hq, 1)),
    ];
    let inputs = [
        (TensorId::Q, Held::new(cuda, &gather(&data.q, &tq, hq * d), nq, hq, d)),
        (TensorId::K, Held::new(cuda, &gather(&data.k, &tk, hk * d), nk, hk, d)),
        (TensorId::V, Held::new(cuda, &gather(&data.v, &tk, hk * dv), nk, hk, dv)),
        (TensorId::DO, Held::new(cuda, &gather(&data.d_o, &tq, hq * dv), nq, hq, dv)),
    ];
    let sinks = data.sinks.as_ref().map(|s| (TensorId::Sinks, Held::new(cuda, s, 1, hq, 1)));
    let d_lse = data.d_lse.as_ref().map(|all| {
        let own: Vec<f32> = tq.iter().flat_map(|&t| &all[t * hq..(t + 1) * hq]).map(|&x| x as f32).collect();
        (TensorId::DLse, Held::new(cuda, &own, nq, hq, 1))
    });
    let (mut bindings, mut held) = (Bindings::default(), Vec::new());
    for (tensor, h) in results.into_iter().chain(inputs).chain(sinks).chain(d_lse) {
        // Gradients of sinks that a problem does not have are refused.
        if tensor != TensorId::Dsinks || data.sinks.is_some() {
            bindings.set(tensor, h.1);
        }
        held.push(h);
    }
    Tensors { held, bindings }
}

impl Tensors {
    /// Enqueues a run on the legacy default stream.
    pub fn enqueue(&self, rank: &mut Rank, plan: &Plan, direction: Direction) -> Result<()> {
        // SAFETY: tests wait for the stream before the tensors go; nothing else uses them.
        unsafe { rank.run(plan, direction, &self.bindings) }
    }

    pub fn results(&self) -> Part {
        self.held[..7].iter().map(Held::read::<u8>).collect()
    }
}

pub fn wait(cuda: &Cuda) -> Result<()> {
    // SAFETY: the default stream.
    unsafe { cuda.synchronize(std::ptr::null_mut()) }
}

/// Forward and backward, and once more: with the same bits.
pub fn forward_and_backward(end: Nccl, plan: &Plan) -> Result<Part> {
    let mut rank = Rank::on_device(end)?;
    let cuda = Arc::clone(rank.cuda().unwrap());
    let all = tensors(&cuda, plan, rank.rank(), &data(plan));
    let mut run = || -> Result<Part> {
        all.enqueue(&mut rank, plan, Direction::Forward)?;
        all.enqueue(&mut rank, plan, Direction::Backward)?;
        wait(&cuda)?;
        rank.poll()?;
        Ok(all.results())
    };
    let first = run()?;
    if plan.mesh().world() == 2 {
        assert!(first == run()?, "a second run has other bits");
    }
    Ok(first)
}

/// The results of all ranks, put together.
pub fn whole(plan: &Plan, parts: &[Part]) -> Results<T> {
    let p = plan.problem();
    let (hq, hk, d, dv) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim());
    let mut all = Results::<T>::unwritten(p);
    fn scatter<E: Element>(all: &mut [E], part: &[u8], tokens: &[usize], row: usize) {
        let part: Vec<E> = part.chunks_exact(size_of::<E>()).map(bytemuck::pod_read_unaligned).collect();
        common::scatter(all, &part, tokens, row);
    }
    for (rank, part) in parts.iter().enumerate() {
        let (tq, tk) = (plan.local_tokens(Side::Q, rank).indices(), plan.local_tokens(Side::K, rank).indices());
        scatter(&mut all.o, &part[0], &tq, hq * dv);
        scatter(&mut all.lse, &part[1], &tq, hq);
        scatter(&mut all.dq, &part[2], &tq, hq * d);
        scatter(&mut all.dk, &part[3], &tk, hk * d);
        scatter(&mut all.dv, &part[4], &tk, hk * dv);
        let largest = part[6].chunks_exact(4).map(bytemuck::pod_read_unaligned::<f32>);
        all.max_logit.iter_mut().zip(largest).for_each(|(all, own)| *all = all.max(own));
        if p.sinks() {
            all.dsinks = part[5].chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
        }
    }
    all
}
