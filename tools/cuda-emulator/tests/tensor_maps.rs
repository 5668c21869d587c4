// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cuTensorMapEncodeTiled` of the stand-in driver: what it writes, and what it refuses.

use cuda_emulator::{Swizzle, TensorMap, driver};
use cudarc::driver::sys;
use std::ffi::{c_int, c_uint, c_void};

type Encode = unsafe extern "C" fn(
    *mut c_void,
    c_uint,
    c_uint,
    *mut c_void,
    *const u64,
    *const u64,
    *const c_uint,
    *const c_uint,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;

/// The arguments of the call, in order.
#[derive(Clone)]
struct Arguments {
    element: u32,
    rank: u32,
    address: u64,
    dims: Vec<u64>,
    strides: Vec<u64>,
    shape: Vec<u32>,
    steps: Vec<u32>,
    interleave: i32,
    swizzle: i32,
    promotion: i32,
    fill: i32,
}

impl Default for Arguments {
    /// bf16, rows of 200 elements that lie 512 bytes apart, a box of 64 columns and 128 rows.
    fn default() -> Self {
        Self {
            element: 9,
            rank: 2,
            address: 0x7000_1000,
            dims: vec![200, 1000],
            strides: vec![512],
            shape: vec![64, 128],
            steps: vec![1, 1],
            interleave: 0,
            swizzle: 3,
            promotion: 2,
            fill: 0,
        }
    }
}

#[repr(align(64))]
struct Aligned([u8; 256]);

/// The call's code, and the bytes it wrote at `offset`.
fn encode(a: &Arguments, offset: usize) -> (i32, [u8; 128]) {
    driver::install().unwrap();
    // SAFETY: the driver's first call; then a look-up that writes through a pointer to a variable; then the function
    // of that name with pointers to lists as long as it reads, and room for a map.
    unsafe {
        assert_eq!(sys::cuInit(0), sys::CUresult::CUDA_SUCCESS);
        let mut f: *mut c_void = std::ptr::null_mut();
        let name = c"cuTensorMapEncodeTiled".as_ptr();
        let mut status = std::mem::MaybeUninit::uninit();
        let found = sys::cuGetProcAddress_v2(name, &mut f, 12000, 0, status.as_mut_ptr());
        assert_eq!(found, sys::CUresult::CUDA_SUCCESS);
        let f: Encode = std::mem::transmute(f);
        let mut out = Aligned([0; 256]);
        let code = f(
            out.0[offset..].as_mut_ptr().cast(),
            a.element,
            a.rank,
            a.address as *mut c_void,
            a.dims.as_ptr(),
            a.strides.as_ptr(),
            a.shape.as_ptr(),
            a.steps.as_ptr(),
            a.interleave,
            a.swizzle,
            a.promotion,
            a.fill,
        );
        (code, out.0[offset..offset + 128].try_into().unwrap())
    }
}

#[test]
fn writes_what_a_kernel_reads() {
    let (code, bytes) = encode(&Arguments::default(), 64);
    assert_eq!(code, 0);
    let map = TensorMap::decode(&bytes).unwrap();
    let want = TensorMap {
        element: 2,
        f32: false,
        address: 0x7000_1000,
        dims: vec![200, 1000],
        strides: vec![512],
        shape: vec![64, 128],
        swizzle: Swizzle::B128,
        fill_nan: false,
    };
    assert_eq!(map, want);
    // One dimension has no stride, and the list of strides is not looked at.
    let line = Arguments {
        element: 7,
        rank: 1,
        dims: vec![1 << 32],
        strides: Vec::new(),
        shape: vec![256],
        steps: vec![1],
        swizzle: 0,
        fill: 1,
        ..Arguments::default()
    };
    let map = TensorMap::decode(&encode(&line, 0).1).unwrap();
    assert!(map.f32 && map.fill_nan && map.strides.is_empty() && map.dims == [1 << 32]);
    assert_eq!(map.bytes(), 1024);
}

#[test]
fn refuses_what_the_driver_refuses_and_what_is_not_modelled() {
    const INVALID: i32 = 1;
    const NOT_SUPPORTED: i32 = 801;
    let change = |f: fn(&mut Arguments)| {
        let mut a = Arguments::default();
        f(&mut a);
        encode(&a, 0).0
    };
    for (k, f) in [
        (|a| a.rank = 0) as fn(&mut Arguments),
        |a| a.address += 8,
        |a| a.dims[1] = 0,
        |a| a.dims[0] = (1 << 32) + 1,
        |a| a.strides[0] = 520,
        |a| a.strides[0] = 1 << 40,
        |a| a.shape[1] = 257,
        |a| a.shape[1] = 0,
        |a| a.shape[0] = 72,
        |a| a.element = 13,
        |a| a.promotion = 4,
        |a| a.fill = 2,
        |a| (a.element, a.fill) = (1, 1),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(change(f), INVALID, "{k}");
    }
    for (k, f) in [
        (|a| a.element = 11) as fn(&mut Arguments),
        |a| a.interleave = 1,
        |a| a.steps[0] = 2,
        |a| a.swizzle = 4,
        // Rows of 64 bytes in a swizzle of 128.
        |a| a.shape[0] = 32,
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(change(f), NOT_SUPPORTED, "{k}");
    }
    assert_eq!(encode(&Arguments::default(), 32).0, INVALID, "the map's own address");
    assert_eq!(change(|a| a.shape[0] = 64), 0);
}
