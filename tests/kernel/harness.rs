// SPDX-License-Identifier: MIT OR Apache-2.0
//! Problems, and how they are laid out in memory: cut into ranges, scattered, among NaN.

use cpattn::call::{DropoutMask, Mode, Pair, QRange, Range, RawTensor, Score};
use cpattn::kernel::cpu::Isa;
use cpattn::kernel::reference::Attention;
use cpattn::{Dtype, Element, Slice};

/// A seed names a problem.
pub struct Random(fastrand::Rng);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.0.usize(..n)
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Roughly normal.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.0.f64()).sum::<f64>() - 6.0
    }
}

/// How many of so many problems are tried: all with `CPATTN_LONG` set (`.ci/long`), else the first of them. Seeds
/// choose by remainders of 2, 3 and 4, so that 12 of them have every choice.
pub fn some_of(seeds: std::ops::Range<u64>) -> std::ops::Range<u64> {
    let most = if std::env::var_os("CPATTN_LONG").is_some() {
        u64::MAX
    } else {
        24.min(12 * (seeds.end - seeds.start).div_ceil(24))
    };
    seeds.start..seeds.end.min(seeds.start.saturating_add(most))
}

/// The instruction sets of this machine that have kernels of their own for elements `E`; of them that which
/// `CPATTN_TEST_ISA` names, where it is set: an emulator takes its time.
pub fn isas<E: Element>() -> impl Iterator<Item = Isa> {
    let named = std::env::var("CPATTN_TEST_ISA").ok();
    Isa::ALL.into_iter().filter(move |isa| {
        isa.is_available()
            && named.as_ref().is_none_or(|named| isa.to_string() == *named)
            && match isa {
                Isa::Amx => E::DTYPE != Dtype::F64,
                Isa::Avx512Bf16 => E::DTYPE == Dtype::Bf16,
                _ => true,
            }
    })
}

/// What products of p and of ds may be off by (relative RMS) on this instruction set: half of a rounding of each, which
/// a sum in the element type would exceed.
pub fn rounding<E: Element>(isa: Isa) -> f64 {
    0.4 * isa.roundoff(E::DTYPE)
}

/// Lengths of a document that is multiplied in tiles where there are some.
pub const LONG: [u32; 2] = [1 << 20; 2];

/// How a document's positions are cut into ranges.
#[derive(Clone, Copy, Debug)]
pub enum Cut {
    Whole,
    /// Pieces of at most this many, at random borders.
    Pieces(usize),
    /// So many interleaved ranges of this block.
    Stripes(u32, u32),
}

#[derive(Clone, Debug)]
pub struct Problem {
    pub seed: u64,
    pub lens_q: Vec<usize>,
    pub lens_k: Vec<usize>,
    pub starts: Vec<i64>,
    pub heads: usize,
    pub kv_heads: usize,
    pub d: usize,
    pub dv: usize,
    pub score: Score,
    pub alibi: bool,
    pub sinks: bool,
    pub cut: Cut,
    /// First q head of each share of heads, and the end.
    pub shares: Vec<usize>,
    pub ring_steps: usize,
    /// What do is multiplied by.
    pub gain: f64,
    /// The mask, if it is not that of documents.
    pub slices: Option<Vec<Slice>>,
    /// The probability with which pairs are dropped; the seed is the problem's.
    pub dropout: Option<f64>,
}

/// Inputs as f64 after rounding to the element type, and what the reference makes of them.
pub struct Whole {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub d_o: Vec<f64>,
    /// `[1 or documents, heads]`.
    pub alibi_slopes: Vec<f64>,
    pub sinks: Vec<f64>,
    pub cu_q: Vec<i32>,
    pub cu_k: Vec<i32>,
}

pub fn cumulative(lens: &[usize]) -> Vec<i32> {
    let mut sum = 0;
    let mut cu = vec![0];
    for &len in lens {
        sum += len as i32;
        cu.push(sum);
    }
    cu
}

