// SPDX-License-Identifier: MIT OR Apache-2.0
//! Global memory: allocations, their bytes and what is known of each byte.
//!
//! Device memory is host memory, so an address is the host's address and copies are plain copies. Each allocation lies
//! between red zones, is poisoned when it is made and when it is freed, and is kept for a while after that, so that a
//! stray access says whose memory it hit. A freed allocation's addresses are not handed out again while it is kept.

use super::footprint::Footprint;
use super::lanes::{LaneAccess, LaneRace, LaneShadow};
use super::order::OrderShadow;
use crate::report::Fault;
use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, VecDeque};

/// Bytes of red zone on each side.
const RED: usize = 1024;
/// Allocations start at multiples of this, as on a device.
const ALIGN: usize = 256;
/// Freed bytes that are kept for use-after-free reports.
const QUARANTINE: usize = 64 << 20;
/// Written into memory that was never written: as f32, f16 and bf16 a NaN.
const POISON_NEW: u8 = 0xff;
/// Written into freed memory: a NaN as well, and recognisable.
const POISON_FREED: u8 = 0xfd;

/// Whose memory an allocation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Device memory.
    Device,
    /// Page-locked host memory, which a device can read: the host writes it unseen, so it counts as written.
    Host,
    /// A `.const` variable: kernels may not write it.
    Constant,
}

/// One allocation.
pub(crate) struct Allocation {
    pub(crate) base: u64,
    pub(crate) size: usize,
    pub(crate) id: u64,
    pub(crate) owner: Owner,
    pub(crate) freed: bool,
    pub(crate) name: String,
    layout: Layout,
    block: *mut u8,
    /// A bit per byte, a word per line.
    pub(crate) written: Vec<u16>,
    pub(crate) order: OrderShadow,
    lanes: LaneShadow,
    /// Bytes the current launch read and wrote, a bit per byte; empty until it touches this allocation.
    reads: Vec<u16>,
    writes: Vec<u16>,
}

// SAFETY: an allocation owns its block; the raw pointer is only a handle to it.
unsafe impl Send for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: block came from `alloc` with this layout and is released once, here.
        unsafe { dealloc(self.block, self.layout) }
    }
}

impl Allocation {
    fn fill(&mut self, byte: u8) {
        // SAFETY: the block holds `size` bytes from `base` on.
        unsafe { std::ptr::write_bytes(self.base as *mut u8, byte, self.size) }
    }

    /// The bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the block holds `size` bytes from `base` on, for as long as the allocation lives.
        unsafe { std::slice::from_raw_parts(self.base as *const u8, self.size) }
    }

    /// The bytes, to be written.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; the allocation is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.base as *mut u8, self.size) }
    }

    /// Whether something wrote a byte.
    pub(crate) fn is_written(&self, offset: usize) -> bool {
        self.written[offset / 16] >> (offset % 16) & 1 == 1
    }

    /// Marks bytes as written.
    pub(crate) fn mark(&mut self, offset: usize, len: usize) {
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let line = at / 16;
            let stop = end.min((line + 1) * 16);
            let (lo, hi) = (at - line * 16, stop - line * 16);
            self.written[line] |= (((1u32 << hi) - 1) & !((1u32 << lo) - 1)) as u16;
            at = stop;
        }
    }

    /// Forgets that bytes were written.
    pub(crate) fn unmark(&mut self, offset: usize, len: usize) {
        for at in offset..offset + len {
            self.written[at / 16] &= !(1 << (at % 16));
        }
    }

    /// Checks and records the order between the lanes of a warp; addresses are offsets here.
    #[inline]
    pub(crate) fn lane_access(&mut self, a: &LaneAccess<'_>) -> Result<(), LaneRace> {
        if self.owner == Owner::Constant {
            return Ok(());
        }
        if self.lanes.is_empty() {
            self.lanes = LaneShadow::new(self.size.div_ceil(16));
        }
        self.lanes.access(a)
    }

    /// Notes that the current launch touches bytes of a line.
    #[inline]
    pub(crate) fn note(&mut self, line: u32, mask: u16, write: bool) {
        let bits = if write { &mut self.writes } else { &mut self.reads };
        if bits.is_empty() {
            *bits = vec![0; self.size.div_ceil(16)];
        }
        bits[line as usize] |= mask;
    }

    /// The first byte of a range that nothing has written.
    pub(crate) fn first_unwritten(&self, offset: usize, len: usize) -> Option<usize> {
        let (mut at, end) = (offset, offset + len);
        while at < end {
            if at % 16 == 0 && end - at >= 16 && self.written[at / 16] == 0xffff {
                at += 16;
                continue;
            }
            if self.written[at / 16] >> (at % 16) & 1 == 0 {
                return Some(at);
            }
            at += 1;
        }
        None
    }

    fn describe(&self) -> String {
        let what = match self.owner {
            Owner::Device => "device",
            Owner::Host => "page-locked host",
            Owner::Constant => "constant",
        };
        let name = if self.name.is_empty() { String::new() } else { format!(" `{}`", self.name) };
        format!("{what} allocation {}{name} of {} bytes at {:#x}", self.id, self.size, self.base)
    }
}

