// SPDX-License-Identifier: MIT OR Apache-2.0
//! Drawn masks of slices in all the ways of the grid: bands of every sort, slices that share tokens and lie across
//! documents, positions far apart, and NaN in every row that no slice reads.

use crate::grid::check;
use crate::harness::*;
use cpattn::call::{Band, Pair, QRange, Range};
use cpattn::kernel::reference::{Gradient, Output};
use cpattn::{Element, Slice};
use half::{bf16, f16};

/// Slices: the reference, who reads what, and the bands of ranges.
impl Problem {
    pub fn forward(&self, w: &Whole, sinks: bool) -> Output {
        let reference = self.reference(w, sinks);
        self.slices.as_ref().map_or_else(|| reference.forward(), |slices| reference.forward_of(slices))
    }

    pub fn backward(&self, w: &Whole, out: &Output) -> Gradient {
        let reference = self.reference(w, true);
        let with = |slices: &Vec<Slice>| reference.backward_of(slices, &w.d_o, None, out);
        self.slices.as_ref().map_or_else(|| reference.backward(&w.d_o, out), with)
    }

    pub fn max_logit(&self, w: &Whole) -> Vec<f64> {
        let reference = self.reference(w, false);
        reference.max_logit_of(&self.slices.clone().unwrap_or_else(|| reference.documents()))
    }

    /// The distances of the pairs that slices and the window allow, by q token and k token. Empty without slices.
    fn distances(&self) -> Vec<(usize, usize, i64)> {
        let mut all = Vec::new();
        for s in self.slices.iter().flatten() {
            for i in s.q_begin as usize..s.q_end.max(s.q_begin) as usize {
                for j in s.k_begin as usize..s.k_end.max(s.k_begin) as usize {
                    let (x, y) = (i as i64 - i64::from(s.q_begin) + s.q_start, j as i64 - i64::from(s.k_begin));
                    if s.allows(i, j) && self.score.allows(x, y) {
                        all.push((i, j, y - x));
                    }
                }
            }
        }
        all
    }

    /// The tokens of q and of k that are in no pair of the slices.
    pub fn unread(&self) -> [Vec<usize>; 2] {
        if self.slices.is_none() {
            return [vec![], vec![]];
        }
        let mut read = [&self.lens_q, &self.lens_k].map(|lens| vec![false; lens.iter().sum()]);
        for (i, j, _) in self.distances() {
            (read[0][i], read[1][j]) = (true, true);
        }
        read.map(|read| (0..read.len()).filter(|&i| !read[i]).collect())
    }

    /// With slices and ALiBi: the largest term of the nearest key of a row.
    pub fn largest_alibi(&self) -> f64 {
        let mut nearest = std::collections::HashMap::new();
        for (i, _, distance) in self.distances() {
            let least = nearest.entry(i).or_insert(i64::MAX);
            *least = distance.abs().min(*least);
        }
        let largest = nearest.into_values().max().unwrap_or(0);
        if self.alibi { 0.5 * largest as f64 } else { 0.0 }
    }

    /// The band of a slice between document `of_q` of q and `of_k` of k.
    fn band(&self, s: &Slice, of_q: usize, of_k: usize) -> Band {
        let first = |lens: &[usize], doc: usize| lens[..doc].iter().sum::<usize>() as i64;
        // What is added to a token of the batch for its position in the document.
        let (to_q, to_k) = (self.starts[of_q] - first(&self.lens_q, of_q), -first(&self.lens_k, of_k));
        Band {
            q_begin: i64::from(s.q_begin) + to_q,
            q_end: i64::from(s.q_end) + to_q,
            k_begin: i64::from(s.k_begin) + to_k,
            k_end: i64::from(s.k_end) + to_k,
            low: s.low,
            high: s.high,
            shift: to_q - to_k + i64::from(s.q_begin) - i64::from(s.k_begin) - s.q_start,
        }
    }

    /// As [`ring_step`], with the bands: for each q range slice by slice, document by document.
    pub fn ring_step(
        &self,
        q: &[Range],
        k: &[Range],
        step: usize,
        finish: bool,
        document: impl Fn(u32) -> [u32; 2],
    ) -> (Vec<QRange>, Vec<Range>, Vec<Pair>, Vec<Band>) {
        let (mut q, k, mut pairs) = ring_step(q, k, step, self.ring_steps, finish, document);
        let Some(slices) = &self.slices else { return (q, k, pairs, vec![Band::WHOLE]) };
        let documents = self.lens_q.len();
        let bands = slices.iter().flat_map(|s| {
            (0..documents).flat_map(move |of_q| (0..documents).map(move |of_k| self.band(s, of_q, of_k)))
        });
        let bands: Vec<_> = bands.collect();
        pairs.clear();
        for q in &mut q {
            q.keys_begin = pairs.len() as u32;
            for slice in 0..slices.len() {
                for doc in 0..documents as u32 {
                    let band = ((slice * documents + q.range.doc as usize) * documents) as u32 + doc;
                    let of = &bands[band as usize];
                    let meets = |k: &Range| k.len > 0 && k.pos < of.k_end && k.last() >= of.k_begin;
                    // Where a band has no row of q or of k there may be a pair or none.
                    let some = |i: usize, k: &Range| k.doc == doc && (meets(k) || (i + slice).is_multiple_of(4));
                    let keys = k.iter().enumerate().filter(|(i, k)| some(*i, k));
                    pairs.extend(keys.map(|(k, _)| Pair { k: k as u32, band }));
                }
            }
            q.keys_end = pairs.len() as u32;
        }
        (q, k, pairs, bands)
    }
}

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

pub fn of(seed: u64) -> Problem {
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
    drawn::<f16>(1200..1224);
}

#[test]
fn slices_f64() {
    drawn::<f64>(1300..1324);
}
