// SPDX-License-Identifier: MIT OR Apache-2.0
//! The trace of a group: what all ranks recorded, on rank 0's clock.
//!
//! Ranks that are threads can share one `epoch` and join their records. Processes have different clocks, and may be on
//! different machines, so the clocks are aligned over the ranks' transport when the trace is gathered
//! ([`transport::gather`](crate::transport::gather)).

use std::{
    format,
    time::{Duration, Instant},
    vec::Vec,
};

use super::{collective, rank::Rank};
use crate::{
    error::{Error, Result},
    report::{packed, trace::Event},
    transport::gather::gather,
};

/// The number that ranks compare: "trace", and the version of the protocol.
const GATHER: [u64; 2] = [u64::from_le_bytes(*b"trace\0\0\0"), 1];

/// The largest number of operations that a rank records before they are taken. Each has memory, and on a device two
/// events, from the start.
const MAX_RECORDED: usize = 1 << 24;

impl Rank {
    /// The record of what this rank's runs do.
    pub fn trace(&mut self) -> RankTrace<'_> {
        RankTrace { rank: self }
    }
}

/// What a rank records of its runs: [`Rank::trace`].
#[derive(Debug)]
pub struct RankTrace<'a> {
    rank: &'a mut Rank,
}

impl RankTrace<'_> {
    /// Starts to record the operations of each lane, at most `capacity` until [`RankTrace::events`] has taken them,
    /// then as many again; 0 stops. Times count from `epoch`. Ranks that are threads of one process should share one
    /// `epoch`; [`RankTrace::gather`] aligns the clocks of several processes.
    ///
    /// On a device each operation is timed by two CUDA events on the stream of its lane, which are created by this
    /// call; the time of an exchange includes the wait for its peers. The device's clock is aligned with `epoch` by
    /// this call, after a wait for the work that the rank enqueued, and again when [`RankTrace::events`] has taken
    /// everything: [`RankTrace::accuracy`] returns the error. Durations have the resolution of the driver's events,
    /// half a microsecond. A recorded run enqueues two more events for each operation and does not wait for the device.
    /// It cannot be captured into a graph, and replays of graphs are not recorded.
    ///
    /// # Errors
    /// A capacity above 2^24; an epoch in the future; the driver's.
    pub fn record(&mut self, epoch: Instant, capacity: usize) -> Result<()> {
        if capacity > MAX_RECORDED {
            return Err(Error::invalid("capacity", capacity, format!("at most {MAX_RECORDED} operations")));
        }
        if let Some(ahead) = epoch.checked_duration_since(Instant::now()).filter(|a| capacity > 0 && !a.is_zero()) {
            let found = format!("{ahead:?} from now");
            return Err(Error::invalid("epoch", found, "a moment that has passed, since times count from it"));
        }
        self.rank.backend.record(epoch, capacity)
    }

    /// Takes what was recorded since the last call, ordered by the end of the operations within each lane.
    ///
    /// On a device it takes only operations that have finished, and does not wait; a later call returns the others.
    /// Call [`Rank::synchronize`] first to get all of them. If the device failed, nothing is returned, and
    /// [`Rank::poll`] returns the reason.
    pub fn events(&mut self) -> Vec<Event> {
        self.rank.backend.events()
    }

    /// The possible error of the recorded times on the clock of `epoch`: half the shortest time in which the host
    /// recorded an event on the idle stream and saw it complete. In addition, CUDA events have a resolution of half a
    /// microsecond, and the driver returns f32 milliseconds, which are rounded to about a microsecond from 8 s after
    /// [`RankTrace::record`], or after the last [`RankTrace::events`] that took everything. 0 on the CPU, and while
    /// nothing is recorded.
    pub fn accuracy(&self) -> Duration {
        self.rank.backend.trace_accuracy()
    }

    /// On rank 0: what all ranks recorded and was not yet taken, ordered by start, with times relative to rank 0's
    /// `epoch`. On other ranks: nothing. All ranks call it, between runs, each with the `epoch` that it gave to
    /// [`RankTrace::record`].
    ///
    /// The error of the aligned clocks is at most half of the fastest of 16 round trips between rank 0 and the rank. On
    /// a device the call waits for the work that this rank enqueued. Ranks are asked one after another, some
    /// milliseconds each, so deadlines must be longer than the sum.
    ///
    /// ```
    /// use cpattn::{Rank, report::{timeline::timeline_svg, trace::chrome_trace}, transport::local};
    /// use std::time::{Duration, Instant};
    ///
    /// let epoch = Instant::now();
    /// for end in local::group(1, Duration::from_secs(10))? {
    ///     let mut rank = Rank::new(end);
    ///     rank.trace().record(epoch, 1 << 16)?;
    ///     // Runs.
    ///     let events = rank.trace().gather(epoch)?;
    ///     if rank.rank() == 0 {
    ///         let (_picture, _trace) = (timeline_svg(&events), chrome_trace(&events)); // to be written to files
    ///     }
    /// }
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Disagreement`](crate::Error::Disagreement) if another rank makes a different call, after which the
    /// group stays usable; a peer that failed; on a device, a run of this rank that is being captured.
    pub fn gather(&mut self, epoch: Instant) -> Result<Vec<Event>> {
        self.rank.synchronize()?;
        let mine = self.events();
        self.gather_events(epoch, &mine)
    }

    /// As [`RankTrace::gather`], for events that were already taken or are the caller's own. Their `rank` is set to
    /// this rank.
    ///
    /// # Errors
    /// As [`RankTrace::gather`].
    pub fn gather_events(&mut self, epoch: Instant, mine: &[Event]) -> Result<Vec<Event>> {
        let (carrier, failure) = (self.rank.backend.between_runs()?, self.rank.backend.failure());
        let end = carrier.end();
        let (group, number) = (0..end.world(), collective::number(&GATHER));
        let now = || epoch.elapsed().as_nanos() as u64;
        let what = || "the gathering of a trace".into();
        collective::agreed(end, failure, group, number, what, || {
            let parts = gather(carrier, &now, &packed::pack(mine))?;
            let mut all = Vec::new();
            for (rank, part) in parts.iter().enumerate() {
                all.extend(packed::unpack(&part.bytes, rank, part.offset_ns)?);
            }
            all.sort_by_key(|event| event.start_ns);
            Ok(all)
        })
    }
}
