// SPDX-License-Identifier: MIT OR Apache-2.0
//! The typed calls of attention: their tensors, in host memory or on a device, and how a rank takes them.
//!
//! [`Forward`] and [`Backward`] are the same for both: [`Views`] says which views they hold. On the CPU a call is safe.
//! On a device it takes a stream, which only the caller can vouch for.

use core::{fmt::Debug, ptr::null_mut};

use super::{bind::Bindings, rank::Rank};
#[cfg(feature = "cuda")]
use crate::{
    call::RawStream,
    tensor::{DeviceView, DeviceViewMut},
};
use crate::{
    call::RawTensor,
    device::Device,
    element::Element,
    error::{Error, Result},
    plan::Plan,
    schedule::{Direction, Purpose, TensorId},
    tensor::{View, ViewMut},
};

/// The views of tensors in one kind of memory: [`HostViews`], or `DeviceViews`.
pub trait Views: Debug {
    /// A tensor that is read.
    type Read<'a, T: Element>: AnyView;
    /// A tensor that is written.
    type Written<'a, T: Element>: AnyView;
    /// An entry for each q head, read.
    type PerHead<'a, T: Element>: AnyView;
    /// An entry for each q head, written.
    type PerHeadWritten<'a, T: Element>: AnyView;
}

/// Views of host memory; tables by q head are slices.
#[derive(Debug)]
pub enum HostViews {}

impl Views for HostViews {
    type Read<'a, T: Element> = View<'a, T>;
    type Written<'a, T: Element> = ViewMut<'a, T>;
    type PerHead<'a, T: Element> = &'a [T];
    type PerHeadWritten<'a, T: Element> = &'a mut [T];
}

/// Views of memory of a device; tables by q head are tensors of `[1, heads, 1]`, or `[1, heads, n]` where a head has
/// `n` sinks.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub enum DeviceViews {}

#[cfg(feature = "cuda")]
impl Views for DeviceViews {
    type Read<'a, T: Element> = DeviceView<'a, T>;
    type Written<'a, T: Element> = DeviceViewMut<'a, T>;
    type PerHead<'a, T: Element> = DeviceView<'a, T>;
    type PerHeadWritten<'a, T: Element> = DeviceViewMut<'a, T>;
}

/// The tensors of a forward: this rank's own tokens (see [`Plan::local_tokens`]), all heads.
///
/// If the literal is not an argument of the call and a field needs a coercion, such as from a vector to a slice, write
/// the element type: `Forward::<f32> { … }`.
#[derive(Debug)]
pub struct Forward<'a, T: Element, V: Views = HostViews> {
    /// `[tokens, heads, head_dim]`.
    pub q: V::Read<'a, T>,
    /// `[k tokens, kv_heads, head_dim]`.
    pub k: V::Read<'a, T>,
    /// `[k tokens, kv_heads, value_dim]`.
    pub v: V::Read<'a, T>,
    /// One logit for each q head, when the problem has sinks; `[heads, n]` with several
    /// ([`with_sinks_per_head`](crate::Problem::with_sinks_per_head)).
    pub sinks: Option<V::PerHead<'a, f32>>,
    /// Written: `[tokens, heads, value_dim]`.
    pub o: V::Written<'a, T>,
    /// Written: `[tokens, heads, 1]`; natural log. [`ViewMut::head_major`], or on a device the strides `[1, tokens]`,
    /// are the usual `[heads, tokens]`.
    pub lse: V::Written<'a, T::Acc>,
    /// Written, if it is given: the largest score of each q head, after scale, softcap and ALiBi, over the pairs that
    /// this rank computed, without sinks; −∞ for a head of which it computed none. The largest over the group is that
    /// of the whole batch: the ranks reduce it as often as they need it. Ranks may differ in whether they give it.
    pub max_logit: Option<V::PerHeadWritten<'a, f32>>,
    /// When the problem has [dropout](crate::Problem::with_dropout): the seed of the pairs that are dropped, another
    /// one for each layer and step. All ranks of the group give the same, which is checked as their plans are.
    pub dropout_seed: Option<u64>,
}

