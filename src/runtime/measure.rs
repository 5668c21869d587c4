// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much a schedule uploads: a backend that runs nothing and counts.

use super::ops::Backend;
use crate::{
    call::{Attend, AttendBackward, Delta, RawTensor, SinkGradient, Transform},
    element::Dtype,
    error::Result,
    kernel::cuda::Cuda,
    plan::Plan,
    schedule::ALIGNMENT,
    transport::{Label, Message},
};

/// Runs nothing: finds how much each lane uploads in one run.
pub(super) struct Measure<'a> {
    cuda: &'a Cuda,
    /// Of all lists.
    pub bytes: usize,
    /// Of the longest.
    pub largest: usize,
    pub launches: usize,
    /// Of one exchange, the longer way.
    pub messages: usize,
}

impl<'a> Measure<'a> {
    pub(super) fn new(cuda: &'a Cuda) -> Self {
        Self { cuda, bytes: 0, largest: 0, launches: 0, messages: 0 }
    }

    fn add(&mut self, bytes: usize) {
        self.bytes += bytes;
        self.largest = self.largest.max(bytes);
        self.launches += 1;
    }
}

impl Backend for Measure<'_> {
    unsafe fn attend(&mut self, args: &Attend<'_>) -> Result<()> {
        self.add(self.cuda.attend_bytes(args)?);
        Ok(())
    }

    unsafe fn attend_backward(&mut self, args: &AttendBackward<'_>) -> Result<()> {
        self.add(self.cuda.attend_backward_bytes(args)?);
        Ok(())
    }

    unsafe fn transform(&mut self, args: &Transform<'_>) -> Result<()> {
        self.add(self.cuda.transform_bytes(args));
        Ok(())
    }

    unsafe fn delta(&mut self, _: &Delta) -> Result<()> {
        Ok(())
    }

    unsafe fn sink_gradient(&mut self, _: &SinkGradient) -> Result<()> {
        Ok(())
    }

    unsafe fn sink_total(&mut self, _: &RawTensor, _: &RawTensor) -> Result<()> {
        Ok(())
    }

    unsafe fn exchange(&mut self, _: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        self.messages = self.messages.max(sends.len()).max(recvs.len());
        Ok(())
    }

    fn slopes(&self, plan: &Plan) -> RawTensor {
        let heads = plan.problem().heads() as u32;
        plan.problem().slopes().map_or(RawTensor::NONE, |_| dangling(Dtype::F32, 1, heads, 1))
    }
}

/// A tensor at an address that nobody will touch.
pub(super) fn dangling(dtype: Dtype, rows: u64, heads: u32, dim: u32) -> RawTensor {
    RawTensor::compact(core::ptr::without_provenance_mut(ALIGNMENT as usize), dtype, rows, heads, dim)
}
