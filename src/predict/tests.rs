// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ratings, refusals and choices follow from the machine. `aggregate`: the two models agree where both apply.

mod aggregate;

use super::*;
use crate::{
    Batch, Dtype, Mask,
    plan::{Candidate, Choice, Circulate, Wire},
};
use alloc::{vec, vec::Vec};

fn h100() -> Machine {
    Machine::parse(include_str!("../../machines/h100_8x400g.machine")).unwrap()
}

fn problem(lengths: &[usize]) -> Problem {
    Problem::new(Batch::from_lengths(lengths).unwrap(), 32, 8, 128, Dtype::Bf16)
}

/// With a window one rank of a node needs rows of another node: they cross once with either schedule, over one card.
#[test]
fn two_levels_gain_nothing_with_a_short_window() {
    let p = problem(&[1 << 19]).with_mask(Mask::sliding(4096));
    let all = meshes(&p, 16, &h100(), Effort::new(0, 0)).unwrap().candidates;
    let of = |levels| {
        let found = all.iter().find(|c| (c.mesh.ring, c.layout, c.levels) == (16, Layout::Contiguous, levels));
        found.unwrap().backward.bytes_of_card
    };
    assert!(of(1) > 0.0 && of(1) == of(2), "{} {}", of(1), of(2));
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
fn a_type_without_kernels_has_derived_rates_and_says_so() {
    let mut machine = h100();
    machine.kernels.retain(|k| k.shape.dtype == Dtype::Bf16);
    let of = |dtype| Problem::new(Batch::from_lengths(&[64]).unwrap(), 2, 2, 16, dtype);
    let outlook = meshes(&of(Dtype::F64), 2, &machine, Effort::default()).unwrap();
    assert_eq!((outlook.exact_kernels, outlook.derived_kernels), (false, Some((Dtype::F64, Dtype::Bf16))));
    assert!(outlook.to_markdown(1).contains("no kernel of f64: the rates are derived from those of bf16"));
    let plan = Plan::builder(&of(Dtype::F64)).world(2).build_on(&machine).unwrap();
    assert!(plan.explain().contains("derived from those of bf16"));
    let own = meshes(&of(Dtype::Bf16), 2, &machine, Effort::default()).unwrap();
    assert_eq!((own.exact_kernels, own.derived_kernels), (false, None));
    assert!(own.to_markdown(1).contains("no kernel of these dims"));
    machine.kernels.retain(|k| !k.shape.backward);
    let text =
        alloc::string::ToString::to_string(&meshes(&of(Dtype::F64), 2, &machine, Effort::default()).unwrap_err());
    assert!(text.contains("without a backward kernel, expected"), "{text}");
}

/// Problems of every type and shape on every description: none is refused.
#[test]
fn every_type_has_a_plan_on_every_description() {
    let machines = [
        include_str!("../../machines/h100_8x400g.machine"),
        include_str!("../../machines/h200_8x400g.machine"),
        include_str!("../../machines/cpu_host.machine"),
    ];
    let mut draw = fastrand::Rng::with_seed(48);
    for _ in 0..300 {
        let machine = Machine::parse(machines[draw.usize(..machines.len())]).unwrap();
        let lengths: Vec<usize> = (0..draw.usize(1..20)).map(|_| draw.usize(..3000)).collect();
        let (kv, group, dim) = (draw.usize(1..5), draw.usize(1..5), 8 * draw.usize(1..32));
        let dtype = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64][draw.usize(..4)];
        let p = Problem::new(Batch::from_lengths(&lengths).unwrap(), kv * group, kv, dim, dtype);
        let plan = Plan::builder(&p).world(draw.usize(1..33)).build_on(&machine).unwrap();
        assert!(!plan.explain().contains("derived from"), "{} {dtype}", machine.name);
    }
}

