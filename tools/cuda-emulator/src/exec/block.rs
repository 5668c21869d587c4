// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the warps of a block share: memory, barriers, copies and products under way, and what each knows of the others.

use super::clock::Knowledge;
use super::cluster::Visits;
use super::flight::Flights;
use super::mbarrier::MBarriers;
use super::products::Products;
use super::registers::Registers;
use crate::mem::shared::SharedMemory;
use crate::op::Code;

/// One of the sixteen barriers.
#[derive(Default)]
struct Barrier {
    arrived: u32,
    /// Threads the current phase waits for.
    count: u32,
    whole: bool,
    /// What all that arrived knew.
    knowledge: Option<Knowledge>,
    /// Warps that wait.
    waiting: u64,
    /// Warps that arrived, waiting or not.
    came: u64,
    /// Lanes of warps that arrived lane by lane.
    parts: Vec<(usize, u32)>,
    popc: u32,
    all: bool,
}

/// A block that runs.
pub(crate) struct Block {
    /// Index in the grid.
    pub(crate) id: [u32; 3],
    /// Number among all blocks of all launches.
    pub(crate) number: u32,
    /// Rank in its cluster.
    pub(crate) rank: usize,
    pub(crate) shape: [u32; 3],
    pub(crate) shared: SharedMemory,
    pub(crate) known: Vec<Knowledge>,
    pub(crate) mbarriers: MBarriers,
    pub(crate) flights: Flights,
    pub(crate) products: Products,
    pub(crate) registers: Registers,
    barriers: [Barrier; 16],
    /// Phases that ended, by barrier.
    phases: [u32; 16],
    exited_warps: u32,
    /// What its warps knew when they ended.
    ended: Knowledge,
    /// What other blocks did here.
    pub(crate) visits: Visits,
    /// Warps let go, with the value of the reduction: popc, and whether all voted.
    freed: Vec<(usize, u32)>,
}

impl Block {
    pub(crate) fn new(
        (id, number, rank): ([u32; 3], u32, usize),
        shape: [u32; 3],
        shared: SharedMemory,
        code: &Code,
    ) -> Self {
        let warps = (shape[0] * shape[1] * shape[2]).div_ceil(32) as usize;
        let mut known = vec![Knowledge::new(number); warps];
        for (w, k) in known.iter_mut().enumerate() {
            k.own[w] = 1;
        }
        let barriers = std::array::from_fn(|_| Barrier::default());
        Self {
            id,
            number,
            rank,
            shape,
            shared,
            known,
            mbarriers: MBarriers::default(),
            flights: Flights::default(),
            products: Products::new(if code.matrix_registers.is_empty() { 0 } else { warps.div_ceil(4) }),
            registers: Registers::new(warps, code.max_registers),
            barriers,
            phases: [0; 16],
            exited_warps: 0,
            ended: Knowledge::new(number),
            visits: Visits::default(),
            freed: Vec::new(),
        }
    }

    pub(crate) fn threads(&self) -> u32 {
        self.shape[0] * self.shape[1] * self.shape[2]
    }

    /// A warp arrives at a barrier. True when that completes it; those it releases are in [`Block::take_freed`].
    pub(crate) fn arrive(
        &mut self,
        id: usize,
        count: u32,
        whole: bool,
        warp: usize,
        waits: bool,
        votes: u32,
        m: u32,
    ) -> Result<bool, String> {
        let b = &mut self.barriers[id];
        if b.arrived > 0 && b.count != count {
            return Err(format!("barrier {id}: {count} threads named by warp {warp}, {} by an earlier one", b.count));
        }
        if b.came >> warp & 1 == 1 {
            return Err(format!("warp {warp} arrives at barrier {id} twice in one phase"));
        }
        if b.arrived == 0 {
            (b.all, b.popc) = (true, 0);
        }
        (b.count, b.whole) = (count, whole);
        b.arrived += 32;
        b.came |= 1 << warp;
        b.waiting |= u64::from(waits) << warp;
        b.popc += votes.count_ones();
        b.all &= votes == m;
        self.publish_to(id, warp);
        Ok(self.complete(id))
    }

