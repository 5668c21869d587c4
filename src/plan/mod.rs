// SPDX-License-Identifier: MIT OR Apache-2.0
//! Problem × mesh × layout → plan.
//!
//! A [`Plan`] is a value (`identity`): make it once for a batch, compare it, clone it cheaply, and run it any number of
//! times. Every option works in every mode, or making the plan is refused with an error that names the option, the
//! limit and the way out. A plan is the same on all ranks; `Schedule::new` makes the list of operations of one rank.

use alloc::{format, sync::Arc};

use crate::{
    batch::Side,
    error::{Error, Result},
    heads::{self, HeadShare},
    layout::{Layout, Shares},
    mesh::{Coordinates, Mesh},
};

mod area;
pub(crate) mod auto;
mod auto_for;
pub(crate) mod builder;
mod check;
mod distribution;
mod fingerprint;
pub(crate) mod form;
pub(crate) mod identity;
mod layout_load;
mod loads;
pub(crate) mod local_tokens;
mod nodes;
pub(crate) mod options;
pub(crate) mod problem;
mod segments;

mod sides;
mod together;
mod words;

pub(crate) use area::Load;
pub use auto::{Candidate, Choice};
pub use builder::PlanBuilder;
use check::check;
pub use distribution::Distribution;
pub(crate) use fingerprint::Fingerprint;
pub(crate) use form::{CirculatingSide, Direction, Form};
use identity::Inner;
pub(crate) use identity::Plan;
pub(crate) use layout_load::LayoutLoad;
pub(crate) use loads::LoadCounter;
pub use local_tokens::LocalTokens;
pub use nodes::ranks_per_node;
pub(crate) use nodes::{NodeRanks, crossing, ring_steps};
pub(crate) use options::Options;
pub use options::{Circulate, Gather, KeyRows, Wire};
pub use problem::AttentionKind;
pub(crate) use problem::Problem;
pub use segments::TokenSegment;
use together::form_of;
pub(crate) use together::{GATHERED, MANY_DOCUMENTS, MIN_KEYS_PER_STEP};

impl Plan {
    /// A plan with these shares; the arguments have been checked.
    fn over(problem: &Problem, mesh: Mesh, shares: Shares, options: Options) -> Self {
        let node_ranks = NodeRanks::new(problem, mesh, options);
        let form = form_of(problem, mesh, shares.layout(), options, node_ranks);
        let forward = sides::forward_side(problem, mesh, &shares, form, options);
        let problem = problem.clone();
        Inner { problem, mesh, options, node_ranks, form, forward, shares, fingerprint: 0, reason: None }.into()
    }

    /// The plan with a reason for its mesh, which [`Plan::explain`] prints.
    pub(crate) fn because(mut self, reason: &str) -> Self {
        if let Some(inner) = Arc::get_mut(&mut self.inner) {
            inner.reason = Some(reason.into());
        }
        self
    }

    pub(crate) fn reason(&self) -> Option<&str> {
        self.inner.reason.as_deref()
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.inner.problem
    }

    /// The mesh.
    pub fn mesh(&self) -> Mesh {
        self.inner.mesh
    }

    /// The layout.
    pub fn layout(&self) -> Layout {
        self.inner.shares.layout()
    }

    /// The options.
    pub fn options(&self) -> Options {
        self.inner.options
    }

    /// The ring ranks of a node: all of them, unless rows cross from node to node ([`Options::ranks_per_node`]).
    pub(crate) fn ring_ranks_of_node(&self) -> usize {
        self.node_ranks().ring
    }

    /// The ranks of a node that pass rows on; `ring_holders` also where k and v do not circulate.
    pub(crate) fn node_ranks(&self) -> NodeRanks {
        self.inner.node_ranks
    }

    /// As [`nodes::ring_ranks_in_node`].
    pub(crate) fn ring_ranks_in_node(&self) -> usize {
        nodes::ring_ranks_in_node(self.mesh(), self.options())
    }

    /// The Ulysses ranks of a node: all of them, unless rows of k and v cross to a node once and are passed on to
    /// several of its ranks, which hold the same kv head ([`Options::ranks_per_node`]). If no ranks of a node hold the
    /// same kv head, each row crosses once anyway, but in `reproducible`, where the partials of all q heads cross.
    pub(crate) fn ulysses_ranks_of_node(&self) -> usize {
        self.node_ranks().ulysses
    }

    /// The Ulysses ranks of a node that divide among them the rows of k and v that cross to it on the ring
    /// ([`Options::ranks_per_node`]): 1 if no two of them hold the same kv head, if the ring lies in one node, or if k
    /// and v do not circulate. Otherwise those that hold the same kv head each receive a part of its rows, and pass it
    /// on to each other.
    pub(crate) fn ring_holders_of_node(&self) -> usize {
        let keys =
            [Direction::Forward, Direction::Backward].map(|d| self.circulates(d)).contains(&CirculatingSide::Keys);
        if keys { self.node_ranks().ring_holders } else { 1 }
    }

    /// Whether rows cross from node to node once and are passed on inside: on the ring, or in its all-to-alls.
    pub fn has_two_levels(&self) -> bool {
        self.ring_ranks_of_node() < self.mesh().ring
            || self.ulysses_ranks_of_node() < self.mesh().ulysses
            || self.ring_holders_of_node() > 1
    }

    /// The shares of the ring ranks.
    pub(crate) fn shares(&self) -> &Shares {
        &self.inner.shares
    }

    /// How many tokens' rows a rank holds between the two all-to-alls: those of all ranks of its Ulysses group.
    ///
    /// # Panics
    /// A rank outside the mesh.
    pub fn tokens_between_all_to_alls(&self, side: Side, rank: usize) -> usize {
        self.shares().rows(side, self.coordinates(rank).ring)
    }

