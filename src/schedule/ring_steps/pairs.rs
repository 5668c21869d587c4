// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ranges and pairs of one ring step, as kernels take them.
//!
//! A q range is listed once with all its k ranges, in the order of their positions, because its mode applies to all of
//! them; the kernel does not need to know which rank a row came from. K ranges are also listed by document and
//! position, so that those of a document are next to each other.

use alloc::vec::Vec;

use super::{RangeScratch, RingSteps};
use crate::{
    batch::Side,
    call::{Mode, Pair, QRange, Range},
    schedule::join::{by_document, document, meets},
};

impl RingSteps {
    /// `order` := the fragments by document and position.
    pub(super) fn sort(&self, s: &mut RangeScratch) {
        s.order.clear();
        s.order.extend(0..s.fragments.len() as u32);
        let f = &s.fragments;
        let key = |&i: &u32| (f[i as usize].range.doc, f[i as usize].range.pos);
        if !s.order.is_sorted_by_key(key) {
            s.order.sort_unstable_by_key(key);
        }
    }

    /// Lists the ranges and pairs of a ring step. Of q ranges, those without a key in this ring step are left out,
    /// except at the first ring step, which starts every row. `Mode`s are those of the forward; in the backward a mode
    /// that continues adds to dq.
    pub fn ranges(&self, ring_step: usize, s: &mut RangeScratch) {
        self.list_incoming(&self.list[ring_step], s);
        self.sort(s);
        s.q.clear();
        s.k.clear();
        s.pairs.clear();
        match self.circulating {
            Side::K => self.pairs_of_keys(ring_step, s),
            Side::Q => self.pairs_of_queries(ring_step, s),
        }
    }

    fn q_range(&self, range: Range, keys: core::ops::Range<u32>, mode: Mode) -> QRange {
        let doc = range.doc as usize;
        let document = [Side::Q, Side::K].map(|side| self.shares.batch().document(side, doc).len() as u32);
        QRange { range, document, keys_begin: keys.start, keys_end: keys.end, mode }
    }

    fn pairs_of_keys(&self, ring_step: usize, s: &mut RangeScratch) {
        s.k.extend(s.order.iter().map(|&f| s.fragments[f as usize].range));
        let (q, pairs, fragments, mask) = (&mut s.q, &mut s.pairs, &s.fragments, self.mask);
        let mut next = 0;
        let split = self.list[ring_step].split;
        let begins = ring_step == self.first(split);
        let last = &self.last[split as usize * self.stationary.len()..];
        let mode = |i: usize| Mode::of(begins, last[i] as usize == ring_step);
        let lone = |q: &mut Vec<QRange>, pairs: &[Pair], i: usize| {
            let at = pairs.len() as u32;
            q.push(self.q_range(self.stationary[i].range, at..at, mode(i)));
        };
        let document_of = |&f: &u32| fragments[f as usize].range.doc;
        by_document((&self.stationary, document), (&s.order, document_of), |first, stationary, at, order| {
            if begins {
                (next..first).for_each(|i| lone(q, pairs, i));
            }
            for (i, st) in stationary.iter().enumerate() {
                let begin = pairs.len() as u32;
                let met = order
                    .iter()
                    .zip(at as u32..)
                    .filter(|(f, _)| meets(&st.range, &fragments[**f as usize].range, mask));
                pairs.extend(met.map(|(_, place)| Pair::of(place)));
                let end = pairs.len() as u32;
                if end > begin || begins {
                    q.push(self.q_range(st.range, begin..end, mode(first + i)));
                }
            }
            next = first + stationary.len();
        });
        if begins {
            (next..self.stationary.len()).for_each(|i| lone(q, pairs, i));
        }
    }

    fn pairs_of_queries(&self, ring_step: usize, s: &mut RangeScratch) {
        s.k.extend(self.stationary.iter().map(|k| k.range));
        let (q, pairs, fragments, mask) = (&mut s.q, &mut s.pairs, &s.fragments, self.mask);
        let mode = if ring_step == self.first(0) && self.continues() { Mode::First } else { Mode::Only };
        let mut next = 0;
        let lone = |q: &mut Vec<QRange>, pairs: &[Pair], f: u32| {
            let at = pairs.len() as u32;
            q.push(self.q_range(fragments[f as usize].range, at..at, mode));
        };
        let order = &s.order;
        let document_of = |&f: &u32| fragments[f as usize].range.doc;
        by_document((&self.stationary, document), (order, document_of), |first, stationary, at, part| {
            order[next..at].iter().for_each(|&f| lone(q, pairs, f));
            for &f in part {
                let range = fragments[f as usize].range;
                let begin = pairs.len() as u32;
                let hits = stationary.iter().enumerate().filter(|(_, st)| meets(&st.range, &range, mask));
                pairs.extend(hits.map(|(i, _)| Pair::of((first + i) as u32)));
                q.push(self.q_range(range, begin..pairs.len() as u32, mode));
            }
            next = at + part.len();
        });
        order[next..].iter().for_each(|&f| lone(q, pairs, f));
    }
}
