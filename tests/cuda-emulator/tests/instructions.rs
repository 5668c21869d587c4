// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every family of instructions against results computed by hand: one PTX line each, run by one warp.
//!
//! A case is the instruction and, for lane 0, its operands and the result as bits. All lanes get the same operands plus
//! nothing else, so that the vector and the lane-by-lane paths (under a guard) must agree too.

use cuda_emulator::{Launch, Memory, Module, Options, launch};

/// Runs one instruction over operands in 64-bit slots; gives the result of a lane that ran the full-warp form and of
/// one that ran the guarded form.
fn run(instruction: &str, dst: &str, operands: &[(&str, u64)]) -> (u64, u64) {
    let mut regs = String::new();
    let mut loads = String::new();
    for (k, (ty, _)) in operands.iter().enumerate() {
        let at = 8 * (k + 1);
        if *ty == "pred" {
            regs += &format!(".reg .pred %a{k}; .reg .b32 %t{k};\n");
            loads += &format!("ld.global.u32 %t{k}, [%rd1+{at}]; setp.ne.u32 %a{k}, %t{k}, 0;\n");
        } else {
            regs += &format!(".reg .{ty} %a{k};\n");
            loads += &format!("ld.global.{ty} %a{k}, [%rd1+{at}];\n");
        }
    }
    let names: Vec<String> = (0..operands.len()).map(|k| format!("%a{k}")).collect();
    let place = |d: &str, guard: &str| {
        let text = if instruction.contains("$?") { instruction.to_owned() } else { format!("$? {instruction}") };
        let mut text = text.replace("$?", guard).replace("$d", d);
        for (k, n) in names.iter().enumerate() {
            text = text.replace(&format!("${k}"), n);
        }
        text
    };
    let (out, keep) = match dst {
        "pred" => {
            (".reg .pred %d, %g;\n".to_owned(), "selp.u32 %s, 1, 0, %D; st.global.u32 [%rd1+OFF], %s;\n".to_owned())
        }
        ty => (format!(".reg .{ty} %d, %g;\n"), format!("st.global.{ty} [%rd1+OFF], %D;\n")),
    };
    let store = |d: &str, off: u32| keep.replace("%D", d).replace("OFF", &off.to_string());
    let ptx = format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p) {{\n\
         .reg .pred %only; .reg .b32 %s, %lane; .reg .b64 %rd<2>;\n{regs}{out}\
         mov.u32 %lane, %tid.x; setp.eq.u32 %only, %lane, 0;\nld.param.u64 %rd1, [p];\n{loads}\
         {}\n{}\n@!%only exit;\n{}{}ret;\n}}\n",
        place("%d", ""),
        place("%g", "@%only"),
        store("%d", 48),
        store("%g", 56),
    );
    let mut mem = Memory::new();
    let loaded =
        Module::parse(&ptx).and_then(|m| m.load(&mut mem)).unwrap_or_else(|e| panic!("{instruction}: {e}\n{ptx}"));
    let p = mem.alloc(64);
    mem.write(p, &[0; 64]).unwrap();
    for (k, (_, v)) in operands.iter().enumerate() {
        mem.write(p + 8 * (k as u64 + 1), &v.to_le_bytes()).unwrap();
    }
    let params = p.to_le_bytes();
    let how =
        Launch { grid: [1; 3], block: [32, 1, 1], dynamic_shared: 0, params: &params, options: Options::default() };
    launch(loaded.kernel("k").unwrap(), &mut mem, &how).unwrap_or_else(|e| panic!("{instruction}: {e}"));
    let word = |at: u64| u64::from_le_bytes(mem.read(p + at, 8).unwrap().try_into().unwrap());
    let mut word = word;
    (word(48), word(56))
}

#[track_caller]
fn check(instruction: &str, dst: &str, operands: &[(&str, u64)], expected: u64) {
    let (full, guarded) = run(instruction, dst, operands);
    assert_eq!(full, expected, "{instruction} {operands:x?}: {full:#x}, not {expected:#x}");
    assert_eq!(guarded, expected, "{instruction} {operands:x?} under a guard: {guarded:#x}, not {expected:#x}");
}

fn f(x: f32) -> u64 {
    u64::from(x.to_bits())
}

fn d(x: f64) -> u64 {
    x.to_bits()
}

const M1: u64 = 0xffff_ffff;

