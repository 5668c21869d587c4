// SPDX-License-Identifier: MIT OR Apache-2.0
//! The launch of the sinks' gradient.

use super::check::Expected;
use super::params::Tensor;
use super::{Cuda, Stream};
use crate::call::SinkGradient;
use crate::element::Dtype;
use crate::error::{Error, Result};
use alloc::format;

const THREADS: u32 = 256;

/// `SinkParams` of `ptx/sinks.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Params {
    lse: Tensor,
    delta: Tensor,
    sinks: Tensor,
    dsinks: Tensor,
    rows: u64,
}

const _: () = assert!(size_of::<Params>() == 104);

impl Cuda {
    /// The gradient of the sinks: see [`SinkGradient`]. Everything is f32.
    ///
    /// # Errors
    /// As [`Cuda::attend`].
    ///
    /// # Safety
    /// As [`Cuda::attend`]: lse, delta and sinks are valid for reads, dsinks for writes, and dsinks overlaps none.
    pub unsafe fn sink_gradient(&self, call: &SinkGradient, stream: Stream) -> Result<()> {
        let checker = self.checker();
        if call.delta.tokens != call.lse.tokens {
            return Err(Error::invalid("delta.tokens", call.delta.tokens, call.lse.tokens));
        }
        for (name, t) in [("sinks", &call.sinks), ("dsinks", &call.dsinks)] {
            if t.tokens != 1 {
                return Err(Error::invalid(format!("{name}.tokens"), t.tokens, "1: there is one number for each head"));
            }
        }
        let like = Expected { heads: call.lse.heads, dim: 1, dtype: Dtype::F32, align: 4 };
        let params = Params {
            lse: checker.needed("lse", &call.lse, like)?,
            delta: checker.needed("delta", &call.delta, like)?,
            sinks: checker.needed("sinks", &call.sinks, like)?,
            dsinks: checker.needed("dsinks", &call.dsinks, like)?,
            rows: call.lse.tokens,
        };
        if call.lse.heads == 0 {
            return Ok(());
        }
        let _entered = self.enter()?;
        let function = self.blocks(&mut self.kernels())?.sinks;
        // SAFETY: the caller's promise.
        unsafe { function.launch(call.lse.heads, THREADS, 0, stream, &params) }
    }
}