impl Problem {
    pub fn whole<E: Element>(&self) -> Whole {
        let mut random = Random::new(self.seed);
        let mut scaled =
            |n: usize, gain: f64| (0..n).map(|_| E::from_f64(random.normal() * gain).to_f64()).collect::<Vec<_>>();
        let mut numbers = |n| scaled(n, 1.0);
        let (tq, tk) = (self.lens_q.iter().sum::<usize>(), self.lens_k.iter().sum::<usize>());
        Whole {
            q: numbers(tq * self.heads * self.d),
            k: numbers(tk * self.kv_heads * self.d),
            v: numbers(tk * self.kv_heads * self.dv),
            d_o: scaled(tq * self.heads * self.dv, self.gain),
            alibi_slopes: (0..self.slope_rows() * self.heads)
                .map(|i| 0.5f64.powi((i % self.heads) as i32 + 1) * [1.0, 0.25, 3.0, -0.5][i / self.heads % 4])
                .collect(),
            sinks: (0..self.heads)
                .map(|h| [0.5, -2.0, f64::NEG_INFINITY, 4.0, 12.0][(h + self.seed as usize) % 5])
                .collect(),
            cu_q: cumulative(&self.lens_q),
            cu_k: cumulative(&self.lens_k),
        }
    }

    /// Every second problem has slopes for each document.
    fn slope_rows(&self) -> usize {
        if self.seed.is_multiple_of(2) { 1 } else { self.lens_q.len() }
    }

    /// Slopes of these heads, where the problem has some, in the table of all heads.
    pub fn slopes(&self, table: &mut [f32], heads: core::ops::Range<usize>) -> RawTensor {
        if !self.alibi {
            return RawTensor::NONE;
        }
        let rows = (table.len() / self.heads) as u64;
        RawTensor::compact(table.as_mut_ptr().cast(), Dtype::F32, rows, self.heads as u32, 1)
            .heads(heads.start as u32, heads.len() as u32)
    }

    pub fn reference<'a>(&'a self, w: &'a Whole, sinks: bool) -> Attention<'a> {
        Attention {
            q: &w.q,
            k: &w.k,
            v: &w.v,
            cu_seqlens_q: &w.cu_q,
            cu_seqlens_k: &w.cu_k,
            q_start: &self.starts,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.d,
            value_dim: self.dv,
            score: self.score,
            alibi_slopes: self.alibi.then_some(&w.alibi_slopes),
            sinks: (sinks && self.sinks).then_some(&w.sinks),
            dropout: self.dropout.map(|p| DropoutMask::new(p, self.seed).unwrap()),
        }
    }
}

/// The ranges of one side, and the row of each token of the packed batch.
pub struct Placed {
    pub ranges: Vec<Range>,
    pub row_of: Vec<usize>,
    pub rows: usize,
}

pub fn place(lens: &[usize], starts: &[i64], cut: Cut, random: &mut Random) -> Placed {
    let mut ranges = Vec::new();
    let mut row_of = vec![0; lens.iter().sum()];
    let (mut row, mut base) = (random.below(3), 0);
    for (doc, (&len, &start)) in lens.iter().zip(starts).enumerate() {
        let mut pieces = Vec::new();
        match cut {
            Cut::Whole => pieces.push(Range::plain(0, len as u32, start, doc as u32)),
            Cut::Pieces(most) => {
                let mut at = 0;
                while at < len {
                    let n = (1 + random.below(most)).min(len - at);
                    pieces.push(Range::plain(0, n as u32, start + at as i64, doc as u32));
                    at += n;
                }
            }
            Cut::Stripes(block, count) => {
                for s in 0..count {
                    let mut range = Range { block, period: block * count, ..Range::plain(0, 0, start, doc as u32) };
                    range.pos += i64::from(s * block);
                    while range.position(range.len) < start + len as i64 {
                        range.len += 1;
                    }
                    pieces.push(range);
                }
            }
        }
        for mut range in pieces {
            range.row = row as i64;
            for i in 0..range.len {
                row_of[base + (range.position(i) - start) as usize] = row + i as usize;
            }
            row += range.len as usize + random.below(3);
            ranges.push(range);
        }
        base += len;
    }
    Placed { ranges, row_of, rows: row + 1 }
}

