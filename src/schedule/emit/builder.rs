// SPDX-License-Identifier: MIT OR Apache-2.0
//! Collects the operations, buffers and blocks of one rank's schedule while the three phases are built.
//!
//! The workspace layout: first the buffers that are used in several phases; after them the buffers of the three phases
//! share the same bytes, because every operation of a phase is ordered after all operations of the phase before.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec,
    vec::Vec,
};
use core::ops::Range;

use crate::schedule::{
    ALIGNMENT, BlockView, Buf, Buffer, BufferView, Lane, MessageView, Op, OpKind, Purpose, Schedule, TensorId,
    expand::ROWS_PER_PEER, ring_steps::Holders,
};
use crate::{
    batch::Side,
    element::Dtype,
    error::{Error, Result},
    heads::HeadShare,
    layout::cut,
    mesh::Coordinates,
    plan::Plan,
};

/// The phases in which a buffer is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Throughout,
    In,
    Ring,
    Out,
}

/// First round of the kv heads that only one rank of the node holds; heads that ranks divide have the rounds before.
const SOLE: usize = 2;

/// Bytes of the workspace that one or more buffers are laid over.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region(pub(super) usize);

/// A group of kv heads that travels together, with the q heads that read it; counted within the rank's own heads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    pub(super) q: (u32, u32),
    pub(super) kv: (u32, u32),
    /// Index among the rounds of the ring, equal on all ranks that hold these heads.
    pub(super) round: usize,
    /// Index in [`Builder::splits`] of the holders of these heads.
    pub(super) split: u32,
}

pub(super) struct Builder<'a> {
    pub(super) plan: &'a Plan,
    pub(super) rank: usize,
    pub(super) coordinates: Coordinates,
    /// The heads of every Ulysses rank.
    pub(super) heads: Vec<HeadShare>,
    /// As [`Plan::ulysses_ranks_of_node`].
    pub(super) ranks_of_node: usize,
    /// As [`Plan::ring_holders_of_node`], where k circulates in this direction; else 1.
    pub(super) ring_holders: usize,
    /// All passes of every Ulysses rank; a pass may have no heads.
    pub(super) passes: Vec<Vec<Pass>>,
    /// Rows of the ring share of q's side and of k's: counting them takes a pass over all documents.
    pub(super) rows: [usize; 2],
    pub(super) regions: Vec<(Life, u64)>,
    pub(super) buffer_regions: Vec<Region>,
    pub(super) out: Schedule,
}

/// The last operation pushed to each lane.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Last {
    pub(super) compute: Option<u32>,
    pub(super) communication: Option<u32>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(plan: &'a Plan, rank: usize, purpose: Purpose) -> Self {
        let (mesh, p) = (plan.mesh(), plan.problem());
        let (heads, kv_heads) = (p.heads() as u32, p.kv_heads() as u32);
        let coordinates = mesh.coordinates(rank);
        let mut builder = Self {
            plan,
            rank,
            coordinates,
            ranks_of_node: plan.ulysses_ranks_of_node(),
            ring_holders: 1,
            passes: Vec::new(),
            rows: [Side::Q, Side::K].map(|side| plan.shares().rows(side, coordinates.ring)),
            heads: (0..mesh.ulysses).map(|u| HeadShare::new(u, mesh.ulysses, heads, kv_heads)).collect(),
            regions: Vec::new(),
            buffer_regions: Vec::new(),
            out: Schedule {
                rank,
                group: mesh.group_of(rank),
                ulysses: mesh.ulysses,
                purpose,
                dtype: p.dtype(),
                buffers: Vec::new(),
                workspace: 0,
                ops: Vec::new(),
                blocks: Vec::new(),
                sources: Vec::new(),
                messages: Vec::new(),
                keys: None,
                queries: None,
                aligned: plan.options().reproducible,
            },
        };
        builder.cut_passes();
        builder
    }
}

