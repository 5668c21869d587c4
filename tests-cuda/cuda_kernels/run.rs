// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs a case forward and backward on the device and compares everything with f64.
//!
//! The bounds: o is rounded once and its weights once, dq, dk and dv have rounded weights and a delta from a rounded o;
//! relative to the RMS of the result that is below one unit roundoff forward, and below three backward.

use crate::case::{Case, Numbers, Side, decode, encode};
use crate::device::{Device, Memory};
use cpattn::Dtype;
use cpattn::call::{
    Attend, AttendBackward, Delta, Dropout, Gradients, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor,
};

/// Elements between the end of a token and the next one.
const GAP: usize = 8;

/// A `[tokens, held heads, dim]` tensor whose every other byte is 0xff, which is NaN in all types.
struct Held {
    memory: Memory,
    raw: RawTensor,
    heads: usize,
    dim: usize,
    stride: usize,
}

impl Held {
    /// `value(token, head, i)` at the rows of `side`; `None` leaves the row alone.
    fn new(
        device: &Device,
        dtype: Dtype,
        side: &Side,
        (heads, dim): (usize, usize),
        value: Option<&dyn Fn(usize, usize, usize) -> f64>,
    ) -> Self {
        let size = dtype.size();
        let stride = heads * dim + if dim == 1 { 0 } else { GAP };
        let mut bytes = vec![0xff; side.rows * stride * size];
        if let Some(value) = value {
            for (token, &row) in side.row_of.iter().enumerate() {
                for h in 0..heads {
                    for i in 0..dim {
                        let at = (row * stride + h * dim + i) * size;
                        bytes[at..at + size].copy_from_slice(&encode(dtype, value(token, h, i)));
                    }
                }
            }
        }
        // The last token has no gap: nothing may lie behind it.
        bytes.truncate((side.rows * stride - (stride - heads * dim)) * size);
        let memory = device.upload(&bytes);
        let raw = memory.tensor(dtype, side.rows, heads as u32, dim as u32, stride);
        Self { memory, raw, heads, dim, stride }
    }

    /// Fills the rows and heads with NaN that `lse` says have met nothing.
    fn poison(&self, device: &Device, lse: &Self, side: &Side) {
        let (lines, mut bytes) = (device.download_f32(&lse.memory), device.download(&self.memory));
        for &row in &side.row_of {
            for h in (0..self.heads).filter(|h| lines[row * lse.stride + h * lse.dim] == f32::NEG_INFINITY) {
                bytes[(row * self.stride + h * self.dim) * 4..][..self.dim * 4].fill(0xff);
            }
        }
        device.overwrite(&self.memory, &bytes);
    }

    /// The values by token, after checking that no other byte was touched.
    fn read(&self, device: &Device, what: &str, side: &Side) -> Vec<f64> {
        let size = self.raw.dtype.size();
        let mut bytes = device.download(&self.memory);
        let mut out = Vec::with_capacity(side.row_of.len() * self.heads * self.dim);
        for &row in &side.row_of {
            let row = &mut bytes[row * self.stride * size..][..self.heads * self.dim * size];
            out.extend(row.chunks_exact(size).map(|b| decode(self.raw.dtype, b)));
            row.fill(0xff);
        }
        let stray = bytes.iter().position(|&b| b != 0xff);
        assert_eq!(stray, None, "{what}: byte {stray:?} belongs to no tensor and was written");
        out
    }
}

/// One call's ranges.
struct RingStep {
    q: Vec<QRange>,
    k: Vec<Range>,
    pairs: Vec<Pair>,
}

