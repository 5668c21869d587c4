// SPDX-License-Identifier: MIT OR Apache-2.0
//! Initialisation and devices.

use super::codes;
use super::entry::{Outcome, call, initialise, put};
use super::machine::Machine;
use std::ffi::{c_char, c_int, c_uint, c_void};

fn check(m: &Machine, device: c_int) -> Result<usize, i32> {
    usize::try_from(device).ok().filter(|d| *d < m.devices.len()).ok_or(codes::INVALID_DEVICE)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuInit(flags: c_uint) -> i32 {
    if flags != 0 { codes::INVALID_VALUE } else { initialise() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> i32 {
    // SAFETY: the caller's result pointer.
    unsafe { put(version, 13000) }.err().unwrap_or(codes::SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> i32 {
    call("cuDeviceGet", |m| {
        check(m, ordinal)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(device, ordinal) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> i32 {
    // SAFETY: the caller's result pointer.
    call("cuDeviceGetCount", |m| unsafe { put(count, m.devices.len() as c_int) })
}

/// Copies a string with its zero byte into a buffer of `len` bytes, cut short if need be.
unsafe fn text(to: *mut c_char, len: c_int, s: &str) -> Outcome {
    if to.is_null() || len <= 0 {
        return Err(codes::INVALID_VALUE);
    }
    let n = s.len().min(len as usize - 1);
    // SAFETY: the caller gives `len` bytes; n + 1 ≤ len.
    unsafe {
        std::ptr::copy_nonoverlapping(s.as_ptr().cast(), to, n);
        to.add(n).write(0);
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> i32 {
    call("cuDeviceGetName", |m| {
        check(m, device)?;
        let (major, minor) = (m.config.sm / 10, m.config.sm % 10);
        // SAFETY: the caller's buffer.
        unsafe { text(name, len, &format!("cpattn CUDA emulator (sm_{major}{minor})")) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) -> i32 {
    call("cuDeviceGetUuid", |m| {
        let d = check(m, device)?;
        let mut bytes = *b"cpattn-emulator\0";
        bytes[15] = d as u8;
        // SAFETY: the caller's result pointer.
        unsafe { put(uuid, bytes) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> i32 {
    // SAFETY: passed on.
    unsafe { cuDeviceGetUuid(uuid, device) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> i32 {
    call("cuDeviceTotalMem_v2", |m| {
        check(m, device)?;
        // SAFETY: the caller's result pointer.
        unsafe { put(bytes, m.config.memory) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int) -> i32 {
    call("cuDeviceGetPCIBusId", |m| {
        let d = check(m, device)?;
        // SAFETY: the caller's buffer.
        unsafe { text(id, len, &format!("0000:{:02X}:00.0", d + 1)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) -> i32 {
    call("cuDeviceCanAccessPeer", |m| {
        let (a, b) = (check(m, device)?, check(m, peer)?);
        // SAFETY: the caller's result pointer.
        unsafe { put(can, (a != b && m.config.peers).into()) }
    })
}

/// 1 the rank of the link, 2 whether there is access, 3 atomics over it, 4 arrays over it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetP2PAttribute(value: *mut c_int, attribute: c_uint, from: c_int, to: c_int) -> i32 {
    call("cuDeviceGetP2PAttribute", |m| {
        if check(m, from)? == check(m, to)? {
            return Err(codes::INVALID_DEVICE);
        }
        let v = match attribute {
            1 => 0,
            2..=4 => m.config.peers.into(),
            _ => return Err(codes::INVALID_VALUE),
        };
        // SAFETY: the caller's result pointer.
        unsafe { put(value, v) }
    })
}

/// Attributes by their number in `cuda.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) -> i32 {
    call("cuDeviceGetAttribute", |m| {
        let d = check(m, device)?;
        let c = &m.config;
        let v = match attribute {
            1..=3 => 1024,          // threads of a block, x, y
            4 => 64,                // z
            5 => i32::MAX,          // grid x
            6 | 7 => 65535,         // y, z
            8 => 48 << 10,          // shared memory of a block
            9 => 64 << 10,          // constant memory
            10 => 32,               // warp
            11 => i32::MAX,         // pitch
            12 | 82 => 65536,       // registers of a block, of a multiprocessor
            13 => 1_000_000,        // clock in kHz
            14 => 512,              // texture alignment
            15 | 19 | 31 | 41 => 1, // overlap, mapped host memory, concurrent kernels, unified addresses
            16 => c.multiprocessors as c_int,
            17 | 18 | 20 | 32 => 0, // run-time limit, integrated, compute mode, ECC
            33 => d as c_int + 1,   // PCI bus
            34 | 50 => 0,           // PCI device, domain
            36 => 1_000_000,        // memory clock in kHz
            37 => 5120,             // memory bus in bits
            38 => c.l2 as c_int,    // L2 cache
            39 => c.threads_total() as c_int,
            40 => 3, // copy engines
            75 => (c.sm / 10) as c_int,
            76 => (c.sm % 10) as c_int,
            78..=80 => 1, // stream priorities, caches
            81 => c.shared_total() as c_int,
            97 => c.shared_optin() as c_int,
            95 => 1,                    // cooperative launches
            106 => 32,                  // blocks of a multiprocessor
            111 => 1024,                // shared memory reserved per block
            115 => 1,                   // memory pools
            120 => (c.sm >= 90).into(), // clusters
            _ => 0,
        };
        // SAFETY: the caller's result pointer.
        unsafe { put(value, v) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetDefaultMemPool(pool: *mut *mut c_void, device: c_int) -> i32 {
    call("cuDeviceGetDefaultMemPool", |m| {
        let d = check(m, device)?;
        // SAFETY: the caller's result pointer; the handle is only ever compared.
        unsafe { put(pool, (0x900 + d * 16) as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetMemPool(pool: *mut *mut c_void, device: c_int) -> i32 {
    // SAFETY: passed on.
    unsafe { cuDeviceGetDefaultMemPool(pool, device) }
}