impl Builder<'_> {
    pub(super) fn element(&self) -> Dtype {
        self.plan.problem().dtype()
    }

    pub(super) fn accumulator(&self) -> Dtype {
        self.element().accumulator()
    }

    /// Rows of the ring share.
    pub(super) fn share(&self, side: Side) -> u64 {
        self.rows[usize::from(side == Side::K)] as u64
    }

    /// First row and number of rows of Ulysses rank `u`'s part of the ring share.
    pub(super) fn part(&self, side: Side, u: usize) -> (u64, u64) {
        let n = self.share(side) as usize;
        let (a, e) = (cut(u, n, self.out.ulysses), cut(u + 1, n, self.out.ulysses));
        (a as u64, (e - a) as u64)
    }

    pub(super) fn mine(&self) -> &HeadShare {
        &self.heads[self.coordinates.ulysses]
    }

    /// k circulates, and ranks that hold the same kv head divide its rows among them.
    pub(super) fn divide_rows(&mut self) {
        self.ring_holders = self.plan.ring_holders_of_node();
        self.cut_passes();
    }

    fn cut_passes(&mut self) {
        self.passes = (0..self.out.ulysses).map(|u| self.passes_of(u)).collect();
    }

    /// The rank's passes over its kv heads; a pass without heads is left out.
    pub(super) fn own_passes(&self) -> Vec<Pass> {
        let mut passes = self.passes[self.coordinates.ulysses].clone();
        passes.retain(|p| p.kv.1 > 0);
        if self.ring_holders == 1 {
            passes.iter_mut().zip(0..).for_each(|(p, round)| p.round = round);
        }
        passes
    }

    /// The holders of the kv heads of each pass.
    pub(super) fn splits(&self) -> Vec<Holders> {
        let me = self.coordinates.ulysses;
        let mut splits = Vec::new();
        for pass in self.own_passes() {
            if splits.len() > pass.split as usize {
                continue;
            }
            let shared = pass.round < SOLE && self.ring_holders > 1;
            let head = self.mine().kv.start + pass.kv.0;
            let of = || Holders::of(&self.heads, &self.holders_node(me), head, me);
            splits.push(if shared { of() } else { Holders::alone() });
        }
        splits
    }

    /// The Ulysses ranks of a rank's node.
    fn holders_node(&self, u: usize) -> Range<usize> {
        let first = u / self.ring_holders * self.ring_holders;
        first..first + self.ring_holders
    }

    /// The passes of Ulysses rank `u`. A kv head that ranks of a node divide has a pass of its own, in the same round
    /// on each of them. So a rank's first and last head, if divided, are in different rounds.
    fn passes_of(&self, u: usize) -> Vec<Pass> {
        let (share, passes) = (&self.heads[u], self.plan.options().passes);
        let (group, n) = (self.plan.problem().group() as u32, share.kv.len());
        let pass = |a: u32, e: u32, round, split| {
            let q0 = (a * group).max(share.q.start);
            let q1 = (e * group).min(share.q.end).max(q0);
            Pass { q: (q0 - share.q.start, q1 - q0), kv: (a - share.kv.start, e - a), round, split }
        };
        let part = |of: &Range<u32>, p: usize, round, split| {
            let n = of.len();
            pass(of.start + cut(p, n, passes) as u32, of.start + cut(p + 1, n, passes) as u32, round, split)
        };
        if self.ring_holders == 1 {
            return (0..passes).map(|p| part(&share.kv, p, p, 0)).collect();
        }
        let node = self.holders_node(u);
        let held_twice = |v: usize| v > node.start && self.heads[v - 1].kv.end > self.heads[v].kv.start;
        let first = held_twice(u) || (n == 1 && u + 1 < node.end && held_twice(u + 1));
        let last = n > 1 && u + 1 < node.end && held_twice(u + 1);
        // Divided heads of the node before this rank's first head.
        let before = (node.start + 1..=u).filter(|&v| held_twice(v)).map(|v| self.heads[v].kv.start);
        let before: BTreeSet<u32> = before.filter(|&head| head < share.kv.start).collect();
        let mut list = Vec::new();
        let mut sole = share.kv.clone();
        if first {
            list.push(pass(sole.start, sole.start + 1, before.len() % 2, 0));
            sole.start += 1;
        }
        if last {
            sole.end -= 1;
            list.push(pass(sole.end, sole.end + 1, (before.len() + list.len()) % 2, list.len() as u32));
        }
        list.sort_by_key(|p| p.round);
        list.iter_mut().zip(0..).for_each(|(p, split)| p.split = split);
        let split = list.len() as u32;
        list.extend((0..passes).map(|p| part(&sole, p, SOLE + p, split)));
        list
    }

    pub(super) fn region(&mut self, life: Life, bytes: u64) -> Region {
        self.regions.push((life, bytes));
        Region(self.regions.len() - 1)
    }

    pub(super) fn buffer_in(
        &mut self,
        region: Region,
        name: &'static str,
        dtype: Dtype,
        rows: u64,
        heads: u32,
        dim: usize,
    ) -> BufferView {
        let buffer = Buffer { name, dtype, rows, heads, dim: dim as u32, offset: 0 };
        self.regions[region.0].1 = self.regions[region.0].1.max(buffer.bytes());
        self.out.buffers.push(buffer);
        self.buffer_regions.push(region);
        BufferView::whole(Buf::Work((self.out.buffers.len() - 1) as u16), rows, heads)
    }

    pub(super) fn buffer(
        &mut self,
        life: Life,
        name: &'static str,
        dtype: Dtype,
        rows: u64,
        heads: u32,
        dim: usize,
    ) -> BufferView {
        let region = self.region(life, 0);
        self.buffer_in(region, name, dtype, rows, heads, dim)
    }

    /// All of the caller's rows and heads of a tensor.
    pub(super) fn user(&self, tensor: TensorId) -> BufferView {
        let rows = if tensor.is_per_head() { 1 } else { self.part(tensor.side(), self.coordinates.ulysses).1 };
        BufferView::whole(Buf::User(tensor), rows, tensor.heads(self.plan.problem()) as u32)
    }

    pub(super) fn block(&mut self, dst: BufferView, sources: &[BufferView]) {
        if dst.rows == 0 || dst.heads == 0 {
            return;
        }
        let begin = self.out.sources.len() as u32;
        self.out.sources.extend_from_slice(sources);
        self.out.blocks.push(BlockView { dst, sources_begin: begin, sources_end: self.out.sources.len() as u32 });
    }

    pub(super) fn message(&mut self, peer: usize, view: BufferView, send: bool) {
        if view.rows > 0 && view.heads > 0 {
            self.out.messages.push(MessageView { peer, view, send });
        }
    }

    pub(super) fn push(&mut self, kind: OpKind, lane: Lane, step: u32, phase: &'static str, after: Option<u32>) -> u32 {
        self.out.ops.push(Op { kind, lane, step, phase, after });
        (self.out.ops.len() - 1) as u32
    }

    /// Pushes the blocks added since `begin` as one transform; nothing when there are none.
    pub(super) fn push_blocks(&mut self, begin: usize, phase: &'static str, after: Option<u32>) -> Option<u32> {
        let (begin, end) = (begin as u32, self.out.blocks.len() as u32);
        (begin < end).then(|| self.push(OpKind::Transform { begin, end }, Lane::Compute, 0, phase, after))
    }

    /// Pushes the messages added since `begin` as one exchange, or as several if one peer has more messages than an
    /// exchange may hold; nothing if there are none. Returns the last exchange.
    ///
    /// Both ranks of a pair number the messages between them alike, in each direction, so they agree on the exchange of
    /// each message. Every rank has its exchanges in the same order, so there is no deadlock.
    pub(super) fn push_messages(&mut self, begin: usize, phase: &'static str, after: Option<u32>) -> Option<u32> {
        self.push_messages_of(0, begin, phase, after)
    }

    /// As [`push_messages`](Self::push_messages), of a step.
    pub(super) fn push_messages_of(
        &mut self,
        step: u32,
        begin: usize,
        phase: &'static str,
        mut after: Option<u32>,
    ) -> Option<u32> {
        let mut count = BTreeMap::new();
        let mut numbered: Vec<(usize, MessageView)> = Vec::new();
        for m in self.out.messages.drain(begin..) {
            let n: &mut usize = count.entry((m.peer, m.send)).or_default();
            numbered.push((*n / ROWS_PER_PEER, m));
            *n += 1;
        }
        numbered.sort_by_key(|(exchange, _)| *exchange);
        let mut last = None;
        for exchange in numbered.chunk_by(|a, b| a.0 == b.0) {
            let begin = self.out.messages.len() as u32;
            self.out.messages.extend(exchange.iter().map(|(_, m)| *m));
            let end = self.out.messages.len() as u32;
            last = Some(self.push(OpKind::Exchange { begin, end }, Lane::Communication, step, phase, after.take()));
        }
        last
    }

    /// The last operation of each lane so far.
    pub(super) fn last(&self) -> Last {
        let of = |lane| self.out.ops.iter().rposition(|op| op.lane == lane).map(|i| i as u32);
        Last { compute: of(Lane::Compute), communication: of(Lane::Communication) }
    }

    /// Gives every buffer its place.
    pub(super) fn finish(mut self) -> Result<Schedule> {
        let mut offsets = vec![0u64; self.regions.len()];
        let mut throughout = 0u64;
        for life in [Life::Throughout, Life::In, Life::Ring, Life::Out] {
            let mut end = throughout;
            for (offset, (_, bytes)) in offsets.iter_mut().zip(&self.regions).filter(|(_, region)| region.0 == life) {
                *offset = end;
                end = end.checked_add(bytes.next_multiple_of(ALIGNMENT)).ok_or_else(|| {
                    Error::invalid("workspace", "more than 2^64 bytes", "a problem that fits a machine")
                })?;
            }
            if life == Life::Throughout {
                throughout = end;
            }
            self.out.workspace = self.out.workspace.max(end);
        }
        for (buffer, region) in self.out.buffers.iter_mut().zip(&self.buffer_regions) {
            buffer.offset = offsets[region.0];
        }
        Ok(self.out)
    }
}
