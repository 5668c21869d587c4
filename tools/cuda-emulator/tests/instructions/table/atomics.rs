// SPDX-License-Identifier: MIT OR Apache-2.0
//! `atom` and `red`: every operation and type, in global, shared and generic memory, every order and scope.
//!
//! A row is what is there, what is given, and what is there afterwards; `atom` also has to give what was there. Where
//! many threads meet at one word, only what does not depend on their order is asked.

use super::case::Case;
use super::case::Ty::{self, B32, B64};
use super::rows::f;

const FAMILY: &str = "atomics";

/// Before, operand, second operand, after.
type Row = (u64, u64, u64, u64);

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let m1 = 0xffff_ffff;
    let all = |cases: &mut Vec<Case>, op: &str, ty: Ty, rows: &[Row]| everywhere(cases, 80, op, ty, rows);
    for s in ["u32", "s32"] {
        all(&mut cases, &format!("add.{s}"), B32, &[(5, 7, 0, 12), (m1, 2, 0, 1)]);
    }
    all(&mut cases, "add.u64", B64, &[(1 << 40, 1 << 40, 0, 1 << 41), (u64::MAX, 2, 0, 1)]);
    for (bits, ty, ones) in [(32, B32, m1), (64, B64, u64::MAX)] {
        let sign = (ones >> 1) + 1;
        all(&mut cases, &format!("exch.b{bits}"), ty, &[(5, 7, 0, 7), (ones, sign, 0, sign)]);
        all(&mut cases, &format!("cas.b{bits}"), ty, &[(5, 5, 9, 9), (5, 6, 9, 5), (sign, sign, 1, 1)]);
        all(&mut cases, &format!("and.b{bits}"), ty, &[(0xff00, 0x0ff0, 0, 0x0f00), (ones, sign, 0, sign)]);
        all(&mut cases, &format!("or.b{bits}"), ty, &[(0xf0, 0x0f, 0, 0xff), (sign, 1, 0, sign | 1)]);
        all(&mut cases, &format!("xor.b{bits}"), ty, &[(0xff, 0x0f, 0, 0xf0), (ones, ones, 0, 0)]);
        all(&mut cases, &format!("min.u{bits}"), ty, &[(5, ones, 0, 5), (sign, 3, 0, 3)]);
        all(&mut cases, &format!("max.u{bits}"), ty, &[(5, ones, 0, ones), (sign, 3, 0, sign)]);
        all(&mut cases, &format!("min.s{bits}"), ty, &[(5, ones, 0, ones), (sign, 3, 0, sign)]);
        all(&mut cases, &format!("max.s{bits}"), ty, &[(5, ones, 0, 5), (sign, 3, 0, 3)]);
    }
    // Up to the operand and back to 0; down to 0 and back to the operand, from above it as well.
    all(&mut cases, "inc.u32", B32, &[(5, 7, 0, 6), (7, 7, 0, 0), (9, 7, 0, 0)]);
    all(&mut cases, "dec.u32", B32, &[(5, 7, 0, 4), (0, 7, 0, 7), (9, 7, 0, 7), (7, 7, 0, 6)]);
    all(
        &mut cases,
        "add.f32",
        B32,
        &[(f(1.5), f(2.25), 0, f(3.75)), (f(1.0), 0x3380_0000, 0, f(1.0)), (0x3f80_0001, 0x3380_0000, 0, 0x3f80_0002)],
    );
    all(&mut cases, "add.f64", B64, &[(0x3ff8 << 48, 0x4002 << 48, 0, 0x400e << 48)]);
    let rows = [(0x3e00_3c00, 0x3e00_1000, 0, 0x4200_3c00), (0x0001_3c01, 0x0001_1000, 0, 0x0002_3c02)];
    all(&mut cases, "add.noftz.f16x2", B32, &rows);
    everywhere(&mut cases, 90, "add.noftz.bf16x2", B32, &[(0x3fc0_3f80, 0x3fc0_3b80, 0, 0x4040_3f80)]);
    subnormals(&mut cases);
    orders(&mut cases);
    crowds(&mut cases);
    messages(&mut cases);
    cases
}

