// SPDX-License-Identifier: MIT OR Apache-2.0
//! The product of two by two AMX tiles: one block of instructions with the whole loop over the inner dimension in it.
//! Stable Rust names no tile instruction, so they are written as assembly; `amx.rs` says how operands lie.

use core::arch::asm;

/// Two by two result tiles: rows of A from `a0` and `a1`, columns of B from `b0` and `b1`, `steps` tiles deep.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub a0: *const u16,
    pub a1: *const u16,
    /// Bytes from one tile of A to the next, and of B.
    pub a_step: usize,
    pub b0: *const u16,
    pub b1: *const u16,
    pub b_step: usize,
    pub steps: usize,
    /// The first row of the upper and of the lower result tiles; the right ones lie 64 bytes behind the left ones.
    pub c0: *mut f32,
    pub c1: *mut f32,
    /// Bytes from one row of C to the next.
    pub ldc: usize,
    /// Add to C instead of writing it.
    pub add: bool,
}

macro_rules! product {
    ($name:ident, $instruction:literal) => {
        /// # Safety
        /// The instruction is present and tiles are configured; `steps` is at least 1; tiles are 1,024 bytes, valid for
        /// reads, and those of C 16 rows of 64 bytes, valid for writes (and reads, where it is added to).
        #[inline(always)]
        pub(super) unsafe fn $name(p: &Product) {
            // SAFETY: the block reads and writes what the caller vouches for, changes the registers named below, and
            // leaves the stack alone. The compiler uses no tile register of its own: no function is compiled for them.
            unsafe {
                asm!(
                    "test {add:e}, {add:e}",
                    "jnz 3f",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "jmp 2f",
                    "3:",
                    "tileloadd tmm0, [{c0} + {ldc}]",
                    "tileloadd tmm1, [{c0} + {ldc} + 64]",
                    "tileloadd tmm2, [{c1} + {ldc}]",
                    "tileloadd tmm3, [{c1} + {ldc} + 64]",
                    "2:",
                    "tileloadd tmm4, [{a0} + {row}]",
                    "tileloadd tmm6, [{b0} + {row}]",
                    concat!($instruction, " tmm0, tmm4, tmm6"),
                    "tileloadd tmm7, [{b1} + {row}]",
                    concat!($instruction, " tmm1, tmm4, tmm7"),
                    "tileloadd tmm5, [{a1} + {row}]",
                    concat!($instruction, " tmm2, tmm5, tmm6"),
                    "add {a0}, {a_step}",
                    "add {a1}, {a_step}",
                    "add {b0}, {b_step}",
                    "add {b1}, {b_step}",
                    concat!($instruction, " tmm3, tmm5, tmm7"),
                    "dec {steps}",
                    "jnz 2b",
                    "tilestored [{c0} + {ldc}], tmm0",
                    "tilestored [{c0} + {ldc} + 64], tmm1",
                    "tilestored [{c1} + {ldc}], tmm2",
                    "tilestored [{c1} + {ldc} + 64], tmm3",
                    a0 = inout(reg) p.a0 => _,
                    a1 = inout(reg) p.a1 => _,
                    b0 = inout(reg) p.b0 => _,
                    b1 = inout(reg) p.b1 => _,
                    a_step = in(reg) p.a_step,
                    b_step = in(reg) p.b_step,
                    steps = inout(reg) p.steps => _,
                    row = in(reg) 64usize,
                    c0 = in(reg) p.c0,
                    c1 = in(reg) p.c1,
                    ldc = in(reg) p.ldc,
                    add = in(reg) u32::from(p.add),
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

product!(product_bf16, "tdpbf16ps");
product!(product_f16, "tdpfp16ps");
