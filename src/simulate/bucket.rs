// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bucket of a rate limit: after a pause a card passes some bytes at once.
//!
//! A limit of `tc tbf` lets bytes pass while its bucket has as many tokens. Tokens come at the rate of the limit, up to
//! the size of the bucket. Here a message takes the tokens that there are when it starts, and the rest of it uses the
//! card at its rate: then tokens come only for the part of the rate that nothing uses.

use crate::machine::Machine;

/// The tokens of one way of a card, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bucket {
    size: f64,
    rate: f64,
    tokens: f64,
    /// When `tokens` was true, and what had passed the card by then.
    since: f64,
    passed: f64,
}

impl Bucket {
    /// A full one.
    pub fn new(machine: &Machine) -> Self {
        let size = machine.between_burst;
        Self { size, rate: machine.between.rate, tokens: size, since: 0.0, passed: 0.0 }
    }

    /// The tokens now, where so many bytes have passed the card at its rate until now.
    pub fn fill(&mut self, now: f64, passed: f64) -> f64 {
        let unused = (now - self.since) * self.rate - (passed - self.passed);
        self.tokens = (self.tokens + unused.max(0.0)).min(self.size);
        (self.since, self.passed) = (now, passed);
        self.tokens
    }

    /// Takes some of them.
    pub fn take(&mut self, bytes: f64) {
        self.tokens -= bytes;
    }
}
