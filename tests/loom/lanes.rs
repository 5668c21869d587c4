// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two lanes of a rank under loom: start, waits between the lanes, an error and a panic in either, the next run
//! after them, the end of the thread.
//!
//! What the lanes do here is to write and read cells that loom watches, in the order that their waits promise. After
//! each run the caller writes the cells itself: loom reports a lane that is not done with them yet.
//!
//! Run by `.ci/loom`.

use cpattn::runtime::lanes::{LaneThreads, Progress, Task};
use cpattn::schedule::Lane::{Communication, Compute};
use cpattn::transport::{Label, Message, Transport};
use cpattn::{Cause, Error, Result};
use loom::cell::UnsafeCell;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};

fn model(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(body);
}

/// A transport that only notes what it is aborted for. Its lock is not part of the model.
#[derive(Default)]
struct Noted(Mutex<Vec<Cause>>);

impl Transport for Noted {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn agree(&self, _: std::ops::Range<usize>, _: u64) -> Result<()> {
        Ok(())
    }

    unsafe fn exchange(&self, _: Label, _: &[Message], _: &[Message]) -> Result<()> {
        Ok(())
    }

    fn poll(&self) -> Result<()> {
        Ok(())
    }

    fn abort(&self, cause: Cause) {
        self.0.lock().unwrap().push(cause);
    }
}

fn lanes() -> (LaneThreads, Arc<Noted>) {
    let transport = Arc::new(Noted::default());
    (LaneThreads::new(transport.clone()), transport)
}

/// A number that loom watches; both lanes use it, in turn.
#[derive(Default)]
struct Cell(UnsafeCell<u32>);

// SAFETY: loom reports every access that another one does not happen before.
unsafe impl Sync for Cell {}

impl Cell {
    fn set(&self, x: u32) {
        // SAFETY: loom checks what the models claim, that no other thread is at the cell.
        self.0.with_mut(|cell| unsafe { *cell = x });
    }

    fn get(&self) -> u32 {
        // SAFETY: loom checks that no other thread writes the cell meanwhile.
        self.0.with(|cell| unsafe { *cell })
    }
}

fn error(n: i64) -> Error {
    Error::Device { call: "model", code: n, message: String::new() }
}

