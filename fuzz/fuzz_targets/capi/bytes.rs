// SPDX-License-Identifier: MIT OR Apache-2.0
//! The input as a source of choices, and the count of calls that it made. Where the bytes end, every choice is the
//! first: an input that is cut short is still a program.

use std::{
    ffi::CStr,
    sync::atomic::{AtomicU64, Ordering},
};

use cpattn_capi::cpattn_last_error;

static CALLS: AtomicU64 = AtomicU64::new(0);

/// Input bytes; zeros when they run out.
pub struct Bytes<'a>(pub &'a [u8]);

impl Bytes<'_> {
    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    pub fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    pub fn below(&mut self, n: u64) -> u64 {
        u64::from(self.byte()) % n
    }

    /// Mostly small, sometimes anything.
    pub fn number(&mut self, small: u64) -> i64 {
        match self.byte() {
            0 => self.word() as i64,
            1 => -1,
            b => (u64::from(b) % small) as i64,
        }
    }

    pub fn rarely(&mut self) -> bool {
        self.byte() == 255
    }

    pub fn f64(&mut self) -> f64 {
        match self.byte() {
            0 => f64::from_bits(self.word()),
            b => f64::from(b) / 64.0,
        }
    }
}

pub fn size<T>(b: &mut Bytes) -> usize {
    // A longer struct would be read beyond its end: sizes beyond ours are left to the unit tests.
    if b.rarely() { b.byte() as usize % size_of::<T>() } else { size_of::<T>() }
}

pub fn called(status: i32) -> i32 {
    assert!((0..=8).contains(&status), "status {status}: {:?}", unsafe { CStr::from_ptr(cpattn_last_error()) });
    let n = CALLS.fetch_add(1, Ordering::Relaxed) + 1;
    if n % (1 << 20) == 0 {
        eprintln!("calls: {n}");
    }
    status
}
