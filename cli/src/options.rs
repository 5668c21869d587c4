// SPDX-License-Identifier: MIT OR Apache-2.0
//! The command line, and what follows from it: problem, mesh, layout and options.
//!
//! No option is ignored: one that is not supported is refused, by clap or by the plan.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use cpattn::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem,
    plan::{Circulate, Gather, Wire},
};

/// Ranks that are threads of this process.
const MAX_WORLD: usize = 1024;

/// Exact context-parallel attention on threads or processes as ranks, against a float64 reference.
///
/// Without arguments: real activations from tests/data/minilm_263.safetensors, forward and backward on 8 ranks
/// (Ulysses 4 × ring 2).
#[derive(Parser, Debug)]
#[command(name = "context_parallel")]
pub struct Arguments {
    /// Read q, k, v, do, cu_seqlens from this safetensors file, and references (o_causal, …) if it has them.
    #[arg(long, value_name = "FILE")]
    pub input: Option<PathBuf>,
    /// Random input: lengths of the documents in tokens; 0 is an empty document.
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', conflicts_with = "input")]
    pub documents: Option<Vec<usize>>,
    /// Random input: q heads.
    #[arg(long, value_name = "N", conflicts_with = "input")]
    pub heads: Option<usize>,
    /// Random input: kv heads; default: as many as q heads.
    #[arg(long, value_name = "N", conflicts_with = "input")]
    pub kv_heads: Option<usize>,
    /// Random input: head dim of q and k.
    #[arg(long, value_name = "N", conflicts_with = "input")]
    pub head_dim: Option<usize>,
    /// Random input: head dim of v; default: that of q and k.
    #[arg(long, value_name = "N", conflicts_with = "input")]
    pub value_dim: Option<usize>,
    /// Seed of random inputs and sinks.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Ranks are threads of this process, or the processes that mpirun has started.
    #[arg(long, value_enum, default_value = "local")]
    pub transport: TransportRule,
    /// Timeout in seconds for a rank that waits for other ranks.
    #[arg(long, value_name = "S", default_value_t = 600.0, value_parser = seconds)]
    pub deadline: f64,
    /// Number of ranks; default: --ulysses times --ring if both are given, otherwise 8; over MPI the number of
    /// processes.
    #[arg(long, value_name = "N")]
    pub world: Option<usize>,
    /// Ulysses ranks, which exchange tokens for heads.
    #[arg(long, value_name = "U")]
    pub ulysses: Option<usize>,
    /// Ring ranks, which send each other k and v. A larger world is filled with replicas.
    #[arg(long, value_name = "R")]
    pub ring: Option<usize>,
    /// A rule for the mesh, instead of --ulysses and --ring.
    #[arg(long, value_enum, conflicts_with_all = ["ulysses", "ring"])]
    pub mesh: Option<MeshRule>,
    /// auto, contiguous, zigzag (each document), zigzag-pack (the whole pack), striped[:TOKENS], balanced[:CHUNKS].
    #[arg(long, value_name = "LAYOUT", default_value = "auto", value_parser = layout)]
    pub layout: LayoutRule,

    /// Which keys a query reads; causal if nothing is given.
    #[arg(long, value_enum)]
    pub mask: Option<MaskRule>,
    /// Keys from LEFT positions before to RIGHT after the query; - means no limit on that side.
    #[arg(long, value_name = "LEFT,RIGHT", value_parser = window, allow_hyphen_values = true)]
    pub window: Option<Window>,
    /// Element type; the file's, or f32 for random input. Other types are converted to it.
    #[arg(long, value_parser = dtype, value_name = "f32|f16|bf16|f64")]
    pub dtype: Option<Dtype>,
    /// Caps scores: X · tanh(s / X).
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub softcap: Option<f64>,
    /// ALiBi with the usual slopes, 2^(−8(h+1)/heads).
    #[arg(long)]
    pub alibi: bool,
    /// A random sink for each head.
    #[arg(long)]
    pub sinks: bool,

    /// Type in which partial gradients are sent; bf16 has its own error bound.
    #[arg(long, value_enum, default_value = "f32")]
    pub wire: WireRule,
    /// Bit-equal results for any number of ranks.
    #[arg(long)]
    pub reproducible: bool,
    /// Receive k and v of all other ranks at once, instead of step by step.
    #[arg(long)]
    pub gather: bool,
    /// Passes over groups of kv heads.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub passes: usize,
    /// Which side is sent round the ring in the backward.
    #[arg(long, value_enum, default_value = "auto")]
    pub circulate: CirculateRule,

