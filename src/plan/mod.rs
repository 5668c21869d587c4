// SPDX-License-Identifier: MIT OR Apache-2.0
//! Problem × mesh × layout → plan.
//!
//! A [`Plan`] is a value: made once, equal by content, cheap to clone, run by a long-lived rank as often as one likes.
//! It either honours every option in every mode or is refused, with an error that names the option, the limit and the
//! way out. It holds nothing of any rank; `Schedule::new` writes one rank's operations.

use alloc::{format, sync::Arc, vec::Vec};

use crate::{
    batch::Side,
    error::{Error, Result},
    heads::{self, HeadShare},
    layout::{Layout, Segment, Shares, cut},
    mesh::{Coordinates, Mesh},
};

mod area;
pub mod auto;
mod fingerprint;
mod form;
mod options;
mod problem;
mod shard;

pub use area::{Load, area};
pub use auto::{BALANCE, Candidate, Choice, Dealt, LAYOUTS, MESSAGE, auto_layout, choose, dealt};
use fingerprint::Fingerprint;
pub use form::{CirculatingSide, Direction, Form};
pub use options::{Circulate, Options, Wire};
pub use problem::{AttentionKind, MAX_HEAD_DIM, Problem};
pub use shard::ShiftMessage;

/// What all ranks agree to compute, and how.
#[derive(Clone, Debug)]
pub struct Plan {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    problem: Problem,
    mesh: Mesh,
    layout: Layout,
    options: Options,
    shares: Shares,
    fingerprint: u64,
}

impl PartialEq for Plan {
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (&*self.inner, &*other.inner);
        Arc::ptr_eq(&self.inner, &other.inner)
            || (a.fingerprint == b.fingerprint
                && a.problem == b.problem
                && a.mesh == b.mesh
                && a.layout == b.layout
                && a.options == b.options)
    }
}

impl Plan {
    /// Plans with the default options.
    pub fn new(problem: &Problem, mesh: Mesh, layout: Layout) -> Result<Self> {
        Self::with_options(problem, mesh, layout, Options::default())
    }

    /// Plans, or refuses.
    pub fn with_options(problem: &Problem, mesh: Mesh, layout: Layout, options: Options) -> Result<Self> {
        problem.check()?;
        if mesh.replicas == 0 || mesh.ring == 0 || mesh.ulysses == 0 {
            return Err(Error::invalid("mesh", mesh.factors(), "every factor at least 1"));
        }
        mesh.check_world()?;
        if mesh.ulysses > problem.heads() {
            return Err(Error::invalid("mesh.ulysses", mesh.ulysses, format!("at most heads = {}", problem.heads()))
                .hint("give the remaining ranks to the ring"));
        }
        if problem.kind == AttentionKind::Other && mesh.ring > 1 {
            return Err(Error::unsupported(
                "kind other on a ring",
                format!("only softmax attention can be merged from parts, and the ring has {} ranks", mesh.ring),
                "give all of them to ulysses: its ranks see whole sequences",
            ));
        }
        let kv_heads = problem.kv_heads();
        if options.passes == 0 || options.passes > kv_heads {
            return Err(Error::invalid("options.passes", options.passes, format!("1 to kv_heads = {kv_heads}")));
        }
        if options.reproducible {
            let clash = |option: &'static str, why: &'static str| {
                Err(Error::unsupported(option, why, "leave it out, or leave out reproducible"))
            };
            if options.wire == Wire::Bf16 {
                return clash("wire bf16 with reproducible", "what is rounded on the way depends on the mesh");
            }
            if options.passes > 1 {
                return clash("options.passes with reproducible", "dk and dv are made head by head in one pass");
            }
            if options.circulate != Circulate::Auto {
                return clash("circulate with reproducible", "the ordered form gathers both sides");
            }
        }
        if options.circulate == Circulate::Queries && options.passes > 1 {
            return Err(Error::unsupported(
                "options.passes with circulate queries",
                "passes divide the kv heads that travel, and here the q side does",
                "leave out one of them",
            ));
        }
        let shares = Shares::new(problem.batch(), problem.mask(), layout, mesh.ring)?;
        let mut h = Fingerprint::new();
        problem.hash_into(&mut h);
        // Replicas run on batches of their own, so their number is no part of what a group agrees on.
        h.word(mesh.ring as u64);
        h.word(mesh.ulysses as u64);
        match layout {
            Layout::Contiguous => h.word(0),
            Layout::Zigzag => h.word(1),
            Layout::ZigzagPack => h.word(2),
            Layout::Striped { stripe } => h.word(3 | u64::from(stripe) << 8),
            Layout::Balanced { chunks } => h.word(4 | u64::from(chunks) << 8),
        }
        h.word(u64::from(options.gather) | u64::from(options.reproducible) << 1 | (options.wire as u64) << 2);
        h.word(options.passes as u64 | (options.circulate as u64) << 32);
        let inner = Inner { problem: problem.clone(), mesh, layout, options, shares, fingerprint: h.finish() };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// What is computed.
    pub fn problem(&self) -> &Problem {
        &self.inner.problem
    }

    /// The decomposition.
    pub fn mesh(&self) -> Mesh {
        self.inner.mesh
    }

    /// How tokens are dealt.
    pub fn layout(&self) -> Layout {
        self.inner.layout
    }

    /// How it is carried out.
    pub fn options(&self) -> Options {
        self.inner.options
    }

    /// The shares of the ring ranks.
    pub fn shares(&self) -> &Shares {
        &self.inner.shares
    }

    /// A number that two plans share only if (up to a chance of 2⁻⁶⁴) they are equal, the number of replicas aside.
    pub fn fingerprint(&self) -> u64 {
        self.inner.fingerprint
    }

    /// A rank's coordinates. A number beyond the world would give those of another rank, and panics.
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
        let p = self.problem();
        HeadShare::new(self.coordinates(rank).ulysses, self.mesh().ulysses, p.heads() as u32, p.kv_heads() as u32)
    }

