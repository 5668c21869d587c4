// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the calls of one input share: memory for tensors, and handles, alive and dead.

use std::{ffi::c_void, ptr::null_mut};

use cpattn_capi::*;

use crate::bytes::Bytes;

const CPU: cpattn_dl_device = cpattn_dl_device { device_type: 1, device_id: 0 };

/// Memory of a run: everything that tensors may point to, in one block whose ends AddressSanitizer watches.
pub struct World {
    pub memory: Vec<u64>,
    pub plans: Vec<*mut cpattn_plan>,
    pub ranks: Vec<*mut cpattn_rank>,
    pub scratches: Vec<*mut cpattn_scratch>,
    pub dead: Vec<*mut c_void>,
    pub used: usize,
}

/// A tensor with what its pointers point to.
pub struct Owned {
    shape: Box<[i64]>,
    strides: Option<Box<[i64]>>,
    t: cpattn_tensor,
}

impl Owned {
    pub fn as_ptr(&mut self) -> *const cpattn_tensor {
        self.t.shape = self.shape.as_mut_ptr();
        self.t.strides = self.strides.as_mut().map_or(null_mut(), |s| s.as_mut_ptr());
        &raw const self.t
    }
}

impl World {
    pub fn handle<T>(list: &[*mut T], others: [*mut c_void; 2], b: &mut Bytes) -> *mut T {
        match b.byte() {
            0 => null_mut(),
            1 => others[0].cast(),
            2 => others[1].cast(),
            3 => std::ptr::without_provenance_mut(b.word() as usize),
            n => list.get(n as usize % list.len().max(1)).copied().unwrap_or(null_mut()),
        }
    }

    pub fn strange(&self, b: &mut Bytes) -> [*mut c_void; 2] {
        let dead = self.dead.get(b.byte() as usize % self.dead.len().max(1)).copied().unwrap_or(null_mut());
        let other = match b.below(3) {
            0 => self.plans.last().map_or(null_mut(), |p| p.cast()),
            1 => self.ranks.last().map_or(null_mut(), |p| p.cast()),
            _ => self.scratches.last().map_or(null_mut(), |p| p.cast()),
        };
        [dead, other]
    }

    pub fn plan(&mut self, b: &mut Bytes) -> *mut cpattn_plan {
        let others = self.strange(b);
        Self::handle(&self.plans, others, b)
    }

    pub fn rank(&mut self, b: &mut Bytes) -> *mut cpattn_rank {
        let others = self.strange(b);
        Self::handle(&self.ranks, others, b)
    }

    pub fn scratch(&mut self, b: &mut Bytes) -> *mut cpattn_scratch {
        let others = self.strange(b);
        Self::handle(&self.scratches, others, b)
    }

    /// A tensor of about `shape` (or of any), whose elements lie in the world's memory, or nowhere.
    pub fn tensor(&mut self, shape: &[i64], bits: u8, b: &mut Bytes) -> Owned {
        let odd = b.byte();
        let mut shape: Box<[i64]> = shape.into();
        if odd & 7 == 7 {
            let at = b.byte() as usize % shape.len();
            shape[at] = b.number(9);
        }
        let mut dtype = cpattn_dl_dtype { code: 2, bits, lanes: 1 };
        if odd & 24 == 24 {
            dtype = cpattn_dl_dtype { code: b.below(6) as u8, bits: b.byte(), lanes: 1 + u16::from(b.rarely()) };
        }
        let mut strides: Option<Box<[i64]>> = None;
        if odd & 96 == 96 {
            strides = Some(shape.iter().map(|_| b.number(64)).collect());
        }
        let mut byte_offset = 0;
        if odd & 128 == 128 {
            byte_offset = b.number(64) as u64;
        }
        let ndim = if b.rarely() { b.byte() as i32 - 2 } else { shape.len() as i32 };
        // The arrays are as long as ndim says.
        let n = ndim.clamp(1, 64) as usize;
        let mut long = shape.to_vec();
        long.resize(n, 2);
        shape = long.into();
        strides = strides.map(|s| {
            let mut long = s.to_vec();
            long.resize(n, 1);
            long.into()
        });
        // How far the elements reach, in bytes.
        let (mut reach, mut compact, mut empty, mut legal) = (0i128, 1i128, false, true);
        for d in (0..n).rev() {
            let s = strides.as_ref().map_or(compact, |s| i128::from(s[d]));
            empty |= shape[d] == 0;
            legal &= shape[d] >= 0 && s >= 0;
            reach = reach.saturating_add(i128::from(shape[d] - i64::from(shape[d] > 0)).saturating_mul(s));
            compact = compact.saturating_mul(i128::from(shape[d].max(1)));
        }
        let size = i128::from(dtype.bits / 8).max(1);
        let bytes = reach.saturating_add(1).saturating_mul(size).saturating_add(i128::from(byte_offset));
        let room = (self.memory.len() * 8) as i128;
        let device = if b.rarely() {
            cpattn_dl_device { device_type: b.byte().into(), device_id: b.byte().into() }
        } else {
            CPU
        };
        let base = self.memory.as_mut_ptr().cast::<u8>();
        let data = if b.rarely() {
            null_mut()
        } else if empty || !legal {
            base
        } else if bytes <= room {
            // Side by side as long as there is room, so that most tensors share nothing.
            let mut at = self.used.next_multiple_of(8);
            if at as i128 + bytes > room || b.rarely() {
                at = (b.byte() as usize * 8) % (room - bytes + 1) as usize;
            }
            self.used = at + bytes as usize;
            base.wrapping_add(at)
        } else if bytes > isize::MAX as i128 {
            // Must be refused for its reach.
            base
        } else {
            null_mut()
        };
        let t = cpattn_tensor {
            data: data.cast(),
            device,
            ndim,
            dtype,
            shape: null_mut(),
            strides: null_mut(),
            byte_offset,
        };
        Owned { shape, strides, t }
    }
}
