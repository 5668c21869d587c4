// SPDX-License-Identifier: MIT OR Apache-2.0
//! Choosing a mesh and a layout, by the rules that [`Choice`] documents.
//!
//! `predict::aggregate` rates the same candidates in seconds, by a machine's description
//! ([`PlanBuilder::build_on`](super::PlanBuilder::build_on)). One model for both was tried: the automatic choice by that
//! model, with the description of H100 nodes where none is given. It was not taken, for three reasons:
//!
//! | | this rule | by the model |
//! |---|---|---|
//! | planning for 8 ranks: 1; 1,000; 1,000,000 documents | 23 µs; 0.6 ms; 49 ms | 4.0; 1.5; 5.8 times |
//! | 64 ranks | 0.2; 1.8; 94 ms | 2.7; 1.5; 7.0 times |
//! | 1,024 ranks | 3.1; 12.6; 113 ms | 1.7; 1.2; 5.6 times |
//! | 3,000 problems over 4 to 32 ranks: faster by more than 1 %, simulated | 798 | 1,396 |
//! | all whose choices differ (2,355), simulated | 69.7 s | 86.7 s |
//!
//! - The gate was 1.2 times the planning time. The model reads edges of every document, and bounds the memory of every
//!   candidate.
//! - More of its choices are faster, but those that are slower take up to 3.4 times as long, and all together a quarter
//!   longer. The model takes one rank to have all of the largest figures; whether that is the reason was not examined.
//! - It computes in f64, and its answer depends on the description: ranks must not choose by a machine that nobody named.
//!
//! `cargo bench --bench choices` repeats it (CPU time, the smallest of two, on an Intel Xeon beside other programs,
//! 2026-11-29). What both models count alike is counted once: `loads`, `nodes` and `heads`.

use alloc::{format, vec::Vec};

use super::{
    AttentionKind, LayoutLoad, LoadCounter, Options, Plan, Problem,
    nodes::{NodeRanks, crossing, holds_ulysses, ring_steps},
};
use crate::{
    batch::Batch,
    error::{Error, Result},
    heads::HeadCounts,
    layout::Layout,
    mesh::Mesh,
};

/// One mesh with its automatic layout and their cost by the rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Candidate {
    /// The mesh.
    pub mesh: Mesh,
    /// Its automatic layout.
    pub layout: Layout,
    /// Multiply-adds of the busiest rank, forward and backward.
    pub multiply_adds: u128,
    /// Bytes that the busiest rank receives, forward and backward.
    pub bytes: u128,
    /// The part of `bytes` that comes from other nodes; approximate, without a schedule. 0 if all links are alike.
    pub bytes_between: u128,
    /// Number of messages that the busiest rank receives, forward and backward; approximate, without a schedule.
    pub messages: u64,
    /// `multiply_adds + balance · (bytes + (INTER_NODE_FACTOR − 1) · bytes_between + MESSAGE_COST_BYTES · messages)`.
    pub cost: u128,
}

/// The chosen mesh and layout, and all candidates.
///
/// [`Plan::explain`] prints every candidate with its figures. The rules:
///
/// 1. *Meshes* are all `ulysses × ring = world` with `ulysses ≤ heads`; with several nodes, only those whose Ulysses
///    ranks lie in one node. Each is rated with its own automatic layout. The mesh with the lowest cost is chosen; if
///    costs are equal, the one with the larger `ulysses`.
/// 2. *Cost* is the multiply-adds of the busiest rank plus `balance` times the bytes that the busiest rank receives,
///    both for one forward and one backward. Multiply-adds are the largest mask area of any ring rank times the largest
///    number of q heads of any Ulysses rank, so heads that do not divide evenly count with the factor `⌈H/U⌉·U/H`.
///    Bytes are those of the two all-to-alls of each direction, and on the ring, for each row that another rank needs,
///    k and v twice and their gradients once, also where q circulates; rows that windows or document boundaries make
///    unneeded are not counted.
///    Every message adds [`Choice::MESSAGE_COST_BYTES`] bytes: k and v, and later their gradients, in each ring step
///    that the needed rows fill, and each tensor to each peer in an all-to-all. Over several nodes
///    ([`Options::ranks_per_node`]) a byte from another node counts [`Choice::INTER_NODE_FACTOR`] times: of an
///    all-to-all the part of the peers that are in other nodes, of the ring's rows those whose owners are, once for
///    each node where the schedule has two levels.
/// 3. *Layouts*: with one ring rank nothing is sent, and contiguous is chosen. Otherwise consider those of
///    [`Choice::LAYOUTS`] whose busiest rank has at most 1 % more work than the best one's. Of these, choose the one
///    whose busiest rank needs the fewest rows of other ranks; of equals the first in the list.
///
/// Everything is counted in integers from the problem alone, so all ranks make the same choice. Where q and k are the
/// same tokens it takes about one step for each document, and for each mesh one for each run of a layout and, for a
/// zigzag, for each rank and length; otherwise `O(documents × ring)` steps for each mesh and
/// layout. These are rules of thumb: if the machine is known, `PlanBuilder::build_on` uses its description.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// The mesh.
    pub mesh: Mesh,
    /// The layout.
    pub layout: Layout,
    /// The multiply-adds per byte that the cost was computed with.
    pub balance: u32,
    /// All candidates, by decreasing `ulysses`.
    pub candidates: Vec<Candidate>,
}

