// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations on the CPU.

use super::ops::Backend;
use crate::{
    call::{Attend, AttendBackward, Delta, RawTensor, SinkGradient, Transform},
    element::Dtype,
    error::Result,
    kernel::{cpu, sinks},
    plan::Plan,
    transport::{Label, Message, Transport},
};

/// One lane's way to the CPU kernels and the transport. Only the compute lane has tiles to attend with.
pub(super) struct Host<'a> {
    pub scratch: Option<&'a mut cpu::Scratch>,
    pub transport: &'a dyn Transport,
}

/// Tiles for the attention of a plan.
pub(super) fn dims(plan: &Plan) -> cpu::Dims {
    let p = plan.problem();
    cpu::Dims { head_dim: p.head_dim() as u32, value_dim: p.value_dim() as u32, dtype: p.dtype() }
}

/// The documents of a plan, for the kernels.
pub(super) fn documents(plan: &Plan) -> cpu::KnownDocuments {
    let p = plan.problem();
    cpu::KnownDocuments::new(p.document_lengths(), &p.score(), p.group() as u32)
}

impl Host<'_> {
    fn scratch(&mut self) -> &mut cpu::Scratch {
        self.scratch.as_mut().expect("planning puts attention on the compute lane")
    }
}

impl Backend for Host<'_> {
    unsafe fn attend(&mut self, args: &Attend<'_>) -> Result<()> {
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of `Backend`.
        unsafe { cpu::attend(args, self.scratch()) }
    }

    unsafe fn attend_backward(&mut self, args: &AttendBackward<'_>) -> Result<()> {
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of `Backend`.
        unsafe { cpu::attend_backward(args, self.scratch()) }
    }

    unsafe fn transform(&mut self, args: &Transform<'_>) -> Result<()> {
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of `Backend`.
        unsafe { cpu::transform(args) }
    }

    unsafe fn delta(&mut self, args: &Delta) -> Result<()> {
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of `Backend`.
        unsafe { cpu::delta(args) }
    }

    unsafe fn sink_gradient(&mut self, args: &SinkGradient) -> Result<()> {
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of `Backend`.
        unsafe { sinks::sink_gradient(args) }
    }

    unsafe fn sink_total(&mut self, digits: &RawTensor, dsinks: &RawTensor) -> Result<()> {
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of `Backend`.
        unsafe { sinks::sink_total(digits, dsinks) }
    }

    unsafe fn exchange(&mut self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        // SAFETY: the tensors are valid host memory that nothing else uses during the call: the promise of `Backend`.
        unsafe { self.transport.exchange(label, sends, recvs) }
    }

    fn alibi_slopes(&self, plan: &Plan) -> RawTensor {
        plan.problem().alibi_slopes().map_or(RawTensor::NONE, |s| {
            RawTensor::compact(s.as_ptr().cast_mut().cast(), Dtype::F32, 1, s.len() as u32, 1)
        })
    }
}
