// SPDX-License-Identifier: MIT OR Apache-2.0
//! Hopper's asynchronous instructions: a kernel that synchronises as it should computes right and is not reported, in
//! any order; each thing it may leave out is.

mod common;

use common::{SEEDS, counting, replaced, without, words};
use cuda_emulator::{Fault, Report};

/// A kernel of one pointer, in `%rd1`, to 4096 bytes: words that count from 0. `%r1` is the thread; `s` and `bar` are
/// shared.
fn kernel(body: &str) -> String {
    format!(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p) {{\n\
         .shared .align 1024 .b8 s[4096]; .shared .align 8 .b8 bar[16];\n\
         .reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %rd<16>; .reg .f32 %f<32>;\n\
         ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; mov.u32 %r2, s; mov.u32 %r3, bar;\n\
         setp.eq.u32 %p1, %r1, 0; shl.b32 %r4, %r1, 2; add.u32 %r5, %r2, %r4; cvt.u64.u32 %rd2, %r4; add.s64 %rd2, %rd1, %rd2;\n\
         {body}\nret;\n}}\n"
    )
}

/// The words after a run of 128 threads.
fn run(ptx: &str, seed: u64, eager: bool) -> Result<Vec<u32>, Box<Report>> {
    common::run(ptx, [1, 128], &counting(), seed, eager).map(|(bytes, _)| words(&bytes))
}

/// Runs right in every order: the words in the end.
#[track_caller]
fn silent(body: &str) -> Vec<u32> {
    let ptx = kernel(body);
    let first = run(&ptx, 0, true).unwrap_or_else(|r| panic!("eager: {r}\n{ptx}"));
    for seed in 0..SEEDS {
        let words = run(&ptx, seed, false).unwrap_or_else(|r| panic!("seed {seed}: {r}\n{ptx}"));
        assert_eq!(words, first, "seed {seed}");
    }
    first
}

/// Is reported in every order, as one of these; the last message.
#[track_caller]
fn fires(body: &str, faults: &[Fault]) -> String {
    let ptx = kernel(body);
    common::fires(&ptx, faults, |seed| run(&ptx, seed, false)).to_string()
}

/// What touching a copy's destination too early can be called: it depends on who comes first.
const EARLY: &[Fault] = &[Fault::AsyncPending, Fault::SharedRace, Fault::Uninitialised];

/// What is prefetched as a tensor map has to be one, where maps may lie.
#[test]
fn prefetched_maps() {
    let said = fires("@%p1 prefetch.tensormap [%rd1];", &[Fault::Illegal]);
    assert!(said.contains("no tensor map that this driver has encoded"), "{said}");
    fires("@%p1 prefetch.tensormap [%rd1+32];", &[Fault::Misaligned]);
    fires("@%p1 prefetch.tensormap [%rd1+4096];", &[Fault::OutOfBounds]);
}

/// Thread 0 loads 512 bytes; all wait, and each writes its word plus 1 back behind them.
const LOAD: &str = "\
@%p1 mbarrier.init.shared.b64 [%r3], 1;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 512;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 512, [%r3];
WAIT:
mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
@!%p2 bra WAIT;
ld.shared.u32 %r6, [%r5]; add.u32 %r6, %r6, 1; st.global.u32 [%rd2+512], %r6;";

#[test]
fn a_load() {
    let words = silent(LOAD);
    assert_eq!(words[128..256], (1..=128).collect::<Vec<u32>>());
    // By generic addresses, with a state instead of a parity, and tested instead of tried.
    let state = replaced(LOAD, "_, [%r3], 512", "%rd5, [%r3], 512");
    let state = replaced(
        &state,
        "WAIT:\nmbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;",
        "@!%p1 bra MEET;\nWAIT:\nmbarrier.test_wait.shared.b64 %p2, [%r3], %rd5;",
    );
    let state = replaced(&state, "bra WAIT;", "bra WAIT;\nMEET:\nbar.sync 0;");
    assert_eq!(silent(&state), words);
    let generic = "cvt.u64.u32 %rd6, %r3; cvta.shared.u64 %rd6, %rd6;\n";
    assert_eq!(
        silent(&format!("{generic}{}", replaced(LOAD, "mbarrier.init.shared.b64 [%r3]", "mbarrier.init.b64 [%rd6]"))),
        words
    );
    // The announcement may come after the copy, and apart from the arrival.
    let apart = replaced(LOAD, "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 512;\n", "");
    let apart = replaced(
        &apart,
        "WAIT:",
        "@%p1 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r3], 512; @%p1 mbarrier.arrive.shared.b64 _, [%r3];\nWAIT:",
    );
    assert_eq!(silent(&apart), words);
}

