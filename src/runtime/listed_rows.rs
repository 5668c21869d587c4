// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs over listed keys in which of k and v only the listed rows move: which rows these are, whether they are fewer
//! bytes than what the mask moves, and the schedules that move them.
//!
//! A rank finds from its lists which rows it needs of each other ring rank, in one pass. Then ranks exchange counts:
//! the bytes that they would receive either way, and how long their lists of rows are. All ranks have the same numbers
//! after that, so they choose alike. If listed rows are fewer bytes, the row numbers follow, and every rank makes its
//! schedule from the rows that it needs and the rows that others need of it.
//!
//! Steps and schedules are kept: the backward of a layer, or another run over lists that name the same rows, finds
//! those of the forward. The numbers of all ranks are the key, and every rank of a group forgets the same entries, so
//! that all find them or none.

use std::{ops::Range, sync::Arc, vec, vec::Vec};

use super::{bind::Bindings, prepared::Prepared};
use crate::{
    batch::Side,
    error::{Error, Result, RunName},
    kernel::cpu::listed::KeyLists,
    plan::{Choice, Fingerprint, Form, KeyRows, Plan},
    schedule::{
        Direction, Hop, ListedRows, Purpose, RingSteps, Schedule, TensorId,
        ring_steps::listed::{RowRuns, TokenSet, first_token},
    },
    transport::{Label, Message, Transport},
};

/// Entries that are kept for each group of ranks: layers of a model, between their forward and their backward.
const REMEMBERED: usize = 64;
/// Rows that the busiest rank lists, in all entries of a group: their runs take at most 8 bytes each.
const REMEMBERED_ROWS: u64 = 1 << 23;

/// Bytes of k and v, and of the gradients that come back, in one run over listed keys, received by all ranks together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyRowBytes {
    /// If the rows that lists name move, with the numbers of the rows.
    pub listed: u64,
    /// If the rows that the mask allows move.
    pub allowed: u64,
    /// Which of them moved.
    pub moved: KeyRows,
}

/// What a rank tells each other rank before rows move.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct RowCounts {
    /// What ranks compare of the run, and its number: lists that name no row of a peer exchange nothing else with it.
    run: [u64; 2],
    /// A fingerprint of the rows that this rank needs.
    rows: u64,
    /// Bytes that it receives, either way; between nodes they count more.
    listed: u64,
    allowed: u64,
    /// Rows that it needs in all.
    needed: u64,
    /// Runs of rows that it needs of the other rank.
    runs: u64,
    /// 1 if its tensors or its workspace are made for what the mask moves.
    bound: u64,
}

/// Steps and schedules for the same rows.
struct ListedSteps {
    key: u64,
    used: u64,
    /// Rows that the busiest rank needs.
    rows: u64,
    steps: Arc<RingSteps>,
    runs: [Option<Prepared>; 2],
}

/// The listed rows of a rank's runs.
#[derive(Default)]
pub(super) struct ListedRuns {
    named: TokenSet,
    /// By group.
    kept: Vec<(Range<usize>, Vec<ListedSteps>)>,
    uses: u64,
    /// Of the last run that counted them.
    bytes: Option<KeyRowBytes>,
}

/// A run over listed keys, as ranks decide how it moves rows.
pub(super) struct ListedRun<'a> {
    /// The caller's plan, and the one of the run.
    pub base: &'a Plan,
    pub plan: &'a Plan,
    pub direction: Direction,
    pub name: Option<RunName>,
    /// The schedule in which the rows move that the mask allows.
    pub allowed: &'a Schedule,
    pub tensors: &'a Bindings,
    /// Whether the workspace is lent by the caller, for plans as they are.
    pub lent: bool,
    /// What ranks compare of the run, and its number.
    pub begun: Option<(u64, u64)>,
    /// Heads and entries of its lists, and its seed of dropout, for errors.
    pub shape: Option<[usize; 2]>,
    pub seed: Option<u64>,
}

impl ListedRuns {
    /// Bytes of the last run over listed keys in a ring.
    pub(super) fn bytes(&self) -> Option<KeyRowBytes> {
        self.bytes
    }

