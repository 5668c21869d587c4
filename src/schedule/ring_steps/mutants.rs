// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ring steps that contradict themselves, for the tests of the verifier: every field set to values that do not fit.

use alloc::{format, string::String, vec::Vec};

use super::{Hop, RingSteps};
use crate::{
    batch::Batch,
    layout::{Layout, Segment, Shares},
    mask::Mask,
    plan::Form,
};

impl RingSteps {
    /// Copies with one change each, and its name.
    pub(crate) fn mutants(&self) -> Vec<(String, Self)> {
        let mut list = Vec::new();
        let mut add = |name: String, change: &dyn Fn(&mut Self)| {
            let mut copy = self.clone();
            change(&mut copy);
            list.push((name, copy));
        };
        for mask in [Mask::full(), Mask::causal(), Mask::window(0, 0), Mask::window(u32::MAX, u32::MAX)] {
            add(format!("{mask:?}"), &|v| v.allowed = mask.into());
        }
        add("the other side".into(), &|v| v.circulating = v.circulating.other());
        for form in [Form::Ring, Form::Gather, Form::Together, Form::Ordered] {
            add(format!("{form:?}"), &|v| v.form = form);
        }
        for n in [0, 1, 2, 3, self.shares.ring(), self.shares.ring() + 1, usize::MAX] {
            add(format!("rank {n}"), &|v| v.me = n);
            add(format!("{n} of a node"), &|v| v.per_node = n);
        }
        let batches = [&[5, 0, 9][..], &[1], &[5, 0, 9, 3, 2], &[50, 60]].map(|l| Batch::from_lengths(l).unwrap());
        let layouts = [Layout::Contiguous, Layout::Striped { stripe: 3 }, Layout::Balanced { chunks: 3 }];
        for ring in [1, 2, self.shares.ring(), self.shares.ring() + 1] {
            for shares in batches.iter().map(|b| Shares::new(b, Mask::full(), layouts[0], ring).unwrap()) {
                add(format!("shares of another batch in {ring}"), &|v| v.shares = shares.clone());
            }
            for layout in layouts {
                let shares = Shares::new(self.shares.batch(), Mask::causal(), layout, ring).unwrap();
                add(format!("shares {layout} in {ring}"), &|v| v.shares = shares.clone());
            }
        }
        for side in [self.circulating, self.circulating.other()] {
            let list = |v: &mut Self| match side == v.circulating {
                true => core::mem::take(&mut v.own),
                false => core::mem::take(&mut v.stationary),
            };
            let name = if side == self.circulating { "own" } else { "stationary" };
            let mut set = |what: String, change: &dyn Fn(&mut Vec<Segment>)| {
                add(format!("{name}: {what}"), &|v| {
                    let mut segments = list(v);
                    change(&mut segments);
                    *(if side == v.circulating { &mut v.own } else { &mut v.stationary }) = segments;
                });
            };
            set("none".into(), &Vec::clear);
            set("reversed".into(), &|s| s.reverse());
            set("repeated".into(), &|s| s.extend_from_within(..));
            set("one dropped".into(), &|s| _ = s.pop());
            let n = if side == self.circulating { self.own.len() } else { self.stationary.len() };
            for i in 0..n {
                set(format!("{i} direction"), &|s| s[i].reverse ^= true);
                for x in [-1, 1, i64::MAX, i64::MIN] {
                    set(format!("{i} row {x}"), &|s| s[i].range.row = s[i].range.row.saturating_add(x));
                    set(format!("{i} pos {x}"), &|s| s[i].range.pos = s[i].range.pos.saturating_add(x));
                }
                for x in [0, 1, 2, 7, u32::MAX] {
                    set(format!("{i} len {x}"), &|s| s[i].range.len = x);
                    set(format!("{i} block {x}"), &|s| s[i].range.block = x);
                    set(format!("{i} period {x}"), &|s| s[i].range.period = x);
                    set(format!("{i} doc {x}"), &|s| s[i].range.doc = x);
                    set(format!("{i} long {x}"), &|s| {
                        (s[i].range.len, s[i].range.block, s[i].range.period) = (u32::MAX, 1, x);
                    });
                }
            }
        }
        add("no splits".into(), &|v| v.splits.clear());
        add("splits twice".into(), &|v| v.splits.extend_from_within(..));
        for i in 0..self.splits.len() {
            for x in [0, 1, 2, 3, u32::MAX] {
                add(format!("split {i} from place {x}"), &|v| v.splits[i].places.start = x);
                add(format!("split {i} to place {x}"), &|v| v.splits[i].places.end = x);
                add(format!("split {i} holder {x}"), &|v| v.splits[i].me = x as usize);
                add(format!("split {i} whole {x}"), &|v| v.splits[i].whole = x.into());
                add(format!("split {i} ends {x}"), &|v| v.splits[i].ends.iter_mut().for_each(|end| *end = x.into()));
            }
            add(format!("split {i} ends at the largest number"), &|v| v.splits[i].ends.push(u64::MAX));
            add(format!("split {i} without ends"), &|v| v.splits[i].ends.clear());
            add(format!("split {i} with ends reversed"), &|v| v.splits[i].ends.reverse());
        }
        add("no ring steps".into(), &|v| v.list.clear());
        add("ring steps reversed".into(), &|v| v.list.reverse());
        add("ring steps twice".into(), &|v| v.list.extend_from_within(..));
        add("a ring step dropped".into(), &|v| _ = v.list.pop());
        add("the first ring step dropped".into(), &|v| _ = v.list.remove(0));
        for i in 0..self.list.len() {
            for x in [0, 1, 2, 3, u32::MAX] {
                add(format!("ring step {i} is step {x}"), &|v| v.list[i].step = x);
                add(format!("ring step {i} is of node {x}"), &|v| v.list[i].node = x);
                add(format!("ring step {i} is of split {x}"), &|v| v.list[i].split = x);
                add(format!("ring step {i} from row {x}"), &|v| v.list[i].first_in = x.into());
                add(format!("ring step {i} with {x} rows in"), &|v| v.list[i].rows_in = x.into());
                add(format!("ring step {i} with {x} rows out"), &|v| v.list[i].rows_out = x.into());
            }
            let crossing = [0, 1, 2, u32::MAX].map(|part| Hop::Crossing { part });
            let hops = [Hop::Own, Hop::Local, Hop::Passed, Hop::Crossed, Hop::Back].into_iter().chain(crossing);
            for (hop, node) in hops.flat_map(|hop| [(hop, None), (hop, Some(0)), (hop, Some(1))]) {
                add(format!("ring step {i} is {hop:?} of {node:?}"), &|v| {
                    v.list[i].hop = hop;
                    v.list[i].node = node.unwrap_or(v.list[i].node);
                });
            }
            add(format!("ring step {i} meets the opposite"), &|v| v.list[i].meets ^= true);
        }
        add("no last steps".into(), &|v| v.last.clear());
        add("last steps twice".into(), &|v| v.last.extend_from_within(..));
        add("a last step dropped".into(), &|v| _ = v.last.pop());
        for x in [0, 1, 2, u32::MAX] {
            add(format!("last steps {x}"), &|v| v.last.iter_mut().for_each(|last| *last = x));
            add(format!("scattered in {x}"), &|v| v.scattered.iter_mut().for_each(|s| s.ring_step = x));
        }
        for n in [0, usize::MAX] {
            add(format!("room for {n}"), &|v| {
                let c = &mut v.capacity;
                (c.segments, c.fragments, c.q, c.k, c.pairs, c.nodes) = (n, n, n, n, n, [n; 6]);
            });
        }
        add("own and stationary exchanged".into(), &|v| core::mem::swap(&mut v.own, &mut v.stationary));
        list
    }
}
