// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mutation tests of the shipped kernels: each barrier, fence, commit and wait is removed in turn, and the workload has
//! to notice.
//!
//! The workload is a test program that launches the kernels through the CUDA backend. It runs on the stand-in driver,
//! which tries the mutants of every kernel at each of its launches (`driver::mutants`): as many processes as there are
//! cores, each with its share of the mutants, and a later workload tries only what the earlier ones did not catch.
//! Survivors are looked up in `equivalent.txt`, where each that is truly equivalent is listed with the reason. Ends
//! with `caught N of M, E equivalent`, and fails when a survivor is not listed, or a kernel that `--only` names was
//! never launched. Event waits of the runtime are mutants too (`driver::trace`): one is caught when the race detector
//! would report its absence.
//!
//! ```text
//! mutate [--only TEXT] [--kinds] [--jobs N] [PROGRAM [ARGUMENT…]]
//! ```
//!
//! Without a program the registry below is built and run. `--only` tries the kernels whose file in `ptx/compiled` and
//! name, as in `forward_f16_64.ptx cpattn_forward`, contain TEXT, and no event waits. It begins with the tests that the
//! registry has for these files, and ends when nothing survives that is not listed: a mutant that is listed is tried by
//! all workloads without `--only`.
//!
//! `--kinds` is a slice of that, for every day: in each kernel, one mutant of each kind (each change of each opcode)
//! has to be caught by the tests for its file, built without optimisation, in one process.

mod survivors;
mod workloads;

use indicatif::{ProgressBar, ProgressStyle};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;
use survivors::{Only, equivalents, excuse, files, is_settled, matching, never_launched, survivors};
use workloads::{Program, REGISTRY, Workload};

#[derive(Default)]
struct Mutant {
    text: String,
    caught: Option<String>,
}

/// Module, kernel, line and change.
type Key = (String, String, (u32, String));

fn read(path: &Path, mutants: &mut BTreeMap<Key, Mutant>) {
    for line in std::fs::read_to_string(path).unwrap_or_default().lines() {
        let words: Vec<&str> = line.splitn(5, ' ').collect();
        let [what, module, kernel, number, rest @ ..] = &words[..] else { continue };
        let (line, change) = number.split_once(':').unwrap_or((number, ""));
        let Ok(line) = line.parse() else { continue };
        let m = mutants.entry(((*module).to_owned(), (*kernel).to_owned(), (line, change.to_owned()))).or_default();
        let rest = rest.first().copied().unwrap_or_default().to_owned();
        match *what {
            "mutant" => m.text = rest,
            "caught" => m.caught = Some(rest),
            _ => {}
        }
    }
}

/// What is asked for on the command line.
struct Arguments {
    only: Option<String>,
    kinds: bool,
    jobs: usize,
    program: Vec<String>,
}

fn arguments() -> Result<Arguments, String> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut out = Arguments { only: None, kinds: false, jobs: cores, program: Vec::new() };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
        match arg.as_str() {
            "--only" => out.only = Some(value()?),
            "--kinds" => (out.kinds, out.jobs) = (true, 1),
            "--jobs" => {
                let n = value()?;
                out.jobs = n.parse().ok().filter(|n| (1..=64).contains(n)).ok_or(format!("--jobs {n}: 1 to 64"))?;
            }
            a if a.starts_with('-') => {
                return Err(format!("`{a}`: usage: mutate [--only TEXT] [--kinds] [--jobs N] [PROGRAM [ARGUMENT…]]"));
            }
            _ => {
                out.program.push(arg);
                out.program.extend(args);
                break;
            }
        }
    }
    Ok(out)
}

/// Where trials are logged, and which kernels are tried: all, or a list of `<module> <kernel>`.
struct Trials<'a> {
    log: &'a Path,
    events: &'a Path,
    only: Option<&'a Only>,
    /// Whether one mutant of each kind is enough.
    kinds: bool,
    jobs: usize,
}

