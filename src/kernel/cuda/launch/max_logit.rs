// SPDX-License-Identifier: MIT OR Apache-2.0
//! The beginning of the largest scores of a run: launches raise them, so they are set to −∞ before the first.

use crate::call::{RawStream, RawTensor};
use crate::device::driver::call;
use crate::error::Result;
use crate::kernel::cuda::Cuda;

impl Cuda {
    /// Sets one f32 for each head, `[1, heads, 1]`, to −∞, in stream order. The context is current.
    ///
    /// # Safety
    /// The tensor is valid device memory for writes, and nothing else accesses it until the stream is past this.
    pub(crate) unsafe fn clear_max_logit(&self, t: &RawTensor, stream: RawStream) -> Result<()> {
        let (each, heads) = if t.head_stride == 1 || t.heads == 1 { (t.heads, 1) } else { (1, t.heads) };
        for head in 0..heads {
            let at = t.heads(head * each, each).ptr as usize as u64;
            // SAFETY: `each` numbers of the tensor, which is as promised.
            unsafe { call!(cuMemsetD32Async(at, f32::NEG_INFINITY.to_bits(), each as usize, stream)) }?;
        }
        Ok(())
    }
}
