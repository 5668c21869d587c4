// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank's tensors, in memory that a test can look at byte by byte.

use super::Data;
use bytemuck::{bytes_of, bytes_of_mut, cast_slice};
use cpattn::{Backward, Element, Forward, Plan, Rank, Result, Side, View, ViewMut};

/// A NaN with every bit set, of any element type.
pub fn poison<T: Element>() -> T {
    let mut x = T::from_f64(0.0);
    bytes_of_mut(&mut x).fill(0xff);
    x
}

/// A `[tokens, heads, dim]` tensor somewhere in a buffer of its own; what is not the tensor's is poison.
#[derive(Clone)]
pub struct Slot<T> {
    pub data: Vec<T>,
    pub offset: usize,
    pub shape: [usize; 3],
    pub strides: [usize; 2],
}

/// How tensors of a shape lie: first element and strides.
pub type Style = fn([usize; 3]) -> (usize, [usize; 2]);

/// Token-major, without gaps.
pub fn compact(shape: [usize; 3]) -> (usize, [usize; 2]) {
    (0, [shape[1] * shape[2], shape[2]])
}

/// Token-major, with gaps behind every row and every token.
pub fn gaps(shape: [usize; 3]) -> (usize, [usize; 2]) {
    (5, [shape[1] * (shape[2] + 3) + 7, shape[2] + 3])
}

/// Heads outside tokens, with gaps.
pub fn heads_first(shape: [usize; 3]) -> (usize, [usize; 2]) {
    (3, [shape[2] + 1, shape[0] * (shape[2] + 1) + 2])
}

impl<T: Element> Slot<T> {
    /// A tensor of poison.
    pub fn new(style: Style, shape: [usize; 3]) -> Self {
        let (offset, strides) = style(shape);
        let end = |n: usize, stride: usize| n.saturating_sub(1) * stride;
        let empty = shape.contains(&0);
        let len = if empty { 0 } else { end(shape[0], strides[0]) + end(shape[1], strides[1]) + shape[2] };
        // A tail, so that a write behind the last row shows.
        Self { data: vec![poison(); offset + len + 9], offset, shape, strides }
    }

    /// A tensor with these elements, in the order of tokens, heads, dim.
    pub fn of(style: Style, shape: [usize; 3], elements: &[T]) -> Self {
        let mut slot = Self::new(style, shape);
        let row = shape[2];
        for t in 0..shape[0] {
            for h in 0..shape[1] {
                let (to, from) = (slot.at(t, h), (t * shape[1] + h) * row);
                slot.data[to..to + row].copy_from_slice(&elements[from..from + row]);
            }
        }
        slot
    }

    fn at(&self, t: usize, h: usize) -> usize {
        self.offset + t * self.strides[0] + h * self.strides[1]
    }

    pub fn view(&self) -> View<'_, T> {
        View::strided(&self.data[self.offset..], self.shape, self.strides).unwrap()
    }

    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut::strided(&mut self.data[self.offset..], self.shape, self.strides).unwrap()
    }

    /// The elements, in the order of tokens, heads, dim, as bytes: NaN differ from each other here.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for t in 0..self.shape[0] {
            for h in 0..self.shape[1] {
                out.extend_from_slice(cast_slice(&self.data[self.at(t, h)..][..self.shape[2]]));
            }
        }
        out
    }

    /// Whether everything that is not the tensor's is still the poison it was.
    pub fn gaps_are_whole(&self) -> bool {
        let mut mine = vec![false; self.data.len()];
        for t in 0..self.shape[0] {
            for h in 0..self.shape[1] {
                let at = self.at(t, h);
                mine[at..at + self.shape[2]].fill(true);
            }
        }
        self.data.iter().zip(mine).all(|(x, mine)| mine || bytes_of(x) == bytes_of(&poison::<T>()))
    }

    /// Whether nothing at all was written yet.
    pub fn is_untouched(&self) -> bool {
        self.data.iter().all(|x| bytes_of(x) == bytes_of(&poison::<T>()))
    }
}

/// All tensors of one rank.
#[derive(Clone)]
pub struct Own<T: Element> {
    pub q: Slot<T>,
    pub k: Slot<T>,
    pub v: Slot<T>,
    pub d_o: Slot<T>,
    pub d_lse: Option<Slot<T::Acc>>,
    pub o: Slot<T>,
    pub lse: Slot<T::Acc>,
    pub dq: Slot<T>,
    pub dk: Slot<T>,
    pub dv: Slot<T>,
    pub sinks: Option<Vec<f32>>,
    pub dsinks: Option<Vec<T::Acc>>,
    pub max_logit: Option<Vec<f32>>,
    pub dropout_seed: Option<u64>,
}

