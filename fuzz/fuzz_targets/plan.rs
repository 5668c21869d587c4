// SPDX-License-Identifier: MIT OR Apache-2.0
//! An arbitrary problem on an arbitrary mesh is refused for a stated reason, or its plan is proved by the verifier and
//! gives what the f64 reference gives.
//!
//! What must be refused is decided here a second time, so that neither a silent acceptance nor a needless refusal
//! passes. The bound on errors is one of correctness, not of accuracy: a forgotten or doubled token is far outside it.
#![no_main]

#[path = "bytes.rs"]
mod bytes;
#[allow(unused_imports, reason = "shared with the crate's tests")]
#[path = "../../tests/common/mod.rs"]
mod common;

use bytes::Bytes;
use common::{Data, Results, error, reference, rms, run};
use cpattn::{
    Batch, Dtype, Element, Error, Layout, Mask, Mesh, Options, Plan, Problem,
    plan::{AttentionKind, Circulate, Gather, Wire},
};
use half::{bf16, f16};
use libfuzzer_sys::fuzz_target;

/// Documents, and whether `Batch` must take them.
fn batch(b: &mut Bytes) -> Option<Batch> {
    let documents = b.below(6);
    let cu = |b: &mut Bytes| {
        let mut cu = vec![0i32];
        for _ in 0..documents {
            let n = b.byte();
            cu.push(cu.last().unwrap() + if n < 96 { 0 } else { i32::from(n % 29) });
        }
        cu
    };
    let (mut q, k) = (cu(b), cu(b));
    // Sometimes an entry becomes anything.
    if b.below(16) == 1 {
        let at = b.below(q.len());
        q[at] = b.bits(4) as u32 as i32;
    }
    let valid = q[0] == 0 && q.is_sorted();
    let starts: Vec<i64> = (0..documents).map(|_| i64::from(b.byte()) - 100).collect();
    let made = match b.below(3) {
        0 => Batch::new(&q),
        1 => Batch::cross(&q, &k, None),
        _ => Batch::cross(&q, &k, Some(&starts)),
    };
    assert_eq!(made.is_ok(), valid, "{q:?}: {made:?}");
    // What an entry out of the ordinary allows may be too long to run.
    made.ok().filter(|m| m.tokens(cpattn::Side::Q) < 200)
}

/// Whether a plan must be made. Mirrors the rules that the documentation states.
fn legal(p: &Problem, scale: Option<f64>, cap: Option<f64>, slopes: Option<&[f32]>, kind: AttentionKind) -> bool {
    let in_range = |n: usize| (1..=512).contains(&n);
    p.heads() > 0
        && p.kv_heads() > 0
        && p.heads() % p.kv_heads() == 0
        && in_range(p.head_dim())
        && in_range(p.value_dim())
        && scale.is_none_or(f64::is_finite)
        && cap.is_none_or(|c| c.is_finite() && c > 0.0)
        && slopes.is_none_or(|s| s.len() == p.alibi_rows() * p.heads() && s.iter().all(|x| x.is_finite()))
        && p.dropout().is_none_or(|p| (0.0..1.0).contains(&p) && kind == AttentionKind::Softmax)
        && matches!(kind, AttentionKind::Softmax | AttentionKind::Other)
}

fn legal_on(p: &Problem, kind: AttentionKind, mesh: Mesh, layout: Layout, o: Options) -> bool {
    mesh.replicas > 0
        && mesh.ring > 0
        && (1..=p.heads()).contains(&mesh.ulysses)
        && !(kind == AttentionKind::Other && mesh.ring > 1)
        && !matches!(layout, Layout::Striped { stripe: 0 } | Layout::Balanced { chunks: 0 })
        && (1..=p.kv_heads()).contains(&o.passes)
        && !(o.reproducible
            && (o.wire == Wire::Bf16 || o.passes > 1 || o.circulate != Circulate::Auto || o.gather == Gather::Steps))
        && !(o.circulate == Circulate::Queries && o.passes > 1)
}

fn compare<T: Element>(what: &str, got: &Results<T>, one: &Results<T>, want: &Results<f64>, rounded: bool) {
    let u = T::DTYPE.unit_roundoff();
    let rule = |name: &str, got: &[T], one: &[T], want: &[f64], wire: f64| {
        let (e, size) = (error(got, want), rms(want.iter().copied()));
        let bound = 4.0 * error(one, want) + (32.0 * u + wire) * (1.0 + size);
        assert!(e <= bound, "{what}: RMS error of {name} is {e:e}, bound {bound:e}, RMS {size:e}");
    };
    let wire = if rounded { 0.02 } else { 0.0 };
    rule("o", &got.o, &one.o, &want.o, 0.0);
    rule("dq", &got.dq, &one.dq, &want.dq, wire);
    rule("dk", &got.dk, &one.dk, &want.dk, wire);
    rule("dv", &got.dv, &one.dv, &want.dv, wire);
    for (g, &w) in got.lse.iter().zip(&want.lse) {
        let g = g.to_f64();
        assert!(g == w || (g - w).abs() <= 1e-5 * w.abs().max(1.0), "{what}: lse is {g}, expected {w}");
    }
    assert_eq!(got.dsinks.len(), want.dsinks.len(), "{what}");
    for (h, (g, &w)) in got.dsinks.iter().zip(&want.dsinks).enumerate() {
        let bound = 4.0 * (one.dsinks[h].to_f64() - w).abs() + 32.0 * u * (1.0 + w.abs());
        assert!((g.to_f64() - w).abs() <= bound, "{what}: dsinks[{h}] is {g:?}, expected {w}");
    }
}

