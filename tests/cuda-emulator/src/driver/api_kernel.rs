// SPDX-License-Identifier: MIT OR Apache-2.0
//! Modules, functions, occupancy and launches.

use super::codes;
use super::entry::{call, in_context, put, stream_of};
use super::machine::{Function, Loaded, Machine};
use super::queue::Work;
use crate::module::Module;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// Registers a thread is said to need: PTX does not tell, and this is what big matrix kernels have.
const REGISTERS: u32 = 128;

fn load(m: &mut Machine, device: usize, text: &str) -> Result<u64, (i32, String)> {
    let module = Module::parse(text).map_err(|e| (codes::INVALID_PTX, e.to_string()))?;
    let (target, exact) = module.target().unwrap_or((0, false));
    let sm = m.config.sm;
    if target > sm || (exact && target != sm) {
        let why = format!("PTX for sm_{target}{} on a device of sm_{sm}", if exact { "a" } else { "" });
        return Err((codes::NO_BINARY_FOR_GPU, why));
    }
    let loaded = module.load(&mut m.mem).map_err(|e| (codes::INVALID_PTX, e.to_string()))?;
    for (_, address, _) in &loaded.variables {
        m.homes.insert(*address, device);
    }
    let id = m.handle();
    m.modules.insert(id, Loaded { device, module: loaded, functions: Default::default(), target });
    Ok(id)
}

