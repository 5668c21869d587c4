// SPDX-License-Identifier: MIT OR Apache-2.0
//! Drawn masks of slices in all the ways of the grid: bands of every sort, slices that share tokens and lie across
//! documents, positions far apart, and NaN in every row that no slice reads.

use crate::grid::check;
use crate::harness::*;
use cpattn::{Element, Slice};
use half::{bf16, f16};

/// A run of up to all of `n` tokens.
fn run(n: usize, random: &mut Random) -> std::ops::Range<usize> {
    let (a, b) = (random.below(n + 1), random.below(n + 1));
    match random.below(5) {
        0 => 0..n,
        1 => a..a,
        _ => a.min(b)..a.max(b),
    }
}

/// A slice of any sort. With `near`, positions are not far apart.
fn slice(tokens: [usize; 2], near: bool, random: &mut Random) -> Slice {
    let [q, k] = tokens.map(|n| run(n, random));
    let shifted = |random: &mut Random| random.below(80) as i64 - 40;
    let s = Slice::new(q, k);
    let far = if random.below(2) == 0 { 1 } else { -1 } * ((1i64 << 40) - random.below(100) as i64);
    let s = match random.below(if near { 3 } else { 4 }) {
        0 => s,
        1 => s.q_start(0),
        2 => s.q_start(s.q_start + shifted(random)),
        _ => s.q_start(far),
    };
    // Where the first query would have distance 0 from a key in the middle.
    let middle = -s.q_start + i64::from(s.k_end - s.k_begin) / 2;
    let (a, b) = (middle + shifted(random), middle + shifted(random));
    match random.below(9) {
        0 | 1 => s,
        2 => s.causal(),
        3 => s.band(0, i64::MAX),
        4 => s.band(1, i64::MAX),
        5 => s.band(a.min(b), a.max(b)),
        6 => s.band(a, b),
        7 => s.band(i64::MIN, a),
        _ => s.band(-20, 5),
    }
}

/// Slices whose pairs are apart.
fn draw(p: &Problem, random: &mut Random) -> Vec<Slice> {
    let tokens = [&p.lens_q, &p.lens_k].map(|lens| lens.iter().sum::<usize>());
    let mut taken = vec![false; tokens[0] * tokens[1]];
    let (most, mut slices) = (random.below(13), Vec::new());
    for _ in 0..4 * most {
        let s = slice(tokens, p.alibi, random);
        let all = (s.q_begin as usize..s.q_end as usize)
            .flat_map(|i| (s.k_begin as usize..s.k_end as usize).map(move |j| (i, j)));
        let pairs: Vec<_> = all.filter(|&(i, j)| s.allows(i, j)).map(|(i, j)| i * tokens[1] + j).collect();
        if slices.len() < most && !pairs.iter().any(|&pair| taken[pair]) {
            pairs.iter().for_each(|&pair| taken[pair] = true);
            slices.push(s);
        }
    }
    slices
}

fn of(seed: u64) -> Problem {
    let mut random = Random::new(seed + 7000);
    let mut p = problem(seed);
    p.lens_q.truncate(3);
    p.lens_k.truncate(3);
    p.starts.truncate(3);
    // Windows would hide most of what bands do.
    if random.below(2) == 0 {
        (p.score.window_left, p.score.window_right) = (UNLIMITED, UNLIMITED);
    }
    p.slices = Some(draw(&p, &mut random));
    p
}

fn drawn<E: Element>(seeds: std::ops::Range<u64>) {
    some_of(seeds).for_each(|seed| check::<E>(&of(seed)));
}

#[test]
fn slices_f32() {
    drawn::<f32>(1000..1048);
}

#[test]
fn slices_bf16() {
    drawn::<bf16>(1100..1148);
}

#[test]
fn slices_f16() {
    drawn::<f16>(1200..1248);
}

#[test]
fn slices_f64() {
    drawn::<f64>(1300..1348);
}
