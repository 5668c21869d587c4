// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CPU kernels against the f64 reference.
//!
//! Every problem is cut into ranges at random, its rows are scattered over tensors with odd strides in which
//! everything else is NaN, its heads are shared out as Ulysses would, and its keys come in several visits. What comes
//! out is compared with the reference run on the same rounded inputs, before it is rounded itself: a sum that was kept
//! in bf16 anywhere would miss these bounds by a factor of a thousand.
#![cfg(feature = "std")]

use cpattn::kernel::cpu::{self, Dims, Scratch};
use cpattn::kernel::reference::Attention;
use cpattn::kernel::{
    Attend, AttendBackward, Block, Delta, Finish, Gradients, HeadMap, Mode, QRange, Range, Ranges, RawTensor, Score,
    Transform, merge,
};
use cpattn::{Dtype, Element, Error};
use half::{bf16, f16};

/// A small generator (xorshift64*), so that a seed names a problem.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Roughly normal.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| (self.next() >> 11) as f64 / (1u64 << 53) as f64).sum::<f64>() - 6.0
    }
}

/// How a document's positions are cut into ranges.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Whole,
    /// Pieces of at most this many, at random borders.
    Pieces(usize),
    /// So many interleaved ranges of this block.
    Stripes(u32, u32),
}

#[derive(Clone, Debug)]
struct Problem {
    seed: u64,
    lens_q: Vec<usize>,
    lens_k: Vec<usize>,
    starts: Vec<i64>,
    heads: usize,
    kv_heads: usize,
    d: usize,
    dv: usize,
    score: Score,
    alibi: bool,
    sinks: bool,
    cut: Cut,
    /// First q head of each share of heads, and the end.
    shares: Vec<usize>,
    visits: usize,
}

/// Inputs as f64 after rounding to the element type, and what the reference makes of them.
struct Whole {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    d_o: Vec<f64>,
    slopes: Vec<f64>,
    sinks: Vec<f64>,
    cu_q: Vec<i32>,
    cu_k: Vec<i32>,
}

fn cumulative(lens: &[usize]) -> Vec<i32> {
    let mut sum = 0;
    let mut cu = vec![0];
    for &len in lens {
        sum += len as i32;
        cu.push(sum);
    }
    cu
}

impl Problem {
    fn whole<E: Element>(&self) -> Whole {
        let mut random = Random::new(self.seed);
        let mut numbers = |n: usize| (0..n).map(|_| E::from_f64(random.normal()).to_f64()).collect::<Vec<_>>();
        let (tq, tk) = (self.lens_q.iter().sum::<usize>(), self.lens_k.iter().sum::<usize>());
        Whole {
            q: numbers(tq * self.heads * self.d),
            k: numbers(tk * self.kv_heads * self.d),
            v: numbers(tk * self.kv_heads * self.dv),
            d_o: numbers(tq * self.heads * self.dv),
            slopes: (0..self.heads).map(|h| 0.5f64.powi(h as i32 + 1)).collect(),
            sinks: (0..self.heads)
                .map(|h| [0.5, -2.0, f64::NEG_INFINITY, 4.0, 12.0][(h + self.seed as usize) % 5])
                .collect(),
            cu_q: cumulative(&self.lens_q),
            cu_k: cumulative(&self.lens_k),
        }
    }

    fn reference<'a>(&'a self, w: &'a Whole, sinks: bool) -> Attention<'a> {
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
            slopes: self.alibi.then_some(&w.slopes),
            sinks: (sinks && self.sinks).then_some(&w.sinks),
        }
    }
}

/// The ranges of one side, and the row of each token of the packed batch.
struct Placed {
    ranges: Vec<Range>,
    row_of: Vec<usize>,
    rows: usize,
}

