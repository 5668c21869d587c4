// SPDX-License-Identifier: MIT OR Apache-2.0
//! Barriers in shared memory (`mbarrier`): arrivals, bytes of copies, phases.
//!
//! A phase ends when all expected arrivals have come and the bytes that landed are those that were announced. Threads
//! wait for the end of a phase by its parity alone, so a thread that falls two phases behind cannot tell: that is a
//! fault here. What a waiter believes to be the current phase follows from what it knows: the phases it has seen end,
//! by itself or by way of other barriers. If the barrier is further than that by two, it has lapped its waiter.
//!
//! Warps of other blocks of a cluster arrive as well. Such an arrival always tells the waiters how far copies and
//! products have come that the arriving warp has waited for: that needs no fence of memory, and is what a buffer given
//! back to a copy of another block rests on. What the warp itself has read or written it tells only when it releases to
//! the cluster, and only to waiters that acquire from it.
//!
//! The object in memory is opaque. Its state is kept here, by address, and its eight bytes belong to the barrier alone
//! while it lives.

use super::clock::{Clocks, Knowledge, Published, slot};

/// The most bytes that may be outstanding, as the PTX manual says.
const MAX_BYTES: i64 = (1 << 20) - 1;
/// The most arrivals a phase may expect.
pub(crate) const MAX_ARRIVALS: u32 = (1 << 20) - 1;

/// One barrier.
pub(crate) struct MBarrier {
    pub(crate) at: u32,
    count: u32,
    /// Arrivals that are missing in this phase.
    pending: u32,
    /// Bytes that are announced and have not landed.
    bytes: i64,
    /// Phases that have ended.
    phases: u32,
    /// The clock's slot, and what it showed when the barrier was made.
    slot: Option<usize>,
    base: u32,
    /// What all that arrived in this phase knew, and in the one before.
    gathering: Option<Knowledge>,
    done: Option<Knowledge>,
    /// What those of other blocks released to the cluster, likewise.
    gathering_far: Published,
    done_far: Published,
    /// Warps all of whose lanes arrived, in this phase and in the one before.
    whole: u32,
    whole_done: u32,
    /// Who made it, and when: others have to know of it.
    made: (usize, u32),
    /// Its number among all that the block has made.
    number: u32,
}

/// What a wait finds.
pub(crate) enum Waited {
    Yes,
    No,
    Lapped(String),
}

/// The barriers of a block.
#[derive(Default)]
pub(crate) struct MBarriers {
    list: Vec<MBarrier>,
    /// The last clock of each slot.
    clocks: [u32; slot::BARRIER_COUNT],
    /// Barriers made so far.
    made: u32,
}

/// Who arrives.
pub(crate) enum Arriving<'a> {
    /// A warp of the block, and whether all its lanes do.
    Own(usize, bool, &'a mut Knowledge),
    /// A warp of another block of the cluster: what all waiters learn, and what those learn that acquire from the
    /// cluster.
    Other(Published, Option<Published>),
}

impl MBarriers {
    /// Makes a barrier; false when there is one already.
    pub(crate) fn make(&mut self, at: u32, count: u32, made: (usize, u32)) -> bool {
        if self.list.iter().any(|b| b.at == at) {
            return false;
        }
        let taken = |k: &usize| self.list.iter().any(|b| b.slot == Some(*k));
        let slot = (0..slot::BARRIER_COUNT).find(|k| !taken(k));
        let base = slot.map_or(0, |k| self.clocks[k]);
        self.made += 1;
        self.list.push(MBarrier {
            at,
            count,
            pending: count,
            bytes: 0,
            phases: 0,
            slot,
            base,
            gathering: None,
            done: None,
            gathering_far: Published::default(),
            done_far: Published::default(),
            whole: 0,
            whole_done: 0,
            made,
            number: self.made,
        });
        true
    }

    /// Ends a barrier's life; false when there is none.
    pub(crate) fn end(&mut self, at: u32) -> bool {
        let Some(k) = self.list.iter().position(|b| b.at == at) else { return false };
        self.list.swap_remove(k);
        true
    }

    /// How many of the barriers made first a warp that knows `clocks` of this block is ordered after.
    pub(crate) fn made_before(&self, clocks: &Clocks) -> u32 {
        let unknown = self.list.iter().filter(|b| clocks[b.made.0] < b.made.1);
        unknown.map(|b| b.number - 1).min().unwrap_or(self.made)
    }

    /// The barrier at an address, as far as a warp may know of it that knows `clocks` of this block.
    pub(crate) fn find(&mut self, at: u32, clocks: &Clocks) -> Result<&mut MBarrier, String> {
        let Some(b) = self.list.iter_mut().find(|b| b.at == at) else {
            return Err(format!("there is no barrier at {at}: nothing has initialised it, or it was invalidated"));
        };
        let (warp, clock) = b.made;
        if clocks[warp] < clock && clocks[slot::MADE] < b.number {
            return Err(format!("warp {warp} has made the barrier at {at}, and this warp is not ordered after that"));
        }
        Ok(b)
    }

