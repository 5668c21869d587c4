// SPDX-License-Identifier: MIT OR Apache-2.0
//! The product of two by two AMX tiles: one block of instructions with the whole loop over the inner dimension in it.
//! Stable Rust names no tile instruction, so they are written as assembly; `tile_engine.rs` says how operands lie.
//!
//! If operands have several parts (`forms.rs`), a step has one product for each pair of parts that matters, from the
//! smallest to that of the first parts. Two successive products share their left or their right operand.

use crate::kernel::cpu::memory::arena::KEYS;
use core::arch::asm;
use core::arch::x86_64::{_mm512_add_ps, _mm512_load_ps, _mm512_loadu_ps, _mm512_storeu_ps};
use core::ops::Range;

/// Elements of a tile.
pub(crate) const TILE: usize = 512;
/// Lanes of a panel.
pub(crate) const PANEL: usize = 32;

/// Two by two result tiles: rows of A from `a0` and `a1`, columns of B from `b0` and `b1`, `steps` tiles deep.
#[derive(Clone, Copy)]
pub(crate) struct Product {
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

/// The product of the 32 keys from `key` on with a panel of q, into 32 rows of scores at `s`. Operands have `parts`
/// parts.
///
/// # Safety
/// `k` and `q` are as long as the engine says, and `key` is within the tile.
#[inline(always)]
pub(crate) unsafe fn scores_of(
    k: *const u16,
    q: *const u16,
    dim: usize,
    s: *mut f32,
    key: usize,
    parts: usize,
) -> Product {
    let deep = dim.div_ceil(32) * parts;
    // SAFETY: the tiles of 32 keys are within k, those of a panel within q, and `s` has 32 rows.
    unsafe {
        let a0 = k.add(key / 16 * deep * TILE);
        Product {
            a0,
            a1: a0.add(deep * TILE),
            a_step: 2 * TILE * parts,
            b0: q,
            b1: q.add(deep * TILE),
            b_step: 2 * TILE * parts,
            steps: deep / parts,
            c0: s,
            c1: s.add(16 * PANEL),
            ldc: 4 * PANEL,
            add: false,
        }
    }
}

/// The product of the 32 dims of v from `d` on with a panel's p, added to `o`, over the keys of a range of blocks.
///
/// # Safety
/// `v`, `p` and `o` are as long as the engine says; `d` is within v, and the keys within the tile.
#[inline(always)]
pub(crate) unsafe fn values_of(
    v: *const u16,
    p: *const u16,
    o: *mut f32,
    d: usize,
    keys: &Range<usize>,
    parts: usize,
) -> Product {
    let block = keys.start / 32;
    let tile = TILE * parts;
    // SAFETY: the tiles of 32 dims are within v, those of the keys within v and p, and `o` has the rows of the dims.
    unsafe {
        let a0 = v.add((d / 16 * (KEYS / 32) + block) * tile);
        let b0 = p.add(block * (PANEL / 16) * tile);
        Product {
            a0,
            a1: a0.add(KEYS / 32 * tile),
            a_step: 2 * tile,
            b0,
            b1: b0.add(tile),
            b_step: 2 * (PANEL / 16) * tile,
            steps: keys.len() / 32,
            c0: o.add(d * PANEL),
            c1: o.add((d + 16) * PANEL),
            ldc: 4 * PANEL,
            add: true,
        }
    }
}

/// The four products of a step with the part of A at `$a` and the part of B at `$b`, both of which are loaded: A with
/// the instruction `$load`.
macro_rules! both {
    ($load:literal, $product:literal, $a:literal, $b:literal) => {
        concat!(
            $load,
            " tmm4, [{a0} + {row} + ",
            $a,
            "]\n",
            "tileloadd tmm6, [{b0} + {row} + ",
            $b,
            "]\n",
            $product,
            " tmm0, tmm4, tmm6\n",
            "tileloadd tmm7, [{b1} + {row} + ",
            $b,
            "]\n",
            $product,
            " tmm1, tmm4, tmm7\n",
            $load,
            " tmm5, [{a1} + {row} + ",
            $a,
            "]\n",
            $product,
            " tmm2, tmm5, tmm6\n",
            $product,
            " tmm3, tmm5, tmm7"
        )
    };
}

/// The four products with another part of A; that of B is in the registers.
macro_rules! left {
    ($a:literal) => {
        concat!(
            "tileloadd tmm4, [{a0} + {row} + ",
            $a,
            "]\n",
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            "tdpbf16ps tmm1, tmm4, tmm7\n",
            "tileloadd tmm5, [{a1} + {row} + ",
            $a,
            "]\n",
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            "tdpbf16ps tmm3, tmm5, tmm7"
        )
    };
}

/// The four products with another part of B; that of A is in the registers.
macro_rules! right {
    ($b:literal) => {
        concat!(
            "tileloadd tmm6, [{b0} + {row} + ",
            $b,
            "]\n",
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            "tileloadd tmm7, [{b1} + {row} + ",
            $b,
            "]\n",
            "tdpbf16ps tmm1, tmm4, tmm7\n",
            "tdpbf16ps tmm3, tmm5, tmm7"
        )
    };
}

/// A step of operands of one part. `$load` is the instruction that loads the left one.
macro_rules! one {
    ($then:ident, $name:ident, $instruction:literal, $load:literal) => {
        $then!($name, both!($load, $instruction, 0, 0));
    };
}

/// A step of operands of two parts of bf16: the products of left and right part 1 with 2, 2 with 2, 2 with 1, 1 with 1.
macro_rules! two {
    ($then:ident, $name:ident) => {
        $then!($name, both!("tileloadd", "tdpbf16ps", 0, 1024), left!(1024), right!(0), left!(0));
    };
}

/// A step of operands of three parts of bf16: left and right part 1 with 3, 1 with 2, 2 with 2, 2 with 1, 3 with 1, 1
/// with 1.
macro_rules! three {
    ($then:ident, $name:ident) => {
        $then!(
            $name,
            both!("tileloadd", "tdpbf16ps", 0, 2048),
            right!(1024),
            left!(1024),
            right!(0),
            left!(2048),
            left!(0)
        );
    };
}

macro_rules! product {
    ($name:ident, $($line:expr),*) => {
        /// # Safety
        /// The instruction is present and tiles are configured; `steps` is at least 1; tiles are 1,024 bytes, valid for
        /// reads, and those of C 16 rows of 64 bytes, valid for writes (and reads, where it is added to).
        #[inline(always)]
        pub(crate) unsafe fn $name(p: &Product) {
            // SAFETY: the block reads and writes the memory of the contract, changes the registers named below, and
            // does not use the stack. The compiler uses no tile registers: no function is compiled for them.
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
                    $($line,)*
                    "add {a0}, {a_step}",
                    "add {a1}, {a_step}",
                    "add {b0}, {b_step}",
                    "add {b1}, {b_step}",
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

one!(product, product_bf16, "tdpbf16ps", "tileloadd");
one!(product, product_f16, "tdpfp16ps", "tileloadd");
two!(product, product_two);
three!(product, product_three);

/// Initialises the result tiles of a product that runs a step at a time: with C if the product is added to it and
/// operands have one part, else with zeros.
///
/// # Safety
/// Tiles are configured; those of C are 16 rows of 64 bytes, valid for reads if the product is added. Until [`end`] no
/// other product may begin on this thread: results stay in tile registers 0 to 3.
#[inline(always)]
pub(crate) unsafe fn begin(p: &Product, parts: usize) {
    // SAFETY: the blocks read the memory of the contract, change only tile registers, which the compiler does not use
    // (see above), and do not use the stack.
    unsafe {
        if p.add && parts == 1 {
            asm!(
                "tileloadd tmm0, [{c0} + {ldc}]",
                "tileloadd tmm1, [{c0} + {ldc} + 64]",
                "tileloadd tmm2, [{c1} + {ldc}]",
                "tileloadd tmm3, [{c1} + {ldc} + 64]",
                c0 = in(reg) p.c0,
                c1 = in(reg) p.c1,
                ldc = in(reg) p.ldc,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, preserves_flags, readonly),
            );
        } else {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, preserves_flags, nomem),
            );
        }
    }
}

/// A product of operands of several parts that is added to C. Adding each part's product to C would round C each time,
/// so the sum of all steps is computed first and C is rounded once.
#[repr(align(64))]
pub(crate) struct Apart([f32; 32 * PANEL]);

impl Apart {
    pub(crate) const fn new() -> Self {
        Self([0.0; 32 * PANEL])
    }