fn place(lens: &[usize], starts: &[i64], cut: Cut, random: &mut Random) -> Placed {
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
struct Buffer<T> {
    data: Vec<T>,
    rows: usize,
    heads: usize,
    dim: usize,
}

impl<T: Element> Buffer<T> {
    fn poisoned(rows: usize, heads: usize, dim: usize) -> Self {
        let mut b = Self { data: Vec::new(), rows, heads, dim };
        b.data = vec![T::from_f64(f64::NAN); rows * b.token_stride()];
        b
    }

    fn head_stride(&self) -> usize {
        self.dim + 3
    }

    fn token_stride(&self) -> usize {
        (self.heads + 2) * self.head_stride() + 1
    }

    fn at(&self, row: usize, head: usize) -> core::ops::Range<usize> {
        let at = row * self.token_stride() + (head + 1) * self.head_stride();
        at..at + self.dim
    }

    /// Puts heads `heads` of compact `[tokens, all, dim]` numbers at the rows of their tokens.
    fn put(&mut self, numbers: &[f64], all: usize, heads: core::ops::Range<usize>, row_of: &[usize]) {
        for (token, &row) in row_of.iter().enumerate() {
            for h in heads.clone() {
                let at = self.at(row, h - heads.start);
                let source = &numbers[(token * all + h) * self.dim..][..self.dim];
                self.data[at].iter_mut().zip(source).for_each(|(x, &y)| *x = T::from_f64(y));
            }
        }
    }

    /// Takes head `head` of each token out again.
    fn get(&self, head: usize, row_of: &[usize]) -> Vec<Vec<f64>> {
        row_of.iter().map(|&row| self.data[self.at(row, head)].iter().map(|x| x.to_f64()).collect()).collect()
    }

    fn raw(&mut self) -> RawTensor {
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

    /// That nothing but `heads` × `row_of` was written.
    fn assert_untouched_elsewhere(&self, row_of: &[usize], name: &str) {
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
struct Rms {
    error: f64,
    norm: f64,
    count: f64,
}

impl Rms {
    fn add(&mut self, found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        self.count += found.len() as f64;
        for (x, y) in found.iter().zip(expected) {
            self.error += (x - y) * (x - y);
            self.norm += y * y;
        }
    }

    /// RMS error over RMS, where an RMS below `floor` counts as that.
    fn relative(&self, floor: f64) -> f64 {
        (self.error / self.norm.max(floor * floor * self.count).max(1e-300)).sqrt()
    }

    #[track_caller]
    fn assert_below(&self, bound: f64, floor: f64, what: &str) {
        let found = self.relative(floor);
        assert!(found < bound, "{what}: relative RMS error {found:e}, bound {bound:e}");
    }
}

/// The pairs of visit `visit`: each k range belongs to one visit, each q range reads all of its document.
fn visit(q: &[Range], k: &[Range], visit: usize, visits: usize, finish: bool) -> (Vec<QRange>, Vec<Range>, Vec<u32>) {
    let keys: Vec<_> = k.iter().enumerate().filter(|(i, _)| i % visits == visit).map(|(_, r)| *r).collect();
    let mut pairs = Vec::new();
    let q = q
        .iter()
        .map(|&range| {
            let keys_begin = pairs.len() as u32;
            pairs.extend(keys.iter().enumerate().filter(|(_, r)| r.doc == range.doc).map(|(i, _)| i as u32));
            let mode = Mode::of(visit == 0, finish && visit == visits - 1);
            QRange { range, keys_begin, keys_end: pairs.len() as u32, mode }
        })
        .collect();
    (q, keys, pairs)
}

fn head_numbers(numbers: &[f64], heads: core::ops::Range<usize>) -> Vec<f32> {
    numbers[heads].iter().map(|&x| x as f32).collect()
}

fn per_head(numbers: &mut [f32], wanted: bool) -> RawTensor {
    if !wanted {
        return RawTensor::NONE;
    }
    RawTensor {
        head_stride: 1,
        ..RawTensor::compact(numbers.as_mut_ptr().cast(), Dtype::F32, 1, numbers.len() as u32, 1)
    }
}

/// Runs a problem forward and backward in all the ways there are, and compares.
fn check<E: Element>(p: &Problem) {
    let bound = if E::Acc::DTYPE == Dtype::F64 { 1e-13 } else { 1e-6 };
    let w = p.whole::<E>();
    let (plain, sunk) = (p.reference(&w, false).forward(), p.reference(&w, true).forward());
    let gradient = p.reference(&w, true).backward(&w.d_o, &sunk);
    let mut random = Random::new(p.seed + 1);
    let zeros = vec![0; p.lens_k.len()];
    let q_at = place(&p.lens_q, &p.starts, p.cut, &mut random);
    let k_at = place(&p.lens_k, &zeros, p.cut, &mut random);
    let dims = Dims { head_dim: p.d as u32, value_dim: p.dv as u32, dtype: E::DTYPE };
    let mut scratch = Scratch::new(1 + p.seed as usize % 3);
    scratch.reserve(&dims);
    let group = p.heads / p.kv_heads;
    let mut rms: [Rms; 5] = Default::default();
    let mut final_error = Rms::default();
    for share in p.shares.windows(2) {
        let heads = share[0]..share[1];
        let kv = heads.start / group..(heads.end - 1) / group + 1;
        let map = HeadMap { q_offset: heads.start as u32, kv_offset: kv.start as u32, group: group as u32 };
        let mut q = Buffer::<E>::poisoned(q_at.rows, heads.len(), p.d);
        let mut k = Buffer::<E>::poisoned(k_at.rows, kv.len(), p.d);
        let mut v = Buffer::<E>::poisoned(k_at.rows, kv.len(), p.dv);
        let mut d_o = Buffer::<E>::poisoned(q_at.rows, heads.len(), p.dv);
        q.put(&w.q, p.heads, heads.clone(), &q_at.row_of);
        k.put(&w.k, p.kv_heads, kv.clone(), &k_at.row_of);
        v.put(&w.v, p.kv_heads, kv.clone(), &k_at.row_of);
        d_o.put(&w.d_o, p.heads, heads.clone(), &q_at.row_of);
        let mut slopes = head_numbers(&w.slopes, heads.clone());
        let mut sinks = head_numbers(&w.sinks, heads.clone());
        let (slopes, sinks) = (per_head(&mut slopes, p.alibi), per_head(&mut sinks, p.sinks));

        for finish in [false, true] {
            let mut running = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), p.dv);
            let mut lse = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), 1);
            let mut o = Buffer::<E>::poisoned(q_at.rows, heads.len(), p.dv);
            for i in 0..p.visits {
                let (qs, ks, pairs) = visit(&q_at.ranges, &k_at.ranges, i, p.visits, finish);
                let call = Attend {
                    q: q.raw(),
                    k: k.raw(),
                    v: v.raw(),
                    running: if finish && E::DTYPE == E::Acc::DTYPE { o.raw() } else { running.raw() },
                    o: if finish { o.raw() } else { RawTensor::NONE },
                    lse: lse.raw(),
                    slopes,
                    sinks,
                    heads: map,
                    score: p.score,
                    ranges: Ranges { q: &qs, k: &ks, pairs: &pairs },
                    aligned: p.seed % 4 == 3,
                };
                // SAFETY: the tensors are the buffers above, alive and nobody else's.
                unsafe { cpu::attend(&call, &mut scratch) }.unwrap();
            }
            let expected = if finish { &sunk } else { &plain };
            for h in heads.clone() {
                let found = if finish {
                    o.get(h - heads.start, &q_at.row_of)
                } else {
                    running.get(h - heads.start, &q_at.row_of)
                };
                let lses = lse.get(h - heads.start, &q_at.row_of);
                for (token, (row, lse)) in found.iter().zip(&lses).enumerate() {
                    let at = token * p.heads + h;
                    if finish { &mut final_error } else { &mut rms[0] }.add(row, &expected.o[at * p.dv..][..p.dv]);
                    let (l, e) = (lse[0], expected.lse[at]);
                    let close = l == e || (l - e).abs() <= bound * 2.0 * (1.0 + e.abs());
                    assert!(close, "lse of token {token}, head {h}: {l}, expected {e}; {p:?}");
                    if e == f64::NEG_INFINITY {
                        assert!(row.iter().all(|&x| x == 0.0));
                    }
                }
            }
            o.assert_untouched_elsewhere(&q_at.row_of, "o");
            running.assert_untouched_elsewhere(&q_at.row_of, "running");
            lse.assert_untouched_elsewhere(&q_at.row_of, "lse");
        }

        let mut lse = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), 1);
        let mut delta = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), 1);
        lse.put(&sunk.lse, p.heads, heads.clone(), &q_at.row_of);
        let deltas: Vec<_> = w
            .d_o
            .chunks(p.dv)
            .zip(sunk.o.chunks(p.dv))
            .map(|(a, b)| a.iter().zip(b).map(|(x, y)| x * y).sum())
            .collect();
        delta.put(&deltas, p.heads, heads.clone(), &q_at.row_of);
        for per_q_head in [false, true] {
            for (passes, aligned) in [
                (&[Gradients::All][..], false),
                (&[Gradients::Queries, Gradients::Keys][..], p.seed.is_multiple_of(2)),
                (&[Gradients::All][..], true),
            ] {
                let partials = if per_q_head { heads.clone() } else { kv.clone() };
                let mut dq = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), p.d);
                let mut dk = Buffer::<E::Acc>::poisoned(k_at.rows, partials.len(), p.d);
                let mut dv = Buffer::<E::Acc>::poisoned(k_at.rows, partials.len(), p.dv);
                let accumulate = p.seed % 2 == 1;
                if accumulate {
                    dk.put(&vec![0.0; w.k.len() * group], partials.end, partials.clone(), &k_at.row_of);
                    dv.put(&vec![0.0; w.v.len() * group], partials.end, partials.clone(), &k_at.row_of);
                }
                for i in 0..p.visits {
                    let (qs, ks, pairs) = visit(&q_at.ranges, &k_at.ranges, i, p.visits, true);
                    for &gradients in passes {
                        let call = AttendBackward {
                            q: q.raw(),
                            k: k.raw(),
                            v: v.raw(),
                            d_o: d_o.raw(),
                            lse: lse.raw(),
                            delta: delta.raw(),
                            dq: if gradients == Gradients::Keys { RawTensor::NONE } else { dq.raw() },
                            dk: if gradients == Gradients::Queries { RawTensor::NONE } else { dk.raw() },
                            dv: if gradients == Gradients::Queries { RawTensor::NONE } else { dv.raw() },
                            accumulate_keys: accumulate,
                            per_q_head,
                            gradients,
                            slopes,
                            heads: map,
                            score: p.score,
                            ranges: Ranges { q: &qs, k: &ks, pairs: &pairs },
                            aligned,
                        };
                        // SAFETY: as above.
                        unsafe { cpu::attend_backward(&call, &mut scratch) }.unwrap();
                    }
                }
                for h in heads.clone() {
                    for (token, row) in dq.get(h - heads.start, &q_at.row_of).iter().enumerate() {
                        rms[1].add(row, &gradient.dq[(token * p.heads + h) * p.d..][..p.d]);
                    }
                }
                dq.assert_untouched_elsewhere(&q_at.row_of, "dq");
                dk.assert_untouched_elsewhere(&k_at.row_of, "dk");
                dv.assert_untouched_elsewhere(&k_at.row_of, "dv");
                // A share of heads holds a part of a group: only whole groups can be compared here.
                for h in kv.clone().filter(|h| heads.start <= h * group && (h + 1) * group <= heads.end) {
                    let sum = |b: &Buffer<E::Acc>, token: usize| {
                        let row = k_at.row_of[token];
                        let mut sum = vec![0.0; b.dim];
                        let of = if per_q_head { h * group..(h + 1) * group } else { h..h + 1 };
                        for part in of {
                            let part = &b.data[b.at(row, part - partials.start)];
                            sum.iter_mut().zip(part).for_each(|(x, y)| *x += y.to_f64());
                        }
                        sum
                    };
                    for token in 0..k_at.row_of.len() {
                        let at = token * p.kv_heads + h;
                        rms[2].add(&sum(&dk, token), &gradient.dk[at * p.d..][..p.d]);
                        rms[3].add(&sum(&dv, token), &gradient.dv[at * p.dv..][..p.dv]);
                    }
                }
            }
        }
    }
    // ds is a difference, do·v − delta, which may cancel to next to nothing (a row with one key); its terms are of this
    // size, and so are their rounding errors.
    let floor = p.score.scale * (p.dv as f64).sqrt();
    for (rms, (what, floor)) in rms.iter().zip([("running o", 0.0), ("dq", floor), ("dk", floor), ("dv", 0.0)]) {
        rms.assert_below(bound, floor, &format!("{what} of {p:?}"));
    }
    // One rounding at the end, of the element type.
    final_error.assert_below(bound + E::DTYPE.unit_roundoff(), 0.0, &format!("o of {p:?}"));
}

