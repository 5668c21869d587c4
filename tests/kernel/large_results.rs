// SPDX-License-Identifier: MIT OR Apache-2.0
//! Results of many megabytes.
//!
//! On x86-64 some of them are written around the caches, where rows are whole lines. The same call with results one
//! element further, whose rows are not, writes them as small ones: both have the same bits, by one worker and by two,
//! and nothing is written beside them.

use crate::harness::*;
use crate::slow::{self, Turn};
use crate::threads::threaded;
use cpattn::Element;
use cpattn::call::{Attend, AttendBackward, Band, Delta, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor};
use cpattn::kernel::cpu::{self, Scratch};
use half::bf16;

const HEADS: usize = 8;
const DIM: usize = 128;
/// What no result is.
const POISON: f64 = 77.0;

/// A tensor `shift` elements behind a boundary of lines, with numbers around it.
struct Results<T> {
    memory: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Element> Results<T> {
    fn new(len: usize, shift: usize) -> Self {
        let memory = vec![T::from_f64(POISON); len + 128];
        let start = memory.as_ptr().align_offset(64) + shift;
        Self { memory, start, len }
    }

    fn raw(&mut self, dim: usize) -> RawTensor {
        let rows = self.len / dim / HEADS;
        let at = self.memory[self.start..].as_mut_ptr().cast();
        RawTensor::compact(at, T::DTYPE, rows as u64, HEADS as u32, dim as u32)
    }

    fn bits(&self) -> Vec<u64> {
        let (inside, end) = (self.start..self.start + self.len, self.start + self.len);
        let mut outside = self.memory[..self.start].iter().chain(&self.memory[end..]);
        assert!(outside.all(|x| x.to_f64() == POISON), "written beside the results");
        self.memory[inside].iter().map(|x| x.to_f64().to_bits()).collect()
    }
}

/// o, lse, dq, dk and dv under a window, of results that begin `shift` elements behind a boundary.
fn run<E: Element>(inputs: &mut [Vec<E>; 4], shift: usize, workers: usize) -> [Vec<u64>; 5] {
    let tokens = inputs[0].len() / HEADS / DIM;
    let [q, k, v, d_o] = inputs
        .each_mut()
        .map(|x| RawTensor::compact(x.as_mut_ptr().cast(), E::DTYPE, tokens as u64, HEADS as u32, DIM as u32));
    let mut o = Results::<E>::new(tokens * HEADS * DIM, shift);
    let [mut lse, mut delta] = [(); 2].map(|()| Results::<E::Acc>::new(tokens * HEADS, shift));
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| Results::<E::Acc>::new(tokens * HEADS * DIM, shift));
    let range = Range::plain(0, tokens as u32, 0, 0);
    let rows = [QRange { range, document: LONG, keys_begin: 0, keys_end: 1, mode: Mode::Only }];
    let ranges = Ranges { q: &rows, k: &[range], pairs: &[Pair { k: 0, band: 0 }], bands: &[Band::WHOLE] };
    let (heads, score) = (HeadMap { q_offset: 0, kv_offset: 0, group: 1 }, score(DIM, 40, 0));
    let mut scratch = threaded(Scratch::new(workers));
    scratch.reserve(E::DTYPE, DIM as u32, DIM as u32);
    let forward = Attend { lse: lse.raw(1), ..Attend::new([q, k, v, o.raw(DIM)], heads, score, ranges) };
    let sums = Delta::new([forward.o, d_o, delta.raw(1)]);
    let backward = AttendBackward {
        lse: forward.lse,
        delta: sums.delta,
        dq: dq.raw(DIM),
        dk: dk.raw(DIM),
        dv: dv.raw(DIM),
        ..AttendBackward::new([q, k, v, d_o], heads, score, ranges)
    };
    // SAFETY: the tensors are those above, alive and used by no other code.
    unsafe {
        cpu::attend(&forward, &mut scratch).unwrap();
        cpu::delta(&sums).unwrap();
        cpu::attend_backward(&backward, &mut scratch).unwrap();
    }
    [o.bits(), lse.bits(), dq.bits(), dk.bits(), dv.bits()]
}

/// `tokens` are as many as make each result of the type at least 8 MiB, those of the sums' type too.
fn check<E: Element>(tokens: usize) {
    assert!(tokens * HEADS * DIM * E::DTYPE.size() >= 8 << 20);
    let mut random = Random::new(3);
    let mut inputs = [(); 4].map(|()| {
        (0..tokens * HEADS * DIM).map(|_| E::from_f64(random.below(4001) as f64 / 1000.0 - 2.0)).collect::<Vec<_>>()
    });
    // Some results are not numbers, however they are written.
    inputs[0][5 * DIM] = E::from_f64(f64::NAN);
    let expected = run(&mut inputs, 1, 1);
    for (shift, workers) in [(0, 1), (0, 2), (1, 2)] {
        let found = run(&mut inputs, shift, workers);
        for (name, (found, expected)) in ["o", "lse", "dq", "dk", "dv"].iter().zip(found.iter().zip(&expected)) {
            let first = found.iter().zip(expected).position(|(a, b)| a != b);
            assert_eq!(first, None, "{name}: {} tokens of {}, {workers} workers", tokens, E::DTYPE);
        }
    }
}

#[test]
fn bf16_results() {
    if slow::left_out(Turn::Every) {
        return;
    }
    check::<bf16>(4096);
}

#[test]
fn f32_results() {
    if slow::left_out(Turn::Every) {
        return;
    }
    check::<f32>(2048);
}
