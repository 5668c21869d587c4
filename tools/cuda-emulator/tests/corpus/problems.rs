// SPDX-License-Identifier: MIT OR Apache-2.0
//! A problem for each kernel of the corpus, with random numbers, and what f64 says about the result.
//!
//! Sizes are no multiples of the tiles wherever the kernel allows it: boxes then reach over the edge of their tensors,
//! into memory that nothing has written.

use crate::kernels::{Arg, Entry, Matrix};
use cuda_emulator::{Memory, Mutant, Options, Report, Swizzle, TensorMap};

/// Small random numbers (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// About normal.
    fn normal(&mut self) -> f64 {
        (0..6).map(|_| (self.next() >> 40) as f64 / (1u64 << 24) as f64 - 0.5).sum::<f64>() * 2f64.sqrt()
    }
}

/// What the bits of a 16-bit number stand for.
fn value(bits: u32, brain: bool) -> f64 {
    if brain {
        return f32::from_bits(bits << 16).into();
    }
    let (sign, e, f) = (bits >> 15, bits >> 10 & 31, f64::from(bits & 0x3ff));
    let size = match e {
        0 => f * 2f64.powi(-24),
        31 => f64::INFINITY,
        _ => (1.0 + f / 1024.0) * 2f64.powi(e as i32 - 15),
    };
    if sign == 1 { -size } else { size }
}

/// A number near x that has few enough bits for either format, and its bits.
fn short(x: f64, brain: bool) -> (u32, f64) {
    // Seven bits after the first one, and nothing below 2^-9.
    let bits = (x as f32).to_bits() & 0xffff_0000;
    let v = f32::from_bits(bits);
    if v.abs() < 2f32.powi(-9) {
        return (0, 0.0);
    }
    let exponent = (bits >> 23 & 0xff) as i32 - 127 + 15;
    let half = bits >> 16 & 0x8000 | (exponent as u32) << 10 | bits >> 13 & 0x3ff;
    (if brain { bits >> 16 } else { half }, v.into())
}

/// A matrix of random numbers, and those numbers.
fn random(mem: &mut Memory, rows: usize, columns: usize, brain: bool, r: &mut Random) -> (Matrix, Vec<f64>) {
    let numbers: Vec<(u32, f64)> = (0..rows * columns).map(|_| short(r.normal(), brain)).collect();
    let m = Matrix::new(mem, rows, columns, 2);
    m.fill(mem, |row, c| numbers[row * columns + c].0);
    (m, numbers.into_iter().map(|n| n.1).collect())
}

/// What a kernel has to have written: bits, and for each a number and how far from it the bits may be.
pub struct Outcome {
    pub bits: Vec<u32>,
    wants: Vec<(f64, f64)>,
    value: fn(u32) -> f64,
}

impl Outcome {
    /// The first number that is wrong.
    pub fn wrong(&self) -> Option<String> {
        assert_eq!(self.bits.len(), self.wants.len());
        self.bits.iter().zip(&self.wants).enumerate().find_map(|(k, (&bits, &(x, error)))| {
            let got = (self.value)(bits);
            // A NaN is wrong as well.
            let good = (got - x).abs() <= error;
            (!good).then(|| format!("number {k} is {got}, not {x} ± {error:e}"))
        })
    }
}

fn of(brain: bool) -> fn(u32) -> f64 {
    if brain { |b| value(b, true) } else { |b| value(b, false) }
}

/// The error of one rounding to the element.
fn rounding(x: f64, brain: bool) -> f64 {
    if brain { x.abs() / 256.0 + 1e-30 } else { x.abs() / 2048.0 + 2f64.powi(-25) }
}

/// Runs a kernel of the corpus, or a mutant of it, on the problem of a seed.
pub fn solve(e: &Entry, change: Option<&Mutant>, problem: u64, options: Options) -> Result<Outcome, Box<Report>> {
    let mut r = Random(problem);
    match e.name.split('_').next().unwrap() {
        "product" | "ring" => product(e, change, options, &mut r),
        "attention" => attention(e, change, options, &mut r),
        "reduction" => reduction(e, change, options, &mut r),
        "ragged" => ragged(e, change, options, &mut r),
        other => panic!("no problem for `{other}`"),
    }
}

