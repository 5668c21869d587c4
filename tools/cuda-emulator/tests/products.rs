// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of a warpgroup: what has to stand around `wgmma.mma_async`, and what is said when it does not.

mod common;

use common::{SEEDS, replaced};
use cuda_emulator::{Fault, Report};

/// A kernel of one pointer, in `%rd1`, to 512 words of zeros, `%rd2` at the thread's own. In shared memory lie A (64 ×
/// 16, ones) and B (8 × 16, twos) without swizzle; `%rd3` and `%rd4` describe them; `%f0` to `%f3` are zeros.
fn kernel(body: &str) -> String {
    format!(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p) {{\n\
         .shared .align 1024 .b8 a[2048]; .shared .align 1024 .b8 b[256];\n\
         .reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %rd<16>; .reg .f32 %f<64>;\n\
         ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; mov.u32 %r2, a; mov.u32 %r3, b; shl.b32 %r4, %r1, 4; add.u32 %r5, %r2, %r4;\n\
         cvt.u64.u32 %rd2, %r4; add.s64 %rd2, %rd1, %rd2; mov.u32 %r6, 0x3f803f80; mov.u32 %r7, 0x40004000;\n\
         st.shared.v4.b32 [%r5], {{%r6, %r6, %r6, %r6}}; and.b32 %r8, %r4, 255; add.u32 %r8, %r8, %r3; setp.lt.u32 %p1, %r1, 16;\n\
         @%p1 st.shared.v4.b32 [%r8], {{%r7, %r7, %r7, %r7}};\n\
         shr.u32 %r9, %r2, 4; cvt.u64.u32 %rd3, %r9; or.b64 %rd3, %rd3, 0x0000000800400000; // 1024 between columns, 128 between rows\n\
         shr.u32 %r10, %r3, 4; cvt.u64.u32 %rd4, %r10; or.b64 %rd4, %rd4, 0x0000000800080000;\n\
         mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;\n{body}\nret;\n}}\n"
    )
}

/// The first 512 numbers after a run.
fn run(ptx: &str, threads: u32, seed: u64, eager: bool) -> Result<Vec<f32>, Box<Report>> {
    let (bytes, _) = common::run(ptx, [1, threads], &[0; 4096], seed, eager)?;
    Ok(bytes[..2048].as_chunks::<4>().0.iter().map(|c| f32::from_le_bytes(*c)).collect())
}

#[track_caller]
fn gives(body: &str, value: f32) {
    let ptx = kernel(body);
    for seed in 0..=SEEDS {
        let words = run(&ptx, 128, seed, seed == SEEDS).unwrap_or_else(|r| panic!("seed {seed}: {r}\n{ptx}"));
        assert_eq!(words, [value; 512], "seed {seed}");
    }
}

#[track_caller]
fn fires(body: &str, faults: &[Fault]) -> String {
    let ptx = kernel(body);
    common::fires(&ptx, faults, |seed| run(&ptx, 128, seed, false)).to_string()
}

/// 16 ones times 16 twos.
const PRODUCT: &str = "\
fence.proxy.async;
bar.sync 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd3, %rd4, 1, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
st.global.v4.f32 [%rd2], {%f0, %f1, %f2, %f3};";
const MMA: &str =
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd3, %rd4, 1, 1, 1, 0, 0;\n";
const WAIT: &str = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n";

#[test]
fn as_it_should_be() {
    gives(PRODUCT, 32.0);
    // Several that add to the same registers need no fence in between, nor a wait.
    gives(&replaced(PRODUCT, MMA, &MMA.repeat(3)), 96.0);
    gives(&replaced(PRODUCT, WAIT, &format!("wgmma.commit_group.sync.aligned;\n{MMA}{WAIT}")), 64.0);
    // After a wait the registers may be touched, and used again after a fence.
    let again = format!(
        "{WAIT}add.f32 %f0, %f0, 0f3F800000; add.f32 %f1, %f1, 0f3F800000;\nadd.f32 %f2, %f2, 0f3F800000; add.f32 %f3, %f3, 0f3F800000;\nwgmma.fence.sync.aligned;\n{MMA}{WAIT}"
    );
    gives(&replaced(PRODUCT, WAIT, &again), 65.0);
    // One group is left alone, whose registers nothing touches.
    let other =
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f4, %f5, %f6, %f7}, %rd3, %rd4, 0, 1, 1, 0, 0;\n";
    let one = format!(
        "wgmma.commit_group.sync.aligned;\n{other}wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;\n"
    );
    gives(&format!("{}\nwgmma.wait_group.sync.aligned 0;", replaced(PRODUCT, WAIT, &one)), 32.0);
}

#[test]
fn registers_and_fences() {
    let said = fires(&replaced(PRODUCT, "wgmma.fence.sync.aligned;\n", ""), &[Fault::ProductRegisters]);
    assert!(said.contains("no `wgmma.fence` before the first product"), "{said}");
    let touched = replaced(PRODUCT, "wgmma.fence.sync.aligned;\n", "wgmma.fence.sync.aligned;\nmov.f32 %f2, %f10;\n");
    let said = fires(&touched, &[Fault::ProductRegisters]);
    assert!(said.contains("register %f2: it was touched since the last `wgmma.fence`"), "{said}");
    // Reading counts as well, also after the wait.
    let read = format!("{WAIT}add.f32 %f20, %f1, %f1;\n{MMA}{WAIT}");
    let said = fires(&replaced(PRODUCT, WAIT, &read), &[Fault::ProductRegisters]);
    assert!(said.contains("register %f1: it was touched"), "{said}");
    gives(&replaced(PRODUCT, WAIT, &read.replace(MMA, &format!("wgmma.fence.sync.aligned;\n{MMA}"))), 64.0);
}

