// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensor maps: the arguments that describe a tensor for copies of rows of ranges (`ptx/sm90/hopper_rows.cuh`), and
//! their encoding by the driver.

use crate::call::RawTensor;
use crate::device::driver::{check, sys};
use crate::element::Dtype;
use crate::error::Result;
use crate::kernel::cuda::abi::params::Tensor;
use crate::kernel::cuda::family::Family;
use crate::kernel::cuda::hopper::switches::switches;

/// Columns of a box: 128 bytes.
pub(super) const COLUMNS: u32 = 64;

/// `TensorMap`: the bytes that the driver wrote.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(in crate::kernel::cuda) struct Map(pub [u8; 128]);

/// A tensor without its address and strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernel::cuda) struct MapShape {
    pub dtype: Dtype,
    pub dim: u32,
    pub heads: u32,
    pub tokens: u64,
    /// Rows of a part.
    pub span: u32,
    /// Rows and heads of a box.
    pub rows: u32,
    pub box_heads: u32,
}

/// The driver's arguments for a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ragged {
    address: u64,
    /// Dimensions that are used: the last one only of wrapped maps.
    rank: u32,
    /// Columns, rows, heads, parts; the fifth dimension.
    dims: [u64; 5],
    /// Bytes from one row, head, part to the next; of the fifth dimension.
    strides: [u64; 4],
}

/// Rows of a part of a wrapped map, and the coordinate of every copy in its fifth dimension
/// (`ptx/sm90/hopper_rows.cuh`).
const WRAPPED_SPAN: u32 = 1 << 30;

/// Rows of a part of maps through which ranges of up to `longest` rows are copied.
pub(in crate::kernel::cuda) fn span(longest: u32) -> u32 {
    if switches().wrapped_maps { longest.max(WRAPPED_SPAN) } else { longest }
}

impl MapShape {
    /// Boxes of `rows` rows of one head.
    pub(in crate::kernel::cuda) fn new(t: &RawTensor, span: u32, rows: u32) -> Self {
        Self { dtype: t.dtype, dim: t.dim, heads: t.heads, tokens: t.tokens, span, rows, box_heads: 1 }
    }

    /// The arguments for a map; `None` if no map can describe the tensor.
    fn ragged(&self, t: Tensor) -> Option<Ragged> {
        if switches().wrapped_maps { self.wrapped(t) } else { self.before(t) }
    }

    /// The map that begins `span` rows before the tensor.
    fn before(&self, t: Tensor) -> Option<Ragged> {
        let at_tensor = self.at_tensor(t)?;
        let address = t.ptr.checked_sub(u64::from(self.span).checked_mul(at_tensor.strides[0])?)?;
        Some(Ragged { address, ..at_tensor })
    }

    /// The map that begins at the tensor: the fifth dimension takes as many rows back as a part has.
    fn wrapped(&self, t: Tensor) -> Option<Ragged> {
        // Of any multiple of 2^34, 2^30 are a multiple of 2^64. This one is Triton's for strides below 2^35 bytes.
        const MULTIPLE: u64 = 1 << 35;
        let mut wrapped = self.at_tensor(t).filter(|_| self.span == WRAPPED_SPAN)?;
        let row = wrapped.strides[0];
        wrapped.strides[3] = Some((row / MULTIPLE + 1) * MULTIPLE - row).filter(|&bytes| bytes < 1 << 40)?;
        wrapped.dims[4] = 0x7fff_0000;
        Some(Ragged { rank: 5, ..wrapped })
    }

    /// The map of four dimensions whose first row is that of the tensor.
    fn at_tensor(&self, t: Tensor) -> Option<Ragged> {
        let compact = i64::from(self.dim) * self.dtype.size() as i64;
        let stride = |bytes: i64, used: bool| {
            let bytes = u64::try_from(if used { bytes } else { compact }).ok()?;
            (bytes > 0 && bytes.is_multiple_of(16) && bytes < 1 << 40).then_some(bytes)
        };
        let (row, head) = (stride(t.token, self.tokens > 1)?, stride(t.head, self.heads > 1)?);
        if !(1..1 << 31).contains(&self.tokens) || !(1..1 << 31).contains(&self.heads) || self.span == 0 {
            return None;
        }
        Some(Ragged {
            address: Some(t.ptr).filter(|a| a.is_multiple_of(16))?,
            rank: 4,
            dims: [self.dim.into(), self.span.into(), self.heads.into(), self.tokens + 1, 1],
            strides: [row, head, row, 0],
        })
    }

    /// The map; `None` if no map can describe the tensor. If the driver refuses a map that can be described, this is an
    /// error. To use the other kernel instead would be slower, and never noticed.
    pub(in crate::kernel::cuda) fn encode(&self, t: Tensor) -> Result<Option<Map>> {
        let Some(ragged) = self.ragged(t) else { return Ok(None) };
        let mut map = Map([0; 128]);
        let code = self.encode_into(&mut map, ragged);
        check("cuTensorMapEncodeTiled", code).map_err(Family::with_way_out)?;
        Ok(Some(map))
    }

