// SPDX-License-Identifier: MIT OR Apache-2.0
//! Barriers of a block and of a warp, their reductions, and fences.
//!
//! Threads write, meet, and read what another wrote: that the values arrive is what is seen here. What happens when a
//! barrier is missing is the detectors' business.

use super::case::Case;
use super::case::Ty::{B32, Pred};

const FAMILY: &str = "barriers";

/// Every thread writes its number and, after the barrier, reads the one 32 further on.
fn exchange(name: &str, barrier: &str) -> Case {
    let text = format!(
        ".shared .align 4 .b8 s[512]; mov.u32 %w3, s; mad.lo.u32 %w2, %t, 4, %w3; st.shared.u32 [%w2], %t; {barrier}
         xor.b32 %w4, %t, 32; mad.lo.u32 %w4, %w4, 4, %w3; ld.shared.u32 $d, [%w4];"
    );
    Case::new(FAMILY, name, 128).gives(B32, |t| t ^ 32).body(&text)
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for barrier in [
        "bar.sync 0;",
        "bar.sync 15;",
        "barrier.sync 3;",
        "barrier.sync.aligned 1;",
        "bar.cta.sync 0;",
        "barrier.cta.sync.aligned 2, 128;",
        "bar.sync 1, 128;",
    ] {
        cases.push(exchange(barrier.split_once(' ').unwrap_or_default().0, barrier));
    }
    // The barrier's number comes from a register, and warps pair up at two of them.
    cases.push(exchange("barrier.sync", "shr.u32 %w5, %t, 6; add.u32 %w5, %w5, 4; barrier.sync %w5, 64;"));
    // The same barrier again and again.
    cases.push(exchange("bar.sync", "bar.sync 0; bar.sync 0; bar.sync 0;"));
    parted(&mut cases);
    arrivals(&mut cases);
    reductions(&mut cases);
    fences(&mut cases);
    let text = ".shared .align 4 .b8 s[128]; mov.u32 %w3, s; mad.lo.u32 %w2, %t, 4, %w3; st.shared.u32 [%w2], %t;
                bar.warp.sync -1; xor.b32 %w4, %t, 9; mad.lo.u32 %w4, %w4, 4, %w3; ld.shared.u32 $d, [%w4];";
    cases.push(Case::new(FAMILY, "bar.warp.sync", 32).gives(B32, |t| t ^ 9).body(text));
    // Each half on its own, at different instructions.
    let text = ".shared .align 4 .b8 s[128]; mov.u32 %w3, s; mad.lo.u32 %w2, %t, 4, %w3; st.shared.u32 [%w2], %t;
                xor.b32 %w4, %t, 9; mad.lo.u32 %w4, %w4, 4, %w3; setp.lt.u32 %p0, %t, 16; @%p0 bra LOW;
                bar.warp.sync 0xffff0000; ld.shared.u32 $d, [%w4]; bra DONE;
                LOW:
                bar.warp.sync 0xffff; ld.shared.u32 %w5, [%w4]; add.u32 $d, %w5, 100;
                DONE:";
    cases
        .push(Case::new(FAMILY, "bar.warp.sync", 32).gives(B32, |t| (t ^ 9) + if t < 16 { 100 } else { 0 }).body(text));
    cases
}

/// Warp 0 writes and arrives, warp 1 waits and reads.
fn arrivals(cases: &mut Vec<Case>) {
    for op in ["bar.arrive", "barrier.arrive", "barrier.cta.arrive.aligned"] {
        let text = format!(
            ".shared .align 4 .b8 s[128]; mov.u32 %w3, s; and.b32 %w2, %t, 31; mad.lo.u32 %w2, %w2, 4, %w3;
             mov.u32 $d, 7; setp.ge.u32 %p0, %t, 32; @%p0 bra READ; st.shared.u32 [%w2], %t; {op} 1, 64; bra DONE;
             READ:
             bar.sync 1, 64; ld.shared.u32 $d, [%w2];
             DONE:"
        );
        cases.push(Case::new(FAMILY, op, 64).gives(B32, |t| if t < 32 { 7 } else { t - 32 }).body(&text));
    }
    // Warp 0 has ended: the barrier of the whole block does not wait for it.
    let text = ".shared .align 4 .b8 s[4]; mov.u32 %w3, s; add.u32 $d, %t, 500; setp.lt.u32 %p0, %t, 32;
                @%p0 bra DONE; setp.eq.u32 %p0, %t, 40; @%p0 st.shared.u32 [%w3], 9; bar.sync 0;
                ld.shared.u32 $d, [%w3];
                DONE:";
    cases.push(Case::new(FAMILY, "bar.sync", 96).gives(B32, |t| if t < 32 { t + 500 } else { 9 }).body(text));
}

