// SPDX-License-Identifier: MIT OR Apache-2.0
//! The launches that only move memory: transforms, delta, finish, merge.

use super::attention::{items, lse_words, sequence};
use super::check::{self, Checker, Expected};
use super::lists::run;
use super::params;
use super::staging::{Staging, padded};
use super::{Cuda, Stream};
use crate::call::{Delta, Finish, Merge, RawTensor, Transform};
use crate::element::Dtype;
use crate::error::{Error, Result};
use alloc::format;

const THREADS: u32 = 256;
/// Steps of a transform's block of threads: four each.
const TILE_STEPS: u64 = THREADS as u64 * 4;
/// Steps of one work item of `finish`.
const FINISH_STEPS: u64 = 2048;

impl Cuda {
    /// Bytes of staging that [`Cuda::transform`] needs for this call.
    pub fn transform_bytes(&self, call: &Transform) -> usize {
        padded(call.blocks.len() * size_of::<params::TransformBlock>())
            + padded(call.sources.len() * size_of::<params::TransformSource>())
    }

    /// Bytes of staging that [`Cuda::finish`] needs for this call.
    pub fn finish_bytes(&self, call: &Finish) -> usize {
        let rows = finish_rows(&call.o);
        let items: usize = call.rows.iter().map(|r| r.len.div_ceil(rows) as usize).sum();
        padded(call.rows.len() * size_of::<params::Run>()) + padded(items * size_of::<params::Work>())
    }

    /// Copies, casts and ordered sums: see [`Transform`].
    ///
    /// # Errors
    /// As [`Cuda::attend`]; f64 is refused.
    ///
    /// # Safety
    /// The stream is of the device's primary context. When the launch runs, in stream order, sources are valid for
    /// reads and blocks for writes; blocks overlap no other block and no source, but for a first source that is the
    /// block itself, and nobody else accesses them.
    pub unsafe fn transform(&self, call: &Transform, staging: &mut Staging, stream: Stream) -> Result<()> {
        let checker = self.checker();
        for (i, block) in call.blocks.iter().enumerate() {
            let Some(sources) = call.sources.get(block.sources_begin as usize..block.sources_end as usize) else {
                return Err(Error::invalid(
                    format!("blocks[{i}].sources"),
                    format!("{}..{}", block.sources_begin, block.sources_end),
                    format!("entries of {}", call.sources.len()),
                ));
            };
            movable(checker, &format!("blocks[{i}].dst"), &block.dst)?;
            for (j, source) in sources.iter().enumerate() {
                let name = format!("blocks[{i}].sources[{j}]");
                check::same_shape(&name, source, &block.dst)?;
                movable(checker, &name, source)?;
            }
            block.check_in_place(i, sources)?;
            let folded = fold(&block.dst, sources);
            if folded.rows * u64::from(folded.units) > u64::from(u32::MAX / 2) || folded.too_long {
                return Err(Error::unsupported(
                    format!("blocks[{i}] of {} rows", block.dst.tokens),
                    "a block has at most 2^31 steps of 8 elements (of one where rows are not aligned to 16 bytes)",
                    "cut the block",
                ));
            }
        }

        let _entered = self.enter()?;
        let function = self.blocks(&mut self.kernels())?.transform;
        let mut writer = staging.begin(self.transform_bytes(call))?;
        let (blocks, blocks_at) = writer.array::<params::TransformBlock>(call.blocks.len());
        let (sources, sources_at) = writer.array::<params::TransformSource>(call.sources.len());
        for (out, source) in sources.iter_mut().zip(call.sources) {
            *out = params::TransformSource { src: tensor(source), dtype: source.dtype as u32, unused: 0 };
        }
        let (mut tiles, mut count) = (0, 0);
        for block in call.blocks {
            let list = &call.sources[block.sources_begin as usize..block.sources_end as usize];
            let folded = fold(&block.dst, list);
            let steps = folded.rows * u64::from(folded.units);
            if steps == 0 {
                continue;
            }
            blocks[count] = params::TransformBlock {
                dst: tensor(&block.dst),
                rows: folded.rows,
                first_tile: tiles,
                heads: params::Divisor::new(folded.heads),
                units: params::Divisor::new(folded.units),
                wide: u32::from(folded.wide),
                dtype: block.dst.dtype as u32,
                sources_begin: block.sources_begin,
                sources_end: block.sources_end,
            };
            count += 1;
            tiles += steps.div_ceil(TILE_STEPS);
        }
        if count == 0 {
            return Ok(());
        }
        let params =
            params::Transform { blocks: blocks_at, sources: sources_at, tiles, block_count: count as u32, unused: 0 };
        let grid = tiles.min(1 << 30) as u32;
        // SAFETY: the caller's promise, and lists that live in the ring until the launch is done.
        sequence(staging, &writer, stream, || unsafe { function.launch(grid, THREADS, 0, stream, &params) })
    }

