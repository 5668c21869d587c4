// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where the scheduler metadata of a call is written: into a ring that is uploaded with the call, or into the metadata
//! of a recorded run.

use super::base_addresses::{BaseOffset, BaseShapes};
use super::params::Work;
use crate::error::Result;
use alloc::vec::Vec;
use bytemuck::Pod;

/// Parts begin at multiples of this; so do arrays inside them.
pub(super) const ALIGN: usize = 16;

/// `bytes` rounded up to a multiple of what arrays are aligned to.
pub(super) const fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}

/// The kind of the addresses of a call's tensors.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant, reason = "it lives on the stack, one for each call that is recorded")]
pub(crate) enum AddressSpace {
    /// Memory that the driver has allocated.
    Memory,
    /// Parts of bases, whose addresses a run will bring.
    Bases(BaseShapes),
}

impl AddressSpace {
    /// Where an address is.
    pub(crate) fn of(&self, address: u64) -> BaseOffset {
        match self {
            Self::Memory => BaseOffset { base: 0, row: address as i64, first_head: 0 },
            Self::Bases(shapes) => shapes.locate(address),
        }
    }
}

/// Where the metadata of a call is written, and the kind of its tensors' addresses.
pub(crate) trait MetadataBuffer {
    /// The address of a word that is zero on the device when the launch of the next writer begins, and that this launch
    /// must leave at zero: nothing clears it between launches. The context that launches is current.
    fn counter(&mut self) -> Result<u64>;

    /// A writer of at most `bytes` bytes, and vectors to sort in.
    fn begin(&mut self, bytes: usize) -> Result<(Writer<'_>, &mut SortBuffers)>;

    /// The kind of the tensors' addresses.
    fn address_space(&self) -> AddressSpace;

    /// Records a tensor whose rows must begin at multiples of 16 bytes when the call is run.
    fn must_align(&mut self, address: u64);
}

/// Vectors that metadata is sorted in.
#[derive(Debug, Default)]
pub(crate) struct SortBuffers {
    /// Tiles while they are sorted.
    pub(super) tiles: Vec<(u64, Work)>,
    /// Tiles that several heads share, while they are sorted.
    pub(super) shared_tiles: Vec<(u64, Work)>,
    /// Runs of keys while they are joined into components: another run of the component, and the least cost so far.
    pub runs: Vec<(u32, u64)>,
}

/// The metadata of a call: its first byte, its size, and the size of the words behind it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Part {
    pub begin: usize,
    pub filled: usize,
    pub words: usize,
}

/// Hands out arrays of one part of a ring or of a plan's metadata, and words that are zero when the launch begins.
#[derive(Debug)]
pub(crate) struct Writer<'a> {
    rest: &'a mut [u8],
    begin: usize,
    /// The device's address of the part.
    device: u64,
    /// The device's address of the words; none when they lie behind the arrays.
    words_at: Option<u64>,
    filled: usize,
    words: usize,
}

impl<'a> Writer<'a> {
    /// A writer of arrays into `memory`, which is, or will be, at `device`, with words at `words_at`, or behind the
    /// arrays.
    pub(crate) fn new(memory: &'a mut [u8], begin: usize, device: u64, words_at: Option<u64>) -> Self {
        Self { rest: memory, begin, device, words_at, filled: 0, words: 0 }
    }

    /// An array of `n`, and its address on the device.
    ///
    /// # Panics
    /// When the part is smaller than what [`MetadataBuffer::begin`] was told; that would be a defect of the backend.
    pub(crate) fn array<T: Pod>(&mut self, n: usize) -> (&'a mut [T], u64) {
        assert_eq!(self.words, 0, "arrays come before words");
        let bytes = n * size_of::<T>();
        let (array, rest) = core::mem::take(&mut self.rest).split_at_mut(padded(bytes));
        let at = self.device + self.filled as u64;
        self.rest = rest;
        self.filled += padded(bytes);
        (bytemuck::cast_slice_mut(&mut array[..bytes]), at)
    }

    /// The address of `n` words that are zero on the device when the launch begins. They come after all arrays.
    ///
    /// # Panics
    /// As [`Writer::array`].
    pub(crate) fn counters(&mut self, n: usize) -> u64 {
        let at = self.words_at.unwrap_or(self.device + self.filled as u64) + self.words as u64;
        self.words += padded(n * 4);
        assert!(self.words <= self.rest.len(), "the part holds {} bytes more, not {}", self.rest.len(), self.words);
        at
    }

    /// The written words.
    pub(crate) fn part(&self) -> Part {
        Part { begin: self.begin, filled: self.filled, words: self.words }
    }
}
