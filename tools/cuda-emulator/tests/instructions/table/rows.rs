// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cases of one instruction over rows of operands, a row a thread.
//!
//! The instruction is executed twice: by the whole warp at once, and under a guard by the odd and the even lanes in
//! turn. Interpreters like to have a fast path for the first, devices predicate the second, and both have to agree.

use super::case::{Case, Float, Ty, Want};

/// The cases of a family.
pub struct Rows {
    family: &'static str,
    pub cases: Vec<Case>,
}

/// An f32's bits.
pub fn f(x: f32) -> u64 {
    x.to_bits().into()
}

/// An f64's bits.
pub fn d(x: f64) -> u64 {
    x.to_bits()
}

/// What an f32 result has to be: any NaN will do for NaN.
fn want32(x: f32) -> Want {
    if x.is_nan() { Want::Nan(Float::F32) } else { Want::Bits(f(x)) }
}

fn want64(x: f64) -> Want {
    if x.is_nan() { Want::Nan(Float::F64) } else { Want::Bits(d(x)) }
}

impl Rows {
    pub fn new(family: &'static str) -> Self {
        Self { family, cases: Vec::new() }
    }

    /// The instruction is written out (`$?` is where the guard goes if not at its beginning); a row is operands and
    /// result.
    pub fn written(&mut self, sm: u32, text: &str, dst: Ty, src: &[Ty], rows: &[(&[u64], Want)]) {
        let place = |d: &str, guard: &str| {
            let text = if text.contains("$?") { text.to_owned() } else { format!("$? {text}") };
            text.replace("$?", guard).replace("$d", d)
        };
        let name = text.trim_start_matches("$?").split_whitespace().find(|w| w.contains('.') && !w.starts_with('.'));
        let threads = rows.len().next_multiple_of(32);
        let mut c = Case::new(self.family, name.unwrap_or(text).trim_end_matches(';'), threads as u32).sm(sm);
        c.distinct = rows.len();
        for (k, &ty) in src.iter().enumerate() {
            c = c.takes(ty, |t| rows[t as usize % rows.len()].0[k]);
        }
        for _ in 0..2 {
            c = c.gives(dst, |t| rows[t as usize % rows.len()].1);
        }
        let (whole, odd, even) = (place("$d0", ""), place("$d1", "@%p7"), place("$d1", "@!%p7"));
        let body = format!("and.b32 %w14, %t, 1;\nsetp.ne.b32 %p7, %w14, 0;\n{whole}\n{odd}\n{even}");
        self.cases.push(c.body(&body));
    }

    /// An opcode with its operands in order.
    pub fn op(&mut self, sm: u32, opcode: &str, dst: Ty, src: &[Ty], rows: &[(&[u64], Want)]) {
        let operands: String = (0..src.len()).map(|k| format!(", ${k}")).collect();
        self.written(sm, &format!("{opcode} $d{operands};"), dst, src, rows);
    }

    /// `opcode d, a` of one type: (a, d).
    pub fn one(&mut self, opcode: &str, ty: Ty, rows: &[(u64, u64)]) {
        self.from(opcode, ty, ty, rows);
    }

    /// `opcode d, a` of two types: (a, d).
    pub fn from(&mut self, opcode: &str, dst: Ty, src: Ty, rows: &[(u64, u64)]) {
        let given: Vec<[u64; 1]> = rows.iter().map(|r| [r.0]).collect();
        let rows: Vec<(&[u64], Want)> = given.iter().zip(rows).map(|(g, r)| (&g[..], r.1.into())).collect();
        self.op(80, opcode, dst, &[src], &rows);
    }

    /// `opcode d, a, b` of one type: (a, b, d).
    pub fn two(&mut self, opcode: &str, ty: Ty, rows: &[(u64, u64, u64)]) {
        self.pair(80, opcode, ty, [ty; 2], rows);
    }

    /// `opcode d, a, b` of several types: (a, b, d).
    pub fn pair(&mut self, sm: u32, opcode: &str, dst: Ty, src: [Ty; 2], rows: &[(u64, u64, u64)]) {
        let given: Vec<[u64; 2]> = rows.iter().map(|r| [r.0, r.1]).collect();
        let rows: Vec<(&[u64], Want)> = given.iter().zip(rows).map(|(g, r)| (&g[..], r.2.into())).collect();
        self.op(sm, opcode, dst, &src, &rows);
    }

    /// `opcode d, a, b, c` of one type: (a, b, c, d).
    pub fn three(&mut self, opcode: &str, ty: Ty, rows: &[(u64, u64, u64, u64)]) {
        self.triple(80, opcode, ty, [ty; 3], rows);
    }

    /// `opcode d, a, b, c` of several types: (a, b, c, d).
    pub fn triple(&mut self, sm: u32, opcode: &str, dst: Ty, src: [Ty; 3], rows: &[(u64, u64, u64, u64)]) {
        let given: Vec<[u64; 3]> = rows.iter().map(|r| [r.0, r.1, r.2]).collect();
        let rows: Vec<(&[u64], Want)> = given.iter().zip(rows).map(|(g, r)| (&g[..], r.3.into())).collect();
        self.op(sm, opcode, dst, &src, &rows);
    }

    /// f32: (a, d).
    pub fn f1(&mut self, opcode: &str, rows: &[(f32, f32)]) {
        let given: Vec<[u64; 1]> = rows.iter().map(|r| [f(r.0)]).collect();
        let rows: Vec<(&[u64], Want)> = given.iter().zip(rows).map(|(g, r)| (&g[..], want32(r.1))).collect();
        self.op(80, opcode, Ty::B32, &[Ty::B32], &rows);
    }

    /// f32: (a, b, d).
    pub fn f2(&mut self, opcode: &str, rows: &[(f32, f32, f32)]) {
        let given: Vec<[u64; 2]> = rows.iter().map(|r| [f(r.0), f(r.1)]).collect();
        let rows: Vec<(&[u64], Want)> = given.iter().zip(rows).map(|(g, r)| (&g[..], want32(r.2))).collect();
        self.op(80, opcode, Ty::B32, &[Ty::B32; 2], &rows);
    }

    /// f32: (a, b, c, d).
    pub fn f3(&mut self, opcode: &str, rows: &[(f32, f32, f32, f32)]) {
        let given: Vec<[u64; 3]> = rows.iter().map(|r| [f(r.0), f(r.1), f(r.2)]).collect();
        let rows: Vec<(&[u64], Want)> = given.iter().zip(rows).map(|(g, r)| (&g[..], want32(r.3))).collect();
        self.op(80, opcode, Ty::B32, &[Ty::B32; 3], &rows);
    }

    /// f64: operands and d.
    pub fn double(&mut self, opcode: &str, rows: &[(&[f64], f64)]) {
        let given: Vec<Vec<u64>> = rows.iter().map(|r| r.0.iter().map(|&x| d(x)).collect()).collect();
        let rows: Vec<(&[u64], Want)> = given.iter().zip(rows).map(|(g, r)| (&g[..], want64(r.1))).collect();
        self.op(80, opcode, Ty::B64, &vec![Ty::B64; given[0].len()], &rows);
    }
}
