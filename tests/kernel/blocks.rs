// SPDX-License-Identifier: MIT OR Apache-2.0
//! What moves memory around attention: transforms in every form, delta, finish.

use crate::harness::*;
use cpattn::call::{Block, Delta, Finish, Range, RawTensor, SinkGradient, Transform};
use cpattn::kernel::cpu::{self};
use cpattn::{Dtype, Element, schedule::Schedule};
use half::{bf16, f16};

#[test]
fn transforms() {
    fn raw<T: Element>(x: &mut [T], strides: (i64, i64), shape: (u64, u32, u32)) -> RawTensor {
        RawTensor {
            ptr: x.as_mut_ptr().cast(),
            token_stride: strides.0,
            head_stride: strides.1,
            tokens: shape.0,
            heads: shape.1,
            dim: shape.2,
            dtype: T::DTYPE,
        }
    }
    let shape = (3, 2, 300);
    // A cast and an ordered sum, into head-major memory; zeros; and a sum added to in place.
    let mut a: Vec<f32> = (0..1800).map(|i| i as f32 * 0.37 - 200.0).collect();
    let mut b: Vec<bf16> = (0..1800).map(|i| bf16::from_f32(1e3 - i as f32)).collect();
    let mut sum = vec![bf16::ZERO; 1800];
    let mut wide = vec![f64::NAN; 1800];
    let mut zeros = vec![f16::NAN; 1800];
    let mut total = a.clone();
    let compact = (600, 300);
    let sources = [
        raw(&mut a, compact, shape),
        raw(&mut b, compact, shape),
        raw(&mut b, compact, shape),
        raw(&mut total, compact, shape),
        raw(&mut a, compact, shape),
    ];
    let block = |dst, sources_begin, sources_end| Block { dst, sources_begin, sources_end };
    let blocks = [
        block(raw(&mut sum, (300, 900), shape), 0, 2),
        block(raw(&mut wide, compact, shape), 2, 3),
        block(raw(&mut zeros, compact, shape), 0, 0),
        block(sources[3], 3, 5),
    ];
    // SAFETY: the tensors are the vectors above.
    unsafe { cpu::transform(&Transform { blocks: &blocks, sources: &sources }) }.unwrap();
    for t in 0..3 {
        for h in 0..2 {
            for d in 0..300 {
                let (i, j) = (t * 600 + h * 300 + d, t * 300 + h * 900 + d);
                assert_eq!(sum[j], bf16::from_f32(a[i] + b[i].to_f32()));
                assert_eq!(wide[i], b[i].to_f64());
                assert_eq!(total[i], a[i] + a[i]);
            }
        }
    }
    assert!(zeros.iter().all(|x| x.to_bits() == 0));
    let wrong = [block(sources[0].rows(0, 2), 1, 2)];
    // SAFETY: refused before anything is touched.
    let refused = unsafe { cpu::transform(&Transform { blocks: &wrong, sources: &sources }) };
    assert_eq!(
        refused.unwrap_err().to_string(),
        "blocks[0].sources[0] [tokens, heads, dim] is [3, 2, 300], expected [2, 2, 300]"
    );
    // What lies where the block does may only be the block itself, and first.
    let strided = RawTensor { token_stride: 1200, ..sources[0] };
    let wrong = [sources[1], sources[0], strided, RawTensor { dtype: Dtype::Bf16, ..sources[0] }];
    for (begin, end, text) in [
        (0, 2, "blocks[0].sources[1] is dst, expected another tensor: only the first source may be dst"),
        (
            2,
            3,
            "blocks[0].sources[0] is f32 with strides (1200, 300), expected f32 with strides (600, 300), as dst, where it \
             lies",
        ),
        (
            3,
            4,
            "blocks[0].sources[0] is bf16 with strides (600, 300), expected f32 with strides (600, 300), as dst, where \
             it lies",
        ),
    ] {
        let blocks = [block(sources[0], begin, end)];
        // SAFETY: refused before anything is touched.
        let refused = unsafe { cpu::transform(&Transform { blocks: &blocks, sources: &wrong }) };
        assert_eq!(refused.unwrap_err().to_string(), text);
    }
    // Nothing steps by the token stride of a single token.
    let one = sources[3].rows(0, 1);
    let call = Transform { blocks: &[block(one, 0, 1)], sources: &[RawTensor { token_stride: 7, ..one }] };
    // SAFETY: the tensors are the vectors above.
    unsafe { cpu::transform(&call) }.unwrap();

    let (mut delta, mut lse) = (vec![f32::NAN; 6], vec![f32::NAN; 6]);
    let o = raw(&mut b, compact, shape);
    let sums = raw(&mut delta, (1, 3), (3, 2, 1));
    // SAFETY: as above.
    unsafe { cpu::delta(&Delta::new([o, o, sums])) }.unwrap();
    for t in 0..3 {
        for h in 0..2 {
            let exact: f64 = b[t * 600 + h * 300..][..300].iter().map(|x| x.to_f64() * x.to_f64()).sum();
            assert!((f64::from(delta[h * 3 + t]) / exact - 1.0).abs() < 1e-6);
        }
    }
    // Less a gradient of lse, which is not read where lse is −∞.
    let (without, mut found) = (delta.clone(), vec![f32::NAN; 6]);
    let mut of_lse = vec![0.5f32, f32::NEG_INFINITY, -0.0, 2.0, f32::INFINITY, -3.0];
    let mut d_lse = vec![1.25f32, f32::NAN, -3.5, 0.75, 2.0, -0.125];
    let numbers = |x: &mut Vec<f32>| raw(x, (1, 3), (3, 2, 1));
    let o = raw(&mut b, compact, shape);
    let call =
        Delta { lse: numbers(&mut of_lse), d_lse: numbers(&mut d_lse), ..Delta::new([o, o, numbers(&mut found)]) };
    // SAFETY: as above.
    unsafe { cpu::delta(&call) }.unwrap();
    for (i, found) in found.iter().enumerate() {
        assert_eq!(*found, if i == 1 { without[1] } else { without[i] - d_lse[i] }, "{i}");
    }
    for (wrong, text) in [
        (Delta { lse: RawTensor::NONE, ..call }, "lse is none, expected the final lse"),
        (Delta { d_lse: call.d_lse.rows(0, 2), ..call }, "d_lse.tokens is 2, expected 3"),
        (Delta { lse: call.lse.heads(0, 1), ..call }, "lse.heads is 1, expected 2"),
        (Delta { d_lse: RawTensor { dtype: Dtype::F64, ..call.d_lse }, ..call }, "d_lse.dtype is f64, expected f32"),
    ] {
        // SAFETY: refused before anything is touched.
        let refused = unsafe { cpu::delta(&wrong) }.unwrap_err().to_string();
        assert!(refused.starts_with(text), "{refused}");
    }
    let mut sinks = [1.5f32, f32::NEG_INFINITY];
    let rows = [Range::plain(1, 2, 0, 0)];
    let before = b.clone();
    let o = raw(&mut b, compact, shape);
    let finish = Finish { o, lse: raw(&mut lse, (2, 1), (3, 2, 1)), sinks: per_head(&mut sinks, true), rows: &rows };
    // SAFETY: as above.
    unsafe { cpu::finish(&finish) }.unwrap();
    assert_eq!(b[..600], before[..600]);
    assert!(b[600..].iter().all(|x| x.to_f32() == 0.0));
    assert!(lse[..2].iter().all(|x| x.is_nan()));
    assert_eq!(lse[2..], [1.5, f32::NEG_INFINITY, 1.5, f32::NEG_INFINITY]);
}

