// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs of a rank: forward, backward, and the two all-to-alls by themselves.

use core::ffi::c_void;

use super::{
    dlpack::{Axes, cpattn_tensor, one, tensor},
    handle::{self, Exclusive as _},
    input::{Versioned, array, one_of, reserved, sized},
    plan::{cpattn_plan, runs, side},
    rank::cpattn_rank,
    status::Outcome,
};
use cpattn::{
    Device, Error, Plan, Result,
    runtime::{Bindings, BlockTable, KeyIndices, Keys, LseBase, Pages},
    schedule::{AllToAll, AllToAllDirection, Direction, TensorId},
};

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_keys {
    pub struct_size: usize,
    pub kind: i32,
    pub reserved: i32,
    pub block_table: *const i32,
    pub documents: usize,
    pub pages_per_document: usize,
    pub page_size: usize,
    pub page_stride: usize,
    pub key_indices: *const i32,
    pub tokens: usize,
    pub heads: usize,
    pub entries: usize,
}

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
    pub keys: *const cpattn_keys,
    pub lse_base: i32,
    pub reserved: i32,
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
    pub keys: *const cpattn_keys,
    pub lse_base: i32,
    pub reserved: i32,
}

versioned! {
    cpattn_keys through entries;
    cpattn_forward_args through lse;
    cpattn_backward_args through dsinks;
}

/// The keys of a run, of a rank on `at`.
///
/// # Safety
/// The header's promises about structs and arrays.
unsafe fn keys<'a>(keys: *const cpattn_keys, plan: &Plan, at: Device) -> Outcome<Keys<'a>> {
    if keys.is_null() {
        return Ok(Keys::All);
    }
    let a = given!(sized("keys", keys));
    reserved("keys.reserved", a.reserved == 0)?;
    let kinds = [("CPATTN_KEYS_ALL", 0), ("CPATTN_KEYS_PAGES", 1), ("CPATTN_KEYS_LISTED", 2)];
    let kind = one_of("keys.kind", a.kind, &kinds)?;
    let pages = [a.documents, a.pages_per_document, a.page_size, a.page_stride];
    let lists = [a.tokens, a.heads, a.entries];
    for (name, of, unused) in [
        ("block_table", 1, a.block_table.is_null() && pages == [0; 4]),
        ("key_indices", 2, a.key_indices.is_null() && lists == [0; 3]),
    ] {
        if kind != of && !unused {
            let expected = format!("NULL, its sizes 0: keys.kind is {}", kinds[kind].0);
            return Err(Error::invalid(format!("keys.{name}"), "given", expected).into());
        }
    }
    match kind {
        1 => {
            let documents = plan.problem().batch().documents();
            if a.documents != documents {
                let expected = format!("{documents}, those of the plan");
                return Err(Error::invalid("documents", a.documents, expected)
                    .hint("block_table has a row for each")
                    .into());
            }
            let block_table = match at {
                #[cfg(feature = "cuda")]
                // SAFETY: valid when the run executes, with pages as entries, by the header's promise.
                Device::Cuda(_) => unsafe { BlockTable::on_device(a.block_table) },
                // A product that is too large is no array's length.
                _ => {
                    let entries = documents.saturating_mul(a.pages_per_document);
                    BlockTable::new(given!(array("block_table", a.block_table, entries)))
                }
            };
            let [_, pages_per_document, page_size, page_stride] = pages;
            Ok(Keys::Pages(Pages { block_table, pages_per_document, page_size, page_stride }))
        }
        2 => {
            let all = lists.into_iter().fold(1, usize::saturating_mul);
            let indices = given!(array("key_indices", a.key_indices, all));
            Ok(Keys::Listed(KeyIndices { indices, heads: a.heads, entries: a.entries }))
        }
        _ => Ok(Keys::All),
    }
}

/// Arguments of a direction of attention: words, of which the table of tensors says the places of tensors.
trait Arguments: Versioned {
    const DIRECTION: Direction;

    /// The stream, the seed of dropout, the keys, the base of lse and what is reserved.
    fn others(&self) -> (*mut c_void, *const u64, *const cpattn_keys, [i32; 2]);
}

macro_rules! arguments {
    ($($name:ident: $direction:expr;)*) => {$(
        impl Arguments for $name {
            const DIRECTION: Direction = $direction;

            fn others(&self) -> (*mut c_void, *const u64, *const cpattn_keys, [i32; 2]) {
                (self.stream, self.dropout_seed, self.keys, [self.lse_base, self.reserved])
            }
        }
    )*};
}

arguments! {
    cpattn_forward_args: Direction::Forward;
    cpattn_backward_args: Direction::Backward;
}

/// The base of lse with this number.
pub(super) fn lse_base(value: i32) -> Result<LseBase> {
    let names = [("CPATTN_LSE_NATURAL", LseBase::Natural), ("CPATTN_LSE_BASE_2", LseBase::Two)];
    one_of("lse_base", value, &names)
}

/// Reads the tensors of a run and runs it.
///
/// # Safety
/// The header's promise about handles and tensors; streams are the driver's.
unsafe fn run<A: Arguments>(rank: *mut cpattn_rank, plan: *const cpattn_plan, args: *const A) -> Outcome {
    let (rank, plan, args) = given!(handle::borrow(rank), handle::borrow(plan), sized("args", args));
    runs(plan)?;
    let (mut rank, mut bindings) = (rank.claim()?, Bindings::default());
    let at = rank.device();
    for id in TensorId::ALL {
        let Some(member) = id.member(A::DIRECTION) else { continue };
        assert!(member < size_of::<A>() / size_of::<usize>());
        // SAFETY: a member of the struct, which is an address (`header.rs` compares places and types).
        let of = unsafe { (&raw const args).cast::<*const cpattn_tensor>().add(member).read() };
        let of = tensor(id.name(), of, id.axes().into());
        let of = if id.is_optional() || id.is_of_sinks() { of.optional() } else { of };
        bindings.set(id, given!(one(at, &of)));
    }
    let (stream, dropout_seed, keys, [base, rest]) = args.others();
    reserved("args.reserved", rest == 0)?;
    bindings = bindings.with_lse_base(lse_base(base)?);
    if !dropout_seed.is_null() {
        bindings = bindings.with_dropout_seed(Some(given!(array("dropout_seed", dropout_seed, 1))[0]));
    }
    let keys = given!(self::keys(keys, plan, at));
    // SAFETY: the memory is the caller's for the run, by the header's promise; shapes are checked against the plan.
    Ok(unsafe { rank.run(plan, A::DIRECTION, &bindings.with_keys(keys).on(stream)) }?)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_forward(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, args: *const cpattn_forward_args,
) -> i32 {
    boundary!({ given!(run(rank, plan, args)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_backward(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, args: *const cpattn_backward_args,
) -> i32 {
    boundary!({ given!(run(rank, plan, args)) })
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
