// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CUDA kernels against attention in f64, on whatever driver is found.
//!
//! An emulated driver on `LD_LIBRARY_PATH` serves as well as a real one. Without any, these tests say so and pass;
//! with `CPATTN_REQUIRE_CUDA` set, that is a failure.

mod bench_cases;
mod blocks;
mod captured;
mod case;
mod clusters;
mod dense;
mod device;
#[path = "../../tests/common/driver.rs"]
mod driver;
mod dropout;
mod family;
mod hopper;
mod hopper_backward;
mod hopper_backward_shared;
mod hopper_walks;
mod large_scores;
mod narrow;
mod repeated;
mod replaced;
mod run;
mod sections;
mod shared_tiles;
mod slices;
#[path = "../../tests/common/slow.rs"]
mod slow;
mod turns;
mod wide;

use case::{Case, Cut};
use cpattn::Dtype;
use cpattn::call::Score;
use device::Device;
use run::check;
use slow::Turn;

fn all(cases: &[Case]) {
    let Some(device) = Device::open() else { return };
    for case in cases {
        check(&device, case);
    }
}

/// Every compiled shape in both types, with head dims that do not fill it, and runs that meet nothing: copies that were
/// begun for them must not outlive their tile.
#[test]
fn shapes() {
    let mut cases = Vec::new();
    for dims in [(64, 64), (40, 24), (96, 96), (128, 128), (104, 128), (192, 128), (192, 192), (256, 256), (232, 248)] {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            cases.push(Case {
                documents: vec![(5, 0, 0), (0, 7, 0), (70, 90, 20), (6, 0, 0), (0, 9, 0)],
                ..Case::new("shape", dtype, dims)
            });
        }
    }
    all(&cases);
}

/// Lengths around the tiles, more queries than keys and the reverse, empty documents.
#[test]
fn lengths() {
    let mut cases = Vec::new();
    for documents in [
        vec![(1, 1, 0), (1, 3, 2), (2, 1, -1), (0, 5, 5), (5, 0, -5)],
        vec![(63, 64, 1), (65, 63, -2)],
        vec![(128, 129, 1), (17, 200, 183)],
        vec![(150, 40, -110)],
    ] {
        cases.push(Case { documents, ..Case::new("lengths", Dtype::F16, (64, 64)) });
    }
    all(&cases);
}

/// Full, causal, windows on both sides, and windows that hide everything.
#[test]
fn windows() {
    let base = Case { documents: vec![(150, 150, 0), (33, 47, 14)], ..Case::new("windows", Dtype::Bf16, (64, 64)) };
    let windows = [(i64::MAX, i64::MAX), (10, 0), (64, 0), (0, 0), (7, 30), (i64::MAX, 5), (0, i64::MAX)];
    let cases: Vec<_> = windows
        .into_iter()
        .map(|(window_left, window_right)| Case {
            score: Score { window_left, window_right, ..base.score },
            ..base.clone()
        })
        .collect();
    all(&cases);
}

/// Softcap, ALiBi, sinks, and scales that are not positive or nearly 0.
#[test]
fn scores() {
    let base = Case {
        documents: vec![(90, 100, 10)],
        heads: 4,
        kv_heads: 2,
        held: 0..4,
        ..Case::new("scores", Dtype::F16, (64, 64))
    };
    all(&base.with_scores());
    // More scales that f32 does not hold.
    let scaled = |scale| Case { score: Score { scale, ..base.score }, ..base.clone() };
    all(&[scaled(1e-60), scaled(1e-41)]);
}

/// Groups of heads, and calls that hold only some heads of the problem.
#[test]
fn heads() {
    let base = Case {
        documents: vec![(40, 70, 30)],
        heads: 6,
        kv_heads: 2,
        held: 0..6,
        alibi_slopes: true,
        sinks: true,
        ..Case::new("heads", Dtype::Bf16, (32, 32))
    };
    all(&[
        base.clone(),
        Case { held: 1..5, ..base.clone() },
        Case { held: 4..6, per_q_head: true, ..base.clone() },
        Case { held: 2..5, accumulate: true, ..base.clone() },
    ]);
}

/// Ranges of every kind, keys spread over several calls, so that results are merged.
#[test]
fn ranges() {
    let base = Case {
        documents: vec![(100, 100, 0), (37, 61, 24)],
        sinks: true,
        ..Case::new("ranges", Dtype::Bf16, (64, 64))
    };
    let open = Score { window_right: i64::MAX, ..base.score };
    let narrow = Score { window_left: 20, ..base.score };
    all(&[
        Case { cut: Cut::Chunks(3), ..base.clone() },
        Case { cut: Cut::Chunks(5), ring_steps: 3, ..base.clone() },
        Case { cut: Cut::Striped(3, 1), ring_steps: 3, ..base.clone() },
        Case { cut: Cut::Striped(2, 5), ring_steps: 2, alibi_slopes: true, score: narrow, ..base.clone() },
        // Rows that meet their first key in the last ring step.
        Case { cut: Cut::Chunks(3), ring_steps: 2, score: narrow, ..base.clone() },
        Case { cut: Cut::Striped(4, 16), ring_steps: 2, score: open, accumulate: true, ..base.clone() },
    ]);
}