    /// Encodes the map and returns the driver's status.
    fn encode_into(&self, map: &mut Map, Ragged { address, rank, dims, strides }: Ragged) -> sys::CUresult {
        let element = if self.dtype == Dtype::Bf16 { sys::TENSOR_MAP_BFLOAT16 } else { sys::TENSOR_MAP_FLOAT16 };
        // SAFETY: the map is aligned to 64 bytes and has 128; the arrays are at least as long as the rank says, one
        // stride less.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                core::ptr::from_mut(map).cast(),
                element,
                rank,
                address as usize as *mut _,
                dims.as_ptr(),
                strides.as_ptr(),
                [COLUMNS, self.rows, self.box_heads, 1, 1].as_ptr(),
                [1; 5].as_ptr(),
                sys::TENSOR_MAP_INTERLEAVE_NONE,
                sys::TENSOR_MAP_SWIZZLE_128B,
                sys::TENSOR_MAP_L2_PROMOTION_256B,
                sys::TENSOR_MAP_FILL_ZEROS,
            )
        }
    }
}

/// Whether the driver can encode maps at all. Drivers that cannot are too old for `sm_90a`.
pub(in crate::kernel::cuda) fn driver_makes_maps() -> bool {
    let shape = MapShape { dtype: Dtype::F16, dim: COLUMNS, heads: 1, tokens: 1, span: span(1), rows: 8, box_heads: 1 };
    let ragged = shape.ragged(Tensor { ptr: 1 << 20, token: 0, head: 0 });
    ragged.is_some_and(|ragged| shape.encode_into(&mut Map([0; 128]), ragged) != sys::NOT_SUPPORTED)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: MapShape =
        MapShape { dtype: Dtype::Bf16, dim: 128, heads: 8, tokens: 1000, span: 300, rows: 128, box_heads: 1 };
    const TENSOR: Tensor = Tensor { ptr: 1 << 30, token: 2064, head: 256 };

    #[test]
    fn maps_are_ragged() {
        let expected = Ragged {
            address: (1 << 30) - 300 * 2064,
            rank: 4,
            dims: [128, 300, 8, 1001, 1],
            strides: [2064, 256, 2064, 0],
        };
        assert_eq!(SHAPE.before(TENSOR), Some(expected));
    }

    /// With the coordinates of `load_rows`, a wrapped map addresses the rows of the tensor.
    #[test]
    fn wrapped_maps_begin_at_the_tensor() {
        let shape = MapShape { span: WRAPPED_SPAN, ..SHAPE };
        for token in [16, 2064, (1 << 34) - 16, 1 << 34, (1 << 35) - 16, 1 << 35, (1 << 39) + 16] {
            let t = Tensor { token, ..TENSOR };
            let wrapped = shape.wrapped(t).expect("a map");
            let (span, row) = (u64::from(WRAPPED_SPAN), token as u64);
            assert_eq!((wrapped.address, wrapped.rank, wrapped.dims[1]), (t.ptr, 5, span));
            for (begin, len, i, head) in [(0, 1000, 0, 0), (0, 1000, 999, 7), (990, 10, 3, 2), (0, 1, 0, 1)] {
                // Row `i` of a range of `len` rows from `begin` on.
                let at = [0, span - len + i, head, begin + len, span];
                assert!(at.iter().zip(wrapped.dims).all(|(at, dim)| *at < dim), "{at:?}");
                let strides = core::iter::once(2).chain(wrapped.strides);
                let address =
                    at.iter().zip(strides).fold(wrapped.address, |a, (at, s)| a.wrapping_add(at.wrapping_mul(s)));
                assert_eq!(address, t.ptr.wrapping_add((begin + i).wrapping_mul(row)).wrapping_add(head * 256));
            }
            assert!(wrapped.strides.iter().all(|s| s % 16 == 0 && *s < 1 << 40), "{:?}", wrapped.strides);
        }
        assert_eq!(shape.wrapped(TENSOR).expect("a map").strides[3], (1 << 35) - 2064);
        // What is farther apart has no such map, nor have ranges of more rows.
        assert_eq!(shape.wrapped(Tensor { token: (1 << 40) - 16, ..TENSOR }).map(|m| m.strides[3]), Some(16));
        assert_eq!(MapShape { span: WRAPPED_SPAN + 1, ..SHAPE }.wrapped(TENSOR), None);
        assert_eq!(shape.wrapped(Tensor { ptr: TENSOR.ptr + 8, ..TENSOR }), None);
    }

    #[test]
    fn what_maps_cannot_say() {
        let change = |f: fn(&mut MapShape, &mut Tensor)| {
            let (mut shape, mut tensor) = (SHAPE, TENSOR);
            f(&mut shape, &mut tensor);
            shape.before(tensor)
        };
        for (i, f) in [
            (|_, t| t.token = -2064) as fn(&mut MapShape, &mut Tensor),
            |_, t| t.head = -256,
            |_, t| t.token = 0,
            |_, t| t.head = 0,
            |_, t| t.token = 2056,
            |_, t| t.head = 1 << 40,
            |s, _| s.tokens = 1 << 31,
            |s, _| s.tokens = 0,
            |s, _| s.heads = 0,
            |s, _| s.span = 0,
            |_, t| t.ptr = 300 * 2064 - 16,
            |_, t| t.ptr += 8,
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(change(f), None, "{i}");
        }
        // Strides of dimensions of size 1 are not used and may be anything.
        let one = change(|s, t| (s.tokens, s.heads, t.token, t.head) = (1, 1, -5, 0)).expect("one row");
        assert_eq!(one.strides, [256, 256, 256, 0]);
        assert!(change(|_, t| t.head = (1 << 40) - 16).is_some());
        assert!(change(|s, _| s.tokens = (1 << 31) - 1).is_some());
    }
}