/// Transforms so large that they take other ways through memory: streaming stores, blocks walked together, long runs
/// read in several places. Each element is compared with its own conversion and sum; what lies between rows stays as it
/// was.
#[test]
fn large_transforms() {
    let mut random = Random::new(5);
    let (tokens, heads, dim, gap) = (4_100, 20, 40, 8);
    let row = heads * (dim + gap);
    let n = tokens * row;
    let mut whole: Vec<f32> = (0..n).map(|_| random.normal() as f32).collect();
    let mut halves: Vec<bf16> = (0..n).map(|_| bf16::from_f64(random.normal())).collect();
    let raw = |ptr: *mut u8, dtype, tokens, heads, token_stride, head_stride| RawTensor {
        ptr,
        token_stride: token_stride as i64,
        head_stride: head_stride as i64,
        tokens: tokens as u64,
        heads,
        dim: dim as u32,
        dtype,
    };
    let f32s = raw(whole.as_mut_ptr().cast(), Dtype::F32, tokens, heads as u32, row, dim + gap);
    let bf16s = raw(halves.as_mut_ptr().cast(), Dtype::Bf16, tokens, heads as u32, row, dim + gap);
    // A block for each head, each of another number of tokens, at an address that is no multiple of a line.
    let lengths: Vec<usize> = (0..heads).map(|h| tokens - 13 * h).collect();
    let mut packed = vec![vec![f32::NAN; tokens * dim + 5]; heads];
    let mut summed = vec![vec![f16::NAN; tokens * dim + 5]; heads];
    let blocks = |memory: Vec<*mut u8>, dtype| -> Vec<RawTensor> {
        memory.into_iter().zip(&lengths).map(|(ptr, &n)| raw(ptr, dtype, n, 1, dim, dim)).collect()
    };
    let copies = blocks(packed.iter_mut().map(|x| x[3..].as_mut_ptr().cast()).collect(), Dtype::F32);
    let sums = blocks(summed.iter_mut().map(|x| x[3..].as_mut_ptr().cast()).collect(), Dtype::F16);
    let (mut list, mut sources) = (Vec::new(), Vec::new());
    for h in 0..heads {
        let head = |t: &RawTensor| t.heads(h as u32, 1).rows(0, lengths[h] as u64);
        for (dst, from) in [(copies[h], vec![head(&f32s)]), (sums[h], vec![head(&f32s), head(&bf16s), head(&f32s)])] {
            let begin = sources.len() as u32;
            sources.extend(from);
            list.push(Block { dst, sources_begin: begin, sources_end: sources.len() as u32 });
        }
    }
    // SAFETY: the tensors are the vectors above.
    unsafe { cpu::transform(&Transform { blocks: &list, sources: &sources }) }.unwrap();
    for h in 0..heads {
        for i in 0..lengths[h] * dim {
            let at = i / dim * row + h * (dim + gap) + i % dim;
            let (x, y) = (whole[at], halves[at].to_f32());
            assert_eq!(packed[h][3 + i].to_bits(), x.to_bits(), "head {h}, element {i}");
            assert_eq!(summed[h][3 + i], f16::from_f32(x + y + x), "head {h}, element {i}");
        }
        let outside = 3 + lengths[h] * dim;
        assert!(packed[h][..3].iter().chain(&packed[h][outside..]).all(|x| x.is_nan()));
        assert!(summed[h][..3].iter().chain(&summed[h][outside..]).all(|x| x.is_nan()));
    }
    // Back between the gaps, and casts of one long run, one of them in place.
    let before: Vec<f32> = packed[0][3..][..tokens * dim].to_vec();
    let mut back = vec![f32::NAN; n];
    let mut narrow = vec![bf16::NAN; n + 3];
    let mut total = whole.clone();
    let run = |ptr: *mut u8, dtype| RawTensor::compact(ptr, dtype, tokens as u64, 1, row as u32);
    let sources = [
        RawTensor { tokens: tokens as u64, ..copies[0] },
        run(whole.as_mut_ptr().cast(), Dtype::F32),
        run(total.as_mut_ptr().cast(), Dtype::F32),
        run(halves.as_mut_ptr().cast(), Dtype::Bf16),
    ];
    let list = [
        Block { dst: raw(back.as_mut_ptr().cast(), Dtype::F32, tokens, 1, row, dim), sources_begin: 0, sources_end: 1 },
        Block { dst: run(narrow[1..].as_mut_ptr().cast(), Dtype::Bf16), sources_begin: 1, sources_end: 2 },
        Block { dst: sources[2], sources_begin: 2, sources_end: 4 },
    ];
    // SAFETY: as above.
    unsafe { cpu::transform(&Transform { blocks: &list, sources: &sources }) }.unwrap();
    for (i, x) in back.iter().enumerate() {
        let inside = i % row < dim;
        assert!(if inside { *x == before[i / row * dim + i % row] } else { x.is_nan() }, "element {i}");
    }
    for i in 0..n {
        assert_eq!(narrow[1 + i], bf16::from_f32(whole[i]), "element {i}");
        assert_eq!(total[i], whole[i] + halves[i].to_f32(), "element {i}");
    }
    assert!(narrow[0].is_nan() && narrow[n + 1..].iter().all(|x| x.is_nan()));
}