/// Global memory.
#[derive(Default)]
pub struct Memory {
    allocations: BTreeMap<u64, Allocation>,
    kept: VecDeque<u64>,
    kept_bytes: usize,
    next_id: u64,
    live_bytes: usize,
    /// The last allocation that was asked for.
    cache: (u64, u64, usize),
    pub(crate) next_block: u32,
}

impl Memory {
    /// Memory without allocations.
    pub fn new() -> Self {
        Self { next_block: 1, next_id: 1, ..Self::default() }
    }

    /// Allocates device memory; its bytes count as unwritten. Returns its address, a multiple of 256.
    pub fn alloc(&mut self, size: usize) -> u64 {
        self.alloc_as(size, Owner::Device, "")
    }

    /// Allocates memory for an owner, with a name for reports.
    pub fn alloc_as(&mut self, size: usize, owner: Owner, name: &str) -> u64 {
        let Ok(layout) = Layout::from_size_align(size.next_multiple_of(16) + 2 * RED, ALIGN) else { return 0 };
        // SAFETY: the size is not 0.
        let block = unsafe { alloc(layout) };
        if block.is_null() {
            return 0;
        }
        let base = block as u64 + RED as u64;
        let lines = size.div_ceil(16);
        let mut a = Allocation {
            base,
            size,
            id: self.next_id,
            owner,
            freed: false,
            name: name.to_owned(),
            layout,
            block,
            written: vec![if owner == Owner::Host { 0xffff } else { 0 }; lines],
            order: OrderShadow::default(),
            lanes: LaneShadow::default(),
            reads: Vec::new(),
            writes: Vec::new(),
        };
        a.fill(POISON_NEW);
        self.next_id += 1;
        self.live_bytes += size;
        self.allocations.insert(base, a);
        base
    }

    /// Frees an allocation by its address. False when there is none of that address, or it was freed before.
    pub fn free(&mut self, base: u64) -> bool {
        let Some(a) = self.allocations.get_mut(&base) else { return false };
        if a.freed {
            return false;
        }
        a.freed = true;
        a.fill(POISON_FREED);
        (a.order, a.lanes) = (OrderShadow::default(), LaneShadow::default());
        self.live_bytes -= a.size;
        self.kept_bytes += a.size;
        self.kept.push_back(base);
        while self.kept_bytes > QUARANTINE || self.kept.len() > 4096 {
            let Some(old) = self.kept.pop_front() else { break };
            if let Some(a) = self.allocations.remove(&old) {
                self.kept_bytes -= a.size;
            }
        }
        self.cache = (0, 0, 0);
        true
    }

    /// All live allocations, by address.
    pub(crate) fn live(&self) -> impl Iterator<Item = &Allocation> {
        self.allocations.values().filter(|a| !a.freed)
    }

    /// Bytes allocated and not freed.
    pub fn live_bytes(&self) -> usize {
        self.live_bytes
    }

    /// The live allocation an address lies in: its base, size and owner.
    pub fn find(&self, address: u64) -> Option<(u64, usize, Owner)> {
        let (_, a) = self.allocations.range(..=address).next_back()?;
        (!a.freed && address < a.base + a.size.max(1) as u64).then_some((a.base, a.size, a.owner))
    }

    /// The allocation with this base address.
    #[inline]
    pub(crate) fn at(&mut self, base: u64) -> &mut Allocation {
        match self.allocations.get_mut(&base) {
            Some(a) => a,
            None => unreachable!("bases come from `locate`"),
        }
    }

    /// Finds the allocation that holds `len` bytes at `address`: its base, or what is wrong.
    #[inline]
    pub(crate) fn locate(&mut self, address: u64, len: usize) -> Result<u64, (Fault, String)> {
        let (base, end, _) = self.cache;
        if address >= base && address.wrapping_add(len as u64) <= end {
            return Ok(base);
        }
        self.locate_slowly(address, len)
    }