#[test]
fn commits_and_waits() {
    for text in [
        replaced(PRODUCT, "wgmma.commit_group.sync.aligned;\n", ""),
        replaced(PRODUCT, "wgmma.wait_group.sync.aligned 0;\n", ""),
        replaced(PRODUCT, "wait_group.sync.aligned 0", "wait_group.sync.aligned 1"),
        replaced(PRODUCT, WAIT, &format!("mov.f32 %f3, %f10;\n{WAIT}")),
    ] {
        let said = fires(&text, &[Fault::ProductRegisters]);
        assert!(said.contains("belongs to the asynchronous product of line"), "{said}");
    }
    let said = fires(PRODUCT.split("wgmma.wait").next().unwrap(), &[Fault::AsyncPending]);
    assert!(said.contains("has ended without waiting for this product"), "{said}");
    // The last warp commits only after a barrier that the others reach when they have waited.
    let late = "setp.ge.u32 %p2, %r1, 96; @%p2 bar.sync 1; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; @!%p2 bar.sync 1;\n";
    fires(&replaced(PRODUCT, WAIT, late), &[Fault::Deadlock]);
}

#[test]
fn memory_that_a_product_reads() {
    let fence = "fence.proxy.async;\n";
    let said = fires(&replaced(PRODUCT, fence, ""), &[Fault::ProxyFence]);
    assert!(said.contains("without `fence.proxy.async` in between"), "{said}");
    gives(&replaced(PRODUCT, "fence.proxy.async;\nbar.sync 0;\n", "bar.sync 0;\nfence.proxy.async;\n"), 32.0);
    fires(&replaced(PRODUCT, "bar.sync 0;\n", ""), &[Fault::SharedRace, Fault::Uninitialised, Fault::ProxyFence]);
    // Written before all warps have waited.
    let early = replaced(PRODUCT, WAIT, &format!("@%p1 st.shared.b32 [%r8], 0;\n{WAIT}"));
    let said = fires(&early, &[Fault::AsyncPending, Fault::SharedRace]);
    assert!(said.contains("product of warpgroup 0"), "{said}");
    // One warp's wait stands for its whole warpgroup: it may write what all of them have read.
    gives(&replaced(PRODUCT, WAIT, &format!("{WAIT}@%p1 st.shared.b32 [%r8], 0;\n")), 32.0);
    // Nothing has written the rows behind.
    let beyond = replaced(PRODUCT, "fence.proxy.async;\n", "add.s64 %rd4, %rd4, 16; fence.proxy.async;\n");
    fires(&beyond, &[Fault::OutOfBounds]);
    let misplaced =
        replaced(PRODUCT, "fence.proxy.async;\n", "or.b64 %rd4, %rd4, 0x2000000000000; fence.proxy.async;\n");
    fires(&misplaced, &[Fault::Illegal]);
}

#[test]
fn matrix_a_in_registers() {
    let from = "%rd3, %rd4, 1, 1, 1, 0, 0;";
    let registers = replaced(PRODUCT, from, "{%r11, %r12, %r13, %r14}, %rd4, 1, 1, 1, 0;");
    let right = format!("mov.b32 %r11, %r6; mov.b32 %r12, %r6; mov.b32 %r13, %r6; mov.b32 %r14, %r6;\n{registers}");
    gives(&right, 32.0);
    let said = fires(&replaced(&right, WAIT, &format!("mov.b32 %r13, %r7;\n{WAIT}")), &[Fault::ProductRegisters]);
    assert!(said.contains("register %r13 belongs"), "{said}");
    let moved = replaced(&right, "wgmma.fence.sync.aligned;\n", "wgmma.fence.sync.aligned;\nmov.b32 %r14, %r6;\n");
    fires(&moved, &[Fault::ProductRegisters]);
    // What one product computes another may not take before it is there.
    let chained = format!(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f4, %f5, %f6, %f7}}, {{%f0, %f1, %f2, %f3}}, %rd4, 0, 1, 1, 0;\n{WAIT}"
    );
    let said = fires(&replaced(PRODUCT, WAIT, &chained), &[Fault::ProductRegisters]);
    assert!(said.contains("register %f0: the product that computes it has not been waited for"), "{said}");
    let wider = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}, %rd3, %rd4, 1, 1, 1, 0, 0;\n";
    let said = fires(&replaced(PRODUCT, WAIT, &format!("{wider}{WAIT}")), &[Fault::ProductRegisters]);
    assert!(said.contains("of another shape"), "{said}");
}

#[test]
fn warps_of_a_warpgroup() {
    let said = fires(
        &replaced(PRODUCT, MMA, &format!("setp.lt.u32 %p2, %r1, 64;\n@%p2 sub.s64 %rd4, %rd4, 0x10000;\n{MMA}")),
        &[Fault::Divergence],
    );
    assert!(said.contains("with other descriptors or at another place"), "{said}");
    fires(
        &replaced(PRODUCT, MMA, &format!("setp.eq.u32 %p2, %r1, 5;\n@%p2 sub.s64 %rd4, %rd4, 0x10000;\n{MMA}")),
        &[Fault::Illegal],
    );
    fires(
        &replaced(PRODUCT, MMA, &format!("setp.lt.u32 %p2, %r1, 64;\n@%p2 bra OVER;\n{MMA}OVER:\n")),
        &[Fault::Divergence],
    );
    let part = run(&kernel(PRODUCT), 96, 0, false).unwrap_err();
    assert_eq!(part.fault, Fault::Illegal, "{part}");
    assert!(part.to_string().contains("3 warps are no whole number of warpgroups"), "{part}");
}
