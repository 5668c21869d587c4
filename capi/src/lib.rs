// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C interface. Its manual is `include/cpattn.h`; `capi/build` makes the library.
//!
//! This crate is a thin layer over the public interface of `cpattn`: it converts C arguments into those of its
//! functions, checks everything that can be checked here (null, alignment, sizes, flags, handles), and converts errors
//! into a status and a text. It computes nothing. Names, fields and their order are exactly those of the header;
//! `tests/header.rs` compares the two, and the C compiler's sizes and offsets with ours.
//!
//! - `status`: the one boundary that no panic crosses, statuses, the thread's last error;
//! - `handle`: opaque handles, and how destroyed ones are detected;
//! - `input`: structs with a size, arrays, flags, results; `dlpack`: tensors;
//! - `problem`, `plan`, `groups`, `shard`, `transport` (with `table`, `engine`, `engine_table`, `mpi`, `nccl`), `rank`,
//!   `run`, `shift`, `trace`, `picture`: the calls of the header, in its order;
//! - `kernel_table`: a kernel of the caller's for a rank's attention;
//! - `scratch`, `ranges`, `attend`, `blocks`: single kernel calls;
//! - `schedule` (with `schedule_list`): a rank's operations, for programs that execute them.
//!
//! CPU and devices are distinguished in three places: a tensor's device (`dlpack`), the creation of a rank, and the
//! creation of a scratch. [`Rank`](cpattn::Rank) and [`Kernels`](cpattn::kernel::Kernels) hide all other differences. A
//! build without CUDA exports the same functions and refuses what it lacks.
//!
//! Every exported function is unsafe for the same reason: pointers come from C. The header's rules for callers are the
//! safety contract; the comments at unsafe blocks name the part that they rely on.
#![allow(non_camel_case_types, reason = "the header's names")]
#![allow(missing_docs, clippy::missing_safety_doc, reason = "the header is the manual, and not repeated here")]

// First, because the other modules use its macros.
#[macro_use]
mod status;
#[macro_use]
mod input;

mod attend;
mod blocks;
mod combine;
mod dlpack;
mod dropout;
mod engine;
mod engine_table;
mod groups;
mod handle;
mod kernel_table;
mod mpi;
mod nccl;
mod picture;
mod plan;
mod problem;
mod ranges;
mod rank;
mod ring;
mod run;
mod scan;
mod schedule;
mod schedule_list;
mod scratch;
mod shard;
mod shift;
mod table;
mod trace;
mod transport;

pub use attend::*;
pub use blocks::*;
pub use combine::cpattn_combine_args;
pub use dlpack::{cpattn_dl_device, cpattn_dl_dtype, cpattn_tensor};
pub use engine::*;
pub use engine_table::*;
pub use groups::*;
pub use kernel_table::*;
pub use mpi::*;
pub use nccl::*;
pub use picture::*;
pub use plan::*;
pub use problem::*;
pub use ranges::*;
pub use rank::*;
pub use ring::*;
pub use run::*;
pub use scan::{cpattn_scan, cpattn_segment};
pub use schedule::*;
pub use scratch::*;
pub use shard::{cpattn_plan_positions, cpattn_plan_shard, cpattn_plan_shift, cpattn_plan_tokens, cpattn_plan_unshard};
pub use shift::*;
pub use status::*;
pub use table::*;
pub use trace::*;
pub use transport::*;
