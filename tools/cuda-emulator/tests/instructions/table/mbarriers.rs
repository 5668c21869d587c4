// SPDX-License-Identifier: MIT OR Apache-2.0
//! Barriers in shared memory: what threads that arrive hand to those that wait, parities, states, counts.
//!
//! Each thread writes a word, arrives, waits and reads the word of another warp. What a wait answers before and after a
//! phase ends is seen as well.

use super::case::Case;
use super::case::Ty::{B32, Pred};

const FAMILY: &str = "mbarriers";

/// `%w2` is the thread's word, `%w4` that of the thread 32 further on, `%w5` the barrier, which `init` makes.
fn start(init: &str) -> String {
    format!(
        ".shared .align 16 .b8 s[256]; .shared .align 8 .b8 bar[16]; mov.u32 %w3, s; mad.lo.u32 %w2, %t, 4, %w3;
         xor.b32 %w4, %t, 32; mad.lo.u32 %w4, %w4, 4, %w3; mov.u32 %w5, bar; setp.eq.u32 %p0, %t, 0;
         {init}
         bar.sync 0; st.shared.u32 [%w2], %t;
         "
    )
}

fn new(name: &str) -> Case {
    Case::new(FAMILY, name, 64).sm(90)
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let init = "@%p0 mbarrier.init.shared.b64 [%w5], 64;";
    let read = "ld.shared.u32 $d, [%w4];";
    let exchanged = |t: u64| t ^ 32;
    for (arrive, wait) in [
        ("mbarrier.arrive.shared.b64 _, [%w5];", "mbarrier.try_wait.parity.shared.b64 %p1, [%w5], 0;"),
        ("mbarrier.arrive.shared::cta.b64 _, [%w5];", "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%w5], 0, 100;"),
        (
            "mbarrier.arrive.release.cta.shared::cta.b64 _, [%w5];",
            "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p1, [%w5], 0;",
        ),
        ("mbarrier.arrive.shared.b64 %q5, [%w5], 1;", "mbarrier.test_wait.parity.shared.b64 %p1, [%w5], 0;"),
        ("mbarrier.arrive.shared.b64 %q5, [%w5];", "mbarrier.test_wait.shared.b64 %p1, [%w5], %q5;"),
        ("mbarrier.arrive.shared.b64 %q5, [%w5];", "mbarrier.try_wait.shared.b64 %p1, [%w5], %q5;"),
        (
            "cvt.u64.u32 %q6, %w5; cvta.shared.u64 %q6, %q6; mbarrier.arrive.b64 _, [%q6];",
            "mbarrier.try_wait.parity.b64 %p1, [%q6], 0;",
        ),
        // Nothing is announced: the arrival alone counts.
        ("mbarrier.arrive.expect_tx.shared.b64 _, [%w5], 0;", "mbarrier.try_wait.parity.shared.b64 %p1, [%w5], 0;"),
    ] {
        let name = wait.split(' ').next().unwrap_or_default();
        let text = format!("{}{arrive}\nWAIT:\n{wait} @!%p1 bra WAIT;\n{read}", start(init));
        cases.push(new(name).gives(B32, exchanged).body(&text));
    }
    // One lane of each warp arrives for 32.
    let text = format!(
        "{}bar.warp.sync -1; and.b32 %w6, %t, 31; setp.eq.u32 %p2, %w6, 0; @%p2 mbarrier.arrive.shared.b64 %q5, [%w5], 32;
         WAIT:
         mbarrier.try_wait.parity.shared.b64 %p1, [%w5], 0; @!%p1 bra WAIT;
         {read}",
        start(init)
    );
    cases.push(new("mbarrier.arrive count").gives(B32, exchanged).body(&text));
    answers(&mut cases);
    // Six phases in a row, parity 0 and 1 in turn: the words go round.
    let text = format!(
        "{}mov.u32 %w8, 0; mov.u32 %w9, %t;
         LOOP:
         and.b32 %w7, %w8, 1; mbarrier.arrive.shared.b64 _, [%w5];
         A: mbarrier.try_wait.parity.shared.b64 %p1, [%w5], %w7; @!%p1 bra A;
         ld.shared.u32 %w10, [%w4]; add.u32 %w9, %w10, 1; bar.sync 0; st.shared.u32 [%w2], %w9;
         add.u32 %w8, %w8, 1; setp.lt.u32 %p2, %w8, 6; @%p2 bra LOOP; mov.u32 $d, %w9;",
        start(init)
    );
    cases.push(new("mbarrier phases").gives(B32, |t| t + 6).body(&text));
    // A barrier's eight bytes are memory again when it is no more, and may become another barrier.
    let text = format!(
        "{}@%p0 mbarrier.inval.shared.b64 [%w5]; @%p0 st.shared.u32 [%w5+4], 77; bar.sync 0; ld.shared.u32 $d1, [%w5+4];
         bar.sync 0; @%p0 mbarrier.init.shared::cta.b64 [%w5], 64; bar.sync 0; mbarrier.arrive.shared.b64 _, [%w5];
         WAIT:
         mbarrier.try_wait.parity.shared.b64 %p1, [%w5], 0; @!%p1 bra WAIT;
         ld.shared.u32 $d0, [%w4];",
        start(init)
    );
    cases.push(new("mbarrier.inval").gives(B32, exchanged).gives(B32, |_| 77).body(&text));
    // With the fence that makes barriers visible to other blocks, where there are any.
    let fenced = format!("{init} fence.mbarrier_init.release.cluster;");
    let text = format!(
        "{}mbarrier.arrive.shared.b64 _, [%w5];
         WAIT:
         mbarrier.try_wait.parity.shared.b64 %p1, [%w5], 0; @!%p1 bra WAIT;
         {read}",
        start(&fenced)
    );
    cases.push(new("fence.mbarrier_init").gives(B32, exchanged).body(&text));
    cases
}

