// SPDX-License-Identifier: MIT OR Apache-2.0
//! How the ranges of a call reach the device: a ring of page-locked memory with its mirror on the device.
//!
//! A call writes its metadata into the next free part of the ring, has that part copied in stream order, launches, and
//! records an event. A part is reused once its event has completed. If the ring holds the metadata of all calls in
//! flight, the host never waits; with a smaller ring it waits here, and nowhere else in the backend. Nothing is
//! allocated after `new`.
//!
//! Metadata that fits into the parameters of a kernel for `sm_90a` is not copied (`Cuda::launch`): the host writes it
//! here and the launch takes them along. Such a kernel takes its items by a counter that it leaves at zero, so that
//! nothing is cleared before a launch. There is one for each launch in flight, since those on other streams run beside
//! it.
//!
//! A part stays on the device until the ring reuses it. A call with the same metadata as such a part uses it there and
//! copies nothing, for example the calls of one batch, layer after layer. Parts that a launch on another stream may
//! still use are not reused, so that no stream waits for another one.

use super::metadata_buffer::{ALIGN, AddressSpace, MetadataBuffer, Part, SortBuffers, Writer, padded};
use super::params::{Run, Work};
use super::pinned_mirror::PinnedMirror;
use crate::device::driver::{Context, CudaEvent, sys::CUstream};
use crate::device::memory::DeviceMemory;
use crate::error::{Error, Result};
use alloc::collections::VecDeque;
use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;

/// The largest size that can be padded. (The driver refuses sizes that it has no memory for.)
const MAX_BYTES: usize = isize::MAX as usize & !(ALIGN - 1);
/// Parts that are remembered.
const MAX_KEPT: usize = 32;
/// Each launch in flight has an event of the driver; a number given by mistake would use up memory and time.
const MAX_LAUNCHES: usize = 1 << 20;

/// A ring of uploads; see [`super::Cuda::staging`].
#[derive(Debug)]
pub struct Staging {
    mirror: PinnedMirror,
    events: Vec<CudaEvent>,
    /// A word for each event, in which the launch before the event counts; `None` if no kernel of the device counts.
    counters: Option<DeviceMemory>,
    /// Parts whose launches may still run, oldest first.
    in_flight: VecDeque<InFlight>,
    /// Parts whose bytes are the same on the device and on the host side, oldest first.
    kept: VecDeque<Part>,
    next_event: usize,
    head: usize,
    /// Where the last call began to write.
    next: usize,
    scratch: SortBuffers,
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    begin: usize,
    end: usize,
    event: usize,
    stream: CUstream,
}

// SAFETY: the stream is compared, and used for nothing else.
unsafe impl Send for InFlight {}

impl Staging {
    /// A ring, with words to count in if `counts`.
    pub(super) fn new(context: &Arc<Context>, bytes: usize, launches: usize, counts: bool) -> Result<Self> {
        if bytes > MAX_BYTES {
            return Err(Error::invalid("staging", format!("{bytes} bytes"), format!("at most {MAX_BYTES}")));
        }
        if launches > MAX_LAUNCHES {
            let (found, expected) = (format!("{launches} launches in flight"), format!("at most {MAX_LAUNCHES}"));
            return Err(Error::invalid("staging", found, expected).hint("with fewer, a call waits for the oldest"));
        }
        let mirror = PinnedMirror::new(context, padded(bytes))?;
        let events = (0..launches.max(1)).map(|_| CudaEvent::new(context)).collect::<Result<Vec<_>>>()?;
        let counters = if counts { Some(DeviceMemory::zeros(context, events.len() * size_of::<u32>())?) } else { None };
        Ok(Self {
            in_flight: VecDeque::with_capacity(events.len()),
            kept: VecDeque::with_capacity(MAX_KEPT),
            scratch: SortBuffers {
                tiles: Vec::with_capacity(mirror.bytes() / size_of::<Work>()),
                shared_tiles: Vec::with_capacity(mirror.bytes() / size_of::<Work>()),
                runs: Vec::with_capacity(mirror.bytes() / size_of::<Run>()),
            },
            mirror,
            events,
            counters,
            next_event: 0,
            head: 0,
            next: 0,
        })
    }

    /// Bytes of the ring.
    pub fn bytes(&self) -> usize {
        self.mirror.bytes()
    }

    /// The launches that can be in flight.
    pub(super) fn launches(&self) -> usize {
        self.events.len()
    }

    /// Whether [`super::Cuda::staging`] would make a ring like this from these numbers.
    pub(super) fn is_like(&self, bytes: usize, launches: usize) -> bool {
        bytes <= MAX_BYTES && self.bytes() == padded(bytes).max(1) && self.launches() == launches.max(1)
    }

    /// Waits until no launch reads the ring any more.
    ///
    /// # Errors
    /// When the driver reports the failure of an earlier launch.
    pub fn drain(&mut self) -> Result<()> {
        while let Some(part) = self.in_flight.front().copied() {
            self.events[part.event].wait()?;
            self.in_flight.pop_front();
        }
        Ok(())
    }

    /// A part with the same bytes as this one, if the device has it and no other stream may be using it.
    pub(super) fn known(&self, part: Part, stream: CUstream) -> Option<Part> {
        let is_free = |part: &Part| self.in_flight.iter().all(|f| f.begin != part.begin || f.stream == stream);
        let is_same = |known: &&Part| {
            (known.filled, known.words) == (part.filled, part.words)
                && is_free(known)
                && self.written(**known) == self.written(part)
        };
        if part.filled == 0 { None } else { self.kept.iter().rev().find(is_same).copied() }
    }

