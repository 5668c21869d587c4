// SPDX-License-Identifier: MIT OR Apache-2.0
//! How the ranges of a call reach the device: a ring of page-locked memory with its mirror on the device.
//!
//! A call writes its metadata into the next free part of the ring, has that part copied in stream order, launches, and
//! records an event. A part is used again once its event has passed. With a ring that holds what is in flight, the host
//! never waits; with a smaller one it waits here, and nowhere else in the backend. Nothing is allocated after `new`.

use super::driver::{Context, Event, sys::CUstream};
use super::metadata_buffer::{ALIGN, MetadataBuffer, Part, Places, SortBuffers, Writer, padded};
use super::params::{Run, Work};
use super::pinned_mirror::PinnedMirror;
use crate::error::{Error, Result};
use alloc::collections::VecDeque;
use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;

/// What rounds up without leaving the address space. (Less than that is the driver's to refuse.)
const MOST_BYTES: usize = isize::MAX as usize & !(ALIGN - 1);
/// Each launch in flight is an event of the driver's, so a number that is not meant would take all memory and time.
const MOST_LAUNCHES: usize = 1 << 20;

/// A ring of uploads; see [`super::Cuda::staging`].
#[derive(Debug)]
pub struct Staging {
    mirror: PinnedMirror,
    events: Vec<Event>,
    /// Parts whose launches may still run, oldest first.
    in_flight: VecDeque<InFlight>,
    next_event: usize,
    head: usize,
    scratch: SortBuffers,
}

#[derive(Clone, Copy, Debug)]
struct InFlight {
    begin: usize,
    end: usize,
    event: usize,
}

impl Staging {
    pub(super) fn new(context: &Arc<Context>, bytes: usize, launches: usize) -> Result<Self> {
        if bytes > MOST_BYTES {
            return Err(Error::invalid("staging", format!("{bytes} bytes"), format!("at most {MOST_BYTES}")));
        }
        if launches > MOST_LAUNCHES {
            let (found, expected) = (format!("{launches} launches in flight"), format!("at most {MOST_LAUNCHES}"));
            return Err(Error::invalid("staging", found, expected).hint("with fewer, a call waits for the oldest"));
        }
        let mirror = PinnedMirror::new(context, padded(bytes))?;
        let events = (0..launches.max(1)).map(|_| Event::new(context)).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            in_flight: VecDeque::with_capacity(events.len()),
            scratch: SortBuffers {
                tiles: Vec::with_capacity(mirror.bytes() / size_of::<Work>()),
                runs: Vec::with_capacity(mirror.bytes() / size_of::<Run>()),
            },
            mirror,
            events,
            next_event: 0,
            head: 0,
        })
    }

    /// Bytes of the ring.
    pub fn bytes(&self) -> usize {
        self.mirror.bytes()
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

    /// Copies what was written to the device and clears its words, in stream order.
    pub(super) fn upload(&self, part: Part, stream: CUstream) -> Result<()> {
        self.mirror.upload(part.begin, part.filled, stream)?;
        self.mirror.clear(part.begin + part.filled, part.words, stream)
    }

    /// Marks the point of the stream after which the part is free again. To be called after an upload, whatever
    /// became of the launch.
    pub(super) fn end(&mut self, part: Part, stream: CUstream) -> Result<()> {
        let used = part.filled + part.words;
        if used == 0 {
            return Ok(());
        }
        let event = self.next_event;
        self.events[event].record(stream)?;
        self.next_event = (event + 1) % self.events.len();
        self.head = part.begin + padded(used);
        self.in_flight.push_back(InFlight { begin: part.begin, end: self.head, event });
        Ok(())
    }
}

impl MetadataBuffer for Staging {
    /// The next part of the ring, free for `bytes` bytes. The context that launches is current.
    fn begin(&mut self, bytes: usize) -> Result<(Writer<'_>, &mut SortBuffers)> {
        self.mirror.at_home()?;
        let bytes = padded(bytes);
        if bytes > self.mirror.bytes() {
            return Err(Error::invalid(
                "staging",
                format!("{} bytes", self.mirror.bytes()),
                format!("at least {bytes}"),
            )
            .hint("ask for the bytes of the largest call before you make it"));
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
        let device = self.mirror.device(begin);
        let writer = Writer::new(self.mirror.host(begin, bytes), begin, device, None);
        Ok((writer, &mut self.scratch))
    }

    fn places(&self) -> Places {
        Places::Memory
    }

    fn must_align(&mut self, _: u64) {}
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Memory must outlive the launches that read it. A failure means that the context is gone, and they with it.
        let _ = self.drain();
    }
}
