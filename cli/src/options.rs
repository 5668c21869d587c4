// SPDX-License-Identifier: MIT OR Apache-2.0
//! The options that commands share, each of them once; and what follows from them: problem, mesh, layout and options of
//! a plan.
//!
//! No option is ignored: one that is not supported is refused, by clap or by the plan.

mod values;

use std::path::PathBuf;

use clap::Args;
use cpattn::{
    Batch, Dtype, Layout, Machine, Mask, Mesh, Options, Plan, Problem,
    plan::{Circulate, Gather, Wire},
};
#[cfg(not(feature = "mpi"))]
pub use values::NO_MPI;
pub use values::TransportRule;
use values::{CirculateRule, LayoutRule, MaskRule, MeshRule, Window, WireRule, dtype, layout, length, seconds, window};

/// Ranks that are threads of this process.
const MAX_WORLD: usize = 1024;

/// A batch of documents and what attention over it is: `run`, `plan`, `mesh`.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Documents and attention")]
pub struct ProblemOptions {
    /// Lengths of the documents in tokens; N*M is N documents of M, and 0 an empty document.
    #[arg(long, value_name = "N,N*M,…", value_delimiter = ',')]
    pub documents: Option<Vec<String>>,
    /// A file with a length on each line, or N*M.
    #[arg(long, value_name = "FILE", conflicts_with = "documents")]
    pub lengths: Option<PathBuf>,
    /// q heads.
    #[arg(long, value_name = "N")]
    pub heads: Option<usize>,
    /// kv heads; default: as many as q heads.
    #[arg(long, value_name = "N")]
    pub kv_heads: Option<usize>,
    /// Head dim of q and k.
    #[arg(long, value_name = "N")]
    pub head_dim: Option<usize>,
    /// Head dim of v; default: that of q and k.
    #[arg(long, value_name = "N")]
    pub value_dim: Option<usize>,
    /// Element type. Inputs of another type are converted to it.
    #[arg(long, value_parser = dtype, value_name = "f32|f16|bf16|f64")]
    pub dtype: Option<Dtype>,
    /// Which keys of its document a query reads; causal if nothing is given.
    #[arg(long, value_enum)]
    pub mask: Option<MaskRule>,
    /// Causal, and no further back than N tokens, the query's own among them; or keys from LEFT positions before to
    /// RIGHT after the query, where - means no limit on that side.
    #[arg(long, value_name = "N|LEFT,RIGHT", value_parser = window, allow_hyphen_values = true)]
    pub window: Option<Window>,
    /// Caps scores: X · tanh(s / X).
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub softcap: Option<f64>,
    /// ALiBi with the usual slopes, 2^(−8(h+1)/heads).
    #[arg(long)]
    pub alibi: bool,
    /// A sink for each head, which is random where something runs.
    #[arg(long)]
    pub sinks: bool,
}

/// How a batch is spread over ranks: `run`, `plan`.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Plan")]
pub struct PlanOptions {
    /// Read q, k, v, do, cu_seqlens from this safetensors file, and references (o_causal, …) if it has them, in place
    /// of --documents. Without any of these: real activations of five documents.
    #[arg(long, value_name = "FILE",
        conflicts_with_all = ["documents", "lengths", "heads", "kv_heads", "head_dim", "value_dim"])]
    pub input: Option<PathBuf>,
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
}

/// How many ranks: all commands.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "Ranks")]
pub struct WorldOption {
    /// Number of ranks. Default: 8, or --ulysses times --ring if both are given; of `mesh` 64; of `machine` the cores;
    /// over MPI the number of processes.
    #[arg(long, visible_alias = "ranks", value_name = "N")]
    pub world: Option<usize>,
}

/// What ranks are: `run`, `ring`, `machine`.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Ranks")]
pub struct TransportOption {
    /// Ranks are threads of this process, or the processes that mpirun has started.
    #[arg(long, value_enum, default_value = "local")]
    pub transport: TransportRule,
}

/// How long a rank waits: `run`, `ring`.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Ranks")]
pub struct DeadlineOption {
    /// Timeout in seconds for a rank that waits for other ranks.
    #[arg(long, value_name = "S", default_value_t = 600.0, value_parser = seconds)]
    pub deadline: f64,
}

/// A file with the description of a machine.
pub fn read_machine(file: &std::path::Path) -> Result<Machine, String> {
    let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    Machine::parse(&text).map_err(|e| format!("{}: {e}", file.display()))
}
/// ALiBi's slopes (Press, Smith and Lewis, 2022) for a power of two of heads; the same formula for other numbers.
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    (1..=heads).map(|h| (-8.0 * h as f64 / heads as f64).exp2() as f32).collect()
}

impl ProblemOptions {
    /// Whether an option names shapes, so that no file does.
    pub fn has_shapes(&self) -> bool {
        self.documents.is_some()
            || self.lengths.is_some()
            || self.heads.is_some()
            || self.kv_heads.is_some()
            || self.head_dim.is_some()
            || self.value_dim.is_some()
    }

    /// The documents, if they are named.
    pub fn batch(&self) -> Result<Option<Batch>, String> {
        let lengths = match (&self.documents, &self.lengths) {
            (Some(list), _) => list.iter().map(|l| length(l)).collect::<Result<Vec<_>, _>>()?.concat(),
            (None, Some(file)) => {
                let text = std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
                let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
                let of = |(i, line)| length(line).map_err(|e| format!("{}, line {}: {e}", file.display(), i + 1));
                let lengths = lines.map(of).collect::<Result<Vec<_>, _>>()?.concat();
                if lengths.is_empty() {
                    return Err(format!("{}: no length, expected one on each line", file.display()));
                }
                lengths
            }
            (None, None) => return Ok(None),
        };
        Batch::from_lengths(&lengths).map(Some).map_err(|e| e.to_string())
    }

