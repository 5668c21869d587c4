// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transforms, finish, merge, the largest score, and refusals.

use crate::case::{decode, encode, random};
use crate::device::{Device, Memory};
use cpattn::call::Merge;
use cpattn::call::{
    Attend, Band, Block, Finish, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score, SinkGradient, Transform,
};
use cpattn::{Dtype, Error};

fn upload(device: &Device, dtype: Dtype, x: &[f64]) -> Memory {
    device.upload(&x.iter().flat_map(|&x| encode(dtype, x)).collect::<Vec<_>>())
}

fn download(device: &Device, dtype: Dtype, memory: &Memory) -> Vec<f64> {
    device.download(memory).chunks_exact(dtype.size()).map(|b| decode(dtype, b)).collect()
}

/// Copies, casts and sums between all pairs of types, for shapes that do and do not allow 16-byte accesses, in one tile
/// of a block of threads and in several.
#[test]
fn transforms() {
    let Some(device) = Device::open() else { return };
    let types = [Dtype::F16, Dtype::Bf16, Dtype::F32];
    let shapes =
        [(37, 3, 16, 0), (5, 2, 64, 8), (9, 3, 5, 1), (300, 1, 24, 0), (700, 2, 16, 0), (400, 3, 8, 8), (250, 1, 5, 1)];
    for (tokens, heads, dim, gap) in shapes {
        let stride = heads * dim + gap;
        let n = (tokens - 1) * stride + heads * dim;
        let tensor = |m: &Memory, t| m.tensor(t, tokens, heads as u32, dim as u32, stride);
        for (i, from) in types.into_iter().enumerate() {
            for (j, to) in types.into_iter().enumerate() {
                let exact = |x: Vec<f64>, t| x.into_iter().map(|x| decode(t, &encode(t, x))).collect::<Vec<_>>();
                let (a, b) = (exact(random(n, 5), from), exact(random(n, 6), types[(i + j) % 3]));
                let a_memory = upload(&device, from, &a);
                let b_memory = upload(&device, types[(i + j) % 3], &b);
                let outs: Vec<Memory> = (0..3).map(|_| upload(&device, to, &vec![7.0; n])).collect();
                let sources = [tensor(&a_memory, from), tensor(&a_memory, from), tensor(&b_memory, types[(i + j) % 3])];
                let block =
                    |k: usize, begin, end| Block { dst: tensor(&outs[k], to), sources_begin: begin, sources_end: end };
                // A copy or cast, a sum, and zeros.
                let blocks = [block(0, 0, 1), block(1, 1, 3), block(2, 3, 3)];
                let call = Transform { blocks: &blocks, sources: &sources };
                let mut kernels = device.kernels(64 << 10, 1);
                // SAFETY: everything lives until the downloads below.
                unsafe { kernels.transform(&call, device.stream) }.expect("a legal call");
                let expected: [&dyn Fn(usize) -> f64; 3] =
                    [&|i| a[i], &|i| f64::from(a[i] as f32 + b[i] as f32), &|_| 0.0];
                for (out, expected) in outs.iter().zip(expected) {
                    for (i, x) in download(&device, to, out).into_iter().enumerate() {
                        let inside = i % stride < heads * dim;
                        let expected = if inside { decode(to, &encode(to, expected(i))) } else { 7.0 };
                        assert_eq!(x, expected, "{from} to {to}, {tokens} x {heads} x {dim}, element {i}");
                    }
                }
            }
        }
    }
}

/// A first source that is the block itself is added to.
#[test]
fn transforms_add_in_place() {
    let Some(device) = Device::open() else { return };
    let (a, b) = (upload(&device, Dtype::F32, &[1.0; 640]), upload(&device, Dtype::Bf16, &[0.5; 640]));
    let dst = a.tensor(Dtype::F32, 10, 4, 16, 64);
    let call = Transform {
        blocks: &[Block { dst, sources_begin: 0, sources_end: 2 }],
        sources: &[dst, b.tensor(Dtype::Bf16, 10, 4, 16, 64)],
    };
    let mut kernels = device.kernels(64 << 10, 1);
    // SAFETY: everything lives until the download below.
    unsafe { kernels.transform(&call, device.stream) }.expect("a legal call");
    assert_eq!(device.download_f32(&a), vec![1.5; 640]);
}

