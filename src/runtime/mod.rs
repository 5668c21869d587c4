// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks, and how they run schedules.
//!
//! A [`Rank`] is made once and runs many plans, one after another. It owns a transport, the workspace, and the
//! schedules of its last plans. A run executes the schedule's operations on two *lanes*, one for kernels and one for
//! exchanges; each operation waits for at most one operation of the other lane. There is no barrier between steps, and
//! a run of a prepared plan allocates nothing. On the CPU the compute lane is the calling thread and the communication
//! lane is a thread of the rank; on a device both lanes are streams.
//!
//! - [`rank`]: the rank, on the CPU or a device; [`front`] and `front_device`: the typed calls for most users;
//!   [`all_to_all`]: the two all-to-alls as separate calls; [`handle`]: the calls that other threads may make;
//! - [`bind`]: checks the caller's tensors; [`prepared`]: a plan as a rank keeps it; [`proof`]: checks of its schedule;
//!   [`run`]: the kinds of runs;
//! - `ring`: the check of the links between ranks; `collective`: other calls of all ranks between runs: `gather`, the
//!   trace of a group, and `shift`, labels and the like;
//! - [`agreement`] and [`tags`]: check that all ranks run the same plan; [`failure`]: keeps a failed group failed;
//! - [`ops`]: one operation, on any backend; [`workspace`]: its memory; [`host_rank`], [`lanes`], [`walk`] and
//!   [`host`]: on the CPU; `device`: on a device.

mod agreement;
mod all_to_all;
mod bind;
mod collective;
#[cfg(feature = "cuda")]
mod device;
mod failure;
mod front;
#[cfg(feature = "cuda")]
mod front_device;
mod gather;
mod handle;
mod host;
mod host_rank;
#[cfg(not(cpattn_loom))]
mod lanes;
#[cfg(cpattn_loom)]
#[allow(missing_debug_implementations, reason = "public for the models of .ci/loom alone")]
pub mod lanes;
mod ops;
mod prepared;
mod proof;
mod rank;
mod ring;
mod run;
mod shift;
mod tags;
mod walk;
mod workspace;

pub use bind::Bindings;
#[cfg(all(feature = "cuda", feature = "capi"))]
pub(crate) use device::Marks;
pub use front::{Backward, Forward};
#[cfg(feature = "cuda")]
pub use front_device::{DeviceBackward, DeviceForward};
pub use handle::AbortHandle;
pub use rank::Rank;
#[cfg(feature = "capi")]
pub(crate) use shift::ShiftedRows;
