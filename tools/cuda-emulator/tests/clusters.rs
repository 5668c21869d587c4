// SPDX-License-Identifier: MIT OR Apache-2.0
//! Clusters of blocks: what reaches into another block computes right in every order where it is synchronised, and each
//! thing that can be left out is reported.

mod common;

use common::{SEEDS, counting, replaced, without, words};
use cuda_emulator::{Fault, Launch, Memory, Module, Options, Report, launch};

/// A kernel for clusters of two blocks. `%rd1` points to 4096 bytes, words that count from 0, `%rd2` to the thread's
/// word of the results (from byte 2048 on). `%r1` is the thread, `%r10` the rank, `%r11` the other one; `s` and four
/// barriers are shared, at `%r2` and `%r3`, and `%r5` is the thread's word of `s`. `%p1` is set in thread 0, `%p3` in
/// the first lane of each warp.
fn kernel(body: &str) -> String {
    format!(
        ".version 8.1\n.target sm_90a\n.address_size 64\n\
         .visible .entry k(.param .u64 p) .explicitcluster .reqnctapercluster 2, 1, 1 {{\n\
         .shared .align 128 .b8 s[1024]; .shared .align 8 .b8 bar[32];\n\
         .reg .pred %p<8>; .reg .b16 %rs<4>; .reg .b32 %r<32>; .reg .b64 %rd<16>;\n\
         ld.param.u64 %rd1, [p]; mov.u32 %r1, %tid.x; mov.u32 %r2, s; mov.u32 %r3, bar; setp.eq.u32 %p1, %r1, 0;\n\
         mov.u32 %r10, %cluster_ctarank; xor.b32 %r11, %r10, 1; shl.b32 %r4, %r1, 2; add.u32 %r5, %r2, %r4;\n\
         and.b32 %r12, %r1, 31; setp.eq.u32 %p3, %r12, 0; mov.u16 %rs1, 3;\n\
         mov.u32 %r12, %ctaid.x; shl.b32 %r12, %r12, 8; add.u32 %r12, %r12, %r4; cvt.u64.u32 %rd2, %r12; add.s64 %rd2, %rd1, %rd2;\n\
         add.s64 %rd2, %rd2, 2048;\n\
         {body}\nret;\n}}\n"
    )
}

const BLOCKS: usize = 4;

/// The results of four blocks of 64 threads.
fn run(ptx: &str, seed: u64, eager: bool) -> Result<Vec<u32>, Box<Report>> {
    let (bytes, _) = common::run(ptx, [BLOCKS as u32, 64], &counting(), seed, eager)?;
    Ok(words(&bytes[2048..2048 + BLOCKS * 256]))
}

/// Runs in every order, and leaves the word that `want` says for block and thread.
#[track_caller]
fn silent(body: &str, want: impl Fn(u32, u32) -> u32) {
    let ptx = kernel(body);
    for seed in 0..=SEEDS {
        let words = run(&ptx, seed, seed == SEEDS).unwrap_or_else(|r| panic!("seed {seed}: {r}\n{ptx}"));
        for (n, &word) in words.iter().enumerate() {
            let (block, thread) = (n as u32 / 64, n as u32 % 64);
            assert_eq!(word, want(block, thread), "seed {seed}: thread {thread} of block {block}");
        }
    }
}

/// Is reported in every order, as one of these; the last message.
#[track_caller]
fn fires(body: &str, faults: &[Fault]) -> String {
    let ptx = kernel(body);
    common::fires(&ptx, faults, |seed| run(&ptx, seed, false)).to_string()
}

/// All threads of the cluster meet.
const MEET: &str = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n";
/// They meet without an order of memory but that of barriers which were made before a fence.
const MEET_RELAXED: &str = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;\n";

