// SPDX-License-Identifier: MIT OR Apache-2.0
//! The description of a scan: states of recurrent layers are passed on along each document.
//!
//! A rank has run a recurrent layer over each of its segments ([`LocalTokens::segments`](crate::plan::LocalTokens))
//! from a zero state, and has for each a decay and an end state. Along a document, in the order of positions,
//!
//! ```text
//! initial[first] = 0      initial[next] = decay[i] · initial[i] + state[i]
//! ```
//!
//! An affine map follows another as an affine map: `(D₂, S₂) after (D₁, S₁) = (D₂·D₁, D₂·S₁ + S₂)`. So a document's
//! segments can be joined in any grouping, and a form is a grouping. [`Hops`] says which segments a step joins and what
//! travels; `emit` makes operations of it, on every rank the same way.

use alloc::{collections::BTreeSet, format, vec::Vec};

use crate::{
    batch::Side,
    element::Dtype,
    error::{Error, Result},
    plan::Plan,
};

/// What a decay is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decay {
    /// A number for each key dim of a head: `[segments, heads, key_dim]`. It scales the `value_dim` numbers of its key
    /// dim in the state.
    Diagonal,
    /// A matrix for each head: `[segments, heads, key_dim · key_dim]`, rows together. It is multiplied by the state.
    Matrix,
}

/// How states travel along a document of S segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScanForm {
    /// For each document whichever of the others takes the least time by counts of bytes and products, over the link of
    /// one node: 10 µs an exchange, 100 GB/s. Direct for at most 64 segments.
    Auto,
    /// From segment to segment: S − 1 exchanges, each of one state.
    Chain,
    /// In ⌈log₂ S⌉ exchanges, each of a state and a decay.
    Tree,
    /// In one exchange: each rank gets state and decay of all segments before its last. S² messages and rows, and so
    /// for at most 1,024 segments.
    Direct,
}

/// A scan over the segments of all ranks of a group. Segments are those of the q tokens of a plan; nothing else of the
/// problem matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scan {
    /// What a decay is.
    pub decay: Decay,
    /// Heads of the states, which need not be those of the problem.
    pub heads: u32,
    /// Rows of a head's state, which decay.
    pub key_dim: u32,
    /// Columns of a head's state: a state is `[segments, heads, key_dim · value_dim]`.
    pub value_dim: u32,
    /// Element type of decay and state: f32 or f64.
    pub dtype: Dtype,
    /// From the last segment of a document to its first. A gradient is such a scan, with transposed matrices.
    pub reverse: bool,
    /// How states travel.
    pub form: ScanForm,
}

impl Scan {
    /// A scan of f32 from the first segment to the last, whose form the planner chooses.
    pub const fn new(decay: Decay, heads: u32, key_dim: u32, value_dim: u32) -> Self {
        Self { decay, heads, key_dim, value_dim, dtype: Dtype::F32, reverse: false, form: ScanForm::Auto }
    }

    /// Numbers of a head's decay.
    pub const fn decay_dim(&self) -> u64 {
        match self.decay {
            Decay::Diagonal => self.key_dim as u64,
            Decay::Matrix => self.key_dim as u64 * self.key_dim as u64,
        }
    }

    /// Numbers of a head's state.
    pub const fn state_dim(&self) -> u64 {
        self.key_dim as u64 * self.value_dim as u64
    }

    /// Refuses what no tensor has, and other types.
    pub(crate) fn check(&self) -> Result<()> {
        for (name, value) in [("heads", self.heads), ("key_dim", self.key_dim), ("value_dim", self.value_dim)] {
            if value == 0 {
                return Err(Error::invalid(format!("scan.{name}"), 0, "at least 1"));
            }
        }
        if !matches!(self.dtype, Dtype::F32 | Dtype::F64) {
            return Err(Error::invalid("scan.dtype", self.dtype, "f32 or f64: states are sums over a whole document")
                .hint("convert decay and state to f32"));
        }
        let most = u64::from(u32::MAX) / u64::from(self.heads);
        let dim = self.decay_dim().max(self.state_dim());
        if dim > most {
            let expected = format!("at most {most} with {} heads", self.heads);
            return Err(Error::invalid("scan.key_dim · max(key_dim, value_dim)", dim, expected));
        }
        Ok(())
    }