#[test]
fn a_load_that_is_not_waited_for() {
    fires(&without(LOAD, "@!%p2 bra WAIT;"), EARLY);
    // The parity of the phase before the first: passes at once.
    fires(&replaced(LOAD, "[%r3], 0;", "[%r3], 1;"), &[EARLY, &[Fault::Barrier]].concat());
    // One thread has waited, and the others are not ordered after it.
    let one = replaced(LOAD, "WAIT:\n", "@!%p1 bra GO;\nWAIT:\n");
    let one = replaced(&one, "bra WAIT;", "bra WAIT;\nGO:");
    fires(&one, EARLY);
    silent(&replaced(&one, "GO:", "GO:\nbar.sync 0;"));
    // No wait and no read: reported where the copy has not landed when the block ends.
    let text = kernel(LOAD.split("WAIT:").next().unwrap());
    let said: Vec<_> = (0..SEEDS).filter_map(|seed| run(&text, seed, false).err()).collect();
    assert!(said.len() > SEEDS as usize / 2, "{} of {SEEDS}", said.len());
    for report in said {
        assert_eq!(report.fault, Fault::AsyncPending, "{report}");
        assert!(report.to_string().contains("nothing has waited for this copy"), "{report}");
    }
}

#[test]
fn bytes_that_are_announced_wrong() {
    let said = fires(&replaced(LOAD, "_, [%r3], 512", "_, [%r3], 1024"), &[Fault::Deadlock]);
    assert!(said.contains("the barrier at 4096 is in phase 0: 0 arrivals and 512 bytes are missing"), "{said}");
    let said = fires(&replaced(LOAD, "_, [%r3], 512", "_, [%r3], 256"), &[Fault::Barrier]);
    assert!(said.contains("256 bytes more have landed"), "{said}");
    // Two copies, of which one is announced: the phase may end before the second has landed.
    let two = replaced(
        LOAD,
        "WAIT:",
        "@%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2+512], [%rd1+512], 512, [%r3];\nWAIT:",
    );
    let two = replaced(
        &two,
        "ld.shared.u32 %r6, [%r5];",
        "ld.shared.u32 %r6, [%r5]; ld.shared.u32 %r7, [%r5+512]; sub.u32 %r6, %r7, %r6;",
    );
    let early = [EARLY, &[Fault::Barrier]].concat();
    fires(&two, &early);
    assert_eq!(silent(&replaced(&two, "_, [%r3], 512", "_, [%r3], 1024"))[128..256], [129; 128]);
    // More than a barrier can count.
    fires(&replaced(LOAD, "_, [%r3], 512", "_, [%r3], 1048576"), &[Fault::Barrier]);
}

#[test]
fn arrivals() {
    fires(
        &without(LOAD, "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 512;\n"),
        &[Fault::Deadlock, Fault::Barrier],
    );
    fires(
        &replaced(LOAD, "mbarrier.arrive.expect_tx.shared.b64 _,", "mbarrier.expect_tx.shared.b64"),
        &[Fault::Deadlock],
    );
    let said = fires(&replaced(LOAD, "[%r3], 1;", "[%r3], 2;"), &[Fault::Deadlock]);
    assert!(said.contains("1 arrivals and 0 bytes are missing"), "{said}");
    // Every thread arrives where one is expected.
    let said =
        fires(&replaced(LOAD, "@%p1 mbarrier.arrive", "mbarrier.arrive"), &[Fault::Barrier, Fault::AsyncPending]);
    assert!(said.contains("arrival") || said.contains("copy"), "{said}");
    // Every lane issues a copy of its own.
    fires(&replaced(LOAD, "@%p1 cp.async", "cp.async"), EARLY);
}