/// The fields are public: both models refuse each value that no description has, by name.
#[test]
fn a_machine_that_no_description_has_is_refused() {
    type Set = fn(&mut Machine);
    let fields: [(Set, &str); 16] = [
        (|m| m.ranks_per_node = 0, "machine.ranks_per_node is 0, expected a whole number above 0"),
        (|m| m.cards_per_node = 0, "machine.cards_per_node is 0, expected a whole number above 0"),
        (|m| m.cores = Some(0), "machine.cores is 0, expected a whole number above 0"),
        (
            |m| m.nodes_share_cores = true,
            "machine.nodes_share_cores is set, without cores, expected machine.cores beside it",
        ),
        (|m| m.between_work = 1e-9, "machine.between_work is set, without cores, expected machine.cores beside it"),
        (|m| m.between_work = -1.0, "machine.between_work is -1, expected a number from 0"),
        (|m| m.between_burst = f64::NAN, "machine.between_burst is NaN, expected a number from 0"),
        (|m| m.between_burst = f64::INFINITY, "machine.between_burst is inf, expected a number from 0"),
        (|m| m.memory = 0.0, "machine.memory is 0, expected a number above 0"),
        (|m| m.operation = -1.0, "machine.operation is -1, expected a number from 0"),
        (|m| m.copy = 0.0, "machine.copy is 0, expected a number above 0"),
        (|m| m.inside.rate = f64::NAN, "machine.inside.rate is NaN, expected a number above 0"),
        (|m| m.inside.latency = -1.0, "machine.inside.latency is -1, expected a number from 0"),
        (|m| m.between.rate = -1.0, "machine.between.rate is -1, expected a number above 0"),
        (|m| m.between.latency = f64::NAN, "machine.between.latency is NaN, expected a number from 0"),
        (|m| m.kernels[0].rate = 0.0, ": rate is 0, expected a number above 0"),
    ];
    let p = problem(&[1 << 13]);
    let plan = Plan::new(&p, Mesh::ring(2).unwrap(), Layout::Zigzag).unwrap();
    for (set, expected) in fields {
        let mut machine = h100();
        set(&mut machine);
        let refusals = [
            plan.simulate(Direction::Forward, &machine).unwrap_err(),
            meshes(&p, 2, &machine, Effort::new(0, 0)).unwrap_err(),
            Plan::builder(&p).world(2).build_on(&machine).unwrap_err(),
        ];
        for text in refusals.map(|e| alloc::string::ToString::to_string(&e)) {
            assert!(text.ends_with(expected), "{text}\n{expected}");
        }
    }
}

/// The machine's figures decide, and the plan says so.
#[test]
fn a_plan_is_chosen_by_the_machine() {
    let (mut machine, p) = (h100(), problem(&[1 << 17]));
    for world in [16, 64] {
        let plan = Plan::builder(&p).world(world).build_on(&machine).unwrap();
        let all = meshes(&p, world, &machine, Effort::new(0, 0)).unwrap().candidates;
        assert_eq!(
            (plan.mesh(), plan.layout(), plan.options()),
            (all[0].mesh, all[0].layout, all[0].options(&machine))
        );
        let text = plan.explain();
        assert!(text.contains("chosen by the description of a machine"), "{text}");
        assert!(text.contains(&machine.name) && !text.contains("rules of thumb"), "{text}");
        assert!(!text.contains("rule:"), "the rule of another choice: {text}");
        // The same plan made by hand is equal, and does not name a machine.
        let given = Plan::builder(&p).mesh(plan.mesh()).layout(plan.layout()).options(plan.options()).build().unwrap();
        assert_eq!((&given, given.fingerprint()), (&plan, plan.fingerprint()));
        let given = given.explain();
        assert!(given.contains("by rules of thumb; no machine is described"), "{given}");
        assert!(given.contains("rule: of the layouts with at most 1 % more work"), "{given}");
        // A plan made by `Plan::next` keeps the reason.
        let kept = plan.next(problem(&[1 << 16, 1 << 16]).batch()).unwrap();
        assert!(kept.mesh() == plan.mesh() && kept.explain().contains(&machine.name));
        assert_eq!(kept.options(), plan.options());
    }
    // With slow cards between nodes k and v would take long: all-to-alls of fewer bytes win, or stay inside nodes.
    let fast = Plan::builder(&p).world(16).build_on(&machine).unwrap();
    machine.between.rate *= 1e-4;
    let slow = Plan::builder(&p).world(16).build_on(&machine).unwrap();
    let seconds = |plan: &Plan| {
        let all = meshes(&p, 16, &machine, Effort::new(0, 0)).unwrap().candidates;
        let of =
            |c: &&MeshTime| (c.mesh, c.layout, c.options(&machine)) == (plan.mesh(), plan.layout(), plan.options());
        all.iter().find(of).unwrap().seconds()
    };
    assert!(seconds(&slow) < seconds(&fast), "{} {}", slow.mesh(), fast.mesh());
}