    /// Row sums before the backward: see [`Delta`].
    ///
    /// # Errors
    /// As [`Cuda::attend`].
    ///
    /// # Safety
    /// As [`Cuda::attend`]: o and d_o are valid for reads, delta for writes, and delta overlaps neither.
    pub unsafe fn delta(&self, call: &Delta, stream: Stream) -> Result<()> {
        let checker = self.checker();
        check::element(call.o.dtype)?;
        check::dim("o.dim", call.o.dim, 256)?;
        let like = Expected { heads: call.o.heads, dim: call.o.dim, dtype: call.o.dtype, align: 16 };
        for (name, t) in [("d_o", &call.d_o), ("delta", &call.delta)] {
            if t.tokens != call.o.tokens {
                return Err(Error::invalid(format!("{name}.tokens"), t.tokens, call.o.tokens));
            }
        }
        let lanes = (call.o.dim / 8).next_power_of_two();
        let params = params::Delta {
            o: checker.needed("o", &call.o, like)?,
            d_o: checker.needed("d_o", &call.d_o, like)?,
            delta: checker.needed("delta", &call.delta, Expected { dim: 1, dtype: Dtype::F32, align: 4, ..like })?,
            rows: rows(&call.o)?,
            heads: call.o.heads,
            dim: call.o.dim,
            dtype: call.o.dtype as u32,
            lanes,
        };
        if params.rows == 0 {
            return Ok(());
        }
        let _entered = self.enter()?;
        let function = self.blocks(&mut self.kernels())?.delta;
        let grid = params.rows.div_ceil(u64::from(THREADS / lanes)).min(1 << 30) as u32;
        // SAFETY: the caller's promise.
        unsafe { function.launch(grid, THREADS, 0, stream, &params) }
    }

