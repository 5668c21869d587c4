// SPDX-License-Identifier: MIT OR Apache-2.0
//! f32 and f16 as sums of bf16 numbers (AMX): no digits are lost, and numbers that bf16 does not hold are themselves.
//!
//! Every instruction set is asked the same: the error of f32 against f64 is compared with that of the portable kernels,
//! and rows with an infinity, a NaN, or a number that would be rounded to infinity, with the reference.

use crate::harness::*;
use cpattn::call::{Attend, AttendBackward, Band, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score};
use cpattn::kernel::cpu::{self, Isa, Scratch};
use cpattn::kernel::reference::Attention;
use cpattn::{Dtype, Element};
use half::{bf16, f16};

const DIM: usize = 128;

/// q, k and v of one head, and what comes of them without a mask.
struct One<E> {
    q: Vec<E>,
    k: Vec<E>,
    v: Vec<E>,
}

impl<E: Element<Acc = f32>> One<E> {
    fn new(rows: usize, keys: usize) -> Self {
        let mut random = Random::new(77);
        let mut numbers = |n: usize| (0..n * DIM).map(|_| E::from_f64(random.normal())).collect();
        Self { q: numbers(rows), k: numbers(keys), v: numbers(keys) }
    }

    fn score() -> Score {
        score(DIM, i64::MAX, i64::MAX)
    }

    fn expected(&self) -> (Vec<f64>, Vec<f64>) {
        let wide = |x: &[E]| x.iter().map(|x| x.to_f64()).collect::<Vec<_>>();
        let lengths = [&self.q, &self.k].map(|x| [0, (x.len() / DIM) as i32]);
        let out = Attention {
            q: &wide(&self.q),
            k: &wide(&self.k),
            v: &wide(&self.v),
            cu_seqlens_q: &lengths[0],
            cu_seqlens_k: &lengths[1],
            q_start: &[0],
            heads: 1,
            kv_heads: 1,
            head_dim: DIM,
            value_dim: DIM,
            score: Self::score(),
            alibi_slopes: None,
            sinks: None,
            dropout: None,
        }
        .forward();
        (out.o, out.lse)
    }

    /// o before it is rounded, and lse.
    fn found(&mut self, isa: Isa) -> (Vec<f64>, Vec<f64>) {
        fn raw<T: Element>(x: &mut [T], dim: usize) -> RawTensor {
            RawTensor::compact(x.as_mut_ptr().cast(), T::DTYPE, (x.len() / dim) as u64, 1, dim as u32)
        }
        let (rows, keys) = (self.q.len() / DIM, self.k.len() / DIM);
        let (mut o, mut words) = (vec![f32::NAN; rows * DIM], vec![f32::NAN; 2 * rows]);
        let mut scratch = Scratch::with_isa(1, isa).unwrap();
        scratch.reserve(E::DTYPE, DIM as u32, DIM as u32);
        let range = Range::plain(0, rows as u32, 0, 0);
        let q = [QRange { range, document: LONG, keys_begin: 0, keys_end: 1, mode: Mode::First }];
        let k = [Range::plain(0, keys as u32, 0, 0)];
        let call = Attend {
            running: raw(&mut o, DIM),
            running_lse: raw(&mut words, 2),
            ..Attend::new(
                [raw(&mut self.q, DIM), raw(&mut self.k, DIM), raw(&mut self.v, DIM), RawTensor::NONE],
                HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
                Self::score(),
                Ranges { q: &q, k: &k, pairs: &[Pair { k: 0, band: 0 }], bands: &[Band::WHOLE] },
            )
        };
        // SAFETY: the tensors are the vectors above, alive and used by nobody else.
        unsafe { cpu::attend(&call, &mut scratch) }.unwrap();
        let lse = words.chunks(2).map(|x| f64::from(x[0]) + f64::from(x[1])).collect();
        (o.into_iter().map(f64::from).collect(), lse)
    }
}