    /// The schedule that moves listed rows only; `None` if the rows move that the mask allows.
    ///
    /// # Errors
    /// Those of the exchanges; a schedule that does not fit what the caller has.
    pub(super) fn choose(
        &mut self,
        run: &ListedRun,
        lists: &KeyLists,
        transport: &dyn Transport,
    ) -> Result<Option<&mut Prepared>> {
        self.bytes = None;
        let (plan, asked) = (run.plan, run.plan.options().key_rows);
        if plan.mesh().ring == 1 || asked == KeyRows::Allowed {
            return Ok(None);
        }
        let (me, group) = (transport.rank(), run.allowed.group.clone());
        let incoming = self.needed(plan, me, lists);
        let counts = exchange_counts(run, &incoming, transport)?;
        let sum = |of: fn(&RowCounts) -> u64| counts.iter().map(of).sum::<u64>();
        let (listed, allowed) = (sum(|c| c.listed), sum(|c| c.allowed));
        let fewer = listed < allowed && counts.iter().all(|c| c.bound == 0);
        let moved = if asked == KeyRows::Listed || fewer { KeyRows::Listed } else { KeyRows::Allowed };
        self.bytes = Some(KeyRowBytes { listed, allowed, moved });
        if moved == KeyRows::Allowed {
            return Ok(None);
        }
        let mut h = Fingerprint::new();
        h.word(run.base.fingerprint());
        counts.iter().for_each(|c| h.word(c.rows));
        let key = h.finish();
        let place = self.kept.iter().position(|(ranks, _)| *ranks == group).unwrap_or(self.kept.len());
        if place == self.kept.len() {
            self.kept.push((group.clone(), Vec::new()));
        }
        let kept = &mut self.kept[place].1;
        self.uses += 1;
        let at = match kept.iter().position(|entry| entry.key == key) {
            Some(at) => at,
            None => {
                let ring = RingColumn { ulysses: plan.mesh().ulysses, me, start: group.start };
                let outgoing = exchange_rows(run, ring, &incoming, &counts, transport)?;
                let steps = RingSteps::listed(
                    plan.shares(),
                    plan.problem().allowed(),
                    plan.form(),
                    plan.mesh().coordinates(me).ring,
                    ListedRows { incoming, outgoing },
                );
                let rows = counts.iter().map(|c| c.needed).max().unwrap_or(0);
                make_room(kept, rows);
                kept.push(ListedSteps { key, used: 0, rows, steps: Arc::new(steps), runs: [None, None] });
                kept.len() - 1
            }
        };
        let entry = &mut kept[at];
        entry.used = self.uses;
        let of_direction = &mut entry.runs[run.direction as usize];
        let purpose = Purpose::Attention(run.direction);
        if of_direction.as_ref().is_none_or(|prepared| !prepared.is(plan, purpose, false)) {
            let schedule = Schedule::over_listed_steps(plan, me, run.direction, Arc::clone(&entry.steps))?;
            *of_direction = Some(Prepared::of_schedule(plan, purpose, schedule)?.tagged());
        }
        if let Some(prepared) = of_direction.as_ref() {
            run.tensors.check(&prepared.expected)?;
        }
        Ok(of_direction.as_mut())
    }

    /// The rows that the lists of this rank's calls name, of each other ring rank's share.
    fn needed(&mut self, plan: &Plan, rank: usize, lists: &KeyLists) -> Vec<RowRuns> {
        let (shares, me) = (plan.shares(), plan.mesh().coordinates(rank).ring);
        let batch = plan.problem().batch();
        let heads = if lists.heads == 1 { 0..1 } else { plan.heads_of(rank).kv };
        let mut segments = Vec::new();
        shares.segments(Side::Q, me, &mut segments);
        self.named.clear(batch.tokens(Side::K));
        for q in segments.iter().map(|segment| &segment.range) {
            let first = first_token(batch, q.doc);
            for row in q.row..q.row + i64::from(q.len) {
                for head in heads.clone() {
                    let keys = lists.of(row, head as usize).iter().filter(|&&key| key >= 0);
                    keys.for_each(|&key| self.named.insert((first + i64::from(key)) as usize));
                }
            }
        }
        let rows = |owner: usize| match owner == me {
            true => RowRuns::new(),
            false => self.named.rows_of(shares, owner, &mut segments),
        };
        (0..plan.mesh().ring).map(rows).collect()
    }
}