/// Keys of each document are dealt out over the ring steps; every q range is in every one of them.
fn ring_steps(case: &Case, q: &Side, k: &Side) -> Vec<RingStep> {
    (0..case.ring_steps)
        .map(|ring_step| {
            let keys: Vec<Range> = k
                .ranges
                .iter()
                .enumerate()
                .filter(|(i, _)| i % case.ring_steps == ring_step)
                .map(|(_, r)| *r)
                .collect();
            let mut pairs = Vec::new();
            let ranges = q
                .ranges
                .iter()
                .enumerate()
                .map(|(i, &range)| {
                    let begin = pairs.len() as u32;
                    for (k, key) in (0..).zip(&keys) {
                        let documents = (range.doc, key.doc);
                        let bands = (0..).zip(&case.slices).filter(|(_, slice)| slice.documents == documents);
                        pairs.extend(bands.map(|(band, _)| Pair { k, band }));
                        pairs.extend((case.slices.is_empty() && key.doc == range.doc).then_some(Pair::of(k)));
                    }
                    if case.shuffled && i % 2 == 1 {
                        pairs[begin as usize..].reverse();
                    }
                    let mode = Mode::of(ring_step == 0, ring_step + 1 == case.ring_steps);
                    QRange { range, document: [0; 2], keys_begin: begin, keys_end: pairs.len() as u32, mode }
                })
                .collect();
            RingStep { q: ranges, k: keys, pairs }
        })
        .collect()
}

/// Tiles of q rows that the heads of a group share: so many rows, and so many of them for all heads of a call.
pub struct Shared {
    pub rows: usize,
    pub parts: u64,
}

/// How many tiles of `keys` rows of k a forward must load, and how many tiles of q: of each k range all tiles between
/// the first and the last row that some row of the q tile may meet, row by row; q where there are any. A tile has
/// `rows` q rows of one head, or fewer of several, whichever makes fewer steps for these rows; each tile of q is one
/// step more.
pub fn tiles_met(case: &Case, (rows, keys): (usize, usize), shared: Option<Shared>) -> (u64, u64) {
    let q_side = Side::new(&case.documents.iter().map(|d| (d.0, d.2)).collect::<Vec<_>>(), case.cut, 3);
    let k_side = Side::new(&case.documents.iter().map(|d| (d.1, 0)).collect::<Vec<_>>(), case.cut, 7);
    let (left, right) = (case.score.window_left, case.score.window_right);
    let (mut tiles, mut some) = (0, 0);
    for step in ring_steps(case, &q_side, &k_side) {
        for q in &step.q {
            let partners: Vec<&Range> = step.pairs[q.keys_begin as usize..q.keys_end as usize]
                .iter()
                .map(|pair| &step.k[pair.k as usize])
                .collect();
            let positions: Vec<i64> = (0..q.range.len).map(|i| q.range.position(i)).collect();
            let met = |tile: &[i64]| -> u64 {
                let of = |k: &&Range| {
                    let met = |j: &u32| {
                        let distance = |p: i64| p - k.position(*j);
                        tile.iter().any(|&p| distance(p) <= left && -distance(p) <= right)
                    };
                    let (first, last) = ((0..k.len).find(met), (0..k.len).rev().find(met));
                    first.zip(last).map_or(0, |(a, b)| ((b - a) as usize / keys + 1) as u64)
                };
                partners.iter().map(of).sum()
            };
            // Tiles of keys and tiles of q that meet any; items, and what they cost.
            let count = |stretch: &[i64], rows: usize, items: u64| {
                let each: Vec<u64> = stretch.chunks(rows).map(met).collect();
                let (sum, some) = (each.iter().sum::<u64>(), each.iter().filter(|&&n| n > 0).count() as u64);
                let number = each.len() as u64 * items;
                ((number, sum * items + number), (sum * items, some * items))
            };
            for stretch in positions.chunks(rows) {
                let single = count(stretch, rows, case.held.len() as u64);
                let found = match &shared {
                    Some(Shared { rows, parts }) => {
                        let shared = count(stretch, *rows, *parts);
                        let better = shared.0.0 <= single.0.0 && shared.0.1 < single.0.1;
                        if better { shared.1 } else { single.1 }
                    }
                    None => single.1,
                };
                tiles += found.0;
                some += found.1;
            }
        }
    }
    (tiles, some)
}

fn rms(x: impl Iterator<Item = f64>) -> f64 {
    let (mut n, mut sum) = (0, 0.0);
    for x in x {
        n += 1;
        sum += x * x;
    }
    (sum / f64::from(n.max(1))).sqrt()
}

