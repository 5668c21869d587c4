// SPDX-License-Identifier: MIT OR Apache-2.0
//! NaN in every byte that must not be read.
//!
//! The workspace is all NaN, results are NaN before they are written, and tensors lie with gaps of NaN in buffers that
//! end in NaN. Every result must have the bits of a clean run, and every gap must be what it was.

use crate::common::{
    Data,
    own::{Own, Style, compact, gaps, heads_first},
};
use cpattn::{
    Backward, Batch, Dtype, Element, Forward, Layout, Mask, Mesh, Options, Plan, Problem, Rank, Side, View, ViewMut,
    plan::{Circulate, Gather, Wire},
    schedule::{Direction, Schedule},
    transport::local,
};
use half::{bf16, f16};
use std::time::Duration;

#[derive(Clone, Copy)]
#[repr(align(256))]
struct Unit(#[allow(dead_code, reason = "memory to lend")] [u8; Schedule::ALIGNMENT as usize]);

/// One run on threads; every rank's tensors.
fn play<T: Element>(plan: &Plan, data: &Data<T>, style: Style, poison: bool) -> Vec<Own<T>> {
    let one_rank = |end: local::Local| {
        let mut rank = Rank::new(end);
        let mut own = Own::new(plan, data, rank.rank(), style);
        let mut bytes = 0;
        for direction in [Direction::Forward, Direction::Backward] {
            bytes = rank.workspace().bytes(plan, direction).unwrap().max(bytes);
        }
        let mut memory = vec![Unit([0xff; Schedule::ALIGNMENT as usize]); bytes.div_ceil(Schedule::ALIGNMENT) as usize];
        let mut fill = |rank: &mut Rank| {
            memory.fill(Unit([0xff; Schedule::ALIGNMENT as usize]));
            // SAFETY: `memory` outlives the rank and is filled between runs only.
            unsafe { rank.workspace().lend(memory.as_mut_ptr().cast(), bytes as usize) }.unwrap();
        };
        if poison {
            fill(&mut rank);
        }
        own.forward(&mut rank, plan).unwrap();
        if poison {
            fill(&mut rank);
        }
        own.backward(&mut rank, plan).unwrap();
        drop(rank);
        own
    };
    local::run(plan.mesh().world(), Duration::from_secs(60), |end| Ok(one_rank(end))).unwrap()
}

fn every_way<T: Element>(p: &Problem, meshes: &[Mesh]) {
    let o = Options::new;
    let forms = [
        o().circulate(Circulate::Keys),
        o().circulate(Circulate::Queries),
        o().gather(true),
        o().gather(Gather::Together),
        o().passes(2),
        o().reproducible(true),
        o().wire(Wire::Bf16),
    ];
    let data = Data::<T>::random(p, 8);
    for &mesh in meshes {
        for form in forms {
            for layout in [Layout::Zigzag, Layout::Striped { stripe: 2 }, Layout::Balanced { chunks: 2 }] {
                let what = format!("{p:?}, {mesh}, {layout}, {form:?}");
                let plan =
                    |pack| Plan::builder(p).mesh(mesh).layout(layout).options(form.pack_inputs(pack)).build().unwrap();
                let clean = play(&plan(false), &data, compact, false);
                let check = |how: &str, got: Vec<Own<T>>| {
                    for (rank, (got, clean)) in got.iter().zip(&clean).enumerate() {
                        let names = ["o", "lse", "dq", "dk", "dv", "dsinks"];
                        for ((name, got), clean) in names.iter().zip(got.results()).zip(clean.results()) {
                            assert!(got == clean, "{what}: {how} changes {name} of rank {rank}");
                        }
                        assert!(got.gaps_are_whole(), "{what}: {how}, rank {rank} wrote into a gap");
                    }
                };
                check("poison in the workspace", play(&plan(false), &data, compact, true));
                check("packing inputs", play(&plan(true), &data, compact, true));
                check("gaps", play(&plan(true), &data, gaps, true));
                check("heads before tokens", play(&plan(true), &data, heads_first, true));
            }
        }
    }
}

fn mesh(u: usize, r: usize) -> Mesh {
    Mesh { replicas: 1, ring: r, ulysses: u }
}

#[test]
fn poison_changes_no_bit() {
    let batch = Batch::from_lengths(&[19, 0, 1, 30]).unwrap();
    let p = |dtype| Problem::new(batch.clone(), 6, 3, 12, dtype).with_value_dim(10);
    let meshes = [mesh(1, 1), mesh(1, 3), mesh(4, 1), mesh(2, 2)];
    every_way::<f32>(&p(Dtype::F32).with_sinks(true), &meshes);
    every_way::<bf16>(&p(Dtype::Bf16).with_mask(Mask::window(7, 3)).with_softcap(2.0), &meshes);
    every_way::<f16>(&p(Dtype::F16).with_mask(Mask::full()), &meshes[1..2]);
    every_way::<f64>(&p(Dtype::F64).with_alibi_slopes(&[0.3; 6]), &meshes[3..]);
}

/// Rows that attend to nothing, and ranks without a token.
#[test]
fn poison_changes_no_bit_where_there_is_nothing_to_do() {
    let p = Problem::new(Batch::cross(&[0, 9, 12, 12], &[0, 4, 4, 9], None).unwrap(), 4, 2, 8, Dtype::F32);
    every_way::<f32>(&p.clone().with_sinks_per_head(2), &[mesh(1, 4), mesh(2, 3)]);
    every_way::<f32>(&p.with_mask(Mask::full()), &[mesh(1, 4)]);
    let p = Problem::new(Batch::from_lengths(&[2, 1]).unwrap(), 4, 2, 8, Dtype::F32);
    every_way::<f32>(&p, &[mesh(1, 8), mesh(4, 2)]);
}

/// q, k and v fused in one buffer, and their gradients in another.
#[test]
fn fused_buffers_are_packed() {
    let p = Problem::new(Batch::from_lengths(&[14, 22]).unwrap(), 4, 2, 8, Dtype::F32);
    let data = Data::<f32>::random(&p, 2);
    for mesh in [mesh(1, 1), mesh(1, 3), mesh(2, 2), mesh(4, 1)] {
        for circulate in [Circulate::Keys, Circulate::Queries] {
            let options = Options::new().pack_inputs(true).circulate(circulate);
            let plan = Plan::builder(&p).mesh(mesh).layout(Layout::Zigzag).options(options).build().unwrap();
            let clean = play(&plan, &data, compact, false);
            let one_rank = |end: local::Local| {
                let mut rank = Rank::new(end);
                let r = rank.rank();
                let mut own = Own::new(&plan, &data, r, compact);
                let n = plan.local_tokens(Side::Q, r).len();
                let mut fused = vec![f32::NAN; n * 8 * 8];
                for (slot, first) in [(&own.q, 0), (&own.k, 4), (&own.v, 6)] {
                    let view = slot.view();
                    for t in 0..n {
                        for h in 0..view.heads() {
                            fused[(t * 8 + first + h) * 8..][..8].copy_from_slice(view.row(t, h));
                        }
                    }
                }
                let all = View::new(&fused, n, 8, 8).unwrap();
                let (q, k, v) = (all.heads_range(0..4), all.heads_range(4..6), all.heads_range(6..8));
                let forward = Forward::new(q, k, v, own.o.view_mut(), own.lse.view_mut());
                rank.forward(&plan, forward).unwrap();
                let mut gradients = vec![f32::NAN; fused.len()];
                let (dq, rest) = ViewMut::new(&mut gradients, n, 8, 8).unwrap().split_heads(4);
                let (dk, dv) = rest.split_heads(2);
                let backward = Backward::new(q, k, v, own.o.view(), own.lse.view(), own.d_o.view(), [dq, dk, dv]);
                rank.backward(&plan, backward).unwrap();
                let all = View::new(&gradients, n, 8, 8).unwrap();
                for (slot, first) in [(&mut own.dq, 0), (&mut own.dk, 4), (&mut own.dv, 6)] {
                    let mut view = slot.view_mut();
                    for t in 0..n {
                        for h in 0..view.heads() {
                            view.row_mut(t, h).copy_from_slice(all.row(t, first + h));
                        }
                    }
                }
                own.results()
            };
            let got: Vec<_> = local::run(mesh.world(), Duration::from_secs(60), |end| Ok(one_rank(end))).unwrap();
            for (rank, (got, clean)) in got.iter().zip(&clean).enumerate() {
                assert!(*got == clean.results(), "{mesh}, {circulate:?}, rank {rank}");
            }
        }
    }
}
