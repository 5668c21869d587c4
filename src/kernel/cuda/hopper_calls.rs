// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls of the kernels for `sm_90a`: loading them, and what a launch is made of.

use super::Cuda;
use super::hopper::{FORWARD, Hopper, Kernel, Kernels, MapShape, Params, section};
use super::params::Forward;
use super::ready::{ELEMENTS, Ready};
use super::shapes::SHAPES;
use crate::call::{Attend, Range};
use crate::error::Result;
use alloc::format;

/// The longest of some ranges.
fn longest<'a>(ranges: impl Iterator<Item = &'a Range>) -> u32 {
    ranges.map(|r| r.len).max().unwrap_or(0)
}

impl Cuda {
    /// Loads the kernel of an element type and shape, where there is one and the device runs it.
    pub(super) fn load_hopper(&self, kernels: &mut Kernels, element: usize, shape: usize) -> Result<Option<Ready>> {
        let Some(s) = FORWARD[shape].filter(|s| self.hopper && s.launch.shared <= self.shared_limit) else {
            return Ok(None);
        };
        let slot = &mut kernels.0[element][shape];
        if slot.is_none() {
            let module = self.module(&format!("hopper_forward_{}_{}", ELEMENTS[element], SHAPES[shape].name))?;
            *slot =
                Some(Kernel { ready: self.function(&module, c"cpattn_hopper_forward", s.launch)?, _module: module });
        }
        Ok(slot.as_ref().map(|k| k.ready))
    }

    /// The parameters of a call whose other ones are `params`, for both kernels, and what the maps of this one are made of.
    /// `work` is where the tiles of this one lie, and their number.
    pub(super) fn hopper_params(
        &self,
        call: &Attend,
        kernel: Ready,
        shape: usize,
        params: Forward,
        (work, tiles): (u64, usize),
        tickets: u64,
    ) -> (Params, Hopper) {
        let (q_span, k_span) = (longest(call.ranges.q.iter().map(|q| &q.range)), longest(call.ranges.k.iter()));
        let keys = FORWARD[shape].map_or(0, |s| s.keys);
        let tensors = [(&call.q, q_span, kernel.launch.rows), (&call.k, k_span, keys), (&call.v, k_span, keys)];
        let tensors = tensors.map(|(t, span, rows)| MapShape {
            dtype: t.dtype,
            dim: t.dim,
            heads: t.heads,
            tokens: t.tokens,
            span,
            rows,
        });
        let held = call.ranges.k.iter().map(|k| u64::from(k.len)).sum::<u64>();
        let head_bytes = held * u64::from(call.k.dim + call.v.dim) * call.k.dtype.size() as u64;
        let section = section(self.l2_bytes, head_bytes, call.heads.group).min(call.q.heads).max(1);
        // Tiles are never more than those of the other kernel, whose number times heads fits.
        let (tiles, items) = (tiles as u32, tiles as u32 * call.q.heads);
        (Params { call: params, tickets, work, q_span, k_span, tiles, section }, Hopper { kernel, items, tensors })
    }
}
