// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plans, proved whole: every rank's schedule of both directions goes through the verifier.

use cpattn::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem,
    plan::{Circulate, Wire},
    schedule::verify::Report,
};

const LAYOUTS: [Layout; 7] = [
    Layout::Contiguous,
    Layout::Zigzag,
    Layout::ZigzagPack,
    Layout::Striped { stripe: 1 },
    Layout::Striped { stripe: 3 },
    Layout::Balanced { chunks: 1 },
    Layout::Balanced { chunks: 3 },
];

const MASKS: [Mask; 6] = [
    Mask::full(),
    Mask::causal(),
    Mask::window(3, 0),
    Mask::window(2, 4),
    Mask { left: Some(5), right: None },
    Mask { left: None, right: Some(2) },
];

fn options() -> Vec<Options> {
    let o = Options::new;
    vec![
        o(),
        o().gather(true),
        o().passes(2),
        o().passes(3).gather(true).wire(Wire::Bf16),
        o().circulate(Circulate::Keys),
        o().circulate(Circulate::Keys).wire(Wire::Bf16).pack_inputs(true),
        o().circulate(Circulate::Queries),
        o().circulate(Circulate::Queries).gather(true),
        o().circulate(Circulate::Queries).wire(Wire::Bf16).pack_inputs(true),
        o().reproducible(true),
        o().reproducible(true).pack_inputs(true),
        o().pack_inputs(true),
    ]
}

fn verify(problem: &Problem, mesh: Mesh, layout: Layout, options: Options) -> (Report, Report) {
    let plan = Plan::with_options(problem, mesh, layout, options)
        .unwrap_or_else(|e| panic!("{problem:?} on {mesh}, {layout}, {options:?}: {e}"));
    plan.verify().unwrap_or_else(|e| panic!("{problem:?} on {mesh}, {layout}, {options:?}: {e}"))
}

/// Every layout, mask and option on one problem shape; returns how many plans were proved.
fn grid(batch: &Batch, heads: usize, kv_heads: usize, mesh: Mesh) -> usize {
    let mut proved = 0;
    for layout in LAYOUTS {
        for mask in MASKS {
            for o in options() {
                if o.passes > kv_heads {
                    continue;
                }
                let dtype = if proved % 2 == 0 { Dtype::Bf16 } else { Dtype::F32 };
                let problem = Problem::new(batch.clone(), heads, kv_heads, 8, dtype)
                    .value_dim(4)
                    .mask(mask)
                    .sinks(proved % 3 == 0);
                let (forward, backward) = verify(&problem, mesh, layout, o);
                assert_eq!(forward.pairs, problem.area() * heads as u128);
                assert_eq!(backward.pairs, forward.pairs);
                proved += 1;
            }
        }
    }
    proved
}

fn pack() -> Batch {
    Batch::from_lengths(&[7, 0, 1, 13, 3, 22]).unwrap()
}

#[test]
fn nine_heads_on_six_ranks() {
    let mesh = Mesh::gcd(9, 6).unwrap();
    assert_eq!((mesh.ulysses, mesh.ring), (3, 2));
    assert_eq!(grid(&pack(), 9, 3, mesh), 504);
}
