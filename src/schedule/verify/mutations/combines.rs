// SPDX-License-Identifier: MIT OR Apache-2.0
//! Corruptions of merges of parts: parts left out, repeated, swapped, of other rows or heads, o and lse apart.

use alloc::{format, vec::Vec};

use super::mutate;
use crate::schedule::{CombineOp, expanded::ExpandedOp};

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
