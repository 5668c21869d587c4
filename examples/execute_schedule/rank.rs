// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank: its tensors, its buffers, and its operations in the order of the list.
//!
//! The list is a legal order of execution: each operation comes after those that it depends on, so one thread needs
//! neither the lanes nor `after`, which say what may overlap. Sends do not wait, so exchanges cannot block each other.

use std::{
    collections::HashMap,
    sync::mpsc::{Receiver, Sender, channel},
};

use cpattn::{
    Plan,
    schedule::{Buf, BufferView, Direction, ExpandedOp, Purpose, Schedule, SumBlock, TensorId},
};

/// The channels of a rank: to each other rank, and from each.
pub struct Links {
    to: Vec<Sender<Vec<f64>>>,
    from: Vec<Receiver<Vec<f64>>>,
}

/// The channels of all ranks.
pub fn connect(world: usize) -> Vec<Links> {
    let mut links: Vec<Links> = (0..world).map(|_| Links { to: Vec::new(), from: Vec::new() }).collect();
    for reader in 0..world {
        for sender in 0..world {
            let (to, from) = channel();
            links[sender].to.push(to);
            links[reader].from.push(from);
        }
    }
    links
}

/// A rank that executes schedules.
pub struct ExecutedRank<'a> {
    pub plan: &'a Plan,
    pub rank: usize,
    links: Links,
    /// The caller's tensors, `[tokens, heads, dim]`.
    pub tensors: HashMap<TensorId, Vec<f64>>,
    /// The workspace: `[rows, heads, dim]` each.
    buffers: Vec<Vec<f64>>,
    /// Heads and dim of each buffer.
    shapes: Vec<[usize; 2]>,
}

impl<'a> ExecutedRank<'a> {
    pub fn new(plan: &'a Plan, rank: usize, links: Links) -> Self {
        Self { plan, rank, links, tensors: HashMap::new(), buffers: Vec::new(), shapes: Vec::new() }
    }

    /// Takes the rank's tokens of a tensor of the whole batch.
    pub fn set(&mut self, tensor: TensorId, whole: &[f64]) {
        let [_, heads, dim] = tensor.shape(self.plan, self.rank);
        let row = heads * dim;
        let tokens = self.plan.local_tokens(tensor.side(), self.rank).indices();
        self.tensors.insert(tensor, tokens.iter().flat_map(|&t| whole[t * row..(t + 1) * row].to_vec()).collect());
    }

    /// Executes a schedule.
    pub fn run(&mut self, schedule: &Schedule) {
        let p = self.plan.problem();
        assert!(
            p.dropout().is_none() && p.sinks_per_head() <= 1,
            "these kernels have no dropout, and one sink for each head"
        );
        // What nothing writes must show.
        let filled = |rows: usize, heads: usize, dim: usize| vec![f64::NAN; rows * heads * dim];
        for tensor in TensorId::ALL {
            let written = match schedule.purpose() {
                Purpose::Attention(Direction::Forward) => matches!(tensor, TensorId::O | TensorId::Lse),
                Purpose::Attention(Direction::Backward) => {
                    matches!(tensor, TensorId::Dq | TensorId::Dk | TensorId::Dv | TensorId::Dsinks)
                }
                _ => unreachable!("all-to-alls and combines have tensors of their own"),
            };
            if written {
                let [tokens, heads, dim] = tensor.shape(self.plan, self.rank);
                self.tensors.insert(tensor, filled(tokens, heads, dim));
            }
        }
        let buffers = schedule.buffers();
        self.shapes = buffers.iter().map(|b| [b.heads as usize, b.dim as usize]).collect();
        self.buffers = buffers.iter().map(|b| filled(b.rows as usize, b.heads as usize, b.dim as usize)).collect();
        for op in 0..schedule.operations().len() {
            self.operation(schedule.expand(op));
        }
    }

    fn operation(&mut self, op: ExpandedOp) {
        match op {
            ExpandedOp::Exchange { messages, .. } => {
                for m in messages.iter().filter(|m| m.send) {
                    self.links.to[m.peer].send(self.read(&m.view)).expect("a peer that lives");
                }
                for m in messages.iter().filter(|m| !m.send) {
                    let rows = self.links.from[m.peer].recv().expect("a peer that lives");
                    self.write(&m.view, rows);
                }
            }
            ExpandedOp::Sums(parts) => parts.iter().flatten().for_each(|sum| self.sum(sum)),
            ExpandedOp::Merges(parts) => {
                for pair in parts.iter().flat_map(|part| part.chunks(2)) {
                    self.merge(&pair[0], &pair[1]);
                }
            }
            ExpandedOp::Delta { delta } => self.delta(&delta),
            ExpandedOp::SinkGradient { delta, partial } => self.sink_gradient(&delta, &partial),
            // The words of a number, here only the first one, are added.
            ExpandedOp::SinkTotal(sum) => {
                let digits = self.read(&sum.sources[0]);
                let words = digits.len() / sum.dst.heads as usize;
                self.write(&sum.dst, digits.chunks(words).map(|number| number.iter().sum()).collect());
            }
            ExpandedOp::Attend(call, ranges) => self.attend(&call, &ranges),
            ExpandedOp::Backward(call, ranges) => self.attend_backward(&call, &ranges),
            other => panic!("an operation that this program does not know: {other:?}"),
        }
    }