const UNLIMITED: i64 = i64::MAX;

fn score(d: usize, left: i64, right: i64) -> Score {
    Score { scale: 1.0 / (d as f64).sqrt(), softcap: 0.0, window_left: left, window_right: right }
}

/// Problem number `seed` of the grid: the options cycle with periods that share no factor, the lengths are random.
fn problem(seed: u64) -> Problem {
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
        visits: 1 + random.below(3),
    }
}

#[test]
fn grid_f32() {
    (0..45).for_each(|seed| check::<f32>(&problem(seed)));
}

#[test]
fn grid_bf16() {
    (100..120).for_each(|seed| check::<bf16>(&problem(seed)));
}

#[test]
fn grid_f16() {
    (200..220).for_each(|seed| check::<f16>(&problem(seed)));
}

#[test]
fn grid_f64() {
    (300..320).for_each(|seed| check::<f64>(&problem(seed)));
}

/// Sums over twenty thousand terms keep the error of short ones, on either side.
#[test]
fn long_documents() {
    for (len_q, len_k) in [(16, 20_000), (20_000, 16)] {
        check::<f32>(&Problem {
            lens_q: vec![len_q],
            lens_k: vec![len_k],
            starts: vec![len_k as i64 - len_q as i64],
            score: score(32, UNLIMITED, UNLIMITED),
            d: 32,
            dv: 32,
            heads: 1,
            kv_heads: 1,
            shares: vec![0, 1],
            alibi: false,
            sinks: false,
            cut: Cut::Whole,
            visits: 1,
            seed: 42,
        });
    }
}

/// Outputs of a call as bits, by token.
#[derive(Default, PartialEq, Debug)]
struct Bits {
    o: Vec<Vec<u64>>,
    lse: Vec<Vec<u64>>,
    dq: Vec<Vec<u64>>,
    dk: Vec<Vec<u64>>,
    dv: Vec<Vec<u64>>,
}

