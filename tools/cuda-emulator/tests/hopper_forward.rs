// SPDX-License-Identifier: MIT OR Apache-2.0
//! The shipped forward kernels for `sm_90a`, launched by hand: every order of warps and copies gives the same right
//! numbers.
//!
//! Two q heads read one kv head, and take some of its q rows in tiles of their own, others in tiles that both share. q
//! rows and keys lie inside longer tensors whose other rows are NaN; two ranges of keys follow one another, the second
//! of which ends in the midst of a tile. Elements are multiples of 1/16, exact in both types.

use cuda_emulator::{Launch, Memory, Module, Options, Swizzle, TensorMap, launch};

const Q_HEADS: usize = 2;
const Q_ROWS: usize = 150;
const KEYS: [usize; 2] = [140, 45];
/// Beyond all positions.
const FAR: i64 = 1 << 61;
/// Rows of no tensor before each tensor's own, and behind them.
const GAP: usize = 3;
/// Position of the first q row.
const START: i64 = 35;

fn encode(bf16: bool, x: f32) -> u16 {
    let bits = x.to_bits();
    if bf16 || x.is_nan() {
        return (bits >> 16) as u16;
    }
    if x == 0.0 {
        return 0;
    }
    let exponent = (bits >> 23 & 0xff) as i32 - 127 + 15;
    (bits >> 16 & 0x8000) as u16 | (exponent as u16) << 10 | (bits >> 13 & 0x3ff) as u16
}

fn decode(bf16: bool, x: u16) -> f64 {
    if bf16 {
        return f32::from_bits(u32::from(x) << 16).into();
    }
    let (sign, exponent, fraction) = (x >> 15, i32::from(x >> 10 & 31), f64::from(x & 0x3ff));
    let size = if exponent == 0 { fraction * 2f64.powi(-24) } else { (1024.0 + fraction) * 2f64.powi(exponent - 25) };
    if sign == 1 { -size } else { size }
}

/// Multiples of 1/16 between -2 and 2.
fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        ((x >> 33) % 65) as f32 / 16.0 - 2.0
    };
    (0..n).map(|_| next()).collect()
}

struct Tensor {
    at: u64,
    numbers: Vec<f32>,
    width: usize,
    rows: usize,
}

impl Tensor {
    fn new(mem: &mut Memory, bf16: bool, rows: usize, width: usize, seed: u64) -> Self {
        let (numbers, edge) = (numbers(rows * width, seed), vec![f32::NAN; GAP * width]);
        let all = edge.iter().chain(&numbers).chain(&edge);
        let bytes: Vec<u8> = all.flat_map(|&x| encode(bf16, x).to_le_bytes()).collect();
        let at = mem.alloc(bytes.len());
        mem.write(at, &bytes).unwrap();
        Self { at, numbers, width, rows }
    }

    /// As `ptx/sm90/hopper_load.cuh` wants it: columns, rows, heads, parts.
    fn map(&self, dim: usize, span: usize, rows: u32, heads: u32) -> [u8; 128] {
        let stride = self.width as u64 * 2;
        let map = TensorMap {
            element: 2,
            f32: false,
            address: self.at - span as u64 * stride,
            dims: vec![dim as u64, span as u64, (self.width / dim) as u64, (self.rows + 2 * GAP + 1) as u64],
            strides: vec![stride, dim as u64 * 2, stride],
            shape: vec![64, rows, heads, 1],
            swizzle: Swizzle::B128,
            fill_nan: false,
        };
        map.check().unwrap();
        map.encode()
    }
}

/// Little-endian numbers one after another.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn u32s(&mut self, x: &[u32]) -> &mut Self {
        self.0.extend(x.iter().flat_map(|x| x.to_le_bytes()));
        self
    }

    fn u64s(&mut self, x: &[u64]) -> &mut Self {
        self.0.extend(x.iter().flat_map(|x| x.to_le_bytes()));
        self
    }

    fn upload(&self, mem: &mut Memory) -> u64 {
        let at = mem.alloc(self.0.len());
        mem.write(at, &self.0).unwrap();
        at
    }
}

/// The text of a shape: those of 96 and 192 are in no library, but in a folder that `CPATTN_CUDA_KERNELS` may name.
fn path(name: &str) -> std::path::PathBuf {
    let file = format!("hopper_forward_bf16_{name}.ptx");
    let apart = std::env::var_os("CPATTN_CUDA_KERNELS").map(|folder| std::path::Path::new(&folder).join(&file));
    let own = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ptx/compiled").join(&file);
    apart.filter(|apart| apart.exists()).unwrap_or(own)
}

