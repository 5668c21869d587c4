// SPDX-License-Identifier: MIT OR Apache-2.0
//! The pairs that dropout keeps, for programs that compute with the whole mask.

use super::input::{array_mut, renamed};
use cpattn::{Error, call::DropoutMask};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_dropout_mask(
    probability: f64, seed: u64, q_begin: u32, q_count: u32, k_begin: u32, k_count: u32, head: u32, kept: *mut u8,
) -> i32 {
    boundary!({
        let mask = DropoutMask::new(probability, seed).map_err(|error| renamed(error, "probability"))?;
        for (name, begin, count) in [("q_count", q_begin, q_count), ("k_count", k_begin, k_count)] {
            if begin.checked_add(count).is_none() {
                return Err(Error::invalid(name, count, format!("at most {}", u32::MAX - begin)).into());
            }
        }
        let pairs = q_count as usize * k_count as usize;
        let kept = given!(array_mut("kept", kept, pairs));
        for (row, q) in kept.chunks_exact_mut(k_count.max(1) as usize).zip(q_begin..) {
            for (kept, k) in row.iter_mut().zip(k_begin..) {
                kept.write(mask.keeps(q, k, head).into());
            }
        }
    })
}