    #[cold]
    fn locate_slowly(&mut self, address: u64, len: usize) -> Result<u64, (Fault, String)> {
        let below = self.allocations.range(..=address).next_back().map(|(_, a)| a);
        if let Some(a) = below {
            let end = a.base + a.size as u64;
            if address.checked_add(len as u64).is_some_and(|e| e <= end) && (address < end || len == 0) {
                if a.freed {
                    let at = address - a.base;
                    return Err((Fault::UseAfterFree, format!("byte {at} of {}, which was freed", a.describe())));
                }
                self.cache = (a.base, end, 0);
                return Ok(a.base);
            }
        }
        let mut text = format!("{len} bytes at {address:#x} are in no allocation");
        if let Some(a) = below {
            let past = address - a.base;
            if past < a.size as u64 + 4 * RED as u64 || address < a.base + a.size as u64 {
                text += &format!("; byte {past} of {}{}", a.describe(), if a.freed { " (freed)" } else { "" });
            }
        }
        if let Some((_, a)) = self.allocations.range(address..).next()
            && a.base - address < 4 * RED as u64
        {
            text += &format!("; {} bytes before {}", a.base - address, a.describe());
        }
        Err((Fault::OutOfBounds, text))
    }

    /// Writes bytes and marks them as written.
    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), (Fault, String)> {
        if bytes.is_empty() {
            return Ok(());
        }
        let base = self.locate(address, bytes.len())?;
        self.at(base).mark((address - base) as usize, bytes.len());
        // SAFETY: `locate` found the whole range inside one live allocation; a slice from the caller may lie in it.
        unsafe { std::ptr::copy(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        Ok(())
    }

    /// Reads bytes, written or not.
    pub fn read(&mut self, address: u64, len: usize) -> Result<Vec<u8>, (Fault, String)> {
        if len == 0 {
            return Ok(Vec::new());
        }
        self.locate(address, len)?;
        // SAFETY: as in `write`.
        Ok(unsafe { std::slice::from_raw_parts(address as *const u8, len) }.to_vec())
    }

    /// The first byte of a range that nothing has written, as a description.
    pub fn unwritten(&mut self, address: u64, len: usize) -> Option<String> {
        let base = self.locate(address, len).ok()?;
        let a = self.at(base);
        let byte = a.first_unwritten((address - base) as usize, len)?;
        Some(format!("byte {byte} of {} was never written", a.describe()))
    }

    /// Copies bytes inside this memory, with what is known of each.
    pub fn copy(&mut self, dst: u64, src: u64, len: usize) -> Result<(), (Fault, String)> {
        if len == 0 {
            return Ok(());
        }
        let from = self.locate(src, len)?;
        let to = self.locate(dst, len)?;
        let a = self.at(from);
        let start = (src - from) as usize;
        let holes: Vec<usize> = match a.first_unwritten(start, len) {
            None => Vec::new(),
            Some(first) => (first..start + len).filter(|&b| a.written[b / 16] >> (b % 16) & 1 == 0).collect(),
        };
        let b = self.at(to);
        b.mark((dst - to) as usize, len);
        for hole in holes {
            b.unmark((dst - to) as usize + hole - start, 1);
        }
        // SAFETY: both ranges lie in live allocations; they may overlap.
        unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, len) };
        Ok(())
    }

    /// How an allocation is called in reports.
    pub(crate) fn describe(&mut self, base: u64) -> String {
        self.at(base).describe()
    }

    /// Takes what the last launch read and wrote.
    pub(crate) fn take_footprints(&mut self) -> (Footprint, Footprint) {
        let (mut reads, mut writes) = (Footprint::default(), Footprint::default());
        for a in self.allocations.values_mut() {
            for (bits, out) in [(&mut a.reads, &mut reads), (&mut a.writes, &mut writes)] {
                let mut run: Option<u64> = None;
                for (line, &mask) in bits.iter().enumerate() {
                    let at = a.base + line as u64 * 16;
                    match (mask, run) {
                        (0xffff, None) => run = Some(at),
                        (0xffff, Some(_)) => {}
                        _ => {
                            if let Some(start) = run.take() {
                                out.add(start, at - start);
                            }
                            for byte in (0..16).filter(|b| mask >> b & 1 == 1) {
                                out.add(at + byte, 1);
                            }
                        }
                    }
                }
                if let Some(start) = run {
                    out.add(start, a.base + bits.len() as u64 * 16 - start);
                }
                bits.clear();
            }
        }
        (reads, writes)
    }

    /// Forgets who accessed what: launches that follow one another do not race.
    pub(crate) fn new_launch(&mut self, blocks: u32) -> u32 {
        if self.next_block.checked_add(blocks).is_none() {
            for a in self.allocations.values_mut() {
                (a.order, a.lanes) = (OrderShadow::default(), LaneShadow::default());
            }
            self.next_block = 1;
        }
        let first = self.next_block;
        self.next_block += blocks;
        first
    }
}
