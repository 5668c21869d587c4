// SPDX-License-Identifier: MIT OR Apache-2.0
//! The vector type that the kernels are generic over, and exp and tanh of vectors.
//!
//! Each algorithm exists once, generic over [`Vector`]; an instruction set is a type that implements it (`__m512`,
//! `__m256`, or plain arrays), in `x86.rs`, `neon.rs` and `portable.rs`. It provides loads, stores, arithmetic, a
//! comparison and exp2; exp and tanh are computed here.
//!
//! Methods of [`Vector`] must be called from functions that are compiled for the instruction set: elsewhere they are
//! not inlined and slow. `mul_add` of the standard library must not be used: without the instruction it is a call.

use super::routine::Routine;
use crate::element::Accumulator;

/// An accumulator with the arithmetic of its kernels.
pub(crate) trait Real:
    Accumulator + core::ops::Sub<Output = Self> + core::ops::Div<Output = Self> + core::ops::Neg<Output = Self>
{
    /// The smallest positive number.
    const TINY: Self;
    /// The smallest finite number.
    const LOWEST: Self;
    /// From here on numbers are whole: what is larger is off by more than 1 where it was rounded.
    const WHOLE: Self;

    /// `self · b + c`, rounded once where the target does that.
    fn fma(self, b: Self, c: Self) -> Self;
    /// Adds the low bits of `t` to the exponent (f32).
    fn pow2(self, t: Self) -> Self;

    /// [`Vector::exp2`], unless the instruction set has its own.
    ///
    /// # Safety
    /// As [`Vector`], here and below.
    unsafe fn exp2<V: Vector<T = Self>>(x: V) -> V;
    /// [`Vector::exp`].
    unsafe fn exp<V: Vector<T = Self>>(x: V) -> V;
    /// [`Vector::tanh`].
    unsafe fn tanh<V: Vector<T = Self>>(x: V) -> V;
}

/// `W` lanes of `T`.
///
/// # Safety
/// Every method needs the instruction set of the implementing type to be present; pointers are to `W` elements, of any
/// alignment.
pub(crate) trait Vector: Copy {
    /// A lane.
    type T: Real;
    /// Lanes.
    const W: usize;
    /// Rows of the matrix product's register block.
    const MR: usize;
    unsafe fn splat(x: Self::T) -> Self;
    unsafe fn load(p: *const Self::T) -> Self;
    unsafe fn store(self, p: *mut Self::T);
    unsafe fn add(self, b: Self) -> Self;
    unsafe fn sub(self, b: Self) -> Self;
    unsafe fn mul(self, b: Self) -> Self;
    unsafe fn div(self, b: Self) -> Self;
    /// `self · b + c`, rounded once where the hardware does that.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    /// The larger one by lane; b where either is NaN.
    #[inline(always)]
    unsafe fn max(a: Self, b: Self) -> Self {
        // SAFETY: the contract, here and below.
        unsafe { Self::gt(a, b, a, b) }
    }
    /// `a > b ? x : y` by lane; y where a or b is NaN.
    unsafe fn gt(a: Self, b: Self, x: Self, y: Self) -> Self;
    /// Whether `a > b` in any lane.
    unsafe fn any_gt(a: Self, b: Self) -> bool;
    /// 2 to the power of each lane, up to 127, within [`EXP2_ULPS`](self::EXP2_ULPS) (f32) or with the standard
    /// library's error (f64). Exactly 0 at −127 and below, and exactly 1 at 0. A result below the smallest normal
    /// number may be any number between 0 and that. A default NaN gives a NaN; a NaN with a payload need not.
    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // SAFETY: as above.
        unsafe { Self::T::exp2(self) }
    }
    /// `p · 2^n` by lane, where `t = 1.5·2^23 + n` (f32).
    #[inline(always)]
    unsafe fn pow2(p: Self, t: Self) -> Self {
        let mut powers = [Self::T::ZERO; MOST];
        // SAFETY: `powers` holds at least W elements; the rest as above.
        unsafe {
            t.store(powers.as_mut_ptr());
            by_lane(p, |i, p| p.pow2(powers[i]))
        }
    }
    /// Transposes `[W][W]` from rows `ld` apart to rows `to_ld` apart.
    #[inline(always)]
    unsafe fn transpose(from: *const Self::T, ld: usize, to: *mut Self::T, to_ld: usize) {
        for i in 0..Self::W {
            for j in 0..Self::W {
                // SAFETY: both have W rows of W elements, `ld` and `to_ld` apart (the contract).
                unsafe { *to.add(j * to_ld + i) = *from.add(i * ld + j) };
            }
        }
    }
    /// e to the power of each lane, within 2 ulp (f32) or with the standard library's error (f64); 0 where the result
    /// is below the smallest normal number, exactly 1 at 0, NaN for NaN.
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        // SAFETY: as above.
        unsafe { Self::T::exp(self) }
    }
    /// The hyperbolic tangent, with the same error.
    #[inline(always)]
    unsafe fn tanh(self) -> Self {
        // SAFETY: as above.
        unsafe { Self::T::tanh(self) }
    }
    /// The matrix product of `gemm.rs`, compiled for this instruction set.
    unsafe fn gemm(g: &crate::kernel::cpu::product::Gemm<Self::T>);
    /// Runs a routine compiled for this instruction set.
    ///
    /// # Safety
    /// As [`Routine::run`].
    unsafe fn call<R: Routine<Self>>(routine: R) -> R::Output;
}