#[test]
fn barriers_that_are_not_there() {
    let early = [EARLY, &[Fault::Barrier]].concat();
    let said = fires(&without(LOAD, "bar.sync 0;\n"), &early);
    assert!(said.contains("barrier at 4096"), "{said}");
    fires(&without(LOAD, "@%p1 mbarrier.init.shared.b64 [%r3], 1;\n"), &[Fault::Barrier]);
    fires(&replaced(LOAD, "bar.sync 0;", "@%p1 mbarrier.init.shared.b64 [%r3], 1; bar.sync 0;"), &[Fault::Barrier]);
    let over = format!("{LOAD}\nbar.sync 0; @%p1 mbarrier.inval.shared.b64 [%r3]; bar.sync 0;\n");
    silent(&over);
    // Its bytes can be used again, as data or as a barrier.
    silent(&format!("{over}@%p1 st.shared.u32 [%r3], 7; @%p1 ld.shared.u32 %r7, [%r3];"));
    silent(&format!("{over}@%p1 mbarrier.init.shared.b64 [%r3], 3;"));
    fires(&format!("{over}@%p1 ld.shared.u32 %r7, [%r3];"), &[Fault::Uninitialised]);
    let said = fires(&format!("{LOAD}\nld.shared.u32 %r7, [%r3+4];"), &[Fault::Barrier]);
    assert!(said.contains("there is a barrier, made at line"), "{said}");
    fires(&replaced(LOAD, "bar.sync 0;", "bar.sync 0; @%p1 mbarrier.arrive.shared.b64 _, [%r3+8];"), &[Fault::Barrier]);
    fires(&replaced(LOAD, "[%r3], 1;", "[%r3+4], 1;"), &[Fault::Misaligned]);
    fires(&replaced(LOAD, "[%r3], 0;", "[%r3], 2;"), &[Fault::Illegal]);
}

#[test]
fn a_phase_that_laps_its_waiter() {
    // Two phases end before any thread waits for the first: its parity is that of the third.
    let twice = "@%p1 mbarrier.init.shared.b64 [%r3], 1; @%p1 mbarrier.arrive.shared.b64 _, [%r3];
                 @%p1 mbarrier.arrive.shared.b64 _, [%r3]; bar.sync 0;
                 WAIT:
                 mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra WAIT;";
    let said = fires(twice, &[Fault::Barrier]);
    assert!(said.contains("means phase 0 to this warp, which knows 0 phases to have ended; 2 have"), "{said}");
    // In turn: each phase is waited for before the next one ends.
    let turns = "@%p1 mbarrier.init.shared.b64 [%r3], 1; mov.u32 %r6, 0;
                 LOOP:
                 bar.sync 0; @%p1 mbarrier.arrive.shared.b64 _, [%r3]; and.b32 %r7, %r6, 1;
                 WAIT:
                 mbarrier.try_wait.parity.shared.b64 %p2, [%r3], %r7; @!%p2 bra WAIT;
                 add.u32 %r6, %r6, 1; setp.lt.u32 %p3, %r6, 5; @%p3 bra LOOP;";
    silent(turns);
    // Who has missed phases but knows of them by another barrier means the current one.
    let told = "@%p1 mbarrier.init.shared.b64 [%r3], 1; bar.sync 0; setp.ge.u32 %p4, %r1, 32; @%p4 bra LATER;
                @%p1 mbarrier.arrive.shared.b64 _, [%r3];
                A: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra A;
                @%p1 mbarrier.arrive.shared.b64 _, [%r3];
                B: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 1; @!%p2 bra B;
                LATER:
                bar.sync 0; @%p1 mbarrier.arrive.shared.b64 _, [%r3];
                C: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra C;";
    silent(told);
}

/// Warp 0 loads tiles of 128 bytes into a ring of two, warp 1 adds them up.
fn ring(free: &str) -> String {
    format!(
        "@%p1 mbarrier.init.shared.b64 [%r3], 1; @%p1 mbarrier.init.shared.b64 [%r3+8], 1;
         .shared .align 8 .b8 free[16]; mov.u32 %r20, free;
         @%p1 mbarrier.init.shared.b64 [%r20], 1; @%p1 mbarrier.init.shared.b64 [%r20+8], 1;
         bar.sync 0; mov.u32 %r6, 0; mov.u32 %r7, 0; setp.ge.u32 %p4, %r1, 64; @%p4 ret; setp.ge.u32 %p4, %r1, 32; @%p4 bra SUM;
         @!%p1 ret;
         FILL:
         and.b32 %r8, %r6, 1; shl.b32 %r9, %r8, 3; add.u32 %r10, %r3, %r9; add.u32 %r11, %r20, %r9; shl.b32 %r12, %r8, 7;
         add.u32 %r12, %r2, %r12; shr.u32 %r13, %r6, 1; and.b32 %r13, %r13, 1; xor.b32 %r13, %r13, 1;
         A: mbarrier.try_wait.parity.shared.b64 %p2, [%r11], %r13; @!%p2 bra A;
         mul.wide.u32 %rd4, %r6, 128; add.s64 %rd4, %rd1, %rd4; mbarrier.arrive.expect_tx.shared.b64 _, [%r10], 128;
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r12], [%rd4], 128, [%r10];
         add.u32 %r6, %r6, 1; setp.lt.u32 %p3, %r6, 7; @%p3 bra FILL; ret;
         SUM:
         and.b32 %r8, %r6, 1; shl.b32 %r9, %r8, 3; add.u32 %r10, %r3, %r9; add.u32 %r11, %r20, %r9; shl.b32 %r12, %r8, 7;
         sub.u32 %r13, %r1, 32; mad.lo.u32 %r12, %r13, 4, %r12; add.u32 %r12, %r12, %r2; shr.u32 %r13, %r6, 1; and.b32 %r13, %r13, 1;
         B: mbarrier.try_wait.parity.shared.b64 %p2, [%r10], %r13; @!%p2 bra B;
         ld.shared.u32 %r14, [%r12]; add.u32 %r7, %r7, %r14; bar.warp.sync -1; setp.eq.u32 %p5, %r1, 32;
         {free}
         add.u32 %r6, %r6, 1; setp.lt.u32 %p3, %r6, 7; @%p3 bra SUM; st.global.u32 [%rd2+2048], %r7;"
    )
}