    /// Rows that no pair covers: see [`Finish`].
    ///
    /// # Errors
    /// As [`Cuda::attend`].
    ///
    /// # Safety
    /// As [`Cuda::attend`]: the rows of o and lse are valid for writes, sinks for reads.
    pub unsafe fn finish(&self, call: &Finish, staging: &mut Staging, stream: Stream) -> Result<()> {
        let checker = self.checker();
        check::element(call.o.dtype)?;
        check::dim("o.dim", call.o.dim, 256)?;
        let o = Expected { heads: call.o.heads, dim: call.o.dim, dtype: call.o.dtype, align: 16 };
        let f32s = Expected { dim: 1, dtype: Dtype::F32, align: 4, ..o };
        let mut params = params::Finish {
            o: checker.needed("o", &call.o, o)?,
            lse: checker.needed("lse", &call.lse, f32s)?,
            sinks: checker.per_head("sinks", &call.sinks, call.o.heads)?,
            runs: 0,
            work: 0,
            items: 0,
            heads: call.o.heads,
            dim: call.o.dim,
            rows: finish_rows(&call.o),
        };
        let tokens = call.o.tokens.min(call.lse.tokens);
        check::rows(call.rows, tokens)?;
        if finish_steps(&call.o) > i32::MAX as u64 {
            return Err(Error::unsupported(
                format!("o of {} heads of {}", call.o.heads, call.o.dim),
                "a token has at most 2^31 steps of 8 elements",
                "finish some heads at a time",
            ));
        }

        let _entered = self.enter()?;
        let function = self.blocks(&mut self.kernels())?.finish;
        let mut writer = staging.begin(self.finish_bytes(call))?;
        let (runs, runs_at) = writer.array::<params::Run>(call.rows.len());
        for (out, range) in runs.iter_mut().zip(call.rows) {
            *out = run(range, 0, 0, 0);
        }
        let tiles: usize = call.rows.iter().map(|r| r.len.div_ceil(params.rows) as usize).sum();
        let (work, work_at) = writer.array::<params::Work>(tiles);
        let mut at = 0;
        for (i, range) in call.rows.iter().enumerate() {
            for tile in 0..range.len.div_ceil(params.rows) {
                work[at] = params::Work { run: i as u32, first: tile * params.rows };
                at += 1;
            }
        }
        params.items = items(tiles, 1)?;
        if params.items == 0 || call.o.heads == 0 {
            return Ok(());
        }
        (params.runs, params.work) = (runs_at, work_at);
        let grid = params.items.min(1 << 30);
        // SAFETY: the caller's promise, and lists that live in the ring until the launch is done.
        sequence(staging, &writer, stream, || unsafe { function.launch(grid, THREADS, 0, stream, &params) })
    }

    /// Merges two partial results: see [`Merge`].
    ///
    /// # Errors
    /// As [`Cuda::attend`].
    ///
    /// # Safety
    /// As [`Cuda::attend`]: o and lse are valid for reads and writes, the others for reads, and nothing overlaps.
    pub unsafe fn merge(&self, call: &Merge, stream: Stream) -> Result<()> {
        let checker = self.checker();
        if !call.o.dim.is_multiple_of(4) {
            return Err(Error::unsupported(format!("o.dim {}", call.o.dim), "multiples of 4", "pad with zeros"));
        }
        let o = Expected { heads: call.o.heads, dim: call.o.dim, dtype: Dtype::F32, align: 16 };
        let lse = |t| Expected { dim: lse_words(t), align: 4, ..o };
        for (name, t) in [("lse", &call.lse), ("with_o", &call.with_o), ("with_lse", &call.with_lse)] {
            if t.tokens != call.o.tokens {
                return Err(Error::invalid(format!("{name}.tokens"), t.tokens, call.o.tokens));
            }
        }
        let params = params::Merge {
            o: checker.needed("o", &call.o, o)?,
            lse: checker.needed("lse", &call.lse, lse(&call.lse))?,
            with_o: checker.needed("with_o", &call.with_o, o)?,
            with_lse: checker.needed("with_lse", &call.with_lse, lse(&call.with_lse))?,
            rows: rows(&call.o)?,
            heads: call.o.heads,
            dim: call.o.dim,
            lse_words: lse_words(&call.lse),
            with_lse_words: lse_words(&call.with_lse),
        };
        if params.rows == 0 {
            return Ok(());
        }
        let _entered = self.enter()?;
        let function = self.blocks(&mut self.kernels())?.merge;
        let grid = params.rows.div_ceil(u64::from(THREADS / 32)).min(1 << 30) as u32;
        // SAFETY: the caller's promise.
        unsafe { function.launch(grid, THREADS, 0, stream, &params) }
    }
}

/// Steps of one token in `finish`.
fn finish_steps(o: &RawTensor) -> u64 {
    u64::from(o.heads) * u64::from(o.dim / 8)
}

/// Rows of one work item of `finish`.
fn finish_rows(o: &RawTensor) -> u32 {
    (FINISH_STEPS / finish_steps(o).max(1)).max(1) as u32
}

