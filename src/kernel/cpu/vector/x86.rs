// SPDX-License-Identifier: MIT OR Apache-2.0
//! The vectors of AVX2 with FMA, and of AVX-512.

use super::routine::Routine;
use super::simd::Vector;
use crate::kernel::cpu::product::Gemm;
use crate::kernel::cpu::product::gemm::gemm;
use core::arch::x86_64::*;

/// Whether the AVX-512 kernels can run here.
pub(crate) fn has_avx512() -> bool {
    std::is_x86_feature_detected!("avx512f") && std::is_x86_feature_detected!("avx512dq") && has_avx2()
}

/// Whether the kernels with BF16 dot products can run here; AMX kernels need the same of the vector units.
pub(crate) fn has_avx512_bf16() -> bool {
    std::is_x86_feature_detected!("avx512bw")
        && std::is_x86_feature_detected!("avx512vl")
        && std::is_x86_feature_detected!("avx512bf16")
        && std::is_x86_feature_detected!("f16c")
        && has_avx512()
}

/// Whether `vdpbf16ps`, if present, is faster than two multiply-adds of f32.
#[allow(unused_unsafe, reason = "cpuid is safe in newer compilers")]
pub(crate) fn dots_pay() -> bool {
    // SAFETY: cpuid is on every x86-64, and has these two leaves there.
    let (vendor, signature) = unsafe { (__cpuid(0), __cpuid(1).eax) };
    let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
    dots_pay_on(name.as_flattened(), signature)
}

/// The same for these values of cpuid. The families are those of Zen 4 and Zen 5 (the Zen 3 processors of the first
/// family lack the instruction).
fn dots_pay_on(vendor: &[u8], signature: u32) -> bool {
    let base = signature >> 8 & 0xf;
    let family = if base == 0xf { base + (signature >> 20 & 0xff) } else { base };
    vendor == b"AuthenticAMD" && matches!(family, 0x19 | 0x1a)
}

/// Whether the AVX2 kernels can run here.
pub(crate) fn has_avx2() -> bool {
    std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma")
}

macro_rules! vector {
    ($v:ty, $t:ty, $w:literal, $mr:literal, $features:literal, $routine:ident,
     $splat:ident $load:ident $store:ident $add:ident $sub:ident $mul:ident $div:ident $fma:ident
     $max:ident,
     |$i:ident, $j:ident| $any:expr, |$a:ident, $b:ident, $x:ident, $y:ident| $gt:expr; $($own:tt)*) => {
        impl Vector for $v {
            type T = $t;
            const W: usize = $w;
            const MR: usize = $mr;
            #[inline(always)]
            unsafe fn splat(x: $t) -> Self {
                // SAFETY: the instruction set is present (the contract of `Vector`).
                unsafe { $splat(x) }
            }
            #[inline(always)]
            unsafe fn load(p: *const $t) -> Self {
                // SAFETY: the instruction set is present and `p` is to W elements (the contract of `Vector`).
                unsafe { $load(p) }
            }
            #[inline(always)]
            unsafe fn store(self, p: *mut $t) {
                // SAFETY: the instruction set is present and `p` is to W elements (the contract of `Vector`).
                unsafe { $store(p, self) }
            }
            #[inline(always)]
            unsafe fn add(self, b: Self) -> Self {
                // SAFETY: the instruction set is present (the contract of `Vector`).
                unsafe { $add(self, b) }
            }
            #[inline(always)]
            unsafe fn sub(self, b: Self) -> Self {
                // SAFETY: the instruction set is present (the contract of `Vector`).
                unsafe { $sub(self, b) }
            }
            #[inline(always)]
            unsafe fn mul(self, b: Self) -> Self {
                // SAFETY: the instruction set is present (the contract of `Vector`).
                unsafe { $mul(self, b) }
            }
            #[inline(always)]
            unsafe fn div(self, b: Self) -> Self {
                // SAFETY: the instruction set is present (the contract of `Vector`).
                unsafe { $div(self, b) }
            }
            #[inline(always)]
            unsafe fn fma(self, b: Self, c: Self) -> Self {
                // SAFETY: the instruction set is present (the contract of `Vector`).
                unsafe { $fma(self, b, c) }
            }
            #[inline(always)]
            unsafe fn max(a: Self, b: Self) -> Self {
                // SAFETY: the instruction set is present (the contract of `Vector`).
                unsafe { $max(a, b) }
            }
            #[inline(always)]
            unsafe fn any_gt($i: Self, $j: Self) -> bool {
                // SAFETY: the instruction set is present (the contract of `Vector`).
                unsafe { $any }
            }
            #[inline(always)]
            unsafe fn gt($a: Self, $b: Self, $x: Self, $y: Self) -> Self {
                // SAFETY: the instruction set is present (the contract of `Vector`).
                unsafe { $gt }
            }
            #[target_feature(enable = $features)]
            unsafe fn gemm(g: &Gemm<$t>) {
                // SAFETY: the panels are as `Gemm` says and the instruction set is present (the contract of `gemm`).
                unsafe { gemm::<Self>(g) }
            }
            #[inline(always)]
            unsafe fn call<R: Routine<Self>>(routine: R) -> R::Output {
                // SAFETY: the instruction set is present (the contract of `Vector`).
                unsafe { routine.$routine() }
            }
            $($own)*
        }
    };
}

