// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CPU kernels against the f64 reference.
//!
//! Every problem is cut into ranges at random, its rows are scattered over tensors with odd strides in which
//! everything else is NaN, its heads are shared out as Ulysses would, and its keys come in several visits. What comes
//! out is compared with the reference run on the same rounded inputs, before it is rounded itself: a sum that was kept
//! in bf16 anywhere would miss these bounds by a factor of a thousand.
#![cfg(feature = "std")]

mod bits;
mod blocks;
mod calls;
mod documents;
mod dropout;
mod grid;
mod growing;
mod harness;
mod huge_scores;
mod large_results;
mod large_scores;
mod parts;
mod reference;
mod refusals;
mod slices;
#[path = "../common/slow.rs"]
mod slow;
mod threads;
mod wide;

mod counting {
    //! Counts the allocations of each thread.
    use std::alloc::{GlobalAlloc, Layout, System};
    use std::cell::Cell;

    struct Counting;

    std::thread_local! {
        static COUNT: Cell<usize> = const { Cell::new(0) };
    }

    pub fn allocations() -> usize {
        COUNT.get()
    }

    // SAFETY: the system's allocator, with a count that allocates nothing.
    unsafe impl GlobalAlloc for Counting {
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            COUNT.set(COUNT.get() + 1);
            // SAFETY: the caller's promise is passed on.
            unsafe { System.alloc(layout) }
        }

        unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
            // SAFETY: as above.
            unsafe { System.dealloc(ptr, layout) }
        }
    }

    #[global_allocator]
    static ALLOCATOR: Counting = Counting;
}
