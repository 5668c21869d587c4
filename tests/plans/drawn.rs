// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random problems, meshes, layouts and options: a plan is refused with a reason, or its schedules are correct.

use crate::seeds::each_seed;
use cpattn::{
    Batch, Dtype, Error, Layout, Mask, Mesh, Options, Plan, Problem, Side,
    plan::{Circulate, Gather, Wire},
    schedule::{AllToAll, AllToAllDirection},
};
use fastrand::Rng;

fn layout(draw: &mut Rng) -> Layout {
    match draw.u32(..5) {
        0 => Layout::Contiguous,
        1 => Layout::Zigzag,
        2 => Layout::ZigzagPack,
        3 => Layout::Striped { stripe: draw.u32(..6) },
        _ => Layout::Balanced { chunks: draw.u32(..5) },
    }
}

fn mask(draw: &mut Rng) -> Mask {
    let side = |draw: &mut Rng| draw.bool().then(|| draw.u32(..40));
    Mask { left: side(draw), right: side(draw) }
}

fn options(draw: &mut Rng) -> Options {
    let gathers = [Gather::Auto, Gather::Steps, Gather::Others, Gather::Together];
    let circulates = [Circulate::Auto, Circulate::Keys, Circulate::Queries];
    // Mostly values that are valid for any problem.
    let passes = match draw.u32(..11) {
        0..8 => 1,
        8..10 => draw.usize(2..4),
        _ => 0,
    };
    Options::new()
        .gather(gathers[draw.usize(..4)])
        .passes(passes)
        .circulate(circulates[draw.usize(..3)])
        .circulate_forward(if draw.u32(..5) == 0 { Circulate::Queries } else { Circulate::Auto })
        .wire(if draw.bool() { Wire::Bf16 } else { Wire::Full })
        .reproducible(draw.u32(..4) == 0)
        .pack_inputs(draw.bool())
        .ranks_per_node(if draw.u32(..3) == 0 { draw.usize(1..9) } else { 0 })
}

fn batch(draw: &mut Rng) -> Batch {
    let documents = draw.usize(..6);
    let cu = |draw: &mut Rng| {
        let mut total = 0;
        let lengths = (0..documents).map(|_| {
            total += draw.i32(0..40);
            total
        });
        [0].into_iter().chain(lengths).collect::<Vec<i32>>()
    };
    let (q, k) = (cu(draw), cu(draw));
    let starts: Vec<i64> = (0..documents).map(|_| draw.i64(-20..60)).collect();
    match draw.u32(..3) {
        0 => Batch::new(&q).unwrap(),
        1 => Batch::cross(&q, &k, None).unwrap(),
        _ => Batch::cross(&q, &k, Some(&starts)).unwrap(),
    }
}

/// A whole random problem is refused with an error that gives the reason, or each of its schedules is correct.
#[test]
fn problems_are_refused_or_right() {
    let (mut drawn, mut accepted) = (0, 0);
    each_seed(600, |draw| {
        let (batch, layout, mask, options) = (batch(draw), layout(draw), mask(draw), options(draw));
        let (kv_heads, group) = (draw.usize(1..5), draw.usize(1..5));
        let (ulysses, ring, too_many) = (draw.usize(1..7), draw.usize(1..7), draw.u32(..10));
        let dtype = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F64][draw.usize(..4)];
        let problem = Problem::new(batch, kv_heads * group, kv_heads, 8, dtype)
            .with_value_dim(4)
            .with_mask(mask)
            .with_sinks(draw.bool());
        let ulysses = if too_many == 0 { ulysses } else { ulysses.min(kv_heads * group) };
        let mesh = Mesh { replicas: 1, ring, ulysses };
        drawn += 1;
        match Plan::builder(&problem).mesh(mesh).layout(layout).options(options).build() {
            Ok(plan) => {
                accepted += 1;
                verify(&plan);
            }
            Err(Error::Invalid { .. } | Error::Unsupported { .. }) => {}
            Err(e) => panic!("{e}"),
        }
        // Without this, refusing nearly everything would pass.
        assert!(drawn < 200 || accepted >= drawn / 4, "{accepted} of {drawn} problems were accepted");
    });
}

/// Each schedule of a plan is correct, and computes and moves what the problem needs.
fn verify(plan: &Plan) {
    let (problem, mesh) = (plan.problem(), plan.mesh());
    let (forward, backward) = plan.verify().unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(forward.pairs, problem.area() * problem.heads() as u128);
    assert_eq!(backward.pairs, forward.pairs);
    for direction in [AllToAllDirection::ToHeads, AllToAllDirection::ToTokens] {
        for side in [Side::Q, Side::K] {
            let all_to_all = AllToAll { direction, side, dim: 3, dtype: problem.dtype() };
            let report = plan.verify_purpose(all_to_all).unwrap_or_else(|e| panic!("{e}"));
            let moved = |rank: usize| {
                let share = plan.heads_of(rank);
                let heads = if side == Side::Q { share.q.len() } else { share.kv.len() };
                let tokens = plan.tokens_between_all_to_alls(side, rank) - plan.local_tokens(side, rank).len();
                heads * tokens * 3 * problem.dtype().size()
            };
            let expected: usize = (0..mesh.group()).map(moved).sum();
            assert_eq!(report.bytes("exchange"), expected as u64);
        }
    }
}
