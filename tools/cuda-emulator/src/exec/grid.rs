// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the blocks of a launch share.

use super::clock::Published;
use super::launch::Options;
use std::collections::HashMap;

/// State of a launch.
pub(crate) struct Grid {
    pub(crate) options: Options,
    /// The parameter buffer.
    pub(crate) params: Vec<u8>,
    pub(crate) shape: [u32; 3],
    /// Number of the launch's first block.
    pub(crate) first_block: u32,
    /// What was published at which address.
    pub(crate) flags: HashMap<u64, Published>,
    /// Executions per instruction.
    pub(crate) counts: Vec<u64>,
    /// Extra passes through shared memory per instruction.
    pub(crate) conflicts: Vec<u64>,
    /// Instructions of all warps.
    pub(crate) executed: u64,
    /// Boxes that tensor copies loaded.
    pub(crate) boxes: u64,
    /// `executed` when something last changed.
    last_effect: u64,
    pub(crate) scratch: [u32; 32],
    state: u64,
}

impl Grid {
    pub(crate) fn new(options: Options, params: Vec<u8>, shape: [u32; 3], first_block: u32, code: usize) -> Self {
        Self {
            state: options.seed ^ 0x9e37_79b9_7f4a_7c15,
            options,
            params,
            shape,
            first_block,
            flags: HashMap::new(),
            counts: vec![0; code],
            conflicts: vec![0; code],
            executed: 0,
            boxes: 0,
            last_effect: 0,
            scratch: [0; 32],
        }
    }

    /// A random number below `n`.
    #[inline]
    pub(crate) fn random(&mut self, n: u32) -> u32 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u64::from((z ^ z >> 31) as u32) * u64::from(n)) >> 32) as u32
    }

    /// Notes that memory may have changed.
    #[inline]
    pub(crate) fn effect(&mut self, changed: bool) {
        if changed {
            self.last_effect = self.executed;
        }
    }

    /// Whether nothing has changed for longer than the limit.
    pub(crate) fn spins(&self) -> bool {
        self.executed - self.last_effect > self.options.spin_limit
    }
}
