// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rule for gathering all k and v for one kernel call ([`Gather::Together`](super::Gather::Together)) when the
//! option `gather` is automatic.
//!
//! In a ring, each step reads every q row, and reads and writes its running result. With long documents this is little
//! work compared with the keys of a step. If a layout cuts each of many short documents for every rank, a row has only
//! a few keys in a step: kernels then work on ranges of a few rows, and the fixed cost of a range exceeds that of its
//! pairs. One call over all keys has the same pairs in far fewer ranges, and needs one exchange instead of many. The
//! price: k and v of all ranks are in the workspace at once, and nothing is computed while they are received.
//!
//! The rule, [`together_pays`], depends only on the problem, the mesh and the layout, so that all ranks make the same
//! choice. It applies if the option `gather` is automatic, with one pass, without a circulating q side being requested,
//! and if the ring lies in one node.

use super::{Circulate, Form, Gather, NodeRanks, Options, Problem};
use crate::{batch::Side, layout::Layout, mesh::Mesh};

/// With at least this many keys per row and ring step, on average, ring steps are as fast or faster and need less
/// memory.
pub(crate) const MIN_KEYS_PER_STEP: u64 = 64;
/// With fewer documents than this, the fixed cost of ranges is too small to matter.
pub(crate) const MANY_DOCUMENTS: usize = 32;
/// The most bytes of k and v, over all ring ranks and the heads of one, that the automatic choice gathers.
pub(crate) const GATHERED: u64 = 16 << 20;

/// The form given by the options, or the automatic choice.
pub(super) fn form_of(problem: &Problem, mesh: Mesh, layout: Layout, options: Options, node_ranks: NodeRanks) -> Form {
    let one_level = node_ranks.ring == mesh.ring;
    let queries = options.circulate == Circulate::Queries || options.circulate_forward == Circulate::Queries;
    let free = options.passes == 1 && !queries && one_level;
    match options.gather {
        _ if options.reproducible => Form::Ordered,
        Gather::Others => Form::Gather,
        Gather::Together if mesh.ring > 1 => Form::Together,
        Gather::Auto if free && together_pays(problem, mesh, layout) => Form::Together,
        _ => Form::Ring,
    }
}

