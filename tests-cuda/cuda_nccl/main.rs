// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks over NCCL: whole plans as threads with a device each and as processes, what goes wrong, and what is refused.
//!
//! Runs on whatever `libcuda.so.1` and `libnccl.so.2` the loader finds; the stand-ins (`.ci/nccl`) serve as well as
//! real ones. Ranks as threads need as many devices as there are ranks, and tests of more ranks than devices say so and
//! pass; with `CPATTN_REQUIRE_CUDA` set, that is a failure. Faults that only the stand-ins can make are tested on them
//! alone.

#[path = "../../tests/common/mod.rs"]
mod common;

mod agreement;
mod all_to_all;
mod between_runs;
mod borrowed;
#[path = "../../tests/common/cache.rs"]
mod cache;
#[path = "../../tests/common/all_to_all.rs"]
mod cases;
mod combine;
#[path = "../../tests/common/combined_on_device.rs"]
mod combined_on_device;
mod faults;
mod group;
#[path = "../../tests/common/held.rs"]
mod held;
mod hosts;
#[path = "../../tests/common/between_runs.rs"]
mod one_rank;
mod paged;
#[path = "../../tests/common/paged_on_device.rs"]
mod paged_on_device;
mod plans;
mod processes;
mod raw;
mod refusals;
#[path = "../../tests/common/refused.rs"]
mod refused;
mod ring;
mod work;