impl Layout {
    /// The automatic layout for `ring` ranks: rule 3 of [`Choice`].
    pub fn auto(problem: &Problem, ring: usize) -> Result<Self> {
        problem.check()?;
        if ring == 0 {
            return Err(Error::invalid("ring", 0, "at least 1"));
        }
        Ok(best_layout(&mut LoadCounter::new(problem), ring)?.layout)
    }
}

/// The meshes of rule 1 of [`Choice`] for an attention of `heads` q heads, by decreasing `ulysses`. `whole`: an
/// attention that needs whole sequences ([`AttentionKind::Other`]).
///
/// # Errors
/// A world of 0, and fewer heads than ranks where an attention needs whole sequences.
pub(crate) fn meshes(
    world: usize,
    heads: usize,
    whole: bool,
    ranks_per_node: usize,
) -> Result<impl Iterator<Item = Mesh>> {
    Mesh::ring(world)?;
    if whole && world > heads {
        return Err(Error::unsupported(
            "kind other on this world",
            format!(
                "it needs a mesh of Ulysses ranks only, and the world of {world} has more ranks than {heads} heads"
            ),
            "plan for at most as many ranks as heads, with ring 1; the other ranks can run other batches",
        ));
    }
    let fits = move |u: &usize| if whole { *u == world } else { holds_ulysses(*u, world, ranks_per_node) };
    let factors = (1..=world.min(heads)).rev().filter(move |u| world.is_multiple_of(*u));
    Ok(factors.filter(fits).map(move |ulysses| Mesh { replicas: 1, ring: world / ulysses, ulysses }))
}

/// The layouts of [`Choice::LAYOUTS`] to consider for `ring` ranks: with one rank all are alike, and with very many the
/// balanced ones are impossible.
pub(crate) fn layouts(ring: usize) -> impl Iterator<Item = Layout> {
    Choice::LAYOUTS.into_iter().filter(move |layout| match layout {
        Layout::Contiguous => true,
        Layout::Balanced { chunks } => ring > 1 && *chunks as usize * ring <= 1 << 20,
        _ => ring > 1,
    })
}

/// Rule 3 of [`Choice`]: of those with at most 1 % more work than the least, the first with the fewest rows. `all` is
/// not empty.
pub(super) fn best<T>(all: Vec<T>, work: impl Fn(&T) -> u128, rows: impl Fn(&T) -> u128) -> T {
    let least = all.iter().map(&work).min().unwrap_or(0);
    // `min_by_key` returns the first minimum.
    let best = all.into_iter().filter(|one| 100 * work(one) <= 101 * least).min_by_key(rows);
    best.expect("the layout with the least work")
}

pub(super) fn best_layout(counter: &mut LoadCounter<'_>, ring: usize) -> Result<LayoutLoad> {
    let all = layouts(ring).map(|layout| counter.load(layout, ring)).collect::<Result<Vec<_>>>()?;
    Ok(best(all, |d| d.largest.area.into(), |d| d.largest.needed.into()))
}

impl Choice {
    /// Multiply-adds that a device does in the time that one byte takes to arrive. 1,024 is the order of magnitude of
    /// an accelerator of a few hundred tera multiply-adds per second on a link of a few hundred gigabytes per second;
    /// it is a convention, not a measurement. The rule ignores that ring steps overlap with compute and all-to-alls do
    /// not.
    pub const BALANCE: u32 = 1024;

    /// The fixed cost of a message, in bytes: 64 KiB take some microseconds on a link of ten gigabytes per second. A
    /// convention, as [`Choice::BALANCE`] is.
    pub const MESSAGE_COST_BYTES: u32 = 1 << 16;

