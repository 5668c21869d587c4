// SPDX-License-Identifier: MIT OR Apache-2.0
//! The typed calls for tensors on a device, with a stream.

use super::{bind::Bindings, rank::Rank};
use crate::{
    call::RawStream,
    device::Device,
    element::Element,
    error::{Error, Result},
    plan::Plan,
    schedule::{Direction, TensorId},
    tensor::{DeviceView, DeviceViewMut},
};

/// The tensors of a forward on a device: as [`Forward`](super::Forward).
#[derive(Debug)]
pub struct DeviceForward<'a, T: Element> {
    /// `[tokens, heads, head_dim]`.
    pub q: DeviceView<'a, T>,
    /// `[k tokens, kv_heads, head_dim]`.
    pub k: DeviceView<'a, T>,
    /// `[k tokens, kv_heads, value_dim]`.
    pub v: DeviceView<'a, T>,
    /// `[1, heads, 1]`, when the problem has sinks.
    pub sinks: Option<DeviceView<'a, f32>>,
    /// Written: `[tokens, heads, value_dim]`.
    pub o: DeviceViewMut<'a, T>,
    /// Written: `[tokens, heads, 1]`; natural log. Strides `[1, tokens]` are the usual `[heads, tokens]`.
    pub lse: DeviceViewMut<'a, T::Acc>,
}

/// The tensors of a backward on a device: as [`Backward`](super::Backward).
#[derive(Debug)]
pub struct DeviceBackward<'a, T: Element> {
    /// As given to the forward.
    pub q: DeviceView<'a, T>,
    /// As given to the forward.
    pub k: DeviceView<'a, T>,
    /// As given to the forward.
    pub v: DeviceView<'a, T>,
    /// As given to the forward.
    pub sinks: Option<DeviceView<'a, f32>>,
    /// As the forward wrote it.
    pub o: DeviceView<'a, T>,
    /// As the forward wrote it.
    pub lse: DeviceView<'a, T::Acc>,
    /// Gradient of o.
    pub d_o: DeviceView<'a, T>,
    /// Written: gradient of q.
    pub dq: DeviceViewMut<'a, T>,
    /// Written: gradient of k.
    pub dk: DeviceViewMut<'a, T>,
    /// Written: gradient of v.
    pub dv: DeviceViewMut<'a, T>,
    /// Written, when the problem has sinks: `[1, heads, 1]`.
    pub dsinks: Option<DeviceViewMut<'a, T::Acc>>,
}

/// Refuses a tensor of another device than the rank's.
pub(super) fn on_device(name: &'static str, rank: Device, tensor: Device) -> Result<()> {
    if tensor == rank {
        return Ok(());
    }
    Err(Error::invalid(name, tensor, std::format!("{rank}, where the rank is")))
}

/// Collects tensors of one device.
struct On {
    device: Device,
    bindings: Bindings,
}

impl On {
    fn new(device: Device) -> Self {
        Self { device, bindings: Bindings::default() }
    }

    fn with(mut self, tensor: TensorId, device: Device, raw: crate::call::RawTensor) -> Result<Self> {
        on_device(tensor.name(), self.device, device)?;
        self.bindings.set(tensor, raw);
        Ok(self)
    }

    fn read<T: Element>(self, tensor: TensorId, view: DeviceView<'_, T>) -> Result<Self> {
        self.with(tensor, view.device(), view.raw())
    }

    fn written<T: Element>(self, tensor: TensorId, view: &DeviceViewMut<'_, T>) -> Result<Self> {
        self.with(tensor, view.device(), view.raw())
    }
}

impl Rank {
    /// [`Rank::forward`] on device tensors, in the order of `stream`: see [`Rank::run_on`].
    ///
    /// # Errors
    /// As [`Rank::run_on`]; a tensor of another device than the rank's.
    ///
    /// # Safety
    /// `stream` is null or one of the driver's that was not destroyed.
    pub unsafe fn forward_on<T: Element>(
        &mut self,
        plan: &Plan,
        t: DeviceForward<'_, T>,
        stream: RawStream,
    ) -> Result<()> {
        let mut on = On::new(self.device())
            .read(TensorId::Q, t.q)?
            .read(TensorId::K, t.k)?
            .read(TensorId::V, t.v)?
            .written(TensorId::O, &t.o)?
            .written(TensorId::Lse, &t.lse)?;
        if let Some(sinks) = t.sinks {
            on = on.read(TensorId::Sinks, sinks)?;
        }
        // SAFETY: views vouch for their memory until the work that they are given to is over, and the exclusive ones for
        // having it alone; the stream is as promised.
        unsafe { self.run_on(plan, Direction::Forward, &on.bindings, stream) }
    }

    /// [`Rank::backward`] on device tensors, in the order of `stream`: see [`Rank::run_on`].
    ///
    /// # Errors
    /// As [`Rank::forward_on`]; dsinks of a problem without sinks.
    ///
    /// # Safety
    /// As [`Rank::forward_on`].
    pub unsafe fn backward_on<T: Element>(
        &mut self,
        plan: &Plan,
        t: DeviceBackward<'_, T>,
        stream: RawStream,
    ) -> Result<()> {
        let mut on = On::new(self.device())
            .read(TensorId::Q, t.q)?
            .read(TensorId::K, t.k)?
            .read(TensorId::V, t.v)?
            .read(TensorId::O, t.o)?
            .read(TensorId::Lse, t.lse)?
            .read(TensorId::DO, t.d_o)?
            .written(TensorId::Dq, &t.dq)?
            .written(TensorId::Dk, &t.dk)?
            .written(TensorId::Dv, &t.dv)?;
        if let Some(sinks) = t.sinks {
            on = on.read(TensorId::Sinks, sinks)?;
        }
        if let Some(dsinks) = &t.dsinks {
            if !plan.problem().sinks() {
                return Err(Error::invalid("dsinks", "given", "none, since the problem has no sinks"));
            }
            on = on.written(TensorId::Dsinks, dsinks)?;
        }
        // SAFETY: as in `forward_on`.
        unsafe { self.run_on(plan, Direction::Backward, &on.bindings, stream) }
    }
}
