// SPDX-License-Identifier: MIT OR Apache-2.0
//! Vector clocks: what a warp knows of all others.
//!
//! Every warp has a clock that advances when it publishes something: at a barrier, a fence, a release. It knows the
//! clocks of its own block densely, and of other blocks as far as it acquired something from them.
//!
//! Not only warps have clocks. What the hardware does on its own (a copy that lands, a product of a warpgroup) is known
//! to those alone who waited for it, so it has slots of its own behind the warps': see [`slot`].
//!
//! The asynchronous proxy sees what the generic proxy wrote only after a proxy fence between the two. So besides the
//! clocks that are known there are those that are known *and fenced*; they travel with the rest.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Warps of a block at most.
pub(crate) const WARPS: usize = 32;

/// Slots of a block's clocks that are not warps.
pub(crate) mod slot {
    /// The products of each warpgroup: groups completed.
    pub(crate) const PRODUCTS: usize = 32;
    /// Barriers in shared memory: phases completed.
    pub(crate) const BARRIERS: usize = 40;
    /// How many barriers have a slot.
    pub(crate) const BARRIER_COUNT: usize = 24;
    /// Bulk stores, by warp modulo [`STORE_COUNT`]: stores begun.
    pub(crate) const STORES: usize = BARRIERS + BARRIER_COUNT;
    pub(crate) const STORE_COUNT: usize = 8;
    /// Barriers in shared memory that were made before a fence for other blocks: how many.
    pub(crate) const MADE: usize = STORES + STORE_COUNT;
    pub(crate) const COUNT: usize = MADE + 1;
}

/// Clocks of one block.
pub(crate) type Clocks = [u32; slot::COUNT];
/// Clocks of the warps of one block.
pub(crate) type WarpClocks = [u32; WARPS];

/// The two kinds of memory that proxy fences name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fenced {
    Shared = 0,
    Global = 1,
}

/// What is known of one block.
#[derive(Clone, Debug)]
pub(crate) struct View {
    clocks: Clocks,
    fenced: [WarpClocks; 2],
}

/// What was published at a flag: views by block.
#[derive(Clone, Debug, Default)]
pub(crate) struct Published(pub(crate) Arc<BTreeMap<u32, Arc<View>>>);

/// What a warp knows.
#[derive(Clone, Debug)]
pub(crate) struct Knowledge {
    pub(crate) block: u32,
    pub(crate) own: Clocks,
    /// Writes of this block's warps that a proxy fence stands behind.
    pub(crate) fenced: [WarpClocks; 2],
    others: Arc<BTreeMap<u32, Arc<View>>>,
}

fn raise<const N: usize>(a: &mut [u32; N], b: &[u32; N]) {
    for (x, y) in a.iter_mut().zip(b) {
        *x = (*x).max(*y);
    }
}

fn raise_fenced(a: &mut [WarpClocks; 2], b: &[WarpClocks; 2]) {
    raise(&mut a[0], &b[0]);
    raise(&mut a[1], &b[1]);
}

fn merge(into: &mut Arc<BTreeMap<u32, Arc<View>>>, from: &Arc<BTreeMap<u32, Arc<View>>>, except: u32) {
    if Arc::ptr_eq(into, from) || from.is_empty() {
        return;
    }
    let map = Arc::make_mut(into);
    for (&block, view) in from.iter().filter(|(b, _)| **b != except) {
        match map.get_mut(&block) {
            None => {
                map.insert(block, view.clone());
            }
            Some(mine) if Arc::ptr_eq(mine, view) => {}
            Some(mine) => {
                let mine = Arc::make_mut(mine);
                raise(&mut mine.clocks, &view.clocks);
                raise_fenced(&mut mine.fenced, &view.fenced);
            }
        }
    }
}

impl Knowledge {
    pub(crate) fn new(block: u32) -> Self {
        let own = [0; slot::COUNT];
        Self { block, own, fenced: [[0; WARPS]; 2], others: Arc::default() }
    }

    /// The clock known of a warp (or of another slot) of another block.
    #[inline]
    pub(crate) fn of(&self, block: u32, slot: u32) -> u32 {
        self.others.get(&block).map_or(0, |v| v.clocks[slot as usize])
    }

    /// What is known of a block and seen by the asynchronous proxy in its shared memory; None where nothing tells that
    /// it has begun.
    pub(crate) fn about(&self, block: u32) -> Option<(Clocks, WarpClocks)> {
        let shared = Fenced::Shared as usize;
        if block == self.block {
            return Some((self.own, self.fenced[shared]));
        }
        self.others.get(&block).map(|v| (v.clocks, v.fenced[shared]))
    }

    /// The clock of a warp up to which its writes to global memory are fenced for the asynchronous proxy.
    pub(crate) fn fenced_of(&self, block: u32, warp: u32) -> u32 {
        let global = Fenced::Global as usize;
        if block == self.block {
            return self.fenced[global][warp as usize];
        }
        self.others.get(&block).map_or(0, |v| v.fenced[global][warp as usize])
    }

    /// A proxy fence: what is known now is seen by the asynchronous proxy.
    pub(crate) fn fence_proxy(&mut self, memory: Fenced, everywhere: bool) {
        let mut warps = [0; WARPS];
        warps.copy_from_slice(&self.own[..WARPS]);
        raise(&mut self.fenced[memory as usize], &warps);
        if everywhere && !self.others.is_empty() {
            for view in Arc::make_mut(&mut self.others).values_mut() {
                let view = Arc::make_mut(view);
                warps.copy_from_slice(&view.clocks[..WARPS]);
                raise(&mut view.fenced[memory as usize], &warps);
            }
        }
    }

    /// Learns what another warp of the block knows.
    pub(crate) fn join(&mut self, other: &Self) {
        raise(&mut self.own, &other.own);
        raise_fenced(&mut self.fenced, &other.fenced);
        merge(&mut self.others, &other.others, self.block);
    }

    /// What this warp can publish now.
    pub(crate) fn publish(&self) -> Published {
        let mut map = self.others.clone();
        Arc::make_mut(&mut map).insert(self.block, Arc::new(View { clocks: self.own, fenced: self.fenced }));
        Published(map)
    }

    /// What an arrival tells another block that orders no memory between the two: how far what the hardware does on its
    /// own has come, as far as this warp has waited for it.
    pub(crate) fn publish_ended(&self) -> Published {
        let mut clocks = self.own;
        clocks[..WARPS].fill(0);
        clocks[slot::MADE] = 0;
        Published::view(self.block, clocks)
    }

    /// What a fence tells other blocks of the barriers that were made before it, and of nothing else.
    pub(crate) fn publish_made(&self, made: u32) -> Published {
        let mut clocks = [0; slot::COUNT];
        clocks[slot::MADE] = made;
        Published::view(self.block, clocks)
    }

    /// Learns what was published.
    pub(crate) fn acquire(&mut self, p: &Published) {
        if let Some(view) = p.0.get(&self.block) {
            raise(&mut self.own, &view.clocks);
            raise_fenced(&mut self.fenced, &view.fenced);
        }
        merge(&mut self.others, &p.0, self.block);
    }
}

impl Published {
    fn view(block: u32, clocks: Clocks) -> Self {
        Self(Arc::new(BTreeMap::from([(block, Arc::new(View { clocks, fenced: [[0; WARPS]; 2] }))])))
    }

    /// Adds what another release published: a read-modify-write continues a release sequence.
    pub(crate) fn add(&mut self, other: &Self) {
        merge(&mut self.0, &other.0, u32::MAX);
    }
}
