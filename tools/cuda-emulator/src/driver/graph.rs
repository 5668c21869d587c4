// SPDX-License-Identifier: MIT OR Apache-2.0
//! Graphs: work that was captured once and is replayed by one call.
//!
//! A node comes behind the nodes it was captured behind and behind nothing else of its graph. To keep it so, a graph
//! that is instantiated gets streams of its own, which no program sees: a node goes into the stream of a node it comes
//! behind where that is the last one there, and into another one otherwise. A replay is ordered behind what its stream
//! held and behind the graph's replay before, and the stream's next work behind all of it. The race detector then sees
//! a replay as it sees everything else.

use super::calls::Piece;
use super::codes;
use super::machine::{Machine, stream};
use super::queue::{Clock, Work};

/// One piece of work and the nodes it comes behind.
#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) work: Work,
    pub(crate) device: usize,
    /// Nodes have smaller numbers than those that come behind them.
    pub(crate) after: Vec<usize>,
}

/// A graph.
#[derive(Clone, Default)]
pub(crate) struct Graph {
    pub(crate) nodes: Vec<Node>,
}

/// A graph that can be launched.
pub(crate) struct Exec {
    pub(crate) graph: Graph,
    /// The stream of each node.
    chains: Vec<u64>,
    /// The end of the replay before.
    last: Option<(u64, u64, Clock)>,
}

impl Graph {
    /// Which nodes are among these or before them.
    pub(crate) fn ancestors(&self, from: &[usize]) -> Vec<bool> {
        let mut reached = vec![false; self.nodes.len()];
        for &n in from {
            reached[n] = true;
        }
        for n in (0..self.nodes.len()).rev() {
            if reached[n] {
                for &a in &self.nodes[n].after {
                    reached[a] = true;
                }
            }
        }
        reached
    }

    /// Splits the nodes into chains of nodes that come behind each other: the number of each one's chain, and how many
    /// there are.
    fn chains(&self) -> (Vec<usize>, usize) {
        let (mut of, mut ends): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
        for (n, node) in self.nodes.iter().enumerate() {
            let free = node
                .after
                .iter()
                .map(|&a| of[a])
                .zip(&node.after)
                .find(|&(chain, &a)| ends[chain] == a && self.nodes[a].device == node.device);
            match free {
                Some((chain, _)) => {
                    of.push(chain);
                    ends[chain] = n;
                }
                None => {
                    of.push(ends.len());
                    ends.push(n);
                }
            }
        }
        (of, ends.len())
    }
}

impl Machine {
    /// Makes a graph ready to be launched.
    pub(crate) fn instantiate(&mut self, graph: u64) -> Result<u64, i32> {
        if self.captures.values().any(|c| c.graph == graph) {
            return Err(codes::INVALID_VALUE);
        }
        let graph = self.graphs.get(&graph).ok_or(codes::INVALID_VALUE)?.clone();
        let (of, count) = graph.chains();
        let mut streams = vec![0; count];
        for (n, &chain) in of.iter().enumerate() {
            if streams[chain] == 0 {
                let id = self.handle();
                self.streams.insert(id, stream(graph.nodes[n].device, true, 0));
                streams[chain] = id;
            }
        }
        let id = self.handle();
        let chains = of.into_iter().map(|c| streams[c]).collect();
        self.execs.insert(id, Exec { graph, chains, last: None });
        Ok(id)
    }

    /// Replays a graph in a stream, or adds it to the graph that the stream is captured into.
    pub(crate) fn launch_graph(&mut self, exec: u64, into: u64) -> Result<(), i32> {
        let Some(mut e) = self.execs.remove(&exec) else { return Err(codes::INVALID_HANDLE) };
        let done = self.replay(&mut e, into);
        self.execs.insert(exec, e);
        done
    }

    fn replay(&mut self, e: &mut Exec, into: u64) -> Result<(), i32> {
        if self.capture_graph(into, &e.graph.nodes)? {
            return Ok(());
        }
        self.counts.piece(Piece::GraphLaunch);
        let (after, clock) = match &e.last {
            Some((s, n, clock)) => (vec![(*s, *n)], Some(clock)),
            None => (Vec::new(), None),
        };
        let begin = self.join(into, after, clock);
        let mut places: Vec<(u64, u64, Clock)> = Vec::with_capacity(e.chains.len());
        let (mut ends, mut all) = (Vec::new(), begin.2.clone());
        for (node, &chain) in e.graph.nodes.iter().zip(&e.chains) {
            let (mut after, mut clock) = (Vec::new(), begin.2.clone());
            if node.after.is_empty() {
                after.push((begin.0, begin.1));
            }
            for &a in &node.after {
                after.push((places[a].0, places[a].1));
                clock.join(&places[a].2);
            }
            let work = match &node.work {
                Work::Record { event, .. } => match self.events.get_mut(event) {
                    Some(e) => {
                        e.version += 1;
                        Work::Record { event: *event, version: e.version }
                    }
                    None => Work::Join,
                },
                Work::Await { event } => {
                    if let Some((s, n, other)) = self.events.get(event).and_then(|e| e.record.as_ref()) {
                        after.push((*s, *n));
                        clock.join(other);
                    }
                    Work::Join
                }
                Work::Exchange(x) => Work::Exchange(x.again()),
                work => work.clone(),
            };
            self.enqueue(chain, after, Some(&clock), work);
            let place = self.place(chain);
            ends.push((place.0, place.1));
            all.join(&place.2);
            places.push(place);
        }
        e.last = Some(self.join(into, ends, Some(&all)));
        Ok(())
    }

    /// Puts a point into a stream that comes behind others, and says where.
    pub(crate) fn join(&mut self, into: u64, after: Vec<(u64, u64)>, clock: Option<&Clock>) -> (u64, u64, Clock) {
        self.enqueue(into, after, clock, Work::Join);
        self.place(into)
    }

    /// Where the newest operation of a stream is.
    fn place(&self, id: u64) -> (u64, u64, Clock) {
        self.streams.get(&id).map_or_else(|| (id, 0, Clock::default()), |s| (id, s.enqueued, s.tail.clone()))
    }

    /// Forgets an instance; a replay that has begun goes on.
    pub(crate) fn destroy_exec(&mut self, exec: u64) -> Result<(), i32> {
        let e = self.execs.remove(&exec).ok_or(codes::INVALID_VALUE)?;
        for id in e.chains {
            if let Some(s) = self.streams.get_mut(&id) {
                s.destroyed = true;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(after: &[&[usize]]) -> Graph {
        Graph { nodes: after.iter().map(|a| Node { work: Work::Join, device: 0, after: a.to_vec() }).collect() }
    }

    #[test]
    fn nodes_without_an_order_are_never_in_one_chain() {
        // A fork into two, a join, and a node on its own.
        let g = graph(&[&[], &[0], &[0], &[1, 2], &[]]);
        let (of, count) = g.chains();
        assert_eq!((of, count), (vec![0, 0, 1, 0, 2], 3));
        assert_eq!(g.ancestors(&[3]), [true, true, true, true, false]);
        assert_eq!(g.ancestors(&[2]), [true, false, true, false, false]);
    }
}
