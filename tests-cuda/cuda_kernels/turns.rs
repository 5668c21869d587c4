// SPDX-License-Identifier: MIT OR Apache-2.0
//! The fused backward on lists that no planner makes, against the kernels that make queries and keys apart.
//!
//! A q range may list a key range twice, which counts it twice. Tiles of keys then add to one dq more than once, with
//! others in between that must wait for the last time.

use crate::case::{encode, random};
use crate::device::{Device, Memory};
use crate::slow::{self, Turn};
use cpattn::Dtype;
use cpattn::call::{AttendBackward, Band, Gradients, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score};
use cpattn::kernel::cuda::{Cuda, Family};

/// A compact tensor of random numbers.
struct Random {
    raw: RawTensor,
    memory: Memory,
}

fn tensor(device: &Device, dtype: Dtype, tokens: usize, heads: usize, dim: usize, seed: u64) -> Random {
    let bytes: Vec<u8> = random(tokens * heads * dim, seed).into_iter().flat_map(|x| encode(dtype, x)).collect();
    let memory = device.upload(&bytes);
    Random { raw: memory.tensor(dtype, tokens, heads as u32, dim as u32, heads * dim), memory }
}

fn close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(0f32, |a, x| a.max(x.abs()));
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= 1e-3 * scale, "{what}: element {i} is {a}, not {b}");
    }
}

/// Ranges, and what reads what.
struct Job<'a> {
    heads: usize,
    tokens: (usize, usize),
    score: Score,
    q: &'a [QRange],
    k: &'a [Range],
    pairs: &'a [Pair],
}

/// Both sides at once against one after the other; and twice the same bits. Returns dq, dk and dv.
fn check(device: &Device, dtype: Dtype, dim: usize, job: &Job) -> [Vec<f32>; 3] {
    let (tq, tk) = job.tokens;
    let [q, d_o] = [1, 2].map(|seed| tensor(device, dtype, tq, job.heads, dim, seed));
    let [k, v] = [3, 4].map(|seed| tensor(device, dtype, tk, 1, dim, seed));
    // Not what a forward would give, but as good.
    let [lse, delta] = [5, 6].map(|seed| tensor(device, Dtype::F32, tq, job.heads, 1, seed));
    let run = |parts: &[Gradients]| {
        let dq = tensor(device, Dtype::F32, tq, job.heads, dim, 7);
        let [dk, dv] = [8, 9].map(|seed| tensor(device, Dtype::F32, tk, 1, dim, seed));
        for &gradients in parts {
            let call = AttendBackward {
                lse: lse.raw,
                delta: delta.raw,
                dq: dq.raw,
                dk: dk.raw,
                dv: dv.raw,
                gradients,
                ..AttendBackward::new(
                    [q.raw, k.raw, v.raw, d_o.raw],
                    HeadMap { q_offset: 0, kv_offset: 0, group: job.heads.max(1) as u32 },
                    job.score,
                    Ranges { q: job.q, k: job.k, pairs: job.pairs, bands: &[Band::WHOLE] },
                )
            };
            let bytes = device.attend_backward_bytes(&call);
            let mut kernels = device.kernels(bytes, 1);
            // SAFETY: all tensors live until the stream is synchronised, by the downloads below.
            unsafe { device.attend_backward(&call, &mut kernels, device.stream) }.expect("a legal call");
        }
        [dq, dk, dv].map(|t| device.download_f32(&t.memory))
    };
    let (fused, apart) = (run(&[Gradients::All]), run(&[Gradients::Queries, Gradients::Keys]));
    for ((what, fused), apart) in ["dq", "dk", "dv"].iter().zip(&fused).zip(&apart) {
        close(what, fused, apart);
    }
    assert!(run(&[Gradients::All]) == fused, "two runs differ");
    fused
}

fn range(row: i64, len: u32, pos: i64) -> Range {
    Range::plain(row, len, pos, 0)
}

fn q_range(range: Range, keys_begin: u32, keys_end: u32, mode: Mode) -> QRange {
    QRange { range, document: [0; 2], keys_begin, keys_end, mode }
}

#[test]
fn pairs_may_repeat() {
    if slow::left_out(Turn::First) {
        return;
    }
    let Some(device) = Device::open() else { return };
    let job = Job {
        heads: 3,
        tokens: (300, 700),
        score: Score { scale: 0.125, softcap: 0.0, window_left: 330, window_right: 60 },
        q: &[
            q_range(range(100, 200, 500), 0, 6, Mode::Only),
            q_range(range(0, 100, 400), 4, 11, Mode::Last),
            // Entries of a list that others have too.
            q_range(range(100, 0, 0), 0, 11, Mode::First),
        ],
        k: &[range(0, 200, 0), range(200, 0, 0), range(200, 350, 200), range(550, 150, 550)],
        pairs: &[2, 2, 0, 1, 0, 3, /**/ 3, 0, 3, 2, 3].map(Pair::of),
    };
    check(&device, Dtype::Bf16, 64, &job);
    check(&device, Dtype::F16, 128, &job);
    let by_sm_80 = Device::of(Cuda::with_family(0, Family::Sm80)).expect("every device runs them");
    check(&by_sm_80, Dtype::Bf16, 256, &job);
    // At 256 the kernel for `sm_90a` makes ds from rounded probabilities, which the other does not: f16, which rounds
    // less, and probabilities that are small enough for f16.
    let small = Job { score: Score { scale: 0.03, ..job.score }, ..job };
    check(&device, Dtype::F16, 256, &small);
}

/// A call that holds kv heads and none of the q heads that read them owes their gradients zeros.
#[test]
fn no_q_heads_leave_zeros() {
    let Some(device) = Device::open() else { return };
    let job = Job {
        heads: 0,
        tokens: (100, 200),
        score: Score { scale: 0.125, softcap: 0.0, window_left: i64::MAX, window_right: 0 },
        q: &[q_range(range(0, 100, 100), 0, 1, Mode::Only)],
        k: &[range(0, 200, 0)],
        pairs: &[Pair { k: 0, band: 0 }],
    };
    let [dq, dk, dv] = check(&device, Dtype::Bf16, 64, &job);
    assert!(dq.is_empty() && dk.len() == 200 * 64 && dk.iter().chain(&dv).all(|&x| x == 0.0));
}

/// Steps are prepared some at a time. Here a tile of keys has many more, from long q ranges and from short ones, and
/// where they are cut the round is in the midst of a run, of the heads of a tile, or between two runs.
#[test]
fn tiles_meet_more_than_is_prepared_at_once() {
    let Some(device) = Device::open() else { return };
    let k: Vec<Range> = (0..8i64).map(|i| range(40 * i, 40 - 5 * (i as u32 % 2), 40 * i)).collect();
    let pairs: Vec<Pair> = (0..8).map(Pair::of).collect();
    let (mut row, mut q) = (0, Vec::new());
    for len in [410, 1, 70, 64, 3, 200, 65] {
        q.push(q_range(range(row, len, row % 300), 0, 8, if len == 64 { Mode::Merge } else { Mode::First }));
        row += i64::from(len);
    }
    let score = Score { scale: 0.125, softcap: 0.0, window_left: i64::MAX, window_right: i64::MAX };
    let job = Job { heads: 3, tokens: (row as usize, 320), score, q: &q, k: &k, pairs: &pairs };
    check(&device, Dtype::F16, 64, &job);
    check(&device, Dtype::Bf16, 72, &job);
}