/// Operations 0 (compute), 1 (communication, after 0) and 2 (compute, after 1): each adds one to what it finds.
fn three_operations(lanes: &mut LaneThreads, cell: &Cell) -> Result<()> {
    let step = |progress: &Progress, lane, after: Option<usize>, op: usize| {
        if after.is_none_or(|after| progress.wait_for(lane, after)) {
            cell.set(cell.get() + 1);
            progress.advance(lane, op + 1, None);
            return true;
        }
        false
    };
    let mut other = |progress: &Progress| {
        step(progress, Communication, Some(0), 1);
        progress.advance(Communication, 3, None);
        Ok(())
    };
    lanes.run(
        |progress| {
            assert!(step(progress, Compute, None, 0) && step(progress, Compute, Some(1), 2));
            Ok(())
        },
        Some(&mut other as &mut Task<'_>),
    )
}

#[test]
fn operations_of_both_lanes_in_the_order_of_their_waits() {
    model(|| {
        let (mut lanes, transport) = lanes();
        let cell = Cell::default();
        three_operations(&mut lanes, &cell).unwrap();
        assert_eq!(cell.get(), 3);
        // The thread sleeps, or is about to: the next run finds it.
        cell.set(10);
        three_operations(&mut lanes, &cell).unwrap();
        assert_eq!(cell.get(), 13);
        drop(lanes);
        assert!(transport.0.lock().unwrap().is_empty());
    });
}

#[test]
fn a_wait_for_a_later_operation_outlasts_the_earlier_ones() {
    model(|| {
        let (mut lanes, _) = lanes();
        let cell = Cell::default();
        let mut other = |progress: &Progress| {
            for op in 0..3 {
                cell.set(cell.get() + 1);
                progress.advance(Communication, op + 1, None);
            }
            Ok(())
        };
        lanes
            .run(
                |progress| {
                    assert!(progress.wait_for(Compute, 2));
                    assert_eq!(cell.get(), 3);
                    Ok(())
                },
                Some(&mut other as &mut Task<'_>),
            )
            .unwrap();
    });
}

#[test]
fn an_error_of_the_communication_lane_ends_the_wait_of_the_other() {
    model(|| {
        let (mut lanes, transport) = lanes();
        let cell = Cell::default();
        let mut other = |progress: &Progress| {
            assert!(progress.wait_for(Communication, 0));
            cell.set(7);
            Err(error(1))
        };
        let result = lanes.run(
            |progress| {
                progress.advance(Compute, 1, None);
                // Operation 1 of the other lane is never done.
                assert!(!progress.wait_for(Compute, 1));
                Ok(())
            },
            Some(&mut other as &mut Task<'_>),
        );
        assert_eq!(result, Err(error(1)));
        assert_eq!(*transport.0.lock().unwrap(), [Cause::Failed]);
        cell.set(0);
        three_operations(&mut lanes, &cell).unwrap();
    });
}

#[test]
fn an_error_of_the_compute_lane_ends_the_wait_of_the_other() {
    model(|| {
        let (mut lanes, transport) = lanes();
        let cell = Cell::default();
        let mut other = |progress: &Progress| {
            assert!(!progress.wait_for(Communication, 0));
            // The memory of the run is still the lane's: `run` has not returned.
            cell.set(7);
            Ok(())
        };
        let result = lanes.run(|_| Err(error(2)), Some(&mut other as &mut Task<'_>));
        assert_eq!(result, Err(error(2)));
        cell.set(0);
        assert_eq!(*transport.0.lock().unwrap(), [Cause::Failed]);
        three_operations(&mut lanes, &cell).unwrap();
    });
}

#[test]
fn of_two_errors_the_first_is_returned() {
    model(|| {
        let (mut lanes, transport) = lanes();
        let mut other = |progress: &Progress| {
            progress.wait_for(Communication, 0);
            Err(error(4))
        };
        let result = lanes.run(
            |progress| {
                progress.advance(Compute, 1, None);
                // Fails because the other lane did.
                if progress.wait_for(Compute, 1) { Ok(()) } else { Err(error(5)) }
            },
            Some(&mut other as &mut Task<'_>),
        );
        assert_eq!(result, Err(error(4)));
        assert_eq!(transport.0.lock().unwrap().len(), 2);
    });
}

/// Unwinds without a message: a model does it thousands of times.
fn unwind(what: &'static str) -> Result<()> {
    resume_unwind(Box::new(what))
}

fn text(panic: &(dyn Any + Send)) -> &'static str {
    panic.downcast_ref::<&'static str>().expect("what was thrown")
}

#[test]
fn a_panic_of_the_communication_lane_goes_on_in_the_caller() {
    model(|| {
        let (mut lanes, transport) = lanes();
        let cell = Cell::default();
        let mut other = |progress: &Progress| {
            assert!(progress.wait_for(Communication, 0));
            cell.set(7);
            unwind("communication")
        };
        let run = || {
            lanes.run(
                |progress| {
                    progress.advance(Compute, 1, None);
                    assert!(!progress.wait_for(Compute, 1));
                    Ok(())
                },
                Some(&mut other as &mut Task<'_>),
            )
        };
        let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        assert_eq!(text(&*panic), "communication");
        assert_eq!(*transport.0.lock().unwrap(), [Cause::Panicked]);
        cell.set(0);
        three_operations(&mut lanes, &cell).unwrap();
    });
}

#[test]
fn a_panic_of_the_compute_lane_waits_for_the_other() {
    model(|| {
        let (mut lanes, transport) = lanes();
        let cell = Cell::default();
        let mut other = |progress: &Progress| {
            assert!(!progress.wait_for(Communication, 0));
            cell.set(7);
            Ok(())
        };
        let run = || lanes.run(|_| unwind("compute"), Some(&mut other as &mut Task<'_>));
        let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        assert_eq!(text(&*panic), "compute");
        cell.set(0);
        assert_eq!(*transport.0.lock().unwrap(), [Cause::Panicked]);
        three_operations(&mut lanes, &cell).unwrap();
    });
}

#[test]
fn a_thread_without_a_run_ends() {
    model(|| {
        let (mut lanes, _) = lanes();
        lanes.ensure_thread().unwrap();
    });
}

#[test]
fn a_run_without_exchanges_waits_for_nobody() {
    model(|| {
        let (mut lanes, _) = lanes();
        lanes
            .run(
                |progress| {
                    assert!(progress.wait_for(Compute, 0));
                    Ok(())
                },
                None,
            )
            .unwrap();
    });
}
