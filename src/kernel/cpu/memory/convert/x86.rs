// SPDX-License-Identifier: MIT OR Apache-2.0
//! The conversions in AVX2 with F16C, and AVX-512: instructions alone.

use super::Convert;
use core::arch::x86_64::*;

/// bf16 of each lane, in its low half: rounded to nearest even in integers, NaNs made quiet.
#[inline(always)]
unsafe fn bf16_512(x: __m512) -> __m512i {
    // SAFETY: AVX-512F is present (the contract of every function of this file: the instruction set of its type).
    unsafe {
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        let bits = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x0040_0000));
        _mm512_srli_epi32::<16>(bits)
    }
}

/// As [`bf16_512`].
#[inline(always)]
unsafe fn bf16_256(x: __m256) -> __m256i {
    // SAFETY: AVX2 is present (the contract of every function of this file).
    unsafe {
        let bits = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan))
    }
}

/// The low halves of sixteen lanes, in their order.
#[inline(always)]
unsafe fn halves_256(low: __m256i, high: __m256i) -> __m256i {
    // SAFETY: AVX2 is present (the contract of every function of this file). The pack works on each half of a register.
    unsafe { _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high)) }
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

impl Convert for __m512 {
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        // SAFETY: `p` is to W elements and the instruction set is present (the contract of `Convert`, here and below).
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: `p` is to W elements and the instruction set is present (the contract of `Convert`).
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn quiet(self) -> Self {
        // SAFETY: the instruction set is present (the contract of `Convert`).
        unsafe {
            let (bits, nan) = (_mm512_castps_si512(self), _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self, self));
            _mm512_castsi512_ps(_mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(0x0040_0000)))
        }
    }
    #[inline(always)]
    unsafe fn total(self) -> f32 {
        // SAFETY: the instruction set is present (the contract of `Convert`); AVX2 is there too.
        unsafe {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self)));
            _mm256_add_ps(_mm512_castps512_ps256(self), high).total()
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8) {
        // SAFETY: `p` is to W elements and the instruction set is present (the contract of `Convert`).
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<NEAREST>(self)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8) {
        // SAFETY: `p` is to W elements and the instruction set is present (the contract of `Convert`).
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(bf16_512(self))) }
    }
    #[inline(always)]
    unsafe fn stream(self, p: *mut u8) {
        // SAFETY: `p` is to W elements and the instruction set is present (the contract of `Convert`), and aligned to
        // 64 bytes.
        unsafe { _mm512_stream_ps(p.cast(), self) }
    }
    #[inline(always)]
    unsafe fn stream_f16(low: Self, high: Self, p: *mut u8) {
        // SAFETY: `p` is to W elements and the instruction set is present (the contract of `Convert`).
        unsafe {
            let low = _mm512_castsi256_si512(_mm512_cvtps_ph::<NEAREST>(low));
            _mm512_stream_si512(p.cast(), _mm512_inserti64x4::<1>(low, _mm512_cvtps_ph::<NEAREST>(high)));
        }
    }
    #[inline(always)]
    unsafe fn stream_bf16(low: Self, high: Self, p: *mut u8) {
        // SAFETY: `p` is to W elements and the instruction set is present (the contract of `Convert`).
        unsafe {
            let low = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(bf16_512(low)));
            _mm512_stream_si512(p.cast(), _mm512_inserti64x4::<1>(low, _mm512_cvtepi32_epi16(bf16_512(high))));
        }
    }
    #[inline(always)]
    unsafe fn finished() {
        // SAFETY: part of every x86-64.
        unsafe { _mm_sfence() }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch of an address that is not there does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

impl Convert for __m256 {
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        // SAFETY: `p` is to W elements and the instruction set is present (the contract of `Convert`).
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: `p` is to W elements and the instruction set is present (the contract of `Convert`).
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn quiet(self) -> Self {
        // SAFETY: the instruction set is present (the contract of `Convert`).
        unsafe {
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(self, self);
            _mm256_or_ps(self, _mm256_and_ps(nan, _mm256_castsi256_ps(_mm256_set1_epi32(0x0040_0000))))
        }
    }
    #[inline(always)]
    unsafe fn total(self) -> f32 {
        // SAFETY: the instruction set is present (the contract of `Convert`).
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(self), _mm256_extractf128_ps::<1>(self));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8) {
        // SAFETY: `p` is to W elements and the instruction set is present (the contract of `Convert`).
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<NEAREST>(self)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8) {
        // SAFETY: `p` is to W elements and the instruction set is present (the contract of `Convert`).
        unsafe {
            let bits = bf16_256(self);
            _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(halves_256(bits, bits)));
        }
    }
    #[inline(always)]
    unsafe fn stream(self, p: *mut u8) {
        // SAFETY: `p` is to W elements and the instruction set is present (the contract of `Convert`), and aligned to
        // 32 bytes.
        unsafe { _mm256_stream_ps(p.cast(), self) }
    }
    #[inline(always)]
    unsafe fn stream_f16(low: Self, high: Self, p: *mut u8) {
        // SAFETY: `p` is to W elements and the instruction set is present (the contract of `Convert`).
        unsafe {
            let (low, high) = (_mm256_cvtps_ph::<NEAREST>(low), _mm256_cvtps_ph::<NEAREST>(high));
            _mm256_stream_si256(p.cast(), _mm256_set_m128i(high, low));
        }
    }
    #[inline(always)]
    unsafe fn stream_bf16(low: Self, high: Self, p: *mut u8) {
        // SAFETY: `p` is to W elements and the instruction set is present (the contract of `Convert`).
        unsafe { _mm256_stream_si256(p.cast(), halves_256(bf16_256(low), bf16_256(high))) }
    }
    #[inline(always)]
    unsafe fn finished() {
        // SAFETY: part of every x86-64.
        unsafe { _mm_sfence() }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch of an address that is not there does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}