/// o and lse of all rows, and the bytes of o.
fn run(bf16: bool, (dim, value): (usize, usize), name: &str, seed: u64) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let text = std::fs::read_to_string(path(name)).unwrap();
    // As `src/kernel/cuda/embedded.rs` makes one of the other.
    let text = if bf16 { text } else { text.replace("bf16", "f16") };
    let mut mem = Memory::new();
    let loaded = Module::parse(&text).unwrap().load(&mut mem).unwrap();
    let keys: usize = KEYS.iter().sum();
    let q = Tensor::new(&mut mem, bf16, Q_ROWS, Q_HEADS * dim, 1);
    let k = Tensor::new(&mut mem, bf16, keys, dim, 2);
    let v = Tensor::new(&mut mem, bf16, keys, value, 3);
    let rows = Q_ROWS + 2 * GAP;
    let o = mem.alloc(rows * Q_HEADS * value * 2);
    let lse = mem.alloc(rows * Q_HEADS * 4);
    mem.write(o, &vec![0xff; rows * Q_HEADS * value * 2]).unwrap();
    mem.write(lse, &vec![0xff; rows * Q_HEADS * 4]).unwrap();

    // Runs: row, position, length, partners, mode (3 is all in one call), block and period of 1.
    let range = |out: &mut Bytes, row: usize, position: i64, len: usize, end: u32| {
        out.u64s(&[row as u64, position as u64]).u32s(&[len as u32, 0, end, 3, 1, 1, 0, 1, 1, 0]);
    };
    let (mut queries, mut partners, mut work) = (Bytes::default(), Bytes::default(), Bytes::default());
    // One band for all pairs: all rows on both sides, no bound to the left, causal, no shift.
    let mut bands = Bytes::default();
    bands.u64s(&[-FAR as u64, FAR as u64, -FAR as u64, FAR as u64, 2 * FAR as u64, 0, 0]);
    range(&mut queries, GAP, START, Q_ROWS, 2);
    let mut runs = Bytes::default();
    range(&mut runs, GAP, 0, KEYS[0], 0);
    range(&mut runs, GAP + KEYS[0], KEYS[0] as i64, KEYS[1], 0);
    // Runs and their band.
    partners.u32s(&[1, 0, 0, 0]);
    // Rows of a tile of q, and of a tile of keys.
    let (rows_of_q, tile) = match (dim, value) {
        (64, _) => (192, 128),
        (192, 192) => (128, 112),
        (256, _) => (128, 80),
        _ => (128, 128),
    };
    // Tiles of one head, then shared ones of 64 rows: all of the first kind, one of each, all of the second. The number
    // of the first shared item.
    let (single, shared, begin): (&[u32], &[u32], u32) = match (seed % 3, rows_of_q) {
        (0, 192) => (&[0], &[], 2),
        (0, _) => (&[128, 0], &[], 4),
        (1, 192) => (&[64], &[0], 2),
        (1, _) => (&[0], &[128], 2),
        _ => (&[], &[64, 128, 0], 0),
    };
    work.u32s(&single.iter().chain(shared).flat_map(|&first| [0, first]).collect::<Vec<_>>());
    let mut tile_counter = Bytes::default();
    tile_counter.u32s(&[0; 4]);
    let tile_counter = tile_counter.upload(&mut mem);
    let lists = [&queries, &runs, &partners, &bands, &work].map(|list| list.upload(&mut mem));

    let scale = (dim as f64).sqrt().recip();
    let log2 = (scale * std::f64::consts::LOG2_E) as f32;
    let (q_row, k_row, v_row) = (Q_HEADS * dim * 2, dim * 2, value * 2);
    let mut params = Bytes::default();
    params.0.extend(q.map(dim, Q_ROWS, rows_of_q, 1));
    params.0.extend(k.map(dim, KEYS[0], tile, 1));
    params.0.extend(v.map(value, KEYS[0], tile, 1));
    params.0.extend(q.map(dim, Q_ROWS, 64, rows_of_q / 64));
    params.u64s(&[q.at, q_row as u64, dim as u64 * 2, k.at, k_row as u64, 0, v.at, v_row as u64, 0]);
    params.u64s(&[0; 6]).u64s(&[o, (Q_HEADS * value * 2) as u64, value as u64 * 2, lse, Q_HEADS as u64 * 4, 4]);
    // No slopes, no sinks, no largest scores.
    params.u64s(&[0; 9]).u64s(&lists);
    // How scores are made, heads, and what this kernel has of its own.
    params.u32s(&[log2.to_bits(), log2.to_bits(), 0, 0, (scale as f32).to_bits(), 0]);
    params.u32s(&[Q_HEADS as u32, 1, 0, 0, 2, dim as u32, value as u32, 2 * Q_HEADS as u32, 1, 0]);
    params.u64s(&[tile_counter, lists[4]]).u32s(&[Q_ROWS as u32, KEYS[0] as u32, single.len() as u32, Q_HEADS as u32]);
    // Where they lie, the first item, how many; one item each, as all heads of the call read one kv head; 2^6 rows.
    params.u64s(&[lists[4] + single.len() as u64 * 8]).u32s(&[begin, shared.len() as u32, 1, 1, 2, 2, 6, 0]);

    let (width, value_width) = (dim.next_multiple_of(64), value.next_multiple_of(64));
    let state = if rows_of_q > 128 { 32 * rows_of_q as usize } else { 0 };
    let shared = 2 * (rows_of_q as usize * width + 2 * tile as usize * (width + value_width)) + 512 + state;
    let options = Options { seed, ..Options::default() };
    // One block takes all items, or each its own.
    let grid = [if seed.is_multiple_of(2) { 1 } else { 4 }, 1, 1];
    let how = Launch {
        grid,
        block: [2 * rows_of_q + 128, 1, 1],
        cluster: [1; 3],
        dynamic_shared: shared as u32,
        params: &params.0,
        options,
    };
    let stats =
        launch(loaded.kernel("cpattn_hopper_forward").unwrap(), &mut mem, &how).unwrap_or_else(|r| panic!("{r}"));
    // With three warpgroups, pairs of a row's largest score and sum lie 16 bytes apart while a step is masked: two
    // passes each.
    let conflicts = if rows_of_q > 128 { 672 } else { 0 };
    assert!(stats.bank_conflicts() <= conflicts, "{} bank conflicts", stats.bank_conflicts());

    let at = |row: usize, n: usize| (row + GAP) * n;
    let bytes = mem.read(o, rows * Q_HEADS * value * 2).unwrap();
    let lines = mem.read(lse, rows * Q_HEADS * 4).unwrap();
    let (before, behind) = (at(0, Q_HEADS * value * 2), at(Q_ROWS, Q_HEADS * value * 2));
    assert!(bytes[..before].iter().chain(&bytes[behind..]).all(|&b| b == 0xff), "rows of no tensor were written");
    let o = bytes[before..behind].as_chunks::<2>().0.iter().map(|b| decode(bf16, u16::from_le_bytes(*b))).collect();
    let lse = lines[at(0, Q_HEADS * 4)..at(Q_ROWS, Q_HEADS * 4)].as_chunks::<4>().0.iter();
    let lse = lse.map(|b| f32::from_le_bytes(*b).into()).collect();
    (o, lse, reference(&q, &k, &v, (dim, value), scale))
}