/// Many tiles of keys that add to one tile of queries, in every order in which ranges may list them: stripes with gaps,
/// windows that leave tiles out, open and causal masks.
#[test]
fn turns() {
    let base = Case {
        documents: vec![(330, 400, 70), (20, 260, 240), (0, 140, 0), (200, 0, 0)],
        shuffled: true,
        ..Case::new("turns", Dtype::Bf16, (64, 64))
    };
    let open = Score { window_right: i64::MAX, ..base.score };
    let ahead = Score { window_left: 3, window_right: i64::MAX, ..base.score };
    let narrow = Score { window_left: 40, window_right: 9, ..base.score };
    let wide = |heads, kv_heads, dims| Case {
        heads,
        kv_heads,
        held: 0..heads,
        ..Case { head_dim: dims, value_dim: dims, ..base.clone() }
    };
    all(&[
        Case { cut: Cut::Chunks(4), ..wide(4, 2, 64) },
        Case { cut: Cut::Chunks(4), score: narrow, dtype: Dtype::F16, ..wide(2, 2, 96) },
        Case { cut: Cut::Chunks(5), score: open, ring_steps: 2, ..wide(2, 1, 128) },
        Case { cut: Cut::Chunks(3), score: ahead, per_q_head: true, ..wide(4, 2, 64) },
        Case { cut: Cut::Striped(2, 150), score: narrow, ring_steps: 2, dtype: Dtype::F16, ..wide(2, 1, 64) },
        Case { cut: Cut::Striped(3, 70), score: narrow, accumulate: true, dtype: Dtype::F16, ..wide(2, 1, 128) },
        Case { cut: Cut::Striped(4, 1), alibi_slopes: true, ..wide(2, 1, 96) },
    ]);
}

/// Every compiled kernel with several tiles of keys for one of queries, and a group of heads that several blocks share.
#[test]
fn every_kernel_takes_turns() {
    let mut cases = Vec::new();
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for dims in [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)] {
            let base = Case { documents: vec![(70, 270, 200)], ..Case::new("every", dtype, dims) };
            cases.push(Case { score: Score { window_right: 100, ..base.score }, ..base });
        }
    }
    all(&cases);
}

/// Tiles that meet many more others than are prepared at once, on either side: each in a range of its own, or all in
/// one, which is then cut in its midst.
#[test]
fn long_walks() {
    if slow::left_out(Turn::First) {
        return;
    }
    let mut cases = Vec::new();
    for dims in [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)] {
        for (dtype, long) in [(Dtype::F16, (1, 2200, 0)), (Dtype::Bf16, (2200, 2, 0))] {
            let base = Case::new("long", dtype, dims);
            let base = Case { score: Score { window_right: i64::MAX, ..base.score }, ..base };
            for document in [(1, 40, 0), (40, 2, 0)] {
                cases.push(Case { documents: vec![document], cut: Cut::Striped(40, 1), ..base.clone() });
            }
            cases.push(Case { documents: vec![long], ..base });
        }
    }
    all(&cases);
}

/// The larger shapes over several tiles and calls.
#[test]
fn wide_ranges() {
    let mut cases = Vec::new();
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for dims in [(96, 96), (128, 128), (192, 128), (192, 192), (256, 256)] {
            cases.push(Case {
                documents: vec![(90, 140, 50)],
                cut: Cut::Chunks(3),
                ring_steps: 2,
                ..Case::new("wide", dtype, dims)
            });
        }
    }
    all(&cases);
}

/// Tiles that meet nothing, between others, taken by blocks that have more to do: every compiled kernel must have its
/// copies behind it before it goes on.
#[test]
fn empty_tiles_on_a_bounded_grid() {
    let Some(device) = Device::open() else { return };
    device.cuda.set_sm_margin(u32::MAX);
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for dims in [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)] {
            let case = Case {
                documents: vec![(20, 0, 0), (0, 20, 0), (9, 20, 11), (7, 17, -100), (3, 0, 0), (0, 5, 0)],
                heads: 6,
                kv_heads: 6,
                held: 0..6,
                ..Case::new("empty", dtype, dims)
            };
            check(&device, &case);
        }
    }
}

/// The same call gives the same bits, whatever order blocks and warps ran in, and however many blocks there were. (On
/// the emulated driver each launch has another seed.)
#[test]
fn runs_repeat() {
    if slow::left_out(Turn::Second) {
        return;
    }
    let Some(device) = Device::open() else { return };
    runs_repeat_of(&device, "repeat", &[(64, 64), (128, 128)], check);
}

fn runs_repeat_of<R: PartialEq>(
    device: &Device,
    name: &'static str,
    every: &[(usize, usize)],
    run: impl Fn(&Device, &Case) -> R,
) {
    for &dims in every {
        let case = Case {
            documents: vec![(300, 300, 0), (90, 290, 200)],
            heads: 4,
            kv_heads: 2,
            held: 0..4,
            cut: Cut::Striped(2, 8),
            ring_steps: 2,
            ..Case::new(name, Dtype::Bf16, dims)
        };
        let first = run(device, &case);
        assert!(run(device, &case) == first, "two runs differ");
        device.cuda.set_sm_margin(u32::MAX);
        assert!(run(device, &case) == first, "a smaller grid differs");
        device.cuda.set_sm_margin(0);
    }
}

/// Positions far from zero.
#[test]
fn far_positions() {
    let base = Case::new("far", Dtype::F16, (64, 64));
    all(&[Case {
        documents: vec![(20, 40, 1 << 40)],
        score: Score { window_left: i64::MAX, window_right: i64::MAX, ..base.score },
        ..base
    }]);
}
