// SPDX-License-Identifier: MIT OR Apache-2.0
//! Clusters of two blocks: their numbers, their barrier, addresses in the other block, multicasts and stores to it.

use super::case::Case;
use super::case::Ty::{B32, B64};

const FAMILY: &str = "clusters";
const THREADS: u64 = 64;

fn new(name: &str) -> Case {
    Case::new(FAMILY, name, THREADS as u32).sm(90).blocks(4).entry(".explicitcluster\n.reqnctapercluster 2, 1, 1")
}

/// The thread of the other block that has the same place.
fn other(t: u64) -> u64 {
    t ^ THREADS
}

/// A barrier of so many arrivals at `%w5`, known to both blocks when they have met; `%w3` is shared memory, `%w2` the
/// thread's word there, `%w6` its place in the block, `%w7` the other rank, `%p0` thread 0 of the block.
fn start(arrivals: u32, fence: &str, arrive: &str, wait: &str) -> String {
    format!(
        ".shared .align 128 .b8 s[512]; .shared .align 8 .b8 bar[8]; mov.u32 %w6, %tid.x; mov.u32 %w3, s; mad.lo.u32 %w2, %w6, 4, %w3;
         mov.u32 %w5, bar; setp.eq.u32 %p0, %w6, 0; mov.u32 %w7, %cluster_ctarank; xor.b32 %w7, %w7, 1;
         @%p0 mbarrier.init.shared.b64 [%w5], {arrivals}; {fence} {arrive} {wait}
         "
    )
}

const WAIT: &str = "
                    WAIT:
                    mbarrier.try_wait.parity.shared.b64 %p1, [%w5], 0; @!%p1 bra WAIT;
                    ld.shared.u32 $d, [%w2];";
const FENCE: &str = "@%p0 fence.mbarrier_init.release.cluster;";
const RELAXED: &str = "barrier.cluster.arrive.relaxed.aligned;";
const ACQUIRE: &str = "barrier.cluster.wait.acquire.aligned;";

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut number = |name: &str, value: fn(u64) -> u64| {
        cases.push(new(name).gives(B32, value).body(&format!("mov.u32 $d, {name};")));
    };
    number("%cluster_ctarank", |t| t / THREADS % 2);
    number("%cluster_nctarank", |_| 2);
    number("%cluster_ctaid.x", |t| t / THREADS % 2);
    number("%cluster_nctaid.x", |_| 2);
    number("%clusterid.x", |t| t / THREADS / 2);
    number("%nclusterid.x", |_| 2);
    let rank = ".shared .align 8 .b8 bar[8]; mov.u32 %w5, bar; mov.u32 %w7, %cluster_ctarank; xor.b32 %w7, %w7, 1;";
    let text = format!("{rank} mapa.shared::cluster.u32 %w8, %w5, %w7; getctarank.shared::cluster.u32 $d, %w8;");
    cases.push(new("mapa u32").gives(B32, |t| (t / THREADS % 2) ^ 1).body(&text));
    let text = format!(
        "{rank} cvt.u64.u32 %q1, %w5; mapa.shared::cluster.u64 %q2, %q1, %w7; getctarank.shared::cluster.u64 %w9, %q2;
         cvt.u64.u32 $d, %w9;"
    );
    cases.push(new("mapa u64").gives(B64, |t| (t / THREADS % 2) ^ 1).body(&text));
    meetings(&mut cases);
    reaches(&mut cases);
    cases
}

/// Words that go to the other block through global memory, over the barrier of the cluster.
fn meetings(cases: &mut Vec<Case>) {
    let words = 4 * THREADS as usize;
    for (arrive, wait) in [
        ("barrier.cluster.arrive;", "barrier.cluster.wait;"),
        ("barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"),
        ("barrier.cluster.arrive.release;", "barrier.cluster.wait.acquire;"),
        ("fence.acq_rel.cluster; barrier.cluster.arrive.relaxed;", "barrier.cluster.wait;"),
    ] {
        let text = format!(
            "mul.wide.u32 %q1, %t, 4; add.s64 %q1, %q1, %mem; add.u32 %w2, %t, 1000; st.global.u32 [%q1], %w2; {arrive} {wait}
             xor.b32 %w3, %t, {THREADS}; mul.wide.u32 %q2, %w3, 4; add.s64 %q2, %q2, %mem; ld.global.u32 $d, [%q2];"
        );
        let after = (0..words as u64).map(|t| (t + 1000).into()).collect();
        cases.push(new(arrive).memory(vec![0; 4 * words], after).gives(B32, |t| other(t) + 1000).body(&text));
    }
}

