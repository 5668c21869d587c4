// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether ring steps fit together and fit their schedule, so that the lists of each of them can be made.
//!
//! Lists are made by arithmetic on shares, holders and steps, without further checks. A schedule can come from outside,
//! so these numbers are checked before the first list is made: numbers of ranks, nodes, holders and parts, and the rows
//! and positions of segments. Whether the rows are those that the plan needs is not checked here; the proof finds that
//! from the lists.

use alloc::{format, string::String};

use super::{Holders, Hop, RingSteps};
use crate::{batch::Side, layout::Segment};

impl RingSteps {
    /// Checks ring steps from any source: those of ring rank `me`, in a group of `ring` × `ulysses` ranks, of the side
    /// by which their schedule names them. The lists of steps that pass can be made, and the sums in them do not
    /// overflow.
    pub(crate) fn check(&self, side: Side, me: usize, ring: usize, ulysses: usize) -> Result<(), String> {
        if self.circulating != side {
            return Err(format!("side {:?} circulates, not side {side:?}", self.circulating));
        }
        if self.me != me || me >= ring || self.shares.ring() != ring {
            return Err(format!("of ring rank {} of {}, not {me} of {ring}", self.me, self.shares.ring()));
        }
        if self.per_node == 0 || !ring.is_multiple_of(self.per_node) {
            return Err(format!("{} ring ranks of a node do not divide a ring of {ring}", self.per_node));
        }
        let documents = self.shares.batch().documents();
        if !self.allowed.is_of(documents) {
            return Err(format!("slices of another batch than that of {documents} documents"));
        }
        self.segments(self.circulating, &self.own).map_err(|text| format!("own segments: {text}"))?;
        let staying = self.circulating.other();
        self.segments(staying, &self.stationary).map_err(|text| format!("stationary segments: {text}"))?;
        if let Some(listed) = &self.listed {
            if self.circulating != Side::K || self.per_node != ring {
                return Err(format!("listed keys of side {:?} in nodes of {}", self.circulating, self.per_node));
            }
            listed.check(&self.shares, self.me)?;
        }
        for (i, holders) in self.splits.iter().enumerate() {
            holders.check(ulysses).map_err(|text| format!("split {i}: {text}"))?;
        }
        self.steps()
    }

    /// Segments follow one another in a share of rows, and each names tokens of its document.
    fn segments(&self, side: Side, list: &[Segment]) -> Result<(), String> {
        let batch = self.shares.batch();
        let mut next = 0;
        for (i, segment) in list.iter().enumerate() {
            let r = &segment.range;
            if r.row != next || r.len == 0 || r.block == 0 || r.period < r.block {
                return Err(format!("{r:?} is not a range at row {next}"));
            }
            next += i64::from(r.len);
            let doc = r.doc as usize;
            if doc >= batch.documents() || i.checked_sub(1).is_some_and(|before| list[before].range.doc > r.doc) {
                return Err(format!("{r:?} is not of a document of {} in order", batch.documents()));
            }
            let (start, tokens) = (batch.start(side, doc), batch.document(side, doc).len());
            let (first, last) = (i128::from(r.pos), r.wide_last());
            if first < i128::from(start) || last >= i128::from(start) + tokens as i128 {
                return Err(format!("{r:?} claims positions {first}..={last} outside its document"));
            }
        }
        let rows = self.shares.rows(side, self.me);
        if next as usize != rows {
            return Err(format!("{next} rows of a share of {rows}"));
        }
        Ok(())
    }

    /// The list of steps, and the lists that are as long.
    fn steps(&self) -> Result<(), String> {
        let (splits, nodes) = (self.splits.len(), self.shares.ring() / self.per_node);
        if splits == 0 || self.list.is_empty() {
            return Err(format!("{splits} splits with {} ring steps", self.list.len()));
        }
        if self.last.len() != self.stationary.len() * splits {
            let segments = self.stationary.len();
            return Err(format!("{} last steps of {segments} segments in {splits} splits", self.last.len()));
        }
        if let Some(last) = self.last.iter().find(|&&last| last as usize >= self.list.len()) {
            return Err(format!("a segment ends in ring step {last} of {}", self.list.len()));
        }
        for (i, step) in self.list.iter().enumerate() {
            let parts = self.parts();
            if step.split as usize >= splits || i.checked_sub(1).is_some_and(|i| self.list[i].split > step.split) {
                return Err(format!("ring step {i} is of split {} of {splits}, in order", step.split));
            }
            if step.node as usize >= nodes {
                return Err(format!("ring step {i} is of rows {} nodes away, of {nodes} nodes", step.node));
            }
            match step.hop {
                Hop::Own | Hop::Local => {}
                hop if step.node == 0 => return Err(format!("ring step {i} is {hop:?} within its node")),
                Hop::Crossing { part } if part as usize >= parts => {
                    return Err(format!("ring step {i} is part {part} of {parts}"));
                }
                Hop::Crossing { .. } | Hop::Passed | Hop::Crossed | Hop::Back => {}
            }
            if step.hop == Hop::Own && step.node > 0 {
                return Err(format!("ring step {i} is the own share, {} nodes away", step.node));
            }
        }
        if let Some(s) = self.scattered.iter().find(|s| s.ring_step as usize >= self.list.len()) {
            return Err(format!("rows are scattered in ring step {} of {}", s.ring_step, self.list.len()));
        }
        Ok(())
    }
}

impl Holders {
    /// Checks the holders of a head in a group of `ulysses` ranks: their places, and parts that are all of its rows.
    fn check(&self, ulysses: usize) -> Result<(), String> {
        let (places, n) = (&self.places, self.places.len());
        if n == 0 || places.end as usize > ulysses || self.me >= n {
            return Err(format!("holder {} at places {places:?} of {ulysses}", self.me));
        }
        let (first, last) = (self.ends.first(), self.ends.last());
        let whole = self.whole > 0 && first == Some(&0) && last == Some(&self.whole);
        if !whole || self.ends.len() != n + 1 || !self.ends.is_sorted() {
            return Err(format!("parts at {:?} of {} of {n} holders", self.ends, self.whole));
        }
        Ok(())
    }
}
