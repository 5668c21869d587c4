// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank's combine on its device, whatever the transport: used with those of one process and with NCCL.

use super::common::combined::{PADDING, Parts};
use cpattn::{
    DeviceView, DeviceViewMut, Element, Plan, Rank, Result, Side,
    kernel::cuda::{Cuda, DeviceMemory},
    runtime::CombineTensors,
    schedule::CombineTo,
};
use std::ptr::null_mut;

fn upload<T: Element>(cuda: &Cuda, values: &[T]) -> DeviceMemory {
    let memory = cuda.allocate(size_of_val(values)).unwrap();
    memory.upload(bytemuck::cast_slice(values)).unwrap();
    memory
}

fn download<T: Element>(memory: &DeviceMemory) -> Vec<T> {
    let mut out = vec![T::from_f64(0.0); memory.bytes() / size_of::<T>()];
    memory.download(bytemuck::cast_slice_mut(&mut out)).unwrap();
    out
}

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
    let (o_part, lse_part) = (upload(&cuda, &parts.o[r]), upload(&cuda, &parts.lse[r]));
    let sinks = parts.sinks.as_ref().map(|sinks| upload(&cuda, sinks));
    let nan = f64::NAN;
    let o = upload(&cuda, &vec![T::from_f64(nan); n * h * dim]);
    let lse = upload(&cuda, &vec![<T::Acc as Element>::from_f64(nan); n * h]);
    for _ in 0..2 {
        // SAFETY: the memory has these shapes, lives until the rank is synchronized, and nothing else uses it; the
        // stream is the default one.
        unsafe {
            let strides = [heads * dim + PADDING, dim];
            let tensors = CombineTensors::<P, T, _> {
                partial_o: DeviceView::new(at, o_part.ptr().cast::<P>(), [tokens, heads, dim], strides)?,
                partial_lse: DeviceView::new(at, lse_part.ptr().cast(), [tokens, heads, 1], [1, tokens])?,
                sinks: match &sinks {
                    Some(sinks) => {
                        let shape = [1, p.heads(), p.sinks_per_head()];
                        Some(DeviceView::compact(at, sinks.ptr().cast(), shape)?)
                    }
                    None => None,
                },
                o: DeviceViewMut::compact(at, o.ptr().cast(), [n, h, dim])?,
                lse: DeviceViewMut::compact(at, lse.ptr().cast(), [n, h, 1])?,
            };
            rank.combine_on(plan, to, tensors, null_mut())?;
        }
    }
    rank.synchronize()?;
    Ok((download(&o), download(&lse)))
}
