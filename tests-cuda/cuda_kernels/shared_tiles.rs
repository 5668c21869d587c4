// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tiles that the q heads of a group share, in the forward kernels for `sm_90a`: 16, 32 or 64 q rows of as many heads
//! as fill 128 rows (192 at head dims up to 64), where ranges are short. What is loaded is counted on the stand-in
//! driver.
//!
//! On a device of another compute capability the same cases run on the kernels for `sm_80`, which have no such tiles.

use crate::case::{Case, Cut};
use crate::device::{Device, emulated_count, has_kernel};
use crate::hopper::{all, alone, of, turn};
use crate::run::{Shared, forward, tiles_met};
use crate::slow::{self, Turn};
use cpattn::Dtype;
use cpattn::call::Score;

/// Every shape, in both types.
const SHAPES: [((usize, usize), Dtype); 12] = [
    ((64, 64), Dtype::Bf16),
    ((64, 64), Dtype::F16),
    ((96, 96), Dtype::Bf16),
    ((96, 96), Dtype::F16),
    ((128, 128), Dtype::Bf16),
    ((128, 128), Dtype::F16),
    ((192, 128), Dtype::Bf16),
    ((192, 128), Dtype::F16),
    ((192, 192), Dtype::Bf16),
    ((192, 192), Dtype::F16),
    ((256, 256), Dtype::Bf16),
    ((256, 256), Dtype::F16),
];

/// Groups that fill a tile and such that do not, and more heads than one has room for.
#[test]
fn groups() {
    let documents = vec![(1, 40, 39), (15, 15, 0), (16, 30, 14), (40, 0, 0), (0, 9, 0), (33, 150, 117), (130, 130, 0)];
    for group in [2, 4, 8, 3, 6, 5, 7, 9, 16] {
        all(&[Case { documents: documents.clone(), ..Case::grouped("shared groups", group, 2, (64, 64)) }]);
    }
}

/// Every compiled kernel, and head dims that do not fill a shape.
#[test]
fn shapes() {
    let base = Case::grouped("shared shapes", 8, 1, (8, 8));
    let base = Case { documents: vec![(3, 140, 137), (21, 21, 0), (150, 150, 0)], ..base };
    all(&SHAPES.map(|(dims, dtype)| of(dtype, dims, &base)));
    all(&[of(Dtype::F16, (40, 24), &base), of(Dtype::Bf16, (168, 120), &base), of(Dtype::F16, (216, 200), &base)]);
}

/// Softcap, ALiBi with a slope for each head, sinks for each head, windows.
#[test]
fn options() {
    let base = Case {
        documents: vec![(50, 170, 120), (18, 18, 0), (7, 3, 9)],
        ..Case::grouped("shared options", 8, 2, (64, 64))
    };
    let score = |left, right, softcap| Score { window_left: left, window_right: right, softcap, ..base.score };
    all(&[
        Case { alibi_slopes: true, ..base.clone() },
        Case { sinks: true, ..base.clone() },
        Case { score: score(i64::MAX, 0, 2.0), alibi_slopes: true, sinks: true, ..base.clone() },
        Case { score: score(20, 0, 0.0), sinks: true, ..base.clone() },
        Case { score: score(5, 70, 0.0), alibi_slopes: true, ..base.clone() },
        Case { score: score(i64::MAX, i64::MAX, 0.0), ..base.clone() },
        Case { score: Score { scale: -0.1, ..base.score }, ..base.clone() },
    ]);
    for group in [3, 4] {
        let score = Score { softcap: 3.0, window_left: 30, ..base.score };
        let base = Case::grouped("shared options", group, 2, (128, 128));
        all(&[Case { documents: vec![(45, 90, 45)], alibi_slopes: true, sinks: true, score, ..base }]);
    }
}

/// Ranges of every kind, keys spread over several calls, so that results are merged: with a running lse of one word
/// (three calls) and of two.
#[test]
fn merges() {
    let base = Case {
        documents: vec![(60, 60, 0), (37, 161, 124)],
        sinks: true,
        ..Case::grouped("shared merges", 8, 1, (64, 64))
    };
    let narrow = Score { window_left: 20, ..base.score };
    let cases = [
        Case { cut: Cut::Chunks(3), ring_steps: 2, ..base.clone() },
        Case { cut: Cut::Chunks(5), ring_steps: 3, ..base.clone() },
        Case { cut: Cut::Striped(3, 1), ring_steps: 3, alibi_slopes: true, ..base.clone() },
        // Rows that meet their first key in the last call.
        Case { cut: Cut::Chunks(3), ring_steps: 2, score: narrow, ..base.clone() },
        Case { cut: Cut::Striped(2, 5), ring_steps: 2, score: narrow, ..base.clone() },
    ];
    all(&cases);
    all(&SHAPES[2..].iter().map(|&(dims, dtype)| of(dtype, dims, &cases[1])).collect::<Vec<_>>());
    let three = Case::grouped("shared merges", 3, 2, (128, 128));
    all(&[Case { documents: vec![(60, 60, 0)], cut: Cut::Chunks(4), ring_steps: 2, sinks: true, ..three }]);
}

/// Calls that hold some heads of the problem, and begin and end inside a group: where all kv heads need one tile each,
/// and where they do not, so that tiles stay those of one head.
#[test]
fn held_heads() {
    if slow::left_out(Turn::Second) {
        return;
    }
    let base = |heads, kv_heads, held| Case {
        documents: vec![(20, 50, 30), (5, 5, 0)],
        alibi_slopes: true,
        sinks: true,
        heads,
        kv_heads,
        held,
        ..Case::new("shared heads", Dtype::Bf16, (64, 64))
    };
    all(&[base(9, 3, 1..8), base(24, 3, 6..18), base(8, 1, 3..5), base(16, 2, 7..9), base(36, 2, 15..36)]);
}

