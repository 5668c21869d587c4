// SPDX-License-Identifier: MIT OR Apache-2.0
//! Launches that stay with a plan: made once, their scheduler metadata on the device, run any number of times.
//!
//! A [`LaunchRecorder`] takes the calls of a plan, with symbols for addresses
//! ([`base_addresses`](super::base_addresses)), and makes their launches and metadata. [`LaunchRecorder::keep`] puts
//! all metadata into one block of device memory. A run then only writes the addresses of its bases into the parameters,
//! clears the words that a launch counts in, and launches.
//!
//! All launches that count use the same words, one after the other, since they are on one stream. All forwards for
//! `sm_90a` take their items by one word of the metadata, which every launch leaves at zero. So they, the runs of a
//! plan and the replays of its graphs must run one after the other too.

use super::Cuda;
use super::base_addresses::{BaseAddresses, BaseOffset, BaseShapes, Meaning, meaning, metadata_symbol, words_symbol};
use super::launch::{Launch, Launches};
use super::metadata_buffer::{AddressSpace, MetadataBuffer, SortBuffers, Writer, padded};
use super::params::{Tensor, tags::BeginRun};
use crate::call::{RawStream, RawTensor};
use crate::device::driver::call;
use crate::device::memory::DeviceMemory;
use crate::element::Dtype;
use crate::error::Result;
use alloc::vec::Vec;

/// Memory that arrays of any metadata can begin in.
type MetadataUnit = u128;

/// Makes the launches of calls.
pub(crate) struct LaunchRecorder<'a> {
    cuda: &'a Cuda,
    shapes: BaseShapes,
    metadata: Vec<MetadataUnit>,
    /// Bytes of `metadata` that are used.
    used: usize,
    /// The largest number of bytes of words that one launch uses.
    words: usize,
    /// The symbol of the word that launches count in and leave at zero, if any does.
    counter: Option<u64>,
    launches: Vec<RecordedLaunch>,
    scratch: SortBuffers,
    must_align: u32,
}

/// One launch.
#[derive(Debug)]
struct RecordedLaunch {
    launch: Launch,
    /// Bytes of words that are cleared before it.
    words: usize,
    /// Tensors among its parameters whose addresses a run sets: the byte offset in the parameters, and the base and
    /// offset in memory that the address is made of.
    tensors: Vec<(usize, BaseOffset)>,
}

/// The launches of a plan, ready to be run.
#[derive(Debug)]
pub(crate) struct RecordedLaunches {
    launches: Vec<RecordedLaunch>,
    /// Metadata, and behind them the words.
    memory: Option<DeviceMemory>,
    /// Where the metadata begins.
    begin: u64,
    words_at: u64,
    must_align: u32,
}

impl MetadataBuffer for LaunchRecorder<'_> {
    fn counter(&mut self) -> Result<u64> {
        let symbol = self.counter.unwrap_or_else(|| self.array(&0u32.to_ne_bytes()));
        self.counter = Some(symbol);
        Ok(symbol)
    }

    fn begin(&mut self, bytes: usize) -> Result<(Writer<'_>, &mut SortBuffers)> {
        let bytes = padded(bytes);
        self.metadata.resize((self.used + bytes).div_ceil(size_of::<MetadataUnit>()), 0);
        let memory = &mut bytemuck::cast_slice_mut::<MetadataUnit, u8>(&mut self.metadata)[self.used..][..bytes];
        Ok((Writer::new(memory, self.used, metadata_symbol(self.used), Some(words_symbol())), &mut self.scratch))
    }

    fn address_space(&self) -> AddressSpace {
        AddressSpace::Bases(self.shapes)
    }

    fn must_align(&mut self, symbol: u64) {
        if meaning(symbol) == Meaning::Base {
            self.must_align |= 1 << self.shapes.locate(symbol).base;
        }
    }
}

impl<'a> LaunchRecorder<'a> {
    pub(crate) fn new(cuda: &'a Cuda, shapes: BaseShapes) -> Self {
        Self {
            cuda,
            shapes,
            metadata: Vec::new(),
            used: 0,
            words: 0,
            counter: None,
            launches: Vec::new(),
            scratch: SortBuffers::default(),
            must_align: 0,
        }
    }

    /// The address that a symbol of a base stands for.
    pub(crate) fn locate(&self, symbol: *mut u8) -> BaseOffset {
        self.shapes.locate(symbol as usize as u64)
    }

    /// Keeps a table of one number for each head, and returns the tensor from which kernels read it.
    pub(crate) fn table(&mut self, values: &[f32]) -> RawTensor {
        let symbol = self.array(bytemuck::cast_slice(values));
        RawTensor::compact(core::ptr::without_provenance_mut(symbol as usize), Dtype::F32, 1, values.len() as u32, 1)
    }

    /// Keeps bytes in the metadata, and returns their symbol.
    pub(super) fn array(&mut self, bytes: &[u8]) -> u64 {
        let at = self.used;
        self.used += padded(bytes.len());
        self.metadata.resize(self.used.div_ceil(size_of::<MetadataUnit>()), 0);
        bytemuck::cast_slice_mut::<MetadataUnit, u8>(&mut self.metadata)[at..][..bytes.len()].copy_from_slice(bytes);
        metadata_symbol(at)
    }