#[test]
fn numbers_of_a_cluster() {
    let number = |name: &str, want: fn(u32) -> u32| {
        silent(&format!("mov.u32 %r6, {name}; st.global.u32 [%rd2], %r6;"), move |block, _| want(block));
    };
    number("%cluster_ctarank", |b| b % 2);
    number("%cluster_nctarank", |_| 2);
    number("%cluster_ctaid.x", |b| b % 2);
    number("%cluster_ctaid.y", |_| 0);
    number("%cluster_nctaid.x", |_| 2);
    number("%clusterid.x", |b| b / 2);
    number("%nclusterid.x", |_| 2);
    // An address is the own block's until it is mapped, and says whose it is.
    silent(
        "mapa.shared::cluster.u32 %r6, %r3, %r11; getctarank.shared::cluster.u32 %r7, %r6; \
         getctarank.shared::cluster.u32 %r8, %r3; shl.b32 %r8, %r8, 1; or.b32 %r7, %r7, %r8; \
         cvt.u64.u32 %rd3, %r3; mapa.shared::cluster.u64 %rd4, %rd3, %r11; cvt.u64.u32 %rd5, %r6; sub.s64 %rd4, %rd4, %rd5; \
         cvt.u32.u64 %r8, %rd4; add.u32 %r7, %r7, %r8; st.global.u32 [%rd2], %r7;",
        |block, _| (block & 1) << 1 | (block & 1 ^ 1),
    );
    let said = fires("mov.u32 %r6, 2; mapa.shared::cluster.u32 %r6, %r3, %r6;", &[Fault::Illegal]);
    assert!(said.contains("rank 2 in a cluster of 2 blocks"), "{said}");
    let twice = "mapa.shared::cluster.u32 %r6, %r3, %r11; mapa.shared::cluster.u32 %r6, %r6, %r11;";
    assert!(fires(twice, &[Fault::Illegal]).contains("own shared memory"));
}

/// Threads write a word each, meet, and read that of the other block.
#[test]
fn the_barrier_orders_memory() {
    let swap = format!(
        "add.u32 %r6, %r1, %r12; st.global.u32 [%rd2], %r6;\n{MEET}\
         mov.u32 %r7, 512; setp.eq.u32 %p4, %r10, 0; @%p4 mov.u32 %r7, 256; sub.u32 %r7, %r7, 256; neg.s32 %r8, %r7;\n\
         mov.u64 %rd4, 256; @!%p4 mov.u64 %rd4, -256; add.s64 %rd4, %rd2, %rd4; ld.global.u32 %r8, [%rd4];\n\
         {MEET}st.global.u32 [%rd2], %r8;"
    );
    let word = |block: u32, thread: u32| thread + block * 256 + thread * 4;
    silent(&swap, |block, thread| word(block ^ 1, thread));
    let mut parts = swap.splitn(2, MEET);
    let (first, rest) = (parts.next().unwrap(), parts.next().unwrap());
    fires(&format!("{first}{rest}"), &[Fault::GlobalRace]);
    fires(&format!("{first}{MEET_RELAXED}{rest}"), &[Fault::GlobalRace]);
    silent(&format!("{first}fence.acq_rel.gpu;\n{MEET_RELAXED}{rest}"), |block, thread| word(block ^ 1, thread));
    fires(&rest.replace(MEET, "").replacen("ld.", &format!("{first}ld."), 1), &[Fault::GlobalRace]);
}

#[test]
fn the_barrier_counts_threads() {
    // Those that have ended are not waited for, and those that stand apart arrive on their own.
    let apart = "setp.ge.u32 %p4, %r1, 40; @%p4 st.global.u32 [%rd2], %r1; @%p4 exit;\n\
                 setp.ge.u32 %p4, %r1, 20; @%p4 bra LATE;\nbarrier.cluster.arrive; bra WAIT;\n\
                 LATE: nanosleep.u32 5; barrier.cluster.arrive;\nWAIT: barrier.cluster.wait;\nst.global.u32 [%rd2], %r1;";
    silent(apart, |_, thread| thread);
    let said = fires("barrier.cluster.arrive; barrier.cluster.arrive;", &[Fault::Illegal]);
    assert!(said.contains("again without having waited"), "{said}");
    let said = fires("barrier.cluster.wait;", &[Fault::Illegal]);
    assert!(said.contains("without having arrived"), "{said}");
    // One warp of one block that waits for something else instead.
    let stuck = "setp.eq.u32 %p4, %r10, 1; @!%p4 bra MEET; setp.ge.u32 %p4, %r1, 32; @!%p4 bra MEET; bar.sync 1, 64;\n\
                 MEET: barrier.cluster.arrive; barrier.cluster.wait;";
    let said = fires(stuck, &[Fault::Deadlock]);
    assert!(
        said.contains("barrier of the cluster has 64 of 64 threads of rank 0 and 32 of 64 threads of rank 1"),
        "{said}"
    );
    assert!(said.contains("warp 1 of rank 1") && said.contains("rank 1: barrier 1 has 32 of 64 threads"), "{said}");
    // Not with the lanes of a warp apart.
    fires("@%p3 barrier.cluster.arrive.aligned; barrier.cluster.wait;", &[Fault::Divergence]);
}