/// Digits of parts of the rows, added, are the sum of all rows, rounded once; whatever the parts.
#[test]
fn sums_of_sinks_without_rounding() {
    const N: usize = Schedule::SINK_DIGITS;
    let (rows, heads, sinks) = (97, 3, 2);
    let raw = |x: &mut [f32], tokens: usize, dim: usize| RawTensor {
        ptr: x.as_mut_ptr().cast(),
        token_stride: heads as i64,
        head_stride: dim as i64,
        tokens: tokens as u64,
        heads: heads as u32,
        dim: dim as u32,
        dtype: Dtype::F32,
    };
    let mut random = Random::new(7);
    let mut of = |n: usize, scale: f64| (0..n).map(|_| (scale * random.normal()) as f32).collect::<Vec<_>>();
    let (mut lse, mut delta, mut values) = (of(rows * heads, 3.0), of(rows * heads, 1e3), of(heads * sinks, 2.0));
    let (values_raw, mut total) = (raw(&mut values, 1, sinks), vec![0f32; heads * sinks]);
    for cuts in [vec![0, rows], vec![0, 5, 5, 60, rows]] {
        let mut sum = vec![0f32; heads * sinks * N];
        for part in cuts.windows(2) {
            let (n, from) = (part[1] - part[0], part[0] * heads);
            let mut digits = vec![f32::NAN; heads * sinks * N];
            let call = SinkGradient {
                lse: raw(&mut lse[from..], n, 1),
                delta: raw(&mut delta[from..], n, 1),
                sinks: values_raw,
                dsinks: raw(&mut digits, 1, sinks * N),
            };
            // SAFETY: all tensors are this test's, of the shapes given, and apart.
            unsafe { cpu::sink_gradient(&call) }.unwrap();
            sum.iter_mut().zip(&digits).for_each(|(sum, digit)| *sum += digit);
        }
        // SAFETY: as above.
        unsafe { cpu::sink_total(&raw(&mut sum, 1, sinks * N), &raw(&mut total, 1, sinks)) }.unwrap();
        for (i, &found) in total.iter().enumerate() {
            let (h, sink) = (i / sinks, f64::from(values[i]));
            let terms = (0..rows).map(|t| (f64::from(lse[t * heads + h]), f64::from(delta[t * heads + h])));
            let exact: f64 = terms.map(|(lse, delta)| -(sink - lse).exp() * delta).sum();
            assert!((f64::from(found) - exact).abs() <= 1e-7 * exact.abs(), "{i}: {found} {exact}");
        }
    }
    // SAFETY: refused before anything is read.
    let error = unsafe { cpu::sink_total(&raw(&mut [0.0; 6], 1, 2), &raw(&mut total, 1, sinks)) }.unwrap_err();
    assert_eq!(error.to_string(), "digits is 3 heads of 2 f32, expected 3 heads of 56 f32");
}