/// How one run of [`aligned_bits`] is cut.
struct Way {
    q_cut: Cut,
    k_cut: Cut,
    /// One call for each q range (for dk, dv: each k range), with no more keys (queries) than it needs.
    apart: bool,
    workers: usize,
    heads: std::ops::Range<usize>,
}

/// Runs a problem of one document in aligned mode, in the given way.
fn aligned_bits<E: Element>(p: &Problem, w: &Whole, way: &Way, seed: u64) -> Bits {
    let mut random = Random::new(seed);
    let q_at = place(&p.lens_q, &p.starts, way.q_cut, &mut random);
    let k_at = place(&p.lens_k, &[0], way.k_cut, &mut random);
    let group = p.heads / p.kv_heads;
    let heads = way.heads.clone();
    let kv = heads.start / group..(heads.end - 1) / group + 1;
    let mut q = Buffer::<E>::poisoned(q_at.rows, heads.len(), p.d);
    let mut k = Buffer::<E>::poisoned(k_at.rows, kv.len(), p.d);
    let mut v = Buffer::<E>::poisoned(k_at.rows, kv.len(), p.dv);
    let mut d_o = Buffer::<E>::poisoned(q_at.rows, heads.len(), p.dv);
    let mut o = Buffer::<E>::poisoned(q_at.rows, heads.len(), p.dv);
    let mut lse = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), 1);
    let mut delta = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), 1);
    let mut dq = Buffer::<E::Acc>::poisoned(q_at.rows, heads.len(), p.d);
    let mut dk = Buffer::<E::Acc>::poisoned(k_at.rows, heads.len(), p.d);
    let mut dv = Buffer::<E::Acc>::poisoned(k_at.rows, heads.len(), p.dv);
    q.put(&w.q, p.heads, heads.clone(), &q_at.row_of);
    k.put(&w.k, p.kv_heads, kv.clone(), &k_at.row_of);
    v.put(&w.v, p.kv_heads, kv.clone(), &k_at.row_of);
    d_o.put(&w.d_o, p.heads, heads.clone(), &q_at.row_of);
    let mut slopes = head_numbers(&w.slopes, heads.clone());
    let slopes = per_head(&mut slopes, p.alibi);
    let map = HeadMap { q_offset: heads.start as u32, kv_offset: kv.start as u32, group: group as u32 };
    let mut scratch = Scratch::new(way.workers);
    scratch.reserve(&Dims { head_dim: p.d as u32, value_dim: p.dv as u32, dtype: E::DTYPE });
    // Calls as lists of q and k ranges.
    let s = p.score;
    let needs = |q: &Range, k: &Range| {
        (0..q.len).any(|i| {
            let pos = q.position(i);
            k.pos <= pos.saturating_add(s.window_right) && k.last() >= pos.saturating_sub(s.window_left)
        })
    };
    let all = (q_at.ranges.clone(), k_at.ranges.clone());
    let by_q: Vec<_> = q_at
        .ranges
        .iter()
        .map(|q| (vec![*q], k_at.ranges.iter().filter(|k| needs(q, k)).copied().collect::<Vec<_>>()))
        .collect();
    let by_k: Vec<_> = k_at
        .ranges
        .iter()
        .map(|k| (q_at.ranges.iter().filter(|q| needs(q, k)).copied().collect::<Vec<_>>(), vec![*k]))
        .collect();
    for (qs, ks) in if way.apart { by_q } else { vec![all.clone()] } {
        let (qs, ks, pairs) = visit(&qs, &ks, 0, 1, true);
        let ranges = Ranges { q: &qs, k: &ks, pairs: &pairs };
        let call = Attend {
            q: q.raw(),
            k: k.raw(),
            v: v.raw(),
            running: RawTensor::NONE,
            o: o.raw(),
            lse: lse.raw(),
            slopes,
            sinks: RawTensor::NONE,
            heads: map,
            score: p.score,
            ranges,
            aligned: true,
        };
        // SAFETY: the tensors are the buffers above, alive and nobody else's; here and below.
        unsafe { cpu::attend(&call, &mut scratch) }.unwrap();
        // SAFETY: as above. Rows in no range are NaN, and give NaN that nobody reads.
        unsafe { cpu::delta(&Delta { o: o.raw(), d_o: d_o.raw(), delta: delta.raw() }) }.unwrap();
        let call = backward_call(
            &call,
            d_o.raw(),
            delta.raw(),
            Gradients::Queries,
            [dq.raw(), RawTensor::NONE, RawTensor::NONE],
        );
        // SAFETY: as above.
        unsafe { cpu::attend_backward(&call, &mut scratch) }.unwrap();
    }
    for (qs, ks) in if way.apart { by_k } else { vec![all] } {
        let (qs, ks, pairs) = visit(&qs, &ks, 0, 1, true);
        let ranges = Ranges { q: &qs, k: &ks, pairs: &pairs };
        let call = Attend {
            q: q.raw(),
            k: k.raw(),
            v: v.raw(),
            running: RawTensor::NONE,
            o: o.raw(),
            lse: lse.raw(),
            slopes,
            sinks: RawTensor::NONE,
            heads: map,
            score: p.score,
            ranges,
            aligned: true,
        };
        let call = backward_call(&call, d_o.raw(), delta.raw(), Gradients::Keys, [RawTensor::NONE, dk.raw(), dv.raw()]);
        // SAFETY: as above.
        unsafe { cpu::attend_backward(&call, &mut scratch) }.unwrap();
    }
    fn bits<T: Element>(b: &Buffer<T>, row_of: &[usize]) -> Vec<Vec<u64>> {
        (0..b.heads).map(|h| b.get(h, row_of).iter().flatten().map(|x| x.to_bits()).collect()).collect()
    }
    Bits {
        o: bits(&o, &q_at.row_of),
        lse: bits(&lse, &q_at.row_of),
        dq: bits(&dq, &q_at.row_of),
        dk: bits(&dk, &k_at.row_of),
        dv: bits(&dv, &k_at.row_of),
    }
}

/// The backward of a forward call, aligned, with a partial for each q head.
fn backward_call<'a>(
    forward: &Attend<'a>,
    d_o: RawTensor,
    delta: RawTensor,
    gradients: Gradients,
    [dq, dk, dv]: [RawTensor; 3],
) -> AttendBackward<'a> {
    AttendBackward {
        q: forward.q,
        k: forward.k,
        v: forward.v,
        d_o,
        lse: forward.lse,
        delta,
        dq,
        dk,
        dv,
        accumulate_keys: false,
        per_q_head: true,
        gradients,
        slopes: forward.slopes,
        heads: forward.heads,
        score: forward.score,
        ranges: forward.ranges,
        aligned: forward.aligned,
    }
}

