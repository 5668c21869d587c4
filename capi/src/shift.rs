// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shifts of rows with ranks, each of which has only its own tokens' rows.
//!
//! As in `shard`, rows are bytes. Ranks whose tensors have different element types or shapes get an error before any
//! data moves.

use core::ffi::c_void;

use super::{
    dlpack::cpattn_tensor,
    handle::{self, Exclusive as _},
    plan::cpattn_plan,
    rank::cpattn_rank,
    shard::{Rows, alike, check_disjoint, check_fill},
};
use cpattn::{Side, runtime::ShiftedRows};

/// Both tensors of a call, and the element for rows without a source.
struct Shifted {
    kind: u64,
    rows: Rows,
    out: Rows,
    fill: *const u8,
}

impl ShiftedRows for Shifted {
    fn row_bytes(&self) -> usize {
        self.rows.parts * self.rows.run
    }

    fn kind(&self) -> u64 {
        self.kind
    }

    fn read(&self, row: usize, to: &mut [u8]) {
        for (from, to) in self.rows.row(row).zip(to.chunks_exact_mut(self.rows.run)) {
            // SAFETY: a run of a row that exists (checked by `row`), in the caller's tensor, which is valid during the
            // call.
            unsafe { core::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
        }
    }

    fn write(&mut self, row: usize, from: &[u8]) {
        for (to, from) in self.out.row(row).zip(from.chunks_exact(self.out.run)) {
            // SAFETY: as in `read`; nothing else uses what the caller has written.
            unsafe { core::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        }
    }

    fn fill(&mut self, row: usize) {
        // SAFETY: the tensor is the caller's for the call; `fill` has one element, by the header's promise.
        unsafe { self.out.fill(row, self.fill) };
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_shift(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, by: i64, fill: *const c_void, rows: *const cpattn_tensor,
    out: *const cpattn_tensor,
) -> i32 {
    boundary!({
        let (rank, plan) = given!(handle::borrow(rank), handle::borrow(plan));
        let mut rank = rank.claim()?;
        plan.fits_world(rank.world())?;
        check_fill(fill)?;
        let tokens = plan.local_tokens(Side::Q, rank.rank()).len();
        let [from, to] = given!(alike(("rows", rows, tokens), ("out", out, tokens)));
        let (rows, out) = (Rows::new("rows", &from)?, Rows::new("out", &to)?);
        if !from.is_empty() {
            check_disjoint(("rows", &rows), ("out", &out), 1)?;
        }
        // Beside the bytes of a row, its type, dimensions and runs must be equal on all ranks.
        let (dtype, runs) = (from.dtype, if from.ndim == 3 { rows.parts as u64 } else { 1 });
        let kind = u64::from(dtype.code) | u64::from(dtype.bits) << 8 | (from.ndim as u64) << 16 | runs << 24;
        let shifted = Shifted { kind, rows, out, fill: fill.cast() };
        rank.shift(plan, by, shifted)?;
    })
}