fn reductions(cases: &mut Vec<Case>) {
    for (limit, all, any) in [(0, 0, 0), (1, 0, 1), (50, 0, 1), (64, 1, 1)] {
        let text = "bar.red.popc.u32 $d0, 0, $0; bar.red.and.pred $d1, 0, $0; bar.red.or.pred $d2, 0, $0;
                    bar.red.popc.u32 $d3, 1, 64, !$0; barrier.red.and.pred $d4, 2, 64, !$0;
                    barrier.cta.red.aligned.or.pred $d5, 3, !$0;";
        cases.push(
            Case::new(FAMILY, "bar.red", 64)
                .takes(Pred, move |t| u64::from(t < limit))
                .gives(B32, move |_| limit)
                .gives(Pred, move |_| all)
                .gives(Pred, move |_| any)
                .gives(B32, move |_| 64 - limit)
                .gives(Pred, move |_| 1 - any)
                .gives(Pred, move |_| 1 - all)
                .body(text),
        );
    }
}

/// Lane 0 of each warp passes a word on to the next warp, by a flag in shared memory.
fn fences(cases: &mut Vec<Case>) {
    for fence in [
        "membar.cta",
        "membar.gl",
        "membar.sys",
        "fence.acq_rel.cta",
        "fence.acq_rel.gpu",
        "fence.acq_rel.sys",
        "fence.sc.cta",
        "fence.sc.gpu",
        "fence.sc.sys",
    ] {
        let text = format!(
            ".shared .align 4 .b8 s[8]; mov.u32 %w3, s; mov.u32 $d, 31; setp.eq.u32 %p0, %t, 0;
             @%p0 st.shared.u32 [%w3], 0; bar.sync 0; setp.eq.u32 %p0, %t, 32; @%p0 bra READ; setp.ne.u32 %p0, %t, 0;
             @%p0 bra DONE; st.shared.u32 [%w3+4], 31; {fence}; st.relaxed.cta.shared.u32 [%w3], 1; bra DONE;
             READ:
             ld.relaxed.cta.shared.u32 %w4, [%w3]; setp.eq.u32 %p1, %w4, 0; @%p1 bra READ; {fence};
             ld.shared.u32 $d, [%w3+4];
             DONE:"
        );
        cases.push(Case::new(FAMILY, fence, 64).gives(B32, |_| 31).body(&text));
    }
}

/// Without `.aligned`, threads arrive and not warps: lanes that have parted, each half at an instruction of its own.
fn parted(cases: &mut Vec<Case>) {
    for (op, count) in [("barrier.sync", ""), ("barrier.cta.sync", ", 128")] {
        let text = format!(
            ".shared .align 4 .b8 s[512]; mov.u32 %w3, s; mad.lo.u32 %w2, %t, 4, %w3; st.shared.u32 [%w2], %t;
             and.b32 %w5, %t, 1; setp.eq.u32 %p0, %w5, 0; @%p0 bra EVEN; {op} 6{count}; xor.b32 %w4, %t, 96; bra READ;
             EVEN:
             {op} 6{count}; xor.b32 %w4, %t, 33;
             READ:
             mad.lo.u32 %w4, %w4, 4, %w3; ld.shared.u32 $d, [%w4];"
        );
        let case = Case::new(FAMILY, &format!("{op} parted"), 128);
        cases.push(case.gives(B32, |t| if t % 2 == 0 { t ^ 33 } else { t ^ 96 }).body(&text));
    }
    // A warpgroup gives registers up and another one takes them; both go on.
    let text =
        "setp.lt.u32 %p0, %t, 128; @%p0 bra LESS; setmaxnreg.inc.sync.aligned.u32 240; add.u32 $d, %t, 1; bra DONE;
                LESS:
                setmaxnreg.dec.sync.aligned.u32 24; add.u32 $d, %t, 2;
                DONE:";
    let case = Case::new(FAMILY, "setmaxnreg", 384).hopper().entry(".maxntid 384 .minnctapersm 1");
    let gives = |t: u64| if t < 128 { t + 2 } else { t + 1 };
    cases.push(case.gives(B32, gives).body(text));
}
