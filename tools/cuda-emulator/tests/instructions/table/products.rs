// SPDX-License-Identifier: MIT OR Apache-2.0
//! `wgmma`: matrices in shared memory in every order and swizzle, A in registers, both formats, scales and signs.
//!
//! Where an element lies is worked out from the manual's canonical layouts, not from what the interpreter does. Factors
//! are small integers, so that sums are exact in any order. A result would be too long to keep whole: each thread adds
//! up what it has of each column of the fragment, multiplied by 1, 2, 3, … for the groups of eight columns.

use super::case::Case;
use super::case::Ty::B32;
use super::rows::f;

const FAMILY: &str = "products";

/// How a matrix lies in shared memory.
#[derive(Clone, Copy)]
struct Layout {
    /// Bytes of a row that the swizzle works in; 16 for none.
    width: u64,
    /// Its long side (m or n) lies contiguously, not k.
    long: bool,
    /// Where the long side does: how many of k there are, which is how many rows a panel has.
    rows: u64,
}

impl Layout {
    /// Depth of the matrix: as much as a row holds where k lies contiguously.
    fn depth(self) -> u64 {
        match (self.long, self.width) {
            (true, _) => self.rows,
            (_, 16) => 16,
            (_, width) => width / 2,
        }
    }

    /// The byte of element (r, k); r counts along the long side.
    fn byte(self, r: u64, k: u64) -> u64 {
        let w = self.width;
        if w == 16 {
            // Blocks of eight times 16 bytes: two of them for the depth, one after the other.
            let (inner, outer) = if self.long { (k, r) } else { (r, k) };
            return r / 8 * 256 + k / 8 * 128 + inner % 8 * 16 + outer % 8 * 2;
        }
        // Rows of the swizzle's width: an element's row, the piece of 16 bytes in it, and the panel where there are
        // more.
        let (panel, row, c) = if self.long { (r / (w / 2), k, r % (w / 2) * 2) } else { (0, r, k * 2) };
        let start = panel * self.rows * w + row * w;
        start + 16 * ((c / 16) ^ (start / 128 % (w / 16))) + c % 16
    }

    /// Bytes of a matrix that is so long.
    fn bytes(self, long: u64) -> u64 {
        let bytes = match (self.long, self.width) {
            (true, 17..) => long.div_ceil(self.width / 2) * self.rows * self.width,
            _ => long * self.depth() * 2,
        };
        bytes.next_multiple_of(1024)
    }

    /// Bytes from the first 16 of k to the `step`th.
    fn step(self, step: u64) -> u64 {
        if self.long { 16 * self.width * step } else { 32 * step }
    }

    /// Bytes from the first of its long side to the `first`th. Inside of a row the swizzle is left to the address's
    /// bits.
    fn from(self, first: u64) -> u64 {
        if !self.long || self.width == 16 {
            assert_eq!(first, 0, "of rows that the long side fills");
            return 0;
        }
        let columns = self.width / 2;
        first / columns * self.rows * self.width + first % columns * 2
    }

    /// All but the address: leading offset, strided offset, swizzle.
    fn descriptor(self) -> u64 {
        let (leading, strided) = match (self.width, self.long) {
            (16, _) => (128, 256),
            (w, true) => (self.rows * w, 8 * w),
            (w, false) => (16, 8 * w),
        };
        let mode = match self.width {
            16 => 0,
            32 => 3,
            64 => 2,
            _ => 1,
        };
        (leading / 16) << 16 | (strided / 16) << 32 | mode << 62
    }
}

fn a(r: u64, k: u64) -> f64 {
    ((5 * r + 3 * k) % 17) as f64 - 8.0
}

fn b(n: u64, k: u64) -> f64 {
    ((7 * k + 11 * n) % 13) as f64 - 6.0
}

/// The bits of a small integer.
fn number(x: f64, brain: bool) -> u16 {
    let bits = (x as f32).to_bits();
    if brain || x == 0.0 {
        return (bits >> 16) as u16;
    }
    let exponent = (bits >> 23 & 0xff) - 127 + 15;
    (bits >> 16 & 0x8000 | exponent << 10 | bits >> 13 & 0x3ff) as u16
}

