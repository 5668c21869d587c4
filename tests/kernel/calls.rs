// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attention call by call: the fixture, merges, sinks, what is allocated and what is left alone.

use crate::bits::backward_call;
use crate::counting;
use crate::harness::*;
use crate::threads::threaded;
use cpattn::call::{
    Attend, AttendBackward, Band, Block, Delta, Finish, Gradients, HeadMap, Mode, Pair, QRange, Range, Ranges,
    RawTensor, Score, Transform,
};
use cpattn::kernel::cpu::{self, Scratch};
use cpattn::kernel::reference::Attention;
use cpattn::{Dtype, Element, Error};
use half::{bf16, f16};

/// Real activations against another implementation's float64 results: the reference, then the kernels.
#[test]
fn fixture() {
    let bytes = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/minilm_263.safetensors")).unwrap();
    // Behind the length of the header: the header, an object of JSON, then the data.
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header = str::from_utf8(header).unwrap();
    let tensor = |name: &str| {
        let entry = header.split_once(&format!("{name:?}:{{")).unwrap().1;
        let offsets = entry.split_once("\"data_offsets\":[").unwrap().1.split_once(']').unwrap().0;
        let (begin, end) = offsets.split_once(',').unwrap();
        &data[begin.parse().unwrap()..end.parse().unwrap()]
    };
    let f32s = |name: &str| -> Vec<f64> {
        tensor(name).chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect()
    };
    let f16s = |name: &str| -> Vec<f16> {
        tensor(name).chunks(2).map(|b| f16::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let wide = |x: &[f16]| x.iter().map(|x| x.to_f64()).collect::<Vec<_>>();
    let cu: Vec<i32> = tensor("cu_seqlens").chunks(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect();
    let mut inputs = ["q", "k", "v", "do"].map(f16s);
    let [q, k, v, d_o] = inputs.each_ref().map(|x| wide(x));
    let a = Attention {
        q: &q,
        k: &k,
        v: &v,
        cu_seqlens_q: &cu,
        cu_seqlens_k: &cu,
        q_start: &vec![0; cu.len() - 1],
        heads: 12,
        kv_heads: 12,
        head_dim: 32,
        value_dim: 32,
        score: score(32, UNLIMITED, 0),
        alibi_slopes: None,
        sinks: None,
        dropout: None,
    };
    let out = a.forward();
    let gradient = a.backward(&d_o, &out);
    let against = |name: &str, found: &[f64], bound: f64| {
        let mut rms = Rms::default();
        rms.add(found, &f32s(name));
        rms.assert_below(bound, 0.0, name);
    };
    // The file holds float64 results rounded to f32.
    against("o_causal", &out.o, 1e-7);
    against("lse_causal", &out.lse, 1e-7);
    against("dq_causal", &gradient.dq, 1e-7);
    against("dk_causal", &gradient.dk, 1e-7);
    against("dv_causal", &gradient.dv, 1e-7);

    // The kernels from f16: o before and after its rounding, gradients in f32 from the rounded o.
    let tokens = *cu.last().unwrap() as usize;
    let tensor = |ptr: *mut u8, dtype, dim| RawTensor::compact(ptr, dtype, tokens as u64, 12, dim);
    let mut o = vec![f16::NAN; tokens * 12 * 32];
    let mut wides = vec![vec![f32::NAN; tokens * 12 * 32]; 4];
    let mut sums = vec![vec![f32::NAN; tokens * 12]; 2];
    let mut words = vec![f32::NAN; tokens * 12 * 2];
    let [q, k, v, d_o] = inputs.each_mut().map(|x| tensor(x.as_mut_ptr().cast(), Dtype::F16, 32));
    let mut each = wides.iter_mut().map(|x| tensor(x.as_mut_ptr().cast(), Dtype::F32, 32));
    let [running, dq, dk, dv] = std::array::from_fn(|_| each.next().unwrap());
    let mut each = sums.iter_mut().map(|x| tensor(x.as_mut_ptr().cast(), Dtype::F32, 1));
    let [lse, delta] = std::array::from_fn(|_| each.next().unwrap());
    let documents: Vec<_> = cu
        .windows(2)
        .enumerate()
        .map(|(doc, w)| Range::plain(w[0].into(), (w[1] - w[0]) as u32, 0, doc as u32))
        .collect();
    let call = Attend {
        running,
        running_lse: tensor(words.as_mut_ptr().cast(), Dtype::F32, 2),
        lse,
        ..Attend::new(
            [q, k, v, tensor(o.as_mut_ptr().cast(), Dtype::F16, 32)],
            HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
            a.score,
            Ranges::default(),
        )
    };
    let mut scratch = threaded(Scratch::new(2));
    let rounding = rounding::<f16>(scratch.isa().unwrap());
    scratch.reserve(Dtype::F16, 32, 32);
    for mode in [Mode::First, Mode::Only] {
        let (mut qs, ks, pairs) = ring_step(&documents, &documents, 0, 1, true, |_| [0; 2]);
        qs.iter_mut().for_each(|q| q.mode = mode);
        let call = Attend { ranges: Ranges { q: &qs, k: &ks, pairs: &pairs, bands: &[Band::WHOLE] }, ..call };
        // SAFETY: the tensors are the vectors above, alive and used by no other code; here and below.
        unsafe { cpu::attend(&call, &mut scratch) }.unwrap();
        if mode == Mode::Only {
            // SAFETY: as above.
            unsafe { cpu::delta(&Delta::new([call.o, d_o, delta])) }.unwrap();
            let backward = backward_call(&call, d_o, delta, Gradients::All, [dq, dk, dv]);
            // SAFETY: as above.
            unsafe { cpu::attend_backward(&backward, &mut scratch) }.unwrap();
        }
    }
    let from_f32 = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    against("o_causal", &from_f32(&wides[0]), 1e-6 + rounding);
    against("lse_causal", &from_f32(&sums[0]), 1e-6);
    assert!(words.chunks(2).map(|w| w[0]).eq(sums[0].iter().copied()), "the first word is the final lse");
    against("o_causal", &wide(&o), 3e-4 + rounding);
    // delta is made of the rounded o, as it is in use.
    against("dq_causal", &from_f32(&wides[1]), 1e-3);
    against("dk_causal", &from_f32(&wides[2]), 1e-3);
    against("dv_causal", &from_f32(&wides[3]), 1e-6 + rounding);
}

/// o and lse of a small f32 problem, whole or with its keys in two partial results that are merged as tensors: an lse
/// of two words with one of one.
#[test]
fn merged_tensors_are_the_whole() {
    let p = Problem { cut: Cut::Pieces(20), sinks: false, ring_steps: 1, ..problem(12) };
    let w = p.whole::<f32>();
    let expected = p.reference(&w, false).forward();
    let mut random = Random::new(5);
    let zeros = vec![0; p.lens_k.len()];
    let q_at = place(&p.lens_q, &p.starts, p.cut, &mut random);
    let k_at = place(&p.lens_k, &zeros, p.cut, &mut random);
    let mut q = Buffer::<f32>::poisoned(q_at.rows, p.heads, p.d);
    let mut k = Buffer::<f32>::poisoned(k_at.rows, p.kv_heads, p.d);
    let mut v = Buffer::<f32>::poisoned(k_at.rows, p.kv_heads, p.dv);
    q.put(&w.q, p.heads, 0..p.heads, &q_at.row_of);
    k.put(&w.k, p.kv_heads, 0..p.kv_heads, &k_at.row_of);
    v.put(&w.v, p.kv_heads, 0..p.kv_heads, &k_at.row_of);
    let mut slopes = head_numbers(&w.alibi_slopes, 0..w.alibi_slopes.len());
    let mut scratch = Scratch::new(1);
    scratch.reserve(Dtype::F32, p.d as u32, p.dv as u32);
    let mut partials: Vec<_> = (0..2)
        .map(|i| {
            let mut o = Buffer::<f32>::poisoned(q_at.rows, p.heads, p.dv);
            let mut lse = Buffer::<f32>::poisoned(q_at.rows, p.heads, 2 - i);
            let (mut qs, ks, pairs) = ring_step(&q_at.ranges, &k_at.ranges, i, 2, false, |_| [0; 2]);
            qs.iter_mut().for_each(|q| q.mode = Mode::First);
            let call = Attend {
                running: o.raw(),
                running_lse: lse.raw(),
                alibi_slopes: p.slopes(&mut slopes, 0..p.heads),
                ..Attend::new(
                    [q.raw(), k.raw(), v.raw(), RawTensor::NONE],
                    HeadMap { q_offset: 0, kv_offset: 0, group: (p.heads / p.kv_heads) as u32 },
                    p.score,
                    Ranges { q: &qs, k: &ks, pairs: &pairs, bands: &[Band::WHOLE] },
                )
            };
            // SAFETY: the tensors are the buffers above, alive and used by no other code.
            unsafe { cpu::attend(&call, &mut scratch) }.unwrap();
            (o, lse)
        })
        .collect();
    let (mut o2, mut l2) = partials.pop().unwrap();
    let (mut o1, mut l1) = partials.pop().unwrap();
    // SAFETY: as above.
    unsafe { cpu::merge(&o1.raw(), &l1.raw(), &o2.raw(), &l2.raw()) }.unwrap();
    let mut rms = Rms::default();
    for h in 0..p.heads {
        for (token, row) in o1.get(h, &q_at.row_of).iter().enumerate() {
            rms.add(row, &expected.o[(token * p.heads + h) * p.dv..][..p.dv]);
        }
    }
    rms.assert_below(1e-6, 0.0, "merged o");
    // SAFETY: refused before anything is touched.
    let refused = unsafe { cpu::merge(&o1.raw(), &o2.raw(), &o2.raw(), &l2.raw()) };
    assert!(matches!(refused, Err(Error::Invalid { argument, .. }) if argument.starts_with("lse")));
}

/// A sink far above all scores, one far below, and none, on rows with and without keys.
#[test]
fn large_sinks() {
    let (mut q, mut k, mut v) = (vec![1f32; 12], vec![1f32; 12], vec![2f32; 12]);
    let (mut o, mut lse) = (vec![f32::NAN; 12], vec![f32::NAN; 6]);
    let mut sinks = [1e4f32, -1e4, f32::NEG_INFINITY];
    let tensor = |x: &mut [f32], dim| RawTensor::compact(x.as_mut_ptr().cast(), Dtype::F32, 2, 3, dim);
    let range = |row, pos| Range::plain(row, 1, pos, 0);
    // Row 1 has the key of position 0, row 0 (position −5) is before it.
    let rows = [
        QRange { range: range(0, -5), document: [0; 2], keys_begin: 0, keys_end: 1, mode: Mode::Only },
        QRange { range: range(1, 0), document: [0; 2], keys_begin: 1, keys_end: 2, mode: Mode::Only },
    ];
    let ranges = Ranges {
        q: &rows,
        k: &[range(0, 0)],
        pairs: &[Pair { k: 0, band: 0 }, Pair { k: 0, band: 0 }],
        bands: &[Band::WHOLE],
    };
    let call = Attend {
        lse: tensor(&mut lse, 1),
        sinks: per_head(&mut sinks, true),
        ..Attend::new(
            [tensor(&mut q, 2), tensor(&mut k, 2), tensor(&mut v, 2), tensor(&mut o, 2)],
            HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
            Score { scale: 1.0, softcap: 0.0, window_left: UNLIMITED, window_right: 0 },
            ranges,
        )
    };
    let mut scratch = Scratch::new(1);
    scratch.reserve(Dtype::F32, 2, 2);
    // SAFETY: the tensors are the vectors above.
    unsafe { cpu::attend(&call, &mut scratch) }.unwrap();
    assert_eq!(lse, [1e4, -1e4, f32::NEG_INFINITY, 1e4, 2.0, 2.0]);
    assert_eq!(o, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0]);
}

/// Calls allocate nothing, in any type and pass.
#[test]
fn calls_do_not_allocate() {
    fn run<E: Element>() {
        let p = Problem { sinks: false, alibi: false, ..problem(30) };
        let mut x = vec![E::from_f64(0.5); 64 * 2 * 16];
        let mut outs: Vec<Vec<E::Acc>> = vec![vec![E::Acc::from_f64(0.0); 64 * 2 * 16]; 6];
        let t = |x: &mut [E]| RawTensor::compact(x.as_mut_ptr().cast(), E::DTYPE, 64, 2, 16);
        let q = t(&mut x);
        let mut o = vec![E::from_f64(0.0); 64 * 2 * 16];
        let mut out = outs
            .iter_mut()
            .enumerate()
            .map(|(i, x)| RawTensor::compact(x.as_mut_ptr().cast(), E::Acc::DTYPE, 64, 2, if i < 2 { 1 } else { 16 }));
        let [lse, delta, running, dq, dk, dv] = std::array::from_fn(|_| out.next().unwrap());
        let range = Range::plain(0, 64, 0, 0);
        let rows = [QRange { range, document: [0; 2], keys_begin: 0, keys_end: 1, mode: Mode::Only }];
        let ranges = Ranges { q: &rows, k: &[range], pairs: &[Pair { k: 0, band: 0 }], bands: &[Band::WHOLE] };
        let call = Attend {
            running,
            lse,
            aligned: true,
            ..Attend::new([q, q, q, t(&mut o)], HeadMap { q_offset: 0, kv_offset: 0, group: 1 }, p.score, ranges)
        };
        let mut scratch = Scratch::new(1);
        scratch.reserve(E::DTYPE, 16, 16);
        let blocks = [Block { dst: dq, sources_begin: 0, sources_end: 2 }];
        let sources = [dq, dk];
        let before = counting::allocations();
        // SAFETY: the tensors are the vectors above.
        unsafe {
            cpu::attend(&call, &mut scratch).unwrap();
            cpu::delta(&Delta::new([call.o, q, delta])).unwrap();
            for aligned in [false, true] {
                let call = backward_call(&Attend { aligned, ..call }, q, delta, Gradients::All, [dq, dk, dv]);
                cpu::attend_backward(&call, &mut scratch).unwrap();
            }
            cpu::transform(&Transform { blocks: &blocks, sources: &sources }).unwrap();
            cpu::finish(&Finish { o: call.o, lse, sinks: RawTensor::NONE, rows: &[range] }).unwrap();
            scratch.reserve(E::DTYPE, 16, 16);
        }
        assert_eq!(counting::allocations() - before, 0, "{}", E::DTYPE);
    }
    run::<f32>();
    run::<f64>();
    run::<bf16>();
    run::<f16>();
}

/// A visit of a ring meets a part of the keys. The others, tile by tile, are neither read nor written.
#[test]
fn adding_to_keys_leaves_those_alone_that_no_row_reaches() {
    let (rows, keys, dim, tile) = (100, 300, 8, 128);
    let numbers = |n: usize, seed: usize| -> Vec<f32> {
        (0..n * dim).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0).collect()
    };
    let (mut q, mut d_o) = (numbers(rows, 1), numbers(rows, 2));
    let (mut k, mut v) = (numbers(keys, 3), numbers(keys, 4));
    k[tile * dim..].fill(f32::NAN);
    v[tile * dim..].fill(f32::NAN);
    let (mut lse, mut delta) = (vec![1.0f32; rows], vec![0.5f32; rows]);
    // What 0 is added to would lose its sign.
    let (mut dk, mut dv) = (vec![-0.0f32; keys * dim], vec![-0.0f32; keys * dim]);
    let raw = |x: &mut [f32], dim: usize| {
        RawTensor::compact(x.as_mut_ptr().cast(), Dtype::F32, (x.len() / dim) as u64, 1, dim as u32)
    };
    let range = Range::plain(0, rows as u32, 0, 0);
    let qs = [QRange { range, document: [0; 2], keys_begin: 0, keys_end: 1, mode: Mode::First }];
    let ranges = Ranges {
        q: &qs,
        k: &[Range::plain(0, keys as u32, 0, 0)],
        pairs: &[Pair { k: 0, band: 0 }],
        bands: &[Band::WHOLE],
    };
    let call = AttendBackward {
        lse: raw(&mut lse, 1),
        delta: raw(&mut delta, 1),
        dk: raw(&mut dk, dim),
        dv: raw(&mut dv, dim),
        accumulate_keys: true,
        gradients: Gradients::Keys,
        ..AttendBackward::new(
            [raw(&mut q, dim), raw(&mut k, dim), raw(&mut v, dim), raw(&mut d_o, dim)],
            HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
            score(dim, UNLIMITED, 0),
            ranges,
        )
    };
    let mut scratch = Scratch::new(1);
    scratch.reserve(Dtype::F32, dim as u32, dim as u32);
    // SAFETY: the tensors are the vectors above, alive and used by no other code.
    unsafe { cpu::attend_backward(&call, &mut scratch) }.unwrap();
    for (name, sums) in [("dk", &dk), ("dv", &dv)] {
        let untouched = |x: &f32| x.to_bits() == (-0.0f32).to_bits();
        assert!(!sums[..rows * dim].iter().any(untouched), "{name} of keys that rows see");
        assert!(sums[tile * dim..].iter().all(untouched), "{name} of keys that none sees");
    }
}
