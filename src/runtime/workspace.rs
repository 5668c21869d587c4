// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory that schedules work in: the rank's own, grown when a larger plan comes, or lent by the caller.

use core::ptr::NonNull;
use std::vec::Vec;

use crate::{
    error::{Error, Result},
    schedule::ALIGNMENT,
};

/// 256 bytes at a multiple of 256.
#[derive(Clone, Copy)]
#[repr(C, align(256))]
struct Unit([u8; ALIGNMENT as usize]);

const _: () = assert!(size_of::<Unit>() as u64 == ALIGNMENT && align_of::<Unit>() as u64 == ALIGNMENT);

/// See the module.
#[derive(Default)]
pub(super) struct Workspace {
    own: Vec<Unit>,
    lent: Option<(*mut u8, usize)>,
}

// SAFETY: lent memory is the rank's alone while it is lent (the promise of `Rank::lend_workspace`), so it may move
// between threads with the rank.
unsafe impl Send for Workspace {}

impl Workspace {
    pub(super) fn lent(ptr: *mut u8, bytes: usize) -> Result<Self> {
        if !(ptr as usize).is_multiple_of(ALIGNMENT as usize) {
            return Err(Error::invalid(
                "workspace",
                std::format!("address {ptr:p}"),
                std::format!("a multiple of {ALIGNMENT} bytes"),
            ));
        }
        Ok(Self { own: Vec::new(), lent: Some((ptr, bytes)) })
    }

    /// Where memory of the caller's lies, if there is any.
    pub(super) fn lent_at(&self) -> Option<*mut u8> {
        self.lent.filter(|&(_, bytes)| bytes > 0).map(|(ptr, _)| ptr)
    }

    /// Makes sure that `bytes` are there.
    pub(super) fn reserve(&mut self, bytes: u64) -> Result<()> {
        match self.lent {
            Some((_, have)) if (have as u64) < bytes => Err(Error::invalid(
                "workspace",
                std::format!("{have} bytes"),
                std::format!("at least {bytes} bytes for this plan"),
            )
            .hint(
                "ask every plan, in each direction and for each all-to-all, for its workspace, and lend the largest",
            )),
            Some(_) => Ok(()),
            None => {
                let units = usize::try_from(bytes.div_ceil(ALIGNMENT)).unwrap_or(usize::MAX);
                if self.own.len() < units {
                    self.own = Vec::new();
                    self.own.try_reserve_exact(units).map_err(|_| {
                        Error::invalid("workspace", std::format!("{bytes} bytes"), "what this machine can allocate")
                            .hint("more ranks, or passes, divide what is in flight")
                    })?;
                    self.own.resize(units, Unit([0; ALIGNMENT as usize]));
                }
                Ok(())
            }
        }
    }

    pub(super) fn ptr(&mut self) -> *mut u8 {
        match self.lent {
            // An address of nothing is the caller's to choose, and may be NULL; slices of nothing need another.
            Some((_, 0)) => NonNull::<Unit>::dangling().as_ptr().cast(),
            Some((ptr, _)) => ptr,
            None => self.own.as_mut_ptr().cast(),
        }
    }
}
