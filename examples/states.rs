// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a scan of states sends and how long it takes, by form, for one document over 2 to 256 ranks: counted from the
//! lists that ranks execute, and simulated on a machine. `gather` is what an all-gather of decays and states would
//! send.
//!
//! `cargo run --release --example states [machine description]`
#![allow(missing_docs, reason = "a program has no users of its items")]

use cpattn::{
    Batch, Dtype, Layout, Machine, Mesh, Plan, Problem, Result,
    schedule::{Decay, Scan, ScanForm},
};

/// A gated delta net of 32 heads of 128 × 128, whose decays are matrices; Mamba-2 of 64 heads with a number each, a
/// head's state of 64 × 128.
const LAYERS: [(&str, Scan); 2] = [
    ("gated delta net, 32 × 128 × 128, matrix", Scan::new(Decay::Matrix, 32, 128, 128)),
    ("Mamba-2, 64 × 64 × 128, diagonal", Scan::new(Decay::Diagonal, 64, 1, 64 * 128)),
];

/// The most bytes that a rank sends or receives, and the most exchanges of one.
fn traffic(plan: &Plan, scan: Scan) -> Result<(u64, usize)> {
    let (mut most, mut exchanges) = (0, 0);
    for rank in 0..plan.mesh().world() {
        let costs = scan.costs(plan, rank)?;
        most = most.max(costs.bytes_in).max(costs.bytes_out);
        exchanges = exchanges.max(costs.exchanges);
    }
    Ok((most, exchanges))
}

fn main() -> Result<()> {
    let file = std::env::args().nth(1);
    let text = file.map(|path| std::fs::read_to_string(path).expect("a description of a machine"));
    let machine = Machine::parse(text.as_deref().unwrap_or(include_str!("../machines/h100_8x400g.machine")))?;
    for (name, scan) in LAYERS {
        println!("{name}: MB of the busiest rank (exchanges), ms on {}", machine.name);
        println!("| ranks | chain | tree | direct | chosen | gather MB |\n|---|---|---|---|---|---|");
        let bytes = [scan.state_dim(), scan.decay_dim()].map(|n| (n * u64::from(scan.heads) * 4) as f64 / 1e6);
        for ranks in [2, 4, 8, 16, 32, 64, 128, 256] {
            let problem = Problem::new(Batch::from_lengths(&[ranks * 4096])?, 32, 32, 128, Dtype::Bf16);
            let plan = Plan::new(&problem, Mesh::ring(ranks)?, Layout::Contiguous)?;
            let mut row = format!("| {ranks} |");
            for form in [ScanForm::Chain, ScanForm::Tree, ScanForm::Direct, ScanForm::Auto] {
                // Its lists are quadratic in ranks.
                if form == ScanForm::Direct && ranks > 64 {
                    row += " |";
                    continue;
                }
                let scan = Scan { form, ..scan };
                let ((most, exchanges), run) = (traffic(&plan, scan)?, plan.simulate(scan, &machine)?);
                row += &format!(" {:.1} ({exchanges}), {:.2} ms |", most as f64 / 1e6, run.makespan * 1e3);
            }
            println!("{row} {:.1} |", (bytes[0] + bytes[1]) * (ranks - 1) as f64);
        }
    }
    Ok(())
}
