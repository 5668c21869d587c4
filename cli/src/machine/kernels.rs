// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels and copies of this machine, on as many threads at once as ranks have cores.

use std::{sync::Barrier, thread, time::Instant};

use cpattn::{
    Dtype, Mask, Result,
    call::{
        Attend, AttendBackward, Band, Block, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score, Transform,
    },
    kernel::cpu::{self, Scratch},
    machine::{KernelRate, KernelShape},
};

use super::{
    cases::finite,
    fit::{Sample, non_negative},
};

const HEADS: u32 = 4;

/// A call of the kernel.
struct Call {
    rows: u32,
    keys: u32,
    /// The position of the first q row; that of the first key is 0.
    first: u32,
    mask: Mask,
    /// Whether it merges into a running result.
    running: bool,
}

const fn call(rows: u32, keys: u32, mask: Mask) -> Call {
    Call { rows, keys, first: 0, mask, running: false }
}

const fn merging(rows: u32, keys: u32, first: u32, mask: Mask) -> Call {
    Call { rows, keys, first, mask, running: true }
}

/// As ring steps and all-to-alls make them: square, wide, high, short, without a mask and with its edges.
const CALLS: [Call; 14] = [
    call(512, 512, Mask::causal()),
    call(1024, 1024, Mask::causal()),
    merging(512, 512, 0, Mask::full()),
    merging(256, 1024, 0, Mask::full()),
    merging(1024, 256, 0, Mask::full()),
    call(256, 256, Mask::causal()),
    merging(256, 256, 0, Mask::full()),
    call(768, 768, Mask::full()),
    call(64, 64, Mask::causal()),
    merging(128, 512, 0, Mask::full()),
    call(512, 512, Mask::sliding(256)),
    call(1024, 1024, Mask::sliding(64)),
    // The keys of the rank before, as far as the window reaches.
    merging(512, 255, 255, Mask::sliding(256)),
    merging(256, 127, 127, Mask::sliding(128)),
];

impl Call {
    /// What its time may grow with: flops of this many for each pair, rows, keys, edges, and 1.
    fn counts(&self, flops: u64) -> [f64; 5] {
        let (q, k) = (Range::plain(0, self.rows, self.first.into(), 0), Range::plain(0, self.keys, 0, 0));
        let [pairs, edges] = [q.area(&k, self.mask), q.edges(&k, self.mask)];
        let of_heads = |n: u64| (n * u64::from(HEADS)) as f64;
        [of_heads(pairs * flops), of_heads(self.rows.into()), of_heads(self.keys.into()), of_heads(edges), 1.0]
    }
}

/// The best times so far of every call, on several threads at once.
pub struct Kernels {
    shapes: Vec<(Dtype, usize)>,
    threads: Vec<(Vec<Bench>, Vec<f64>)>,
}

impl Kernels {
    pub fn new(shapes: &[(Dtype, usize)], threads: usize) -> Self {
        let benches = || shapes.iter().map(|&(dtype, dim)| Bench::new(dtype, dim)).collect();
        let slots = shapes.len() * 2 * CALLS.len();
        let threads = (0..threads).map(|_| (benches(), vec![f64::INFINITY; slots])).collect();
        Self { shapes: shapes.to_vec(), threads }
    }

    /// Every call of every shape again.
    pub fn round(&mut self) -> Result<()> {
        let barrier = Barrier::new(self.threads.len());
        thread::scope(|scope| {
            let begin = &barrier;
            let each = self.threads.iter_mut();
            let threads: Vec<_> = each.map(|(b, best)| scope.spawn(move || best_times(b, best, begin))).collect();
            threads.into_iter().try_for_each(|t| t.join().expect("a thread that ended well"))
        })
    }

    /// Figures of both directions of every shape.
    pub fn rates(&self) -> Vec<KernelRate> {
        let slots = self.threads[0].1.len();
        let mut times = (0..slots).map(|i| self.threads.iter().map(|t| t.1[i]).fold(f64::INFINITY, f64::min));
        let shapes = self.shapes.iter().flat_map(|&shape| [(shape, false), (shape, true)]);
        shapes.map(|((dtype, dim), backward)| fitted(dtype, dim, backward, &mut times)).collect()
    }
}

fn fitted(dtype: Dtype, dim: usize, backward: bool, times: &mut impl Iterator<Item = f64>) -> KernelRate {
    let flops = 2 * dim as u64 * if backward { 5 } else { 2 };
    let samples: Vec<Sample> = CALLS.iter().map(|c| c.counts(flops)).zip(times).collect();
    let [flop, row, key, edge, call] = non_negative(&samples);
    let shape = KernelShape { dtype, head_dim: dim, value_dim: dim, backward };
    let kernel = KernelRate { shape, rate: 1.0 / flop, row, key, edge, call };
    for (([flops, rows, keys, edges, _], t), c) in samples.iter().zip(&CALLS) {
        let error = 100.0 * (kernel.seconds(*flops, *rows, *keys, *edges) / t - 1.0);
        let Call { rows, keys, first, mask, .. } = c;
        eprintln!("{shape} {rows} rows from {first}, {keys} keys, {mask:?}: {:.3} ms, fitted {error:+.1} %", t * 1e3);
    }
    kernel
}

