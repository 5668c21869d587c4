// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which side is sent round the ring.
//!
//! Either side can stay in place while the other is sent, in the forward and in the backward. Each row that is sent
//! costs bytes; k and v are sent to the ranks whose q rows read them, q to the ranks whose keys it reads. If the option
//! is automatic, the side with fewer bytes is sent.
//!
//! In the backward all tokens of both sides are counted. In the forward that would be wrong in an important case: in a
//! cache with partly filled slots most k rows are read by no query. So the forward counts the rows that are sent, by
//! the mask and the shares. If q and k are the same tokens, as in training, k and v are sent without counting: a q row
//! costs more than a k row, because o is returned in the accumulator's type, with an lse, and there are no fewer q
//! heads than kv heads. Fewer q rows than k rows would be sent there only if documents were cut unevenly.
//!
//! The choice depends on the problem, the mesh and the layout alone, so all ranks make the same one.

use super::{
    Circulate, CirculatingSide, Form, Options, Problem,
    layout_load::{LayoutLoad, loads_of_ranks},
};
use crate::{batch::Side, heads::HeadCounts, layout::Shares, mesh::Mesh};

/// Bytes of a row sent in a forward of ring steps, to all ranks of a Ulysses group: a row of k and v, and a row of q
/// with the o that is returned.
fn row_bytes(problem: &Problem, mesh: Mesh) -> [u128; 2] {
    let held = u128::from(HeadCounts::new(mesh.ulysses, problem.head_numbers()).all_kv);
    let (e, a) = (problem.dtype().size() as u128, problem.dtype().accumulator().size() as u128);
    let (dk, dv) = (problem.head_dim() as u128, problem.value_dim() as u128);
    [held * (dk + dv) * e, problem.heads() as u128 * (dk * e + (dv + 2) * a)]
}

/// Total bytes that ring ranks receive in a forward of ring steps: with k and v circulating, and with q. With several
/// nodes, as if each row were sent to each of its readers.
pub(super) fn forward_bytes(problem: &Problem, mesh: Mesh, shares: &Shares) -> [u128; 2] {
    let [of_key, of_query] = row_bytes(problem, mesh);
    let needed = |sent| u128::from(LayoutLoad::of(problem, shares, sent).total.needed);
    [needed(CirculatingSide::Keys) * of_key, needed(CirculatingSide::Queries) * of_query]
}

/// Whether q's bytes are fewer than those of k and v. Ranks are counted one by one until the answer is certain: early
/// if there are few q rows, because a q row is sent to all other ranks at most.
fn queries_are_fewer(problem: &Problem, mesh: Mesh, shares: &Shares) -> bool {
    let [of_key, of_query] = row_bytes(problem, mesh);
    let most = problem.batch().tokens(Side::Q) as u128 * (mesh.ring as u128 - 1) * of_query;
    let (mut keys, mut queries) = (0, 0);
    for load in loads_of_ranks(problem, shares, CirculatingSide::Keys) {
        keys += u128::from(load.needed) * of_key;
        if keys > most {
            return true;
        }
    }
    for load in loads_of_ranks(problem, shares, CirculatingSide::Queries) {
        queries += u128::from(load.needed) * of_query;
        if queries >= keys {
            return false;
        }
    }
    true
}

/// Whether an automatic choice compares the bytes of a forward.
pub(super) fn counts(problem: &Problem, mesh: Mesh, form: Form, options: Options) -> bool {
    form == Form::Ring && options.passes == 1 && mesh.ring > 1 && !problem.batch().is_self_attention()
}

