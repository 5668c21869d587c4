// SPDX-License-Identifier: MIT OR Apache-2.0
//! The computation, independent of the number of ranks.
//!
//! A [`Problem`] describes the attention as if one device held the whole batch: documents, heads, mask, score options,
//! element type. It does not depend on ranks. It is checked once (`check.rs`); later stages rely on that.

use alloc::sync::Arc;

use crate::{
    batch::{Batch, Side},
    call::Score,
    element::Dtype,
    mask::Mask,
    slice::parts::Allowed,
};

mod check;

/// Softmax attention, or the caller's own kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AttentionKind {
    /// Softmax attention; every mesh.
    Softmax,
    /// The caller's own kernel on whole sequences (linear attention, state space models, convolutions) between two
    /// all-to-alls; needs a mesh with `ring` 1.
    Other,
}

/// One attention over one packed batch. Built with setters, checked by [`Problem::check`] (planning does it too).
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    pub(crate) batch: Batch,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) dtype: Dtype,
    pub(crate) mask: Mask,
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    pub(crate) alibi_slopes: Option<Arc<[f32]>>,
    /// Whether there is a row of slopes for each document, and not one for all.
    alibi_per_document: bool,
    /// Sinks of each head; 0 for none.
    pub(crate) sinks: usize,
    pub(crate) dropout: Option<f64>,
    /// Whether a probability was given, 0 included: runs may then have a seed.
    takes_seed: bool,
    pub(crate) kind: AttentionKind,
}

impl Problem {
    /// The largest supported head dim.
    pub const MAX_HEAD_DIM: usize = 576;

    /// The most sinks of a head.
    pub const MAX_SINKS: usize = 4096;

    /// Causal attention over the documents of `batch`, or attention over its slices with [`Mask::full`] inside them;
    /// with `heads` q heads, `kv_heads` kv heads, one head dim for q, k and v, and a scale of `1/√head_dim`.
    pub fn new(batch: Batch, heads: usize, kv_heads: usize, head_dim: usize, dtype: Dtype) -> Self {
        let mask = if batch.slices().is_some() { Mask::full() } else { Mask::causal() };
        Self {
            batch,
            heads,
            kv_heads,
            head_dim,
            value_dim: head_dim,
            dtype,
            mask,
            scale: None,
            softcap: None,
            alibi_slopes: None,
            alibi_per_document: false,
            sinks: 0,
            dropout: None,
            takes_seed: false,
            kind: AttentionKind::Softmax,
        }
    }

    /// v's head dim, when it differs from q's and k's.
    #[must_use]
    pub fn with_value_dim(mut self, value_dim: usize) -> Self {
        self.value_dim = value_dim;
        self
    }

    /// The same problem with other documents.
    #[must_use]
    pub(super) fn with_batch(mut self, batch: Batch) -> Self {
        self.batch = batch;
        self
    }

    /// Which keys a query reads, by their distance: in its document, or in each of its slices.
    #[must_use]
    pub fn with_mask(mut self, mask: Mask) -> Self {
        self.mask = mask;
        self
    }

    /// The factor of q·k; the default is `1/√head_dim`.
    #[must_use]
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Caps scores: `cap · tanh(s / cap)`.
    #[must_use]
    pub fn with_softcap(mut self, cap: f64) -> Self {
        self.softcap = Some(cap);
        self
    }

    /// ALiBi: subtracts `slope_h · |q_pos − k_pos|`; one slope for each q head, between −1e18 and 1e18. Distances are
    /// numbers of the accumulator's type: those above 2^24 are rounded in f32.
    #[must_use]
    pub fn with_alibi_slopes(mut self, alibi_slopes: &[f32]) -> Self {
        self.alibi_slopes = Some(alibi_slopes.into());
        self.alibi_per_document = false;
        self
    }

