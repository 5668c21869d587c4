// SPDX-License-Identifier: MIT OR Apache-2.0
//! The part of the CUDA driver that this crate calls: types, numbers and functions as `cuda.h` declares them.
//!
//! Codes and attributes are integers, because a newer driver may answer with one that no enumeration here would know.
//! Names with `_v2` are those that the header's macros have stood for since CUDA 4; the default stream is the legacy
//! one.

pub(crate) use super::table::NOT_SUPPORTED;
use super::table::functions;
use core::ffi::{c_char, c_int, c_uint, c_void};

/// A status; [`SUCCESS`] is the only good one.
pub(crate) type CUresult = i32;
pub(crate) type CUdevice = c_int;
/// An address on a device.
pub(crate) type CUdeviceptr = u64;
/// `cudaStream_t` is the same.
pub(crate) type CUstream = *mut c_void;

/// Handles, each of a type of its own.
macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident = $target:ident;)+) => {$(
        #[repr(C)]
        #[derive(Debug)]
        pub(crate) struct $target([u8; 0]);
        $(#[$doc])*
        pub(crate) type $name = *mut $target;
    )+};
}
handles! {
    CUcontext = ContextObject;
    CUmodule = ModuleObject;
    CUfunction = FunctionObject;
    CUevent = EventObject;
}

pub(crate) const SUCCESS: CUresult = 0;
pub(crate) const OUT_OF_MEMORY: CUresult = 2;
pub(crate) const PEER_ACCESS_UNSUPPORTED: CUresult = 217;
pub(crate) const INVALID_HANDLE: CUresult = 400;
pub(crate) const NOT_READY: CUresult = 600;
pub(crate) const PEER_ACCESS_ALREADY_ENABLED: CUresult = 704;
pub(crate) const TOO_MANY_PEERS: CUresult = 711;
pub(crate) const STREAM_CAPTURE_IMPLICIT: CUresult = 906;

pub(crate) const DEVICE_MULTIPROCESSOR_COUNT: c_int = 16;
pub(crate) const DEVICE_L2_CACHE_SIZE: c_int = 38;
pub(crate) const DEVICE_COMPUTE_CAPABILITY_MAJOR: c_int = 75;
pub(crate) const DEVICE_COMPUTE_CAPABILITY_MINOR: c_int = 76;
pub(crate) const DEVICE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;

pub(crate) const FUNCTION_MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
pub(crate) const POINTER_DEVICE_ORDINAL: c_int = 9;
pub(crate) const HOST_PORTABLE_AND_MAPPED: c_uint = 1 | 2;
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
pub(crate) const STREAM_CAPTURE_NONE: c_int = 0;
pub(crate) const STREAM_CAPTURE_ACTIVE: c_int = 1;
pub(crate) const STREAM_CAPTURE_MODE_RELAXED: c_uint = 2;
pub(crate) const EVENT_DEFAULT: c_uint = 0;
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
pub(crate) const EVENT_RECORD_EXTERNAL: c_uint = 1;
pub(crate) const EVENT_WAIT_EXTERNAL: c_uint = 1;

pub(crate) const TENSOR_MAP_FLOAT16: c_int = 6;
pub(crate) const TENSOR_MAP_BFLOAT16: c_int = 9;
pub(crate) const TENSOR_MAP_INTERLEAVE_NONE: c_int = 0;
pub(crate) const TENSOR_MAP_SWIZZLE_128B: c_int = 3;
pub(crate) const TENSOR_MAP_L2_PROMOTION_256B: c_int = 3;
pub(crate) const TENSOR_MAP_FILL_ZEROS: c_int = 0;

/// The driver's own name comes first: a toolkit has a `libcuda.so` to link with, which does nothing.
#[cfg(windows)]
const LIBRARIES: &[&str] = &["nvcuda.dll"];
#[cfg(not(windows))]
const LIBRARIES: &[&str] = &["libcuda.so.1", "libcuda.so"];

functions! {
    LIBRARIES, "install NVIDIA's driver, 470 or later, or say where it is, or use the CPU kernels";
    required {
        cuInit(flags: c_uint);
        cuGetErrorString(code: CUresult, text: *mut *const c_char);
        cuDeviceGetCount(count: *mut c_int);
        cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
        cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice);
        cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice);
        cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
        cuDevicePrimaryCtxRelease_v2(device: CUdevice);
        cuCtxPushCurrent_v2(context: CUcontext);
        cuCtxPopCurrent_v2(context: *mut CUcontext);
        cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint);
        cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
        cuModuleUnload(module: CUmodule);
        cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
        cuFuncSetAttribute(function: CUfunction, attribute: c_int, value: c_int);
        cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, function: CUfunction, threads: c_int, shared: usize);
        cuLaunchKernel(
            function: CUfunction,
            grid_x: c_uint,
            grid_y: c_uint,
            grid_z: c_uint,
            block_x: c_uint,
            block_y: c_uint,
            block_z: c_uint,
            shared: c_uint,
            stream: CUstream,
            params: *mut *mut c_void,
            extra: *mut *mut c_void,
        );
        cuStreamCreate(stream: *mut CUstream, flags: c_uint);
        cuStreamDestroy_v2(stream: CUstream);
        cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
        cuStreamGetCaptureInfo_v2(
            stream: CUstream,
            status: *mut c_int,
            id: *mut u64,
            graph: *mut *mut c_void,
            dependencies: *mut *const c_void,
            count: *mut usize,
        );
        cuStreamQuery(stream: CUstream);
        cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
        cuStreamSynchronize(stream: CUstream);
        cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
        cuEventCreate(event: *mut CUevent, flags: c_uint);
        cuEventDestroy_v2(event: CUevent);
        cuEventRecord(event: CUevent, stream: CUstream);
        cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: c_uint);
        cuEventQuery(event: CUevent);
        cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
        cuEventSynchronize(event: CUevent);
        cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
        cuMemFree_v2(address: CUdeviceptr);
        cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
        cuMemFreeHost(address: *mut c_void);
        cuMemHostGetDevicePointer_v2(address: *mut CUdeviceptr, host: *mut c_void, flags: c_uint);
        cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize);
        cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize);
        #[cfg(feature = "nccl")]
        cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
        cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
        cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
        cuMemsetD8Async(to: CUdeviceptr, value: u8, bytes: usize, stream: CUstream);
        cuMemsetD32Async(to: CUdeviceptr, value: c_uint, words: usize, stream: CUstream);
        cuPointerGetAttribute(value: *mut c_void, attribute: c_int, address: CUdeviceptr);
    }
    optional {
        // Since CUDA 12.0.
        cuTensorMapEncodeTiled(
            map: *mut c_void,
            element: c_int,
            rank: c_uint,
            address: *mut c_void,
            dims: *const u64,
            strides: *const u64,
            shape: *const c_uint,
            steps: *const c_uint,
            interleave: c_int,
            swizzle: c_int,
            promotion: c_int,
            fill: c_int,
        );
    }
}
