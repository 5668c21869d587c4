// SPDX-License-Identifier: MIT OR Apache-2.0
//! Single calls of the CPU kernels over a pack of documents, timed: for benchmarks.

use cpattn::Dtype;
use cpattn::call::{Attend, AttendBackward, Band, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score};
use cpattn::kernel::cpu::{self, Scratch};
use half::{bf16, f16};
use std::time::Instant;

/// The properties of a pack except its documents.
#[derive(Clone, Copy)]
pub struct Shape {
    pub heads: u32,
    pub kv_heads: u32,
    pub dim: u32,
    pub dtype: Dtype,
    pub causal: bool,
}

/// Documents of some lengths, one after the other.
pub fn documents(lengths: impl IntoIterator<Item = u32>) -> (Vec<Range>, u64) {
    let (mut documents, mut row) = (Vec::new(), 0);
    for len in lengths {
        documents.push(Range::plain(row, len, 0, documents.len() as u32));
        row += i64::from(len);
    }
    (documents, row as u64)
}

/// The tensors of a pack: q, do, k and v, then o, dq, dk and dv, then lse and delta.
pub struct Tensors {
    inputs: [Vec<u8>; 4],
    results: [Vec<f32>; 4],
    sums: [Vec<f32>; 2],
    rows: u64,
    shape: Shape,
}

impl Tensors {
    pub fn new(rows: u64, shape: Shape) -> Self {
        let Shape { heads, kv_heads, dim, dtype, .. } = shape;
        let mut seed = 1u64;
        let mut number = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        let mut numbers = |heads: u32| -> Vec<u8> {
            let numbers = (0..rows * u64::from(heads * dim)).map(|_| number());
            match dtype {
                Dtype::F32 => numbers.flat_map(f32::to_ne_bytes).collect(),
                Dtype::F16 => numbers.flat_map(|x| f16::from_f32(x).to_ne_bytes()).collect(),
                _ => numbers.flat_map(|x| bf16::from_f32(x).to_ne_bytes()).collect(),
            }
        };
        let inputs = [heads, heads, kv_heads, kv_heads].map(&mut numbers);
        let results =
            [heads, heads, kv_heads, kv_heads].map(|heads| vec![0.0; (rows * u64::from(heads * dim)) as usize]);
        let sums = [(); 2].map(|()| vec![0.0; (rows * u64::from(heads)) as usize]);
        Self { inputs, results, sums, rows, shape }
    }

    /// Seconds of a forward, and of a backward, of some documents.
    pub fn run(&mut self, documents: &[Range], scratch: &mut Scratch) -> [f64; 2] {
        let q: Vec<_> = (0..)
            .zip(documents)
            .map(|(i, &range)| QRange {
                range,
                document: [range.len; 2],
                keys_begin: i,
                keys_end: i + 1,
                mode: Mode::Only,
            })
            .collect();
        let pairs: Vec<Pair> = (0..documents.len() as u32).map(Pair::of).collect();
        let ranges = Ranges { q: &q, k: documents, pairs: &pairs, bands: &[Band::WHOLE] };
        let Self { rows, shape: Shape { heads, kv_heads, dim, dtype, causal }, .. } = *self;
        let tensor = |ptr: *mut u8, dtype, heads, dim| RawTensor::compact(ptr, dtype, rows, heads, dim);
        let [q, d_o, k, v] = [0, 1, 2, 3]
            .map(|i: usize| tensor(self.inputs[i].as_mut_ptr(), dtype, if i < 2 { heads } else { kv_heads }, dim));
        let [o, dq, dk, dv] = [0, 1, 2, 3].map(|i: usize| {
            let dtype = if i == 0 { dtype } else { Dtype::F32 };
            tensor(self.results[i].as_mut_ptr().cast(), dtype, if i < 2 { heads } else { kv_heads }, dim)
        });
        let [lse, delta] = self.sums.each_mut().map(|x| tensor(x.as_mut_ptr().cast(), Dtype::F32, heads, 1));
        let map = HeadMap { q_offset: 0, kv_offset: 0, group: heads / kv_heads };
        let window_right = if causal { 0 } else { i64::MAX };
        let score = Score { scale: 0.125, softcap: 0.0, window_left: i64::MAX, window_right };
        let forward = Attend { lse, ..Attend::new([q, k, v, o], map, score, ranges) };
        let backward =
            AttendBackward { lse, delta, dq, dk, dv, ..AttendBackward::new([q, k, v, d_o], map, score, ranges) };
        let begin = Instant::now();
        // SAFETY: the tensors are the vectors of `self`, as long as their shapes say, and used by no other code.
        unsafe { cpu::attend(&forward, scratch) }.expect("a forward");
        let middle = Instant::now();
        // SAFETY: as above.
        unsafe { cpu::attend_backward(&backward, scratch) }.expect("a backward");
        [(middle - begin).as_secs_f64(), middle.elapsed().as_secs_f64()]
    }
}
