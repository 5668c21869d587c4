// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lse of a caller to base 2: a run computes with natural logarithms, and converts at its border.
//!
//! Other kernels return lse to base 2, and one base taken for the other gives results that look right. A run is told
//! which it gets and gives. What it reads is converted into memory of the rank, since the caller's is not the run's to
//! write; what it writes is converted in place, after the run. A gradient of lse is that of the lse which the caller
//! has. Sinks and scores are natural logarithms in every base.

use core::f64::consts::{LN_2, LOG2_E};
use std::vec::Vec;

use super::{bind::Bindings, lse_base::LseBase};
use crate::{
    call::RawTensor,
    element::Dtype,
    schedule::{Direction, Purpose, TensorId},
};

/// Natural lse of what a run reads; room that is kept from run to run.
#[derive(Default)]
pub(super) struct NaturalLse {
    room: Vec<u64>,
}

impl NaturalLse {
    /// The tensors of a run with natural logarithms in place of what it reads to base 2.
    ///
    /// # Safety
    /// The tensors have the forms of the run and are valid for reads.
    pub(super) unsafe fn read(&mut self, run: Purpose, tensors: &Bindings) -> Bindings {
        let mut natural = *tensors;
        let read: &[(TensorId, f64)] = match (tensors.lse_base, run) {
            (LseBase::Two, Purpose::Attention(Direction::Backward)) => {
                &[(TensorId::Lse, LN_2), (TensorId::DLse, LOG2_E)]
            }
            (LseBase::Two, Purpose::Combine(_)) => &[(TensorId::PartialLse, LN_2)],
            _ => return natural,
        };
        let given = || read.iter().map(|&(id, factor)| (id, factor, *tensors.get(id))).filter(|(.., t)| !t.is_none());
        // An element in each word, whichever of the two types it has.
        self.room.clear();
        self.room.resize(given().map(|(.., t)| t.tokens as usize * t.heads as usize).sum(), 0);
        let mut rest = self.room.as_mut_ptr();
        for (id, factor, from) in given() {
            let to = RawTensor::compact(rest.cast(), from.dtype, from.tokens, from.heads, 1);
            // SAFETY: `from` is as promised, and the room has a word for each of its numbers.
            unsafe { convert(&from, &to, factor) };
            natural.set(id, to);
            rest = rest.wrapping_add(from.tokens as usize * from.heads as usize);
        }
        natural
    }
}

/// Converts the lse that a run has written.
///
/// # Safety
/// The tensors have the forms of the run and are valid for writes, by this call alone.
pub(super) unsafe fn write(run: Purpose, tensors: &Bindings) {
    let writes = matches!(run, Purpose::Attention(Direction::Forward) | Purpose::Combine(_));
    if tensors.lse_base == LseBase::Two && writes {
        let lse = tensors.get(TensorId::Lse);
        // SAFETY: as promised.
        unsafe { convert(lse, lse, LOG2_E) };
    }
}

/// `to = factor · from`, number by number.
///
/// # Safety
/// Both are tensors of f32 or of f64, of one shape, valid for reads and writes.
unsafe fn convert(from: &RawTensor, to: &RawTensor, factor: f64) {
    let wide = from.dtype == Dtype::F64;
    for token in 0..from.tokens {
        for head in 0..from.heads {
            let [from, to] = [from, to].map(|t| t.rows(token, 1).heads(head, 1).ptr);
            // SAFETY: a number of each tensor, aligned to its type.
            unsafe {
                if wide {
                    *to.cast::<f64>() = *from.cast::<f64>() * factor;
                } else {
                    *to.cast::<f32>() = (f64::from(*from.cast::<f32>()) * factor) as f32;
                }
            }
        }
    }
}