/// The tensors of a backward. It repeats the forward's exchanges, so besides the inputs only o and lse have to be kept.
#[derive(Debug)]
pub struct Backward<'a, T: Element, V: Views = HostViews> {
    /// As given to the forward.
    pub q: V::Read<'a, T>,
    /// As given to the forward.
    pub k: V::Read<'a, T>,
    /// As given to the forward.
    pub v: V::Read<'a, T>,
    /// As given to the forward.
    pub sinks: Option<V::PerHead<'a, f32>>,
    /// As the forward wrote it.
    pub o: V::Read<'a, T>,
    /// As the forward wrote it.
    pub lse: V::Read<'a, T::Acc>,
    /// Gradient of o.
    pub d_o: V::Read<'a, T>,
    /// Gradient of lse, of its shape; `None` if nothing but o was used. It is not read where lse is −∞. Ranks may
    /// differ in whether they give it.
    pub d_lse: Option<V::Read<'a, T::Acc>>,
    /// As given to the forward.
    pub dropout_seed: Option<u64>,
    /// Written: gradient of q.
    pub dq: V::Written<'a, T>,
    /// Written: gradient of k.
    pub dk: V::Written<'a, T>,
    /// Written: gradient of v.
    pub dv: V::Written<'a, T>,
    /// Written, when the problem has sinks: their gradient, summed over all ranks of the group, the same on each.
    pub dsinks: Option<V::PerHeadWritten<'a, T::Acc>>,
}

/// [`Forward`] on a device.
#[cfg(feature = "cuda")]
pub type DeviceForward<'a, T> = Forward<'a, T, DeviceViews>;

/// [`Backward`] on a device.
#[cfg(feature = "cuda")]
pub type DeviceBackward<'a, T> = Backward<'a, T, DeviceViews>;

mod sealed {
    use super::{Debug, Device, RawTensor};

    /// A view as runs take it.
    pub trait AnyView: Debug + Sized {
        fn device(&self) -> Device;
        fn into_raw(self) -> RawTensor;
    }
}
pub(super) use sealed::AnyView;

macro_rules! tensors {
    ($($view:ident on $device:expr;)*) => {$(
        impl<T: Element> AnyView for $view<'_, T> {
            fn device(&self) -> Device {
                let device: fn(&Self) -> Device = $device;
                device(self)
            }

            fn into_raw(self) -> RawTensor {
                self.raw()
            }
        }
    )*};
}

tensors! {
    View on |_| Device::Cpu;
    ViewMut on |_| Device::Cpu;
}

#[cfg(feature = "cuda")]
tensors! {
    DeviceView on Self::device;
    DeviceViewMut on Self::device;
}

impl<T: Element> AnyView for &[T] {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn into_raw(self) -> RawTensor {
        RawTensor::compact(self.as_ptr().cast_mut().cast(), T::DTYPE, 1, self.len() as u32, 1)
    }
}

impl<T: Element> AnyView for &mut [T] {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn into_raw(self) -> RawTensor {
        RawTensor::compact(self.as_mut_ptr().cast(), T::DTYPE, 1, self.len() as u32, 1)
    }
}

/// The tensor for a rank on `device`; refused if it lies elsewhere.
pub(super) fn raw_on(device: Device, name: &'static str, tensor: impl AnyView) -> Result<RawTensor> {
    if tensor.device() == device {
        return Ok(tensor.into_raw());
    }
    Err(Error::invalid(name, tensor.device(), format!("{device}, where the rank is")))
}

impl Bindings {
    /// As [`Bindings::with_view`], for the sinks of a plan or their gradient: slices of the host hold all sinks of a
    /// head side by side.
    pub(super) fn with_sinks(
        self,
        device: Device,
        plan: &Plan,
        id: TensorId,
        view: Option<impl AnyView>,
    ) -> Result<Self> {
        let Some(view) = view else { return Ok(self) };
        let raw = raw_on(device, id.name(), view)?;
        let count = plan.problem().sinks_per_head().max(1) as u32;
        if device != Device::Cpu || !raw.heads.is_multiple_of(count) {
            return Ok(self.with(id, raw));
        }
        Ok(self.with(id, RawTensor::compact(raw.ptr, raw.dtype, 1, raw.heads / count, count)))
    }

