// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shifts of rows, and the trace of a group, over NCCL.

use std::time::Instant;

use cpattn::Rank;

use crate::{
    group::{LONG, devices, threads},
    one_rank::one_rank,
};

#[test]
fn rows_are_shifted_and_traces_gathered() {
    let Some(devices) = devices(3) else { return };
    let began = Instant::now();
    let all = threads(&devices, LONG, |end| one_rank(Rank::on_device(end).unwrap(), 3, began));
    all.into_iter().for_each(|outcome| outcome.unwrap());
}
