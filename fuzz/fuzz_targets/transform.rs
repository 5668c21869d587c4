// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arbitrary layout transforms round-trip.
//!
//! Tokens: cut to ranks and put back. Tensors: any strides into any other strides, through a compact buffer, with casts
//! and sums; what lies in the gaps stays as it was. And the check of strides itself against counting: a mutable view
//! is refused exactly when two of its rows share an element.
#![no_main]

#[path = "bytes.rs"]
mod bytes;

use bytes::Bytes;
use cpattn::{
    Batch, Dtype, Element, Layout, Mesh, Plan, Problem, Side, View, ViewMut,
    call::{Block, RawTensor, Transform},
    kernel::cpu,
};
use half::{bf16, f16};
use libfuzzer_sys::fuzz_target;

fn tokens(b: &mut Bytes) {
    let lengths: Vec<usize> = (0..b.below(7)).map(|_| b.below(40) * b.below(3)).collect();
    let other: Vec<usize> = lengths.iter().map(|_| b.below(50)).collect();
    let cu = |l: &[usize]| Batch::from_lengths(l).unwrap().cu_seqlens(Side::Q).to_vec();
    let batch = Batch::cross(&cu(&lengths), &cu(&other), None).unwrap();
    let layout = match b.below(5) {
        0 => Layout::Contiguous,
        1 => Layout::Zigzag,
        2 => Layout::ZigzagPack,
        3 => Layout::Striped { stripe: 1 + b.below(9) as u32 },
        _ => Layout::Balanced { chunks: 1 + b.below(7) as u32 },
    };
    let mesh = Mesh { replicas: 1, ring: 1 + b.below(9), ulysses: 1 + b.below(6) };
    let plan = Plan::new(&Problem::new(batch, 6, 2, 4, Dtype::F32), mesh, layout).unwrap();
    let row = b.below(4);
    for side in [Side::Q, Side::K] {
        let full: Vec<u32> = (0..(plan.problem().batch().tokens(side) * row) as u32).collect();
        let mut back = vec![u32::MAX; full.len()];
        let mut count = 0;
        for rank in 0..mesh.world() {
            let local = plan.local_tokens(side, rank).shard(&full, row).unwrap();
            assert_eq!(local.len(), plan.local_tokens(side, rank).len() * row);
            plan.local_tokens(side, rank).unshard_into(&local, &mut back, row).unwrap();
            count += local.len();
        }
        assert!(back == full && count == full.len());
    }
}

/// A buffer of its own with a `[tokens, heads, dim]` tensor somewhere in it.
struct Strided<T> {
    data: Vec<T>,
    shape: [usize; 3],
    strides: [usize; 2],
    offset: usize,
}

impl<T: Element> Strided<T> {
    /// Tokens outside heads or heads outside tokens, with gaps; filled with `fill`.
    fn new(b: &mut Bytes, shape: [usize; 3], fill: impl Fn(usize) -> T) -> Self {
        let [tokens, heads, dim] = shape;
        let (a, c, offset) = (b.below(4), b.below(4), b.below(3));
        let strides = if b.flag() {
            let head = dim + a;
            [heads * head + c, head]
        } else {
            let token = dim + a;
            [token, tokens * token + c]
        };
        let len = offset + tokens * strides[0].max(1) + heads * strides[1].max(1) + dim;
        Self { data: (0..len).map(fill).collect(), shape, strides, offset }
    }

    fn raw(&mut self) -> RawTensor {
        ViewMut::strided(&mut self.data[self.offset..], self.shape, self.strides).unwrap().raw()
    }

    fn at(&self, t: usize, h: usize, d: usize) -> usize {
        self.offset + t * self.strides[0] + h * self.strides[1] + d
    }

    fn each(&self, mut f: impl FnMut(usize)) {
        for t in 0..self.shape[0] {
            for h in 0..self.shape[1] {
                (0..self.shape[2]).for_each(|d| f(self.at(t, h, d)));
            }
        }
    }
}

fn apply(dst: RawTensor, sources: &[RawTensor]) {
    let blocks = [Block { dst, sources_begin: 0, sources_end: sources.len() as u32 }];
    // SAFETY: every tensor of this file lies in a buffer of its own that outlives the call.
    unsafe { cpu::transform(&Transform { blocks: &blocks, sources }) }.unwrap();
}

