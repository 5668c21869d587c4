// SPDX-License-Identifier: MIT OR Apache-2.0
//! Launches: what the driver checks before a kernel is queued.
//!
//! The grid, the block, dynamic shared memory and every attribute are honoured or refused; parameters are copied when
//! the call is made, as the driver copies them, so that the caller's variables may go.

use super::api_kernel::occupancy;
use super::codes;
use super::entry::{in_context, stream_of};
use super::machine::Machine;
use super::queue::Work;
use crate::exec::MAX_BLOCKS;
use std::ffi::{c_uint, c_void};

/// The launch itself, with its checks.
unsafe fn start(
    m: &mut Machine,
    device: usize,
    f: *mut c_void,
    grid: [u32; 3],
    block: [u32; 3],
    dynamic: u32,
    stream: *mut c_void,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
    (cooperative, cluster): (bool, [u32; 3]),
) -> Result<(), i32> {
    let s = stream_of(m, device, stream)?;
    let f = m.functions.get(&(f as u64)).ok_or(codes::INVALID_HANDLE)?;
    if m.modules.get(&f.module).is_none_or(|l| l.device != device) {
        return Err(codes::INVALID_HANDLE);
    }
    let (kernel, module) = (f.kernel.clone(), f.module);
    let threads = block.iter().map(|&n| u64::from(n)).product::<u64>();
    let why = if grid.contains(&0) || block.contains(&0) {
        Some("a dimension of the launch is 0".to_owned())
    } else if grid[0] > i32::MAX as u32 || grid[1] > 65535 || grid[2] > 65535 {
        Some(format!("grid {grid:?} is larger than [{}, 65535, 65535]", i32::MAX))
    } else if block[0] > 1024 || block[1] > 1024 || block[2] > 64 || threads > u64::from(kernel.max_threads()) {
        Some(format!("blocks {block:?} of `{}`, which may have {} threads", kernel.name(), kernel.max_threads()))
    } else if dynamic > f.most_dynamic {
        let most = f.most_dynamic;
        Some(format!("{dynamic} bytes of dynamic shared memory for `{}`, which may have {most}", kernel.name()))
    } else {
        None
    };
    if let Some(why) = why {
        m.tell(&format!("launch refused: {why}"));
        return Err(codes::INVALID_VALUE);
    }
    let per = occupancy(m, f, threads as u32, dynamic).max(1);
    let resident = per * m.config.multiprocessors;
    let required = kernel.required_cluster();
    let shape = required.unwrap_or(cluster);
    let size = shape.iter().map(|&n| u64::from(n)).product::<u64>();
    let why = if cluster != [1; 3] && cluster != shape {
        Some(format!("clusters {cluster:?} of `{}`, which is for clusters {shape:?}", kernel.name()))
    } else if size == 0 || size > MAX_BLOCKS.into() || size > 1 && m.config.sm < 90 {
        Some(format!("clusters {shape:?}: compute capability 9.0 runs up to {MAX_BLOCKS} blocks, others one"))
    } else if (0..3).any(|d| !grid[d].is_multiple_of(shape[d])) {
        Some(format!("grid {grid:?} is not made of clusters {shape:?}"))
    } else if size > u64::from(resident) {
        Some(format!(
            "clusters {shape:?} of `{}`, of whose blocks the device holds {resident} at a time",
            kernel.name()
        ))
    } else {
        None
    };
    if let Some(why) = why {
        m.tell(&format!("launch refused: {why}"));
        return Err(codes::INVALID_CLUSTER_SIZE);
    }
    let blocks = grid.iter().map(|&n| u64::from(n)).product::<u64>();
    if cooperative && blocks > u64::from(resident) {
        return Err(codes::COOPERATIVE_LAUNCH_TOO_LARGE);
    }
    let mut buffer = vec![0u8; kernel.param_bytes()];
    if !params.is_null() {
        for (k, p) in kernel.params().iter().enumerate() {
            // SAFETY: the caller gives one pointer per parameter, each to as many bytes as the parameter has.
            unsafe {
                let from = *params.add(k);
                if from.is_null() {
                    return Err(codes::INVALID_VALUE);
                }
                std::ptr::copy_nonoverlapping(from.cast(), buffer.as_mut_ptr().add(p.offset), p.size);
            }
        }
    } else if !extra.is_null() {
        // SAFETY: `extra` is a list of tag and value that ends in 0: 1 the buffer, 2 its size.
        unsafe {
            let (mut at, mut from, mut len) = (extra, std::ptr::null::<u8>(), 0usize);
            while !(*at).is_null() {
                match *at as usize {
                    1 => from = (*at.add(1)).cast(),
                    2 => len = *(*at.add(1)).cast(),
                    _ => return Err(codes::INVALID_VALUE),
                }
                at = at.add(2);
            }
            if from.is_null() || len < buffer.len() {
                return Err(codes::INVALID_VALUE);
            }
            std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), buffer.len());
        }
    } else if !buffer.is_empty() {
        return Err(codes::INVALID_VALUE);
    }
    m.submit(s, Work::Launch { kernel, module, grid, block, cluster, shared: dynamic, params: buffer, resident })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    f: *mut c_void,
    gx: c_uint,
    gy: c_uint,
    gz: c_uint,
    bx: c_uint,
    by: c_uint,
    bz: c_uint,
    dynamic: c_uint,
    stream: *mut c_void,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> i32 {
    // SAFETY: the caller's arguments, passed on.
    in_context("cuLaunchKernel", |m, d| unsafe {
        start(m, d, f, [gx, gy, gz], [bx, by, bz], dynamic, stream, params, extra, (false, [1; 3]))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchCooperativeKernel(
    f: *mut c_void,
    gx: c_uint,
    gy: c_uint,
    gz: c_uint,
    bx: c_uint,
    by: c_uint,
    bz: c_uint,
    dynamic: c_uint,
    stream: *mut c_void,
    params: *mut *mut c_void,
) -> i32 {
    let none = std::ptr::null_mut();
    // SAFETY: the caller's arguments, passed on.
    in_context("cuLaunchCooperativeKernel", |m, d| unsafe {
        start(m, d, f, [gx, gy, gz], [bx, by, bz], dynamic, stream, params, none, (true, [1; 3]))
    })
}

/// `CUlaunchConfig` of `cuda.h`.
#[repr(C)]
pub struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    dynamic: c_uint,
    stream: *mut c_void,
    attributes: *const LaunchAttribute,
    count: c_uint,
}

/// `CUlaunchAttribute` of `cuda.h`.
#[repr(C)]
pub struct LaunchAttribute {
    id: c_uint,
    pad: [u8; 4],
    value: [u64; 8],
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernelEx(
    config: *const LaunchConfig,
    f: *mut c_void,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> i32 {
    in_context("cuLaunchKernelEx", |m, d| {
        if config.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        // SAFETY: not null; the caller's configuration with its list of attributes.
        let (c, attributes) = unsafe {
            let c = &*config;
            let list: &[LaunchAttribute] =
                if c.count == 0 { &[] } else { std::slice::from_raw_parts(c.attributes, c.count as usize) };
            (c, list)
        };
        let (mut cooperative, mut cluster) = (false, [1; 3]);
        for a in attributes {
            match a.id {
                2 => cooperative = a.value[0] as u32 != 0,
                // Hints, and an overlap with the launch before that only ever weakens the order.
                0 | 1 | 3 | 5 | 8 | 14 => {}
                4 => cluster = [a.value[0] as u32, (a.value[0] >> 32) as u32, a.value[1] as u32],
                _ => {
                    m.tell(&format!("launch refused: attribute {} is not known to the emulator", a.id));
                    return Err(codes::NOT_SUPPORTED);
                }
            }
        }
        // SAFETY: the caller's arguments, passed on.
        unsafe { start(m, d, f, c.grid, c.block, c.dynamic, c.stream, params, extra, (cooperative, cluster)) }
    })
}
