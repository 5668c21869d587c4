// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where inputs come from: a safetensors file, or a seed. The default file is in the program.
//!
//! Values are held in f64, which every element type converts to without loss; references are used only while the
//! conversion to the type of the run loses nothing either.

use std::{fmt::Display, path::Path};

use cpattn::{Batch, Dtype, Element, Mask, Problem, Side};

use crate::safetensors::{self, Tensor};

use super::team::{Inputs, Results};

/// One batch with its shapes.
pub struct Batched {
    pub batch: Batch,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    /// The type the values were stored in.
    pub dtype: Dtype,
    pub values: Inputs<f64>,
    /// References by the name of their mask.
    pub references: Vec<(&'static str, Results<f64>)>,
}

/// The default file: the shapes and activations of a layer of all-MiniLM-L6-v2, five documents.
const FIXTURE: &[u8] = include_bytes!("../../../tests/data/minilm_263.safetensors");
/// Its name.
const FIXTURE_NAME: &str = "tests/data/minilm_263.safetensors";

/// Values that are drawn at most: 4 GiB while they are f64.
const MAX_VALUES: u128 = 1 << 29;

/// Numbers that look random; a seed gives the same ones everywhere.
pub struct Random(fastrand::Rng);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// Standard normal, by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        let (u, v) = (1.0 - self.0.f64(), self.0.f64());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }

    /// Sinks of both signs, some larger than most scores: a forgotten one shows.
    pub fn sinks(&mut self, heads: usize) -> Vec<f32> {
        (0..heads).map(|_| (3.0 * self.normal()) as f32).collect()
    }
}

impl Batched {
    /// Standard normal q, k, v and do.
    pub fn random(batch: Batch, shapes: [usize; 4], seed: u64) -> Result<Self, String> {
        let [heads, kv_heads, head_dim, value_dim] = shapes;
        let n = batch.tokens(Side::Q);
        // Shapes are checked before any memory is asked for.
        Problem::new(batch.clone(), heads, kv_heads, head_dim, Dtype::F32)
            .with_value_dim(value_dim)
            .check()
            .map_err(|e| e.to_string())?;
        let values = (n as u128) * (heads + kv_heads) as u128 * (head_dim + value_dim) as u128;
        if values > MAX_VALUES {
            return Err(format!("{n} tokens of these heads are {values} random values, expected at most {MAX_VALUES}"));
        }
        let mut random = Random::new(seed);
        let mut fill = |heads: usize, dim: usize| (0..n * heads * dim).map(|_| random.normal()).collect();
        let values = Inputs {
            q: fill(heads, head_dim),
            k: fill(kv_heads, head_dim),
            v: fill(kv_heads, value_dim),
            d_o: fill(heads, value_dim),
            sinks: None,
        };
        Ok(Self { batch, heads, kv_heads, head_dim, value_dim, dtype: Dtype::F32, values, references: Vec::new() })
    }

    /// Heads, kv heads, head dim and value dim.
    pub fn shapes(&self) -> [usize; 4] {
        [self.heads, self.kv_heads, self.head_dim, self.value_dim]
    }

    /// A file, or the default one, and its name.
    pub fn read(path: Option<&Path>) -> Result<(Self, String), String> {
        let Some(path) = path else {
            return Ok((Self::parse(Path::new(FIXTURE_NAME), FIXTURE)?, FIXTURE_NAME.to_owned()));
        };
        let bytes = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok((Self::parse(path, &bytes)?, path.display().to_string()))
    }

    /// `q`, `k`, `v`, `do` `[tokens, heads, dim]`, `cu_seqlens` `[documents + 1]`, and any of `o_M`, `lse_M`, `dq_M`,
    /// `dk_M`, `dv_M` with M `causal` or `full`, which count when all five are there.
    fn parse(path: &Path, bytes: &[u8]) -> Result<Self, String> {
        let tensors =
            safetensors::read(bytes).map_err(|e| format!("{}: not a safetensors file: {e}", path.display()))?;
        let file = File { path, tensors };
        let (q, [tokens, heads, head_dim]) = file.tensor("q")?;
        let (k, [k_tokens, kv_heads, k_dim]) = file.tensor("k")?;
        file.shape("k", [k_tokens, k_dim], "[tokens, head_dim] of q", [tokens, head_dim])?;
        let (v, [v_tokens, v_heads, value_dim]) = file.tensor("v")?;
        file.shape("v", [v_tokens, v_heads], "[tokens, kv_heads] of k", [tokens, kv_heads])?;
        let (d_o, shape) = file.tensor("do")?;
        file.shape("do", shape, "[tokens, heads, value_dim]", [tokens, heads, value_dim])?;
        let batch = file.batch(tokens)?;
        let dtype = file.dtype("q")?;
        let mut references = Vec::new();
        for mask in ["causal", "full"] {
            let name = |tensor: &str| format!("{tensor}_{mask}");
            if !["o", "lse", "dq", "dk", "dv"].iter().all(|t| file.tensors.iter().any(|tensor| tensor.name == name(t)))
            {
                continue;
            }
            let read = |tensor: &str, heads: usize, dim: usize| -> Result<Vec<f64>, String> {
                let (values, shape) = file.tensor(&name(tensor))?;
                file.shape(&name(tensor), shape, "shape", [tokens, heads, dim])?;
                Ok(values)
            };
            let (lse, shape) = file.tensor(&name("lse"))?;
            file.shape(&name("lse"), shape, "[tokens, heads]", [tokens, heads])?;
            let reference = Results {
                o: read("o", heads, value_dim)?,
                lse,
                dq: read("dq", heads, head_dim)?,
                dk: read("dk", kv_heads, head_dim)?,
                dv: read("dv", kv_heads, value_dim)?,
                dsinks: Vec::new(),
            };
            references.push((mask, reference));
        }
        let values = Inputs { q, k, v, d_o, sinks: None };
        Ok(Self { batch, heads, kv_heads, head_dim, value_dim, dtype, values, references })
    }

