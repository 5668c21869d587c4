// SPDX-License-Identifier: MIT OR Apache-2.0
//! Moves, packing, immediates, special registers, addresses.

use super::case::Case;
use super::case::Ty::{B16, B32, B64};
use super::rows::{Rows, d, f};

const FAMILY: &str = "moves";

pub fn cases() -> Vec<Case> {
    let mut t = Rows::new(FAMILY);
    packing(&mut t);
    immediates(&mut t);
    let mut cases = t.cases;
    cases.extend(registers());
    cases.extend(addresses());
    cases
}

fn packing(t: &mut Rows) {
    let (a, b) = (0x8000_0001, 0xfedc_ba98);
    t.written(80, "mov.b64 $d, {$0, $1};", B64, &[B32; 2], &[(&[a, b], 0xfedc_ba98_8000_0001.into())]);
    t.written(80, "mov.b32 $d, {$0, $1};", B32, &[B16; 2], &[(&[0x8001, 0xfedc], 0xfedc_8001.into())]);
    let four: &[u64] = &[0x8001, 0x8002, 0x8003, 0x8004];
    t.written(80, "mov.b64 $d, {$0, $1, $2, $3};", B64, &[B16; 4], &[(four, 0x8004_8003_8002_8001.into())]);
    let whole: &[u64] = &[0x8004_8003_8002_8001];
    t.written(
        80,
        "{ .reg .b32 x, y; $? mov.b64 {x, y}, $0; $? mov.b32 $d, x; }",
        B32,
        &[B64],
        &[(whole, 0x8002_8001.into())],
    );
    t.written(
        80,
        "{ .reg .b32 x, y; $? mov.b64 {x, y}, $0; $? mov.b32 $d, y; }",
        B32,
        &[B64],
        &[(whole, 0x8004_8003.into())],
    );
    for (k, part) in [0x8001, 0x8002, 0x8003, 0x8004].into_iter().enumerate() {
        let text = format!("{{ .reg .b16 h0, h1, h2, h3; $? mov.b64 {{h0, h1, h2, h3}}, $0; $? mov.b16 $d, h{k}; }}");
        t.written(80, &text, B16, &[B64], &[(whole, u64::into(part))]);
    }
    let word: &[u64] = &[0x1234_5678];
    t.written(80, "{ .reg .b16 x; $? mov.b32 {_, x}, $0; $? mov.b16 $d, x; }", B16, &[B32], &[(word, 0x1234.into())]);
    t.written(80, "{ .reg .b16 x; $? mov.b32 {x, _}, $0; $? mov.b16 $d, x; }", B16, &[B32], &[(word, 0x5678.into())]);
}

fn immediates(t: &mut Rows) {
    t.written(80, "mov.u32 $d, -5;", B32, &[], &[(&[], 0xffff_fffb.into())]);
    t.written(80, "mov.b32 $d, 0xdeadbeef;", B32, &[], &[(&[], 0xdead_beef.into())]);
    t.written(80, "mov.u32 $d, 0b1011;", B32, &[], &[(&[], 11.into())]);
    t.written(80, "mov.u32 $d, 017;", B32, &[], &[(&[], 15.into())]);
    t.written(80, "mov.u64 $d, 0x123456789abcdef0;", B64, &[], &[(&[], 0x1234_5678_9abc_def0.into())]);
    t.written(80, "mov.u16 $d, 65535;", B16, &[], &[(&[], 0xffff.into())]);
    t.written(80, "mov.f32 $d, 0fC0000000;", B32, &[], &[(&[], f(-2.0).into())]);
    t.written(80, "mov.f32 $d, 1.5;", B32, &[], &[(&[], f(1.5).into())]);
    t.written(80, "mov.f64 $d, 0d4000000000000000;", B64, &[], &[(&[], d(2.0).into())]);
    t.written(80, "add.s64 $d, $0, -5;", B64, &[B64], &[(&[2], 0xffff_ffff_ffff_fffd.into())]);
    t.written(80, "sub.s16 $d, $0, -1;", B16, &[B16], &[(&[0xffff], 0.into())]);
}

