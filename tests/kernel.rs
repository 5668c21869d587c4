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
use cpattn::kernel::{Attend, AttendBackward, Gradients, HeadMap, Mode, QRange, Range, Ranges, RawTensor, Score};
use cpattn::{Dtype, Element};
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
                (&[Gradients::Queries, Gradients::Keys][..], p.seed % 2 == 0),
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
