// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device for tests: a driver (real or emulated), a stream, and memory that is allocated to the byte.

use crate::driver;
pub use crate::driver::emulated_count;
use core::ptr::null_mut;
use cpattn::Dtype;
use cpattn::call::{Attend, AttendBackward, Delta, RawStream, RawTensor};
use cpattn::kernel::cuda::{Cuda, Family, StreamKernels};
use cudarc::driver::sys;
use std::sync::Arc;

/// Panics unless a driver call succeeded.
macro_rules! ok {
    ($f:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the tests below hand out only pointers to locals and memory they own.
        let code = unsafe { sys::$f($($arg),*) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS, stringify!($f));
    }};
}

pub(crate) use ok;

/// Whether there is a kernel that no library has (`ptx/compile --with CLUSTER,FORWARD_96_192`): in the folder that the
/// environment names.
pub fn has_kernel(name: &str) -> bool {
    let folder = std::env::var_os("CPATTN_CUDA_KERNELS").map(std::path::PathBuf::from);
    folder.is_some_and(|folder| folder.join(name).with_extension("ptx").exists())
}

pub struct Device {
    pub cuda: Arc<Cuda>,
    pub stream: RawStream,
}

impl Device {
    /// Device 0, or `None` where there is no driver. `CPATTN_REQUIRE_CUDA` makes that a failure.
    pub fn open() -> Option<Self> {
        Self::of(Cuda::new(0))
    }

    /// The same with the forward kernels for `sm_90a` at every head dim, where the device runs them and
    /// [`has_kernel`] says that there are those of 96 and 192: else these are those for `sm_80`.
    pub fn open_hopper() -> Option<Self> {
        if !has_kernel("hopper_forward_bf16_96") || !has_kernel("hopper_forward_bf16_192") {
            return Self::open();
        }
        Self::of(Cuda::with_family(0, Family::Sm90a).or_else(|_| Cuda::new(0)))
    }

    /// With this one.
    pub fn of(cuda: cpattn::Result<Cuda>) -> Option<Self> {
        let cuda = driver::opened(cuda)?;
        let (mut context, mut stream) = (null_mut(), null_mut());
        ok!(cuDevicePrimaryCtxRetain(&raw mut context, 0));
        ok!(cuCtxSetCurrent(context));
        ok!(cuStreamCreate(&raw mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32));
        Some(Self { cuda: Arc::new(cuda), stream: stream.cast() })
    }

    /// What makes single calls, with a ring of this size for lists.
    pub fn kernels(&self, bytes: usize, calls: usize) -> StreamKernels {
        StreamKernels::with_metadata(Arc::clone(&self.cuda), bytes, calls).expect("memory")
    }

    /// Bytes of lists of a call.
    pub fn attend_bytes(&self, call: &Attend) -> usize {
        self.kernels(16, 1).attend_metadata(call).expect("a supported call")
    }

    pub fn attend_backward_bytes(&self, call: &AttendBackward) -> usize {
        self.kernels(16, 1).attend_backward_metadata(call).expect("a supported call")
    }

    /// A call whose kernels are loaded if they are not.
    ///
    /// # Safety
    /// As [`StreamKernels::attend`].
    pub unsafe fn attend(
        &self,
        call: &Attend<'_>,
        kernels: &mut StreamKernels,
        stream: RawStream,
    ) -> cpattn::Result<()> {
        kernels.reserve(call.q.dtype, call.q.dim, call.v.dim)?;
        // SAFETY: the promise of this function.
        unsafe { kernels.attend(call, stream) }
    }

    /// # Safety
    /// As [`StreamKernels::attend_backward`].
    pub unsafe fn attend_backward(
        &self,
        call: &AttendBackward<'_>,
        kernels: &mut StreamKernels,
        stream: RawStream,
    ) -> cpattn::Result<()> {
        kernels.reserve(call.q.dtype, call.q.dim, call.v.dim)?;
        // SAFETY: the promise of this function.
        unsafe { kernels.attend_backward(call, stream) }
    }

    /// # Safety
    /// As [`StreamKernels::delta`].
    pub unsafe fn delta(&self, call: &Delta, stream: RawStream) -> cpattn::Result<()> {
        // SAFETY: the promise of this function.
        unsafe { self.kernels(16, 1).delta(call, stream) }
    }

    pub fn synchronize(&self) {
        ok!(cuStreamSynchronize(self.stream.cast()));
    }

    /// Memory with these bytes, which are there for every stream when this returns.
    pub fn upload(&self, bytes: &[u8]) -> Memory {
        let mut ptr = 0;
        ok!(cuMemAlloc_v2(&raw mut ptr, bytes.len().max(1)));
        let memory = Memory { ptr, bytes: bytes.len() };
        self.overwrite(&memory, bytes);
        memory
    }

    /// Writes all of it anew, behind everything launched so far.
    pub fn overwrite(&self, memory: &Memory, bytes: &[u8]) {
        assert_eq!(memory.bytes, bytes.len());
        if !bytes.is_empty() {
            ok!(cuMemcpyHtoDAsync_v2(memory.ptr, bytes.as_ptr().cast(), bytes.len(), self.stream.cast()));
            self.synchronize();
        }
    }

    /// What the memory holds after everything launched so far.
    pub fn download(&self, memory: &Memory) -> Vec<u8> {
        self.synchronize();
        let mut bytes = vec![0; memory.bytes];
        if !bytes.is_empty() {
            ok!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), memory.ptr, memory.bytes));
        }
        bytes
    }

    pub fn download_f32(&self, memory: &Memory) -> Vec<f32> {
        self.download(memory).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.synchronize();
        ok!(cuStreamDestroy_v2(self.stream.cast()));
        ok!(cuDevicePrimaryCtxRelease_v2(0));
    }
}

pub struct Memory {
    ptr: sys::CUdeviceptr,
    bytes: usize,
}

impl Memory {
    pub fn tensor(&self, dtype: Dtype, tokens: usize, heads: u32, dim: u32, token_stride: usize) -> RawTensor {
        RawTensor {
            token_stride: token_stride as i64,
            ..RawTensor::compact(self.ptr as usize as *mut u8, dtype, tokens as u64, heads, dim)
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        ok!(cuMemFree_v2(self.ptr));
    }
}