    /// Run forward and backward N times; times are those of all runs, errors those of the last.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
    /// Write Chrome trace events (open in Perfetto).
    #[arg(long, value_name = "FILE.json")]
    pub trace: Option<PathBuf>,
    /// Write a picture of the lanes of all ranks.
    #[arg(long, value_name = "FILE.svg")]
    pub timeline: Option<PathBuf>,
    /// Check the ring instead: sends a stamped message over every link in both directions; prints which link fails, and
    /// how fast each is.
    #[arg(long, conflicts_with_all = ["input", "documents", "heads", "kv_heads", "head_dim", "value_dim", "seed", "ulysses",
        "ring", "mesh", "layout", "mask", "window", "dtype", "softcap", "alibi", "sinks", "wire", "reproducible", "gather",
        "passes", "circulate", "repeat", "trace", "timeline", "suite"])]
    pub check_ring: bool,
    /// Run every combination of options on small random problems instead.
    #[arg(long, conflicts_with_all = ["input", "documents", "heads", "kv_heads", "head_dim", "value_dim", "world", "ulysses",
        "ring", "mesh", "layout", "mask", "window", "dtype", "softcap", "alibi", "sinks", "wire", "reproducible", "gather",
        "passes", "circulate", "repeat", "trace", "timeline", "transport", "deadline"])]
    pub suite: bool,
    /// With --suite: a fixed sample of the combinations.
    #[arg(long, requires = "suite")]
    pub quick: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransportRule {
    /// Threads of this process.
    Local,
    /// Processes, over MPI; needs a build with the feature mpi.
    Mpi,
}

