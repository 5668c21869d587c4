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
//! - `plan`, `shard`, `transport`, `rank`, `kernel`: the calls, in the header's order.
//!
//! Every exported function is unsafe in the same way and for the same reason: pointers come from C. What the header asks
//! of its callers is the safety contract; comments at the blocks say which part of it they rest on.
#![allow(non_camel_case_types, reason = "the header's names")]
#![allow(missing_docs, clippy::missing_safety_doc, reason = "the header is the manual, and not repeated here")]

mod dlpack;
mod handle;
mod input;
mod kernel;
mod plan;
mod rank;
mod shard;
mod status;
mod transport;

pub use dlpack::{cpattn_dl_device, cpattn_dl_dtype, cpattn_tensor};
pub use kernel::*;
pub use plan::*;
pub use rank::*;
pub use shard::*;
pub use status::*;
pub use transport::*;
