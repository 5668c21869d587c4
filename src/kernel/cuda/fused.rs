// SPDX-License-Identifier: MIT OR Apache-2.0
//! The launch of the fused backward: one kernel for dq, dk and dv.

use super::attention::{items, sequence};
use super::lists::Tiles;
use super::params::{Backward, Fused as Params};
use super::staging::Staging;
use super::turns::{self, Turns};
use super::{Cuda, Ready, Stream, shapes};
use crate::error::Result;
use crate::kernel::AttendBackward;

impl shapes::Fused {
    pub(super) const fn tiles(self) -> Tiles {
        Tiles { queries: self.queries, keys: self.launch.rows }
    }
}

impl Cuda {
    /// Launches the fused kernel of a checked call, whose lists `params` lack yet. The context is current.
    ///
    /// # Safety
    /// As [`Cuda::attend_backward`].
    pub(super) unsafe fn fused_backward(
        &self,
        call: &AttendBackward,
        kernel: Ready,
        fused: shapes::Fused,
        mut params: Backward,
        window: (i64, i64),
        staging: &mut Staging,
        stream: Stream,
    ) -> Result<()> {
        let heads = if call.per_q_head { call.q.heads } else { call.k.heads };
        let tiles = fused.tiles();
        let mut writer = staging.begin(turns::bytes(&call.ranges, tiles, call.q.heads))?;
        let Turns { queries, keys, keys_of, queries_of, query_tiles, key_tiles, work, tiles, words, ticket, turns } =
            turns::write(staging, &mut writer, &call.ranges, tiles, window, call.q.heads);
        // Words are counted with 32 bits.
        items(words, 1)?;
        params.heads.items = items(tiles, heads)?;
        if params.heads.items == 0 {
            return Ok(());
        }
        (params.queries, params.keys) = (queries, keys);
        (params.partners, params.work) = (queries_of, work);
        let params = Params { call: params, keys_of, query_tiles, key_tiles, turns, ticket };
        sequence(staging, &writer, stream, || {
            let blocks = self.resident(kernel, params.call.heads.items)?;
            // SAFETY: the caller's promise, and lists that live in the ring until the launch is done.
            unsafe { kernel.function.launch(blocks, kernel.launch.threads, kernel.launch.shared, stream, &params) }
        })
    }
}