    /// The documents of `run` and `plan`, if shapes are named.
    pub fn batch_to_run(&self) -> Result<Batch, String> {
        let default = || Batch::from_lengths(&[297, 282, 187]).map_err(|e| e.to_string());
        self.batch()?.map_or_else(default, Ok)
    }

    /// The shapes of `run` and `plan`, if shapes are named.
    pub fn shapes_to_run(&self) -> [usize; 4] {
        self.shapes(8, 64)
    }

    /// Heads, kv heads, head dim and value dim, with these defaults of heads and head dim.
    pub fn shapes(&self, heads: usize, head_dim: usize) -> [usize; 4] {
        let (heads, head_dim) = (self.heads.unwrap_or(heads), self.head_dim.unwrap_or(head_dim));
        [heads, self.kv_heads.unwrap_or(heads), head_dim, self.value_dim.unwrap_or(head_dim)]
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
        if self.mask == Some(MaskRule::Full) && right == Some(0) {
            return Err(
                "--window reads no tokens after the query, and --mask full all; give LEFT,RIGHT, or leave out --mask"
                    .into(),
            );
        }
        Ok(Mask { left, right })
    }

    /// The problem for a batch of these shapes: heads, kv heads, head dim and value dim.
    pub fn problem(&self, batch: Batch, shapes: [usize; 4], dtype: Dtype) -> Result<Problem, String> {
        let [heads, kv_heads, head_dim, value_dim] = shapes;
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
}

impl WorldOption {
    /// As many as there are processes; another number is refused.
    #[cfg(feature = "mpi")]
    pub fn of_processes(self, processes: usize) -> Result<Self, String> {
        match self.world {
            Some(world) if world != processes => {
                Err(format!("--world is {world}, expected {processes}, the number of processes that mpirun started"))
            }
            _ => Ok(Self { world: Some(processes) }),
        }
    }

    /// The ranks as threads of this process, of which there are `default` if none is given.
    pub fn threads(self, default: usize) -> Result<usize, String> {
        match self.world.unwrap_or(default) {
            world if world > MAX_WORLD => Err(format!(
                "--world is {world}, expected at most {MAX_WORLD}: each rank is a thread here; start more ranks as processes \
                 (--transport mpi)"
            )),
            world => Ok(world),
        }
    }
}

impl PlanOptions {
    /// The number of ranks unless it is given.
    pub fn default_world(&self) -> usize {
        match (self.ulysses, self.ring) {
            (Some(u), Some(r)) => u.saturating_mul(r),
            _ => 8,
        }
    }

    fn mesh(&self, p: &Problem, world: usize, fixture: bool) -> cpattn::Result<Mesh> {
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

    /// The plan of a problem for a number of ranks; `fixture`: the problem is from the default file.
    pub fn plan(&self, p: &Problem, world: usize, fixture: bool) -> Result<Plan, String> {
        self.plan_for(p, world, fixture).map_err(|e| e.to_string())
    }

    fn plan_for(&self, p: &Problem, world: usize, fixture: bool) -> cpattn::Result<Plan> {
        let mesh = self.mesh(p, world, fixture)?;
        let layout = match self.layout {
            LayoutRule::Auto => Layout::auto(p, mesh.ring)?,
            LayoutRule::Of(layout) => layout,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_numbers_or_products() {
        assert_eq!(length("7"), Ok(vec![7]));
        assert_eq!(length(" 3 * 50 "), Ok(vec![50; 3]));
        for (documents, text) in [
            ("5,,6", "\"\", expected a number of tokens, or N*M"),
            ("2*x", "\"2*x\", expected a number of tokens, or N*M"),
            ("99999999999999*1", "\"99999999999999*1\" is 99999999999999 documents, expected at most 67108864"),
            ("3000000000", "lengths[0] is 3000000000, expected a total of at most"),
        ] {
            let documents = Some(documents.split(',').map(str::to_owned).collect());
            let error = ProblemOptions { documents, ..ProblemOptions::default() }.batch().unwrap_err();
            assert!(error.starts_with(text), "{error}");
        }
    }

    #[test]
    fn files_of_lengths_that_are_refused() {
        let file = std::env::temp_dir().join(format!("cpattn_lengths_{}", std::process::id()));
        for (lines, text) in [
            ("\n \n", ": no length, expected one on each line"),
            ("10\n\n5 7\n", ", line 3: \"5 7\", expected a number of tokens, or N*M"),
        ] {
            std::fs::write(&file, lines).unwrap();
            let options = ProblemOptions { lengths: Some(file.clone()), ..ProblemOptions::default() };
            assert_eq!(options.batch().unwrap_err(), format!("{}{text}", file.display()));
        }
        std::fs::remove_file(file).unwrap();
    }

    #[test]
    fn windows_are_one_number_or_two() {
        let mask = |text: &str| {
            let options = ProblemOptions { window: Some(window(text)?), ..ProblemOptions::default() };
            options.mask()
        };
        assert_eq!(mask("256"), Ok(Mask::sliding(256)));
        assert_eq!(mask("7,3"), Ok(Mask::window(7, 3)));
        assert_eq!(mask("-,0"), Ok(Mask::causal()));
        assert_eq!(mask("0").unwrap_err(), "expected a number of tokens above 0, or LEFT,RIGHT");
        let both = ProblemOptions {
            window: Some(window("256").unwrap()),
            mask: Some(MaskRule::Full),
            ..ProblemOptions::default()
        };
        assert!(both.mask().unwrap_err().contains("--mask full"));
        assert!(mask("7,x").unwrap_err().contains("neither a number of tokens nor -"));
    }
}
