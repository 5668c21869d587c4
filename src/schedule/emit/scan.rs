// SPDX-License-Identifier: MIT OR Apache-2.0
//! A scan, as a separate schedule: the joins and messages of one rank, step by step.
//!
//! [`Hops`] lists what all ranks do in each step. Of that a rank has the joins that it makes and the messages that it
//! sends or receives; those of one step are one exchange, so documents travel side by side. Every rank has its steps in
//! the same order, so no rank waits for one that waits for it.
//!
//! What is joined and what arrives has rows of its own in the workspace, each written once. The state that precedes a
//! segment is copied to the caller's tensor at the end; the first segment of a document gets zeros.

use alloc::{collections::BTreeMap, vec::Vec};
use core::ops::Range;

use super::{
    builder::{Builder, Life},
    check_rank,
};
use crate::{
    error::Result,
    plan::Plan,
    schedule::{
        Buf, BufferView, Lane, OpKind, Scan, Schedule, TensorId,
        scan::{Hops, Joined, StateHop},
    },
};

/// The phase of all operations of a scan.
const PHASE: &str = "scan";

/// Where a rank has joined segments.
#[derive(Clone, Copy)]
struct Place {
    state: BufferView,
    /// Of what follows other segments.
    decay: Option<BufferView>,
    /// The operation that writes it; `None` for the caller's.
    op: Option<u32>,
}

/// Rows of the workspace for states and for decays, and how many are in use.
#[derive(Default)]
struct Rows {
    state: Option<BufferView>,
    decay: Option<BufferView>,
    used: [u64; 2],
}

impl Rows {
    /// Room for what `of` lists.
    fn new(b: &mut Builder<'_>, names: [&'static str; 2], scan: Scan, of: impl Iterator<Item = Joined>) -> Self {
        let [mut states, mut decays] = [0, 0];
        for what in of {
            states += 1;
            decays += u64::from(what.has_decay());
        }
        let mut room = |name, rows, dim: u64| {
            (rows > 0).then(|| b.buffer(Life::Throughout, name, scan.dtype, rows, scan.heads, dim as usize))
        };
        let [state, decay] = names;
        Self {
            state: room(state, states, scan.state_dim()),
            decay: room(decay, decays, scan.decay_dim()),
            used: [0; 2],
        }
    }

    /// The next rows.
    fn take(&mut self, what: Joined) -> (Option<BufferView>, Option<BufferView>) {
        let [state, decay] = self.used;
        self.used = [state + 1, decay + u64::from(what.has_decay())];
        (self.state.map(|v| v.slice(state, 1)), self.decay.filter(|_| what.has_decay()).map(|v| v.slice(decay, 1)))
    }
}

impl Schedule {
    /// One rank's operations for a scan.
    ///
    /// # Errors
    /// A rank outside the mesh; states without numbers, of other types than f32 and f64, or too large; a layout that
    /// breaks a document into more than 4,096 segments (1,024 with [`ScanForm::Direct`](crate::schedule::ScanForm)), or
    /// all documents in more than 65,536 places.
    pub fn scan(plan: &Plan, rank: usize, scan: Scan) -> Result<Self> {
        check_rank(plan, rank)?;
        scan.check()?;
        let group: Range<usize> = plan.mesh().group_of(rank);
        let hops = Hops::new(plan, group, scan)?;
        let mut b = Builder::new(plan, rank, scan.into());
        b.out.dtype = scan.dtype;
        let all = || hops.steps.iter().flatten();
        let joined = all().filter_map(|hop| match hop {
            StateHop::Join { rank: at, whole, .. } if *at == rank => Some(*whole),
            _ => None,
        });
        let arrived = all().filter_map(|hop| match hop {
            StateHop::Send { to, what, .. } if *to == rank => Some(*what),
            _ => None,
        });
        let joined = Rows::new(&mut b, ["joined states", "joined decays"], scan, joined);
        let arrived = Rows::new(&mut b, ["arrived states", "arrived decays"], scan, arrived);
        let mut emitter = Emitter { b, scan, joined, arrived, places: BTreeMap::new() };
        emitter.own_segments(&hops);
        for (step, hops) in hops.steps.iter().enumerate() {
            emitter.joins(step as u32, hops);
            emitter.messages(step as u32, hops);
        }
        emitter.initial_states(&hops);
        emitter.b.finish()
    }
}

struct Emitter<'a> {
    b: Builder<'a>,
    scan: Scan,
    joined: Rows,
    arrived: Rows,
    places: BTreeMap<Joined, Place>,
}