    /// The bytes written into a part.
    pub(super) fn written(&self, part: Part) -> &[u8] {
        self.mirror.written(part.begin, part.filled)
    }

    /// The device's address of a part.
    pub(super) fn address(&self, part: Part) -> u64 {
        self.mirror.device(part.begin)
    }

    /// Copies the written bytes to the device and clears its words, in stream order.
    pub(super) fn upload(&mut self, part: Part, stream: CUstream) -> Result<()> {
        self.mirror.upload(part.begin, part.filled, stream)?;
        self.clear(part, stream)?;
        if part.filled > 0 {
            if self.kept.len() == MAX_KEPT {
                self.kept.pop_front();
            }
            self.kept.push_back(part);
        }
        Ok(())
    }

    /// Clears the words of a part that is on the device, behind every launch that uses it.
    pub(super) fn reuse(&self, part: Part, stream: CUstream) -> Result<()> {
        // The handle may belong to a new stream by now; the old one was destroyed with work in flight.
        if let Some(last) = self.in_flight.iter().rev().find(|f| f.begin == part.begin) {
            self.events[last.event].make_stream_wait(stream)?;
        }
        self.clear(part, stream)
    }

    /// Clears the words of a part, in stream order.
    fn clear(&self, part: Part, stream: CUstream) -> Result<()> {
        self.mirror.clear(part.begin + part.filled, part.words, stream)
    }

    /// Marks the point of the stream after which the part is free again. To be called after an upload, also if the
    /// launch failed.
    pub(super) fn end(&mut self, part: Part, stream: CUstream) -> Result<()> {
        let used = part.filled + part.words;
        if used == 0 {
            return Ok(());
        }
        let event = self.next_event;
        self.events[event].record(stream)?;
        self.next_event = (event + 1) % self.events.len();
        let end = part.begin + padded(used);
        // A part that was there before is not the ring's next one.
        if part.begin == self.next {
            self.head = end;
        }
        self.in_flight.push_back(InFlight { begin: part.begin, end, event, stream });
        Ok(())
    }
}

impl MetadataBuffer for Staging {
    /// The counter of the next event. [`MetadataBuffer::begin`] waits if a launch still counts in it.
    fn counter(&mut self) -> Result<u64> {
        // Another device's ring may have none.
        self.mirror.at_home()?;
        let counters = self.counters.as_ref().expect("made with the ring of a device whose kernels count");
        Ok(counters.ptr() as usize as u64 + (self.next_event * size_of::<u32>()) as u64)
    }

    /// The next part of the ring, free for `bytes` bytes. The context that launches is current.
    fn begin(&mut self, bytes: usize) -> Result<(Writer<'_>, &mut SortBuffers)> {
        self.mirror.at_home()?;
        let bytes = padded(bytes);
        if bytes > self.mirror.bytes() {
            return Err(Error::invalid(
                "room for scheduler metadata",
                format!("{} bytes", self.mirror.bytes()),
                format!("at least {bytes} for this call"),
            )
            .hint("make room for the metadata of the largest call before the call"));
        }
        if self.head + bytes > self.mirror.bytes() {
            self.head = 0;
        }
        let (begin, end) = (self.head, self.head + bytes);
        // Parts are in the order of the ring, so the oldest ones are the ones in the way.
        while let Some(part) = self.in_flight.front().copied() {
            let in_the_way = self.in_flight.iter().any(|p| p.begin < end && begin < p.end);
            if !in_the_way && self.in_flight.len() < self.events.len() && !self.events[part.event].is_done()? {
                break;
            }
            if in_the_way || self.in_flight.len() == self.events.len() {
                self.events[part.event].wait()?;
            }
            self.in_flight.pop_front();
        }
        self.kept.retain(|p| end <= p.begin || p.begin + p.filled + p.words <= begin);
        self.next = begin;
        let device = self.mirror.device(begin);
        let writer = Writer::new(self.mirror.host(begin, bytes), begin, device, None);
        Ok((writer, &mut self.scratch))
    }

    fn address_space(&self) -> AddressSpace {
        AddressSpace::Memory
    }

    fn must_align(&mut self, _: u64) {}
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Memory must outlive the launches that read it. A failure means that the context, and the launches with it,
        // are gone.
        let _ = self.drain();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    /// The ring of a device without kernels that count, used where another context is current.
    #[test]
    fn a_ring_of_another_device_is_refused_before_its_counters_are_missed() {
        let context = match Context::new(0) {
            Ok(context) => context,
            Err(Error::Unsupported { .. }) if std::env::var_os("CPATTN_REQUIRE_CUDA").is_none() => return,
            Err(error) => panic!("{error}"),
        };
        let mut ring = Staging::new(&context, 64, 1, false).expect("memory");
        for refused in [ring.counter().map(|_| ()), ring.begin(16).map(|_| ())] {
            let error = refused.expect_err("no context is current").to_string();
            assert!(error.starts_with("staging is memory of device 0, expected memory of the device"), "{error}");
        }
        let mut ring = Staging::new(&context, 64, 2, true).expect("memory");
        let _here = context.enter().expect("a context");
        let counter = ring.counter().expect("at home");
        assert_eq!(ring.counter(), Ok(counter), "one for each launch");
    }
}
