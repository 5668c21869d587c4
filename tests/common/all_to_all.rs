// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two all-to-alls of a plan on ranks of the CPU and of devices: the same inputs, results as bytes.

use std::time::Duration;

use cpattn::{
    Batch, Device, DeviceView, DeviceViewMut, Dtype, Element, Layout, Mesh, Plan, Problem, Rank, Result, Side, View,
    ViewMut,
    call::RawStream,
    kernel::cuda::{Cuda, DeviceMemory},
    transport::local,
};

/// Plans of so many ranks. In most of them several ranks hold a kv head.
pub fn plans(world: usize) -> Vec<(&'static str, Plan)> {
    let plan = |lengths: &[usize], heads, kv_heads, ulysses, layout| {
        let p = Problem::new(Batch::from_lengths(lengths).unwrap(), heads, kv_heads, 16, Dtype::Bf16);
        Plan::new(&p, Mesh { replicas: 1, ring: world / ulysses, ulysses }.in_world(world).unwrap(), layout).unwrap()
    };
    match world {
        1 => vec![("one rank", plan(&[5, 6], 4, 2, 1, Layout::Contiguous))],
        2 => vec![("Ulysses 2", plan(&[9, 0, 14], 6, 3, 2, Layout::Contiguous))],
        4 => vec![
            ("Ulysses 4", plan(&[17, 20], 4, 2, 4, Layout::Contiguous)),
            // Rank 3 has no tokens.
            ("Ulysses 4, few tokens", plan(&[3], 9, 3, 4, Layout::Contiguous)),
            ("hybrid 2 x 2", plan(&[21, 8], 3, 1, 2, Layout::Zigzag)),
        ],
        n => panic!("no plans of {n} ranks"),
    }
}

/// Innermost dimensions: rows of whole vectors of a kernel, and not.
pub const DIMS: [usize; 2] = [16, 5];
pub const SIDES: [Side; 2] = [Side::Q, Side::K];

/// Shapes by tokens and by heads on a rank.
pub fn shapes(plan: &Plan, rank: usize, side: Side, dim: usize) -> [[usize; 3]; 2] {
    let (p, share) = (plan.problem(), plan.heads_of(rank));
    let (all, own) = match side {
        Side::Q => (p.heads(), share.q.len()),
        Side::K => (p.kv_heads(), share.kv.len()),
    };
    let members = (0..plan.mesh().world()).filter(|&r| {
        let (a, b) = (plan.mesh().coordinates(r), plan.mesh().coordinates(rank));
        (a.replica, a.ring) == (b.replica, b.ring)
    });
    let rows = members.map(|r| plan.local_tokens(side, r).len()).sum();
    [[plan.local_tokens(side, rank).len(), all, dim], [rows, own, dim]]
}

/// Numbers that depend on these alone.
pub fn numbers<T: Element>(seed: u64, rank: usize, side: Side, held: bool, n: usize) -> Vec<T> {
    let key = seed * 100 + rank as u64 * 8 + u64::from(side == Side::K) * 2 + u64::from(held);
    let mut random = fastrand::Rng::with_seed(key);
    (0..n).map(|_| T::from_f64(random.f64() * 4.0 - 2.0)).collect()
}

/// What arrives at a rank's heads and at its tokens.
pub type Arrived = [Vec<u8>; 2];

/// What ranks on the CPU make of it, rank by rank.
pub fn on_the_cpu<T: Element>(plan: &Plan, side: Side, dim: usize, seed: u64) -> Vec<Arrived> {
    let run = |end| -> Arrived {
        let mut rank = Rank::new(end);
        let me = rank.rank();
        let [tokens, held] = shapes(plan, me, side, dim);
        let count = |s: [usize; 3]| s.iter().product::<usize>();
        let (x, y) = (numbers(seed, me, side, false, count(tokens)), numbers(seed, me, side, true, count(held)));
        let (mut at_heads, mut back) =
            (vec![T::from_f64(f64::NAN); count(held)], vec![T::from_f64(0.0); count(tokens)]);
        let (view, out) =
            (View::<T>::new(&x, tokens[0], tokens[1], dim), ViewMut::new(&mut at_heads, held[0], held[1], dim));
        rank.all_to_all(plan).to_heads(side, view.unwrap(), out.unwrap()).unwrap();
        let (view, out) =
            (View::<T>::new(&y, held[0], held[1], dim), ViewMut::new(&mut back, tokens[0], tokens[1], dim));
        rank.all_to_all(plan).to_tokens(side, view.unwrap(), out.unwrap()).unwrap();
        [at_heads, back].map(|list| bytemuck::cast_slice(&list).to_vec())
    };
    local::run(plan.mesh().world(), Duration::from_secs(60), |end| Ok(run(end))).unwrap()
}

/// Bytes between rows, which stay as they are.
const GAP: u8 = 0x5a;

