// SPDX-License-Identifier: MIT OR Apache-2.0
//! The typed calls of attention: their tensors, in host memory or on a device, and how a rank takes them.
//!
//! A call is made of the tensors that every run of its direction has; what a run may have besides is added by a method
//! of the call. So an option that comes later changes no call that does not use it.

use core::marker::PhantomData;

use super::{
    bind::Bindings,
    keys::Keys,
    lse_base::LseBase,
    operands::{InputTensor, Operand, OutputTensor},
    rank::Rank,
};
use crate::{
    call::{RawStream, RawTensor},
    device::Device,
    element::Element,
    error::{Error, Result},
    plan::Plan,
    schedule::{Direction, Purpose, TensorId},
};

/// The options that calls share, each written once: `options!(Forward: sinks, on);` gives a call these methods.
macro_rules! options {
    ($call:ident: $($option:ident),+) => {
        impl<'a, T: Element> $call<'a, T> {
            $(options!(@$option);)+
        }
    };
    (@sinks) => {
        /// When the problem has sinks: one logit for each q head; `[heads, n]` with several
        /// ([`with_sinks_per_head`](crate::Problem::with_sinks_per_head)). On a device a tensor of `[1, heads, n]`. A
        /// backward gets those of its forward.
        #[must_use]
        pub fn sinks(mut self, sinks: impl InputTensor<'a, Element = f32>) -> Self {
            self.tensors = self.tensors.with(TensorId::Sinks, sinks);
            self
        }
    };
    (@dropout_seed) => {
        /// When the problem has [dropout](crate::Problem::with_dropout): the seed of the pairs that are dropped,
        /// another one for each layer and step, and for a backward that of its forward. All ranks of the group give the
        /// same, which is checked as their plans are.
        #[must_use]
        pub fn dropout_seed(mut self, seed: impl Into<Option<u64>>) -> Self {
            self.tensors.bindings = self.tensors.bindings.with_dropout_seed(seed.into());
            self
        }
    };
    (@keys) => {
        /// The keys that are read, and where they lie: [`Keys::All`], unless it is given. A backward gets those of its
        /// forward.
        #[must_use]
        pub fn keys(mut self, keys: Keys<'a>) -> Self {
            self.tensors.bindings = self.tensors.bindings.with_keys(keys);
            self
        }
    };
    (@lse_base) => {
        /// The base of each lse of the call, read or written, and of its gradient: natural, unless it is given. Each
        /// rank by itself.
        #[must_use]
        pub fn lse_base(mut self, base: LseBase) -> Self {
            self.tensors.bindings = self.tensors.bindings.with_lse_base(base);
            self
        }
    };
    (@on) => {
        /// On a device, the stream in whose order the run is enqueued, instead of the legacy default stream: see
        /// [`Rank::run`].
        ///
        /// # Safety
        /// When the call runs, `stream` is null or one of the driver's that was not destroyed.
        #[must_use]
        pub unsafe fn on(mut self, stream: RawStream) -> Self {
            self.tensors.bindings = self.tensors.bindings.on(stream);
            self
        }
    };
}
pub(super) use options;

/// The tensors of a forward: this rank's own tokens (see [`Plan::local_tokens`]), all heads; and its options.
///
/// All are in the memory of the rank: views of the host on the CPU, device views on a device.
#[derive(Debug)]
pub struct Forward<'a, T: Element> {
    tensors: TypedTensors,
    memory: PhantomData<&'a mut T>,
}

/// The tensors of a backward, and its options. It repeats the forward's exchanges, so besides the inputs only o and lse
/// have to be kept.
#[derive(Debug)]
pub struct Backward<'a, T: Element> {
    tensors: TypedTensors,
    memory: PhantomData<&'a mut T>,
}