/// Whether gathering all k and v for one call is faster than ring steps and takes little memory.
///
/// The layout cuts every document for every rank (zigzag, striped), there are at least [`MANY_DOCUMENTS`], a q row has
/// on average fewer than [`MIN_KEYS_PER_STEP`] keys in each ring step, and k and v of all ring ranks, of the heads of
/// one rank, take at most [`GATHERED`] bytes.
pub(super) fn together_pays(problem: &Problem, mesh: Mesh, layout: Layout) -> bool {
    let batch = problem.batch();
    if mesh.ring == 1
        || !matches!(layout, Layout::Zigzag | Layout::Striped { .. })
        || batch.documents() < MANY_DOCUMENTS
    {
        return false;
    }
    let (q, k) = (batch.tokens(Side::Q) as u128, batch.tokens(Side::K) as u128);
    let heads = problem.kv_heads().div_ceil(mesh.ulysses) as u128;
    let row = heads * (problem.head_dim() + problem.value_dim()) as u128 * problem.dtype().size() as u128;
    k * row <= u128::from(GATHERED) && problem.area() < u128::from(MIN_KEYS_PER_STEP) * q * mesh.ring as u128
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, Dtype, Mask, Plan};
    use alloc::vec;

    fn problem(documents: usize, length: usize) -> Problem {
        Problem::new(Batch::from_lengths(&vec![length; documents]).unwrap(), 8, 2, 64, Dtype::F32)
    }

    fn form(p: &Problem, ring: usize, layout: Layout, options: Options) -> Form {
        Plan::builder(p).mesh(Mesh::ring(ring).unwrap()).layout(layout).options(options).build().unwrap().form()
    }

    #[test]
    fn many_short_documents_that_are_cut_for_every_rank() {
        let chosen = |p: &Problem, ring, layout| form(p, ring, layout, Options::new());
        let p = problem(300, 20);
        assert_eq!(chosen(&p, 4, Layout::Zigzag), Form::Together);
        assert_eq!(chosen(&p, 4, Layout::Striped { stripe: 2 }), Form::Together);
        for layout in [Layout::Contiguous, Layout::ZigzagPack, Layout::Balanced { chunks: 4 }] {
            assert_eq!(chosen(&p, 4, layout), Form::Ring, "{layout}");
        }
        assert_eq!(chosen(&p, 1, Layout::Zigzag), Form::Ring);
        // Few documents; long ones; long ones with a short window, and with more ranks.
        assert_eq!(chosen(&problem(MANY_DOCUMENTS - 1, 20), 4, Layout::Zigzag), Form::Ring);
        let long = problem(MANY_DOCUMENTS, 512);
        assert_eq!(chosen(&long, 4, Layout::Zigzag), Form::Ring);
        assert_eq!(chosen(&long, 5, Layout::Zigzag), Form::Together);
        assert_eq!(chosen(&long.with_mask(Mask::sliding(200)), 4, Layout::Zigzag), Form::Together);
    }

    #[test]
    fn no_more_is_gathered_than_it_says() {
        // A k token and a v token are 1,024 bytes together.
        let (at, above) = (problem(64, 256), problem(64, 257));
        let (mesh, layout) = (Mesh::ring(4).unwrap(), Layout::Zigzag);
        assert!(together_pays(&at, mesh, layout) && !together_pays(&above, mesh, layout));
        // Each Ulysses rank has one head.
        assert!(together_pays(&above, Mesh { replicas: 1, ring: 4, ulysses: 2 }, layout));
    }

    #[test]
    fn options_come_first() {
        let (p, o) = (problem(300, 20), Options::new);
        for (options, expected) in [
            (o().gather(Gather::Steps), Form::Ring),
            (o().gather(Gather::Others), Form::Gather),
            (o().passes(2), Form::Ring),
            (o().circulate(Circulate::Queries), Form::Ring),
            (o().circulate(Circulate::Keys), Form::Together),
            (o().reproducible(true), Form::Ordered),
            (o().gather(Gather::Together).circulate(Circulate::Queries), Form::Together),
            (o().gather(Gather::Together).passes(2), Form::Together),
        ] {
            assert_eq!(form(&p, 3, Layout::Zigzag, options), expected, "{options:?}");
        }
        let made = |gather| {
            Plan::builder(&p)
                .mesh(Mesh::ring(3).unwrap())
                .layout(Layout::Zigzag)
                .options(o().gather(gather))
                .build()
                .unwrap()
        };
        assert_ne!(made(Gather::Auto).fingerprint(), made(Gather::Steps).fingerprint());
    }

    /// The chosen form is right.
    #[test]
    fn a_chosen_plan_is_proved() {
        let lengths: alloc::vec::Vec<usize> = (0..MANY_DOCUMENTS + 3).map(|i| i * 7 % 13).collect();
        let p = Problem::new(Batch::from_lengths(&lengths).unwrap(), 4, 2, 8, Dtype::Bf16);
        for (mesh, layout) in [((1, 3), Layout::Zigzag), ((2, 2), Layout::Striped { stripe: 1 })] {
            let mesh = Mesh { replicas: 1, ring: mesh.1, ulysses: mesh.0 };
            let plan = Plan::new(&p, mesh, layout).unwrap();
            assert_eq!(plan.form(), Form::Together);
            let (forward, backward) = plan.verify().unwrap();
            if mesh.ulysses == 1 {
                assert!(
                    forward.ranks.iter().all(|r| r.exchanges == 1) && backward.ranks.iter().all(|r| r.exchanges == 2)
                );
            }
        }
    }
}
