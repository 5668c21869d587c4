// SPDX-License-Identifier: MIT OR Apache-2.0
//! The overlap decision against brute force.
//!
//! Brute force marks the bytes of every row in a set; the library compares strides. Random small tensors agree on both,
//! and a few tensors of real size show that the decision needs no enumeration.

use super::{refusal, refuses};
use crate::seeds::each_seed;
use cpattn::{Dtype, call::RawTensor, disjoint};
use fastrand::Rng;
use std::collections::BTreeSet;

/// A tensor at a made-up address: `disjoint` never touches memory.
fn at(address: usize, dtype: Dtype, shape: [u64; 3], strides: [i64; 2]) -> RawTensor {
    RawTensor {
        ptr: std::ptr::without_provenance_mut(address),
        token_stride: strides[0],
        head_stride: strides[1],
        tokens: shape[0],
        heads: shape[1] as u32,
        dim: shape[2] as u32,
        dtype,
    }
}

#[test]
fn overlap_names_both_arguments() {
    let q = at(4096, Dtype::F32, [4, 2, 8], [16, 8]);
    let k = at(4096 + 4 * 63, Dtype::F32, [4, 2, 8], [16, 8]);
    let next = at(4096 + 4 * 64, Dtype::F32, [4, 2, 8], [16, 8]);
    assert_eq!(disjoint(&[("q", q, false), ("k", k, false), ("v", q, false)]), Ok(()));
    assert_eq!(disjoint(&[("q", q, false), ("o", next, true)]), Ok(()));
    refuses(disjoint(&[("q", q, false), ("o", k, true)]), "o", "memory that overlaps q", "no byte with q");
    refuses(disjoint(&[("o", k, true), ("q", q, false)]), "o", "memory that overlaps q", "no byte with q");
    refuses(disjoint(&[("dq", k, true), ("dk", q, true)]), "dk", "memory that overlaps dq", "no byte with dq");
    refuses(
        disjoint(&[("dk", RawTensor { token_stride: 8, ..k }, true)]),
        "dk.token_stride",
        "8 with head_stride 8",
        "at least 16",
    );
    refuses(disjoint(&[("dk", RawTensor { head_stride: 7, ..k }, true)]), "dk.head_stride", "7", "at least 8");
    assert_eq!(disjoint(&[("k", RawTensor { token_stride: 0, ..k }, false)]), Ok(()));
    refuses(disjoint(&[("k", RawTensor { ptr: std::ptr::null_mut(), ..k }, false)]), "k.ptr", "null", "address");
    let far = RawTensor { tokens: u64::MAX, ..k };
    refuses(disjoint(&[("k", far, false)]), "k.token_stride", "16 for", "address space");
    // Nothing written, nothing to hit: tensors without elements overlap nothing.
    let none = [("o", RawTensor::NONE, true), ("lse", RawTensor { tokens: 0, ..q }, true), ("q", q, true)];
    assert_eq!(disjoint(&none), Ok(()));
}

#[test]
fn real_sizes_are_decided_exactly() {
    let (tokens, heads, dim) = (1 << 20, 32, 128i64);
    let base = 1 << 40;
    // Slices of a fused [tokens, 3, heads, dim] buffer, compact within a token.
    let fused = |i: i64| at(base + (2 * i * 32 * dim) as usize, Dtype::Bf16, [tokens, heads, 128], [3 * 32 * dim, dim]);
    let (dq, dk, dv) = (fused(0), fused(1), fused(2));
    assert_eq!(disjoint(&[("dq", dq, true), ("dk", dk, true), ("dv", dv, true)]), Ok(()));
    let late = RawTensor { ptr: dk.ptr.wrapping_sub(2), ..dk };
    refuses(disjoint(&[("dq", dq, true), ("dk", late, true)]), "dk", "overlaps dq", "dq");
    // [tokens, heads, 3, dim]: interleaved head by head.
    let inner = |i: i64| at(base + (2 * i * dim) as usize, Dtype::Bf16, [tokens, heads, 128], [3 * 32 * dim, 3 * dim]);
    assert_eq!(disjoint(&[("dq", inner(0), true), ("dk", inner(1), true), ("dv", inner(2), true)]), Ok(()));
    refuses(disjoint(&[("dq", inner(0), true), ("dk", fused(0), true)]), "dk", "overlaps dq", "dq");
    // Both halves of the tokens of one [heads, tokens] lse.
    let lse = at(base, Dtype::F32, [tokens, heads, 1], [1, 1 << 20]);
    let (early, late) = (lse.rows(0, 1 << 19), lse.rows(1 << 19, 1 << 19));
    assert_eq!(disjoint(&[("lse", early, true), ("delta", late, true)]), Ok(()));
    let one_more = lse.rows(0, (1 << 19) + 1);
    refuses(disjoint(&[("lse", one_more, true), ("delta", late, true)]), "delta", "overlaps lse", "lse");
    // Token strides that differ: all tokens of q against every third one of the fused buffer's k.
    let third = RawTensor { token_stride: 3 * dk.token_stride, tokens: tokens / 3, ..dk };
    assert_eq!(disjoint(&[("q", dq, true), ("k", third, true)]), Ok(()));
    // Neither nested, nor equal, nor told apart by divisors.
    let a = at(base, Dtype::F16, [tokens, 3, 1], [60, 3]);
    let b = at(base + 2, Dtype::F16, [tokens, 1, 1], [100, 1]);
    let (argument, found, _, hint) = refusal(disjoint(&[("q", a, false), ("o", b, true)]));
    assert_eq!((argument.as_str(), hint), ("o", "use separate buffers, or equal token strides"));
    assert!(found.contains("interleaved with q"), "{found}");
    // Fewer tokens are counted out.
    assert_eq!(disjoint(&[("q", RawTensor { tokens: 9000, ..a }, false), ("o", b, true)]), Ok(()));
}

