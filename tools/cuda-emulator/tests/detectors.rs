// SPDX-License-Identifier: MIT OR Apache-2.0
//! Each detector fires on a kernel with one defect, for every seed, and stays silent on the kernel without it.

mod common;

use common::words;
use cuda_emulator::{Fault, Launch, Memory, Module, Options, Report, Stats, launch};

const HEADER: &str = ".version 8.0\n.target sm_80\n.address_size 64\n";

/// A kernel of one pointer parameter, loaded into `%rd1`; `%r1` is the thread, `%r2` the block.
fn kernel(shared: &str, body: &str) -> String {
    format!(
        "{HEADER}.visible .entry k(.param .u64 p) {{\n{shared}\n.reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %rd<8>; \
         .reg .f32 %f<16>;\nld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;\n{body}\nret;\n}}\n"
    )
}

struct Setup {
    blocks: u32,
    threads: u32,
    /// Bytes behind the parameter, all written as zeros.
    bytes: usize,
}

const ONE: Setup = Setup { blocks: 1, threads: 64, bytes: 1024 };

fn run(ptx: &str, s: &Setup, seed: u64, eager: bool) -> Result<(Vec<u8>, Stats), Box<Report>> {
    common::run(ptx, [s.blocks, s.threads], &vec![0; s.bytes], seed, eager)
}

#[track_caller]
fn fires(ptx: &str, s: &Setup, fault: Fault) -> Box<Report> {
    common::fires(ptx, &[fault], |seed| run(ptx, s, seed, false))
}

#[track_caller]
fn silent(ptx: &str, s: &Setup) -> Vec<u8> {
    let mut first: Option<Vec<u8>> = None;
    for seed in 0..16 {
        let (bytes, _) = run(ptx, s, seed, seed == 0).unwrap_or_else(|r| panic!("seed {seed}: {r}\n{ptx}"));
        assert_eq!(*first.get_or_insert_with(|| bytes.clone()), bytes, "seed {seed}");
    }
    first.unwrap()
}

#[test]
fn out_of_bounds() {
    let at = |offset: i32| {
        kernel(
            "",
            &format!("mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd1, %rd2;\nst.global.u32 [%rd2+{offset}], %r1;"),
        )
    };
    silent(&at(1024 - 256), &ONE);
    let r = fires(&at(1024 - 252), &ONE, Fault::OutOfBounds);
    assert_eq!((r.line, r.text.as_str(), r.thread), (9, "st.global.u32 [%rd2+772], %r1;", Some([63, 0, 0])));
    assert!(r.detail.contains("byte 1024 of device allocation"), "{r}");
    fires(&at(-4), &ONE, Fault::OutOfBounds);
    let shared = |at: u32| kernel(".shared .align 4 .b8 s[64];", &format!("st.shared.u32 [s+{at}], 1;"));
    fires(&shared(64), &Setup { threads: 1, ..ONE }, Fault::OutOfBounds);
    silent(&shared(60), &Setup { threads: 1, ..ONE });
}

#[test]
fn misaligned() {
    fires(&kernel("", "ld.global.u32 %r3, [%rd1+2];"), &ONE, Fault::Misaligned);
    fires(&kernel("", "ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%rd1+8];"), &ONE, Fault::Misaligned);
    silent(&kernel("", "ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%rd1+16];"), &ONE);
}