    /// The same product, with this buffer as its C.
    #[inline(always)]
    pub(crate) fn instead(&mut self, p: &Product) -> Product {
        let c0 = self.0.as_mut_ptr();
        // The second half of the rows.
        Product { c0, c1: c0.wrapping_add(16 * PANEL), ldc: 4 * PANEL, add: false, ..*p }
    }

    /// Adds this buffer to C of `p`.
    ///
    /// # Safety
    /// AVX-512 is present; C of `p` is 32 rows of 32, valid for reads and writes.
    #[target_feature(enable = "avx512f")]
    #[inline(never)]
    pub(crate) unsafe fn add_to(&self, p: &Product) {
        for (half, c) in [p.c0, p.c1].into_iter().enumerate() {
            for row in 0..16 {
                for lane in [0, 16] {
                    // SAFETY: within C, and within these 32 rows.
                    unsafe {
                        let to = c.byte_add(row * p.ldc).add(lane);
                        let sum = _mm512_load_ps(self.0.as_ptr().add((16 * half + row) * PANEL + lane));
                        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sum));
                    }
                }
            }
        }
    }
}

/// Writes the result tiles of a product after its last step.
///
/// # Safety
/// As [`begin`], which was called for this product; tiles of C are valid for writes.
#[inline(always)]
pub(crate) unsafe fn end(p: &Product) {
    // SAFETY: the block writes the memory of the contract, and changes neither registers nor the stack.
    unsafe {
        asm!(
            "tilestored [{c0} + {ldc}], tmm0",
            "tilestored [{c0} + {ldc} + 64], tmm1",
            "tilestored [{c1} + {ldc}], tmm2",
            "tilestored [{c1} + {ldc} + 64], tmm3",
            c0 = in(reg) p.c0,
            c1 = in(reg) p.c1,
            ldc = in(reg) p.ldc,
            options(nostack, preserves_flags),
        );
    }
}

macro_rules! step {
    ($name:ident, $($line:expr),*) => {
        /// The next step of a product that was begun.
        ///
        /// # Safety
        /// As [`begin`]; the instruction is present, and the four tiles of the step are 1,024 bytes a part, valid for
        /// reads.
        #[inline(always)]
        pub(crate) unsafe fn $name(p: &Product) {
            // SAFETY: as in [`begin`].
            unsafe {
                asm!(
                    $($line,)*
                    a0 = in(reg) p.a0,
                    a1 = in(reg) p.a1,
                    b0 = in(reg) p.b0,
                    b1 = in(reg) p.b1,
                    row = in(reg) 64usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, preserves_flags, readonly),
                );
            }
        }
    };
}

one!(step, step_bf16, "tdpbf16ps", "tileloaddt1");
one!(step, step_f16, "tdpfp16ps", "tileloaddt1");
two!(step, step_two);
three!(step, step_three);