#[test]
fn a_ring_of_tiles() {
    let right = ring("@%p5 mbarrier.arrive.shared.b64 _, [%r11];");
    let words = silent(&right);
    for lane in 0..32 {
        assert_eq!(words[512 + 32 + lane], (0..7).map(|k| 32 * k + lane as u32).sum::<u32>(), "{lane}");
    }
    // The tile is not given back.
    fires(&ring(""), &[Fault::Deadlock]);
    // It is given back before it is read.
    let early = without(&right, "ld.shared.u32 %r14, [%r12]; ");
    let early = replaced(&early, "add.u32 %r7, %r7, %r14; ", "");
    let early = replaced(&early, "[%r11];\n", "[%r11];\nld.shared.u32 %r14, [%r12]; add.u32 %r7, %r7, %r14;\n");
    fires(&early, EARLY);
    // The loader does not wait for it.
    fires(&without(&right, "@!%p2 bra A;"), &[EARLY, &[Fault::Barrier, Fault::Deadlock]].concat());
}

/// Each thread writes a word, and thread 0 stores all of them; then each adds 1 to its word in shared memory.
const STORE: &str = "\
add.u32 %r6, %r1, 1000; st.shared.u32 [%r5], %r6;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1+1024], [%r2], 512;
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group.read 0;
bar.sync 1;
st.shared.u32 [%r5], 7;";

#[test]
fn a_store() {
    let words = silent(STORE);
    assert_eq!(words[256..384], (1000..1128).collect::<Vec<u32>>());
    // The fence may stand behind the barrier, in the thread that issues the copy, and cover more.
    let reader = replaced(STORE, "fence.proxy.async.shared::cta;\nbar.sync 0;", "bar.sync 0; fence.proxy.async;");
    assert_eq!(silent(&reader), words);
    // Not before the write, not after the copy, not for other memory.
    let fence = "fence.proxy.async.shared::cta;\n";
    for moved in [
        without(STORE, fence),
        format!("{fence}{}", without(STORE, fence)),
        replaced(&without(STORE, fence), "bar.sync 1;", &format!("{fence}bar.sync 1;")),
        replaced(STORE, fence, "fence.proxy.async.global;\n"),
    ] {
        let said = fires(&moved, &[Fault::ProxyFence]);
        assert!(said.contains("without `fence.proxy.async` in between"), "{said}");
    }
    fires(&without(STORE, "bar.sync 0;\n"), &[Fault::SharedRace, Fault::Uninitialised, Fault::ProxyFence]);
}

#[test]
fn a_store_that_is_not_waited_for() {
    let said = fires(&without(STORE, "@%p1 cp.async.bulk.wait_group.read 0;\n"), &[Fault::AsyncPending]);
    assert!(said.contains("a bulk store of warp 0 reads it") || said.contains("without waiting until"), "{said}");
    fires(&without(STORE, "@%p1 cp.async.bulk.commit_group;\n"), &[Fault::AsyncPending]);
    fires(&replaced(STORE, "wait_group.read 0", "wait_group.read 1"), &[Fault::AsyncPending]);
    fires(&without(STORE, "bar.sync 1;\n"), &[Fault::AsyncPending, Fault::SharedRace]);
    // Reading is enough to write shared memory again, not to read what was written.
    let read = replaced(
        STORE,
        "bar.sync 1;",
        "@%p1 ld.global.u32 %r7, [%rd1+1024]; @%p1 st.global.u32 [%rd1], %r7; bar.sync 1;",
    );
    let said = fires(&read, &[Fault::GlobalRace]);
    assert!(said.contains("a bulk copy"), "{said}");
    assert_eq!(silent(&replaced(&read, "wait_group.read 0", "wait_group 0"))[0], 1000);
}

