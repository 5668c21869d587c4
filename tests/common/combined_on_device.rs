// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank's combine on its device, whatever the transport: used with those of one process and with NCCL.

use super::{
    common::combined::{PADDING, Parts},
    held::Held,
};
use cpattn::{
    DeviceView, DeviceViewMut, Element, Plan, Rank, Result, Side, runtime::CombineTensors, schedule::CombineTo,
};

/// The rank's o and lse, `[tokens, heads, dim]` and `[tokens, heads]`, of the second of two runs: the first leaves
/// nothing behind that changes it.
pub fn of_rank<P: Element, T: Element<Acc = P::Acc>>(
    mut rank: Rank,
    plan: &Plan,
    to: CombineTo,
    parts: &Parts<P>,
) -> Result<(Vec<T>, Vec<T::Acc>)> {
    let (p, tokens) = (plan.problem(), plan.problem().batch().tokens(Side::Q));
    let (dim, at, cuda) = (p.value_dim(), rank.device(), rank.cuda().unwrap().clone());
    let (r, share) = (rank.rank(), plan.combined_share(rank.rank(), to));
    let heads = plan.heads_of(r).q.len();
    let (n, h) = (share.tokens.len(), share.heads.len());
    let o_part = Held::new(&cuda, &parts.o[r], tokens, 1, heads * dim + PADDING);
    let lse_part = Held::new(&cuda, &parts.lse[r], heads, 1, tokens);
    let sinks = parts.sinks.as_ref().map(|sinks| Held::new(&cuda, sinks, 1, p.heads(), p.sinks_per_head()));
    let (o, lse) = (Held::nan::<T>(&cuda, n, h, dim), Held::nan::<T::Acc>(&cuda, n, h, 1));
    for _ in 0..2 {
        // SAFETY: the memory has these shapes, lives until the rank is synchronized, and nothing else uses it; the
        // stream is the default one.
        unsafe {
            let strides = [heads * dim + PADDING, dim];
            let tensors = CombineTensors::<T>::new(
                DeviceView::new(at, o_part.1.ptr.cast::<P>(), [tokens, heads, dim], strides)?,
                DeviceView::new(at, lse_part.1.ptr.cast(), [tokens, heads, 1], [1, tokens])?,
                DeviceViewMut::compact(at, o.1.ptr.cast(), [n, h, dim])?,
                DeviceViewMut::compact(at, lse.1.ptr.cast(), [n, h, 1])?,
            )
            .sinks(match &sinks {
                Some(sinks) => {
                    let shape = [1, p.heads(), p.sinks_per_head()];
                    Some(DeviceView::compact(at, sinks.1.ptr.cast(), shape)?)
                }
                None => None,
            });
            rank.combine(plan, to, tensors)?;
        }
    }
    rank.synchronize()?;
    Ok((o.read(), lse.read()))
}
