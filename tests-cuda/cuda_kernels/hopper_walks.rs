// SPDX-License-Identifier: MIT OR Apache-2.0
//! Long walks of each forward kernel for `sm_90a`: over many tiles of keys, in one range and in many, by blocks that
//! take several items, with merges, masks and shared tiles. A test for each kernel, named as its file: mutants of a
//! kernel are tried on its own test first (`mutate --only`), so what tells most of them comes first and is small.

use crate::case::{Case, Cut};
use crate::device::Device;
use crate::hopper::turn;
use crate::run::forward;
use cpattn::Dtype;
use cpattn::call::Score;

fn walks(dims: (usize, usize)) {
    let _turn = turn();
    let Some(device) = Device::open_hopper() else { return };
    let base = Case::new("hopper walks", Dtype::Bf16, dims);
    let open = Score { window_right: i64::MAX, ..base.score };
    // All items by one block: what is left of one item shows in the next. Three calls: one begins a result, one adds to
    // it in place, one ends it.
    device.cuda.set_sm_margin(u32::MAX);
    let documents = vec![(140, 300, 160), (20, 20, 0), (20, 0, 0), (0, 20, 0)];
    let merged = Case { documents, heads: 4, kv_heads: 2, held: 0..4, cut: Cut::Striped(2, 8), ..base.clone() };
    forward(&device, &Case { ring_steps: 3, sinks: true, ..merged });
    forward(&device, &Case { score: open, documents: vec![(130, 400, 0)], cut: Cut::Striped(40, 1), ..base.clone() });
    let documents = vec![(20, 0, 0), (0, 20, 0), (9, 200, 191), (7, 17, -100), (3, 0, 0), (140, 300, 160)];
    forward(&device, &Case { documents, heads: 6, kv_heads: 6, held: 0..6, ..base.clone() });
    device.cuda.set_sm_margin(0);
    forward(&device, &Case { score: open, documents: vec![(140, 1500, 0)], ..base });
}

#[test]
fn bf16_64() {
    walks((64, 64));
}

#[test]
fn bf16_96() {
    walks((96, 96));
}

#[test]
fn bf16_128() {
    walks((128, 128));
}

#[test]
fn bf16_192128() {
    walks((192, 128));
}

#[test]
fn bf16_192() {
    walks((192, 192));
}

#[test]
fn bf16_256() {
    walks((256, 256));
}
