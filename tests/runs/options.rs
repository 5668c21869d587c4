// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every option is honoured in every mode, or refused.
//!
//! All combinations of [`Options`] on Ulysses, ring and hybrid: what is accepted gives the reference's results (that
//! its schedules show each option is tested beside them). All score options: leaving one out would be noticed.

use crate::common::{Data, check, error, one_rank, reference, rms, run};
use cpattn::{
    Batch, Dtype, Error, Layout, Mask, Mesh, Options, Plan, Problem,
    plan::{Circulate, Gather, Wire},
};

fn all() -> Vec<Options> {
    let flags = [false, true];
    let mut list = Vec::new();
    for gather in [Gather::Auto, Gather::Steps, Gather::Others, Gather::Together] {
        for passes in [1, 3] {
            for circulate in [Circulate::Auto, Circulate::Keys, Circulate::Queries] {
                for wire in [Wire::Full, Wire::Bf16] {
                    for reproducible in flags {
                        for pack in flags {
                            let o = Options::new().gather(gather).passes(passes).circulate(circulate);
                            let o = o.wire(wire).reproducible(reproducible).pack_inputs(pack);
                            list.extend([o, o.circulate_forward(Circulate::Queries)]);
                        }
                    }
                }
            }
        }
    }
    list
}

fn mesh(ulysses: usize, ring: usize) -> Mesh {
    Mesh::explicit(ulysses * ring, ulysses, ring).unwrap()
}

#[test]
fn every_combination_of_options_is_honoured_or_refused() {
    let batch = Batch::from_lengths(&[21, 0, 12, 5]).unwrap();
    let p = Problem::new(batch, 6, 3, 8, Dtype::F32).with_value_dim(4).with_sinks(true).with_mask(Mask::window(9, 2));
    let data = Data::<f32>::random(&p, 7);
    let (want, one) = (reference(&p, &data), one_rank(&p, &data));
    let (mut honoured, mut refused) = (0, 0);
    for options in all() {
        let clash = options.reproducible
            && (options.wire == Wire::Bf16
                || options.passes > 1
                || options.circulate != Circulate::Auto
                || options.gather == Gather::Steps)
            || options.circulate == Circulate::Queries && options.passes > 1
            || options.circulate_forward == Circulate::Queries
                && (options.reproducible
                    || options.passes > 1
                    || matches!(options.gather, Gather::Others | Gather::Together));
        for (mesh, ranks_per_node) in [
            (mesh(3, 1), 0),
            (mesh(1, 3), 0),
            (mesh(2, 2), 0),
            (mesh(1, 4), 2),
            (mesh(2, 4), 4),
            (mesh(2, 2), 2),
            (mesh(4, 2), 2),
            (mesh(4, 2), 4),
        ] {
            let options = options.ranks_per_node(ranks_per_node);
            let what = format!("{mesh}, {options:?}");
            let plan = match Plan::with_options(&p, mesh, Layout::Zigzag, options) {
                Ok(plan) => plan,
                Err(error) => {
                    assert!(clash && matches!(error, Error::Unsupported { .. }), "{what}: {error}");
                    assert!(error.to_string().contains("leave"), "{error} shows no way out");
                    refused += 1;
                    continue;
                }
            };
            assert!(!clash, "{what} is accepted");
            assert_eq!(plan.options(), options);
            let mut got = run(&plan, &data).unwrap_or_else(|e| panic!("{what}: {e}"));
            if options.wire == Wire::Bf16 {
                // A wire of bf16 has a bound of its own; o and lse have no part in it.
                let part = |got: &[f32], want: &[f64]| error(got, want) / rms(want.iter().copied());
                let errors = [part(&got.dq, &want.dq), part(&got.dk, &want.dk), part(&got.dv, &want.dv)];
                assert!(errors.iter().all(|&e| e < 3e-3), "{what}: {errors:?}");
                (got.dq, got.dk, got.dv) = (one.dq.clone(), one.dk.clone(), one.dv.clone());
            }
            check(&what, &got, &one, &want);
            honoured += 1;
        }
    }
    assert_eq!((honoured, refused), (880, 2192), "honoured, refused");
}

/// The results of every mode are those with the option, and clearly not those without it.
#[test]
fn every_score_option_makes_a_difference_in_every_mode() {
    let batch = Batch::cross(&[0, 17, 17, 30], &[0, 21, 26, 40], None).unwrap();
    let base = Problem::new(batch.clone(), 6, 3, 8, Dtype::F32);
    let starts = Batch::cross(&[0, 17, 17, 30], &[0, 21, 26, 40], Some(&[2, 0, 0])).unwrap();
    let slopes = [0.5, 0.25, 0.125, 0.0625, 0.03, 0.7];
    let problems = [
        ("mask", base.clone().with_mask(Mask::full())),
        ("window, left", base.clone().with_mask(Mask::sliding(5))),
        ("window, right", base.clone().with_mask(Mask { left: None, right: Some(3) })),
        ("scale", base.clone().with_scale(0.8)),
        ("softcap", base.clone().with_softcap(0.7)),
        ("alibi_slopes", base.clone().with_alibi_slopes(&slopes)),
        ("sinks", base.clone().with_sinks(true)),
        ("q_start", Problem::new(starts, 6, 3, 8, Dtype::F32)),
    ];
    let o = Options::new;
    let forms = [
        o().circulate(Circulate::Keys),
        o().circulate(Circulate::Queries),
        o().circulate_forward(Circulate::Queries),
        o().gather(true),
        o().gather(Gather::Together),
        o().passes(3),
        o().reproducible(true),
    ];
    let plain = Data::<f32>::random(&base, 3);
    let without = reference(&base, &plain);
    for (name, p) in &problems {
        let data = Data::<f32>::random(p, 3);
        let (want, one) = (reference(p, &data), one_rank(p, &data));
        let apart = rms(want.o.iter().zip(&without.o).map(|(a, b)| a - b)) / rms(want.o.iter().copied());
        assert!(apart > 0.01, "{name} makes no difference to speak of: {apart}");
        for mesh in [mesh(3, 1), mesh(1, 3), mesh(2, 2), mesh(4, 2)] {
            for form in forms {
                let what = format!("{name}, {mesh}, {form:?}");
                let plan = Plan::with_options(p, mesh, Layout::Zigzag, form).unwrap();
                check(&what, &run(&plan, &data).unwrap_or_else(|e| panic!("{what}: {e}")), &one, &want);
            }
        }
    }
}
