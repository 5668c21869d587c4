// SPDX-License-Identifier: MIT OR Apache-2.0
//! Folds the lanes of one instruction into lines of 16 bytes.
//!
//! Shadows are kept per line, with a slow path for lines that several warps share. What counts is therefore not what a
//! lane touches (often two or four bytes) but what the warp's instruction touches together.

/// The lines one instruction touches, with a bit per byte.
pub(crate) struct Touches {
    n: usize,
    line: [u32; 32],
    mask: [u16; 32],
}

impl Touches {
    pub(crate) fn new() -> Self {
        Self { n: 0, line: [0; 32], mask: [0; 32] }
    }

    /// Adds `size` bytes (a power of two, at most 16) at an offset that is a multiple of it.
    #[inline]
    pub(crate) fn add(&mut self, offset: u64, size: u32) {
        let line = (offset >> 4) as u32;
        let mask = ((((1u32 << size) - 1) as u16) as u32) << (offset & 15);
        let mask = mask as u16;
        for k in (self.n.saturating_sub(4)..self.n).rev() {
            if self.line[k] == line {
                self.mask[k] |= mask;
                return;
            }
        }
        self.line[self.n] = line;
        self.mask[self.n] = mask;
        self.n += 1;
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, u16)> + '_ {
        self.line[..self.n].iter().copied().zip(self.mask[..self.n].iter().copied())
    }

    pub(crate) fn clear(&mut self) {
        self.n = 0;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.n == 0
    }
}
