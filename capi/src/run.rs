// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs of a rank: forward, backward, and the two all-to-alls by themselves.

use core::ffi::c_void;

use super::{
    dlpack::{Axes, Given, cpattn_tensor, one, read, written},
    handle,
    input::sized,
    plan::{cpattn_plan, runs, side},
    rank::{RankState, cpattn_rank},
    status::Outcome,
};
use cpattn::{
    error::Error,
    plan::Plan,
    runtime::Bindings,
    schedule::{AllToAll, AllToAllDirection, Direction, TensorId},
};

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_forward_args {
    pub struct_size: usize,
    pub q: *const cpattn_tensor,
    pub k: *const cpattn_tensor,
    pub v: *const cpattn_tensor,
    pub sinks: *const cpattn_tensor,
    pub o: *const cpattn_tensor,
    pub lse: *const cpattn_tensor,
    pub stream: *mut c_void,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_backward_args {
    pub struct_size: usize,
    pub q: *const cpattn_tensor,
    pub k: *const cpattn_tensor,
    pub v: *const cpattn_tensor,
    pub sinks: *const cpattn_tensor,
    pub o: *const cpattn_tensor,
    pub lse: *const cpattn_tensor,
    pub d_o: *const cpattn_tensor,
    pub dq: *const cpattn_tensor,
    pub dk: *const cpattn_tensor,
    pub dv: *const cpattn_tensor,
    pub dsinks: *const cpattn_tensor,
    pub stream: *mut c_void,
}

versioned! {
    cpattn_forward_args through lse;
    cpattn_backward_args through dsinks;
}

/// Reads the tensors of a run and runs it.
///
/// # Safety
/// The header's promise about tensors; streams are the driver's.
unsafe fn run(
    rank: &RankState,
    plan: &Plan,
    direction: Direction,
    list: &[(TensorId, Given)],
    stream: *mut c_void,
) -> Outcome {
    runs(plan)?;
    let mut bindings = Bindings::default();
    for (tensor, given) in list {
        bindings.set(*tensor, given!(one(rank.device, given)));
    }
    // SAFETY: the memory is the caller's for the run, by the header's promise; shapes are checked against the plan.
    unsafe { rank.lock()?.run_on(plan, direction, &bindings, stream) }?;
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_forward(
    rank: *mut cpattn_rank,
    plan: *const cpattn_plan,
    args: *const cpattn_forward_args,
) -> i32 {
    boundary!({
        let (rank, plan, a) = given!(handle::borrow(rank), handle::borrow(plan), sized("args", args));
        let list = [
            (TensorId::Q, read("q", a.q, Axes::Rows)),
            (TensorId::K, read("k", a.k, Axes::Rows)),
            (TensorId::V, read("v", a.v, Axes::Rows)),
            (TensorId::Sinks, read("sinks", a.sinks, Axes::PerHead).optional()),
            (TensorId::O, written("o", a.o, Axes::Rows)),
            (TensorId::Lse, written("lse", a.lse, Axes::HeadMajor)),
        ];
        given!(run(rank, plan, Direction::Forward, &list, a.stream));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_backward(
    rank: *mut cpattn_rank,
    plan: *const cpattn_plan,
    args: *const cpattn_backward_args,
) -> i32 {
    boundary!({
        let (rank, plan, a) = given!(handle::borrow(rank), handle::borrow(plan), sized("args", args));
        if !a.dsinks.is_null() && !plan.problem().sinks() {
            runs(plan)?;
            return Err(Error::invalid("dsinks", "given", "NULL, since the problem has no sinks").into());
        }
        let list = [
            (TensorId::Q, read("q", a.q, Axes::Rows)),
            (TensorId::K, read("k", a.k, Axes::Rows)),
            (TensorId::V, read("v", a.v, Axes::Rows)),
            (TensorId::Sinks, read("sinks", a.sinks, Axes::PerHead).optional()),
            (TensorId::O, read("o", a.o, Axes::Rows)),
            (TensorId::Lse, read("lse", a.lse, Axes::HeadMajor)),
            (TensorId::DO, read("d_o", a.d_o, Axes::Rows)),
            (TensorId::Dq, written("dq", a.dq, Axes::Rows)),
            (TensorId::Dk, written("dk", a.dk, Axes::Rows)),
            (TensorId::Dv, written("dv", a.dv, Axes::Rows)),
            (TensorId::Dsinks, written("dsinks", a.dsinks, Axes::PerHead).optional()),
        ];
        given!(run(rank, plan, Direction::Backward, &list, a.stream));
    })
}

/// One all-to-all; `tokens` and `held` as the header describes them.
///
/// # Safety
/// The header's promises about handles and tensors.
unsafe fn all_to_all(
    rank: *mut cpattn_rank,
    plan: *const cpattn_plan,
    side: i32,
    way: AllToAllDirection,
    [tokens, held]: [Given; 2],
    stream: *mut c_void,
) -> Outcome {
    let (rank, plan) = given!(handle::borrow(rank), handle::borrow(plan));
    let side = self::side(side)?;
    let (tokens, held) = given!(one(rank.device, &tokens), one(rank.device, &held));
    let all_to_all = AllToAll { way, side, dim: tokens.dim, dtype: tokens.dtype };
    // SAFETY: the memory is the caller's for the run, and the stream one of the driver's, by the header's promises; shapes
    // are checked against the plan.
    unsafe { rank.lock()?.all_to_all(plan, all_to_all, tokens, held, stream) }?;
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_to_heads(
    rank: *mut cpattn_rank,
    plan: *const cpattn_plan,
    side: i32,
    from: *const cpattn_tensor,
    to: *const cpattn_tensor,
    stream: *mut c_void,
) -> i32 {
    boundary!({
        let tensors = [read("from", from, Axes::Rows), written("to", to, Axes::Rows)];
        given!(all_to_all(rank, plan, side, AllToAllDirection::ToHeads, tensors, stream));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_to_tokens(
    rank: *mut cpattn_rank,
    plan: *const cpattn_plan,
    side: i32,
    from: *const cpattn_tensor,
    to: *const cpattn_tensor,
    stream: *mut c_void,
) -> i32 {
    boundary!({
        let tensors = [written("to", to, Axes::Rows), read("from", from, Axes::Rows)];
        given!(all_to_all(rank, plan, side, AllToAllDirection::ToTokens, tensors, stream));
    })
}
