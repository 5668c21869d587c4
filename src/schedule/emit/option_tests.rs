// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests that every option of a plan has an effect on its schedules: an accepted option without effect fails here.

use alloc::{format, vec::Vec};

use crate::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem,
    plan::{Circulate, Gather, Wire},
    schedule::{Direction, OpKind, Schedule},
};

/// Checks that the schedule shows every option of the plan.
fn shows(what: &str, plan: &Plan) {
    let o = plan.options();
    let ring = plan.mesh().ring > 1;
    let of = |direction| Schedule::new(plan, plan.mesh().world() - 1, direction).unwrap();
    let (forward, backward) = (of(Direction::Forward), of(Direction::Backward));
    let both = Schedule::both(plan, plan.mesh().world() - 1).unwrap();
    assert_eq!(format!("{both:?}"), format!("{:?}", [&forward, &backward]), "{what}: made together");
    let count = |s: &Schedule, is: &dyn Fn(&OpKind) -> bool| s.ops.iter().filter(|op| is(&op.kind)).count();
    for s in [&forward, &backward] {
        assert_eq!(s.aligned, o.reproducible, "{what}: reproducible");
    }
    if !ring {
        return;
    }
    let fetches = count(&forward, &|k| matches!(k, OpKind::Fetch { .. }));
    let steps = if o.gather != Gather::Steps { 1 } else { plan.mesh().ring - 1 };
    // A rank makes at most as many passes as it has kv heads.
    let passes = o.passes.min(plan.heads_of(plan.mesh().world() - 1).kv.len());
    assert_eq!(fetches, steps * passes, "{what}: gather or passes");
    let queries = o.circulate_forward == Circulate::Queries;
    assert_eq!((forward.keys.is_none(), forward.queries.is_some()), (queries, queries), "{what}: circulate_forward");
    let merges = count(&forward, &|k| matches!(k, OpKind::Merge { .. }));
    assert_eq!(merges, if queries { steps } else { 0 }, "{what}: circulate_forward");
    match o.circulate {
        _ if o.reproducible => assert!(backward.keys.is_some() && backward.queries.is_some(), "{what}: reproducible"),
        Circulate::Queries => assert!(backward.keys.is_none() && backward.queries.is_some(), "{what}: circulate"),
        Circulate::Keys => assert!(backward.keys.is_some() && backward.queries.is_none(), "{what}: circulate"),
        Circulate::Auto => {}
    }
    let narrow = backward.buffers.iter().any(|b| b.dtype == Dtype::Bf16);
    assert_eq!(narrow, o.wire == Wire::Bf16, "{what}: wire");
}

#[test]
fn schedules_show_their_options() {
    let batch = Batch::from_lengths(&[21, 0, 12, 5]).unwrap();
    let p =
        Problem::new(batch, 6, 3, 8, Dtype::F32).with_value_dim(4).with_sinks_per_head(2).with_mask(Mask::window(9, 2));
    let flags = [false, true];
    let mut list = Vec::new();
    for (gather, passes) in
        [(Gather::Steps, 1), (Gather::Steps, 3), (Gather::Others, 1), (Gather::Others, 3), (Gather::Together, 1)]
    {
        for circulate in [Circulate::Auto, Circulate::Keys, Circulate::Queries] {
            for (wire, reproducible) in [(Wire::Full, false), (Wire::Full, true), (Wire::Bf16, false)] {
                for pack in flags {
                    let o = Options::new().gather(gather).passes(passes).circulate(circulate);
                    let o = o.wire(wire).reproducible(reproducible).pack_inputs(pack);
                    list.extend([o, o.circulate_forward(Circulate::Queries)]);
                }
            }
        }
    }
    let mut shown = 0;
    for options in list {
        for (ulysses, ring) in [(3, 1), (1, 3), (2, 2)] {
            let mesh = Mesh { replicas: 1, ring, ulysses };
            // Refusals have tests of their own.
            let Ok(plan) = Plan::builder(&p).mesh(mesh).layout(Layout::Zigzag).options(options).build() else {
                continue;
            };
            shows(&format!("{mesh}, {options:?}"), &plan);
            shown += 1;
        }
    }
    assert_eq!(shown, 204);
}