/// In aligned mode the bits of a row do not depend on how q, k or heads were cut, on trimmed keys, or on workers.
fn check_aligned<E: Element>(window: (i64, i64), alibi: bool, softcap: f64) {
    let p = Problem {
        seed: 7,
        lens_q: vec![700],
        lens_k: vec![700],
        starts: vec![0],
        heads: 4,
        kv_heads: 2,
        d: 40,
        dv: 24,
        score: Score { softcap, ..score(40, window.0, window.1) },
        alibi,
        sinks: false,
        cut: Cut::Whole,
        shares: vec![0, 4],
        visits: 1,
    };
    let w = p.whole::<E>();
    let whole = Way { q_cut: Cut::Whole, k_cut: Cut::Whole, apart: false, workers: 1, heads: 0..4 };
    let expected = aligned_bits::<E>(&p, &w, &whole, 1);
    let ways = [
        Way { q_cut: Cut::Pieces(90), k_cut: Cut::Pieces(200), heads: 0..4, ..whole },
        Way { q_cut: Cut::Pieces(9), k_cut: Cut::Pieces(3), workers: 3, heads: 0..4, ..whole },
        Way { q_cut: Cut::Pieces(300), k_cut: Cut::Pieces(70), apart: true, heads: 0..4, ..whole },
        Way { q_cut: Cut::Pieces(40), k_cut: Cut::Pieces(40), apart: true, heads: 1..4, ..whole },
        Way { q_cut: Cut::Whole, k_cut: Cut::Pieces(130), workers: 2, heads: 3..4, ..whole },
    ];
    for (i, way) in ways.iter().enumerate() {
        let found = aligned_bits::<E>(&p, &w, way, i as u64 + 2);
        let part = |x: &Vec<Vec<u64>>| x[way.heads.clone()].to_vec();
        assert!(found.o == part(&expected.o), "o, way {i}");
        assert!(found.lse == part(&expected.lse), "lse, way {i}");
        assert!(found.dq == part(&expected.dq), "dq, way {i}");
        assert!(found.dk == part(&expected.dk), "dk, way {i}");
        assert!(found.dv == part(&expected.dv), "dv, way {i}");
    }
    // Striped queries: dk and dv need them in the order of positions, o and dq do not.
    let striped = Way { q_cut: Cut::Stripes(16, 3), k_cut: Cut::Pieces(90), apart: false, workers: 1, heads: 0..4 };
    let found = aligned_bits::<E>(&p, &w, &striped, 9);
    assert!(found.o == expected.o && found.lse == expected.lse && found.dq == expected.dq, "striped queries");
}

#[test]
fn aligned_bits_do_not_depend_on_the_cut() {
    check_aligned::<f32>((UNLIMITED, 0), false, 0.0);
    check_aligned::<f32>((150, 20), true, 5.0);
    check_aligned::<bf16>((UNLIMITED, UNLIMITED), true, 0.0);
    check_aligned::<f64>((64, 0), false, 0.0);
}

/// A NaN in a key, a value or a query reaches those that see it, and nobody else.
#[test]
fn a_masked_nan_reaches_nobody() {
    let p = Problem { lens_q: vec![300], lens_k: vec![300], starts: vec![0], alibi: false, ..problem(4) };
    let p = Problem { heads: 2, kv_heads: 2, d: 16, dv: 16, score: score(16, 100, 0), visits: 1, ..p };
    let at = 150; // seen by rows 150 to 250; sees keys 50 to 150
    let way = || Way { q_cut: Cut::Whole, k_cut: Cut::Whole, apart: false, workers: 1, heads: 0..2 };
    let clean = aligned_bits::<f32>(&p, &p.whole::<f32>(), &way(), 1);
    let nan = |x: u64| f64::from_bits(x).is_nan();
    for bad in 0..4 {
        let mut w = p.whole::<f32>();
        let poisoned = [&mut w.q, &mut w.k, &mut w.v, &mut w.d_o].into_iter().nth(bad).unwrap();
        poisoned[at * 2 * 16] = if bad == 2 { f64::INFINITY } else { f64::NAN };
        let found = aligned_bits::<f32>(&p, &w, &way(), 1);
        let mut reached = [0; 5];
        for token in 0..300 {
            let keys = [1, 2].contains(&bad);
            let row = if keys { (150..=250).contains(&token) } else { token == at };
            let key = if keys { (50..=250).contains(&token) } else { (50..=150).contains(&token) };
            let all = [
                (&found.o, &clean.o, 16, row),
                (&found.lse, &clean.lse, 1, row),
                (&found.dq, &clean.dq, 16, row),
                (&found.dk, &clean.dk, 16, key),
                (&found.dv, &clean.dv, 16, key),
            ];
            for (i, (found, clean, dim, sees)) in all.into_iter().enumerate() {
                let part = token * dim..(token + 1) * dim;
                reached[i] +=
                    found[0][part.clone()].iter().filter(|x| nan(**x) || f64::from_bits(**x).is_infinite()).count();
                assert!(
                    sees || found[0][part.clone()] == clean[0][part.clone()],
                    "tensor {bad} reached {i} of {token}"
                );
                assert!(found[1][part.clone()] == clean[1][part], "tensor {bad} reached {i} of {token}, other head");
            }
        }
        // Those that see it are told.
        assert!(reached[2] >= 16 && reached[3] >= 16, "{bad}: {reached:?}");
    }
}

