// SPDX-License-Identifier: MIT OR Apache-2.0
//! Base addresses: the memory whose addresses are known only when a run begins.
//!
//! A plan is prepared before the addresses of the workspace and of the caller's tensors, and their strides, are known.
//! Until then an address is a *symbol*: the number of a base and an offset. Base 0 is the workspace. The other bases
//! are the caller's tensors; symbols treat them as compact, so that row and head follow from the offset. No device has
//! a symbol as an address, and a symbol is never used as one.

use crate::call::RawTensor;
use crate::element::Dtype;
use crate::kernel::cuda::abi::params::{BASES, Tensor};

/// A symbol has a number in the upper bits, and an offset in bytes below.
const SHIFT: u32 = 52;
/// Behind the bases: the metadata of a plan, and the words that are cleared before a launch.
const METADATA: u64 = BASES as u64;
const WORDS: u64 = METADATA + 1;

const fn symbol(number: u64) -> u64 {
    (number + 1) << SHIFT
}

/// The symbol of byte `at` of the metadata.
pub(in crate::kernel::cuda) const fn metadata_symbol(at: usize) -> u64 {
    symbol(METADATA) + at as u64
}

/// The symbol of the words that are cleared before a launch.
pub(in crate::kernel::cuda) const fn words_symbol() -> u64 {
    symbol(WORDS)
}

/// The kind of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernel::cuda) enum Meaning {
    /// An address or null, not a symbol.
    Address,
    /// Part of a base.
    Base,
    /// A byte of the metadata.
    Metadata(u64),
    /// A byte of the words that are cleared.
    Word(u64),
}

pub(in crate::kernel::cuda) const fn meaning(address: u64) -> Meaning {
    let at = address & ((1 << SHIFT) - 1);
    match address >> SHIFT {
        0 => Meaning::Address,
        n if n == METADATA + 1 => Meaning::Metadata(at),
        n if n == WORDS + 1 => Meaning::Word(at),
        _ => Meaning::Base,
    }
}

/// A part of a base: from `row` and `first_head` on. Rows of base 0 are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BaseOffset {
    pub base: u32,
    pub row: i64,
    pub first_head: u32,
}

impl BaseOffset {
    /// Where an address is: part of a base of these shapes, or, where there are none, memory. All memory is part of
    /// base 0, whose address is 0 then.
    pub(in crate::kernel::cuda) fn of(shapes: Option<&BaseShapes>, address: *mut u8) -> Self {
        let address = address as usize as u64;
        shapes.map_or(Self { base: 0, row: address as i64, first_head: 0 }, |shapes| shapes.locate(address))
    }

    /// Its address.
    pub(crate) fn address(&self, bases: &BaseAddresses) -> u64 {
        let Tensor { ptr, token, head } = bases.0[self.base as usize];
        let by = self.row.wrapping_mul(token).wrapping_add(i64::from(self.first_head).wrapping_mul(head));
        ptr.wrapping_add_signed(by)
    }

    /// The tensor at this offset. In base 0 it has the strides of `own`.
    pub(in crate::kernel::cuda) fn tensor(&self, bases: &BaseAddresses, own: Tensor) -> Tensor {
        let Tensor { token, head, .. } = if self.base == 0 { own } else { bases.0[self.base as usize] };
        Tensor { ptr: self.address(bases), token, head }
    }
}

/// Bytes of a row and of a head of each base, as symbols count them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BaseShapes([[u64; 2]; BASES]);

impl BaseShapes {
    /// Shapes of the tensors with numbers from 1 on, each as heads, dim, type.
    pub(crate) fn new(tensors: impl IntoIterator<Item = (u32, u32, Dtype)>) -> Self {
        let mut shapes = [[1, 1]; BASES];
        for (out, (heads, dim, dtype)) in shapes[1..].iter_mut().zip(tensors) {
            let head = u64::from(dim) * dtype.size() as u64;
            *out = [(u64::from(heads) * head).max(1), head.max(1)];
        }
        Self(shapes)
    }

    /// The symbol of the beginning of a base.
    pub(crate) fn symbol(base: usize) -> *mut u8 {
        debug_assert!(base < BASES);
        core::ptr::without_provenance_mut(symbol(base as u64) as usize)
    }

