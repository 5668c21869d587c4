// SPDX-License-Identifier: MIT OR Apache-2.0
//! The registers of a block, as `setmaxnreg` moves them between its warps.
//!
//! All threads begin with the same number; what a warp gives up, another may take. A warp that asks for more than is
//! free waits. The number at the start is the compiler's: `.maxnreg` where it is given, else the most that lets a block
//! of this size have a multiprocessor to itself, which is what `.minnctapersm 1` leads to.

/// Registers of a multiprocessor.
const ALL: u32 = 65536;

/// Registers of a block's warps, per thread.
pub(crate) struct Registers {
    of: Vec<u32>,
    free: u32,
}

impl Registers {
    pub(crate) fn new(warps: usize, limit: Option<u32>) -> Self {
        let fair = ALL / (32 * warps.max(1) as u32) / 8 * 8;
        let each = limit.unwrap_or(fair.min(256));
        Self { of: vec![each; warps], free: 0 }
    }

    /// A warp gives up all but `n` registers a thread. The number it has, when that is fewer.
    pub(crate) fn give(&mut self, warp: usize, n: u32) -> Result<(), u32> {
        let mine = &mut self.of[warp];
        if *mine < n {
            return Err(*mine);
        }
        self.free += *mine - n;
        *mine = n;
        Ok(())
    }

    /// A warp asks for `n` registers a thread; false when they are not free yet.
    pub(crate) fn take(&mut self, warp: usize, n: u32) -> bool {
        let more = n.saturating_sub(self.of[warp]);
        if more > self.free {
            return false;
        }
        self.free -= more;
        self.of[warp] += more;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn move_between_warps() {
        // 384 threads begin with 168; one warpgroup gives up 144 of each, and the others get 72.
        let mut r = Registers::new(12, None);
        assert_eq!(r.of[0], 168);
        assert!(!r.take(0, 240));
        for w in 8..12 {
            assert_eq!(r.give(w, 24), Ok(()));
        }
        assert!((0..8).all(|w| r.take(w, 240)));
        assert!(!r.take(8, 32) && r.take(0, 240));
        assert_eq!(r.give(8, 32), Err(24));
    }
}
