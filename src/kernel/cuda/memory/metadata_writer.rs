// SPDX-License-Identifier: MIT OR Apache-2.0
//! Writes the scheduler metadata of one call: arrays, and behind them words that are zero when the launch begins.
//!
//! Addresses are symbols ([`base_addresses`](crate::kernel::cuda::abi::base_addresses)): where the metadata will be on
//! the device is known when the whole call has been written.

use crate::kernel::cuda::abi::base_addresses::{metadata_symbol, words_symbol};
use crate::kernel::cuda::abi::params::Work;
use alloc::vec::Vec;
use bytemuck::Pod;

/// Arrays begin at multiples of this.
pub(in crate::kernel::cuda) const ALIGN: usize = 16;

/// `bytes` rounded up to a multiple of what arrays are aligned to.
pub(in crate::kernel::cuda) const fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}

/// Vectors that metadata is sorted in.
#[derive(Debug, Default)]
pub(crate) struct SortBuffers {
    /// Tiles while they are sorted.
    pub(in crate::kernel::cuda) tiles: Vec<(u64, Work)>,
    /// Tiles that several heads share, while they are sorted.
    pub(in crate::kernel::cuda) shared_tiles: Vec<(u64, Work)>,
    /// Runs of keys while they are joined into components: another run of the component, and the least cost so far.
    pub runs: Vec<(u32, u64)>,
}

/// The sizes of a call's metadata: bytes of arrays, and bytes of the words that are cleared before its launch.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Part {
    pub filled: usize,
    pub words: usize,
}

/// Hands out the arrays and words of one call.
#[derive(Debug)]
pub(crate) struct Writer<'a> {
    rest: &'a mut [u8],
    /// Where the arrays begin in the metadata.
    begin: usize,
    part: Part,
}

impl<'a> Writer<'a> {
    /// A writer of arrays into `memory`, which begins at byte `begin` of the metadata.
    pub(crate) fn new(memory: &'a mut [u8], begin: usize) -> Self {
        Self { rest: memory, begin, part: Part::default() }
    }

    /// An array of `n`, and the symbol of its address.
    ///
    /// # Panics
    /// When the memory is smaller than the arrays; that would be a defect of the backend.
    pub(crate) fn array<T: Pod>(&mut self, n: usize) -> (&'a mut [T], u64) {
        let bytes = n * size_of::<T>();
        let (array, rest) = core::mem::take(&mut self.rest).split_at_mut(padded(bytes));
        // The memory may hold another call's; metadata that is the same is the same to the last byte.
        array.fill(0);
        let at = metadata_symbol(self.begin + self.part.filled);
        self.rest = rest;
        self.part.filled += padded(bytes);
        (bytemuck::cast_slice_mut(&mut array[..bytes]), at)
    }

    /// The symbol of `n` words that are zero on the device when the launch begins. They come after all arrays.
    ///
    /// # Panics
    /// When the memory is smaller than arrays and words.
    pub(crate) fn counters(&mut self, n: usize) -> u64 {
        let at = words_symbol() + self.part.words as u64;
        self.part.words += padded(n * 4);
        let (room, words) = (self.rest.len(), self.part.words);
        assert!(words <= room, "the part holds {room} bytes more, not {words}");
        at
    }

    /// What was written.
    pub(crate) fn part(&self) -> Part {
        self.part
    }
}