/// What threads of one block do in the shared memory of the other.
fn reaches(cases: &mut Vec<Case>) {
    let leave = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;";
    // Arrivals of the other block alone, in either scope; then the block may go on, and has a word of its own to show.
    for arrive in [
        "mbarrier.arrive.shared::cluster.b64 _, [%w8];",
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%w8];",
        "mbarrier.arrive.release.cta.shared::cluster.b64 _, [%w8], 1;",
    ] {
        let text = format!(
            "{}mapa.shared::cluster.u32 %w8, %w5, %w7; st.shared.u32 [%w2], %t; {arrive}
             WAIT:
             mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%w5], 0; @!%p1 bra WAIT;
             ld.shared.u32 $d, [%w2]; {leave}",
            start(THREADS as u32, FENCE, RELAXED, ACQUIRE)
        );
        cases.push(new(arrive).gives(B32, |t| t).body(&text));
    }
    // Half of the words of each block, to both.
    let multicast = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster";
    let memory = || (0..2 * THREADS as u32).flat_map(|k| (k * 3).to_le_bytes()).collect::<Vec<u8>>();
    for (name, hint) in [(multicast.to_owned(), ""), (format!("{multicast}.L2::cache_hint"), ", %q1")] {
        let text = format!(
            "{}createpolicy.fractional.L2::evict_last.b64 %q1, 1.0; mov.u32 %w8, %cluster_ctarank; shl.b32 %w8, %w8, 7;
             cvt.u64.u32 %q2, %w8; add.s64 %q2, %q2, %mem; add.u32 %w9, %w3, %w8; mov.u16 %h1, 3;
             @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%w5], 256; @%p0 {name} [%w9], [%q2], 128, [%w5], %h1{hint};
             {WAIT} {leave}",
            start(1, FENCE, RELAXED, ACQUIRE)
        );
        cases.push(new(&name).hopper().memory(memory(), Vec::new()).gives(B32, |t| t % THREADS * 3).body(&text));
    }
    // Over words that threads of both wrote.
    let fence = "fence.proxy.async.shared::cluster;";
    let text = format!(
        "{}mov.u32 %w8, %cluster_ctarank; shl.b32 %w8, %w8, 7; cvt.u64.u32 %q2, %w8; add.s64 %q2, %q2, %mem;
         add.u32 %w9, %w3, %w8; mov.u16 %h1, 3; @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%w5], 256;
         @%p0 {multicast} [%w9], [%q2], 128, [%w5], %h1; {WAIT} {leave}",
        start(1, &format!("{FENCE} st.shared.u32 [%w2], %t; {fence}"), "barrier.cluster.arrive.aligned;", ACQUIRE)
    );
    cases.push(new(fence).hopper().memory(memory(), Vec::new()).gives(B32, |t| t % THREADS * 3).body(&text));
    // The same to the other block alone.
    let one = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes";
    let text = format!(
        "{}mapa.shared::cluster.u32 %w8, %w5, %w7; mapa.shared::cluster.u32 %w9, %w3, %w7;
         @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%w5], 256; @%p0 {one} [%w9], [%mem], 256, [%w8]; {WAIT} {leave}",
        start(1, FENCE, RELAXED, ACQUIRE)
    );
    cases.push(new("to the other block").memory(memory(), Vec::new()).gives(B32, |t| t % THREADS * 3).body(&text));
    // A word, or pairs and fours of words, of each thread for its neighbour.
    let store = "st.async.shared::cluster.mbarrier::complete_tx::bytes";
    for (ty, every, value) in [
        ("b32", 1, "%t"),
        ("u32", 1, "%t"),
        ("b64", 2, "%q1"),
        ("v2.b32", 2, "{%t, %w10}"),
        ("v4.b32", 4, "{%t, %w10, %w11, %w12}"),
        ("v2.b64", 4, "{%q1, %q2}"),
    ] {
        let text = format!(
            "{}mapa.shared::cluster.u32 %w8, %w5, %w7; mapa.shared::cluster.u32 %w9, %w2, %w7; add.u32 %w10, %t, 1;
             add.u32 %w11, %t, 2; add.u32 %w12, %t, 3; mov.b64 %q1, {{%t, %w10}}; mov.b64 %q2, {{%w11, %w12}};
             @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%w5], 256; and.b32 %w13, %t, {}; setp.eq.u32 %p2, %w13, 0;
             @%p2 {store}.{ty} [%w9], {value}, [%w8]; {WAIT} {leave}",
            start(1, "", "barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"),
            every - 1
        );
        cases.push(new(&format!("{store}.{ty}")).gives(B32, other).body(&text));
    }
}
