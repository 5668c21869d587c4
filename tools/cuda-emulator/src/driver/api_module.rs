// SPDX-License-Identifier: MIT OR Apache-2.0
//! Modules: PTX in, functions and variables by name.
//!
//! An ELF image is refused, since its instructions are not those of PTX, unless it has a section of type
//! [`SECTION_OF_PTX`]: such an image stands for a cubin in tests of programs that load some.
//!
//! A module that this device cannot run is refused as the driver refuses it: text that is not PTX, an architecture that
//! is later than the device's, an instruction that the interpreter does not know. The error log says why.

use super::codes;
use super::entry::{call, in_context, put};
use super::machine::{Function, Loaded, Machine};
use crate::module::Module;
use std::ffi::{CStr, c_char, c_uint, c_void};

fn load(m: &mut Machine, device: usize, text: &str) -> Result<u64, (i32, String)> {
    let module = Module::parse(text).map_err(|e| (codes::INVALID_PTX, e.to_string()))?;
    let (target, exact) = module.target().unwrap_or((0, false));
    let sm = m.config.sm;
    let name = format!("sm_{target}{}", if exact { "a" } else { "" });
    if m.config.refuse.as_ref() == Some(&name) {
        return Err((codes::INVALID_PTX, format!("PTX for {name}, which CPATTN_EMU_REFUSE names")));
    }
    if target > sm || (exact && target != sm) {
        let why = format!("PTX for {name} on a device of sm_{sm}");
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

/// The type of an ELF section that holds PTX: one of those that the format leaves to programs.
const SECTION_OF_PTX: u64 = 0x8000_4350;

/// The PTX in an ELF image of 64 bits; like the driver, it is told no length.
///
/// # Safety
/// The image is one, and whole.
unsafe fn text_of_elf(image: *const u8) -> Option<String> {
    let number = |at: u64, bytes: usize| {
        // SAFETY: the header's fields, and those of sections that the header says there are.
        let read = |i: usize| u64::from(unsafe { image.add(at as usize + i).read() }) << (8 * i);
        (0..bytes).map(read).sum::<u64>()
    };
    let (table, each, sections) = (number(40, 8), number(58, 2), number(60, 2));
    let found = (0..sections).map(|i| table + i * each).find(|&at| number(at + 4, 4) == SECTION_OF_PTX)?;
    let (begin, bytes) = (number(found + 24, 8), number(found + 32, 8));
    // SAFETY: the section is inside of the image.
    let text = unsafe { std::slice::from_raw_parts(image.add(begin as usize), bytes as usize) };
    String::from_utf8(text.to_vec()).ok()
}

/// Loads PTX text that ends in a zero byte, or an ELF image.
unsafe fn load_image(out: *mut *mut c_void, image: *const c_void, log: Option<(*mut c_char, usize)>) -> i32 {
    in_context("cuModuleLoadData", |m, d| {
        if image.is_null() {
            return Err(codes::INVALID_VALUE);
        }
        // SAFETY: not null; the driver's contract asks for text that ends in a zero byte, or a binary image, which is
        // recognised by its first bytes.
        let bytes = unsafe { CStr::from_ptr(image.cast()) }.to_bytes();
        let done = match std::str::from_utf8(bytes) {
            _ if bytes.starts_with(b"\x7fELF") => {
                // SAFETY: the driver's contract asks for a whole image.
                let text = unsafe { text_of_elf(image.cast()) };
                let why = "the image is a cubin: this device interprets PTX and nothing else";
                text.map_or_else(|| Err((codes::INVALID_IMAGE, why.to_owned())), |text| load(m, d, &text))
            }
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

/// The manual does not say that the driver waits for launches of the module, so this one does not: they fail.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(module: *mut c_void) -> i32 {
    in_context("cuModuleUnload", |m, _| {
        let l = m.modules.remove(&(module as u64)).ok_or(codes::INVALID_HANDLE)?;
        for (_, address, _) in &l.module.variables {
            m.homes.remove(address);
            m.mem.free(*address);
        }
        for f in l.functions.values() {
            m.functions.remove(f);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(out: *mut *mut c_void, module: *mut c_void, name: *const c_char) -> i32 {
    in_context("cuModuleGetFunction", |m, _| {
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
    in_context("cuModuleGetGlobal_v2", |m, _| {
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
    call("cuModuleGetLoadingMode", |_| unsafe { put(mode, 1) })
}
