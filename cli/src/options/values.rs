// SPDX-License-Identifier: MIT OR Apache-2.0
//! The values of options, and how they are read from the command line.

use clap::ValueEnum;
use cpattn::{Dtype, Layout};

/// Most documents of one N*M, so that a typing error does not ask for all memory.
const MOST_DOCUMENTS: usize = 1 << 26;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransportRule {
    /// Threads of this process.
    Local,
    /// Processes, over MPI; needs a build with the feature mpi.
    Mpi,
}

/// Why a build without MPI has no such ranks.
#[cfg(not(feature = "mpi"))]
pub const NO_MPI: &str = "--transport is mpi, which this build does not have: build with --features mpi";

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
    Of(Layout),
}

#[derive(Clone, Copy, Debug)]
pub struct Window {
    pub left: Option<u32>,
    pub right: Option<u32>,
}

pub fn layout(text: &str) -> Result<LayoutRule, String> {
    let (name, number) = text.split_once(':').map_or((text, None), |(name, n)| (name, Some(n)));
    let count = |default: u32| match number {
        None => Ok(default),
        Some(n) => n.parse().map_err(|_| format!("{n:?} is not a number of tokens or chunks")),
    };
    let layout = match name {
        "striped" => Layout::Striped { stripe: count(1)? },
        "balanced" => Layout::Balanced { chunks: count(4)? },
        _ if number.is_some() => return Err("only striped and balanced take a number".into()),
        "auto" => return Ok(LayoutRule::Auto),
        "contiguous" => Layout::Contiguous,
        "zigzag" => Layout::Zigzag,
        "zigzag-pack" => Layout::ZigzagPack,
        _ => return Err("expected auto, contiguous, zigzag, zigzag-pack, striped[:TOKENS] or balanced[:CHUNKS]".into()),
    };
    Ok(LayoutRule::Of(layout))
}

pub fn seconds(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|s| (0.001..=1e6).contains(s)).ok_or_else(|| "expected 0.001 to 1000000 seconds".into())
}

pub fn window(text: &str) -> Result<Window, String> {
    let side = |s: &str| match s.trim() {
        "-" => Ok(None),
        n => n.parse().map(Some).map_err(|_| format!("{n:?} is neither a number of tokens nor -")),
    };
    if let Some((left, right)) = text.split_once(',') {
        return Ok(Window { left: side(left)?, right: side(right)? });
    }
    // The tokens of a sliding window: the query's own is one of them.
    let tokens = text.trim().parse().ok().filter(|&n: &u32| n > 0);
    Ok(Window { left: Some(tokens.ok_or("expected a number of tokens above 0, or LEFT,RIGHT")? - 1), right: Some(0) })
}

pub fn length(text: &str) -> Result<Vec<usize>, String> {
    let number =
        |n: &str| n.trim().parse::<usize>().map_err(|_| format!("{text:?}, expected a number of tokens, or N*M"));
    let (times, tokens) = text.split_once('*').map_or(Ok((1, text)), |(n, m)| number(n).map(|n| (n, m)))?;
    if times > MOST_DOCUMENTS {
        return Err(format!("{text:?} is {times} documents, expected at most {MOST_DOCUMENTS}"));
    }
    Ok(vec![number(tokens)?; times])
}

pub fn dtype(text: &str) -> Result<Dtype, String> {
    [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F64]
        .into_iter()
        .find(|d| d.name() == text)
        .ok_or_else(|| "expected f32, f16, bf16 or f64".into())
}
