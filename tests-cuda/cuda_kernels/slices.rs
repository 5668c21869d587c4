// SPDX-License-Identifier: MIT OR Apache-2.0
//! Slices: pairs of documents with bands, against attention in f64 over pairs of tokens.
//!
//! The problems are drawn: slices over the same tokens, of the same document or of two, empty ones, limits of every
//! sort. No two share a pair of tokens.

use crate::case::{Case, Cut, Slice};
use crate::clusters;
use crate::device::Device;
use crate::hopper::alone_with;
use crate::run::check;
use crate::slow::{self, Turn};
use core::ops::Range;
use cpattn::Dtype;
use cpattn::call::{Band, Score};
use cpattn::kernel::cuda::{Cuda, Family};
use fastrand::Rng;

/// A limit, or none.
fn limit(rng: &mut Rng, of: Range<i64>, none: i64) -> i64 {
    if rng.u8(..4) == 0 { none } else { rng.i64(of) }
}

/// Of every sort: full, causal, inverse, windows, negative ones, nothing; a part of the documents or all of them.
fn slice(rng: &mut Rng, documents: &[(usize, usize, i64)]) -> Slice {
    let q = rng.usize(..documents.len());
    let k = if rng.bool() { q } else { rng.usize(..documents.len()) };
    let (len_q, len_k) = (documents[q].0 as i64, documents[k].1 as i64);
    let start = documents[q].2;
    let (q_begin, q_end) =
        (limit(rng, start - 5..start + len_q + 2, i64::MIN), limit(rng, start..start + len_q + 5, i64::MAX));
    let (k_begin, k_end) = (limit(rng, -5..len_k + 2, i64::MIN), limit(rng, 0..len_k + 5, i64::MAX));
    // Distances as if the slice's first q and k were near each other, whatever their positions.
    let shift = start + rng.i64(-40..40);
    let (low, high) = match rng.u8(..7) {
        0 => (i64::MIN, i64::MAX),
        1 => (i64::MIN, 0),
        2 => (0, i64::MAX),
        3 => (1, rng.i64(0..60)),
        4 => (-rng.i64(0..90), rng.i64(-60..60)),
        5 => (-rng.i64(0..40), 0),
        _ => (rng.i64(-150..0), -1),
    };
    Slice { documents: (q as u32, k as u32), band: Band { q_begin, q_end, k_begin, k_end, low, high, shift } }
}

/// Up to eight slices, no pair of tokens in two.
fn slices(rng: &mut Rng, documents: &[(usize, usize, i64)]) -> Vec<Slice> {
    let most = rng.usize(1..9);
    let mut out: Vec<Slice> = Vec::new();
    let mut taken = std::collections::HashSet::new();
    for _ in 0..60 {
        if out.len() == most {
            break;
        }
        let new = slice(rng, documents);
        let (q, k) = (new.documents.0 as usize, new.documents.1 as usize);
        let mut pairs = Vec::new();
        for x in documents[q].2..documents[q].2 + documents[q].0 as i64 {
            let (begin, end) = new.band.keys(x, (i64::MAX, i64::MAX));
            pairs.extend((begin.max(0)..end.min(documents[k].1 as i64)).map(|y| (q, x, k, y)));
        }
        if pairs.iter().all(|pair| !taken.contains(pair)) {
            taken.extend(pairs);
            out.push(new);
        }
    }
    out
}

/// A problem for kernels of these head dims.
pub fn draw(rng: &mut Rng, dims: (usize, usize)) -> Case {
    let dtype = if rng.bool() { Dtype::Bf16 } else { Dtype::F16 };
    let mut lens = || rng.usize(0..210);
    let lens = [(lens(), lens()), (lens(), lens()), (lens(), 0)];
    let count = rng.usize(1..4);
    let documents: Vec<_> = lens[..count].iter().map(|&(q, k)| (q, k, [0, 37, -20][rng.usize(..3)])).collect();
    let (heads, kv_heads) = [(2, 1), (4, 2), (3, 3), (4, 1)][rng.usize(..4)];
    let cut = [Cut::Whole, Cut::Whole, Cut::Chunks(3), Cut::Striped(2, 16), Cut::Striped(3, 1)][rng.usize(..5)];
    let base = Case::new("slices", dtype, dims);
    let score = Score {
        softcap: if rng.u8(..4) == 0 { 2.0 } else { 0.0 },
        window_left: if rng.u8(..4) == 0 { rng.i64(0..100) } else { i64::MAX },
        window_right: if rng.u8(..4) == 0 { rng.i64(0..100) } else { i64::MAX },
        ..base.score
    };
    Case {
        slices: slices(rng, &documents),
        documents,
        heads,
        kv_heads,
        held: 0..heads,
        score,
        alibi_slopes: rng.u8(..3) == 0,
        sinks: rng.u8(..3) == 0,
        cut,
        ring_steps: if matches!(cut, Cut::Whole) { 1 } else { rng.usize(1..4) },
        shuffled: rng.bool(),
        accumulate: rng.u8(..4) == 0,
        ..base
    }
}

