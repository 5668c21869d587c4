// SPDX-License-Identifier: MIT OR Apache-2.0
//! A case as one line of words, read by this program and by its Python peers:
//!
//! ```text
//! NAME kind=forward dtype=bf16 heads=16/16 dims=128/128 mask=causal lengths=8192*2 peers=cudnn,flash
//! ```
//!
//! `heads` are q heads and kv heads, `dims` head_dim and value_dim, `lengths` the documents of the pack (`8192*2` is
//! two of 8192). `first` and `merge` are forward with that output mode. `pack` and `unpack` move heads between
//! `[tokens, heads, dim]` and `parts` buffers of `[tokens, heads / parts, dim]`.

use super::Result;
use cpattn::Dtype;
use std::collections::HashMap;
use std::str::FromStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Forward,
    First,
    Merge,
    Backward,
    Pack,
    Unpack,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub kind: Kind,
    pub dtype: Dtype,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub causal: bool,
    pub lengths: Vec<usize>,
    pub parts: usize,
}

fn number<T: FromStr>(word: &str) -> Result<T> {
    word.parse().map_err(|_| format!("{word:?} is not a number"))
}

fn pair(word: &str) -> Result<(usize, usize)> {
    let (a, b) = word.split_once('/').ok_or(format!("{word:?} is not a/b"))?;
    Ok((number(a)?, number(b)?))
}

impl Case {
    pub fn parse(line: &str) -> Result<Self> {
        let mut words = line.split_whitespace();
        let name = words.next().ok_or("an empty line")?.to_owned();
        let values: HashMap<&str, &str> = words.filter_map(|word| word.split_once('=')).collect();
        let get = |key: &str| values.get(key).copied().ok_or(format!("{name} has no {key}="));
        let kind = match get("kind")? {
            "forward" => Kind::Forward,
            "first" => Kind::First,
            "merge" => Kind::Merge,
            "backward" => Kind::Backward,
            "pack" => Kind::Pack,
            "unpack" => Kind::Unpack,
            other => return Err(format!("kind={other}")),
        };
        let dtype = match get("dtype")? {
            "f16" => Dtype::F16,
            "bf16" => Dtype::Bf16,
            other => return Err(format!("dtype={other}")),
        };
        let causal = match get("mask")? {
            "causal" => true,
            "full" => false,
            other => return Err(format!("mask={other}")),
        };
        let mut lengths = Vec::new();
        for word in get("lengths")?.split(',') {
            let (len, times) = word.split_once('*').unwrap_or((word, "1"));
            let len: usize = number(len)?;
            lengths.extend(std::iter::repeat_n(len, number::<usize>(times)?));
        }
        let ((heads, kv_heads), (head_dim, value_dim)) = (pair(get("heads")?)?, pair(get("dims")?)?);
        let parts = values.get("parts").map_or(Ok(1), |p| number(p))?;
        let sizes = [heads, kv_heads, head_dim, value_dim, parts];
        if sizes.contains(&0) || lengths.contains(&0) || heads % kv_heads != 0 || heads % parts != 0 {
            return Err(format!("{line}: sizes of 0, or heads that do not divide"));
        }
        Ok(Self { name, kind, dtype, heads, kv_heads, head_dim, value_dim, causal, lengths, parts })
    }

    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// The document of a token: its first token and its length.
    pub fn document_of(&self, token: usize) -> (usize, usize) {
        let mut first = 0;
        for &len in &self.lengths {
            if token < first + len {
                return (first, len);
            }
            first += len;
        }
        panic!("token {token} of {}", self.tokens());
    }

    /// The value in a row of results. Moves are counted as forward.
    pub fn direction(&self) -> &'static str {
        if self.kind == Kind::Backward { "backward" } else { "forward" }
    }

    /// Multiplications and additions of the matrix products, 0 for moves. For documents of one length this is the usual
    /// formula, `4 S² d H B`, halved if causal; for packs of several lengths the pairs that the mask allows are
    /// counted.
    pub fn flops(&self) -> f64 {
        let equal = self.lengths.iter().all(|&len| len == self.lengths[0]);
        let area = |len: usize| {
            let len = len as f64;
            match (self.causal, equal) {
                (false, _) => len * len,
                (true, true) => len * len / 2.0,
                (true, false) => len * (len + 1.0) / 2.0,
            }
        };
        let pairs: f64 = self.lengths.iter().map(|&len| area(len)).sum();
        let forward = 2.0 * pairs * (self.head_dim + self.value_dim) as f64 * self.heads as f64;
        match self.kind {
            Kind::Pack | Kind::Unpack => 0.0,
            Kind::Backward => 2.5 * forward,
            _ => forward,
        }
    }

    /// Bytes that a move reads and writes, 0 for attention.
    pub fn bytes_moved(&self) -> f64 {
        match self.kind {
            Kind::Pack | Kind::Unpack => 2.0 * (self.tokens() * self.heads * self.head_dim * self.dtype.size()) as f64,
            _ => 0.0,
        }
    }
}