    /// The buffer of a view, its heads and its dim.
    fn buffer(&self, buf: Buf) -> (&[f64], [usize; 2]) {
        match buf {
            Buf::User(tensor) => {
                let [_, heads, dim] = tensor.shape(self.plan, self.rank);
                (&self.tensors[&tensor], [heads, dim])
            }
            Buf::Work(i) => (&self.buffers[i as usize], self.shapes[i as usize]),
        }
    }

    /// The innermost dimension of a view.
    pub fn dim(&self, view: &BufferView) -> usize {
        self.buffer(view.buf).1[1]
    }

    /// Where the elements of row `i`, head `h` of a view begin in its buffer.
    fn at(&self, view: &BufferView, i: usize, h: usize) -> usize {
        let [heads, dim] = self.buffer(view.buf).1;
        ((view.row as usize + i) * heads + view.head as usize + h) * dim
    }

    /// Row `i`, head `h` of a view.
    pub fn row(&self, view: &BufferView, i: usize, h: usize) -> &[f64] {
        let at = self.at(view, i, h);
        &self.buffer(view.buf).0[at..at + self.dim(view)]
    }

    /// As [`ExecutedRank::row`], to write to.
    pub fn row_mut(&mut self, view: &BufferView, i: usize, h: usize) -> &mut [f64] {
        let (at, dim) = (self.at(view, i, h), self.dim(view));
        let buffer = match view.buf {
            Buf::User(tensor) => self.tensors.get_mut(&tensor).expect("a tensor of the run"),
            Buf::Work(i) => &mut self.buffers[i as usize],
        };
        &mut buffer[at..at + dim]
    }

    /// Rows and heads of a view, in the order of its elements.
    fn places(view: &BufferView) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (rows, heads) = (view.rows as usize, view.heads as usize);
        (0..rows).flat_map(move |i| (0..heads).map(move |h| (i, h)))
    }

    fn read(&self, view: &BufferView) -> Vec<f64> {
        Self::places(view).flat_map(|(i, h)| self.row(view, i, h)).copied().collect()
    }

    fn write(&mut self, view: &BufferView, values: Vec<f64>) {
        let dim = self.dim(view);
        for ((i, h), row) in Self::places(view).zip(values.chunks(dim)) {
            self.row_mut(view, i, h).copy_from_slice(row);
        }
    }

    fn sum(&mut self, sum: &SumBlock) {
        let mut total = vec![0.0; Self::places(&sum.dst).count() * self.dim(&sum.dst)];
        for source in &sum.sources {
            total.iter_mut().zip(self.read(source)).for_each(|(t, x)| *t += x);
        }
        self.write(&sum.dst, total);
    }

    /// Merges partial results: rows of o, and their lse, of which the first word is used.
    fn merge(&mut self, o: &SumBlock, lse: &SumBlock) {
        for (i, h) in Self::places(&o.dst) {
            let [a, b] = [0, 1].map(|n| (self.row(&o.sources[n], i, h).to_vec(), self.row(&lse.sources[n], i, h)[0]));
            let (row, sum) = super::attention::merged(a, b);
            self.row_mut(&o.dst, i, h).copy_from_slice(&row);
            let words = self.row_mut(&lse.dst, i, h);
            words.fill(0.0);
            words[0] = sum;
        }
    }
}

/// A tensor of the whole batch from the tokens of all ranks.
pub fn gather(plan: &Plan, tensor: TensorId, ranks: &[ExecutedRank]) -> Vec<f64> {
    let [_, heads, dim] = tensor.shape(plan, 0);
    let row = heads * dim;
    let mut whole = vec![f64::NAN; plan.problem().batch().tokens(tensor.side()) * row];
    for rank in ranks {
        for (from, t) in plan.local_tokens(tensor.side(), rank.rank).indices().into_iter().enumerate() {
            whole[t * row..(t + 1) * row].copy_from_slice(&rank.tensors[&tensor][from * row..(from + 1) * row]);
        }
    }
    whole
}
