// SPDX-License-Identifier: MIT OR Apache-2.0
//! `ldmatrix`, `stmatrix`, `movmatrix` and `mma.sync`.
//!
//! Where each element sits is taken from the tables of the PTX manual, as functions of the lane and the register, and
//! checked element by element: loads move 16-bit numbers that name their matrix, row and column, and products pick one
//! k at a time, so that a result is row times column and nothing else. Sums that are not exact may be added in any
//! order, in single precision at worst; the bound is that freedom, a unit of the largest partial sum for each addition.

use super::case::Ty::B32;
use super::case::{Case, Float, Want};
use super::rows::f;

const FAMILY: &str = "matrices";

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    loads(&mut cases);
    stores(&mut cases);
    for brain in [false, true] {
        for k in [8, 16] {
            picks(&mut cases, brain, k);
            sums(&mut cases, brain, k);
        }
    }
    cases
}

/// The 16-bit number at row r, column c of matrix n.
fn mark(n: u64, r: u64, c: u64) -> u64 {
    0x1000 * (n + 1) + 0x100 * r + c
}

/// Four 8×8 matrices in shared memory, a row every 32 bytes: written as two lots of 16 bytes, the second unused.
fn shared() -> String {
    // Lane t writes row t % 8 of matrix t / 8; words of two columns.
    let mut text = ".shared .align 16 .b8 s[1024]; mov.u32 %w3, s; shr.u32 %w4, %t, 3; add.u32 %w4, %w4, 1;
                    mul.lo.u32 %w4, %w4, 0x1000; and.b32 %w5, %t, 7; mul.lo.u32 %w5, %w5, 0x100;
                    add.u32 %w4, %w4, %w5; mul.lo.u32 %w4, %w4, 0x10001; mad.lo.u32 %w2, %t, 32, %w3;
                    "
    .to_owned();
    for pair in 0..4u32 {
        let columns = (2 * pair) | (2 * pair + 1) << 16;
        text += &format!(
            "add.u32 %w{}, %w4, {columns:#x};
                          ",
            6 + pair
        );
    }
    text + "st.shared.v4.b32 [%w2], {%w6, %w7, %w8, %w9}; bar.warp.sync -1;
            "
}

/// Lane 4r + c/2 gets columns c and c + 1 of row r, or of column r when transposed.
fn fragment(t: u64, n: u64, trans: bool) -> u64 {
    let (r, c) = (t / 4, t % 4 * 2);
    if trans { mark(n, c, r) | mark(n, c + 1, r) << 16 } else { mark(n, r, c) | mark(n, r, c + 1) << 16 }
}

fn loads(cases: &mut Vec<Case>) {
    for count in [1u64, 2, 4] {
        for trans in [false, true] {
            let op = format!("ldmatrix.sync.aligned.m8n8.x{count}{}.shared.b16", if trans { ".trans" } else { "" });
            let items: Vec<String> = (0..count).map(|k| format!("$d{k}")).collect();
            let (items, mut c) = (items.join(", "), Case::new(FAMILY, &op, 32));
            let mut turned = Case::new(FAMILY, &op, 32);
            for n in 0..count {
                c = c.gives(B32, move |t| fragment(t, n, trans));
                // Rows given the other way round: matrix n is what was 3 − n, upside down.
                turned = turned.gives(B32, move |t| {
                    let (r, k) = (t / 4, t % 4 * 2);
                    let at = |r: u64, c: u64| mark(3 - n, 7 - r, c);
                    if trans { at(k, r) | at(k + 1, r) << 16 } else { at(r, k) | at(r, k + 1) << 16 }
                });
            }
            cases.push(c.body(&format!("{}{op} {{{items}}}, [%w2];", shared())));
            let reach = "sub.u32 %w2, 31, %t; mad.lo.u32 %w2, %w2, 32, %w3;
                         ";
            cases.push(turned.body(&format!("{}{reach}{op} {{{items}}}, [%w2];", shared())));
        }
    }
    let op = "movmatrix.sync.aligned.m8n8.trans.b16";
    let c = Case::new(FAMILY, op, 32).takes(B32, |t| fragment(t, 0, false)).gives(B32, |t| fragment(t, 0, true));
    cases.push(c.body(&format!("{op} $d, $0;")));
}

