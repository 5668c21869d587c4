// SPDX-License-Identifier: MIT OR Apache-2.0
//! Capture of streams: what is put into a capturing stream becomes a node of a graph and does not run.
//!
//! A capture begins in one stream, its origin. Other streams join it by waiting for an event that was recorded in it,
//! and must be joined back before it ends. Each stream of a capture has a frontier: the nodes that the next node put
//! into it comes behind.
//!
//! What may not be done while a stream is being captured ends with the code that the manual gives for it and makes the
//! capture invalid: from then on its streams refuse everything until the capture is ended in its origin, which gives no
//! graph. The manual calls some functions unsafe during captures without listing them; here these are all that
//! allocate, load code, ask or wait (`calls`). Whom they are refused to depends on the mode of the capture and of the
//! thread.
//!
//! Not supported in a capture, and refused: copies from and to pageable memory, `cuMemAllocAsync` and `cuMemFreeAsync`.

use super::codes;
use super::entry::Outcome;
use super::graph::{Graph, Node};
use super::machine::{Machine, default_stream};
use super::queue::Work;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::thread::{self, ThreadId};

pub(crate) const GLOBAL: u32 = 0;
pub(crate) const RELAXED: u32 = 2;

thread_local! {
    /// The thread's own mode, see `cuThreadExchangeStreamCaptureMode`.
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// Sets the thread's mode and gives what it was.
pub(crate) fn exchange_mode(mode: u32) -> u32 {
    MODE.replace(mode)
}

/// A capture that has begun and not ended.
pub(crate) struct Capture {
    origin: u64,
    mode: u32,
    thread: ThreadId,
    /// The graph that is being made.
    pub(crate) graph: u64,
    /// The nodes that the next one comes behind, of each stream.
    pub(crate) frontiers: BTreeMap<u64, Vec<usize>>,
    pub(crate) invalid: bool,
}

impl Machine {
    pub(crate) fn is_capturing(&self) -> bool {
        !self.captures.is_empty()
    }

    /// The capture a stream is part of.
    fn capture_of(&self, stream: u64) -> Option<u64> {
        self.streams.get(&stream).and_then(|s| s.capture)
    }

    fn invalidate(&mut self, which: impl Fn(u64, &Capture) -> bool) -> bool {
        let mut any = false;
        for (&id, c) in &mut self.captures {
            if which(id, c) {
                c.invalid = true;
                any = true;
            }
        }
        any
    }

    /// Makes a stream's capture invalid and gives the error.
    pub(crate) fn spoil(&mut self, stream: u64, code: i32) -> i32 {
        if let Some(capture) = self.capture_of(stream) {
            self.invalidate(|id, _| id == capture);
        }
        code
    }

    /// A call that is unsafe while streams are being captured: refused by the modes of this thread and of the captures.
    pub(crate) fn refuse_unsafe(&mut self) -> Outcome {
        let (me, mode) = (thread::current().id(), MODE.get());
        let hit = self.invalidate(|_, c| match mode {
            RELAXED => false,
            GLOBAL if c.mode == GLOBAL => true,
            _ => c.thread == me && c.mode != RELAXED,
        });
        if hit { Err(codes::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// Whether a stream may be waited for or asked.
    pub(crate) fn observable(&mut self, stream: u64) -> Outcome {
        if self.capture_of(stream).is_some() {
            return Err(self.spoil(stream, codes::STREAM_CAPTURE_UNSUPPORTED));
        }
        self.legacy(stream)
    }

    /// Whether a device may be waited for: not while any of its streams is being captured.
    pub(crate) fn device_observable(&mut self, device: usize) -> Outcome {
        let involved: Vec<u64> =
            self.streams.values().filter(|s| s.device == device).filter_map(|s| s.capture).collect();
        if self.invalidate(|id, _| involved.contains(&id)) {
            return Err(codes::STREAM_CAPTURE_UNSUPPORTED);
        }
        Ok(())
    }

    /// The default stream cannot be used while a stream that it is ordered with is being captured.
    fn legacy(&mut self, stream: u64) -> Outcome {
        let involved = self.blocked_by(stream);
        if involved.is_empty() {
            return Ok(());
        }
        self.invalidate(|id, _| involved.contains(&id));
        Err(codes::STREAM_CAPTURE_IMPLICIT)
    }

    /// The captures whose streams a default stream is ordered with; none for any other stream.
    pub(crate) fn blocked_by(&self, stream: u64) -> Vec<u64> {
        let Some(device) = self.streams.get(&stream).map(|s| s.device) else { return Vec::new() };
        if self.captures.is_empty() || stream != default_stream(device) {
            return Vec::new();
        }
        self.streams.values().filter(|s| s.device == device && !s.independent).filter_map(|s| s.capture).collect()
    }

    /// Puts work into a stream: into its queue, or into the graph that it is captured into.
    pub(crate) fn submit(&mut self, stream: u64, work: Work) -> Outcome {
        if self.captures.is_empty() {
            self.enqueue(stream, Vec::new(), None, work);
            return Ok(());
        }
        let Some(id) = self.capture_of(stream) else {
            self.legacy(stream)?;
            self.enqueue(stream, Vec::new(), None, work);
            return Ok(());
        };
        self.valid(id)?;
        if matches!(work, Work::Write { .. } | Work::Read { .. } | Work::Alloc { .. } | Work::Free { .. }) {
            self.tell(
                "a graph refused: copies of pageable memory and allocations in stream order cannot be captured here",
            );
            return Err(self.spoil(stream, codes::STREAM_CAPTURE_UNSUPPORTED));
        }
        let device = self.streams.get(&stream).map_or(0, |s| s.device);
        self.add_node(id, stream, Node { work, device, after: Vec::new() });
        Ok(())
    }

    /// Whether a stream takes work: not one of a spoilt capture, nor a default stream that a capture would depend on.
    pub(crate) fn acceptable(&mut self, stream: u64) -> Outcome {
        match self.capture_of(stream) {
            Some(id) => self.valid(id),
            None => self.legacy(stream),
        }
    }

    /// Adds a node behind a stream's frontier.
    fn add_node(&mut self, capture: u64, stream: u64, mut node: Node) {
        let Some(c) = self.captures.get_mut(&capture) else { return };
        let Some(graph) = self.graphs.get_mut(&c.graph) else { return };
        let frontier = c.frontiers.entry(stream).or_default();
        node.after.clone_from(frontier);
        graph.nodes.push(node);
        *frontier = vec![graph.nodes.len() - 1];
    }

    /// Adds the nodes of a graph that is launched into a capturing stream. False when the stream is not capturing.
    pub(crate) fn capture_graph(&mut self, stream: u64, nodes: &[Node]) -> Result<bool, i32> {
        let Some(id) = self.capture_of(stream) else {
            self.legacy(stream)?;
            return Ok(false);
        };
        self.valid(id)?;
        let Some(c) = self.captures.get_mut(&id) else { return Ok(false) };
        let Some(graph) = self.graphs.get_mut(&c.graph) else { return Ok(false) };
        let frontier = c.frontiers.entry(stream).or_default();
        let base = graph.nodes.len();
        for node in nodes {
            let mut node = node.clone();
            node.after =
                if node.after.is_empty() { frontier.clone() } else { node.after.iter().map(|n| n + base).collect() };
            graph.nodes.push(node);
        }
        let leaves: Vec<usize> =
            (base..graph.nodes.len()).filter(|n| !graph.nodes[base..].iter().any(|m| m.after.contains(n))).collect();
        if !leaves.is_empty() {
            *frontier = leaves;
        }
        Ok(true)
    }

    fn valid(&self, capture: u64) -> Outcome {
        match self.captures.get(&capture) {
            Some(c) if c.invalid => Err(codes::STREAM_CAPTURE_INVALIDATED),
            _ => Ok(()),
        }
    }

    /// Begins a capture in a stream.
    pub(crate) fn begin_capture(&mut self, stream: u64, mode: u32) -> Outcome {
        let device = self.streams.get(&stream).ok_or(codes::INVALID_HANDLE)?.device;
        if mode > RELAXED {
            return Err(codes::INVALID_VALUE);
        }
        if stream == default_stream(device) || self.capture_of(stream).is_some() {
            return Err(self.spoil(stream, codes::STREAM_CAPTURE_UNSUPPORTED));
        }
        let (id, graph) = (self.handle(), self.handle());
        self.graphs.insert(graph, Graph::default());
        let frontiers = BTreeMap::from([(stream, Vec::new())]);
        let capture =
            Capture { origin: stream, mode, thread: thread::current().id(), graph, frontiers, invalid: false };
        self.captures.insert(id, capture);
        self.join_capture(stream, id);
        Ok(())
    }

    fn join_capture(&mut self, stream: u64, capture: u64) {
        if let Some(s) = self.streams.get_mut(&stream) {
            s.capture = Some(capture);
        }
    }

    /// Ends the capture of a stream and gives its graph.
    pub(crate) fn end_capture(&mut self, stream: u64) -> Result<u64, i32> {
        let id = self.capture_of(stream).ok_or(codes::INVALID_VALUE)?;
        let c = self.captures.get(&id).ok_or(codes::INVALID_VALUE)?;
        if c.origin != stream {
            return Err(self.spoil(stream, codes::STREAM_CAPTURE_UNMATCHED));
        }
        if c.mode != RELAXED && c.thread != thread::current().id() {
            return Err(self.spoil(stream, codes::STREAM_CAPTURE_WRONG_THREAD));
        }
        let Some(c) = self.captures.remove(&id) else { return Err(codes::INVALID_VALUE) };
        for s in self.streams.values_mut().filter(|s| s.capture == Some(id)) {
            s.capture = None;
        }
        let joined = self.graphs.get(&c.graph).is_some_and(|g| {
            let reached = g.ancestors(c.frontiers.get(&stream).map_or(&[][..], |f| f));
            c.frontiers.values().flatten().all(|&n| reached[n])
        });
        if c.invalid || !joined {
            self.graphs.remove(&c.graph);
            return Err(if c.invalid { codes::STREAM_CAPTURE_INVALIDATED } else { codes::STREAM_CAPTURE_UNJOINED });
        }
        Ok(c.graph)
    }

    /// Records an event in a capturing stream: it stands for the stream's frontier. False when it is not capturing.
    pub(crate) fn capture_record(&mut self, stream: u64, event: u64, external: bool) -> Result<bool, i32> {
        let Some(id) = self.capture_of(stream) else {
            self.legacy(stream)?;
            if let Some(e) = self.events.get_mut(&event) {
                e.captured = None;
            }
            return Ok(false);
        };
        self.valid(id)?;
        if external {
            self.submit(stream, Work::Record { event, version: 0 })?;
            return Ok(true);
        }
        let frontier = self.captures.get(&id).and_then(|c| c.frontiers.get(&stream)).cloned().unwrap_or_default();
        if let Some(e) = self.events.get_mut(&event) {
            e.captured = Some((id, frontier));
        }
        Ok(true)
    }

    /// Has a stream wait for an event when one of them belongs to a capture. False when neither does.
    pub(crate) fn capture_wait(&mut self, stream: u64, event: u64, external: bool) -> Result<bool, i32> {
        let mine = self.capture_of(stream);
        let captured = self.events.get(&event).and_then(|e| e.captured.clone());
        if let Some(id) = mine {
            self.valid(id)?;
        }
        if external && mine.is_some() {
            self.submit(stream, Work::Await { event })?;
            return Ok(true);
        }
        match (mine, captured) {
            (None, None) => {
                self.legacy(stream)?;
                Ok(false)
            }
            (Some(_), None) => Err(self.spoil(stream, codes::STREAM_CAPTURE_ISOLATION)),
            (_, Some((theirs, _))) if !self.captures.contains_key(&theirs) => {
                Err(self.spoil(stream, codes::CAPTURED_EVENT))
            }
            (Some(mine), Some((theirs, _))) if mine != theirs => {
                self.invalidate(|id, _| id == mine || id == theirs);
                Err(codes::STREAM_CAPTURE_MERGE)
            }
            (_, Some((id, nodes))) => {
                self.valid(id)?;
                let device = self.streams.get(&stream).map_or(0, |s| s.device);
                if stream == default_stream(device) {
                    self.invalidate(|i, _| i == id);
                    return Err(codes::STREAM_CAPTURE_IMPLICIT);
                }
                self.join_capture(stream, id);
                if let Some(c) = self.captures.get_mut(&id) {
                    let frontier = c.frontiers.entry(stream).or_default();
                    frontier.extend(nodes);
                    frontier.sort_unstable();
                    frontier.dedup();
                }
                Ok(true)
            }
        }
    }

    /// Whether an event may be waited for or asked by the host: not when its last record was captured.
    pub(crate) fn event_observable(&mut self, event: u64) -> Outcome {
        let e = self.events.get(&event).ok_or(codes::INVALID_HANDLE)?;
        if let Some((id, _)) = e.captured {
            self.invalidate(|i, _| i == id);
            return Err(codes::CAPTURED_EVENT);
        }
        Ok(())
    }
}
