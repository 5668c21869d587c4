// SPDX-License-Identifier: MIT OR Apache-2.0
//! Problems, meshes and options that contradict each other, whatever the layout.

use alloc::format;

use super::{AttentionKind, Circulate, Gather, Options, Problem, Wire, nodes};
use crate::{
    error::{Error, Result},
    mesh::Mesh,
};

/// Refuses problems, meshes and options that have no plan with any layout.
pub(super) fn check(problem: &Problem, mesh: Mesh, options: Options) -> Result<()> {
    problem.check()?;
    if mesh.replicas == 0 || mesh.ring == 0 || mesh.ulysses == 0 {
        return Err(Error::invalid("mesh", mesh.factors(), "every factor at least 1"));
    }
    mesh.check_world()?;
    if mesh.ulysses > problem.heads() {
        return Err(Error::invalid("mesh.ulysses", mesh.ulysses, format!("at most heads = {}", problem.heads()))
            .hint("give the remaining ranks to the ring, of all plans that share their tokens"));
    }
    if problem.kind == AttentionKind::Other && mesh.ring > 1 {
        return Err(Error::unsupported(
            "kind other on a ring",
            format!("only softmax attention can be merged from parts, and the ring has {} ranks", mesh.ring),
            "give all of them to ulysses: its ranks see whole sequences",
        ));
    }
    let kv_heads = problem.kv_heads();
    if options.passes == 0 || options.passes > kv_heads {
        return Err(Error::invalid("options.passes", options.passes, format!("1 to kv_heads = {kv_heads}")));
    }
    if options.reproducible {
        let clash = |option: &'static str, why: &'static str| {
            Err(Error::unsupported(option, why, "leave it out, or leave out reproducible"))
        };
        if options.wire == Wire::Bf16 {
            return clash("wire bf16 with reproducible", "what is rounded on the way depends on the mesh");
        }
        if options.passes > 1 {
            return clash("options.passes with reproducible", "dk and dv are made head by head in one pass");
        }
        if options.circulate != Circulate::Auto {
            return clash("circulate with reproducible", "the ordered form gathers both sides");
        }
        if options.circulate_forward != Circulate::Auto {
            return clash("circulate_forward with reproducible", "the ordered form gathers k and v");
        }
        if options.gather == Gather::Steps {
            return clash("gather steps with reproducible", "the ordered form receives all rows at once");
        }
    }
    if options.circulate == Circulate::Queries && options.passes > 1 {
        return Err(Error::unsupported(
            "options.passes with circulate queries",
            "passes divide the kv heads that travel, and here the q side does",
            "leave out one of them",
        ));
    }
    if options.circulate_forward == Circulate::Queries {
        if options.passes > 1 {
            return Err(Error::unsupported(
                "options.passes with circulate_forward queries",
                "passes divide the kv heads that travel, and here q does",
                "leave out one of them",
            ));
        }
        if matches!(options.gather, Gather::Others | Gather::Together) {
            return Err(Error::unsupported(
                "options.gather with circulate_forward queries",
                "it says how k and v arrive, and here they stay where they are",
                "leave out one of them, or receive step by step",
            ));
        }
    }
    nodes::check(mesh, options)
}