impl<T: Element> Own<T> {
    /// A rank's part of the data; results are poison.
    pub fn new(plan: &Plan, data: &Data<T>, rank: usize, style: Style) -> Self {
        let p = plan.problem();
        let (tq, tk) = (plan.local_tokens(Side::Q, rank).len(), plan.local_tokens(Side::K, rank).len());
        let shape = |tokens, heads, dim| [tokens, heads, dim];
        let (q, k) = (shape(tq, p.heads(), p.head_dim()), shape(tk, p.kv_heads(), p.head_dim()));
        let (o, v) = (shape(tq, p.heads(), p.value_dim()), shape(tk, p.kv_heads(), p.value_dim()));
        let cut = |side, full: &[T], s: [usize; 3]| plan.local_tokens(side, rank).shard(full, s[1] * s[2]).unwrap();
        Self {
            q: Slot::of(style, q, &cut(Side::Q, &data.q, q)),
            k: Slot::of(style, k, &cut(Side::K, &data.k, k)),
            v: Slot::of(style, v, &cut(Side::K, &data.v, v)),
            d_o: Slot::of(style, o, &cut(Side::Q, &data.d_o, o)),
            d_lse: data.d_lse.as_ref().map(|all| {
                let own = plan.local_tokens(Side::Q, rank).shard(all, p.heads()).unwrap();
                let own: Vec<_> = own.into_iter().map(T::Acc::from_f64).collect();
                Slot::of(style, shape(tq, p.heads(), 1), &own)
            }),
            o: Slot::new(style, o),
            lse: Slot::new(style, shape(tq, p.heads(), 1)),
            dq: Slot::new(style, q),
            dk: Slot::new(style, k),
            dv: Slot::new(style, v),
            sinks: data.sinks.clone(),
            dsinks: data.sinks.as_ref().map(|s| vec![poison(); s.len()]),
            max_logit: None,
            dropout_seed: data.dropout_seed,
        }
    }

    pub fn forward(&mut self, rank: &mut Rank, plan: &Plan) -> Result<()> {
        let tensors = Forward::new(self.q.view(), self.k.view(), self.v.view(), self.o.view_mut(), self.lse.view_mut())
            .sinks(self.sinks.as_deref())
            .max_logit(self.max_logit.as_deref_mut())
            .dropout_seed(self.dropout_seed);
        rank.forward(plan, tensors)
    }

    pub fn backward(&mut self, rank: &mut Rank, plan: &Plan) -> Result<()> {
        let tensors = Backward::new(
            self.q.view(),
            self.k.view(),
            self.v.view(),
            self.o.view(),
            self.lse.view(),
            self.d_o.view(),
            [self.dq.view_mut(), self.dk.view_mut(), self.dv.view_mut()],
        )
        .sinks(self.sinks.as_deref())
        .d_lse(self.d_lse.as_ref().map(Slot::view))
        .dropout_seed(self.dropout_seed)
        .dsinks(self.dsinks.as_deref_mut());
        rank.backward(plan, tensors)
    }

    /// Every result, bit by bit.
    pub fn results(&self) -> Vec<Vec<u8>> {
        let dsinks = self.dsinks.as_ref().map_or(Vec::new(), |d| cast_slice(d).to_vec());
        vec![self.o.bytes(), self.lse.bytes(), self.dq.bytes(), self.dk.bytes(), self.dv.bytes(), dsinks]
    }

    /// Whether inputs and results lie in gaps that nothing wrote to.
    pub fn gaps_are_whole(&self) -> bool {
        let all = [&self.q, &self.k, &self.v, &self.d_o, &self.o, &self.dq, &self.dk, &self.dv];
        let of_lse = self.d_lse.iter().chain([&self.lse]);
        all.iter().all(|s| s.gaps_are_whole()) && of_lse.into_iter().all(Slot::gaps_are_whole)
    }

    /// Whether no result was written.
    pub fn is_untouched(&self) -> bool {
        [&self.o, &self.dq, &self.dk, &self.dv].iter().all(|s| s.is_untouched())
            && self.lse.is_untouched()
            && self.dsinks.iter().flatten().all(|x| bytes_of(x) == bytes_of(&poison::<T::Acc>()))
    }
}
