// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensor maps: `cuTensorMapEncodeTiled`, and a new address for a map that is there.
//!
//! What the driver refuses is refused, with a line that says why. What the emulator does not model (interleaved
//! layouts, steps between elements, elements that are rounded on the way, rows of a box that are shorter than its
//! swizzle) is refused as not supported, not computed almost right.

use super::codes;
use super::entry::call;
use super::machine::Machine;
use crate::tensormap::{Swizzle, TensorMap};
use std::ffi::{c_int, c_uint, c_void};

/// Bytes of the elements of `CUtensorMapDataType`, from 0 on: u8, u16, u32, i32, u64, i64, f16, f32, f64, bf16.
const ELEMENTS: [u32; 10] = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2];
const F32: u32 = 7;

fn refuse(m: &mut Machine, code: i32, why: &str) -> i32 {
    m.tell(&format!("tensor map refused: {why}"));
    code
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuTensorMapEncodeTiled(
    out: *mut c_void,
    element: c_uint,
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
) -> i32 {
    call("cuTensorMapEncodeTiled", |m| {
        if m.config.refuse.as_deref() == Some("tensor_map") {
            return Err(refuse(m, codes::INVALID_VALUE, "CPATTN_EMU_REFUSE names them"));
        }
        if out.is_null() || dims.is_null() || shape.is_null() || steps.is_null() || rank > 1 && strides.is_null() {
            return Err(refuse(m, codes::INVALID_VALUE, "a pointer is null"));
        }
        if !(out as usize).is_multiple_of(64) {
            return Err(refuse(m, codes::INVALID_VALUE, &format!("the map's address {out:p} is not a multiple of 64")));
        }
        if !(1..=5).contains(&rank) {
            return Err(refuse(m, codes::INVALID_VALUE, &format!("rank {rank}: 1 to 5")));
        }
        if !(0..=3).contains(&promotion) || !(0..=1).contains(&fill) || element > 12 {
            return Err(refuse(m, codes::INVALID_VALUE, "an enumeration has a value that is none of its own"));
        }
        let n = rank as usize;
        // SAFETY: not null; the caller's lists of `rank` numbers each, one fewer for the strides.
        let (dims, shape, steps) = unsafe {
            let list = |p| std::slice::from_raw_parts(p, n);
            (std::slice::from_raw_parts(dims, n).to_vec(), list(shape).to_vec(), list(steps))
        };
        // SAFETY: as above; a list of none is not looked at.
        let strides = if n > 1 { unsafe { std::slice::from_raw_parts(strides, n - 1) }.to_vec() } else { Vec::new() };
        let Some(&bytes) = ELEMENTS.get(element as usize) else {
            return Err(refuse(m, codes::NOT_SUPPORTED, &format!("elements of type {element} are not modelled")));
        };
        if interleave != 0 || steps.iter().any(|s| *s != 1) {
            return Err(refuse(
                m,
                codes::NOT_SUPPORTED,
                "interleaved layouts and steps between elements are not modelled",
            ));
        }
        let Some(swizzle) = u32::try_from(swizzle).ok().and_then(Swizzle::of) else {
            return Err(refuse(m, codes::NOT_SUPPORTED, &format!("swizzle {swizzle} is not modelled")));
        };
        if fill == 1 && !matches!(element, 6..=9) {
            return Err(refuse(m, codes::INVALID_VALUE, "only floating-point elements can be filled with NaN"));
        }
        let (f32, address, fill_nan) = (element == F32, address as u64, fill == 1);
        let map = TensorMap { element: bytes, f32, address, dims, strides, shape, swizzle, fill_nan };
        map.check().map_err(|why| refuse(m, codes::INVALID_VALUE, &why))?;
        let inner = map.shape[0] * map.element;
        if swizzle != Swizzle::None && inner != swizzle.width() {
            let why =
                format!("rows of {inner} bytes under {swizzle:?}: shorter rows than the swizzle are not modelled");
            return Err(refuse(m, codes::NOT_SUPPORTED, &why));
        }
        // SAFETY: not null, and room for the 128 bytes of a map is the caller's part of the driver's contract.
        unsafe { out.cast::<[u8; 128]>().write_unaligned(map.encode()) };
        Ok(())
    })
}

/// Gives a map another address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuTensorMapReplaceAddress(map: *mut c_void, address: *mut c_void) -> i32 {
    call("cuTensorMapReplaceAddress", |m| {
        if map.is_null() {
            return Err(refuse(m, codes::INVALID_VALUE, "a pointer is null"));
        }
        let map = map.cast::<[u8; 128]>();
        // SAFETY: not null; the caller's map has 128 bytes.
        let Some(mut changed) = TensorMap::decode(&unsafe { map.read_unaligned() }) else {
            return Err(refuse(m, codes::INVALID_VALUE, "these 128 bytes are no tensor map"));
        };
        changed.address = address as u64;
        changed.check().map_err(|why| refuse(m, codes::INVALID_VALUE, &why))?;
        // SAFETY: as above.
        unsafe { map.write_unaligned(changed.encode()) };
        Ok(())
    })
}