/// Each block loads half of 256 bytes to both.
const MULTICAST: &str = "\
@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
@%p1 fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
shl.b32 %r6, %r10, 7; cvt.u64.u32 %rd3, %r6; add.s64 %rd3, %rd1, %rd3; add.u32 %r6, %r2, %r6;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 256;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r6], [%rd3], 128, [%r3], %rs1;
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
@!%p2 bra WAIT;
ld.shared.u32 %r7, [%r5]; st.global.u32 [%rd2], %r7;";

#[test]
fn a_multicast() {
    silent(MULTICAST, |_, thread| thread);
    // A hint has an operand behind the mask; a release orders as much as the fence.
    let hint = replaced(MULTICAST, "multicast::cluster [", "multicast::cluster.L2::cache_hint [");
    silent(&replaced(&hint, "%rs1;", "%rs1, %rd1;"), |_, thread| thread);
    let released = without(MULTICAST, "@%p1 fence.mbarrier_init.release.cluster;\n");
    silent(&replaced(&released, ".relaxed.aligned", ".release.aligned"), |_, thread| thread);
    // The other block's barrier has to be there, and known to be.
    let said = fires(&released, &[Fault::Barrier]);
    assert!(said.contains("not ordered after that") || said.contains("no barrier at"), "{said}");
    let alone = replaced(
        MULTICAST,
        "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;",
        "bar.sync 0;",
    );
    assert!(fires(&alone, &[Fault::Cluster]).contains("begun"));
    // What it brings is known only to those that have waited.
    let early = without(MULTICAST, "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;\n@!%p2 bra WAIT;\n");
    fires(&early, &[Fault::AsyncPending, Fault::SharedRace, Fault::Uninitialised]);
}

/// Threads have written where the multicast lands: the asynchronous proxy has to be told, by who writes or by who
/// copies.
#[test]
fn a_multicast_over_what_was_written() {
    let meet = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;";
    let relaxed = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;";
    let with = |before: &str, behind: &str| {
        replaced(MULTICAST, relaxed, &format!("st.shared.u32 [%r5], %r1; {before}\n{meet}\n{behind}"))
    };
    silent(&with("fence.proxy.async;", ""), |_, thread| thread);
    silent(&with("fence.proxy.async.shared::cta;", ""), |_, thread| thread);
    silent(&with("", "fence.proxy.async.shared::cluster;"), |_, thread| thread);
    fires(&with("", ""), &[Fault::ProxyFence]);
    // In the copying thread, of its own block alone.
    fires(&with("", "fence.proxy.async.shared::cta;"), &[Fault::ProxyFence]);
    fires(&replaced(&with("fence.proxy.async;", ""), meet, relaxed), &[Fault::SharedRace, Fault::ProxyFence]);
}

