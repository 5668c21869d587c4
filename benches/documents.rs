// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cost of long and short documents in one call: the time of a pack over that of its long and its short documents
//! in a call each, in turn, on one worker. Medians of ratios, each of two measurements beside each other.
//!
//! `cargo bench --bench documents [-- --rounds N]`

use cpattn::Dtype;
use cpattn::call::{Attend, AttendBackward, HeadMap, Mode, QRange, Range, Ranges, RawTensor, Score};
use cpattn::kernel::cpu::{self, Dims, Isa, Scratch};
use half::bf16;
use std::time::Instant;

const HEADS: u32 = 8;
const KV_HEADS: u32 = 2;
const DIM: u32 = 64;

/// The tensors of a pack: q, do, k and v, then o, dq, dk and dv, then lse and delta.
struct Tensors {
    inputs: [Vec<u8>; 4],
    results: [Vec<f32>; 4],
    sums: [Vec<f32>; 2],
    rows: u64,
    dtype: Dtype,
}

impl Tensors {
    fn new(rows: u64, dtype: Dtype) -> Self {
        let mut seed = 1u64;
        let mut number = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        let mut numbers = |heads: u32| -> Vec<u8> {
            let numbers = (0..rows * u64::from(heads * DIM)).map(|_| number());
            match dtype {
                Dtype::F32 => numbers.flat_map(f32::to_ne_bytes).collect(),
                _ => numbers.flat_map(|x| bf16::from_f32(x).to_ne_bytes()).collect(),
            }
        };
        let inputs = [HEADS, HEADS, KV_HEADS, KV_HEADS].map(&mut numbers);
        let results =
            [HEADS, HEADS, KV_HEADS, KV_HEADS].map(|heads| vec![0.0; (rows * u64::from(heads * DIM)) as usize]);
        let sums = [(); 2].map(|()| vec![0.0; (rows * u64::from(HEADS)) as usize]);
        Self { inputs, results, sums, rows, dtype }
    }

    /// Seconds of a forward, and of a backward, of some documents.
    fn run(&mut self, documents: &[Range], scratch: &mut Scratch) -> [f64; 2] {
        let q: Vec<_> = (0..)
            .zip(documents)
            .map(|(i, &range)| QRange { range, keys_begin: i, keys_end: i + 1, mode: Mode::Only })
            .collect();
        let pairs: Vec<u32> = (0..documents.len() as u32).collect();
        let ranges = Ranges { q: &q, k: documents, pairs: &pairs };
        let rows = self.rows;
        let tensor = |ptr: *mut u8, dtype, heads, dim| RawTensor::compact(ptr, dtype, rows, heads, dim);
        let [q, d_o, k, v] = [0, 1, 2, 3].map(|i: usize| {
            let heads = if i < 2 { HEADS } else { KV_HEADS };
            tensor(self.inputs[i].as_mut_ptr(), self.dtype, heads, DIM)
        });
        let [o, dq, dk, dv] = [0, 1, 2, 3].map(|i: usize| {
            let heads = if i < 2 { HEADS } else { KV_HEADS };
            let dtype = if i == 0 { self.dtype } else { Dtype::F32 };
            tensor(self.results[i].as_mut_ptr().cast(), dtype, heads, DIM)
        });
        let [lse, delta] = self.sums.each_mut().map(|x| tensor(x.as_mut_ptr().cast(), Dtype::F32, HEADS, 1));
        let heads = HeadMap { q_offset: 0, kv_offset: 0, group: HEADS / KV_HEADS };
        let score = Score { scale: 0.125, softcap: 0.0, window_left: i64::MAX, window_right: 0 };
        let forward = Attend { lse, ..Attend::new([q, k, v, o], heads, score, ranges) };
        let backward =
            AttendBackward { lse, delta, dq, dk, dv, ..AttendBackward::new([q, k, v, d_o], heads, score, ranges) };
        let begin = Instant::now();
        // SAFETY: the tensors are the vectors of `self`, as long as their shapes say, and used by no other code.
        unsafe { cpu::attend(&forward, scratch) }.expect("a forward");
        let middle = Instant::now();
        // SAFETY: as above.
        unsafe { cpu::attend_backward(&backward, scratch) }.expect("a backward");
        [(middle - begin).as_secs_f64(), middle.elapsed().as_secs_f64()]
    }
}

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_unstable_by(f64::total_cmp);
    x[x.len() / 2]
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let rounds = args.iter().position(|a| a == "--rounds").and_then(|i| args.get(i + 1)?.parse().ok()).unwrap_or(21);
    let isa = Isa::chosen().expect("an instruction set");
    println!(
        "{isa}, {HEADS} heads, {KV_HEADS} kv heads of {DIM}, causal: the pack over its long and its short documents"
    );
    // Long documents, and how many short ones of which length.
    let packs: [(&[u32], u32, u32); 4] =
        [(&[1024], 3072, 2), (&[2048], 64, 20), (&[800, 900, 1500], 100, 30), (&[1024; 4], 0, 0)];
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for (long, count, short) in packs {
            let (mut documents, mut row) = (Vec::new(), 0);
            for &len in long.iter().chain(std::iter::repeat_n(&short, count as usize)) {
                documents.push(Range::plain(row, len, 0, documents.len() as u32));
                row += i64::from(len);
            }
            let mut tensors = Tensors::new(row as u64, dtype);
            let mut scratch = Scratch::new(1);
            scratch.reserve(&Dims { head_dim: DIM, value_dim: DIM, dtype });
            let (mut ratios, mut seconds) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2]);
            for round in 0..=rounds {
                let together = tensors.run(&documents, &mut scratch);
                let a = tensors.run(&documents[..long.len()], &mut scratch);
                let b = tensors.run(&documents[long.len()..], &mut scratch);
                // The first touches the memory.
                for i in (0..2).filter(|_| round > 0) {
                    ratios[i].push(together[i] / (a[i] + b[i]));
                    seconds[i].push(together[i]);
                }
            }
            let [f, b] = ratios.map(median);
            let [f_ms, b_ms] = seconds.map(|x| 1e3 * median(x));
            println!(
                "{dtype} {long:?} and {count} of {short}: forward {f:.2} ({f_ms:.1} ms), backward {b:.2} ({b_ms:.1} ms)"
            );
        }
    }
}
