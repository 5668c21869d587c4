// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two models agree where both can be had, and figures follow from the machine.

use super::*;
use crate::{Batch, Dtype, Mask};

fn h100() -> Machine {
    Machine::parse(include_str!("../../machines/h100_8x400g.machine")).unwrap()
}

fn problem(lengths: &[usize]) -> Problem {
    Problem::new(Batch::from_lengths(lengths).unwrap(), 32, 8, 128, Dtype::Bf16)
}

/// Every mesh and layout of 16 ranks: the aggregate model against the simulation.
#[test]
fn the_aggregate_model_is_near_the_simulation() {
    let (machine, mut two) = (h100(), 0);
    for (lengths, mask) in [
        (alloc::vec![1 << 19], Mask::causal()),
        (alloc::vec![1 << 19], Mask::full()),
        (alloc::vec![1 << 17; 8], Mask::causal()),
    ] {
        let p = problem(&lengths).with_mask(mask);
        let quick = meshes(&p, 16, &machine, Effort::new(0, 0)).unwrap();
        assert!(quick.candidates.iter().all(|c| c.model == Model::Aggregate));
        for c in &quick.candidates {
            let mut exact = *c;
            simulate(&p, &mut exact, &machine).unwrap();
            let ratio = c.seconds() / exact.seconds();
            // At a ring step of zigzag some ranks have more work than others, and all wait for them.
            let uneven = matches!(c.layout, Layout::Zigzag | Layout::ZigzagPack);
            // Over two levels a rank has one partner at a step, which is even but for documents shorter than its node's share.
            let least = match (uneven, c.levels) {
                (true, 2) if lengths.len() > 1 => 0.69,
                (true, _) => 0.83,
                _ => 0.97,
            };
            let what = alloc::format!("{mask:?} {} {}, levels {}", c.mesh, c.layout, c.levels);
            assert!((least..1.02).contains(&ratio), "{what}: {ratio}");
            two += usize::from(c.levels == 2);
            // What cards carry is exact where all rows are needed.
            let bytes = (c.backward.bytes_of_card, exact.backward.bytes_of_card);
            assert!(mask != Mask::full() || (bytes.0 - bytes.1).abs() <= 0.01 * bytes.1, "{what}: {bytes:?}");
        }
    }
    assert!(two > 20, "{two} candidates of two levels");
}

#[test]
fn the_best_are_simulated_where_that_is_asked_for() {
    let outlook = meshes(&problem(&[1 << 16]), 8, &h100(), Effort::new(2, 8)).unwrap();
    let simulated = outlook.candidates.iter().filter(|c| c.model == Model::Simulation).count();
    assert_eq!(simulated, 2);
    assert!(outlook.candidates[0].seconds() <= outlook.candidates[1].seconds());
    assert!(outlook.candidates[0].seconds() >= outlook.ideal && outlook.exact_kernels && outlook.estimate);
    // One node: no card carries anything.
    assert!(outlook.candidates.iter().all(|c| c.forward.bytes_of_card == 0.0));
    let text = outlook.to_markdown(3);
    assert_eq!(text.matches("\n| ").count(), 4, "{text}");
    assert!(text.contains("Best: ulysses") && text.contains("estimated figures"), "{text}");
    let again = meshes(&problem(&[1 << 16]), 8, &h100(), Effort::new(2, 8)).unwrap();
    assert_eq!(outlook, again);
}

#[test]
fn what_does_not_fit_comes_last() {
    let mut machine = h100();
    let p = problem(&[1 << 18]);
    let all = meshes(&p, 8, &machine, Effort::new(0, 0)).unwrap();
    let mut memory: Vec<u64> = all.candidates.iter().map(|c| c.memory).collect();
    memory.sort_unstable();
    assert!(memory[0] < memory[memory.len() - 1]);
    machine.memory = memory[0] as f64;
    let few = meshes(&p, 8, &machine, Effort::new(0, 0)).unwrap();
    assert!(few.fits(&few.candidates[0]) && !few.fits(few.candidates.last().unwrap()));
    machine.memory = 1.0;
    let none = meshes(&p, 8, &machine, Effort::new(0, 0)).unwrap();
    assert!(none.to_markdown(1).contains("No candidate fits"));
}

#[test]
fn a_machine_without_the_kernel_is_refused() {
    let p = Problem::new(Batch::from_lengths(&[64]).unwrap(), 2, 2, 16, Dtype::F64);
    let text = alloc::string::ToString::to_string(&meshes(&p, 2, &h100(), Effort::default()).unwrap_err());
    assert!(text.contains("without a forward kernel of f64"), "{text}");
    let p = Problem::new(Batch::from_lengths(&[64]).unwrap(), 2, 2, 96, Dtype::Bf16);
    assert!(!meshes(&p, 2, &h100(), Effort::default()).unwrap().exact_kernels);
}