#[test]
fn masks_of_a_multicast() {
    let mask =
        |value: &str| replaced(MULTICAST, "@%p1 mbarrier.init", &format!("mov.u16 %rs1, {value}; @%p1 mbarrier.init"));
    for (value, text) in [("0", "mask 0x0000"), ("4", "mask 0x0004"), ("7", "mask 0x0007")] {
        let said = fires(&mask(value), &[Fault::Illegal]);
        assert!(said.contains(text) && said.contains("cluster of 2"), "{said}");
    }
    // Only the own block: the other half never comes.
    let own = replaced(
        MULTICAST,
        "shl.b32 %r6, %r10, 7;",
        "mov.u32 %r6, 1; shl.b32 %r6, %r6, %r10; cvt.u16.u32 %rs1, %r6; shl.b32 %r6, %r10, 7;",
    );
    let said = fires(&own, &[Fault::Deadlock]);
    assert!(said.contains("0 arrivals and 128 bytes are missing") && said.contains("rank 1"), "{said}");
    // The barrier is told of more than it expects.
    let fewer = replaced(MULTICAST, "_, [%r3], 256", "_, [%r3], 128");
    fires(&fewer, &[Fault::Barrier, Fault::Cluster, Fault::AsyncPending, Fault::Uninitialised, Fault::SharedRace]);
}

/// Two rounds of [`MULTICAST`] into one buffer: a warp that is done with it says so to both blocks.
const ROUNDS: &str = "\
@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
@%p1 mbarrier.init.shared::cta.b64 [%r3+8], 4;
@%p1 fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
shl.b32 %r6, %r10, 7; cvt.u64.u32 %rd3, %r6; add.s64 %rd3, %rd1, %rd3; add.u32 %r6, %r2, %r6;
add.u32 %r8, %r3, 8; mapa.shared::cluster.u32 %r8, %r8, %r11;
mov.u32 %r9, 0;
ROUND:
setp.eq.u32 %p5, %r9, 0; @%p5 bra FREE; @!%p1 bra FREE;
EMPTY:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r3+8], 0;
@!%p2 bra EMPTY;
FREE:
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 256;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r6], [%rd3], 128, [%r3], %rs1;
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], %r9;
@!%p2 bra WAIT;
ld.shared.u32 %r7, [%r5];
bar.warp.sync -1;
@%p3 mbarrier.arrive.shared::cta.b64 _, [%r3+8];
@%p3 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];
add.s64 %rd3, %rd3, 256; add.u32 %r9, %r9, 1; setp.lt.u32 %p5, %r9, 2; @%p5 bra ROUND;
st.global.u32 [%rd2], %r7;
barrier.cluster.arrive; barrier.cluster.wait;";

#[test]
fn buffers_that_both_blocks_give_back() {
    silent(ROUNDS, |_, thread| 64 + thread);
    const LATE: &[Fault] = &[Fault::SharedRace, Fault::AsyncPending, Fault::Barrier];
    // What was read by instructions of the other block is known by a release to the cluster and an acquire from it
    // alone.
    fires(&replaced(ROUNDS, ".release.cluster.shared", ".release.cta.shared"), LATE);
    fires(&replaced(ROUNDS, ".release.cluster.shared::cluster", ".shared::cluster"), LATE);
    fires(&without(ROUNDS, ".acquire.cluster"), LATE);
    // What only the hardware touched is known without: here nobody reads the first round.
    let unread = replaced(ROUNDS, "ld.shared.u32", "setp.eq.u32 %p6, %r9, 1; @%p6 ld.shared.u32");
    let plain = replaced(&without(&unread, ".acquire.cluster"), ".release.cluster.shared::cluster", ".shared::cluster");
    silent(&plain, |_, thread| 64 + thread);
    // An arrival that is missing is named.
    let said = fires(
        &without(ROUNDS, "@%p3 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];\n"),
        &[Fault::Deadlock],
    );
    assert!(said.contains("is in phase 0: 2 arrivals and 0 bytes are missing"), "{said}");
    // The last arrivals are of no phase that anybody waits for: a block has to stay until they have come.
    let said = fires(&without(ROUNDS, "\nbarrier.cluster.arrive; barrier.cluster.wait;"), &[Fault::Cluster]);
    assert!(said.contains("reached into its shared memory") || said.contains("has ended"), "{said}");
}