/// Documents, masks, kv heads and ranks: `cpattn mesh` and the automatic choice rate one level and two alike, by either
/// model. The choice is the first of all candidates, with the machine's nodes if that has two levels.
#[test]
fn nodes_need_not_be_given() {
    let machines = [h100(), Machine { ranks_per_node: 4, cards_per_node: 1, ..h100() }];
    let (mut chosen, mut compared) = ([0; 3], 0);
    let mut most: f64 = 1.0;
    for machine in &machines {
        for (lengths, kv_heads) in [(&[1 << 18][..], 8), (&[1 << 13; 9], 1), (&[3000; 60], 32)] {
            for mask in [Mask::causal(), Mask::full(), Mask::sliding(1024)] {
                for world in [12, 16, 32] {
                    let batch = Batch::from_lengths(lengths).unwrap();
                    let p = Problem::new(batch, 32, kv_heads, 128, Dtype::Bf16).with_mask(mask);
                    let plan = Plan::builder(&p).world(world).build_on(machine).unwrap();
                    let of = |c: &&MeshTime| {
                        (c.mesh, c.layout, c.options(machine)) == (plan.mesh(), plan.layout(), plan.options())
                    };
                    let quick = meshes(&p, world, machine, Effort::new(0, 0)).unwrap().candidates;
                    assert!(quick.iter().position(|c| of(&c)) == Some(0), "{}", plan.explain());
                    let levels = if plan.has_two_levels() { 2 } else { 1 };
                    assert_eq!(levels, quick[0].levels);
                    chosen[levels] += 1;
                    let text = plan.explain();
                    let each = machine.ranks_per_node;
                    let two = quick.iter().any(|c| c.levels == 2);
                    // 12 ranks do not fill nodes of 8.
                    assert_eq!(two, world % each == 0, "{text}");
                    let rated = if two {
                        "schedules of one level and of two were rated, over"
                    } else {
                        "schedules of one level were rated; no mesh has two levels over"
                    };
                    let nodes = alloc::format!("{rated} the machine's nodes of {each} ranks.");
                    assert!(text.contains(&nodes), "{text}");
                    assert_eq!(text.contains(", two levels (ranks_per_node)."), levels == 2, "{text}");
                    assert!(!text.contains("share cores"), "{text}");
                    // The simulated candidates include the choice.
                    let simulated = meshes(&p, world, machine, Effort::new(4, 16)).unwrap().candidates;
                    let chosen = simulated.iter().find(of).unwrap();
                    if chosen.model == Model::Simulation {
                        compared += 1;
                        most = most.max(chosen.seconds() / simulated[0].seconds());
                    }
                }
            }
        }
    }
    assert!(chosen[1] > 5 && chosen[2] > 5, "{chosen:?}");
    assert!(compared > 30 && most < 1.27, "{compared} {most}");
}

/// Given nodes are those of the plan, whatever the machine has, and do not change other options.
#[test]
fn nodes_that_are_given_are_taken() {
    let machine = Machine { ranks_per_node: 4, cards_per_node: 1, ..h100() };
    let (p, options) = (problem(&[1 << 18]), Options::new().wire(Wire::Bf16));
    let free = Plan::builder(&p).world(16).options(options).build_on(&machine).unwrap();
    assert_eq!(free.options(), options.ranks_per_node(4));
    assert!(free.has_two_levels());
    for each in [2, 4, 16] {
        let plan = Plan::builder(&p).world(16).options(options.ranks_per_node(each)).build_on(&machine).unwrap();
        assert_eq!(plan.options(), options.ranks_per_node(each));
        assert!(each < 16 || !plan.has_two_levels());
        let text = plan.explain();
        let given = alloc::format!("ranks_per_node {each} was given and decided the levels;");
        let nodes = "bytes between nodes are counted over the machine's nodes of 4 ranks.";
        assert!(text.contains(&given) && text.contains(nodes), "{text}");
    }
}

