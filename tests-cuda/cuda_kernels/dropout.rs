// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dropout by token: every kernel that has it against attention in f64 with the same mask, and the mask pair by pair.

use crate::case::{Case, Cut};
use crate::device::{Device, Memory};
use crate::run::check;
use crate::slices;
use cpattn::Dtype;
use cpattn::call::{
    Attend, AttendBackward, Band, Dropout, DropoutMask, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score,
};
use half::bf16;

const SEED: u64 = 0xfedc_ba98_7654_3210;

fn all(cases: &[Case]) {
    let Some(device) = Device::open() else { return };
    for case in cases {
        check(&device, case);
    }
}

fn base(dtype: Dtype, dims: (usize, usize)) -> Case {
    Case { dropout: Some((0.25, SEED)), ..Case::new("dropout", dtype, dims) }
}

/// Every compiled shape in both types, with head dims that do not fill it, and probabilities near 0 and near 1.
#[test]
fn shapes() {
    let mut cases = Vec::new();
    for (dims, dtype, probability) in [
        ((64, 64), Dtype::Bf16, 0.25),
        ((40, 24), Dtype::F16, 0.9),
        ((128, 128), Dtype::F16, 0.5),
        ((72, 104), Dtype::Bf16, 1e-7),
        ((136, 24), Dtype::Bf16, 0.9),
        ((192, 128), Dtype::F16, 0.1),
        ((576, 512), Dtype::Bf16, 0.25),
    ] {
        cases.push(Case {
            documents: vec![(5, 0, 0), (0, 7, 0), (70, 90, 20), (6, 0, 0), (0, 9, 0)],
            dropout: Some((probability, SEED)),
            ..Case::new("dropout", dtype, dims)
        });
    }
    all(&cases);
}

/// Windows, softcap, ALiBi, sinks; groups of heads and calls that hold some of them; ranges of every kind and keys over
/// several calls; q and k in positions far from zero.
#[test]
fn options() {
    let pack = Case { documents: vec![(70, 70, 0), (37, 61, 24)], sinks: true, ..base(Dtype::Bf16, (64, 64)) };
    let grouped = Case { heads: 6, kv_heads: 2, held: 0..6, alibi_slopes: true, documents: vec![(40, 70, 30)], ..pack };
    let window = |case: &Case, window_left, window_right| Score { window_left, window_right, ..case.score };
    let narrow = window(&grouped, 9, 4);
    let pack = Case { documents: vec![(70, 70, 0), (37, 61, 24)], sinks: true, ..base(Dtype::Bf16, (64, 64)) };
    all(&[
        Case { held: 1..5, score: Score { softcap: 2.0, ..narrow }, ..grouped.clone() },
        Case { held: 4..6, per_q_head: true, ..grouped.clone() },
        Case { held: 2..5, accumulate: true, dtype: Dtype::F16, head_dim: 128, value_dim: 96, ..grouped.clone() },
        Case { held: 2..5, accumulate: true, per_q_head: true, head_dim: 144, value_dim: 136, ..grouped },
        Case { cut: Cut::Chunks(5), ring_steps: 3, ..pack.clone() },
        Case { cut: Cut::Striped(3, 1), ring_steps: 3, ..pack.clone() },
        Case {
            cut: Cut::Striped(2, 5),
            ring_steps: 2,
            alibi_slopes: true,
            score: narrow,
            shuffled: true,
            ..pack.clone()
        },
        Case {
            cut: Cut::Striped(2, 3),
            ring_steps: 2,
            head_dim: 128,
            value_dim: 128,
            dtype: Dtype::F16,
            ..pack.clone()
        },
        Case {
            cut: Cut::Striped(2, 6),
            ring_steps: 2,
            head_dim: 136,
            value_dim: 136,
            dtype: Dtype::F16,
            ..pack.clone()
        },
        Case {
            documents: vec![(20, 40, 1 << 40), (9, 5, -(1 << 35))],
            score: window(&pack, i64::MAX, i64::MAX),
            sinks: false,
            ..pack
        },
    ]);
}

/// Slices across documents, with NaN in every row that none may read.
#[test]
fn drawn_slices() {
    let Some(device) = Device::open() else { return };
    let mut rng = fastrand::Rng::with_seed(11);
    for dims in [(64, 64), (128, 128), (64, 64), (160, 160)] {
        let case = slices::draw(&mut rng, dims);
        check(&device, &Case { dropout: Some((0.4, rng.u64(..))), ..case });
    }
}

/// Numbers of a tensor, rounded to bf16.
fn upload(device: &Device, tokens: usize, dim: usize, value: impl Fn(usize, usize) -> f32) -> (Memory, RawTensor) {
    let value = &value;
    let bytes: Vec<u8> =
        (0..tokens).flat_map(|t| (0..dim).flat_map(move |i| bf16::from_f32(value(t, i)).to_le_bytes())).collect();
    let memory = device.upload(&bytes);
    let raw = memory.tensor(Dtype::Bf16, tokens, 1, dim as u32, dim);
    (memory, raw)
}