fn stores(cases: &mut Vec<Case>) {
    for count in [1u64, 2, 4] {
        for trans in [false, true] {
            let op = format!("stmatrix.sync.aligned.m8n8.x{count}{}.shared.b16", if trans { ".trans" } else { "" });
            let mut c = Case::new(FAMILY, &op, 32).sm(90);
            for n in 0..count {
                c = c.takes(B32, move |t| fragment(t, n, trans));
            }
            let items: Vec<String> = (0..count).map(|k| format!("${k}")).collect();
            for pair in 0..4 {
                // Rows of matrices beyond the count stay as they were.
                c = c.gives(B32, move |t| {
                    let (n, r) = (t / 8, t % 8);
                    if n < count { mark(n, r, 2 * pair) | mark(n, r, 2 * pair + 1) << 16 } else { 0x5555_5555 }
                });
            }
            let text = format!(
                ".shared .align 16 .b8 s[1024]; mov.u32 %w3, s; mad.lo.u32 %w2, %t, 32, %w3; mov.b32 %w4, 0x55555555;
                 st.shared.v4.b32 [%w2], {{%w4, %w4, %w4, %w4}}; bar.warp.sync -1; {op} [%w2], {{{}}};
                 bar.warp.sync -1; ld.shared.v4.b32 {{$d0, $d1, $d2, $d3}}, [%w2];",
                items.join(", ")
            );
            cases.push(c.body(&text));
        }
    }
}

/// Where the manual puts A: row and column of half h of register i.
fn place_a(t: u64, i: u64, h: u64) -> (u64, u64) {
    (t / 4 + if i % 2 == 1 { 8 } else { 0 }, t % 4 * 2 + h + if i >= 2 { 8 } else { 0 })
}

/// B: row (k) and column of half h of register i.
fn place_b(t: u64, i: u64, h: u64) -> (u64, u64) {
    (t % 4 * 2 + h + 8 * i, t / 4)
}

/// C and D: row and column of register i.
fn place_c(t: u64, i: u64) -> (u64, u64) {
    (t / 4 + if i >= 2 { 8 } else { 0 }, t % 4 * 2 + i % 2)
}

/// Bits of infinity or of a small number (an integer below 256 times a power of two) in either format.
fn number(brain: bool, x: f64) -> u64 {
    let bits = (x as f32).to_bits();
    if brain {
        return u64::from(bits >> 16);
    }
    if x == 0.0 {
        return 0;
    }
    if x.is_infinite() {
        return 0x7c00;
    }
    let exponent = (bits >> 23 & 0xff) as i32 - 127 + 15;
    assert!((1..31).contains(&exponent) && bits & 0x1fff == 0, "{x} is not a small number");
    u64::from(bits >> 16 & 0x8000 | (exponent as u32) << 10 | bits >> 13 & 0x3ff)
}

type Matrix = Box<dyn Fn(u64, u64) -> f64>;

/// One product, A and B in numbers that are exact, C in f32; what D has to be.
fn product(name: &str, brain: bool, k: u64, a: &Matrix, b: &Matrix, c: &Matrix, d: impl Fn(u64, u64) -> Want) -> Case {
    let ty = if brain { "bf16" } else { "f16" };
    let op = format!("mma.sync.aligned.m16n8k{k}.row.col.f32.{ty}.{ty}.f32");
    let mut case = Case::new(FAMILY, &format!("{op} {name}"), 32);
    let (an, bn) = (k / 4, k / 8);
    let two = |x: (u64, u64), y: (u64, u64), m: &Matrix| number(brain, m(x.0, x.1)) | number(brain, m(y.0, y.1)) << 16;
    for i in 0..an {
        case = case.takes(B32, |t| two(place_a(t, i, 0), place_a(t, i, 1), a));
    }
    for i in 0..bn {
        case = case.takes(B32, |t| two(place_b(t, i, 0), place_b(t, i, 1), b));
    }
    for i in 0..4 {
        case = case.takes(B32, |t| {
            let (r, n) = place_c(t, i);
            f(c(r, n) as f32)
        });
    }
    for i in 0..4 {
        case = case.gives(B32, |t| {
            let (r, n) = place_c(t, i);
            d(r, n)
        });
    }
    let list = |from: u64, n: u64| (from..from + n).map(|i| format!("${i}")).collect::<Vec<_>>().join(", ");
    case.body(&format!(
        "{op} {{$d0, $d1, $d2, $d3}}, {{{}}}, {{{}}}, {{{}}};",
        list(0, an),
        list(an, bn),
        list(an + bn, 4)
    ))
}

