// SPDX-License-Identifier: MIT OR Apache-2.0
//! Executes schedules without this crate's runtime, kernels and transports.
//!
//! A plan's schedules are data: for each rank a list of operations, with the views of buffers that each reads and
//! writes. `rank.rs` executes such a list with plain loops in f64 and a channel for each pair of ranks; `attention.rs`
//! has the loops of attention. A framework that brings its own streams, kernels and communicator does the same with
//! those. Here ranks are threads, and the results are compared with attention over the whole batch.
//!
//!     cargo run --release --example execute_schedule

mod attention;
mod rank;
#[cfg(test)]
mod tests;

use cpattn::{
    Batch, Dtype, Layout, Mesh, Plan, Problem, Result, Side,
    kernel::reference::{Attention, Gradient, Output},
    schedule::{Direction, Schedule, TensorId},
};
use rank::{ExecutedRank, connect};

/// The inputs of the whole batch, tokens in its order: q, k, v, do and the sinks.
struct Inputs {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    d_o: Vec<f64>,
    sinks: Vec<f64>,
}

impl Inputs {
    /// Numbers that look random.
    fn new(p: &Problem) -> Self {
        let mut state = 1u64;
        let mut fill = |n: usize| -> Vec<f64> {
            let number = |_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f64 / f64::from(1 << 23) - 1.0
            };
            (0..n).map(number).collect()
        };
        let [q, k] = [Side::Q, Side::K].map(|side| p.batch().tokens(side));
        Self {
            q: fill(q * p.heads() * p.head_dim()),
            k: fill(k * p.kv_heads() * p.head_dim()),
            v: fill(k * p.kv_heads() * p.value_dim()),
            d_o: fill(q * p.heads() * p.value_dim()),
            sinks: fill(if p.sinks() { p.heads() } else { 0 }),
        }
    }
}

/// Executes forward and backward of all ranks; returns the whole batch's o, lse, dq, dk, dv and dsinks.
fn execute(plan: &Plan, inputs: &Inputs) -> Result<[Vec<f64>; 6]> {
    let world = plan.mesh().world();
    let ranks: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = connect(world)
            .into_iter()
            .enumerate()
            .map(|(rank, links)| {
                scope.spawn(move || -> Result<_> {
                    let mut r = ExecutedRank::new(plan, rank, links);
                    for (tensor, whole) in [
                        (TensorId::Q, &inputs.q),
                        (TensorId::K, &inputs.k),
                        (TensorId::V, &inputs.v),
                        (TensorId::DO, &inputs.d_o),
                    ] {
                        r.set(tensor, whole);
                    }
                    r.tensors.insert(TensorId::Sinks, inputs.sinks.clone());
                    for direction in [Direction::Forward, Direction::Backward] {
                        r.run(&Schedule::new(plan, rank, direction)?);
                    }
                    Ok(r)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank that does not panic")).collect()
    });
    let ranks = ranks.into_iter().collect::<Result<Vec<_>>>()?;
    let outputs = [TensorId::O, TensorId::Lse, TensorId::Dq, TensorId::Dk, TensorId::Dv];
    let [o, lse, dq, dk, dv] = outputs.map(|tensor| rank::gather(plan, tensor, &ranks));
    Ok([o, lse, dq, dk, dv, ranks[0].tensors.get(&TensorId::Dsinks).cloned().unwrap_or_default()])
}

/// The same from attention over the whole batch.
fn whole(p: &Problem, inputs: &Inputs) -> [Vec<f64>; 6] {
    let starts: Vec<i64> = (0..p.batch().documents()).map(|d| p.batch().start(Side::Q, d)).collect();
    let slopes: Option<Vec<f64>> = p.alibi_slopes().map(|slopes| slopes.iter().map(|&x| x.into()).collect());
    let attention = Attention {
        q: &inputs.q,
        k: &inputs.k,
        v: &inputs.v,
        cu_seqlens_q: p.batch().cu_seqlens(Side::Q),
        cu_seqlens_k: p.batch().cu_seqlens(Side::K),
        q_start: &starts,
        heads: p.heads(),
        kv_heads: p.kv_heads(),
        head_dim: p.head_dim(),
        value_dim: p.value_dim(),
        score: p.score(),
        alibi_slopes: slopes.as_deref(),
        sinks: p.sinks().then_some(&inputs.sinks[..]),
        dropout: None,
    };
    let out = attention.forward();
    let Gradient { dq, dk, dv, dsinks } = attention.backward(&inputs.d_o, &out);
    let Output { o, lse } = out;
    [o, lse, dq, dk, dv, dsinks]
}

/// The largest difference of two lists; infinite if one has a NaN.
fn difference(a: &[f64], b: &[f64]) -> f64 {
    let of = |(x, y): (&f64, &f64)| if x == y { 0.0 } else { (x - y).abs() };
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(of).fold(0.0, |most, d| if d.is_nan() { f64::INFINITY } else { d.max(most) })
}

fn main() -> Result<()> {
    let problem = Problem::new(Batch::from_lengths(&[40, 7, 90])?, 6, 2, 16, Dtype::F64).with_sinks(true);
    let inputs = Inputs::new(&problem);
    let plan = Plan::new(&problem, Mesh { replicas: 1, ring: 3, ulysses: 2 }, Layout::Zigzag)?;
    let schedule = Schedule::new(&plan, 0, Direction::Backward)?;
    println!("the backward of rank 0 of {}:", plan.mesh());
    for (i, op) in schedule.operations().enumerate() {
        println!("  {i:2} {:15} {:12} step {} on lane {:?}", op.name, op.phase, op.step, op.lane);
    }
    let (found, expected) = (execute(&plan, &inputs)?, whole(&problem, &inputs));
    for ((name, a), b) in ["o", "lse", "dq", "dk", "dv", "dsinks"].iter().zip(&found).zip(&expected) {
        println!("{name:7} largest difference {:.1e}", difference(a, b));
        assert!(difference(a, b) < 1e-11);
    }
    Ok(())
}