fn compute<T: Element>(p: &Problem, plan: &Plan, seed: u64) {
    let what = format!("{p:?} on {}, {}, {:?}, seed {seed}", plan.mesh(), plan.layout(), plan.options());
    let data = Data::<T>::random(p, seed);
    let options = Options::new().reproducible(plan.options().reproducible);
    let one = Plan::builder(p).mesh(Mesh::single()).layout(Layout::Contiguous).options(options).build().unwrap();
    let got = run(plan, &data).unwrap_or_else(|e| panic!("{what}: {e}"));
    let one = run(&one, &data).unwrap_or_else(|e| panic!("{what}, one rank: {e}"));
    compare(&what, &got, &one, &reference(p, &data), plan.options().wire == Wire::Bf16);
    if plan.options().reproducible {
        assert!(got.o == one.o && got.lse == one.lse && got.dq == one.dq, "{what}: other bits");
        assert!(got.dk == one.dk && got.dv == one.dv, "{what}: other bits");
    }
}

fuzz_target!(|data: &[u8]| {
    let b = &mut Bytes(data);
    let Some(batch) = batch(b) else { return };
    let (kv_heads, group) = (b.below(5), 1 + b.below(3));
    let heads = if b.below(12) == 1 { b.below(9) } else { kv_heads * group };
    let (head_dim, value_dim) = (b.below(21), b.below(21));
    let dtype = b.pick(&[Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F64]);
    let window = (b.pick(&[0, 1, 2, 7, 30, u32::MAX]), b.pick(&[0, 1, 3, 11, u32::MAX]));
    let mask = b.pick(&[Mask::causal(), Mask::full(), Mask::sliding(window.0), Mask::window(window.0, window.1)]);
    let mask = if b.below(8) == 1 { Mask { left: None, right: Some(window.1) } } else { mask };
    let scale = b.pick(&[None, None, None, Some(0.3), Some(-0.7), Some(0.0), Some(f64::NAN), Some(f64::INFINITY)]);
    let cap = b.pick(&[None, None, None, Some(2.5), Some(0.5), Some(0.0), Some(-1.0), Some(f64::NAN)]);
    let mut slopes: Option<Vec<f32>> = match b.below(8) {
        1 | 2 => Some((0..heads).map(|_| f32::from(b.byte()) / 300.0).collect()),
        3 => Some(vec![0.5; b.below(9)]),
        4 => Some(vec![f32::NAN; heads]),
        _ => None,
    };
    let kind = if b.below(16) == 1 { AttentionKind::Other } else { AttentionKind::Softmax };
    let mut p =
        Problem::new(batch, heads, kv_heads, head_dim, dtype).with_value_dim(value_dim).with_mask(mask).with_kind(kind);
    p = p.with_sinks(b.below(3) == 1);
    if let Some(scale) = scale {
        p = p.with_scale(scale);
    }
    if let Some(cap) = cap {
        p = p.with_softcap(cap);
    }
    // Of all documents, or of each: then there may be too few, too.
    let each = b.flag();
    if let Some(slopes) = slopes.as_mut() {
        if each && b.flag() {
            *slopes = slopes.repeat(p.batch().documents());
        }
        p = if each { p.with_alibi_slopes_per_document(slopes) } else { p.with_alibi_slopes(slopes) };
    }
    p = p.with_dropout(b.pick(&[0.0, 0.0, 0.0, 0.3, 0.9, 1.0, -0.1, f64::NAN]));
    let mesh = Mesh { replicas: b.pick(&[1, 1, 1, 2, 0]), ring: b.below(6), ulysses: b.below(7) };
    let layout = match b.below(5) {
        0 => Layout::Contiguous,
        1 => Layout::Zigzag,
        2 => Layout::ZigzagPack,
        3 => Layout::Striped { stripe: b.below(7) as u32 },
        _ => Layout::Balanced { chunks: b.below(5) as u32 },
    };
    let options = Options::new()
        .gather(b.pick(&[Gather::Auto, Gather::Steps, Gather::Others, Gather::Together]))
        .passes(b.pick(&[1, 1, 1, 2, 3, 0]))
        .circulate(b.pick(&[Circulate::Auto, Circulate::Keys, Circulate::Queries]))
        .wire(b.pick(&[Wire::Full, Wire::Full, Wire::Bf16]))
        .reproducible(b.below(4) == 1)
        .pack_inputs(b.flag());
    let seed = b.bits(2);

    let possible = legal(&p, scale, cap, slopes.as_deref(), kind);
    assert_eq!(p.check().is_ok(), possible, "{p:?}");
    let legal = possible && legal_on(&p, kind, mesh, layout, options);
    let plan = Plan::builder(&p).mesh(mesh).layout(layout).options(options).build();
    let plan = match plan {
        Ok(plan) => plan,
        Err(error) => {
            assert!(!legal, "{p:?}, {mesh:?}, {layout:?}, {options:?} is refused: {error}");
            assert!(matches!(error, Error::Invalid { .. } | Error::Unsupported { .. }), "{error}");
            return;
        }
    };
    assert!(legal, "{p:?}, {mesh:?}, {layout:?}, {options:?} is accepted");
    let _ = plan.explain();
    if kind == AttentionKind::Other {
        return;
    }
    plan.verify().unwrap_or_else(|e| panic!("{p:?}, {mesh:?}, {layout:?}, {options:?}: {e}"));
    if mesh.world() > 12 {
        return;
    }
    match dtype {
        Dtype::F16 => compute::<f16>(&p, &plan, seed),
        Dtype::Bf16 => compute::<bf16>(&p, &plan, seed),
        Dtype::F32 => compute::<f32>(&p, &plan, seed),
        Dtype::F64 => compute::<f64>(&p, &plan, seed),
    }
});