/// What thread 0 is told before its arrivals, between them and after them.
fn answers(cases: &mut Vec<Case>) {
    let text = format!(
        "{}setp.ne.u32 %p7, %t, 0; mov.pred %p1, 0; mov.pred %p2, 0; mov.pred %p3, 0; mov.pred %p4, 0; mov.pred %p5, 0;
         mov.pred %p6, 0; @%p7 bra OVER;
         mbarrier.test_wait.parity.shared.b64 %p1, [%w5], 0; mbarrier.test_wait.parity.shared.b64 %p2, [%w5], 1;
         mbarrier.arrive.shared.b64 %q5, [%w5]; mbarrier.test_wait.shared.b64 %p3, [%w5], %q5;
         mbarrier.arrive.shared.b64 _, [%w5], 2; mbarrier.test_wait.shared.b64 %p4, [%w5], %q5;
         mbarrier.test_wait.parity.shared.b64 %p5, [%w5], 0; mbarrier.test_wait.parity.shared.b64 %p6, [%w5], 1;
         OVER:
         selp.b32 %w7, 1, 0, %p1; selp.b32 %w8, 2, 0, %p2; or.b32 %w7, %w7, %w8; selp.b32 %w8, 4, 0, %p3; or.b32 %w7, %w7, %w8;
         selp.b32 %w8, 8, 0, %p4; or.b32 %w7, %w7, %w8; selp.b32 %w8, 16, 0, %p5; or.b32 %w7, %w7, %w8;
         selp.b32 %w8, 32, 0, %p6; or.b32 $d0, %w7, %w8; mov.pred $d1, %p4;",
        start("@%p0 mbarrier.init.shared.b64 [%w5], 3;")
    );
    // Before: parity 0 is open, parity 1 is that of the phase before the first. After: the other way round.
    let first = |t: u64, v: u64| if t == 0 { v } else { 0 };
    let case = new("mbarrier.test_wait").gives(B32, move |t| first(t, 2 + 8 + 16)).gives(Pred, move |t| first(t, 1));
    cases.push(case.body(&text));
}