fn compare(case: &Case, what: &str, found: &[f64], expected: &[f64], bound: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let error = rms(found.iter().zip(expected).map(|(a, b)| a - b));
    let scale = rms(expected.iter().copied());
    // do·v less delta is rounded before it is multiplied by the size of q or k and the scale; with dropout o is not v
    // exactly, and delta has its rounding.
    let of_o = if case.dropout.is_some() { case.dtype.unit_roundoff() * (case.value_dim as f64).sqrt() } else { 0.0 };
    let of_scores = if matches!(what, "dq" | "dk") { (1e-5 + 2.0 * of_o) * (case.magnitude() - 1.0) } else { 0.0 };
    let limit = bound * case.dtype.unit_roundoff() * scale + 1e-6 + of_scores;
    if error.is_nan() || error > limit {
        let worst = found
            .iter()
            .zip(expected)
            .enumerate()
            .max_by(|a, b| (a.1.0 - a.1.1).abs().total_cmp(&(b.1.0 - b.1.1).abs()))
            .map(|(i, (a, b))| format!("element {i} is {a}, not {b}"));
        panic!("{what}: RMS error {error:.3e} over {limit:.3e}; {worst:?}; {case:?}");
    }
}

/// What the device gave: o, and dq, dk and dv of one call and of two.
#[derive(Debug, Default, PartialEq)]
pub struct Found {
    o: Vec<f64>,
    pub all: [Vec<f64>; 3],
    pub apart: [Vec<f64>; 3],
}

/// o of a case's forward alone.
pub fn forward(device: &Device, case: &Case) -> Vec<f64> {
    run(device, case, false).o
}

/// Forward, delta and backward of a case.
pub fn check(device: &Device, case: &Case) -> Found {
    run(device, case, true)
}

