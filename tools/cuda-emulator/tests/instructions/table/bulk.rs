// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bulk copies of one dimension: loads that tell a barrier, stores and sums in groups, hints, proxy fences.

use super::case::Case;
use super::case::Ty::B32;
use super::rows::f;

const FAMILY: &str = "bulk";

/// `%w2` is the thread's word in 512 bytes of shared memory at `%w3`, `%w5` a barrier of one arrival, `%p0` thread 0.
const START: &str =
    ".shared .align 128 .b8 s[512]; .shared .align 8 .b8 bar[8]; mov.u32 %w3, s; mad.lo.u32 %w2, %t, 4, %w3;
                     mov.u32 %w5, bar; setp.eq.u32 %p0, %t, 0; @%p0 mbarrier.init.shared.b64 [%w5], 1; bar.sync 0;
                     ";
const WAIT: &str = "
                    WAIT:
                    mbarrier.try_wait.parity.shared.b64 %p1, [%w5], 0; @!%p1 bra WAIT;
                    ld.shared.u32 $d, [%w2];";
const FILL: &str = "st.shared.u32 [%w2], $0; fence.proxy.async.shared::cta; bar.sync 0;
                    ";

fn words(n: u32, value: impl Fn(u32) -> u32) -> Vec<u8> {
    (0..n).flat_map(|k| value(k).to_le_bytes()).collect()
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    loads(&mut cases);
    stores(&mut cases);
    sums(&mut cases);
    cases
}

fn loads(cases: &mut Vec<Case>) {
    let load = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes";
    let expect = "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%w5], 512;";
    let hinted = format!(
        "createpolicy.fractional.L2::evict_last.b64 %q1, 1.0; @%p0 {load}.L2::cache_hint [%w3], [%mem], 512, [%w5], %q1;"
    );
    let normal = format!(
        "createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %q1; @%p0 {load}.L2::cache_hint [%w3], [%mem], 512, [%w5], %q1;"
    );
    let prefetched =
        format!("@%p0 cp.async.bulk.prefetch.L2.global [%mem], 512; @%p0 {load} [%w3], [%mem], 512, [%w5];");
    // Each warp's first lane loads a quarter.
    let parts = format!(
        "and.b32 %w6, %t, 31; setp.eq.u32 %p2, %w6, 0; mad.wide.u32 %q0, %t, 4, %mem; @%p2 {load} [%w2], [%q0], 128, [%w5];"
    );
    let apart = "@%p0 mbarrier.expect_tx.relaxed.cta.shared.b64 [%w5], 512; @%p0 mbarrier.arrive.shared.b64 _, [%w5];";
    for (copy, announce) in [
        (format!("@%p0 {load} [%w3], [%mem], 512, [%w5];"), expect),
        (hinted, expect),
        (normal, expect),
        (prefetched, expect),
        (parts, expect),
        (format!("@%p0 {load} [%w3], [%mem], 512, [%w5];"), apart),
    ] {
        // What is announced may come before the copy or after it.
        for text in [format!("{announce}\n{copy}"), format!("{copy}\n{announce}")] {
            let case = Case::new(FAMILY, load, 128).sm(90).memory(words(128, |k| 3 * k + 1), Vec::new());
            cases.push(case.gives(B32, |t| 3 * t + 1).body(&format!("{START}{text}{WAIT}")));
        }
    }
    // The smallest, between words that stay as they are.
    let text = format!(
        "{START}st.shared.u32 [%w2], 5; fence.proxy.async; bar.sync 0; @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%w5], 16;
         @%p0 {load} [%w3+64], [%mem+32], 16, [%w5];{WAIT}"
    );
    let case = Case::new(FAMILY, load, 128).sm(90).memory(words(128, |k| 3 * k + 1), Vec::new());
    cases.push(case.gives(B32, |t| if (16..20).contains(&t) { 3 * (t - 8) + 1 } else { 5 }).body(&text));
    // What the block itself has written to global memory, after a proxy fence.
    for fence in ["fence.proxy.async;", "fence.proxy.async.global;"] {
        let text = format!(
            "{START}mad.wide.u32 %q0, %t, 4, %mem; add.u32 %w6, %t, 9; st.global.u32 [%q0], %w6; {fence} bar.sync 0;
             {expect} @%p0 {load} [%w3], [%mem], 512, [%w5];{WAIT}"
        );
        let case = Case::new(FAMILY, fence.trim_end_matches(';'), 128).sm(90).memory(vec![0; 512], Vec::new());
        cases.push(case.gives(B32, |t| t + 9).body(&text));
    }
}