/// Each thread sends its number, plus 100 times its block's, to its neighbour's in the other block.
const SEND: &str = "\
@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 256;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.aligned;
mov.u32 %r7, %ctaid.x; mad.lo.u32 %r7, %r7, 100, %r1;
mapa.shared::cluster.u32 %r6, %r5, %r11; mapa.shared::cluster.u32 %r8, %r3, %r11;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r6], %r7, [%r8];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
@!%p2 bra WAIT;
ld.shared.u32 %r7, [%r5]; st.global.u32 [%rd2], %r7;";

#[test]
fn stores_to_another_block() {
    silent(SEND, |block, thread| (block ^ 1) * 100 + thread);
    // Vectors and wide elements: one thread for four, two threads for two.
    let four = replaced(
        SEND,
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r6], %r7, [%r8];",
        "and.b32 %r13, %r1, 3; setp.eq.u32 %p4, %r13, 0; add.u32 %r14, %r7, 1; add.u32 %r15, %r7, 2; add.u32 %r16, %r7, 3;\n\
         @%p4 st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%r6], {%r7, %r14, %r15, %r16}, [%r8];",
    );
    silent(&four, |block, thread| (block ^ 1) * 100 + thread);
    let wide = replaced(
        SEND,
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r6], %r7, [%r8];",
        "and.b32 %r13, %r1, 1; setp.eq.u32 %p4, %r13, 0; add.u32 %r14, %r7, 1; mov.b64 %rd6, {%r7, %r14};\n\
         @%p4 st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%r6], %rd6, [%r8];",
    );
    silent(&wide, |block, thread| (block ^ 1) * 100 + thread);
    // Before the wait the bytes are nobody's.
    let early = without(SEND, "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;\n@!%p2 bra WAIT;\n");
    fires(&early, &[Fault::AsyncPending, Fault::SharedRace, Fault::Uninitialised]);
    // Over something that the other block may still be reading.
    let over = replaced(SEND, "mov.u32 %r7, %ctaid.x;", "st.shared.u32 [%r5], %r1; mov.u32 %r7, %ctaid.x;");
    fires(&over, &[Fault::SharedRace, Fault::AsyncPending]);
    // Told to the wrong block, and not told of at all.
    let said = fires(&replaced(SEND, "%r7, [%r8]", "%r7, [%r3]"), &[Fault::Illegal]);
    assert!(said.contains("tells a barrier of rank"), "{said}");
    let said = fires(&replaced(SEND, "_, [%r3], 256", "_, [%r3], 260"), &[Fault::Deadlock]);
    assert!(said.contains("0 arrivals and 4 bytes are missing"), "{said}");
}

/// A block that does not wait for what another one does in its shared memory.
#[test]
fn blocks_that_end_too_early() {
    const GONE: &[Fault] = &[Fault::Cluster, Fault::AsyncPending];
    let leaves = replaced(SEND, "WAIT:", "setp.eq.u32 %p4, %r10, 1; @%p4 st.global.u32 [%rd2], %r1; @%p4 exit;\nWAIT:");
    fires(&leaves, GONE);
    let arrives = "@%p1 mbarrier.init.shared::cta.b64 [%r3], 64;\n\
                   barrier.cluster.arrive.release.aligned; barrier.cluster.wait.aligned;\n\
                   mapa.shared::cluster.u32 %r8, %r3, %r11; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];\n";
    let said = fires(arrives, &[Fault::Cluster]);
    assert!(said.contains("this block has ended") || said.contains("has ended, and its shared memory"), "{said}");
    // Its own wait for the phase is as good as a barrier of the cluster.
    let done = "st.global.u32 [%rd2], %r1;";
    silent(&format!("{arrives}{MEET}{done}"), |_, thread| thread);
    let waits = "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;\n@!%p2 bra WAIT;\n";
    silent(&format!("{arrives}{waits}{done}"), |_, thread| thread);
}

