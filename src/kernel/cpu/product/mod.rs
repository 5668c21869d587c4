// SPDX-License-Identifier: MIT OR Apache-2.0
//! Matrix products: by vectors (`gemm`), by matrix units (`amx`, `amx_product`, `amx_interleaved`), by BF16 dot
//! products (`dots`), and the trait through which attention calls them (`engine`).
//!
//! This file defines the arguments of a product over vectors: sizes, addresses, and how the result is stored.

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

/// How the product is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    /// `C = A·B`.
    Set,
    /// `C = C + A·B`, with the product summed separately.
    Add,
    /// `C = C + A·B`, with C as the start of the chain, so that any division of k gives the same bits.
    Chain,
}

/// Which operand holds probabilities. Products with a probability of 0 are skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Skip {
    /// All numbers are finite, and no product is skipped.
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
    /// Elements from one row of A to the next.
    pub a_row: usize,
    /// Elements from one column of A to the next.
    pub a_col: usize,
    pub b: *const T,
    pub ldb: usize,
    pub c: *mut T,
    pub ldc: usize,
    pub store: Store,
    pub skip: Skip,
}
