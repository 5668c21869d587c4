// SPDX-License-Identifier: MIT OR Apache-2.0
//! Proof that the core needs no std: a program without it plans, writes a schedule, and links.
//!
//! It brings what a bare target must bring: an allocator, a panic handler, an entry point. If any part of the core
//! pulled std in, the link would fail on a second panic handler.
#![no_std]
#![no_main]

extern crate alloc;

use core::{
    alloc::{GlobalAlloc, Layout as Memory},
    cell::UnsafeCell,
    ffi::c_int,
    sync::atomic::{AtomicUsize, Ordering},
};

use cpattn::{Batch, Dtype, Layout, Mesh, Plan, Problem, schedule::{Direction, Schedule}};

const ARENA: usize = 1 << 22;

/// Hands out memory from the front and never takes any back.
struct Bump {
    arena: UnsafeCell<[u8; ARENA]>,
    used: AtomicUsize,
}

// SAFETY: the arena is only handed out in parts that do not overlap, by way of an atomic counter.
unsafe impl Sync for Bump {}

// SAFETY: every returned block lies in the arena, is aligned as asked, and overlaps no other block.
unsafe impl GlobalAlloc for Bump {
    unsafe fn alloc(&self, layout: Memory) -> *mut u8 {
        let base = self.arena.get() as usize;
        let mut start = 0;
        let claimed = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            start = (base + used).next_multiple_of(layout.align()) - base;
            start.checked_add(layout.size()).filter(|&end| end <= ARENA)
        });
        match claimed {
            Ok(_) => (base + start) as *mut u8,
            Err(_) => core::ptr::null_mut(),
        }
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Memory) {}
}

#[global_allocator]
static HEAP: Bump = Bump { arena: UnsafeCell::new([0; ARENA]), used: AtomicUsize::new(0) };

unsafe extern "C" {
    fn abort() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: abort has no preconditions.
    unsafe { abort() }
}

fn operations() -> cpattn::Result<usize> {
    let problem = Problem::new(Batch::new(&[0, 5, 5, 36])?, 9, 3, 64, Dtype::Bf16);
    let plan = Plan::new(&problem, Mesh { replicas: 1, ring: 2, ulysses: 4 }, Layout::Zigzag)?;
    Ok(Schedule::new(&plan, 3, Direction::Backward)?.operations().len())
}

/// Exits with 0 when a schedule with operations was written.
// SAFETY: the name is the C runtime's entry point, and nothing else in this program defines it.
#[unsafe(no_mangle)]
pub extern "C" fn main(_: c_int, _: *const *const u8) -> c_int {
    match operations() {
        Ok(n) if n > 0 => 0,
        _ => 1,
    }
}

// What the prebuilt alloc crate refers to, as it was built with unwinding; never called under panic = "abort".
// SAFETY: nothing else in a program without std defines these names.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

// SAFETY: as above.
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    // SAFETY: abort has no preconditions.
    unsafe { abort() }
}

#[link(name = "c")]
unsafe extern "C" {}
