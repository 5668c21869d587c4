// SPDX-License-Identifier: MIT OR Apache-2.0
//! Context-parallel attention as an operation of candle's, with its backward.
//!
//! Tensors are used where they lie: a view is made from candle's storage, shape, strides and start offset. The
//! operation has one result, o; lse, which the backward needs, stays beside it in the operation, of which each call
//! makes a new one.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp3, Device, Error, Layout, Result, Shape, Storage, Tensor, bail};
use cpattn::{Backward, Forward, Plan, Rank, View, ViewMut};

pub struct Attention {
    rank: Arc<Mutex<Rank>>,
    plan: Arc<Plan>,
    lse: Mutex<Vec<f32>>,
}

impl Attention {
    pub fn new(rank: &Arc<Mutex<Rank>>, plan: &Arc<Plan>) -> Self {
        Self { rank: rank.clone(), plan: plan.clone(), lse: Mutex::default() }
    }
}

/// `[tokens, heads, dim]` of any strides of tokens and heads.
fn view<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<View<'a, f32>> {
    let ((tokens, heads, dim), strides) = (layout.shape().dims3()?, layout.stride());
    if strides[2] != 1 && dim > 1 {
        bail!("the last dimension has stride {}, 1 is needed: call contiguous()", strides[2]);
    }
    let data = &storage.as_slice::<f32>()?[layout.start_offset()..];
    View::strided(data, [tokens, heads, dim], [strides[0], strides[1]]).map_err(Error::wrap)
}

/// The storage of a tensor of the CPU.
fn cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => bail!("a tensor of the CPU is needed"),
    }
}

fn out(data: &mut [f32], [tokens, heads, dim]: [usize; 3]) -> Result<ViewMut<'_, f32>> {
    ViewMut::new(data, tokens, heads, dim).map_err(Error::wrap)
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "context-parallel attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (q, k, v) = (view(q, q_layout)?, view(k, k_layout)?, view(v, v_layout)?);
        let [tokens, heads, dim] = [q.tokens(), q.heads(), v.dim()];
        let (mut o, mut lse) = (vec![0.0; tokens * heads * dim], vec![0.0; tokens * heads]);
        let scores = ViewMut::head_major(&mut lse, tokens, heads).map_err(Error::wrap)?;
        let call = Forward::new(q, k, v, out(&mut o, [tokens, heads, dim])?, scores);
        self.rank.lock().unwrap_or_else(PoisonError::into_inner).forward(&self.plan, call).map_err(Error::wrap)?;
        *self.lse.lock().unwrap_or_else(PoisonError::into_inner) = lse;
        Ok((CpuStorage::F32(o), Shape::from((tokens, heads, dim))))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        o: &Tensor,
        d_o: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        // A gradient may have been broadcast, and rows that are sent have to be apart.
        let d_o = d_o.contiguous()?;
        let inputs = [q, k, v, o, &d_o].map(Tensor::storage_and_layout);
        let views = inputs.iter().map(|(storage, layout)| view(cpu(storage)?, layout)).collect::<Result<Vec<_>>>()?;
        let [q_view, k_view, v_view, o_view, d_o_view] = views[..] else { bail!("five tensors have five views") };
        let lse = self.lse.lock().unwrap_or_else(PoisonError::into_inner);
        let [mut dq, mut dk, mut dv] = [q, k, v].map(|of| vec![0.0; of.elem_count()]);
        let call = Backward::new(
            q_view,
            k_view,
            v_view,
            o_view,
            View::head_major(&lse, q_view.tokens(), q_view.heads()).map_err(Error::wrap)?,
            d_o_view,
            [out(&mut dq, q_view.shape())?, out(&mut dk, k_view.shape())?, out(&mut dv, v_view.shape())?],
        );
        self.rank.lock().unwrap_or_else(PoisonError::into_inner).backward(&self.plan, call).map_err(Error::wrap)?;
        let tensor = |data, like: &Tensor| Tensor::from_vec(data, like.shape(), &Device::Cpu).map(Some);
        Ok((tensor(dq, q)?, tensor(dk, k)?, tensor(dv, v)?))
    }
}
