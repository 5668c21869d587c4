// SPDX-License-Identifier: MIT OR Apache-2.0
//! The launches of all calls but attention and merges: transforms, delta, finish, the gradient of the sinks.

use crate::call::{Delta, Finish, RawTensor, SinkGradient, Transform};
use crate::device::driver::Function;
use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::kernel::cuda::Cuda;
use crate::kernel::cuda::abi::base_addresses::{self, BaseOffset, BaseShapes};
use crate::kernel::cuda::abi::params::{self, Parameters};
use crate::kernel::cuda::abi::shapes::LARGEST;
use crate::kernel::cuda::launch::check::{self, Checker, TensorSpec};
use crate::kernel::cuda::launch::recorded::LaunchRecorder;
use crate::kernel::cuda::launch::{Launch, Launches, items};
use crate::kernel::cuda::memory::metadata::run;
use crate::kernel::cuda::memory::metadata_writer::{Part, padded};
use crate::kernel::cuda::modules::Blocks;
use alloc::format;

pub(super) const THREADS: u32 = 256;
/// Steps of a transform's block of threads: four each.
const TILE_STEPS: u64 = THREADS as u64 * 4;
/// Steps of one work item of `finish`.
const FINISH_STEPS: u64 = 2048;
/// The offset of a tensor without elements.
const NOWHERE: BaseOffset = BaseOffset { base: 0, row: 0, first_head: 0 };

/// Bytes of the metadata of a transform.
pub(in crate::kernel::cuda) fn transform_bytes(call: &Transform) -> usize {
    padded(call.blocks.len() * size_of::<params::TransformBlock>())
        + padded(call.sources.len() * size_of::<params::TransformSource>())
}

/// Bytes of the metadata of a finish.
pub(in crate::kernel::cuda) fn finish_bytes(call: &Finish) -> usize {
    let rows = finish_rows(&call.o);
    let items: usize = call.rows.iter().map(|r| r.len.div_ceil(rows) as usize).sum();
    padded(call.rows.len() * size_of::<params::Run>()) + padded(items * size_of::<params::Work>())
}

impl Cuda {
    /// The launch of copies, casts and ordered sums, its metadata written into `recorder`.
    pub(crate) fn transform_launches(&self, call: &Transform<'_>, recorder: &mut LaunchRecorder) -> Result<Launches> {
        let checker = recorder.checker(self);
        for (i, block) in call.blocks.iter().enumerate() {
            let Some(sources) = call.sources.get(block.sources_begin as usize..block.sources_end as usize) else {
                return Err(Error::invalid(
                    format!("blocks[{i}].sources"),
                    format!("{}..{}", block.sources_begin, block.sources_end),
                    format!("entries of sources, which has {}", call.sources.len()),
                ));
            };
            movable(checker, &format!("blocks[{i}].dst"), &block.dst)?;
            for (j, source) in sources.iter().enumerate() {
                let name = format!("blocks[{i}].sources[{j}]");
                check::same_shape(|| name.clone(), source, &block.dst)?;
                movable(checker, &name, source)?;
            }
            block.check_in_place(i, sources)?;
            let steps = BlockSteps::of(&block.dst);
            let alone = steps.elements > u64::from(u32::MAX / 2);
            let all = || core::iter::once(&block.dst).chain(sources);
            // Counts that the kernel keeps in 32 bits.
            if steps.count() > u64::from(u32::MAX / 2) || (alone && checker.is_memory && !all().all(is_aligned)) {
                return Err(Error::unsupported(
                    format!("blocks[{i}] of {} rows", block.dst.tokens),
                    "a block has at most 2^31 steps of 8 elements (of one where rows are not aligned to 16 bytes)",
                    "cut the block",
                ));
            }
            if alone {
                all().for_each(|t| recorder.must_align(t.ptr));
            }
        }

        let function = self.blocks()?.transform;
        let shapes = recorder.shapes();
        let (mut writer, _) = recorder.begin(transform_bytes(call))?;
        let (blocks, blocks_at) = writer.array::<params::TransformBlock>(call.blocks.len());
        let (sources, sources_at) = writer.array::<params::TransformSource>(call.sources.len());
        for (out, source) in sources.iter_mut().zip(call.sources) {
            *out = params::TransformSource {
                src: located(shapes.as_ref(), source),
                dtype: source.dtype as u32,
                unused: 0,
            };
        }
        let (mut tiles, mut count) = (0, 0);
        for block in call.blocks {
            let steps = BlockSteps::of(&block.dst);
            if steps.count() == 0 {
                continue;
            }
            blocks[count] = params::TransformBlock {
                dst: located(shapes.as_ref(), &block.dst),
                rows: steps.rows,
                first_tile: tiles,
                heads: params::Divisor::new(block.dst.heads),
                units: params::Divisor::new(steps.units),
                dim: params::Divisor::new(block.dst.dim),
                eights: u32::from(steps.eights),
                dtype: block.dst.dtype as u32,
                sources_begin: block.sources_begin,
                sources_end: block.sources_end,
                unused: 0,
            };
            count += 1;
            tiles += steps.count().div_ceil(TILE_STEPS);
        }
        let params = params::TransformParams {
            blocks: blocks_at,
            sources: sources_at,
            tiles,
            block_count: count as u32,
            unused: 0,
            bases: [params::Tensor::default(); params::BASES],
        };
        let launch = (count > 0).then(|| Launch::blocks(function, tiles, THREADS, &params));
        Ok(Launches::one(writer.part(), launch))
    }