/// One k at a time: A is r + 1 in that column, B is n + 1 in that row, and D is C plus their product.
fn picks(cases: &mut Vec<Case>, brain: bool, depth: u64) {
    for k in 0..depth {
        let a: Matrix = Box::new(move |r, c| if c == k { r as f64 + 1.0 } else { 0.0 });
        let b: Matrix = Box::new(move |r, n| if r == k { n as f64 + 1.0 } else { 0.0 });
        let c: Matrix = Box::new(|r, n| (1000 * r + 10 * n) as f64);
        let d = |r: u64, n: u64| Want::Bits(f((1000 * r + 10 * n + (r + 1) * (n + 1)) as f32));
        cases.push(product(&format!("k = {k}"), brain, depth, &a, &b, &c, d));
        // B one row off: nothing meets.
        let b: Matrix = Box::new(move |r, n| if r == (k + 1) % depth { n as f64 + 1.0 } else { 0.0 });
        let d = |r: u64, n: u64| Want::Bits(f((1000 * r + 10 * n) as f32));
        cases.push(product(&format!("k = {k} alone"), brain, depth, &a, &b, &c, d));
    }
}

/// Whole matrices: small integers, whose sums are exact, and numbers whose sums are not; signs, overflow and NaN.
fn sums(cases: &mut Vec<Case>, brain: bool, depth: u64) {
    let a: Matrix = Box::new(|r, k| ((5 * r + 3 * k) % 17) as f64 - 8.0);
    let b: Matrix = Box::new(|k, n| ((7 * k + 11 * n) % 13) as f64 - 6.0);
    let c: Matrix = Box::new(|r, n| (r * 8 + n) as f64 - 64.0);
    let exact = |r: u64, n: u64| c(r, n) + (0..depth).map(|k| a(r, k) * b(k, n)).sum::<f64>();
    let d = |r: u64, n: u64| Want::Bits(f(exact(r, n) as f32));
    cases.push(product("integers", brain, depth, &a, &b, &c, d));
    // Terms of very different size.
    let a: Matrix = Box::new(|r, k| (1.0 + ((3 * r + 5 * k) % 64) as f64 / 64.0) * 2f64.powi((k % 5) as i32 - 2));
    let b: Matrix =
        Box::new(|k, n| (1.0 + ((9 * k + n) % 64) as f64 / 64.0) * if (k + n) % 2 == 0 { 0.5 } else { -2.0 });
    let c: Matrix = Box::new(|r, n| 1.0 / (1.0 + (r * 8 + n) as f64));
    let d = |r: u64, n: u64| {
        let c = f64::from(c(r, n) as f32);
        let terms = || (0..depth).map(|k| a(r, k) * b(k, n));
        let size = c.abs() + terms().map(f64::abs).sum::<f64>();
        Want::Near(Float::F32, c + terms().sum::<f64>(), (depth + 1) as f64 * size * 2f64.powi(-23))
    };
    cases.push(product("rounded", brain, depth, &a, &b, &c, d));
    // Infinity in A times 0 and 1 of B: column 0 of B is zero.
    let a: Matrix = Box::new(|r, k| if (r, k) == (3, 1) { f64::INFINITY } else { 0.0 });
    let b: Matrix = Box::new(|k, n| if k == 1 && n > 0 { 1.0 } else { 0.0 });
    let c: Matrix = Box::new(|r, n| if (r, n) == (5, 5) { f64::NAN } else { 1.0 });
    let d = |r: u64, n: u64| match (r, n) {
        (3, 0) | (5, 5) => Want::Nan(Float::F32),
        (3, _) => Want::Bits(f(f32::INFINITY)),
        _ => Want::Bits(f(1.0)),
    };
    cases.push(product("infinity", brain, depth, &a, &b, &c, d));
}
