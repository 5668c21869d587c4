// SPDX-License-Identifier: MIT OR Apache-2.0
//! The scheduler metadata of single calls on the device: a ring of page-locked memory, and as much on the device.
//!
//! The ring holds *parts*. A part has the metadata of one call, or of several calls on one stream with the same
//! metadata: for example the calls of one batch, layer after layer. The host writes a part, has it copied in stream
//! order, and the launches that read it follow on the same stream. Its event marks the end of the last of them.
//!
//! - A part is overwritten, on both sides, after its event has completed. Where it has not, the host waits; it waits
//!   nowhere else.
//! - A call with the same metadata as a part uses that part and copies nothing, on the stream of its last call. On
//!   another stream it does so only if the event has completed, so that no stream waits for another one.
//! - A call without metadata has its end marked by the event of a part of its stream, so that a drop can wait for it.
//!
//! To free memory, a driver waits until the whole device is idle. So [`SpareRings`] keeps the rings that no user has at
//! present, for the next user of the same size.

use crate::device::driver::{Context, CudaEvent, call, sys::CUstream};
use crate::device::memory::{DeviceMemory, PinnedMemory};
use crate::error::{Error, Result};
use crate::kernel::cuda::memory::metadata_writer::{ALIGN, padded};
use alloc::collections::VecDeque;
use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;
use std::sync::{Mutex, PoisonError};

/// The largest size that can be padded. (The driver refuses sizes that it has no memory for.)
const MAX_BYTES: usize = isize::MAX as usize & !(ALIGN - 1);
/// Each part has an event of the driver; a number given by mistake would use up memory and time.
const MAX_PARTS: usize = 1 << 20;
/// The newest parts, in which a call's metadata is looked for. They are at most half of the ring's, so that a part is
/// seldom in use when its turn comes to be overwritten.
const MAX_SEARCHED: usize = 32;

/// See the module.
#[derive(Debug)]
pub(in crate::kernel::cuda) struct MetadataRing {
    host: PinnedMemory,
    device: DeviceMemory,
    /// Oldest first, which is the order of the ring.
    parts: VecDeque<RingPart>,
    /// Events without a part.
    unused: Vec<CudaEvent>,
    /// Where the next part begins.
    head: usize,
}

#[derive(Debug)]
struct RingPart {
    begin: usize,
    end: usize,
    /// Bytes of metadata, and of the words behind them that launches count in.
    filled: usize,
    words: usize,
    /// The stream of its last call, and the end of that call.
    stream: CUstream,
    event: CudaEvent,
}

// SAFETY: the stream is compared, and used for nothing else.
unsafe impl Send for RingPart {}

/// The part of one call, until [`MetadataRing::end`].
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel::cuda) struct PartIndex(usize);

impl MetadataRing {
    /// A ring of `bytes` bytes and at most `parts` parts.
    pub(in crate::kernel::cuda) fn new(context: &Arc<Context>, bytes: usize, parts: usize) -> Result<Self> {
        if bytes > MAX_BYTES {
            return Err(Error::invalid("metadata", format!("{bytes} bytes"), format!("at most {MAX_BYTES}")));
        }
        if parts > MAX_PARTS {
            let (found, expected) = (format!("{parts} calls in flight"), format!("at most {MAX_PARTS}"));
            return Err(Error::invalid("metadata", found, expected).hint("with fewer, a call waits for the oldest"));
        }
        let (bytes, parts) = Self::size(bytes, parts);
        Ok(Self {
            host: PinnedMemory::new(context, bytes, 0)?,
            device: DeviceMemory::new(context, bytes)?,
            parts: VecDeque::with_capacity(parts),
            unused: (0..parts).map(|_| CudaEvent::new(context)).collect::<Result<_>>()?,
            head: 0,
        })
    }

    fn size(bytes: usize, parts: usize) -> (usize, usize) {
        (padded(bytes.max(1)), parts.max(1))
    }

    /// Bytes of the ring.
    pub(in crate::kernel::cuda) fn bytes(&self) -> usize {
        self.device.bytes()
    }

    /// The most parts.
    pub(in crate::kernel::cuda) fn max_parts(&self) -> usize {
        self.parts.len() + self.unused.len()
    }

    /// Puts metadata of a call on the device, with room for `words` bytes of words behind it, and returns its part. The
    /// context is current; [`MetadataRing::end`] follows when the launches of the call were put on the stream, also if
    /// they failed.
    ///
    /// # Panics
    /// When the ring is smaller.
    pub(in crate::kernel::cuda) fn place(
        &mut self,
        metadata: &[u8],
        words: usize,
        stream: CUstream,
    ) -> Result<PartIndex> {
        if let Some(at) = self.find(metadata, words, stream)? {
            let part = &mut self.parts[at];
            part.stream = stream;
            // The handle may belong to a new stream by now, while work of the old one is still in flight; on the same
            // stream the wait ends at once.
            part.event.make_stream_wait(stream)?;
            return Ok(PartIndex(at));
        }
        let bytes = padded(metadata.len() + words).max(ALIGN);
        let begin = self.make_room(bytes)?;
        let host = self.host.ptr().wrapping_add(begin);
        if !metadata.is_empty() {
            let to = self.device.ptr() as usize as u64 + begin as u64;
            // SAFETY: both sides hold `bytes` bytes from `begin` on and live until no part is in use; no copy or launch
            // uses them any more (`make_room`), and nothing else on the host has a reference to them.
            unsafe {
                host.copy_from_nonoverlapping(metadata.as_ptr(), metadata.len());
                call!(cuMemcpyHtoDAsync_v2(to, host.cast_const().cast(), metadata.len(), stream))?;
            }
        }
        let event = self.unused.pop().expect("made by `make_room`");
        let (end, filled) = (begin + bytes, metadata.len());
        self.parts.push_back(RingPart { begin, end, filled, words, stream, event });
        self.head = end;
        Ok(PartIndex(self.parts.len() - 1))
    }

