// SPDX-License-Identifier: MIT OR Apache-2.0
//! Long and short documents in one call: each is computed as it is alone, to the bit, whatever the others take.
//!
//! Where an instruction set has matrix units, long documents take these and short ones vectors; a choice for the whole
//! call would give the short ones, or the long ones, the bits of another sum. Nor do bits depend on the number of
//! workers.

use crate::harness::*;
use crate::slow::{self, Turn};
use crate::threads::Threads;
use cpattn::Element;
use cpattn::call::{Attend, AttendBackward, Band, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor};
use cpattn::kernel::cpu::{self, Isa, Scratch};
use half::{bf16, f16};
use std::sync::Arc;

const DIM: usize = 40;
const LENGTHS: [u32; 9] = [2, 700, 9, 1, 330, 40, 2, 2, 530];

const NAMES: [&str; 5] = ["o", "lse", "dq", "dk", "dv"];

/// q, do, k and v of all documents, one after the other.
struct Pack<E> {
    inputs: [Vec<E>; 4],
    heads: usize,
    kv_heads: usize,
    window: (i64, i64),
}

/// How documents are run.
#[derive(Clone, Copy)]
struct Way {
    /// Each is two q ranges and two k ranges, the second half first.
    cut: bool,
    workers: usize,
    isa: Isa,
}

/// o, lse, dq, dk and dv as bits.
type Results = [Vec<u64>; 5];

const ROWS: usize = {
    let (mut sum, mut i) = (0, 0);
    while i < LENGTHS.len() {
        sum += LENGTHS[i] as usize;
        i += 1;
    }
    sum
};

fn raw<T: Element>(x: &mut [T], dim: usize) -> RawTensor {
    RawTensor::compact(x.as_mut_ptr().cast(), T::DTYPE, ROWS as u64, (x.len() / ROWS / dim) as u32, dim as u32)
}

impl<E: Element> Pack<E> {
    fn new(heads: usize, kv_heads: usize, window: (i64, i64)) -> Self {
        let mut random = Random::new(5);
        let mut numbers = |heads: usize| (0..ROWS * heads * DIM).map(|_| E::from_f64(random.normal())).collect();
        Self { inputs: [heads, heads, kv_heads, kv_heads].map(&mut numbers), heads, kv_heads, window }
    }

    /// A forward and a backward of some documents.
    fn run(&mut self, docs: &[usize], Way { cut, workers, isa }: Way) -> Results {
        let (mut q, mut k, mut pairs) = (Vec::new(), Vec::new(), Vec::new());
        for &doc in docs {
            let (row, len) = (LENGTHS[..doc].iter().sum::<u32>(), LENGTHS[doc]);
            let half = if cut { len / 2 } else { 0 };
            let part = |first: u32, len| Range::plain((row + first).into(), len, first.into(), doc as u32);
            let parts = [part(half, len - half), part(0, half)];
            let (keys_begin, first) = (pairs.len() as u32, k.len() as u32);
            k.extend(parts.iter().filter(|part| part.len > 0));
            pairs.extend((first..k.len() as u32).map(Pair::of));
            let keys_end = pairs.len() as u32;
            let range = |range| QRange { range, document: [0; 2], keys_begin, keys_end, mode: Mode::Only };
            q.extend(parts.into_iter().filter(|part| part.len > 0).map(range));
        }
        let ranges = Ranges { q: &q, k: &k, pairs: &pairs, bands: &[Band::WHOLE] };
        let (n, n_kv, score) = (self.heads, self.kv_heads, score(DIM, self.window.0, self.window.1));
        let [q, d_o, k, v] = self.inputs.each_mut().map(|x| raw(x, DIM));
        let sums = |heads: usize| vec![E::Acc::from_f64(f64::NAN); ROWS * heads];
        let mut o = vec![E::from_f64(f64::NAN); ROWS * n * DIM];
        let (mut lse, mut delta) = (sums(n), vec![E::Acc::from_f64(0.25); ROWS * n]);
        let [mut dq, mut dk, mut dv] = [n, n_kv, n_kv].map(|heads| sums(heads * DIM));
        let mut scratch = Scratch::with_isa(workers, isa).unwrap().with_executor(Arc::new(Threads));
        scratch.reserve(E::DTYPE, DIM as u32, DIM as u32);
        let heads = HeadMap { q_offset: 0, kv_offset: 0, group: (n / n_kv) as u32 };
        let forward =
            Attend { lse: raw(&mut lse, 1), ..Attend::new([q, k, v, raw(&mut o, DIM)], heads, score, ranges) };
        let backward = AttendBackward {
            lse: forward.lse,
            delta: raw(&mut delta, 1),
            dq: raw(&mut dq, DIM),
            dk: raw(&mut dk, DIM),
            dv: raw(&mut dv, DIM),
            ..AttendBackward::new([q, k, v, d_o], heads, score, ranges)
        };
        // SAFETY: the tensors are the vectors above, alive and used by no other code.
        unsafe {
            cpu::attend(&forward, &mut scratch).unwrap();
            cpu::attend_backward(&backward, &mut scratch).unwrap();
        }
        fn bits<T: Element>(x: &[T]) -> Vec<u64> {
            x.iter().map(|x| x.to_f64().to_bits()).collect()
        }
        [bits(&o), bits(&lse), bits(&dq), bits(&dk), bits(&dv)]
    }
}

