// SPDX-License-Identifier: MIT OR Apache-2.0
//! Vector clocks: what a warp knows of all others.
//!
//! Every warp has a clock that advances when it publishes something: at a barrier, a fence, a release. It knows the
//! clocks of the warps of its own block densely, and of other blocks as far as it acquired something from them.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Clocks of the warps of one block.
pub(crate) type Clocks = [u32; 32];

/// What was published at a flag: clocks by block.
#[derive(Clone, Debug, Default)]
pub(crate) struct Published(pub(crate) Arc<BTreeMap<u32, Arc<Clocks>>>);

/// What a warp knows.
#[derive(Clone, Debug)]
pub(crate) struct Knowledge {
    pub(crate) block: u32,
    pub(crate) own: Clocks,
    others: Arc<BTreeMap<u32, Arc<Clocks>>>,
}

fn raise(a: &mut Clocks, b: &Clocks) {
    for (x, y) in a.iter_mut().zip(b) {
        *x = (*x).max(*y);
    }
}

fn merge(into: &mut Arc<BTreeMap<u32, Arc<Clocks>>>, from: &Arc<BTreeMap<u32, Arc<Clocks>>>, except: u32) {
    if Arc::ptr_eq(into, from) || from.is_empty() {
        return;
    }
    let map = Arc::make_mut(into);
    for (&block, clocks) in from.iter().filter(|(b, _)| **b != except) {
        match map.get_mut(&block) {
            None => {
                map.insert(block, clocks.clone());
            }
            Some(mine) if Arc::ptr_eq(mine, clocks) => {}
            Some(mine) => raise(Arc::make_mut(mine), clocks),
        }
    }
}

impl Knowledge {
    pub(crate) fn new(block: u32) -> Self {
        Self { block, own: [0; 32], others: Arc::default() }
    }

    /// The clock known of a warp of another block.
    #[inline]
    pub(crate) fn of(&self, block: u32, warp: u32) -> u32 {
        self.others.get(&block).map_or(0, |c| c[warp as usize])
    }

    /// Learns what another warp of the block knows.
    pub(crate) fn join(&mut self, other: &Self) {
        raise(&mut self.own, &other.own);
        merge(&mut self.others, &other.others, self.block);
    }

    /// What this warp can publish now.
    pub(crate) fn publish(&self) -> Published {
        let mut map = self.others.clone();
        Arc::make_mut(&mut map).insert(self.block, Arc::new(self.own));
        Published(map)
    }

    /// Learns what was published.
    pub(crate) fn acquire(&mut self, p: &Published) {
        if let Some(own) = p.0.get(&self.block) {
            raise(&mut self.own, own);
        }
        merge(&mut self.others, &p.0, self.block);
    }
}

impl Published {
    /// Adds what another release published: a read-modify-write continues a release sequence.
    pub(crate) fn add(&mut self, other: &Self) {
        merge(&mut self.0, &other.0, u32::MAX);
    }
}