    /// The launch of the row sums before a backward; none when there are no rows.
    pub(crate) fn delta_launches(&self, call: &Delta, checker: Checker) -> Result<Launches> {
        check::element(call.o.dtype)?;
        check::dim("o.dim", call.o.dim, LARGEST.1)?;
        let like = TensorSpec { heads: call.o.heads, dim: call.o.dim, dtype: call.o.dtype, align: 16 };
        for (name, t) in [("d_o", &call.d_o), ("delta", &call.delta)] {
            if t.tokens != call.o.tokens {
                return Err(Error::invalid(format!("{name}.tokens"), t.tokens, call.o.tokens));
            }
        }
        crate::kernel::check::lse_gradient(call, |_, _| Ok(()))?;
        let number = TensorSpec { dim: 1, dtype: Dtype::F32, align: 4, ..like };
        let lanes = (call.o.dim / 8).next_power_of_two().min(32);
        let params = params::DeltaParams {
            o: checker.needed("o", &call.o, like)?,
            d_o: checker.needed("d_o", &call.d_o, like)?,
            delta: checker.needed("delta", &call.delta, number)?,
            lse: checker.optional("lse", &call.lse, number)?,
            d_lse: checker.optional("d_lse", &call.d_lse, number)?,
            rows: rows(&call.o)?,
            heads: call.o.heads,
            dim: call.o.dim,
            dtype: call.o.dtype as u32,
            lanes,
        };
        self.launch_of_rows(|kernels| kernels.delta, params.rows, THREADS / lanes, &params)
    }

