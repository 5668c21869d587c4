// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs of a rank: forward, backward, and the two all-to-alls by themselves.

use core::ffi::c_void;

use super::{
    dlpack::{Axes, cpattn_tensor, one, tensor},
    handle::{self, Exclusive as _},
    input::{array, sized},
    plan::{cpattn_plan, runs, side},
    rank::{RankState, cpattn_rank},
    status::Outcome,
};
use cpattn::{
    Device, Error, Plan,
    runtime::{Bindings, BlockTable, KeyIndices, Keys, Pages},
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
    pub max_logit: *const cpattn_tensor,
    pub dropout_seed: *const u64,
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
    pub d_lse: *const cpattn_tensor,
    pub dropout_seed: *const u64,
}

versioned! {
    cpattn_forward_args through lse;
    cpattn_backward_args through dsinks;
}

/// The tensors of a forward and of a backward, in the order of their structs.
const FORWARD: [TensorId; 7] = {
    use TensorId::{K, Lse, MaxLogit, O, Q, Sinks, V};
    [Q, K, V, Sinks, O, Lse, MaxLogit]
};
const BACKWARD: [TensorId; 12] = {
    use TensorId::{DLse, DO, Dk, Dq, Dsinks, Dv, K, Lse, O, Q, Sinks, V};
    [Q, K, V, Sinks, O, Lse, DO, Dq, Dk, Dv, Dsinks, DLse]
};

/// The keys of a run, as arguments of a function.
enum KeyArguments {
    All,
    /// The table, its entries, and the sizes.
    Paged(*const i32, usize, [usize; 3]),
    /// The lists, and their shape.
    Listed(*const i32, [usize; 3]),
}

/// The lists of a rank's tokens.
///
/// # Safety
/// The header's promise about arrays.
unsafe fn listed<'a>(indices: *const i32, [tokens, heads, entries]: [usize; 3]) -> Outcome<Keys<'a>> {
    // A product that is too large is no array's length.
    let all = tokens.saturating_mul(heads).saturating_mul(entries);
    Ok(Keys::Listed(KeyIndices { indices: given!(array("key_indices", indices, all)), heads, entries }))
}

/// Where k and v lie: the table is in memory of the rank's device.
///
/// # Safety
/// The header's promise about arrays.
unsafe fn paged<'a>(
    at: Device, block_table: *const i32, entries: usize, [pages_per_document, page_size, page_stride]: [usize; 3],
) -> Outcome<Keys<'a>> {
    let block_table = match at {
        #[cfg(feature = "cuda")]
        // SAFETY: valid when the run executes, with pages as entries, by the header's promise.
        Device::Cuda(_) => unsafe { BlockTable::on_device(block_table) },
        _ => BlockTable::new(given!(array("block_table", block_table, entries))),
    };
    Ok(Keys::Pages(Pages { block_table, pages_per_document, page_size, page_stride }))
}