/// Every single pair of q and k tokens: with equal scores, and v, do and k that have a one for each token in a column
/// of its own, o, dv and dq are not 0 exactly where the mask keeps. Tokens begin at each remainder of four and at the
/// end of what 32 bits hold; keys are one range, or stripes of one to six tokens.
#[test]
fn every_pair_is_that_of_the_mask() {
    let Some(device) = Device::open() else { return };
    let mask = DropoutMask::new(0.4, SEED).unwrap();
    for dims in [64, 128, 160] {
        let (tq, tk) = (dims.min(70), dims.min(130));
        for (i, (base, stripe)) in [(0, 0), (5, 1), (1 << 20 | 2, 2), (7, 3), (2, 4), (3, 6)].into_iter().enumerate() {
            if dims != 64 && i % 2 == dims / 128 {
                continue;
            }
            let last = if i == 3 { i64::from(u32::MAX) - 2 * tk as i64 } else { base };
            let (k_first, q_first) = (last, base * 3 + 1);
            let plain = |tokens: usize| Range::plain(0, tokens as u32, 0, 0);
            let keys = match stripe {
                0 => plain(tk),
                block => Range { block, period: 2 * block, ..plain(tk) },
            };
            let token = |row: usize| (k_first + keys.position(row as u32)) as u32;
            let rows = [QRange { range: plain(tq), document: [0; 2], keys_begin: 0, keys_end: 1, mode: Mode::Only }];
            let (keys, pairs, bands) = ([keys], [Pair::of(0)], [Band::WHOLE]);
            let ranges = Ranges { q: &rows, k: &keys, pairs: &pairs, bands: &bands };
            let dropout = Some(Dropout { mask, q_tokens: &[q_first], k_tokens: &[k_first] });
            let one_hot = |t: usize, i: usize| if t == i { 1.0 } else { 0.0 };
            let (zeros, ones) = (upload(&device, tq, dims, |_, _| 0.0), upload(&device, tk.max(tq), dims, |_, _| 1.0));
            let (of_k, of_q) = (upload(&device, tk, dims, one_hot), upload(&device, tq, dims, one_hot));
            let o = upload(&device, tq, dims, |_, _| f32::NAN);
            let f32s = |tokens: usize, dim: usize, x: f32| {
                let memory = device.upload(&x.to_le_bytes().repeat(tokens * dim));
                let raw = memory.tensor(Dtype::F32, tokens, 1, dim as u32, dim);
                (memory, raw)
            };
            let (lse, delta) = (f32s(tq, 1, f32::NAN), f32s(tq, 1, 0.0));
            let (dq, dk, dv) = (f32s(tq, dims, f32::NAN), f32s(tk, dims, f32::NAN), f32s(tk, dims, f32::NAN));
            let score = Score { scale: 1.0, softcap: 0.0, window_left: i64::MAX, window_right: i64::MAX };
            // The call holds head 3 of the problem.
            let heads = HeadMap { q_offset: 3, kv_offset: 3, group: 1 };
            let mut kernels = device.kernels(1 << 14, 4);
            let forward = Attend {
                lse: lse.1,
                dropout,
                ..Attend::new([zeros.1, ones.1.rows(0, tk as u64), of_k.1, o.1], heads, score, ranges)
            };
            // SAFETY: all tensors live until the downloads below.
            unsafe { device.attend(&forward, &mut kernels, device.stream) }.unwrap();
            let backward = |k: RawTensor, v: RawTensor, d_o: RawTensor, kernels: &mut _| {
                let call = AttendBackward {
                    lse: lse.1,
                    delta: delta.1,
                    dq: dq.1,
                    dk: dk.1,
                    dv: dv.1,
                    dropout,
                    ..AttendBackward::new([zeros.1, k, v, d_o], heads, score, ranges)
                };
                // SAFETY: as above.
                unsafe { device.attend_backward(&call, kernels, device.stream) }.unwrap();
            };
            let whole = ones.1.rows(0, tk as u64);
            backward(of_k.1, whole, ones.1.rows(0, tq as u64), &mut kernels);
            let found_dq = device.download_f32(&dq.0);
            backward(whole, whole, of_q.1, &mut kernels);
            let found_dv = device.download_f32(&dv.0);
            let found_o: Vec<f32> =
                device.download(&o.0).chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
            let (expected, mut kept) = (mask.factor() / tk as f64, 0);
            for t in 0..tq {
                for s in 0..tk.min(dims) {
                    let keeps = mask.keeps((q_first + t as i64) as u32, token(s), 3);
                    kept += usize::from(keeps);
                    let expected = if keeps { expected } else { 0.0 };
                    // ds = p (kept do v), with do v the head dim.
                    let of_dq = expected * dims as f64;
                    for (what, found, expected) in [
                        ("o", found_o[t * dims + s], expected),
                        ("dq", found_dq[t * dims + s], of_dq),
                        ("dv", found_dv[s * dims + t], expected),
                    ] {
                        let close = (f64::from(found) - expected).abs() <= 0.01 * expected;
                        assert!(
                            close,
                            "{what} of q {t} and k {s} is {found}, not {expected}: {dims}, {base}, {stripe}"
                        );
                    }
                }
            }
            let share = kept as f64 / (tq * tk.min(dims)) as f64;
            assert!((share - 0.6).abs() < 0.04, "{share} of the pairs are kept");
        }
    }
}
