// SPDX-License-Identifier: MIT OR Apache-2.0
//! The checks of a call before anything is launched: shapes, types, alignment, ranges, and the device of its memory.

use crate::call::{Band, QRange, Range, Ranges, RawTensor, Score};
use crate::device::driver::device_of;
use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::kernel::check;
pub(in crate::kernel::cuda) use crate::kernel::check::{dropout, heads, same_shape};
use crate::kernel::cuda::abi::params::Tensor;
use alloc::format;
use core::f64::consts::LOG2_E;

/// Beyond this, a difference of two positions plus a window would overflow.
const FAR: i64 = 1 << 61;
/// The largest shift of a band.
const SHIFT: u64 = 1 << 42;
/// The upper bound of windows; no two positions are as far apart.
const WIDE: i64 = 1 << 62;

/// The requirements on a tensor of a call.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel::cuda) struct TensorSpec {
    pub heads: u32,
    pub dim: u32,
    pub dtype: Dtype,
    /// Bytes that every row must be aligned to.
    pub align: usize,
}

/// The device, and whether addresses are memory that the driver knows. Symbols are checked when a run replaces them
/// with addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checker {
    pub(in crate::kernel::cuda) ordinal: i32,
    pub(in crate::kernel::cuda) is_memory: bool,
}

impl Checker {
    /// A required tensor of the call.
    pub(in crate::kernel::cuda) fn needed(self, name: &str, t: &RawTensor, expected: TensorSpec) -> Result<Tensor> {
        check::tensor(name, t, expected.heads, expected.dim, expected.dtype)?;
        self.memory(name, t, expected.align)
    }

    /// As [`Checker::needed`], or nothing.
    pub(in crate::kernel::cuda) fn optional(self, name: &str, t: &RawTensor, expected: TensorSpec) -> Result<Tensor> {
        if t.is_none() { Ok(Tensor::default()) } else { self.needed(name, t, expected) }
    }

    /// A table of one f32 for each head, `[1, heads, 1]`, or nothing.
    pub(in crate::kernel::cuda) fn per_head(self, name: &str, t: &RawTensor, heads: u32) -> Result<Tensor> {
        check::per_head(name, t, heads)?;
        if t.is_none() { Ok(Tensor::default()) } else { self.memory(name, t, 4) }
    }

    /// The sinks of each head, `[1, heads, n]`, or nothing.
    pub(in crate::kernel::cuda) fn sinks(self, t: &RawTensor, heads: u32) -> Result<Tensor> {
        check::sinks(t, heads)?;
        if t.is_none() { Ok(Tensor::default()) } else { self.memory("sinks", t, 4) }
    }

    /// Address, strides and device of a tensor of any shape.
    pub(in crate::kernel::cuda) fn memory(self, name: &str, t: &RawTensor, align: usize) -> Result<Tensor> {
        let size = t.dtype.size() as i64;
        let empty = t.tokens == 0 || t.heads == 0 || t.dim == 0;
        let out = Tensor {
            ptr: t.ptr as usize as u64,
            token: t.token_stride.saturating_mul(size),
            head: t.head_stride.saturating_mul(size),
        };
        if empty {
            return Ok(out);
        }
        if t.is_none() {
            return Err(Error::invalid(name, "none", "a tensor"));
        }
        if !out.ptr.is_multiple_of(align as u64) {
            return Err(Error::invalid(
                format!("{name}.ptr"),
                format!("{:#x}", out.ptr),
                format!("aligned to {align} bytes"),
            ));
        }
        let strides = [("token_stride", out.token, t.tokens > 1), ("head_stride", out.head, t.heads > 1)];
        for (field, bytes, used) in strides {
            if used && bytes % align as i64 != 0 {
                return Err(Error::invalid(
                    format!("{name}.{field}"),
                    format!("{bytes} bytes"),
                    format!("a multiple of {align}"),
                ));
            }
        }
        if t.tokens > 1 && i32::try_from(out.token).is_err() {
            return Err(Error::unsupported(
                format!("{name}.token_stride of {} bytes", out.token),
                "kernels step through rows with 32-bit strides",
                "use strides below 2 GiB",
            ));
        }
        self.home(name, t.ptr).map(|()| out)
    }

    /// The device of an address's memory.
    pub(in crate::kernel::cuda) fn home(self, name: &str, address: *const u8) -> Result<()> {
        if !self.is_memory {
            return Ok(());
        }
        match device_of(address) {
            Some(device) if device == self.ordinal => Ok(()),
            Some(device) => Err(Error::invalid(
                format!("{name}.ptr"),
                format!("memory of device {device}"),
                format!("memory of device {}", self.ordinal),
            )),
            None => Err(Error::invalid(
                format!("{name}.ptr"),
                format!("{address:p}, which the driver does not know"),
                format!("memory of device {}", self.ordinal),
            )),
        }
    }
}

/// Element type and head dims that the kernels exist for.
pub(in crate::kernel::cuda) fn element(dtype: Dtype) -> Result<()> {
    match dtype {
        Dtype::F16 | Dtype::Bf16 => Ok(()),
        other => Err(Error::unsupported(
            format!("dtype {other}"),
            "the CUDA kernels take f16 and bf16",
            "convert, or use the CPU kernels",
        )),
    }
}

/// Refuses slopes for each document, which the kernels do not have.
pub(super) fn one_row_of_slopes(rows: u64) -> Result<()> {
    if rows <= 1 {
        return Ok(());
    }
    Err(Error::unsupported(
        format!("alibi_slopes of {rows} documents"),
        "the CUDA kernels take one slope for each head",
        "give [heads] slopes for all documents, a call for each document, or use the CPU kernels",
    ))
}

