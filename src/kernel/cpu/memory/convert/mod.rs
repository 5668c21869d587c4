// SPDX-License-Identifier: MIT OR Apache-2.0
//! Conversion between f16, bf16 and f32 in memory and vectors of f32, for loops that are bound by memory bandwidth.
//!
//! A conversion gives the bits of [`crate::element`] on every instruction set, also for NaNs and subnormal numbers.
//! bf16 is rounded in integers, because the instruction for it reads subnormals as zero.
//!
//! A streaming (non-temporal) store bypasses the caches. For a large result this avoids reading every line before it is
//! written. For a small result, which would have stayed in the cache for its reader, it is slower; the caller decides
//! by size.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg_attr(target_arch = "aarch64", allow(dead_code, reason = "NEON is always there, and this is tested beside it"))]
mod portable;
pub(crate) mod runs;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::call::RawTensor;
use crate::element::Dtype;
#[cfg(not(target_arch = "aarch64"))]
use crate::kernel::cpu::vector::portable::FourLanes;
use crate::kernel::cpu::vector::simd::Vector;

/// Bytes of results from which streaming is used. On a Xeon with 2 MiB of L2 cache both kinds of store take the same
/// time at 4 MiB; at 32 MiB and more streaming takes two thirds of the time.
pub(crate) const STREAM: usize = 8 << 20;

/// Whether to stream `rows` rows of every head of `t`, each written once: they are large enough, and rows are whole
/// lines.
pub(crate) fn streams(t: &RawTensor, rows: u64) -> bool {
    let size = t.dtype.size() as u64;
    let row = u64::from(t.dim) * size;
    let apart = [t.token_stride, t.head_stride].map(|stride| stride.unsigned_abs() * size);
    let whole_lines = [t.ptr.addr() as u64, row, apart[0], apart[1]].iter().all(|x| x % 64 == 0);
    whole_lines && rows * u64::from(t.heads) * row >= STREAM as u64
}

/// Bytes by which the lines of a long run are prefetched; the hardware does not prefetch across pages in time.
const AHEAD: usize = 2048;

/// A vector of f32 that converts from and to the other types.
///
/// # Safety
/// As [`Vector`]: every method needs the instruction set; pointers are to `W` elements of any alignment, those of
/// `stream` aligned to what they write, which [`finished`](Convert::finished) makes visible to others.
pub(crate) trait Convert: Vector<T = f32> {
    unsafe fn load_f16(p: *const u8) -> Self;
    /// Loads bf16. A signalling NaN stays one, until arithmetic or [`quiet`](Convert::quiet).
    unsafe fn load_bf16(p: *const u8) -> Self;
    unsafe fn quiet(self) -> Self;
    /// The sum of all lanes, added in pairs that are half of them apart.
    unsafe fn total(self) -> f32;
    unsafe fn store_f16(self, p: *mut u8);
    unsafe fn store_bf16(self, p: *mut u8);
    /// Stores past the caches, if the machine has such an instruction. Two vectors of f32 become one vector of halves,
    /// so the caller passes two adjacent vectors.
    #[inline(always)]
    unsafe fn stream(self, p: *mut u8) {
        // SAFETY: the contract, here and below.
        unsafe { self.store(p.cast()) }
    }
    #[inline(always)]
    unsafe fn stream_f16(low: Self, high: Self, p: *mut u8) {
        // SAFETY: as above, two vectors side by side.
        unsafe {
            low.store_f16(p);
            high.store_f16(p.add(2 * Self::W));
        }
    }
    #[inline(always)]
    unsafe fn stream_bf16(low: Self, high: Self, p: *mut u8) {
        // SAFETY: as above.
        unsafe {
            low.store_bf16(p);
            high.store_bf16(p.add(2 * Self::W));
        }
    }
    /// To be called after the last streaming store, before another thread reads.
    #[inline(always)]
    unsafe fn finished() {}
    /// Prefetches the line of `p`, which may be any address.
    unsafe fn prefetch(p: *const u8);
}

/// A loop over vectors of f32, run by the calling thread.
pub(crate) trait VectorLoop {
    /// # Safety
    /// The instruction set of `V` is present; the rest is up to the pass.
    unsafe fn run<V: Convert>(&self);
}