#[test]
fn uninitialised() {
    let shared = ".shared .align 4 .b8 s[256];";
    let body = |store: &str| {
        kernel(
            shared,
            &format!("shl.b32 %r3, %r1, 2; mov.u32 %r4, s; add.u32 %r3, %r3, %r4;\n{store}\nld.shared.u32 %r5, [%r3];"),
        )
    };
    silent(&body("st.shared.u32 [%r3], %r1;"), &ONE);
    fires(&body(""), &ONE, Fault::Uninitialised);
    fires(&body("st.shared.u16 [%r3], 1;"), &ONE, Fault::Uninitialised);
    let mut mem = Memory::new();
    let ptx = kernel("", "ld.global.u32 %r3, [%rd1];");
    let loaded = Module::parse(&ptx).unwrap().load(&mut mem).unwrap();
    let p = mem.alloc(16);
    let params = p.to_le_bytes();
    let how = Launch {
        grid: [1; 3],
        block: [1; 3],
        cluster: [1; 3],
        dynamic_shared: 0,
        params: &params,
        options: Options::default(),
    };
    let k = loaded.kernel("k").unwrap();
    assert_eq!(launch(k, &mut mem, &how).unwrap_err().fault, Fault::Uninitialised);
    mem.write(p, &[0; 4]).unwrap();
    launch(k, &mut mem, &how).unwrap();
    mem.free(p);
    assert_eq!(launch(k, &mut mem, &how).unwrap_err().fault, Fault::UseAfterFree);
}

#[test]
fn constants_are_read_only() {
    let ptx = |op: &str| {
        kernel("", &format!("mov.u64 %rd2, c;\n{op}")).replacen(".visible", ".const .align 4 .u32 c = 7;\n.visible", 1)
    };
    fires(&ptx("st.global.u32 [%rd2], 1;"), &ONE, Fault::ReadOnly);
    let out = silent(&ptx("ld.const.u32 %r3, [c]; setp.eq.u32 %p1, %r1, 0; @%p1 st.global.u32 [%rd1], %r3;"), &ONE);
    assert_eq!(words(&out)[0], 7);
}

/// Parameters have generic addresses, by which they can be read and no more, and which no other space knows.
#[test]
fn parameters_are_read_only() {
    let ptx = |op: &str| kernel("", &format!("mov.b64 %rd2, p; cvta.param.u64 %rd2, %rd2;\n{op}"));
    silent(&ptx("ld.u64 %rd3, [%rd2]; ld.u32 %r3, [%rd2+4];"), &ONE);
    fires(&ptx("st.u32 [%rd2], 1;"), &ONE, Fault::ReadOnly);
    fires(&ptx("ld.u32 %r3, [%rd2+2];"), &ONE, Fault::Misaligned);
    for op in [
        "ld.u32 %r3, [%rd2+8];",
        "ld.u64 %rd3, [%rd2+8];",
        "ld.u32 %r3, [%rd2+-4];",
        "ld.global.u32 %r3, [%rd2];",
        "atom.add.u32 %r3, [%rd2], 1;",
    ] {
        fires(&ptx(op), &ONE, Fault::OutOfBounds);
    }
}

/// Every thread writes its slot and reads the one 32 further on: another warp's.
fn exchange(barrier: &str) -> String {
    kernel(
        ".shared .align 4 .b8 s[256];",
        &format!(
            "mov.u32 %r4, s; shl.b32 %r3, %r1, 2; add.u32 %r5, %r3, %r4; st.shared.u32 [%r5], %r1;\n{barrier}\n\
             xor.b32 %r6, %r3, 128; add.u32 %r6, %r6, %r4; ld.shared.u32 %r7, [%r6];\n\
             mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd1, %rd2; st.global.u32 [%rd2], %r7;"
        ),
    )
}

#[test]
fn shared_race() {
    let out = silent(&exchange("bar.sync 0;"), &ONE);
    assert_eq!(words(&out)[..64], (0..64).map(|t| t ^ 32).collect::<Vec<u32>>());
    silent(&exchange("barrier.sync 3, 64;"), &ONE);
    // Whichever warp comes first, it misses what the other has not written yet, or is not ordered with it.
    for seed in 0..16 {
        let r = run(&exchange(""), &ONE, seed, false).unwrap_err();
        assert!(matches!(r.fault, Fault::SharedRace | Fault::Uninitialised), "{r}");
    }
    // A second barrier is missing: the slot is written again while the other warp may still read it.
    let again =
        |barrier: &str| exchange("bar.sync 0;").replace("ret;", &format!("{barrier} st.shared.u32 [%r5], 1;\nret;"));
    silent(&again("bar.sync 0;"), &ONE);
    fires(&again(""), &ONE, Fault::SharedRace);
}