    /// Sets the tensor of a view, for a rank on `device`; an optional tensor may be left out.
    fn with_view(self, device: Device, id: TensorId, view: Option<impl AnyView>) -> Result<Self> {
        view.map_or(Ok(self), |view| Ok(self.with(id, raw_on(device, id.name(), view)?)))
    }
}

impl<T: Element, V: Views> Forward<'_, T, V> {
    /// The tensors without their types, for a rank on `at`.
    pub(super) fn bindings(self, at: Device, plan: &Plan) -> Result<Bindings> {
        Bindings::default()
            .with_dropout_seed(self.dropout_seed)
            .with_view(at, TensorId::Q, Some(self.q))?
            .with_view(at, TensorId::K, Some(self.k))?
            .with_view(at, TensorId::V, Some(self.v))?
            .with_view(at, TensorId::O, Some(self.o))?
            .with_view(at, TensorId::Lse, Some(self.lse))?
            .with_view(at, TensorId::MaxLogit, self.max_logit)?
            .with_sinks(at, plan, TensorId::Sinks, self.sinks)
    }
}

impl<T: Element, V: Views> Backward<'_, T, V> {
    /// The tensors without their types, for a rank on `at`.
    pub(super) fn bindings(self, at: Device, plan: &Plan) -> Result<Bindings> {
        Bindings::default()
            .with_dropout_seed(self.dropout_seed)
            .with_view(at, TensorId::Q, Some(self.q))?
            .with_view(at, TensorId::K, Some(self.k))?
            .with_view(at, TensorId::V, Some(self.v))?
            .with_view(at, TensorId::O, Some(self.o))?
            .with_view(at, TensorId::Lse, Some(self.lse))?
            .with_view(at, TensorId::DO, Some(self.d_o))?
            .with_view(at, TensorId::DLse, self.d_lse)?
            .with_view(at, TensorId::Dq, Some(self.dq))?
            .with_view(at, TensorId::Dk, Some(self.dk))?
            .with_view(at, TensorId::Dv, Some(self.dv))?
            .with_sinks(at, plan, TensorId::Sinks, self.sinks)?
            .with_sinks(at, plan, TensorId::Dsinks, self.dsinks)
    }
}

impl Rank {
    /// o and lse of this rank's tokens, exactly as if one device had seen the whole batch. All ranks of the group call
    /// it, with equal plans in the same order.
    ///
    /// # Errors
    /// As [`Rank::run`].
    pub fn forward<T: Element>(&mut self, plan: &Plan, t: Forward<'_, T>) -> Result<()> {
        self.expect_host("forward on host views", "give device tensors to forward_on")?;
        let bindings = t.bindings(Device::Cpu, plan)?;
        // SAFETY: as long as `t` lives, views guarantee valid memory, and exclusive ones that nothing else uses their
        // memory.
        unsafe { self.backend.run(plan, Purpose::Attention(Direction::Forward), &bindings, null_mut()) }
    }