#[test]
fn finish_writes_rows_of_nobody() {
    let Some(device) = Device::open() else { return };
    let (tokens, heads, dim) = (400, 3, 24);
    for sinks in [None, Some([0.5, f64::NEG_INFINITY, 2.0])] {
        let o = upload(&device, Dtype::Bf16, &vec![3.0; tokens * heads * dim]);
        let lse = upload(&device, Dtype::F32, &vec![3.0; tokens * heads]);
        let sink = upload(&device, Dtype::F32, &sinks.unwrap_or_default());
        let rows = [Range::plain(5, 1, 0, 0), Range::plain(10, 300, 0, 0), Range::plain(350, 0, 0, 0)];
        let call = Finish {
            o: o.tensor(Dtype::Bf16, tokens, heads as u32, dim as u32, heads * dim),
            lse: lse.tensor(Dtype::F32, tokens, heads as u32, 1, heads),
            sinks: if sinks.is_some() { sink.tensor(Dtype::F32, 1, heads as u32, 1, heads) } else { RawTensor::NONE },
            rows: &rows,
        };
        let mut kernels = device.kernels(64 << 10, 1);
        // SAFETY: everything lives until the downloads below.
        unsafe { kernels.finish(&call, device.stream) }.expect("a legal call");
        let covered = |token: usize| token == 5 || (10..310).contains(&token);
        for (i, x) in download(&device, Dtype::Bf16, &o).into_iter().enumerate() {
            assert_eq!(x, if covered(i / heads / dim) { 0.0 } else { 3.0 });
        }
        for (i, x) in download(&device, Dtype::F32, &lse).into_iter().enumerate() {
            let value = sinks.map_or(f64::NEG_INFINITY, |s| s[i % heads]);
            assert_eq!(x, if covered(i / heads) { value } else { 3.0 });
        }
    }
}

#[test]
fn merge_of_two_partials() {
    let Some(device) = Device::open() else { return };
    for words in [(1, 1), (1, 2), (2, 1), (2, 2)] {
        merge_of(&device, words);
    }
}

/// `words` of the two lse. The second words are NaN where there is no key, which counts for nothing.
fn merge_of(device: &Device, words: (usize, usize)) {
    let none = f64::NEG_INFINITY;
    // The last two pairs are apart by what one word does not hold.
    let exact = [1.0, none, 0.5, none, f64::NAN, 80.0, 1000.0 + 2e-5, -1000.0 - 3e-5];
    let other = [1.0, 2.0, none, none, 1.0, -80.0, 1000.0, -1000.0];
    let split = |x: &[f64], words: usize| -> (Vec<f64>, Vec<f64>) {
        let first = x.iter().map(|&x| f64::from(x as f32));
        let rest = |x: f64| if x == none { f64::NAN } else { f64::from((x - f64::from(x as f32)) as f32) };
        let held = x.iter().flat_map(|&x| [f64::from(x as f32), rest(x)][..words].to_vec()).collect();
        (held, if words == 2 { x.to_vec() } else { first.collect() })
    };
    let ((held_a, a), (held_b, b)) = (split(&exact, words.0), split(&other, words.1));
    let dim = 20;
    let (x, y) = (random(a.len() * dim, 1), random(a.len() * dim, 2));
    let empty_is_zero = |x: &[f64], lse: &[f64]| -> Vec<f64> {
        x.iter().enumerate().map(|(i, &x)| if lse[i / dim] == none { 0.0 } else { x }).collect()
    };
    let (x, y) = (empty_is_zero(&x, &a), empty_is_zero(&y, &b));
    // What a side holds that saw no key does not matter: any bytes, NaN among them.
    let with_garbage = |x: &[f64], lse: &[f64]| -> Vec<f64> {
        x.iter().enumerate().map(|(i, &x)| if lse[i / dim] == none { f64::NAN } else { x }).collect()
    };
    let (o, lse) = (upload(device, Dtype::F32, &with_garbage(&x, &a)), upload(device, Dtype::F32, &held_a));
    let (with_o, with_lse) = (upload(device, Dtype::F32, &with_garbage(&y, &b)), upload(device, Dtype::F32, &held_b));
    let shape = |m: &Memory, dim: usize| m.tensor(Dtype::F32, a.len(), 1, dim as u32, dim);
    let call = Merge {
        o: shape(&o, dim),
        lse: shape(&lse, words.0),
        with_o: shape(&with_o, dim),
        with_lse: shape(&with_lse, words.1),
    };
    // SAFETY: everything lives until the downloads below.
    unsafe { device.kernels(16, 1).merge(&call, device.stream) }.expect("a legal call");
    let (o, lse) = (download(device, Dtype::F32, &o), download(device, Dtype::F32, &lse));
    for row in 0..a.len() {
        let largest = a[row].max(b[row]);
        let (wa, wb) = if largest == none { (0.5, 0.5) } else { ((a[row] - largest).exp(), (b[row] - largest).exp()) };
        let expected = if largest == none { none } else { largest + (wa + wb).ln() };
        let found: f64 = lse[row * words.0..][..words.0].iter().sum();
        let bound = if words.0 == 2 { 1e-6 } else { 1e-6 + expected.abs() * 2f64.powi(-24) };
        let close = found == expected || (found - expected).abs() < bound || (found.is_nan() && a[row].is_nan());
        assert!(close, "{words:?}, row {row}: lse {found}, expected {expected}");
        for i in row * dim..(row + 1) * dim {
            let expected = (wa * x[i] + wb * y[i]) / (wa + wb);
            assert!((o[i] - expected).abs() < 1e-6 || (o[i].is_nan() && a[row].is_nan()), "{row}: {} {expected}", o[i]);
        }
    }
}

