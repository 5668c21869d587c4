// SPDX-License-Identifier: MIT OR Apache-2.0
//! Scratches: the kernels of one device or of the CPU, with the memory that calls take.
//!
//! On the CPU that is memory for tiles; on a device, loaded kernels and a ring buffer for scheduler metadata. The calls
//! of this file allocate all of it, so that those of `attend` and `blocks` allocate nothing unless they refuse.

use std::sync::Mutex;

#[cfg(feature = "cuda")]
use super::dlpack::device;
use super::{
    handle::{self, Exclusive, Handle, HandleKind},
    input::{one_of, result},
    problem::DTYPES,
    rank::{instruction_set, workers},
};
#[cfg(feature = "cuda")]
use cpattn::kernel::cuda::StreamKernels;
use cpattn::{Error, Problem, kernel::Kernels};

/// A larger ring buffer is taken for a mistake.
const MAX_METADATA_BYTES: u64 = 1 << 32;
/// More calls in flight are taken for a mistake: each has an event.
const MAX_CALLS: u32 = 1 << 16;

pub type cpattn_scratch = Handle<Mutex<Kernels>>;

impl HandleKind for Mutex<Kernels> {
    const NAME: &'static str = "scratch";
    const MAGIC: u64 = u64::from_le_bytes(*b"cpatTILE");
}

impl Exclusive for Mutex<Kernels> {
    type State = Kernels;

    fn mutex(&self) -> &Self {
        self
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_scratch_create(workers: u32, scratch: *mut *mut cpattn_scratch) -> i32 {
    boundary!({
        let out = given!(result("scratch", scratch));
        out.write(handle::create(Mutex::new(Kernels::cpu(self::workers("workers", workers)?))));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_scratch_create_cuda(device_id: i32, scratch: *mut *mut cpattn_scratch) -> i32 {
    boundary!({
        let out = given!(result("scratch", scratch));
        with_feature!("cuda", cpattn_scratch_create_cuda, (out, device_id), {
            let kernels = StreamKernels::new(device("device_id", device_id)?)?;
            out.write(handle::create(Mutex::new(Kernels::Cuda(kernels))));
        });
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_scratch_destroy(scratch: *mut cpattn_scratch) -> i32 {
    boundary!({ given!(handle::destroy_idle(scratch)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_scratch_reserve(
    scratch: *mut cpattn_scratch, dtype: i32, head_dim: u32, value_dim: u32,
) -> i32 {
    boundary!({
        let scratch = given!(handle::borrow(scratch));
        let dtype = one_of("dtype", dtype, &DTYPES)?;
        for (name, dim) in [("head_dim", head_dim), ("value_dim", value_dim)] {
            if dim == 0 || dim as usize > Problem::MAX_HEAD_DIM {
                return Err(Error::invalid(name, dim, format!("1 to {}", Problem::MAX_HEAD_DIM)).into());
            }
        }
        scratch.claim()?.reserve(dtype, head_dim, value_dim)?;
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_scratch_set_sm_margin(scratch: *mut cpattn_scratch, multiprocessors: u32) -> i32 {
    boundary!({
        given!(handle::borrow(scratch)).claim()?.set_sm_margin(multiprocessors)?;
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_scratch_set_isa(scratch: *mut cpattn_scratch, isa: i32) -> i32 {
    boundary!({
        given!(handle::borrow(scratch)).claim()?.set_isa(instruction_set("isa", isa)?)?;
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_scratch_reserve_metadata(scratch: *mut cpattn_scratch, bytes: u64, calls: u32) -> i32 {
    boundary!({
        if bytes > MAX_METADATA_BYTES {
            return Err(Error::invalid("bytes", bytes, format!("at most {MAX_METADATA_BYTES}")).into());
        }
        if calls == 0 || calls > MAX_CALLS {
            return Err(Error::invalid("calls", calls, format!("1 to {MAX_CALLS}")).into());
        }
        given!(handle::borrow(scratch)).claim()?.reserve_metadata(bytes as usize, calls as usize)?;
    })
}
