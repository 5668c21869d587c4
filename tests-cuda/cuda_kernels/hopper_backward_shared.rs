// SPDX-License-Identifier: MIT OR Apache-2.0
//! Steps that the q heads of a group share, in the backward kernels for `sm_90a`: where the last tile of a range has at
//! most 32 of its 64 q rows, a step has 16 or 32 rows of as many heads as fill it. The copies of each case are counted
//! on the stand-in driver.
//!
//! On a device of another compute capability the same cases run on the kernels for `sm_80`, which have no such steps.

use crate::case::{Case, Cut};
use crate::device::{Device, emulated_count};
use crate::hopper::{alone, of, turn};
use crate::hopper_backward::all;
use crate::run::{check, forward};
use crate::slow::{self, Turn};
use cpattn::Dtype;
use cpattn::call::Score;

/// Documents of a case whose copies are counted.
const PACK: usize = 16;

/// Every shape that has a kernel.
const SHAPES: [(usize, usize); 4] = [(64, 64), (128, 128), (192, 128), (256, 256)];

/// Checks the cases: with blocks that take many items too, so that one item's rows are left in the buffers of the next.
fn both_grids(cases: &[Case]) {
    all(cases);
    let _turn = turn();
    let Some(device) = Device::open_hopper() else { return };
    device.cuda.set_sm_margin(u32::MAX);
    for case in cases {
        check(&device, case);
    }
}

/// Groups that fill a step and such that do not, and more heads than one step has room for: last tiles of 1 to 33 rows.
#[test]
fn groups() {
    let documents = vec![(1, 40, 39), (16, 30, 14), (17, 17, 0), (32, 0, 0), (0, 9, 0), (33, 33, 0), (96, 110, 14)];
    for group in [2, 3, 4, 5, 7, 8, 9, 16] {
        let kv_heads = if group == 3 { 2 } else { 1 };
        all(&[Case {
            documents: documents.clone(),
            ..Case::grouped("shared backward groups", group, kv_heads, (64, 64))
        }]);
    }
}

/// Every kernel in both types, and head dims that do not fill a shape.
#[test]
fn shapes() {
    if slow::left_out(Turn::First) {
        return;
    }
    let base = Case::grouped("shared backward shapes", 6, 1, (8, 8));
    let base = Case { documents: vec![(3, 140, 137), (30, 30, 0), (70, 70, 0)], ..base };
    for dims in SHAPES {
        both_grids(&[of(Dtype::Bf16, dims, &base), of(Dtype::F16, dims, &base)]);
    }
    all(&[(40, 24), (104, 120), (168, 120), (216, 200)].map(|dims| of(Dtype::F16, dims, &base)));
}

/// Softcap, ALiBi with a slope for each head, sinks for each head, windows.
#[test]
fn options() {
    if slow::left_out(Turn::First) {
        return;
    }
    for (i, dims) in SHAPES.into_iter().enumerate() {
        let base = Case {
            documents: vec![(20, 150, 130), (18, 18, 0), (7, 3, 9)],
            ..Case::grouped("shared backward options", if i % 2 == 0 { 4 } else { 3 }, 2, dims)
        };
        all(&base.with_scores());
        let windows = [(i64::MAX, i64::MAX), (10, 0), (5, 70), (0, i64::MAX)];
        all(&windows.map(|(window_left, window_right)| Case {
            score: Score { window_left, window_right, softcap: 3.0, ..base.score },
            alibi_slopes: true,
            sinks: true,
            ..base.clone()
        }));
    }
}

/// Ranges of every kind, keys spread over several calls and added to, pairs in any order.
#[test]
fn ranges() {
    if slow::left_out(Turn::First) {
        return;
    }
    for dims in SHAPES {
        let base = Case {
            documents: vec![(60, 60, 0), (37, 161, 124), (0, 140, 0), (20, 0, 0)],
            sinks: true,
            ..Case::grouped("shared backward ranges", 5, 1, dims)
        };
        let narrow = Score { window_left: 20, ..base.score };
        let ahead = Score { window_left: 3, window_right: i64::MAX, ..base.score };
        all(&[
            Case { cut: Cut::Chunks(5), ring_steps: 3, ..base.clone() },
            Case { cut: Cut::Striped(3, 1), ring_steps: 3, alibi_slopes: true, ..base.clone() },
            Case { cut: Cut::Striped(2, 5), ring_steps: 2, score: narrow, accumulate: true, ..base.clone() },
            Case { cut: Cut::Chunks(4), shuffled: true, score: ahead, ..base.clone() },
        ]);
    }
}

/// Calls that hold some heads of the problem and begin and end inside of a group; dk and dv of each q head, where no
/// heads share a step.
#[test]
fn held_heads() {
    if slow::left_out(Turn::Second) {
        return;
    }
    for dims in SHAPES {
        let base = |heads, kv_heads, held| Case {
            documents: vec![(20, 50, 30), (5, 5, 0)],
            alibi_slopes: true,
            sinks: true,
            heads,
            kv_heads,
            held,
            ..Case::new("shared backward heads", Dtype::F16, dims)
        };
        all(&[Case { accumulate: true, ..base(8, 2, 1..7) }]);
        if dims == SHAPES[0] {
            all(&[base(9, 3, 1..8), base(8, 1, 3..5), base(16, 2, 7..9), base(12, 2, 3..11)]);
            all(&[Case { per_q_head: true, ..base(8, 2, 1..7) }]);
        }
    }
}

/// Boxes of 64 columns that the backward of a case loads.
fn boxes(device: &Device, case: &Case) -> Option<u64> {
    let count = || emulated_count(c"boxes");
    let begin = count()?;
    forward(device, case);
    let before = count()?;
    check(device, case);
    // A check runs the forward too.
    Some(count()? - before - (before - begin))
}

/// The copies of documents that are one tile of keys each: k and v once, and q and do of each step: a panel by one
/// copy, or by four where heads share the step.
#[test]
fn short_documents_take_fewer_steps() {
    if !alone("hopper_backward_shared::short_documents_take_fewer_steps") {
        return;
    }
    let Some(device) = Device::open_hopper() else { return };
    if emulated_count(c"boxes").is_none() || std::env::var("CPATTN_EMU_SM").is_ok_and(|sm| sm != "90") {
        return;
    }
    // Rows, group, steps of one head, steps that heads share.
    for (rows, group, single, shared) in [
        (16, 8, 0, 2),
        (1, 8, 0, 2),
        (17, 8, 0, 4),
        (32, 8, 0, 4),
        (33, 8, 8, 0),
        (64, 8, 8, 0),
        (80, 8, 8, 2),
        (16, 5, 0, 2),
        (20, 3, 0, 2),
        (16, 1, 1, 0),
    ] {
        // Enough documents that each item has all heads of a group.
        let case = Case { documents: vec![(rows, rows, 0); PACK], ..Case::grouped("steps", group, 1, (64, 64)) };
        let copies = 2 + 2 * (single + 4 * shared);
        assert_eq!(boxes(&device, &case), Some(PACK as u64 * copies), "{rows} rows, {group} heads");
    }
}
