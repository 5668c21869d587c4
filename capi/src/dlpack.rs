// SPDX-License-Identifier: MIT OR Apache-2.0
//! DLPack tensors in, [`RawTensor`]s out.
//!
//! The three structs are DLPack's `DLDevice`, `DLDataType` and `DLTensor`, which have kept their layout since version
//! 0.2. A `DLTensor` has an address and no length. So the checks here are of device, type, number of dimensions,
//! strides and alignment, and that every offset stays within the address space; later code computes offsets without
//! checks. The backend asks the driver whether a device address belongs to the device.

use core::{array, ffi::c_void};
#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use super::input::renamed;
use super::status::without;
#[cfg(feature = "cuda")]
use cpattn::kernel::cuda::Cuda;
use cpattn::{Device, Dtype, Error, Result, call::RawTensor, disjoint, schedule::TensorAxes};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct cpattn_dl_device {
    pub device_type: i32,
    pub device_id: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct cpattn_dl_dtype {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_tensor {
    pub data: *mut c_void,
    pub device: cpattn_dl_device,
    pub ndim: i32,
    pub dtype: cpattn_dl_dtype,
    pub shape: *mut i64,
    pub strides: *mut i64,
    pub byte_offset: u64,
}

/// How the dimensions of an argument are to be read.
#[derive(Clone, Copy)]
pub(super) enum Axes {
    /// `[tokens, heads, dim]`.
    Rows,
    /// `[heads, tokens]`.
    HeadMajor,
    /// `[heads, tokens]` or `[heads, tokens, 2]`.
    PartialLse,
    /// `[heads]`.
    PerHead,
    /// `[heads]` or `[heads, sinks of each]`.
    Sinks,
    /// `[heads]` or `[documents, heads]`.
    Slopes,
}

impl From<TensorAxes> for Axes {
    fn from(axes: TensorAxes) -> Self {
        match axes {
            TensorAxes::Rows => Self::Rows,
            TensorAxes::RowNumbers => Self::HeadMajor,
            TensorAxes::HeadNumbers => Self::PerHead,
            TensorAxes::HeadSinks => Self::Sinks,
        }
    }
}

const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const CUDA_MANAGED: i32 = 13;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;

/// A described tensor, whatever its type: address, and counts and strides (in elements) by dimension.
pub(super) struct TensorFields {
    pub ptr: *mut u8,
    pub item: usize,
    pub dtype: cpattn_dl_dtype,
    pub ndim: usize,
    pub shape: [u64; 3],
    /// A dimension of 0 or 1 has the stride of a compact tensor.
    pub strides: [i64; 3],
}

impl TensorFields {
    pub(super) fn is_empty(&self) -> bool {
        self.shape[..self.ndim].contains(&0)
    }
}

/// The device that an argument asks for; a refusal names the argument, which may be one entry of a list.
#[cfg(feature = "cuda")]
pub(super) fn device(argument: &str, id: i32) -> Result<Arc<Cuda>> {
    Cuda::shared(id).map_err(|error| match error {
        Error::Unsupported { option, limit, hint } => {
            Error::Unsupported { option: format!("{argument} = {id}: {option}"), limit, hint }
        }
        Error::Device { call, code, message } => {
            Error::Device { call, code, message: format!("{message} ({argument} = {id})") }
        }
        other => renamed(other, argument),
    })
}

/// A device in DLPack's numbers.
pub(super) fn device_of(name: &str, device_type: i32, device_id: i32) -> Result<Device> {
    match (device_type, device_id) {
        (CPU, 0) => Ok(Device::Cpu),
        (CPU, id) => Err(Error::invalid(format!("{name}.device_id"), id, "0 on the CPU")),
        (CUDA, id) if cfg!(feature = "cuda") => Ok(Device::Cuda(id)),
        (CUDA, id) => without("cuda", format!("{name}.device type 2 id {id} (CUDA)")),
        (CUDA_MANAGED, _) => Err(Error::unsupported(
            format!("{name}.device type 13 (managed memory)"),
            "it does not say which side may touch it now",
            "describe it as CPATTN_DEVICE_CPU or CPATTN_DEVICE_CUDA, whichever it is",
        )),
        (other, id) => Err(Error::unsupported(
            format!("{name}.device type {other} id {id}"),
            "the CPU (1) and CUDA devices (2) are served",
            "copy the tensor to one of them",
        )),
    }
}

/// Reads a tensor and makes the checks that all tensors need. It must be on device `at`.
///
/// # Safety
/// `t` is null or misaligned, or a DLTensor whose shape and strides have `ndim` entries.
pub(super) unsafe fn parts(
    name: &'static str, t: *const cpattn_tensor, ndims: core::ops::RangeInclusive<i32>, at: Device,
) -> Result<TensorFields> {
    if t.is_null() || !t.is_aligned() {
        let found = if t.is_null() { "NULL" } else { "misaligned" };
        return Err(Error::invalid(name, found, "the address of a cpattn_tensor"));
    }
    // SAFETY: non-null and aligned (checked above), so it is a DLTensor (the contract of this function).
    let t = unsafe { t.read() };
    // Page-locked memory is memory of the host.
    let device_type = if t.device.device_type == CUDA_HOST { CPU } else { t.device.device_type };
    let found = device_of(name, device_type, t.device.device_id)?;
    if found != at {
        return Err(Error::invalid(format!("{name}.device"), format!("type {}, {found}", t.device.device_type), at)
            .hint("all tensors of a call lie where its rank or scratch is"));
    }
    if !ndims.contains(&t.ndim) {
        let (low, high) = (ndims.start(), ndims.end());
        let expected = if low == high { format!("{low}") } else { format!("{low} to {high}") };
        return Err(Error::invalid(format!("{name}.ndim"), t.ndim, expected));
    }
    if t.dtype.lanes != 1 {
        return Err(Error::invalid(format!("{name}.dtype.lanes"), t.dtype.lanes, 1));
    }
    let item = usize::from(t.dtype.bits / 8);
    if !matches!(t.dtype.bits, 8 | 16 | 32 | 64 | 128) {
        return Err(Error::invalid(format!("{name}.dtype.bits"), t.dtype.bits, "8, 16, 32, 64 or 128"));
    }
    let ndim = t.ndim as usize;
    let entries = |what: &'static str, at: *mut i64| {
        // SAFETY: entries of the caller's arrays, by its promise.
        unsafe { super::input::array(what, at.cast_const(), ndim) }.map_err(|_| {
            let found = if at.is_null() { "NULL" } else { "misaligned" };
            Error::invalid(format!("{name}.{what}"), found, format!("{ndim} entries"))
        })
    };
    let shape_of = entries("shape", t.shape)?;
    let strides_of = if t.strides.is_null() { None } else { Some(entries("strides", t.strides)?) };
    let mut out = TensorFields { ptr: t.data.cast(), item, dtype: t.dtype, ndim, shape: [1; 3], strides: [1; 3] };
    for (d, &n) in shape_of.iter().enumerate() {
        out.shape[d] = u64::try_from(n).map_err(|_| Error::invalid(format!("{name}.shape[{d}]"), n, "at least 0"))?;
    }
    let mut compact = 1i64;
    let mut reach = 0i128;
    for d in (0..ndim).rev() {
        let n = out.shape[d];
        out.strides[d] = compact;
        if n > 1 && !out.is_empty() {
            if let Some(s) = strides_of {
                if s[d] < 0 {
                    return Err(Error::invalid(format!("{name}.strides[{d}]"), s[d], "at least 0"));
                }
                out.strides[d] = s[d];
            }
            // Saturates: the largest shapes times the largest strides leave even an i128.
            reach = reach.saturating_add(i128::from(n).saturating_mul(i128::from(out.strides[d])));
        }
        compact = i64::try_from(n.max(1)).ok().and_then(|n| compact.checked_mul(n)).ok_or_else(|| {
            Error::invalid(format!("{name}.shape[{d}]"), n, "a tensor that stays within the address space")
        })?;
    }
    if ndim == 3 && out.shape[2] > 1 && out.strides[2] != 1 {
        return Err(
            Error::invalid(format!("{name}.strides[2]"), out.strides[2], 1).hint("the last dimension is contiguous")
        );
    }
    let address = (out.ptr.addr() as u64).checked_add(t.byte_offset).map(i128::from);
    let end = address.map(|a| reach.saturating_add(1).saturating_mul(item as i128).saturating_add(a));
    if out.is_empty() {
        return Ok(out);
    }
    if out.ptr.is_null() {
        return Err(Error::invalid(format!("{name}.data"), "NULL", "an address: no dimension is 0"));
    }
    if !t.byte_offset.is_multiple_of(item as u64) {
        return Err(Error::invalid(format!("{name}.byte_offset"), t.byte_offset, format!("a multiple of {item}")));
    }
    if end.is_none_or(|end| end > isize::MAX as i128) {
        return Err(Error::invalid(
            format!("{name}.strides"),
            format!("{:?} for shape {:?}", &out.strides[..ndim], &out.shape[..ndim]),
            "a tensor that stays within the address space",
        )
        .hint("strides are counted in elements, byte_offset in bytes"));
    }
    out.ptr = out.ptr.wrapping_add(t.byte_offset as usize);
    if !out.ptr.addr().is_multiple_of(item) {
        return Err(Error::invalid(
            format!("{name}.data"),
            format!("{:p} with its byte_offset", out.ptr),
            format!("a multiple of {item}, the element's size"),
        ));
    }
    Ok(out)
}

fn dtype(name: &'static str, d: cpattn_dl_dtype) -> Result<Dtype> {
    match (d.code, d.bits) {
        (FLOAT, 16) => Ok(Dtype::F16),
        (FLOAT, 32) => Ok(Dtype::F32),
        (FLOAT, 64) => Ok(Dtype::F64),
        (BFLOAT, 16) => Ok(Dtype::Bf16),
        (code, bits) => Err(Error::invalid(
            format!("{name}.dtype"),
            format!("code {code} with {bits} bits"),
            "f16 {2, 16}, bf16 {4, 16}, f32 {2, 32} or f64 {2, 64}",
        )),
    }
}

/// The number of tensors of the call with the most.
const MAX_TENSORS: usize = 10;

/// A tensor argument of a call.
#[derive(Clone, Copy)]
pub(super) struct Given {
    name: &'static str,
    tensor: *const cpattn_tensor,
    form: Axes,
    /// May be NULL.
    optional: bool,
}

pub(super) const fn tensor(name: &'static str, tensor: *const cpattn_tensor, form: Axes) -> Given {
    Given { name, tensor, form, optional: false }
}

impl Given {
    pub(super) const fn optional(self) -> Self {
        Self { optional: true, ..self }
    }
}

/// Reads all tensors of a call, and refuses those that share memory with a written one. Only the tensor named `shared`
/// may be the same as `o`.
///
/// # Safety
/// As [`parts`], for each.
pub(super) unsafe fn disjoint_tensors<const R: usize, const W: usize>(
    at: Device, read: [Given; R], written: [Given; W], shared: &str,
) -> Result<([RawTensor; R], [RawTensor; W])> {
    const { assert!(R + W <= MAX_TENSORS) };
    let mut named = [("", RawTensor::NONE, false); MAX_TENSORS];
    for (i, given) in read.iter().chain(&written).enumerate() {
        // SAFETY: each tensor of the lists is a DLTensor or refused by `parts` (the contract of this function).
        named[i] = (given.name, unsafe { one(at, given) }?, i >= R);
    }
    let out = (array::from_fn(|i| named[i].1), array::from_fn(|i| named[R + i].1));
    let of = |name| named[..R + W].iter().position(|(found, ..)| *found == name);
    if let (Some(twin), Some(o)) = (of(shared), of("o"))
        && named[twin].1 == named[o].1
    {
        named[twin].1 = RawTensor::NONE;
    }
    disjoint(&named[..R + W])?;
    Ok(out)
}

/// # Safety
/// As [`parts`].
pub(super) unsafe fn one(at: Device, given: &Given) -> Result<RawTensor> {
    let &Given { name, tensor, form, optional } = given;
    if optional && tensor.is_null() {
        return Ok(RawTensor::NONE);
    }
    let ndim = match form {
        Axes::Rows => 3..=3,
        Axes::HeadMajor => 2..=2,
        Axes::PartialLse => 2..=3,
        Axes::PerHead => 1..=1,
        Axes::Sinks | Axes::Slopes => 1..=2,
    };
    // SAFETY: the tensor is as `parts` needs it (the contract of this function).
    let p = unsafe { parts(name, tensor, ndim, at) }?;
    let dtype = dtype(name, p.dtype)?;
    let narrow = |d: usize| {
        u32::try_from(p.shape[d])
            .map_err(|_| Error::invalid(format!("{name}.shape[{d}]"), p.shape[d], format!("at most {}", u32::MAX)))
    };
    let s = p.strides;
    if matches!(form, Axes::PartialLse) && p.ndim == 3 && p.shape[2] != 2 {
        return Err(Error::invalid(format!("{name}.shape[2]"), p.shape[2], "2: the lse and what rounding it lost"));
    }
    let (tokens, token_stride, heads, head_stride, dim) = match form {
        Axes::Rows => (p.shape[0], s[0], narrow(1)?, s[1], narrow(2)?),
        Axes::HeadMajor => (p.shape[1], s[1], narrow(0)?, s[0], 1),
        Axes::PartialLse => (p.shape[1], s[1], narrow(0)?, s[0], if p.ndim == 3 { 2 } else { 1 }),
        Axes::Slopes if p.ndim == 2 => (p.shape[0], s[0], narrow(1)?, s[1], 1),
        Axes::PerHead | Axes::Slopes => (1, 0, narrow(0)?, s[0], 1),
        Axes::Sinks => (1, 0, narrow(0)?, s[0], if p.ndim == 2 { narrow(1)? } else { 1 }),
    };
    let mut ptr = p.ptr;
    if optional && ptr.is_null() {
        // A tensor without elements may have no address. It gets one here, since NULL stands for an omitted argument.
        ptr = core::ptr::without_provenance_mut(dtype.size());
    }
    Ok(RawTensor { ptr, token_stride, head_stride, tokens, heads, dim, dtype })
}
