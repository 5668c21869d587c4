// SPDX-License-Identifier: MIT OR Apache-2.0
//! The automatic choice beside the choice by a machine's description: how long each takes to plan, and which of their
//! plans the simulation finds faster.
//!
//! `plan/auto.rs` says what was found. A rule that replaces the automatic choice has to take at most 1.2 times as long,
//! and to be better here.
//!
//! ```text
//! cargo bench --bench choices [-- DRAWS [SEED]]
//! ```

use std::{hint::black_box, time::Instant};

use cpattn::{Batch, Dtype, Machine, Mask, Options, Plan, Problem, schedule::Direction};

/// Seconds of the fastest of some calls.
fn fastest<T>(mut call: impl FnMut() -> T) -> f64 {
    let time = |()| {
        let begin = Instant::now();
        black_box(call());
        begin.elapsed().as_secs_f64()
    };
    [(); 5].map(time).into_iter().fold(f64::INFINITY, f64::min)
}

fn planning(machine: &Machine) {
    for documents in [1, 1000, 1_000_000] {
        let mean = (1 << 20).max(64 * documents) / documents;
        let mut draw = fastrand::Rng::with_seed(1);
        let lengths: Vec<usize> = (0..documents).map(|_| draw.usize(mean / 8..=mean * 15 / 8)).collect();
        let batch = Batch::from_lengths(&lengths).unwrap();
        let problem = Problem::new(batch, 32, 8, 128, Dtype::Bf16).with_mask(Mask::causal());
        for world in [8, 64, 1024] {
            let rule = fastest(|| Plan::auto(&problem, world).unwrap());
            let by_machine = fastest(|| Plan::builder(&problem).world(world).build_on(machine).unwrap());
            let (us, times) = (1e6 * rule, by_machine / rule);
            println!(
                "{documents} documents, {world} ranks: {us:.0} us by the rule, {times:.1} times that by a machine"
            );
        }
    }
}

/// A problem and a world, drawn from what models have.
fn drawn(draw: &mut fastrand::Rng) -> (Problem, usize) {
    let world = [4, 8, 16, 16, 32][draw.usize(..5)];
    let (documents, mean) = ([1, 2, 5, 20, 80][draw.usize(..5)], [512, 4096, 32768][draw.usize(..3)]);
    let lengths: Vec<usize> = (0..documents).map(|_| draw.usize(1..2 * mean)).collect();
    let shapes = [(32, 8, 128), (32, 8, 128), (8, 8, 64), (64, 8, 64), (16, 2, 128), (28, 4, 128)];
    let (heads, kv_heads, dim) = shapes[draw.usize(..6)];
    let mask = [Mask::causal(), Mask::causal(), Mask::full(), Mask::sliding(1024)][draw.usize(..4)];
    let batch = Batch::from_lengths(&lengths).unwrap();
    (Problem::new(batch, heads, kv_heads, dim, Dtype::Bf16).with_mask(mask), world)
}

fn compared(machine: &Machine, draws: usize, seed: u64) {
    let mut draw = fastrand::Rng::with_seed(seed);
    let (mut alike, mut sums, mut ratios) = (0, [0.0; 2], Vec::new());
    for _ in 0..draws {
        let (problem, world) = drawn(&mut draw);
        let options = Options::new().ranks_per_node(if world > 8 { 8 } else { 0 });
        let builder = || Plan::builder(&problem).world(world).options(options);
        let (rule, by_machine) = (builder().build().unwrap(), builder().build_on(machine).unwrap());
        if (rule.mesh(), rule.layout()) == (by_machine.mesh(), by_machine.layout()) {
            alike += 1;
            continue;
        }
        let pass = |plan: &Plan, direction| plan.simulate(direction, machine).unwrap().makespan;
        let both = |plan| pass(plan, Direction::Forward) + pass(plan, Direction::Backward);
        let [a, b] = [both(&rule), both(&by_machine)];
        sums = [sums[0] + a, sums[1] + b];
        ratios.push(b / a);
    }
    ratios.sort_unstable_by(f64::total_cmp);
    let (least, most) = (ratios.first().copied().unwrap_or(1.0), ratios.last().copied().unwrap_or(1.0));
    let (shorter, longer) =
        (ratios.iter().filter(|r| **r < 0.99).count(), ratios.iter().filter(|r| **r > 1.01).count());
    println!("{draws} problems, {alike} with one choice; where choices differ, by the simulation:");
    println!(
        "  the machine's is faster in {shorter} (at best {:.1} times), slower in {longer} (at worst {most:.1} times)",
        1.0 / least
    );
    println!("  and takes {:.2} times as long in all", sums[1] / sums[0]);
}

fn main() {
    let machine = Machine::parse(include_str!("../machines/h100_8x400g.machine")).unwrap();
    let numbers: Vec<u64> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    planning(&machine);
    compared(&machine, numbers.first().map_or(3000, |&n| n as usize), numbers.get(1).copied().unwrap_or(7));
}