/// One key for each call, so that a partial's o is its v and its lse a score near 1,000: what comes out is the weights.
#[test]
fn partial_results_keep_their_digits_as_scores_grow() {
    let Some(device) = Device::open() else { return };
    const KEYS: usize = 8;
    // With this scale a score in base-2 units is q·k itself, an integer and some eighths: exact in f32.
    let scale = std::f64::consts::LN_2;
    for shift in [104.0, 1443.0, -1443.0] {
        let row = |a: f64, b: f64| [a, b, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let scores: Vec<f64> = (0..KEYS).map(|i| ((i * 5) % 8) as f64 / 8.0).collect();
        let keys: Vec<f64> = scores.iter().flat_map(|&s| row(1.0, s)).collect();
        let values = random(KEYS * 8, 9);
        let values: Vec<f64> = values.iter().map(|&x| decode(Dtype::F16, &encode(Dtype::F16, x))).collect();
        let inputs = [row(shift, 1.0).to_vec(), keys, values.clone()].map(|x| upload(&device, Dtype::F16, &x));
        let running = upload(&device, Dtype::F32, &[f64::NAN; 8]);
        let words = upload(&device, Dtype::F32, &[f64::NAN; 2]);
        let mut kernels = device.kernels(8192, 8);
        for i in 0..KEYS {
            let mode = if i == 0 { Mode::First } else { Mode::Merge };
            let q = [QRange { range: Range::plain(0, 1, 0, 0), document: [0; 2], keys_begin: 0, keys_end: 1, mode }];
            let k = [Range::plain(i as i64, 1, 0, 0)];
            let call = Attend {
                running: running.tensor(Dtype::F32, 1, 1, 8, 8),
                running_lse: words.tensor(Dtype::F32, 1, 1, 2, 2),
                ..Attend::new(
                    [
                        inputs[0].tensor(Dtype::F16, 1, 1, 8, 8),
                        inputs[1].tensor(Dtype::F16, KEYS, 1, 8, 8),
                        inputs[2].tensor(Dtype::F16, KEYS, 1, 8, 8),
                        RawTensor::NONE,
                    ],
                    HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
                    Score { scale, softcap: 0.0, window_left: i64::MAX, window_right: i64::MAX },
                    Ranges { q: &q, k: &k, pairs: &[Pair { k: 0, band: 0 }], bands: &[Band::WHOLE] },
                )
            };
            // SAFETY: everything lives until the downloads below.
            unsafe { device.attend(&call, &mut kernels, device.stream) }.expect("a legal call");
        }
        let weights: Vec<f64> = scores.iter().map(|s| s.exp2()).collect();
        let sum: f64 = weights.iter().sum();
        let found = download(&device, Dtype::F32, &running);
        for (d, found) in found.iter().enumerate() {
            let expected: f64 = (0..KEYS).map(|i| weights[i] / sum * values[i * 8 + d]).sum();
            assert!((found - expected).abs() < 2e-6, "{shift}: o[{d}] is {found}, expected {expected}");
        }
        let lse: f64 = download(&device, Dtype::F32, &words).iter().sum();
        let expected = shift * scale + sum.ln();
        assert!((lse - expected).abs() < 2e-6, "{shift}: lse {lse}, expected {expected}");
    }
}

/// One q token, two keys: small enough to see what is wrong with it.
struct Small {
    memory: Vec<Memory>,
    q: [QRange; 1],
    k: [Range; 1],
}

impl Small {
    fn new(device: &Device) -> Self {
        // q = (1, 0, …), k = (2, …), (5, …), v anything.
        let row = |x: f64| core::iter::once(x).chain(core::iter::repeat_n(0.0, 7)).collect::<Vec<_>>();
        let keys = [row(2.0), row(5.0)].concat();
        let memory = vec![
            upload(device, Dtype::F16, &row(1.0)),
            upload(device, Dtype::F16, &keys),
            upload(device, Dtype::F16, &keys),
            upload(device, Dtype::F16, &row(0.0)),
            upload(device, Dtype::F32, &[0.0]),
            upload(device, Dtype::F32, &[f64::NEG_INFINITY]),
        ];
        let q = [QRange {
            range: Range::plain(0, 1, 1, 0),
            document: [0; 2],
            keys_begin: 0,
            keys_end: 1,
            mode: Mode::Only,
        }];
        Self { memory, q, k: [Range::plain(0, 2, 0, 0)] }
    }

    fn call(&self) -> Attend<'_> {
        let f16s = |i: usize, n| self.memory[i].tensor(Dtype::F16, n, 1, 8, 8);
        Attend {
            lse: self.memory[4].tensor(Dtype::F32, 1, 1, 1, 1),
            ..Attend::new(
                [f16s(0, 1), f16s(1, 2), f16s(2, 2), f16s(3, 1)],
                HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
                Score { scale: 1.0, softcap: 0.0, window_left: i64::MAX, window_right: 0 },
                Ranges { q: &self.q, k: &self.k, pairs: &[Pair { k: 0, band: 0 }], bands: &[Band::WHOLE] },
            )
        }
    }
}

