// SPDX-License-Identifier: MIT OR Apache-2.0
//! The order in which units of work add to the same rows of dq.
//!
//! The units of one document and kv head hold blocks of its keys, and each adds to the same rows of dq. A unit adds to
//! a row only after the unit of the previous block has done so; the sums then have the same bits for any number of
//! workers. A unit *passes* a row once it has added to all rows up to it. It never passes a row before its predecessor
//! has. Units are handed out in order, so a predecessor is already with some worker, and that worker waits only for
//! still earlier units. This rules out a deadlock for any number of threads, and a single worker never waits.

use crate::sync::{AtomicU64, thread};
use core::sync::atomic::Ordering;

/// Entries, one for each unit in progress. Under loom there are two, so that a third unit reuses the entry of the
/// first.
const UNITS: usize = if cfg!(cpattn_loom) { 2 } else { 256 };

/// The progress of each unit in progress: its number plus 1 in the upper half, the last row that it passed in the
/// lower.
pub struct DqOrder([AtomicU64; UNITS]);

/// One unit's entry in the order.
pub struct DqTurn<'a> {
    order: &'a DqOrder,
    unit: u64,
    /// The preceding unit that adds to the same rows.
    before: Option<u64>,
}

impl DqOrder {
    pub fn new() -> Self {
        Self(core::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// Begins unit number `unit`; units are numbered from 0 as they are handed out. `before` is the earlier unit that
    /// adds to the same rows, if there is one.
    pub fn begin(&self, unit: usize, before: Option<usize>) -> DqTurn<'_> {
        let turn = DqTurn { order: self, unit: unit as u64, before: before.map(|unit| unit as u64) };
        // The previous unit of this entry must be done. Units that wait for it see a larger number in the entry, and
        // stop waiting.
        if let Some(same) = turn.unit.checked_sub(UNITS as u64) {
            self.wait(same, u32::MAX);
        }
        self.0[unit % UNITS].store((turn.unit + 1) << 32, Ordering::Release);
        turn
    }

    /// Waits until `unit` has passed `place`, or its entry belongs to a later unit.
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

    /// Publishes that all rows up to `place` are done.
    pub fn pass(&self, place: u32) {
        self.wait(place);
        self.order.0[self.unit as usize % UNITS].store((self.unit + 1) << 32 | u64::from(place), Ordering::Release);
    }
}

impl Drop for DqTurn<'_> {
    /// Passes all rows, also when the worker panics, so that no other worker waits forever.
    fn drop(&mut self) {
        self.pass(u32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicUsize;
    use std::sync::Mutex;

    /// Chains of seven units over five places, run by several threads, `turns` chains at a time: at every place the
    /// units of a chain follow each other. With 300 chains at a time the predecessor's entry has been reused before its
    /// successor begins.
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
