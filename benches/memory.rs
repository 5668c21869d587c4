// SPDX-License-Identifier: MIT OR Apache-2.0
//! The speed of a rank's memory-bound operations, relative to a copy of as many bytes.
//!
//! Packing and unpacking for an all-to-all, casts, row sums, ordered sums, merges. Each is timed in turn with the
//! standard library's copy of half the bytes that it reads and writes (a copy reads and writes each byte once), on one
//! thread, and the share is the median of the rounds' ratios: a disturbance of a round affects both times. Two sizes:
//! memory far larger than the second cache, as for long batches, and memory that fits in it.
//!
//! ```text
//! cargo bench --bench memory [-- --rounds N] [--only TEXT] [--json FILE]
//! ```
//!
//! Rows of the JSON: `case`, `direction`, `dtype`, `ours_s`, `peer` (always `copy`), `peer_s`, `ratio` (`peer_s /
//! ours_s`, the share), `bytes`, `date`, `machine`.

mod median;

use std::{hint::black_box, time::Instant};

use cpattn::{
    Dtype,
    call::{Block, Delta, RawTensor, Transform},
    kernel::cpu,
};
use median::median;

const PEERS: usize = 8;
/// The share required if memory is the limit. In the second cache a copy is as fast as registers, and operations that
/// compute are not.
const TARGET: f64 = 0.9;
const LONG: usize = 16_384;

/// Memory for tensors, touched before the measurement. It begins at multiples of a cache line, as memory of a rank and
/// of most libraries does.
struct Arena(Vec<Vec<Line>>);

#[derive(Clone)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [u64; 8]);

impl Arena {
    fn tensor(&mut self, dtype: Dtype, tokens: usize, heads: usize, dim: usize) -> RawTensor {
        let bytes = tokens * heads * dim * dtype.size();
        // 0x3c3c is 1.06 in f16, and a small number in bf16 and f32: no value is subnormal or infinite.
        let mut memory = vec![Line([0x3c3c_3c3c_3c3c_3c3c; 8]); bytes.div_ceil(64)];
        let t = RawTensor::compact(memory.as_mut_ptr().cast(), dtype, tokens as u64, heads as u32, dim as u32);
        self.0.push(memory);
        t
    }

    /// `[heads, tokens]`, as `[tokens, heads, 1]`.
    fn per_row(&mut self, tokens: usize, heads: usize) -> RawTensor {
        RawTensor { token_stride: 1, head_stride: tokens as i64, ..self.tensor(Dtype::F32, tokens, heads, 1) }
    }
}

/// An operation to measure, and the bytes it reads and writes.
struct Case {
    name: String,
    dtype: Dtype,
    bytes: usize,
    run: Box<dyn FnMut()>,
    _memory: Arena,
}

fn bytes(t: &RawTensor) -> usize {
    t.tokens as usize * t.heads as usize * t.dim as usize * t.dtype.size()
}

/// A transform: a block for each destination, with an equal number of sources.
fn transform(name: String, dst: Vec<RawTensor>, sources: Vec<RawTensor>, memory: Arena) -> Case {
    let each = (sources.len() / dst.len()) as u32;
    let total = dst.iter().chain(&sources).map(bytes).sum();
    let dtype = dst[0].dtype;
    let blocks: Vec<Block> =
        (0..).zip(dst).map(|(i, dst)| Block { dst, sources_begin: i * each, sources_end: (i + 1) * each }).collect();
    let run = move || {
        // SAFETY: the tensors lie in the case's memory, apart from each other, and nothing else touches them.
        unsafe { cpu::transform(&Transform { blocks: &blocks, sources: &sources }) }.expect("shapes agree");
    };
    Case { name, dtype, bytes: total, run: Box::new(run), _memory: memory }
}

/// All heads of a token-major tensor, and the heads of one peer.
fn all_to_all(tokens: usize, dim: usize, whole: Dtype, blocks: Dtype, pack: bool) -> Case {
    let mut memory = Arena(Vec::new());
    let all = memory.tensor(whole, tokens, PEERS, dim);
    let heads: Vec<_> = (0..PEERS as u32).map(|h| all.heads(h, 1)).collect();
    let peers: Vec<_> = (0..PEERS).map(|_| memory.tensor(blocks, tokens, 1, dim)).collect();
    let cast = if whole == blocks { String::new() } else { format!(" from {}", if pack { whole } else { blocks }) };
    let name = format!("{} {PEERS} blocks, heads of {dim}{cast}", if pack { "pack" } else { "unpack" });
    let (dst, src) = if pack { (peers, heads) } else { (heads, peers) };
    transform(name, dst, src, memory)
}

fn sum(tokens: usize, from: Dtype, to: Dtype, count: usize) -> Case {
    let mut memory = Arena(Vec::new());
    let dst = memory.tensor(to, tokens, 8, 128);
    let sources = (0..count).map(|_| memory.tensor(from, tokens, 8, 128)).collect();
    let name = if count == 1 { format!("cast from {from}") } else { format!("sum of {count} from {from}") };
    transform(name, vec![dst], sources, memory)
}

fn delta(tokens: usize, dim: usize, dtype: Dtype) -> Case {
    let mut memory = Arena(Vec::new());
    let (o, d_o) = (memory.tensor(dtype, tokens, 8, dim), memory.tensor(dtype, tokens, 8, dim));
    let call = Delta::new([o, d_o, memory.per_row(tokens, 8)]);
    let total = bytes(&call.o) + bytes(&call.d_o) + bytes(&call.delta);
    // SAFETY: as for transforms.
    let run = move || unsafe { cpu::delta(&call) }.expect("shapes agree");
    Case { name: format!("delta, heads of {dim}"), dtype, bytes: total, run: Box::new(run), _memory: memory }
}