    /// Adds the launches of a call, and returns their numbers.
    pub(crate) fn add(
        &mut self,
        make: impl FnOnce(&Cuda, &mut Self) -> Result<Launches>,
    ) -> Result<core::ops::Range<usize>> {
        let first = self.launches.len();
        let Launches { part, list } = make(self.cuda, self)?;
        if list.iter().any(Option::is_some) {
            self.used += part.filled;
            self.words = self.words.max(part.words);
        }
        // Only a call of one launch counts.
        let mut words = part.words;
        for launch in list.into_iter().flatten() {
            let place = |&offset: &usize| match meaning(launch.word(offset)) {
                Meaning::Base => Some((offset, self.shapes.locate(launch.word(offset)))),
                Meaning::Address | Meaning::Metadata(_) | Meaning::Word(_) => None,
            };
            let tensors = launch.addresses.tensors.iter().filter_map(place).collect();
            self.launches.push(RecordedLaunch { launch, words, tensors });
            words = 0;
        }
        Ok(first..self.launches.len())
    }

    /// Puts the metadata on the device and the addresses of metadata and words into the launches. The host waits for
    /// the upload.
    pub(crate) fn keep(mut self) -> Result<RecordedLaunches> {
        let bytes = self.used + self.words;
        let memory = if bytes > 0 { Some(self.cuda.allocate(bytes)?) } else { None };
        let begin = memory.as_ref().map_or(0, |m| m.ptr() as usize as u64);
        let words_at = begin + self.used as u64;
        if let Some(memory) = &memory {
            memory.upload(&bytemuck::cast_slice(&self.metadata)[..self.used])?;
        }
        for RecordedLaunch { launch, .. } in &mut self.launches {
            let addresses = launch.addresses;
            for &offset in addresses.metadata.iter().chain(addresses.tensors) {
                match meaning(launch.word(offset)) {
                    Meaning::Metadata(at) => launch.set_word(offset, begin + at),
                    Meaning::Word(at) => launch.set_word(offset, words_at + at),
                    Meaning::Address | Meaning::Base => {}
                }
            }
        }
        Ok(RecordedLaunches { launches: self.launches, memory, begin, words_at, must_align: self.must_align })
    }
}

impl RecordedLaunches {
    /// Bytes of metadata and words on the device.
    pub(crate) fn bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, DeviceMemory::bytes)
    }

    /// The address of a symbol of the metadata; `None` for one of a base.
    pub(crate) fn metadata_address(&self, symbol: *mut u8) -> Option<*mut u8> {
        match meaning(symbol as usize as u64) {
            Meaning::Metadata(at) => Some((self.begin + at) as usize as *mut u8),
            Meaning::Address | Meaning::Base | Meaning::Word(_) => None,
        }
    }

    /// Whether the rows of a base must begin at multiples of 16 bytes, even where a copy alone would take less.
    pub(crate) fn must_align(&self, base: usize) -> bool {
        self.must_align >> base & 1 == 1
    }

    /// Writes the addresses of a run into all launches.
    pub(crate) fn set_bases(&mut self, bases: &BaseAddresses) {
        for RecordedLaunch { launch, tensors, .. } in &mut self.launches {
            for &(offset, place) in &*tensors {
                let own =
                    Tensor { ptr: 0, token: launch.word(offset + 8) as i64, head: launch.word(offset + 16) as i64 };
                launch.set_tensor(offset, place.tensor(bases, own));
            }
            for &offset in launch.addresses.bases {
                launch.set_bases(offset, &bases.0);
            }
        }
    }

    /// Writes the seed of dropout of a run into all launches.
    pub(crate) fn set_seed(&mut self, seed: u64) {
        for RecordedLaunch { launch, .. } in &mut self.launches {
            for &offset in launch.addresses.seeds {
                // The key of Philox: the low half, then the high one.
                launch.set_word(offset, bytemuck::cast([seed as u32, (seed >> 32) as u32]));
            }
        }
    }

    /// Writes what ranks compare in a run into the launch that begins it.
    pub(crate) fn set_fingerprint(&mut self, i: usize, fingerprint: u64) {
        self.launches[i].launch.set_word(core::mem::offset_of!(BeginRun, fingerprint), fingerprint);
    }

    /// Puts launch `i` on a stream, after the work that clears its words. The context is current.
    ///
    /// # Safety
    /// The bases were set, to memory that is as the call of this launch needs it when the launch runs, in stream order,
    /// for tensors of the shapes that were recorded. All launches that count words or take items by the counter are put
    /// on one stream. No launch of another run of them, or of a replay of a graph that has captured one, runs between
    /// these launches or at the same time. `cuda` is the device that recorded them.
    pub(crate) unsafe fn start(&self, i: usize, cuda: &Cuda, stream: RawStream) -> Result<()> {
        let RecordedLaunch { launch, words, .. } = &self.launches[i];
        if *words > 0 {
            // SAFETY: `memory` holds the words of every launch behind its metadata; the stream orders the launch
            // behind.
            unsafe { call!(cuMemsetD32Async(self.words_at, 0, words / 4, stream)) }?;
        }
        // SAFETY: metadata and words are in memory that lives as long as `self`; the rest is promised above.
        unsafe { launch.start(cuda, stream) }
    }
}