#[test]
fn integers() {
    let two = |op: &str, ty: &'static str, a: u64, b: u64, r: u64| {
        check(&format!("{op} $d, $0, $1;"), ty, &[(ty, a), (ty, b)], r)
    };
    two("add.s32", "b32", M1, 2, 1);
    two("add.s64", "b64", u64::MAX, 2, 1);
    two("add.u16", "b16", 0xffff, 2, 1);
    two("sub.s32", "b32", 1, 2, M1);
    two("sub.s64", "b64", 1, 2, u64::MAX);
    two("mul.lo.s32", "b32", 0x1_0001, 0x1_0001, 0x2_0001);
    two("mul.lo.s64", "b64", 1 << 33, 3, 3 << 33);
    two("mul.lo.u16", "b16", 0x101, 0x101, 0x201);
    two("mul.hi.u32", "b32", 0x8000_0000, 4, 2);
    two("mul.hi.s32", "b32", M1, 4, M1);
    two("mul.hi.u64", "b64", 1 << 63, 4, 2);
    two("mul.hi.s64", "b64", u64::MAX, 4, u64::MAX);
    two("div.u32", "b32", M1, 2, 0x7fff_ffff);
    two("div.s32", "b32", M1 - 6, 2, M1 - 2); // -7 / 2 = -3
    two("div.s64", "b64", (-7i64) as u64, 2, (-3i64) as u64);
    two("rem.s32", "b32", M1 - 6, 2, M1); // -7 mod 2 = -1
    two("rem.u64", "b64", 17, 5, 2);
    two("min.s32", "b32", M1, 1, M1);
    two("min.u32", "b32", M1, 1, 1);
    two("max.s64", "b64", u64::MAX, 1, 1);
    two("max.u64", "b64", u64::MAX, 1, u64::MAX);
    two("and.b32", "b32", 0xff00, 0x0ff0, 0x0f00);
    two("or.b64", "b64", 1 << 40, 1, 1 << 40 | 1);
    two("xor.b16", "b16", 0xffff, 0x00ff, 0xff00);
    check("mul.wide.s32 $d, $0, $1;", "b64", &[("b32", M1), ("b32", 3)], (-3i64) as u64);
    check("mul.wide.u32 $d, $0, $1;", "b64", &[("b32", M1), ("b32", 3)], 3 * M1);
    check("mul.wide.u16 $d, $0, $1;", "b32", &[("b16", 0xffff), ("b16", 2)], 0x1_fffe);
    check("mad.lo.s32 $d, $0, $1, $2;", "b32", &[("b32", 3), ("b32", 4), ("b32", M1)], 11);
    check("mad.hi.u32 $d, $0, $1, $2;", "b32", &[("b32", M1), ("b32", 2), ("b32", 5)], 6);
    check("mad.wide.u32 $d, $0, $1, $2;", "b64", &[("b32", M1), ("b32", 2), ("b64", 1)], 2 * M1 + 1);
    check("mad.wide.s32 $d, $0, $1, $2;", "b64", &[("b32", M1), ("b32", 2), ("b64", 1)], u64::MAX);
    check("abs.s32 $d, $0;", "b32", &[("b32", M1)], 1);
    check("neg.s64 $d, $0;", "b64", &[("b64", 1)], u64::MAX);
    check("not.b32 $d, $0;", "b32", &[("b32", 0xff)], 0xffff_ff00);
    check("cnot.b32 $d, $0;", "b32", &[("b32", 0)], 1);
    check("sad.u32 $d, $0, $1, $2;", "b32", &[("b32", 3), ("b32", 8), ("b32", 10)], 15);
    check("add.sat.s32 $d, $0, $1;", "b32", &[("b32", 0x7fff_ffff), ("b32", 1)], 0x7fff_ffff);
}

