// SPDX-License-Identifier: MIT OR Apache-2.0
//! Small plans of every kind, by the number of ranks.

use cpattn::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem,
    plan::{Circulate, Gather, Wire},
};

fn problem(lengths: &[usize], heads: usize, kv_heads: usize, dim: usize) -> Problem {
    Problem::new(Batch::from_lengths(lengths).unwrap(), heads, kv_heads, dim, Dtype::Bf16)
}

fn plan(p: &Problem, ulysses: usize, ring: usize, layout: Layout, options: Options) -> Plan {
    let mesh = Mesh { replicas: 1, ring, ulysses };
    Plan::builder(p).mesh(mesh).layout(layout).options(options).build().unwrap()
}

/// Plans of so many ranks.
pub fn of(world: usize) -> Vec<(&'static str, Plan)> {
    let o = Options::new;
    let window = problem(&[21, 0, 30], 4, 2, 32).with_mask(Mask::window(9, 2)).with_sinks_per_head(2);
    let alibi = problem(&[33, 8], 4, 4, 16).with_alibi_slopes(&[0.5, 0.25, 0.1, 0.05]).with_softcap(4.0);
    let mla = problem(&[18, 25], 4, 1, 48).with_value_dim(32);
    match world {
        1 => vec![
            ("alone, window and sinks", plan(&window, 1, 1, Layout::Contiguous, o())),
            ("alone, ALiBi", plan(&alibi, 1, 1, Layout::Contiguous, o())),
        ],
        2 => vec![
            ("ring, window and sinks", plan(&window, 1, 2, Layout::Zigzag, o())),
            ("Ulysses, ALiBi", plan(&alibi, 2, 1, Layout::Contiguous, o())),
            ("ring, MLA, q circulates", {
                let o = o().circulate(Circulate::Queries).pack_inputs(true);
                plan(&mla, 1, 2, Layout::Striped { stripe: 3 }, o)
            }),
            (
                "ring, q circulates forward",
                plan(&window, 1, 2, Layout::Zigzag, o().circulate_forward(Circulate::Queries)),
            ),
            ("together", plan(&window, 1, 2, Layout::Zigzag, o().gather(Gather::Together))),
            ("gather, bf16 on the wire", plan(&mla, 1, 2, Layout::Zigzag, o().gather(true).wire(Wire::Bf16))),
        ],
        3 => vec![
            ("Ulysses of 3 over 4 heads and sinks", plan(&window, 3, 1, Layout::Contiguous, o())),
            ("ring of 3, passes", plan(&window, 1, 3, Layout::ZigzagPack, o().passes(2))),
        ],
        4 => vec![
            ("hybrid, window and sinks", plan(&window, 2, 2, Layout::Zigzag, o())),
            ("hybrid, ALiBi", plan(&alibi, 2, 2, Layout::Balanced { chunks: 2 }, o().circulate(Circulate::Keys))),
        ],
        n => panic!("no plans of {n} ranks"),
    }
}