    /// As [`Problem::with_alibi_slopes`], with slopes of each document: `[documents, heads]`, document by document. A
    /// pair has the slope of the q token's document, also in a slice that reads keys of another one. CPU only.
    ///
    /// ```
    /// # use cpattn::{Batch, Dtype, Problem};
    /// let batch = Batch::from_lengths(&[5, 7])?; // two documents, and two heads
    /// let p = Problem::new(batch, 2, 2, 64, Dtype::F32).with_alibi_slopes_per_document(&[0.5, 0.25, 1.0, 0.5]);
    /// assert_eq!(p.alibi_rows(), 2);
    /// # p.check()?;
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    #[must_use]
    pub fn with_alibi_slopes_per_document(mut self, alibi_slopes: &[f32]) -> Self {
        self.alibi_slopes = Some(alibi_slopes.into());
        self.alibi_per_document = true;
        self
    }

    /// Each q head has a learnable sink: a logit that takes part in the softmax and has no value. The logits are given
    /// with each run; the backward returns their gradients. A sink is finite, or −∞ for none. One that is +∞ takes all
    /// weight: in its head o is 0, lse +∞, dq 0 and nothing is added to dk and dv, and its own gradient is NaN. NaN
    /// makes all results of its head NaN.
    #[must_use]
    pub fn with_sinks(self, sinks: bool) -> Self {
        self.with_sinks_per_head(sinks.into())
    }

    /// As [`Problem::with_sinks`], with several sinks for each q head, `[heads, count]`: all of them take part in the
    /// softmax, and each has its own gradient. 0 for none.
    #[must_use]
    pub fn with_sinks_per_head(mut self, count: usize) -> Self {
        self.sinks = count;
        self
    }

    /// Drops each probability with this probability, and multiplies those that are kept by `1 / (1 − probability)`; lse
    /// is that of all pairs, and sinks are not dropped. Which pairs are dropped is a hash of the two tokens' places in
    /// the batch, the q head and a seed ([`DropoutMask`](crate::call::DropoutMask)), so they are the same on every
    /// mesh. The seed is given with each run, the same on all ranks of the group, and the backward gets that of its
    /// forward. A program that executes a schedule itself gives both to its kernels
    /// ([`Dropout`](crate::call::Dropout)). From 0, which drops nothing and takes a seed or none, up to but not
    /// including 1. A run that is
    /// captured into a CUDA graph is refused: its replays would drop the same pairs.
    #[must_use]
    pub fn with_dropout(mut self, probability: f64) -> Self {
        self.dropout = (probability != 0.0).then_some(probability);
        self.takes_seed = true;
        self
    }

    /// Sets the kind of attention.
    #[must_use]
    pub fn with_kind(mut self, kind: AttentionKind) -> Self {
        self.kind = kind;
        self
    }

    /// The documents.
    pub fn batch(&self) -> &Batch {
        &self.batch
    }

    /// q heads.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// kv heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// q's and k's head dim.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// v's head dim.
    pub fn value_dim(&self) -> usize {
        self.value_dim
    }

    /// The element type of q, k, v, o and their gradients.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The mask.
    pub fn mask(&self) -> Mask {
        self.mask
    }

    /// ALiBi slopes, if any: `[alibi_rows, heads]`.
    pub fn alibi_slopes(&self) -> Option<&[f32]> {
        self.alibi_slopes.as_deref()
    }

    /// Rows of the ALiBi slopes: one for each document if they were given so
    /// ([`Problem::with_alibi_slopes_per_document`]), otherwise 1.
    pub fn alibi_rows(&self) -> usize {
        if self.alibi_per_document { self.batch.documents() } else { 1 }
    }

    /// Whether documents have slopes of their own.
    pub(crate) fn alibi_per_document(&self) -> bool {
        self.alibi_per_document && self.alibi_slopes.is_some()
    }

    /// Whether each head has sinks.
    pub fn sinks(&self) -> bool {
        self.sinks > 0
    }

    /// Sinks of each head; 0 for none.
    pub fn sinks_per_head(&self) -> usize {
        self.sinks
    }

    /// The probability with which a pair is dropped, if any is.
    pub fn dropout(&self) -> Option<f64> {
        self.dropout
    }

    /// Whether its runs may have a seed.
    #[cfg(feature = "std")]
    pub(crate) fn takes_seed(&self) -> bool {
        self.takes_seed
    }

    /// The kind of attention.
    pub fn kind(&self) -> AttentionKind {
        self.kind
    }

    /// q heads per kv head.
    pub fn group(&self) -> usize {
        self.heads.checked_div(self.kv_heads).unwrap_or(0)
    }