/// Reads the tensors of a run and runs it.
///
/// # Safety
/// The header's promise about handles and tensors; streams are the driver's.
unsafe fn run(
    rank: &RankState, plan: &Plan, direction: Direction, tensors: &[*const cpattn_tensor], dropout_seed: *const u64,
    keys: KeyArguments, stream: *mut c_void,
) -> Outcome {
    runs(plan)?;
    let (mut rank, mut bindings) = (rank.claim()?, Bindings::default());
    let at = rank.device();
    let ids: &[TensorId] = match direction {
        Direction::Forward => &FORWARD,
        Direction::Backward => &BACKWARD,
    };
    for (&id, &given) in ids.iter().zip(tensors) {
        let name = if id == TensorId::DO { "d_o" } else { id.name() };
        let given = match id {
            TensorId::Sinks | TensorId::Dsinks => tensor(name, given, Axes::Sinks).optional(),
            TensorId::MaxLogit => tensor(name, given, Axes::PerHead).optional(),
            TensorId::Lse => tensor(name, given, Axes::HeadMajor),
            TensorId::DLse => tensor(name, given, Axes::HeadMajor).optional(),
            _ => tensor(name, given, Axes::Rows),
        };
        bindings.set(id, given!(one(at, &given)));
    }
    if !dropout_seed.is_null() {
        bindings = bindings.with_dropout_seed(Some(given!(array("dropout_seed", dropout_seed, 1))[0]));
    }
    let keys = match keys {
        KeyArguments::All => Keys::All,
        KeyArguments::Paged(table, entries, sizes) => given!(paged(at, table, entries, sizes)),
        KeyArguments::Listed(indices, shape) => given!(listed(indices, shape)),
    };
    // SAFETY: the memory is the caller's for the run, by the header's promise; shapes are checked against the plan.
    Ok(unsafe { rank.run(plan, direction, &bindings.with_keys(keys).on(stream)) }?)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_forward(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, args: *const cpattn_forward_args,
) -> i32 {
    boundary!({
        let (rank, plan, a) = given!(handle::borrow(rank), handle::borrow(plan), sized("args", args));
        let tensors = [a.q, a.k, a.v, a.sinks, a.o, a.lse, a.max_logit];
        given!(run(rank, plan, Direction::Forward, &tensors, a.dropout_seed, KeyArguments::All, a.stream));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_forward_paged(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, args: *const cpattn_forward_args, block_table: *const i32,
    documents: usize, pages_per_document: usize, page_size: usize, page_stride: usize,
) -> i32 {
    boundary!({
        let (rank, plan, a) = given!(handle::borrow(rank), handle::borrow(plan), sized("args", args));
        let tensors = [a.q, a.k, a.v, a.sinks, a.o, a.lse, a.max_logit];
        if documents != plan.problem().batch().documents() {
            let expected = format!("{}, those of the plan", plan.problem().batch().documents());
            return Err(Error::invalid("documents", documents, expected).hint("block_table has a row for each").into());
        }
        // A product that is too large is no array's length.
        let entries = documents.saturating_mul(pages_per_document);
        let keys = KeyArguments::Paged(block_table, entries, [pages_per_document, page_size, page_stride]);
        given!(run(rank, plan, Direction::Forward, &tensors, a.dropout_seed, keys, a.stream));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_backward(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, args: *const cpattn_backward_args,
) -> i32 {
    boundary!({
        let (rank, plan, a) = given!(handle::borrow(rank), handle::borrow(plan), sized("args", args));
        let tensors = [a.q, a.k, a.v, a.sinks, a.o, a.lse, a.d_o, a.dq, a.dk, a.dv, a.dsinks, a.d_lse];
        given!(run(rank, plan, Direction::Backward, &tensors, a.dropout_seed, KeyArguments::All, a.stream));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_forward_listed(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, args: *const cpattn_forward_args, key_indices: *const i32,
    tokens: usize, heads: usize, entries: usize,
) -> i32 {
    boundary!({
        let (rank, plan, a) = given!(handle::borrow(rank), handle::borrow(plan), sized("args", args));
        let tensors = [a.q, a.k, a.v, a.sinks, a.o, a.lse, a.max_logit];
        let keys = KeyArguments::Listed(key_indices, [tokens, heads, entries]);
        given!(run(rank, plan, Direction::Forward, &tensors, a.dropout_seed, keys, a.stream));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_backward_listed(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, args: *const cpattn_backward_args, key_indices: *const i32,
    tokens: usize, heads: usize, entries: usize,
) -> i32 {
    boundary!({
        let (rank, plan, a) = given!(handle::borrow(rank), handle::borrow(plan), sized("args", args));
        let tensors = [a.q, a.k, a.v, a.sinks, a.o, a.lse, a.d_o, a.dq, a.dk, a.dv, a.dsinks, a.d_lse];
        let keys = KeyArguments::Listed(key_indices, [tokens, heads, entries]);
        given!(run(rank, plan, Direction::Backward, &tensors, a.dropout_seed, keys, a.stream));
    })
}

/// One all-to-all.
///
/// # Safety
/// The header's promises about handles and tensors.
unsafe fn all_to_all(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, side: i32, way: AllToAllDirection,
    [from, to]: [*const cpattn_tensor; 2], stream: *mut c_void,
) -> Outcome {
    let (rank, plan) = given!(handle::borrow(rank), handle::borrow(plan));
    let (mut rank, side) = (rank.claim()?, self::side(side)?);
    let (from, to) = (tensor("from", from, Axes::Rows), tensor("to", to, Axes::Rows));
    let (from, to) = given!(one(rank.device(), &from), one(rank.device(), &to));
    let (tokens, held) = match way {
        AllToAllDirection::ToHeads => (from, to),
        AllToAllDirection::ToTokens => (to, from),
    };
    let all_to_all = AllToAll { direction: way, side, dim: tokens.dim, dtype: tokens.dtype };
    let tensors = Bindings::default().with(TensorId::OwnTokens, tokens).with(TensorId::OwnHeads, held);
    // SAFETY: the memory is the caller's for the run, and the stream one of the driver's, by the header's promises;
    // shapes are checked against the plan.
    Ok(unsafe { rank.run(plan, all_to_all, &tensors.on(stream)) }?)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_to_heads(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, side: i32, from: *const cpattn_tensor, to: *const cpattn_tensor,
    stream: *mut c_void,
) -> i32 {
    boundary!({ given!(all_to_all(rank, plan, side, AllToAllDirection::ToHeads, [from, to], stream)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_to_tokens(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, side: i32, from: *const cpattn_tensor, to: *const cpattn_tensor,
    stream: *mut c_void,
) -> i32 {
    boundary!({ given!(all_to_all(rank, plan, side, AllToAllDirection::ToTokens, [from, to], stream)) })
}
