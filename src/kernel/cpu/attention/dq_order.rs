// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sums that several units add to, in one order.
//!
//! The units of a document with one kv head hold blocks of its keys; each adds to dq of the same rows. That the sum has
//! the same bits for any number of workers, a unit adds to a row only when the unit of the block before has done so: it *passes* a
//! row when it is done with all rows up to there, and not before its predecessor has passed the same row. Units are
//! handed out in order, so the predecessor has been taken by a worker that waits, if at all, for still earlier ones:
//! no worker waits for ever, whatever threads there are, and a single worker never waits.

use crate::sync::{AtomicU64, thread};
use core::sync::atomic::Ordering;

/// Units that can be under way at the same time; in a model two, so that a third one gets the entry of the first.
const UNITS: usize = if cfg!(cpattn_loom) { 2 } else { 256 };

/// How far each unit is.
pub struct DqOrder([AtomicU64; UNITS]);

/// One unit's part of it.
pub struct DqTurn<'a> {
    order: &'a DqOrder,
    unit: u64,
    /// The unit before it that adds to the same rows.
    before: Option<u64>,
}

impl DqOrder {
    pub fn new() -> Self {
        Self(core::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// Begins unit `unit`, counted from 0 in the order in which units are handed out, which adds to rows that unit `before`, an
    /// earlier one, adds to.
    pub fn begin(&self, unit: usize, before: Option<usize>) -> DqTurn<'_> {
        let turn = DqTurn { order: self, unit: unit as u64, before: before.map(|unit| unit as u64) };
        // The unit that had the same entry must be done: whichever waits for it then sees that, by the number of a later one.
        if let Some(same) = turn.unit.checked_sub(UNITS as u64) {
            self.wait(same, u32::MAX);
        }
        self.0[unit % UNITS].store((turn.unit + 1) << 32, Ordering::Release);
        turn
    }

    /// Until `unit` has passed `place`, or given its entry to another.
    fn wait(&self, unit: u64, place: u32) {
        let wanted = (unit + 1) << 32 | u64::from(place);
        let mut tries = 0u32;
        while self.0[unit as usize % UNITS].load(Ordering::Acquire) < wanted {
            tries += 1;
            if tries < 64 && !cfg!(cpattn_loom) { core::hint::spin_loop() } else { thread::yield_now() }
        }
    }
}

impl DqTurn<'_> {
    /// Waits until rows up to `place` may be added to.
    pub fn wait(&self, place: u32) {
        if let Some(before) = self.before {
            self.order.wait(before, place);
        }
    }

    /// Says that all rows up to `place` are done.
    pub fn pass(&self, place: u32) {
        self.wait(place);
        self.order.0[self.unit as usize % UNITS].store((self.unit + 1) << 32 | u64::from(place), Ordering::Release);
    }
}

impl Drop for DqTurn<'_> {
    /// Done with everything, also when the worker panics: no other worker may wait for ever.
    fn drop(&mut self) {
        self.pass(u32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicUsize;
    use std::sync::Mutex;

    /// Chains of seven units over five places, by several threads, `turns` chains at a time: at every place the units of a chain
    /// follow each other. With 300 turns the unit before has long given its entry away.
    #[test]
    fn units_of_a_chain_keep_their_order() {
        for turns in [1, 3, 300] {
            let (order, next, log) = (DqOrder::new(), AtomicUsize::new(0), Mutex::new(std::vec::Vec::new()));
            let units = 7 * if turns == 300 { 600 } else { 90 };
            std::thread::scope(|s| {
                for _ in 0..4 {
                    s.spawn(|| {
                        loop {
                            let unit = next.fetch_add(1, Ordering::Relaxed);
                            if unit >= units {
                                break;
                            }
                            let (chain, link) = (unit / (7 * turns) * turns + unit % turns, unit / turns % 7);
                            let turn = order.begin(unit, (link > 0).then(|| unit - turns));
                            for place in (1..=5).filter(|place| (unit + place) % 3 > 0) {
                                turn.wait(place as u32);
                                log.lock().unwrap().push((chain, place, unit));
                                turn.pass(place as u32);
                            }
                        }
                    });
                }
            });
            let mut log = log.into_inner().unwrap();
            // A stable sort: entries of one chain and place stay in the order of time.
            log.sort_by_key(|&(chain, place, _)| (chain, place));
            assert!(log.len() == units * 5 * 2 / 3 && log.is_sorted(), "{turns} turns");
        }
    }
}
