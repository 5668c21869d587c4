// SPDX-License-Identifier: MIT OR Apache-2.0
//! A problem, and one way of cutting it into ranges.
//!
//! Rows that belong to no range, and columns between one token and the next, hold NaN: whatever reads a neighbour
//! shows.

use crate::dense;
use cpattn::call::{Band, DropoutMask, Range, Score};
use cpattn::kernel::reference::{Attention, Gradient, Output};
use cpattn::{Dtype, Element};
use half::{bf16, f16};

/// How the tokens of a document become ranges.
#[derive(Clone, Copy, Debug)]
pub enum Cut {
    /// One range.
    Whole,
    /// Pieces of uneven lengths, some of them shorter than a tile.
    Chunks(usize),
    /// This many ranges, each a stripe of blocks.
    Striped(usize, u32),
}

/// A band between a document of q and one of k.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    pub documents: (u32, u32),
    pub band: Band,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub name: &'static str,
    pub dtype: Dtype,
    /// q tokens, k tokens and the position of the first q token of each document.
    pub documents: Vec<(usize, usize, i64)>,
    /// What attends to what, in the place of each document to itself; empty for that. Tokens in no pair hold NaN (see
    /// `is_read`).
    pub slices: Vec<Slice>,
    pub heads: usize,
    pub kv_heads: usize,
    /// The q heads that the call holds.
    pub held: core::ops::Range<usize>,
    pub head_dim: usize,
    pub value_dim: usize,
    pub score: Score,
    pub alibi_slopes: bool,
    pub sinks: bool,
    pub cut: Cut,
    /// Calls over which the keys of each document are spread.
    pub ring_steps: usize,
    /// Every second q range meets its keys from the last to the first.
    pub shuffled: bool,
    pub per_q_head: bool,
    pub accumulate: bool,
    /// Probability and seed.
    pub dropout: Option<(f64, u64)>,
    /// What the q of a token is multiplied by.
    pub q_factor: fn(usize) -> f64,
}

impl Case {
    /// This case with softcap, ALiBi, sinks, and scales that are not positive or nearly 0.
    pub fn with_scores(&self) -> Vec<Self> {
        let near = Score { window_left: 5, ..self.score };
        // Rows that no key is near enough to.
        let far = Self { score: near, documents: vec![(60, 20, 30), (33, 33, 0)], sinks: true, ..self.clone() };
        let scores = [
            (0.125, 2.0, false, false),
            (0.125, 0.0, true, false),
            (0.125, 0.0, false, true),
            (0.2, 3.0, true, true),
            (-0.1, 0.0, false, false),
            (0.0, 0.0, true, true),
            // A scale that f32 does not hold, with masked tiles.
            (-1e-60, 0.0, false, true),
            (1e-60, 2.0, true, false),
        ];
        let with = |(scale, softcap, alibi_slopes, sinks)| Self {
            score: Score { scale, softcap, ..self.score },
            alibi_slopes,
            sinks,
            ..self.clone()
        };
        scores.map(with).into_iter().chain([far]).collect()
    }

    /// Some kv heads with a group of q heads each.
    pub fn grouped(name: &'static str, group: usize, kv_heads: usize, dims: (usize, usize)) -> Self {
        let heads = group * kv_heads;
        Self { heads, kv_heads, held: 0..heads, ..Self::new(name, Dtype::Bf16, dims) }
    }

    pub fn new(name: &'static str, dtype: Dtype, dims: (usize, usize)) -> Self {
        Self {
            name,
            dtype,
            documents: vec![(70, 70, 0)],
            slices: vec![],
            heads: 2,
            kv_heads: 1,
            held: 0..2,
            head_dim: dims.0,
            value_dim: dims.1,
            score: Score {
                scale: (dims.0 as f64).sqrt().recip(),
                softcap: 0.0,
                window_left: i64::MAX,
                window_right: 0,
            },
            alibi_slopes: false,
            sinks: false,
            cut: Cut::Whole,
            ring_steps: 1,
            shuffled: false,
            per_q_head: false,
            accumulate: false,
            dropout: None,
            q_factor: |_| 1.0,
        }
    }

    /// The size of scores with a q and a k of size 1, where that is more than 1.
    pub fn magnitude(&self) -> f64 {
        let factor = (0..self.q_tokens()).map(self.q_factor).fold(1.0, f64::max);
        (self.score.scale.abs() * factor).max(1.0)
    }