#[test]
fn sums_in_memory() {
    // Two warps add to the same words; the order does not matter.
    let add = "add.u32 %r6, %r1, 1; and.b32 %r7, %r1, 31; cvt.rn.f32.u32 %f1, %r7; st.shared.f32 [%r5], %f1; st.global.f32 [%rd2], 0f3F800000;
               fence.proxy.async; bar.sync 0; and.b32 %r8, %r1, 31; setp.eq.u32 %p2, %r8, 0;
               @%p2 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r5], 128;
               cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;";
    let words = silent(add);
    for (lane, word) in words[..32].iter().enumerate() {
        assert_eq!(f32::from_bits(*word), 1.0 + 4.0 * lane as f32);
    }
    // A store is no sum.
    let store = add.replace(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
        "cp.async.bulk.global.shared::cta.bulk_group",
    );
    fires(&store, &[Fault::GlobalRace]);
}

#[test]
fn what_ordinary_stores_left_in_global_memory() {
    let body = |fence: &str| replaced(LOAD, "bar.sync 0;", &format!("st.global.u32 [%rd2], %r1; {fence} bar.sync 0;"));
    silent(&body("fence.proxy.async;"));
    silent(&body("fence.proxy.async.global;"));
    fires(&body(""), &[Fault::ProxyFence]);
    fires(&body("fence.proxy.async.shared::cta;"), &[Fault::ProxyFence]);
}

#[test]
fn addresses_and_sizes() {
    for (from, to, fault) in [
        ("[%rd1], 512", "[%rd1], 520", Fault::Misaligned),
        ("[%rd1], 512", "[%rd1+8], 512", Fault::Misaligned),
        ("[%r2], [%rd1]", "[%r2+8], [%rd1]", Fault::Misaligned),
        ("[%rd1], 512", "[%rd1+3600], 512", Fault::OutOfBounds),
        ("[%r2], [%rd1]", "[%r2+3904], [%rd1]", Fault::OutOfBounds),
    ] {
        fires(&replaced(LOAD, from, to), &[fault]);
    }
    fires(&replaced(STORE, "[%rd1+1024]", "[%rd1+3600]"), &[Fault::OutOfBounds]);
    // Bytes that nothing wrote are not stored.
    fires(&replaced(STORE, "[%r2], 512", "[%r2], 528"), &[Fault::Uninitialised]);
}

#[test]
fn barriers_of_lanes_that_have_parted() {
    // Half of each warp arrives at one instruction, half at another.
    let parted = "and.b32 %r6, %r1, 1; setp.eq.u32 %p2, %r6, 1; st.shared.u32 [%r5], %r1; @%p2 bra ODD;
                  barrier.sync 2; xor.b32 %r7, %r4, 256; bra READ;
                  ODD:
                  barrier.sync 2; xor.b32 %r7, %r4, 128;
                  READ:
                  add.u32 %r7, %r7, %r2; ld.shared.u32 %r8, [%r7]; st.global.u32 [%rd2], %r8;";
    let words = silent(parted);
    assert_eq!(words[..128], (0..128).map(|t| if t % 2 == 1 { t ^ 32 } else { t ^ 64 }).collect::<Vec<u32>>());
    // The same with `.aligned` is not allowed.
    fires(&parted.replace("barrier.sync", "bar.sync"), &[Fault::Divergence]);
    // One warp's odd lanes do not come.
    let said = fires(
        &parted.replace("ODD:\n", "ODD:\nsetp.lt.u32 %p3, %r1, 32; @%p3 bra READ;\n"),
        &[Fault::Deadlock, Fault::SharedRace, Fault::Uninitialised],
    );
    assert!(said.contains("112 of 128 threads") || said.contains("shared memory"), "{said}");
}

#[test]
fn registers_that_nobody_gives_up() {
    let move_them = "setp.lt.u32 %p2, %r1, 64; @%p2 bra LESS; setmaxnreg.inc.sync.aligned.u32 256; ret;
                     LESS:";
    let text = kernel(move_them).replace("(.param .u64 p) {", "(.param .u64 p) .maxnreg 168 {");
    let said = run(&text, 1, false).unwrap_err();
    assert_eq!(said.fault, Fault::Deadlock, "{said}");
    let given = text.replace("LESS:", "LESS:\nsetmaxnreg.dec.sync.aligned.u32 80;");
    for seed in 0..SEEDS {
        run(&given, seed, false).unwrap_or_else(|e| panic!("{e}"));
    }
    let less = text.replace("LESS:", "LESS:\nsetmaxnreg.dec.sync.aligned.u32 200;");
    assert!((0..SEEDS).any(|seed| run(&less, seed, false).is_err_and(|e| e.fault == Fault::Illegal)));
}
