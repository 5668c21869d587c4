// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C interface: `include/cpattn.h`, which is its manual.
//!
//! Everything here is a thin skin: it turns what C can say into what the crate's safe and unsafe functions take, checks
//! on the way all that can be checked from outside (null, alignment, sizes, flags, handles), and turns errors into a
//! status and a text. Nothing is computed here. Names, fields and their order are those of the header, letter by letter;
//! `tests/capi_header.rs` compares the two, and the C compiler's sizes and offsets with ours.
//!
//! - `status`: the one boundary that no panic crosses, statuses, the thread's last error;
//! - `handle`: opaque handles, and how dead ones are told from live ones;
//! - `input`: structs with a size, arrays, flags, results; `dlpack`: tensors;
//! - `problem`, `plan`, `shard`, `transport` (with `table`, `mpi`, `nccl`), `rank`, `run`, `trace`: the calls of the whole job, in the header's order;
//! - `scratch`, `ranges`, `attend`, `blocks`: the kernels by themselves.
//!
//! CPU and devices are told apart in three places: where a tensor says it lies (`dlpack`), where a rank is made, and where
//! a scratch is. What differs behind them is the crate's own [`Rank`](crate::Rank) and
//! [`Kernels`](crate::kernel::Kernels). A build without CUDA exports the same functions and refuses what it lacks.
//!
//! Every exported function is unsafe in the same way and for the same reason: pointers come from C. What the header asks
//! of its callers is the safety contract; comments at the blocks say which part of it they rest on.
#![allow(non_camel_case_types, reason = "the header's names")]
#![allow(missing_docs, clippy::missing_safety_doc, reason = "the header is the manual, and not repeated here")]

mod attend;
mod blocks;
mod dlpack;
mod handle;
mod input;
mod mpi;
mod nccl;
mod plan;
mod problem;
mod ranges;
mod rank;
mod ring;
mod run;
mod scratch;
mod shard;
mod status;
mod table;
mod trace;
mod transport;

pub use attend::*;
pub use blocks::*;
pub use dlpack::{cpattn_dl_device, cpattn_dl_dtype, cpattn_tensor};
pub use mpi::*;
pub use nccl::*;
pub use plan::*;
pub use problem::*;
pub use ranges::*;
pub use rank::*;
pub use ring::*;
pub use run::*;
pub use scratch::*;
pub use shard::*;
pub use status::*;
pub use table::*;
pub use trace::*;
pub use transport::*;
