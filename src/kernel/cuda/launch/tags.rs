// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tags that runs on devices send with their messages, so that ranks with different plans are found without
//! synchronising hosts.
//!
//! A run begins, on the communication stream, with a kernel that increments the group's run count and writes this
//! rank's tag: fingerprint, number of the run, and a word that identifies a tag. After every exchange with receives,
//! and before anything reads the data, another kernel compares the received tags. Both are launches of the plan
//! ([`LaunchRecorder`]), and the count is on the device, so each replay of a graph counts as a run.
//!
//! The first difference is written to memory that the host reads ([`NoteMemory`]). From then on all data that this rank
//! receives is overwritten with NaN at once: results that depend on it are NaN, here and on ranks that it is sent to.

use crate::device::driver::{call, sys};
use crate::device::memory::{DeviceMemory, PinnedMemory};
use crate::error::Result;
use crate::kernel::cuda::Cuda;
use crate::kernel::cuda::abi::base_addresses::{Meaning, meaning};
use crate::kernel::cuda::abi::params::{
    BASES, Tensor,
    tags::{Arrived, ArrivedRange, BeginRun, Note, Tag},
};
use crate::kernel::cuda::launch::recorded::LaunchRecorder;
use crate::kernel::cuda::launch::{Launch, Launches};
use crate::kernel::cuda::memory::metadata_writer::{Part, padded};
use alloc::vec;
use core::ops::Range;
use core::ptr::without_provenance_mut;
use core::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a tag.
pub(crate) const TAG_BYTES: usize = size_of::<Tag>();
const THREADS: u32 = 256;
/// Blocks of the kernel after an exchange: it has work only if ranks differ.
const MAX_BLOCKS: u64 = 8;
/// Up to this many bytes one block is enough.
const BLOCK_BYTES: u64 = 1 << 16;

/// How many runs a group has begun, counted on the device.
#[derive(Debug)]
pub(crate) struct RunCount(DeviceMemory);

impl RunCount {
    /// No run counted yet.
    pub(crate) fn new(cuda: &Cuda) -> Result<Self> {
        DeviceMemory::zeros(cuda.context(), size_of::<u64>()).map(Self)
    }
}

/// Where a rank's device notes that a peer runs something else.
#[derive(Debug)]
pub(crate) struct NoteMemory {
    /// A [`Note`], which the host reads after `written` alone.
    host: PinnedMemory,
    device: u64,
    /// Not 0 once something was noted.
    disagreed: DeviceMemory,
}

/// The first difference that a device found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Noted {
    /// Which of the run's tags, from 1.
    pub tag: usize,
    pub ours: u64,
    pub our_run: u64,
    pub theirs: u64,
    pub their_run: u64,
    /// Whether the bytes that arrived are a tag: after a failed exchange they are not.
    pub is_tag: bool,
}

impl NoteMemory {
    /// Nothing noted.
    pub(crate) fn new(cuda: &Cuda) -> Result<Self> {
        let context = cuda.context();
        let disagreed = DeviceMemory::zeros(context, size_of::<u64>())?;
        let host = PinnedMemory::new(context, size_of::<Note>(), sys::HOST_PORTABLE_AND_MAPPED)?;
        let _entered = context.enter()?;
        let mut device = 0;
        // SAFETY: mapped memory of the host, and a pointer to a local.
        unsafe { call!(cuMemHostGetDevicePointer_v2(&raw mut device, host.ptr().cast(), 0)) }?;
        Ok(Self { host, device, disagreed })
    }

    fn note(&self) -> *mut Note {
        self.host.ptr().cast()
    }

    /// The first difference, if there is one. Calls no function of the driver.
    pub(crate) fn read(&self) -> Option<Noted> {
        // SAFETY: the word is aligned, lives as long as `self`, and is only stored to by the device.
        let written = unsafe { AtomicU64::from_ptr(&raw mut (*self.note()).written) };
        if written.load(Ordering::Acquire) == 0 {
            return None;
        }
        // SAFETY: the device has written the rest before that word, and writes nothing any more.
        let note = unsafe { self.note().read_volatile() };
        Some(Noted {
            tag: note.tag as usize,
            ours: note.ours,
            our_run: note.our_run,
            theirs: note.theirs,
            their_run: note.their_run,
            is_tag: note.is_tag != 0,
        })
    }
}

impl LaunchRecorder {
    /// Keeps `count` tags, and returns their symbol.
    pub(crate) fn tags(&mut self, count: usize) -> Result<*mut u8> {
        Ok(without_provenance_mut(self.array(&vec![0; count * TAG_BYTES])? as usize))
    }

    /// The launch that begins a run: it counts in `runs` and sets `count` tags, the rank's own first.
    pub(crate) fn begin_run(
        &self,
        cuda: &Cuda,
        fingerprint: u64,
        (tags, count): (*mut u8, usize),
        runs: &RunCount,
    ) -> Result<Launches> {
        let function = cuda.blocks()?.begin_run;
        let params = BeginRun {
            runs: runs.0.ptr() as usize as u64,
            tags: tags as usize as u64,
            fingerprint,
            tag_count: count as u32,
            unused: 0,
        };
        Ok(Launches::one(Part::default(), Some(Launch::blocks(function, 1, 32, &params))))
    }

    /// The launch after an exchange. It compares the tags with the numbers `compared`. If any rank so far differs,
    /// it overwrites the received data `ranges`, given as symbols of bases and bytes.
    pub(crate) fn arrived(
        &mut self,
        cuda: &Cuda,
        tags: *mut u8,
        compared: Range<usize>,
        ranges: &[(*mut u8, usize)],
        notice: &NoteMemory,
    ) -> Result<Launches> {
        let function = cuda.blocks()?.arrived;
        let offsets: alloc::vec::Vec<_> = ranges.iter().map(|&(symbol, bytes)| (self.locate(symbol), bytes)).collect();
        let (mut writer, _) = self.begin(padded(ranges.len() * size_of::<ArrivedRange>()))?;
        let (list, at) = writer.array::<ArrivedRange>(ranges.len());
        for (out, (place, bytes)) in list.iter_mut().zip(offsets) {
            *out = ArrivedRange { row: place.row, bytes: bytes as u64, first_head: place.first_head, base: place.base };
        }
        let part = writer.part();
        let params = Arrived {
            tags: tags as usize as u64,
            ranges: at,
            disagreed: notice.disagreed.ptr() as usize as u64,
            note: notice.device,
            tags_begin: compared.start as u32,
            tags_end: compared.end as u32,
            range_count: ranges.len() as u32,
            unused: 0,
            bases: [Tensor::default(); BASES],
        };
        let bytes: u64 = ranges.iter().map(|r| r.1 as u64).sum();
        let blocks = bytes.div_ceil(BLOCK_BYTES).clamp(1, MAX_BLOCKS);
        Ok(Launches::one(part, Some(Launch::blocks(function, blocks, THREADS, &params))))
    }
}

/// Whether an address stands for a part of the metadata.
pub(crate) fn is_of_metadata(address: *mut u8) -> bool {
    matches!(meaning(address as usize as u64), Meaning::Metadata(_))
}
