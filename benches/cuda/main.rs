// SPDX-License-Identifier: MIT OR Apache-2.0
//! Speed of the CUDA kernels, one JSON object per line and case, with a check of the results.
//!
//! A fast kernel with wrong results is useless, so every case is first run over poisoned outputs, and sampled rows are
//! compared with attention in f64; only then is it timed. Times are measured by device events around each call, over
//! several sets of buffers that together exceed the L2 cache, and the median counts. A time includes everything that a
//! call puts on the stream: the copy of its lists, delta before the backward, the casts of the gradients after it.
//!
//! Cases come from `benches/peers/cases.txt` (`tiny.txt` with `--tiny`, for an emulated driver), or with `--serve` one
//! by one from the standard input: in this way `benches/peers/run` alternates with other libraries.

mod attention;
mod case;
mod check;
mod device;
mod transform;

use case::{Case, Kind};
use device::Device;
use std::io::{BufRead, Write};
use std::process::ExitCode;

/// Errors are texts, because they are only printed.
pub type Result<T> = std::result::Result<T, String>;

/// A case with its buffers.
pub trait Prepared {
    /// Puts one call on the stream, with this set of buffers.
    fn launch(&mut self, device: &Device, set: usize) -> Result<()>;
    /// Sets of buffers.
    fn sets(&self) -> usize;
    /// Runs once over poisoned outputs and compares; returns the largest error divided by the limit.
    fn check(&mut self, device: &Device) -> Result<f64>;
}

struct Options {
    warmup: usize,
    repeats: usize,
    only: Option<String>,
    serve: bool,
    list: bool,
    jit: bool,
    cases: &'static str,
}

fn options() -> Result<Options> {
    let all = include_str!("../peers/cases.txt");
    let mut options = Options { warmup: 5, repeats: 30, only: None, serve: false, list: false, jit: false, cases: all };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--tiny" => {
                (options.warmup, options.repeats, options.cases) = (1, 2, include_str!("../peers/tiny.txt"));
            }
            "--warmup" => options.warmup = value()?.parse().map_err(|e| format!("--warmup: {e}"))?,
            "--repeats" => options.repeats = value()?.parse().map_err(|e| format!("--repeats: {e}"))?,
            "--only" => options.only = Some(value()?),
            "--serve" => options.serve = true,
            "--list" => options.list = true,
            "--jit" => options.jit = true,
            // `cargo bench` adds this argument.
            "--bench" => {}
            _ => {
                return Err(format!(
                    "{word} is none of --tiny --list --jit --serve --only PART --warmup N --repeats N"
                ));
            }
        }
    }
    options.repeats = options.repeats.max(1);
    Ok(options)
}

/// A case that stays on the device until another one is requested, and whether its result was right.
struct Held {
    line: String,
    case: Case,
    prepared: Box<dyn Prepared>,
    checked: f64,
}

fn hold(device: &Device, line: &str) -> Result<Held> {
    let case = Case::parse(line)?;
    let mut prepared: Box<dyn Prepared> = match case.kind {
        Kind::Pack | Kind::Unpack => Box::new(transform::Moves::new(device, &case)?),
        _ => Box::new(attention::Heads::new(device, &case)?),
    };
    let checked = prepared.check(device)?;
    Ok(Held { line: line.to_owned(), case, prepared, checked })
}