fn best_times(benches: &mut [Bench], best: &mut [f64], barrier: &Barrier) -> Result<()> {
    barrier.wait();
    let mut slot = best.iter_mut();
    for bench in benches {
        for backward in [false, true] {
            for call in &CALLS {
                let slot = slot.next().expect("a slot for each");
                for _ in 0..3 {
                    *slot = slot.min(bench.run(call, backward)?);
                }
            }
        }
    }
    Ok(())
}

/// Tensors of one shape, for the largest call.
struct Bench {
    dtype: Dtype,
    dim: usize,
    inputs: [Vec<f32>; 4],
    outputs: [Vec<f32>; 6],
    scratch: Scratch,
}

impl Bench {
    fn new(dtype: Dtype, dim: usize) -> Self {
        let most = CALLS.iter().map(|c| c.rows.max(c.keys)).max().unwrap_or(0) as usize * HEADS as usize;
        let mut random = fastrand::Rng::with_seed(1);
        let mut numbers = || finite(&mut random, most * dim, dtype);
        let inputs = [numbers(), numbers(), numbers(), numbers()];
        let outputs = [dim, dim, dim, dim, 2, 1].map(|d| vec![0.0; most * d]);
        let mut scratch = Scratch::new(1);
        scratch.reserve(dtype, dim as u32, dim as u32);
        Self { dtype, dim, inputs, outputs, scratch }
    }

    /// Seconds of one call.
    fn run(&mut self, call: &Call, backward: bool) -> Result<f64> {
        let &Call { rows, keys, first, mask, running } = call;
        let (dtype, dim) = (self.dtype, self.dim as u32);
        let tensor = |ptr: *mut u8, dtype, tokens: u32, dim| RawTensor::compact(ptr, dtype, tokens.into(), HEADS, dim);
        let inputs = self.inputs.each_mut().map(|x| x.as_mut_ptr().cast());
        let [q, k, v, d_o] =
            [(0, rows), (1, keys), (2, keys), (3, rows)].map(|(i, n)| tensor(inputs[i], dtype, n, dim));
        let [o, run, dk, dv, run_lse, lse] = self.outputs.each_mut().map(|x| x.as_mut_ptr().cast::<u8>());
        let (run, run_lse) = (tensor(run, Dtype::F32, rows, dim), tensor(run_lse, Dtype::F32, rows, 2));
        let lse = tensor(lse, Dtype::F32, rows, 1);
        let mode = if running { Mode::Merge } else { Mode::Only };
        let q_ranges = [QRange {
            range: Range::plain(0, rows, first.into(), 0),
            document: [0; 2],
            keys_begin: 0,
            keys_end: 1,
            mode,
        }];
        let ranges = Ranges {
            q: &q_ranges,
            k: &[Range::plain(0, keys, 0, 0)],
            pairs: &[Pair { k: 0, band: 0 }],
            bands: &[Band::WHOLE],
        };
        let heads = HeadMap { q_offset: 0, kv_offset: 0, group: 1 };
        let score =
            Score { scale: 0.1, softcap: 0.0, window_left: mask.left_limit(), window_right: mask.right_limit() };
        let o = tensor(o, dtype, rows, dim);
        let forward =
            Attend { running: run, running_lse: run_lse, lse, ..Attend::new([q, k, v, o], heads, score, ranges) };
        let mut gradients = AttendBackward::new([q, k, v, d_o], heads, score, ranges);
        (gradients.lse, gradients.delta, gradients.dq) = (lse, lse, run);
        (gradients.dk, gradients.dv) = (tensor(dk, Dtype::F32, keys, dim), tensor(dv, Dtype::F32, keys, dim));
        let start = Instant::now();
        if backward {
            // SAFETY: all tensors are this bench's vectors, large enough for the largest call, and used by nothing
            // else.
            unsafe { cpu::attend_backward(&gradients, &mut self.scratch) }?;
        } else {
            // SAFETY: as above.
            unsafe { cpu::attend(&forward, &mut self.scratch) }?;
        }
        Ok(start.elapsed().as_secs_f64())
    }
}

/// Bytes per second, read and written, of packing rows of some heads of a tensor.
pub fn copy(rounds: usize) -> Result<f64> {
    let (tokens, heads, dim) = (1024u64, 8u32, 64u32);
    let mut from = vec![1.0f32; tokens as usize * (heads * dim) as usize];
    let mut to = vec![0.0f32; from.len() / 2];
    let source = RawTensor::compact(from.as_mut_ptr().cast(), Dtype::F32, tokens, heads, dim).heads(2, heads / 2);
    let dst = RawTensor::compact(to.as_mut_ptr().cast(), Dtype::F32, tokens, heads / 2, dim);
    let blocks = [Block { dst, sources_begin: 0, sources_end: 1 }];
    let mut best = f64::INFINITY;
    for _ in 0..rounds {
        let start = Instant::now();
        // SAFETY: two vectors of this function.
        unsafe { cpu::transform(&Transform { blocks: &blocks, sources: &[source] }) }?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * size_of_val(to.as_slice()) as f64 / best)
}
