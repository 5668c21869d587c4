// SPDX-License-Identifier: MIT OR Apache-2.0
//! Shifts of rows with ranks, each of which has only its own tokens' rows.
//!
//! As in `shard`, rows are bytes. Ranks whose tensors have different element types or shapes get an error before any
//! data moves.

use core::ffi::c_void;

use super::{
    dlpack::{TensorFields, cpattn_tensor},
    handle::{self, Exclusive as _},
    plan::cpattn_plan,
    rank::cpattn_rank,
    shard::{Rows, alike, apart, given_fill},
};
use cpattn::{Side, runtime::ShiftedRows};

/// Both tensors of a call, and the element for rows without a source.
struct Shifted {
    kind: u64,
    rows: Rows,
    out: Rows,
    fill: *const u8,
}

impl Shifted {
    /// Calls `each(address, bytes of a row from there on)` for every run of a row.
    fn runs(rows: &Rows, row: usize, mut each: impl FnMut(*mut u8, core::ops::Range<usize>)) {
        assert!(row < rows.tokens, "row {row} of {}", rows.tokens);
        for part in 0..rows.parts {
            each(rows.row(row, part), part * rows.run..(part + 1) * rows.run);
        }
    }
}

impl ShiftedRows for Shifted {
    fn row_bytes(&self) -> usize {
        self.rows.parts * self.rows.run
    }

    fn kind(&self) -> u64 {
        self.kind
    }

    fn read(&self, row: usize, to: &mut [u8]) {
        Self::runs(&self.rows, row, |from, bytes| {
            let to = &mut to[bytes];
            // SAFETY: a run of a row that exists (checked by `runs`), in the caller's tensor, which is valid during the
            // call.
            unsafe { core::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
        });
    }

    fn write(&mut self, row: usize, from: &[u8]) {
        Self::runs(&self.out, row, |to, bytes| {
            let from = &from[bytes];
            // SAFETY: as in `read`; nothing else uses what the caller has written.
            unsafe { core::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        });
    }

    fn fill(&mut self, row: usize) {
        assert!(row < self.out.tokens, "row {row} of {}", self.out.tokens);
        // SAFETY: the row exists; `fill` has one element, by the header's promise.
        unsafe { self.out.fill(row, self.fill) };
    }
}

/// A number that must be equal on all ranks beside the bytes of a row: type, dimensions, and runs of a row.
fn kind(p: &TensorFields, rows: &Rows) -> u64 {
    let runs = if p.ndim == 3 { rows.parts as u64 } else { 1 };
    u64::from(p.dtype.code) | u64::from(p.dtype.bits) << 8 | (p.ndim as u64) << 16 | runs << 24
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_shift(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, by: i64, fill: *const c_void, rows: *const cpattn_tensor,
    out: *const cpattn_tensor,
) -> i32 {
    boundary!({
        let (rank, plan) = given!(handle::borrow(rank), handle::borrow(plan));
        let mut rank = rank.lock()?;
        plan.fits_world(rank.world())?;
        given_fill(fill)?;
        let tokens = plan.local_tokens(Side::Q, rank.rank());
        let [from, to] = given!(alike(("rows", rows, tokens), ("out", out, tokens)));
        let (rows, out) = (Rows::new("rows", &from)?, Rows::new("out", &to)?);
        if !from.is_empty() {
            apart(("rows", &rows), ("out", &out), 1)?;
        }
        let mut shifted = Shifted { kind: kind(&from, &rows), rows, out, fill: fill.cast() };
        rank.shift_rows(plan, by, &mut shifted)?;
    })
}