/// The bytes of every row, and whether one is addressed twice.
pub fn footprint(t: &RawTensor) -> (BTreeSet<i64>, bool) {
    let (mut bytes, mut twice) = (BTreeSet::new(), false);
    let size = t.dtype.size() as i64;
    for token in 0..t.tokens as i64 {
        for head in 0..i64::from(t.heads) {
            let first = t.ptr.addr() as i64 + (token * t.token_stride + head * t.head_stride) * size;
            for byte in first..first + i64::from(t.dim) * size {
                twice |= !bytes.insert(byte);
            }
        }
    }
    (bytes, twice)
}

fn small_tensor(draw: &mut Rng) -> RawTensor {
    let dtype = [Dtype::F16, Dtype::F32, Dtype::F64][draw.usize(..3)];
    let shape = [5, 4, 3].map(|most| if draw.u32(..16) == 0 { 0 } else { draw.u64(1..=most) });
    at(4096 + 2 * draw.usize(..60), dtype, shape, [(); 2].map(|()| draw.i64(-12..24)))
}

/// Strides that nest often enough for disjoint answers to be common.
fn nested_pair(draw: &mut Rng) -> (RawTensor, RawTensor) {
    let (heads, dim, parts, gap) = (draw.i64(1..5), draw.i64(1..5), draw.i64(1..4), draw.i64(0..4));
    let (row, swap) = (dim + gap, draw.bool());
    let token = parts * heads * row;
    let mut one = || {
        let first = draw.i64(0..parts * heads);
        let (tokens, h, d, step) = (draw.u64(1..6), draw.i64(1..4), draw.u64(1..=dim as u64), draw.i64(1..4));
        let heads = h.min(parts * heads - first) as u64;
        let strides = [token * step, row];
        let (shape, strides) =
            if swap { ([heads, tokens, d], [strides[1], strides[0]]) } else { ([tokens, heads, d], strides) };
        at((4096 + 4 * first * row) as usize, Dtype::F32, shape, strides)
    };
    (one(), one())
}

#[track_caller]
fn agrees_with_brute_force(a: RawTensor, b: RawTensor) {
    let ((bytes_a, twice_a), (bytes_b, twice_b)) = (footprint(&a), footprint(&b));
    let shared = !bytes_a.is_disjoint(&bytes_b);
    let answer = |written_a, written_b| disjoint(&[("a", a, written_a), ("b", b, written_b)]);
    assert_eq!(answer(false, false), Ok(()));
    for (written_a, written_b) in [(true, false), (false, true), (true, true)] {
        let refused = (written_a && twice_a) || (written_b && twice_b) || shared;
        let result = answer(written_a, written_b);
        assert_eq!(result.is_err(), refused, "{a:?} {b:?}: {result:?}");
        if refused && !(written_a && twice_a) && !(written_b && twice_b) {
            let (blamed, with) = if written_b { ("b", "a") } else { ("a", "b") };
            refuses(result, blamed, &format!("memory that overlaps {with}"), with);
        }
    }
}

#[test]
fn overlap_agrees_with_brute_force() {
    each_seed(10_000, |draw| agrees_with_brute_force(small_tensor(draw), small_tensor(draw)));
}

#[test]
fn nested_overlap_agrees_with_brute_force() {
    each_seed(10_000, |draw| {
        let (a, b) = nested_pair(draw);
        agrees_with_brute_force(a, b);
    });
}