/// A tensor on a device, with room behind every head and every token if it is not compact.
pub struct Held {
    memory: DeviceMemory,
    shape: [usize; 3],
    strides: [usize; 2],
    size: usize,
}

impl Held {
    pub fn new(cuda: &Cuda, shape: [usize; 3], compact: bool, size: usize) -> Self {
        let [tokens, heads, dim] = shape;
        let strides = if compact { [heads * dim, dim] } else { [heads * (dim + 3) + 7, dim + 3] };
        let memory = cuda.allocate((tokens * strides[0]).max(1) * size).unwrap();
        memory.upload(&vec![GAP; memory.bytes()]).unwrap();
        Self { memory, shape, strides, size }
    }

    fn rows(&self) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let ([tokens, heads, dim], strides, size) = (self.shape, self.strides, self.size);
        let at = move |t, h| (t * strides[0] + h * strides[1]) * size;
        (0..tokens).flat_map(move |t| (0..heads).map(move |h| at(t, h)..at(t, h) + dim * size))
    }

    /// Its elements, one row after another.
    pub fn fill(&self, elements: &[u8]) {
        let mut all = vec![GAP; self.memory.bytes()];
        let mut rest = elements;
        for row in self.rows() {
            let (head, tail) = rest.split_at(row.len());
            all[row].copy_from_slice(head);
            rest = tail;
        }
        assert!(rest.is_empty());
        self.memory.upload(&all).unwrap();
    }

    pub fn read(&self) -> Vec<u8> {
        let mut all = vec![0; self.memory.bytes()];
        self.memory.download(&mut all).unwrap();
        let mut out = Vec::new();
        for row in self.rows() {
            out.extend_from_slice(&all[row.clone()]);
            all[row].fill(GAP);
        }
        assert!(all.iter().all(|&b| b == GAP), "something was written between the rows");
        out
    }

    /// # Safety
    /// As [`DeviceView::new`].
    pub unsafe fn view<T: Element>(&self, device: Device) -> DeviceView<'_, T> {
        // SAFETY: rows lie in `memory`; the rest is promised.
        unsafe { DeviceView::new(device, self.memory.ptr().cast_const().cast(), self.shape, self.strides) }.unwrap()
    }

    /// # Safety
    /// As [`DeviceViewMut::new`].
    pub unsafe fn view_mut<T: Element>(&self, device: Device) -> DeviceViewMut<'_, T> {
        // SAFETY: rows lie in `memory`; the rest is promised.
        unsafe { DeviceViewMut::new(device, self.memory.ptr().cast(), self.shape, self.strides) }.unwrap()
    }
}

/// The tensors of both all-to-alls on a device.
pub struct Tensors {
    side: Side,
    rank: usize,
    device: Device,
    x: Held,
    at_heads: Held,
    y: Held,
    back: Held,
}

impl Tensors {
    pub fn new<T: Element>(cuda: &Cuda, plan: &Plan, rank: usize, side: Side, dim: usize, compact: bool) -> Self {
        let [tokens, held] = shapes(plan, rank, side, dim);
        let new = |shape, compact| Held::new(cuda, shape, compact, size_of::<T>());
        let (x, at_heads, y, back) = (new(tokens, compact), new(held, true), new(held, true), new(tokens, compact));
        Self { side, rank, device: Device::Cuda(cuda.ordinal()), x, at_heads, y, back }
    }

    pub fn fill<T: Element>(&self, seed: u64) {
        for (held, by_heads) in [(&self.x, false), (&self.y, true)] {
            let n = held.shape.iter().product();
            held.fill(bytemuck::cast_slice(&numbers::<T>(seed, self.rank, self.side, by_heads, n)));
        }
        // Nothing of an earlier run is taken for a result.
        for held in [&self.at_heads, &self.back] {
            held.fill(&vec![0xff; held.shape.iter().product::<usize>() * held.size]);
        }
    }

    /// Enqueues both.
    ///
    /// # Safety
    /// The stream is null or a live one of the device; the tensors stay until it was waited for.
    pub unsafe fn enqueue<T: Element>(&self, rank: &mut Rank, plan: &Plan, stream: RawStream) -> Result<()> {
        // SAFETY: memory of these tensors, which nothing else uses until the stream was waited for (promised).
        unsafe {
            let (x, at_heads) = (self.x.view::<T>(self.device), self.at_heads.view_mut::<T>(self.device));
            rank.all_to_all(plan).on(stream).to_heads(self.side, x, at_heads)?;
            let (y, back) = (self.y.view::<T>(self.device), self.back.view_mut::<T>(self.device));
            rank.all_to_all(plan).on(stream).to_tokens(self.side, y, back)
        }
    }

    pub fn arrived(&self) -> Arrived {
        [self.at_heads.read(), self.back.read()]
    }
}