/// Both kinds of tiles in one call, either first, by blocks that take many items.
#[test]
fn both_kinds() {
    let _turn = turn();
    let Some(device) = Device::open_hopper() else { return };
    let base = Case::grouped("shared and not", 4, 2, (64, 64));
    for documents in [
        vec![(300, 300, 0), (20, 20, 0), (0, 20, 0), (9, 0, 0)],
        vec![(128, 128, 0), (1, 700, 699), (30, 600, 570)],
        vec![(4, 4, 0), (3, 0, 0)],
    ] {
        let case = Case { documents, ..base.clone() };
        let first = forward(&device, &case);
        device.cuda.set_sm_margin(u32::MAX);
        assert!(forward(&device, &case) == first, "a smaller grid differs");
        device.cuda.set_sm_margin(0);
    }
}

/// Boxes of 64 columns that the forward of a case loads.
fn boxes(device: &Device, case: &Case) -> Option<u64> {
    let before = emulated_count(c"boxes")?;
    forward(device, case);
    Some(emulated_count(c"boxes")? - before)
}

fn counts() -> bool {
    emulated_count(c"boxes").is_some() && std::env::var("CPATTN_EMU_SM").is_ok_and(|sm| sm == "90")
}

/// Copies load each tile of keys that some row meets once for each tile of q rows, and no others; q once, where
/// anything is met. What they load is right in the other tests, which leaves no room for a tile too few.
#[test]
fn tiles_are_loaded_once() {
    if !alone("shared_tiles::tiles_are_loaded_once") {
        return;
    }
    let Some(device) = Device::open_hopper() else { return };
    if !counts() {
        return;
    }
    for (dims, tile) in [
        ((64, 64), (192, 128)),
        ((96, 96), (128, 128)),
        ((128, 128), (128, 128)),
        ((192, 128), (128, 128)),
        ((192, 192), (128, 112)),
        ((256, 256), (128, 80)),
    ] {
        if [(96, 96), (192, 192)].contains(&dims) && !has_kernel(&format!("hopper_forward_bf16_{}", dims.0)) {
            continue;
        }
        let documents = vec![(150, 420, 270), (1, 60, 59), (0, 20, 0), (30, 0, 0), (260, 260, 0)];
        let base = Case { documents, ..Case::grouped("hopper loads", 2, 1, dims) };
        let window = |left, right| Score { window_left: left, window_right: right, ..base.score };
        for case in [
            base.clone(),
            Case { score: window(i64::MAX, i64::MAX), ..base.clone() },
            Case { score: window(20, 0), ..base.clone() },
            Case { score: window(7, 40), cut: Cut::Chunks(3), ..base.clone() },
            Case { cut: Cut::Striped(2, 8), ring_steps: 2, ..base.clone() },
            // No two heads share a tile.
            Case { heads: 2, kv_heads: 2, ..base.clone() },
            Case { heads: 6, kv_heads: 2, held: 0..6, ..base.clone() },
        ] {
            let shared = match case.heads / case.kv_heads {
                1 => None,
                2 => Some(Shared { rows: 64, parts: 1 }),
                // Three heads of 64 rows fill 192.
                _ => Some(Shared { rows: if tile.0 == 192 { 64 } else { 32 }, parts: 2 }),
            };
            let (tiles, items) = tiles_met(&case, tile, shared);
            let panels = |dim: usize| dim.div_ceil(64) as u64;
            let expected = items * panels(dims.0) + tiles * (panels(dims.0) + panels(dims.1));
            assert!(expected > 0);
            assert_eq!(boxes(&device, &case), Some(expected), "boxes of 64 columns: {case:?}");
        }
    }
}

/// Eight heads that read one: documents of 16 rows load an eighth of what a tile for each head would, and make an
/// eighth of the scores; one row that meets many keys likewise; documents of 40 rows three eighths; a tile of 128 rows
/// the same, and its rest of 40 rows three eighths again.
#[test]
fn short_documents_load_an_eighth() {
    if !alone("shared_tiles::short_documents_load_an_eighth") {
        return;
    }
    let Some(device) = Device::open_hopper() else { return };
    if !counts() {
        return;
    }
    for (documents, eighths) in [
        (vec![(16, 16, 0); 5], 1),
        (vec![(1, 400, 399); 2], 1),
        (vec![(40, 40, 0); 3], 3),
        (vec![(128, 128, 0); 2], 8),
        (vec![(168, 40, 0)], 11),
    ] {
        let case = Case { documents, ..Case::grouped("eighths", 8, 1, (128, 128)) };
        let (tiles, items) = tiles_met(&case, (128, 128), None);
        let (separate, found) = (2 * items + 4 * tiles, boxes(&device, &case).expect("counted"));
        // Each tile of keys is two boxes of k and two of v, and 128 x 128 scores; q is two.
        let whole = if eighths > 8 { 16 } else { 8 };
        assert_eq!(found * whole, separate * eighths, "{case:?}");
        let met =
            |&(q, k, start): &(usize, usize, i64)| (0..q as i64).map(|i| (start + i + 1).min(k as i64)).sum::<i64>();
        let used = 8 * case.documents.iter().map(met).sum::<i64>();
        let wasted = |tiles: u64| 100.0 * (1.0 - used as f64 / (tiles * 128 * 128) as f64);
        let together = tiles_met(&case, (128, 128), Some(Shared { rows: 16, parts: 1 })).0;
        println!("wasted scores: {:.1} %, apart {:.1} %: {:?}", wasted(together), wasted(tiles), case.documents);
    }
}