    /// The device's address of a part.
    pub(in crate::kernel::cuda) fn address(&self, PartIndex(at): PartIndex) -> u64 {
        self.device.ptr() as usize as u64 + self.parts[at].begin as u64
    }

    /// Marks the point of the stream after which the part is free again.
    pub(in crate::kernel::cuda) fn end(&mut self, PartIndex(at): PartIndex, stream: CUstream) -> Result<()> {
        self.parts[at].event.record(stream)
    }

    /// A part with this metadata, which a call on `stream` may use.
    fn find(&self, metadata: &[u8], words: usize, stream: CUstream) -> Result<Option<usize>> {
        let searched = (self.max_parts() / 2).clamp(1, MAX_SEARCHED);
        for (at, part) in self.parts.iter().enumerate().rev().take(searched) {
            let is_of_stream = part.stream == stream;
            let found = if metadata.is_empty() {
                is_of_stream
            } else {
                (part.filled, part.words) == (metadata.len(), words)
                    && self.written(part) == metadata
                    && (is_of_stream || part.event.is_done()?)
            };
            if found {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    fn written(&self, part: &RingPart) -> &[u8] {
        // SAFETY: the ring owns the memory, which holds the part and was written; copies to the device only read it,
        // and a writer has the only borrow of `self`.
        unsafe { core::slice::from_raw_parts(self.host.ptr().wrapping_add(part.begin), part.filled) }
    }

    /// The beginning of `bytes` bytes that no part uses; and there is an event without a part. Waits for the oldest
    /// parts where they are in the way.
    fn make_room(&mut self, bytes: usize) -> Result<usize> {
        assert!(bytes <= self.bytes(), "a part of {bytes} bytes in a ring of {}", self.bytes());
        let mut begin = self.head;
        if begin + bytes > self.bytes() {
            // The parts behind the head are the oldest ones.
            while self.parts.front().is_some_and(|part| part.begin >= begin) {
                self.free_oldest()?;
            }
            begin = 0;
        }
        let end = begin + bytes;
        let overlaps = |part: &RingPart| part.begin < end && begin < part.end;
        while self.unused.is_empty() || self.parts.front().is_some_and(overlaps) {
            self.free_oldest()?;
        }
        debug_assert!(!self.parts.iter().any(overlaps), "parts are in the order of the ring");
        Ok(begin)
    }

    /// Waits for the calls of the oldest part, and forgets the part.
    fn free_oldest(&mut self) -> Result<()> {
        if let Some(part) = self.parts.front() {
            part.event.wait()?;
        }
        self.unused.extend(self.parts.pop_front().map(|part| part.event));
        Ok(())
    }

    /// Waits for all calls that use the ring, and forgets their parts.
    fn clear(&mut self) -> Result<()> {
        while !self.parts.is_empty() {
            self.free_oldest()?;
        }
        self.head = 0;
        Ok(())
    }

    /// Waits until all calls that use the ring are done.
    ///
    /// # Errors
    /// When the driver reports the failure of an earlier launch.
    pub(in crate::kernel::cuda) fn wait(&self) -> Result<()> {
        self.parts.iter().try_for_each(|part| part.event.wait())
    }
}

impl Drop for MetadataRing {
    fn drop(&mut self) {
        // Memory must outlive the launches that read it. A failure means that the context, and the launches with it,
        // are gone.
        let _ = self.wait();
    }
}

/// Bytes of spare rings, on each side.
const MAX_SPARE_BYTES: usize = 16 << 20;

/// The rings of a device that no user has. No call that uses them is in flight.
#[derive(Debug, Default)]
pub(in crate::kernel::cuda) struct SpareRings(Mutex<Vec<MetadataRing>>);

impl SpareRings {
    /// A spare ring of this size, or a new one.
    pub(in crate::kernel::cuda) fn take(
        &self,
        context: &Arc<Context>,
        bytes: usize,
        parts: usize,
    ) -> Result<MetadataRing> {
        // A panic leaves the list consistent.
        let mut spares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_like = |ring: &MetadataRing| (ring.bytes(), ring.max_parts()) == MetadataRing::size(bytes, parts);
        let spare = if bytes <= MAX_BYTES { spares.iter().position(is_like) } else { None };
        let spare = spare.map(|at| spares.swap_remove(at));
        drop(spares);
        spare.map_or_else(|| MetadataRing::new(context, bytes, parts), Ok)
    }

    /// Waits for the calls that use a ring, and keeps it, or frees it where there are enough.
    pub(in crate::kernel::cuda) fn put(&self, mut ring: MetadataRing) {
        // A failure means that the context is gone, and its memory with it.
        if ring.clear().is_err() {
            return;
        }
        let mut spares = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if spares.iter().map(MetadataRing::bytes).sum::<usize>() + ring.bytes() <= MAX_SPARE_BYTES {
            spares.push(ring);
        } else {
            // Freed without the lock, so that other threads need not wait.
            drop(spares);
            drop(ring);
        }
    }
}
