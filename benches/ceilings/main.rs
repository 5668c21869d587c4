// SPDX-License-Identifier: MIT OR Apache-2.0
//! Upper limits of this CPU: the ceilings that the CPU kernels' shares refer to.
//!
//! Each probe keeps one execution unit busy with independent operations on registers only, for some 10 ms on every
//! thread at once, and counts floating-point operations per second (a multiply-add counts as two). Copy is the standard
//! library's copy of 128 MiB; it counts bytes read plus bytes written. A probe is null if the CPU lacks its
//! instructions.
//!
//! ```text
//! cargo bench --bench ceilings                 the best of some seconds, as a table
//! cargo bench --bench ceilings -- --serve      answers each line (a number of threads) with one JSON object
//! ```
//!
//! Clock rates and the load of neighbours change within seconds, so `benches/peers/run cpu` measures again before every
//! case and uses the best figure so far: a slow moment of the probe then does not make a share look better.

#[cfg(target_arch = "x86_64")]
mod amx;
mod vector;

use std::{
    io::{BufRead, Write},
    sync::Barrier,
    time::{Duration, Instant},
};

/// A probe does this many floating-point operations (or bytes) each time it is called.
type Probe = fn() -> f64;

/// How long one probe runs.
const BURST: Duration = Duration::from_millis(12);

/// Names as in the JSON of results.
fn probes() -> Vec<(&'static str, Option<Probe>)> {
    let mut all: Vec<(&'static str, Option<Probe>)> =
        vec![("fma_f32", Some(vector::fma())), ("bf16_dot", vector::bf16_dot())];
    #[cfg(target_arch = "x86_64")]
    all.extend([("amx_bf16", amx::bf16()), ("amx_f16", amx::f16())]);
    #[cfg(not(target_arch = "x86_64"))]
    all.extend([("amx_bf16", None), ("amx_f16", None)]);
    all
}

/// Operations per second of `threads` threads that start together.
fn rate(probe: Probe, threads: usize) -> f64 {
    let ready = Barrier::new(threads);
    let one = || {
        ready.wait();
        // The first calls make the CPU power up its wide units.
        probe();
        let (began, mut done) = (Instant::now(), 0.0);
        while began.elapsed() < BURST {
            done += probe();
        }
        done / began.elapsed().as_secs_f64()
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(one)).collect();
        one() + others.into_iter().map(|t| t.join().expect("a probe does not panic")).sum::<f64>()
    })
}

/// Buffers of the copy of each thread, touched before anything is measured.
struct Copies(Vec<(Vec<u64>, Vec<u64>)>);

impl Copies {
    const BYTES: usize = 128 << 20;

    fn rate(&mut self, threads: usize) -> f64 {
        let each = Self::BYTES / threads / 8;
        if self.0.len() != threads || self.0[0].0.len() != each {
            self.0 = (0..threads).map(|i| (vec![i as u64 + 1; each], vec![1; each])).collect();
        }
        let ready = Barrier::new(threads);
        let one = |(from, to): &mut (Vec<u64>, Vec<u64>)| {
            ready.wait();
            let began = Instant::now();
            to.copy_from_slice(std::hint::black_box(from));
            std::hint::black_box(to);
            (2 * each * 8) as f64 / began.elapsed().as_secs_f64()
        };
        let (first, rest) = self.0.split_first_mut().expect("at least one thread");
        std::thread::scope(|scope| {
            let others: Vec<_> = rest.iter_mut().map(|b| scope.spawn(|| one(b))).collect();
            one(first) + others.into_iter().map(|t| t.join().expect("a copy does not panic")).sum::<f64>()
        })
    }
}

fn measure(copies: &mut Copies, threads: usize) -> Vec<(&'static str, Option<f64>)> {
    let mut out: Vec<_> =
        probes().into_iter().map(|(name, probe)| (name, probe.map(|probe| rate(probe, threads)))).collect();
    out.push(("copy", Some(copies.rate(threads))));
    out
}

fn serve() {
    let mut copies = Copies(Vec::new());
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let text = match line.trim().parse() {
            Ok(threads @ 1..=1024) => {
                let member = |(name, value): (&str, Option<f64>)| {
                    format!("\"{name}\": {}", value.map_or("null".into(), |v| format!("{v:.6e}")))
                };
                let members: Vec<String> = measure(&mut copies, threads).into_iter().map(member).collect();
                format!("{{{}}}", members.join(", "))
            }
            _ => format!("{{\"failed\": \"threads is {:?}, expected 1 to 1024\"}}", line.trim()),
        };
        println!("{text}");
        std::io::stdout().flush().expect("who asks also reads");
    }
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args.iter().any(|a| a == "--serve") {
        return serve();
    }
    let (mut copies, mut best) = (Copies(Vec::new()), measure(&mut Copies(Vec::new()), 1));
    for _ in 0..20 {
        for (best, (_, now)) in best.iter_mut().zip(measure(&mut copies, 1)) {
            best.1 = best.1.zip(now).map(|(a, b)| a.max(b));
        }
    }
    for (name, value) in best {
        let unit = if name == "copy" { "GB/s read and written" } else { "GFLOP/s" };
        match value {
            Some(v) => println!("{name:10}{:>10.1} {unit}, one thread", v / 1e9),
            None => println!("{name:10}{:>10} this CPU has none", "-"),
        }
    }
}
