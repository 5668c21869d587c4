// SPDX-License-Identifier: MIT OR Apache-2.0
//! A handle for other threads: to abort a rank, and to ask whether it failed.

use std::sync::{Arc, Weak};

use super::failure::FirstFailure;
use crate::{
    error::{Cause, Result},
    transport::Transport,
};

/// Ends a run from another thread. It does not keep its rank alive: once the rank is dropped, [`AbortHandle::abort`]
/// does nothing and [`AbortHandle::poll`] returns no error.
#[derive(Clone)]
pub struct AbortHandle {
    transport: Weak<dyn Transport>,
    failure: FirstFailure,
}

impl AbortHandle {
    pub(super) fn new(transport: &Arc<dyn Transport>, failure: &FirstFailure) -> Self {
        Self { transport: Arc::downgrade(transport), failure: failure.clone() }
    }

    /// Ends the run on every rank; each gets an error that names the rank that aborted.
    pub fn abort(&self) {
        if let Some(transport) = self.transport.upgrade() {
            self.failure.ended(transport.rank(), Cause::Aborted);
            transport.abort(Cause::Aborted);
        }
    }

    /// As [`Rank::poll`](crate::Rank::poll).
    pub fn poll(&self) -> Result<()> {
        self.transport.upgrade().map_or(Ok(()), |transport| self.failure.poll(&*transport))
    }
}

impl core::fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let rank = self.transport.upgrade().map(|transport| transport.rank());
        f.debug_struct("AbortHandle").field("rank", &rank).finish_non_exhaustive()
    }
}
