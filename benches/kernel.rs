// SPDX-License-Identifier: MIT OR Apache-2.0
//! Speed of the CPU kernels: one document, 8 heads of 64, one worker.
//!
//! Throughput counts multiplications and additions of the matrix products (elements per second are floating-point
//! operations): `2 · pairs · (head_dim + value_dim)` per head forward and 2.5 times that backward, for the allowed
//! pairs only.

use cpattn::Dtype;
use cpattn::call::{
    Attend, AttendBackward, Band, Dropout, DropoutMask, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score,
};
use cpattn::kernel::cpu::{self, Scratch};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;

const HEADS: u32 = 8;
const DIM: u32 = 64;

fn numbers(n: usize, mut seed: u64) -> Vec<f32> {
    (0..n)
        .map(|_| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

fn kernel(c: &mut Criterion) {
    for tokens in [512, 2048] {
        let n = tokens * (HEADS * DIM) as usize;
        let inputs: Vec<Vec<f32>> = (0..4).map(|i| numbers(n, i + 1)).collect();
        let rounded: Vec<Vec<bf16>> = inputs.iter().map(|x| x.iter().map(|&x| bf16::from_f32(x)).collect()).collect();
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for (mask, right) in [("full", i64::MAX), ("causal", 0)] {
                one(c, tokens, dtype, (mask, right, None), &inputs, &rounded);
            }
            let mask = DropoutMask::new(0.1, 1).unwrap();
            let dropout = Some(Dropout { mask, q_tokens: &[0], k_tokens: &[0] });
            one(c, tokens, dtype, ("causal dropout", 0, dropout), &inputs, &rounded);
        }
    }
}

fn one(
    c: &mut Criterion,
    tokens: usize,
    dtype: Dtype,
    (mask, right, dropout): (&str, i64, Option<Dropout<'static>>),
    inputs: &[Vec<f32>],
    rounded: &[Vec<bf16>],
) {
    let tensor = |ptr: *mut u8, dtype, dim| RawTensor::compact(ptr, dtype, tokens as u64, HEADS, dim);
    let input = |i: usize| match dtype {
        Dtype::F32 => tensor(inputs[i].as_ptr().cast_mut().cast(), dtype, DIM),
        _ => tensor(rounded[i].as_ptr().cast_mut().cast(), dtype, DIM),
    };
    let n = tokens * (HEADS * DIM) as usize;
    let mut outputs: Vec<Vec<f32>> = (0..4).map(|_| vec![0.0; n]).collect();
    let mut sums: Vec<Vec<f32>> = (0..2).map(|_| vec![0.0; tokens * HEADS as usize]).collect();
    let mut out = outputs.iter_mut().map(|x| x.as_mut_ptr().cast::<u8>());
    let [o, dq, dk, dv] = std::array::from_fn(|_| out.next().unwrap());
    let (lse, delta) = (sums[0].as_mut_ptr().cast(), sums[1].as_mut_ptr().cast());
    let mut scratch = Scratch::new(1);
    scratch.reserve(dtype, DIM, DIM);
    let range = Range::plain(0, tokens as u32, 0, 0);
    let q = [QRange { range, document: [0; 2], keys_begin: 0, keys_end: 1, mode: Mode::Only }];
    let ranges = Ranges { q: &q, k: &[range], pairs: &[Pair { k: 0, band: 0 }], bands: &[Band::WHOLE] };
    let heads = HeadMap { q_offset: 0, kv_offset: 0, group: 1 };
    let score = Score { scale: 0.125, softcap: 0.0, window_left: i64::MAX, window_right: right };
    let forward = Attend {
        lse: tensor(lse, Dtype::F32, 1),
        dropout,
        ..Attend::new([input(0), input(1), input(2), tensor(o, dtype, DIM)], heads, score, ranges)
    };
    let backward = AttendBackward {
        lse: forward.lse,
        delta: tensor(delta, Dtype::F32, 1),
        dq: tensor(dq, Dtype::F32, DIM),
        dk: tensor(dk, Dtype::F32, DIM),
        dv: tensor(dv, Dtype::F32, DIM),
        dropout,
        ..AttendBackward::new([forward.q, forward.k, forward.v, input(3)], heads, score, ranges)
    };
    let pairs = if right == 0 { tokens * (tokens + 1) / 2 } else { tokens * tokens };
    let work = (2 * pairs * 2 * (DIM * HEADS) as usize) as u64;
    let name = |pass: &str| format!("{pass} {dtype} {mask}");
    let mut group = c.benchmark_group("kernel");
    group.sample_size(10);
    group.throughput(Throughput::Elements(work));
    group.bench_function(BenchmarkId::new(name("forward"), tokens), |b| {
        // SAFETY: all tensors are the vectors above, alive and used by nothing else.
        b.iter(|| unsafe { cpu::attend(&forward, &mut scratch) }.unwrap());
    });
    group.throughput(Throughput::Elements(work * 5 / 2));
    group.bench_function(BenchmarkId::new(name("backward"), tokens), |b| {
        // SAFETY: as above.
        b.iter(|| unsafe { cpu::attend_backward(&backward, &mut scratch) }.unwrap());
    });
    group.finish();
}

criterion_group!(benches, kernel);
criterion_main!(benches);
