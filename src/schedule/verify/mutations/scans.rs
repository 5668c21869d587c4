// SPDX-License-Identifier: MIT OR Apache-2.0
//! Corruptions of joins of states: left out, repeated, of other segments, in the wrong order, without what is added.

use alloc::{format, vec::Vec};

use super::mutate;
use crate::schedule::expanded::{ExpandedOp, SumBlock};

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
