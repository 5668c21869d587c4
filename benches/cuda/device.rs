// SPDX-License-Identifier: MIT OR Apache-2.0
//! A device to measure on: a stream, events with times, buffers and random numbers.

use crate::Result;
use core::ffi::CStr;
use core::ptr::null_mut;
use cpattn::Dtype;
use cpattn::call::RawStream;
use cpattn::call::RawTensor;
use cpattn::kernel::cuda::{Cuda, DeviceMemory, StreamKernels};
use cudarc::driver::sys;
use half::{bf16, f16};
use std::sync::Arc;

/// A driver call; the error names it.
macro_rules! call {
    ($f:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: pointers are to locals that outlive the call or to device memory that its owner sized for it, and
        // `Cuda::new` has found the driver.
        match unsafe { sys::$f($($arg),*) } {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            code => Err(format!("{}: {code:?}", stringify!($f))),
        }
    }};
}

pub fn text<T>(result: cpattn::Result<T>) -> Result<T> {
    result.map_err(|e| e.to_string())
}

pub struct Device {
    pub cuda: Arc<Cuda>,
    pub stream: RawStream,
    pub name: String,
    cache: usize,
}

impl Device {
    pub fn open() -> Result<Self> {
        let cuda = Arc::new(text(Cuda::new(0))?);
        let (mut device, mut context, mut stream) = (0, null_mut(), null_mut());
        call!(cuDeviceGet(&raw mut device, 0))?;
        call!(cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        call!(cuCtxSetCurrent(context))?;
        call!(cuStreamCreate(&raw mut stream, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))?;
        let mut name = [0; 256];
        call!(cuDeviceGetName(name.as_mut_ptr(), name.len() as i32 - 1, device))?;
        // SAFETY: the last byte is still zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut cache = 0;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
        // If the driver does not report it, the smallest number of sets is used.
        let _ = call!(cuDeviceGetAttribute(&raw mut cache, attribute, device));
        Ok(Self { cuda, stream: stream.cast(), name, cache: cache.max(0) as usize })
    }

    /// The number of sets of buffers of `bytes` bytes such that a set has left the cache before it is used again.
    pub fn sets(&self, bytes: usize) -> usize {
        (2 * self.cache).div_ceil(bytes.max(1)).clamp(2, 8)
    }

    pub fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        text(self.cuda.allocate(bytes))
    }

    /// What makes single calls.
    pub fn kernels(&self) -> Result<StreamKernels> {
        text(StreamKernels::new(Arc::clone(&self.cuda)))
    }

    pub fn copy(&self, to: &DeviceMemory, from: &DeviceMemory) -> Result<()> {
        let address = |m: &DeviceMemory| m.ptr() as usize as u64;
        call!(cuMemcpyDtoDAsync_v2(address(to), address(from), from.bytes().min(to.bytes()), self.stream.cast()))
    }

    /// Every byte 0xff, which is NaN in all types.
    pub fn poison(&self, memory: &DeviceMemory) -> Result<()> {
        call!(cuMemsetD8Async(memory.ptr() as usize as u64, 0xff, memory.bytes(), self.stream.cast()))
    }

    pub fn synchronize(&self) -> Result<()> {
        call!(cuStreamSynchronize(self.stream.cast()))
    }

    /// Whether the context still works. After a fault of a kernel it stays unusable.
    pub fn answers(&self) -> Result<()> {
        self.synchronize()?;
        self.poison(&self.allocate(256)?)?;
        self.synchronize()
    }

    pub fn download(&self, memory: &DeviceMemory) -> Result<Vec<u8>> {
        self.synchronize()?;
        let mut bytes = vec![0; memory.bytes()];
        if !bytes.is_empty() {
            text(memory.download(&mut bytes))?;
        }
        Ok(bytes)
    }

    /// Seconds of `repeats` calls after `warmup` further calls, ascending. The host waits only for the last call.
    pub fn times(
        &self,
        warmup: usize,
        repeats: usize,
        mut launch: impl FnMut(usize) -> Result<()>,
    ) -> Result<Vec<f64>> {
        (0..warmup).try_for_each(&mut launch)?;
        let mut events = Vec::new();
        for i in 0..repeats {
            let (start, end) = (Event::new()?, Event::new()?);
            call!(cuEventRecord(start.0, self.stream.cast()))?;
            launch(warmup + i)?;
            call!(cuEventRecord(end.0, self.stream.cast()))?;
            events.push((start, end));
        }
        self.synchronize()?;
        let mut times = Vec::new();
        for (start, end) in &events {
            let mut milliseconds = 0f32;
            call!(cuEventElapsedTime_v2(&raw mut milliseconds, start.0, end.0))?;
            times.push(f64::from(milliseconds) / 1e3);
        }
        times.sort_by(f64::total_cmp);
        Ok(times)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // A failure at the end of the program has no consequence.
        let _ = self.synchronize();
        let _ = call!(cuStreamDestroy_v2(self.stream.cast()));
        let _ = call!(cuDevicePrimaryCtxRelease_v2(0));
    }
}

struct Event(sys::CUevent);

impl Event {
    fn new() -> Result<Self> {
        let mut event = null_mut();
        call!(cuEventCreate(&raw mut event, sys::CUevent_flags::CU_EVENT_DEFAULT as u32))?;
        Ok(Self(event))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = call!(cuEventDestroy_v2(self.0));
    }
}

/// A compact tensor over the whole of a buffer.
pub fn tensor(memory: &DeviceMemory, dtype: Dtype, heads: usize, dim: usize) -> RawTensor {
    let tokens = memory.bytes() / (heads * dim * dtype.size());
    RawTensor::compact(memory.ptr(), dtype, tokens as u64, heads as u32, dim as u32)
}

/// Elements of a standard normal distribution, drawn from 65536 values of it (Box and Muller) that were rounded once.
pub fn normal(dtype: Dtype, n: usize, seed: u64) -> Vec<u16> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut unit = || 1.0 - random.f64();
    let values: Vec<u16> = (0..1 << 16)
        .map(|_| {
            let x = (-2.0 * unit().ln()).sqrt() * (std::f64::consts::TAU * unit()).cos();
            if dtype == Dtype::F16 { f16::from_f64(x).to_bits() } else { bf16::from_f64(x).to_bits() }
        })
        .collect();
    (0..n).map(|_| values[random.usize(..1 << 16)]).collect()
}

pub fn decode(dtype: Dtype, bits: u16) -> f64 {
    if dtype == Dtype::F16 { f16::from_bits(bits).to_f64() } else { bf16::from_bits(bits).to_f64() }
}