/// Refused calls name the argument, launch nothing, and leave the device usable.
#[test]
fn refusals() {
    let Some(device) = Device::open() else { return };
    let small = Small::new(&device);
    let call = small.call();
    let mut kernels = device.kernels(4096, 4);
    let mut run = |call: &Attend| {
        // SAFETY: refused before anything is launched, or legal.
        unsafe { device.attend(call, &mut kernels, device.stream) }
    };
    let refused = |error: Error, part: &str| {
        assert!(!matches!(error, Error::Device { .. }) && format!("{error}").contains(part), "{error}");
    };
    let f32s = |t: RawTensor| RawTensor { dtype: Dtype::F32, ..t };
    refused(run(&Attend { q: f32s(call.q), ..call }).unwrap_err(), "f32");
    refused(run(&Attend { q: RawTensor { dim: 12, ..call.q }, ..call }).unwrap_err(), "head_dim 12");
    refused(run(&Attend { v: RawTensor { dim: 520, ..call.v }, ..call }).unwrap_err(), "value_dim 520");
    refused(run(&Attend { k: RawTensor { dim: 16, ..call.k }, ..call }).unwrap_err(), "k.dim");
    refused(run(&Attend { v: RawTensor { dtype: Dtype::Bf16, ..call.v }, ..call }).unwrap_err(), "v.dtype");
    let odd = RawTensor { ptr: call.k.ptr.wrapping_add(2), ..call.k };
    refused(run(&Attend { k: odd, ..call }).unwrap_err(), "k.ptr");
    let odd = RawTensor { token_stride: 12, ..call.k };
    refused(run(&Attend { k: odd, ..call }).unwrap_err(), "k.token_stride");
    let host = vec![0u8; 4096];
    let address = host.as_ptr().wrapping_add(host.as_ptr().align_offset(64)).cast_mut();
    refused(run(&Attend { k: RawTensor { ptr: address, ..call.k }, ..call }).unwrap_err(), "driver does not know");
    refused(run(&Attend { o: RawTensor::NONE, ..call }).unwrap_err(), "o is none");
    refused(run(&Attend { aligned: true, ..call }).unwrap_err(), "aligned");
    refused(run(&Attend { heads: HeadMap { q_offset: 3, ..call.heads }, ..call }).unwrap_err(), "k.heads");
    let score = Score { scale: f64::NAN, ..call.score };
    refused(run(&Attend { score, ..call }).unwrap_err(), "scale");
    let score = Score { window_right: -1, ..call.score };
    refused(run(&Attend { score, ..call }).unwrap_err(), "window_right is -1, expected 0 to 4294967295, or i64::MAX");
    // Finite, but not in the f32 that the kernels score in: a score of 0 would be NaN.
    for (scale, softcap, part) in [
        (1e300, 0.0, "scale is 1e300"),
        (-3e38, 0.0, "scale is -3e38"),
        (1.0, 1e300, "softcap is 1e300"),
        (1.0, 3e38, "softcap is 3e38"),
        (1.0, 1e-300, "softcap is 1e-300"),
        (1e20, 1e-20, "softcap is 1e-20"),
    ] {
        refused(run(&Attend { score: Score { scale, softcap, ..call.score }, ..call }).unwrap_err(), part);
    }
    let two = RawTensor::compact(call.lse.ptr, Dtype::F32, 2, 1, 1);
    refused(run(&Attend { sinks: two, ..call }).unwrap_err(), "sinks.tokens is 2");
    refused(run(&Attend { alibi_slopes: two, ..call }).unwrap_err(), "alibi_slopes of 2 documents");
    let k = [Range::plain(0, 2, 0, 1)];
    refused(run(&Attend { ranges: Ranges { k: &k, ..call.ranges }, ..call }).unwrap_err(), "ranges.k[0].doc is 1");
    let k = [Range::plain(1, 2, 0, 0)];
    refused(run(&Attend { ranges: Ranges { k: &k, ..call.ranges }, ..call }).unwrap_err(), "ranges.k[0].row");
    for pos in [1 << 61, (1 << 61) - 1, -1 << 61, i64::MIN, i64::MAX] {
        let k = [Range::plain(0, 2, pos, 0)];
        refused(run(&Attend { ranges: Ranges { k: &k, ..call.ranges }, ..call }).unwrap_err(), "positions below 2^61");
    }
    refused(
        run(&Attend { ranges: Ranges { pairs: &[Pair { k: 1, band: 0 }], ..call.ranges }, ..call }).unwrap_err(),
        "ranges.pairs",
    );
    refused(run(&Attend { ranges: Ranges { pairs: &[], ..call.ranges }, ..call }).unwrap_err(), "ranges.q[0].keys");
    let mut none = device.kernels(16, 1);
    // What lies where a block does may only be the block itself; and rows are named as the caller names them.
    let block = [Block { dst: call.k, sources_begin: 0, sources_end: 1 }];
    let sources = [RawTensor { token_stride: 1024, ..call.k }];
    let transform = Transform { blocks: &block, sources: &sources };
    // SAFETY: refused before anything is launched.
    let refusal = unsafe { none.transform(&transform, device.stream) };
    refused(refusal.unwrap_err(), "blocks[0].sources[0] is f16 with strides");
    let rows = [Range::plain(0, 1, 0, 0), Range::plain(1, 3, 0, 0)];
    let finish = Finish { o: call.o, lse: call.lse, sinks: RawTensor::NONE, rows: &rows };
    // SAFETY: as above.
    let refusal = unsafe { none.finish(&finish, device.stream) };
    refused(refusal.unwrap_err(), "rows[1].row is 1 with len 3");
    // SAFETY: as above.
    let refusal = unsafe { none.finish(&Finish { sinks: two, rows: &[], ..finish }, device.stream) };
    refused(refusal.unwrap_err(), "sinks.tokens is 2");
    let many = |t: RawTensor, dim| RawTensor { heads: 1 << 29, head_stride: 0, dim, ..t };
    let finish = Finish { o: many(call.o, 256), lse: many(call.lse, 1), rows: &[], ..finish };
    // SAFETY: as above.
    let refusal = unsafe { none.finish(&finish, device.stream) };
    refused(refusal.unwrap_err(), "o of 536870912 heads of 256");
    // SAFETY: refused before anything is launched.
    refused(
        unsafe { device.attend(&call, &mut none, device.stream) }.unwrap_err(),
        "room for scheduler metadata is 16",
    );
    for (bytes, launches, part) in
        [(usize::MAX, 1, "bytes, expected at most"), (usize::MAX - 14, 1, "bytes"), (16, usize::MAX, "calls in flight")]
    {
        let kernels = cpattn::kernel::cuda::StreamKernels::with_metadata(device.cuda.clone(), bytes, launches);
        refused(kernels.unwrap_err(), part);
    }
    let error = device.cuda.allocate(1 << 60).unwrap_err();
    assert!(matches!(error, Error::Device { .. }), "{error}");
    assert!(error.to_string().contains("1152921504606846976 bytes were asked for"), "{error}");
    assert!(matches!(device.cuda.prepare(Dtype::F64, 64, 64), Err(Error::Unsupported { .. })));
    assert!(matches!(cpattn::kernel::cuda::Cuda::new(1000), Err(Error::Invalid { .. })));

    // The same, at the ends of what positions may be.
    let far = (1 << 61) - 1;
    let q = [QRange { range: Range::plain(0, 1, far, 0), ..call.ranges.q[0] }];
    let k = [Range::plain(0, 2, -far, 0)];
    for (what, ranges) in [("legal", call.ranges), ("far", Ranges { q: &q, k: &k, ..call.ranges })] {
        run(&Attend { ranges, ..call }).expect(what);
        let lse = device.download_f32(&small.memory[4])[0];
        assert!((f64::from(lse) - (2f64.exp() + 5f64.exp()).ln()).abs() < 1e-5, "{what}: {lse}");
        device.overwrite(&small.memory[4], &[0xff; 4]);
    }
}