#[test]
fn shifts_and_bits() {
    let shift = |op: &str, ty: &'static str, a: u64, n: u64, r: u64| {
        check(&format!("{op} $d, $0, $1;"), ty, &[(ty, a), ("b32", n)], r)
    };
    shift("shl.b32", "b32", 1, 31, 0x8000_0000);
    shift("shl.b32", "b32", 1, 32, 0);
    shift("shl.b64", "b64", 1, 40, 1 << 40);
    shift("shr.u32", "b32", 0x8000_0000, 31, 1);
    shift("shr.u32", "b32", 0x8000_0000, 32, 0);
    shift("shr.s32", "b32", 0x8000_0000, 40, M1);
    shift("shr.s64", "b64", 1 << 63, 62, (-2i64) as u64);
    shift("shr.u16", "b16", 0x8000, 15, 1);
    check("popc.b32 $d, $0;", "b32", &[("b32", 0xf0f0)], 8);
    check("popc.b64 $d, $0;", "b32", &[("b64", u64::MAX)], 64);
    check("clz.b32 $d, $0;", "b32", &[("b32", 1)], 31);
    check("clz.b64 $d, $0;", "b32", &[("b64", 1)], 63);
    check("brev.b32 $d, $0;", "b32", &[("b32", 1)], 0x8000_0000);
    check("bfind.u32 $d, $0;", "b32", &[("b32", 0x100)], 8);
    check("bfind.u32 $d, $0;", "b32", &[("b32", 0)], M1);
    check("bfe.u32 $d, $0, $1, $2;", "b32", &[("b32", 0xabcd), ("b32", 4), ("b32", 8)], 0xbc);
    check("bfe.s32 $d, $0, $1, $2;", "b32", &[("b32", 0xabcd), ("b32", 4), ("b32", 8)], 0xffff_ffbc);
    check("bfe.u64 $d, $0, $1, $2;", "b64", &[("b64", 0xab << 40), ("b32", 40), ("b32", 4)], 0xb);
    check("bfi.b32 $d, $0, $1, $2, $3;", "b32", &[("b32", 0xf), ("b32", 0), ("b32", 8), ("b32", 4)], 0xf00);
    check("bfi.b64 $d, $0, $1, $2, $3;", "b64", &[("b64", 1), ("b64", 2), ("b32", 32), ("b32", 8)], 1 << 32 | 2);
    check("shf.l.wrap.b32 $d, $0, $1, $2;", "b32", &[("b32", 0x8000_0000), ("b32", 1), ("b32", 1)], 3);
    check("shf.r.wrap.b32 $d, $0, $1, $2;", "b32", &[("b32", 2), ("b32", 1), ("b32", 1)], 0x8000_0001);
    check("shf.l.clamp.b32 $d, $0, $1, $2;", "b32", &[("b32", 5), ("b32", 9), ("b32", 33)], 5);
    check("shf.r.clamp.b32 $d, $0, $1, $2;", "b32", &[("b32", 5), ("b32", 9), ("b32", 33)], 9);
    check("prmt.b32 $d, $0, $1, 0x5410;", "b32", &[("b32", 0x3322_1100), ("b32", 0x7766_5544)], 0x5544_1100);
    check("prmt.b32 $d, $0, $1, 0x9;", "b32", &[("b32", 0x0000_8000), ("b32", 0)], 0xff);
    check("lop3.b32 $d, $0, $1, $2, 0x96;", "b32", &[("b32", 0xff), ("b32", 0x0f), ("b32", 0x3c)], 0xff ^ 0x0f ^ 0x3c);
    check("lop3.b32 $d, $0, $1, $2, 0xE8;", "b32", &[("b32", 0b1100), ("b32", 0b1010), ("b32", 0b1001)], 0b1000);
}

