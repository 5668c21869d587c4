// SPDX-License-Identifier: MIT OR Apache-2.0
//! Staging memory on loan from its device: see [`spare_staging`](super::spare_staging).

use super::{Cuda, staging::Staging};
use crate::error::Result;
use alloc::sync::Arc;
use core::ops::{Deref, DerefMut};

/// Staging memory that goes back to its device when it is dropped, after a wait for the launches that use it.
#[derive(Debug)]
pub(super) struct LentStaging {
    /// `None` in `drop` alone.
    staging: Option<Staging>,
    cuda: Arc<Cuda>,
}

impl LentStaging {
    /// Takes spare staging memory of this size, or allocates it.
    pub(super) fn new(cuda: &Arc<Cuda>, bytes: usize, launches: usize) -> Result<Self> {
        let staging = match cuda.spare_staging.take(bytes, launches) {
            Some(staging) => staging,
            None => cuda.staging(bytes, launches)?,
        };
        Ok(Self { staging: Some(staging), cuda: Arc::clone(cuda) })
    }
}

impl Deref for LentStaging {
    type Target = Staging;

    fn deref(&self) -> &Staging {
        self.staging.as_ref().expect("taken by drop alone")
    }
}

impl DerefMut for LentStaging {
    fn deref_mut(&mut self) -> &mut Staging {
        self.staging.as_mut().expect("taken by drop alone")
    }
}

impl Drop for LentStaging {
    fn drop(&mut self) {
        // A failure means that the context is gone, and its memory with it.
        if let Some(mut staging) = self.staging.take()
            && staging.drain().is_ok()
        {
            self.cuda.spare_staging.put(staging);
        }
    }
}