/// Forgets the entries that were not used for longest, so that one with so many rows fits.
fn make_room(kept: &mut Vec<ListedSteps>, rows: u64) {
    while kept.len() >= REMEMBERED
        || !kept.is_empty() && kept.iter().map(|entry| entry.rows).sum::<u64>() + rows > REMEMBERED_ROWS
    {
        let oldest = kept.iter().enumerate().min_by_key(|(_, entry)| entry.used).map_or(0, |(at, _)| at);
        kept.remove(oldest);
    }
}

/// This rank, and the ranks that have the other ring shares of the same heads.
#[derive(Clone, Copy)]
struct RingColumn {
    ulysses: usize,
    me: usize,
    start: usize,
}

impl RingColumn {
    fn peer(&self, ring: usize) -> usize {
        self.start + ring * self.ulysses + self.me % self.ulysses
    }
}

/// Tells every rank of the group this rank's counts, and returns those of all, in rank order; `runs` of each is what it
/// needs of this rank.
fn exchange_counts(run: &ListedRun, incoming: &[RowRuns], transport: &dyn Transport) -> Result<Vec<RowCounts>> {
    let (group, me, ulysses) = (run.allowed.group.clone(), transport.rank(), run.plan.mesh().ulysses);
    let own = counts(run, me, incoming);
    let of_peer = |peer: usize| match (peer + group.len() - me) % ulysses {
        0 => RowCounts { runs: incoming[(peer - group.start) / ulysses].len() as u64, ..own },
        _ => own,
    };
    let sent: Vec<RowCounts> = group.clone().map(of_peer).collect();
    let mut all = vec![RowCounts::default(); group.len()];
    all[me - group.start] = own;
    let bytes = size_of::<RowCounts>();
    let (mut sends, mut recvs) = (Vec::new(), Vec::new());
    for (i, peer) in group.enumerate().filter(|&(_, peer)| peer != me) {
        sends.push(Message { peer, ptr: (&raw const sent[i]).cast_mut().cast(), bytes });
        recvs.push(Message { peer, ptr: (&raw mut all[i]).cast(), bytes });
    }
    let label = Label { run: run.name, ..Label::new("exchange of counts of listed rows", 0) };
    // SAFETY: what is sent is read alone, and each entry that is received is written by one message.
    unsafe { transport.exchange(label, &sends, &recvs) }?;
    let first = run.allowed.group.start;
    match all.iter().position(|other| other.run != own.run) {
        None => Ok(all),
        Some(i) => Err(Error::Disagreement {
            rank: me,
            peer: first + i,
            ours: own.run[0],
            theirs: all[i].run[0],
            what: Purpose::Attention(run.direction).describe_with(run.plan, run.seed, run.shape),
            runs: Some([own.run[1], all[i].run[1]]),
        }),
    }
}

/// What this rank needs, in numbers.
fn counts(run: &ListedRun, rank: usize, incoming: &[RowRuns]) -> RowCounts {
    let (plan, p) = (run.plan, run.plan.problem());
    let dims = (plan.heads_of(rank).kv.len() * (p.head_dim() + p.value_dim())) as u64;
    let returned = if run.direction == Direction::Backward { plan.gradient_bytes() } else { 0 };
    let row = dims * (p.dtype().size() + returned) as u64;
    let me = plan.mesh().coordinates(rank).ring;
    let (allowed, per_node) = match &run.allowed.keys {
        Some(steps) => {
            (allowed_rows(steps), if steps.crosses() { plan.ring_ranks_in_node() } else { plan.mesh().ring })
        }
        None => (0, plan.mesh().ring),
    };
    let far = |owner: usize| if owner / per_node == me / per_node { 1 } else { u64::from(Choice::INTER_NODE_FACTOR) };
    let mut h = Fingerprint::new();
    let (mut listed, mut needed) = (0, 0);
    for (owner, runs) in incoming.iter().enumerate() {
        let rows = ListedRows::count(runs);
        h.word(runs.len() as u64);
        runs.iter().for_each(|&(first, end)| h.word(u64::from(first) << 32 | u64::from(end)));
        listed += far(owner) * (rows * row + size_of::<[u32; 2]>() as u64 * runs.len() as u64);
        needed += rows;
    }
    let strided = plan.mesh().ulysses == 1
        && !plan.options().pack_inputs
        && [TensorId::K, TensorId::V].iter().any(|&t| !run.tensors.get(t).is_compact());
    let (compared, number) = run.begun.unwrap_or_default();
    RowCounts {
        run: [compared, number],
        rows: h.finish(),
        listed,
        allowed: allowed * row,
        needed,
        runs: 0,
        bound: (run.lent || strided).into(),
    }
}