/// Real activations against another implementation's float64 results, through every function: forward, delta, backward.
#[test]
fn fixture() {
    let bytes = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/minilm_263.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let f32s = |name: &str| -> Vec<f64> {
        let data = file.tensor(name).unwrap().data().to_vec();
        data.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect()
    };
    let f16s = |name: &str| -> Vec<f64> {
        let data = file.tensor(name).unwrap().data().to_vec();
        data.chunks(2).map(|b| f16::from_le_bytes(b.try_into().unwrap()).to_f64()).collect()
    };
    let cu: Vec<i32> = file
        .tensor("cu_seqlens")
        .unwrap()
        .data()
        .chunks(4)
        .map(|b| i32::from_le_bytes(b.try_into().unwrap()))
        .collect();
    let lens: Vec<usize> = cu.windows(2).map(|w| (w[1] - w[0]) as usize).collect();
    let (q, k, v, d_o) = (f16s("q"), f16s("k"), f16s("v"), f16s("do"));
    let starts = vec![0; lens.len()];
    let a = Attention {
        q: &q,
        k: &k,
        v: &v,
        cu_seqlens_q: &cu,
        cu_seqlens_k: &cu,
        q_start: &starts,
        heads: 12,
        kv_heads: 12,
        head_dim: 32,
        value_dim: 32,
        score: score(32, UNLIMITED, 0),
        slopes: None,
        sinks: None,
    };
    let out = a.forward();
    let gradient = a.backward(&d_o, &out);
    for (name, found) in [
        ("o_causal", &out.o),
        ("lse_causal", &out.lse),
        ("dq_causal", &gradient.dq),
        ("dk_causal", &gradient.dk),
        ("dv_causal", &gradient.dv),
    ] {
        let mut rms = Rms::default();
        rms.add(found, &f32s(name));
        // The file holds float64 results rounded to f32.
        rms.assert_below(1e-7, 0.0, name);
    }
}

/// o and lse of a small f32 problem, whole or with its keys in two partial results that are merged as tensors.
#[test]
fn merged_tensors_are_the_whole() {
    let p = Problem { cut: Cut::Pieces(20), sinks: false, visits: 1, ..problem(12) };
    let w = p.whole::<f32>();
    let expected = p.reference(&w, false).forward();
    let mut random = Random::new(5);
    let zeros = vec![0; p.lens_k.len()];
    let q_at = place(&p.lens_q, &p.starts, p.cut, &mut random);
    let k_at = place(&p.lens_k, &zeros, p.cut, &mut random);
    let mut q = Buffer::<f32>::poisoned(q_at.rows, p.heads, p.d);
    let mut k = Buffer::<f32>::poisoned(k_at.rows, p.kv_heads, p.d);
    let mut v = Buffer::<f32>::poisoned(k_at.rows, p.kv_heads, p.dv);
    q.put(&w.q, p.heads, 0..p.heads, &q_at.row_of);
    k.put(&w.k, p.kv_heads, 0..p.kv_heads, &k_at.row_of);
    v.put(&w.v, p.kv_heads, 0..p.kv_heads, &k_at.row_of);
    let mut slopes = head_numbers(&w.slopes, 0..p.heads);
    let mut scratch = Scratch::new(1);
    scratch.reserve(&Dims { head_dim: p.d as u32, value_dim: p.dv as u32, dtype: Dtype::F32 });
    let mut partials: Vec<_> = (0..2)
        .map(|i| {
            let mut o = Buffer::<f32>::poisoned(q_at.rows, p.heads, p.dv);
            let mut lse = Buffer::<f32>::poisoned(q_at.rows, p.heads, 1);
            let (mut qs, ks, pairs) = visit(&q_at.ranges, &k_at.ranges, i, 2, false);
            qs.iter_mut().for_each(|q| q.mode = Mode::First);
            let call = Attend {
                q: q.raw(),
                k: k.raw(),
                v: v.raw(),
                running: o.raw(),
                o: RawTensor::NONE,
                lse: lse.raw(),
                slopes: per_head(&mut slopes, p.alibi),
                sinks: RawTensor::NONE,
                heads: HeadMap { q_offset: 0, kv_offset: 0, group: (p.heads / p.kv_heads) as u32 },
                score: p.score,
                ranges: Ranges { q: &qs, k: &ks, pairs: &pairs },
                aligned: false,
            };
            // SAFETY: the tensors are the buffers above, alive and nobody else's.
            unsafe { cpu::attend(&call, &mut scratch) }.unwrap();
            (o, lse)
        })
        .collect();
    let (mut o2, mut l2) = partials.pop().unwrap();
    let (mut o1, mut l1) = partials.pop().unwrap();
    // SAFETY: as above.
    unsafe { merge::merge(&o1.raw(), &l1.raw(), &o2.raw(), &l2.raw()) }.unwrap();
    let mut rms = Rms::default();
    for h in 0..p.heads {
        for (token, row) in o1.get(h, &q_at.row_of).iter().enumerate() {
            rms.add(row, &expected.o[(token * p.heads + h) * p.dv..][..p.dv]);
        }
    }
    rms.assert_below(1e-6, 0.0, "merged o");
    // SAFETY: refused before anything is touched.
    let refused = unsafe { merge::merge(&o1.raw(), &o2.raw(), &o2.raw(), &l2.raw()) };
    assert!(matches!(refused, Err(Error::Invalid { argument, .. }) if argument.starts_with("lse")));
}