    /// Whether some kv head is held by more than one Ulysses rank.
    pub fn shares_kv_heads(&self) -> bool {
        heads::shared_kv(self.mesh().ulysses, self.problem().heads() as u32, self.problem().kv_heads() as u32)
    }

    /// Rows of its ring share that a rank brings and gets back.
    ///
    /// # Panics
    /// A rank outside the mesh.
    pub fn local_rows(&self, side: Side, rank: usize) -> core::ops::Range<usize> {
        let Coordinates { ring, ulysses, .. } = self.coordinates(rank);
        let rows = self.shares().rows(side, ring);
        cut(ulysses, rows, self.mesh().ulysses)..cut(ulysses + 1, rows, self.mesh().ulysses)
    }

    /// How many tokens a rank holds.
    ///
    /// # Panics
    /// A rank outside the mesh.
    pub fn local_tokens(&self, side: Side, rank: usize) -> usize {
        self.local_rows(side, rank).len()
    }

    /// The form of the ring.
    pub fn form(&self) -> Form {
        match self.options() {
            Options { reproducible: true, .. } => Form::Ordered,
            Options { gather: true, .. } => Form::Gather,
            _ => Form::Ring,
        }
    }

    /// Which side travels in the backward. Bytes of a travelling k token are `Hk(dk + dv)(e + g)`, of a q token
    /// `Hq(dk + dv)e + Hq·dk·g + 2·Hq·a` (e, g, a: bytes of an element, of a travelling gradient, of lse and delta).
    pub fn backward_circulates(&self) -> CirculatingSide {
        let (p, o) = (self.problem(), self.options());
        match o.circulate {
            Circulate::Keys => CirculatingSide::Keys,
            Circulate::Queries => CirculatingSide::Queries,
            Circulate::Auto if o.passes > 1 || o.gather || o.reproducible => CirculatingSide::Keys,
            Circulate::Auto => {
                let (k, q) = self.bytes_per_circulating_token();
                let (nk, nq) = (p.batch().tokens(Side::K) as u128, p.batch().tokens(Side::Q) as u128);
                if q * nq < k * nk { CirculatingSide::Queries } else { CirculatingSide::Keys }
            }
        }
    }

    /// Bytes that one token of k's side, and one of q's, moves per ring step in the backward, there and home.
    pub fn bytes_per_circulating_token(&self) -> (u128, u128) {
        let p = self.problem();
        let e = p.dtype().size();
        let a = p.dtype().accumulator().size();
        let g = if self.options().wire == Wire::Bf16 { 2 } else { a };
        let dims = p.head_dim() + p.value_dim();
        let k = p.kv_heads() * dims * (e + g);
        let q = p.heads() * (dims * e + p.head_dim() * g + 2 * a);
        (k as u128, q as u128)
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
            .hint("plan for the world of the transport; ranks beyond ulysses × ring become replicas"));
        }
        Ok(())
    }

    /// Calls `each(global token, position, document)` for every token a rank holds, in its order.
    ///
    /// # Panics
    /// A rank outside the mesh.
    pub fn for_each_token(&self, side: Side, rank: usize, mut each: impl FnMut(usize, i64, usize)) {
        let rows = self.local_rows(side, rank);
        let mut segments: Vec<Segment> = Vec::new();
        self.shares().segments(side, self.mesh().coordinates(rank).ring, &mut segments);
        let batch = self.problem().batch();
        for s in &segments {
            let first = s.range.row as usize;
            let doc = s.range.doc as usize;
            let base = batch.document(side, doc).start as i64 - batch.start(side, doc);
            for row in rows.start.max(first)..rows.end.min(first + s.range.len as usize) {
                let pos = s.range.position((row - first) as u32);
                each((base + pos) as usize, pos, doc);
            }
        }
    }

    /// The tokens of the packed batch that a rank holds, in its order.
    ///
    /// # Panics
    /// A rank outside the mesh.
    pub fn token_indices(&self, side: Side, rank: usize) -> Vec<usize> {
        let mut out = Vec::with_capacity(self.local_tokens(side, rank));
        self.for_each_token(side, rank, |token, _, _| out.push(token));
        out
    }

    /// The positions of those tokens in their documents (for rotary embeddings and the like).
    ///
    /// # Panics
    /// A rank outside the mesh.
    pub fn positions(&self, side: Side, rank: usize) -> Vec<i64> {
        let mut out = Vec::with_capacity(self.local_tokens(side, rank));
        self.for_each_token(side, rank, |_, pos, _| out.push(pos));
        out
    }
}
