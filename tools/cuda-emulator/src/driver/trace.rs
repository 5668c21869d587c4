// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mutants of the runtime: what if one event wait had been forgotten?
//!
//! No second run is needed to know. With `CPATTN_EMU_EVENTS` set, the driver keeps every operation with the edges that
//! order it and the bytes it touched. Taking one wait away and computing the clocks again tells whether two operations
//! that touch the same bytes would have been left without an order: then the race detector reports that mutant, in
//! every seed. A wait whose removal leaves the order of all operations as it was is redundant; one that orders only
//! operations which share no bytes is idle (the first use of a buffer, say). Either way nothing can come out
//! differently.
//!
//! Each time the device is idle and the host knows it, the file gets a line per wait: `event caught|redundant|idle
//! <what waits for what>`.

use super::queue::Clock;
use crate::mem::Footprint;
use std::collections::HashMap;
use std::io::Write as _;
use std::path::PathBuf;

struct Traced {
    id: (u64, u64),
    what: String,
    /// Edges from earlier operations; those of a wait's event are apart.
    after: Vec<(u64, u64)>,
    event: Option<(u64, u64)>,
    /// How many of `facts` the host knew.
    facts: usize,
    reads: Footprint,
    writes: Footprint,
}

/// All operations since the device was last idle.
pub(crate) struct Trace {
    path: PathBuf,
    ops: Vec<Traced>,
    index: HashMap<(u64, u64), usize>,
    /// Operations the host learned to be done, in the order in which it did.
    facts: Vec<(u64, u64)>,
}

impl Trace {
    /// From the environment.
    pub(crate) fn from_env() -> Option<Self> {
        let path = std::env::var_os("CPATTN_EMU_EVENTS")?.into();
        Some(Self { path, ops: Vec::new(), index: HashMap::new(), facts: Vec::new() })
    }

    /// An operation was enqueued; `event` is what it waits for if it is a wait.
    pub(crate) fn enqueued(&mut self, id: (u64, u64), after: &[(u64, u64)], event: Option<(u64, u64)>) {
        let after = after.iter().copied().filter(|e| Some(*e) != event).collect();
        self.index.insert(id, self.ops.len());
        self.ops.push(Traced {
            id,
            what: String::new(),
            after,
            event,
            facts: self.facts.len(),
            reads: Footprint::default(),
            writes: Footprint::default(),
        });
    }

    /// An operation ran.
    pub(crate) fn ran(&mut self, id: (u64, u64), what: &str, reads: &Footprint, writes: &Footprint) {
        if let Some(&k) = self.index.get(&id) {
            let op = &mut self.ops[k];
            (op.what, op.reads, op.writes) = (what.to_owned(), reads.clone(), writes.clone());
        }
    }

    /// The host learned that an operation is done.
    pub(crate) fn known(&mut self, id: (u64, u64)) {
        if self.facts.last() != Some(&id) {
            self.facts.push(id);
        }
    }

    /// Clocks of all operations, without one of the waits.
    fn clocks(&self, without: Option<usize>) -> Vec<Clock> {
        let mut out: Vec<Clock> = Vec::with_capacity(self.ops.len());
        let (mut host, mut known) = (Clock::default(), 0);
        for (k, op) in self.ops.iter().enumerate() {
            for fact in &self.facts[known..op.facts] {
                if let Some(c) = self.index.get(fact).and_then(|&f| out.get(f)) {
                    host.join(c);
                }
            }
            known = op.facts;
            let mut clock = host.clone();
            let (stream, number) = op.id;
            let event = if without == Some(k) { None } else { op.event };
            for edge in op.after.iter().chain(&event).chain(&[(stream, number - 1)]) {
                if let Some(c) = self.index.get(edge).and_then(|&e| out.get(e)) {
                    clock.join(c);
                }
            }
            clock.raise(stream, number);
            out.push(clock);
        }
        out
    }

    /// Judges every wait and starts anew. To be called when nothing is queued and the host knows it.
    pub(crate) fn judge(&mut self) {
        let waits: Vec<usize> = (0..self.ops.len()).filter(|&k| self.ops[k].event.is_some()).collect();
        if !waits.is_empty() {
            let touching: Vec<usize> = (0..self.ops.len())
                .filter(|&k| !self.ops[k].reads.is_empty() || !self.ops[k].writes.is_empty())
                .collect();
            let before = self.clocks(None);
            let ordered = |c: &[Clock], a: usize, b: usize| c[b].covers(self.ops[a].id.0, self.ops[a].id.1);
            let mut text = String::new();
            let mut conflicts: HashMap<(usize, usize), bool> = HashMap::new();
            for &w in &waits {
                let after = self.clocks(Some(w));
                let (mut changed, mut caught) = (false, None);
                'search: for (n, &b) in touching.iter().enumerate() {
                    for &a in &touching[..n] {
                        if !ordered(&before, a, b) || ordered(&after, a, b) {
                            continue;
                        }
                        changed = true;
                        let clash = *conflicts.entry((a, b)).or_insert_with(|| self.conflict(a, b));
                        if clash {
                            caught = Some((a, b));
                            break 'search;
                        }
                    }
                }
                let next = touching.iter().find(|&&k| k > w && self.ops[k].id.0 == self.ops[w].id.0);
                let waiting = next.map_or("the end of its stream", |&k| &self.ops[k].what);
                text += &match caught {
                    Some((a, b)) => format!("event caught {} before {}\n", self.ops[a].what, self.ops[b].what),
                    None if changed => format!("event idle before {waiting}\n"),
                    None => format!("event redundant before {waiting}\n"),
                };
            }
            if let Ok(mut f) = std::fs::OpenOptions::new().create(true).append(true).open(&self.path) {
                // Lines that cannot be written show up as waits that were never judged.
                let _ = f.write_all(text.as_bytes());
            }
        }
        self.ops.clear();
        self.index.clear();
        self.facts.clear();
    }

    fn conflict(&self, a: usize, b: usize) -> bool {
        let (a, b) = (&self.ops[a], &self.ops[b]);
        a.writes.overlap(&b.writes).or(a.writes.overlap(&b.reads)).or(a.reads.overlap(&b.writes)).is_some()
    }
}
