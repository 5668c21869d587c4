// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that a rank refuses while graphs are being captured, so that the capture stays valid.
//!
//! Once a run is captured, the transport's stream is part of the capture until the caller ends it. The driver answers a
//! wait for such a stream, or work that joins it from outside of the capture, with an error, and makes the capture
//! invalid. So the rank checks first and refuses such calls without effect: the caller can still end the capture and
//! launch its graph. Captures without the rank's work do not matter: the driver objects of
//! [`kernel::cuda`](crate::kernel::cuda) wait and allocate in a way that leaves them valid.

use std::format;

use super::DeviceRank;
use crate::{
    call::RawStream,
    error::{Error, Result},
    plan::Plan,
    schedule::Purpose,
};

/// The capture that the stream of a run, and so the rank, is part of.
const CAPTURED: &str = "a stream that is being captured";

impl DeviceRank {
    /// While a run of the rank is being captured, refuses a call that waits for the rank's enqueued work, or resets
    /// state that its runs share.
    pub(super) fn beside_no_capture(&self, call: &'static str) -> Result<()> {
        // SAFETY: a live stream of the transport's (the contract of `DeviceTransport`).
        match unsafe { self.gpu().context().capture_of(self.transport.stream()) }? {
            None => Ok(()),
            Some(_) => Err(Error::unsupported(
                format!("{call} while a run of the rank is being captured"),
                "it waits for the rank's stream, which is part of the capture and has not begun",
                "end the capture before the call",
            )),
        }
    }

    /// The capture that a run on `stream` becomes part of, or `None`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the rank's stream is in a capture and `stream` is in another one or in none; if the
    /// capture has failed; and for the default stream while it takes no work.
    ///
    /// # Safety
    /// `stream` is a live stream of the device.
    pub(super) unsafe fn capture_of_run(&mut self, stream: RawStream) -> Result<Option<u64>> {
        let context = self.transport.device().context();
        // SAFETY: a live stream, as promised.
        let capture = unsafe { context.capture_of(stream) }?;
        if capture == Some(0) {
            return Err(Error::unsupported(
                "a stream whose capture has failed",
                "the driver takes no more of it",
                "end the capture, which gives no graph, and capture again without the call that made it fail",
            ));
        }
        // Only a run can have made the rank's stream part of a capture.
        if self.in_capture {
            // SAFETY: a live stream of the transport's (the contract of `DeviceTransport`).
            let own = unsafe { context.capture_of(self.transport.stream()) }?;
            self.in_capture = own.is_some();
            if own.is_some() && own != capture {
                return Err(Error::unsupported(
                    "a run outside of the capture that an earlier run of the rank is part of",
                    "the runs of a rank come one behind the other, and what is captured has not begun",
                    "end the capture before the call, or have the stream join it by an event",
                ));
            }
        }
        Ok(capture)
    }

    /// Refuses a run that cannot be captured.
    pub(super) fn capturable(&self, plan: &Plan, run: Purpose, over_pages: bool) -> Result<()> {
        let refusal = |limit, hint| Err(Error::unsupported(CAPTURED, limit, hint));
        let (unprepared, prepare) = match run {
            Purpose::Attention(_) if over_pages => (
                "a graph cannot hold what preparing a plan does: the plan is not prepared for k and v in pages",
                "make the same call once before the capture begins",
            ),
            Purpose::Attention(_) => (
                "a graph cannot hold what preparing a plan does: the plan is not prepared in this direction",
                "call prepare before the capture begins",
            ),
            Purpose::Combine(_) | Purpose::AllToAll(_) | Purpose::Scan(_) => (
                "a graph cannot hold what preparing a plan does: this combine or all-to-all is not prepared",
                "make the same call once before the capture begins, or prepare it",
            ),
        };
        if self.tracer.is_some() {
            return refusal(
                "the rank records a trace, and what a replay does leaves no times behind",
                "stop recording before the capture begins: record with a capacity of 0",
            );
        }
        match self.prepared.find(plan, run, over_pages) {
            None => refusal(unprepared, prepare),
            Some(at) if self.workspace.is_short(self.prepared[at].prepared.schedule.workspace) => {
                refusal("the rank has no workspace for the plan yet, and a graph cannot hold its allocation", prepare)
            }
            Some(at) if self.prepared[at].sequence.exchanges() && !self.transport.can_capture() => refusal(
                "the transport's exchanges cannot be captured, and this plan has some",
                "run it outside of the capture, or use a transport that can be captured",
            ),
            Some(_) => Ok(()),
        }
    }
}
