// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads and stores: every width, vectors, spaces, orders and hints.
//!
//! A load extends by the sign of its type into whatever register takes it; a store writes so many bytes and no more.

use super::case::Case;
use super::case::Ty::{self, B16, B32, B64};

const FAMILY: &str = "memory";

/// Sixteen bytes whose every part has its sign bit set or not in its own way.
const BYTES: [u8; 16] =
    [0x80, 0x7f, 0xfe, 0x01, 0x11, 0x92, 0x33, 0xf4, 0x05, 0x86, 0x17, 0x28, 0x99, 0xaa, 0x3b, 0xcc];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    loads(&mut cases);
    stores(&mut cases);
    hints(&mut cases);
    spaces(&mut cases);
    parameters(&mut cases);
    cases
}

fn new(name: &str) -> Case {
    Case::new(FAMILY, name, 32)
}

/// The type, the register, and what the first sixteen bytes hold of it.
fn loads(cases: &mut Vec<Case>) {
    let table: [(&str, Ty, &[u64]); 23] = [
        ("u8", B16, &[0x80, 0x7f, 0xfe, 0x01]),
        ("b8", B16, &[0x80, 0x7f, 0xfe, 0x01]),
        ("s8", B16, &[0xff80, 0x7f, 0xfffe, 0x01]),
        ("u8", B32, &[0x80, 0x7f, 0xfe, 0x01]),
        ("s8", B32, &[0xffff_ff80, 0x7f, 0xffff_fffe, 0x01]),
        ("s8", B64, &[0xffff_ffff_ffff_ff80, 0x7f, 0xffff_ffff_ffff_fffe, 0x01]),
        ("u16", B16, &[0x7f80, 0x01fe, 0x9211, 0xf433]),
        ("s16", B16, &[0x7f80, 0x01fe, 0x9211, 0xf433]),
        ("b16", B16, &[0x7f80, 0x01fe, 0x9211, 0xf433]),
        ("u16", B32, &[0x7f80, 0x01fe, 0x9211, 0xf433]),
        ("s16", B32, &[0x7f80, 0x01fe, 0xffff_9211, 0xffff_f433]),
        ("s16", B64, &[0x7f80, 0x01fe, 0xffff_ffff_ffff_9211, 0xffff_ffff_ffff_f433]),
        ("u32", B32, &[0x01fe_7f80, 0xf433_9211, 0x2817_8605, 0xcc3b_aa99]),
        ("s32", B32, &[0x01fe_7f80, 0xf433_9211, 0x2817_8605, 0xcc3b_aa99]),
        ("b32", B32, &[0x01fe_7f80, 0xf433_9211, 0x2817_8605, 0xcc3b_aa99]),
        ("f32", B32, &[0x01fe_7f80, 0xf433_9211, 0x2817_8605, 0xcc3b_aa99]),
        ("u32", B64, &[0x01fe_7f80, 0xf433_9211, 0x2817_8605, 0xcc3b_aa99]),
        ("s32", B64, &[0x01fe_7f80, 0xffff_ffff_f433_9211, 0x2817_8605, 0xffff_ffff_cc3b_aa99]),
        ("u64", B64, &[0xf433_9211_01fe_7f80, 0xcc3b_aa99_2817_8605]),
        ("s64", B64, &[0xf433_9211_01fe_7f80, 0xcc3b_aa99_2817_8605]),
        ("b64", B64, &[0xf433_9211_01fe_7f80, 0xcc3b_aa99_2817_8605]),
        ("f64", B64, &[0xf433_9211_01fe_7f80, 0xcc3b_aa99_2817_8605]),
        ("b8", B32, &[0x80, 0x7f, 0xfe, 0x01]),
    ];
    for (ty, register, values) in table {
        let n = values.len() as u64;
        let bytes = if ty.ends_with("64") {
            8
        } else if ty.ends_with("32") {
            4
        } else {
            1 + u64::from(ty.ends_with("16"))
        };
        // Each lane its own item.
        let body = format!("rem.u32 %w2, %t, {n}; mad.wide.u32 %q0, %w2, {bytes}, %mem; ld.global.{ty} $d, [%q0];");
        cases.push(
            new(&format!("ld.global.{ty}"))
                .gives(register, |t| values[(t % n) as usize])
                .memory(BYTES.to_vec(), Vec::new())
                .body(&body),
        );
        if n * bytes > 16 || register != natural(ty) && bytes < 4 {
            continue;
        }
        // Two and four at once, in the second half when they are two.
        for count in [2, 4] {
            if count * bytes > 16 {
                continue;
            }
            let skip = if n >= 2 * count { count } else { 0 };
            let items: Vec<String> = (0..count).map(|k| format!("$d{k}")).collect();
            let text = format!("ld.global.v{count}.{ty} {{{}}}, [%mem+{}];", items.join(", "), skip * bytes);
            let mut c = new(&format!("ld.global.v{count}.{ty}")).memory(BYTES.to_vec(), Vec::new());
            for k in 0..count {
                c = c.gives(register, |_| values[(skip + k) as usize]);
            }
            cases.push(c.body(&text));
        }
    }
}