/// Which side circulates in the forward.
pub(super) fn forward_side(
    problem: &Problem,
    mesh: Mesh,
    shares: &Shares,
    form: Form,
    options: Options,
) -> CirculatingSide {
    let queries = match options.circulate_forward {
        Circulate::Auto => counts(problem, mesh, form, options) && queries_are_fewer(problem, mesh, shares),
        asked => asked == Circulate::Queries,
    };
    if queries { CirculatingSide::Queries } else { CirculatingSide::Keys }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, Dtype, Layout, Mask, Plan, schedule::Direction};

    /// One sequence with one new token, one with none, one with a chunk, in slots that are partly filled.
    fn serving() -> Batch {
        Batch::cross(&[0, 1, 1, 12], &[0, 48, 96, 144], Some(&[40, 3, 9])).unwrap()
    }

    /// Batches whose q and k differ; the last two have few keys.
    fn batches() -> [Batch; 4] {
        [
            serving(),
            Batch::cross(&[0, 5, 24], &[0, 9, 80], None).unwrap(),
            Batch::cross(&[0, 40, 90], &[0, 3, 20], Some(&[-2, 5])).unwrap(),
            Batch::cross(&[0, 48], &[0, 48], Some(&[2])).unwrap(),
        ]
    }

    fn plan(problem: &Problem, mesh: Mesh, layout: Layout, side: Circulate) -> Plan {
        Plan::builder(problem)
            .mesh(mesh)
            .layout(layout)
            .options(Options::new().circulate_forward(side))
            .build()
            .unwrap()
    }

    /// The compared bytes are those of the schedules; the automatic plan moves the fewer bytes, and passes the proof.
    #[test]
    fn the_automatic_side_moves_fewer_bytes() {
        let mut chosen = [0; 2];
        for batch in batches() {
            for mask in [Mask::causal(), Mask::full(), Mask::window(6, 0), Mask::window(1, 4)] {
                for (heads, kv_heads, value_dim) in [(6, 2, 8), (4, 4, 4)] {
                    let p = Problem::new(batch.clone(), heads, kv_heads, 8, Dtype::Bf16);
                    let p = p.with_value_dim(value_dim).with_mask(mask);
                    for layout in [Layout::Zigzag, Layout::Contiguous, Layout::Striped { stripe: 2 }] {
                        for (ring, ulysses) in [(1, 2), (2, 1), (4, 1), (3, 2), (2, 4)] {
                            let mesh = Mesh { replicas: 1, ring, ulysses };
                            let received = |side| -> u128 {
                                let plan = plan(&p, mesh, layout, side);
                                let of = |r| u128::from(plan.costs(r, Direction::Forward).unwrap().bytes_received());
                                (0..mesh.world()).map(of).sum()
                            };
                            let what = alloc::format!("{batch:?} {mask:?} {heads} {layout} {mesh}");
                            let [keys, queries] = [Circulate::Keys, Circulate::Queries].map(received);
                            let auto = plan(&p, mesh, layout, Circulate::Auto);
                            assert_eq!(received(Circulate::Auto), keys.min(queries), "{what}");
                            let [k, q] = forward_bytes(&p, mesh, auto.shares());
                            if ulysses == 1 {
                                assert_eq!([k, q], [keys, queries], "{what}");
                            }
                            // All-to-alls are the same with both sides.
                            assert_eq!(keys + q, queries + k, "{what}");
                            let side = auto.circulates(Direction::Forward);
                            // If bytes are equal, k and v are sent.
                            assert_eq!(side == CirculatingSide::Queries, ring > 1 && q < k, "{what}");
                            chosen[usize::from(side == CirculatingSide::Queries)] += 1;
                            let asked = if q < k { Circulate::Queries } else { Circulate::Keys };
                            let options = Options::new().circulate_forward(asked).pack_inputs(q < k);
                            let asked = Plan::builder(&p).mesh(mesh).layout(layout).options(options).build().unwrap();
                            assert_eq!(
                                auto.workspace_bound(0, Direction::Forward),
                                asked.workspace_bound(0, Direction::Forward)
                            );
                            if side == CirculatingSide::Queries {
                                auto.verify().unwrap();
                            }
                        }
                    }
                }
            }
        }
        assert!(chosen[0] > 100 && chosen[1] > 40, "{chosen:?}");
    }

    /// If q and k are the same tokens, or if an option keeps q in place, nothing changes.
    #[test]
    fn k_and_v_circulate_where_q_may_not() {
        let side = |batch: Batch, options| {
            let p = Problem::new(batch, 4, 4, 8, Dtype::F32);
            let layout = Layout::Striped { stripe: 2 };
            Plan::builder(&p)
                .mesh(Mesh::ring(4).unwrap())
                .layout(layout)
                .options(options)
                .build()
                .unwrap()
                .circulates(Direction::Forward)
        };
        let (k, q, o) = (CirculatingSide::Keys, CirculatingSide::Queries, Options::new);
        assert_eq!(side(serving(), o()), q);
        assert_eq!(side(serving(), o().gather(false)), q);
        assert_eq!(side(serving(), o().ranks_per_node(2)), q);
        for options in [o().passes(2), o().gather(true), o().reproducible(true), o().circulate_forward(Circulate::Keys)]
        {
            assert_eq!(side(serving(), options), k, "{options:?}");
        }
        let same = Batch::from_lengths(&[40, 1, 33]).unwrap();
        assert_eq!(side(same.clone(), o()), k);
        assert_eq!(side(same, o().circulate_forward(Circulate::Queries)), q);
    }

    /// A slot counts with the rows that are read, not with its length.
    #[test]
    fn a_slot_counts_by_what_is_in_it() {
        let side = |start: i64, new: i32| {
            let batch = Batch::cross(&[0, new], &[0, 1 << 16], Some(&[start])).unwrap();
            let p = Problem::new(batch, 32, 8, 128, Dtype::Bf16);
            Plan::new(&p, Mesh::ring(4).unwrap(), Layout::Striped { stripe: 64 })
                .unwrap()
                .circulates(Direction::Forward)
        };
        assert_eq!(side(0, 2048), CirculatingSide::Keys);
        assert_eq!(side(60_000, 2048), CirculatingSide::Queries);
        assert_eq!(side(60_000, 1), CirculatingSide::Queries);
        // A q row costs 6.1 times as many bytes as a k row.
        assert_eq!(side(10_000, 2048), CirculatingSide::Keys);
    }
}
