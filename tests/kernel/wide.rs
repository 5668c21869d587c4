// SPDX-License-Identifier: MIT OR Apache-2.0
//! Head dims above 256, up to those of MLA in its latent form: q and k of 576, v of 512, one kv head for all q heads.
//!
//! Nothing in the kernels bounds a head dim. What grows with it is the memory of a worker (`Scratch::reserve`) and the
//! number of blocks of columns, so the dims here are whole blocks of every engine, one more, and one fewer.

use crate::grid::check;
use crate::harness::*;
use cpattn::Element;
use half::{bf16, f16};

const DIMS: [(usize, usize); 6] = [(576, 512), (577, 513), (575, 511), (320, 512), (40, 512), (576, 24)];

fn wide<E: Element>(seeds: std::ops::Range<u64>) {
    // Each pair of dims once: a problem takes seconds, since the oracle is the formula.
    let most = if std::env::var_os("CPATTN_LONG").is_some() { usize::MAX } else { DIMS.len() };
    for seed in seeds.take(most) {
        let (d, dv) = DIMS[seed as usize % DIMS.len()];
        let mut p = Problem { d, dv, ..problem(seed) };
        p.score.scale = score(d, 0, 0).scale;
        // Short documents, and one of more than a tile of keys.
        let shorter = |len: &mut usize| *len = if *len > 90 { 130 } else { *len };
        p.lens_k.iter_mut().for_each(shorter);
        p.lens_q.iter_mut().for_each(shorter);
        p.starts = p.lens_q.iter().zip(&p.lens_k).map(|(&q, &k)| k as i64 - q as i64).collect();
        check::<E>(&p);
    }
}

#[test]
fn wide_f32() {
    wide::<f32>(100..124);
}

#[test]
fn wide_f64() {
    wide::<f64>(100..112);
}

#[test]
fn wide_bf16() {
    wide::<bf16>(100..124);
}

#[test]
fn wide_f16() {
    wide::<f16>(100..112);
}