fn natural(ty: &str) -> Ty {
    match ty {
        t if t.ends_with("64") => B64,
        t if t.ends_with("32") => B32,
        _ => B16,
    }
}

/// The instruction, its operands and what memory holds of its sixteen bytes, which were all ff.
fn stores(cases: &mut Vec<Case>) {
    let ff = 0xffff_ffff;
    let table: [(&str, &str, Ty, u64, [u64; 4]); 20] = [
        ("st.global.u8", "[%mem+1], $0", B16, 0x1234, [0xffff_34ff, ff, ff, ff]),
        ("st.global.b8", "[%mem+3], $0", B32, 0x1234_5678, [0x78ff_ffff, ff, ff, ff]),
        ("st.global.s8", "[%mem], $0", B64, 0xab, [0xffff_ffab, ff, ff, ff]),
        ("st.global.u16", "[%mem+2], $0", B16, 0x1234, [0x1234_ffff, ff, ff, ff]),
        ("st.global.b16", "[%mem+4], $0", B32, 0x1234_5678, [ff, 0xffff_5678, ff, ff]),
        ("st.global.u32", "[%mem+4], $0", B32, 0x1234_5678, [ff, 0x1234_5678, ff, ff]),
        ("st.global.f32", "[%mem+12], $0", B32, 0x3fc0_0000, [ff, ff, ff, 0x3fc0_0000]),
        ("st.global.b32", "[%mem+8], $0", B64, 0x9999_9999_1234_5678, [ff, ff, 0x1234_5678, ff]),
        ("st.global.u64", "[%mem+8], $0", B64, 0x0123_4567_89ab_cdef, [ff, ff, 0x89ab_cdef, 0x0123_4567]),
        ("st.global.f64", "[%mem], $0", B64, 0x4000_0000_0000_0001, [1, 0x4000_0000, ff, ff]),
        ("st.global.v2.u8", "[%mem+2], {$0, $0}", B16, 0x12, [0x1212_ffff, ff, ff, ff]),
        ("st.global.v4.u8", "[%mem+4], {$0, $0, 7, $0}", B16, 0x12, [ff, 0x1207_1212, ff, ff]),
        ("st.global.v2.u16", "[%mem+4], {$0, 9}", B16, 0x1234, [ff, 0x0009_1234, ff, ff]),
        ("st.global.v4.b16", "[%mem+8], {$0, 1, 2, $0}", B16, 0x1234, [ff, ff, 0x0001_1234, 0x1234_0002]),
        ("st.global.v2.u32", "[%mem+8], {5, $0}", B32, 0x1234, [ff, ff, 5, 0x1234]),
        ("st.global.v4.u32", "[%mem], {5, $0, 6, $0}", B32, 0x1234, [5, 0x1234, 6, 0x1234]),
        (
            "st.global.v4.f32",
            "[%mem], {$0, $0, $0, 0f3F800000}",
            B32,
            0x4000_0000,
            [0x4000_0000, 0x4000_0000, 0x4000_0000, 0x3f80_0000],
        ),
        ("st.global.v2.u64", "[%mem], {$0, 3}", B64, 0x1_0000_0002, [2, 1, 3, 0]),
        ("st.u32", "[%mem+4], $0", B32, 0x1234_5678, [ff, 0x1234_5678, ff, ff]),
        ("st.volatile.global.u32", "[%mem], $0", B32, 77, [77, ff, ff, ff]),
    ];
    for (op, operands, ty, value, after) in table {
        let text = format!("setp.eq.u32 %p0, %t, 0; @%p0 {op} {operands};");
        let after = after.into_iter().map(u64::into).collect();
        cases.push(new(op).takes(ty, |_| value).memory(vec![0xff; 16], after).body(&text));
    }
    // Every lane its own word.
    let text = "mad.wide.u32 %q0, %t, 4, %mem; mul.lo.u32 %w2, %t, 3; st.global.u32 [%q0], %w2;";
    let after = (0..32).map(|t| (3 * t).into()).collect();
    cases.push(new("st.global.u32").memory(vec![0xff; 128], after).body(text));
}

