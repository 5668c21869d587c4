// SPDX-License-Identifier: MIT OR Apache-2.0
//! The launch of the sinks' gradient.

use super::Cuda;
use super::check::{Checker, TensorSpec};
use super::launch::{Grid, Launch};
use super::params::Sinks;
use crate::call::{RawStream, SinkGradient};
use crate::element::Dtype;
use crate::error::{Error, Result};
use alloc::format;

const THREADS: u32 = 256;

impl Cuda {
    /// The gradient of the sinks: see [`SinkGradient`]. Everything is f32.
    ///
    /// # Errors
    /// As [`Cuda::attend`].
    ///
    /// # Safety
    /// As [`Cuda::attend`]: lse, delta and sinks are valid for reads, dsinks for writes, and dsinks overlaps none.
    pub unsafe fn sink_gradient(&self, call: &SinkGradient, stream: RawStream) -> Result<()> {
        let _entered = self.enter()?;
        let Some(launch) = self.sink_gradient_launch(call, self.memory_checker())? else { return Ok(()) };
        // SAFETY: the tensors are valid and dsinks is apart when the launch runs, the stream is of this context (the
        // contract).
        unsafe { launch.start(self, stream) }
    }

    /// The launch of [`Cuda::sink_gradient`]; none when there are no heads.
    pub(super) fn sink_gradient_launch(&self, call: &SinkGradient, checker: Checker) -> Result<Option<Launch>> {
        if call.delta.tokens != call.lse.tokens {
            return Err(Error::invalid("delta.tokens", call.delta.tokens, call.lse.tokens));
        }
        for (name, t) in [("sinks", &call.sinks), ("dsinks", &call.dsinks)] {
            if t.tokens != 1 {
                return Err(Error::invalid(format!("{name}.tokens"), t.tokens, "1: there is one number for each head"));
            }
        }
        let like = TensorSpec { heads: call.lse.heads, dim: 1, dtype: Dtype::F32, align: 4 };
        let params = Sinks {
            lse: checker.needed("lse", &call.lse, like)?,
            delta: checker.needed("delta", &call.delta, like)?,
            sinks: checker.needed("sinks", &call.sinks, like)?,
            dsinks: checker.needed("dsinks", &call.dsinks, like)?,
            rows: call.lse.tokens,
        };
        if call.lse.heads == 0 {
            return Ok(None);
        }
        let function = self.blocks(&mut self.kernels())?.sinks;
        Ok(Some(Launch::new(function, Grid::Blocks(call.lse.heads), (THREADS, 0), &params)))
    }
}
