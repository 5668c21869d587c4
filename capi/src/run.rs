// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs of a rank: forward, backward, and the two all-to-alls by themselves.

use core::ffi::c_void;

use super::{
    dlpack::{self, Axes, Given, cpattn_tensor, one, tensor},
    handle::{self, Exclusive as _},
    input::sized,
    plan::{cpattn_plan, runs, side},
    rank::{RankState, cpattn_rank},
    status::Outcome,
};
use cpattn::{
    Error, Plan,
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

/// The tensors of a run in the order of `cpattn_backward_args`; a forward has the first six.
const TENSORS: [(TensorId, &str, Axes); 11] = [
    (TensorId::Q, "q", Axes::Rows),
    (TensorId::K, "k", Axes::Rows),
    (TensorId::V, "v", Axes::Rows),
    (TensorId::Sinks, "sinks", Axes::PerHead),
    (TensorId::O, "o", Axes::Rows),
    (TensorId::Lse, "lse", Axes::HeadMajor),
    (TensorId::DO, "d_o", Axes::Rows),
    (TensorId::Dq, "dq", Axes::Rows),
    (TensorId::Dk, "dk", Axes::Rows),
    (TensorId::Dv, "dv", Axes::Rows),
    (TensorId::Dsinks, "dsinks", Axes::PerHead),
];

/// Reads the tensors of a run and runs it.
///
/// # Safety
/// The header's promise about handles and tensors; streams are the driver's.
unsafe fn run(
    rank: &RankState, plan: &Plan, direction: Direction, tensors: &[*const cpattn_tensor], stream: *mut c_void,
) -> Outcome {
    runs(plan)?;
    let mut bindings = Bindings::default();
    for (&(id, name, form), &tensor) in TENSORS.iter().zip(tensors) {
        // Only sinks and their gradient have one value for each head, and only they may be left out.
        let mut given = dlpack::tensor(name, tensor, form);
        if matches!(form, Axes::PerHead) {
            given = given.optional();
        }
        bindings.set(id, given!(one(rank.device, &given)));
    }
    // SAFETY: the memory is the caller's for the run, by the header's promise; shapes are checked against the plan.
    unsafe { rank.lock()?.run_on(plan, direction, &bindings, stream) }?;
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_forward(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, args: *const cpattn_forward_args,
) -> i32 {
    boundary!({
        let (rank, plan, a) = given!(handle::borrow(rank), handle::borrow(plan), sized("args", args));
        given!(run(rank, plan, Direction::Forward, &[a.q, a.k, a.v, a.sinks, a.o, a.lse], a.stream));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_backward(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, args: *const cpattn_backward_args,
) -> i32 {
    boundary!({
        let (rank, plan, a) = given!(handle::borrow(rank), handle::borrow(plan), sized("args", args));
        if !a.dsinks.is_null() && !plan.problem().sinks() {
            runs(plan)?;
            return Err(Error::invalid("dsinks", "given", "NULL, since the problem has no sinks").into());
        }
        let tensors = [a.q, a.k, a.v, a.sinks, a.o, a.lse, a.d_o, a.dq, a.dk, a.dv, a.dsinks];
        given!(run(rank, plan, Direction::Backward, &tensors, a.stream));
    })
}

/// One all-to-all; `tokens` and `held` as the header describes them.
///
/// # Safety
/// The header's promises about handles and tensors.
unsafe fn all_to_all(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, side: i32, way: AllToAllDirection, [tokens, held]: [Given; 2],
    stream: *mut c_void,
) -> Outcome {
    let (rank, plan) = given!(handle::borrow(rank), handle::borrow(plan));
    let side = self::side(side)?;
    let (tokens, held) = given!(one(rank.device, &tokens), one(rank.device, &held));
    let all_to_all = AllToAll { way, side, dim: tokens.dim, dtype: tokens.dtype };
    // SAFETY: the memory is the caller's for the run, and the stream one of the driver's, by the header's promises;
    // shapes are checked against the plan.
    unsafe { rank.lock()?.all_to_all(plan, all_to_all, tokens, held, stream) }?;
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_to_heads(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, side: i32, from: *const cpattn_tensor, to: *const cpattn_tensor,
    stream: *mut c_void,
) -> i32 {
    boundary!({
        let tensors = [tensor("from", from, Axes::Rows), tensor("to", to, Axes::Rows)];
        given!(all_to_all(rank, plan, side, AllToAllDirection::ToHeads, tensors, stream));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_to_tokens(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, side: i32, from: *const cpattn_tensor, to: *const cpattn_tensor,
    stream: *mut c_void,
) -> i32 {
    boundary!({
        let tensors = [tensor("to", to, Axes::Rows), tensor("from", from, Axes::Rows)];
        given!(all_to_all(rank, plan, side, AllToAllDirection::ToTokens, tensors, stream));
    })
}
