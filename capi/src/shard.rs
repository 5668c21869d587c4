// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which rank holds which tokens: lists, and copies of rows between the whole batch and a rank's share.
//!
//! Rows are copied as bytes: token ids, activations and losses have element types that attention has no kernels for.

use core::ffi::c_void;

use super::{
    dlpack::{TensorFields, cpattn_dl_dtype, cpattn_tensor, parts},
    handle,
    input::array_mut,
    plan::{cpattn_plan, rank_of, side},
    status::Outcome,
};
use cpattn::{Device, Error, Plan, Result, Side};

/// Writes a number for each of a rank's tokens: `number(token, position)`.
///
/// # Safety
/// The header's promise about handles and arrays.
unsafe fn list(
    plan: *const cpattn_plan, side: i32, rank: u32, (name, out, capacity): (&'static str, *mut i64, usize),
    number: fn(usize, i64) -> i64,
) -> Outcome {
    let (plan, out) = given!(handle::borrow(plan), array_mut(name, out, capacity));
    let (side, rank) = (self::side(side)?, rank_of(plan, rank)?);
    let n = plan.local_tokens(side, rank).len();
    if capacity < n {
        let expected = format!("at least the {n} {name} of rank {rank}");
        return Err(Error::invalid("capacity", capacity, expected).into());
    }
    let mut at = out.iter_mut();
    plan.local_tokens(side, rank).for_each(|token, pos, _| {
        at.next().map(|to| to.write(number(token, pos)));
    });
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_tokens(
    plan: *const cpattn_plan, side: i32, rank: u32, tokens: *mut i64, capacity: usize,
) -> i32 {
    boundary!({ given!(list(plan, side, rank, ("tokens", tokens, capacity), |token, _| token as i64)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_positions(
    plan: *const cpattn_plan, side: i32, rank: u32, positions: *mut i64, capacity: usize,
) -> i32 {
    boundary!({ given!(list(plan, side, rank, ("positions", positions, capacity), |_, pos| pos)) })
}

/// Refuses a shift without an element for rows that have no source.
pub(super) fn check_fill(fill: *const c_void) -> Result<()> {
    if fill.is_null() {
        return Err(Error::invalid("fill", "NULL", "the address of one element"));
    }
    Ok(())
}

/// A tensor as rows of bytes: `[tokens, parts]` runs of `run` bytes.
pub(super) struct Rows {
    ptr: *mut u8,
    item: usize,
    pub(super) tokens: usize,
    token_stride: usize,
    pub(super) parts: usize,
    part_stride: usize,
    pub(super) run: usize,
}

impl Rows {
    pub(super) fn new(name: &'static str, p: &TensorFields) -> Result<Self> {
        let size = p.item;
        // The address space holds all of a tensor with elements (checked), so these fit; without any, nothing is
        // copied.
        let bytes = |stride: i64| (stride as usize).wrapping_mul(size);
        let [n, a, b] = p.shape;
        let [s, sa, sb] = p.strides;
        let (parts, part_stride, run) = match p.ndim {
            1 => (1, 0, size),
            2 if a > 1 && sa != 1 => {
                return Err(
                    Error::invalid(format!("{name}.strides[1]"), sa, 1).hint("the last dimension is contiguous")
                );
            }
            2 => (1, 0, (a as usize).wrapping_mul(size)),
            _ => (a as usize, bytes(sa), (b as usize).wrapping_mul(size)),
        };
        debug_assert!(p.ndim < 3 || b <= 1 || sb == 1);
        Ok(Self { ptr: p.ptr, item: size, tokens: n as usize, token_stride: bytes(s), parts, part_stride, run })
    }

    /// The addresses of the runs of a row.
    pub(super) fn row(&self, row: usize) -> impl Iterator<Item = *mut u8> {
        assert!(row < self.tokens, "row {row} of {}", self.tokens);
        (0..self.parts).map(move |part| self.ptr.wrapping_add(row * self.token_stride + part * self.part_stride))
    }

    /// The addresses from the first byte to the end of the last.
    fn hull(&self) -> core::ops::Range<usize> {
        let start = self.ptr.addr();
        start..start + (self.tokens - 1) * self.token_stride + (self.parts - 1) * self.part_stride + self.run
    }

    /// Whether no byte belongs to two runs. Exact for nested strides only.
    fn is_injective(&self) -> bool {
        let by_part = self.parts <= 1 || self.part_stride >= self.run;
        let nested = self.tokens <= 1 || self.token_stride >= (self.parts - 1) * self.part_stride + self.run;
        let crossed = self.parts <= 1 || self.part_stride >= (self.tokens - 1) * self.token_stride + self.run;
        let by_token = self.tokens <= 1 || self.token_stride >= self.run;
        (by_part && nested) || (by_token && crossed)
    }

    /// Writes one element to all places of a row.
    ///
    /// # Safety
    /// The tensor is valid for writes, and `fill` has one element.
    pub(super) unsafe fn fill(&self, row: usize, fill: *const u8) {
        for to in self.row(row) {
            for i in (0..self.run).step_by(self.item) {
                // SAFETY: within the run of a row that exists (checked by `row`); `fill` has one element (promised).
                unsafe { core::ptr::copy_nonoverlapping(fill, to.add(i), self.item) };
            }
        }
    }
}

/// A tensor of a call that copies rows: its name, its address, and the number of rows that it must have.
pub(super) type Wanted = (&'static str, *const cpattn_tensor, usize);

/// Reads two tensors; refuses the second if its type or shape differs from that of the first.
///
/// # Safety
/// The header's promise about tensors.
pub(super) unsafe fn alike((a, first, rows_a): Wanted, (b, second, rows_b): Wanted) -> Result<[TensorFields; 2]> {
    // SAFETY: both tensors are as the header says (the contract of this function).
    let (f, s) = unsafe { (parts(a, first, 1..=3, Device::Cpu)?, parts(b, second, 1..=3, Device::Cpu)?) };
    if s.ndim != f.ndim {
        return Err(Error::invalid(format!("{b}.ndim"), s.ndim, format!("that of {a}, {}", f.ndim)));
    }
    if s.dtype != f.dtype {
        let words = |d: cpattn_dl_dtype| format!("code {} with {} bits", d.code, d.bits);
        return Err(Error::invalid(format!("{b}.dtype"), words(s.dtype), format!("that of {a}, {}", words(f.dtype))));
    }
    for (name, p, rows) in [(a, &f, rows_a), (b, &s, rows_b)] {
        if p.shape[0] != rows as u64 {
            return Err(Error::invalid(format!("{name}.shape[0]"), p.shape[0], format!("{rows} tokens")));
        }
    }
    for d in 1..f.ndim {
        if s.shape[d] != f.shape[d] {
            let expected = format!("that of {a}, {}", f.shape[d]);
            return Err(Error::invalid(format!("{b}.shape[{d}]"), s.shape[d], expected));
        }
    }
    Ok([f, s])
}

/// Refuses a written tensor whose rows share bytes or that overlaps the other tensor. Neither tensor is empty.
pub(super) fn check_disjoint(first: (&str, &Rows), second: (&str, &Rows), written: usize) -> Result<()> {
    let (name, rows) = [first, second][written];
    if !rows.is_injective() {
        let expected = "rows that share no byte: they are written";
        return Err(Error::invalid(format!("{name}.strides"), "overlapping", expected));
    }
    let (a, b) = (first.1.hull(), second.1.hull());
    if a.start < b.end && b.start < a.end {
        return Err(Error::invalid(second.0, format!("memory that overlaps {}", first.0), "memory of its own"));
    }
    Ok(())
}

/// The whole batch's rows and a rank's; `None` when there is nothing to copy.
///
/// # Safety
/// The header's promise about tensors.
unsafe fn pair(
    plan: &Plan, side: Side, rank: usize, whole: *const cpattn_tensor, local: *const cpattn_tensor, whole_written: bool,
) -> Result<Option<(Rows, Rows)>> {
    let (all, mine) = (plan.problem().batch().tokens(side), plan.local_tokens(side, rank).len());
    // SAFETY: both tensors are as the header says (the contract of this function).
    let [w, l] = unsafe { alike(("whole", whole, all), ("local", local, mine)) }?;
    if w.is_empty() || l.is_empty() {
        return Ok(None);
    }
    let (w, l) = (Rows::new("whole", &w)?, Rows::new("local", &l)?);
    check_disjoint(("whole", &w), ("local", &l), usize::from(!whole_written))?;
    Ok(Some((w, l)))
}

/// Copies a row of one tensor to a row of the other.
///
/// # Safety
/// The tensors are valid for the call, and belong to a [`pair`].
unsafe fn copy((from, from_row): (&Rows, usize), (to, to_row): (&Rows, usize)) {
    for (a, b) in from.row(from_row).zip(to.row(to_row)) {
        // SAFETY: runs of equal length (equal types and shapes), of rows that exist (checked by `row`), in tensors that
        // share no byte.
        unsafe { core::ptr::copy_nonoverlapping(a, b, from.run) };
    }
}

/// # Safety
/// The header's promise about handles and tensors.
unsafe fn move_rows(
    plan: *const cpattn_plan, side: i32, rank: u32, whole: *const cpattn_tensor, local: *const cpattn_tensor,
    whole_written: bool,
) -> Outcome {
    let plan = given!(handle::borrow(plan));
    let (side, rank) = (self::side(side)?, rank_of(plan, rank)?);
    if let Some((whole, local)) = given!(pair(plan, side, rank, whole, local, whole_written)) {
        let mut row = 0;
        plan.local_tokens(side, rank).for_each(|token, _, _| {
            let (whole, local) = ((&whole, token), (&local, row));
            // SAFETY: the tensors of a `pair`, the caller's for the call.
            unsafe { if whole_written { copy(local, whole) } else { copy(whole, local) } };
            row += 1;
        });
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_shard(
    plan: *const cpattn_plan, side: i32, rank: u32, whole: *const cpattn_tensor, local: *const cpattn_tensor,
) -> i32 {
    boundary!({ given!(move_rows(plan, side, rank, whole, local, false)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_unshard(
    plan: *const cpattn_plan, side: i32, rank: u32, local: *const cpattn_tensor, whole: *const cpattn_tensor,
) -> i32 {
    boundary!({ given!(move_rows(plan, side, rank, whole, local, true)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_shift(
    plan: *const cpattn_plan, rank: u32, by: i64, fill: *const c_void, whole: *const cpattn_tensor,
    local: *const cpattn_tensor,
) -> i32 {
    boundary!({
        let plan = given!(handle::borrow(plan));
        let rank = rank_of(plan, rank)?;
        check_fill(fill)?;
        let pair = given!(pair(plan, Side::Q, rank, whole, local, false));
        let Some((whole, local)) = pair else { return Ok(()) };
        let mut row = 0;
        plan.local_tokens(Side::Q, rank).for_each_shifted(by, |token| {
            match token {
                // SAFETY: the tensors of a `pair`, the caller's for the call.
                Some(token) => unsafe { copy((&whole, token), (&local, row)) },
                // SAFETY: the tensor is the caller's for the call; `fill` has one element, by the header's promise.
                None => unsafe { local.fill(row, fill.cast()) },
            }
            row += 1;
        })?;
    })
}
