// SPDX-License-Identifier: MIT OR Apache-2.0
//! The launches that merge partial results `(o, lse)` of the same rows: two of them, as a ring does after a step, or
//! those of all ranks of a ring at once, as a combine does.

use crate::call::{Merge, MergeAll};
use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::kernel::cuda::Cuda;
use crate::kernel::cuda::abi::params;
use crate::kernel::cuda::launch::attention::lse_words;
use crate::kernel::cuda::launch::blocks::{THREADS, located, rows};
use crate::kernel::cuda::launch::check::{Checker, TensorSpec};
use crate::kernel::cuda::launch::recorded::LaunchRecorder;
use crate::kernel::cuda::launch::{Launch, Launches};
use crate::kernel::cuda::memory::metadata_writer::padded;
use crate::kernel::merge_all::check_parts;
use alloc::format;

impl Cuda {
    /// The launch of a merge; none when there are no rows.
    pub(crate) fn merge_launches(&self, call: &Merge, checker: Checker) -> Result<Launches> {
        if !call.o.dim.is_multiple_of(4) {
            return Err(Error::unsupported(format!("o.dim {}", call.o.dim), "multiples of 4", "pad with zeros"));
        }
        let o = TensorSpec { heads: call.o.heads, dim: call.o.dim, dtype: Dtype::F32, align: 16 };
        let lse = |t| TensorSpec { dim: lse_words(t), align: 4, ..o };
        for (name, t) in [("lse", &call.lse), ("with_o", &call.with_o), ("with_lse", &call.with_lse)] {
            if t.tokens != call.o.tokens {
                return Err(Error::invalid(format!("{name}.tokens"), t.tokens, call.o.tokens));
            }
        }
        let params = params::MergeParams {
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
        self.launch_of_rows(|kernels| kernels.merge, params.rows, THREADS / 32, &params)
    }

    /// The launch of a merge of the parts of several ranks, the list of parts written into `recorder`; none when there
    /// are no rows.
    pub(crate) fn combine_launches(&self, call: &MergeAll<'_>, recorder: &mut LaunchRecorder) -> Result<Launches> {
        check_parts(call)?;
        let checker = recorder.checker(self);
        debug_assert!(call.o.dim.is_multiple_of(8), "refused before any run of the plan begins");
        for (i, (o, lse)) in call.o_parts.iter().zip(call.lse_parts).enumerate() {
            checker.memory(&format!("o_parts[{i}]"), o, 16)?;
            checker.memory(&format!("lse_parts[{i}]"), lse, 4)?;
            recorder.must_align(o.ptr);
        }
        recorder.must_align(call.o.ptr);
        let rows = rows(&call.o)?;
        if rows == 0 {
            return Ok(Launches::default());
        }
        let lanes = (call.o.dim / 8).next_power_of_two().min(32);
        let mut params = params::CombineParams {
            o: checker.memory("o", &call.o, 16)?,
            lse: checker.memory("lse", &call.lse, 4)?,
            sinks: checker.sinks(&call.sinks, call.o.heads)?,
            parts: 0,
            rows,
            part_count: call.o_parts.len() as u32,
            heads: call.o.heads,
            dim: call.o.dim,
            dtype: call.o.dtype as u32,
            lanes,
            sink_count: if call.sinks.is_none() { 0 } else { call.sinks.dim },
            bases: [params::Tensor::default(); params::BASES],
        };
        let function = self.blocks()?.combine;
        let shapes = recorder.shapes();
        let parts = call.o_parts.iter().chain(call.lse_parts);
        let (mut writer, _) = recorder.begin(padded(parts.clone().count() * size_of::<params::TransformSource>()))?;
        let (out, at) = writer.array::<params::TransformSource>(2 * call.o_parts.len());
        params.parts = at;
        for (out, part) in out.iter_mut().zip(parts) {
            *out = params::TransformSource { src: located(shapes.as_ref(), part), dtype: part.dtype as u32, unused: 0 };
        }
        let launch = Launch::blocks(function, rows.div_ceil((THREADS / lanes).into()), THREADS, &params);
        Ok(Launches::one(writer.part(), Some(launch)))
    }
}