    /// A number that is equal for equal plans and, with a probability of 1 − 2⁻⁶⁴, different for different plans. The
    /// number of replicas does not count.
    pub fn fingerprint(&self) -> u64 {
        self.inner.fingerprint
    }

    /// A rank's coordinates; panics if there is no such rank.
    fn coordinates(&self, rank: usize) -> Coordinates {
        let world = self.mesh().world();
        assert!(rank < world, "rank is {rank}, expected below the world of {world}");
        self.mesh().coordinates(rank)
    }

    /// The heads that a rank holds between the two all-to-alls.
    ///
    /// # Panics
    /// A rank outside the mesh.
    pub fn heads_of(&self, rank: usize) -> HeadShare {
        let [heads, kv_heads] = self.problem().head_numbers();
        HeadShare::new(self.coordinates(rank).ulysses, self.mesh().ulysses, heads, kv_heads)
    }

    /// Whether some kv head is held by more than one Ulysses rank.
    pub fn shares_kv_heads(&self) -> bool {
        let ulysses = self.mesh().ulysses;
        heads::shared_kv_in(ulysses, ulysses, self.problem().head_numbers())
    }

    /// How k and v are received on the ring.
    pub fn form(&self) -> Form {
        self.inner.form
    }

    /// The side that is sent round the ring.
    ///
    /// In a forward ([`Options::circulate_forward`]) that is automatic: q, if sending q moves fewer bytes in total over
    /// all ring ranks, and there are ring steps, one pass, and different tokens of q and k; otherwise k and v. A q row
    /// costs `Hq(dk·e + (dv + 2)a)` bytes for each rank whose keys it reads, a k row `Hk(dk + dv)e` for each rank whose
    /// q rows read it (e: bytes of an element, a: of an element of the accumulator).
    ///
    /// In a backward ([`Options::circulate`]) the bytes per k token are `Hk(dk + dv)(e + g)`, per q token `Hq(dk + dv)e
    /// + Hq·dk·g + 2·Hq·a` (g: bytes of an element of a gradient as sent).
    pub fn circulates(&self, direction: Direction) -> CirculatingSide {
        match direction {
            Direction::Forward => self.inner.forward,
            Direction::Backward => self.backward_side(),
        }
    }

    fn backward_side(&self) -> CirculatingSide {
        let (p, o) = (self.problem(), self.options());
        match o.circulate {
            Circulate::Keys => CirculatingSide::Keys,
            Circulate::Queries => CirculatingSide::Queries,
            Circulate::Auto if o.passes > 1 || self.form() != Form::Ring => CirculatingSide::Keys,
            Circulate::Auto => {
                let (k, q) = self.bytes_per_circulating_token();
                let (nk, nq) = (p.batch().tokens(Side::K) as u128, p.batch().tokens(Side::Q) as u128);
                if q * nq < k * nk { CirculatingSide::Queries } else { CirculatingSide::Keys }
            }
        }
    }

    /// The plan of a direction over listed keys, if it is not this one: where this plan has chosen by itself to send q
    /// round the ring, k and v are sent instead. The tokens of ranks are the same.
    #[cfg(feature = "std")]
    pub(crate) fn for_listed_keys(&self, direction: Direction) -> Option<Self> {
        let o = self.options();
        let options = match direction {
            Direction::Forward if o.circulate_forward == Circulate::Auto => o.circulate_forward(Circulate::Keys),
            Direction::Backward if o.circulate == Circulate::Auto => o.circulate(Circulate::Keys),
            _ => return None,
        };
        let chosen = self.mesh().ring > 1 && self.circulates(direction) == CirculatingSide::Queries;
        chosen.then(|| Self::over(self.problem(), self.mesh(), self.shares().clone(), options))
    }

    /// Bytes of an element of a gradient as it is sent.
    pub(crate) fn gradient_bytes(&self) -> usize {
        if self.options().wire == Wire::Bf16 { 2 } else { self.problem().dtype().accumulator().size() }
    }

    /// Whether a forward in which q circulates packs it first: if the option asks for it, or if the automatic choice
    /// sends q, which may then have any strides because the caller did not ask for it.
    pub(crate) fn packs_forward_queries(&self) -> bool {
        let options = self.options();
        options.pack_inputs || options.circulate_forward == Circulate::Auto
    }

    /// The bytes per ring step in the backward, both ways, for one token of k's side and for one of q's side.
    pub(crate) fn bytes_per_circulating_token(&self) -> (u128, u128) {
        let p = self.problem();
        let e = p.dtype().size();
        let (a, g) = (p.dtype().accumulator().size(), self.gradient_bytes());
        let dims = p.head_dim() + p.value_dim();
        let k = p.kv_heads() * dims * (e + g);
        let q = p.heads() * (dims * e + p.head_dim() * g + 2 * a);
        (k as u128, q as u128)
    }

    /// Bytes that the ring moves in a forward with k and v circulating, and with q circulating; `None` if the automatic
    /// choice did not compare them.
    pub(crate) fn compared_in_forward(&self) -> Option<[u128; 2]> {
        let (p, mesh, o) = (self.problem(), self.mesh(), self.options());
        let counted = o.circulate_forward == Circulate::Auto && sides::counts(p, mesh, self.form(), o);
        counted.then(|| sides::forward_bytes(p, mesh, self.shares()))
    }

    /// Refuses a transport whose world is not the mesh's.
    pub fn fits_world(&self, world: usize) -> Result<()> {
        let mesh = self.mesh();
        if mesh.world() != world {
            return Err(Error::invalid(
                "mesh",
                format!("{mesh} = {} ranks", mesh.world()),
                format!("the transport's world of {world}"),
            )
            .hint("plan with a mesh of as many ranks as the transport has"));
        }
        Ok(())
    }
}