/// Runs a loop on the best instruction set of the machine.
///
/// # Safety
/// The conditions of the loop.
pub(crate) unsafe fn on_best(pass: &impl VectorLoop) {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: the instruction set is there (asked above); the elements are as the pass says (the contract of
        // `on_best`).
        #[target_feature(enable = "avx512f,avx512dq,avx2,fma")]
        unsafe fn avx512(pass: &impl VectorLoop) {
            // SAFETY: as above.
            unsafe { pass.run::<core::arch::x86_64::__m512>() }
        }
        // SAFETY: as above.
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2(pass: &impl VectorLoop) {
            // SAFETY: as above.
            unsafe { pass.run::<core::arch::x86_64::__m256>() }
        }
        if crate::kernel::cpu::vector::x86::has_avx512() {
            // SAFETY: the check above has found the instruction set, here and below.
            return unsafe { avx512(pass) };
        }
        if crate::kernel::cpu::vector::x86::has_avx2() && std::is_x86_feature_detected!("f16c") {
            // SAFETY: as above.
            return unsafe { avx2(pass) };
        }
    }
    #[cfg(target_arch = "aarch64")]
    type Always = crate::kernel::cpu::vector::neon::Floats;
    #[cfg(not(target_arch = "aarch64"))]
    type Always = FourLanes<f32>;
    // SAFETY: arrays need no instruction set, and NEON is part of every AArch64.
    unsafe { pass.run::<Always>() }
}

/// Prefetches the `bytes` bytes that are [`AHEAD`] of `p`.
///
/// # Safety
/// As [`Convert`]; the addresses may be any.
#[inline(always)]
pub(crate) unsafe fn prefetch<V: Convert>(p: *const u8, bytes: usize) {
    for line in 0..bytes.div_ceil(64) {
        // SAFETY: the instruction set of V is present (the contract); a prefetch may have any address.
        unsafe { V::prefetch(p.wrapping_add(AHEAD + 64 * line)) };
    }
}

/// Four vectors, the unit of every loop here: enough loads in flight, and whole cache lines for every type.
pub(crate) type Four<V> = [V; 4];

/// Four vectors of `dtype` from `p` on.
///
/// # Safety
/// As [`Convert`], with `p` to `4 W` elements.
#[inline(always)]
pub(crate) unsafe fn load<V: Convert>(dtype: Dtype, p: *const u8) -> Four<V> {
    let (half, whole) = (2 * V::W, 4 * V::W);
    // Written out, since functions that a closure calls need not be inlined.
    // SAFETY: `p` points to 4 W elements and the instruction set of V is present (the contract).
    unsafe {
        match dtype {
            Dtype::F16 => {
                [V::load_f16(p), V::load_f16(p.add(half)), V::load_f16(p.add(2 * half)), V::load_f16(p.add(3 * half))]
            }
            Dtype::Bf16 => [
                V::load_bf16(p),
                V::load_bf16(p.add(half)),
                V::load_bf16(p.add(2 * half)),
                V::load_bf16(p.add(3 * half)),
            ],
            Dtype::F32 => [
                V::load(p.cast()),
                V::load(p.add(whole).cast()),
                V::load(p.add(2 * whole).cast()),
                V::load(p.add(3 * whole).cast()),
            ],
            Dtype::F64 => unreachable!("sums with an f64 operand are kept in f64"),
        }
    }
}

/// Four vectors to `dtype` from `p` on.
///
/// # Safety
/// As [`load`]; with `stream`, `p` is aligned to whole vectors of bytes.
#[inline(always)]
pub(crate) unsafe fn store<V: Convert>(x: Four<V>, dtype: Dtype, p: *mut u8, stream: bool) {
    let size = V::W * dtype.size();
    let [a, b, c, d] = x;
    // SAFETY: `p` is to 4 W elements, aligned where `stream` needs it, and the instruction set is present (the
    // contract).
    unsafe {
        match (dtype, stream) {
            (Dtype::F16, false) => {
                a.store_f16(p);
                b.store_f16(p.add(size));
                c.store_f16(p.add(2 * size));
                d.store_f16(p.add(3 * size));
            }
            (Dtype::Bf16, false) => {
                a.store_bf16(p);
                b.store_bf16(p.add(size));
                c.store_bf16(p.add(2 * size));
                d.store_bf16(p.add(3 * size));
            }
            (Dtype::F32, false) => {
                a.store(p.cast());
                b.store(p.add(size).cast());
                c.store(p.add(2 * size).cast());
                d.store(p.add(3 * size).cast());
            }
            (Dtype::F16, true) => {
                V::stream_f16(a, b, p);
                V::stream_f16(c, d, p.add(2 * size));
            }
            (Dtype::Bf16, true) => {
                V::stream_bf16(a, b, p);
                V::stream_bf16(c, d, p.add(2 * size));
            }
            (Dtype::F32, true) => {
                a.stream(p);
                b.stream(p.add(size));
                c.stream(p.add(2 * size));
                d.stream(p.add(3 * size));
            }
            (Dtype::F64, _) => unreachable!("sums with an f64 operand are kept in f64"),
        }
    }
}
