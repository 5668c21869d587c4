// SPDX-License-Identifier: MIT OR Apache-2.0
//! Simulates how evenly the work units of the CPU kernels are distributed over many workers: the time of the slowest
//! worker over the mean.
//!
//! See `cpattn::kernel::cpu::Isa::forward_balance`: no machine with so many cores is needed. Only the division of work
//! is simulated, not memory or clocks.
//!
//! `cargo bench --bench balance [-- --json FILE]`

use cpattn::{
    Dtype,
    call::{Attend, AttendBackward, Band, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score},
    kernel::cpu::Isa,
};

/// The pack of `benches/peers/cpu_cases.txt`: 64 long-tailed documents, 8,192 tokens.
const PACK: [u32; 64] = [
    99, 61, 51, 13, 193, 57, 37, 715, 74, 9, 55, 36, 97, 34, 32, 15, 431, 34, 74, 48, 593, 124, 39, 587, 11, 44, 19,
    61, 72, 275, 91, 32, 123, 254, 29, 68, 9, 58, 39, 35, 32, 9, 205, 60, 129, 992, 133, 28, 69, 125, 37, 325, 72, 25,
    9, 41, 81, 124, 70, 14, 16, 797, 36, 35,
];

struct Case {
    name: &'static str,
    lengths: &'static [u32],
    heads: (u32, u32),
    dim: u32,
    causal: bool,
    dtype: Dtype,
}

/// Number of units, and balance, of a forward and of a backward.
fn balances(case: &Case, isa: Isa, workers: usize) -> [(usize, f64); 2] {
    let mut k = Vec::new();
    let mut row = 0;
    for (doc, &len) in case.lengths.iter().enumerate() {
        k.push(Range::plain(row, len, 0, doc as u32));
        row += i64::from(len);
    }
    let q: Vec<QRange> = (0..)
        .zip(&k)
        .map(|(i, &range)| QRange { range, document: [0; 2], keys_begin: i, keys_end: i + 1, mode: Mode::Only })
        .collect();
    let pairs: Vec<Pair> = (0..k.len() as u32).map(Pair::of).collect();
    let ranges = Ranges { q: &q, k: &k, pairs: &pairs, bands: &[Band::WHOLE] };
    // Only shapes matter: no memory is accessed.
    let tensor = |heads| RawTensor::compact(std::ptr::null_mut(), case.dtype, row as u64, heads, case.dim);
    let (q, k) = (tensor(case.heads.0), tensor(case.heads.1));
    let heads = HeadMap { q_offset: 0, kv_offset: 0, group: case.heads.0 / case.heads.1 };
    let window_right = if case.causal { 0 } else { i64::MAX };
    let score = Score { scale: 1.0, softcap: 0.0, window_left: i64::MAX, window_right };
    let forward = Attend::new([q, k, k, q], heads, score, ranges);
    let backward = AttendBackward::new([q, k, k, q], heads, score, ranges);
    [isa.forward_balance(&forward, workers), isa.backward_balance(&backward, workers)]
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let case = |name, lengths, heads, dim, causal, dtype| Case { name, lengths, heads, dim, causal, dtype };
    let cases = [
        case("documents", &PACK, (8, 2), 128, true, Dtype::F32),
        case("documents", &PACK, (8, 2), 128, true, Dtype::Bf16),
        case("dense", &[4096], (8, 8), 128, false, Dtype::F32),
        case("dense", &[4096], (8, 8), 128, false, Dtype::Bf16),
        case("short", &[512], (16, 16), 64, true, Dtype::F32),
        case("short", &[512], (16, 16), 64, true, Dtype::Bf16),
    ];
    let mut rows = Vec::new();
    println!("{:12}{:>6}{:>9}{:>10}{:>8}{:>9}{:>10}", "", "", "isa", "", "units", "workers", "balance");
    for case in &cases {
        let isa = if case.dtype == Dtype::F32 { Isa::Avx512 } else { Isa::Amx };
        for workers in [16, 64] {
            for (direction, (n, balance)) in ["forward", "backward"].into_iter().zip(balances(case, isa, workers)) {
                let (name, dtype, isa) = (case.name, case.dtype, isa.name());
                println!("{name:12}{:>6}{isa:>9}{direction:>10}{n:>8}{workers:>9}{balance:>10.2}", dtype.to_string());
                rows.push(format!(
                    "{{\"case\": \"{name}\", \"direction\": \"{direction}\", \"dtype\": \"{dtype}\", \"isa\": \"{isa}\", \
                     \"units\": {n}, \"workers\": {workers}, \"balance\": {balance:.4}}}"
                ));
            }
        }
    }
    if let Some(path) = args.iter().position(|a| a == "--json").and_then(|i| args.get(i + 1)) {
        std::fs::write(path, format!("[\n {}\n]\n", rows.join(",\n "))).expect("the file can be written");
    }
}
