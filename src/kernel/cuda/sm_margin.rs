// SPDX-License-Identifier: MIT OR Apache-2.0
//! Multiprocessors that attention leaves free for other kernels.
//!
//! The blocks of an attention kernel fill a device, so a communicator's kernels that are launched meanwhile wait until
//! the first of these blocks end. To let the two overlap, attention launches only as many blocks as fit on the
//! remaining multiprocessors. Ranks and scratches of one process share a device, so each that needs a margin holds an
//! [`SmMargin`]; the largest applies, as long as its `SmMargin` lives.

use super::Cuda;
use crate::error::{Error, Result};
use alloc::format;
use alloc::sync::Arc;

/// Multiprocessors that a device leaves free for as long as this lives.
#[derive(Debug)]
pub(crate) struct SmMargin {
    cuda: Arc<Cuda>,
    n: u32,
}

impl SmMargin {
    /// Asks for `n` multiprocessors of a device; for 0 nothing is asked.
    ///
    /// # Errors
    /// `n` is not below the number of multiprocessors that the device has.
    pub(crate) fn new(cuda: &Arc<Cuda>, n: u32) -> Result<Option<Self>> {
        if n == 0 {
            return Ok(None);
        }
        if n >= cuda.multiprocessors() {
            let expected = format!("below the {} multiprocessors of device {}", cuda.multiprocessors(), cuda.ordinal());
            return Err(Error::invalid("multiprocessors", n, expected));
        }
        cuda.margin_requests.add(n);
        Ok(Some(Self { cuda: Arc::clone(cuda), n }))
    }
}

impl Drop for SmMargin {
    fn drop(&mut self) {
        self.cuda.margin_requests.remove(self.n);
    }
}

impl Cuda {
    /// Bounds the blocks of every later attention launch to what fits on all but `n` multiprocessors (at least one is
    /// used), so that communication kernels find room beside them. Blocks then take several tiles each. Ranks and
    /// [`StreamKernels`](super::StreamKernels) may ask for more while they live.
    pub fn set_sm_margin(&self, n: u32) {
        self.margin_requests.set_own(n);
    }

    /// The number of multiprocessors that attention leaves free now: the largest request.
    pub fn sm_margin(&self) -> u32 {
        self.margin_requests.most()
    }
}
