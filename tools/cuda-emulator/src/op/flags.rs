// SPDX-License-Identifier: MIT OR Apache-2.0
//! Locations that synchronise: what a strong write publishes there, and what a strong read learns.

use super::{Cx, Order};
use crate::mem::SHARED_WINDOW;
use crate::mem::lanes as lane_order;
use crate::ptx::Space;

/// Names a location that synchronises.
pub(super) fn flag_key(cx: &Cx, space: Space, at: u64) -> u64 {
    if space == Space::Shared { SHARED_WINDOW | u64::from(cx.block.number) << 24 | at } else { at }
}

impl Cx<'_> {
    /// Names this warp between two of its synchronisations.
    pub(super) fn lane_key(&self) -> u64 {
        lane_order::key(self.block.number, self.warp.index, self.warp.syncs)
    }

    /// A strong write to a flag: publishes what the warp may publish there.
    pub(super) fn publish(&mut self, key: u64, order: Order, device: bool, rmw: bool) {
        let w = self.warp.index;
        let what = if order.releases() {
            let p = self.block.known[w].publish();
            self.block.known[w].own[w] += 1;
            Some(p)
        } else if device {
            self.warp.fenced.clone()
        } else {
            self.warp.fenced_block.clone().or(self.warp.fenced.clone())
        };
        match what {
            Some(p) if rmw => self.grid.flags.entry(key).or_default().add(&p),
            Some(p) => {
                self.grid.flags.insert(key, p);
            }
            None if !rmw => {
                self.grid.flags.remove(&key);
            }
            None => {}
        }
    }

    /// A strong read of a flag: learns what was published there, now or at the next fence.
    pub(super) fn observe(&mut self, key: u64, order: Order) {
        let Some(p) = self.grid.flags.get(&key) else { return };
        if order.acquires() {
            self.block.known[self.warp.index].acquire(p);
        } else {
            self.warp.observed.add(p);
        }
    }
}