/// Tokens times heads.
fn rows(t: &RawTensor) -> Result<u64> {
    let rows = t.tokens.saturating_mul(u64::from(t.heads));
    if rows > u64::from(u32::MAX) {
        return Err(Error::unsupported(format!("{rows} rows"), "at most 2^32 tokens times heads", "cut the call"));
    }
    Ok(rows)
}

fn movable(checker: Checker, name: &str, t: &RawTensor) -> Result<()> {
    if t.dtype == Dtype::F64 {
        return Err(Error::unsupported(format!("{name}.dtype f64"), "f16, bf16 and f32", "use the CPU kernels"));
    }
    checker.memory(name, t, t.dtype.size()).map(|_| ())
}

fn tensor(t: &RawTensor) -> params::Tensor {
    let size = t.dtype.size() as i64;
    params::Tensor {
        ptr: t.ptr as usize as u64,
        token: t.token_stride.wrapping_mul(size),
        head: t.head_stride.wrapping_mul(size),
    }
}

/// A block with the dimensions folded that lie end to end in all its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Folded {
    rows: u64,
    heads: u32,
    units: u32,
    wide: bool,
    too_long: bool,
}

fn fold(dst: &RawTensor, sources: &[RawTensor]) -> Folded {
    let all = || core::iter::once(dst).chain(sources);
    let (mut tokens, mut heads, mut dim) = (dst.tokens, u64::from(dst.heads), u64::from(dst.dim));
    let wide_memory = all().all(|t| {
        let bytes = |stride: i64| stride.wrapping_mul(t.dtype.size() as i64);
        (t.ptr as usize).is_multiple_of(16)
            && (tokens <= 1 || bytes(t.token_stride) % 16 == 0)
            && (heads <= 1 || bytes(t.head_stride) % 16 == 0)
    });
    if heads <= 1 || all().all(|t| t.head_stride == dim as i64) {
        (dim, heads) = (dim * heads, heads.min(1));
        if tokens <= 1 || all().all(|t| t.token_stride == dim as i64) {
            (dim, tokens) = (dim * tokens, tokens.min(1));
        }
    }
    let wide = wide_memory && dim.is_multiple_of(8);
    let units = if wide { dim / 8 } else { dim };
    Folded {
        rows: tokens.saturating_mul(heads),
        heads: heads.max(1) as u32,
        units: units as u32,
        wide,
        too_long: units > u64::from(u32::MAX / 2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: usize, tokens: u64, heads: u32, dim: u32) -> RawTensor {
        RawTensor::compact(address as *mut u8, Dtype::Bf16, tokens, heads, dim)
    }

    #[test]
    fn compact_blocks_are_one_row() {
        let folded = fold(&at(256, 10, 4, 64), &[at(4096, 10, 4, 64)]);
        assert_eq!(folded, Folded { rows: 1, heads: 1, units: 320, wide: true, too_long: false });
        // A part of the heads of a larger tensor: one row per token.
        let part = RawTensor { token_stride: 512, ..at(4096, 10, 4, 64) };
        let folded = fold(&at(256, 10, 4, 64), &[part]);
        assert_eq!(folded, Folded { rows: 10, heads: 1, units: 32, wide: true, too_long: false });
        // Heads first: nothing folds.
        let first = RawTensor { token_stride: 64, head_stride: 640, ..part };
        let folded = fold(&at(256, 10, 4, 64), &[first]);
        assert_eq!(folded, Folded { rows: 40, heads: 4, units: 8, wide: true, too_long: false });
    }

    #[test]
    fn odd_addresses_and_dims_go_one_by_one() {
        assert!(!fold(&at(258, 10, 4, 64), &[]).wide);
        assert_eq!(fold(&at(256, 3, 1, 1), &[]), Folded { rows: 1, heads: 1, units: 3, wide: false, too_long: false });
        assert_eq!(fold(&at(256, 0, 4, 64), &[]).rows, 0);
    }
}
