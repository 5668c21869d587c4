// SPDX-License-Identifier: MIT OR Apache-2.0
//! Matrix products: of vectors (`gemm`), of matrix units (`amx` and its neighbours), of BF16 dot products (`dots`), and
//! the trait by which attention asks for them (`engine`).
//!
//! Here are the arguments of a product over vectors: sizes, addresses, and what becomes of the result.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod amx_interleaved;
#[cfg(target_arch = "x86_64")]
pub(crate) mod amx_product;
#[cfg(target_arch = "x86_64")]
pub(crate) mod dots;
pub(crate) mod engine;
#[cfg(target_arch = "x86_64")]
pub(crate) mod forms;
pub(crate) mod gemm;
#[cfg(target_arch = "x86_64")]
pub(crate) mod not_finite;
#[cfg(target_arch = "x86_64")]
pub(crate) mod tile_engine;

/// What becomes of the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    /// `C = A·B`.
    Set,
    /// `C = C + A·B`, the product summed by itself.
    Add,
    /// `C = C + A·B` with C as the start of the chain: any cut of k gives the same bits.
    Chain,
}

/// Which operand holds probabilities: products with a 0 there are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Skip {
    /// All numbers are finite: nothing has to be left out.
    None,
    /// Where A is 0.
    A,
    /// Where B is 0.
    B,
}

/// A product of `[m, kk]` by `[kk, n]`.
#[derive(Clone, Copy)]
pub(crate) struct Gemm<T> {
    pub m: usize,
    /// A multiple of the vector's lanes.
    pub n: usize,
    pub kk: usize,
    pub a: *const T,
    /// From one row of A to the next.
    pub a_row: usize,
    /// From one column of A to the next.
    pub a_col: usize,
    pub b: *const T,
    pub ldb: usize,
    pub c: *mut T,
    pub ldc: usize,
    pub store: Store,
    pub skip: Skip,
}