impl<'a, T: Element> Forward<'a, T> {
    /// A forward of q, `[tokens, heads, head_dim]`, k, `[k tokens, kv_heads, head_dim]`, and v, `[k tokens, kv_heads,
    /// value_dim]`. It writes o, `[tokens, heads, value_dim]`, and lse, `[tokens, heads, 1]`, natural log:
    /// [`ViewMut::head_major`](crate::ViewMut::head_major), or on a device the strides `[1, tokens]`, are the usual
    /// `[heads, tokens]`.
    pub fn new(
        q: impl InputTensor<'a, Element = T>,
        k: impl InputTensor<'a, Element = T>,
        v: impl InputTensor<'a, Element = T>,
        o: impl OutputTensor<'a, Element = T>,
        lse: impl OutputTensor<'a, Element = T::Acc>,
    ) -> Self {
        let tensors = TypedTensors::default()
            .with(TensorId::Q, q)
            .with(TensorId::K, k)
            .with(TensorId::V, v)
            .with(TensorId::O, o)
            .with(TensorId::Lse, lse);
        Self { tensors, memory: PhantomData }
    }

    /// Written: the largest score of each q head, after scale, softcap and ALiBi, over the pairs that this rank
    /// computed, without sinks; −∞ for a head of which it computed none. The largest over the group is that of the
    /// whole batch: the ranks reduce it as often as they need it. Ranks may differ in whether they give it. On a device
    /// a tensor of `[1, heads, 1]`.
    #[must_use]
    pub fn max_logit(mut self, max_logit: impl OutputTensor<'a, Element = f32>) -> Self {
        self.tensors = self.tensors.with(TensorId::MaxLogit, max_logit);
        self
    }
}

options!(Forward: sinks, dropout_seed, keys, lse_base, on);

