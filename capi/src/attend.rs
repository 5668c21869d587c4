// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attention over ranges, forward and backward.

use core::ffi::c_void;

use super::{
    dlpack::{Axes, cpattn_tensor, disjoint_tensors, tensor},
    handle::{self, Exclusive as _},
    input::{flag, one_of, reserved, result, sized},
    ranges::{ElementSizes, RangeCopies, cpattn_head_map, cpattn_ranges, cpattn_score, head_map, ranges, score},
    scratch::cpattn_scratch,
};
use cpattn::{
    Device, Error, Result,
    call::{Attend, AttendBackward, Gradients},
    kernel::Kernels,
};

const GRADIENTS: [(&str, Gradients); 3] = [
    ("CPATTN_GRADIENTS_ALL", Gradients::All),
    ("CPATTN_GRADIENTS_QUERIES", Gradients::Queries),
    ("CPATTN_GRADIENTS_KEYS", Gradients::Keys),
];

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_attend_args {
    pub struct_size: usize,
    pub q: *const cpattn_tensor,
    pub k: *const cpattn_tensor,
    pub v: *const cpattn_tensor,
    pub running: *const cpattn_tensor,
    pub o: *const cpattn_tensor,
    pub lse: *const cpattn_tensor,
    pub alibi_slopes: *const cpattn_tensor,
    pub sinks: *const cpattn_tensor,
    pub heads: cpattn_head_map,
    pub aligned: i32,
    pub score: cpattn_score,
    pub ranges: cpattn_ranges,
    pub stream: *mut c_void,
    pub running_lse: *const cpattn_tensor,
    pub q_range_size: usize,
    pub pair_size: usize,
    pub max_logit: *const cpattn_tensor,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_attend_backward_args {
    pub struct_size: usize,
    pub q: *const cpattn_tensor,
    pub k: *const cpattn_tensor,
    pub v: *const cpattn_tensor,
    pub d_o: *const cpattn_tensor,
    pub lse: *const cpattn_tensor,
    pub delta: *const cpattn_tensor,
    pub dq: *const cpattn_tensor,
    pub dk: *const cpattn_tensor,
    pub dv: *const cpattn_tensor,
    pub alibi_slopes: *const cpattn_tensor,
    pub heads: cpattn_head_map,
    pub accumulate_keys: i32,
    pub per_q_head: i32,
    pub gradients: i32,
    pub aligned: i32,
    pub reserved: i32,
    pub score: cpattn_score,
    pub ranges: cpattn_ranges,
    pub stream: *mut c_void,
    pub q_range_size: usize,
    pub pair_size: usize,
}

versioned! {
    cpattn_attend_args through stream;
    cpattn_attend_backward_args through stream;
}

/// # Safety
/// Tensors and arrays are as the header says, as long as the result lives.
unsafe fn forward<'a>(at: Device, a: &cpattn_attend_args, copies: &'a mut RangeCopies) -> Result<Attend<'a>> {
    let read = [
        tensor("q", a.q, Axes::Rows),
        tensor("k", a.k, Axes::Rows),
        tensor("v", a.v, Axes::Rows),
        tensor("alibi_slopes", a.alibi_slopes, Axes::Slopes).optional(),
        tensor("sinks", a.sinks, Axes::Sinks).optional(),
    ];
    let written = [
        tensor("running", a.running, Axes::Rows).optional(),
        tensor("running_lse", a.running_lse, Axes::PartialLse).optional(),
        tensor("o", a.o, Axes::Rows).optional(),
        tensor("lse", a.lse, Axes::HeadMajor).optional(),
        tensor("max_logit", a.max_logit, Axes::PerHead).optional(),
    ];
    let ([q, k, v, alibi_slopes, sinks], [running, running_lse, o, lse, max_logit]) =
        given!(disjoint_tensors(at, read, written, "running"));
    let (heads, score, aligned) = (head_map(a.heads, &q)?, score(a.score)?, flag("aligned", a.aligned)?);
    let sizes = ElementSizes { q_range: a.q_range_size, pair: a.pair_size };
    let ranges = given!(ranges(&a.ranges, sizes, copies));
    // If it is not given, `lse` holds the running lse too, in one word.
    let running_lse = if running_lse.is_none() { lse } else { running_lse };
    let call = Attend::new([q, k, v, o], heads, score, ranges);
    Ok(Attend { running, running_lse, lse, alibi_slopes, sinks, max_logit, aligned, ..call })
}