/// o and, behind it, lse.
fn reference(q: &Tensor, k: &Tensor, v: &Tensor, (dim, value): (usize, usize), scale: f64) -> Vec<f64> {
    let (mut o, mut lse) = (Vec::new(), Vec::new());
    for row in 0..Q_ROWS {
        for head in 0..Q_HEADS {
            let x = &q.numbers[row * q.width + head * dim..][..dim];
            let met = (row + START as usize + 1).min(k.rows);
            let dot =
                |j: usize| x.iter().zip(&k.numbers[j * dim..]).map(|(a, b)| f64::from(a * b)).sum::<f64>() * scale;
            let scores: Vec<f64> = (0..met).map(dot).collect();
            let largest = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
            let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
            let sum: f64 = weights.iter().sum();
            o.extend((0..value).map(|c| {
                weights.iter().enumerate().map(|(j, w)| w * f64::from(v.numbers[j * value + c])).sum::<f64>() / sum
            }));
            lse.push(largest + sum.ln());
        }
    }
    o.extend(lse);
    o
}

fn check(bf16: bool, dims: (usize, usize), name: &str) {
    let mut first: Option<(Vec<f64>, Vec<f64>)> = None;
    for seed in 0..6 {
        let (o, lse, expected) = run(bf16, dims, name, seed);
        let (expected_o, expected_lse) = expected.split_at(o.len());
        let bound = if bf16 { 2f64.powi(-8) } else { 2f64.powi(-11) };
        let rms = |x: &mut dyn Iterator<Item = f64>| (x.map(|x| x * x).sum::<f64>() / o.len() as f64).sqrt();
        let error = rms(&mut o.iter().zip(expected_o).map(|(a, b)| a - b));
        let size = rms(&mut expected_o.iter().copied());
        assert!(error <= bound * size, "{name}, seed {seed}: error {error:e} of {size}");
        for (i, (a, b)) in lse.iter().zip(expected_lse).enumerate() {
            assert!((a - b).abs() < 2e-5, "{name}, seed {seed}: lse {i} is {a}, not {b}");
        }
        let same = first.get_or_insert_with(|| (o.clone(), lse.clone()));
        assert!(*same == (o, lse), "{name}: seed {seed} gives other bits");
    }
}

#[test]
fn head_dim_64() {
    check(true, (64, 64), "64");
    check(false, (64, 64), "64");
}

#[test]
fn head_dim_96() {
    if !path("96").exists() {
        return eprintln!("not run: `ptx/compile --with FORWARD_96_192` makes this kernel");
    }
    check(true, (96, 96), "96");
    check(false, (96, 96), "96");
}

#[test]
fn head_dim_192() {
    if !path("192").exists() {
        return eprintln!("not run: `ptx/compile --with FORWARD_96_192` makes this kernel");
    }
    check(true, (192, 192), "192");
    check(false, (192, 192), "192");
}

#[test]
fn head_dim_128() {
    check(true, (128, 128), "128");
    check(false, (128, 128), "128");
}

#[test]
fn head_dims_192_and_128() {
    check(true, (192, 128), "192128");
    check(false, (192, 128), "192128");
}

#[test]
fn head_dim_256() {
    check(true, (256, 256), "256");
    check(false, (256, 256), "256");
}