/// Sums of f32 in global memory take subnormal numbers for zeros of their sign; those in shared memory keep them. Of
/// vectors the manual does not say it: the emulator has them alike.
fn subnormals(cases: &mut Vec<Case>) {
    // What is there, and what is added: the smallest normal number is 0080_0000, the smallest subnormal one 1.
    let rows: [(u32, u32); 5] =
        [(0x0080_0000, 1), (1, 0x0080_0000), (0x8000_0001, 0x8000_0001), (0x0080_0001, 0x8080_0000), (1, 0xbf80_0000)];
    let in_global = [0x0080_0000, 0x0080_0000, 0x8000_0000, 0, 0xbf80_0000];
    let in_shared = [0x0080_0001, 0x0080_0001, 0x8000_0002, 1, 0xbf80_0000];
    let row = move |t: u64| t as usize % rows.len();
    let case = |name: &str, after: [u32; 5]| {
        let mut c =
            Case::new(FAMILY, &format!("{name} of subnormals"), 32).sm(if name.contains(".v2") { 90 } else { 80 });
        c.distinct = rows.len();
        c.takes(B32, move |t| u64::from(rows[row(t)].0))
            .takes(B32, move |t| u64::from(rows[row(t)].1))
            .gives(B32, move |t| u64::from(after[row(t)]))
            .memory(vec![0; 256], Vec::new())
    };
    let global = "mad.wide.u32 %q1, %t, 8, %mem; st.global.b32 [%q1], $0;";
    for red in ["red.global.add.f32 [%q1], $1;", "red.relaxed.gpu.global.add.v2.f32 [%q1], {$1, $1};"] {
        let name = red.split(' ').next().unwrap();
        cases.push(case(name, in_global).body(&format!("{global} {red} ld.global.b32 $d, [%q1];")));
    }
    let shared = ".shared .align 8 .b8 s[256]; mov.u32 %w2, s; cvt.u64.u32 %q0, %w2; mad.wide.u32 %q1, %t, 4, %q0;";
    let red = "st.shared.b32 [%q1], $0; red.shared.add.f32 [%q1], $1; ld.shared.b32 $d, [%q1];";
    cases.push(case("red.shared.add.f32", in_shared).body(&format!("{shared} {red}")));
}

fn everywhere(cases: &mut Vec<Case>, sm: u32, op: &str, ty: Ty, rows: &[Row]) {
    let row = |t: u64| rows[t as usize % rows.len()];
    let (bytes, name) = if ty == B32 { (4, "b32") } else { (8, "b64") };
    let operands = if op.starts_with("cas") { "$1, $2" } else { "$1" };
    let shared = ".shared .align 8 .b8 s[256]; mov.u32 %w2, s; cvt.u64.u32 %q0, %w2;
                  ";
    // The last gives a generic address to an instruction of no space.
    for (space, reach) in [
        (
            "global",
            format!(
                "mad.wide.u32 %q1, %t, {bytes}, %mem;
                            "
            ),
        ),
        (
            "shared",
            format!(
                "{shared}mad.wide.u32 %q1, %t, {bytes}, %q0;
                            "
            ),
        ),
        (
            "",
            format!(
                "{shared}cvta.shared.u64 %q0, %q0; mad.wide.u32 %q1, %t, {bytes}, %q0;
                      "
            ),
        ),
    ] {
        let dot = if space.is_empty() { "" } else { "." };
        let (mut c, text) = (
            new(op, sm, space, "atom"),
            format!(
                "{reach}st{dot}{space}.{name} [%q1], $0;
                                                                  "
            ),
        );
        c.distinct = rows.len();
        let c = c.takes(ty, |t| row(t).0).takes(ty, |t| row(t).1).takes(ty, |t| row(t).2);
        let c = c.memory(vec![0; 256], Vec::new());
        let atom = format!("atom{dot}{space}.{op} $d0, [%q1], {operands}; ld{dot}{space}.{name} $d1, [%q1];");
        let both = c.clone().gives(ty, |t| row(t).0).gives(ty, |t| row(t).3);
        cases.push(both.body(&format!("{text}{atom}")));
        if op.starts_with("exch") || op.starts_with("cas") {
            continue;
        }
        let mut c = c.gives(ty, |t| row(t).3);
        c.name = c.name.replacen("atom", "red", 1);
        cases.push(c.body(&format!("{text}red{dot}{space}.{op} [%q1], $1; ld{dot}{space}.{name} $d0, [%q1];")));
    }
}

