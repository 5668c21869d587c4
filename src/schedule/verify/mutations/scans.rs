// SPDX-License-Identifier: MIT OR Apache-2.0
//! Corruptions of joins of states: left out, repeated, of other segments, in the wrong order, without what is added.

use alloc::{format, vec::Vec};

use super::{Subject, mutate};
use crate::{
    batch::Batch,
    element::Dtype,
    layout::Layout,
    mesh::Mesh,
    plan::{Plan, Problem},
    schedule::{
        Decay, Purpose, Scan, ScanForm, Schedule,
        expanded::{ExpandedOp, SumBlock},
    },
};

/// Scans in each form: documents within a rank and over several, an empty one, ranks without tokens, two segments of a
/// document on one rank, beside Ulysses ranks.
pub(super) fn scans() -> Vec<Subject> {
    let mut subjects = Vec::new();
    for (lengths, ring, ulysses, layout) in [
        (&[2, 0, 13, 3][..], 5, 1, Layout::Contiguous),
        (&[9, 7], 3, 1, Layout::Zigzag),
        (&[3, 14], 2, 2, Layout::Balanced { chunks: 2 }),
    ] {
        let problem = Problem::new(Batch::from_lengths(lengths).unwrap(), 4, 2, 8, Dtype::Bf16);
        let plan = Plan::new(&problem, Mesh { replicas: 1, ring, ulysses }, layout).unwrap();
        for form in [ScanForm::Chain, ScanForm::Tree, ScanForm::Direct] {
            for decay in [Decay::Diagonal, Decay::Matrix] {
                let scan = Scan { form, reverse: decay == Decay::Matrix, ..Scan::new(decay, 2, 2, 2) };
                let name = format!("{scan:?} over {layout}, {ring} × {ulysses}");
                subjects.push(Subject::new(name, &plan, Purpose::Scan(scan), |rank| Schedule::scan(&plan, rank, scan)));
            }
        }
    }
    subjects
}

#[test]
fn joins_changed() {
    mutate("join", 400, |t, s, r, i, w| {
        let ExpandedOp::Compose(joins) = w else { return };
        for (b, sum) in joins.iter().enumerate() {
            let mut change = |what: &str, change: &dyn Fn(&mut Vec<SumBlock>)| {
                t.listed(s, format!("rank {r} op {i} join {b} {what}"), |x| {
                    if let ExpandedOp::Compose(joins) = &mut x[r][i] {
                        change(joins);
                    }
                });
            };
            change("left out", &|x| _ = x.remove(b));
            change("made twice", &|x| x.push(x[b].clone()));
            change("to another row", &|x| x[b].dst.row += 1);
            change("to another head", &|x| x[b].dst.head += 1);
            change("without rows", &|x| {
                let one = &mut x[b];
                one.dst.rows = 0;
                one.sources.iter_mut().for_each(|v| v.rows = 0);
            });
            change("of the first head", &|x| {
                let one = &mut x[b];
                one.dst.heads = 1;
                one.sources.iter_mut().for_each(|v| v.heads = 1);
            });
            change("operands exchanged", &|x| x[b].sources.swap(0, 1));
            if sum.sources.len() == 3 {
                change("later for earlier", &|x| x[b].sources.swap(1, 2));
                change("nothing added", &|x| _ = x[b].sources.pop());
            }
            change("a decay added", &|x| x[b].sources.push(x[b].sources[0]));
            for n in 0..sum.sources.len() {
                change("of the row behind", &|x| x[b].sources[n].row += 1);
                if sum.sources[n].row > 0 {
                    change("of the row before", &|x| x[b].sources[n].row -= 1);
                }
                change("of another head", &|x| x[b].sources[n].head += 1);
                change("of the result", &|x| x[b].sources[n] = x[b].dst);
            }
        }
    });
}