#[test]
fn producers_and_consumers() {
    // Warp 0 arrives, warp 1 waits: one direction is ordered, the other is not.
    let ptx = |back: &str| {
        kernel(
            ".shared .align 4 .b8 s[256];",
            &format!(
                "mov.u32 %r4, s; and.b32 %r3, %r1, 31; shl.b32 %r3, %r3, 2; add.u32 %r5, %r3, %r4; setp.ge.u32 %p1, %r1, 32;\n\
                 @%p1 bra CONSUMER;\nst.shared.u32 [%r5], %r1;\nbar.arrive 1, 64;\n{back}\nret;\nCONSUMER:\nbar.sync 1, 64;\n\
                 ld.shared.u32 %r6, [%r5];"
            ),
        )
    };
    silent(&ptx(""), &ONE);
    for seed in 0..16 {
        // The producer overwrites what it does not know to be read.
        let r = run(&ptx("st.shared.u32 [%r5], 7;"), &ONE, seed, false).unwrap_err();
        assert_eq!(r.fault, Fault::SharedRace, "{r}");
    }
}

#[test]
fn lanes_of_a_warp() {
    let one = Setup { threads: 32, ..ONE };
    let ptx = |sync: &str| exchange(sync).replace("xor.b32 %r6, %r3, 128;", "xor.b32 %r6, %r3, 4;");
    fires(&ptx(""), &one, Fault::SharedRace);
    silent(&ptx("bar.warp.sync -1;"), &one);
    // A shuffle brings lanes together and orders nothing.
    fires(&ptx("shfl.sync.bfly.b32 %r8, %r1, 1, 31, -1;"), &one, Fault::SharedRace);
}

#[test]
fn lanes_in_global_memory() {
    // All lanes read a word, then the first one overwrites it.
    let ptx = |sync: &str| {
        kernel(
            "",
            &format!("ld.global.u32 %r3, [%rd1];\n{sync}\nsetp.eq.u32 %p1, %r1, 0; @%p1 st.global.u32 [%rd1], 5;"),
        )
    };
    let one = Setup { threads: 32, ..ONE };
    fires(&ptx(""), &one, Fault::GlobalRace);
    assert_eq!(words(&silent(&ptx("bar.warp.sync -1;"), &one))[0], 5);
}

/// Every thread copies 16 bytes, waits and reads those of another warp.
fn copies(first: &str, second: &str) -> String {
    kernel(
        ".shared .align 16 .b8 s[1024];",
        &format!(
            "mov.u32 %r4, s; shl.b32 %r3, %r1, 4; add.u32 %r5, %r3, %r4; cvt.u64.u32 %rd2, %r3; add.s64 %rd2, %rd1, %rd2;\n\
             cp.async.cg.shared.global [%r5], [%rd2], 16;\ncp.async.commit_group;\n{first}\n{second}\n\
             xor.b32 %r6, %r3, 512; add.u32 %r6, %r6, %r4; ld.shared.v4.u32 {{%r7, %r8, %r9, %r10}}, [%r6];"
        ),
    )
}

#[test]
fn asynchronous_copies() {
    silent(&copies("cp.async.wait_group 0;", "bar.sync 0;"), &ONE);
    silent(&copies("cp.async.wait_all;", "bar.sync 0;"), &ONE);
    for (first, second) in [("", "bar.sync 0;"), ("cp.async.wait_group 1;", "bar.sync 0;")] {
        for seed in 0..16 {
            let r = run(&copies(first, second), &ONE, seed, false).unwrap_err();
            assert!(matches!(r.fault, Fault::AsyncPending | Fault::Uninitialised), "{r}");
        }
    }
    for seed in 0..16 {
        for (first, second) in [("bar.sync 0;", "cp.async.wait_group 0;"), ("cp.async.wait_group 0;", "")] {
            let r = run(&copies(first, second), &ONE, seed, false).unwrap_err();
            assert!(matches!(r.fault, Fault::AsyncPending | Fault::SharedRace | Fault::Uninitialised), "{r}");
        }
    }
}

