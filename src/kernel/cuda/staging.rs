// SPDX-License-Identifier: MIT OR Apache-2.0
//! How the ranges of a call reach the device: a ring of page-locked memory with its mirror on the device.
//!
//! A call writes its lists into the next free part of the ring, has that part copied in stream order, launches, and
//! records an event. A part is used again once its event has passed. With a ring that holds what is in flight, the host
//! never waits; with a smaller one it waits here, and nowhere else in the backend. Nothing is allocated after `new`.

use super::driver::{Context, Event, sys::CUstream};
use super::params::{Run, Work};
use super::pinned_mirror::PinnedMirror;
use crate::error::{Error, Result};
use alloc::collections::VecDeque;
use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;
use bytemuck::AnyBitPattern;

/// Parts begin at multiples of this; so do arrays inside them.
const ALIGN: usize = 16;

/// What rounds up without leaving the address space. (Less than that is the driver's to refuse.)
const MOST_BYTES: usize = isize::MAX as usize & !(ALIGN - 1);
/// Each launch in flight is an event of the driver's, so a number that is not meant would take all memory and time.
const MOST_LAUNCHES: usize = 1 << 20;

/// `bytes` rounded up to a multiple of what arrays are aligned to.
pub(super) const fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN)
}

/// A ring of uploads; see [`super::Cuda::staging`].
#[derive(Debug)]
pub struct Staging {
    mirror: PinnedMirror,
    events: Vec<Event>,
    /// Parts whose launches may still run, oldest first.
    in_flight: VecDeque<Part>,
    next_event: usize,
    head: usize,
    /// Tiles while they are sorted.
    pub(super) tiles: Vec<(u64, Work)>,
    /// Runs of keys while they are put together: another of the same component, and the least cost met so far.
    pub(super) runs: Vec<(u32, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Part {
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
            tiles: Vec::with_capacity(mirror.bytes() / size_of::<Work>()),
            runs: Vec::with_capacity(mirror.bytes() / size_of::<Run>()),
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

    /// The next part of the ring, free for `bytes` bytes. The context that launches is current.
    pub(super) fn begin(&mut self, bytes: usize) -> Result<Writer> {
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
        Ok(Writer {
            host: self.mirror.host(begin),
            device: self.mirror.device(begin),
            begin,
            used: 0,
            filled: 0,
            bytes,
        })
    }

    /// Copies what was written to the device and clears its words, in stream order.
    pub(super) fn upload(&self, writer: &Writer, stream: CUstream) -> Result<()> {
        self.mirror.upload(writer.begin, writer.filled, stream)?;
        self.mirror.clear(writer.begin + writer.filled, writer.used - writer.filled, stream)
    }

    /// Marks the point of the stream after which the part is free again. To be called after an upload, whatever
    /// became of the launch.
    pub(super) fn end(&mut self, writer: &Writer, stream: CUstream) -> Result<()> {
        if writer.used == 0 {
            return Ok(());
        }
        let event = self.next_event;
        self.events[event].record(stream)?;
        self.next_event = (event + 1) % self.events.len();
        self.head = writer.begin + padded(writer.used);
        self.in_flight.push_back(Part { begin: writer.begin, end: self.head, event });
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Memory must outlive the launches that read it. A failure means that the context is gone, and they with it.
        let _ = self.drain();
    }
}

/// Hands out arrays of one part of the ring.
#[derive(Debug)]
pub(super) struct Writer {
    host: *mut u8,
    device: u64,
    begin: usize,
    used: usize,
    /// Bytes of arrays; what lies behind them are words.
    filled: usize,
    bytes: usize,
}

impl Writer {
    /// An array of `n`, and its address on the device. The slice is the caller's until the upload.
    ///
    /// # Panics
    /// When the part is smaller than what [`Staging::begin`] was told; that would be a defect of the backend.
    pub fn array<T: AnyBitPattern>(&mut self, n: usize) -> (&'static mut [T], u64) {
        assert_eq!(self.filled, self.used, "arrays come before words");
        let at = self.take(padded(n * size_of::<T>()));
        self.filled = self.used;
        // SAFETY: the part has these bytes, was zeroed at allocation, is aligned to 16 and handed out once; any bytes
        // are a `T`. The slice never leaves the call that holds the staging.
        let slice = unsafe { core::slice::from_raw_parts_mut(self.host.add(at).cast::<T>(), n) };
        (slice, self.device + at as u64)
    }

    /// The address of `n` words that are zero on the device when the launch begins. They come after all arrays.
    ///
    /// # Panics
    /// As [`Writer::array`].
    pub fn words(&mut self, n: usize) -> u64 {
        let at = self.take(padded(n * 4));
        self.device + at as u64
    }

    fn take(&mut self, bytes: usize) -> usize {
        let at = self.used;
        let end = at + bytes;
        assert!(end <= self.bytes, "the part holds {} bytes, not {end}", self.bytes);
        self.used = end;
        at
    }
}
