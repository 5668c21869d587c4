// SPDX-License-Identifier: MIT OR Apache-2.0
//! What ranks exchange before listed rows move: counts, then the numbers of the rows, and where a caller's memory may
//! be too small for them, whether it is.
//!
//! Each exchange is one of all ranks of the group or of none, and what a rank decides after it follows from numbers
//! that all of them have.

use std::{format, string::String, vec, vec::Vec};

use crate::{
    error::{Error, Result, RunName},
    plan::{Choice, Fingerprint, Form, Plan},
    runtime::{
        bind::Bindings,
        workspace::{HostMemory, Workspace},
    },
    schedule::{Direction, Hop, ListedRows, Purpose, RingSteps, Schedule, TensorId, ring_steps::listed::RowRuns},
    transport::{Label, Message, Transport},
};

/// A run over listed keys, as ranks decide how it moves rows.
pub(in crate::runtime) struct ListedRun<'a> {
    /// The caller's plan, and the one of the run.
    pub base: &'a Plan,
    pub plan: &'a Plan,
    pub direction: Direction,
    pub name: Option<RunName>,
    /// The schedule in which the rows move that the mask allows.
    pub allowed: &'a Schedule,
    pub tensors: &'a Bindings,
    pub workspace: &'a Workspace<HostMemory>,
    /// What ranks compare of the run, and its number.
    pub begun: Option<(u64, u64)>,
    /// Heads and entries of its lists, and its seed of dropout, for errors.
    pub shape: Option<[usize; 2]>,
    pub seed: Option<u64>,
}

/// What a rank tells each other rank before rows move.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct RowCounts {
    /// What ranks compare of the run, and its number: lists that name no row of a peer exchange nothing else with it.
    run: [u64; 2],
    /// A fingerprint of the rows that this rank needs.
    pub rows: u64,
    /// Bytes that it receives, either way; between nodes they count more.
    pub listed: u64,
    pub allowed: u64,
    /// Rows that it needs in all.
    pub needed: u64,
    /// Runs of rows that it needs of the other rank.
    runs: u64,
    /// 1 if its tensors or its workspace are the caller's for what the mask moves: listed rows may not fit them.
    pub bound: u64,
}

/// This rank, and the ranks that have the other ring shares of the same heads.
#[derive(Clone, Copy)]
pub(super) struct RingColumn {
    pub ulysses: usize,
    pub me: usize,
    pub start: usize,
}

impl RingColumn {
    fn peer(&self, ring: usize) -> usize {
        self.start + ring * self.ulysses + self.me % self.ulysses
    }
}

/// Tells every rank of the group this rank's counts, and returns those of all, in rank order; `runs` of each is what it
/// needs of this rank.
pub(super) fn exchange_counts(
    run: &ListedRun,
    incoming: &[RowRuns],
    transport: &dyn Transport,
) -> Result<Vec<RowCounts>> {
    let (group, me, ulysses) = (run.allowed.group.clone(), transport.rank(), run.plan.mesh().ulysses);
    let own = counts(run, me, incoming);
    let of_peer = |peer: usize| match (peer + group.len() - me) % ulysses {
        0 => RowCounts { runs: incoming[(peer - group.start) / ulysses].len() as u64, ..own },
        _ => own,
    };
    let sent: Vec<RowCounts> = group.clone().map(of_peer).collect();
    let mut all = vec![RowCounts::default(); group.len()];
    all[me - group.start] = own;
    let label = Label { run: run.name, ..Label::new("exchange of counts of listed rows", 0) };
    // SAFETY: any bits are numbers.
    unsafe { exchange_all(label, group.start, &sent, &mut all, transport) }?;
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
        bound: (run.workspace.is_lent() || strided).into(),
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
pub(super) fn exchange_rows(
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

fn format_runs(runs: usize) -> String {
    format!("{runs} runs of rows")
}

/// Sends `sent[i]` to rank `start + i`, and receives `all[i]` of it; this rank's own entry stays.
///
/// # Safety
/// Any bits are a `T`.
unsafe fn exchange_all<T: Copy>(
    label: Label,
    start: usize,
    sent: &[T],
    all: &mut [T],
    transport: &dyn Transport,
) -> Result<()> {
    let (bytes, me) = (size_of::<T>(), transport.rank());
    let (mut sends, mut recvs) = (Vec::new(), Vec::new());
    for (i, (to, from)) in sent.iter().zip(all).enumerate().filter(|&(i, _)| start + i != me) {
        let peer = start + i;
        sends.push(Message { peer, ptr: (&raw const *to).cast_mut().cast(), bytes });
        recvs.push(Message { peer, ptr: (&raw mut *from).cast(), bytes });
    }
    // SAFETY: what is sent is read alone, and each entry that is received is written by one message (and may have any
    // bits, as promised).
    unsafe { transport.exchange(label, &sends, &recvs) }
}

/// Whether listed rows fit what the caller of one rank has.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Fit {
    /// Bytes of its workspace if it is too small, and those that it needs; otherwise 0.
    bytes: u64,
    needed: u64,
    /// 1 if its tensors do not fit.
    tensors: u64,
}

/// Refuses listed rows on all ranks of the group if they do not fit what the caller of one of them has; `tensors` is
/// whether they fit this rank's tensors, and `needed` the bytes of workspace that they need.
///
/// The outer error is that of an exchange. All ranks return the inner one, or none, so the group goes on after it.
pub(super) fn agree_on_fit(
    run: &ListedRun,
    needed: u64,
    tensors: Result<()>,
    transport: &dyn Transport,
) -> Result<Result<()>> {
    let group = run.allowed.group.clone();
    let mut own = Fit { tensors: tensors.is_err().into(), ..Fit::default() };
    if let Some(bytes) = run.workspace.lent_bytes().filter(|&bytes| bytes < needed) {
        (own.bytes, own.needed) = (bytes, needed);
    }
    let mut all = vec![own; group.len()];
    let label = Label { run: run.name, ..Label::new("agreement on workspaces for listed rows", 0) };
    // SAFETY: any bits are numbers.
    unsafe { exchange_all(label, group.start, &vec![own; group.len()], &mut all, transport) }?;
    // As many bytes on every rank are enough: the first of those who need most.
    let largest = all.iter().map(|fit| fit.needed).max().unwrap_or(0);
    if let Some((i, fit)) = all.iter().enumerate().find(|(_, fit)| largest > 0 && fit.needed == largest) {
        let found = format!("{} bytes on rank {}", fit.bytes, group.start + i);
        return Ok(Err(Error::invalid("workspace", found, format!("at least {largest} bytes for the listed rows"))
            .hint(
                "lend that many where the plan needs fewer, or none; or plan with key_rows allowed, whose rows fit the workspace of the plan",
            )));
    }
    Ok(tensors.and_then(|()| match all.iter().position(|fit| fit.tensors != 0) {
        Some(i) => Err(Error::invalid(
            "key_rows",
            "listed",
            format!("tensors of rank {} that go together with listed rows: see its own error", group.start + i),
        )
        .hint("keep tensors apart from a lent workspace, or plan with key_rows allowed")),
        None => Ok(()),
    }))
}
