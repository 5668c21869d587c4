// SPDX-License-Identifier: MIT OR Apache-2.0
//! Merging arbitrary partial results.
//!
//! From finite o and lse that are finite or −inf nothing becomes NaN, whatever lies in o where lse is −inf and between
//! the rows; a NaN of lse stays one; the order of the two does not matter beyond rounding; and the result is the
//! softmax over both, in f64.
#![no_main]

#[path = "bytes.rs"]
mod bytes;

use bytes::Bytes;
use cpattn::{Accumulator, Element, ViewMut, call::RawTensor, kernel::cpu};
use libfuzzer_sys::fuzz_target;

/// One partial result: o with strides, lse with strides, NaN between the rows.
struct Partial<A> {
    o: Vec<A>,
    lse: Vec<A>,
    shape: [usize; 3],
    pad: [usize; 2],
}

impl<A: Accumulator + Element> Partial<A> {
    fn draw(b: &mut Bytes, shape: [usize; 3]) -> Self {
        let pad = [b.below(3), b.below(3)];
        let [tokens, heads, dim] = shape;
        let nan = A::from_f64(f64::NAN);
        let (o_len, lse_len) = (tokens * (heads * (dim + pad[0]) + pad[1]), tokens * heads * (1 + pad[1]));
        let mut p = Self { o: vec![nan; o_len], lse: vec![nan; lse_len], shape, pad };
        for t in 0..tokens {
            for h in 0..heads {
                let lse = match b.below(8) {
                    0 => f64::NEG_INFINITY,
                    1 => f64::NAN,
                    2 => f64::from(f32::from_bits(b.bits(4) as u32)),
                    _ => f64::from(b.bits(2) as u16 as i16) / 256.0,
                };
                // A log-sum-exp of +inf has no o that could be said to be right.
                let lse = if lse == f64::INFINITY { 0.0 } else { lse };
                let at = p.lse_at(t, h);
                p.lse[at] = A::from_f64(lse);
                for d in 0..dim {
                    let at = p.o_at(t, h) + d;
                    // Where no key was seen, o stays NaN and must not be read.
                    if lse != f64::NEG_INFINITY {
                        let wild = f32::from_bits(b.bits(4) as u32) * 0.25;
                        let tame = f32::from(b.byte()) / 16.0 - 8.0;
                        p.o[at] = A::from_f64(f64::from(if b.flag() && wild.is_finite() { wild } else { tame }));
                    }
                }
            }
        }
        p
    }

    fn o_at(&self, t: usize, h: usize) -> usize {
        t * (self.shape[1] * (self.shape[2] + self.pad[0]) + self.pad[1]) + h * (self.shape[2] + self.pad[0])
    }

    fn lse_at(&self, t: usize, h: usize) -> usize {
        (h * self.shape[0] + t) * (1 + self.pad[1])
    }

    fn raw(&mut self) -> (RawTensor, RawTensor) {
        let [tokens, heads, dim] = self.shape;
        let strides = [heads * (dim + self.pad[0]) + self.pad[1], dim + self.pad[0]];
        let o = ViewMut::strided(&mut self.o, self.shape, strides).unwrap().raw();
        let step = 1 + self.pad[1];
        let lse = ViewMut::strided(&mut self.lse, [tokens, heads, 1], [step, tokens * step]).unwrap().raw();
        (o, lse)
    }

    fn merged(&self, other: &mut Self) -> Self {
        let mut to = Self { o: self.o.clone(), lse: self.lse.clone(), ..*self };
        let ((o, lse), (other_o, other_lse)) = (to.raw(), other.raw());
        // SAFETY: all four lie in buffers of their own.
        unsafe { cpu::merge(&o, &lse, &other_o, &other_lse) }.unwrap();
        to
    }
}

fn check<A: Accumulator + Element>(b: &mut Bytes) {
    let shape = [1 + b.below(3), 1 + b.below(3), b.below(5)];
    let (mut x, mut y) = (Partial::<A>::draw(b, shape), Partial::<A>::draw(b, shape));
    let (xy, yx) = (x.merged(&mut y), y.merged(&mut x));
    let u = A::DTYPE.unit_roundoff();
    let mut inside = vec![false; xy.o.len()];
    for t in 0..shape[0] {
        for h in 0..shape[1] {
            let lse = |p: &Partial<A>| p.lse[p.lse_at(t, h)].to_f64();
            let (lx, ly, l) = (lse(&x), lse(&y), lse(&xy));
            assert!(l.to_bits() == lse(&yx).to_bits() || l.is_nan() && lse(&yx).is_nan(), "{lx} {ly}: {l}");
            let nan = lx.is_nan() || ly.is_nan();
            assert_eq!(l.is_nan(), nan, "{lx} {ly}: {l}");
            let m = lx.max(ly);
            if !nan && m == f64::NEG_INFINITY {
                assert_eq!(l, m);
            } else if !nan {
                let want = m + ((lx - m).exp() + (ly - m).exp()).ln();
                assert!((l - want).abs() <= 2.0 * u * want.abs().max(1.0), "{lx} {ly}: {l}, expected {want}");
            }
            for d in 0..shape[2] {
                let o = |p: &Partial<A>| p.o[p.o_at(t, h) + d].to_f64();
                inside[xy.o_at(t, h) + d] = true;
                let (ox, oy, got, swapped) = (o(&x), o(&y), o(&xy), o(&yx));
                if nan {
                    // Against a side that saw no key, o stays as it is, beside its NaN of a log-sum-exp.
                    let kept = |o: f64, l: f64| l == f64::NEG_INFINITY && got == o && swapped == o;
                    let spoilt = got.is_nan() && swapped.is_nan();
                    assert!(spoilt || kept(ox, ly) || kept(oy, lx), "{lx} {ly}: {ox} {oy} became {got}, {swapped}");
                    continue;
                }
                let part = |l: f64, o: f64| if l == f64::NEG_INFINITY { (0.0, 0.0) } else { ((l - m).exp(), o) };
                let ((wx, ox), (wy, oy)) = (part(lx, ox), part(ly, oy));
                let want = if wx + wy == 0.0 { 0.0 } else { (wx * ox + wy * oy) / (wx + wy) };
                let bound = 8.0 * u * (ox.abs() + oy.abs()) + f64::from(f32::MIN_POSITIVE);
                assert!((got - want).abs() <= bound, "{lx} {ly}: {ox} {oy} became {got}, expected {want}");
                assert!((got - swapped).abs() <= bound, "{got} or {swapped}, by order");
            }
        }
    }
    for (i, inside) in inside.into_iter().enumerate() {
        assert!(inside || xy.o[i].to_f64().is_nan(), "a gap of o was written");
    }
}

fuzz_target!(|data: &[u8]| {
    let b = &mut Bytes(data);
    if b.flag() { check::<f64>(b) } else { check::<f32>(b) }
});
