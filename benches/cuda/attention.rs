// SPDX-License-Identifier: MIT OR Apache-2.0
//! Forward and backward over a pack of documents, one range each.

use crate::case::{Case, Kind};
use crate::check::{Error, Inputs, scale};
use crate::device::{Device, decode, normal, tensor, text};
use crate::{Prepared, Result};
use cpattn::Dtype;
use cpattn::call::{
    Attend, AttendBackward, Band, Block, Delta, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score, Transform,
};
use cpattn::kernel::cuda::{DeviceMemory, StreamKernels};

/// The number of rows, and of keys, that are compared.
const SAMPLES: usize = 12;

/// Buffers of one call. Buffers that a direction does not use are empty.
struct Set {
    q: DeviceMemory,
    k: DeviceMemory,
    v: DeviceMemory,
    d_o: DeviceMemory,
    o: DeviceMemory,
    running: DeviceMemory,
    running_lse: DeviceMemory,
    lse: DeviceMemory,
    delta: DeviceMemory,
    /// dq, dk, dv as they are summed, and in the element type.
    sums: [DeviceMemory; 3],
    gradients: [DeviceMemory; 3],
}

pub struct Heads {
    case: Case,
    host: Inputs,
    q_ranges: Vec<QRange>,
    k_ranges: Vec<Range>,
    pairs: Vec<Pair>,
    sets: Vec<Set>,
    /// `None` while a call borrows it together with other fields.
    kernels: Option<StreamKernels>,
}

/// Heads and dims of q, k and v.
fn shapes(case: &Case) -> [(usize, usize); 3] {
    [(case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.value_dim)]
}

fn allocate(device: &Device, case: &Case) -> Result<Set> {
    let tokens = case.tokens();
    let buffer =
        |needed: bool, width: usize, size: usize| device.allocate(if needed { tokens * width * size } else { 0 });
    let backward = case.kind == Kind::Backward;
    let finishes = matches!(case.kind, Kind::Forward | Kind::Backward);
    let out = case.heads * case.value_dim;
    let widths = shapes(case).map(|(heads, dim)| heads * dim);
    let three = |size: usize| -> Result<[DeviceMemory; 3]> {
        Ok([buffer(backward, widths[0], size)?, buffer(backward, widths[1], size)?, buffer(backward, widths[2], size)?])
    };
    Ok(Set {
        q: buffer(true, widths[0], 2)?,
        k: buffer(true, widths[1], 2)?,
        v: buffer(true, widths[2], 2)?,
        d_o: buffer(backward, out, 2)?,
        o: buffer(finishes, out, 2)?,
        running: buffer(!finishes, out, 4)?,
        running_lse: buffer(!finishes, 2 * case.heads, 4)?,
        lse: buffer(finishes, case.heads, 4)?,
        delta: buffer(backward, case.heads, 4)?,
        sums: three(4)?,
        gradients: three(2)?,
    })
}

impl Heads {
    pub fn new(device: &Device, case: &Case) -> Result<Self> {
        let tokens = case.tokens();
        let random = |(heads, dim): (usize, usize), seed| normal(case.dtype, tokens * heads * dim, seed);
        let [q, k, v] = shapes(case);
        let backward = case.kind == Kind::Backward;
        let d_o = if backward { random((case.heads, case.value_dim), 4) } else { Vec::new() };
        let host = Inputs { q: random(q, 1), k: random(k, 2), v: random(v, 3), d_o };
        let bytes = 2 * (2 * host.q.len() + host.k.len() + host.v.len());
        let mut sets: Vec<Set> = Vec::new();
        for _ in 0..device.sets(bytes) {
            let set = allocate(device, case)?;
            match sets.first() {
                None => {
                    let all = [(&set.q, &host.q), (&set.k, &host.k), (&set.v, &host.v), (&set.d_o, &host.d_o)];
                    for (to, from) in all.into_iter().filter(|(_, from)| !from.is_empty()) {
                        text(to.upload(bytemuck::cast_slice(from)))?;
                    }
                }
                Some(s) => {
                    for (to, from) in [(&set.q, &s.q), (&set.k, &s.k), (&set.v, &s.v)] {
                        device.copy(to, from)?;
                    }
                    if backward {
                        device.copy(&set.d_o, &s.d_o)?;
                    }
                }
            }
            sets.push(set);
        }
        let mode = match case.kind {
            Kind::First => Mode::First,
            Kind::Merge => Mode::Merge,
            _ => Mode::Only,
        };
        let (mut q_ranges, mut k_ranges, mut row) = (Vec::new(), Vec::new(), 0);
        for (i, &len) in case.lengths.iter().enumerate() {
            let range = Range::plain(row, len as u32, 0, i as u32);
            q_ranges.push(QRange { range, document: [0; 2], keys_begin: i as u32, keys_end: i as u32 + 1, mode });
            k_ranges.push(range);
            row += len as i64;
        }
        let pairs: Vec<Pair> = (0..case.lengths.len() as u32).map(Pair::of).collect();
        text(device.cuda.prepare(case.dtype, case.head_dim as u32, case.value_dim as u32))?;
        let mut heads = Self { case: case.clone(), host, q_ranges, k_ranges, pairs, sets, kernels: None };
        let mut kernels = device.kernels()?;
        // For many calls, so that the host can run ahead without waiting.
        text(kernels.reserve_metadata(heads.metadata_bytes(&kernels)? * 16, 64))?;
        heads.kernels = Some(kernels);
        // The backward needs the results of a forward, and a merge needs running results.
        for set in 0..heads.sets.len() {
            match case.kind {
                Kind::Backward => heads.forward(device, set)?,
                Kind::Merge => heads.as_mode(Mode::First, |heads| heads.forward(device, set))?,
                _ => {}
            }
        }
        device.synchronize()?;
        Ok(heads)
    }