#[test]
fn floats() {
    let two = |op: &str, a: f32, b: f32, r: f32| {
        check(&format!("{op} $d, $0, $1;"), "f32", &[("f32", f(a)), ("f32", f(b))], f(r))
    };
    two("add.f32", 1.5, 2.25, 3.75);
    two("sub.rn.f32", 1.5, 2.25, -0.75);
    two("mul.f32", 1.5, -2.0, -3.0);
    two("div.rn.f32", 1.0, 3.0, 1.0 / 3.0);
    two("div.approx.f32", 6.0, 3.0, 2.0);
    two("min.f32", f32::NAN, 2.0, 2.0);
    two("max.f32", -0.0, 0.0, 0.0);
    two("min.f32", 0.0, -0.0, -0.0);
    two("max.f32", 3.0, f32::NEG_INFINITY, 3.0);
    two("add.ftz.f32", 1e-40, 0.0, 0.0);
    two("add.f32", 1e-40, 0.0, 1e-40);
    two("add.sat.f32", 1.0, 2.0, 1.0);
    two("add.rz.f32", 1.0, -1e-10, 1.0f32.next_down());
    two("add.rp.f32", 1.0, 1e-10, 1.0f32.next_up());
    two("add.rm.f32", 1.0, 1e-10, 1.0);
    two("mul.rz.f32", 1.0f32.next_up(), 1.0f32.next_up(), f32::from_bits(0x3f80_0002));
    let tri = |op: &str, a: f32, b: f32, c: f32, r: f32| {
        check(&format!("{op} $d, $0, $1, $2;"), "f32", &[("f32", f(a)), ("f32", f(b)), ("f32", f(c))], f(r));
    };
    // (1 + e)(1 − e) − 1 = −e², which two roundings would lose.
    let e = f32::EPSILON;
    tri("fma.rn.f32", 1.0 + e, 1.0 - e, -1.0, -e * e);
    tri("fma.rm.f32", 1.0, 1.0, -1e-20, 1.0f32.next_down());
    tri("fma.rp.f32", 1.0, 1.0, -1e-20, 1.0);
    tri("fma.rz.f32", -1.0, 1.0, 1e-20, (-1.0f32).next_up());
    let one = |op: &str, a: f32, r: f32| check(&format!("{op} $d, $0;"), "f32", &[("f32", f(a))], f(r));
    one("neg.f32", 2.0, -2.0);
    one("abs.f32", -2.0, 2.0);
    one("sqrt.rn.f32", 2.0, std::f32::consts::SQRT_2);
    one("rcp.rn.f32", 3.0, 1.0 / 3.0);
    one("rcp.approx.ftz.f32", 4.0, 0.25);
    one("rsqrt.approx.f32", 4.0, 0.5);
    one("ex2.approx.f32", -3.0, 0.125);
    one("ex2.approx.ftz.f32", f32::NEG_INFINITY, 0.0);
    one("lg2.approx.f32", 8.0, 3.0);
    one("sin.approx.f32", 0.0, 0.0);
    one("cos.approx.f32", 0.0, 1.0);
    one("tanh.approx.f32", f32::INFINITY, 1.0);
    check("add.f64 $d, $0, $1;", "f64", &[("f64", d(0.1)), ("f64", d(0.2))], d(0.1 + 0.2));
    check("fma.rn.f64 $d, $0, $1, $2;", "f64", &[("f64", d(3.0)), ("f64", d(4.0)), ("f64", d(5.0))], d(17.0));
    check("max.f64 $d, $0, $1;", "f64", &[("f64", d(f64::NAN)), ("f64", d(1.0))], d(1.0));
    check("copysign.f32 $d, $0, $1;", "f32", &[("f32", f(-1.0)), ("f32", f(3.0))], f(-3.0));
}

#[test]
fn half_precision() {
    // 1.5 is 0x3e00 in f16 and 0x3fc0 in bf16.
    check("add.f16 $d, $0, $1;", "b16", &[("b16", 0x3e00), ("b16", 0x3e00)], 0x4200);
    check("mul.bf16 $d, $0, $1;", "b16", &[("b16", 0x3fc0), ("b16", 0x3fc0)], 0x4010);
    check("fma.rn.f16 $d, $0, $1, $2;", "b16", &[("b16", 0x3e00), ("b16", 0x4000), ("b16", 0x3c00)], 0x4400);
    check(
        "fma.rn.f16x2 $d, $0, $1, $2;",
        "b32",
        &[("b32", 0x3c00_3e00), ("b32", 0x4000_4000), ("b32", 0)],
        0x4000_4200,
    );
    check("add.bf16x2 $d, $0, $1;", "b32", &[("b32", 0x3f80_3fc0), ("b32", 0x3f80_3f80)], 0x4000_4020);
    check("max.f16x2 $d, $0, $1;", "b32", &[("b32", 0x3c00_bc00), ("b32", 0x4000_3c00)], 0x4000_3c00);
    check("neg.bf16x2 $d, $0;", "b32", &[("b32", 0x3f80_bf80)], 0xbf80_3f80);
}

