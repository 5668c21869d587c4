// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bucket of a rate limit: after a pause a card passes some bytes at once.
//!
//! A limit of `tc tbf` lets bytes pass while its bucket has as many tokens. Tokens arrive at the rate of the limit, up
//! to the size of the bucket. In this model a message takes the tokens available when it starts, and the rest of it
//! uses the card at the card's rate; meanwhile tokens arrive only for the unused part of the rate.

use crate::machine::Machine;

/// The tokens of one direction of a card, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    size: f64,
    rate: f64,
    tokens: f64,
    /// The time at which `tokens` was computed, and the bytes that had passed the card by then.
    since: f64,
    passed: f64,
}

impl Bucket {
    /// A full bucket.
    pub(super) fn new(machine: &Machine) -> Self {
        let size = machine.between_burst;
        Self { size, rate: machine.between.rate, tokens: size, since: 0.0, passed: 0.0 }
    }

    /// The tokens at time `now`, if `passed` bytes have passed the card at its rate until then.
    pub(super) fn fill(&mut self, now: f64, passed: f64) -> f64 {
        let unused = (now - self.since) * self.rate - (passed - self.passed);
        self.tokens = (self.tokens + unused.max(0.0)).min(self.size);
        (self.since, self.passed) = (now, passed);
        self.tokens
    }

    /// Takes tokens for some bytes.
    pub(super) fn take(&mut self, bytes: f64) {
        self.tokens -= bytes;
    }
}