    /// Bytes inside a node that take as long as one byte from another node. 8 is the order of magnitude of a node of
    /// eight accelerators with links of a few hundred gigabytes per second and a card of 400 Gb/s for each; a
    /// convention, as [`Choice::BALANCE`] is. It says nothing unless [`Options::ranks_per_node`] is given.
    pub const INTER_NODE_FACTOR: u32 = 8;

    /// The layouts that are considered, in order of preference.
    pub const LAYOUTS: [Layout; 6] = [
        Layout::Contiguous,
        Layout::ZigzagPack,
        Layout::Balanced { chunks: 4 },
        Layout::Balanced { chunks: 16 },
        Layout::Zigzag,
        Layout::Striped { stripe: 128 },
    ];

    /// The automatic mesh and layout for `world` ranks that share one batch, with all candidates: the rules of the
    /// [type](Choice). `balance` is usually [`Choice::BALANCE`]. With `ranks_per_node`
    /// ([`Options::ranks_per_node`]; 0 if all links are alike) only meshes whose Ulysses ranks lie in one node are
    /// considered, where the kind of attention leaves a choice, and bytes from other nodes count
    /// [`Choice::INTER_NODE_FACTOR`] times.
    ///
    /// # Errors
    /// A problem that [`Problem::check`] refuses, a world of 0, and a [`AttentionKind::Other`] on more ranks than
    /// heads.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Mesh, Problem, plan::Choice};
    /// let problem = Problem::new(Batch::from_lengths(&[8192])?, 8, 8, 64, Dtype::Bf16);
    /// let choice = Choice::new(&problem, 8, Choice::BALANCE, 0)?;
    /// assert_eq!(choice.mesh, Mesh::ulysses(8)?);
    /// assert_eq!(choice.candidates.len(), 4);
    /// let first = &choice.candidates[0];
    /// let sent = first.bytes + u128::from(Choice::MESSAGE_COST_BYTES) * u128::from(first.messages);
    /// assert_eq!(first.cost, first.multiply_adds + u128::from(Choice::BALANCE) * sent);
    /// // A link that costs nothing leaves the balance of work to decide.
    /// assert!(Choice::new(&problem, 8, 0, 0)?.mesh.ulysses > 0);
    ///
    /// // Two nodes of eight: all-to-alls inside each of them, a ring across.
    /// let problem = Problem::new(Batch::from_lengths(&[1 << 17])?, 32, 8, 128, Dtype::Bf16);
    /// let choice = Choice::new(&problem, 16, Choice::BALANCE, 8)?;
    /// assert_eq!((choice.mesh.ulysses, choice.mesh.ring), (8, 2));
    /// let best = &choice.candidates[0];
    /// let alike = Choice::new(&problem, 16, Choice::BALANCE, 0)?;
    /// let same = alike.candidates.iter().find(|c| c.mesh == best.mesh).unwrap();
    /// let weight = u128::from(Choice::BALANCE * (Choice::INTER_NODE_FACTOR - 1));
    /// assert_eq!(best.cost - same.cost, weight * best.bytes_between);
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn new(problem: &Problem, world: usize, balance: u32, ranks_per_node: usize) -> Result<Self> {
        Self::among(problem, world, balance, ranks_per_node, None)
    }

    /// As [`Choice::new`], of the meshes with `layout` if one is given.
    pub(crate) fn among(
        problem: &Problem,
        world: usize,
        balance: u32,
        ranks_per_node: usize,
        layout: Option<Layout>,
    ) -> Result<Self> {
        problem.check()?;
        let mut counter = LoadCounter::new(problem);
        let rated = |mesh: Mesh| {
            let d = match layout {
                Some(layout) => counter.load(layout, mesh.ring)?,
                None => best_layout(&mut counter, mesh.ring)?,
            };
            Ok(judge(problem, mesh, &d, balance, ranks_per_node))
        };
        let whole = problem.kind == AttentionKind::Other;
        let meshes = meshes(world, problem.heads(), whole, ranks_per_node)?;
        let candidates = meshes.map(rated).collect::<Result<Vec<_>>>()?;
        let best = candidates.iter().min_by_key(|c| c.cost);
        let best = best.ok_or_else(|| Error::invalid("world", world, "a mesh that fits the problem"))?;
        Ok(Self { mesh: best.mesh, layout: best.layout, balance, candidates })
    }
}

