// SPDX-License-Identifier: MIT OR Apache-2.0
//! The scheduler metadata of calls: how it is made, and where it is on the device.

pub(super) mod bands;
pub(super) mod dq_semaphore;
pub(super) mod metadata;
pub(super) mod metadata_ring;
pub(super) mod metadata_writer;
pub(super) mod unread;