    fn score(&self) -> Score {
        let window_right = if self.case.causal { 0 } else { i64::MAX };
        Score { scale: scale(&self.case), softcap: 0.0, window_left: i64::MAX, window_right }
    }

    fn map(&self) -> HeadMap {
        HeadMap { q_offset: 0, kv_offset: 0, group: (self.case.heads / self.case.kv_heads) as u32 }
    }

    fn ranges(&self) -> Ranges<'_> {
        Ranges { q: &self.q_ranges, k: &self.k_ranges, pairs: &self.pairs, bands: &[Band::WHOLE] }
    }

    /// q, k, v and o of a set.
    fn tensors(&self, set: &Set) -> [RawTensor; 4] {
        let [q, k, v] = shapes(&self.case);
        let new = |m: &DeviceMemory, (heads, dim)| match m.bytes() {
            0 => RawTensor::NONE,
            _ => tensor(m, self.case.dtype, heads, dim),
        };
        [new(&set.q, q), new(&set.k, k), new(&set.v, v), new(&set.o, (self.case.heads, self.case.value_dim))]
    }

    fn attend(&self, set: &Set) -> Attend<'_> {
        let [q, k, v, o] = self.tensors(set);
        let optional = |memory: &DeviceMemory, dim| match memory.bytes() {
            0 => RawTensor::NONE,
            _ => tensor(memory, Dtype::F32, self.case.heads, dim),
        };
        Attend {
            running: optional(&set.running, self.case.value_dim),
            running_lse: optional(&set.running_lse, 2),
            lse: optional(&set.lse, 1),
            ..Attend::new([q, k, v, o], self.map(), self.score(), self.ranges())
        }
    }

    fn attend_backward(&self, set: &Set) -> AttendBackward<'_> {
        let [q, k, v, o] = self.tensors(set);
        let shapes = shapes(&self.case);
        let sum = |i: usize| tensor(&set.sums[i], Dtype::F32, shapes[i].0, shapes[i].1);
        AttendBackward {
            lse: tensor(&set.lse, Dtype::F32, self.case.heads, 1),
            delta: tensor(&set.delta, Dtype::F32, self.case.heads, 1),
            dq: sum(0),
            dk: sum(1),
            dv: sum(2),
            ..AttendBackward::new(
                [q, k, v, RawTensor { ptr: set.d_o.ptr(), ..o }],
                self.map(),
                self.score(),
                self.ranges(),
            )
        }
    }

    /// The casts after the backward: a framework returns gradients in the element type.
    fn casts(&self, set: &Set) -> ([Block; 3], [RawTensor; 3]) {
        let shapes = shapes(&self.case);
        let of = |m: &DeviceMemory, dtype, i: usize| tensor(m, dtype, shapes[i].0, shapes[i].1);
        let block = |i: usize| Block {
            dst: of(&set.gradients[i], self.case.dtype, i),
            sources_begin: i as u32,
            sources_end: i as u32 + 1,
        };
        ([0, 1, 2].map(block), [0, 1, 2].map(|i| of(&set.sums[i], Dtype::F32, i)))
    }

    /// Bytes of the lists of all calls of one launch.
    fn metadata_bytes(&self, kernels: &StreamKernels) -> Result<usize> {
        let set = &self.sets[0];
        let mut bytes = text(kernels.attend_metadata(&self.attend(set)))?;
        if self.case.kind == Kind::Backward {
            let (blocks, sources) = self.casts(set);
            bytes += text(kernels.attend_backward_metadata(&self.attend_backward(set)))?;
            bytes += kernels.transform_metadata(&Transform { blocks: &blocks, sources: &sources });
        }
        Ok(bytes)
    }

    /// Calls `f` with another output mode.
    fn as_mode(&mut self, mode: Mode, f: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let before = self.q_ranges.clone();
        self.q_ranges.iter_mut().for_each(|q| q.mode = mode);
        let result = f(self);
        self.q_ranges = before;
        result
    }

    fn with_kernels(&mut self, f: impl FnOnce(&Self, &mut StreamKernels) -> Result<()>) -> Result<()> {
        let mut kernels = self.kernels.take().ok_or("no room for lists")?;
        let result = f(self, &mut kernels);
        self.kernels = Some(kernels);
        result
    }

    fn forward(&mut self, device: &Device, set: usize) -> Result<()> {
        self.with_kernels(|s, kernels| {
            let call = s.attend(&s.sets[set]);
            // SAFETY: the buffers live as long as `self`, which is dropped after the stream was waited for.
            text(unsafe { kernels.attend(&call, device.stream) })
        })
    }

    fn backward(&mut self, device: &Device, set: usize) -> Result<()> {
        self.with_kernels(|s, kernels| {
            let (call, [_, _, _, o]) = (s.attend_backward(&s.sets[set]), s.tensors(&s.sets[set]));
            let (blocks, sources) = s.casts(&s.sets[set]);
            let delta = Delta::new([o, call.d_o, call.delta]);
            let casts = Transform { blocks: &blocks, sources: &sources };
            // SAFETY: as in `forward`.
            unsafe {
                text(kernels.delta(&delta, device.stream))?;
                text(kernels.attend_backward(&call, device.stream))?;
                text(kernels.transform(&casts, device.stream))
            }
        })
    }

    /// The rows, and the keys, to compare: both ends of the first and of the longest document, and random ones.
    fn samples(&self) -> Vec<(usize, usize)> {
        let case = &self.case;
        let longest = (0..case.lengths.len()).max_by_key(|&i| case.lengths[i]).unwrap_or(0);
        let start: usize = case.lengths[..longest].iter().sum();
        let mut tokens = vec![0, case.tokens() - 1, start, start + case.lengths[longest] - 1];
        let mut random = fastrand::Rng::with_seed(5);
        while tokens.len() < SAMPLES {
            tokens.push(random.usize(..case.tokens()));
        }
        tokens.into_iter().map(|token| (token, random.usize(..case.heads))).collect()
    }
}