    /// Bytes of one segment's state, and of its decay.
    fn bytes(&self) -> [u64; 2] {
        [self.state_dim(), self.decay_dim()].map(|dim| dim * u64::from(self.heads) * self.dtype.size() as u64)
    }

    /// The form for a document of `n` segments, by integers alone, so that all ranks find the same.
    fn form_of(&self, n: usize) -> ScanForm {
        if self.form != ScanForm::Auto {
            return self.form;
        }
        let [chain, tree, direct] = [ScanForm::Chain, ScanForm::Tree, ScanForm::Direct].map(|f| self.cost(f, n));
        let direct = if n <= MOST_CHOSEN_DIRECT { direct } else { u128::MAX };
        // Of equal ones, the one that moves the fewest bytes.
        if chain <= tree && chain <= direct {
            ScanForm::Chain
        } else if tree <= direct {
            ScanForm::Tree
        } else {
            ScanForm::Direct
        }
    }

    /// Nanoseconds until the last segment of a document has its state: an exchange takes [`LATENCY_NS`], and bytes and
    /// products at the rates below.
    fn cost(&self, form: ScanForm, n: usize) -> u128 {
        let ([state, decay], n) = (self.bytes().map(u128::from), n as u128);
        let rows = u128::from(self.heads) * u128::from(self.key_dim);
        let width = if self.decay == Decay::Matrix { u128::from(self.key_dim) } else { 1 };
        let apply = rows * u128::from(self.value_dim) * width / PRODUCTS_PER_NS;
        let compose = if self.decay == Decay::Matrix { rows * width * width } else { rows } / PRODUCTS_PER_NS;
        let send = |exchanges: u128, bytes: u128| exchanges * LATENCY_NS + bytes / BYTES_PER_NS;
        match (form, n) {
            (_, 0 | 1) => 0,
            (ScanForm::Direct, _) => send(1, (n - 1) * state + (n - 2) * decay) + (n - 2) * apply,
            (ScanForm::Tree, _) => {
                let steps = u128::from((n - 1).ilog2() + 1);
                send(steps, steps * state + (steps - 1) * decay) + (steps - 1) * 2 * (apply + compose)
            }
            _ => send(n - 1, (n - 1) * state) + (n - 2) * apply,
        }
    }
}

/// The link that a choice of form assumes: that of a node of `machines/h100_8x400g.machine`, rounded. Any is exact;
/// this decides only how many small exchanges a large one is worth.
const LATENCY_NS: u128 = 10_000;
const BYTES_PER_NS: u128 = 100;
/// Multiply-adds of f32 that a rank makes in a nanosecond.
const PRODUCTS_PER_NS: u128 = 10_000;

/// The most segments of a document for which `Auto` takes [`ScanForm::Direct`], whose messages and rows are the square
/// of them: small states save microseconds by it, planning and workspace grow without end.
const MOST_CHOSEN_DIRECT: usize = 64;
/// The most for which it may be asked for.
const MOST_DIRECT: usize = 1 << 10;

/// The most segments of a document: on many ranks it has as many as ranks, stripes of a token have one for each token.
/// A chain over more takes that many exchanges, and a tree seconds to plan.
const MOST_SEGMENTS: usize = 1 << 12;

/// The most places in all documents where a state passes from one segment to the next. Thousands of short documents,
/// each of few segments, are planned in less time than one long one in stripes.
const MOST_PASSES: usize = 1 << 16;

const FEWER_SEGMENTS: &str = "layout contiguous has one for each rank and document, zigzag two";

/// A segment and who has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnedSegment {
    pub rank: usize,
    /// Its number among the rank's segments: its row in decay, state and initial state.
    pub row: usize,
}

/// Segments `begin..end` of a document, joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Joined {
    pub document: u32,
    pub begin: u32,
    pub end: u32,
}