vector!(__m512, f32, 16, 8, "avx512f,avx512dq,avx2,fma", avx512,
    _mm512_set1_ps _mm512_loadu_ps _mm512_storeu_ps _mm512_add_ps _mm512_sub_ps _mm512_mul_ps _mm512_div_ps
    _mm512_fmadd_ps _mm512_max_ps,
    |a, b| _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b) != 0,
    |a, b, x, y| _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b), y, x);
    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // SAFETY: the instruction set is present (the contract of `Vector`).
        unsafe { exp2_f32_avx512(self) }
    }
    #[inline(always)]
    unsafe fn pow2(p: Self, t: Self) -> Self {
        // SAFETY: the instruction set is present (the contract of `Vector`).
        unsafe {
            let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(t));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), n))
        }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, ld: usize, to: *mut f32, to_ld: usize) {
        // SAFETY: the contract of `Vector`.
        unsafe { transpose16(from, ld, to, to_ld) }
    }
);
vector!(__m512d, f64, 8, 8, "avx512f,avx512dq,avx2,fma", avx512,
    _mm512_set1_pd _mm512_loadu_pd _mm512_storeu_pd _mm512_add_pd _mm512_sub_pd _mm512_mul_pd _mm512_div_pd
    _mm512_fmadd_pd _mm512_max_pd,
    |a, b| _mm512_cmp_pd_mask::<_CMP_GT_OQ>(a, b) != 0,
    |a, b, x, y| _mm512_mask_blend_pd(_mm512_cmp_pd_mask::<_CMP_GT_OQ>(a, b), y, x););
vector!(__m256, f32, 8, 6, "avx2,fma", avx2,
    _mm256_set1_ps _mm256_loadu_ps _mm256_storeu_ps _mm256_add_ps _mm256_sub_ps _mm256_mul_ps _mm256_div_ps
    _mm256_fmadd_ps _mm256_max_ps,
    |a, b| _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b)) != 0,
    |a, b, x, y| _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_GT_OQ>(a, b));
    #[inline(always)]
    unsafe fn pow2(p: Self, t: Self) -> Self {
        // SAFETY: the instruction set is present (the contract of `Vector`).
        unsafe {
            let n = _mm256_slli_epi32::<23>(_mm256_castps_si256(t));
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), n))
        }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, ld: usize, to: *mut f32, to_ld: usize) {
        // SAFETY: the contract of `Vector`.
        unsafe { transpose8(from, ld, to, to_ld) }
    }
);
vector!(__m256d, f64, 4, 6, "avx2,fma", avx2,
    _mm256_set1_pd _mm256_loadu_pd _mm256_storeu_pd _mm256_add_pd _mm256_sub_pd _mm256_mul_pd _mm256_div_pd
    _mm256_fmadd_pd _mm256_max_pd,
    |a, b| _mm256_movemask_pd(_mm256_cmp_pd::<_CMP_GT_OQ>(a, b)) != 0,
    |a, b, x, y| _mm256_blendv_pd(y, x, _mm256_cmp_pd::<_CMP_GT_OQ>(a, b)););

/// exp2 of f32 with two instructions of AVX-512: the fractional part of x, and a product with a power of two. Between
/// them is a polynomial of degree 5: among those with the value 1 at 0, it has the least relative error on [0, 1]. A
/// subnormal result becomes 0, since the instruction would take a hundred cycles to produce it.
///
/// # Safety
/// AVX-512 F and DQ are present.
#[inline(always)]
unsafe fn exp2_f32_avx512(x: __m512) -> __m512 {
    // SAFETY: the caller has the instruction set.
    unsafe {
        // True for a NaN, so that the result is NaN.
        let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
        let r = _mm512_reduce_ps::<_MM_FROUND_TO_NEG_INF>(x);
        let mut p = _mm512_set1_ps(1.867_13e-3);
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.017_029e-3));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.579_991e-2));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.401_644_4e-1));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931_513e-1));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0));
        _mm512_maskz_scalef_ps(normal, p, x)
    }
}

