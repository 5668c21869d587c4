// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels that read or write whole tensors, row by row: delta, finish, the sinks' gradient, merge, transform.
//!
//! On the CPU they need no memory, so their scratch may be NULL.

use core::ffi::c_void;
use std::sync::MutexGuard;

use super::{
    dlpack::{Axes, cpattn_tensor, disjoint_tensors, one, tensor},
    handle::{self, Exclusive as _},
    input::array,
    ranges::{cpattn_range, rows},
    scratch::cpattn_scratch,
    status::Outcome,
};
use cpattn::{
    Device, Error,
    call::{Block, Delta, Finish, Merge, RawTensor, SinkGradient, Transform},
    disjoint,
    kernel::{Kernels, cpu},
};

const MAX_SOURCES: usize = 64;

/// The kernels of a scratch, or for NULL those of the CPU.
#[allow(clippy::large_enum_variant, reason = "lives on the stack for one call")]
enum Where<'a> {
    Scratch(MutexGuard<'a, Kernels>),
    Cpu(Kernels),
}

impl Where<'_> {
    fn kernels(&mut self) -> &mut Kernels {
        match self {
            Self::Scratch(kernels) => kernels,
            Self::Cpu(kernels) => kernels,
        }
    }
}

/// # Safety
/// The header's promise about handles.
unsafe fn kernels<'a>(scratch: *mut cpattn_scratch) -> Outcome<Where<'a>> {
    if scratch.is_null() {
        return Ok(Where::Cpu(Kernels::cpu(1)));
    }
    Ok(Where::Scratch(given!(handle::borrow(scratch.cast_const())).claim()?))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_delta(
    scratch: *mut cpattn_scratch, o: *const cpattn_tensor, d_o: *const cpattn_tensor, delta: *const cpattn_tensor,
    stream: *mut c_void,
) -> i32 {
    boundary!({ given!(delta_of([o, d_o, core::ptr::null(), core::ptr::null(), delta], scratch, stream)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_delta_with_lse(
    scratch: *mut cpattn_scratch, o: *const cpattn_tensor, d_o: *const cpattn_tensor, lse: *const cpattn_tensor,
    d_lse: *const cpattn_tensor, delta: *const cpattn_tensor, stream: *mut c_void,
) -> i32 {
    boundary!({
        for (name, tensor) in [("lse", lse), ("d_lse", d_lse)] {
            if tensor.is_null() {
                return Err(Error::invalid(name, "NULL", "a tensor; without a gradient of lse, cpattn_delta").into());
            }
        }
        given!(delta_of([o, d_o, lse, d_lse, delta], scratch, stream));
    })
}

/// # Safety
/// The header's promises about handles, tensors and streams.
unsafe fn delta_of(
    [o, d_o, lse, d_lse, delta]: [*const cpattn_tensor; 5], scratch: *mut cpattn_scratch, stream: *mut c_void,
) -> Outcome<()> {
    let mut at = given!(kernels(scratch));
    let read = [
        tensor("o", o, Axes::Rows),
        tensor("d_o", d_o, Axes::Rows),
        tensor("lse", lse, Axes::HeadMajor).optional(),
        tensor("d_lse", d_lse, Axes::HeadMajor).optional(),
    ];
    let written = [tensor("delta", delta, Axes::HeadMajor)];
    let ([o, d_o, lse, d_lse], [delta]) = given!(disjoint_tensors(at.kernels().device(), read, written, ""));
    if o.tokens == 0 || o.heads == 0 {
        return Ok(());
    }
    given!(Kernels::delta(at.kernels(), &Delta { o, d_o, delta, lse, d_lse }, stream));
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_finish(
    scratch: *mut cpattn_scratch, o: *const cpattn_tensor, lse: *const cpattn_tensor, sinks: *const cpattn_tensor,
    rows: *const cpattn_range, row_count: usize, stream: *mut c_void,
) -> i32 {
    boundary!({
        let mut at = given!(kernels(scratch));
        let read = [tensor("sinks", sinks, Axes::Sinks).optional()];
        let written = [tensor("o", o, Axes::Rows), tensor("lse", lse, Axes::HeadMajor)];
        let (([sinks], [o, lse]), rows) =
            given!(disjoint_tensors(at.kernels().device(), read, written, ""), self::rows(rows, row_count));
        given!(Kernels::finish(at.kernels(), &Finish { o, lse, sinks, rows }, stream));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_sink_gradient(
    scratch: *mut cpattn_scratch, lse: *const cpattn_tensor, delta: *const cpattn_tensor, sinks: *const cpattn_tensor,
    dsinks: *const cpattn_tensor, stream: *mut c_void,
) -> i32 {
    boundary!({
        let mut at = given!(kernels(scratch));
        let read = [
            tensor("lse", lse, Axes::HeadMajor),
            tensor("delta", delta, Axes::HeadMajor),
            tensor("sinks", sinks, Axes::Sinks),
        ];
        let written = [tensor("dsinks", dsinks, Axes::Sinks)];
        let ([lse, delta, sinks], [dsinks]) = given!(disjoint_tensors(at.kernels().device(), read, written, ""));
        given!(Kernels::sink_gradient(at.kernels(), &SinkGradient { lse, delta, sinks, dsinks }, stream));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_sink_total(digits: *const cpattn_tensor, dsinks: *const cpattn_tensor) -> i32 {
    boundary!({
        let (read, written) = ([tensor("digits", digits, Axes::Sinks)], [tensor("dsinks", dsinks, Axes::Sinks)]);
        let ([digits], [dsinks]) = given!(disjoint_tensors(Device::Cpu, read, written, ""));
        given!(cpu::sink_total(&digits, &dsinks));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_merge(
    scratch: *mut cpattn_scratch, o: *const cpattn_tensor, lse: *const cpattn_tensor, other_o: *const cpattn_tensor,
    other_lse: *const cpattn_tensor, stream: *mut c_void,
) -> i32 {
    boundary!({
        let mut at = given!(kernels(scratch));
        let read = [tensor("other_o", other_o, Axes::Rows), tensor("other_lse", other_lse, Axes::PartialLse)];
        let written = [tensor("o", o, Axes::Rows), tensor("lse", lse, Axes::PartialLse)];
        let ([with_o, with_lse], [o, lse]) = given!(disjoint_tensors(at.kernels().device(), read, written, ""));
        if o.dim == 0 {
            return Err(Error::invalid("o.shape[2]", 0, "at least 1").into());
        }
        given!(Kernels::merge(at.kernels(), &Merge { o, lse, with_o, with_lse }, stream));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_transform(
    scratch: *mut cpattn_scratch, dst: *const cpattn_tensor, sources: *const *const cpattn_tensor, source_count: usize,
    stream: *mut c_void,
) -> i32 {
    boundary!({
        let mut at = given!(kernels(scratch));
        if source_count > MAX_SOURCES {
            return Err(Error::invalid("source_count", source_count, format!("at most {MAX_SOURCES}"))
                .hint("sum in several calls, with dst as the first source of the later ones")
                .into());
        }
        let (dst, pointers) = given!(
            one(at.kernels().device(), &tensor("dst", dst, Axes::Rows)),
            array("sources", sources, source_count)
        );
        let mut list = [RawTensor::NONE; MAX_SOURCES];
        let mut named = [("", RawTensor::NONE, false); MAX_SOURCES + 1];
        for (i, (to, &from)) in list.iter_mut().zip(pointers).enumerate() {
            *to = given!(one(at.kernels().device(), &tensor("sources", from, Axes::Rows)));
            let itself = i == 0 && *to == dst;
            named[i] = ("sources", if itself { RawTensor::NONE } else { *to }, false);
        }
        named[source_count] = ("dst", dst, true);
        disjoint(&named[..=source_count])?;
        let block = Block { dst, sources_begin: 0, sources_end: source_count as u32 };
        let call = Transform { blocks: &[block], sources: &list[..source_count] };
        if dst.tokens == 0 || dst.heads == 0 || dst.dim == 0 {
            return Ok(());
        }
        given!(Kernels::transform(at.kernels(), &call, stream));
    })
}
