// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel calls of a schedule, as loops over rows, heads and keys in f64.

use cpattn::{
    call::{Gradients, Pair},
    schedule::{AttendOp, BackwardOp, BufferView, CallRanges, TensorId},
};

use crate::rank::ExecutedRank;

/// A partial result: a row of o, normalised, and its lse.
pub type Partial = (Vec<f64>, f64);

/// Two partial results of the same row as one.
pub fn merged((a, of_a): Partial, (b, of_b): Partial) -> Partial {
    let most = of_a.max(of_b);
    if most == f64::NEG_INFINITY {
        return (vec![0.0; a.len()], most);
    }
    let (x, y) = ((of_a - most).exp(), (of_b - most).exp());
    let weigh = |a: f64, b: f64| (if x > 0.0 { x * a } else { 0.0 } + if y > 0.0 { y * b } else { 0.0 }) / (x + y);
    (a.iter().zip(&b).map(|(&a, &b)| weigh(a, b)).collect(), most + (x + y).ln())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// A key that a query attends to: its row in the call's views, and its distance.
struct Key {
    row: usize,
    distance: i64,
}

impl ExecutedRank<'_> {
    /// The keys of the `i`-th row of a q range.
    fn keys(&self, ranges: &CallRanges, q: usize, i: u32) -> Vec<Key> {
        let score = self.plan.problem().score();
        let pos = ranges.q[q].range.position(i);
        let of_pair = |&Pair { k, band }: &Pair| {
            let (k, band) = (ranges.k[k as usize], ranges.bands[band as usize]);
            let (begin, end) = band.keys(pos, (score.window_left, score.window_right));
            let inside = (0..k.len).filter(move |&j| (begin..end).contains(&k.position(j)));
            inside
                .map(move |j| Key { row: (k.row + i64::from(j)) as usize, distance: band.distance(pos, k.position(j)) })
        };
        ranges.keys(q).iter().flat_map(of_pair).collect()
    }

    /// The score of a product under the options of the problem, and its derivative by the product. `head` is a q head
    /// of the problem, and `document` that of the q row: slopes are those of all documents, or of each.
    fn score(&self, product: f64, (head, document): (usize, u32), distance: i64) -> (f64, f64) {
        let (p, score) = (self.plan.problem(), self.plan.problem().score());
        let (mut s, mut derivative) = (score.scale * product, score.scale);
        if score.softcap != 0.0 {
            let t = (s / score.softcap).tanh();
            s = score.softcap * t;
            derivative *= 1.0 - t * t;
        }
        let row = if p.alibi_rows() == 1 { 0 } else { document as usize };
        let slope = p.alibi_slopes().map_or(0.0, |slopes| slopes[row * p.heads() + head].into());
        (s - slope * distance.abs() as f64, derivative)
    }

    pub fn attend(&mut self, call: &AttendOp, ranges: &CallRanges) {
        for (n, q) in ranges.q.iter().enumerate() {
            for (i, h) in (0..q.range.len).flat_map(|i| (0..call.q.heads).map(move |h| (i, h))) {
                let (row, head) = ((q.range.row + i64::from(i)) as usize, (call.heads.q_offset + h) as usize);
                let (h, kv) = (h as usize, call.heads.kv(h) as usize);
                let mut result = (vec![0.0; self.dim(&call.v)], f64::NEG_INFINITY);
                for key in self.keys(ranges, n, i) {
                    let product = dot(self.row(&call.q, row, h), self.row(&call.k, key.row, kv));
                    let s = self.score(product, (head, q.range.doc), key.distance).0;
                    result = merged(result, (self.row(&call.v, key.row, kv).to_vec(), s));
                }
                if let Some((o, lse)) = call.running.as_ref().filter(|_| q.mode.continues()) {
                    result = merged((self.row(o, row, h).to_vec(), self.row(lse, row, h)[0]), result);
                }
                if q.mode.finishes() {
                    let sinks = &self.tensors[&TensorId::Sinks];
                    let sink = if self.plan.problem().sinks() { sinks[head] } else { f64::NEG_INFINITY };
                    result = merged(result.clone(), (vec![0.0; result.0.len()], sink));
                }
                let to = if q.mode.finishes() { &call.result } else { &call.running };
                let (o, lse) = to.as_ref().expect("a place for the result");
                self.row_mut(o, row, h).copy_from_slice(&result.0);
                let words = self.row_mut(lse, row, h);
                words.fill(0.0);
                words[0] = result.1;
            }
        }
    }

    pub fn attend_backward(&mut self, call: &BackwardOp, ranges: &CallRanges) {
        let dkv = call.dkv.filter(|_| call.gradients != Gradients::Queries);
        if let Some((dk, dv)) = dkv.filter(|_| !call.accumulate_keys) {
            for row in ranges.k.iter().flat_map(|k| k.row as usize..k.row as usize + k.len as usize) {
                (0..dk.heads as usize).for_each(|h| self.row_mut(&dk, row, h).fill(0.0));
                (0..dv.heads as usize).for_each(|h| self.row_mut(&dv, row, h).fill(0.0));
            }
        }
        let dq = call.dq.filter(|_| call.gradients != Gradients::Keys);
        for (n, q) in ranges.q.iter().enumerate() {
            for (i, h) in (0..q.range.len).flat_map(|i| (0..call.q.heads).map(move |h| (i, h))) {
                let (row, head) = ((q.range.row + i64::from(i)) as usize, (call.heads.q_offset + h) as usize);
                let (h, kv) = (h as usize, call.heads.kv(h) as usize);
                let [lse, delta] = [&call.lse, &call.delta].map(|view| self.row(view, row, h)[0]);
                let mut sum = vec![0.0; self.dim(&call.q)];
                for key in self.keys(ranges, n, i).iter().filter(|_| lse > f64::NEG_INFINITY) {
                    let k = self.row(&call.k, key.row, kv);
                    let product = dot(self.row(&call.q, row, h), k);
                    let (s, derivative) = self.score(product, (head, q.range.doc), key.distance);
                    let p = (s - lse).exp();
                    let of_o = dot(self.row(&call.d_o, row, h), self.row(&call.v, key.row, kv));
                    let ds = p * (of_o - delta) * derivative;
                    sum.iter_mut().zip(k).for_each(|(sum, k)| *sum += ds * k);
                    if let Some((dk, dv)) = &dkv {
                        let to = if call.per_q_head { h } else { kv };
                        self.add(dk, key.row, to, &call.q, (row, h), ds);
                        self.add(dv, key.row, to, &call.d_o, (row, h), p);
                    }
                }
                if let Some(dq) = &dq {
                    let to = self.row_mut(dq, row, h);
                    to.iter_mut().zip(sum).for_each(|(x, sum)| *x = if q.mode.continues() { *x + sum } else { sum });
                }
            }
        }
    }

    /// Adds a row of `from`, times `by`, to row `row`, head `head` of `to`.
    fn add(&mut self, to: &BufferView, row: usize, head: usize, from: &BufferView, (i, h): (usize, usize), by: f64) {
        let from = self.row(from, i, h).to_vec();
        self.row_mut(to, row, head).iter_mut().zip(from).for_each(|(x, y)| *x += by * y);
    }

    /// The rank's own rows of a tensor as a view.
    fn own(&self, tensor: TensorId) -> BufferView {
        let [tokens, heads, _] = tensor.shape(self.plan, self.rank);
        BufferView::whole(cpattn::schedule::Buf::User(tensor), tokens as u64, heads as u32)
    }

    pub fn delta(&mut self, delta: &BufferView) {
        let (o, d_o) = (self.own(TensorId::O), self.own(TensorId::DO));
        for (i, h) in (0..delta.rows as usize).flat_map(|i| (0..delta.heads as usize).map(move |h| (i, h))) {
            self.row_mut(delta, i, h)[0] = dot(self.row(&o, i, h), self.row(&d_o, i, h));
        }
    }

    pub fn sink_gradient(&mut self, delta: &BufferView, partial: &BufferView) {
        let lse = self.own(TensorId::Lse);
        for h in 0..partial.heads as usize {
            let sink = self.tensors[&TensorId::Sinks][h];
            let of = |i: usize| -(sink - self.row(&lse, i, h)[0]).exp() * self.row(delta, i, h)[0];
            let sum = (0..delta.rows as usize).map(of).sum();
            let words = self.row_mut(partial, 0, h);
            words.fill(0.0);
            words[0] = sum;
        }
    }
}
