// SPDX-License-Identifier: MIT OR Apache-2.0
//! From calls to launches, on one route for the calls of a plan and for a single call.
//!
//! A [`LaunchRecorder`] makes the launches of calls and writes their scheduler metadata into memory of the host. Where
//! the metadata will be on the device is known when all of it was written; until then its addresses are symbols
//! ([`base_addresses`](crate::kernel::cuda::abi::base_addresses)). Then the launches get its address, and are started.
//!
//! - The calls of a plan are recorded when it is prepared. Their tensors are symbols too. [`LaunchRecorder::keep`] puts
//!   all metadata into one block of device memory; a run then only writes the addresses of its bases into the
//!   parameters, clears the words that a launch counts in, and launches.
//! - A single call has the addresses of its tensors. Its metadata goes into the ring of its
//!   [`StreamKernels`](crate::kernel::cuda::StreamKernels), whose recorder serves one call after the other and
//!   allocates nothing.
//!
//! All launches of a plan that count use the same words, one after the other, since they are on one stream. All
//! forwards for `sm_90a` take their items by one word of the metadata, which every launch leaves at zero. So they, the
//! runs of a plan and the replays of its graphs must run one after the other too.

use crate::call::{RawStream, RawTensor};
use crate::device::driver::call;
use crate::device::memory::DeviceMemory;
use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::kernel::cuda::Cuda;
use crate::kernel::cuda::abi::base_addresses::{
    BaseAddresses, BaseOffset, BaseShapes, Meaning, meaning, metadata_symbol,
};
use crate::kernel::cuda::abi::params::{PageTable, Run, Tensor, Work, tags::BeginRun};
use crate::kernel::cuda::launch::check::Checker;
use crate::kernel::cuda::launch::paged::HeldDocuments;
use crate::kernel::cuda::launch::{Launch, Launches};
use crate::kernel::cuda::memory::metadata_writer::{SortBuffers, Writer, padded};
use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

/// Memory that arrays of any metadata can begin in.
type MetadataUnit = u128;

/// Bytes of metadata that [`LaunchRecorder::counter`] takes.
pub(in crate::kernel::cuda) const COUNTER_BYTES: usize = padded(size_of::<u32>());

/// Makes the launches of calls.
#[derive(Debug)]
pub(crate) struct LaunchRecorder {
    /// The shapes of the bases that tensors are parts of; `None` where tensors are memory.
    shapes: Option<BaseShapes>,
    metadata: Vec<MetadataUnit>,
    /// Bytes of `metadata` that are used, and the most there may be.
    used: usize,
    most: usize,
    /// The largest number of bytes of words that one launch uses.
    words: usize,
    /// The symbol of the word that launches count in and leave at zero, if any does.
    counter: Option<u64>,
    launches: Vec<RecordedLaunch>,
    scratch: SortBuffers,
    must_align: u32,
    /// Where the rank's k rows lie in their documents, if k and v of forwards lie in pages.
    pages: Option<HeldDocuments>,
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

impl RecordedLaunch {
    /// Writes the addresses of metadata and words, which begin at `begin` and at `words_at`, in the place of symbols.
    fn set_metadata(&mut self, begin: u64, words_at: u64) {
        let addresses = self.launch.addresses;
        for &offset in addresses.metadata.iter().chain(addresses.tensors) {
            match meaning(self.launch.word(offset)) {
                Meaning::Metadata(at) => self.launch.set_word(offset, begin + at),
                Meaning::Word(at) => self.launch.set_word(offset, words_at + at),
                Meaning::Address | Meaning::Base => {}
            }
        }
    }

    /// Clears its words and launches it. The context is current.
    ///
    /// # Safety
    /// As [`Launch::start`]; words and metadata are at the addresses that were set.
    unsafe fn start(&self, words_at: u64, cuda: &Cuda, stream: RawStream) -> Result<()> {
        if self.words > 0 {
            // SAFETY: the memory holds the words of every launch (the promise of this function); the stream orders the
            // launch behind.
            unsafe { call!(cuMemsetD32Async(words_at, 0, self.words / 4, stream)) }?;
        }
        // SAFETY: the promise of this function.
        unsafe { self.launch.start(cuda, stream) }
    }
}

impl LaunchRecorder {
    /// A recorder of the calls of a plan.
    pub(crate) fn of_plan(shapes: BaseShapes) -> Self {
        Self {
            shapes: Some(shapes),
            metadata: Vec::new(),
            used: 0,
            most: usize::MAX,
            words: 0,
            counter: None,
            launches: Vec::new(),
            scratch: SortBuffers::default(),
            must_align: 0,
            pages: None,
        }
    }

