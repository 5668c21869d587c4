// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank's tensors in device memory, in several forms of strides and addresses, among bytes that no kernel may
//! touch.

use cpattn::{
    Dtype, Plan, Side,
    call::RawTensor,
    kernel::cuda::{Cuda, DeviceMemory},
    runtime::Bindings,
    schedule::{Direction, TensorId},
};
use half::bf16;

/// How a tensor lies in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Token after token.
    Compact,
    /// With room behind every token, rows at multiples of 16 bytes.
    Padded,
    /// Head after head, as lse is elsewhere.
    HeadMajor,
    /// Token after token, at an address that is a multiple of no more than an element.
    Odd,
}

/// What lies between.
const GAP: u8 = 0xff;
const MARGIN: usize = 4096;

/// A tensor and the memory around it.
pub struct Held {
    memory: DeviceMemory,
    pub raw: RawTensor,
    begin: usize,
}

impl Held {
    pub fn new(cuda: &Cuda, dtype: Dtype, shape: [usize; 3], form: Form) -> Self {
        let [tokens, heads, dim] = shape;
        let size = dtype.size();
        let (token, head) = match form {
            Form::Compact | Form::Odd => (heads * dim, dim),
            Form::Padded => (heads * (dim + 16) + 8, dim + 16),
            Form::HeadMajor => (dim, (tokens + 3) * dim),
        };
        let begin = MARGIN + if form == Form::Odd { size } else { 0 };
        let span = tokens * heads * (dim + 16) * size + (heads * 4 + tokens * 8) * dim * size;
        let memory = cuda.allocate(begin + span + MARGIN).unwrap();
        let raw = RawTensor {
            token_stride: token as i64,
            head_stride: head as i64,
            ..RawTensor::compact(memory.ptr().wrapping_add(begin), dtype, tokens as u64, heads as u32, dim as u32)
        };
        let held = Self { memory, raw, begin };
        held.memory.upload(&vec![GAP; held.memory.bytes()]).unwrap();
        held
    }

    /// First byte of each row, and bytes of a row.
    fn rows(&self) -> (Vec<usize>, usize) {
        let (t, size) = (&self.raw, self.raw.dtype.size());
        let at = |token, head| {
            self.begin + (token as i64 * t.token_stride + i64::from(head) * t.head_stride) as usize * size
        };
        let rows = (0..t.tokens).flat_map(|token| (0..t.heads).map(move |head| at(token, head))).collect();
        (rows, t.dim as usize * size)
    }

    /// Writes elements, token after token.
    pub fn write(&self, compact: &[u8]) {
        let mut all = vec![GAP; self.memory.bytes()];
        let (rows, bytes) = self.rows();
        assert_eq!(rows.len() * bytes, compact.len());
        for (at, row) in rows.into_iter().zip(compact.chunks(bytes)) {
            all[at..at + bytes].copy_from_slice(row);
        }
        self.memory.upload(&all).unwrap();
    }

    /// Its elements, token after token. What lies between must be as it was.
    pub fn read(&self, what: &str) -> Vec<u8> {
        let mut all = vec![0; self.memory.bytes()];
        self.memory.download(&mut all).unwrap();
        let (rows, bytes) = self.rows();
        let mut out = Vec::with_capacity(rows.len() * bytes);
        for at in rows {
            out.extend_from_slice(&all[at..at + bytes]);
            all[at..at + bytes].fill(GAP);
        }
        assert!(all.iter().all(|&b| b == GAP), "{what}: something was written beside it");
        out
    }
}

pub const INPUTS: [TensorId; 5] = [TensorId::Q, TensorId::K, TensorId::V, TensorId::DO, TensorId::Sinks];
pub const OUTPUTS: [TensorId; 6] =
    [TensorId::O, TensorId::Lse, TensorId::Dq, TensorId::Dk, TensorId::Dv, TensorId::Dsinks];