impl TransportRule {
    /// What its ranks are.
    pub fn ranks(self) -> &'static str {
        match self {
            Self::Local => "threads",
            Self::Mpi => "processes",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MeshRule {
    /// The mesh with the lowest cost in work and bytes.
    Auto,
    /// Ulysses of gcd(heads, world), ring for the rest.
    Gcd,
    /// Ulysses only.
    Ulysses,
    /// Ring only.
    Ring,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MaskRule {
    Causal,
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WireRule {
    F32,
    Bf16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CirculateRule {
    Auto,
    Keys,
    Queries,
}

#[derive(Clone, Copy, Debug)]
pub enum LayoutRule {
    Auto,
    Given(Layout),
}

#[derive(Clone, Copy, Debug)]
pub struct Window {
    left: Option<u32>,
    right: Option<u32>,
}

fn layout(text: &str) -> Result<LayoutRule, String> {
    let (name, number) = text.split_once(':').map_or((text, None), |(name, n)| (name, Some(n)));
    let count = |default: u32| match number {
        None => Ok(default),
        Some(n) => n.parse().map_err(|_| format!("{n:?} is not a number of tokens or chunks")),
    };
    let given = match name {
        "striped" => Layout::Striped { stripe: count(1)? },
        "balanced" => Layout::Balanced { chunks: count(4)? },
        _ if number.is_some() => return Err("only striped and balanced take a number".into()),
        "auto" => return Ok(LayoutRule::Auto),
        "contiguous" => Layout::Contiguous,
        "zigzag" => Layout::Zigzag,
        "zigzag-pack" => Layout::ZigzagPack,
        _ => return Err("expected auto, contiguous, zigzag, zigzag-pack, striped[:TOKENS] or balanced[:CHUNKS]".into()),
    };
    Ok(LayoutRule::Given(given))
}

fn seconds(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|s| (0.001..=1e6).contains(s)).ok_or_else(|| "expected 0.001 to 1000000 seconds".into())
}

fn window(text: &str) -> Result<Window, String> {
    let side = |s: &str| match s.trim() {
        "-" => Ok(None),
        n => n.parse().map(Some).map_err(|_| format!("{n:?} is neither a number of tokens nor -")),
    };
    let (left, right) = text.split_once(',').ok_or("expected LEFT,RIGHT")?;
    Ok(Window { left: side(left)?, right: side(right)? })
}

fn dtype(text: &str) -> Result<Dtype, String> {
    [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F64]
        .into_iter()
        .find(|d| d.name() == text)
        .ok_or_else(|| "expected f32, f16, bf16 or f64".into())
}

/// ALiBi's slopes (Press, Smith and Lewis, 2022) for a power of two of heads; the same formula for other numbers.
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    (1..=heads).map(|h| (-8.0 * h as f64 / heads as f64).exp2() as f32).collect()
}

impl Arguments {
    /// Whether any option of random input was given.
    pub fn is_random(&self) -> bool {
        self.documents.is_some()
            || self.heads.is_some()
            || self.kv_heads.is_some()
            || self.head_dim.is_some()
            || self.value_dim.is_some()
    }

    fn mask(&self) -> Result<Mask, String> {
        let Some(Window { left, right }) = self.window else {
            return Ok(if self.mask == Some(MaskRule::Full) { Mask::full() } else { Mask::causal() });
        };
        if self.mask == Some(MaskRule::Causal) && right != Some(0) {
            let right = right.map_or("-".to_owned(), |n| n.to_string());
            return Err(format!(
                "--window reads {right} tokens after the query, and --mask causal none; give a RIGHT of 0, or leave out --mask"
            ));
        }
        Ok(Mask { left, right })
    }

    /// The problem for a batch of these shapes.
    pub fn problem(
        &self,
        batch: Batch,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        value_dim: usize,
        dtype: Dtype,
    ) -> Result<Problem, String> {
        let mut p = Problem::new(batch, heads, kv_heads, head_dim, dtype)
            .with_value_dim(value_dim)
            .with_mask(self.mask()?)
            .with_sinks(self.sinks);
        if let Some(cap) = self.softcap {
            p = p.with_softcap(cap);
        }
        if self.alibi {
            p = p.with_alibi_slopes(&alibi_slopes(heads));
        }
        p.check().map_err(|e| e.to_string())?;
        Ok(p)
    }

    /// Takes the world from the number of processes, and refuses another.
    #[cfg(feature = "mpi")]
    pub fn started_as(&mut self, processes: usize) -> Result<(), String> {
        let asked = self.world.or(self.ulysses.zip(self.ring).map(|(u, r)| u.saturating_mul(r)));
        match asked {
            Some(world) if world != processes && self.world.is_some() => {
                Err(format!("--world is {world}, expected {processes}, the number of processes that mpirun started"))
            }
            _ => {
                self.world = Some(processes);
                Ok(())
            }
        }
    }

    fn world(&self) -> usize {
        self.world.unwrap_or(match (self.ulysses, self.ring) {
            (Some(u), Some(r)) => u.saturating_mul(r),
            _ => 8,
        })
    }

    fn mesh(&self, p: &Problem, fixture: bool) -> cpattn::Result<Mesh> {
        let world = self.world();
        match (self.mesh, self.ulysses, self.ring) {
            (Some(MeshRule::Gcd), ..) => Mesh::gcd(p.heads(), world),
            (Some(MeshRule::Ulysses), ..) => Mesh::ulysses(world),
            (Some(MeshRule::Ring), ..) => Mesh::ring(world),
            (None, Some(u), Some(r)) => Mesh { replicas: 1, ring: r, ulysses: u }.in_world(world),
            (None, Some(u), None) => Mesh { replicas: 1, ring: (world / u.max(1)).max(1), ulysses: u }.in_world(world),
            (None, None, Some(r)) => Mesh { replicas: 1, ring: r, ulysses: (world / r.max(1)).max(1) }.in_world(world),
            (None, None, None) if fixture && world == 8 => Ok(Mesh { replicas: 1, ring: 2, ulysses: 4 }),
            (Some(MeshRule::Auto) | None, ..) => Ok(Mesh::auto(p, world)?),
        }
    }

    /// How many ranks there are as threads.
    pub fn threads(&self) -> Result<usize, String> {
        match self.world() {
            world if world > MAX_WORLD => Err(format!(
                "--world is {world}, expected at most {MAX_WORLD}: each rank is a thread here; start more ranks as processes \
                 (--transport mpi)"
            )),
            world => Ok(world),
        }
    }

    /// The plan for a problem; `fixture`: the problem is from the default file.
    pub fn plan(&self, p: &Problem, fixture: bool) -> Result<Plan, String> {
        if self.transport == TransportRule::Local {
            self.threads()?;
        }
        self.plan_for(p, fixture).map_err(|e| e.to_string())
    }

    fn plan_for(&self, p: &Problem, fixture: bool) -> cpattn::Result<Plan> {
        let mesh = self.mesh(p, fixture)?;
        let layout = match self.layout {
            LayoutRule::Auto => Layout::auto(p, mesh.ring)?,
            LayoutRule::Given(layout) => layout,
        };
        let options = Options::new()
            .gather(if self.gather { Gather::Others } else { Gather::Auto })
            .passes(self.passes)
            .reproducible(self.reproducible)
            .wire(match self.wire {
                WireRule::F32 => Wire::Full,
                WireRule::Bf16 => Wire::Bf16,
            })
            .circulate(match self.circulate {
                CirculateRule::Auto => Circulate::Auto,
                CirculateRule::Keys => Circulate::Keys,
                CirculateRule::Queries => Circulate::Queries,
            });
        Plan::builder(p).mesh(mesh).layout(layout).options(options).build()
    }
}
