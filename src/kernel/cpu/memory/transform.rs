// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies, casts and ordered sums of blocks; rows that no pair covers.
//!
//! All are bound by memory bandwidth, so they run on the calling thread. The order of memory accesses decides their
//! speed.

use super::convert::{self, Convert, VectorLoop};
use super::rows::{address, load, store};
use crate::call::{Block, Finish, RawTensor, Transform};
use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::kernel::cpu::attention::tile::at;
use crate::kernel::cpu::check;
use crate::kernel::cpu::vector::simd::Real;
use crate::kernel::merge::{self, LogSumExp};
use alloc::format;

/// The number of blocks that are processed together, and the bytes of each at a time (at least one row).
const TOGETHER: usize = 16;
const AT_A_TIME: usize = 512;

/// A long run is read at several places at once, this many elements apart. The hardware prefetches each stream; one
/// stream alone reaches half of the memory bandwidth.
const PLACES: usize = 4;
const APART: usize = 4096;

pub(crate) fn check_transform(t: &Transform) -> Result<()> {
    for (i, b) in t.blocks.iter().enumerate() {
        let Some(sources) = t.sources.get(b.sources_begin as usize..b.sources_end as usize) else {
            return Err(Error::invalid(
                format!("blocks[{i}].sources"),
                format!("{}..{}", b.sources_begin, b.sources_end),
                format!("entries of sources, which has {}", t.sources.len()),
            ));
        };
        for (j, s) in sources.iter().enumerate() {
            check::same_shape(|| format!("blocks[{i}].sources[{j}]"), s, &b.dst)?;
        }
        b.check_in_place(i, sources)?;
    }
    Ok(())
}

/// # Safety
/// Checked; tensors are valid, and blocks overlap nothing but a first source that is `dst`.
pub(crate) unsafe fn transform(t: &Transform) {
    // SAFETY: checked, tensors valid, blocks apart but for a first source that is `dst` (the contract).
    unsafe {
        convert::on_best(&Narrow(t));
        for b in t.blocks.iter().filter(|b| is_wide(b, t)) {
            wide(b, sources(b, t));
        }
    }
}

fn sources<'a>(b: &Block, t: &Transform<'a>) -> &'a [RawTensor] {
    &t.sources[b.sources_begin as usize..b.sources_end as usize]
}

/// Whether f64 takes part.
fn is_wide(b: &Block, t: &Transform) -> bool {
    b.dst.dtype == Dtype::F64 || sources(b, t).iter().any(|s| s.dtype == Dtype::F64)
}

/// The runs of a block: `tokens` times `heads` runs of `run` elements, the longest that are contiguous in all its
/// tensors.
#[derive(Clone, Copy)]
struct RunGrid {
    tokens: usize,
    heads: usize,
    run: usize,
}

impl RunGrid {
    fn new(dst: &RawTensor, sources: &[RawTensor]) -> Self {
        let (tokens, heads, dim) = (dst.tokens as usize, dst.heads as usize, dst.dim as usize);
        let all = |which: fn(&RawTensor) -> bool| which(dst) && sources.iter().all(which);
        if all(RawTensor::is_compact) {
            Self { tokens: 1, heads: 1, run: tokens * heads * dim }
        } else if all(|t| t.heads <= 1 || t.head_stride == i64::from(t.dim)) {
            Self { tokens, heads: 1, run: heads * dim }
        } else {
            Self { tokens, heads, run: dim }
        }
    }
}

/// The address of a token's head.
fn row(t: &RawTensor, token: usize, head: usize) -> *mut u8 {
    let offset = token as isize * t.token_stride as isize + head as isize * t.head_stride as isize;
    t.ptr.wrapping_offset(offset * t.dtype.size() as isize)
}

/// The blocks whose sums are f32.
struct Narrow<'a>(&'a Transform<'a>);