fn measure(device: &Device, options: &Options, held: &mut Held) -> Result<String> {
    let sets = held.prepared.sets();
    let times = device.times(options.warmup, options.repeats, |i| held.prepared.launch(device, i % sets))?;
    let seconds = times[times.len() / 2];
    let case = &held.case;
    let (dim, value_dim) = (case.head_dim as u32, case.value_dim as u32);
    let family = match case.kind {
        Kind::Backward => device.cuda.backward_family(case.dtype, dim, value_dim),
        _ => device.cuda.family(case.dtype, dim, value_dim),
    };
    let family = device::text(family)?.name();
    let clusters = case.kind != Kind::Backward && device::text(device.cuda.clusters(case.dtype, dim, value_dim))?;
    let rate = |work: f64| if work > 0.0 { format!("{:.3}", work / seconds / 1e12) } else { "null".to_owned() };
    Ok(format!(
        "{{\"case\": {:?}, \"direction\": {:?}, \"dtype\": \"{}\", \"ours_s\": {seconds:e}, \"fastest_s\": {:e}, \
         \"slowest_s\": {:e}, \"samples\": {}, \"tflops\": {}, \"tb_per_s\": {}, \"error\": {:.4}, \"family\": {:?}, \
         \"clusters\": {clusters}, \"device\": {:?}}}",
        case.name,
        case.direction(),
        case.dtype,
        times[0],
        times[times.len() - 1],
        times.len(),
        rate(case.flops()),
        rate(case.bytes_moved()),
        held.checked,
        family,
        device.name,
    ))
}

/// Answers every line; a failure is an answer too. A fault of a kernel makes the context unusable for all later cases:
/// the program then ends after the answer, which says `"ended": true`, and its caller starts it again.
fn serve(device: &Device, options: &Options) -> Result<()> {
    let mut held: Option<Held> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|e| e.to_string())?;
        if held.as_ref().is_none_or(|h| h.line != line) {
            // The memory of the previous case is freed first.
            drop(held.take());
        }
        let answer = match held.take() {
            Some(h) => Ok(h),
            None => hold(device, &line),
        }
        .and_then(|h| {
            let h = held.insert(h);
            measure(device, options, h)
        });
        let (text, lost) = match answer {
            Ok(row) => (row, Ok(())),
            Err(e) => {
                let lost = device.answers();
                (format!("{{\"failed\": {e:?}, \"ended\": {}}}", lost.is_err()), lost)
            }
        };
        println!("{text}");
        std::io::stdout().flush().map_err(|e| e.to_string())?;
        lost.map_err(|e| format!("the context is of no use any more: {e}"))?;
    }
    Ok(())
}

/// The time that the driver takes to compile the kernels of each type and dims, as one line of JSON. With
/// `CUDA_CACHE_DISABLE=1` results of earlier runs are not used.
fn jit() -> Result<()> {
    let device = Device::open()?;
    let mut seconds = Vec::new();
    for (name, dtype) in [("bf16", cpattn::Dtype::Bf16), ("f16", cpattn::Dtype::F16)] {
        for (d, dv) in [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)] {
            let start = std::time::Instant::now();
            device::text(device.cuda.prepare(dtype, d, dv))?;
            seconds.push(format!("\"{name} {d}/{dv}\": {:.3}", start.elapsed().as_secs_f64()));
        }
    }
    println!("{{\"device\": {:?}, \"seconds\": {{{}}}}}", device.name, seconds.join(", "));
    Ok(())
}

fn run() -> Result<bool> {
    let options = options()?;
    let wanted = |line: &&str| {
        let comment = line.is_empty() || line.starts_with('#');
        !comment
            && options.only.as_ref().is_none_or(|part| line.split(' ').next().unwrap_or("").contains(part.as_str()))
    };
    let lines = options.cases.lines().filter(wanted);
    if options.list {
        lines.for_each(|line| println!("{line}"));
        return Ok(true);
    }
    if options.jit {
        return jit().map(|()| true);
    }
    let device = Device::open()?;
    if options.serve {
        return serve(&device, &options).map(|()| true);
    }
    let mut good = true;
    for line in lines {
        match hold(&device, line).and_then(|mut held| measure(&device, &options, &mut held)) {
            Ok(row) => println!("{row}"),
            Err(e) => {
                eprintln!("{}: {e}", line.split(' ').next().unwrap_or(line));
                device
                    .answers()
                    .map_err(|e| format!("no case after this one: the context is of no use any more: {e}"))?;
                good = false;
            }
        }
    }
    Ok(good)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