fn product(e: &Entry, change: Option<&Mutant>, options: Options, r: &mut Random) -> Result<Outcome, Box<Report>> {
    let [m, n, k] = e.tile;
    let (ta, tb) = (e.name.contains("_at"), e.name.contains("_bt"));
    // Two tiles each way, the second one cut short; a few steps, the last one too, and more than a ring has tiles.
    let steps = if e.name.starts_with("ring") { 7 } else { 3 };
    let (rows, columns, depth) = (2 * m - 8, 2 * n - 24, steps * k + 8 * (1 + r.next() as usize % 3));
    let mut mem = Memory::new();
    let (a, av) =
        if ta { random(&mut mem, depth, rows, e.brain, r) } else { random(&mut mem, rows, depth, e.brain, r) };
    let (b, bv) =
        if tb { random(&mut mem, columns, depth, e.brain, r) } else { random(&mut mem, depth, columns, e.brain, r) };
    let c = Matrix::new(&mut mem, rows, columns, 2);
    let args = [Arg::Tensor(a), Arg::Tensor(b), Arg::Tensor(c.clone()), Arg::Int(depth as i32)];
    e.run(&mut mem, change, [2, 2, 1], &args, options)?;
    let mut wants = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        for column in 0..columns {
            let (mut x, mut size) = (0.0, 0.0);
            for k in 0..depth {
                let a = if ta { av[k * rows + row] } else { av[row * depth + k] };
                let b = if tb { bv[column * depth + k] } else { bv[k * columns + column] };
                x += a * b;
                size += (a * b).abs();
            }
            wants.push((x, rounding(x, e.brain) + depth as f64 * size * 2f64.powi(-24)));
        }
    }
    Ok(Outcome { bits: c.read(&mut mem), wants, value: of(e.brain) })
}

fn attention(e: &Entry, change: Option<&Mutant>, options: Options, r: &mut Random) -> Result<Outcome, Box<Report>> {
    let [m, _, d] = e.tile;
    let (heads, n, causal) = (2, 2 * m, e.name.contains("causal"));
    let mut mem = Memory::new();
    let [q, k, v] = [(); 3].map(|()| random(&mut mem, heads * n, d, e.brain, r));
    let o = Matrix::new(&mut mem, heads * n, d, 2);
    let lse = Matrix::new(&mut mem, 1, heads * n, 4);
    let scale = std::f32::consts::LOG2_E / (d as f32).sqrt();
    let args = [
        Arg::Tensor(q.0),
        Arg::Tensor(k.0),
        Arg::Tensor(v.0),
        Arg::Tensor(o.clone()),
        Arg::Pointer(lse.at),
        Arg::Int(n as i32),
        Arg::Float(scale),
    ];
    e.run(&mut mem, change, [2, heads as u32, 1], &args, options)?;
    let (mut wants, mut lses) = (Vec::new(), Vec::new());
    for row in 0..heads * n {
        let (head, last) = (row / n * n, if causal { row % n + 1 } else { n });
        let score = |key: usize| {
            let dot: f64 = (0..d).map(|c| q.1[row * d + c] * k.1[(head + key) * d + c]).sum();
            dot * f64::from(scale)
        };
        let weights: Vec<f64> = (0..last).map(|key| score(key).exp2()).collect();
        let sum: f64 = weights.iter().sum();
        lses.push(sum.log2());
        for c in 0..d {
            let terms = || weights.iter().enumerate().map(|(key, w)| w / sum * v.1[(head + key) * d + c]);
            let (x, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
            // Weights are rounded to the element before they are multiplied.
            wants.push((x, rounding(x, e.brain) + rounding(size, e.brain)));
        }
    }
    for (bits, want) in lse.read(&mut mem).into_iter().zip(lses) {
        let got = f64::from(f32::from_bits(bits));
        assert!((got - want).abs() < 1e-4, "{}: lse {got}, not {want}", e.name);
    }
    Ok(Outcome { bits: o.read(&mut mem), wants, value: of(e.brain) })
}

fn reduction(e: &Entry, change: Option<&Mutant>, options: Options, r: &mut Random) -> Result<Outcome, Box<Report>> {
    let [m, n, k] = e.tile;
    let (rows, columns, cuts, depth) = (2 * m - 24, 2 * n - 4, 2, 4 * k);
    let all = cuts * depth - 40;
    let mut mem = Memory::new();
    let (a, av) = random(&mut mem, all, rows, true, r);
    let (b, bv) = random(&mut mem, columns, all, true, r);
    let c = Matrix::new(&mut mem, rows, columns, 4);
    let before: Vec<f32> = (0..rows * columns).map(|_| r.normal() as f32 * 100.0).collect();
    c.fill(&mut mem, |row, column| before[row * columns + column].to_bits());
    let args = [Arg::Tensor(a), Arg::Tensor(b), Arg::Tensor(c.clone()), Arg::Int(depth as i32)];
    e.run(&mut mem, change, [2, 2, cuts as u32], &args, options)?;
    let mut wants = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        for column in 0..columns {
            let terms = || (0..all).map(|k| av[k * rows + row] * bv[column * all + k]);
            let (start, size) = (f64::from(before[row * columns + column]), terms().map(f64::abs).sum::<f64>());
            let x = start + terms().sum::<f64>();
            wants.push((x, (all as f64 * size + 8.0 * (size + start.abs())) * 2f64.powi(-24)));
        }
    }
    Ok(Outcome { bits: c.read(&mut mem), wants, value: |b| f32::from_bits(b).into() })
}