#[test]
fn transforms() {
    fn raw<T: Element>(x: &mut [T], strides: (i64, i64), shape: (u64, u32, u32)) -> RawTensor {
        RawTensor {
            ptr: x.as_mut_ptr().cast(),
            token_stride: strides.0,
            head_stride: strides.1,
            tokens: shape.0,
            heads: shape.1,
            dim: shape.2,
            dtype: T::DTYPE,
        }
    }
    let shape = (3, 2, 300);
    // A cast and an ordered sum, into head-major memory; zeros; and a sum added to in place.
    let mut a: Vec<f32> = (0..1800).map(|i| i as f32 * 0.37 - 200.0).collect();
    let mut b: Vec<bf16> = (0..1800).map(|i| bf16::from_f32(1e3 - i as f32)).collect();
    let mut sum = vec![bf16::ZERO; 1800];
    let mut wide = vec![f64::NAN; 1800];
    let mut zeros = vec![f16::NAN; 1800];
    let mut total = a.clone();
    let compact = (600, 300);
    let sources = [
        raw(&mut a, compact, shape),
        raw(&mut b, compact, shape),
        raw(&mut b, compact, shape),
        raw(&mut total, compact, shape),
        raw(&mut a, compact, shape),
    ];
    let block = |dst, sources_begin, sources_end| Block { dst, sources_begin, sources_end };
    let blocks = [
        block(raw(&mut sum, (300, 900), shape), 0, 2),
        block(raw(&mut wide, compact, shape), 2, 3),
        block(raw(&mut zeros, compact, shape), 0, 0),
        block(sources[3], 3, 5),
    ];
    // SAFETY: the tensors are the vectors above.
    unsafe { cpu::transform(&Transform { blocks: &blocks, sources: &sources }) }.unwrap();
    for t in 0..3 {
        for h in 0..2 {
            for d in 0..300 {
                let (i, j) = (t * 600 + h * 300 + d, t * 300 + h * 900 + d);
                assert_eq!(sum[j], bf16::from_f32(a[i] + b[i].to_f32()));
                assert_eq!(wide[i], b[i].to_f64());
                assert_eq!(total[i], a[i] + a[i]);
            }
        }
    }
    assert!(zeros.iter().all(|x| x.to_bits() == 0));
    let wrong = [block(sources[0].rows(0, 2), 1, 2)];
    // SAFETY: refused before anything is touched.
    let refused = unsafe { cpu::transform(&Transform { blocks: &wrong, sources: &sources }) };
    assert_eq!(
        refused.unwrap_err().to_string(),
        "blocks[0].sources[0] [tokens, heads, dim] is [3, 2, 300], expected [2, 2, 300]"
    );

    let (mut delta, mut lse) = (vec![f32::NAN; 6], vec![f32::NAN; 6]);
    let o = raw(&mut b, compact, shape);
    let sums = raw(&mut delta, (1, 3), (3, 2, 1));
    // SAFETY: as above.
    unsafe { cpu::delta(&Delta { o, d_o: o, delta: sums }) }.unwrap();
    for t in 0..3 {
        for h in 0..2 {
            let exact: f64 = b[t * 600 + h * 300..][..300].iter().map(|x| x.to_f64() * x.to_f64()).sum();
            assert!((f64::from(delta[h * 3 + t]) / exact - 1.0).abs() < 1e-6);
        }
    }
    let mut sinks = [1.5f32, f32::NEG_INFINITY];
    let rows = [Range::plain(1, 2, 0, 0)];
    let before = b.clone();
    let o = raw(&mut b, compact, shape);
    let finish = Finish { o, lse: raw(&mut lse, (2, 1), (3, 2, 1)), sinks: per_head(&mut sinks, true), rows: &rows };
    // SAFETY: as above.
    unsafe { cpu::finish(&finish) }.unwrap();
    assert_eq!(b[..600], before[..600]);
    assert!(b[600..].iter().all(|x| x.to_f32() == 0.0));
    assert!(lse[..2].iter().all(|x| x.is_nan()));
    assert_eq!(lse[2..], [1.5, f32::NEG_INFINITY, 1.5, f32::NEG_INFINITY]);
}

/// A sink far above all scores, one far below, and none, on rows with and without keys.
#[test]
fn large_sinks() {
    let (mut q, mut k, mut v) = (vec![1f32; 12], vec![1f32; 12], vec![2f32; 12]);
    let (mut o, mut lse) = (vec![f32::NAN; 12], vec![f32::NAN; 6]);
    let mut sinks = [1e4f32, -1e4, f32::NEG_INFINITY];
    let tensor = |x: &mut [f32], dim| RawTensor::compact(x.as_mut_ptr().cast(), Dtype::F32, 2, 3, dim);
    let range = |row, pos| Range::plain(row, 1, pos, 0);
    // Row 1 has the key of position 0, row 0 (position −5) is before it.
    let rows = [
        QRange { range: range(0, -5), keys_begin: 0, keys_end: 1, mode: Mode::Only },
        QRange { range: range(1, 0), keys_begin: 1, keys_end: 2, mode: Mode::Only },
    ];
    let call = Attend {
        q: tensor(&mut q, 2),
        k: tensor(&mut k, 2),
        v: tensor(&mut v, 2),
        running: RawTensor::NONE,
        o: tensor(&mut o, 2),
        lse: tensor(&mut lse, 1),
        slopes: RawTensor::NONE,
        sinks: per_head(&mut sinks, true),
        heads: HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
        score: Score { scale: 1.0, softcap: 0.0, window_left: UNLIMITED, window_right: 0 },
        ranges: Ranges { q: &rows, k: &[range(0, 0)], pairs: &[0, 0] },
        aligned: false,
    };
    let mut scratch = Scratch::new(1);
    scratch.reserve(&Dims { head_dim: 2, value_dim: 2, dtype: Dtype::F32 });
    // SAFETY: the tensors are the vectors above.
    unsafe { cpu::attend(&call, &mut scratch) }.unwrap();
    assert_eq!(lse, [1e4, -1e4, f32::NEG_INFINITY, 1e4, 2.0, 2.0]);
    assert_eq!(o, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0]);
}

