// SPDX-License-Identifier: MIT OR Apache-2.0
//! An [`Outlook`] as text: a table of candidates, and the reasons for the first one.

use alloc::{format, string::String};
use core::fmt::Write;

use super::{MeshTime, Model, Outlook};

impl Outlook {
    /// A table of the first `most` candidates in Markdown, followed by an explanation of the best one.
    pub fn to_markdown(&self, most: usize) -> String {
        let mut out = String::new();
        let kind = if self.estimate { "estimated figures" } else { "measured figures" };
        let _ = writeln!(out, "Predicted for {} ranks on {} ({kind}).", self.world, self.machine);
        if let Some((own, other)) = self.derived_kernels {
            let _ = writeln!(
                out,
                "The machine description has no kernel of {own}: the rates are derived from those of {other} and the nearest \
                 dims, inverse to the bytes of an element."
            );
        } else if !self.exact_kernels {
            out.push_str(
                "The machine description has no kernel of these dims: the rates are those of the nearest dims.\n",
            );
        }
        out.push_str(
            "\n| ulysses × ring | layout | levels | forward ms | backward ms | exposed ms | MB of a rank inside | MB of a card between | GB of a rank | model |\n\
             |---|---|---|---|---|---|---|---|---|---|\n",
        );
        for c in self.candidates.iter().take(most) {
            let ms = |s: f64| format!("{:.3}", 1e3 * s);
            let mb = |b: f64| format!("{:.1}", 1e-6 * b);
            let _ = writeln!(
                out,
                "| {} × {} | {} | {} | {} | {} | {} | {} | {} | {:.2}{} | {} |",
                c.mesh.ulysses,
                c.mesh.ring,
                c.layout,
                c.levels,
                ms(c.forward.seconds),
                ms(c.backward.seconds),
                ms(c.exposed()),
                mb(c.forward.bytes_inside + c.backward.bytes_inside),
                mb(c.forward.bytes_of_card + c.backward.bytes_of_card),
                1e-9 * c.memory as f64,
                if self.fits(c) { "" } else { ", too much" },
                match c.model {
                    Model::Aggregate => "busiest rank",
                    Model::Simulation => "simulated",
                },
            );
        }
        if self.candidates.len() > most {
            let _ = writeln!(out, "\n{} more candidates.", self.candidates.len() - most);
        }
        self.explain_best(&mut out);
        out
    }

    /// Whether a candidate fits in the memory of a rank.
    pub fn fits(&self, candidate: &MeshTime) -> bool {
        candidate.memory as f64 <= self.memory
    }

    fn explain_best(&self, out: &mut String) {
        let Some(best) = self.candidates.first() else { return };
        let (seconds, exposed) = (best.seconds(), best.exposed());
        let _ = writeln!(
            out,
            "\nBest: ulysses {} × ring {}, {}{}. Of {:.3} ms, {:.3} ms would be needed for the work if it were spread evenly ({:.1} %); \
             {:.3} ms are exposed communication ({:.1} %); the rest is uneven work, packing and fixed costs.",
            best.mesh.ulysses,
            best.mesh.ring,
            best.layout,
            if best.levels == 2 { ", two levels (ranks_per_node)" } else { ", one level" },
            1e3 * seconds,
            1e3 * self.ideal,
            100.0 * self.ideal / seconds,
            1e3 * exposed,
            100.0 * exposed / seconds,
        );
        if !self.fits(best) {
            let _ = writeln!(out, "No candidate fits in the {:.1} GB of a rank.", 1e-9 * self.memory);
        }
        let alike = |c: &&MeshTime| (c.mesh, c.layout, c.model) == (best.mesh, best.layout, best.model);
        if let Some(other) = self.candidates.iter().filter(alike).find(|c| c.levels != best.levels) {
            let levels = if other.levels == 2 { "Two levels (ranks_per_node) take" } else { "One level takes" };
            let _ = writeln!(out, "{levels} {:.3} times as long on this mesh and layout.", other.seconds() / seconds);
        }
        if let Some(next) = self.candidates.iter().find(|c| c.mesh != best.mesh) {
            let _ = writeln!(
                out,
                "The next mesh, ulysses {} × ring {} with {}, takes {:.2} times as long, with {:.3} ms exposed.",
                next.mesh.ulysses,
                next.mesh.ring,
                next.layout,
                next.seconds() / seconds,
                1e3 * next.exposed(),
            );
        }
        if self.candidates.iter().any(|c| c.model == Model::Aggregate) {
            out.push_str(
                "\"Busiest rank\": computed from the largest load of any rank, as if rows came evenly from all ranks and ring \
                 steps overlapped perfectly. These times are up to 16 % too short for zigzag layouts, and up to 51 % too \
                 long with two levels and rows of a few neighbours.\n",
            );
            if self.on_cores {
                out.push_str("Here ranks share cores: with a mask they are up to 1.9 times too long.\n");
            }
        }
    }
}