/// Rows that a rank receives where the rows move that the mask allows; those from another node count more.
fn allowed_rows(steps: &RingSteps) -> u64 {
    let (own, splits) =
        (steps.own_rows(), steps.list().iter().map(|step| u64::from(step.split) + 1).max().unwrap_or(1));
    let crossed: u64 = steps.list().iter().filter(|step| !step.attends()).map(|step| step.rows_in).sum();
    let beside = if matches!(steps.form(), Form::Together | Form::Ordered) { own * splits + crossed } else { 0 };
    let rows = |hop: Hop| match hop {
        Hop::Own | Hop::Crossed | Hop::Back => 0,
        Hop::Local | Hop::Passed => 1,
        Hop::Crossing { .. } => u64::from(Choice::INTER_NODE_FACTOR),
    };
    let all: u64 = steps.list().iter().map(|step| rows(step.hop) * step.rows_in).sum();
    all.saturating_sub(beside) / splits
}

/// Sends each owner the rows that this rank needs of it; returns, by reader, the rows that are needed of this rank.
fn exchange_rows(
    run: &ListedRun,
    ring: RingColumn,
    incoming: &[RowRuns],
    counts: &[RowCounts],
    transport: &dyn Transport,
) -> Result<Vec<RowRuns>> {
    let flat = |runs: &RowRuns| runs.iter().flat_map(|&(first, end)| [first, end]).collect::<Vec<u32>>();
    let sent: Vec<Vec<u32>> = incoming.iter().map(flat).collect();
    let me = (ring.me - ring.start) / ring.ulysses;
    let words = |reader: usize| if reader == me { 0 } else { 2 * counts[ring.peer(reader) - ring.start].runs as usize };
    let mut received: Vec<Vec<u32>> = Vec::with_capacity(incoming.len());
    for reader in 0..incoming.len() {
        let mut list = Vec::new();
        list.try_reserve_exact(words(reader)).map_err(|_| {
            Error::invalid("key_indices", format_runs(words(reader) / 2), "lists of rows that this machine can hold")
        })?;
        list.resize(words(reader), 0);
        received.push(list);
    }
    let (mut sends, mut recvs) = (Vec::new(), Vec::new());
    for (j, (to, from)) in sent.iter().zip(&mut received).enumerate() {
        let peer = ring.peer(j);
        for (list, ptr, len) in
            [(&mut sends, to.as_ptr().cast_mut(), to.len()), (&mut recvs, from.as_mut_ptr(), from.len())]
        {
            if len > 0 {
                list.push(Message { peer, ptr: ptr.cast(), bytes: len * size_of::<u32>() });
            }
        }
    }
    if !(sends.is_empty() && recvs.is_empty()) {
        let label = Label { run: run.name, ..Label::new("exchange of listed rows", 0) };
        // SAFETY: what is sent is read alone, and each list that is received is written by one message.
        unsafe { transport.exchange(label, &sends, &recvs) }?;
    }
    let runs = |list: Vec<u32>| list.chunks_exact(2).map(|run| (run[0], run[1])).collect();
    Ok(received.into_iter().map(runs).collect())
}

fn format_runs(runs: usize) -> std::string::String {
    std::format!("{runs} runs of rows")
}