impl<E: Element<Acc = f32>> One<E> {
    /// dq, dk and dv for a do of ones with signs, and an lse and a delta that need not be those of the forward.
    fn gradients(&mut self, isa: Isa) -> [Vec<f32>; 3] {
        fn raw<T: Element>(x: &mut [T], dim: usize) -> RawTensor {
            RawTensor::compact(x.as_mut_ptr().cast(), T::DTYPE, (x.len() / dim) as u64, 1, dim as u32)
        }
        let (rows, keys) = (self.q.len() / DIM, self.k.len() / DIM);
        let sign = |i: usize| E::from_f64(if i.is_multiple_of(3) { -1.0 } else { 1.0 });
        let mut d_o: Vec<E> = (0..rows * DIM).map(sign).collect();
        let (mut lse, mut delta) = (vec![5.0f32; rows], vec![0.25f32; rows]);
        let mut results = [rows, keys, keys].map(|n| vec![f32::NAN; n * DIM]);
        let mut scratch = Scratch::with_isa(1, isa).unwrap();
        scratch.reserve(E::DTYPE, DIM as u32, DIM as u32);
        let range = Range::plain(0, rows as u32, 0, 0);
        let q = [QRange { range, document: LONG, keys_begin: 0, keys_end: 1, mode: Mode::Only }];
        let k = [Range::plain(0, keys as u32, 0, 0)];
        let [dq, dk, dv] = results.each_mut().map(|x| raw(x, DIM));
        let call = AttendBackward {
            lse: raw(&mut lse, 1),
            delta: raw(&mut delta, 1),
            dq,
            dk,
            dv,
            ..AttendBackward::new(
                [raw(&mut self.q, DIM), raw(&mut self.k, DIM), raw(&mut self.v, DIM), raw(&mut d_o, DIM)],
                HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
                Self::score(),
                Ranges { q: &q, k: &k, pairs: &[Pair { k: 0, band: 0 }], bands: &[Band::WHOLE] },
            )
        };
        // SAFETY: the tensors are the vectors above, alive and used by nobody else.
        unsafe { cpu::attend_backward(&call, &mut scratch) }.unwrap();
        results
    }
}

/// Dot products are for bf16 alone: the other types have the bits that they have on AVX-512.
#[test]
fn other_types_have_no_dot_products() {
    /// Whether they are the same: o, lse, dq, dk and dv of one problem on both.
    fn same<E: Element<Acc = f32>>() -> bool {
        let mut one = One::<E>::new(40, 200);
        let mut all = |isa| (one.found(isa), one.gradients(isa));
        all(Isa::Avx512) == all(Isa::Avx512Bf16)
    }
    if Isa::Avx512Bf16.is_available() {
        assert_eq!((same::<f32>(), same::<f16>(), same::<bf16>()), (true, true, false));
        let roundoff = [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::Bf16].map(|x| Isa::Avx512Bf16.roundoff(x));
        assert_eq!(roundoff, [0.0, 0.0, 0.0, Dtype::Bf16.unit_roundoff()]);
    }
}

/// Neither o nor lse errs more than with multiply-adds of f32, by the rule of errors: 1.1 times that, and 4 roundings.
#[test]
fn parts_lose_no_digits() {
    for keys in [40, 1000] {
        let mut one = One::<f32>::new(64, keys);
        let expected = one.expected();
        let mut error = |isa| {
            let (o, lse) = one.found(isa);
            let mut rms = Rms::default();
            rms.add(&o, &expected.0);
            let lse = lse.iter().zip(&expected.1).map(|(x, y)| (x - y).powi(2)).sum::<f64>() / lse.len() as f64;
            (rms.relative(0.0), lse.sqrt())
        };
        let (o, lse) = error(Isa::Portable);
        for isa in isas::<f32>() {
            let found = error(isa);
            println!("{keys} keys, {isa}: o {:e}, lse {:e}; portable o {o:e}, lse {lse:e}", found.0, found.1);
            let rounding = 4.0 * Dtype::F32.unit_roundoff();
            assert!(found.0 <= 1.1 * o + rounding && found.1 <= 1.1 * lse + rounding, "{isa}: {found:?}");
        }
    }
}

