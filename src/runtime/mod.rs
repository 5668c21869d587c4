// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs schedules.
//!
//! A [`Rank`] lives long and runs many plans, one after another. It owns a transport, the workspace, and the schedules of
//! the plans it has seen. Running a plan walks its list on two lanes, one for kernels and one for exchanges, and each
//! operation waits for at most one of the other lane. There is no barrier between steps and nothing is allocated once a
//! plan is prepared. On the CPU the calling thread is the compute lane and a thread of the rank's own the communication
//! lane; on a device both lanes are streams.
//!
//! - [`rank`]: the rank, wherever its tensors are; [`front`] and `front_device`: the typed calls for most users; [`all_to_all`]: the two
//!   all-to-alls as calls of their own; [`handle`]: what other threads may do to a rank;
//! - [`bind`]: the caller's tensors, checked before anything is touched; [`prepared`]: a plan as a rank keeps it;
//!   [`proof`]: what its schedule is checked for; [`run`]: what a run is for;
//! - `ring`: the check of the links between ranks;
//! - [`agreement`] and [`tags`]: that all ranks run the same; [`failure`]: that a group which failed stays failed;
//! - [`ops`]: one operation, wherever it runs; [`workspace`]: the memory that it works in; [`host_rank`], [`lanes`], [`walk`]
//!   and [`host`]: on the CPU; `device`: on a device.

mod agreement;
mod all_to_all;
mod bind;
#[cfg(feature = "cuda")]
mod device;
mod failure;
mod front;
#[cfg(feature = "cuda")]
mod front_device;
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
