// SPDX-License-Identifier: MIT OR Apache-2.0
//! Detection of AMX, and configuration of its tiles for a thread.
//!
//! A thread must call [`configure`] before it uses tiles, and release them afterwards: while they are configured the
//! system saves 8 KiB at each context switch.

use core::arch::asm;
use core::arch::x86_64::*;

/// Whether AMX is present and the system permits its use.
#[allow(unused_unsafe, reason = "cpuid is safe in newer compilers")]
pub(crate) fn available() -> bool {
    // SAFETY: cpuid is on every x86-64.
    let (features, widest) = unsafe { (__cpuid_count(7, 0), __cpuid(0).eax) };
    let (bf16, tile) = (features.edx >> 22 & 1, features.edx >> 24 & 1);
    widest >= 7
        && bf16 == 1
        && tile == 1
        && crate::kernel::cpu::vector::x86::has_avx512_bf16()
        && state_is_saved()
        && permitted()
}

/// Whether AMX also multiplies f16.
#[allow(unused_unsafe, reason = "as above")]
pub(crate) fn has_f16() -> bool {
    // SAFETY: as above; leaf 7 has a second part where its first says so.
    unsafe { __cpuid(0).eax >= 7 && __cpuid_count(7, 0).eax >= 1 && __cpuid_count(7, 1).eax >> 21 & 1 == 1 }
}

/// Whether the system saves tile registers (bits 17 and 18 of the extended control register).
fn state_is_saved() -> bool {
    let low: u32;
    // SAFETY: AVX-512 is present, so the system has enabled xgetbv, which reads a register.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack, preserves_flags)) };
    low >> 17 & 3 == 3
}

/// Asks the kernel for the right to use tiles, which it gives to the whole process.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    let result: i64;
    // SAFETY: the call takes two numbers and touches no memory of ours; the kernel keeps all registers but these.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// Other systems give the right by themselves, or not at all.
#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct TileConfig([u8; 64]);

static CONFIG: TileConfig = {
    let mut c = [0; 64];
    c[0] = 1;
    let mut i = 0;
    while i < 8 {
        c[16 + 2 * i] = 64;
        c[48 + i] = 16;
        i += 1;
    }
    TileConfig(c)
};

/// Configures the tiles for this thread.
///
/// # Safety
/// AMX is [`available`].
#[inline(always)]
pub(crate) unsafe fn configure() {
    // SAFETY: AMX is present and permitted; the configuration is one.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIG, options(nostack, preserves_flags)) }
}

/// Undoes [`configure`].
///
/// # Safety
/// AMX is [`available`].
#[inline(always)]
pub(crate) unsafe fn release() {
    // SAFETY: AMX is present.
    unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
}
