// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dropout on whole plans. The reference drops by the batch's tokens alone, so a result that agrees with it on a mesh
//! has dropped the same pairs as every other mesh. Also: bits that do not depend on the mesh, ranks whose seeds differ,
//! and what is refused.

use crate::common::{Data, error, one_rank, own, reference, rms, run};
use crate::context_parallel::{LAYOUTS, every_way, forms, mesh};
use cpattn::{
    Batch, Dtype, Element, Error, Layout, Mask, Options, Plan, Problem, Rank, call::DropoutMask, plan::AttentionKind,
    slices, transport::local,
};
use half::{bf16, f16};
use std::time::Duration;

/// GQA, sinks, softcap, a window, and documents of which q and k differ.
fn problem(dtype: Dtype) -> Problem {
    let batch = Batch::cross(&[0, 17, 17, 30], &[0, 21, 26, 40], Some(&[2, 0, -4])).unwrap();
    let p = Problem::new(batch, 6, 3, 8, dtype).with_value_dim(12).with_softcap(1.5).with_sinks(true);
    p.with_mask(Mask { left: Some(9), right: Some(0) }).with_dropout(0.3)
}

#[test]
fn every_form_in_every_layout() {
    let p = problem(Dtype::F32);
    every_way::<f32>("dropout", &p, &[mesh(1, 4), mesh(3, 2), mesh(4, 1)], &LAYOUTS, &forms());
}

#[test]
fn every_element_type() {
    fn of<T: Element>() {
        let layouts = [Layout::Zigzag, Layout::Striped { stripe: 3 }];
        every_way::<T>(T::DTYPE.name(), &problem(T::DTYPE), &[mesh(1, 3), mesh(2, 2)], &layouts, &forms());
    }
    of::<f16>();
    of::<bf16>();
    of::<f64>();
}

/// Slices across documents, whose positions are not those of the documents, and two levels of nodes.
#[test]
fn slices_and_nodes() {
    let batch = Batch::from_lengths(&[24, 20]).unwrap();
    let p = Problem::new(batch.with_slices(&slices::shared_prefix(20, &[9, 8, 7])).unwrap(), 4, 2, 8, Dtype::F32);
    let p = p.with_dropout(0.5);
    every_way::<f32>("slices", &p, &[mesh(1, 4), mesh(2, 2)], &[Layout::Zigzag], &forms());
    let nodes = [Options::new().ranks_per_node(2), Options::new().ranks_per_node(2).gather(true)];
    every_way::<f32>("nodes", &p, &[mesh(1, 4), mesh(2, 2)], &[Layout::Contiguous], &nodes);
}

/// The seed and the probability make a difference, and lse is that of all pairs.
#[test]
fn it_makes_a_difference() {
    let p = problem(Dtype::F32);
    let data = Data::<f32>::random(&p, 7);
    let with = reference(&p, &data);
    let without = reference(&p.clone().with_dropout(0.0), &data);
    let other = reference(&p, &Data { dropout_seed: Some(1), ..data.clone() });
    let more = reference(&p.clone().with_dropout(0.31), &data);
    for x in [&without, &other, &more] {
        for (a, b) in [(&with.o, &x.o), (&with.dq, &x.dq), (&with.dk, &x.dk), (&with.dv, &x.dv)] {
            let apart = rms(a.iter().zip(b).map(|(a, b)| a - b));
            assert!(apart > 0.02 * rms(a.iter().copied()), "{apart}");
        }
        assert!(x.lse == with.lse && x.max_logit == with.max_logit);
    }
    assert!(error(&one_rank(&p, &data).o, &with.o) < 1e-6 && rms(with.dsinks.iter().copied()) > 0.0);
}

/// A reproducible plan has the bits of one rank on every mesh.
#[test]
fn same_bits_on_every_mesh() {
    let p = problem(Dtype::Bf16);
    let data = Data::<bf16>::random(&p, 5);
    let of = |mesh, layout| {
        let plan =
            Plan::builder(&p).mesh(mesh).layout(layout).options(Options::new().reproducible(true)).build().unwrap();
        let r = run(&plan, &data).unwrap();
        (r.o, r.lse, r.dq, r.dk, r.dv, r.dsinks)
    };
    let one = of(mesh(1, 1), Layout::Contiguous);
    for layout in [Layout::Contiguous, Layout::Zigzag, Layout::Striped { stripe: 3 }] {
        for (ulysses, ring) in [(3, 1), (1, 3), (2, 2), (4, 2)] {
            assert!(of(mesh(ulysses, ring), layout) == one, "{layout} {ulysses} x {ring}");
        }
    }
}