fn ragged(e: &Entry, change: Option<&Mutant>, options: Options, r: &mut Random) -> Result<Outcome, Box<Report>> {
    let (total, columns) = (300, 64);
    let (first, rows) = (r.next() as usize % 100, 1 + r.next() as usize % 150);
    // The tile begins inside of the part or behind it, and may reach over its end.
    let row = (r.next() as usize % (rows + 20)) as i32;
    let mut mem = Memory::new();
    let (x, _) = random(&mut mem, total, columns, true, r);
    let bits = x.read(&mut mem);
    let o = Matrix::new(&mut mem, total, columns, 2);
    let map = |m: &Matrix| {
        let stride = (m.stride * m.element) as u64;
        TensorMap {
            element: 2,
            f32: false,
            // Rows 2^30 before the first one: the third coordinate takes them back.
            address: m.at.wrapping_sub(stride << 31),
            dims: vec![64, 1 << 30, 1 << 31, (1 << 30) + 1],
            strides: vec![stride, stride, stride],
            shape: Vec::new(),
            swizzle: Swizzle::None,
            fill_nan: false,
        }
    };
    let args = [Arg::Map(map(&x)), Arg::Map(map(&o)), Arg::Int(first as i32), Arg::Int(rows as i32), Arg::Int(row)];
    e.run(&mut mem, change, [1, 1, 1], &args, options)?;
    let stored: Vec<u8> = mem.read(o.at, total * o.stride * 2).unwrap();
    let (mut wants, mut found) = (Vec::new(), Vec::new());
    for at in 0..total as i64 {
        let inside = (0..rows as i64).contains(&(at - first as i64));
        let copied = inside && (0..64).contains(&(at - first as i64 - i64::from(row)));
        for c in 0..columns {
            let k = (at as usize * o.stride + c) * 2;
            found.push(u32::from(stored[k]) | u32::from(stored[k + 1]) << 8);
            let want = if copied { bits[at as usize * columns + c] } else { 0xffff };
            wants.push((f64::from(want), 0.0));
        }
    }
    Ok(Outcome { bits: found, wants, value: f64::from })
}
