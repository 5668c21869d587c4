// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dropout in the ways of the grid: documents and slices, ranges cut in every way, heads in shares, all element types;
//! and what a call with dropout is refused for.

use crate::grid::check;
use crate::harness::*;
use crate::slices;
use cpattn::Element;
use cpattn::call::{Attend, Band, Dropout, DropoutMask, HeadMap, Pair, QRange, Range, Ranges, RawTensor};
use cpattn::call::{Mode, Score};
use cpattn::kernel::cpu::{self, Scratch};
use half::{bf16, f16};

fn drawn<E: Element>(seeds: std::ops::Range<u64>) {
    for seed in some_of(seeds) {
        let dropout = Some([0.1, 0.5, 0.9, 0.3][seed as usize % 4]);
        check::<E>(&Problem { dropout, ..problem(seed) });
        check::<E>(&Problem { dropout, ..slices::of(seed) });
    }
}

#[test]
fn dropout_f32() {
    drawn::<f32>(2000..2009);
}

#[test]
fn dropout_bf16() {
    drawn::<bf16>(2100..2109);
}

#[test]
fn dropout_f16() {
    drawn::<f16>(2200..2204);
}

#[test]
fn dropout_f64() {
    drawn::<f64>(2300..2309);
}

/// Rows must be tokens of the batch: their document listed, and their places numbers of 32 bits.
#[test]
fn refusals() {
    let mut scratch = Scratch::new(1);
    scratch.reserve(cpattn::Dtype::F32, 8, 8);
    let (mut x, mut lse) = (vec![0f32; 4 * 8], vec![0f32; 4]);
    let t = RawTensor::compact(x.as_mut_ptr().cast(), cpattn::Dtype::F32, 4, 1, 8);
    let lse = RawTensor::compact(lse.as_mut_ptr().cast(), cpattn::Dtype::F32, 4, 1, 1);
    let mut refused = |pos: i64, doc: u32, tokens: [&[i64]; 2]| {
        let range = Range::plain(0, 4, pos, doc);
        let q = [QRange { range, document: [0; 2], keys_begin: 0, keys_end: 1, mode: Mode::Only }];
        let ranges = Ranges { q: &q, k: &[range], pairs: &[Pair::of(0)], bands: &[Band::WHOLE] };
        let score = Score { scale: 1.0, softcap: 0.0, window_left: i64::MAX, window_right: i64::MAX };
        let heads = HeadMap { q_offset: 0, kv_offset: 0, group: 1 };
        let mask = DropoutMask::new(0.5, 1).unwrap();
        let dropout = Some(Dropout { mask, q_tokens: tokens[0], k_tokens: tokens[1] });
        let call = Attend { lse, dropout, ..Attend::new([t, t, t, t], heads, score, ranges) };
        // SAFETY: the call is refused before it accesses memory.
        unsafe { cpu::attend(&call, &mut scratch) }.unwrap_err().to_string()
    };
    let text = refused(0, 2, [&[0, 0], &[0, 0, 0]]);
    assert_eq!(text, "ranges.q[0].doc is 2, expected below 2, the length of dropout.q_tokens");
    let text = refused(0, 2, [&[0, 0, 0], &[0, 0]]);
    assert_eq!(text, "ranges.k[0].doc is 2, expected below 2, the length of dropout.k_tokens");
    let expected = "expected tokens 0 to 4294967295 of the packed batch: dropout is by token";
    assert_eq!(refused(-3, 0, [&[2], &[3]]), format!("ranges.q[0] is tokens -1..=2, {expected}"));
    let far = (1 << 32) - 4;
    assert_eq!(refused(1, 0, [&[0], &[far]]), format!("ranges.k[0] is tokens 4294967293..=4294967296, {expected}"));
}