fn tensors<T: Element, W: Element>(b: &mut Bytes) {
    let shape = [b.below(9), b.below(6), b.below(140)];
    let value = |i: usize| T::from_f64(((i * 37) % 101) as f64 / 8.0 - 5.0);
    let nan = T::from_f64(f64::NAN);
    let mut from = Strided::<T>::new(b, shape, value);
    let mut inside = vec![false; from.data.len()];
    from.each(|i| inside[i] = true);
    // What is not the tensor's is NaN: reading it would show.
    for (x, &inside) in from.data.iter_mut().zip(&inside) {
        if !inside {
            *x = nan;
        }
    }
    let mut to = Strided::<T>::new(b, shape, |_| nan);
    let mut packed = vec![nan; shape.iter().product()];
    let compact = ViewMut::new(&mut packed, shape[0], shape[1], shape[2]).unwrap().raw();
    apply(compact, &[from.raw()]);
    apply(to.raw(), &[compact]);
    let mut written = vec![false; to.data.len()];
    for t in 0..shape[0] {
        for h in 0..shape[1] {
            for d in 0..shape[2] {
                let (i, j) = (from.at(t, h, d), to.at(t, h, d));
                assert!(from.data[i] == to.data[j], "{shape:?} {:?} {:?}", from.strides, to.strides);
                written[j] = true;
            }
        }
    }
    for (x, &written) in to.data.iter().zip(&written) {
        assert!(written || x.to_f64().is_nan(), "a gap was written");
    }

    // A sum in order, in another type: rounded once from the wider accumulator.
    let sources = b.below(4);
    let mut others: Vec<Strided<T>> = (0..sources).map(|_| Strided::new(b, shape, value)).collect();
    let mut sum = Strided::<W>::new(b, shape, |_| W::from_f64(f64::NAN));
    let list: Vec<RawTensor> = others.iter_mut().map(Strided::raw).collect();
    apply(sum.raw(), &list);
    let double = sources > 0 && T::DTYPE == Dtype::F64 || W::DTYPE == Dtype::F64;
    for t in 0..shape[0] {
        for h in 0..shape[1] {
            for d in 0..shape[2] {
                let mut want = 0f64;
                for (n, o) in others.iter().enumerate() {
                    let x = o.data[o.at(t, h, d)].to_f64();
                    want = if n == 0 { x } else { want + x };
                    want = if double { want } else { f64::from(want as f32) };
                }
                let got = sum.data[sum.at(t, h, d)];
                assert!(got == W::from_f64(want), "{shape:?}: {got:?} for {want}");
            }
        }
    }
}

/// `ViewMut::strided` against counting.
fn overlap(b: &mut Bytes) {
    let shape = [b.below(12), b.below(12), b.below(6)];
    let strides = [b.below(70), b.below(70)];
    let mut data = vec![0f32; b.below(256) * 4];
    let len = data.len();
    let mut seen = std::collections::HashSet::new();
    let (mut inside, mut twice) = (true, false);
    for t in 0..shape[0] {
        for h in 0..shape[1] {
            for d in 0..shape[2] {
                let i = t * strides[0] + h * strides[1] + d;
                inside &= i < len;
                twice |= !seen.insert(i);
            }
        }
    }
    let read = View::strided(&data, shape, strides).is_ok();
    assert_eq!(read, inside, "{shape:?} {strides:?} over {len}");
    let write = ViewMut::strided(&mut data, shape, strides).is_ok();
    assert_eq!(write, inside && !twice, "{shape:?} {strides:?} over {len}");
}

fuzz_target!(|data: &[u8]| {
    let b = &mut Bytes(data);
    match b.below(8) {
        0 => tokens(b),
        1 => overlap(b),
        2 => tensors::<f32, f32>(b),
        3 => tensors::<f32, bf16>(b),
        4 => tensors::<f16, f32>(b),
        5 => tensors::<bf16, f16>(b),
        6 => tensors::<f64, f32>(b),
        _ => tensors::<f16, f64>(b),
    }
});
