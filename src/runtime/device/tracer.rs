// SPDX-License-Identifier: MIT OR Apache-2.0
//! The trace of a rank on a device, from events with timing that a run records around its operations.
//!
//! Events are made when the recording begins ([`Tracer::new`]), a pair for each operation that is to be recorded. A run
//! that records puts one pair around each of its operations on the stream of its lane, and does nothing else that other
//! runs do not do: no wait, no query. The times are read when the trace is taken ([`Tracer::take`]), of operations that
//! are over by then.
//!
//! # Which clock
//! The driver returns the milliseconds between two events of one device. One event, the base, is aligned with the host
//! clock: while the stream is idle it is recorded and waited for a few times, and the middle of the fastest of these
//! round trips is taken as its time. The error is at most half of that round trip; [`Tracer::accuracy_ns`] returns it.
//! Clocks drift, and the driver returns times as f32, whose rounding grows with the time since the base (a microsecond
//! from 8 seconds on), so the base is aligned again whenever a trace was taken completely. Durations are measured
//! between the two events of an operation and do not depend on the base.

use std::{sync::Arc, time::Instant, vec::Vec};

use crate::{
    call::RawStream,
    device::driver::{Context, CudaEvent},
    error::Result,
    report::trace,
    schedule::{Lane, Op},
};

/// Measurements of the base; the fastest counts.
const TRIES: usize = 8;

/// An operation as a trace names it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named {
    lane: Lane,
    name: &'static str,
    phase: &'static str,
    step: u32,
    bytes: u64,
}

impl Named {
    pub(super) fn new(op: &Op, bytes: u64) -> Self {
        Self { lane: op.lane, name: op.kind.name(), phase: op.phase, step: op.step, bytes }
    }
}

/// Around one operation.
struct EventPair {
    start: CudaEvent,
    end: CudaEvent,
}

/// Pairs of events with timing, and the host time of one of them.
pub(super) struct Tracer {
    rank: usize,
    epoch: Instant,
    base: CudaEvent,
    /// An event that may become the base.
    other: CudaEvent,
    base_ns: u64,
    accuracy_ns: u64,
    free: Vec<EventPair>,
    /// Recorded operations whose times were not read yet, in the order of the runs.
    recorded: Vec<(Named, EventPair)>,
    /// The operation that is being enqueued.
    open: Option<(Named, EventPair)>,
}

impl Tracer {
    /// Makes the events for `capacity` operations of a rank. Its stream `idle` has no work. The host waits for the
    /// base.
    pub(super) fn new(
        context: &Arc<Context>,
        rank: usize,
        epoch: Instant,
        capacity: usize,
        idle: RawStream,
    ) -> Result<Self> {
        let timed = || CudaEvent::timed(context);
        let pair = || Ok(EventPair { start: timed()?, end: timed()? });
        let mut made = Self {
            rank,
            epoch,
            base: timed()?,
            other: timed()?,
            base_ns: 0,
            accuracy_ns: 0,
            free: (0..capacity).map(|_| pair()).collect::<Result<_>>()?,
            recorded: Vec::with_capacity(capacity),
            open: None,
        };
        made.tie(context, idle)?;
        Ok(made)
    }

    /// Aligns the base with the clock of the host, on an idle stream.
    fn tie(&mut self, context: &Context, idle: RawStream) -> Result<()> {
        let mut shortest = None;
        for _ in 0..TRIES {
            let before = self.epoch.elapsed();
            {
                let _entered = context.enter()?;
                self.other.record(idle)?;
            }
            self.other.wait()?;
            let after = self.epoch.elapsed();
            let round = after - before;
            if shortest.is_none_or(|s| round < s) {
                shortest = Some(round);
                core::mem::swap(&mut self.base, &mut self.other);
                self.base_ns = ((before + round / 2).as_nanos()) as u64;
                self.accuracy_ns = (round / 2).as_nanos() as u64;
            }
        }
        Ok(())
    }

    /// The largest error of times on the clock of the host, without the driver's resolution of half a microsecond.
    pub(super) fn accuracy_ns(&self) -> u64 {
        self.accuracy_ns
    }

    /// Records the start of an operation on the stream of its lane. The context is current. Without room it is left
    /// out.
    pub(super) fn begin(&mut self, op: Named, stream: RawStream) -> Result<()> {
        self.discard();
        let Some(pair) = self.free.pop() else { return Ok(()) };
        let recorded = pair.start.record(stream);
        self.open = Some((op, pair));
        recorded
    }

    /// Records the end of the operation that began last.
    pub(super) fn end(&mut self, stream: RawStream) -> Result<()> {
        let Some((op, pair)) = self.open.take() else { return Ok(()) };
        let recorded = pair.end.record(stream);
        self.recorded.push((op, pair));
        recorded
    }

    /// Forgets an operation that began in a run which failed before its end.
    fn discard(&mut self) {
        self.free.extend(self.open.take().map(|(_, pair)| pair));
    }

    /// Takes the recorded operations that are complete. A later call takes the rest, also operations of which a failed
    /// device reports no time. Never waits for a run: the base is measured again only if all runs are complete (`idle`:
    /// a stream of the transport).
    pub(super) fn take(&mut self, context: &Context, idle: Option<RawStream>) -> Vec<trace::Event> {
        let mut list = Vec::with_capacity(self.recorded.len());
        let mut later = Vec::with_capacity(self.recorded.capacity());
        for (op, pair) in self.recorded.drain(..) {
            let times = (pair.start.ns_since(&self.base), pair.end.ns_since(&pair.start));
            let (Ok(Some(start)), Ok(Some(lasted))) = times else {
                later.push((op, pair));
                continue;
            };
            let start_ns = self.base_ns.saturating_add_signed(start);
            let end_ns = start_ns.saturating_add_signed(lasted);
            let Named { lane, name, phase, step, bytes } = op;
            list.push(trace::Event { rank: self.rank, lane, name, phase, step, start_ns, end_ns, bytes });
            self.free.push(pair);
        }
        self.recorded = later;
        if let Some(stream) = idle.filter(|_| self.recorded.is_empty()) {
            // If the alignment fails, the old base stays; `Rank::poll` reports the device's error.
            let _ = self.tie(context, stream);
        }
        list
    }
}
