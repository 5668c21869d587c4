// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backward at head dim 128 on devices with 99 KB of shared memory to a block (compute capability 8.6, 8.9, 12.0):
//! one kernel, with v in registers. The stand-in driver is asked for such devices, in processes of their own.

use crate::case::{Case, Cut};
use crate::device::{Device, emulated_count};
use crate::hopper::alone_with;
use crate::run::check;
use crate::runs_repeat_of;
use crate::slow::{self, Turn};
use core::ffi::CStr;
use cpattn::Dtype;
use cpattn::call::Score;

const NARROW: &CStr = c"cpattn_backward_fused_narrow";
const WIDE: &CStr = c"cpattn_backward_fused";
const APART: &CStr = c"cpattn_backward_queries";

fn launched() -> [u64; 3] {
    [NARROW, WIDE, APART].map(|name| emulated_count(name).expect("asked before"))
}

/// Whether the driver is the stand-in.
fn is_emulated() -> bool {
    Device::open().is_some() && emulated_count(c"boxes").is_some()
}

fn base(name: &'static str, dtype: Dtype) -> Case {
    Case { heads: 4, kv_heads: 2, held: 0..4, ..Case::new(name, dtype, (128, 128)) }
}

/// Which kernel makes all gradients of which head dims, on which device.
#[test]
fn shared_memory_decides() {
    if !is_emulated() {
        return;
    }
    for sm in ["80", "86", "89", "120"] {
        if alone_with("narrow::shared_memory_decides", &[("CPATTN_EMU_SM", sm)]) {
            let device = Device::open().expect("asked before");
            let is_small = std::env::var("CPATTN_EMU_SM").is_ok_and(|sm| sm != "80");
            let small = |on_small, on_others| if is_small { on_small } else { on_others };
            // The case runs the kernels of one side each besides.
            for (dims, expected) in [
                ((64, 64), [0, 1, 1]),
                ((96, 96), small([0, 0, 2], [0, 1, 1])),
                ((104, 128), small([1, 0, 1], [0, 1, 1])),
                ((128, 128), small([1, 0, 1], [0, 1, 1])),
                ((192, 128), small([0, 0, 2], [0, 1, 1])),
            ] {
                let before = launched();
                device.cuda.prepare(Dtype::F16, dims.0, dims.1).expect("kernels that fit");
                assert_eq!(device.cuda.is_prepared(Dtype::F16, dims.0, dims.1), Ok(true));
                let dims = (dims.0 as usize, dims.1 as usize);
                check(&device, &Case { documents: vec![(20, 30, 10)], ..Case::new("small", Dtype::F16, dims) });
                let after = launched();
                assert_eq!([0, 1, 2].map(|i| after[i] - before[i]), expected, "{dims:?}");
            }
            return;
        }
    }
}

/// Every option, and tiles of keys that wait for each other in every order, against attention in f64.
#[test]
fn every_option() {
    if slow::left_out(Turn::First) {
        return;
    }
    if !is_emulated() || !alone_with("narrow::every_option", &[("CPATTN_EMU_SM", "86")]) {
        return;
    }
    let device = Device::open().expect("asked before");
    let plain = Case { documents: vec![(90, 100, 10)], ..base("narrow", Dtype::Bf16) };
    let mut cases = plain.with_scores();
    let open = Score { window_right: i64::MAX, ..plain.score };
    let narrow = Score { window_left: 40, window_right: 9, ..plain.score };
    let many = Case {
        documents: vec![(230, 300, 70), (20, 160, 140), (0, 140, 0), (90, 0, 0)],
        shuffled: true,
        ..plain.clone()
    };
    cases.extend([
        // Head dims that leave columns empty, and tails of tiles.
        Case { head_dim: 104, value_dim: 72, ..many.clone() },
        Case {
            documents: vec![(5, 0, 0), (0, 7, 0), (70, 90, 20), (6, 0, 0), (0, 9, 0)],
            dtype: Dtype::F16,
            ..plain.clone()
        },
        Case { held: 1..4, accumulate: true, alibi_slopes: true, sinks: true, ..plain.clone() },
        Case { held: 2..4, per_q_head: true, dtype: Dtype::F16, ..plain.clone() },
        Case { cut: Cut::Chunks(4), score: open, ring_steps: 2, ..many.clone() },
        Case { cut: Cut::Chunks(3), score: narrow, dtype: Dtype::F16, accumulate: true, ..many.clone() },
        Case { cut: Cut::Striped(3, 70), score: narrow, ring_steps: 2, alibi_slopes: true, ..many.clone() },
        Case { cut: Cut::Striped(4, 1), sinks: true, ..many },
        // More steps than are prepared at a time, of one range and of many.
        Case { documents: vec![(1100, 2, 0)], score: open, ..base("long", Dtype::F16) },
        Case { documents: vec![(40, 2, 0)], score: open, cut: Cut::Striped(40, 1), ..base("long", Dtype::Bf16) },
    ]);
    let before = launched();
    for case in &cases {
        check(&device, case);
    }
    let after = launched();
    let [narrow, wide, apart] = [0, 1, 2].map(|i| after[i] - before[i]);
    // The kernels of one side each serve calls for one side, of which a case makes as many.
    assert!(narrow >= cases.len() as u64 && wide == 0 && apart == narrow, "{narrow}, {wide}, {apart}");
    runs_repeat_of(&device, "narrow", &[(128, 128)], check);
}

/// Tiles and order of sums are those of the kernel with more shared memory. The stand-in driver computes alike for
/// every device, so the bits are the same too.
#[test]
fn bits_are_those_of_the_other_kernel() {
    if !is_emulated() {
        return;
    }
    let file = |sm: &str| std::env::temp_dir().join(format!("cpattn-narrow-{}-{sm}", std::process::id()));
    let mut found = Vec::new();
    for sm in ["80", "86"] {
        let path = file(sm);
        let variables = [("CPATTN_EMU_SM", sm), ("CPATTN_FOUND", path.to_str().expect("a name in UTF-8"))];
        if alone_with("narrow::bits_are_those_of_the_other_kernel", &variables) {
            let device = Device::open().expect("asked before");
            let case = Case { documents: vec![(200, 290, 90)], cut: Cut::Chunks(2), ..base("bits", Dtype::Bf16) };
            let text = format!("{:?}", check(&device, &case));
            std::fs::write(std::env::var_os("CPATTN_FOUND").expect("set above"), text).expect("a file");
            return;
        }
        found.push(std::fs::read_to_string(&path).expect("written by the process above"));
        std::fs::remove_file(&path).expect("a file");
    }
    assert!(found[0].len() > 10_000 && found[0] == found[1], "the kernels differ");
}