/// Hints and orders change nothing that one thread can see.
fn hints(cases: &mut Vec<Case>) {
    for how in [
        "ca",
        "cg",
        "cs",
        "lu",
        "cv",
        "nc",
        "weak",
        "L1::evict_last",
        "L1::no_allocate",
        "L2::128B",
        "relaxed.cta",
        "relaxed.gpu",
        "relaxed.sys",
        "acquire.cta",
        "acquire.gpu",
        "acquire.sys",
        "volatile",
    ] {
        let (before, after) = match how {
            "nc" => ("global.nc", ""),
            h if h.starts_with("L") => ("global", h),
            h if h.starts_with('c') || h == "lu" => ("global", h),
            h => (h, "global"),
        };
        let op = ["ld", before, after, "u32"].into_iter().filter(|p| !p.is_empty()).collect::<Vec<_>>().join(".");
        let c = new(&op).gives(B32, |_| 0xf433_9211).memory(BYTES.to_vec(), Vec::new());
        cases.push(c.body(&format!("{op} $d, [%mem+4];")));
    }
    for how in [
        "wb",
        "cg",
        "cs",
        "wt",
        "weak",
        "L1::no_allocate",
        "relaxed.cta",
        "relaxed.gpu",
        "relaxed.sys",
        "release.cta",
        "release.gpu",
        "release.sys",
    ] {
        let (before, after) = if ["wb", "cg", "cs", "wt"].contains(&how) || how.starts_with("L") {
            ("global", how)
        } else {
            (how, "global")
        };
        let op = format!("st.{before}.{after}.u32");
        let after = vec![0xffff_ffff.into(), 1234.into()];
        let text = format!("setp.eq.u32 %p0, %t, 9; @%p0 {op} [%mem+4], 1234;");
        cases.push(new(&op).memory(vec![0xff; 8], after).body(&text));
    }
    for op in ["ldu.global.u32", "ld.global.ca.v2.u32", "ld.global.nc.v4.u32", "ld.global.nc.L1::no_allocate.v4.f32"] {
        let n = if op.contains("v4") {
            4
        } else if op.contains("v2") {
            2
        } else {
            1
        };
        let values = [0x01fe_7f80, 0xf433_9211, 0x2817_8605, 0xcc3b_aa99];
        let items: Vec<String> = (0..n).map(|k| format!("$d{k}")).collect();
        let items = if n == 1 { items[0].clone() } else { format!("{{{}}}", items.join(", ")) };
        let mut c = new(op).memory(BYTES.to_vec(), Vec::new());
        for value in values.into_iter().take(n) {
            c = c.gives(B32, move |_| value);
        }
        cases.push(c.body(&format!("{op} {items}, [%mem];")));
    }
    let c = new("prefetch").gives(B32, |_| 0x01fe_7f80).memory(BYTES.to_vec(), Vec::new());
    cases.push(
        c.body("prefetch.global.L1 [%mem]; prefetch.global.L2 [%mem]; prefetchu.L1 [%mem]; ld.global.u32 $d, [%mem];"),
    );
}