fn new(op: &str, sm: u32, space: &str, what: &str) -> Case {
    let dot = if space.is_empty() { "" } else { "." };
    Case::new(FAMILY, &format!("{what}{dot}{space}.{op}"), 32).sm(sm)
}

/// Orders and scopes change nothing that one thread can see.
fn orders(cases: &mut Vec<Case>) {
    for scope in ["cta", "gpu", "sys"] {
        for order in ["relaxed", "acquire", "release", "acq_rel"] {
            let op = format!("atom.{order}.{scope}.global.add.u32");
            let text = format!("mad.wide.u32 %q1, %t, 4, %mem; {op} $d0, [%q1], 7; ld.global.u32 $d1, [%q1];");
            let c = Case::new(FAMILY, &op, 32).gives(B32, |_| 0).gives(B32, |_| 7).memory(vec![0; 128], Vec::new());
            cases.push(c.body(&text));
            if order == "relaxed" || order == "release" {
                let op = format!("red.{order}.{scope}.global.add.u32");
                let text = format!("mad.wide.u32 %q1, %t, 4, %mem; {op} [%q1], 7; ld.global.u32 $d, [%q1];");
                let c = Case::new(FAMILY, &op, 32).gives(B32, |_| 7).memory(vec![0; 128], Vec::new());
                cases.push(c.body(&text));
            }
        }
    }
}

/// Four blocks of 64 threads at one word. Every old value is given once, so their sum is 0 + 1 + … + 255.
fn crowds(cases: &mut Vec<Case>) {
    let new = |name: &str| Case::new(FAMILY, name, 64).blocks(4);
    let text = "atom.global.add.u32 %w2, [%mem], 1; red.global.add.u32 [%mem+4], %w2;";
    cases.push(new("atom.global.add.u32").memory(vec![0; 8], vec![256.into(), 32640.into()]).body(text));
    let text =
        "atom.global.inc.u32 %w2, [%mem], 9; red.global.max.u32 [%mem+4], %w2; red.global.min.s32 [%mem+8], %w2;";
    // 256 steps round a ring of ten.
    let before = [0u32, 0, 100].iter().flat_map(|w| w.to_le_bytes()).collect();
    cases.push(new("atom.global.inc.u32").memory(before, vec![6.into(), 9.into(), 0.into()]).body(text));
    let text = "and.b32 %w3, %t, 31; shl.b32 %w2, 1, %w3; red.global.or.b32 [%mem], %w2;
                red.global.xor.b32 [%mem+4], %w2; not.b32 %w2, %w2; red.global.and.b32 [%mem+8], %w2;";
    let before = [0u32, 0, u32::MAX].iter().flat_map(|w| w.to_le_bytes()).collect();
    cases.push(new("red.global.or.b32").memory(before, vec![0xffff_ffff.into(), 0.into(), 0.into()]).body(text));
    // Halves of units are exact in any order.
    let text = "mov.b32 %w2, 0f3F000000; red.global.add.f32 [%mem], %w2;";
    cases.push(new("red.global.add.f32").memory(vec![0; 4], vec![f(128.0).into()]).body(text));
    // Two and four at once, each element by itself.
    let text = "mov.b32 %w2, 0f3F000000; mov.b32 %w3, 0f3FC00000; red.global.add.v2.f32 [%mem], {%w2, %w3};
                red.relaxed.gpu.global.add.v4.f32 [%mem+16], {%w3, %w2, %w2, %w3};";
    let after = [128.0, 384.0, 0.0, 0.0, 384.0, 128.0, 128.0, 384.0].map(|x| f(x).into()).to_vec();
    cases.push(Case::new(FAMILY, "red.global.add.v2.f32", 64).sm(90).blocks(4).memory(vec![0; 32], after).body(text));
    // A lock of one word: each thread adds to the next word while it holds it.
    let text = "mov.u32 %w4, 0;
                TRY:
                atom.acquire.gpu.global.cas.b32 %w2, [%mem], 0, 1; setp.ne.u32 %p0, %w2, 0; @%p0 bra AGAIN;
                ld.relaxed.gpu.global.u32 %w3, [%mem+4]; add.u32 %w3, %w3, 3; st.relaxed.gpu.global.u32 [%mem+4], %w3;
                mov.u32 %w4, 1; atom.release.gpu.global.exch.b32 %w2, [%mem], 0;
                AGAIN:
                setp.eq.u32 %p0, %w4, 0; @%p0 bra TRY;";
    cases.push(new("atom.acquire.gpu.global.cas.b32").memory(vec![0; 8], vec![0.into(), 768.into()]).body(text));
    let text = ".shared .align 4 .b8 s[4]; mov.u32 %w2, s; mov.u32 %w5, %tid.x; setp.eq.u32 %p0, %w5, 0;
                @%p0 st.shared.u32 [%w2], 0; bar.sync 0; atom.shared.add.u32 %w3, [%w2], 2; bar.sync 0;
                ld.shared.u32 $d, [%w2];";
    cases.push(new("atom.shared.add.u32").gives(B32, |_| 128).body(text));
}

