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
            .hint("use a larger ring, in all plans that share their tokens"));
    }
    if problem.kind == AttentionKind::Other && mesh.ring > 1 {
        return Err(Error::unsupported(
            "kind other on a ring",
            format!("only softmax attention can be merged from parts, and the ring has {} ranks", mesh.ring),
            "give all ranks to ulysses, with ring 1: Ulysses ranks have whole sequences",
        ));
    }
    let kv_heads = problem.kv_heads();
    if options.passes == 0 || options.passes > kv_heads {
        return Err(Error::invalid("options.passes", options.passes, format!("1 to kv_heads = {kv_heads}")).hint(
            "a pass takes one kv head at least: use fewer passes (plans with the same tokens may have different ones)",
        ));
    }
    let Options { gather, circulate, circulate_forward, reproducible: ordered, .. } = options;
    let (passes, queries) = (options.passes > 1, circulate_forward == Circulate::Queries);
    let queries_travel = "passes send k and v in parts, by kv heads, and here the q side is sent";
    let clash = |both: bool, names: &'static str, why: &'static str| {
        if both { Err(Error::unsupported(names, why, "leave out one of the two options")) } else { Ok(()) }
    };
    let wire = ordered && options.wire == Wire::Bf16;
    clash(wire, "options.wire bf16 with reproducible", "the mesh decides which values are rounded, and so the bits")?;
    clash(ordered && passes, "options.passes with reproducible", "dk and dv are computed head by head, in one pass")?;
    let asked = ordered && circulate != Circulate::Auto;
    clash(asked, "options.circulate with reproducible", "a reproducible plan gathers all rows of both sides first")?;
    let asked = ordered && circulate_forward != Circulate::Auto;
    clash(asked, "options.circulate_forward with reproducible", "a reproducible plan gathers k and v first")?;
    let steps = ordered && gather == Gather::Steps;
    clash(steps, "options.gather steps with reproducible", "a reproducible plan receives all rows at once")?;
    clash(passes && circulate == Circulate::Queries, "options.passes with circulate queries", queries_travel)?;
    clash(passes && queries, "options.passes with circulate_forward queries", queries_travel)?;
    let gathers = queries && matches!(gather, Gather::Others | Gather::Together);
    let why = "the option gather is about receiving k and v, and here they stay with their owners";
    clash(gathers, "options.gather with circulate_forward queries", why)?;
    nodes::check(mesh, options)
}