/// The cost of a mesh with a layout, over nodes of this many ranks.
pub(super) fn judge(problem: &Problem, mesh: Mesh, d: &LayoutLoad, balance: u32, ranks_per_node: usize) -> Candidate {
    let u = mesh.ulysses as u128;
    let counts = HeadCounts::new(mesh.ulysses, problem.head_numbers());
    let [hq, hkv, all_kv] = [counts.q, counts.kv, counts.all_kv].map(u128::from);
    let (e, a) = (problem.dtype().size() as u128, problem.dtype().accumulator().size() as u128);
    let (dk, dv) = (problem.head_dim() as u128, problem.value_dim() as u128);
    let (h, hk) = (problem.heads() as u128, problem.kv_heads() as u128);
    // Forward: s and o. Backward: s and dp again, dq, dk, dv.
    let multiply_adds = u128::from(d.largest.area) * hq * ((dk + dv) + (3 * dk + 2 * dv));
    let ring = u128::from(d.largest.needed) * hkv * (dk + dv) * (2 * e + a);
    let (nq, nk) = (u128::from(d.largest.q_tokens), u128::from(d.largest.k_tokens));
    let (own_q, own_k) = (nq.div_ceil(u), nk.div_ceil(u));
    let into_heads = (nq - own_q) * hq * (dk * e + (dk + dv) * e + 2 * a) + (nk - own_k) * hkv * 2 * (dk + dv) * e;
    // A gradient of a kv head that several ranks hold is a partial, in the accumulator's type.
    let keys_back = (all_kv - hkv) * (dk + dv) * if all_kv > hk { a } else { e };
    let back = own_q * (h - hq) * (dv * e + a + dk * e) + own_k * keys_back;
    let exchanged = if u > 1 { into_heads + back } else { 0 };
    let bytes = ring + exchanged;
    let node = if ranks_per_node == 0 { mesh.world() } else { ranks_per_node };
    let node_ranks = NodeRanks::new(problem, mesh, Options::new().ranks_per_node(ranks_per_node));
    let cross = crossing(problem, mesh, d, node, node_ranks);
    let bytes_between = cross.exchanged.bytes(exchanged) + cross.rows.bytes(ring);
    let steps = ring_steps(mesh, &d.largest);
    // Forward: q, k, v there, o and lse back. Backward: q, k, v, do, lse, delta there, dq, dk, dv back.
    let peers = if bytes > ring { mesh.ulysses as u64 - 1 } else { 0 };
    let messages = 6 * steps + 14 * peers;
    let weighed = bytes
        + u128::from(Choice::INTER_NODE_FACTOR - 1) * bytes_between
        + u128::from(Choice::MESSAGE_COST_BYTES) * u128::from(messages);
    let cost = multiply_adds + u128::from(balance) * weighed;
    Candidate { mesh, layout: d.layout, multiply_adds, bytes, bytes_between, messages, cost }
}

impl Mesh {
    /// The mesh that [`Choice::new`] takes for `world` ranks with [`Choice::BALANCE`], of which all links are alike.
    pub fn auto(problem: &Problem, world: usize) -> Result<Self> {
        Ok(Choice::new(problem, world, Choice::BALANCE, 0)?.mesh)
    }
}

impl Plan {
    /// The plan of another batch with the mesh, the layout, the options and all else of this plan: nothing is chosen
    /// again.
    ///
    /// For steps of a training run that differ only in the lengths of their documents. It takes about as long as
    /// reading `cu_seqlens` (for [`Layout::Balanced`] as dealing the chunks; where q and k are different tokens, a step
    /// for each document and ring rank decides the [side](Plan::circulates) anew). Whether the kept choice is
    /// still the best is not considered: see [`Choice::new`].
    ///
    /// Plans of one [`distribution`](Plan::distribution), for layers of several kinds, have one distribution of the
    /// next batch too: chunks of a balanced layout are dealt by the mask that dealt those of this plan
    /// ([`PlanBuilder::tokens_of`](super::PlanBuilder::tokens_of), [`Plan::auto_for`]), and by the documents: kinds may
    /// have different slices, so slices do not count here.
    ///
    /// # Errors
    /// As [`PlanBuilder::build`](super::PlanBuilder::build). A batch with slices after one without, or the other way
    /// round: the mask of the problem means something else then. [`slices::documents`](crate::slices::documents) are
    /// documents as slices.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Mask, Options, Plan, Problem};
    /// let full = Problem::new(Batch::from_lengths(&[4000, 96])?, 8, 8, 64, Dtype::Bf16);
    /// let windowed = full.clone().with_mask(Mask::sliding(512));
    /// let mut kinds = Plan::auto_for(&[(full, 1), (windowed, 5)], 4, Options::default())?; // the first batch
    /// for lengths in [[1000, 2000, 1096], [3, 4000, 93]] {
    ///     let batch = Batch::from_lengths(&lengths)?; // each step: its batch, and a plan for each kind of layer
    ///     kinds = kinds.iter().map(|plan| plan.next(&batch)).collect::<Result<_, _>>()?;
    ///     assert_eq!(kinds[0].distribution(), kinds[1].distribution());
    /// }
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn next(&self, batch: &Batch) -> Result<Self> {
        let slices = |batch: &Batch| if batch.slices().is_some() { "with slices" } else { "without slices" };
        let [found, expected] = [batch, self.problem().batch()].map(slices);
        if found != expected {
            let expected = format!("one {expected}, as in the plan before");
            return Err(Error::invalid("batch", found, expected).hint("give documents as slices too"));
        }
        if self.problem().alibi_per_document() {
            let limit = "the slopes of this plan are of its documents";
            let hint = "plan a kind without them so, and make this plan with its tokens and with slopes of the batch";
            return Err(Error::unsupported("slopes per document for the next batch", limit, hint));
        }
        let problem = self.problem().clone().with_batch(batch.clone());
        super::check(&problem, self.mesh(), self.options())?;
        let plan = Self::over(&problem, self.mesh(), self.shares().of_batch(batch)?, self.options());
        Ok(if let Some(reason) = self.reason() { plan.because(reason) } else { plan })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, Dtype, Mask};
    use alloc::vec;