fn drawn(device: &Device, seed: u64, n: usize, every: &[(usize, usize)]) {
    let mut rng = Rng::with_seed(seed);
    let mut bands = 0;
    for i in 0..n {
        let case = draw(&mut rng, every[i % every.len()]);
        bands += case.slices.len();
        check(device, &case);
    }
    assert!(bands > n, "{bands} slices in {n} problems");
}

const DIMS: [(usize, usize); 6] = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)];

/// What the device takes by itself: where it runs the kernels for `sm_90a`, these.
#[test]
fn drawn_slices() {
    let Some(device) = Device::open() else { return };
    drawn(&device, 1, 24, &DIMS);
}

/// The forward kernels for `sm_90a` at every head dim, where the device runs them.
#[test]
fn drawn_slices_of_every_hopper_kernel() {
    let Some(device) = Device::open_hopper() else { return };
    drawn(&device, 2, 24, &DIMS);
}

#[test]
fn drawn_slices_of_sm_80() {
    if slow::left_out(Turn::Second) {
        return;
    }
    let Some(device) = Device::of(Cuda::with_family(0, Family::Sm80)) else { return };
    drawn(&device, 3, 24, &DIMS);
}

#[test]
fn drawn_slices_of_wide_heads() {
    let Some(device) = Device::open() else { return };
    drawn(&device, 6, 12, &[(264, 8), (72, 264)]);
}

/// The kernels of devices with 99 KB of shared memory to a block.
#[test]
fn drawn_slices_of_small_devices() {
    if Device::open().is_some() && alone_with("slices::drawn_slices_of_small_devices", &[("CPATTN_EMU_SM", "86")]) {
        drawn(&Device::open().expect("asked before"), 4, 12, &[(128, 128), (64, 64), (96, 96)]);
    }
}

/// Clusters of two blocks.
#[test]
fn drawn_slices_in_clusters() {
    if alone_with("slices::drawn_slices_in_clusters", &[(clusters::VARIABLE, "1")])
        && let Some([with, _]) = clusters::devices()
    {
        drawn(&with, 5, 12, &[(128, 128)]);
    }
}

/// A prompt that several answers read, each by a slice of its own, beside the causal slices.
#[test]
fn shared_prefix() {
    if slow::left_out(Turn::First) {
        return;
    }
    let Some(device) = Device::open() else { return };
    let (prompt, answers) = (150, [60, 1, 130]);
    let len = prompt + answers.iter().sum::<i64>();
    let mut begin = prompt;
    let causal =
        |begin: i64, end: i64| Band { q_begin: begin, q_end: end, k_begin: begin, k_end: end, high: 0, ..Band::WHOLE };
    let mut bands = vec![causal(0, prompt)];
    for answer in answers {
        bands.push(causal(begin, begin + answer));
        // Its first token lies right behind the prompt.
        let shift = begin - prompt;
        bands.push(Band { q_begin: begin, q_end: begin + answer, k_end: prompt, shift, ..Band::WHOLE });
        begin += answer;
    }
    let slices: Vec<Slice> = bands.into_iter().map(|band| Slice { documents: (0, 0), band }).collect();
    for dims in DIMS {
        let base = Case::new("prefix", Dtype::Bf16, dims);
        let open = Score { window_right: i64::MAX, ..base.score };
        let window = Score { window_left: 70, ..open };
        for (score, alibi_slopes, cut) in
            [(open, false, Cut::Whole), (window, true, Cut::Whole), (open, true, Cut::Chunks(4))]
        {
            let documents = vec![(len as usize, len as usize, 0)];
            check(&device, &Case { documents, slices: slices.clone(), score, alibi_slopes, cut, ..base.clone() });
        }
    }
}
