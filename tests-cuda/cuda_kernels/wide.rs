// SPDX-License-Identifier: MIT OR Apache-2.0
//! Head dims above 256: the kernels whose partners come through shared memory in chunks of 64 columns.
//!
//! Dims are those of MLA in its latent form, others whose last chunk has a single group of eight columns, and such that
//! have the fewest chunks. One kernel serves them all, on every device: 99 KB of shared memory are enough.

use crate::case::{Case, Cut};
use crate::device::Device;
use crate::run::check;
use crate::slow::{self, Turn};
use crate::{all, runs_repeat_of};
use cpattn::Dtype;
use cpattn::call::Score;

const LATENT: (usize, usize) = (576, 512);

/// Chunks that are full, nearly empty and missing; tiles that meet nothing; both types.
#[test]
fn dims() {
    let mut cases = Vec::new();
    for (i, dims) in [LATENT, (264, 8), (8, 264), (320, 448), (520, 456), (576, 128), (64, 512)].into_iter().enumerate()
    {
        cases.push(Case {
            documents: vec![(5, 0, 0), (0, 7, 0), (70, 90, 20), (6, 0, 0), (0, 9, 0)],
            ..Case::new("dims", [Dtype::Bf16, Dtype::F16][i % 2], dims)
        });
    }
    all(&cases);
}

/// Every option, at dims of few chunks.
#[test]
fn scores() {
    let base = Case {
        heads: 4,
        kv_heads: 2,
        held: 0..4,
        documents: vec![(70, 80, 10)],
        ..Case::new("scores", Dtype::F16, (264, 8))
    };
    all(&base.with_scores());
}

/// A kv head for all q heads, keys in several calls whose results are merged, stripes and windows.
#[test]
fn ranges() {
    let base = Case {
        documents: vec![(100, 140, 40), (37, 61, 24)],
        sinks: true,
        heads: 3,
        kv_heads: 1,
        held: 0..3,
        ..Case::new("ranges", Dtype::Bf16, (320, 264))
    };
    let near = Score { window_left: 20, window_right: 9, ..base.score };
    all(&[
        Case { cut: Cut::Chunks(3), ring_steps: 2, ..base.clone() },
        Case { cut: Cut::Striped(3, 5), ring_steps: 3, score: near, alibi_slopes: true, ..base.clone() },
        Case { cut: Cut::Chunks(4), accumulate: true, shuffled: true, ..base.clone() },
        Case { held: 1..3, per_q_head: true, score: near, ..base },
    ]);
}

/// Walks over more tiles than are prepared at once, on either side.
#[test]
fn long_walks() {
    if slow::left_out(Turn::First) {
        return;
    }
    let mut cases = Vec::new();
    for long in [(1, 2200, 0), (2200, 2, 0)] {
        let base = Case::new("long", Dtype::F16, (264, 40));
        cases.push(Case { documents: vec![long], score: Score { window_right: i64::MAX, ..base.score }, ..base });
    }
    all(&cases);
}

/// Blocks that take several tiles, some of which meet nothing: what was begun for one must not reach the next.
#[test]
fn a_bounded_grid() {
    let Some(device) = Device::open() else { return };
    device.cuda.set_sm_margin(u32::MAX);
    let case = Case {
        documents: vec![(20, 0, 0), (0, 20, 0), (70, 20, -50), (7, 17, -100), (3, 0, 0), (0, 5, 0)],
        ..Case::new("empty", Dtype::Bf16, (264, 264))
    };
    check(&device, &case);
}

#[test]
fn runs_repeat() {
    if slow::left_out(Turn::Second) {
        return;
    }
    let Some(device) = Device::open() else { return };
    runs_repeat_of(&device, "repeat", &[(264, 8)], check);
}