/// Runs one workload to its end, showing how many mutants were caught so far.
fn run(w: &dyn Workload, trials: &Trials<'_>, mutants: &mut BTreeMap<Key, Mutant>) -> Result<(), String> {
    let folder = cuda_emulator::driver::library_dir().map_err(|e| e.to_string())?;
    let mut path = folder.into_os_string();
    if let Some(old) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(old);
    }
    let Some(program) = w.command(trials.only.map(|o| &*o.files), trials.kinds)? else { return Ok(()) };
    let mut children = Vec::new();
    for part in 0..trials.jobs {
        let mut command = Command::new(program.get_program());
        command
            .args(program.get_args())
            .env("LD_LIBRARY_PATH", &path)
            .env("CPATTN_REQUIRE_CUDA", "1")
            .env("CPATTN_EMU_SM", std::env::var("CPATTN_EMU_SM").unwrap_or_else(|_| w.device().to_owned()))
            .env("CPATTN_EMU_MUTANTS", trials.log)
            .env("CPATTN_EMU_MUTANTS_PART", format!("{part}/{}", trials.jobs))
            .env("CPATTN_EMU_MUTANTS_KINDS", u8::from(trials.kinds).to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        match trials.only {
            Some(only) => {
                command.env("CPATTN_EMU_MUTANTS_ONLY", &only.kernels);
            }
            // Every process waits for the same events: one of them tells.
            None if part == 0 => {
                command.env("CPATTN_EMU_EVENTS", trials.events);
            }
            None => {}
        }
        children.push(command.spawn().map_err(|e| format!("{}: {e}", w.name()))?);
    }
    let bar = ProgressBar::new(1);
    if let Ok(style) = ProgressStyle::with_template("{prefix} [{elapsed_precise}] {bar:40} {pos}/{len} caught") {
        bar.set_style(style);
    }
    bar.set_prefix(w.name());
    let mut failed = None;
    while !children.is_empty() {
        std::thread::sleep(Duration::from_millis(250));
        read(trials.log, mutants);
        bar.set_length(mutants.len() as u64);
        bar.set_position(mutants.values().filter(|m| m.caught.is_some()).count() as u64);
        let mut left = Vec::new();
        for mut child in children {
            match child.try_wait().map_err(|e| e.to_string())? {
                None => left.push(child),
                Some(status) if !status.success() => failed = Some(status),
                Some(_) => {}
            }
        }
        children = left;
    }
    read(trials.log, mutants);
    bar.finish();
    failed.map_or(Ok(()), |status| Err(format!("{} fails without any mutant: {status}", w.name())))
}

fn mutate() -> Result<bool, String> {
    let args = arguments()?;
    let only = args.only.as_deref().map(matching).transpose()?;
    let given = Program(args.program);
    let workloads: Vec<&dyn Workload> =
        if given.0.is_empty() { REGISTRY.iter().map(|t| t as &dyn Workload).collect() } else { vec![&given] };
    let log: PathBuf = std::env::temp_dir().join(format!("cuda-emulator-mutants-{}", std::process::id()));
    let mut mutants = BTreeMap::new();
    let events = log.with_extension("events");
    // Whatever an earlier process of this number left there.
    let _ = (std::fs::remove_file(&log), std::fs::remove_file(&events));
    let trials = Trials { log: &log, events: &events, only: only.as_ref(), kinds: args.kinds, jobs: args.jobs };
    let (files, known) = (files(), equivalents()?);
    for w in workloads {
        run(w, &trials, &mut mutants)?;
        if only.as_ref().is_some_and(|only| is_settled(only, &mutants, &known, &files)) {
            break;
        }
    }
    let waits = std::fs::read_to_string(&events).unwrap_or_default();
    let logged = std::fs::read_to_string(&log).unwrap_or_default();
    let unstable = logged.lines().filter(|l| l.starts_with("unstable ")).count();
    let _ = (std::fs::remove_file(&log), std::fs::remove_file(&events));
    if unstable > 0 {
        println!("{unstable} launches give other bytes in another order of warps and blocks: not tried in that order");
    }
    let mut how: BTreeMap<&str, usize> = BTreeMap::new();
    for by in mutants.values().filter_map(|m| m.caught.as_deref()) {
        *how.entry(by).or_default() += 1;
    }
    for (by, n) in &how {
        println!("{n:5} by {by}");
    }
    let (mut equivalent, mut unknown) = (0, 0);
    let mut excused: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (which, lines) in &survivors(&mutants, &files) {
        let (file, kernel, text) = which;
        match excuse(&known, which, lines.len()) {
            Some(k) => {
                equivalent += lines.len();
                excused.entry(&k.reason).or_default().push(format!("{file} {kernel} {lines:?}"));
            }
            None => {
                unknown += lines.len();
                println!("survives: {file} {kernel} `{text}` at lines {lines:?}");
            }
        }
    }
    for (reason, which) in &excused {
        println!("equivalent: {reason}:\n    {}", which.join("\n    "));
    }
    let count = |what: &str| waits.lines().filter(|l| l.starts_with(&format!("event {what} "))).count();
    let (caught, redundant, idle) = (count("caught"), count("redundant"), count("idle"));
    if only.is_none() {
        println!("event waits: caught {caught} of {}, {redundant} redundant, {idle} idle", caught + redundant + idle);
    }
    let all = mutants.len() + caught + redundant + idle;
    let found = mutants.len() - equivalent - unknown + caught;
    println!("caught {found} of {all}, {} equivalent", equivalent + redundant + idle);
    let left = only.as_ref().map_or(Vec::new(), |only| never_launched(only, &mutants, &files));
    for kernel in &left {
        println!("never launched: {kernel}");
    }
    Ok(unknown == 0 && left.is_empty() && !mutants.is_empty())
}

fn main() -> ExitCode {
    match mutate() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