#[test]
fn conversions() {
    check("cvt.s64.s32 $d, $0;", "b64", &[("b32", M1)], u64::MAX);
    check("cvt.u64.u32 $d, $0;", "b64", &[("b32", M1)], M1);
    check("cvt.s64.s32 $d, $0;", "b64", &[("b64", 0x5_ffff_ffff)], u64::MAX); // a wider source: its lower half
    check("cvt.u32.u64 $d, $0;", "b32", &[("b64", 0x1_0000_0007)], 7);
    check("cvt.u32.u16 $d, $0;", "b32", &[("b16", 0xfff0)], 0xfff0);
    check("cvt.s32.s16 $d, $0;", "b32", &[("b16", 0xfff0)], 0xffff_fff0);
    check("cvt.u16.u32 $d, $0;", "b16", &[("b32", 0x1_2345)], 0x2345);
    check("cvt.s32.s8 $d, $0;", "b32", &[("b32", 0x80)], 0xffff_ff80);
    check("cvt.sat.u8.s32 $d, $0;", "b16", &[("b32", 300)], 255);
    check("cvt.rn.f32.s32 $d, $0;", "f32", &[("b32", M1)], f(-1.0));
    check("cvt.rn.f32.u32 $d, $0;", "f32", &[("b32", M1)], f(4_294_967_296.0));
    check("cvt.rz.f32.u32 $d, $0;", "f32", &[("b32", M1)], f(4_294_967_040.0));
    check("cvt.rn.f32.u64 $d, $0;", "f32", &[("b64", 1 << 40)], f(1_099_511_627_776.0));
    check("cvt.rn.f64.s64 $d, $0;", "f64", &[("b64", u64::MAX)], d(-1.0));
    check("cvt.rni.s32.f32 $d, $0;", "b32", &[("f32", f(2.5))], 2);
    check("cvt.rzi.s32.f32 $d, $0;", "b32", &[("f32", f(-2.9))], M1 - 1);
    check("cvt.rmi.s32.f32 $d, $0;", "b32", &[("f32", f(-2.1))], M1 - 2);
    check("cvt.rpi.u32.f32 $d, $0;", "b32", &[("f32", f(2.1))], 3);
    check("cvt.rzi.s32.f32 $d, $0;", "b32", &[("f32", f(f32::NAN))], 0);
    check("cvt.rzi.u32.f32 $d, $0;", "b32", &[("f32", f(-5.0))], 0);
    check("cvt.rzi.s64.f32 $d, $0;", "b64", &[("f32", f(f32::NAN))], 1 << 63);
    check("cvt.rmi.f32.f32 $d, $0;", "f32", &[("f32", f(-2.5))], f(-3.0));
    check("cvt.rni.f32.f32 $d, $0;", "f32", &[("f32", f(3.5))], f(4.0));
    check("cvt.sat.f32.f32 $d, $0;", "f32", &[("f32", f(-3.5))], f(0.0));
    check("cvt.f64.f32 $d, $0;", "f64", &[("f32", f(0.1))], d(f64::from(0.1f32)));
    check("cvt.rn.f32.f64 $d, $0;", "f32", &[("f64", d(0.1))], f(0.1));
    check("cvt.f32.f16 $d, $0;", "f32", &[("b16", 0x0001)], f(2f32.powi(-24)));
    check("cvt.rn.f16.f32 $d, $0;", "b16", &[("f32", f(65520.0))], 0x7c00);
    check("cvt.rz.f16.f32 $d, $0;", "b16", &[("f32", f(65520.0))], 0x7bff);
    check("cvt.rn.bf16.f32 $d, $0;", "b16", &[("f32", 0x3f80_8000)], 0x3f80);
    check("cvt.rn.bf16x2.f32 $d, $0, $1;", "b32", &[("f32", f(2.0)), ("f32", f(1.0))], 0x4000_3f80);
    check("cvt.rn.f16x2.f32 $d, $0, $1;", "b32", &[("f32", f(2.0)), ("f32", f(1.0))], 0x4000_3c00);
}