fn stores(cases: &mut Vec<Case>) {
    let store = "cp.async.bulk.global.shared::cta.bulk_group";
    let end = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;";
    let two = format!(
        "@%p0 {store} [%mem], [%w3], 256; @%p0 cp.async.bulk.commit_group; @%p0 {store} [%mem+256], [%w3+256], 256;
         @%p0 cp.async.bulk.commit_group; @%p0 cp.async.bulk.wait_group.read 1; @%p0 st.shared.u32 [%w3], 0;
         cp.async.bulk.wait_group.read 0;"
    );
    let hinted = format!(
        "createpolicy.fractional.L2::evict_normal.b64 %q1, 0.5; @%p0 {store}.L2::cache_hint [%mem], [%w3], 512, %q1; {end}"
    );
    for text in [format!("@%p0 {store} [%mem], [%w3], 512; {end}"), two, hinted] {
        let after = (0..128u64).map(|k| (7 * k).into()).collect();
        let case = Case::new(FAMILY, store, 128).sm(90).memory(vec![0; 512], after);
        cases.push(case.takes(B32, |t| 7 * t).body(&format!("{START}{FILL}{text}")));
    }
    // After the full wait the thread reads what its copy wrote.
    let text = format!(
        "{START}{FILL}and.b32 %w6, %t, 31; setp.eq.u32 %p2, %w6, 0; mad.wide.u32 %q0, %t, 4, %mem; mov.u32 $d, 0;
                        @%p2 {store} [%q0], [%w2], 128; {end} @%p2 ld.global.u32 $d, [%q0+124];"
    );
    let case = Case::new(FAMILY, store, 128).sm(90).memory(vec![0; 512], Vec::new());
    cases.push(case.takes(B32, |t| t + 50).gives(B32, |t| if t % 32 == 0 { t + 31 + 50 } else { 0 }).body(&text));
    // Memory may be written again once it has been read.
    let text = format!("{START}{FILL}@%p0 {store} [%mem], [%w3], 512; @%p0 cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
                        bar.sync 0; st.shared.u32 [%w2], 1; ld.shared.u32 $d, [%w2];");
    let after = (0..128u64).map(|k| (k + 50).into()).collect();
    let case = Case::new(FAMILY, "cp.async.bulk.wait_group.read", 128).sm(90).memory(vec![0; 512], after);
    cases.push(case.takes(B32, |t| t + 50).gives(B32, |_| 1).body(&text));
}

fn sums(cases: &mut Vec<Case>) {
    let add = "cp.reduce.async.bulk.global.shared::cta.bulk_group";
    // Four warps add to the same 32 words; small integers, so that any order gives the same.
    for (hint, policy) in [("", ""), (".L2::cache_hint", ", %q1")] {
        let text = format!(
            "{START}{FILL}createpolicy.fractional.L2::evict_unchanged.b64 %q1, 1.0; and.b32 %w6, %t, 31; setp.eq.u32 %p2, %w6, 0;
             @%p2 {add}{hint}.add.f32 [%mem], [%w2], 128{policy}; cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"
        );
        // Word k gets k + (32 + k) + (64 + k) + (96 + k) on top of 1000.
        let after = (0..32u32).map(|k| f((1000 + 4 * k + 192) as f32).into()).collect();
        let case = Case::new(FAMILY, add, 128).sm(90).memory(words(32, |_| 1000f32.to_bits()), after);
        cases.push(case.takes(B32, |t| f(t as f32)).body(&text));
    }
}