impl VectorLoop for Narrow<'_> {
    /// A block of one run is processed from start to end. Other blocks are processed together, a few tokens of each in
    /// turn: the blocks of an all-to-all hold different heads of the same tokens, so memory is then read, or written,
    /// once from start to end, and not with a stride once for each block.
    #[inline(always)]
    unsafe fn run<V: Convert>(&self) {
        let t = self.0;
        let written = |d: &RawTensor| d.tokens as usize * d.heads as usize * d.dim as usize * d.dtype.size();
        let stream = t.blocks.iter().map(|b| written(&b.dst)).sum::<usize>() >= convert::STREAM;
        let mut group = [0; TOGETHER];
        let mut walks = [RunGrid { tokens: 0, heads: 0, run: 0 }; TOGETHER];
        let mut n = 0;
        for (i, b) in t.blocks.iter().enumerate() {
            if is_wide(b, t) {
                continue;
            }
            let walk = RunGrid::new(&b.dst, sources(b, t));
            if walk.tokens <= 1 {
                // SAFETY: checked, tensors valid and blocks apart (the contract of `transform`, under which a `Narrow`
                // is made), here and below.
                unsafe {
                    if walk.heads == 1 && walk.run >= PLACES * APART && !is_copy(b, sources(b, t)) {
                        long::<V>(b, sources(b, t), walk.run, stream);
                    } else {
                        narrow::<V>(b, sources(b, t), walk, 0..walk.tokens, stream);
                    }
                }
                continue;
            }
            (group[n], walks[n]) = (i, walk);
            n += 1;
            if n == TOGETHER {
                // SAFETY: as above.
                unsafe { self.together::<V>(&group, &walks, stream) };
                n = 0;
            }
        }
        // SAFETY: as above.
        unsafe {
            self.together::<V>(&group[..n], &walks[..n], stream);
            if stream {
                V::finished();
            }
        }
    }
}

impl Narrow<'_> {
    /// # Safety
    /// As [`transform`].
    #[inline(always)]
    unsafe fn together<V: Convert>(&self, group: &[usize], walks: &[RunGrid], stream: bool) {
        let most = walks.iter().map(|w| w.tokens).max().unwrap_or(0);
        let bytes = |(&i, w): (&usize, &RunGrid)| w.heads * w.run * self.0.blocks[i].dst.dtype.size();
        let tokens = (AT_A_TIME / group.iter().zip(walks).map(bytes).max().unwrap_or(0).max(1)).max(1);
        for first in (0..most).step_by(tokens) {
            for (&i, &walk) in group.iter().zip(walks) {
                let b = &self.0.blocks[i];
                let tokens = first..walk.tokens.min(first + tokens);
                // SAFETY: checked, tensors valid and blocks apart (the contract of `transform`).
                unsafe { narrow::<V>(b, sources(b, self.0), walk, tokens, stream) };
            }
        }
    }
}

/// Whether nothing is computed.
fn is_copy(b: &Block, sources: &[RawTensor]) -> bool {
    matches!(sources, [s] if s.dtype == b.dst.dtype)
}

/// A block of one long run whose sums are f32, in several places at once.
///
/// # Safety
/// As [`transform`].
#[inline(always)]
unsafe fn long<V: Convert>(b: &Block, sources: &[RawTensor], run: usize, stream: bool) {
    let (dst, unit) = (&b.dst, 4 * V::W);
    let stream = stream && sources.first().is_none_or(|s| s.ptr != dst.ptr);
    // From a boundary of lines on, so that all units begin at one.
    let lead = (dst.ptr.addr().wrapping_neg() % 64 / dst.dtype.size()).min(run);
    // SAFETY: elements below `run` of each tensor, valid and apart by the contract of `transform`, here and below.
    unsafe { part::<V>(dst, sources, 0, lead, stream) };
    for first in (lead..run).step_by(PLACES * APART) {
        for k in (0..APART).step_by(unit) {
            for place in 0..PLACES {
                let begin = first + place * APART + k;
                if begin < run {
                    // SAFETY: as above.
                    unsafe { part::<V>(dst, sources, begin, run.min(begin + unit), stream) };
                }
            }
        }
    }
}