    /// Lanes of a warp arrive at a barrier that does not ask for all of them at once; `threads` is how many they count
    /// for. Returns the phase they have arrived in: when [`Block::phase`] is another, it has ended.
    pub(crate) fn arrive_lanes(
        &mut self,
        id: usize,
        (count, whole): (u32, bool),
        warp: usize,
        lanes: u32,
        threads: u32,
    ) -> Result<u32, String> {
        let phase = self.phases[id];
        let b = &mut self.barriers[id];
        if b.arrived > 0 && b.count != count {
            return Err(format!("barrier {id}: {count} threads named by warp {warp}, {} by an earlier one", b.count));
        }
        if b.came >> warp & 1 == 1 || b.parts.iter().any(|&(w, part)| w == warp && part & lanes != 0) {
            return Err(format!("lanes {lanes:#010x} of warp {warp} arrive at barrier {id} twice in one phase"));
        }
        if b.arrived == 0 {
            (b.all, b.popc) = (true, 0);
        }
        (b.count, b.whole) = (count, whole);
        b.arrived += threads;
        b.parts.push((warp, lanes));
        self.publish_to(id, warp);
        self.complete(id);
        Ok(phase)
    }

    /// Phases of a barrier that have ended.
    pub(crate) fn phase(&self, id: usize) -> u32 {
        self.phases[id]
    }

    /// The barrier learns what a warp knows.
    fn publish_to(&mut self, id: usize, warp: usize) {
        let mine = &self.known[warp];
        match &mut self.barriers[id].knowledge {
            Some(k) => k.join(mine),
            none => *none = Some(mine.clone()),
        }
        self.known[warp].own[warp] += 1;
    }

    /// Ends the phase of a barrier if all have come.
    fn complete(&mut self, id: usize) -> bool {
        let b = &mut self.barriers[id];
        // Warps that have ended count as arrived where the whole block is meant.
        let gone = if b.whole { self.exited_warps * 32 } else { 0 };
        if b.arrived == 0 || b.arrived + gone < b.count {
            return false;
        }
        let b = std::mem::take(b);
        self.phases[id] += 1;
        let value = if b.all { b.popc | 1 << 31 } else { b.popc };
        for w in (0..self.known.len()).filter(|w| b.waiting >> w & 1 == 1) {
            if let Some(k) = &b.knowledge {
                self.known[w].join(k);
            }
            self.freed.push((w, value));
        }
        for &(w, _) in &b.parts {
            if let Some(k) = &b.knowledge {
                self.known[w].join(k);
            }
        }
        true
    }

    /// A warp ended: barriers of the whole block may be complete now.
    pub(crate) fn warp_ended(&mut self, warp: usize) {
        self.ended.join(&self.known[warp]);
        self.exited_warps += 1;
        for id in 0..16 {
            self.complete(id);
        }
    }

    /// Whether all its warps have ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.exited_warps as usize == self.known.len()
    }

    /// Something another block did here that this one, which ends, is not ordered after.
    pub(crate) fn unknown_visit(&self) -> Option<(u32, usize, usize)> {
        self.visits.unknown(&self.ended)
    }

    /// The release of one warp.
    pub(crate) fn take_release(&mut self, warp: usize) -> Option<u32> {
        let at = self.freed.iter().position(|f| f.0 == warp)?;
        Some(self.freed.swap_remove(at).1)
    }

    /// All warps that were let go.
    pub(crate) fn take_freed(&mut self) -> Vec<(usize, u32)> {
        std::mem::take(&mut self.freed)
    }

    /// Which barriers are incomplete, for a report.
    pub(crate) fn waiting_barriers(&self) -> String {
        let mut out = Vec::new();
        for (id, b) in self.barriers.iter().enumerate().filter(|(_, b)| b.arrived > 0) {
            out.push(format!("barrier {id} has {} of {} threads", b.arrived, b.count));
        }
        let missing = self.mbarriers.missing();
        if !missing.is_empty() {
            out.push(missing);
        }
        out.join(", ")
    }
}