/// A tensor with a head too many on each side, and gaps between heads and rows: NaN where nothing was put.
pub struct Buffer<T> {
    pub data: Vec<T>,
    pub rows: usize,
    pub heads: usize,
    pub dim: usize,
}

impl<T: Element> Buffer<T> {
    pub fn poisoned(rows: usize, heads: usize, dim: usize) -> Self {
        let mut b = Self { data: Vec::new(), rows, heads, dim };
        b.data = vec![T::from_f64(f64::NAN); rows * b.token_stride()];
        b
    }

    pub fn head_stride(&self) -> usize {
        self.dim + 3
    }

    pub fn token_stride(&self) -> usize {
        (self.heads + 2) * self.head_stride() + 1
    }

    pub fn at(&self, row: usize, head: usize) -> core::ops::Range<usize> {
        let at = row * self.token_stride() + (head + 1) * self.head_stride();
        at..at + self.dim
    }

    /// Puts heads `heads` of compact `[tokens, all, dim]` numbers at the rows of their tokens.
    pub fn put(&mut self, numbers: &[f64], all: usize, heads: core::ops::Range<usize>, row_of: &[usize]) {
        for (token, &row) in row_of.iter().enumerate() {
            for h in heads.clone() {
                let at = self.at(row, h - heads.start);
                let source = &numbers[(token * all + h) * self.dim..][..self.dim];
                self.data[at].iter_mut().zip(source).for_each(|(x, &y)| *x = T::from_f64(y));
            }
        }
    }

    /// Takes head `head` of each token out again.
    pub fn get(&self, head: usize, row_of: &[usize]) -> Vec<Vec<f64>> {
        row_of.iter().map(|&row| self.data[self.at(row, head)].iter().map(|x| x.to_f64()).collect()).collect()
    }

    pub fn raw(&mut self) -> RawTensor {
        let first = self.head_stride();
        RawTensor {
            ptr: self.data[first..].as_mut_ptr().cast(),
            token_stride: self.token_stride() as i64,
            head_stride: self.head_stride() as i64,
            tokens: self.rows as u64,
            heads: self.heads as u32,
            dim: self.dim as u32,
            dtype: T::DTYPE,
        }
    }

    /// Makes a row NaN.
    pub fn poison(&mut self, row: usize) {
        for head in 0..self.heads {
            let at = self.at(row, head);
            self.data[at].fill(T::from_f64(f64::NAN));
        }
    }

    /// That nothing but `heads` × `row_of` was written.
    pub fn assert_untouched_elsewhere(&self, row_of: &[usize], name: &str) {
        let mut allowed = vec![false; self.data.len()];
        for &row in row_of {
            for h in 0..self.heads {
                allowed[self.at(row, h)].fill(true);
            }
        }
        let stray = self.data.iter().zip(allowed).position(|(x, allowed)| !allowed && !x.to_f64().is_nan());
        assert_eq!(stray, None, "{name} was written outside of its ranges");
    }
}

/// Relative RMS error.
#[derive(Default)]
pub struct Rms {
    pub error: f64,
    pub norm: f64,
    pub count: f64,
}

impl Rms {
    pub fn add(&mut self, found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        self.count += found.len() as f64;
        for (x, y) in found.iter().zip(expected) {
            self.error += (x - y) * (x - y);
            self.norm += y * y;
        }
    }

    /// RMS error over RMS, where an RMS below `floor` counts as that.
    pub fn relative(&self, floor: f64) -> f64 {
        (self.error / self.norm.max(floor * floor * self.count).max(1e-300)).sqrt()
    }

    #[track_caller]
    pub fn assert_below(&self, bound: f64, floor: f64, what: &str) {
        let found = self.relative(floor);
        assert!(found < bound, "{what}: relative RMS error {found:e}, bound {bound:e}");
    }
}

