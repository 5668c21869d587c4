// SPDX-License-Identifier: MIT OR Apache-2.0
//! Corruptions of merges of parts: parts left out, repeated, swapped, of other rows or heads, o and lse apart.

use alloc::{format, vec::Vec};

use super::{Subject, mutate};
use crate::{
    batch::Batch,
    element::Dtype,
    layout::Layout,
    mesh::Mesh,
    plan::{Plan, Problem},
    schedule::{Combine, CombineOp, CombineTo, Purpose, Schedule, expanded::ExpandedOp},
};

/// Combines over rings, alone and beside Ulysses ranks, with pieces of heads and of tokens, some of them empty.
pub(super) fn subjects() -> Vec<Subject> {
    let mut subjects = Vec::new();
    for (ring, ulysses, heads, tokens) in [(2, 1, 2, 3), (3, 1, 4, 2), (3, 2, 6, 4), (4, 1, 3, 2)] {
        let problem = Problem::new(Batch::from_lengths(&[tokens]).unwrap(), heads, heads, 8, Dtype::Bf16);
        let mesh = Mesh { replicas: 1, ring, ulysses };
        let plan = Plan::new(&problem.with_sinks(ring == 3), mesh, Layout::Contiguous).unwrap();
        for to in [CombineTo::All, CombineTo::Heads, CombineTo::Tokens] {
            let combine = Combine { to, partial: Dtype::F32 };
            let name = format!("{combine:?} over {mesh:?}");
            subjects.push(Subject::new(name, &plan, Purpose::Combine(combine), |rank| {
                Schedule::combine(&plan, rank, combine)
            }));
        }
    }
    subjects
}

#[test]
fn merges_of_parts_changed() {
    mutate("merge of parts", 400, |t, s, r, i, w| {
        let ExpandedOp::Combine(c) = w else { return };
        let mut change = |what: &str, change: &dyn Fn(&mut CombineOp)| {
            t.listed(s, format!("rank {r} op {i} {what}"), |x| {
                if let ExpandedOp::Combine(c) = &mut x[r][i] {
                    change(c);
                }
            });
        };
        change("of other heads", &|c| c.first_head += 1);
        change("o for lse", &|c| core::mem::swap(&mut c.o, &mut c.lse));
        change("nothing", &|c| (c.o.sources, c.lse.sources) = (Vec::new(), Vec::new()));
        for n in 0..c.o.sources.len() {
            change("a part left out", &|c| _ = (c.o.sources.remove(n), c.lse.sources.remove(n)));
            change("a part twice", &|c| {
                c.o.sources.push(c.o.sources[n]);
                c.lse.sources.push(c.lse.sources[n]);
            });
            change("an o left out", &|c| _ = c.o.sources.remove(n));
            change("an lse left out", &|c| _ = c.lse.sources.remove(n));
            change("an o of another row", &|c| c.o.sources[n].row += 1);
            change("an lse of another row", &|c| c.lse.sources[n].row += 1);
            change("an o of another head", &|c| c.o.sources[n].head += 1);
            for m in 0..n {
                change("parts swapped", &|c| {
                    c.o.sources.swap(n, m);
                    c.lse.sources.swap(n, m);
                });
                change("the lse of another part", &|c| c.lse.sources.swap(n, m));
            }
        }
        change("fewer rows", &|c| {
            let all = [&mut c.o, &mut c.lse];
            for sum in all {
                sum.dst.rows -= 1;
                sum.sources.iter_mut().for_each(|v| v.rows -= 1);
            }
        });
    });
}