/// Rows and keys with numbers that have no parts, and all the others beside them, as the reference has them.
#[test]
fn numbers_without_parts() {
    fn check<E: Element<Acc = f32>>(huge: f64) {
        for isa in isas::<E>() {
            // Which tensor, which row, and what its element 3 becomes.
            for (tensor, row, x) in [
                (0, 5, f64::NEG_INFINITY),
                (0, 5, huge),
                (1, 9, f64::INFINITY),
                (1, 9, f64::NEG_INFINITY),
                (1, 37, -huge),
                (1, 9, f64::NAN),
                (2, 37, f64::INFINITY),
                (2, 9, f64::NAN),
                (2, 9, huge),
            ] {
                let mut one = One::<E>::new(40, 50);
                // Scores with a huge number are to be like others. Where v has it, q and k stay: the products of its ds
                // with numbers that tiles take for 0 would be missed.
                if tensor < 2 {
                    let column = |x: &mut E| *x = E::from_f64(x.to_f64() * 16.0 / huge);
                    one.q.iter_mut().skip(3).step_by(DIM).for_each(column);
                    one.k.iter_mut().skip(3).step_by(DIM).for_each(column);
                }
                [&mut one.q, &mut one.k, &mut one.v][tensor][row * DIM + 3] = E::from_f64(x);
                let (expected, found) = (one.gradients(Isa::Portable), one.gradients(isa));
                for (what, found, expected) in
                    [("dq", &found[0], &expected[0]), ("dk", &found[1], &expected[1]), ("dv", &found[2], &expected[2])]
                {
                    for (i, (x, y)) in found.iter().zip(expected).enumerate() {
                        // An infinity less an infinity is NaN, in whichever order they come.
                        let same = if y.is_finite() { (x - y).abs() <= 5e-4 * (1.0 + y.abs()) } else { !x.is_finite() };
                        assert!(same, "{what}[{i}] is {x}, portable {y}: {isa}, {} {tensor} {row} {x}", E::DTYPE);
                    }
                }
                let (expected, found) = (one.expected(), one.found(isa));
                for (what, found, expected) in [("o", found.0, expected.0), ("lse", found.1, expected.1)] {
                    for (i, (x, y)) in found.iter().zip(&expected).enumerate() {
                        // Infinite and NaN together; what lies beyond f32 is infinite there.
                        let y = f64::from(*y as f32);
                        let same =
                            if y.is_nan() { x.is_nan() } else { x == &y || (x - y).abs() <= 2e-5 * (1.0 + y.abs()) };
                        assert!(same, "{what}[{i}] is {x}, expected {y}: {isa}, {} {tensor} {row}", E::DTYPE);
                    }
                }
            }
        }
    }
    check::<f32>(f64::from(f32::MAX));
    check::<f16>(f16::MAX.to_f64());
}

/// A key whose scores are all −∞ is one that no row sees, whatever the panels of lanes are filled up with: its
/// gradients are 0, and those of the others are finite.
#[test]
fn a_key_of_minus_infinity_takes_no_part() {
    fn check<E: Element<Acc = f32>>() {
        for isa in isas::<E>() {
            for rows in [18, 32, 50, 130] {
                let mut one = One::<E>::new(rows, 50);
                one.q.iter_mut().skip(3).step_by(DIM).for_each(|x| *x = E::from_f64(1.0));
                one.k[5 * DIM + 3] = E::from_f64(f64::NEG_INFINITY);
                let (expected, found) = (one.gradients(Isa::Portable), one.gradients(isa));
                for (what, found, expected) in [("dk", &found[1], &expected[1]), ("dv", &found[2], &expected[2])] {
                    for (i, (x, y)) in found.iter().zip(expected).enumerate() {
                        let error = (x - y).abs();
                        let what = format!("{what}[{i}] is {x}, portable {y}: {isa}, {}, {rows} rows", E::DTYPE);
                        assert!(y.is_finite() && error <= 2e-2 * (1.0 + y.abs()), "{what}");
                        assert!(i / DIM != 5 || *x == 0.0, "{what}");
                    }
                }
            }
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}