/// One block writes and raises a flag, the other waits for the flag and reads.
fn messages(cases: &mut Vec<Case>) {
    for (name, raise, wait) in [
        ("st.release.gpu", "st.release.gpu.global.u32 [%mem], 1;", "ld.acquire.gpu.global.u32 %w2, [%mem];"),
        ("red.release.gpu", "red.release.gpu.global.add.u32 [%mem], 1;", "ld.acquire.gpu.global.u32 %w2, [%mem];"),
        (
            "atom.acquire.gpu",
            "atom.release.gpu.global.exch.b32 %w3, [%mem], 1;",
            "atom.acquire.gpu.global.or.b32 %w2, [%mem], 0;",
        ),
        ("membar.gl", "membar.gl; st.volatile.global.u32 [%mem], 1;", "ld.volatile.global.u32 %w2, [%mem]; membar.gl;"),
        (
            "membar.sys",
            "membar.sys; st.volatile.global.u32 [%mem], 1;",
            "ld.volatile.global.u32 %w2, [%mem]; membar.sys;",
        ),
        (
            "fence.acq_rel.gpu",
            "fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%mem], 1;",
            "ld.relaxed.gpu.global.u32 %w2, [%mem]; fence.acq_rel.gpu;",
        ),
        (
            "fence.sc.sys",
            "fence.sc.sys; st.relaxed.sys.global.u32 [%mem], 1;",
            "ld.relaxed.sys.global.u32 %w2, [%mem]; fence.sc.sys;",
        ),
    ] {
        let text = format!(
            "mov.u32 %w4, %ctaid.x; mov.u32 $d, 4711; setp.ne.u32 %p0, %w4, 0; @%p0 bra READ;
             st.global.u32 [%mem+4], 4711; {raise} bra DONE;
             READ:
             {wait} setp.eq.u32 %p1, %w2, 0; @%p1 bra READ; ld.global.u32 $d, [%mem+4];
             DONE:"
        );
        let c =
            Case::new(FAMILY, name, 1).blocks(2).gives(B32, |_| 4711).memory(vec![0; 8], vec![1.into(), 4711.into()]);
        cases.push(c.body(&text));
    }
}