#[test]
fn zero_fill_of_copies() {
    let ptx = kernel(
        ".shared .align 16 .b8 s[16];",
        "mov.u32 %r4, s; mov.u32 %r5, 4; st.global.u32 [%rd1], -1; st.global.u32 [%rd1+4], -1; bar.sync 0;\n\
         cp.async.ca.shared.global [%r4], [%rd1], 16, %r5; cp.async.wait_all;\n\
         ld.shared.v4.u32 {%r7, %r8, %r9, %r10}, [%r4]; st.global.v4.u32 [%rd1+16], {%r7, %r8, %r9, %r10};",
    );
    let out = words(&silent(&ptx, &Setup { threads: 1, ..ONE }));
    assert_eq!(out[4..8], [u32::MAX, 0, 0, 0]);
}

#[test]
fn divergence() {
    let part = |sync: &str| kernel("", &format!("setp.lt.u32 %p1, %r1, 16;\n@%p1 bra SKIP;\n{sync}\nSKIP:"));
    let one = Setup { threads: 32, ..ONE };
    silent(&part("activemask.b32 %r3;"), &one);
    silent(&part("shfl.sync.bfly.b32 %r3, %r1, 1, 31, 0xffff0000;"), &one);
    fires(&part("shfl.sync.bfly.b32 %r3, %r1, 1, 31, -1;"), &one, Fault::Divergence);
    fires(&part("bar.sync 0; ret;").replace("SKIP:", "SKIP:\nbar.sync 1;"), &one, Fault::Divergence);
    fires(&kernel("", "setp.lt.u32 %p1, %r1, 16;\n@%p1 bar.sync 0;"), &one, Fault::Divergence);
    // Both sides meet again: no divergence.
    silent(
        &kernel(
            "",
            "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra A;\nadd.u32 %r3, %r1, 1;\nbra B;\nA:\nadd.u32 %r3, %r1, 2;\nB:\nbar.sync 0;",
        ),
        &ONE,
    );
}

#[test]
fn deadlock_and_livelock() {
    let r = fires(
        &kernel("", "setp.lt.u32 %p1, %r1, 32;\n@%p1 bra SKIP;\nbar.sync 1, 64;\nret;\nSKIP:\nbar.sync 2, 64;"),
        &ONE,
        Fault::Deadlock,
    );
    assert!(r.detail.contains("barrier 1 has 32 of 64") && r.detail.contains("barrier 2"), "{r}");
    // Warps that have ended count for the barrier of the whole block, as on the device.
    silent(&kernel("", "setp.lt.u32 %p1, %r1, 32;\n@%p1 ret;\nbar.sync 0;"), &ONE);
    fires(
        &kernel("", "L:\nld.relaxed.gpu.global.u32 %r3, [%rd1]; setp.eq.u32 %p1, %r3, 0;\n@%p1 bra L;"),
        &ONE,
        Fault::Livelock,
    );
    fires(&kernel("", "bar.sync 0, 48;"), &ONE, Fault::Illegal);
    fires(&kernel("", "trap;"), &ONE, Fault::Illegal);
}

/// Blocks take turns by a counter: each adds to a sum that is not atomic.
fn turns(wait: &str, pass: &str) -> String {
    kernel(
        "",
        &format!(
            "setp.ne.u32 %p1, %r1, 0;\n@%p1 bra DONE;\nWAIT:\n{wait}\nsetp.ne.u32 %p2, %r3, %r2;\n@%p2 bra WAIT;\n\
             ld.global.u32 %r4, [%rd1+64]; add.u32 %r4, %r4, %r2; st.global.u32 [%rd1+64], %r4;\nadd.u32 %r5, %r2, 1;\n{pass}\nDONE:"
        ),
    )
}

