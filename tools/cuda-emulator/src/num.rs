// SPDX-License-Identifier: MIT OR Apache-2.0
//! Number formats and roundings that Rust has no type for.

/// f16 bits to f32, exactly.
#[inline(always)]
pub(crate) fn f16_to_f32(h: u16) -> f32 {
    let sign = (u32::from(h) & 0x8000) << 16;
    let rest = (u32::from(h) & 0x7fff) << 13;
    // Scaling by 2^112 moves the exponent bias from 15 to 127 and normalises subnormals on the way.
    let scaled = f32::from_bits(rest) * f32::from_bits(0x7780_0000);
    let bits = if rest >= 0x0f80_0000 { rest | 0x7f80_0000 } else { scaled.to_bits() };
    f32::from_bits(bits | sign)
}

/// f32 to f16 bits, to nearest even.
#[inline(always)]
pub(crate) fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let abs = bits & 0x7fff_ffff;
    if abs > 0x7f80_0000 {
        return 0x7fff;
    }
    if abs >= 0x477f_f000 {
        return sign | 0x7c00;
    }
    if abs < 0x3880_0000 {
        // Subnormal: adding 0.5 · 2^-13… lets the FPU round at the right bit.
        let magic = f32::from_bits(0x3f00_0000);
        let rounded = (f32::from_bits(abs) + magic).to_bits().wrapping_sub(magic.to_bits());
        return sign | rounded as u16;
    }
    let odd = (abs >> 13) & 1;
    let rounded = abs.wrapping_add(0xc800_0fff).wrapping_add(odd);
    sign | (rounded >> 13) as u16
}

/// f32 to f16 bits, towards zero.
pub(crate) fn f32_to_f16_rz(x: f32) -> u16 {
    if x.is_nan() {
        return 0x7fff;
    }
    if x.is_infinite() {
        return f32_to_f16(x);
    }
    let h = f32_to_f16(x);
    if f16_to_f32(h).abs() > x.abs() { h - 1 } else { h }
}

/// bf16 bits to f32, exactly.
#[inline(always)]
pub(crate) fn bf16_to_f32(b: u16) -> f32 {
    f32::from_bits(u32::from(b) << 16)
}

/// f32 to bf16 bits, to nearest even.
#[inline(always)]
pub(crate) fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return 0x7fff;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// f32 to bf16 bits, towards zero.
pub(crate) fn f32_to_bf16_rz(x: f32) -> u16 {
    if x.is_nan() { 0x7fff } else { (x.to_bits() >> 16) as u16 }
}

/// Subnormals become zeros of the same sign.
#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    if x.is_subnormal() { f32::from_bits(x.to_bits() & 0x8000_0000) } else { x }
}

/// Clamps to [0, 1]; NaN becomes 0.
#[inline(always)]
pub(crate) fn saturate(x: f32) -> f32 {
    if x > 0.0 { if x < 1.0 { x } else { 1.0 } } else { 0.0 }
}

/// `min` of PTX: a NaN loses against a number, −0 is below +0.
#[inline(always)]
pub(crate) fn min_num(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() {
        return if a.is_nan() { if b.is_nan() { f32::from_bits(0x7fff_ffff) } else { b } } else { a };
    }
    if a < b || (a == b && a.is_sign_negative()) { a } else { b }
}

/// `max` of PTX.
#[inline(always)]
pub(crate) fn max_num(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() {
        return if a.is_nan() { if b.is_nan() { f32::from_bits(0x7fff_ffff) } else { b } } else { a };
    }
    if a > b || (a == b && a.is_sign_positive()) { a } else { b }
}

/// 2^x, as exact as `ex2.approx` may be.
#[inline(always)]
pub(crate) fn exp2(x: f32) -> f32 {
    // Cody-Waite to [-0.5, 0.5] and a polynomial of degree 7 in double precision keep the loop free of calls, so that
    // a row of 32 lanes vectorises. The error stays below 1 ulp of f32; the device's own is 2 ulp.
    if x.is_nan() {
        return x;
    }
    let x = x.clamp(-160.0, 140.0);
    let n = (f64::from(x) + 6_755_399_441_055_744.0) - 6_755_399_441_055_744.0;
    let t = (f64::from(x) - n) * std::f64::consts::LN_2;
    let p = 1.0
        + t * (1.0
            + t * (0.5
                + t * (1.0 / 6.0 + t * (1.0 / 24.0 + t * (1.0 / 120.0 + t * (1.0 / 720.0 + t * (1.0 / 5040.0)))))));
    let scale = f64::from_bits(((n as i64 + 1023) as u64) << 52);
    (p * scale) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_round_trip_and_rounding() {
        for h in 0..=0xffffu16 {
            let f = f16_to_f32(h);
            if !f.is_nan() {
                assert_eq!(f32_to_f16(f), h, "{h:#x}");
            }
        }
        assert_eq!(f32_to_f16(65519.996), 0x7bff);
        assert_eq!(f32_to_f16(65520.0), 0x7c00);
        assert_eq!(f32_to_f16(2049.0), 0x6800); // a tie goes to the even 2048
        assert_eq!(f32_to_f16(2051.0), 0x6802); // and to the even 2052
        assert_eq!(f32_to_f16(2f32.powi(-25)), 0); // half of the smallest
        assert_eq!(f32_to_f16(2f32.powi(-25) * 1.01), 1);
        assert_eq!(f32_to_f16_rz(2051.9), 0x6801);
    }

    #[test]
    fn bf16_rounds_to_even() {
        assert_eq!(f32_to_bf16(1.0), 0x3f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f80_8000)), 0x3f80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f80_8001)), 0x3f81);
        assert_eq!(f32_to_bf16(f32::INFINITY), 0x7f80);
        assert_eq!(f32_to_bf16(f32::MAX), 0x7f80);
    }

    #[test]
    fn exp2_is_within_an_ulp() {
        for i in -1400..1280 {
            let x = i as f32 * 0.1;
            let exact = f64::from(x).exp2();
            let got = f64::from(exp2(x));
            let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            assert!((got - exact).abs() <= ulp, "{x}: {got} {exact}");
        }
        assert_eq!(exp2(0.0), 1.0);
        assert_eq!(exp2(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp2(f32::INFINITY), f32::INFINITY);
        assert!(exp2(f32::NAN).is_nan());
    }
}
