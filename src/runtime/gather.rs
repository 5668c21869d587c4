// SPDX-License-Identifier: MIT OR Apache-2.0
//! The trace of a group: what all ranks recorded, on rank 0's clock.
//!
//! Ranks that are threads can share one `epoch` and join their records. Processes have different clocks, and may be on
//! different machines, so the clocks are aligned over the ranks' transport when the trace is gathered
//! ([`transport::gather`](crate::transport::gather)).

use std::{time::Instant, vec::Vec};

use super::{collective, rank::Rank};
use crate::{
    error::Result,
    report::{packed, trace::Event},
    transport::gather::gather,
};

/// The number that ranks compare: "trace", and the version of the protocol.
const GATHER: [u64; 2] = [u64::from_le_bytes(*b"trace\0\0\0"), 1];

impl Rank {
    /// On rank 0: what all ranks recorded and was not yet taken, ordered by start, with times relative to rank 0's
    /// `epoch`. On other ranks: nothing. All ranks call it, between runs, each with the `epoch` that it gave to
    /// [`Rank::record`].
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
    ///     rank.record(epoch, 1 << 16)?;
    ///     // Runs.
    ///     let events = rank.gather_trace(epoch)?;
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
    pub fn gather_trace(&mut self, epoch: Instant) -> Result<Vec<Event>> {
        self.synchronize()?;
        let mine = self.events();
        self.gather_events(epoch, &mine)
    }

    /// As [`Rank::gather_trace`], for events that were already taken or are the caller's own. Their `rank` is set to
    /// this rank.
    ///
    /// # Errors
    /// As [`Rank::gather_trace`].
    pub fn gather_events(&mut self, epoch: Instant, mine: &[Event]) -> Result<Vec<Event>> {
        let (carrier, failure) = (self.backend.between_runs()?, self.backend.failure());
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
