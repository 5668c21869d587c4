// SPDX-License-Identifier: MIT OR Apache-2.0
//! Probes of AMX: products of tiles that stay in registers.
//!
//! The instructions have no stable intrinsics, so they are written in assembly. The operating system saves tiles only
//! for processes that asked for permission (`arch_prctl(ARCH_REQ_XCOMP_PERM)`); without it the first tile instruction
//! would fault. So permission is requested before a probe is returned.

use crate::Probe;
use core::arch::{
    asm,
    x86_64::{__cpuid_count, CpuidResult},
};

/// Tile products of one call, in steps of four.
const STEPS: usize = 2_000;

/// `STEPS` times four products `tmm0..3 += tmm4..7` of 16 rows by 64 bytes, each with its own sum.
macro_rules! products {
    ($name:ident, $product:literal) => {
        fn $name() -> f64 {
            let config = configuration();
            // SAFETY: handed out only where CPU and operating system grant tiles. `config` is the 64 bytes that
            // ldtilecfg reads; nothing else is read or written, and tiles are released before any other code runs.
            unsafe {
                asm!(
                    "ldtilecfg [{config}]",
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
                    "2:",
                    concat!($product, " tmm0, tmm4, tmm6"),
                    concat!($product, " tmm1, tmm4, tmm7"),
                    concat!($product, " tmm2, tmm5, tmm6"),
                    concat!($product, " tmm3, tmm5, tmm7"),
                    "dec {steps}",
                    "jnz 2b",
                    "tilerelease",
                    config = in(reg) config.0.as_ptr(),
                    steps = inout(reg) STEPS => _,
                    options(nostack, readonly),
                );
            }
            // 16 rows by 16 columns, 32 products of two bytes each.
            (STEPS * 4 * 16 * 16 * 32 * 2) as f64
        }
    };
}
products!(run_bf16, "tdpbf16ps");
products!(run_f16, "tdpfp16ps");

pub fn bf16() -> Option<Probe> {
    // EDX bit 22 of leaf 7.0 is AMX-BF16.
    (has_tiles() && leaf_7(0).edx >> 22 & 1 == 1).then_some(run_bf16 as Probe)
}

pub fn f16() -> Option<Probe> {
    // EAX bit 21 of leaf 7.1 is AMX-FP16.
    (has_tiles() && leaf_7(1).eax >> 21 & 1 == 1).then_some(run_f16 as Probe)
}

/// Zeros if the CPU does not have this leaf.
// Later compilers than the oldest that is supported call this intrinsic safe.
#[allow(unused_unsafe)]
fn leaf_7(sub: u32) -> CpuidResult {
    // SAFETY: every x86-64 CPU has the instruction. Leaf 0 holds the last leaf, leaf 7.0 its last sub-leaf.
    unsafe {
        let there = __cpuid_count(0, 0).eax >= 7 && __cpuid_count(7, 0).eax >= sub;
        if there { __cpuid_count(7, sub) } else { CpuidResult { eax: 0, ebx: 0, ecx: 0, edx: 0 } }
    }
}

/// Whether the CPU has tiles and this process may use them.
fn has_tiles() -> bool {
    // EDX bit 24 of leaf 7.0 is AMX-TILE. AVX-512 is required as a sign that the system saves wide state.
    is_x86_feature_detected!("avx512f") && leaf_7(0).edx >> 24 & 1 == 1 && permission()
}

#[cfg(target_os = "linux")]
fn permission() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    let status: i64;
    // SAFETY: a system call that reads and writes no memory of ours; the kernel clobbers rcx and r11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => status,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    status == 0
}

#[cfg(not(target_os = "linux"))]
fn permission() -> bool {
    false
}

#[repr(align(64))]
struct Configuration([u8; 64]);

/// Palette 1, eight tiles of 16 rows by 64 bytes.
fn configuration() -> Configuration {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    for tile in 0..8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = 16;
    }
    Configuration(bytes)
}
