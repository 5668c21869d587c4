// SPDX-License-Identifier: MIT OR Apache-2.0
//! Hopper kernels that another compiler has made: all compute right, in every order, and nothing is reported.
//!
//! `make.py` says where the text in `ptx/` comes from.

mod kernels;
mod mutants;
mod problems;

use cuda_emulator::Options;
use problems::solve;

/// Seeds each kernel runs with, besides a run on a friendly machine.
const SEEDS: u64 = 6;

fn right(family: &str) {
    let mut tried = 0;
    for e in kernels::all().iter().filter(|e| e.name.starts_with(family)) {
        for seed in 0..=SEEDS {
            let options = Options { seed, eager: seed == SEEDS, ..Options::default() };
            let outcome = solve(e, None, seed, options).unwrap_or_else(|r| panic!("{}, seed {seed}: {r}", e.name));
            if let Some(wrong) = outcome.wrong() {
                panic!("{}, seed {seed}: {wrong}", e.name);
            }
        }
        tried += 1;
    }
    assert!(tried > 0, "no kernel of the corpus is called `{family}…`");
}

#[test]
fn products_of_every_swizzle_and_order() {
    right("product");
}

#[test]
fn rings_with_a_warp_that_loads() {
    right("ring");
}

#[test]
fn attention() {
    right("attention");
}

#[test]
fn reductions_in_f32() {
    right("reduction");
}

#[test]
fn ragged_maps() {
    right("ragged");
}

#[test]
fn the_corpus_is_whole() {
    assert_eq!(kernels::all().len(), 22);
}

#[test]
fn mutants_of_products() {
    mutants::all_caught(&["product_128_bt", "product_bf16_n256"]);
}

#[test]
fn mutants_of_rings() {
    mutants::all_caught(&["ring_128_128x128", "ring_64_64x64", "ring_128_256x64"]);
}

#[test]
fn mutants_of_attention() {
    mutants::all_caught(&["attention_bf16_64_causal", "attention_f16_128_causal"]);
}

#[test]
fn mutants_of_reductions_and_ragged_maps() {
    mutants::all_caught(&["reduction", "ragged"]);
}