    fn problem(lengths: &[usize], heads: usize, kv_heads: usize) -> Problem {
        Problem::new(Batch::from_lengths(lengths).unwrap(), heads, kv_heads, 64, Dtype::Bf16)
    }

    fn layout_load(problem: &Problem, layout: Layout, ring: usize) -> Result<LayoutLoad> {
        LoadCounter::new(problem).load(layout, ring)
    }

    #[test]
    fn the_layout_follows_the_work() {
        let layout = |p: &Problem, ring| Layout::auto(p, ring).unwrap();
        let long = problem(&[1 << 16], 8, 8);
        assert_eq!(layout(&long, 1), Layout::Contiguous);
        // Causal: the last of contiguous ranks works twice the mean; a zigzag is even.
        assert_eq!(layout(&long, 8), Layout::ZigzagPack);
        assert!(layout_load(&long, Layout::Contiguous, 8).unwrap().work_imbalance() > 1.8);
        // Where every rank works alike, the one that sends least: contiguous.
        assert_eq!(layout(&long.clone().with_mask(Mask::window(127, 0)), 8), Layout::Contiguous);
        assert_eq!(layout(&long.clone().with_mask(Mask::full()), 8), Layout::Contiguous);
        // Equal documents, one for each rank: nothing travels at all.
        let equal = problem(&[4096; 8], 8, 8);
        assert_eq!(layout(&equal, 8), Layout::Contiguous);
        assert_eq!(layout_load(&equal, Layout::Contiguous, 8).unwrap().largest.needed, 0);
    }

    #[test]
    fn the_chosen_layout_is_within_a_percent_of_the_best() {
        let mut lengths = vec![];
        let mut draw = fastrand::Rng::with_seed(7);
        for _ in 0..40 {
            lengths.push(1 << draw.u32(3..19));
        }
        let p = problem(&lengths, 8, 8);
        for ring in [2, 3, 8, 16] {
            let chosen = layout_load(&p, Layout::auto(&p, ring).unwrap(), ring).unwrap();
            for layout in Choice::LAYOUTS {
                let other = layout_load(&p, layout, ring).unwrap();
                assert_eq!(u128::from(other.total.area), p.area());
                assert!(chosen.largest.area as f64 <= 1.01 * other.largest.area as f64, "{ring} {layout}");
            }
        }
    }

    /// Lengths with a Pareto tail, from a seeded generator.
    #[test]
    fn a_balanced_deal_of_a_long_tail_is_even_in_work_and_in_tokens() {
        let mut draw = fastrand::Rng::with_seed(3);
        let lengths: Vec<usize> =
            (0..256).map(|_| (((64u64 << 32) / (u64::from(draw.u32(..)) + 1)) as usize).min(1 << 16)).collect();
        assert!(lengths.iter().max().unwrap() > &(50 * lengths.iter().min().unwrap()));
        let p = problem(&lengths, 8, 8);
        for ring in [8, 64] {
            let d = layout_load(&p, Layout::Balanced { chunks: 16 }, ring).unwrap();
            assert!(d.work_imbalance() <= 1.05 && d.token_imbalance() <= 1.05, "{ring}: {d:?}");
            assert!(layout_load(&p, Layout::Contiguous, ring).unwrap().work_imbalance() > 1.3);
        }
    }
}