impl<'a, T: Element> Backward<'a, T> {
    /// The backward of a forward: q, k and v as it was given, o and lse as it wrote them, and the gradient of o. It
    /// writes the gradients of q, k and v, of their shapes.
    pub fn new(
        q: impl InputTensor<'a, Element = T>,
        k: impl InputTensor<'a, Element = T>,
        v: impl InputTensor<'a, Element = T>,
        o: impl InputTensor<'a, Element = T>,
        lse: impl InputTensor<'a, Element = T::Acc>,
        d_o: impl InputTensor<'a, Element = T>,
        [dq, dk, dv]: [impl OutputTensor<'a, Element = T>; 3],
    ) -> Self {
        let tensors = TypedTensors::default()
            .with(TensorId::Q, q)
            .with(TensorId::K, k)
            .with(TensorId::V, v)
            .with(TensorId::O, o)
            .with(TensorId::Lse, lse)
            .with(TensorId::DO, d_o)
            .with(TensorId::Dq, dq)
            .with(TensorId::Dk, dk)
            .with(TensorId::Dv, dv);
        Self { tensors, memory: PhantomData }
    }

    /// Written, when the problem has sinks, and needed then: their gradient, summed over all ranks of the group, the
    /// same on each.
    #[must_use]
    pub fn dsinks(mut self, dsinks: impl OutputTensor<'a, Element = T::Acc>) -> Self {
        self.tensors = self.tensors.with(TensorId::Dsinks, dsinks);
        self
    }

    /// Gradient of lse, of its shape, if more than o was used. It is not read where lse is −∞. Ranks may differ in
    /// whether they give it.
    #[must_use]
    pub fn d_lse(mut self, d_lse: impl InputTensor<'a, Element = T::Acc>) -> Self {
        self.tensors = self.tensors.with(TensorId::DLse, d_lse);
        self
    }
}

options!(Backward: sinks, dropout_seed, keys, lse_base, on);

impl Rank {
    /// o and lse of this rank's tokens, exactly as if one device had seen the whole batch. All ranks of the group call
    /// it, with equal plans in the same order.
    ///
    /// # Errors
    /// As [`Rank::run`]; a tensor of another device than the rank's.
    pub fn forward<T: Element>(&mut self, plan: &Plan, call: Forward<'_, T>) -> Result<()> {
        let bindings = call.tensors.bindings(self.device(), plan)?;
        // SAFETY: as long as `call` lives, on a device until the work enqueued with it is over, views guarantee valid
        // memory, and exclusive ones that nothing else uses their memory; the stream is as promised to `on`.
        unsafe { self.backend.run(plan, Purpose::Attention(Direction::Forward), &bindings) }
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
    ///     let (q, d_o) = (View::new(&q, n, heads, dim)?, View::new(&d_o, n, heads, dim)?);
    ///     let (k, v) = (View::new(&k, n, kv_heads, dim)?, View::new(&v, n, kv_heads, dim)?);
    ///     let (out, sums) = (ViewMut::new(&mut o, n, heads, dim)?, ViewMut::head_major(&mut lse, n, heads)?);
    ///     rank.forward(plan, Forward::new(q, k, v, out, sums).sinks(&sinks))?;
    ///     let (o, lse) = (View::new(&o, n, heads, dim)?, View::head_major(&lse, n, heads)?);
    ///     let gradients = [
    ///         ViewMut::new(&mut dq, n, heads, dim)?,
    ///         ViewMut::new(&mut dk, n, kv_heads, dim)?,
    ///         ViewMut::new(&mut dv, n, kv_heads, dim)?,
    ///     ];
    ///     rank.backward(plan, Backward::new(q, k, v, o, lse, d_o, gradients).sinks(&sinks).dsinks(&mut dsinks))?;
    ///     Ok(dsinks)
    /// })?;
    /// assert!(all_dsinks[0] == all_dsinks[1] && all_dsinks[0].iter().all(|x| *x < 0.0)); // sums over all ranks
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Rank::forward`].
    pub fn backward<T: Element>(&mut self, plan: &Plan, call: Backward<'_, T>) -> Result<()> {
        let bindings = call.tensors.bindings(self.device(), plan)?;
        // SAFETY: as long as `call` lives, on a device until the work enqueued with it is over, views guarantee valid
        // memory, and exclusive ones that nothing else uses their memory; the stream is as promised to `on`.
        unsafe { self.backend.run(plan, Purpose::Attention(Direction::Backward), &bindings) }
    }
}

/// The tensors of a typed call: without their types, with the devices that they are on.
#[derive(Debug, Default)]
pub(super) struct TypedTensors {
    pub(super) bindings: Bindings,
    /// The first tensor, by name, and its device; and the first one that is on another.
    first: Option<(&'static str, Device)>,
    elsewhere: Option<(&'static str, Device)>,
}

impl TypedTensors {
    /// Sets a tensor, unless it is left out.
    #[must_use]
    pub(super) fn with(self, id: TensorId, tensor: impl Operand) -> Self {
        self.with_name(id, id.name(), tensor)
    }

    /// As [`TypedTensors::with`], of a tensor that errors of the call name otherwise.
    #[must_use]
    pub(super) fn with_name(mut self, id: TensorId, name: &'static str, tensor: impl Operand) -> Self {
        let Some((device, raw)) = tensor.operand() else {
            self.bindings.set(id, RawTensor::NONE);
            return self;
        };
        match self.first {
            None => self.first = Some((name, device)),
            Some((_, at)) if at != device && self.elsewhere.is_none() => self.elsewhere = Some((name, device)),
            Some(_) => {}
        }
        self.bindings.set(id, raw);
        self
    }

    /// The tensors for a rank on `device`. Sinks and their gradient, which a slice of the host holds side by side,
    /// become rows of a head.
    ///
    /// # Errors
    /// A tensor that lies elsewhere.
    pub(super) fn bindings(self, device: Device, plan: &Plan) -> Result<Bindings> {
        let wrong = self.first.filter(|&(_, at)| at != device).or(self.elsewhere);
        if let Some((name, at)) = wrong {
            return Err(Error::invalid(name, at, std::format!("{device}, where the rank is")));
        }
        let (mut bindings, count) = (self.bindings, plan.problem().sinks_per_head().max(1) as u32);
        for id in [TensorId::Sinks, TensorId::Dsinks] {
            let raw = *bindings.get(id);
            let flat = device == Device::Cpu && raw.tokens == 1 && raw.dim == 1 && raw.is_compact();
            if flat && raw.heads.is_multiple_of(count) {
                bindings.set(id, RawTensor::compact(raw.ptr, raw.dtype, 1, raw.heads / count, count));
            }
        }
        Ok(bindings)
    }
}