/// A number that depends on the thread.
type OfThread = Box<dyn Fn(u64) -> u64>;

/// What every thread can ask of itself: two blocks of 96 threads.
fn registers() -> Vec<Case> {
    fn mask(t: u64) -> u64 {
        1 << (t % 32)
    }
    let table: [(&str, OfThread); 14] = [
        ("%tid.x", Box::new(|t| t % 96)),
        ("%tid.y", Box::new(|_| 0)),
        ("%ntid.x", Box::new(|_| 96)),
        ("%ntid.z", Box::new(|_| 1)),
        ("%ctaid.x", Box::new(|t| t / 96)),
        ("%ctaid.y", Box::new(|_| 0)),
        ("%nctaid.x", Box::new(|_| 2)),
        ("%nctaid.z", Box::new(|_| 1)),
        ("%laneid", Box::new(|t| t % 32)),
        ("%lanemask_eq", Box::new(mask)),
        ("%lanemask_lt", Box::new(|t| mask(t) - 1)),
        ("%lanemask_le", Box::new(|t| 2 * mask(t) - 1)),
        ("%lanemask_gt", Box::new(|t| 0xffff_ffff - (2 * mask(t) - 1))),
        ("%lanemask_ge", Box::new(|t| 0xffff_ffff - (mask(t) - 1))),
    ];
    let made = table.into_iter().map(|(name, value)| {
        let text = format!("mov.u32 $d, {name};");
        Case::new(FAMILY, &format!("mov.u32 {name}"), 96).blocks(2).gives(B32, value).body(&text)
    });
    let mut cases: Vec<Case> = made.collect();
    let one = |name: &str| Case::new(FAMILY, name, 32).gives(B32, |_| 1);
    cases.push(one("mov.u32 WARP_SZ").gives(B32, |_| 32).body("mov.u32 $d0, 1; mov.u32 $d1, WARP_SZ;"));
    // Clocks only grow; multiprocessors and warps are numbered from 0.
    cases.push(one("mov.u64 %clock64").body(
        "mov.u64 %q0, %clock64; mov.u32 %w2, %clock; bar.warp.sync -1; mov.u64 %q1, %clock64;
         setp.ge.u64 %p0, %q1, %q0; selp.u32 $d, 1, 0, %p0;",
    ));
    cases.push(one("mov.u64 %globaltimer").body(
        "mov.u64 %q0, %globaltimer; bar.warp.sync -1; mov.u64 %q1, %globaltimer; setp.ge.u64 %p0, %q1, %q0;
         selp.u32 $d, 1, 0, %p0;",
    ));
    cases.push(
        one("mov.u32 %smid")
            .body("mov.u32 %w2, %smid; mov.u32 %w3, %nsmid; set.lt.u32.u32 %w4, %w2, %w3; neg.s32 $d, %w4;"),
    );
    cases.push(
        one("mov.u32 %warpid")
            .body("mov.u32 %w2, %warpid; mov.u32 %w3, %nwarpid; set.lt.u32.u32 %w4, %w2, %w3; neg.s32 $d, %w4;"),
    );
    cases.push(
        one("mov.u64 %gridid")
            .body("mov.u64 %q0, %gridid; mov.u64 %q1, %gridid; set.eq.u32.u64 %w2, %q0, %q1; neg.s32 $d, %w2;"),
    );
    cases.push(
        Case::new(FAMILY, "mov.u32 %dynamic_smem_size", 32).gives(B32, |_| 0).body(
            ".shared .align 4 .b8 s[64]; mov.u32 %w2, s; st.shared.u32 [%w2], %w2; mov.u32 $d, %dynamic_smem_size;",
        ),
    );
    // The driver may take some for itself, but not less than is declared.
    cases.push(one("mov.u32 %total_smem_size").body(
        ".shared .align 4 .b8 s[64]; mov.u32 %w2, s; st.shared.u32 [%w2], %w2; mov.u32 %w3, %total_smem_size;
         set.ge.u32.u32 %w4, %w3, 64; neg.s32 $d, %w4;",
    ));
    cases
}