impl Prepared for Heads {
    fn launch(&mut self, device: &Device, set: usize) -> Result<()> {
        if self.case.kind == Kind::Backward { self.backward(device, set) } else { self.forward(device, set) }
    }

    fn sets(&self) -> usize {
        self.sets.len()
    }

    fn check(&mut self, device: &Device) -> Result<f64> {
        let case = self.case.clone();
        let set = &self.sets[0];
        let outputs = [&set.o, &set.running, &set.running_lse, &set.lse, &set.delta];
        for memory in outputs.into_iter().chain(&set.sums).chain(&set.gradients) {
            if memory.bytes() > 0 {
                device.poison(memory)?;
            }
        }
        match case.kind {
            Kind::Backward => self.forward(device, 0)?,
            // A merge of the same keys: o is unchanged, every weight doubles.
            Kind::Merge => self.as_mode(Mode::First, |s| s.forward(device, 0))?,
            _ => {}
        }
        self.launch(device, 0)?;
        let set = &self.sets[0];
        let floats = |memory: &DeviceMemory| -> Result<Vec<f32>> {
            Ok(device.download(memory)?.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        };
        let elements = |memory: &DeviceMemory| -> Result<Vec<f64>> {
            let bytes = device.download(memory)?;
            Ok(bytes.chunks_exact(2).map(|b| decode(case.dtype, u16::from_le_bytes([b[0], b[1]]))).collect())
        };
        let o = match set.o.bytes() {
            0 => floats(&set.running)?.into_iter().map(f64::from).collect(),
            _ => elements(&set.o)?,
        };
        let lse = match set.lse.bytes() {
            0 => floats(&set.running_lse)?.chunks(2).map(|words| words[0]).collect(),
            _ => floats(&set.lse)?,
        };
        let delta = floats(&set.delta)?;
        let [dq, dk, dv] = [elements(&set.gradients[0])?, elements(&set.gradients[1])?, elements(&set.gradients[2])?];
        let doubled = if case.kind == Kind::Merge { std::f64::consts::LN_2 } else { 0.0 };
        let roundoff = case.dtype.unit_roundoff();
        let mut errors = ["o", "lse", "dq", "dk", "dv"].map(|name| {
            let limit = [("o", 2.0 * roundoff), ("lse", 1e-5)];
            Error::new(name, limit.iter().find(|l| l.0 == name).map_or(6.0 * roundoff, |l| l.1))
        });
        let slice = |x: &[f64], heads: usize, dim: usize, token: usize, head: usize| {
            x[(token * heads + head) * dim..][..dim].to_vec()
        };
        for (token, head) in self.samples() {
            let row = self.host.row(&case, token, head);
            errors[0].add(slice(&o, case.heads, case.value_dim, token, head), &row.o);
            errors[1].add([f64::from(lse[token * case.heads + head])], &[row.lse + doubled]);
            if case.kind == Kind::Backward {
                let kv = head / (case.heads / case.kv_heads);
                let key = self.host.key(&case, token, kv, &lse, &delta);
                errors[2].add(slice(&dq, case.heads, case.head_dim, token, head), &row.dq);
                errors[3].add(slice(&dk, case.kv_heads, case.head_dim, token, kv), &key.0);
                errors[4].add(slice(&dv, case.kv_heads, case.value_dim, token, kv), &key.1);
            }
        }
        let mut worst = 0f64;
        for error in &errors {
            let part = error.part();
            if part.is_nan() || part > 1.0 {
                return Err(format!("{} is wrong: {part:.2} times the error that is allowed", error.name));
            }
            worst = worst.max(part);
        }
        Ok(worst)
    }
}
