// SPDX-License-Identifier: MIT OR Apache-2.0
//! The gradient of lse beside that of o. All other tests here draw one for every second seed; this is what they do not
//! see: that it makes a difference in every form, that ranks may differ in giving it, and what is refused.

use crate::common::{Data, Results, check, error, one_rank, own, reference, rms, run};
use crate::context_parallel::{forms, mesh};
use cpattn::{Batch, Dtype, Element, Error, Layout, Mask, Plan, Problem, Rank, Side, transport::local};
use half::bf16;
use std::time::Duration;

/// GQA, sinks, softcap, a window, and rows at the start of the second document that no key precedes.
fn problem(dtype: Dtype) -> Problem {
    let batch = Batch::cross(&[0, 17, 17, 30], &[0, 21, 26, 40], Some(&[2, 0, -4])).unwrap();
    let p = Problem::new(batch, 6, 3, 8, dtype).with_value_dim(12).with_softcap(1.5);
    p.with_mask(Mask { left: Some(9), right: Some(0) })
}

/// Each form's results are those of a loss of o and lse, and clearly not those of o alone; without a gradient of o,
/// they are those of lse alone.
fn on_every_form<T: Element>(dtype: Dtype) {
    for sinks in [false, true] {
        let p = problem(dtype).with_sinks(sinks);
        let mut data = Data::<T>::random(&p, 3);
        for d_o in [true, false] {
            if !d_o {
                data.d_o.fill(T::from_f64(0.0));
            }
            let (want, one) = (reference(&p, &data), one_rank(&p, &data));
            let lost = want.lse.iter().filter(|l| **l == f64::NEG_INFINITY).count();
            assert_eq!(lost, if sinks { 0 } else { 4 * 6 });
            let without = reference(&p, &Data { d_lse: None, ..data.clone() });
            for (a, b) in [(&want.dq, &without.dq), (&want.dk, &without.dk)] {
                let apart = rms(a.iter().zip(b).map(|(a, b)| a - b));
                assert!(apart > 0.05 * rms(a.iter().copied()), "{apart}");
            }
            assert!(want.dv == without.dv, "lse does not depend on v");
            for mesh in [mesh(1, 1), mesh(3, 1), mesh(1, 3), mesh(2, 2)] {
                for form in forms() {
                    let what = format!("{dtype} sinks {sinks} d_o {d_o} {mesh} {form:?}");
                    let plan = Plan::builder(&p).mesh(mesh).layout(Layout::Zigzag).options(form).build().unwrap();
                    let mut got = run(&plan, &data).unwrap_or_else(|e| panic!("{what}: {e}"));
                    if form.wire != cpattn::plan::Wire::Full {
                        let off = |x: &[T], want: &[f64]| error(x, want) / rms(want.iter().copied()).max(1e-9);
                        assert!(off(&got.dq, &want.dq) < 2e-2 && off(&got.dk, &want.dk) < 2e-2, "{what}");
                        Results { dq: got.dq, dk: got.dk, dv: got.dv, .. } = one.clone();
                    }
                    check(&what, &got, &one, &want);
                }
            }
        }
    }
}

#[test]
fn on_every_form_f32() {
    on_every_form::<f32>(Dtype::F32);
}

#[test]
fn on_every_form_bf16() {
    on_every_form::<bf16>(Dtype::Bf16);
}

/// A rank that gives none has the bits of one that gives zeros; the others need not know.
#[test]
fn ranks_may_differ() {
    let p = problem(Dtype::F32).with_sinks(true);
    for mesh in [mesh(3, 1), mesh(1, 3), mesh(2, 2)] {
        let plan = Plan::new(&p, mesh, Layout::Zigzag).unwrap();
        let mut data = Data::<f32>::random(&p, 5);
        for t in plan.local_tokens(Side::Q, 1).indices() {
            data.d_lse.as_mut().unwrap()[t * 6..(t + 1) * 6].fill(0.0);
        }
        let results = |given: bool| -> Vec<Vec<Vec<u8>>> {
            local::run(mesh.world(), Duration::from_secs(60), |end| {
                let mut rank = Rank::new(end);
                let mut own = own::Own::new(&plan, &data, rank.rank(), own::compact);
                if rank.rank() == 1 && !given {
                    own.d_lse = None;
                }
                own.forward(&mut rank, &plan)?;
                own.backward(&mut rank, &plan)?;
                Ok(own.results())
            })
            .unwrap()
        };
        assert!(results(true) == results(false), "{mesh}");
    }
}

#[test]
fn a_wrong_shape_is_refused() {
    let p = problem(Dtype::F32);
    let plan = Plan::new(&p, mesh(1, 1), Layout::Contiguous).unwrap();
    let mut rank = Rank::new(local::group(1, Duration::from_secs(9)).unwrap().remove(0));
    let mut own = own::Own::new(&plan, &Data::<f32>::random(&p, 5), 0, own::compact);
    own.forward(&mut rank, &plan).unwrap();
    let good = own.d_lse.take();
    for (shape, words) in
        [([29, 6, 1], "d_lse.tokens is 29, expected 30"), ([30, 5, 1], "d_lse.heads is 5, expected 6")]
    {
        own.d_lse = Some(own::Slot::new(own::compact, shape));
        let refused = own.backward(&mut rank, &plan).unwrap_err();
        assert!(matches!(refused, Error::Invalid { .. }) && refused.to_string().contains(words), "{refused}");
    }
    own.d_lse = good;
    own.backward(&mut rank, &plan).unwrap();
}