/// A product and what is special about it.
struct Product {
    n: u64,
    /// The first column of B in a longer matrix.
    first: u64,
    brain: bool,
    a: Layout,
    b: Layout,
    registers: bool,
    /// What `scale-d` is: text, and whether what was there counts.
    scale: (&'static str, bool),
    signs: (i32, i32),
}

const PLAIN: Layout = Layout { width: 128, long: false, rows: 16 };

impl Default for Product {
    fn default() -> Self {
        Self { n: 8, first: 0, brain: true, a: PLAIN, b: PLAIN, registers: false, scale: ("1", true), signs: (1, 1) }
    }
}

impl Product {
    fn op(&self) -> String {
        let ty = if self.brain { "bf16" } else { "f16" };
        format!("wgmma.mma_async.sync.aligned.m64n{}k16.f32.{ty}.{ty}", self.n)
    }

    /// As deep as both matrices go.
    fn depth(&self) -> u64 {
        match (self.registers, self.b.long) {
            (true, true) => self.b.depth(),
            (true, false) => 16,
            _ => self.a.depth().min(self.b.depth()),
        }
    }

    /// Which k of A is multiplied with this one of B: registers hold 16 of them, for every step.
    fn of_a(&self, k: u64) -> u64 {
        if self.registers { k % 16 } else { k }
    }

    /// Both matrices as they lie in shared memory, B from `second` on. What lies beside them is no number.
    fn image(&self) -> (Vec<u8>, u64) {
        let second = if self.registers { 0 } else { self.a.bytes(64) };
        let columns = self.first + self.n;
        let mut image = vec![0xffu8; (second + self.b.bytes(columns)) as usize];
        let mut put = |at: u64, x: f64| {
            let bits = number(x, self.brain).to_le_bytes();
            image[at as usize..at as usize + 2].copy_from_slice(&bits);
        };
        for k in 0..self.a.depth() {
            (0..64).filter(|_| !self.registers).for_each(|r| put(self.a.byte(r, k), a(r, k)));
        }
        for k in 0..self.b.depth() {
            (0..columns).for_each(|n| put(second + self.b.byte(n, k), b(n, k)));
        }
        (image, second)
    }

