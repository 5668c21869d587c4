// SPDX-License-Identifier: MIT OR Apache-2.0
//! Probes of vector units: f32 multiply-adds on the widest vectors, and dot products of bf16 pairs.
//!
//! About sixteen independent sums cover the latency of two units. Sums converge to a constant, so that no number
//! becomes infinite or subnormal, and are passed to `black_box`, so that the compiler removes none of them.

use crate::Probe;
#[cfg(target_arch = "x86_64")]
use core::arch::x86_64::*;
use std::hint::black_box;

/// Steps of one call.
const STEPS: usize = 20_000;

pub fn fma() -> Probe {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the instructions were just asked for.
            return || unsafe { fma_avx512() };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: as above.
            return || unsafe { fma_avx2() };
        }
    }
    fma_portable
}

pub fn bf16_dot() -> Option<Probe> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512f") {
        // SAFETY: the instructions were just asked for.
        return Some(|| unsafe { dot_avx512() });
    }
    None
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn fma_avx512() -> f64 {
    const SUMS: usize = 16;
    let (a, b) = (_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(black_box(1.0)));
    let mut sums = [_mm512_set1_ps(1.0); SUMS];
    for _ in 0..STEPS {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, a, b);
        }
    }
    black_box(sums);
    (STEPS * SUMS * 16 * 2) as f64
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fma_avx2() -> f64 {
    const SUMS: usize = 12;
    let (a, b) = (_mm256_set1_ps(black_box(0.5)), _mm256_set1_ps(black_box(1.0)));
    let mut sums = [_mm256_set1_ps(1.0); SUMS];
    for _ in 0..STEPS {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, a, b);
        }
    }
    black_box(sums);
    (STEPS * SUMS * 8 * 2) as f64
}

/// Compiled for the target's vectors: NEON on AArch64.
fn fma_portable() -> f64 {
    const SUMS: usize = 16;
    let (a, b) = (black_box(0.5f32), black_box(1.0f32));
    let mut sums = [[1f32; 4]; SUMS];
    for _ in 0..STEPS {
        for x in sums.iter_mut().flatten() {
            *x = if cfg!(target_arch = "aarch64") { x.mul_add(a, b) } else { *x * a + b };
        }
    }
    black_box(sums);
    (STEPS * SUMS * 4 * 2) as f64
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dot_avx512() -> f64 {
    const SUMS: usize = 16;
    let zero = black_box(_mm512_setzero_ps());
    let (a, b) = (_mm512_cvtne2ps_pbh(zero, zero), _mm512_cvtne2ps_pbh(zero, zero));
    let mut sums = [zero; SUMS];
    for _ in 0..STEPS {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, a, b);
        }
    }
    black_box(sums);
    (STEPS * SUMS * 16 * 2 * 2) as f64
}
