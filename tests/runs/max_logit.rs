// SPDX-License-Identifier: MIT OR Apache-2.0
//! The largest score of each head. All other tests here compare it, over the ranks, with the reference; this is what
//! they do not see: the same bits on every mesh, heads without a pair, ranks that do not ask, and refusals.

use crate::common::{Data, one_rank, own, run};
use crate::context_parallel::mesh;
use cpattn::{Batch, Dtype, Element, Layout, Mask, Options, Plan, Problem, Rank, Slice, transport::local};
use half::{bf16, f16};
use std::time::Duration;

fn problem(dtype: Dtype) -> Problem {
    let batch = Batch::from_lengths(&[40, 0, 23]).unwrap();
    Problem::new(batch, 6, 3, 16, dtype).with_mask(Mask::sliding(20)).with_softcap(4.0).with_sinks(true)
}

/// A sink is no score, however large, and the softmax's reference, which may stay up to eight binary orders below the
/// largest score, is not taken for it: keys come in the order of their scores.
#[test]
fn rising_scores_and_large_sinks() {
    fn of<T: Element>(dtype: Dtype) {
        let p = Problem::new(Batch::from_lengths(&[300]).unwrap(), 2, 1, 8, dtype).with_scale(1.0).with_sinks(true);
        let mut data = Data::<T>::random(&p, 2);
        for (t, row) in data.k.chunks_mut(8).enumerate() {
            row.fill(T::from_f64(0.0));
            row[0] = T::from_f64(t as f64 / 64.0);
        }
        for (i, row) in data.q.chunks_mut(8).enumerate() {
            row[0] = T::from_f64(if i % 2 == 0 { 1.0 } else { -2.0 });
        }
        data.sinks = Some(vec![1e4, -5.0]);
        let ends = [299.0 / 64.0, 0.0].map(|x| T::from_f64(x).to_f64() as f32);
        for (ulysses, ring) in [(1, 1), (2, 1), (1, 3), (2, 2)] {
            let plan = Plan::new(&p, mesh(ulysses, ring), Layout::Contiguous).unwrap();
            assert_eq!(run(&plan, &data).unwrap().max_logit, ends, "{dtype} {ulysses} x {ring}");
        }
    }
    of::<f32>(Dtype::F32);
    of::<bf16>(Dtype::Bf16);
    of::<f16>(Dtype::F16);
    of::<f64>(Dtype::F64);
}

/// A reproducible plan has the bits of one rank on every mesh.
#[test]
fn same_bits_on_every_mesh() {
    for (seed, dtype) in [(3, Dtype::F32), (4, Dtype::F32)] {
        let p = problem(dtype);
        let data = Data::<f32>::random(&p, seed);
        let of = |mesh, layout| {
            let plan =
                Plan::builder(&p).mesh(mesh).layout(layout).options(Options::new().reproducible(true)).build().unwrap();
            run(&plan, &data).unwrap().max_logit
        };
        let one = of(mesh(1, 1), Layout::Contiguous);
        for layout in [Layout::Contiguous, Layout::Zigzag, Layout::Striped { stripe: 3 }] {
            for (ulysses, ring) in [(3, 1), (1, 3), (2, 2), (4, 2)] {
                assert_eq!(of(mesh(ulysses, ring), layout), one, "{layout} {ulysses} x {ring}");
            }
        }
    }
}

/// −∞ where no pair is allowed, though the tensor held something else; a rank that does not ask changes nothing for the
/// others, and a Ulysses rank has its own heads alone.
#[test]
fn no_pairs_and_ranks_that_do_not_ask() {
    let none = Batch::from_lengths(&[9]).unwrap().with_slices(&[Slice::new(0..4, 0..0)]).unwrap();
    let p = Problem::new(none, 4, 2, 8, Dtype::F32);
    assert_eq!(one_rank(&p, &Data::<f32>::random(&p, 3)).max_logit, [f32::NEG_INFINITY; 4]);
    let p = problem(Dtype::F32);
    let data = Data::<f32>::random(&p, 5);
    let whole = one_rank(&p, &data).max_logit;
    let plan = Plan::new(&p, mesh(2, 1), Layout::Contiguous).unwrap();
    for all in [true, false] {
        let found = local::run(2, Duration::from_secs(60), |end| {
            let mut rank = Rank::new(end);
            let mut own = own::Own::new(&plan, &data, rank.rank(), own::compact);
            own.max_logit = (all || rank.rank() == 1).then(|| vec![f32::NAN; 6]);
            own.forward(&mut rank, &plan)?;
            Ok(own.max_logit)
        })
        .unwrap();
        let heads = |r: usize| plan.heads_of(r).q.start as usize..plan.heads_of(r).q.end as usize;
        for (r, found) in found.iter().enumerate() {
            let Some(found) = found else {
                assert!(!all && r == 0);
                continue;
            };
            for (h, &x) in found.iter().enumerate() {
                let near = (x - whole[h]).abs() <= 1e-6 * whole[h].abs();
                assert!(if heads(r).contains(&h) { near } else { x == f32::NEG_INFINITY }, "rank {r} head {h}: {x}");
            }
        }
    }
}

#[test]
fn a_wrong_shape_is_refused() {
    let p = problem(Dtype::F32);
    let plan = Plan::new(&p, mesh(1, 1), Layout::Contiguous).unwrap();
    let mut rank = Rank::new(local::group(1, Duration::from_secs(9)).unwrap().remove(0));
    let mut own = own::Own::new(&plan, &Data::<f32>::random(&p, 5), 0, own::compact);
    own.max_logit = Some(vec![0.0; 5]);
    let refused = own.forward(&mut rank, &plan).unwrap_err().to_string();
    assert!(refused.contains("max_logit.heads is 5, expected 6"), "{refused}");
    assert!(own.is_untouched() && own.max_logit == Some(vec![0.0; 5]));
}
