// SPDX-License-Identifier: MIT OR Apache-2.0
//! Partial results merged over the ring: against f64, a part alone, a NaN, refusals.

use crate::common::combined::{self, PADDING, Parts, Shares, parts};
use crate::context_parallel::mesh;
use crate::refused::refused;
use cpattn::{
    Batch, Dtype, Element, Layout, Mesh, Plan, Problem, Rank, View, ViewMut,
    runtime::CombineTensors,
    schedule::{Combine, CombineTo},
    transport::local,
};
use half::{bf16, f16};
use std::time::Duration;

/// One run on threads.
fn run<P: Element, T: Element<Acc = P::Acc>>(
    ranks: Vec<Rank>,
    plan: &Plan,
    to: CombineTo,
    parts: &Parts<P>,
) -> Shares<T> {
    let (p, tokens) = (plan.problem(), plan.problem().batch().tokens(cpattn::Side::Q));
    let dim = p.value_dim();
    std::thread::scope(|scope| {
        let run = |mut rank: Rank| {
            let (r, share) = (rank.rank(), plan.combined_share(rank.rank(), to));
            let heads = plan.heads_of(r).q.len();
            let (n, h) = (share.tokens.len(), share.heads.len());
            let mut o = vec![T::from_f64(f64::NAN); n * h * dim];
            let mut lse = vec![<T::Acc as Element>::from_f64(f64::NAN); n * h];
            // Twice: a run leaves nothing behind that changes the next.
            for _ in 0..2 {
                let tensors = CombineTensors::new(
                    View::strided(&parts.o[r], [tokens, heads, dim], [heads * dim + PADDING, dim]).unwrap(),
                    View::head_major(&parts.lse[r], tokens, heads).unwrap(),
                    ViewMut::new(&mut o, n, h, dim).unwrap(),
                    ViewMut::new(&mut lse, n, h, 1).unwrap(),
                )
                .sinks(parts.sinks.as_deref());
                rank.combine(plan, to, tensors).unwrap();
            }
            (o, lse)
        };
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn threads(plan: &Plan) -> Vec<Rank> {
    local::group(plan.mesh().world(), Duration::from_secs(60)).unwrap().into_iter().map(Rank::new).collect()
}

fn right<P: Element, T: Element<Acc = P::Acc>>(dtype: Dtype, epsilon: f64) {
    let meshes = [(1, 1), (1, 2), (1, 3), (2, 2), (3, 4), (1, 6)];
    let all = |plan: &Plan, to, parts: &Parts<P>| run::<P, T>(threads(plan), plan, to, parts);
    combined::right(dtype, [epsilon, 2e-7], &meshes, all);
}

#[test]
fn parts_of_f32() {
    right::<f32, f32>(Dtype::F32, 4e-7);
}

/// A combine is no attention: ranks with a kernel of the caller's do it as others do.
#[test]
fn ranks_with_a_kernel_of_ones_own() {
    let all = |plan: &Plan, to, parts: &Parts<f32>| {
        let ranks = crate::own_kernel::ranks(plan.mesh().world(), |_| crate::common::plain_kernel::PlainKernel::new());
        run::<f32, f32>(ranks, plan, to, parts)
    };
    combined::right(Dtype::F32, [4e-7, 2e-7], &[(1, 2), (2, 2)], all);
}

#[test]
fn parts_of_bf16_and_of_f32_for_bf16() {
    right::<bf16, bf16>(Dtype::Bf16, 5e-3);
    right::<f32, bf16>(Dtype::Bf16, 5e-3);
    right::<bf16, f32>(Dtype::F32, 4e-7);
}

#[test]
fn parts_of_f16_and_f64() {
    right::<f16, f16>(Dtype::F16, 6e-4);
    right::<f16, bf16>(Dtype::Bf16, 5e-3);
    right::<bf16, f16>(Dtype::F16, 6e-4);
    right::<f64, f64>(Dtype::F64, 1e-13);
}

/// A part that is alone in a row keeps its bits: its weight is 1.
#[test]
fn a_part_alone_keeps_its_bits() {
    let p = Problem::new(Batch::from_lengths(&[9]).unwrap(), 3, 3, 16, Dtype::F32);
    let plan = Plan::new(&p, mesh(1, 3), Layout::Contiguous).unwrap();
    let mut parts = parts::<f32>(&plan, 5);
    for (r, lse) in parts.lse.iter_mut().enumerate() {
        lse.iter_mut().enumerate().for_each(|(i, l)| *l = if i % 3 == r { 41.7 } else { f32::NEG_INFINITY });
    }
    for o in &mut parts.o {
        o.iter_mut().enumerate().for_each(|(i, x)| *x = i as f32 / 7.0);
    }
    let got = run::<f32, f32>(threads(&plan), &plan, CombineTo::All, &parts);
    for t in 0..9 {
        for h in 0..3 {
            let own = &parts.o[(h * 9 + t) % 3][t * (48 + PADDING) + h * 16..][..16];
            assert_eq!(&got[1].0[(t * 3 + h) * 16..][..16], own);
            assert_eq!(got[2].1[t * 3 + h], 41.7);
        }
    }
}

/// A NaN in a part is seen in its row, and in no other.
#[test]
fn a_nan_is_seen() {
    let p = Problem::new(Batch::from_lengths(&[4]).unwrap(), 2, 2, 16, Dtype::F32);
    let plan = Plan::new(&p, mesh(1, 2), Layout::Contiguous).unwrap();
    let mut parts = parts::<f32>(&plan, 6);
    parts.lse.iter_mut().for_each(|lse| lse.fill(1.0));
    parts.o.iter_mut().for_each(|o| o.fill(2.0));
    parts.lse[1][2] = f32::NAN;
    parts.o[0][3 * (32 + PADDING)] = f32::NAN;
    for (o, lse) in run::<f32, f32>(threads(&plan), &plan, CombineTo::All, &parts) {
        let bad: Vec<usize> = (0..o.len()).filter(|&i| o[i].is_nan()).collect();
        // Head 0 of token 2, and one element of head 0 of token 3.
        assert_eq!(bad, (64..80).chain([96]).collect::<Vec<_>>());
        assert!(lse.iter().enumerate().all(|(i, l)| l.is_nan() == (i == 4)));
    }
}

#[test]
fn refusals() {
    let p = Problem::new(Batch::from_lengths(&[4]).unwrap(), 2, 2, 8, Dtype::F32);
    let plan = Plan::new(&p, Mesh::single(), Layout::Contiguous).unwrap();
    let mut rank = threads(&plan).remove(0);
    let (x, l) = ([0.0f32; 64], [0.0f32; 8]);
    let mut run = |tokens: usize, lse: usize, out: usize, sinks: Option<&[f32]>| {
        let (mut o, mut out_lse) = ([0.0f32; 64], [0.0f32; 8]);
        let tensors = CombineTensors::new(
            View::new(&x[..tokens * 16], tokens, 2, 8).unwrap(),
            View::new(&l[..lse * 2], lse, 2, 1).unwrap(),
            ViewMut::new(&mut o[..out * 16], out, 2, 8).unwrap(),
            ViewMut::new(&mut out_lse, 4, 2, 1).unwrap(),
        )
        .sinks(sinks);
        rank.combine(&plan, CombineTo::All, tensors)
    };
    run(4, 4, 4, None).unwrap();
    refused(run(3, 4, 4, None), &["partial_o.tokens is 3, expected 4", "its part of all q tokens"]);
    refused(run(4, 3, 4, None), &["partial_lse.tokens is 3, expected 4", "its part of all q tokens"]);
    refused(run(4, 4, 3, None), &["o.tokens is 3, expected 4", "combined share"]);
    refused(run(4, 4, 4, Some(&[1.0; 2])), &["sinks", "the problem has no sinks"]);
    let combine = Combine { to: CombineTo::All, partial: Dtype::F64 };
    refused(plan.verify_purpose(combine).map(|_| ()), &["partial_o.dtype is f64", "f32, f16 or bf16"]);
}