#[test]
fn options_that_rule_out_meshes_leave_the_others() {
    let (machine, p) = (h100(), problem(&[1 << 16]));
    // The ranks of an all-to-all fill nodes or lie in one: with 12 ranks in nodes of 4, ulysses 3 and 6 do neither.
    let options = Options::new().ranks_per_node(4);
    let plan = Plan::builder(&p).world(12).options(options).build_on(&machine).unwrap();
    assert!([1, 2, 4, 12].contains(&plan.mesh().ulysses) && plan.options().ranks_per_node == 4, "{}", plan.mesh());
    let text = |options| {
        alloc::string::ToString::to_string(
            &Plan::builder(&p).world(16).options(options).build_on(&machine).unwrap_err(),
        )
    };
    let passes = text(Options::new().passes(9));
    assert!(
        passes.starts_with("options.passes is 9, expected 1 to kv_heads = 8; a pass takes one kv head"),
        "{passes}"
    );
    assert!(text(Options::new().ranks_per_node(3)).contains("options.ranks_per_node is 3"));
}

/// The rules of thumb know no machine, only the number of ranks in a node. Two and four nodes of eight.
#[test]
fn rules_of_thumb_weigh_what_crosses_nodes() {
    let (machine, options) = (h100(), Options::new().ranks_per_node(8));
    // Grouped kv heads; MLA's shape.
    let shapes = [(32, 8, 128), (128, 128, 192)];
    let short = alloc::vec![1 << 10; 256];
    // A document is about as long as a rank's tokens: rows of neighbours, which cross at nodes' borders.
    let (long, like_a_rank) = (alloc::vec![1 << 18], alloc::vec![12_000; 22]);
    let tail = (0..60).map(|i| if i % 15 == 7 { 40_000 } else { 100 + 61 * i }).collect();
    let mut changed = 0;
    let mut gain = 1.0;
    for (heads, kv_heads, head_dim) in shapes {
        for (lengths, expected) in [(&long, Some(8)), (&short, Some(1)), (&like_a_rank, Some(8)), (&tail, None)] {
            for world in [16, 32] {
                let batch = Batch::from_lengths(lengths).unwrap();
                let p = Problem::new(batch, heads, kv_heads, head_dim, Dtype::Bf16).with_value_dim(128);
                let choice = Choice::new(&p, world, Choice::BALANCE, 8).unwrap();
                assert!(expected.is_none_or(|ulysses| ulysses == choice.mesh.ulysses), "{world}: {}", choice.mesh);
                // Among the same meshes, the choice for links of one kind.
                let weight =
                    |c: &Candidate| u128::from(Choice::BALANCE * (Choice::INTER_NODE_FACTOR - 1)) * c.bytes_between;
                let alike = choice.candidates.iter().min_by_key(|c| c.cost - weight(c)).unwrap();
                let all = outlook(&p, world, &machine, [options; 2]).unwrap().candidates;
                let seconds = |mesh, layout| {
                    let this = all.iter().find(|c| (c.mesh, c.layout) == (mesh, layout));
                    this.unwrap().seconds()
                };
                let (chosen, alone) = (seconds(choice.mesh, choice.layout), seconds(alike.mesh, alike.layout));
                assert!(chosen < 1.31 * all[0].seconds(), "{world}: {} {}", choice.mesh, choice.layout);
                changed += usize::from(alike.mesh != choice.mesh);
                gain *= alone / chosen;
            }
        }
    }
    // Some choices differ from those with links of one kind, and are faster on the machine on average.
    assert!(changed >= 3 && gain > 1.2, "{changed} {gain}");
}
