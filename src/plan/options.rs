// SPDX-License-Identifier: MIT OR Apache-2.0
//! Options of a plan: how it is run.

/// Which side is sent round the ring, in the backward ([`Options::circulate`]) or in the forward
/// ([`Options::circulate_forward`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Circulate {
    /// The side that moves fewer bytes. In the forward that is k and v if q and k are the same tokens, and in plans
    /// with several passes, gathered plans and reproducible plans
    /// ([`Plan::circulates`](super::Plan::circulates)).
    #[default]
    Auto,
    /// k and v (pass-KV); in the backward dk and dv are sent back to their owners.
    Keys,
    /// q (pass-Q). Backward: q, d_o, lse and delta; dq is sent back to its owner. Forward: q; partial o and lse, in the
    /// accumulator's type, are sent back to its owner and merged there, and no row of k or v moves.
    Queries,
}

/// Whether a rank receives k and v step by step or all at once. A reproducible plan always gathers them, because it
/// computes in the order of positions; with [`Steps`](Self::Steps) it is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Gather {
    /// [`Together`](Self::Together) for many short documents, each cut for every rank; [`Steps`](Self::Steps)
    /// otherwise. Many are at least 32, with fewer than 64 keys for each q row in a ring step on average; and k and v
    /// of a rank's heads, of all ranks, take at most 16 MiB. [`Plan::form`](super::Plan::form) is the choice.
    #[default]
    Auto,
    /// An all-gather: receive k and v of all other ranks at once, while the kernel computes with the rank's own.
    Others,
    /// Ring attention: step by step.
    Steps,
    /// Receive all at once, then make one kernel call over all keys, the rank's own included. Nothing is computed
    /// during the exchange; each row is read and written once.
    Together,
}

impl From<bool> for Gather {
    /// [`Gather::Others`] or [`Gather::Steps`].
    fn from(gather: bool) -> Self {
        if gather { Self::Others } else { Self::Steps }
    }
}

/// Which rows of k and v move in a run over listed keys (`runtime::KeyIndices`); other runs do not read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum KeyRows {
    /// Those of the two that are fewer bytes over all ranks, the numbers of the rows included. Ranks count both in each
    /// run. A byte from another node counts [`Choice::INTER_NODE_FACTOR`](super::Choice::INTER_NODE_FACTOR) times where
    /// the plan has nodes. On a rank with a lent workspace, or whose k and v are not compact, the rows that the mask
    /// allows move.
    #[default]
    Auto,
    /// The rows that lists name, each once to each ring rank whose tokens list it. They go straight from their owner to
    /// the reader, also between nodes. They may need more workspace than the plan names, which lists decide; if a lent
    /// workspace is too small, all ranks refuse the run before rows move, and the error names the bytes.
    Listed,
    /// The rows that the mask allows, as without lists.
    Allowed,
}

/// The type in which partial gradients are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Wire {
    /// The accumulator's: f32 (f64 for f64). No rounding.
    #[default]
    Full,
    /// bf16: half the bytes, and each partial is rounded once to 8 bits before it is summed. Over several nodes only
    /// what crosses is bf16: the sum over a node.
    ///
    /// | gradients that are sent | relative RMS error |
    /// |---|---|
    /// | bf16 | 1.5e-3 to 1.9e-3 |
    /// | `Full` | 4e-7 |
    ///
    /// (f32, one document of 200 tokens, full mask, a ring of 8 and Ulysses 4 × ring 2, on the CPU: `cargo test --test
    /// runs bf16_wire -- --nocapture`.) bf16 has the exponents of f32, so gradients underflow below 2⁻¹²⁶ as in f32;
    /// those of an f64 plan do too, and overflow above 3.4e38.
    Bf16,
}

/// Options of a plan. The default is one pass, and ring steps one after another unless [`Gather::Auto`] chooses
/// otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Options {
    /// Whether k and v arrive step by step or at once.
    pub gather: Gather,
    /// Passes over groups of kv heads, 1 to `kv_heads`: the workspace for k, v and gradients in flight shrinks by about
    /// this factor.
    pub passes: usize,
    /// Which side is sent round the ring in the backward.
    pub circulate: Circulate,
    /// The side that is sent round the ring in the forward. q suits few q rows over many keys, for example tokens
    /// generated from a KV cache that is spread over the ranks; it needs one pass, and ring steps one after another.
    /// With `pack_inputs` off, the side that is sent must be compact: k and v, or a q that this option asks for. A q
    /// that the automatic choice sends may have any strides.
    pub circulate_forward: Circulate,
    /// The type in which partial gradients are sent.
    pub wire: Wire,
    /// The same bits for any number of ranks: see [`Form::Ordered`](super::Form::Ordered).
    pub reproducible: bool,
    /// Allows any strides for k and v (and for q's side, if that is sent). Set it where k and v are slices of a fused
    /// projection, or heads first: tensors that a ring sends in place must be compact. They are then packed before they
    /// are sent, also where they are compact, which takes a copy and workspace.
    pub pack_inputs: bool,
    /// Ranks of a node (or of whatever a slow link joins); 0 if all links are alike. Node n has ranks
    /// `n · ranks_per_node ..`; [`ranks_per_node`](super::ranks_per_node) makes the number of a list.
    ///
    /// A row that another node needs then crosses to it once, and is passed on inside it; gradients are summed inside a
    /// node before they cross back. Where no row has two readers in a node, schedules stay as they are: a ring with one
    /// ring rank in each node, an all-to-all whose ranks of a node hold different kv heads, or one node in all.
    ///
    /// An automatic mesh keeps Ulysses inside a node, so with 1 it is a ring. It counts a byte from another node
    /// [`Choice::INTER_NODE_FACTOR`](super::Choice::INTER_NODE_FACTOR) times.
    pub ranks_per_node: usize,
    /// Which rows of k and v move in runs over listed keys.
    pub key_rows: KeyRows,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            gather: Gather::Auto,
            passes: 1,
            circulate: Circulate::Auto,
            circulate_forward: Circulate::Auto,
            wire: Wire::Full,
            reproducible: false,
            pack_inputs: false,
            ranks_per_node: 0,
            key_rows: KeyRows::Auto,
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
    pub fn gather(mut self, gather: impl Into<Gather>) -> Self {
        self.gather = gather.into();
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

    /// Sets [`Options::circulate_forward`].
    #[must_use]
    pub fn circulate_forward(mut self, circulate: Circulate) -> Self {
        self.circulate_forward = circulate;
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

    /// Sets [`Options::ranks_per_node`].
    #[must_use]
    pub fn ranks_per_node(mut self, ranks: usize) -> Self {
        self.ranks_per_node = ranks;
        self
    }

    /// Sets [`Options::key_rows`].
    #[must_use]
    pub fn key_rows(mut self, rows: KeyRows) -> Self {
        self.key_rows = rows;
        self
    }
}