    fn case(&self, name: &str) -> Case {
        let (image, second) = self.image();
        let size = image.len();
        let regs = self.n / 2;
        let sums = (0..regs).map(|k| format!("%acc{k}")).collect::<Vec<_>>().join(", ");
        let mut text = format!(
            ".shared .align 1024 .b8 s[{size}]; .reg .f32 %acc<{regs}>; mov.u32 %w2, s; shl.b32 %w3, %t, 4;
             setp.lt.u32 %p1, %t, 128; setp.ge.u32 %p2, %t, 128;
             FILL:
             setp.ge.u32 %p0, %w3, {size}; @%p0 bra FULL; cvt.u64.u32 %q0, %w3; add.s64 %q0, %mem, %q0;
             ld.global.v4.b32 {{%w4, %w5, %w6, %w7}}, [%q0]; add.u32 %w8, %w2, %w3; st.shared.v4.b32 [%w8], {{%w4, %w5, %w6, %w7}};
             add.u32 %w3, %w3, 2048; bra FILL;
             FULL:
             fence.proxy.async; bar.sync 0; shr.u32 %w2, %w2, 4; cvt.u64.u32 %q1, %w2;
             "
        );
        for k in 0..regs {
            text += &format!("mov.b32 %acc{k}, $4;\n");
        }
        text += "wgmma.fence.sync.aligned;\n";
        for step in 0..self.depth() / 16 {
            // Within the swizzle's rows, the next 16 of k are 32 bytes further on; else they are the next 16 rows.
            let at = |from: u64, l: Layout| l.descriptor() + (from + l.step(step)) / 16;
            text += &format!(
                "add.s64 %q2, %q1, {}; add.s64 %q3, %q1, {};\n",
                at(0, self.a) as i64,
                at(second + self.b.from(self.first), self.b) as i64
            );
            let left = if self.registers { "{$0, $1, $2, $3}" } else { "%q2" };
            let first = if step == 0 { self.scale.0 } else { "1" };
            let (sa, sb) = self.signs;
            let major = if self.registers { String::new() } else { format!("{}, ", u32::from(self.a.long)) };
            text += &format!(
                "{} {{{sums}}}, {left}, %q3, {first}, {sa}, {sb}, {major}{};\n",
                self.op(),
                u32::from(self.b.long)
            );
        }
        text += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;\n";
        for j in 0..4 {
            text += &format!("mov.b32 $d{j}, 0;\n");
            for group in 0..self.n / 8 {
                let weight = ((group + 1) as f32).to_bits();
                text += &format!("fma.rn.f32 $d{j}, %acc{}, 0f{weight:08x}, $d{j};\n", 4 * group + j);
            }
        }
        // What was in D before: the thread's number, which stays below 128.
        let before = |t: u64| if self.scale.1 { t as f64 } else { 0.0 };
        let (depth, sign) = (self.depth(), f64::from(self.signs.0 * self.signs.1));
        let element =
            |r: u64, n: u64| sign * (0..depth).map(|k| a(r, self.of_a(k)) * b(self.first + n, k)).sum::<f64>();
        let mut case = Case::new(FAMILY, &format!("{} {name}", self.op()), 128).hopper();
        // Fragments: thread t has rows 16 w + t % 32 / 4 and eight further on, columns 2 (t % 4) and one further on.
        let row = |t: u64, j: u64| 16 * (t / 32) + t % 32 / 4 + 8 * (j / 2);
        for j in 0..4 {
            let pair = move |t: u64, half: u64| number(a(row(t, j % 2 * 2), t % 4 * 2 + j / 2 * 8 + half), self.brain);
            case = case.takes(B32, |t| u64::from(pair(t, 0)) | u64::from(pair(t, 1)) << 16);
        }
        case = case.takes(B32, |t| f(t as f32));
        for j in 0..4 {
            case = case.gives(B32, |t| {
                let column = |g: u64| 8 * g + t % 4 * 2 + j % 2;
                let terms = (0..self.n / 8).map(|g| (g + 1) as f64 * (before(t) + element(row(t, j), column(g))));
                f(terms.sum::<f64>() as f32)
            });
        }
        case.memory(image, Vec::new()).body(&text)
    }
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let order = |l: Layout| if l.long { "m" } else { "k" };
    for width in [16, 32, 64, 128] {
        for (la, lb) in [(false, false), (false, true), (true, false), (true, true)] {
            let (a, b) = (Layout { width, long: la, rows: 16 }, Layout { width, long: lb, rows: 16 });
            for brain in [true, false] {
                let p = Product { n: 64, brain, a, b, ..Product::default() };
                cases.push(p.case(&format!("rows of {width}, {} and {}", order(a), order(b))));
            }
        }
    }
    for n in [8, 24, 80, 128, 176, 256] {
        cases.push(Product { n, ..Product::default() }.case("columns"));
        let p = Product { n, brain: false, registers: true, ..Product::default() };
        cases.push(p.case("columns, A in registers"));
    }
    let long = Layout { width: 128, long: true, rows: 16 };
    for brain in [true, false] {
        for b in [PLAIN, long] {
            let p = Product { n: 64, brain, registers: true, b, ..Product::default() };
            cases.push(p.case(&format!("A in registers, {}", order(b))));
        }
    }
    // P V of the forward kernels: all steps over a tile of keys, in as many panels as v has columns. Of 96 columns the
    // second panel is filled by half.
    for (n, rows) in [(64, 128), (96, 128), (128, 128), (192, 96), (256, 64)] {
        let b = Layout { width: 128, long: true, rows };
        for brain in [true, false] {
            let p = Product { n, brain, registers: true, b, ..Product::default() };
            cases.push(p.case(&format!("panels of {rows} rows, A in registers, n")));
        }
    }
    // dq of the backward at head dims 64 and 192: the second half of a panel's columns, 64 bytes into rows of 128. The
    // manual shows no such matrix. Then what replaces it: all columns, and the half as a matrix of its own, with rows
    // of 64.
    let ds = Layout { width: 128, long: false, rows: 16 };
    for (n, first, width, rows) in
        [(32, 32, 128, 64), (32, 32, 128, 16), (32, 96, 128, 16), (64, 0, 128, 64), (32, 0, 64, 64)]
    {
        let b = Layout { width, long: true, rows };
        for brain in [true, false] {
            let p = Product { n, first, brain, a: ds, b, ..Product::default() };
            cases.push(p.case(&format!("half panels: columns from {first} on, rows of {width} and panels of {rows}")));
        }
    }
    for scale in [("0", false), ("%p1", true), ("%p2", false)] {
        for registers in [false, true] {
            cases.push(Product { scale, registers, ..Product::default() }.case(&format!("scale-d {}", scale.0)));
        }
    }
    for signs in [(-1, 1), (1, -1), (-1, -1)] {
        for registers in [false, true] {
            let p = Product { signs, registers, brain: !registers, ..Product::default() };
            cases.push(p.case(&format!("signs {signs:?}")));
        }
    }
    cases
}