/// What is refused, and how it is said. Nothing is touched: the tensors have addresses that would fault.
#[test]
fn refusals() {
    let nowhere = |heads, dim| RawTensor::compact(std::ptr::without_provenance_mut(64), Dtype::F32, 8, heads, dim);
    let range = Range::plain(0, 8, 0, 0);
    let rows = [QRange { range, keys_begin: 0, keys_end: 1, mode: Mode::Only }];
    let good = Attend {
        q: nowhere(4, 16),
        k: nowhere(2, 16),
        v: nowhere(2, 8),
        running: RawTensor::NONE,
        o: nowhere(4, 8),
        lse: nowhere(4, 1),
        slopes: RawTensor::NONE,
        sinks: RawTensor::NONE,
        heads: HeadMap { q_offset: 0, kv_offset: 0, group: 2 },
        score: score(16, UNLIMITED, 0),
        ranges: Ranges { q: &rows, k: &[range], pairs: &[0] },
        aligned: false,
    };
    let mut scratch = Scratch::new(1);
    let mut refused = |call: Attend, text: &str| {
        // SAFETY: refused before anything is touched, which is what is tested.
        let error = unsafe { cpu::attend(&call, &mut scratch) }.unwrap_err();
        assert_eq!(error.to_string(), text);
    };
    let with = |score: Score| Attend { score, ..good };
    refused(Attend { k: nowhere(2, 15), ..good }, "k.dim is 15, expected 16");
    refused(Attend { k: RawTensor { dtype: Dtype::Bf16, ..good.k }, ..good }, "k.dtype is bf16, expected f32");
    refused(Attend { v: nowhere(3, 8), ..good }, "v.heads is 3, expected 2");
    refused(Attend { q: nowhere(4, 0), ..good }, "q.dim is 0, expected at least 1");
    refused(Attend { lse: nowhere(4, 2), ..good }, "lse.dim is 2, expected 1");
    refused(with(Score { scale: f64::NAN, ..good.score }), "scale is NaN, expected a finite number");
    refused(
        with(Score { softcap: -1.0, ..good.score }),
        "softcap is -1, expected a finite number above 0, or 0 for none",
    );
    refused(
        Attend { heads: HeadMap { q_offset: 2, ..good.heads }, ..good },
        "k.heads is kv heads 0..2, expected to hold 1..3; q head h of the call reads kv head (q_offset + h) / group",
    );
    let long = [Range::plain(1, 8, 0, 0)];
    refused(
        Attend { ranges: Ranges { k: &long, ..good.ranges }, ..good },
        "ranges.k[0].row is 1 with len 8, expected rows of k, which has 8",
    );
    let other = [Range { doc: 3, ..range }];
    refused(
        Attend { ranges: Ranges { k: &other, ..good.ranges }, ..good },
        "ranges.k[0].doc is 3, expected 0, the document of q range 0",
    );
    refused(
        Attend { ranges: Ranges { pairs: &[1], ..good.ranges }, ..good },
        "ranges.pairs of q range 0 is 1, expected an index of ranges.k, which has 1",
    );
    refused(
        Attend { ranges: Ranges { pairs: &[], ..good.ranges }, ..good },
        "ranges.q[0].keys is 0..1, expected entries of pairs, which has 0",
    );
    let stripe = [Range { block: 4, period: 3, ..range }];
    refused(
        Attend { ranges: Ranges { k: &stripe, ..good.ranges }, ..good },
        "ranges.k[0] is block 4 and period 3, expected 1 <= block <= period",
    );
    let first = [QRange { mode: Mode::First, ..rows[0] }];
    refused(
        Attend { ranges: Ranges { q: &first, ..good.ranges }, ..good },
        "running is none, expected a tensor of dim 8: the mode of ranges.q[0] needs it",
    );
    // SAFETY: as above.
    let error = unsafe { cpu::attend(&good, &mut scratch) }.unwrap_err();
    assert!(error.to_string().starts_with("scratch is"), "{error}");
    let backward = backward_call(&good, good.o, good.lse, Gradients::All, [good.q, good.q, nowhere(4, 7)]);
    // SAFETY: as above.
    let error = unsafe { cpu::attend_backward(&backward, &mut scratch) }.unwrap_err();
    assert_eq!(error.to_string(), "dv.dim is 7, expected 8");
}

/// Calls allocate nothing, in any type and pass.
#[test]
fn calls_do_not_allocate() {
    fn run<E: Element>() {
        let p = Problem { sinks: false, alibi: false, ..problem(30) };
        let mut x = vec![E::from_f64(0.5); 64 * 2 * 16];
        let mut outs: Vec<Vec<E::Acc>> = vec![vec![E::Acc::from_f64(0.0); 64 * 2 * 16]; 6];
        let t = |x: &mut [E]| RawTensor::compact(x.as_mut_ptr().cast(), E::DTYPE, 64, 2, 16);
        let q = t(&mut x);
        let mut o = vec![E::from_f64(0.0); 64 * 2 * 16];
        let mut out = outs
            .iter_mut()
            .enumerate()
            .map(|(i, x)| RawTensor::compact(x.as_mut_ptr().cast(), E::Acc::DTYPE, 64, 2, if i < 2 { 1 } else { 16 }));
        let [lse, delta, running, dq, dk, dv] = std::array::from_fn(|_| out.next().unwrap());
        let range = Range::plain(0, 64, 0, 0);
        let rows = [QRange { range, keys_begin: 0, keys_end: 1, mode: Mode::Only }];
        let call = Attend {
            q,
            k: q,
            v: q,
            running,
            o: t(&mut o),
            lse,
            slopes: RawTensor::NONE,
            sinks: RawTensor::NONE,
            heads: HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
            score: p.score,
            ranges: Ranges { q: &rows, k: &[range], pairs: &[0] },
            aligned: true,
        };
        let mut scratch = Scratch::new(1);
        scratch.reserve(&Dims { head_dim: 16, value_dim: 16, dtype: E::DTYPE });
        let blocks = [Block { dst: dq, sources_begin: 0, sources_end: 2 }];
        let sources = [dq, dk];
        let before = counting::allocations();
        // SAFETY: the tensors are the vectors above.
        unsafe {
            cpu::attend(&call, &mut scratch).unwrap();
            cpu::delta(&Delta { o: call.o, d_o: q, delta }).unwrap();
            for aligned in [false, true] {
                let call = backward_call(&Attend { aligned, ..call }, q, delta, Gradients::All, [dq, dk, dv]);
                cpu::attend_backward(&call, &mut scratch).unwrap();
            }
            cpu::transform(&Transform { blocks: &blocks, sources: &sources }).unwrap();
            cpu::finish(&Finish { o: call.o, lse, sinks: RawTensor::NONE, rows: &[range] }).unwrap();
            scratch.reserve(&Dims { head_dim: 16, value_dim: 16, dtype: E::DTYPE });
        }
        assert_eq!(counting::allocations() - before, 0, "{}", E::DTYPE);
    }
    run::<f32>();
    run::<f64>();
    run::<bf16>();
    run::<f16>();
}

mod counting {
    //! Counts the allocations of each thread.
    use std::alloc::{GlobalAlloc, Layout, System};
    use std::cell::Cell;

    struct Counting;

    std::thread_local! {
        static COUNT: Cell<usize> = const { Cell::new(0) };
    }

    pub fn allocations() -> usize {
        COUNT.get()
    }

    // SAFETY: the system's allocator, with a count that allocates nothing.
    unsafe impl GlobalAlloc for Counting {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            COUNT.set(COUNT.get() + 1);
            // SAFETY: the caller's promise is passed on.
            unsafe { System.alloc(layout) }
        }

        unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
            // SAFETY: as above.
            unsafe { System.dealloc(ptr, layout) }
        }
    }

    #[global_allocator]
    static ALLOCATOR: Counting = Counting;
}
