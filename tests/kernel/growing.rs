// SPDX-License-Identifier: MIT OR Apache-2.0
//! Scores that grow, or fall, along the keys.
//!
//! The forward pass keeps the reference of a row until a score is far above it. On matrix units a tile is done on the
//! chance that this does not happen, and done again if it does. Here it happens in no tile, in some, and in every one,
//! for rows that meet their first key in different tiles, over more tiles than are packed together.

use crate::harness::*;
use crate::slow::{self, Turn};
use cpattn::Element;
use cpattn::call::{Attend, Band, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor};
use cpattn::kernel::cpu::{self, Isa, Scratch};
use cpattn::kernel::reference::Attention;
use half::{bf16, f16};

const ROWS: usize = 180;
const KEYS: usize = 830;
const HEADS: usize = 2;
const DIM: usize = 40;
const VALUE_DIM: usize = 72;

fn raw<T: Element>(x: &mut [T], heads: usize, dim: usize) -> RawTensor {
    RawTensor::compact(x.as_mut_ptr().cast(), T::DTYPE, (x.len() / dim / heads) as u64, heads as u32, dim as u32)
}

/// Two q heads that read one kv head; the last column of k grows by `growth` a key, and that of q is 1.
fn check<E: Element>(isa: Isa, growth: f64, left: i64, right: i64) {
    let what = format!("{isa:?} {} growth {growth} window {left}, {right}", E::DTYPE);
    let mut random = Random::new(7);
    let mut numbers = |n: usize| (0..n).map(|_| E::from_f64(random.normal())).collect::<Vec<_>>();
    let (mut q, mut k, mut v) = (numbers(ROWS * HEADS * DIM), numbers(KEYS * DIM), numbers(KEYS * VALUE_DIM));
    q.chunks_mut(DIM).for_each(|row| row[DIM - 1] = E::from_f64(1.0));
    k.chunks_mut(DIM).enumerate().for_each(|(j, row)| row[DIM - 1] = E::from_f64(growth * j as f64));
    let score = score(DIM, left, right);
    // The first row stands in the middle of the keys.
    let start = 400;
    let wide = |x: &[E]| x.iter().map(|x| x.to_f64()).collect::<Vec<_>>();
    let expected = Attention {
        q: &wide(&q),
        k: &wide(&k),
        v: &wide(&v),
        cu_seqlens_q: &[0, ROWS as i32],
        cu_seqlens_k: &[0, KEYS as i32],
        q_start: &[start],
        heads: HEADS,
        kv_heads: 1,
        head_dim: DIM,
        value_dim: VALUE_DIM,
        score,
        alibi_slopes: None,
        sinks: None,
        dropout: None,
    }
    .forward();
    let nan = E::Acc::from_f64(f64::NAN);
    let (mut o, mut lse) = (vec![nan; ROWS * HEADS * VALUE_DIM], vec![nan; ROWS * HEADS]);
    let mut words = vec![nan; ROWS * HEADS * 2];
    let mut scratch = Scratch::with_isa(1, isa).unwrap();
    scratch.reserve(E::DTYPE, DIM as u32, VALUE_DIM as u32);
    let rows = [QRange {
        range: Range::plain(0, ROWS as u32, start, 0),
        document: LONG,
        keys_begin: 0,
        keys_end: 1,
        mode: Mode::First,
    }];
    let ranges = Ranges {
        q: &rows,
        k: &[Range::plain(0, KEYS as u32, 0, 0)],
        pairs: &[Pair { k: 0, band: 0 }],
        bands: &[Band::WHOLE],
    };
    let call = Attend {
        running: raw(&mut o, HEADS, VALUE_DIM),
        running_lse: raw(&mut words, HEADS, 2),
        lse: raw(&mut lse, HEADS, 1),
        ..Attend::new(
            [raw(&mut q, HEADS, DIM), raw(&mut k, 1, DIM), raw(&mut v, 1, VALUE_DIM), RawTensor::NONE],
            HeadMap { q_offset: 0, kv_offset: 0, group: HEADS as u32 },
            score,
            ranges,
        )
    };
    // SAFETY: the tensors are the vectors above, alive and used by no other code.
    unsafe { cpu::attend(&call, &mut scratch) }.unwrap();
    let mut rms = Rms::default();
    rms.add(&o.iter().map(|x| x.to_f64()).collect::<Vec<_>>(), &expected.o);
    // Sums of f32 that are as large as the scores lose as many digits. Many values, of both signs, nearly cancel: what
    // p is off by counts for more.
    let largest = score.scale * growth.abs() * KEYS as f64;
    rms.assert_below(1e-6 + 2f64.powi(-23) * largest + 1.3 * rounding::<E>(isa), 0.0, &what);
    for (word, expected) in words.chunks(2).zip(&expected.lse) {
        let found = word[0].to_f64() + word[1].to_f64();
        assert!((found - expected).abs() <= 2e-6 * (1.0 + expected.abs()), "{what}: lse {found}, expected {expected}");
    }
}

#[test]
fn scores_that_grow_along_the_keys() {
    if slow::left_out(Turn::Every) {
        return;
    }
    fn all<E: Element>() {
        for isa in isas::<E>() {
            for growth in [0.0, 0.2, 0.6, 2.0, -0.6] {
                for (left, right) in [(UNLIMITED, UNLIMITED), (UNLIMITED, 0), (150, 0), (40, 300)] {
                    check::<E>(isa, growth, left, right);
                }
            }
        }
    }
    all::<bf16>();
    all::<f16>();
    all::<f32>();
}