/// The numbers of a document.
fn of(doc: usize, x: &[u64]) -> &[u64] {
    let (row, each) = (LENGTHS[..doc].iter().sum::<u32>() as usize, x.len() / ROWS);
    &x[row * each..][..LENGTHS[doc] as usize * each]
}

const ALL: [usize; LENGTHS.len()] = [0, 1, 2, 3, 4, 5, 6, 7, 8];

#[track_caller]
fn assert_same(docs: &[usize], a: &Results, b: &Results, what: &str) {
    for (name, (a, b)) in NAMES.iter().zip(a.iter().zip(b)) {
        for &doc in docs {
            assert!(of(doc, a) == of(doc, b), "{name} of {} tokens, {what}", LENGTHS[doc]);
        }
    }
}

/// Instruction sets with long vectors; the others are slow.
fn quick(isa: Isa) -> bool {
    isa >= Isa::Avx512
}

/// Ways to cut: the slow ones are run in one.
fn cuts(isa: Isa) -> &'static [bool] {
    if quick(isa) || std::env::var_os("CPATTN_LONG").is_some() { &[false, true] } else { &[true] }
}

#[test]
fn a_document_has_the_bits_that_it_has_alone() {
    if slow::left_out(Turn::Every) {
        return;
    }
    fn check<E: Element>() {
        let mut pack = Pack::<E>::new(4, 2, (UNLIMITED, 0));
        for isa in isas::<E>() {
            for &cut in cuts(isa) {
                let way = Way { cut, workers: 1, isa };
                let together = pack.run(&ALL, way);
                assert!(together.iter().flatten().all(|&x| f64::from_bits(x).is_finite()), "{isa}");
                for doc in ALL {
                    let what = format!("{isa} {}, cut {cut}", E::DTYPE);
                    assert_same(&[doc], &pack.run(&[doc], way), &together, &what);
                }
            }
        }
    }
    check::<f32>();
    check::<bf16>();
    // Units of f16 are those of bf16, with other conversions.
    if std::env::var_os("CPATTN_LONG").is_some() {
        check::<f16>();
    }
    check::<f64>();
}

/// Few workers have units of more rows, which see keys of more positions: tiles must not break elsewhere for that.
#[test]
fn bits_do_not_depend_on_the_number_of_workers() {
    if slow::left_out(Turn::Every) {
        return;
    }
    /// Heads, kv heads; the window.
    type Heads = ((usize, usize), (i64, i64));
    const ALL_HEADS: [Heads; 6] = [
        ((4, 2), (UNLIMITED, 0)),
        ((8, 1), (31, 0)),
        ((3, 1), (UNLIMITED, UNLIMITED)),
        ((2, 2), (100, 0)),
        ((3, 3), (60, 90)),
        ((20, 1), (UNLIMITED, 5)),
    ];
    fn check<E: Element>(these: &[Heads]) {
        for &((heads, kv_heads), window) in these {
            let mut pack = Pack::<E>::new(heads, kv_heads, window);
            for isa in isas::<E>().filter(|isa| quick(*isa) || heads == 4) {
                for &cut in cuts(isa) {
                    let one = pack.run(&ALL, Way { cut, workers: 1, isa });
                    let found = pack.run(&ALL, Way { cut, workers: 16, isa });
                    let what = format!("16 workers, {isa} {} {heads}:{kv_heads} {window:?} {cut}", E::DTYPE);
                    assert_same(&ALL, &found, &one, &what);
                }
            }
        }
    }
    // Units of f16 are those of bf16, with other conversions.
    check::<f32>(&ALL_HEADS);
    check::<bf16>(&ALL_HEADS);
    check::<f16>(if std::env::var_os("CPATTN_LONG").is_some() { &ALL_HEADS } else { &ALL_HEADS[..2] });
}

/// Where q ranges are in no order of documents, all decide together; nothing is left out.
#[test]
fn documents_out_of_order() {
    fn check<E: Element>() {
        let mut pack = Pack::<E>::new(4, 2, (UNLIMITED, 0));
        for isa in isas::<E>() {
            let way = Way { cut: true, workers: 2, isa };
            let (found, expected) = (pack.run(&[1, 0, 4, 2, 3, 8, 5, 7, 6], way), pack.run(&ALL, way));
            let bound = 4e-6 + 2.0 * E::DTYPE.unit_roundoff() + rounding::<E>(isa);
            for (name, (a, b)) in NAMES.iter().zip(found.iter().zip(&expected)) {
                let [a, b] = [a, b].map(|x| x.iter().map(|&x| f64::from_bits(x)).collect::<Vec<_>>());
                let mut rms = Rms::default();
                rms.add(&a, &b);
                rms.assert_below(bound, 0.0, &format!("{name}, {isa} {}", E::DTYPE));
            }
        }
    }
    check::<f32>();
    check::<bf16>();
}
