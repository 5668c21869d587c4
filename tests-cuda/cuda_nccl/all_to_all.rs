// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two all-to-alls over NCCL: the bits of ranks on the CPU, in runs one after another.

use std::sync::Arc;

use cpattn::{Element, Rank, Result};
use half::bf16;

use crate::{
    cases::{self, DIMS, SIDES, Tensors},
    group::{LONG, devices, threads},
    work::wait,
};

fn bits<T: Element>(world: usize) {
    let Some(devices) = devices(world) else { return };
    for (name, plan) in &cases::plans(world) {
        let cases: Vec<_> = SIDES.into_iter().flat_map(|s| DIMS.map(|d| (s, d))).collect();
        let expected: Vec<_> = cases.iter().map(|&(side, dim)| cases::on_the_cpu::<T>(plan, side, dim, 6)).collect();
        let arrived = threads(&devices, LONG, |end| -> Result<Vec<cases::Arrived>> {
            let mut rank = Rank::on_device(end)?;
            let cuda = Arc::clone(rank.cuda().unwrap());
            let held = cases.iter().map(|&(side, dim)| {
                let tensors = Tensors::new::<T>(&cuda, plan, rank.rank(), side, dim, false);
                tensors.fill::<T>(6);
                tensors
            });
            let held: Vec<_> = held.collect();
            // The second run carries its check along.
            for tensors in held.iter().chain(&held) {
                // SAFETY: the tensors live until the stream was waited for.
                unsafe { tensors.enqueue::<T>(&mut rank, plan, std::ptr::null_mut()) }?;
            }
            wait(&cuda)?;
            rank.synchronize()?;
            Ok(held.iter().map(Tensors::arrived).collect())
        });
        for (me, arrived) in arrived.into_iter().enumerate() {
            for (i, arrived) in arrived.unwrap().unwrap().into_iter().enumerate() {
                assert!(arrived == expected[i][me], "{name}, {:?}, rank {me}: other bits than on the CPU", cases[i]);
            }
        }
    }
}

#[test]
fn two_ranks() {
    bits::<f32>(2);
    bits::<bf16>(2);
}

#[test]
fn four_ranks() {
    bits::<f32>(4);
    bits::<bf16>(4);
}
