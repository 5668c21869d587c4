// SPDX-License-Identifier: MIT OR Apache-2.0
//! The typed calls for tensors in host memory.

use std::format;

use super::{bind::Bindings, rank::Rank, run::Purpose};
use crate::{
    call::RawTensor,
    element::{Dtype, Element},
    error::{Error, Result},
    plan::Plan,
    schedule::{Direction, TensorId},
    tensor::{View, ViewMut},
};

/// The tensors of a forward: this rank's own tokens (see [`Plan::token_indices`]), all heads.
#[derive(Debug)]
pub struct Forward<'a, T: Element> {
    /// `[tokens, heads, head_dim]`.
    pub q: View<'a, T>,
    /// `[k tokens, kv_heads, head_dim]`.
    pub k: View<'a, T>,
    /// `[k tokens, kv_heads, value_dim]`.
    pub v: View<'a, T>,
    /// One logit for each q head, when the problem has sinks.
    pub sinks: Option<&'a [f32]>,
    /// Written: `[tokens, heads, value_dim]`.
    pub o: ViewMut<'a, T>,
    /// Written: `[tokens, heads, 1]`; natural log. [`ViewMut::head_major`] is the usual `[heads, tokens]`.
    pub lse: ViewMut<'a, T::Acc>,
}

/// The tensors of a backward. It repeats the forward's exchanges, so besides the inputs only o and lse have to be kept.
#[derive(Debug)]
pub struct Backward<'a, T: Element> {
    /// As given to the forward.
    pub q: View<'a, T>,
    /// As given to the forward.
    pub k: View<'a, T>,
    /// As given to the forward.
    pub v: View<'a, T>,
    /// As given to the forward.
    pub sinks: Option<&'a [f32]>,
    /// As the forward wrote it.
    pub o: View<'a, T>,
    /// As the forward wrote it.
    pub lse: View<'a, T::Acc>,
    /// Gradient of o.
    pub d_o: View<'a, T>,
    /// Written: gradient of q.
    pub dq: ViewMut<'a, T>,
    /// Written: gradient of k.
    pub dk: ViewMut<'a, T>,
    /// Written: gradient of v.
    pub dv: ViewMut<'a, T>,
    /// Written, when the problem has sinks: their gradient, summed over all ranks of the group, the same on each.
    pub dsinks: Option<&'a mut [T::Acc]>,
}

/// A table of one entry for each q head, given as address and length.
fn per_head(
    name: &'static str,
    dtype: Dtype,
    given: Option<(*mut u8, usize)>,
    wanted: Option<usize>,
) -> Result<RawTensor> {
    match (given, wanted) {
        (None, None) => Ok(RawTensor::NONE),
        (Some((ptr, n)), Some(heads)) if n == heads => Ok(RawTensor::compact(ptr, dtype, 1, heads as u32, 1)),
        (Some((_, n)), Some(heads)) => {
            Err(Error::invalid(name, format!("{n} entries"), format!("one for each of {heads} q heads")))
        }
        (None, Some(heads)) => {
            Err(Error::invalid(name, "not given", format!("one for each of {heads} q heads: the problem has sinks")))
        }
        (Some(_), None) => {
            Err(Error::invalid(name, "given", "none, since the problem has no sinks")
                .hint("plan a problem that has sinks"))
        }
    }
}

fn sinks(given: Option<&[f32]>, wanted: Option<usize>) -> Result<RawTensor> {
    per_head("sinks", Dtype::F32, given.map(|s| (s.as_ptr().cast_mut().cast(), s.len())), wanted)
}

impl Rank {
    /// o and lse of this rank's tokens, exactly as if one device had seen the whole batch.
    ///
    /// # Errors
    /// As [`Rank::run`].
    pub fn forward<T: Element>(&mut self, plan: &Plan, t: Forward<'_, T>) -> Result<()> {
        let host = self.on_host_for("forward on host views", "give device tensors to forward_on")?;
        let heads = plan.problem().sinks().then(|| plan.problem().heads());
        let bindings = Bindings::default()
            .with(TensorId::Q, t.q.raw())
            .with(TensorId::K, t.k.raw())
            .with(TensorId::V, t.v.raw())
            .with(TensorId::Sinks, sinks(t.sinks, heads)?)
            .with(TensorId::O, t.o.raw())
            .with(TensorId::Lse, t.lse.raw());
        // SAFETY: views vouch for their memory, and the exclusive ones for having it alone, as long as `t` lives.
        unsafe { host.run(plan, Purpose::Attention(Direction::Forward), &bindings) }
    }

    /// dq, dk, dv of this rank's tokens (and the sinks' gradients).
    ///
    /// # Errors
    /// As [`Rank::run`].
    pub fn backward<T: Element>(&mut self, plan: &Plan, mut t: Backward<'_, T>) -> Result<()> {
        let host = self.on_host_for("backward on host views", "give device tensors to backward_on")?;
        let heads = plan.problem().sinks().then(|| plan.problem().heads());
        let dsinks = t.dsinks.as_deref_mut().map(|s| (s.as_mut_ptr().cast(), s.len()));
        let bindings = Bindings::default()
            .with(TensorId::Q, t.q.raw())
            .with(TensorId::K, t.k.raw())
            .with(TensorId::V, t.v.raw())
            .with(TensorId::Sinks, sinks(t.sinks, heads)?)
            .with(TensorId::O, t.o.raw())
            .with(TensorId::Lse, t.lse.raw())
            .with(TensorId::DO, t.d_o.raw())
            .with(TensorId::Dq, t.dq.raw())
            .with(TensorId::Dk, t.dk.raw())
            .with(TensorId::Dv, t.dv.raw())
            .with(TensorId::Dsinks, per_head("dsinks", T::Acc::DTYPE, dsinks, heads)?);
        // SAFETY: as in `forward`.
        unsafe { host.run(plan, Purpose::Attention(Direction::Backward), &bindings) }
    }
}
