// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every form and option, executed without the runtime: a second oracle of schedules.

use super::*;
use cpattn::{
    Mask, Options,
    plan::{Circulate, Gather},
};

/// Executes a plan, and compares it with attention over the whole batch.
fn check(p: &Problem, mesh: Mesh, layout: Layout, options: Options) {
    let inputs = Inputs::new(p);
    let plan = Plan::builder(p).mesh(mesh).layout(layout).options(options).build().unwrap();
    let (found, expected) = (execute(&plan, &inputs).unwrap(), whole(p, &inputs));
    for ((name, a), b) in ["o", "lse", "dq", "dk", "dv", "dsinks"].iter().zip(&found).zip(&expected) {
        let far = difference(a, b);
        assert!(far < 1e-11, "{name} is {far:e} off: {p:?} {mesh} {layout} {options:?}");
    }
}

#[test]
fn every_form_and_option() {
    let packed = Batch::from_lengths(&[11, 0, 23, 4]).unwrap();
    let crossed = Batch::cross(&[0, 9, 21], &[0, 14, 40], Some(&[3, -2])).unwrap();
    let o = Options::new;
    let forms = [
        o(),
        o().circulate(Circulate::Keys).passes(2),
        o().circulate(Circulate::Queries),
        o().circulate_forward(Circulate::Queries),
        o().gather(Gather::Others),
        o().gather(Gather::Together),
        o().reproducible(true),
        o().pack_inputs(true),
        o().ranks_per_node(2),
        o().ranks_per_node(2).circulate(Circulate::Queries),
        o().ranks_per_node(2).gather(Gather::Together),
    ];
    let layouts = [
        Layout::Contiguous,
        Layout::Zigzag,
        Layout::ZigzagPack,
        Layout::Striped { stripe: 3 },
        Layout::Balanced { chunks: 2 },
    ];
    for batch in [&packed, &crossed] {
        for (i, options) in forms.into_iter().enumerate() {
            for (j, (ring, ulysses)) in [(1, 1), (4, 1), (1, 4), (2, 2), (3, 2)].into_iter().enumerate() {
                let p = Problem::new(batch.clone(), 4, 2, 5, Dtype::F64).with_value_dim(3).with_sinks(true);
                let p = match (i + j) % 4 {
                    0 => p.with_mask(Mask::full()).with_softcap(2.0),
                    1 => p.with_mask(Mask::window(6, 2)).with_alibi_slopes(&[0.1, 0.2, 0.0, 0.4]),
                    2 => {
                        let slopes: Vec<f32> = (0..4 * batch.documents()).map(|i| i as f32 * 0.07 - 0.2).collect();
                        p.with_mask(Mask::sliding(5)).with_alibi_slopes_per_document(&slopes)
                    }
                    _ => p,
                };
                let mesh = Mesh { replicas: 1, ring, ulysses };
                if Plan::builder(&p).mesh(mesh).layout(layouts[j]).options(options).build().is_ok() {
                    check(&p, mesh, layouts[(i + j) % layouts.len()], options);
                }
            }
        }
    }
}