impl Joined {
    /// Whether its decay is of use: what begins with the document follows nothing.
    pub(crate) const fn has_decay(self) -> bool {
        self.begin > 0
    }

    pub(crate) const fn is_one(self) -> bool {
        self.begin + 1 == self.end
    }
}

/// One action of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateHop {
    /// A rank joins segments up to `mid` with those after it, which it has both.
    Join { rank: usize, whole: Joined, mid: u32 },
    /// A rank sends what it has.
    Send { from: usize, to: usize, what: Joined },
}

/// The documents of a plan as lists of segments, and what each step of a scan does: the same on all ranks.
pub(crate) struct Hops {
    /// Of each document that has a segment, in the order of the scan.
    pub documents: Vec<Vec<OwnedSegment>>,
    /// Joins, then sends, of each step.
    pub steps: Vec<Vec<StateHop>>,
}

impl Hops {
    /// The steps of a scan over one group.
    ///
    /// # Errors
    /// A layout that breaks documents in more than [`MOST_PASSES`] places, or one into more than [`MOST_SEGMENTS`];
    /// [`ScanForm::Direct`] for more than [`MOST_DIRECT`] segments.
    pub(crate) fn new(plan: &Plan, group: core::ops::Range<usize>, scan: Scan) -> Result<Self> {
        let documents = documents(plan, group, scan.reverse)?;
        let longest = documents.iter().map(Vec::len).max().unwrap_or(0);
        let what = |form: &str| format!("{form} over layout {} with {longest} segments of a document", plan.layout());
        if longest > MOST_SEGMENTS {
            return Err(Error::unsupported(what("a scan"), format!("at most {MOST_SEGMENTS}"), FEWER_SEGMENTS));
        }
        if scan.form == ScanForm::Direct && longest > MOST_DIRECT {
            let hint = "its messages are the square of them: form auto, chain or tree, or layout contiguous";
            return Err(Error::unsupported(what("a scan of form direct"), format!("at most {MOST_DIRECT}"), hint));
        }
        let mut hops = Self { documents, steps: Vec::new() };
        for d in 0..hops.documents.len() {
            let owners: Vec<usize> = hops.documents[d].iter().map(|s| s.rank).collect();
            let mut of = OfDocument { document: d as u32, owners, hops: &mut hops, has: BTreeSet::new() };
            match scan.form_of(of.owners.len()) {
                ScanForm::Tree => of.tree(),
                ScanForm::Direct => of.direct(),
                ScanForm::Auto | ScanForm::Chain => of.chain(),
            }
        }
        hops.prune();
        Ok(hops)
    }

    /// Leaves out what no initial state needs: a rank with several segments of a document may have by one way what a
    /// form brings by another.
    fn prune(&mut self) {
        let mut needed = BTreeSet::new();
        for (document, segments) in (0..).zip(&self.documents) {
            let before = (1..).map(|end| Joined { document, begin: 0, end });
            needed.extend(segments.iter().skip(1).map(|s| s.rank).zip(before));
        }
        for step in self.steps.iter_mut().rev() {
            let mut kept = Vec::with_capacity(step.len());
            for hop in step.drain(..).rev() {
                match hop {
                    StateHop::Join { rank, whole, mid } if needed.contains(&(rank, whole)) => {
                        needed.insert((rank, Joined { end: mid, ..whole }));
                        needed.insert((rank, Joined { begin: mid, ..whole }));
                    }
                    StateHop::Send { from, to, what } if needed.contains(&(to, what)) => {
                        needed.insert((from, what));
                    }
                    StateHop::Join { .. } | StateHop::Send { .. } => continue,
                }
                kept.push(hop);
            }
            kept.reverse();
            *step = kept;
        }
    }
}