/// Checks one head dim; `largest` is the largest dim of the shapes.
pub(in crate::kernel::cuda) fn dim(name: &str, dim: u32, largest: u32) -> Result<()> {
    if dim == 0 || !dim.is_multiple_of(8) || dim > largest {
        return Err(Error::unsupported(
            format!("{name} {dim}"),
            format!("the CUDA kernels take multiples of 8 up to {largest}"),
            if dim > largest { "use the CPU kernels" } else { "pad the heads with zeros" },
        ));
    }
    Ok(())
}

/// Checks the score's numbers, and returns the windows, cut to the largest distance of positions.
pub(in crate::kernel::cuda) fn score(s: &Score) -> Result<(i64, i64)> {
    check::score(s)?;
    // The kernels get products of these in f32; if a product is not finite, a score of 0 becomes NaN.
    let most = f64::from(f32::MAX) / LOG2_E;
    if s.scale.abs() > most {
        return Err(Error::invalid("scale", format!("{:e}", s.scale), format!("at most {most:e} (f32, base 2)")));
    }
    if s.softcap > 0.0 {
        let least = (2.0 * s.scale.abs() / most).max(f64::from(f32::MIN_POSITIVE));
        if !(least..=most).contains(&s.softcap) {
            let expected = format!("{least:e} to {most:e}, so that scale / softcap is finite in f32");
            return Err(Error::invalid("softcap", format!("{:e}", s.softcap), expected).hint("0 means no softcap"));
        }
    }
    Ok((s.window_left.min(WIDE), s.window_right.min(WIDE)))
}

fn range(argument: &str, i: usize, r: &Range, tokens: u64) -> Result<()> {
    check::stripe(argument, i, r)?;
    if r.len == 0 {
        return Ok(());
    }
    if r.row < 0 || r.row.checked_add(i64::from(r.len)).is_none_or(|end| end as u64 > tokens) {
        return Err(Error::invalid(
            format!("{argument}[{i}].row"),
            format!("{} with len {}", r.row, r.len),
            format!("rows below {tokens}"),
        ));
    }
    let span = u64::from((r.len - 1) / r.block) * u64::from(r.period) + u64::from((r.len - 1) % r.block);
    let near = |pos: i64| pos.unsigned_abs() < FAR as u64;
    if r.len > i32::MAX as u32 || span > u64::from(u32::MAX) || !near(r.pos) || !near(r.pos + span as i64) {
        return Err(Error::unsupported(
            format!("{argument}[{i}] of {} rows from position {} on, {span} positions wide", r.len, r.pos),
            "positions below 2^61, ranges of at most 2^31 rows over 2^32 positions",
            "cut the range",
        ));
    }
    Ok(())
}

/// Rows that are finished lie within their tensors.
pub(in crate::kernel::cuda) fn rows(rows: &[Range], tokens: u64) -> Result<()> {
    rows.iter().enumerate().try_for_each(|(i, r)| range("rows", i, r, tokens))
}

/// Ranges lie within their tensors, and pairs within the ranges.
pub(in crate::kernel::cuda) fn ranges(ranges: &Ranges, q_tokens: u64, k_tokens: u64, distances: bool) -> Result<()> {
    for (i, k) in ranges.k.iter().enumerate() {
        range("ranges.k", i, k, k_tokens)?;
    }
    for (i, q) in ranges.q.iter().enumerate() {
        range("ranges.q", i, &q.range, q_tokens)?;
    }
    check::pairs(ranges, |_, _| Ok(()))?;
    bands(ranges)?;
    let of = |q: &Range, k: u32, band: u32| farthest(q, &ranges.k[k as usize], &ranges.bands[band as usize]);
    let far = |q: &QRange| ranges.pairs_of(q).iter().filter_map(|pair| of(&q.range, pair.k, pair.band)).max();
    match ranges.q.iter().filter_map(far).max() {
        Some(far) if distances && far > i64::from(i32::MAX) => Err(Error::unsupported(
            format!("ALiBi over a distance of {far}"),
            "distances of at most 2^31 positions",
            "leave out the slopes",
        )),
        _ => Ok(()),
    }
}

/// Refuses shifts that distances cannot hold beside positions.
fn bands(ranges: &Ranges) -> Result<()> {
    match ranges.bands.iter().enumerate().find(|(_, band)| band.shift.unsigned_abs() > SHIFT) {
        None => Ok(()),
        Some((i, band)) => {
            Err(Error::invalid(format!("ranges.bands[{i}].shift"), band.shift, format!("within ±{SHIFT} (2^42)")))
        }
    }
}

/// The largest distance of a pair under a band, whatever the window of the call; `None` if there is no pair.
fn farthest(q: &Range, k: &Range, band: &Band) -> Option<i64> {
    if q.len == 0 || k.len == 0 {
        return None;
    }
    let (q_first, q_last) = (q.pos.max(band.q_begin), q.last().min(band.q_end.saturating_sub(1)));
    let (k_first, k_last) = (k.pos.max(band.k_begin), k.last().min(band.k_end.saturating_sub(1)));
    if q_first > q_last || k_first > k_last {
        return None;
    }
    let low = band.distance(q_last, k_first).max(band.low);
    let high = band.distance(q_first, k_last).min(band.high);
    (low <= high).then(|| low.abs().max(high.abs()))
}