    /// The inputs in the type of the run, and whether nothing was lost.
    pub fn convert<T: Element>(&self, sinks: Option<Vec<f32>>) -> (Inputs<T>, bool) {
        let mut exact = true;
        let mut convert = |values: &[f64]| {
            let narrow = |&x: &f64| {
                let y = T::from_f64(x);
                exact &= y.to_f64() == x;
                y
            };
            values.iter().map(narrow).collect::<Vec<T>>()
        };
        let v = &self.values;
        let inputs = Inputs { q: convert(&v.q), k: convert(&v.k), v: convert(&v.v), d_o: convert(&v.d_o), sinks };
        (inputs, exact)
    }

    /// The stored references that hold for a problem run on `exact` inputs: its mask is causal or full, it has no
    /// other options, and it does not ask for more than the f32 they are stored in.
    pub fn reference_for(&self, p: &Problem, exact: bool) -> Option<(&'static str, &Results<f64>)> {
        let plain = p.score().softcap == 0.0 && p.alibi_slopes().is_none() && !p.sinks();
        if !exact || !plain || p.dtype() == Dtype::F64 {
            return None;
        }
        let mask = match p.mask() {
            m if m == Mask::causal() => "causal",
            m if m == Mask::full() => "full",
            _ => return None,
        };
        self.references.iter().find(|(name, _)| *name == mask).map(|(name, r)| (*name, r))
    }
}

struct File<'a> {
    path: &'a Path,
    tensors: Vec<Tensor<'a>>,
}

impl File<'_> {
    fn wrong(&self, name: &str, what: impl Display) -> String {
        format!("{}: tensor {name}: {what}", self.path.display())
    }

    fn raw(&self, name: &str) -> Result<&Tensor<'_>, String> {
        self.tensors.iter().find(|tensor| tensor.name == name).ok_or_else(|| {
            let mut names: Vec<_> = self.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
            names.sort_unstable();
            self.wrong(name, format!("not there; the file has {}", names.join(", ")))
        })
    }

    fn dtype(&self, name: &str) -> Result<Dtype, String> {
        match self.raw(name)?.dtype.as_str() {
            "F16" => Ok(Dtype::F16),
            "BF16" => Ok(Dtype::Bf16),
            "F32" => Ok(Dtype::F32),
            "F64" => Ok(Dtype::F64),
            other => Err(self.wrong(name, format!("stored as {other}, expected F16, BF16, F32 or F64"))),
        }
    }

    /// Values of any float type, and the shape, which must have `N` dimensions.
    fn tensor<const N: usize>(&self, name: &str) -> Result<(Vec<f64>, [usize; N]), String> {
        let view = self.raw(name)?;
        let shape: [usize; N] = view
            .shape
            .as_slice()
            .try_into()
            .map_err(|_| self.wrong(name, format!("has shape {:?}, expected {N} dimensions", view.shape)))?;
        fn widen<T: Element>(bytes: &[u8]) -> Vec<f64> {
            bytes.chunks_exact(size_of::<T>()).map(|b| bytemuck::pod_read_unaligned::<T>(b).to_f64()).collect()
        }
        let values = match self.dtype(name)? {
            Dtype::F16 => widen::<half::f16>(view.data),
            Dtype::Bf16 => widen::<half::bf16>(view.data),
            Dtype::F32 => widen::<f32>(view.data),
            Dtype::F64 => widen::<f64>(view.data),
        };
        Ok((values, shape))
    }

    fn shape<const N: usize>(
        &self,
        name: &str,
        found: [usize; N],
        what: &str,
        expected: [usize; N],
    ) -> Result<(), String> {
        if found == expected {
            return Ok(());
        }
        Err(self.wrong(name, format!("has {what} {found:?}, expected {expected:?}")))
    }

    fn batch(&self, tokens: usize) -> Result<Batch, String> {
        let name = "cu_seqlens";
        let view = self.raw(name)?;
        let cu: Vec<i32> = match view.dtype.as_str() {
            "I32" => view.data.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect(),
            "I64" => view
                .data
                .chunks_exact(8)
                .map(|b| i32::try_from(bytemuck::pod_read_unaligned::<i64>(b)))
                .collect::<Result<_, _>>()
                .map_err(|_| self.wrong(name, "has an entry outside of i32"))?,
            other => return Err(self.wrong(name, format!("stored as {other}, expected I32 or I64"))),
        };
        if view.shape.len() != 1 {
            return Err(self.wrong(name, format!("has shape {:?}, expected [documents + 1]", view.shape)));
        }
        let batch = Batch::new(&cu).map_err(|e| self.wrong(name, e))?;
        if batch.tokens(Side::Q) != tokens {
            return Err(
                self.wrong(name, format!("ends at {}, expected the {tokens} tokens of q", batch.tokens(Side::Q)))
            );
        }
        Ok(batch)
    }
}