/// The segments of each document, in the order of a scan.
fn documents(plan: &Plan, group: core::ops::Range<usize>, reverse: bool) -> Result<Vec<Vec<OwnedSegment>>> {
    let mut all = Vec::new();
    for rank in group {
        let own = plan.local_tokens(Side::Q, rank).segments();
        all.extend(own.iter().enumerate().map(|(row, s)| (s.token, s.document, OwnedSegment { rank, row })));
        let passes = all.len().saturating_sub(plan.problem().batch().documents());
        if passes > MOST_PASSES {
            let limit = format!("at most {MOST_PASSES}");
            return Err(Error::unsupported(
                format!("a scan over layout {} with more than {} segments", plan.layout(), all.len()),
                limit,
                FEWER_SEGMENTS,
            ));
        }
    }
    all.sort_unstable_by_key(|(token, ..)| *token);
    let of = |list: &[(usize, usize, OwnedSegment)]| {
        let mut list: Vec<OwnedSegment> = list.iter().map(|(.., s)| *s).collect();
        if reverse {
            list.reverse();
        }
        list
    };
    Ok(all.chunk_by(|a, b| a.1 == b.1).map(of).collect())
}

/// The steps of one document while they are listed.
struct OfDocument<'a> {
    document: u32,
    owners: Vec<usize>,
    hops: &'a mut Hops,
    /// What ranks have beside their own segments.
    has: BTreeSet<(usize, Joined)>,
}

impl OfDocument<'_> {
    fn joined(&self, begin: usize, end: usize) -> Joined {
        Joined { document: self.document, begin: begin as u32, end: end as u32 }
    }

    fn push(&mut self, step: usize, hop: StateHop) {
        if self.hops.steps.len() <= step {
            self.hops.steps.resize_with(step + 1, Vec::new);
        }
        self.hops.steps[step].push(hop);
    }

    /// Whether a rank has it already; from now on it has.
    fn gets(&mut self, rank: usize, what: Joined) -> bool {
        let own = what.is_one() && self.owners[what.begin as usize] == rank;
        !own && self.has.insert((rank, what))
    }

    fn join(&mut self, step: usize, rank: usize, begin: usize, mid: usize, end: usize) {
        let whole = self.joined(begin, end);
        if begin < mid && mid < end && self.gets(rank, whole) {
            self.push(step, StateHop::Join { rank, whole, mid: mid as u32 });
        }
    }

    fn send(&mut self, step: usize, from: usize, to: usize, begin: usize, end: usize) {
        let what = self.joined(begin, end);
        if from != to && self.gets(to, what) {
            self.push(step, StateHop::Send { from, to, what });
        }
    }

    fn chain(&mut self) {
        for i in 1..self.owners.len() {
            let (from, to) = (self.owners[i - 1], self.owners[i]);
            self.join(i - 1, from, 0, i - 1, i);
            self.send(i - 1, from, to, 0, i);
        }
    }

    /// At step k segment i has those before it back to `i − 2ᵏ + 1`, and joins them with itself for segment `i + 2ᵏ`.
    fn tree(&mut self) {
        let n = self.owners.len();
        let mut reach = 1;
        for step in 0.. {
            if reach >= n {
                // What arrived last is joined with what was there.
                (reach / 2..n).for_each(|i| self.joined_before(step, i, reach));
                return;
            }
            for i in 0..n {
                self.joined_before(step, i, reach);
                if i + reach < n {
                    self.join(step, self.owners[i], (i + 1).saturating_sub(reach), i, i + 1);
                }
            }
            for i in reach..n {
                let (from, to) = (self.owners[i - reach], self.owners[i]);
                self.send(step, from, to, (i + 1).saturating_sub(2 * reach), i - reach + 1);
            }
            reach *= 2;
        }
    }

    /// Joins what segment i got in the step before with what it had: all before it back to `i − reach + 1`.
    fn joined_before(&mut self, step: usize, i: usize, reach: usize) {
        if i >= reach / 2 && reach > 2 {
            self.join(step, self.owners[i], (i + 1).saturating_sub(reach), i - reach / 2 + 1, i);
        }
    }

    fn direct(&mut self) {
        let owners = self.owners.clone();
        for (i, &to) in owners.iter().enumerate() {
            (0..i).for_each(|j| self.send(0, owners[j], to, j, j + 1));
        }
        for (i, &rank) in owners.iter().enumerate() {
            (1..i).for_each(|j| self.join(1, rank, 0, j, j + 1));
        }
    }
}