/// A tensor of four rows of 32 words, one box a row: `map` is a parameter. Each block loads two rows to both.
#[test]
fn boxes_for_several_blocks() {
    use cuda_emulator::{Swizzle, TensorMap};
    let ptx = kernel(&MULTICAST.replace(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r6], [%rd3], 128, [%r3], %rs1",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r6], [%rd4, {%r13, %r10}], \
         [%r3], %rs1",
    ));
    let ptx = replaced(&ptx, ".param .u64 p)", ".param .u64 p, .param .align 64 .b8 map[128])");
    let ptx =
        replaced(&ptx, "ld.param.u64", "mov.u32 %r13, 0; mov.b64 %rd4, map; cvta.param.u64 %rd4, %rd4; ld.param.u64");
    for seed in 0..SEEDS {
        let mut mem = Memory::new();
        let loaded = Module::parse(&ptx).and_then(|m| m.load(&mut mem)).unwrap_or_else(|e| panic!("{e}\n{ptx}"));
        let p = mem.alloc(4096);
        mem.write(p, &counting()).unwrap();
        let map = TensorMap {
            element: 4,
            f32: false,
            address: p,
            dims: vec![32, 4],
            strides: vec![128],
            shape: vec![32, 1],
            swizzle: Swizzle::None,
            fill_nan: false,
        };
        let kernel = loaded.kernel("k").unwrap();
        let mut params = vec![0; kernel.param_bytes()];
        for (at, bytes) in kernel.params().iter().zip([p.to_le_bytes().to_vec(), map.encode().to_vec()]) {
            params[at.offset..at.offset + at.size].copy_from_slice(&bytes);
        }
        let options = Options { seed, spin_limit: 200_000, ..Options::default() };
        let grid = [BLOCKS as u32, 1, 1];
        let how = Launch { grid, block: [64, 1, 1], cluster: [1; 3], dynamic_shared: 0, params: &params, options };
        let stats = launch(kernel, &mut mem, &how).unwrap_or_else(|r| panic!("seed {seed}: {r}"));
        assert_eq!(stats.boxes, 4, "each row is fetched once a cluster");
        let bytes = mem.read(p + 2048, BLOCKS * 256).unwrap();
        for (n, word) in bytes.as_chunks::<4>().0.iter().enumerate() {
            assert_eq!(u32::from_le_bytes(*word), n as u32 % 64, "seed {seed}");
        }
    }
}

/// Clusters that a launch asks for, or a kernel, have to fit the grid.
#[test]
fn launches() {
    let own = kernel("mov.u32 %r6, %cluster_nctarank; st.global.u32 [%rd2], %r6;");
    let free = replaced(&own, ".explicitcluster .reqnctapercluster 2, 1, 1 ", "");
    let launched = |ptx: &str, grid: [u32; 3], cluster: [u32; 3]| {
        let mut mem = Memory::new();
        let loaded = Module::parse(ptx).and_then(|m| m.load(&mut mem)).unwrap();
        let p = mem.alloc(4096 + 8192);
        let params = p.to_le_bytes();
        let options = Options::default();
        let how = Launch { grid, block: [64, 1, 1], cluster, dynamic_shared: 0, params: &params, options };
        let done = launch(loaded.kernel("k").unwrap(), &mut mem, &how);
        done.map(|_| mem.read(p + 2048, 1).unwrap()[0]).map_err(|r| (r.fault, r.detail))
    };
    assert_eq!(launched(&free, [4, 1, 1], [1; 3]), Ok(1));
    assert_eq!(launched(&free, [4, 1, 1], [4, 1, 1]), Ok(4));
    assert_eq!(launched(&own, [4, 1, 1], [1; 3]), Ok(2));
    assert_eq!(launched(&own, [4, 1, 1], [2, 1, 1]), Ok(2));
    for (ptx, grid, cluster) in [
        (&own, [3, 1, 1], [1; 3]),
        (&own, [4, 1, 1], [4, 1, 1]),
        (&free, [4, 1, 1], [3, 1, 1]),
        (&free, [16, 1, 1], [16, 1, 1]),
        (&free, [4, 1, 1], [0, 1, 1]),
    ] {
        let (fault, said) = launched(ptx, grid, cluster).unwrap_err();
        assert!(fault == Fault::Launch && said.contains("clusters"), "{said}");
    }
}