/// Symbols, and the way between a space and generic addresses.
fn addresses() -> Vec<Case> {
    let variable = ".global .align 8 .b32 g[4] = {11, 22, 33, 44}; .const .align 8 .b32 c[4] = {55, 66, 77, 88};";
    let new = |name: &str| Case::new(FAMILY, name, 32).module(variable);
    let pick = |v: [u64; 4]| move |t: u64| v[t as usize % 4];
    let index = "and.b32 %w2, %t, 3; mul.wide.u32 %q1, %w2, 4;
                 ";
    vec![
        new("mov.u64 symbol")
            .gives(B32, pick([11, 22, 33, 44]))
            .body(&format!("{index}mov.u64 %q0, g; add.s64 %q0, %q0, %q1; ld.global.u32 $d, [%q0];")),
        new("mov.u64 symbol+offset").gives(B32, |_| 33).body("mov.u64 %q0, g+8; ld.global.u32 $d, [%q0];"),
        new("cvta.global.u64").gives(B32, pick([11, 22, 33, 44])).body(&format!(
            "{index}mov.u64 %q0, g; cvta.global.u64 %q0, %q0; add.s64 %q0, %q0, %q1; ld.u32 $d, [%q0];"
        )),
        new("cvta.const.u64")
            .gives(B32, pick([55, 66, 77, 88]))
            .body(&format!("{index}mov.u64 %q0, c; cvta.const.u64 %q0, %q0; add.s64 %q0, %q0, %q1; ld.u32 $d, [%q0];")),
        new("cvta.to.global.u64")
            .gives(B32, |_| 22)
            .body("mov.u64 %q0, g; cvta.global.u64 %q0, %q0; cvta.to.global.u64 %q0, %q0; ld.global.u32 $d, [%q0+4];"),
        // A list among the parameters, read as memory is.
        new("cvta.param.u64")
            .extra(".param .align 16 .b8 list[16]", &[15u32, 25, 35, 45].map(u32::to_le_bytes).concat())
            .gives(B32, pick([15, 25, 35, 45]))
            .gives(B32, |_| 35)
            .body(&format!(
                "{index}mov.b64 %q0, list; cvta.param.u64 %q0, %q0; add.s64 %q1, %q0, %q1; ld.u32 $d0, [%q1];
                 cvta.to.param.u64 %q2, %q0; ld.param.u32 $d1, [%q2+8];"
            )),
        new("cvta.shared.u64").gives(B32, |t| t + 7).gives(B32, |t| t + 7).body(
            ".shared .align 4 .b8 s[128]; shl.b32 %w2, %t, 2; mov.u32 %w3, s; add.u32 %w2, %w2, %w3;
             add.u32 %w4, %t, 7; st.shared.u32 [%w2], %w4; cvt.u64.u32 %q0, %w2; cvta.shared.u64 %q1, %q0;
             ld.u32 $d0, [%q1]; cvta.to.shared.u64 %q2, %q1; ld.shared.u32 $d1, [%q2];",
        ),
        new("cvta.local.u64").gives(B32, |t| t + 9).gives(B32, |t| t + 9).body(
            ".local .align 4 .b8 l[16]; mov.u64 %q0, l; add.u32 %w2, %t, 9; cvta.local.u64 %q1, %q0;
             st.u32 [%q1+8], %w2; ld.local.u32 $d0, [%q0+8]; cvta.to.local.u64 %q2, %q1; ld.local.u32 $d1, [%q2+8];",
        ),
    ]
}