    /// The launch for rows that no pair covers, its metadata written into `recorder`; none when there are no rows.
    pub(in crate::kernel::cuda) fn finish_launches(
        &self,
        call: &Finish<'_>,
        recorder: &mut LaunchRecorder,
    ) -> Result<Launches> {
        let checker = recorder.checker(self);
        check::element(call.o.dtype)?;
        check::dim("o.dim", call.o.dim, LARGEST.1)?;
        let o = TensorSpec { heads: call.o.heads, dim: call.o.dim, dtype: call.o.dtype, align: 16 };
        let f32s = TensorSpec { dim: 1, dtype: Dtype::F32, align: 4, ..o };
        let mut params = params::FinishParams {
            o: checker.needed("o", &call.o, o)?,
            lse: checker.needed("lse", &call.lse, f32s)?,
            sinks: checker.sinks(&call.sinks, call.o.heads)?,
            runs: 0,
            work: 0,
            items: 0,
            heads: call.o.heads,
            dim: call.o.dim,
            rows: finish_rows(&call.o),
            sink_count: if call.sinks.is_none() { 0 } else { call.sinks.dim },
            unused: 0,
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

        let function = self.blocks()?.finish;
        let (mut writer, _) = recorder.begin(finish_bytes(call))?;
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
        (params.runs, params.work) = (runs_at, work_at);
        let launch = (params.items > 0 && call.o.heads > 0)
            .then(|| Launch::blocks(function, params.items.into(), THREADS, &params));
        Ok(Launches::one(writer.part(), launch))
    }

    /// The launch of the gradient of the sinks; none when there are no heads.
    pub(crate) fn sink_gradient_launches(&self, call: &SinkGradient, checker: Checker) -> Result<Launches> {
        if call.delta.tokens != call.lse.tokens {
            return Err(Error::invalid("delta.tokens", call.delta.tokens, call.lse.tokens));
        }
        for (name, t) in [("sinks", &call.sinks), ("dsinks", &call.dsinks)] {
            if t.tokens != 1 {
                return Err(Error::invalid(
                    format!("{name}.tokens"),
                    t.tokens,
                    "1: there is one row of sinks for each head",
                ));
            }
        }
        let like = TensorSpec { heads: call.lse.heads, dim: 1, dtype: Dtype::F32, align: 4 };
        let count = call.sinks.dim.max(1);
        let of_sinks = TensorSpec { dim: count, ..like };
        let params = params::Sinks {
            lse: checker.needed("lse", &call.lse, like)?,
            delta: checker.needed("delta", &call.delta, like)?,
            sinks: checker.needed("sinks", &call.sinks, of_sinks)?,
            dsinks: checker.needed("dsinks", &call.dsinks, of_sinks)?,
            rows: call.lse.tokens,
            count,
            unused: 0,
        };
        self.launch_of_rows(|kernels| kernels.sinks, u64::from(call.lse.heads) * u64::from(count), 1, &params)
    }

    /// A launch whose blocks take `each` rows at a time; none when there are no rows.
    pub(super) fn launch_of_rows<P: Parameters>(
        &self,
        kernel: impl FnOnce(Blocks) -> Function,
        rows: u64,
        each: u32,
        params: &P,
    ) -> Result<Launches> {
        if rows == 0 {
            return Ok(Launches::default());
        }
        let function = kernel(self.blocks()?);
        let launch = Launch::blocks(function, rows.div_ceil(each.into()), THREADS, params);
        Ok(Launches::one(Part::default(), Some(launch)))
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
pub(super) fn rows(t: &RawTensor) -> Result<u64> {
    let rows = t.tokens.saturating_mul(u64::from(t.heads));
    if rows > u64::from(u32::MAX) {
        return Err(Error::unsupported(format!("{rows} rows"), "at most 2^32 tokens times heads", "cut the call"));
    }
    Ok(rows)
}

/// A tensor as kernels find it by its base.
pub(super) fn located(shapes: Option<&BaseShapes>, t: &RawTensor) -> params::TransformTensor {
    let params::Tensor { token, head, .. } = base_addresses::bytes(t);
    let BaseOffset { base, row, first_head } =
        if BlockSteps::of(t).count() == 0 { NOWHERE } else { BaseOffset::of(shapes, t.ptr) };
    params::TransformTensor { row, token, head, first_head, base }
}

fn movable(checker: Checker, name: &str, t: &RawTensor) -> Result<()> {
    if t.dtype == Dtype::F64 {
        return Err(Error::unsupported(format!("{name}.dtype f64"), "f16, bf16 and f32", "use the CPU kernels"));
    }
    checker.memory(name, t, t.dtype.size()).map(|_| ())
}

/// How a kernel steps through a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BlockSteps {
    /// Tokens times heads.
    rows: u64,
    /// Steps of one row.
    units: u32,
    /// Whether a step is 8 elements.
    eights: bool,
    elements: u64,
}

impl BlockSteps {
    fn of(t: &RawTensor) -> Self {
        let rows = t.tokens.saturating_mul(u64::from(t.heads));
        let eights = t.dim.is_multiple_of(8);
        let units = if eights { t.dim / 8 } else { t.dim };
        Self { rows, units, eights, elements: rows.saturating_mul(u64::from(t.dim)) }
    }

    fn count(self) -> u64 {
        self.rows.saturating_mul(u64::from(self.units))
    }
}

/// Whether all rows begin at multiples of 16 bytes.
fn is_aligned(t: &RawTensor) -> bool {
    let bytes = base_addresses::bytes(t);
    bytes.ptr.is_multiple_of(16) && (t.tokens <= 1 || bytes.token % 16 == 0) && (t.heads <= 1 || bytes.head % 16 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_8_elements_where_the_dim_allows() {
        let steps = |tokens, heads, dim| {
            BlockSteps::of(&RawTensor::compact(core::ptr::null_mut(), Dtype::Bf16, tokens, heads, dim))
        };
        assert_eq!(steps(10, 4, 64), BlockSteps { rows: 40, units: 8, eights: true, elements: 2560 });
        assert_eq!(steps(10, 4, 3), BlockSteps { rows: 40, units: 3, eights: false, elements: 120 });
        assert_eq!((steps(10, 4, 64).count(), steps(3, 1, 1).count(), steps(0, 4, 64).count()), (320, 3, 0));
        assert_eq!(steps(u64::MAX, 4, 64).count(), u64::MAX);
    }
}
