// SPDX-License-Identifier: MIT OR Apache-2.0
//! Partial results merged over NCCL, against f64.

use crate::{
    combined_on_device::of_rank,
    common::combined::right,
    group::{LONG, devices, threads},
};
use cpattn::{Dtype, Rank};
use half::bf16;

#[test]
fn parts_are_merged() {
    for (world, mesh) in [(2, (1, 2)), (4, (2, 2))] {
        let Some(devices) = devices(world) else { return };
        right::<bf16, bf16>(Dtype::Bf16, [5e-3, 4e-7], &[mesh], |plan, to, parts| {
            let shares = threads(&devices, LONG, |end| of_rank(Rank::on_device(end)?, plan, to, parts));
            shares.into_iter().map(|share| share.unwrap().unwrap()).collect()
        });
    }
}