/// The pairs of visit `visit`: each k range belongs to one visit, each q range reads all of its document, whose lengths
/// are said to be `document`'s.
pub fn ring_step(
    q: &[Range],
    k: &[Range],
    ring_step: usize,
    ring_steps: usize,
    finish: bool,
    document: impl Fn(u32) -> [u32; 2],
) -> (Vec<QRange>, Vec<Range>, Vec<Pair>) {
    let keys: Vec<_> = k.iter().enumerate().filter(|(i, _)| i % ring_steps == ring_step).map(|(_, r)| *r).collect();
    let mut pairs = Vec::new();
    let q = q
        .iter()
        .map(|&range| {
            let keys_begin = pairs.len() as u32;
            pairs.extend(keys.iter().enumerate().filter(|(_, r)| r.doc == range.doc).map(|(i, _)| Pair::of(i as u32)));
            let mode = Mode::of(ring_step == 0, finish && ring_step == ring_steps - 1);
            QRange { range, document: document(range.doc), keys_begin, keys_end: pairs.len() as u32, mode }
        })
        .collect();
    (q, keys, pairs)
}

pub fn head_numbers(numbers: &[f64], heads: core::ops::Range<usize>) -> Vec<f32> {
    numbers[heads].iter().map(|&x| x as f32).collect()
}

pub fn per_head(numbers: &mut [f32], wanted: bool) -> RawTensor {
    if !wanted {
        return RawTensor::NONE;
    }
    RawTensor {
        head_stride: 1,
        ..RawTensor::compact(numbers.as_mut_ptr().cast(), Dtype::F32, 1, numbers.len() as u32, 1)
    }
}

pub const UNLIMITED: i64 = i64::MAX;

pub fn score(d: usize, left: i64, right: i64) -> Score {
    Score { scale: 1.0 / (d as f64).sqrt(), softcap: 0.0, window_left: left, window_right: right }
}

/// Problem number `seed` of the grid: the options cycle with periods that share no factor, the lengths are random.
pub fn problem(seed: u64) -> Problem {
    let mut random = Random::new(seed + 1000);
    let i = seed as usize;
    let (d, dv) = [(1, 1), (8, 8), (32, 32), (40, 40), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256)][i % 9];
    let (heads, kv_heads) = [(4, 4), (6, 2), (4, 1), (3, 3), (1, 1)][i % 5];
    let window =
        [(UNLIMITED, 0), (UNLIMITED, UNLIMITED), (17, 0), (30, 9), (0, 0), (UNLIMITED, 5), (40, UNLIMITED)][i % 7];
    let cut = [Cut::Whole, Cut::Pieces(50), Cut::Stripes(4, 3), Cut::Pieces(3)][random.below(4)];
    let longest = if d > 64 { 90 } else { 200 };
    let mut lens = |n: usize| (0..n).map(|_| random.pick(&[0, 1, 2, 5, 31, longest, longest / 3])).collect::<Vec<_>>();
    let lens_k = lens(4);
    let (lens_q, starts) = match i % 3 {
        0 => (lens_k.clone(), vec![0; 4]),
        // Bottom-right aligned: q may be the shorter (a prefix is there already) or the longer one.
        _ => {
            let lens_q = lens(4);
            let starts = lens_q.iter().zip(&lens_k).map(|(&q, &k)| k as i64 - q as i64).collect();
            (lens_q, starts)
        }
    };
    let mut score = score(d, window.0, window.1);
    score.softcap = [0.0, 0.0, 3.0, 30.0][random.below(4)];
    let shares = match heads {
        4 => vec![0, 1, 4],
        6 => vec![0, 3, 5, 6],
        n => vec![0, n],
    };
    Problem {
        seed,
        lens_q,
        lens_k,
        starts,
        heads,
        kv_heads,
        d,
        dv,
        score,
        alibi: random.below(3) == 0,
        sinks: random.below(3) == 0,
        cut,
        shares,
        ring_steps: 1 + random.below(3),
        gain: 1.0,
        slices: None,
        dropout: None,
    }
}