    /// The same for a plan whose k and v lie in pages.
    pub(crate) fn over_pages(self, rows: HeldDocuments) -> Self {
        Self { pages: Some(rows), ..self }
    }

    /// Where the rank's k rows lie in their documents, if k and v lie in pages.
    pub(in crate::kernel::cuda) fn pages(&self) -> Option<HeldDocuments> {
        self.pages.clone()
    }

    /// A recorder of single calls, each with at most `bytes` bytes of metadata and words. It allocates here alone.
    pub(in crate::kernel::cuda) fn of_single_calls(bytes: usize) -> Self {
        Self {
            shapes: None,
            metadata: vec![0; bytes.div_ceil(size_of::<MetadataUnit>())],
            used: 0,
            most: bytes,
            words: 0,
            counter: None,
            launches: Vec::with_capacity(3),
            scratch: SortBuffers {
                tiles: Vec::with_capacity(bytes / size_of::<Work>()),
                shared_tiles: Vec::with_capacity(bytes / size_of::<Work>()),
                runs: Vec::with_capacity(bytes / size_of::<Run>()),
            },
            must_align: 0,
            pages: None,
        }
    }

    /// Checks calls on this device whose tensors have the addresses that this recorder takes.
    pub(crate) fn checker(&self, cuda: &Cuda) -> Checker {
        Checker { ordinal: cuda.ordinal(), is_memory: self.shapes.is_none() }
    }

    /// The shapes of the bases that tensors are parts of; `None` where tensors are memory.
    pub(in crate::kernel::cuda) fn shapes(&self) -> Option<BaseShapes> {
        self.shapes
    }

    /// Where an address is.
    pub(crate) fn locate(&self, address: *mut u8) -> BaseOffset {
        BaseOffset::of(self.shapes.as_ref(), address)
    }

    /// The symbol of a word that is zero on the device when a launch begins, and that this launch must leave at zero:
    /// nothing clears it between launches.
    pub(in crate::kernel::cuda) fn counter(&mut self) -> Result<u64> {
        if let Some(symbol) = self.counter {
            return Ok(symbol);
        }
        let symbol = self.array(&0u32.to_ne_bytes())?;
        self.counter = Some(symbol);
        Ok(symbol)
    }

    /// A writer of at most `bytes` bytes, and vectors to sort in.
    pub(in crate::kernel::cuda) fn begin(&mut self, bytes: usize) -> Result<(Writer<'_>, &mut SortBuffers)> {
        let memory = extend(&mut self.metadata, self.used, bytes, self.most)?;
        Ok((Writer::new(memory, self.used), &mut self.scratch))
    }

    /// Keeps a table of one number for each head, and returns the tensor from which kernels read it.
    pub(crate) fn table(&mut self, values: &[f32]) -> Result<RawTensor> {
        let symbol = core::ptr::without_provenance_mut(self.array(bytemuck::cast_slice(values))? as usize);
        Ok(RawTensor::compact(symbol, Dtype::F32, 1, values.len() as u32, 1))
    }

    /// Keeps bytes in the metadata, and returns their symbol.
    pub(in crate::kernel::cuda) fn array(&mut self, bytes: &[u8]) -> Result<u64> {
        let at = self.used;
        let memory = extend(&mut self.metadata, at, bytes.len(), self.most)?;
        let (array, rest) = memory.split_at_mut(bytes.len());
        array.copy_from_slice(bytes);
        rest.fill(0);
        self.used += padded(bytes.len());
        Ok(metadata_symbol(at))
    }

    /// In a plan, records a tensor whose rows must begin at multiples of 16 bytes when the call is run.
    pub(in crate::kernel::cuda) fn must_align(&mut self, address: *mut u8) {
        if meaning(address as usize as u64) == Meaning::Base {
            self.must_align |= 1 << self.locate(address).base;
        }
    }

