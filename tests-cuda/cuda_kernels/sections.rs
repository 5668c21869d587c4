// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls whose heads are taken in several sections, because k and v of all of them do not fit half of the L2 cache: the
//! stand-in device says that its cache is one byte, so that every kv head is a section of its own.

use crate::case::{Case, Cut};
use crate::device::{Device, ok};
use crate::hopper::{alone_with, of, turn};
use crate::run::forward;
use cpattn::Dtype;
use cudarc::driver::sys;

fn l2_bytes() -> i32 {
    let mut bytes = 0;
    ok!(cuDeviceGetAttribute(&raw mut bytes, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 0));
    bytes
}

/// Whole groups, calls that begin and end inside one (the last section is shorter), shared tiles beside, several calls
/// that are merged; on grids of every size, so that blocks go from one section to the next.
#[test]
fn every_head_is_its_own_section() {
    if !alone_with("sections::every_head_is_its_own_section", &[("CPATTN_EMU_L2", "1")]) {
        return;
    }
    let _turn = turn();
    let Some(device) = Device::open_hopper() else { return };
    if crate::device::emulated_count(c"boxes").is_some() {
        assert_eq!(l2_bytes(), 1);
    }
    let base = Case {
        documents: vec![(140, 300, 160), (20, 20, 0), (129, 129, 0)],
        heads: 6,
        kv_heads: 3,
        held: 0..6,
        alibi_slopes: true,
        sinks: true,
        ..Case::new("sections", Dtype::Bf16, (64, 64))
    };
    for case in [
        base.clone(),
        Case { held: 1..6, ..base.clone() },
        Case { held: 3..4, ..base.clone() },
        Case { heads: 5, kv_heads: 5, held: 0..5, ..base.clone() },
        Case { held: 1..5, cut: Cut::Striped(2, 8), ring_steps: 2, ..base.clone() },
        of(Dtype::F16, (128, 128), &base),
        of(Dtype::Bf16, (256, 256), &Case { documents: vec![(140, 300, 160)], held: 1..5, ..base.clone() }),
    ] {
        let first = forward(&device, &case);
        device.cuda.set_sm_margin(u32::MAX);
        assert!(forward(&device, &case) == first, "a smaller grid differs: {case:?}");
        device.cuda.set_sm_margin(0);
    }
}
