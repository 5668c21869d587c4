// SPDX-License-Identifier: MIT OR Apache-2.0
//! Choices made by the fuzzer's bytes. Where they end, every choice is the first.

pub struct Bytes<'a>(pub &'a [u8]);

#[allow(dead_code, reason = "each target uses its part")]
impl Bytes<'_> {
    pub fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((&b, rest)) => {
                self.0 = rest;
                b
            }
            None => 0,
        }
    }

    pub fn bits(&mut self, bytes: usize) -> u64 {
        (0..bytes).fold(0, |n, _| n << 8 | u64::from(self.byte()))
    }

    /// Below `n`, at most 256.
    pub fn below(&mut self, n: usize) -> usize {
        self.byte() as usize % n
    }

    pub fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}