/// Lanes of the widest vector.
const MOST: usize = 16;

/// A function of a lane's index and number, lane by lane.
///
/// # Safety
/// As [`Vector`].
#[inline(always)]
unsafe fn by_lane<V: Vector>(x: V, f: impl Fn(usize, V::T) -> V::T) -> V {
    let mut lanes = [V::T::ZERO; MOST];
    debug_assert!(V::W <= lanes.len());
    // SAFETY: `lanes` holds at least W elements; the caller has the instruction set.
    unsafe {
        x.store(lanes.as_mut_ptr());
        for (i, lane) in lanes[..V::W].iter_mut().enumerate() {
            *lane = f(i, *lane);
        }
        V::load(lanes.as_ptr())
    }
}

/// The error bound of exp2 of f32, in units in the last place of the result.
#[cfg(test)]
pub(crate) const EXP2_ULPS: f64 = 3.0;

/// Below this exp2 of f32 is 0.
const EXP2_LEAST: f32 = -127.0;

impl Real for f32 {
    const LOWEST: Self = Self::MIN;
    const WHOLE: Self = 16_777_216.0;
    const TINY: Self = Self::from_bits(1);

    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) { self.mul_add(b, c) } else { self * b + c }
    }

    #[inline(always)]
    fn pow2(self, t: Self) -> Self {
        Self::from_bits(self.to_bits().wrapping_add(t.to_bits() << 23))
    }

    /// `n = round(x)`, a polynomial of degree 5 in the remainder (interpolated at Chebyshev nodes), then the exponent.
    /// The softmax spends most of its time here, so there is one comparison only: at −127 the remainder is 0, the
    /// polynomial is 1, and subtracting 127 from the exponent of 1 gives 0.
    #[inline(always)]
    unsafe fn exp2<V: Vector<T = f32>>(x: V) -> V {
        // SAFETY: the caller has the instruction set.
        unsafe {
            let magic = V::splat(12_582_912.0);
            let x = V::max(V::splat(EXP2_LEAST), x);
            let t = x.add(magic);
            let r = x.sub(t.sub(magic));
            let mut p = V::splat(1.338_13e-3);
            for c in [9.666_368e-3, 5.550_381e-2, 2.402_235e-1, core::f32::consts::LN_2, 1.0] {
                p = p.fma(r, V::splat(c));
            }
            V::pow2(p, t)
        }
    }

    /// `n = round(x / ln 2)`, then a polynomial of degree 6 in the remainder (interpolated at Chebyshev nodes), then
    /// the exponent.
    #[inline(always)]
    unsafe fn exp<V: Vector<T = f32>>(x: V) -> V {
        // SAFETY: the caller has the instruction set.
        unsafe {
            let t = x.fma(V::splat(core::f32::consts::LOG2_E), V::splat(12_582_912.0));
            let n = t.sub(V::splat(12_582_912.0));
            // ln 2 in two parts, the first with so few bits that n times it is exact.
            let r = n.fma(V::splat(-0.693_145_75), x);
            let r = n.fma(V::splat(-1.428_606_8e-6), r);
            let mut p = V::splat(0.001_392_632_6);
            for c in [0.008_363_293, 0.041_666_556, 0.166_665_76, 0.5, 1.0, 1.0] {
                p = p.fma(r, V::splat(c));
            }
            let y = V::pow2(p, t);
            // Between the bounds the exponent stays in range. Above: infinity, or NaN for NaN (which fails both
            // comparisons); below: 0.
            let y = V::gt(V::splat(88.0), x, y, x.add(V::splat(f32::INFINITY)));
            V::gt(V::splat(-87.0), x, V::splat(0.0), y)
        }
    }

    /// An odd polynomial near 0, `1 − 2 / (exp(2|x|) + 1)` elsewhere.
    #[inline(always)]
    unsafe fn tanh<V: Vector<T = f32>>(x: V) -> V {
        // SAFETY: the caller has the instruction set.
        unsafe {
            let zero = V::splat(0.0);
            let negative = zero.sub(x);
            let a = V::gt(negative, zero, negative, x);
            let z = x.mul(x);
            let mut p = V::splat(0.002_269_501_7);
            for c in [-0.008_323_187, 0.021_762_503, -0.053_958_46, 0.133_333, -0.333_333_33] {
                p = p.fma(z, V::splat(c));
            }
            let small = p.mul(z).fma(x, x);
            let e = a.add(a).exp();
            let large = V::splat(1.0).sub(V::splat(2.0).div(e.add(V::splat(1.0))));
            let large = V::gt(zero, x, zero.sub(large), large);
            V::gt(V::splat(0.63), a, small, large)
        }
    }
}