fn merged(tokens: usize, dim: usize) -> Case {
    let mut memory = Arena(Vec::new());
    let (o, other_o) = (memory.tensor(Dtype::F32, tokens, 8, dim), memory.tensor(Dtype::F32, tokens, 8, dim));
    let (lse, other_lse) = (memory.per_row(tokens, 8), memory.per_row(tokens, 8));
    // o and lse are read and written.
    let total = 2 * bytes(&o) + bytes(&other_o) + 2 * bytes(&lse) + bytes(&other_lse);
    // SAFETY: as for transforms.
    let run = move || unsafe { cpu::merge(&o, &lse, &other_o, &other_lse) }.expect("shapes agree");
    Case {
        name: format!("merge, heads of {dim}"),
        dtype: Dtype::F32,
        bytes: total,
        run: Box::new(run),
        _memory: memory,
    }
}

/// Constructors of the cases, so that only one case has its memory at a time.
fn cases() -> Vec<Box<dyn Fn(usize) -> Case>> {
    use Dtype::{Bf16, F16, F32};
    let mut all: Vec<Box<dyn Fn(usize) -> Case>> = Vec::new();
    for dim in [64, 128] {
        for dtype in [F32, Bf16] {
            for pack in [true, false] {
                all.push(Box::new(move |n| all_to_all(n, dim, dtype, dtype, pack)));
            }
        }
    }
    all.push(Box::new(|n| all_to_all(n, 128, F16, F32, false)));
    for half in [Bf16, F16] {
        all.push(Box::new(move |n| sum(n, half, F32, 1)));
        all.push(Box::new(move |n| sum(n, F32, half, 1)));
    }
    for (from, to) in [(F32, F32), (F32, Bf16), (Bf16, F32)] {
        // As many bytes as the other cases; the standard library copies this size with ordinary stores.
        all.push(Box::new(move |n| sum(n.div_ceil(4), from, to, 8)));
    }
    for dtype in [F32, Bf16, F16] {
        all.push(Box::new(move |n| delta(n, 128, dtype)));
    }
    for dim in [64, 128] {
        all.push(Box::new(move |n| merged(n, dim)));
    }
    all
}

fn seconds(run: &mut dyn FnMut()) -> f64 {
    let began = Instant::now();
    run();
    began.elapsed().as_secs_f64()
}

/// Seconds of the operation, seconds of the copy, and the share.
fn measure(case: &mut Case, rounds: usize) -> (f64, f64, f64) {
    let words = case.bytes / 16;
    let (from, mut to) = (vec![1u64; words], vec![2u64; words]);
    let mut copy = || {
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
    };
    // Small cases are repeated, because one is too short for the clock.
    let each = ((1 << 22) / case.bytes).max(1);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let mine = seconds(&mut || (0..each).for_each(|_| (case.run)())) / each as f64;
        let theirs_now = seconds(&mut || (0..each).for_each(|_| copy())) / each as f64;
        // The first round warms up.
        if round > 0 {
            ours.push(mine);
            theirs.push(theirs_now);
        }
    }
    let share = median(ours.iter().zip(&theirs).map(|(o, t)| t / o).collect());
    (median(ours), median(theirs), share)
}

/// The CPU's own name.
fn machine() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|l| l.strip_prefix("model name")?.split_once(": "));
    name.map_or(std::env::consts::ARCH, |(_, name)| name).into()
}

/// Seconds since 1970 as a date and time.
fn date() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, minutes) = ((now / 86_400) as i64, now % 86_400 / 60);
    // Days to a civil date. Counting from 1 March of year 0 puts leap days at the end of a year.
    let z = days + 719_468;
    let (era, day) = (z.div_euclid(146_097), z.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let (d, m) = (of_year - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let y = year + era * 400 + i64::from(m <= 2);
    format!("{y:04}-{m:02}-{d:02}T{:02}:{:02}Z", minutes / 60, minutes % 60)
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let value = |name: &str| args.iter().position(|a| a == name).and_then(|i| args.get(i + 1));
    let Ok(rounds @ 1..) = value("--rounds").map_or(Ok(15), |n| n.parse::<usize>()) else {
        eprintln!("--rounds N takes a number above 0");
        std::process::exit(2);
    };
    let only = value("--only").cloned().unwrap_or_default();
    let (machine, date) = (machine(), date());
    println!("{machine}, {date}, one thread, {rounds} rounds");
    println!("{:48}{:>6}{:>10}{:>10}{:>9}", "", "", "ms", "GB/s", "of copy");
    let mut rows = Vec::new();
    for tokens in [LONG, 128] {
        for make in cases() {
            let mut case = make(tokens);
            let name = format!("{}, {:.0} MB", case.name, case.bytes as f64 / 1e6);
            if !name.contains(&only) {
                continue;
            }
            let (ours, theirs, share) = measure(&mut case, rounds);
            let verdict = if share >= TARGET || tokens < LONG { "" } else { "  missed" };
            println!(
                "{name:48}{:>6}{:>10.3}{:>10.1}{share:>9.2}{verdict}",
                case.dtype.to_string(),
                ours * 1e3,
                case.bytes as f64 / ours / 1e9
            );
            rows.push(format!(
                "{{\"case\": \"{name}\", \"direction\": \"forward\", \"dtype\": \"{}\", \"ours_s\": {ours:.3e}, \
                 \"peer\": \"copy\", \"peer_s\": {theirs:.3e}, \"ratio\": {share:.3}, \"bytes\": {}, \
                 \"date\": \"{date}\", \"machine\": \"{machine}\"}}",
                case.dtype, case.bytes
            ));
        }
    }
    if let Some(path) = value("--json") {
        std::fs::write(path, format!("[\n {}\n]\n", rows.join(",\n "))).expect("the file can be written");
    }
}
