// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies, casts and ordered sums of blocks; delta; rows that no pair covers.
//!
//! All are bound by memory, so they run on the calling thread, in short chunks on the stack.

use super::check;
use super::rows::{address, load, store, widen_from};
use super::simd::Real;
use super::tile::at;
use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::kernel::{Block, Delta, Finish, RawTensor, Transform, merge};
use alloc::format;

/// Elements of a chunk.
const CHUNK: usize = 256;

pub(super) fn check_transform(t: &Transform) -> Result<()> {
    for (i, b) in t.blocks.iter().enumerate() {
        let Some(sources) = t.sources.get(b.sources_begin as usize..b.sources_end as usize) else {
            return Err(Error::invalid(
                format!("blocks[{i}].sources"),
                format!("{}..{}", b.sources_begin, b.sources_end),
                format!("entries of sources, which has {}", t.sources.len()),
            ));
        };
        for (j, s) in sources.iter().enumerate() {
            check::same_shape(|| format!("blocks[{i}].sources[{j}] [tokens, heads, dim]"), s, &b.dst)?;
        }
        b.check_in_place(i, sources)?;
    }
    Ok(())
}

/// # Safety
/// Checked; tensors are valid, and blocks overlap nothing but a first source that is `dst`.
pub(super) unsafe fn transform(t: &Transform) {
    for b in t.blocks {
        let sources = &t.sources[b.sources_begin as usize..b.sources_end as usize];
        let wide = b.dst.dtype == Dtype::F64 || sources.iter().any(|s| s.dtype == Dtype::F64);
        // SAFETY: the caller's promise is passed on.
        unsafe { if wide { block::<f64>(b, sources) } else { block::<f32>(b, sources) } }
    }
}

/// # Safety
/// As [`transform`].
unsafe fn block<A: Real>(b: &Block, sources: &[RawTensor]) {
    let dst = &b.dst;
    let (tokens, heads, dim) = (dst.tokens as usize, dst.heads as usize, dst.dim as usize);
    let compact = |depth: fn(&RawTensor) -> bool| depth(dst) && sources.iter().all(depth);
    // Runs as long as all tensors allow: everything, the heads of a token, or one head.
    let (outer, inner, run) = if compact(RawTensor::is_compact) {
        (1, 1, tokens * heads * dim)
    } else if compact(|t| t.heads <= 1 || t.head_stride == i64::from(t.dim)) {
        (tokens, 1, heads * dim)
    } else {
        (tokens, heads, dim)
    };
    let same = match sources {
        [s] => s.dtype == dst.dtype,
        _ => false,
    };
    for i in 0..outer {
        for h in 0..inner {
            let from = |t: &RawTensor| {
                let offset = i as isize * t.token_stride as isize + h as isize * t.head_stride as isize;
                t.ptr.wrapping_offset(offset * t.dtype.size() as isize)
            };
            let to = from(dst);
            if same {
                let source = from(&sources[0]).cast_const();
                if source != to.cast_const() {
                    // SAFETY: a run of both; another source than dst itself does not overlap it.
                    unsafe { core::ptr::copy_nonoverlapping(source, to, run * dst.dtype.size()) };
                }
                continue;
            }
            let mut done = 0;
            while done < run {
                let n = CHUNK.min(run - done);
                let (mut sum, mut next) = ([A::ZERO; CHUNK], [A::ZERO; CHUNK]);
                for (j, s) in sources.iter().enumerate() {
                    let source = from(s).wrapping_add(done * s.dtype.size());
                    if j == 0 {
                        // SAFETY: `done + n ≤ run` elements of each tensor are there.
                        unsafe { load(s.dtype, source, &mut sum[..n]) };
                        continue;
                    }
                    // SAFETY: as above.
                    unsafe { load(s.dtype, source, &mut next[..n]) };
                    for (x, &y) in sum[..n].iter_mut().zip(&next[..n]) {
                        *x = *x + y;
                    }
                }
                // SAFETY: as above.
                unsafe { store(dst.dtype, &sum[..n], to.wrapping_add(done * dst.dtype.size())) };
                done += n;
            }
        }
    }
}

pub(super) fn check_delta(d: &Delta) -> Result<()> {
    check::same_shape(|| "d_o [tokens, heads, dim]".into(), &d.d_o, &d.o)?;
    check::tensor("d_o", &d.d_o, d.o.heads, d.o.dim, d.o.dtype)?;
    check::tensor("delta", &d.delta, d.o.heads, 1, d.o.dtype.accumulator())?;
    if d.delta.tokens != d.o.tokens {
        return Err(Error::invalid("delta.tokens", d.delta.tokens, d.o.tokens));
    }
    Ok(())
}

/// # Safety
/// Checked for sums of `A`; tensors are valid, and `delta` overlaps nothing.
pub(super) unsafe fn delta<A: Real>(c: &Delta) {
    /// Partial sums, so that they can be added side by side.
    const LANES: usize = 16;
    let (dim, size) = (c.o.dim as usize, c.o.dtype.size());
    for t in 0..c.o.tokens as i64 {
        for h in 0..c.o.heads {
            let mut sums = [A::ZERO; LANES];
            let (mut o, mut d_o) = ([A::ZERO; CHUNK], [A::ZERO; CHUNK]);
            let mut done = 0;
            while done < dim {
                let n = CHUNK.min(dim - done);
                // SAFETY: `done + n ≤ dim`, and the row is within both tensors.
                unsafe {
                    widen_from(c.o.dtype, address(&c.o, t, h).add(done * size), &mut o[..n]);
                    widen_from(c.o.dtype, address(&c.d_o, t, h).add(done * size), &mut d_o[..n]);
                }
                o[n..].fill(A::ZERO);
                d_o[n..].fill(A::ZERO);
                let padded = n.next_multiple_of(LANES);
                for (x, y) in o[..padded].chunks_exact(LANES).zip(d_o[..padded].chunks_exact(LANES)) {
                    for ((sum, &x), &y) in sums.iter_mut().zip(x).zip(y) {
                        *sum = *sum + x * y;
                    }
                }
                done += n;
            }
            let mut width = LANES;
            while width > 1 {
                width /= 2;
                for i in 0..width {
                    sums[i] = sums[i] + sums[i + width];
                }
            }
            // SAFETY: the row is within delta.
            unsafe { *at::<A>(&c.delta, t, h) = sums[0] };
        }
    }
}

pub(super) fn check_finish(f: &Finish) -> Result<()> {
    check::tensor("lse", &f.lse, f.o.heads, 1, f.o.dtype.accumulator())?;
    check::per_head("sinks", &f.sinks, f.o.heads)?;
    check::finish_rows(&f.o, "o", f.rows)?;
    check::finish_rows(&f.lse, "lse", f.rows)
}

/// # Safety
/// Checked for sums of `A`; tensors are valid, and nobody else touches `o` and `lse`.
pub(super) unsafe fn finish<A: Real>(f: &Finish) {
    for range in f.rows {
        for i in 0..i64::from(range.len) {
            for h in 0..f.o.heads {
                // SAFETY: rows and heads are within o, lse and sinks (checked).
                unsafe {
                    let sink = if f.sinks.is_none() {
                        A::NEG_INFINITY
                    } else {
                        A::from_f64((*at::<f32>(&f.sinks, 0, h)).into())
                    };
                    // Zero is zero bytes in every type.
                    address(&f.o, range.row + i, h).write_bytes(0, f.o.dim as usize * f.o.dtype.size());
                    *at::<A>(&f.lse, range.row + i, h) = merge::sink(A::NEG_INFINITY, sink).1;
                }
            }
        }
    }
}
