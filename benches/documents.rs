// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cost of long and short documents in one call: the time of a pack divided by the time of two calls, one with its
//! long and one with its short documents, on one worker. Figures are medians of ratios; the two times of a ratio are
//! measured in turn.
//!
//! `cargo bench --bench documents [-- --rounds N]`

mod median;
mod pack;

use cpattn::Dtype;
use cpattn::kernel::cpu::{Isa, Scratch};
use median::median;
use pack::{Shape, Tensors};

const HEADS: u32 = 8;
const KV_HEADS: u32 = 2;
const DIM: u32 = 64;

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
            let (documents, rows) = pack::documents(long.iter().copied().chain((0..count).map(|_| short)));
            let shape = Shape { heads: HEADS, kv_heads: KV_HEADS, dim: DIM, dtype, causal: true };
            let mut tensors = Tensors::new(rows, shape);
            let mut scratch = Scratch::new(1);
            scratch.reserve(dtype, DIM, DIM);
            let (mut ratios, mut seconds) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2]);
            for round in 0..=rounds {
                let together = tensors.run(&documents, &mut scratch);
                let a = tensors.run(&documents[..long.len()], &mut scratch);
                let b = tensors.run(&documents[long.len()..], &mut scratch);
                // The first round touches the memory.
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
