// SPDX-License-Identifier: MIT OR Apache-2.0
//! Weak and strong scaling of three set-ups, predicted: the text and the picture of `docs/scale.md`.

use std::fmt::Write;

use cpattn::{
    Batch, Dtype, Machine, Mask, Problem, Result, predict,
    predict::{Effort, Model, Outlook},
};

use super::picture;

const RANKS: [usize; 7] = [8, 32, 128, 512, 2048, 8192, 16_384];
/// Tokens of strong scaling.
const TOKENS: usize = 1 << 20;
/// Tokens of a rank of weak scaling.
const EACH: usize = 1 << 13;

type Setup = (&'static str, &'static str, fn(usize) -> Result<Problem>);

const SETUPS: [Setup; 3] = [
    ("dense 8B", "32 q heads over 8 kv heads of 128, causal", |tokens| {
        Ok(Problem::new(Batch::from_lengths(&[tokens])?, 32, 8, 128, Dtype::Bf16))
    }),
    ("MLA", "128 heads, head dim 192 of q and k, 128 of v, causal", |tokens| {
        Ok(Problem::new(Batch::from_lengths(&[tokens])?, 128, 128, 192, Dtype::Bf16).with_value_dim(128))
    }),
    ("window 4,096", "64 q heads over 8 kv heads of 64, a window of 4,096 tokens, sinks", |tokens| {
        let problem = Problem::new(Batch::from_lengths(&[tokens])?, 64, 8, 64, Dtype::Bf16);
        Ok(problem.with_mask(Mask::sliding(4096)).with_sinks(true))
    }),
];

/// The page and its picture.
pub fn pages(machine: &Machine, file: &str) -> Result<(String, String)> {
    let mut page = format!(
        "# Scaling, predicted\n\n\
         **Nothing here was measured on a cluster.** The figures are predictions for {}, from `{file}`, whose figures are {}. \
         They are of one layer's attention, forward and backward, without the rest of a model.\n\n\
         `cargo run --release -- mesh --scaling docs` writes this page and its picture.\n\n\
         - *Part of ideal*: an ideal time over the predicted one. Ideal is that all work is spread evenly over the ranks, at \
         the kernels' rates, and nothing else takes time.\n\
         - *Model*: up to 32 ranks the best candidates are simulated operation by operation. Above that the time is that of the \
         busiest rank; `src/predict/aggregate.rs` says what that leaves out.\n\
         - *Levels*: with one level a row crosses the network once for each rank of a node that needs it; with two \
         (`ranks_per_node`) once.\n\
         - *How far to trust the busiest rank*: for 16 ranks on two nodes and long documents it differs from a simulation by at \
         most 2 %. For zigzag its times are up to 16 % too short: rows of `zigzag-pack` that are not simulated may take that \
         much longer, and another layout may then be the best.\n\
         - Strong scaling: one document of 2^20 tokens. Weak scaling: one document of 2^13 tokens for each rank; its work per rank \
         grows with the ranks unless a window bounds it.\n\n\
         ![Part of the ideal over ranks](scale.svg)\n",
        machine.name,
        if machine.estimate { "estimates with their sources" } else { "measured" },
    );
    let mut panels: Vec<picture::Panel> = Vec::new();
    for (name, strong) in [("Strong scaling", true), ("Weak scaling", false)] {
        let mut lines = Vec::new();
        for (setup, what, problem) in SETUPS {
            let _ = writeln!(page, "\n## {name}: {setup}\n\n{what}.\n");
            page.push_str(
                "| ranks | ulysses × ring | layout | forward ms | backward ms | exposed ms | MB of a card | GB of a rank | part of ideal | model |\n\
                 |---|---|---|---|---|---|---|---|---|---|\n",
            );
            let mut points = Vec::new();
            for ranks in RANKS {
                let tokens = if strong { TOKENS } else { EACH * ranks };
                let outlook = predict::meshes(&problem(tokens)?, ranks, machine, Effort::new(3, 32))?;
                points.push((ranks, part_of_ideal(&outlook)));
                line(&mut page, &outlook);
            }
            lines.push((setup, points));
        }
        panels.push((name, lines));
    }
    let title = format!("Predicted part of the ideal time, {}", machine.name);
    Ok((page, picture::lines(&title, &panels)))
}

fn part_of_ideal(outlook: &Outlook) -> f64 {
    outlook.candidates.first().map_or(0.0, |c| outlook.ideal / c.seconds())
}

fn line(page: &mut String, outlook: &Outlook) {
    let Some(c) = outlook.candidates.first() else { return };
    let _ = writeln!(
        page,
        "| {} | {} × {} | {}{} | {:.3} | {:.3} | {:.3} | {:.1} | {:.2}{} | {:.1} % | {} |",
        outlook.world,
        c.mesh.ulysses,
        c.mesh.ring,
        c.layout,
        if c.levels == 2 { ", 2 levels" } else { "" },
        1e3 * c.forward.seconds,
        1e3 * c.backward.seconds,
        1e3 * c.exposed(),
        1e-6 * (c.forward.bytes_of_card + c.backward.bytes_of_card),
        1e-9 * c.memory as f64,
        if outlook.fits(c) { "" } else { ", too much" },
        100.0 * part_of_ideal(outlook),
        if c.model == Model::Simulation { "simulated" } else { "busiest rank" },
    );
}