#[test]
fn turns_between_blocks() {
    let s = Setup { blocks: 4, threads: 64, bytes: 128 };
    for (wait, pass) in [
        ("ld.acquire.gpu.global.u32 %r3, [%rd1];", "st.release.gpu.global.u32 [%rd1], %r5;"),
        ("ld.volatile.global.u32 %r3, [%rd1]; membar.gl;", "membar.gl; st.volatile.global.u32 [%rd1], %r5;"),
        ("ld.acquire.gpu.global.u32 %r3, [%rd1];", "red.release.gpu.global.add.u32 [%rd1], 1;"),
        ("atom.acquire.gpu.global.add.u32 %r3, [%rd1], 0;", "membar.gl; atom.global.add.u32 %r6, [%rd1], 1;"),
    ] {
        let out = words(&silent(&turns(wait, pass), &s));
        assert_eq!(out[16], 6);
    }
    for (wait, pass) in [
        ("ld.relaxed.gpu.global.u32 %r3, [%rd1];", "st.release.gpu.global.u32 [%rd1], %r5;"),
        ("ld.acquire.gpu.global.u32 %r3, [%rd1];", "st.relaxed.gpu.global.u32 [%rd1], %r5;"),
        ("ld.volatile.global.u32 %r3, [%rd1];", "membar.gl; st.volatile.global.u32 [%rd1], %r5;"),
        ("ld.volatile.global.u32 %r3, [%rd1]; membar.gl;", "membar.cta; st.volatile.global.u32 [%rd1], %r5;"),
    ] {
        fires(&turns(wait, pass), &s, Fault::GlobalRace);
    }
}

#[test]
fn global_races() {
    let s = Setup { blocks: 2, threads: 32, bytes: 1024 };
    fires(&kernel("", "st.global.u32 [%rd1], %r2;"), &s, Fault::GlobalRace);
    silent(&kernel("", "red.global.add.u32 [%rd1], 1;"), &s);
    // Neighbouring bytes of one line are no race.
    let own =
        "mul.wide.u32 %rd2, %r2, 2; add.s64 %rd2, %rd1, %rd2; setp.eq.u32 %p1, %r1, 0; @%p1 st.global.u16 [%rd2], 1;";
    assert_eq!(words(&silent(&kernel("", own), &s))[0], 0x1_0001);
    // One block reads what the other writes.
    fires(
        &kernel("", "setp.eq.u32 %p1, %r2, 0; @%p1 ld.global.u32 %r3, [%rd1]; @!%p1 st.global.u32 [%rd1], 1;"),
        &s,
        Fault::GlobalRace,
    );
}

#[test]
fn bank_conflicts_are_counted() {
    let stride = |bytes: u32| {
        kernel(
            ".shared .align 4 .b8 s[4096];",
            &format!("mul.lo.u32 %r3, %r1, {bytes}; mov.u32 %r4, s; add.u32 %r3, %r3, %r4; st.shared.u32 [%r3], %r1;"),
        )
    };
    let one = Setup { threads: 32, ..ONE };
    for (bytes, extra) in [(4, 0), (8, 1), (16, 3), (128, 31), (68, 0), (0, 0)] {
        let (_, stats) = run(&stride(bytes), &one, 0, false).unwrap_or_else(|r| panic!("{bytes}: {r}"));
        assert_eq!(stats.bank_conflicts(), extra, "{bytes}");
    }
    let (_, stats) = run(&kernel("", "add.u32 %r3, %r1, 1;"), &ONE, 0, false).unwrap();
    assert_eq!(stats.executed(|line| line == 8), 2, "two warps execute line 8 once each");
}