    /// Whether each token of q and of k is in some pair; where none may hold NaN, all count: without slices, and in
    /// stripes, where kernels multiply rows in the gaps by zeros.
    pub fn is_read(&self) -> [Vec<bool>; 2] {
        let all = self.slices.is_empty() || matches!(self.cut, Cut::Striped(..));
        let mut read = [vec![all; self.q_tokens()], vec![all; self.k_tokens()]];
        if !all {
            for (t, keys) in dense::pairs(self).iter().enumerate() {
                read[0][t] = !keys.is_empty();
                keys.iter().for_each(|&(s, _)| read[1][s] = true);
            }
        }
        read
    }

    /// Which pairs are dropped.
    pub fn mask(&self) -> Option<DropoutMask> {
        self.dropout.map(|(probability, seed)| DropoutMask::new(probability, seed).expect("a probability"))
    }

    /// For each document, the tokens of q and of k that position 0 is, or would be.
    pub fn first_tokens(&self) -> [Vec<i64>; 2] {
        let (mut tokens, mut before) = ([vec![], vec![]], [0, 0]);
        for &(len_q, len_k, start) in &self.documents {
            tokens[0].push(before[0] - start);
            tokens[1].push(before[1]);
            before = [before[0] + len_q as i64, before[1] + len_k as i64];
        }
        tokens
    }

    /// Sinks of each head, where there are any.
    pub fn sinks_per_head(&self) -> usize {
        if self.ring_steps == 2 || self.heads > 2 { 3 } else { 1 }
    }

    /// The bands of the calls.
    pub fn bands(&self) -> Vec<Band> {
        if self.slices.is_empty() { vec![Band::WHOLE] } else { self.slices.iter().map(|s| s.band).collect() }
    }

    /// The kv heads that the held q heads read.
    pub fn held_kv(&self) -> core::ops::Range<usize> {
        let group = self.heads / self.kv_heads;
        self.held.start / group..(self.held.end - 1) / group + 1
    }

    pub fn q_tokens(&self) -> usize {
        self.documents.iter().map(|d| d.0).sum()
    }

    pub fn k_tokens(&self) -> usize {
        self.documents.iter().map(|d| d.1).sum()
    }
}

/// Inputs, rounded to the element type, and what f64 makes of them.
pub struct Numbers {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub d_o: Vec<f64>,
    pub alibi_slopes: Vec<f64>,
    pub sinks: Vec<f64>,
    pub out: Output,
    pub gradient: Gradient,
    /// The largest score of each head.
    pub max_logit: Vec<f64>,
}

/// Numbers that look random: between −√3 and √3, so of variance 1.
pub fn random(n: usize, seed: u64) -> Vec<f64> {
    let mut draw = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| (2.0 * draw.f64() - 1.0) * 3f64.sqrt()).collect()
}

/// Rounded once: `half`'s own conversion makes ties of what lies beside them.
pub fn encode(dtype: Dtype, x: f64) -> Vec<u8> {
    match dtype {
        Dtype::F16 => <f16 as Element>::from_f64(x).to_le_bytes().to_vec(),
        Dtype::Bf16 => <bf16 as Element>::from_f64(x).to_le_bytes().to_vec(),
        Dtype::F32 => (x as f32).to_le_bytes().to_vec(),
        Dtype::F64 => x.to_le_bytes().to_vec(),
    }
}

pub fn decode(dtype: Dtype, bytes: &[u8]) -> f64 {
    match dtype {
        Dtype::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        Dtype::Bf16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        Dtype::F32 => f64::from(f32::from_le_bytes(bytes.try_into().expect("four bytes"))),
        Dtype::F64 => f64::from_le_bytes(bytes.try_into().expect("eight bytes")),
    }
}

impl Numbers {
    pub fn of(case: &Case) -> Self {
        let round = |x| decode(case.dtype, &encode(case.dtype, x));
        let rounded = |n, seed| -> Vec<f64> { random(n, seed).into_iter().map(round).collect() };
        let (tq, tk) = (case.q_tokens(), case.k_tokens());
        let row = case.heads * case.head_dim;
        let q = (0..).zip(random(tq * row, 1)).map(|(i, x)| round(x * (case.q_factor)(i / row))).collect();
        let k = rounded(tk * case.kv_heads * case.head_dim, 2);
        let v = rounded(tk * case.kv_heads * case.value_dim, 3);
        let d_o = rounded(tq * case.heads * case.value_dim, 4);
        let slopes: Vec<f64> = (0..case.heads).map(|h| f64::from(0.5f32.powi(h as i32 + 1))).collect();
        let count = case.sinks_per_head();
        let some = [1.5, f64::NEG_INFINITY, -2.0, 40.0, 0.5, -1.0, f64::NEG_INFINITY];
        let sinks: Vec<f64> = (0..case.heads * count).map(|i| some[i % some.len()]).collect();
        let mut numbers = Self {
            q,
            k,
            v,
            d_o,
            alibi_slopes: slopes,
            sinks,
            out: Output { o: vec![], lse: vec![] },
            gradient: none(),
            max_logit: vec![],
        };
        if case.slices.is_empty() {
            numbers.out = numbers.with(case, |attention| attention.forward());
            numbers.max_logit = numbers.with(case, |attention| attention.max_logit_of(&attention.documents()));
            numbers.gradient = numbers.backward(case, &numbers.d_o);
        } else {
            (numbers.out, numbers.gradient, numbers.max_logit) = dense::attention(case, &numbers, &numbers.d_o);
        }
        numbers
    }

