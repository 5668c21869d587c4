// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every option is honoured in every mode, or refused.
//!
//! All combinations of [`Options`] on Ulysses, ring and hybrid: what is accepted gives the reference's results (that
//! its schedules show each option is tested beside them). All score options: leaving one out would be noticed.

use crate::common::{Data, check, error, one_rank, reference, rms, run};
use cpattn::{
    Batch, Dtype, Element, Error, Layout, Mask, Mesh, Options, Plan, Problem,
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
    Mesh { replicas: 1, ring, ulysses }
}

#[test]
fn every_combination_of_options_is_honoured_or_refused() {
    let batch = Batch::from_lengths(&[21, 0, 12, 5]).unwrap();
    let p =
        Problem::new(batch, 6, 3, 8, Dtype::F32).with_value_dim(4).with_sinks_per_head(2).with_mask(Mask::window(9, 2));
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
            let plan = match Plan::builder(&p).mesh(mesh).layout(Layout::Zigzag).options(options).build() {
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
                let plan = Plan::builder(p).mesh(mesh).layout(Layout::Zigzag).options(form).build().unwrap();
                check(&what, &run(&plan, &data).unwrap_or_else(|e| panic!("{what}: {e}")), &one, &want);
            }
        }
    }
}

/// The documented results of sinks that are no numbers: +∞ takes all weight of its head, and NaN makes its head NaN. In
/// every form, and other heads have the bits that they have beside a finite sink.
#[test]
fn sinks_that_are_not_finite() {
    fn of<T: Element>(mesh: Mesh, options: Options) {
        // Each kv head has two q heads.
        let (heads, kv, dim) = (6, 3, 8);
        let batch = Batch::from_lengths(&[13, 6]).unwrap();
        let p = Problem::new(batch, heads, kv, dim, T::DTYPE).with_mask(Mask::causal()).with_sinks(true);
        let plan = Plan::builder(&p).mesh(mesh).layout(Layout::Zigzag).options(options).build().unwrap();
        let (mut data, what) = (Data::<T>::random(&p, 7), format!("{} {mesh} {options:?}", T::DTYPE));
        let head = |x: &[T], heads: usize, h: usize| -> Vec<f64> {
            x.chunks(heads * dim).flat_map(|row| &row[h * dim..(h + 1) * dim]).map(|x| x.to_f64()).collect()
        };
        let one =
            |x: &[T::Acc], h: usize| -> Vec<f64> { x.iter().skip(h).step_by(heads).map(|x| x.to_f64()).collect() };
        // Without gradients of its head, so that dk and dv are those of the other head alone.
        data.d_o.chunks_mut(heads * dim).for_each(|row| row[..dim].fill(T::from_f64(0.0)));
        let d_lse = data.d_lse.clone();
        data.d_lse.as_mut().unwrap().iter_mut().step_by(heads).for_each(|x| *x = 0.0);
        data.sinks.as_mut().unwrap()[0] = 0.5;
        let finite = run(&plan, &data).unwrap();
        data.d_o = Data::<T>::random(&p, 8)
            .d_o
            .into_iter()
            .zip(&data.d_o)
            .enumerate()
            .map(|(i, (new, &old))| if i % (heads * dim) < dim { new } else { old })
            .collect();
        data.d_lse = d_lse;
        data.sinks.as_mut().unwrap()[0] = f32::INFINITY;
        let got = run(&plan, &data).unwrap();
        assert!(head(&got.o, heads, 0).iter().all(|&x| x == 0.0), "{what}: o");
        assert!(one(&got.lse, 0).iter().all(|&x| x == f64::INFINITY), "{what}: lse");
        assert!(head(&got.dq, heads, 0).iter().all(|&x| x == 0.0), "{what}: dq");
        assert!(got.dsinks[0].to_f64().is_nan(), "{what}: dsinks");
        for h in 1..heads {
            assert_eq!(head(&got.o, heads, h), head(&finite.o, heads, h), "{what}: o of head {h}");
            assert_eq!(one(&got.lse, h), one(&finite.lse, h), "{what}: lse of head {h}");
            assert_eq!(head(&got.dq, heads, h), head(&finite.dq, heads, h), "{what}: dq of head {h}");
            assert_eq!(got.dsinks[h], finite.dsinks[h], "{what}: dsinks of head {h}");
        }
        for h in 0..kv {
            assert_eq!(head(&got.dk, kv, h), head(&finite.dk, kv, h), "{what}: dk of head {h}");
            assert_eq!(head(&got.dv, kv, h), head(&finite.dv, kv, h), "{what}: dv of head {h}");
        }
        data.sinks.as_mut().unwrap()[0] = f32::NAN;
        let got = run(&plan, &data).unwrap();
        let nan = |name: &str, all: Vec<f64>| assert!(all.iter().all(|x| x.is_nan()), "{what}: {name} of a NaN");
        nan("o", head(&got.o, heads, 0));
        nan("lse", one(&got.lse, 0));
        nan("dq", head(&got.dq, heads, 0));
        nan("dk", head(&got.dk, kv, 0));
        nan("dv", head(&got.dv, kv, 0));
        nan("dsinks", vec![got.dsinks[0].to_f64()]);
        for h in 1..heads {
            assert_eq!(head(&got.o, heads, h), head(&finite.o, heads, h), "{what}: o of head {h} beside NaN");
        }
    }
    for (mesh, options) in [
        (mesh(1, 1), Options::new()),
        (mesh(3, 1), Options::new()),
        (mesh(1, 3), Options::new()),
        (mesh(2, 2), Options::new().circulate_forward(Circulate::Queries)),
        (mesh(1, 3), Options::new().circulate(Circulate::Queries)),
        (mesh(1, 4), Options::new().ranks_per_node(2)),
        (mesh(2, 2), Options::new().reproducible(true)),
    ] {
        of::<f32>(mesh, options);
        of::<half::bf16>(mesh, options);
        of::<f64>(mesh, options);
    }
}
