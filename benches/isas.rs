// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every instruction set of this processor in turn (except portable code, which takes minutes): the time of single
//! calls on one worker, medians in ms. A star marks the instruction set that `Isa::best` chooses.
//!
//! `cargo bench --bench isas [-- --rounds N] [--only TEXT] [--isa NAME] [--length N] [--json FILE]`
//!
//! `--only` selects the cases whose line contains a text, `--isa` one instruction set, `--length` documents of this
//! many tokens.

mod median;
mod pack;

use cpattn::Dtype;
use cpattn::kernel::cpu::{Isa, Scratch};
use median::median;
use pack::{Shape, Tensors};

/// Lengths of the 64 documents of `benches/peers/cpu_cases.txt`.
const MIXED: [u32; 64] = [
    99, 61, 51, 13, 193, 57, 37, 715, 74, 9, 55, 36, 97, 34, 32, 15, 431, 34, 74, 48, 593, 124, 39, 587, 11, 44, 19,
    61, 72, 275, 91, 32, 123, 254, 29, 68, 9, 58, 39, 35, 32, 9, 205, 60, 129, 992, 133, 28, 69, 125, 37, 325, 72, 25,
    9, 41, 81, 124, 70, 14, 16, 797, 36, 35,
];

/// Name, lengths of the documents, q and kv heads, head_dim, whether causal.
type Case = (String, Vec<u32>, [u32; 2], u32, bool);

/// The cases; with `length`, documents of this length with the same total of tokens.
fn cases(length: Option<u32>) -> Vec<Case> {
    if let Some(n) = length {
        let documents = || vec![n; (2048 / n.max(1)).max(1) as usize];
        let case = |heads: [u32; 2], dim: u32| {
            (
                format!("documents of {n} tokens, {}:{} heads of {dim}, causal", heads[0], heads[1]),
                documents(),
                heads,
                dim,
                true,
            )
        };
        return vec![case([8, 8], 128), case([8, 2], 128), case([8, 8], 64), case([8, 2], 64)];
    }
    vec![
        ("1,024 tokens, 8 heads of 128, full".into(), vec![1024], [8, 8], 128, false),
        ("512 tokens, 16 heads of 64, causal".into(), vec![512], [16, 16], 64, true),
        ("64 documents, 8,192 tokens, 8:2 heads of 128, causal".into(), MIXED.into(), [8, 2], 128, true),
        ("64 documents of 24 tokens, 8 heads of 128, causal".into(), vec![24; 64], [8, 8], 128, true),
        ("300 documents of 5 tokens, 8 heads of 64, causal".into(), vec![5; 300], [8, 8], 64, true),
    ]
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let value = |name: &str| args.iter().position(|a| a == name).and_then(|i| args.get(i + 1));
    let rounds = value("--rounds").and_then(|n| n.parse().ok()).unwrap_or(11).max(1);
    let length = value("--length").and_then(|n| n.parse().ok());
    let (only, name) = (value("--only"), value("--isa"));
    let wanted = |isa: &Isa| name.map_or(*isa != Isa::Portable, |name| name == isa.name());
    let isas: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.is_available() && wanted(isa)).collect();
    assert!(!isas.is_empty(), "--isa names none of this processor's: {:?}", Isa::ALL.map(Isa::name));
    let mut rows = Vec::new();
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        for (name, lengths, [heads, kv_heads], dim, causal) in cases(length) {
            let line = format!("{dtype}, {name}");
            if only.is_some_and(|only| !line.contains(only)) {
                continue;
            }
            println!("{line}");
            let (documents, tokens) = pack::documents(lengths.iter().copied());
            let mut tensors = Tensors::new(tokens, Shape { heads, kv_heads, dim, dtype, causal });
            let mut scratches: Vec<Scratch> = isas
                .iter()
                .map(|&isa| {
                    let mut scratch = Scratch::with_isa(1, isa).expect("an instruction set that is there");
                    scratch.reserve(dtype, dim, dim);
                    scratch
                })
                .collect();
            let mut seconds: Vec<[Vec<f64>; 2]> = isas.iter().map(|_| Default::default()).collect();
            for round in 0..=rounds {
                for (scratch, seconds) in scratches.iter_mut().zip(&mut seconds) {
                    let times = tensors.run(&documents, scratch);
                    // The first round touches the memory.
                    if round > 0 {
                        seconds.iter_mut().zip(times).for_each(|(all, time)| all.push(time));
                    }
                }
            }
            for (&isa, seconds) in isas.iter().zip(seconds) {
                let [f, b] = seconds.map(|x| 1e3 * median(x));
                let star = if isa == Isa::best() { "*" } else { "" };
                println!("  {:13}{f:9.2} forward{b:9.2} backward", format!("{isa}{star}"));
                rows.push(format!(
                    "{{\"case\": \"{name}\", \"dtype\": \"{dtype}\", \"isa\": \"{isa}\", \"forward_ms\": {f:.3}, \
                     \"backward_ms\": {b:.3}}}"
                ));
            }
        }
    }
    if let Some(file) = value("--json") {
        std::fs::write(file, format!("[\n  {}\n]\n", rows.join(",\n  "))).expect("a file that can be written");
    }
}