    /// The gradients for another gradient of o.
    pub fn backward(&self, case: &Case, d_o: &[f64]) -> Gradient {
        if !case.slices.is_empty() {
            return dense::attention(case, self, d_o).1;
        }
        self.with(case, |attention| attention.backward(d_o, &self.out))
    }

    fn with<R>(&self, case: &Case, f: impl FnOnce(&Attention) -> R) -> R {
        let (mut cu_q, mut cu_k, mut starts) = (vec![0], vec![0], vec![]);
        for &(len_q, len_k, start) in &case.documents {
            cu_q.push(cu_q[cu_q.len() - 1] + len_q as i32);
            cu_k.push(cu_k[cu_k.len() - 1] + len_k as i32);
            starts.push(start);
        }
        f(&Attention {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            cu_seqlens_q: &cu_q,
            cu_seqlens_k: &cu_k,
            q_start: &starts,
            heads: case.heads,
            kv_heads: case.kv_heads,
            head_dim: case.head_dim,
            value_dim: case.value_dim,
            score: case.score,
            alibi_slopes: case.alibi_slopes.then_some(&self.alibi_slopes),
            sinks: case.sinks.then_some(&self.sinks),
            dropout: case.mask(),
        })
    }
}

fn none() -> Gradient {
    Gradient { dq: vec![], dk: vec![], dv: vec![], dsinks: vec![] }
}

/// Ranges of one side, and the row of every token.
pub struct Side {
    pub ranges: Vec<Range>,
    pub row_of: Vec<usize>,
    pub rows: usize,
}

impl Side {
    /// `lens` and first positions by document; `seed` shuffles the ranges over the rows.
    pub fn new(documents: &[(usize, i64)], cut: Cut, seed: u64) -> Self {
        // Each range with the tokens it holds.
        let mut pieces: Vec<(Range, Vec<usize>)> = Vec::new();
        let mut base = 0;
        for (doc, &(len, start)) in documents.iter().enumerate() {
            match cut {
                Cut::Whole => {
                    pieces.push((Range::plain(0, len as u32, start, doc as u32), (base..base + len).collect()))
                }
                Cut::Chunks(n) => {
                    for i in 0..n {
                        // Squares make the pieces uneven.
                        let (a, b) = (len * i * i / (n * n), len * (i + 1) * (i + 1) / (n * n));
                        let range = Range::plain(0, (b - a) as u32, start + a as i64, doc as u32);
                        pieces.push((range, (base + a..base + b).collect()));
                    }
                }
                Cut::Striped(n, block) => {
                    let period = n as u32 * block;
                    for i in 0..n {
                        let tokens: Vec<usize> = (0..len).filter(|t| t / block as usize % n == i).collect();
                        let range = Range {
                            row: 0,
                            pos: start + (i as u32 * block) as i64,
                            len: tokens.len() as u32,
                            block,
                            period,
                            doc: doc as u32,
                        };
                        for (j, &token) in tokens.iter().enumerate() {
                            assert_eq!(range.position(j as u32), start + token as i64);
                        }
                        pieces.push((range, tokens.into_iter().map(|t| base + t).collect()));
                    }
                }
            }
            base += len;
        }
        // Rows in another order than ranges, with rows of no tensor between them.
        let mut order: Vec<usize> = (0..pieces.len()).collect();
        fastrand::Rng::with_seed(seed).shuffle(&mut order);
        let (mut row_of, mut row) = (vec![usize::MAX; base], 2);
        for i in order {
            pieces[i].0.row = row as i64;
            for (j, &token) in pieces[i].1.iter().enumerate() {
                row_of[token] = row + j;
            }
            row += pieces[i].1.len() + 1;
        }
        Self { ranges: pieces.into_iter().map(|p| p.0).collect(), row_of, rows: row + 1 }
    }
}