/// Loads PTX text that ends in a zero byte.
unsafe fn load_image(out: *mut *mut c_void, image: *const c_void, log: Option<(*mut c_char, usize)>) -> i32 {
    in_context(|m, d| {
        if image.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        // SAFETY: not null; the driver's contract asks for text that ends in a zero byte, or a binary image, which is
        // recognised by its first bytes.
        let bytes = unsafe { CStr::from_ptr(image.cast()) }.to_bytes();
        let done = match std::str::from_utf8(bytes) {
            Ok(text) if text.contains(".version") => load(m, d, text),
            _ => Err((codes::INVALID_IMAGE, "the image is not PTX: this device runs nothing else".to_owned())),
        };
        match done {
            // SAFETY: the caller's result pointer.
            Ok(id) => unsafe { put(out, id as *mut c_void) },
            Err((code, why)) => {
                m.tell(&format!("module not loaded: {why}"));
                if let Some((to, len)) = log.filter(|l| !l.0.is_null() && l.1 > 0) {
                    let n = why.len().min(len - 1);
                    // SAFETY: the caller's log buffer of `len` bytes.
                    unsafe {
                        std::ptr::copy_nonoverlapping(why.as_ptr(), to.cast(), n);
                        to.add(n).write(0);
                    }
                }
                Err(code)
            }
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(out: *mut *mut c_void, image: *const c_void) -> i32 {
    // SAFETY: passed on.
    unsafe { load_image(out, image, None) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadDataEx(
    out: *mut *mut c_void,
    image: *const c_void,
    n: c_uint,
    options: *mut c_uint,
    values: *mut *mut c_void,
) -> i32 {
    let (mut buffer, mut size) = (std::ptr::null_mut(), 0);
    for k in 0..n as usize {
        // SAFETY: the caller gives n options and n values. 5 is the error log, 6 its size, kept in the pointer itself.
        unsafe {
            match *options.add(k) {
                5 => buffer = (*values.add(k)).cast(),
                6 => size = *values.add(k) as usize,
                _ => {}
            }
        }
    }
    // SAFETY: passed on.
    unsafe { load_image(out, image, Some((buffer, size))) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoad(out: *mut *mut c_void, path: *const c_char) -> i32 {
    if path.is_null() {
        return codes::INVALID_VALUE;
    }
    // SAFETY: not null; a path that ends in a zero byte.
    let path = unsafe { CStr::from_ptr(path) }.to_string_lossy();
    let Ok(mut text) = std::fs::read(&*path) else { return codes::FILE_NOT_FOUND };
    text.push(0);
    // SAFETY: the text ends in a zero byte now.
    unsafe { load_image(out, text.as_ptr().cast(), None) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(module: *mut c_void) -> i32 {
    in_context(|m, _| {
        if !m.modules.contains_key(&(module as u64)) {
            return Err(codes::INVALID_HANDLE);
        }
        m.drain_all();
        if let Some(l) = m.modules.remove(&(module as u64)) {
            for (_, address, _) in &l.module.variables {
                m.homes.remove(address);
                m.mem.free(*address);
            }
            for f in l.functions.values() {
                m.functions.remove(f);
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(out: *mut *mut c_void, module: *mut c_void, name: *const c_char) -> i32 {
    in_context(|m, _| {
        if name.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        // SAFETY: not null; a name that ends in a zero byte.
        let name = unsafe { CStr::from_ptr(name) };
        let text = name.to_str().map_err(|_| codes::NOT_FOUND)?.to_owned();
        let id = m.handle();
        let l = m.modules.get_mut(&(module as u64)).ok_or(codes::INVALID_HANDLE)?;
        let known = match l.functions.get(&text) {
            Some(&f) => f,
            None => {
                let kernel = l.module.kernel(&text).ok_or(codes::NOT_FOUND)?.clone();
                let most_dynamic = (48u32 << 10).saturating_sub(kernel.static_shared());
                l.functions.insert(text, id);
                let target = l.target;
                let f = Function { module: module as u64, kernel, most_dynamic, name: name.to_owned(), target };
                m.functions.insert(id, f);
                id
            }
        };
        // SAFETY: the caller's result pointer.
        unsafe { put(out, known as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetGlobal_v2(
    out: *mut u64,
    bytes: *mut usize,
    module: *mut c_void,
    name: *const c_char,
) -> i32 {
    in_context(|m, _| {
        if name.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        // SAFETY: not null; a name that ends in a zero byte.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let l = m.modules.get(&(module as u64)).ok_or(codes::INVALID_HANDLE)?;
        let (_, address, size) = l.module.variables.iter().find(|v| v.0 == name).ok_or(codes::NOT_FOUND)?;
        // SAFETY: the caller's result pointers, each of which may be null.
        unsafe {
            if !out.is_null() {
                put(out, *address)?;
            }
            if !bytes.is_null() {
                put(bytes, *size as usize)?;
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetLoadingMode(mode: *mut c_uint) -> i32 {
    // SAFETY: the caller's result pointer.
    call(|_| unsafe { put(mode, 1) })
}

fn function(m: &mut Machine, f: *mut c_void) -> Result<&mut Function, i32> {
    m.functions.get_mut(&(f as u64)).ok_or(codes::INVALID_HANDLE)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(value: *mut c_int, which: c_uint, f: *mut c_void) -> i32 {
    in_context(|m, _| {
        let sm = m.config.sm;
        let f = function(m, f)?;
        let v = match which {
            0 => f.kernel.max_threads(),
            1 => f.kernel.static_shared(),
            2 => 0,
            3 => f.kernel.local_bytes(),
            4 => REGISTERS,
            5 => f.target,
            6 => sm,
            7 | 9..=16 => 0,
            8 => f.most_dynamic,
            _ => return Err(codes::INVALID_VALUE),
        };
        // SAFETY: the caller's result pointer.
        unsafe { put(value, v as c_int) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncSetAttribute(f: *mut c_void, which: c_uint, value: c_int) -> i32 {
    in_context(|m, _| {
        let optin = m.config.shared_optin();
        let f = function(m, f)?;
        match which {
            8 => {
                if value < 0 || value as u32 + f.kernel.static_shared() > optin {
                    return Err(codes::INVALID_VALUE);
                }
                f.most_dynamic = value as u32;
                Ok(())
            }
            9 | 14 => Ok(()),
            _ => Err(codes::INVALID_VALUE),
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncSetCacheConfig(f: *mut c_void, _config: c_uint) -> i32 {
    in_context(|m, _| function(m, f).map(|_| ()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetName(out: *mut *const c_char, f: *mut c_void) -> i32 {
    in_context(|m, _| {
        let p = function(m, f)?.name.as_ptr();
        // SAFETY: the caller's result pointer; the name lives as long as the function.
        unsafe { put(out, p) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetModule(out: *mut *mut c_void, f: *mut c_void) -> i32 {
    in_context(|m, _| {
        let module = function(m, f)?.module;
        // SAFETY: the caller's result pointer.
        unsafe { put(out, module as *mut c_void) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetParamInfo(f: *mut c_void, n: usize, offset: *mut usize, size: *mut usize) -> i32 {
    in_context(|m, _| {
        let f = function(m, f)?;
        let p = f.kernel.params().get(n).ok_or(codes::INVALID_VALUE)?.clone();
        // SAFETY: the caller's result pointers; the size may be null.
        unsafe {
            put(offset, p.offset)?;
            if !size.is_null() {
                put(size, p.size)?;
            }
        }
        Ok(())
    })
}

/// Blocks of a multiprocessor: by threads, by shared memory, by registers.
fn occupancy(m: &Machine, f: &Function, threads: u32, dynamic: u32) -> u32 {
    let shared = f.kernel.static_shared() + dynamic;
    if threads == 0 || threads > f.kernel.max_threads() || shared > m.config.shared_optin() {
        return 0;
    }
    let threads = threads.next_multiple_of(32);
    let by_shared = m.config.shared_total() / (shared.next_multiple_of(128) + 1024);
    let by_registers = 65536 / (threads * REGISTERS.min(65536 / threads));
    (m.config.threads_total() / threads).min(by_shared).min(by_registers).min(32)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut c_int,
    f: *mut c_void,
    threads: c_int,
    dynamic: usize,
) -> i32 {
    in_context(|m, _| {
        let handle = f as u64;
        let f = m.functions.get(&handle).ok_or(codes::INVALID_HANDLE)?;
        if threads <= 0 {
            return Err(codes::INVALID_VALUE);
        }
        // SAFETY: the caller's result pointer.
        unsafe { put(blocks, occupancy(m, f, threads as u32, dynamic.min(1 << 30) as u32) as c_int) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    blocks: *mut c_int,
    f: *mut c_void,
    threads: c_int,
    dynamic: usize,
    _flags: c_uint,
) -> i32 {
    // SAFETY: passed on.
    unsafe { cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, f, threads, dynamic) }
}

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
    cooperative: bool,
) -> Result<(), i32> {
    let s = stream_of(m, device, stream)?;
    let f = m.functions.get(&(f as u64)).ok_or(codes::INVALID_HANDLE)?;
    if m.modules.get(&f.module).is_none_or(|l| l.device != device) {
        return Err(codes::INVALID_HANDLE);
    }
    let kernel = f.kernel.clone();
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
    m.enqueue(s, Vec::new(), None, Work::Launch { kernel, grid, block, shared: dynamic, params: buffer, resident });
    Ok(())
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
    in_context(|m, d| unsafe { start(m, d, f, [gx, gy, gz], [bx, by, bz], dynamic, stream, params, extra, false) })
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
    in_context(|m, d| unsafe { start(m, d, f, [gx, gy, gz], [bx, by, bz], dynamic, stream, params, none, true) })
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
    in_context(|m, d| {
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
        let mut cooperative = false;
        for a in attributes {
            match a.id {
                2 => cooperative = a.value[0] as u32 != 0,
                // Hints, and an overlap with the launch before that only ever weakens the order.
                0 | 1 | 3 | 8 | 14 => {}
                // A cluster of one block is no cluster.
                4 if a.value[0] == 1 | 1 << 32 && a.value[1] as u32 == 1 => {}
                _ => {
                    m.tell(&format!("launch refused: attribute {} is not known to the emulator", a.id));
                    return Err(codes::NOT_SUPPORTED);
                }
            }
        }
        // SAFETY: the caller's arguments, passed on.
        unsafe { start(m, d, f, c.grid, c.block, c.dynamic, c.stream, params, extra, cooperative) }
    })
}