/// Shape of a rank's tensor.
fn shape(plan: &Plan, rank: usize, tensor: TensorId) -> (Dtype, [usize; 3]) {
    let p = plan.problem();
    let (q, k) = (plan.local_tokens(Side::Q, rank).len(), plan.local_tokens(Side::K, rank).len());
    match tensor {
        TensorId::Q | TensorId::Dq => (p.dtype(), [q, p.heads(), p.head_dim()]),
        TensorId::K | TensorId::Dk => (p.dtype(), [k, p.kv_heads(), p.head_dim()]),
        TensorId::V | TensorId::Dv => (p.dtype(), [k, p.kv_heads(), p.value_dim()]),
        TensorId::O | TensorId::DO => (p.dtype(), [q, p.heads(), p.value_dim()]),
        TensorId::Lse | TensorId::DLse => (Dtype::F32, [q, p.heads(), 1]),
        TensorId::Sinks | TensorId::Dsinks => (Dtype::F32, [1, p.heads(), p.sinks_per_head()]),
        TensorId::MaxLogit => (Dtype::F32, [1, p.heads(), 1]),
        _ => unreachable!("tensors of other runs"),
    }
}

/// The tensors of both directions.
pub struct Tensors {
    held: Vec<(TensorId, Held)>,
}

impl Tensors {
    /// In memory of its own; `form` says how each lies.
    pub fn new(cuda: &Cuda, plan: &Plan, rank: usize, form: impl Fn(TensorId) -> Form) -> Self {
        let sinks = plan.problem().sinks();
        let used = |t: &TensorId| sinks || !matches!(t, TensorId::Sinks | TensorId::Dsinks);
        let held = INPUTS.into_iter().chain(OUTPUTS).filter(used).map(|t| {
            let (dtype, shape) = shape(plan, rank, t);
            (t, Held::new(cuda, dtype, shape, form(t)))
        });
        Self { held: held.collect() }
    }

    /// Fills the inputs with numbers that depend on the seed, the rank and nothing else.
    pub fn fill(&self, seed: u64, rank: usize) {
        for (tensor, held) in self.held.iter().filter(|(t, _)| INPUTS.contains(t)) {
            let mut random = fastrand::Rng::with_seed(seed * 1000 + rank as u64 * 20 + *tensor as u64);
            let n = held.raw.tokens as usize * held.raw.heads as usize * held.raw.dim as usize;
            let numbers = (0..n).map(|_| random.f32() * 2.0 - 1.0);
            let bytes: Vec<u8> = match held.raw.dtype {
                Dtype::F32 => numbers.flat_map(f32::to_le_bytes).collect(),
                _ => numbers.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
            };
            held.write(&bytes);
        }
    }

    pub fn bindings(&self) -> Bindings {
        self.held.iter().fold(Bindings::default(), |b, (t, held)| b.with(*t, held.raw))
    }

    /// How many a direction is given.
    pub fn count(&self, direction: Direction) -> u64 {
        let forward = [TensorId::Q, TensorId::K, TensorId::V, TensorId::O, TensorId::Lse, TensorId::Sinks];
        self.held.iter().filter(|(t, _)| direction == Direction::Backward || forward.contains(t)).count() as u64
    }

    /// All results.
    pub fn results(&self, what: &str) -> Vec<(TensorId, Vec<u8>)> {
        let outputs = self.held.iter().filter(|(t, _)| OUTPUTS.contains(t));
        outputs.map(|(t, held)| (*t, held.read(&format!("{what}, {}", t.name())))).collect()
    }
}

/// Forms that differ from compact ones wherever a plan allows it: what a ring may send as it lies stays compact.
pub fn awkward(plan: &Plan) -> impl Fn(TensorId) -> Form {
    let packed = plan.options().pack_inputs || plan.mesh().ring == 1;
    move |tensor| match tensor {
        TensorId::O => Form::Padded,
        TensorId::Q | TensorId::K | TensorId::V | TensorId::DO if packed => Form::Padded,
        TensorId::Lse if packed => Form::HeadMajor,
        TensorId::Dq | TensorId::Dk => Form::Odd,
        TensorId::Dv => Form::HeadMajor,
        _ => Form::Compact,
    }
}