/// Calls over nothing launch nothing.
#[test]
fn no_heads_and_no_rows_are_no_launch() {
    let Some(device) = Device::open() else { return };
    let nothing = |heads| RawTensor::compact(core::ptr::null_mut(), Dtype::F32, 1, heads, 1);
    let call = SinkGradient { lse: nothing(0), delta: nothing(0), sinks: nothing(0), dsinks: nothing(0) };
    // SAFETY: there is no memory to touch.
    unsafe { device.kernels(16, 1).sink_gradient(&call, device.stream) }.expect("a call over no heads");
    let two = RawTensor { tokens: 2, ..call.sinks };
    // SAFETY: refused, and there is no memory to touch.
    let error = unsafe { device.kernels(16, 1).sink_gradient(&SinkGradient { sinks: two, ..call }, device.stream) }
        .unwrap_err();
    assert!(error.to_string().contains("sinks.tokens is 2"), "{error}");
}

/// Multiprocessors left free: fewer blocks, the same result.
#[test]
fn a_bounded_grid_does_all_tiles() {
    let Some(device) = Device::open() else { return };
    device.cuda.set_sm_margin(u32::MAX);
    let case = crate::case::Case {
        documents: vec![(400, 40, 0)],
        heads: 4,
        held: 0..4,
        ..crate::case::Case::new("bounded", Dtype::F16, (64, 64))
    };
    crate::run::check(&device, &case);
}
