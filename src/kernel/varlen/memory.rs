// SPDX-License-Identifier: MIT OR Apache-2.0
//! The packed tensors of a call: memory that grows to the largest call and is used by all.

use alloc::vec::Vec;

use super::{
    call::{Elements, ElementsMut},
    pieces::RowRun,
};
use crate::{call::RawTensor, element::Dtype};

/// Memory for several tensors, aligned for every element type.
#[derive(Default)]
pub(super) struct Packed(Vec<u128>);

/// A compact tensor to be placed: type, rows, heads, dim.
pub(super) type Shape = (Dtype, u64, u32, u32);

impl Packed {
    /// Places tensors one after another. What was placed before is gone.
    pub(super) fn place<const N: usize>(&mut self, shapes: [Shape; N]) -> [RawTensor; N] {
        let words = |(dtype, tokens, heads, dim): Shape| {
            (tokens as usize * heads as usize * dim as usize * dtype.size()).div_ceil(size_of::<u128>())
        };
        let needed = shapes.into_iter().map(words).sum();
        if self.0.len() < needed {
            // Not kept while the new memory is made.
            self.0 = Vec::new();
            self.0.resize(needed, 0);
        }
        let base = self.0.as_mut_ptr();
        let mut at = 0;
        shapes.map(|shape @ (dtype, tokens, heads, dim)| {
            let ptr = base.wrapping_add(at).cast();
            at += words(shape);
            RawTensor::compact(ptr, dtype, tokens, heads, dim)
        })
    }
}

/// `[heads, rows]` of a compact tensor of one number for each row and head.
pub(super) fn head_major(t: RawTensor) -> RawTensor {
    RawTensor { token_stride: 1, head_stride: t.tokens as i64, ..t }
}

/// The rows of a run.
pub(super) fn strided(t: RawTensor, run: RowRun) -> RawTensor {
    let token_stride = t.token_stride * i64::from(run.step);
    RawTensor { tokens: u64::from(run.count), token_stride, ..t.rows(run.first, 1) }
}

/// The rows of runs where they lie, if that is one after another.
pub(super) fn in_place(t: &RawTensor, runs: &[RowRun]) -> Option<RawTensor> {
    let first = runs.first()?.first;
    let mut end = first;
    let follows = runs.iter().all(|run| {
        let follows = run.first == end && (run.step == 1 || run.count == 1);
        end += u64::from(run.count);
        follows
    });
    let rows = follows.then(|| t.rows(first, end - first))?;
    rows.is_compact().then_some(rows)
}

fn elements(t: &RawTensor) -> usize {
    t.tokens as usize * t.heads as usize * t.dim as usize
}

/// A compact tensor as a slice.
///
/// # Safety
/// It is valid for reads, aligned, and not written while the slice lives.
pub(super) unsafe fn read<'a>(t: &RawTensor) -> Elements<'a> {
    let n = elements(t);
    // SAFETY: the contract.
    unsafe {
        match t.dtype {
            Dtype::F16 => Elements::F16(core::slice::from_raw_parts(t.ptr.cast(), n)),
            Dtype::Bf16 => Elements::Bf16(core::slice::from_raw_parts(t.ptr.cast(), n)),
            Dtype::F32 => Elements::F32(core::slice::from_raw_parts(t.ptr.cast(), n)),
            Dtype::F64 => Elements::F64(core::slice::from_raw_parts(t.ptr.cast(), n)),
        }
    }
}

/// A compact tensor as a slice to be written, filled with NaN.
///
/// # Safety
/// It is valid for writes, aligned, and not accessed otherwise while the slice lives.
pub(super) unsafe fn write<'a>(t: &RawTensor) -> ElementsMut<'a> {
    let n = elements(t);
    // SAFETY: the contract. All bits set is a NaN of every type.
    unsafe {
        t.ptr.write_bytes(0xff, n * t.dtype.size());
        match t.dtype {
            Dtype::F16 => ElementsMut::F16(core::slice::from_raw_parts_mut(t.ptr.cast(), n)),
            Dtype::Bf16 => ElementsMut::Bf16(core::slice::from_raw_parts_mut(t.ptr.cast(), n)),
            Dtype::F32 => ElementsMut::F32(core::slice::from_raw_parts_mut(t.ptr.cast(), n)),
            Dtype::F64 => ElementsMut::F64(core::slice::from_raw_parts_mut(t.ptr.cast(), n)),
        }
    }
}

/// Number `i` of a row and head of a tensor in an accumulator's type, replaced by what `with` makes of it.
///
/// # Safety
/// The row and the head are of the tensor, whose memory is valid, and used by nothing else.
pub(super) unsafe fn replace(t: &RawTensor, row: u64, head: u32, i: usize, with: impl FnOnce(f64) -> f64) {
    let at = t.rows(row, 1).heads(head, 1).ptr;
    // SAFETY: the contract.
    unsafe {
        if t.dtype == Dtype::F64 {
            let x = at.cast::<f64>().add(i);
            x.write(with(x.read()));
        } else {
            let x = at.cast::<f32>().add(i);
            x.write(with(f64::from(x.read())) as f32);
        }
    }
}