    /// Adds the launches of a call, and returns their numbers.
    pub(crate) fn add(&mut self, make: impl FnOnce(&mut Self) -> Result<Launches>) -> Result<core::ops::Range<usize>> {
        let first = self.launches.len();
        let Launches { part, list } = make(self)?;
        if list.iter().any(Option::is_some) {
            self.used += part.filled;
            self.words = self.words.max(part.words);
        }
        // Only a call of one launch counts.
        let mut words = part.words;
        for launch in list.into_iter().flatten() {
            let tensors = match &self.shapes {
                Some(shapes) => {
                    let is_of_base = |offset: &&usize| meaning(launch.word(**offset)) == Meaning::Base;
                    let moved = launch.addresses.tensors.iter().filter(is_of_base);
                    moved.map(|&offset| (offset, shapes.locate(launch.word(offset)))).collect()
                }
                None => Vec::new(),
            };
            self.launches.push(RecordedLaunch { launch, words, tensors });
            words = 0;
        }
        Ok(first..self.launches.len())
    }

    /// Puts the metadata on the device and the addresses of metadata and words into the launches. The host waits for
    /// the upload.
    pub(crate) fn keep(mut self, cuda: &Cuda) -> Result<RecordedLaunches> {
        let bytes = self.used + self.words;
        let memory = if bytes > 0 { Some(cuda.allocate(bytes)?) } else { None };
        let begin = memory.as_ref().map_or(0, |m| m.ptr() as usize as u64);
        let words_at = begin + self.used as u64;
        if let Some(memory) = &memory {
            memory.upload(self.metadata())?;
        }
        self.launches.iter_mut().for_each(|launch| launch.set_metadata(begin, words_at));
        Ok(RecordedLaunches { launches: self.launches, memory, begin, words_at, must_align: self.must_align })
    }

    /// Forgets all calls.
    pub(in crate::kernel::cuda) fn clear(&mut self) {
        self.launches.clear();
        (self.used, self.words, self.counter) = (0, 0, None);
    }

    /// Whether there are no launches.
    pub(in crate::kernel::cuda) fn is_empty(&self) -> bool {
        self.launches.is_empty()
    }

    /// The metadata so far.
    pub(in crate::kernel::cuda) fn metadata(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.metadata)[..self.used]
    }

    /// Bytes of the words that launches count in.
    pub(in crate::kernel::cuda) fn words(&self) -> usize {
        self.words
    }

    /// Puts all launches on a stream, with the metadata at `begin` and the words behind it. The context is current.
    ///
    /// # Safety
    /// Metadata and room for the words are there when the launches run, in stream order, and nothing else uses the
    /// words until they are done. The tensors of the calls are as their launches need them. `cuda` is the device of
    /// every call that was added.
    pub(in crate::kernel::cuda) unsafe fn start(&mut self, begin: u64, cuda: &Cuda, stream: RawStream) -> Result<()> {
        let words_at = begin + self.used as u64;
        self.launches.iter_mut().try_for_each(|launch| {
            launch.set_metadata(begin, words_at);
            // SAFETY: the promise of this function.
            unsafe { launch.start(words_at, cuda, stream) }
        })
    }
}

/// `bytes` bytes of metadata from `used` on, which is the end of what is used.
fn extend(metadata: &mut Vec<MetadataUnit>, used: usize, bytes: usize, most: usize) -> Result<&mut [u8]> {
    let end = used + padded(bytes);
    if end > most {
        let (found, expected) = (format!("{most} bytes"), format!("at least {end} for this call"));
        return Err(Error::invalid("room for scheduler metadata", found, expected)
            .hint("make room for the metadata of the largest call before the call"));
    }
    if metadata.len() < end / size_of::<MetadataUnit>() {
        metadata.resize(end / size_of::<MetadataUnit>(), 0);
    }
    Ok(&mut bytemuck::cast_slice_mut::<MetadataUnit, u8>(metadata)[used..end])
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

    /// Writes the table of pages of a run into all launches.
    pub(crate) fn set_pages(&mut self, table: PageTable) {
        for RecordedLaunch { launch, .. } in &mut self.launches {
            launch.addresses.pages.iter().for_each(|&offset| launch.set_pages(offset, table));
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
        // SAFETY: metadata and words are in memory that lives as long as `self`; the rest is promised above.
        unsafe { self.launches[i].start(self.words_at, cuda, stream) }
    }
}