fn spaces(cases: &mut Vec<Case>) {
    let shared = ".shared .align 16 .b8 s[512]; shl.b32 %w2, %t, 4; mov.u32 %w3, s; add.u32 %w2, %w2, %w3;
                  ";
    let rows = |k: u64| move |t: u64| 100 * t + k;
    let mut c = new("ld.shared.v4.u32");
    let mut text = shared.to_owned();
    for k in 0..4 {
        c = c.takes(B32, rows(k)).gives(B32, rows(k));
    }
    text += "st.shared.v4.u32 [%w2], {$0, $1, $2, $3}; ld.shared.v4.u32 {$d0, $d1, $d2, $d3}, [%w2];";
    cases.push(c.body(&text));
    let text = format!(
        "{shared}st.shared.u16 [%w2+2], $0; st.shared.u8 [%w2], 200; ld.shared.s16 $d0, [%w2+2];
         ld.shared.s8 $d1, [%w2];"
    );
    cases.push(
        new("st.shared.u16")
            .takes(B16, |t| 0xfff0 + t % 16)
            .gives(B32, |t| 0xffff_fff0 + t % 16)
            .gives(B32, |_| 0xffff_ffc8)
            .body(&text),
    );
    let text =
        format!("{shared}st.shared.u64 [%w2+8], $0; ld.volatile.shared.u64 $d0, [%w2+8]; ld.shared.u32 $d1, [%w2+12];");
    cases.push(
        new("st.shared.u64").takes(B64, |t| t << 32 | 5).gives(B64, |t| t << 32 | 5).gives(B32, |t| t).body(&text),
    );
    // Another lane's, by way of the other address width.
    let text = format!(
        "{shared}st.shared.u32 [%w2], $0; bar.warp.sync -1; xor.b32 %w4, %t, 1; shl.b32 %w4, %w4, 4;
         add.u32 %w4, %w4, %w3; cvt.u64.u32 %q0, %w4; ld.shared.u32 $d0, [%q0]; add.u32 %w4, %w4, -16;
         ld.shared.u32 $d1, [%w4+16];"
    );
    cases.push(
        new("ld.shared.u32").takes(B32, |t| 7 * t).gives(B32, |t| 7 * (t ^ 1)).gives(B32, |t| 7 * (t ^ 1)).body(&text),
    );
    let text = ".local .align 8 .b8 l[24]; st.local.u32 [l+4], $0; st.local.v2.u32 [l+8], {$0, 6};
                st.local.u8 [l], 129; ld.local.u32 $d0, [l+4]; ld.local.u64 $d1, [l+8]; ld.local.s8 $d2, [l];";
    cases.push(
        new("st.local")
            .takes(B32, |t| t)
            .gives(B32, |t| t)
            .gives(B64, |t| 6 << 32 | t)
            .gives(B32, |_| 0xffff_ff81)
            .body(text),
    );
    let module = ".const .align 8 .b32 c[4] = {55, -66, 0x4d, 88};
                  .const .align 8 .b64 wide[2] = {0x123456789abcdef0, 9}; .const .align 4 .f32 half = 0f3F000000;
                  .const .align 1 .b8 letters[4] = {97, 98, 99, 200};";
    let text = "and.b32 %w2, %t, 3; mul.wide.u32 %q0, %w2, 4; mov.u64 %q1, c; add.s64 %q1, %q1, %q0;
                ld.const.u32 $d0, [%q1]; ld.const.u64 $d1, [wide]; ld.const.f32 $d2, [half];
                ld.const.s8 $d3, [letters+3]; ld.const.v2.u32 {$d4, $d5}, [c+8];";
    cases.push(
        new("ld.const")
            .module(module)
            .gives(B32, |t| [55, 0xffff_ffbe, 77, 88][t as usize % 4])
            .gives(B64, |_| 0x1234_5678_9abc_def0)
            .gives(B32, |_| 0x3f00_0000)
            .gives(B32, |_| 0xffff_ffc8)
            .gives(B32, |_| 77)
            .gives(B32, |_| 88)
            .body(text),
    );
    let module = ".global .align 8 .b32 g[4] = {55, -66, 0x4d, 88}; .global .align 4 .b32 untouched[2];";
    let text = "ld.global.u32 $d0, [g+4]; ld.global.u32 $d1, [untouched+4];";
    cases.push(new(".global").module(module).gives(B32, |_| 0xffff_ffbe).gives(B32, |_| 0).body(text));
    // Lanes of one instruction in three spaces, by generic addresses.
    let text = ".shared .align 4 .b8 s[4]; .local .align 4 .b8 l[4]; st.local.u32 [l], 31; mov.u32 %w2, s;
                setp.eq.u32 %p0, %t, 0; @%p0 st.shared.u32 [%w2], 21; bar.warp.sync -1; mov.u64 %q0, l;
                cvta.local.u64 %q0, %q0; cvt.u64.u32 %q1, %w2; cvta.shared.u64 %q1, %q1; rem.u32 %w3, %t, 3;
                setp.eq.u32 %p1, %w3, 1; selp.b64 %q0, %q1, %q0, %p1; setp.eq.u32 %p1, %w3, 2;
                cvta.global.u64 %q1, %mem; selp.b64 %q0, %q1, %q0, %p1; ld.u32 $d, [%q0];";
    let c = new("ld.u32").gives(B32, |t| [31, 21, 0x01fe_7f80][t as usize % 3]).memory(BYTES.to_vec(), Vec::new());
    cases.push(c.body(text));
}

/// Parameters lie one after the other, each aligned to its size.
fn parameters(cases: &mut Vec<Case>) {
    let text = "ld.param.u8 $d0, [a]; ld.param.u16 $d1, [b]; ld.param.s16 $d2, [b]; ld.param.f32 $d3, [c];
                ld.param.u64 $d4, [e]; ld.param.v2.u32 {$d5, $d6}, [many+8]; ld.param.s8 $d7, [many+1];
                ld.param.b32 $d8, [last];";
    cases.push(
        new("ld.param")
            .extra(".param .u8 a", &[0xf1])
            .extra(".param .u16 b", &[0x34, 0x92])
            .extra(".param .f32 c", &1.5f32.to_le_bytes())
            .extra(".param .u64 e", &0x0123_4567_89ab_cdefu64.to_le_bytes())
            .extra(".param .align 8 .b8 many[16]", &BYTES)
            .extra(".param .u32 last", &4321u32.to_le_bytes())
            .gives(B32, |_| 0xf1)
            .gives(B32, |_| 0x9234)
            .gives(B32, |_| 0xffff_9234)
            .gives(B32, |_| 0x3fc0_0000)
            .gives(B64, |_| 0x0123_4567_89ab_cdef)
            .gives(B32, |_| 0x2817_8605)
            .gives(B32, |_| 0xcc3b_aa99)
            .gives(B32, |_| 0x7f)
            .gives(B32, |_| 4321)
            .body(text),
    );
}