#[test]
fn comparisons_and_selection() {
    let cmp = |op: &str, ty: &'static str, a: u64, b: u64, r: bool| {
        check(&format!("setp.{op} $d, $0, $1;"), "pred", &[(ty, a), (ty, b)], r.into())
    };
    cmp("lt.s32", "b32", M1, 0, true);
    cmp("lt.u32", "b32", M1, 0, false);
    cmp("lo.u32", "b32", 1, 2, true);
    cmp("ge.s64", "b64", 5, 5, true);
    cmp("eq.s16", "b16", 7, 7, true);
    cmp("ne.b64", "b64", 7, 7, false);
    let nan = f(f32::NAN);
    for (op, a, b, r) in [
        ("lt.f32", nan, 0, false),
        ("ltu.f32", nan, 0, true),
        ("ne.f32", nan, 0, false),
        ("neu.f32", nan, 0, true),
        ("equ.f32", nan, 0, true),
        ("num.f32", nan, 0, false),
        ("nan.f32", nan, 0, true),
        ("leu.f32", f(2.0), f(1.0), false),
        ("eq.f32", f(0.0), f(-0.0), true),
        ("gt.f32", f(2.0), f(1.0), true),
    ] {
        cmp(op, "f32", a, b, r);
    }
    cmp("gt.f64", "f64", d(2.0), d(1.0), true);
    let with = |op: &str, p: u64, r: u64| {
        check(&format!("setp.{op}.s32 $d, $0, $1, $2;"), "pred", &[("b32", 1), ("b32", 2), ("pred", p)], r)
    };
    with("lt.and", 1, 1);
    with("lt.and", 0, 0);
    with("gt.or", 1, 1);
    with("lt.xor", 1, 0);
    check("setp.lt.and.s32 $d, $0, $1, !$2;", "pred", &[("b32", 1), ("b32", 2), ("pred", 0)], 1);
    check("setp.lt.s32 _|$d, $0, $1;", "pred", &[("b32", 1), ("b32", 2)], 0);
    check("set.gt.u32.s32 $d, $0, $1;", "b32", &[("b32", 2), ("b32", 1)], M1);
    check("set.gt.f32.f32 $d, $0, $1;", "f32", &[("f32", f(2.0)), ("f32", f(1.0))], f(1.0));
    check("selp.b64 $d, $0, $1, $2;", "b64", &[("b64", 5), ("b64", 6), ("pred", 1)], 5);
    check("selp.f32 $d, $0, 0f40000000, $1;", "f32", &[("f32", f(5.0)), ("pred", 0)], f(2.0));
    check("slct.s32.s32 $d, $0, $1, $2;", "b32", &[("b32", 5), ("b32", 6), ("b32", M1)], 6);
    check("and.pred $d, $0, $1;", "pred", &[("pred", 1), ("pred", 0)], 0);
    check("or.pred $d, $0, !$1;", "pred", &[("pred", 0), ("pred", 0)], 1);
    check("xor.pred $d, $0, $1;", "pred", &[("pred", 1), ("pred", 1)], 0);
    check("not.pred $d, $0;", "pred", &[("pred", 0)], 1);
    check("mov.pred $d, !$0;", "pred", &[("pred", 0)], 1);
}

#[test]
fn moves() {
    check("mov.b64 $d, {$0, $1};", "b64", &[("b32", 1), ("b32", 2)], 2 << 32 | 1);
    check("mov.b32 $d, {$0, $1};", "b32", &[("b16", 1), ("b16", 2)], 2 << 16 | 1);
    check("{ .reg .b32 x, y; $? mov.b64 {x, y}, $0; $? sub.u32 $d, y, x; }", "b32", &[("b64", 9 << 32 | 4)], 5);
    check("{ .reg .b16 x; $? mov.b32 {_, x}, $0; $? cvt.u32.u16 $d, x; }", "b32", &[("b32", 0x1234_5678)], 0x1234);
    check("mov.u32 $d, %ntid.x;", "b32", &[], 32);
    check("mov.u32 $d, %lanemask_ge;", "b32", &[], M1);
    check("mov.f32 $d, 0fC0000000;", "f32", &[], f(-2.0));
    check("mov.f64 $d, 0d4000000000000000;", "f64", &[], d(2.0));
    check("mov.u32 $d, -5;", "b32", &[], M1 - 4);
    check("add.s64 $d, $0, -5;", "b64", &[("b64", 2)], (-3i64) as u64);
}

#[test]
fn what_is_not_known_is_named() {
    for (line, what) in [
        ("add.s33 %r1, %r1, %r1;", "`add.s33` in kernel `k`"),
        ("wgmma.fence.sync.aligned;", "`wgmma.fence.sync.aligned`"),
        ("mbarrier.init.shared.b64 [%rd1], 1;", "`mbarrier.init.shared.b64`"),
        ("cp.async.bulk.commit_group;", "`cp.async.bulk.commit_group`"),
        ("setmaxnreg.inc.sync.aligned.u32 64;", "setmaxnreg"),
        ("barrier.cluster.arrive;", "barrier.cluster"),
        ("ld.global.b128 %r1, [%rd1];", "ld.global.b128"),
        ("ld.global.u32 %rq, [%rd1];", "is not a result"),
        ("add.u32 %r1, %rd1, 1;", "another width"),
        ("bra NOWHERE;", "no label `NOWHERE`"),
    ] {
        let ptx = format!(
            ".version 8.0\n.target sm_90a\n.address_size 64\n.entry k() {{\n.reg .b32 %r<2>; .reg .b64 %rd<2>;\n{line}\nret;\n}}"
        );
        let Err(e) = Module::parse(&ptx) else { panic!("{line} was accepted") };
        assert_eq!(e.line, 6, "{e}");
        assert!(e.to_string().contains(what), "{line}: {e}");
    }
}
