// SPDX-License-Identifier: MIT OR Apache-2.0
//! The order in which units of the backward add to dq, under loom: workers take units, and each adds to rows that
//! another unit adds to.
//!
//! The rows are cells that loom watches: it reports a unit that writes one while, or before, the unit before it does.
//! The sum in each tells their order. A model has two entries for units under way, so that the third unit takes over
//! that of the first.
//!
//! Run by `.ci/loom`.

use cpattn::kernel::cpu::dq_order::DqOrder;
use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread,
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

struct Call {
    order: DqOrder,
    next: AtomicUsize,
    /// For each chain a row for each place: the numbers of its units, as digits of a number to base 10, in the order in
    /// which they came.
    rows: Vec<Vec<UnsafeCell<usize>>>,
    turns: usize,
    units: usize,
    /// A unit that ends before it has added to anything, as one whose worker panics does.
    panics: Option<usize>,
}

// SAFETY: the rows are written in the order that is the subject of the test; loom reports a write that is not alone.
unsafe impl Sync for Call {}

impl Call {
    fn work(&self) {
        loop {
            let unit = self.next.fetch_add(1, Relaxed);
            if unit >= self.units {
                return;
            }
            let _ = catch_unwind(AssertUnwindSafe(|| self.unit(unit)));
        }
    }

    fn unit(&self, unit: usize) {
        let turn = self.order.begin(unit, unit.checked_sub(self.turns));
        if self.panics == Some(unit) {
            // As a panic does, without its words.
            std::panic::resume_unwind(Box::new(()));
        }
        for (place, row) in (1..).zip(&self.rows[unit % self.turns]) {
            turn.wait(place);
            // SAFETY: loom reports it if another thread is at the cell.
            row.with_mut(|row| unsafe { *row = *row * 10 + unit + 1 });
            turn.pass(place);
        }
    }
}

/// Two workers, `units` units in `turns` chains over so many places; what each row of each chain must hold. A worker is
/// interrupted at most `interrupted` times, which bounds the time that a model takes.
fn check([units, turns, places]: [usize; 3], panics: Option<usize>, interrupted: usize, expected: &'static [usize]) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(interrupted);
    builder.check(move || {
        let rows = (0..turns).map(|_| (0..places).map(|_| UnsafeCell::new(0)).collect()).collect();
        let call = Arc::new(Call { order: DqOrder::new(), next: AtomicUsize::new(0), rows, turns, units, panics });
        let other = {
            let call = Arc::clone(&call);
            thread::spawn(move || call.work())
        };
        call.work();
        other.join().unwrap();
        for (chain, &expected) in call.rows.iter().zip(expected) {
            for row in chain {
                // SAFETY: the other worker has ended; loom reports it if not.
                assert_eq!(row.with(|row| unsafe { *row }), expected);
            }
        }
    });
}

#[test]
fn a_chain() {
    check([3, 1, 1], None, 2, &[123]);
}

#[test]
fn two_chains_in_turn() {
    check([4, 2, 2], None, 3, &[13, 24]);
}

/// More chains than entries: the unit before has given its entry away.
#[test]
fn three_chains_in_turn() {
    check([4, 3, 1], None, 2, &[14, 2, 3]);
}

/// The others of its chain do not wait for it for ever.
#[test]
fn a_unit_that_panics() {
    check([3, 1, 2], Some(1), 3, &[13]);
}