    /// q heads and kv heads, as the functions of [`heads`](crate::heads) take them.
    pub(crate) fn head_numbers(&self) -> [u32; 2] {
        [self.heads as u32, self.kv_heads as u32]
    }

    /// The parameters of scores, for kernels.
    pub fn score(&self) -> Score {
        Score {
            scale: self.scale.unwrap_or_else(|| inverse_sqrt(self.head_dim as f64)),
            softcap: self.softcap.unwrap_or(0.0),
            window_left: self.mask.left_limit(),
            window_right: self.mask.right_limit(),
        }
    }

    /// The pairs that are computed.
    pub(crate) fn allowed(&self) -> Allowed {
        self.batch.allowed(self.mask)
    }

    /// The number of allowed (q, k) pairs over all documents or slices, for one head.
    pub fn area(&self) -> u128 {
        let allowed = self.allowed();
        let of_document = |d: usize| {
            let q = self.batch.whole(Side::Q, d);
            allowed.of(Side::Q, d as u32).map(move |reach| {
                u128::from(q.area_within(&self.batch.whole(Side::K, reach.document as usize), &reach.limits))
            })
        };
        (0..self.batch.documents()).flat_map(of_document).sum()
    }

    pub(super) fn hash_into(&self, h: &mut super::fingerprint::Fingerprint) {
        h.batch(&self.batch);
        h.slices(&self.batch);
        for n in [self.heads, self.kv_heads, self.head_dim, self.value_dim] {
            h.word(n as u64);
        }
        h.word(self.dtype as u64);
        h.word(self.mask.left.map_or(u64::MAX, u64::from));
        h.word(self.mask.right.map_or(u64::MAX, u64::from));
        h.word(self.score().scale.to_bits());
        h.word(self.softcap.map_or(0, f64::to_bits));
        match &self.alibi_slopes {
            Some(alibi_slopes) => alibi_slopes.iter().for_each(|s| h.word(1 << 32 | u64::from(s.to_bits()))),
            None => h.word(u64::MAX),
        }
        // With one document both ways to give slopes mean the same.
        if self.alibi_per_document() && self.alibi_rows() != 1 {
            h.word(2 << 32 | self.alibi_rows() as u64);
        }
        h.word(u64::from(self.sinks()) | (self.kind as u64) << 1 | (self.sinks.saturating_sub(1) as u64) << 32);
        if let Some(probability) = self.dropout {
            h.word(probability.to_bits());
        }
    }
}

/// `1/√x` without std: Newton's iteration from above, to the last bit or two of f64. It is infinite for 0, which it
/// would not reach.
pub(super) fn inverse_sqrt(x: f64) -> f64 {
    if x == 0.0 {
        return f64::INFINITY;
    }
    let mut root = if x > 1.0 { x } else { 1.0 };
    loop {
        let next = 0.5 * (root + x / root);
        if next >= root {
            return 1.0 / root;
        }
        root = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_scale_is_one_over_the_root_of_head_dim() {
        for d in 1..=Problem::MAX_HEAD_DIM {
            let exact = 1.0 / (d as f64).sqrt();
            assert!((inverse_sqrt(d as f64) - exact).abs() <= 2.0 * f64::EPSILON * exact, "{d}");
        }
    }

    /// A problem is checked when a plan is made of it: until then its functions take any numbers.
    #[test]
    fn an_unchecked_problem_can_be_asked_anything() {
        for numbers in [[0, 0, 0], [0, 1, 4], [4, 0, 4], [4, 8, 0], [usize::MAX; 3]] {
            for lengths in [&[][..], &[0], &[3, 0, 5]] {
                let batch = Batch::from_lengths(lengths).unwrap();
                let p = Problem::new(batch, numbers[0], numbers[1], numbers[2], Dtype::F32);
                assert!(p.score().scale >= 0.0);
                assert_eq!(p.group(), numbers[0].checked_div(numbers[1]).unwrap_or(0));
                assert!(p.area() <= 9 + 25 && p.alibi_rows() == 1);
                let plan = crate::plan::Plan::new(&p, crate::Mesh::single(), crate::Layout::Contiguous);
                assert!(plan.is_err(), "{numbers:?}");
            }
        }
    }
}
