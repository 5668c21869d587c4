// SPDX-License-Identifier: MIT OR Apache-2.0
//! The workspace: the rank's own memory, which grows when a larger plan needs it, or memory lent by the caller.
//!
//! The same for host memory and a device; `M` is the type of the rank's own memory. Memory that is no longer needed is
//! returned to the rank, because enqueued work on a device may still use it.

use core::ptr::NonNull;
use std::{format, vec::Vec};

use super::bind;
use crate::{
    call::RawTensor,
    error::{Error, Result},
    schedule::ALIGNMENT,
};

/// Memory of a rank's own.
pub(super) trait OwnMemory {
    /// Its first byte, at a multiple of [`ALIGNMENT`].
    fn ptr(&self) -> *mut u8;
    /// How many bytes there are.
    fn bytes(&self) -> usize;
}

/// Memory that schedules work in, owned (`M`) or lent.
pub(super) struct Workspace<M> {
    own: Option<M>,
    lent: Option<(*mut u8, usize)>,
}

// SAFETY: lent memory is the rank's alone while it is lent (the promise of `RankWorkspace::lend`), so it may move
// between threads with the rank; memory of the rank's own is `Send` itself.
unsafe impl<M: Send> Send for Workspace<M> {}

impl<M> Default for Workspace<M> {
    fn default() -> Self {
        Self { own: None, lent: None }
    }
}

impl<M: OwnMemory> Workspace<M> {
    /// Refuses memory that cannot be lent, on the host or on a device.
    pub(super) fn accept(ptr: *mut u8) -> Result<()> {
        if (ptr as usize).is_multiple_of(ALIGNMENT as usize) {
            return Ok(());
        }
        Err(Error::invalid("workspace", format!("address {ptr:p}"), format!("a multiple of {ALIGNMENT} bytes")))
    }

    /// Switches to memory that was [accepted](Self::accept). Returns the rank's own memory, if it had any.
    pub(super) fn lend(&mut self, ptr: *mut u8, bytes: usize) -> Option<M> {
        self.lent = Some((ptr, bytes));
        self.own.take()
    }

    /// Whether memory is lent.
    pub(super) fn is_lent(&self) -> bool {
        self.lent.is_some()
    }

    /// The bytes that are lent, if the workspace is.
    pub(super) fn lent_bytes(&self) -> Option<u64> {
        self.lent.map(|(_, bytes)| bytes as u64)
    }

    /// Ends the lending.
    pub(super) fn take_back(&mut self) {
        self.lent = None;
    }

    /// Whether the rank's own memory has to grow for a run.
    pub(super) fn is_short(&self, needed: u64) -> bool {
        self.lent.is_none() && needed > self.own.as_ref().map_or(0, |own| own.bytes() as u64)
    }

    /// Returns the rank's own memory, which is then replaced by a larger one.
    pub(super) fn take_own(&mut self) -> Option<M> {
        self.own.take()
    }

    /// Works in new memory of the rank's own.
    pub(super) fn set_own(&mut self, own: M) {
        self.own = Some(own);
    }

    /// The address of the workspace.
    ///
    /// # Errors
    /// Lent memory that is too small. (Memory of the rank's own was made large enough.)
    pub(super) fn at(&self, needed: u64) -> Result<*mut u8> {
        debug_assert!(!self.is_short(needed));
        match self.lent {
            Some((_, bytes)) if (bytes as u64) < needed => {
                let (found, expected) = (format!("{bytes} bytes"), format!("at least {needed} bytes for this plan"));
                Err(Error::invalid("workspace", found, expected)
                    .hint("ask every plan, in each direction and for each all-to-all, for its workspace, and lend the largest"))
            }
            Some((ptr, bytes)) if bytes > 0 => Ok(ptr),
            // For 0 bytes the caller may give any address, also NULL; empty slices need a non-null one.
            Some(_) | None => {
                Ok(self.own.as_ref().map_or(NonNull::<AlignedUnit>::dangling().as_ptr().cast(), OwnMemory::ptr))
            }
        }
    }

    /// Refuses tensors that lie in the part of lent memory that a run uses: the run would overwrite them.
    pub(super) fn check_disjoint(
        &self,
        needed: u64,
        tensors: impl IntoIterator<Item = (&'static str, RawTensor)>,
    ) -> Result<()> {
        match self.lent {
            Some((ptr, bytes)) if bytes > 0 => bind::check_disjoint_from(ptr, needed, tensors),
            _ => Ok(()),
        }
    }
}

/// 256 bytes at a multiple of 256.
#[derive(Clone, Copy)]
#[repr(C, align(256))]
struct AlignedUnit([u8; ALIGNMENT as usize]);

const _: () = assert!(size_of::<AlignedUnit>() as u64 == ALIGNMENT && align_of::<AlignedUnit>() as u64 == ALIGNMENT);

/// Host memory of a rank's own.
pub(super) struct HostMemory {
    begin: *mut AlignedUnit,
    units: Vec<AlignedUnit>,
}

// SAFETY: the address is that of the vector's own memory, which moves with it.
unsafe impl Send for HostMemory {}

impl HostMemory {
    /// Allocates `bytes` bytes of zeros.
    ///
    /// # Errors
    /// The machine does not have the memory.
    pub(super) fn new(bytes: u64) -> Result<Self> {
        let count = usize::try_from(bytes.div_ceil(ALIGNMENT)).unwrap_or(usize::MAX);
        let mut units = Vec::new();
        units.try_reserve_exact(count).map_err(|_| {
            Error::invalid("workspace", format!("{bytes} bytes"), "what this machine can allocate")
                .hint("more ranks, or passes, divide what is in flight")
        })?;
        units.resize(count, AlignedUnit([0; ALIGNMENT as usize]));
        Ok(Self { begin: units.as_mut_ptr(), units })
    }
}

impl OwnMemory for HostMemory {
    fn ptr(&self) -> *mut u8 {
        self.begin.cast()
    }

    fn bytes(&self) -> usize {
        self.units.len() * size_of::<AlignedUnit>()
    }
}
