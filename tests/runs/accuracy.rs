// SPDX-License-Identifier: MIT OR Apache-2.0
//! Errors of whole plans where rounding could add up: large scores, short ranges of long documents, a wire of bf16.

use crate::common::{self, Data, check, one_rank, reference, run};
use crate::context_parallel::mesh;
use cpattn::{
    Batch, Dtype, Layout, Mask, Options, Plan, Problem,
    plan::{Circulate, Wire},
};

/// A constant in every score, of one sign or the other in each row, so that |lse| reaches `shift` while many keys share
/// the weight.
fn shifted(p: &Problem, shift: f32) -> Data<f32> {
    let mut data = Data::<f32>::random(p, 13);
    let (d, heads) = (p.head_dim(), p.heads());
    for (i, row) in data.q.chunks_mut(d).enumerate() {
        row[d - 1] = if (i / heads + i) % 2 == 0 { shift } else { -shift } / 8.0;
    }
    data.k.chunks_mut(d).for_each(|row| row[d - 1] = 8.0);
    data
}

/// What ranks merge may not err more than one rank does, however large scores are.
#[test]
fn large_scores_keep_their_digits() {
    let batch = Batch::from_lengths(&[120, 41]).unwrap();
    for mask in [Mask::causal(), Mask::full()] {
        for sinks in [false, true] {
            let p = Problem::new(batch.clone(), 8, 8, 16, Dtype::F32).with_scale(1.0).with_mask(mask).with_sinks(sinks);
            for shift in [72.0, 1000.0] {
                let data = shifted(&p, shift);
                let (want, one) = (reference(&p, &data), one_rank(&p, &data));
                assert!(want.lse.iter().any(|l| l.abs() >= f64::from(shift)));
                for mesh in [mesh(1, 2), mesh(1, 5), mesh(1, 8), mesh(8, 1), mesh(2, 4)] {
                    for layout in [Layout::Contiguous, Layout::Zigzag, Layout::ZigzagPack] {
                        let plan = Plan::new(&p, mesh, layout).unwrap();
                        let what = format!("|lse| up to {shift}, {mask:?}, sinks {sinks}, {mesh}, {layout}");
                        check(&what, &run(&plan, &data).unwrap(), &one, &want);
                    }
                }
            }
        }
    }
}

/// Ranges of a ring are short where documents are not. Where an instruction set sums short ones in another way (AMX),
/// all parts of a document are summed in the way of the whole: the rule has no floor here.
#[test]
fn the_error_of_f32_does_not_depend_on_the_mesh() {
    for (lengths, heads, kv_heads) in [(&[800][..], 4, 4), (&[400, 230, 10], 8, 2), (&[300, 20], 4, 4)] {
        let batch = Batch::from_lengths(lengths).unwrap();
        let p = Problem::new(batch, heads, kv_heads, 64, Dtype::F32).with_mask(Mask::causal());
        let data = Data::<f32>::random(&p, 21);
        let (want, one) = (reference(&p, &data), one_rank(&p, &data));
        for mesh in [mesh(1, 2), mesh(1, 5), mesh(1, 8), mesh(2, 4), mesh(4, 1)] {
            for layout in [Layout::Contiguous, Layout::Zigzag, Layout::ZigzagPack] {
                let got = run(&Plan::new(&p, mesh, layout).unwrap(), &data).unwrap();
                let rule = |name: &str, got: &[f32], one: &[f32], want: &[f64]| {
                    let (e, e1) = (common::error(got, want), common::error(one, want));
                    assert!(
                        e <= 1.1 * e1,
                        "{name}, {lengths:?}, {mesh}, {layout}: RMS error {e:e}, of one rank {e1:e}"
                    );
                };
                rule("o", &got.o, &one.o, &want.o);
                rule("lse", &got.lse, &one.lse, &want.lse);
                rule("dq", &got.dq, &one.dq, &want.dq);
                rule("dk", &got.dk, &one.dk, &want.dk);
                rule("dv", &got.dv, &one.dv, &want.dv);
            }
        }
    }
}

/// Partials rounded to bf16 once each: relative RMS error of dk and dv at most 3e-3 for f32 inputs on a ring of 8
/// (a partial's rounding alone is 1.65e-3 relative RMS).
#[test]
fn a_bf16_wire_has_its_own_bound() {
    let p = Problem::new(Batch::from_lengths(&[200]).unwrap(), 4, 2, 32, Dtype::F32).with_mask(Mask::full());
    let data = Data::<f32>::random(&p, 3);
    let want = reference(&p, &data);
    for (mesh, circulate) in
        [(mesh(1, 8), Circulate::Keys), (mesh(1, 8), Circulate::Queries), (mesh(4, 2), Circulate::Auto)]
    {
        let options = Options::new().wire(Wire::Bf16).circulate(circulate);
        let got =
            run(&Plan::builder(&p).mesh(mesh).layout(Layout::Zigzag).options(options).build().unwrap(), &data).unwrap();
        let relative = |got: &[f32], want: &[f64]| common::error(got, want) / common::rms(want.iter().copied());
        let errors = [relative(&got.dq, &want.dq), relative(&got.dk, &want.dk), relative(&got.dv, &want.dv)];
        println!("{mesh}, {circulate:?}: relative RMS error of dq, dk, dv {errors:?}");
        assert!(errors.iter().all(|&e| e < 3e-3), "{mesh} {errors:?}");
        assert!(errors.iter().any(|&e| e > 1e-4), "nothing was rounded: {mesh} {errors:?}");
        assert!(relative(&got.o, &want.o) < 1e-6);
    }
}