impl Emitter<'_> {
    /// The numbers of a document's segments that this rank has, and their rows.
    fn own(&self, hops: &Hops) -> impl Iterator<Item = (Joined, u64)> + use<> {
        let mut own = Vec::new();
        for (d, segments) in hops.documents.iter().enumerate() {
            for (i, s) in segments.iter().enumerate().filter(|(_, s)| s.rank == self.b.rank) {
                own.push((Joined { document: d as u32, begin: i as u32, end: i as u32 + 1 }, s.row as u64));
            }
        }
        own.into_iter()
    }

    fn user(&self, tensor: TensorId, row: u64) -> BufferView {
        BufferView { buf: Buf::User(tensor), row, rows: 1, head: 0, heads: self.scan.heads }
    }

    fn own_segments(&mut self, hops: &Hops) {
        for (what, row) in self.own(hops) {
            let decay = what.has_decay().then(|| self.user(TensorId::Decay, row));
            self.places.insert(what, Place { state: self.user(TensorId::State, row), decay, op: None });
        }
    }

    fn place(&self, document: u32, begin: u32, end: u32) -> Place {
        let found = self.places.get(&Joined { document, begin, end });
        *found.expect("the steps of a scan join only what a rank has")
    }

    /// The later of two operations of the other lane, `None` before any.
    fn later(&self, lane: Lane, ops: [Option<u32>; 2]) -> Option<u32> {
        ops.into_iter().flatten().filter(|&op| self.b.out.ops[op as usize].lane != lane).max()
    }

    /// The joins of a step. What needs another join of the step comes in an operation behind it.
    fn joins(&mut self, step: u32, hops: &[StateHop]) {
        let (mut begin, mut after) = (self.b.out.blocks.len(), None);
        let mut writing = self.next();
        for hop in hops {
            let StateHop::Join { rank, whole, mid } = *hop else { continue };
            if rank != self.b.rank {
                continue;
            }
            let earlier = self.place(whole.document, whole.begin, mid);
            let later = self.place(whole.document, mid, whole.end);
            if [earlier.op, later.op].contains(&Some(writing)) {
                self.push_joins(step, begin, after);
                (begin, after, writing) = (self.b.out.blocks.len(), None, self.next());
            }
            after = after.max(self.later(Lane::Compute, [earlier.op, later.op]));
            let (Some(state), decay) = self.joined.take(whole) else { continue };
            let Some(by) = later.decay else { continue };
            self.b.block(state, &[by, earlier.state, later.state]);
            if let (Some(decay), Some(of)) = (decay, earlier.decay) {
                self.b.block(decay, &[by, of]);
            }
            self.places.insert(whole, Place { state, decay, op: Some(writing) });
        }
        self.push_joins(step, begin, after);
    }

    /// The number of the operation that is pushed next.
    fn next(&self) -> u32 {
        self.b.out.ops.len() as u32
    }

    fn push_joins(&mut self, step: u32, begin: usize, after: Option<u32>) {
        let (begin, end) = (begin as u32, self.b.out.blocks.len() as u32);
        if begin < end {
            self.b.push(OpKind::Compose { begin, end }, Lane::Compute, step, PHASE, after);
        }
    }

    fn messages(&mut self, step: u32, hops: &[StateHop]) {
        let (begin, mut after) = (self.b.out.messages.len(), None);
        let mut arriving = Vec::new();
        for hop in hops {
            let StateHop::Send { from, to, what } = *hop else { continue };
            if from == self.b.rank {
                let place = self.place(what.document, what.begin, what.end);
                after = after.max(self.later(Lane::Communication, [place.op, None]));
                self.b.message(to, place.state, true);
                if let Some(decay) = place.decay {
                    self.b.message(to, decay, true);
                }
            } else if to == self.b.rank {
                let (Some(state), decay) = self.arrived.take(what) else { continue };
                self.b.message(from, state, false);
                if let Some(decay) = decay {
                    self.b.message(from, decay, false);
                }
                arriving.push((what, Place { state, decay, op: None }));
            }
        }
        let op = self.b.push_messages_of(step, begin, PHASE, after);
        self.places.extend(arriving.into_iter().map(|(what, place)| (what, Place { op, ..place })));
    }

    fn initial_states(&mut self, hops: &Hops) {
        let (begin, mut after) = (self.b.out.blocks.len(), None);
        for (what, row) in self.own(hops) {
            let to = self.user(TensorId::InitialState, row);
            if what.begin == 0 {
                self.b.block(to, &[]);
                continue;
            }
            let place = self.place(what.document, 0, what.begin);
            after = after.max(self.later(Lane::Compute, [place.op, None]));
            self.b.block(to, &[place.state]);
        }
        self.b.push_blocks(begin, PHASE, after);
    }
}