    /// The address that a symbol of a base stands for.
    pub(crate) fn locate(&self, address: u64) -> BaseOffset {
        debug_assert_eq!(meaning(address), Meaning::Base, "{address:#x}");
        let base = ((address >> SHIFT) - 1) as u32;
        let at = address & ((1 << SHIFT) - 1);
        if base == 0 {
            return BaseOffset { base, row: at as i64, first_head: 0 };
        }
        let [row, head] = self.0[base as usize];
        debug_assert_eq!(at % row % head, 0, "{address:#x} is inside a row");
        BaseOffset { base, row: (at / row) as i64, first_head: (at % row / head) as u32 }
    }
}

/// The bases of one run: addresses, and strides in bytes. A row of base 0 is a byte.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BaseAddresses(pub(in crate::kernel::cuda) [Tensor; BASES]);

impl BaseAddresses {
    /// The workspace, and the tensors with numbers from 1 on.
    pub(crate) fn new<'a>(workspace: *mut u8, tensors: impl IntoIterator<Item = &'a RawTensor>) -> Self {
        let mut bases = [Tensor::default(); BASES];
        bases[0] = Tensor { ptr: workspace as usize as u64, token: 1, head: 0 };
        for (out, t) in bases[1..].iter_mut().zip(tensors) {
            *out = bytes(t);
        }
        Self(bases)
    }
}

/// Address and strides in bytes.
pub(in crate::kernel::cuda) fn bytes(t: &RawTensor) -> Tensor {
    let size = t.dtype.size() as i64;
    Tensor {
        ptr: t.ptr as usize as u64,
        token: t.token_stride.wrapping_mul(size),
        head: t.head_stride.wrapping_mul(size),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_become_the_addresses_of_parts() {
        let shapes = BaseShapes::new([(4, 64, Dtype::Bf16), (3, 1, Dtype::F32)]);
        let base = |n| BaseShapes::symbol(n);
        let q = RawTensor::compact(base(1), Dtype::Bf16, 100, 4, 64).rows(7, 2).heads(3, 1);
        let lse = RawTensor::compact(base(2), Dtype::F32, 100, 3, 1).rows(99, 1).heads(1, 2);
        let work = base(0).wrapping_add(4096);
        let place = |p: *mut u8| shapes.locate(p as usize as u64);
        assert_eq!(place(q.ptr), BaseOffset { base: 1, row: 7, first_head: 3 });
        assert_eq!(place(lse.ptr), BaseOffset { base: 2, row: 99, first_head: 1 });
        assert_eq!(place(work), BaseOffset { base: 0, row: 4096, first_head: 0 });
        // Strided memory of the caller's: q padded to 80 a head, lse head by head.
        let at = |address: usize| core::ptr::without_provenance_mut(address);
        let tensors = [
            RawTensor {
                token_stride: 400,
                head_stride: 80,
                ..RawTensor::compact(at(1 << 20), Dtype::Bf16, 100, 4, 64)
            },
            RawTensor { token_stride: 1, head_stride: 100, ..RawTensor::compact(at(1 << 30), Dtype::F32, 100, 3, 1) },
        ];
        let bases = BaseAddresses::new(at(512), &tensors);
        let expected = [tensors[0].rows(7, 2).heads(3, 1), tensors[1].rows(99, 1).heads(1, 2)];
        for (found, expected) in [q, lse].iter().zip(&expected) {
            let found = place(found.ptr).tensor(&bases, Tensor::default());
            assert_eq!(bytemuck::bytes_of(&found), bytemuck::bytes_of(&bytes(expected)));
        }
        assert_eq!(place(work).address(&bases), 512 + 4096);
    }

    #[test]
    fn nothing_is_taken_for_something_else() {
        assert_eq!(meaning(0), Meaning::Address);
        assert_eq!(meaning(0x7fff_ffff_ffff), Meaning::Address);
        assert_eq!(meaning(metadata_symbol(17)), Meaning::Metadata(17));
        assert_eq!(meaning(words_symbol() + 4), Meaning::Word(4));
        assert!((0..BASES).all(|n| meaning(BaseShapes::symbol(n) as usize as u64 + 9) == Meaning::Base));
    }
}
