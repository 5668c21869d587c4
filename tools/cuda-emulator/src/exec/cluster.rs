// SPDX-License-Identifier: MIT OR Apache-2.0
//! A cluster of blocks: the barrier of all its threads, and when a block may reach into the shared memory of another.
//!
//! The blocks of a cluster are resident together and take turns as the warps of one block do, because they may wait for
//! each other. An address of another block's shared memory has that block's rank, plus one, above bit 24; an address
//! without is the own block's.
//!
//! A block's shared memory exists from its first instruction to its last. Who reaches into it has to know that the
//! block has begun: by the barrier of the cluster, or because it says so by way of a third. When it ends, it has to
//! know of all that others have done there. Both are decided by what warps know, so they are found in every order.

use super::block::Block;
use super::clock::{Knowledge, Published};
use std::collections::HashMap;

/// Where the rank begins in an address.
pub(crate) const RANK_SHIFT: u32 = 24;
/// The most blocks of a cluster that every device of compute capability 9.0 runs.
pub(crate) const MAX_BLOCKS: u32 = 8;

/// What the blocks of a cluster share.
pub(crate) struct Cluster {
    /// Blocks along each dimension.
    pub(crate) shape: [u32; 3],
    /// Warps of a block.
    each: usize,
    /// Lanes that have not exited, by warp; those of one block after those of another.
    alive: Vec<u32>,
    /// Lanes that have arrived at the barrier in this phase.
    arrived: Vec<u32>,
    /// Lanes that have arrived and not waited.
    owing: Vec<u32>,
    gathering: Published,
    done: Published,
}

impl Cluster {
    pub(crate) fn new(shape: [u32; 3], each: usize) -> Self {
        let warps = each * shape.iter().product::<u32>() as usize;
        let none = || vec![0; warps];
        Self {
            shape,
            each,
            alive: none(),
            arrived: none(),
            owing: none(),
            gathering: Published::default(),
            done: Published::default(),
        }
    }

    /// Blocks.
    pub(crate) fn blocks(&self) -> u32 {
        self.shape.iter().product()
    }

    /// Which lanes of a warp there are. Without those that have exited the phase may be complete.
    pub(crate) fn set_alive(&mut self, (rank, warp): (usize, usize), lanes: u32) {
        let alive = &mut self.alive[rank * self.each + warp];
        if *alive != lanes {
            *alive = lanes;
            self.complete();
        }
    }

    /// Lanes of a warp arrive.
    pub(crate) fn arrive(&mut self, (rank, warp): (usize, usize), m: u32, tells: &Published) -> Result<(), String> {
        let w = rank * self.each + warp;
        let twice = self.owing[w] & m;
        if twice != 0 {
            return Err(format!(
                "lanes {twice:#010x} arrive at the barrier of the cluster again without having waited"
            ));
        }
        self.owing[w] |= m;
        self.arrived[w] |= m;
        self.gathering.add(tells);
        self.complete();
        Ok(())
    }

    /// Lanes of a warp wait: what those that arrived have told, if all have.
    pub(crate) fn wait(&mut self, (rank, warp): (usize, usize), m: u32) -> Result<Option<&Published>, String> {
        let w = rank * self.each + warp;
        let never = m & !self.owing[w];
        if never != 0 {
            return Err(format!("lanes {never:#010x} wait at the barrier of the cluster without having arrived"));
        }
        if self.arrived[w] & m != 0 {
            return Ok(None);
        }
        self.owing[w] &= !m;
        Ok(Some(&self.done))
    }

    /// Ends the phase if every lane that has not exited has arrived.
    fn complete(&mut self) {
        let some = self.arrived.iter().any(|&a| a != 0);
        if some && self.alive.iter().zip(&self.arrived).all(|(alive, arrived)| alive & !arrived == 0) {
            self.arrived.fill(0);
            self.done = std::mem::take(&mut self.gathering);
        }
    }

    /// Who is missing at the barrier, for a report.
    pub(crate) fn missing(&self) -> String {
        if self.arrived.iter().all(|&a| a == 0) {
            return String::new();
        }
        let lanes = |of: &[u32]| of.iter().map(|m| m.count_ones()).sum::<u32>();
        let each = self.each;
        let show = |rank: usize| {
            let (alive, arrived) = (&self.alive[rank * each..][..each], &self.arrived[rank * each..][..each]);
            format!("{} of {} threads of rank {rank}", lanes(arrived), lanes(alive))
        };
        let ranks: Vec<String> = (0..self.blocks() as usize).map(show).collect();
        format!("the barrier of the cluster has {}", ranks.join(" and "))
    }
}

/// The blocks of the cluster but the one that runs.
pub(crate) struct Peers<'a> {
    pub(crate) before: &'a mut [Block],
    pub(crate) after: &'a mut [Block],
}

impl Peers<'_> {
    /// The block of a rank; None where it is the one that runs.
    pub(crate) fn get(&mut self, rank: usize) -> Option<&mut Block> {
        let own = self.before.len();
        if rank < own { self.before.get_mut(rank) } else { self.after.get_mut(rank.checked_sub(own + 1)?) }
    }
}

/// What other blocks did in the shared memory of one, that it may not know of yet.
#[derive(Debug, Default)]
pub(crate) struct Visits(HashMap<(u32, usize, u32), Visit>);

#[derive(Clone, Copy, Debug)]
struct Visit {
    /// The clock of the other block's warp.
    clock: u32,
    /// The slot of a barrier, and its clock when the phase in which this happened has ended.
    phase: (u32, u32),
    pc: usize,
}

impl Visits {
    /// A warp of another block did something that a phase of a barrier here counts.
    pub(crate) fn note(&mut self, by: &Knowledge, warp: usize, phase: (u32, u32), pc: usize) {
        self.0.insert((by.block, warp, phase.0), Visit { clock: by.own[warp], phase, pc });
    }

    /// One that a block which ends, and knows this much, is not ordered after: the other block, its warp, the
    /// instruction.
    pub(crate) fn unknown(&self, knowledge: &Knowledge) -> Option<(u32, usize, usize)> {
        let knows = |block: u32, warp: usize, v: &Visit| {
            let (slot, clock) = v.phase;
            slot != 0 && knowledge.own[slot as usize] >= clock
                || knowledge.about(block).is_some_and(|(clocks, _)| clocks[warp] >= v.clock)
        };
        let unknown = self.0.iter().filter(|((block, warp, _), v)| !knows(*block, *warp, v));
        unknown.map(|((block, warp, _), v)| (*block, *warp, v.pc)).min()
    }
}