/// Without dropout a plan is today's: its fingerprint, and the bits of its results.
#[test]
fn a_probability_of_0_is_no_dropout() {
    let p = problem(Dtype::F32).with_dropout(0.0);
    assert!(p.dropout().is_none() && problem(Dtype::F32).dropout() == Some(0.3));
    let plan = |p: &Problem| Plan::new(p, mesh(1, 2), Layout::Zigzag).unwrap();
    assert!(plan(&p) != plan(&problem(Dtype::F32)));
    let text = plan(&problem(Dtype::F32)).explain().to_string();
    assert!(text.contains("dropout 0.3"), "{text}");
}

/// Ranks of other seeds are found in the first run, where they may go on, and in later ones.
#[test]
fn seeds_that_differ() {
    let p = problem(Dtype::F32);
    let plan = Plan::new(&p, mesh(1, 2), Layout::Zigzag).unwrap();
    let data = Data::<f32>::random(&p, 5);
    for first in [true, false] {
        let found = local::run(2, Duration::from_secs(60), |end| {
            let mut rank = Rank::new(end);
            let mut own = own::Own::new(&plan, &data, rank.rank(), own::compact);
            if !first {
                own.forward(&mut rank, &plan)?;
            }
            let right = own.dropout_seed;
            own.dropout_seed = Some(20 + rank.rank() as u64);
            let refused = own.forward(&mut rank, &plan).unwrap_err();
            let after = if first {
                own.dropout_seed = right;
                own.forward(&mut rank, &plan)
            } else {
                Ok(())
            };
            Ok((refused, after))
        })
        .unwrap();
        let differ = found.iter().enumerate().filter(|(rank, (refused, after))| {
            let words = format!("dropout 0.3, dropout_seed {}", 20 + rank);
            after.as_ref().unwrap();
            matches!(refused, Error::Disagreement { .. }) && refused.to_string().contains(&words)
        });
        // In a later run, the one that is late may hear that its peer has left.
        assert!(differ.count() >= if first { 2 } else { 1 }, "first {first}: {found:?}");
    }
    // Later seeds may be any, if they are equal.
    local::run(2, Duration::from_secs(60), |end| {
        let mut rank = Rank::new(end);
        let mut own = own::Own::new(&plan, &data, rank.rank(), own::compact);
        for seed in [3, u64::MAX, 0] {
            own.dropout_seed = Some(seed);
            own.forward(&mut rank, &plan)?;
            own.backward(&mut rank, &plan)?;
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn refusals() {
    let text = |p: Problem| p.check().unwrap_err().to_string();
    for probability in [1.0, -0.5, f64::NAN] {
        let expected = format!("dropout is {probability:?}, expected a probability from 0 up to, but not including, 1");
        assert_eq!(text(problem(Dtype::F32).with_dropout(probability)), expected);
    }
    assert!(text(problem(Dtype::F32).with_kind(AttentionKind::Other)).starts_with("dropout with attention of kind"));
    let p = problem(Dtype::F32);
    let mut rank = Rank::new(local::group(1, Duration::from_secs(9)).unwrap().remove(0));
    for (p, seed, words) in [
        (p.clone(), None, "dropout_seed is not given, expected a number for this layer and step"),
        (
            Problem::new(p.batch().clone(), p.heads(), p.kv_heads(), p.head_dim(), p.dtype()),
            Some(7),
            "dropout_seed is 7, expected none, since the problem has no dropout",
        ),
    ] {
        let plan = Plan::new(&p, mesh(1, 1), Layout::Contiguous).unwrap();
        let mut own = own::Own::new(&plan, &Data::<f32>::random(&p, 5), 0, own::compact);
        let right = std::mem::replace(&mut own.dropout_seed, seed);
        let refused = own.forward(&mut rank, &plan).unwrap_err().to_string();
        assert!(refused.contains(words) && own.is_untouched(), "{refused}");
        own.dropout_seed = right;
        own.forward(&mut rank, &plan).unwrap();
        own.dropout_seed = seed;
        let refused = own.backward(&mut rank, &plan).unwrap_err().to_string();
        assert!(refused.contains(words), "{refused}");
    }
    // A probability of 0 drops nothing, and takes a seed or none: that of a layer may grow from 0.
    let plan = Plan::new(&p.with_dropout(0.0), mesh(1, 1), Layout::Contiguous).unwrap();
    let mut own = own::Own::new(&plan, &Data::<f32>::random(plan.problem(), 5), 0, own::compact);
    let [with, without] = [Some(7), None].map(|seed| {
        own.dropout_seed = seed;
        own.forward(&mut rank, &plan).unwrap();
        own.backward(&mut rank, &plan).unwrap();
        [own.o.bytes(), own.dq.bytes(), own.dk.bytes()]
    });
    assert!(with == without);
    assert!(DropoutMask::new(0.3, 0).unwrap().with_seed(9) == DropoutMask::new(0.3, 9).unwrap());
}