/// # Safety
/// As [`forward`].
unsafe fn backward<'a>(
    at: Device, a: &cpattn_attend_backward_args, copies: &'a mut RangeCopies,
) -> Result<AttendBackward<'a>> {
    reserved("args.reserved", a.reserved == 0)?;
    let gradients = one_of("gradients", a.gradients, &GRADIENTS)?;
    let (keys, queries) = (gradients != Gradients::Queries, gradients != Gradients::Keys);
    for (name, given, made) in
        [("dq", !a.dq.is_null(), queries), ("dk", !a.dk.is_null(), keys), ("dv", !a.dv.is_null(), keys)]
    {
        if given != made {
            let (found, expected) = if made { ("NULL", "a tensor") } else { ("given", "NULL") };
            let (constant, _) = GRADIENTS[a.gradients as usize];
            return Err(Error::invalid(name, found, format!("{expected} with gradients {constant}")));
        }
    }
    let read = [
        tensor("q", a.q, Axes::Rows),
        tensor("k", a.k, Axes::Rows),
        tensor("v", a.v, Axes::Rows),
        tensor("d_o", a.d_o, Axes::Rows),
        tensor("lse", a.lse, Axes::HeadMajor),
        tensor("delta", a.delta, Axes::HeadMajor),
        tensor("alibi_slopes", a.alibi_slopes, Axes::Slopes).optional(),
    ];
    let written = [
        tensor("dq", a.dq, Axes::Rows).optional(),
        tensor("dk", a.dk, Axes::Rows).optional(),
        tensor("dv", a.dv, Axes::Rows).optional(),
    ];
    let ([q, k, v, d_o, lse, delta, alibi_slopes], [dq, dk, dv]) = given!(disjoint_tensors(at, read, written, ""));
    let accumulate_keys = flag("accumulate_keys", a.accumulate_keys)?;
    let per_q_head = flag("per_q_head", a.per_q_head)?;
    let (heads, score, aligned) = (head_map(a.heads, &q)?, score(a.score)?, flag("aligned", a.aligned)?);
    let sizes = ElementSizes { q_range: a.q_range_size, pair: a.pair_size };
    let ranges = given!(ranges(&a.ranges, sizes, copies));
    let call = AttendBackward::new([q, k, v, d_o], heads, score, ranges);
    Ok(AttendBackward { lse, delta, dq, dk, dv, accumulate_keys, per_q_head, gradients, alibi_slopes, aligned, ..call })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_attend(scratch: *mut cpattn_scratch, args: *const cpattn_attend_args) -> i32 {
    boundary!({
        let (scratch, a) = given!(handle::borrow(scratch), sized("args", args));
        let (mut kernels, mut copies) = (scratch.claim()?, RangeCopies::default());
        let call = given!(forward(kernels.device(), &a, &mut copies));
        given!(Kernels::attend(&mut kernels, &call, a.stream));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_attend_metadata(
    scratch: *mut cpattn_scratch, args: *const cpattn_attend_args, bytes: *mut u64,
) -> i32 {
    boundary!({
        let (scratch, a, bytes) = given!(handle::borrow(scratch), sized("args", args), result("bytes", bytes));
        let (kernels, mut copies) = (scratch.claim()?, RangeCopies::default());
        let call = given!(forward(kernels.device(), &a, &mut copies));
        bytes.write(kernels.attend_metadata(&call)? as u64);
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_attend_backward(
    scratch: *mut cpattn_scratch, args: *const cpattn_attend_backward_args,
) -> i32 {
    boundary!({
        let (scratch, a) = given!(handle::borrow(scratch), sized("args", args));
        let (mut kernels, mut copies) = (scratch.claim()?, RangeCopies::default());
        let call = given!(backward(kernels.device(), &a, &mut copies));
        given!(Kernels::attend_backward(&mut kernels, &call, a.stream));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_attend_backward_metadata(
    scratch: *mut cpattn_scratch, args: *const cpattn_attend_backward_args, bytes: *mut u64,
) -> i32 {
    boundary!({
        let (scratch, a, bytes) = given!(handle::borrow(scratch), sized("args", args), result("bytes", bytes));
        let (kernels, mut copies) = (scratch.claim()?, RangeCopies::default());
        let call = given!(backward(kernels.device(), &a, &mut copies));
        bytes.write(kernels.attend_backward_metadata(&call)? as u64);
    })
}