/// Transposes `[8][8]` f32. Halves of rows are exchanged by the loads, so that transpositions of four by four within
/// halves remain.
///
/// # Safety
/// AVX2 is present; `from` and `to` are valid for 8 rows of 8, `ld` and `to_ld` apart, and do not overlap.
#[inline(always)]
unsafe fn transpose8(from: *const f32, ld: usize, to: *mut f32, to_ld: usize) {
    // SAFETY: rows and columns are below 8.
    unsafe {
        let mut c = 0;
        while c < 8 {
            let mut rows = [_mm256_setzero_ps(); 4];
            let mut r = 0;
            while r < 4 {
                let at = from.add(r * ld + c);
                let x = _mm256_castps128_ps256(_mm_loadu_ps(at));
                rows[r] = _mm256_insertf128_ps::<1>(x, _mm_loadu_ps(at.add(4 * ld)));
                r += 1;
            }
            let [a, b, e, f] = rows;
            let (ab, ef) = (_mm256_castps_pd(_mm256_unpacklo_ps(a, b)), _mm256_castps_pd(_mm256_unpacklo_ps(e, f)));
            let (ab_hi, ef_hi) =
                (_mm256_castps_pd(_mm256_unpackhi_ps(a, b)), _mm256_castps_pd(_mm256_unpackhi_ps(e, f)));
            let to = to.add(c * to_ld);
            _mm256_storeu_ps(to, _mm256_castpd_ps(_mm256_unpacklo_pd(ab, ef)));
            _mm256_storeu_ps(to.add(to_ld), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, ef)));
            _mm256_storeu_ps(to.add(2 * to_ld), _mm256_castpd_ps(_mm256_unpacklo_pd(ab_hi, ef_hi)));
            _mm256_storeu_ps(to.add(3 * to_ld), _mm256_castpd_ps(_mm256_unpackhi_pd(ab_hi, ef_hi)));
            c += 4;
        }
    }
}

/// Transposes `[16][16]` dwords. Quarters of rows are exchanged by the loads, so that transpositions of four by four
/// within quarters remain.
///
/// # Safety
/// AVX-512 is present; `from` and `to` are valid for 16 rows of 16, `ld` and `to_ld` apart, and do not overlap.
#[inline(always)]
pub(crate) unsafe fn transpose16(from: *const f32, ld: usize, to: *mut f32, to_ld: usize) {
    // SAFETY: rows and columns are below 16.
    unsafe {
        let mut c = 0;
        while c < 16 {
            let mut rows = [_mm512_setzero_ps(); 4];
            let mut r = 0;
            while r < 4 {
                let at = from.add(r * ld + c);
                let x = _mm512_castps128_ps512(_mm_loadu_ps(at));
                let x = _mm512_insertf32x4::<1>(x, _mm_loadu_ps(at.add(4 * ld)));
                let x = _mm512_insertf32x4::<2>(x, _mm_loadu_ps(at.add(8 * ld)));
                rows[r] = _mm512_insertf32x4::<3>(x, _mm_loadu_ps(at.add(12 * ld)));
                r += 1;
            }
            let [a, b, e, f] = rows;
            let (ab, ef) = (_mm512_castps_pd(_mm512_unpacklo_ps(a, b)), _mm512_castps_pd(_mm512_unpacklo_ps(e, f)));
            let (ab_hi, ef_hi) =
                (_mm512_castps_pd(_mm512_unpackhi_ps(a, b)), _mm512_castps_pd(_mm512_unpackhi_ps(e, f)));
            let to = to.add(c * to_ld);
            _mm512_storeu_ps(to, _mm512_castpd_ps(_mm512_unpacklo_pd(ab, ef)));
            _mm512_storeu_ps(to.add(to_ld), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, ef)));
            _mm512_storeu_ps(to.add(2 * to_ld), _mm512_castpd_ps(_mm512_unpacklo_pd(ab_hi, ef_hi)));
            _mm512_storeu_ps(to.add(3 * to_ld), _mm512_castpd_ps(_mm512_unpackhi_pd(ab_hi, ef_hi)));
            c += 4;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_products_are_taken_by_processor() {
        for (vendor, signature, pays) in [
            // Sapphire Rapids, Granite Rapids, Cooper Lake.
            (b"GenuineIntel", 0x000806f8, false),
            (b"GenuineIntel", 0x000a06d1, false),
            (b"GenuineIntel", 0x0005065b, false),
            // Genoa, Turin, and an unknown later family.
            (b"AuthenticAMD", 0x00a10f11, true),
            (b"AuthenticAMD", 0x00b00f21, true),
            (b"AuthenticAMD", 0x00c00f00, false),
            // Rome, and the same family number with another name.
            (b"AuthenticAMD", 0x00830f10, false),
            (b"GenuineIntel", 0x00b00f21, false),
        ] {
            assert_eq!(dots_pay_on(vendor, signature), pays, "{signature:#x}");
        }
    }
}
