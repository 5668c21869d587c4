// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a plan is carried out.

/// Which side of the attention travels in the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Circulate {
    /// Whichever moves fewer bytes.
    #[default]
    Auto,
    /// k and v; dk and dv come home.
    Keys,
    /// q, do, lse and delta; dq comes home.
    Queries,
}

/// The type in which partial gradients travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Wire {
    /// The accumulator's: f32 (f64 for f64). Nothing is lost.
    #[default]
    Full,
    /// bf16: half the bytes, and each partial is rounded once to 8 bits before it is summed. Measured on f32 inputs (one
    /// document of 200 tokens, full mask, CPU): a relative RMS error of 1.5e-3 to 1.9e-3 in what travels, on a ring of 8
    /// and on Ulysses 4 × ring 2, against 4e-7 with `Full`; `cargo test --test context_parallel bf16_wire -- --nocapture`.
    Bf16,
}

/// How a plan is carried out. The default is the ring form with one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Options {
    /// Gather all k and v at once instead of step by step.
    pub gather: bool,
    /// Passes over groups of kv heads: what is in flight shrinks by this factor.
    pub passes: usize,
    /// Which side travels in the backward.
    pub circulate: Circulate,
    /// In which type partial gradients travel.
    pub wire: Wire,
    /// The same bits for any number of ranks: see [`Form::Ordered`](super::Form::Ordered).
    pub reproducible: bool,
    /// k and v (and q's side where it travels) may have any strides; they are packed before they are sent. Without it
    /// they must be compact where they are sent as they lie.
    pub pack_inputs: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            gather: false,
            passes: 1,
            circulate: Circulate::Auto,
            wire: Wire::Full,
            reproducible: false,
            pack_inputs: false,
        }
    }
}

impl Options {
    /// The default.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets [`Options::gather`].
    #[must_use]
    pub fn gather(mut self, gather: bool) -> Self {
        self.gather = gather;
        self
    }

    /// Sets [`Options::passes`].
    #[must_use]
    pub fn passes(mut self, passes: usize) -> Self {
        self.passes = passes;
        self
    }

    /// Sets [`Options::circulate`].
    #[must_use]
    pub fn circulate(mut self, circulate: Circulate) -> Self {
        self.circulate = circulate;
        self
    }

    /// Sets [`Options::wire`].
    #[must_use]
    pub fn wire(mut self, wire: Wire) -> Self {
        self.wire = wire;
        self
    }

    /// Sets [`Options::reproducible`].
    #[must_use]
    pub fn reproducible(mut self, reproducible: bool) -> Self {
        self.reproducible = reproducible;
        self
    }

    /// Sets [`Options::pack_inputs`].
    #[must_use]
    pub fn pack_inputs(mut self, pack_inputs: bool) -> Self {
        self.pack_inputs = pack_inputs;
        self
    }
}
