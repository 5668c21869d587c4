// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks, and how they run schedules.
//!
//! A [`Rank`](crate::Rank) is made once and runs many plans, one after another. It owns a transport, the workspace, and
//! the schedules of its last plans. A run executes the schedule's operations on two *lanes*, one for kernels and one
//! for exchanges; each operation waits for at most one operation of the other lane. There is no barrier between steps,
//! and a run of a prepared plan allocates nothing. On the CPU the compute lane is the calling thread and the
//! communication lane is a thread of the rank; on a device both lanes are streams.
//!
//! - `rank`: the rank; `tensors`: its typed calls, of the views that `operands` lists; `keys`: the keys of such a call;
//!   `lse_base` and `natural_lse`: the base of its lse; `combine`, `scan` and `all_to_all`: these runs as calls;
//!   `rank_workspace`: its memory as a caller sees it; `handle`: the calls that other threads may make;
//! - `bind`: checks the caller's tensors; `found_rows` and `key_lists`: the tables of pages and the lists of keys;
//!   `listed_rows`: runs that move only the rows that lists name;
//!   `prepared`: a plan as a rank keeps it; `run`: how a run of each purpose is named and compared;
//! - `ring`: the check of the links between ranks; `collective`: other calls of all ranks between runs: `trace`, the
//!   trace of a group, and `shift`, labels and the like;
//! - `agreement` and `tags`: check that all ranks run the same plan; `failure`: keeps a failed group failed;
//! - `backend`: a rank on one kind of memory: `host_rank` or `device`; `workspace`: its memory;
//! - `ops`: one operation; `host`: performs all operations of a schedule on the CPU, on the two `lanes`.
//!
//! A run goes through `tensors` (untyped, as from C: `rank`), and then on the CPU `host_rank`, `host`,
//! `lanes` and `ops` to the kernels; on a device `device` and its `sequence`, which `ops` recorded.

mod agreement;
mod all_to_all;
mod backend;
mod bind;
mod collective;
mod combine;
#[cfg(feature = "cuda")]
mod device;
mod failure;
mod found_rows;
mod handle;
mod host;
mod host_rank;
mod key_lists;
mod keys;
#[cfg(not(cpattn_loom))]
#[allow(unreachable_pub, reason = "public for the models of .ci/loom alone")]
mod lanes;
#[cfg(cpattn_loom)]
#[allow(missing_debug_implementations, reason = "public for the models of .ci/loom alone")]
pub mod lanes;
mod listed_rows;
mod lse_base;
mod natural_lse;
mod operands;
mod ops;
mod prepared;
pub(crate) mod rank;
mod rank_workspace;
mod ring;
mod run;
mod scan;
mod shift;
mod tags;
pub(crate) mod tensors;
mod trace;
mod workspace;

pub use all_to_all::AllToAlls;
pub use bind::Bindings;
pub use combine::CombineTensors;
pub use handle::AbortHandle;
pub use keys::{BlockTable, KeyIndices, Keys, Pages};
pub use listed_rows::KeyRowBytes;
pub use lse_base::LseBase;
pub use operands::{InputTensor, OutputTensor};
pub use rank_workspace::RankWorkspace;
pub use scan::ScanTensors;
pub use shift::{ShiftedRows, SliceRows};
pub use trace::RankTrace;