/// Elements `begin..end` of tensors that are one run.
///
/// # Safety
/// As [`transform`], with `end` elements in each.
// A function and not a closure: functions that a closure calls need not be inlined, and then lack the instruction set.
#[inline(always)]
unsafe fn part<V: Convert>(dst: &RawTensor, sources: &[RawTensor], begin: usize, end: usize, stream: bool) {
    let at = |t: &RawTensor| (t.ptr.wrapping_add(begin * t.dtype.size()), t.dtype);
    // SAFETY: elements `begin..end` of each tensor, which the contract of `transform` makes valid; V's instructions
    // are present.
    unsafe { convert::runs::sum::<V>(at(dst), sources.iter().map(at), end - begin, stream) };
}

/// Some tokens of a block whose sums are f32.
///
/// # Safety
/// As [`transform`].
#[inline(always)]
unsafe fn narrow<V: Convert>(
    b: &Block,
    sources: &[RawTensor],
    walk: RunGrid,
    tokens: core::ops::Range<usize>,
    stream: bool,
) {
    let dst = &b.dst;
    let in_place = sources.first().is_some_and(|s| s.ptr == dst.ptr);
    // In place, the lines were just read and are in the cache.
    let (stream, copied) = (stream && !in_place, is_copy(b, sources));
    if copied && in_place {
        return;
    }
    for i in tokens {
        for h in 0..walk.heads {
            let to = row(dst, i, h);
            // SAFETY: one run of each tensor; a source other than dst itself does not overlap dst.
            unsafe {
                if copied {
                    convert::runs::copy::<V>(row(&sources[0], i, h), to, walk.run * dst.dtype.size(), stream);
                } else {
                    let sources = sources.iter().map(|s| (row(s, i, h), s.dtype));
                    convert::runs::sum::<V>((to, dst.dtype), sources, walk.run, stream);
                }
            }
        }
    }
}

/// A block with sums in f64, in chunks on the stack.
///
/// # Safety
/// As [`transform`].
unsafe fn wide(b: &Block, sources: &[RawTensor]) {
    /// Elements of a chunk.
    const CHUNK: usize = 256;
    let walk = RunGrid::new(&b.dst, sources);
    for (i, h) in (0..walk.tokens).flat_map(|i| (0..walk.heads).map(move |h| (i, h))) {
        for done in (0..walk.run).step_by(CHUNK) {
            let n = CHUNK.min(walk.run - done);
            let (mut sum, mut next) = ([0f64; CHUNK], [0f64; CHUNK]);
            let at = |t: &RawTensor| row(t, i, h).wrapping_add(done * t.dtype.size());
            for (j, s) in sources.iter().enumerate() {
                if j == 0 {
                    // SAFETY: `done + n ≤ run` elements of each tensor are there, here and below.
                    unsafe { load(s.dtype, at(s), &mut sum[..n]) };
                    continue;
                }
                // SAFETY: as above.
                unsafe { load(s.dtype, at(s), &mut next[..n]) };
                sum[..n].iter_mut().zip(&next[..n]).for_each(|(x, y)| *x += y);
            }
            // SAFETY: as above.
            unsafe { store(b.dst.dtype, &sum[..n], at(&b.dst)) };
        }
    }
}

pub(crate) fn check_finish(f: &Finish) -> Result<()> {
    check::tensor("lse", &f.lse, f.o.heads, 1, f.o.dtype.accumulator())?;
    check::sinks(&f.sinks, f.o.heads)?;
    check::finish_rows(&f.o, "o", f.rows)?;
    check::finish_rows(&f.lse, "lse", f.rows)
}

/// # Safety
/// Checked for sums of `A`; tensors are valid, and nothing else touches `o` and `lse`.
pub(crate) unsafe fn finish<A: Real>(f: &Finish) {
    for range in f.rows {
        for i in 0..i64::from(range.len) {
            for h in 0..f.o.heads {
                // SAFETY: rows and heads are within o, lse and sinks (checked).
                unsafe {
                    let sink = if f.sinks.is_none() { LogSumExp::NOTHING } else { merge::sinks_of::<A>(&f.sinks, h) };
                    // Zero is zero bytes in every type.
                    address(&f.o, range.row + i, h).write_bytes(0, f.o.dim as usize * f.o.dtype.size());
                    *at::<A>(&f.lse, range.row + i, h) = merge::sink(LogSumExp::NOTHING, sink).1;
                }
            }
        }
    }
}