fn run(device: &Device, case: &Case, gradients: bool) -> Found {
    println!("{} {} {}/{} {:?} {:?}", case.name, case.dtype, case.head_dim, case.value_dim, case.documents, case.cut);
    let (numbers, bands, [q_read, k_read]) = (Numbers::of(case), case.bands(), case.is_read());
    let q_side = Side::new(&case.documents.iter().map(|d| (d.0, d.2)).collect::<Vec<_>>(), case.cut, 3);
    let k_side = Side::new(&case.documents.iter().map(|d| (d.1, 0)).collect::<Vec<_>>(), case.cut, 7);
    let (held, held_kv) = (case.held.clone(), case.held_kv());
    let (heads, kv_heads, d, dv) = (case.heads, case.kv_heads, case.head_dim, case.value_dim);
    let (hq, hk) = (held.len(), held_kv.len());
    let of_q = |x: &[f64], dim: usize, t: usize, h: usize, i: usize| {
        if q_read[t] { x[(t * heads + held.start + h) * dim + i] } else { f64::NAN }
    };
    let of_k = |x: &[f64], dim: usize, t: usize, h: usize, i: usize| {
        if k_read[t] { x[(t * kv_heads + held_kv.start + h) * dim + i] } else { f64::NAN }
    };
    let new = |dtype, side: &Side, shape, value: Option<&dyn Fn(usize, usize, usize) -> f64>| {
        Held::new(device, dtype, side, shape, value)
    };
    let q = new(case.dtype, &q_side, (hq, d), Some(&|t, h, i| of_q(&numbers.q, d, t, h, i)));
    let k = new(case.dtype, &k_side, (hk, d), Some(&|t, h, i| of_k(&numbers.k, d, t, h, i)));
    let v = new(case.dtype, &k_side, (hk, dv), Some(&|t, h, i| of_k(&numbers.v, dv, t, h, i)));
    let d_o = new(case.dtype, &q_side, (hq, dv), Some(&|t, h, i| of_q(&numbers.d_o, dv, t, h, i)));
    let o = new(case.dtype, &q_side, (hq, dv), None);
    let running = new(Dtype::F32, &q_side, (hq, dv), None);
    let lse = new(Dtype::F32, &q_side, (hq, 1), None);
    let words = new(Dtype::F32, &q_side, (hq, 2), None);
    // Cases of three calls keep the running lse in one word, where the final one goes.
    let running_lse = if case.ring_steps == 3 { &lse } else { &words };
    let per_head = |x: &[f64], each: usize| {
        let bytes: Vec<u8> =
            x[held.start * each..held.end * each].iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
        device.upload(&bytes)
    };
    let count = case.sinks_per_head();
    let (slopes, sinks) = (per_head(&numbers.alibi_slopes, 1), per_head(&numbers.sinks, count));
    let optional = |on: bool, m: &Memory, each: usize| match on {
        true => m.tensor(Dtype::F32, 1, hq as u32, each as u32, hq * each),
        false => RawTensor::NONE,
    };
    let map = HeadMap {
        q_offset: held.start as u32,
        kv_offset: held_kv.start as u32,
        group: (case.heads / case.kv_heads) as u32,
    };
    let ring_steps = ring_steps(case, &q_side, &k_side);
    let [q_tokens, k_tokens] = case.first_tokens();
    let dropout = case.mask().map(|mask| Dropout { mask, q_tokens: &q_tokens, k_tokens: &k_tokens });
    // Raised by every call. Bytes of no head are NaN.
    let max_logit = device.upload(&[&[0xff; 4][..], &f32::NEG_INFINITY.to_le_bytes().repeat(hq), &[0xff; 4]].concat());
    let whole = max_logit.tensor(Dtype::F32, 1, hq as u32, 1, hq);
    let largest = RawTensor { ptr: whole.ptr.wrapping_add(4), ..whole };

    // Forward.
    let calls: Vec<Attend> = ring_steps
        .iter()
        .map(|ring_step| Attend {
            running: if case.ring_steps > 1 { running.raw } else { RawTensor::NONE },
            running_lse: if case.ring_steps > 1 { running_lse.raw } else { RawTensor::NONE },
            lse: lse.raw,
            alibi_slopes: optional(case.alibi_slopes, &slopes, 1),
            sinks: optional(case.sinks, &sinks, count),
            max_logit: largest,
            dropout,
            ..Attend::new(
                [q.raw, k.raw, v.raw, o.raw],
                map,
                case.score,
                Ranges { q: &ring_step.q, k: &ring_step.k, pairs: &ring_step.pairs, bands: &bands },
            )
        })
        .collect();
    let bytes = calls.iter().map(|c| device.attend_bytes(c)).max().unwrap_or(0);
    // Room for one and a half calls: the ring wraps round and waits.
    let mut kernels = device.kernels(bytes + bytes / 2, 2);
    for call in &calls {
        // SAFETY: all tensors live until the stream is synchronised, by the downloads below.
        unsafe { device.attend(call, &mut kernels, device.stream) }.expect("a legal call");
        // The next ring step may find anything in the running o of a row that has met no key yet.
        // (Cases of three ring steps leave the device running.)
        if case.ring_steps == 2 {
            running.poison(device, running_lse, &q_side);
        }
    }
    let pick = |x: &[f64], tokens: usize, heads: usize, held: core::ops::Range<usize>, dim: usize| -> Vec<f64> {
        (0..tokens).flat_map(|t| x[(t * heads + held.start) * dim..(t * heads + held.end) * dim].to_vec()).collect()
    };
    let (tq, tk) = (case.q_tokens(), case.k_tokens());
    let found_o = o.read(device, "o", &q_side);
    compare(case, "o", &found_o, &pick(&numbers.out.o, tq, heads, held.clone(), dv), 1.0);
    let expected = pick(&numbers.out.lse, tq, heads, held.clone(), 1);
    for (i, (found, expected)) in lse.read(device, "lse", &q_side).iter().zip(&expected).enumerate() {
        let close = found == expected || (found - expected).abs() <= 2e-6 * (8.0 + expected.abs());
        assert!(close, "lse {i} is {found}, not {expected}; {case:?}");
    }
    let found = device.download_f32(&max_logit);
    assert!(found[0].is_nan() && found[hq + 1].is_nan(), "max_logit has {hq} numbers: {found:?}");
    for (h, (&found, &expected)) in found[1..=hq].iter().zip(&numbers.max_logit[held.clone()]).enumerate() {
        let (found, expected) = (f64::from(found), expected);
        let close = found == expected || (found - expected).abs() <= 2e-6 * (4.0 + expected.abs());
        assert!(close, "max_logit of head {h} is {found}, not {expected}; {case:?}");
    }
    if case.ring_steps > 1 {
        running.read(device, "running", &q_side);
        running_lse.read(device, "running_lse", &q_side);
    }

    if !gradients {
        return Found { o: found_o, ..Found::default() };
    }

    // Backward.
    let delta = new(Dtype::F32, &q_side, (hq, 1), None);
    let (o, d_o) = (&o, &d_o);
    let rows = |t: &RawTensor, r: &Range| t.rows(r.row as u64, u64::from(r.len));
    for r in &q_side.ranges {
        let call = Delta::new([rows(&o.raw, r), rows(&d_o.raw, r), rows(&delta.raw, r)]);
        // SAFETY: as above.
        unsafe { device.delta(&call, device.stream) }.expect("a legal call");
    }
    delta.read(device, "delta", &q_side);
    // All gradients by one kernel, where there is a fused one, then queries and keys apart.
    let backward = |parts: &[Gradients]| {
        let key_heads = if case.per_q_head { hq } else { hk };
        let dq = new(Dtype::F32, &q_side, (hq, d), None);
        let one: &dyn Fn(usize, usize, usize) -> f64 = &|_, _, _| 1.0;
        let before = case.accumulate.then_some(one);
        let dk = new(Dtype::F32, &k_side, (key_heads, d), before);
        let dv_out = new(Dtype::F32, &k_side, (key_heads, dv), before);
        for ring_step in &ring_steps {
            let call = AttendBackward {
                lse: lse.raw,
                delta: delta.raw,
                dq: dq.raw,
                dk: dk.raw,
                dv: dv_out.raw,
                accumulate_keys: case.accumulate,
                per_q_head: case.per_q_head,
                alibi_slopes: optional(case.alibi_slopes, &slopes, 1),
                dropout,
                ..AttendBackward::new(
                    [q.raw, k.raw, v.raw, d_o.raw],
                    map,
                    case.score,
                    Ranges { q: &ring_step.q, k: &ring_step.k, pairs: &ring_step.pairs, bands: &bands },
                )
            };
            for &gradients in parts {
                let call = AttendBackward { gradients, ..call };
                let bytes = device.attend_backward_bytes(&call);
                let mut kernels = device.kernels(bytes, 1);
                // SAFETY: as above.
                unsafe { device.attend_backward(&call, &mut kernels, device.stream) }.expect("a legal call");
            }
        }
        let found_dq = dq.read(device, "dq", &q_side);
        compare(case, "dq", &found_dq, &pick(&numbers.gradient.dq, tq, heads, held.clone(), d), 3.0);
        let mut keys = Vec::new();
        for (what, tensor, gradient, dim) in
            [("dk", &dk, &numbers.gradient.dk, d), ("dv", &dv_out, &numbers.gradient.dv, dv)]
        {
            let mut found = tensor.read(device, what, &k_side);
            keys.push(found.clone());
            if case.accumulate {
                found.iter_mut().for_each(|x| *x -= 1.0);
            }
            if case.per_q_head {
                let mut sums = vec![0.0; tk * hk * dim];
                for (i, x) in found.iter().enumerate() {
                    let (t, h) = (i / dim / hq, i / dim % hq);
                    sums[(t * hk + map.kv(h as u32) as usize) * dim + i % dim] += x;
                }
                found = sums;
            }
            let mut expected = pick(gradient, tk, kv_heads, held_kv.clone(), dim);
            if held != (0..heads) {
                // The other q heads of a group belong to other ranks: recompute without them.
                expected = partial(case, &numbers, what, dim);
            }
            compare(case, what, &found, &expected, 3.0);
        }
        let [found_dk, found_dv] = keys.try_into().expect("two");
        [found_dq, found_dk, found_dv]
    };
    Found { o: found_o, all: backward(&[Gradients::All]), apart: backward(&[Gradients::Queries, Gradients::Keys]) }
}

/// dk or dv of the held heads alone: the reference with the gradient of o of all other heads set to zero.
fn partial(case: &Case, numbers: &Numbers, what: &str, dim: usize) -> Vec<f64> {
    let mut d_o = numbers.d_o.clone();
    for (i, x) in d_o.iter_mut().enumerate() {
        if !case.held.contains(&(i / case.value_dim % case.heads)) {
            *x = 0.0;
        }
    }
    let gradient = numbers.backward(case, &d_o);
    let all = if what == "dk" { gradient.dk } else { gradient.dv };
    let held = case.held_kv();
    (0..case.k_tokens())
        .flat_map(|t| all[(t * case.kv_heads + held.start) * dim..(t * case.kv_heads + held.end) * dim].to_vec())
        .collect()
}
