// SPDX-License-Identifier: MIT OR Apache-2.0
//! A rank on the CPU or on a device, for callers who learn at run time which of them it is.

use std::boxed::Box;

#[cfg(feature = "cuda")]
use super::DeviceRank;
use super::{AbortHandle, Bindings, Rank};
use crate::{
    device::Device,
    error::Result,
    kernel::{RawStream, no_stream},
    plan::Plan,
    schedule::Direction,
};

/// See the module.
pub enum AnyRank {
    /// Its tensors are in host memory; a run returns when it is done.
    Host(Box<Rank>),
    /// Its tensors are on a device; a run returns when it is enqueued.
    #[cfg(feature = "cuda")]
    Device(Box<DeviceRank>),
}

impl From<Rank> for AnyRank {
    fn from(rank: Rank) -> Self {
        Self::Host(Box::new(rank))
    }
}

#[cfg(feature = "cuda")]
impl From<DeviceRank> for AnyRank {
    fn from(rank: DeviceRank) -> Self {
        Self::Device(Box::new(rank))
    }
}

impl AnyRank {
    /// Where its tensors are.
    pub fn place(&self) -> Device {
        match self {
            Self::Host(_) => Device::Cpu,
            #[cfg(feature = "cuda")]
            Self::Device(rank) => Device::Cuda(rank.device().ordinal()),
        }
    }

    /// For other threads.
    pub fn handle(&self) -> AbortHandle {
        match self {
            Self::Host(rank) => rank.handle(),
            #[cfg(feature = "cuda")]
            Self::Device(rank) => rank.handle(),
        }
    }

    /// See [`Rank::prepare`].
    ///
    /// # Errors
    /// As there, or [`DeviceRank::prepare`](super::DeviceRank::prepare).
    pub fn prepare(&mut self, plan: &Plan, direction: Direction) -> Result<()> {
        match self {
            Self::Host(rank) => rank.prepare(plan, direction),
            #[cfg(feature = "cuda")]
            Self::Device(rank) => rank.prepare(plan, direction),
        }
    }

    /// See [`Rank::lend_workspace`].
    ///
    /// # Safety
    /// As there, with memory of the rank's place.
    ///
    /// # Errors
    /// As there, or [`DeviceRank::lend_workspace`](super::DeviceRank::lend_workspace).
    pub unsafe fn lend_workspace(&mut self, ptr: *mut u8, bytes: usize) -> Result<()> {
        match self {
            // SAFETY: what the same function of the rank asks for is what this one asks for.
            Self::Host(rank) => unsafe { rank.lend_workspace(ptr, bytes) },
            #[cfg(feature = "cuda")]
            // SAFETY: what the same function of the rank asks for is what this one asks for.
            Self::Device(rank) => unsafe { rank.lend_workspace(ptr, bytes) },
        }
    }

    /// See [`Rank::take_workspace_back`].
    ///
    /// # Errors
    /// The driver's.
    pub fn take_workspace_back(&mut self) -> Result<()> {
        match self {
            Self::Host(rank) => {
                rank.take_workspace_back();
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Self::Device(rank) => rank.take_workspace_back(),
        }
    }

    /// See [`Rank::run`]; on a device, in the order of `stream`.
    ///
    /// # Safety
    /// As there, or [`DeviceRank::run`](super::DeviceRank::run).
    ///
    /// # Errors
    /// As there; on the CPU, a stream.
    pub unsafe fn run(
        &mut self,
        plan: &Plan,
        direction: Direction,
        tensors: &Bindings,
        stream: RawStream,
    ) -> Result<()> {
        match self {
            Self::Host(rank) => {
                no_stream(stream)?;
                // SAFETY: what the same function of the rank asks for is what this one asks for.
                unsafe { rank.run(plan, direction, tensors) }
            }
            #[cfg(feature = "cuda")]
            // SAFETY: what the same function of the rank asks for is what this one asks for.
            Self::Device(rank) => unsafe { rank.run(plan, direction, tensors, stream.cast()) },
        }
    }
}