    /// dq, dk, dv of this rank's tokens (and the sinks' gradients). All ranks of the group call it, as the forward.
    ///
    /// ```
    /// use cpattn::{Backward, Batch, Dtype, Forward, Plan, Problem, Rank, Side, View, ViewMut, transport::local};
    /// use std::time::Duration;
    /// let (heads, kv_heads, dim) = (4, 2, 16);
    /// let problem = Problem::new(Batch::from_lengths(&[5, 7])?, heads, kv_heads, dim, Dtype::F32).with_sinks(true);
    /// let plan = &Plan::auto(&problem, 2)?;
    /// let all_dsinks = local::run(2, Duration::from_secs(10), |end| {
    ///     let mut rank = Rank::new(end);
    ///     let n = plan.local_tokens(Side::Q, rank.rank()).len();
    ///     let tensor = |heads, x| vec![x; n * heads * dim];
    ///     let (q, k, v, d_o) = (tensor(heads, 0.1), tensor(kv_heads, 0.2), tensor(kv_heads, 0.3), tensor(heads, 1.0f32));
    ///     let (mut o, mut lse) = (tensor(heads, 0.0), vec![0.0; heads * n]);
    ///     let (mut dq, mut dk, mut dv) = (tensor(heads, 0.0), tensor(kv_heads, 0.0), tensor(kv_heads, 0.0));
    ///     let (sinks, mut dsinks) = (vec![0.5; heads], vec![0.0; heads]);
    ///     let q = View::new(&q, n, heads, dim)?;
    ///     let (k, v) = (View::new(&k, n, kv_heads, dim)?, View::new(&v, n, kv_heads, dim)?);
    ///     rank.forward(plan, Forward {
    ///         q,
    ///         k,
    ///         v,
    ///         sinks: Some(&sinks),
    ///         o: ViewMut::new(&mut o, n, heads, dim)?,
    ///         lse: ViewMut::head_major(&mut lse, n, heads)?,
    ///         max_logit: None,
    ///         dropout_seed: None,
    ///     })?;
    ///     rank.backward(plan, Backward {
    ///         q,
    ///         k,
    ///         v,
    ///         sinks: Some(&sinks),
    ///         o: View::new(&o, n, heads, dim)?,
    ///         lse: View::head_major(&lse, n, heads)?,
    ///         d_o: View::new(&d_o, n, heads, dim)?,
    ///         d_lse: None,
    ///         dropout_seed: None,
    ///         dq: ViewMut::new(&mut dq, n, heads, dim)?,
    ///         dk: ViewMut::new(&mut dk, n, kv_heads, dim)?,
    ///         dv: ViewMut::new(&mut dv, n, kv_heads, dim)?,
    ///         dsinks: Some(&mut dsinks),
    ///     })?;
    ///     Ok(dsinks)
    /// })?;
    /// assert!(all_dsinks[0] == all_dsinks[1] && all_dsinks[0].iter().all(|x| *x < 0.0)); // sums over all ranks
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Rank::run`].
    pub fn backward<T: Element>(&mut self, plan: &Plan, t: Backward<'_, T>) -> Result<()> {
        self.expect_host("backward on host views", "give device tensors to backward_on")?;
        let bindings = t.bindings(Device::Cpu, plan)?;
        // SAFETY: as long as `t` lives, views guarantee valid memory, and exclusive ones that nothing else uses their
        // memory.
        unsafe { self.backend.run(plan, Purpose::Attention(Direction::Backward), &bindings, null_mut()) }
    }

    /// [`Rank::forward`] on device tensors, in the order of `stream`: see [`Rank::run_on`].
    ///
    /// # Errors
    /// As [`Rank::run_on`]; a tensor of another device than the rank's.
    ///
    /// # Safety
    /// `stream` is null or one of the driver's that was not destroyed.
    #[cfg(feature = "cuda")]
    pub unsafe fn forward_on<T: Element>(
        &mut self,
        plan: &Plan,
        t: DeviceForward<'_, T>,
        stream: RawStream,
    ) -> Result<()> {
        let bindings = t.bindings(self.device(), plan)?;
        // SAFETY: until the work enqueued with them is over, views guarantee valid memory, and exclusive ones that
        // nothing else uses their memory; the stream is as promised.
        unsafe { self.backend.run(plan, Purpose::Attention(Direction::Forward), &bindings, stream) }
    }

    /// [`Rank::backward`] on device tensors, in the order of `stream`: see [`Rank::run_on`].
    ///
    /// # Errors
    /// As [`Rank::forward_on`].
    ///
    /// # Safety
    /// As [`Rank::forward_on`].
    #[cfg(feature = "cuda")]
    pub unsafe fn backward_on<T: Element>(
        &mut self,
        plan: &Plan,
        t: DeviceBackward<'_, T>,
        stream: RawStream,
    ) -> Result<()> {
        let bindings = t.bindings(self.device(), plan)?;
        // SAFETY: until the work enqueued with them is over, views guarantee valid memory, and exclusive ones that
        // nothing else uses their memory; the stream is as promised.
        unsafe { self.backend.run(plan, Purpose::Attention(Direction::Backward), &bindings, stream) }
    }
}