impl Real for f64 {
    const LOWEST: Self = Self::MIN;
    const WHOLE: Self = 9_007_199_254_740_992.0;
    const TINY: Self = Self::from_bits(1);

    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) { self.mul_add(b, c) } else { self * b + c }
    }

    #[inline(always)]
    fn pow2(self, _: Self) -> Self {
        unreachable!("exp2 and exp of f64 are the standard library's")
    }

    #[inline(always)]
    unsafe fn exp2<V: Vector<T = f64>>(x: V) -> V {
        // SAFETY: the caller has the instruction set, here and below.
        unsafe { by_lane(x, |_, x| x.exp2()) }
    }

    #[inline(always)]
    unsafe fn exp<V: Vector<T = f64>>(x: V) -> V {
        // SAFETY: as above.
        unsafe { by_lane(x, |_, x| x.exp()) }
    }

    #[inline(always)]
    unsafe fn tanh<V: Vector<T = f64>>(x: V) -> V {
        // SAFETY: as above.
        unsafe { by_lane(x, |_, x| x.tanh()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::cpu::vector::portable::FourLanes;

    fn ulps(x: f32, y: f64) -> f64 {
        (f64::from(x) - y).abs() / (y.abs() * 2f64.powi(-23)).max(1e-38)
    }

    /// # Safety
    /// The instruction set of `V` must be present.
    unsafe fn check<V: Vector<T = f32>>() {
        let (mut worst_exp, mut worst_tanh) = (0f64, 0f64);
        let apply = |x: f32, f: unsafe fn(V) -> V| {
            let mut out = [0f32; 16];
            // SAFETY: 16 is at least W; the caller of `check` has the instruction set.
            unsafe { f(V::splat(x)).store(out.as_mut_ptr()) };
            out[0]
        };
        for i in 0..40_000 {
            let x = -86.9 + i as f32 * 0.0043;
            if x < 88.0 {
                worst_exp = worst_exp.max(ulps(apply(x, V::exp), f64::from(x).exp()));
            }
            let y = -10.0 + i as f32 * 0.0005;
            worst_tanh = worst_tanh.max(ulps(apply(y, V::tanh), f64::from(y).tanh()));
        }
        assert!(worst_exp <= 2.0 && worst_tanh <= 4.0, "exp {worst_exp} ulp, tanh {worst_tanh} ulp");
        assert_eq!(apply(0.0, V::exp), 1.0);
        let worst =
            (0..200_000).map(|i| -126.0 + i as f32 * 0.000_671).map(|x| ulps(apply(x, V::exp2), f64::from(x).exp2()));
        let worst = worst.fold(0.0, f64::max);
        assert!(worst <= EXP2_ULPS, "exp2 {worst} ulp");
        for (x, y) in [(0.0, 1.0), (8.0, 256.0), (-127.0, 0.0), (-1e30, 0.0), (f32::NEG_INFINITY, 0.0)] {
            assert_eq!(apply(x, V::exp2), y);
        }
        assert!((0.0..=f32::MIN_POSITIVE).contains(&apply(-126.7, V::exp2)) && apply(f32::NAN, V::exp2).is_nan());
        assert_eq!(apply(f32::NEG_INFINITY, V::exp), 0.0);
        assert_eq!(apply(-200.0, V::exp), 0.0);
        assert_eq!(apply(f32::INFINITY, V::exp), f32::INFINITY);
        assert!(apply(f32::NAN, V::exp).is_nan() && apply(f32::NAN, V::tanh).is_nan());
        assert_eq!(apply(f32::INFINITY, V::tanh), 1.0);
        assert_eq!(apply(f32::NEG_INFINITY, V::tanh), -1.0);
    }

    /// The largest error of `exp2` over these numbers.
    ///
    /// # Safety
    /// The instruction set of `V` must be present.
    unsafe fn worst_exp2<V: Vector<T = f32>>(numbers: &[f32; 16], expected: &[f64; 16]) -> f64 {
        let mut out = [0f32; 16];
        for at in (0..16).step_by(V::W) {
            // SAFETY: W divides 16; the caller has the instruction set.
            unsafe { V::load(numbers[at..].as_ptr()).exp2().store(out[at..].as_mut_ptr()) };
        }
        out.iter().zip(expected).map(|(&x, &y)| ulps(x, y)).fold(0.0, f64::max)
    }

    /// All arguments of a softmax, from −126 to 8, on every instruction set: each 61st f32, or the step that the
    /// environment sets. All of them (`CPATTN_EXP2_STEP=1`) are two thousand million, and take minutes.
    #[test]
    fn exp2_of_all_numbers() {
        let step = std::env::var("CPATTN_EXP2_STEP").map_or(61, |step| step.parse().unwrap());
        let (zero, least) = ((-0f32).to_bits(), (-126f32).to_bits());
        let mut all = (0..=8f32.to_bits()).step_by(step).chain((zero..=least).step_by(step)).map(f32::from_bits);
        let mut worst = [0f64; 4];
        let (mut numbers, mut expected) = ([0f32; 16], [0f64; 16]);
        while let Some(first) = all.next() {
            numbers[0] = first;
            numbers[1..].iter_mut().for_each(|x| *x = all.next().unwrap_or(-126.0));
            expected.iter_mut().zip(numbers).for_each(|(y, x)| *y = f64::from(x).exp2());
            // SAFETY: arrays are always there, and the others are asked for.
            unsafe {
                worst[0] = worst[0].max(worst_exp2::<FourLanes<f32>>(&numbers, &expected));
                #[cfg(target_arch = "aarch64")]
                {
                    worst[3] =
                        worst[3].max(worst_exp2::<crate::kernel::cpu::vector::neon::Floats>(&numbers, &expected));
                }
                #[cfg(target_arch = "x86_64")]
                {
                    if crate::kernel::cpu::vector::x86::has_avx2() {
                        worst[1] = worst[1].max(worst_exp2::<core::arch::x86_64::__m256>(&numbers, &expected));
                    }
                    if crate::kernel::cpu::vector::x86::has_avx512() {
                        worst[2] = worst[2].max(worst_exp2::<core::arch::x86_64::__m512>(&numbers, &expected));
                    }
                }
            }
        }
        assert!(worst.iter().all(|&worst| worst <= EXP2_ULPS), "{worst:?} ulp");
    }

    #[test]
    fn exp_and_tanh_of_every_instruction_set() {
        // SAFETY: arrays are always there, and the others are asked for.
        unsafe {
            check::<FourLanes<f32>>();
            #[cfg(target_arch = "aarch64")]
            check::<crate::kernel::cpu::vector::neon::Floats>();
            #[cfg(target_arch = "x86_64")]
            {
                if crate::kernel::cpu::vector::x86::has_avx2() {
                    check::<core::arch::x86_64::__m256>();
                }
                if crate::kernel::cpu::vector::x86::has_avx512() {
                    check::<core::arch::x86_64::__m512>();
                }
            }
        }
    }
}