    /// Bytes of a copy have landed. The slot and clock that the copied bytes are known by: `(0, 0)` when none.
    pub(crate) fn land(&mut self, at: u32, bytes: u32) -> Result<(u32, u32), String> {
        let Some(b) = self.list.iter_mut().find(|b| b.at == at) else {
            return Err(format!("a copy has landed whose barrier at {at} was invalidated meanwhile"));
        };
        let known_by = b.known_by();
        b.bytes -= i64::from(bytes);
        if b.pending == 0 && b.bytes < 0 || b.bytes < -MAX_BYTES {
            return Err(format!("{} bytes more have landed than the barrier at {at} expects in this phase", -b.bytes));
        }
        b.complete(&mut self.clocks);
        Ok(known_by)
    }

    /// Announces bytes, arrives `arrivals` times, or both; `block` is the number of the barrier's block.
    pub(crate) fn arrive(
        &mut self,
        (block, at): (u32, u32),
        bytes: u32,
        arrivals: u32,
        who: Arriving<'_>,
    ) -> Result<u32, String> {
        let b = self.list.iter_mut().find(|b| b.at == at).ok_or("there is no barrier")?;
        b.bytes += i64::from(bytes);
        if b.bytes > MAX_BYTES {
            return Err(format!("{} bytes are outstanding at the barrier at {at}, {MAX_BYTES} are allowed", b.bytes));
        }
        if b.pending < arrivals {
            let missing = b.pending;
            return Err(format!("{arrivals} more arrivals at the barrier at {at}, whose phase expects {missing} more"));
        }
        let phase = b.phases;
        if arrivals > 0 {
            b.pending -= arrivals;
            let gathering = b.gathering.get_or_insert_with(|| Knowledge::new(block));
            match who {
                Arriving::Own(warp, whole, knowledge) => {
                    gathering.join(knowledge);
                    knowledge.own[warp] += 1;
                    b.whole |= u32::from(whole) << warp;
                }
                Arriving::Other(ended, released) => {
                    gathering.acquire(&ended);
                    b.gathering_far.add(&released.unwrap_or_default());
                }
            }
            b.complete(&mut self.clocks);
        }
        Ok(phase)
    }

    /// What is missing, for a report.
    pub(crate) fn missing(&self) -> String {
        let show = |b: &MBarrier| {
            format!(
                "the barrier at {} is in phase {}: {} arrivals and {} bytes are missing",
                b.at, b.phases, b.pending, b.bytes
            )
        };
        self.list.iter().map(show).collect::<Vec<_>>().join(", ")
    }
}

impl MBarrier {
    /// The slot and clock by which others know that this phase has ended; `(0, 0)` when there is none.
    pub(crate) fn known_by(&self) -> (u32, u32) {
        self.slot.map_or((0, 0), |k| ((slot::BARRIERS + k) as u32, self.base + self.phases + 1))
    }

    fn complete(&mut self, clocks: &mut [u32; slot::BARRIER_COUNT]) {
        if self.pending > 0 || self.bytes != 0 {
            return;
        }
        self.phases += 1;
        self.pending = self.count;
        self.done = self.gathering.take();
        self.done_far = std::mem::take(&mut self.gathering_far);
        (self.whole_done, self.whole) = (self.whole, 0);
        if let Some(k) = self.slot {
            clocks[k] = self.base + self.phases;
        }
    }

    /// Asks whether the phase of a parity has ended; a warp for which it has learns what was known by those that
    /// arrived.
    pub(crate) fn wait_parity(&mut self, parity: u32, knowledge: &mut Knowledge, cluster: bool) -> Waited {
        if let Some(k) = self.slot {
            let known = knowledge.own[slot::BARRIERS + k].saturating_sub(self.base);
            // The phase this warp asks for: the one after those it knows to have ended, or the last of those.
            let phase = if known % 2 == parity { i64::from(known) } else { i64::from(known) - 1 };
            if i64::from(self.phases) > phase + 1 {
                return Waited::Lapped(format!(
                    "parity {parity} of the barrier at {} means phase {phase} to this warp, which knows {known} phases to \
                     have ended; {} have, so that the answer is about a later phase",
                    self.at, self.phases
                ));
            }
        }
        if self.phases % 2 == parity {
            return Waited::No;
        }
        self.learn(knowledge, cluster);
        Waited::Yes
    }

    /// Asks whether the phase in which an arrival gave this state has ended.
    pub(crate) fn wait_state(&mut self, state: u64, knowledge: &mut Knowledge, cluster: bool) -> Waited {
        let phase = state as u32;
        if self.phases <= phase {
            return Waited::No;
        }
        if self.phases > phase + 1 {
            let text =
                format!("the state is of phase {phase} of the barrier at {}, {} have ended", self.at, self.phases);
            return Waited::Lapped(text);
        }
        self.learn(knowledge, cluster);
        Waited::Yes
    }

    fn learn(&self, knowledge: &mut Knowledge, cluster: bool) {
        if cluster {
            knowledge.acquire(&self.done_far);
        }
        if let Some(done) = &self.done {
            knowledge.join(done);
        }
        if let Some(k) = self.slot {
            let clock = &mut knowledge.own[slot::BARRIERS + k];
            *clock = (*clock).max(self.base + self.phases);
        }
    }

    /// Whether all lanes of a warp arrived in the phase that ended last: waiting for it orders them with each other.
    pub(crate) fn ordered_lanes(&self, warp: usize) -> bool {
        self.whole_done >> warp & 1 == 1
    }
}
