// SPDX-License-Identifier: MIT OR Apache-2.0
//! A ring on loan from its device: see [`spare_rings`](super::spare_rings).

use super::{Cuda, staging::Staging};
use crate::error::Result;
use alloc::sync::Arc;
use core::ops::{Deref, DerefMut};

/// A ring that goes back to its device when it is dropped, after a wait for the launches that use it.
#[derive(Debug)]
pub(super) struct LentRing {
    /// `None` in `drop` alone.
    ring: Option<Staging>,
    cuda: Arc<Cuda>,
}

impl LentRing {
    /// A spare ring of this size, or a new one.
    pub fn new(cuda: &Arc<Cuda>, bytes: usize, launches: usize) -> Result<Self> {
        let ring = match cuda.rings.take(bytes, launches) {
            Some(ring) => ring,
            None => cuda.staging(bytes, launches)?,
        };
        Ok(Self { ring: Some(ring), cuda: Arc::clone(cuda) })
    }
}

impl Deref for LentRing {
    type Target = Staging;

    fn deref(&self) -> &Staging {
        self.ring.as_ref().expect("taken by drop alone")
    }
}

impl DerefMut for LentRing {
    fn deref_mut(&mut self) -> &mut Staging {
        self.ring.as_mut().expect("taken by drop alone")
    }
}

impl Drop for LentRing {
    fn drop(&mut self) {
        // A failure means that the context is gone, and the ring's memory with it.
        if let Some(mut ring) = self.ring.take()
            && ring.drain().is_ok()
        {
            self.cuda.rings.put(ring);
        }
    }
}
