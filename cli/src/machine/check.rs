// SPDX-License-Identifier: MIT OR Apache-2.0
//! Measured makespans beside predicted ones, as Markdown and as JSON.
//!
//! Cases take turns, round after round, and the shortest time of each counts.

use std::fmt::Write;

use cpattn::{Error, Machine, Mask, Result, schedule::Direction};

use super::cases::Case;
use crate::json::Json;

/// Both, in this order.
pub const DIRECTIONS: [Direction; 2] = [Direction::Forward, Direction::Backward];

/// All cases, with their best makespans so far.
pub struct Cases {
    list: Vec<Case>,
    best: Vec<[f64; 2]>,
}

/// A line of the table.
struct Line {
    /// Case, type and dim, mask, mesh, layout, levels, direction.
    words: [String; 7],
    predicted: f64,
    measured: f64,
}

impl Line {
    fn error(&self) -> f64 {
        self.predicted / self.measured - 1.0
    }
}

impl Cases {
    pub fn new(list: Vec<Case>) -> Self {
        Self { best: vec![[f64::INFINITY; 2]; list.len()], list }
    }

    /// Runs every case again: `makespan` takes the seconds of one direction.
    pub fn round(&mut self, mut makespan: impl FnMut(&Case, Direction) -> Result<f64>) -> Result<()> {
        for (case, best) in self.list.iter().zip(&mut self.best) {
            for (direction, best) in DIRECTIONS.into_iter().zip(best) {
                *best = best.min(makespan(case, direction)?);
            }
        }
        Ok(())
    }

    fn lines(&self, machine: &Machine) -> Result<Vec<Line>> {
        let mut lines = Vec::new();
        for (Case { name, plan }, best) in self.list.iter().zip(&self.best) {
            let p = plan.problem();
            let window = || p.mask().left.map_or("full".into(), |left| format!("window {}", left + 1));
            let mask = if p.mask() == Mask::causal() { "causal".into() } else { window() };
            let levels = if plan.options().ranks_per_node > 0 { "2" } else { "1" };
            for (direction, &measured) in DIRECTIONS.into_iter().zip(best) {
                if measured.is_infinite() {
                    return Err(Error::Invalid {
                        argument: format!("the time of {name}, {} {}, {direction:?}", plan.mesh(), plan.layout()),
                        found: "shorter than a tick of the clock".into(),
                        expected: "a longer one".into(),
                        hint: "more --tokens",
                    });
                }
                let words = [
                    name.to_string(),
                    format!("{} {}", p.dtype(), p.head_dim()),
                    mask.clone(),
                    plan.mesh().to_string(),
                    plan.layout().to_string(),
                    levels.into(),
                    format!("{direction:?}").to_lowercase(),
                ];
                lines.push(Line { words, predicted: plan.simulate(direction, machine)?.makespan, measured });
            }
        }
        Ok(lines)
    }

    /// Predicts every case; the table as Markdown.
    pub fn to_markdown(&self, machine: &Machine) -> Result<String> {
        let mut text =
            "| case | type, dim | mask | mesh | layout | levels | direction | predicted ms | measured ms | error |\n\
                        |---|---|---|---|---|---|---|---|---|---|\n"
                .to_string();
        let lines = self.lines(machine)?;
        for line in &lines {
            let [predicted, measured, error] = [line.predicted * 1e3, line.measured * 1e3, line.error() * 100.0];
            let words = line.words.join(" | ");
            let _ = writeln!(text, "| {words} | {predicted:.2} | {measured:.2} | {error:+.1} % |");
        }
        let mut errors: Vec<f64> = lines.iter().map(|line| 100.0 * line.error().abs()).collect();
        errors.sort_unstable_by(f64::total_cmp);
        let (median, worst) = (errors[errors.len() / 2], errors[errors.len() - 1]);
        let _ = writeln!(text, "\n{} cases: error {median:.1} % in the median, {worst:.1} % at worst.", errors.len());
        Ok(text)
    }

    /// The lines of the table, as JSON.
    pub fn as_json(&self, machine: &Machine) -> Result<Vec<Json>> {
        const NAMES: [&str; 7] = ["case", "dtype_dim", "mask", "mesh", "layout", "levels", "direction"];
        let of = |line: Line| {
            let mut fields: Vec<_> = NAMES.into_iter().zip(line.words.map(Json::Text)).collect();
            fields.push(("predicted", Json::Number(line.predicted)));
            fields.push(("measured", Json::Number(line.measured)));
            Json::Object(fields)
        };
        Ok(self.lines(machine)?.into_iter().map(of).collect())
    }
}
