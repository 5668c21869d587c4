// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is printed.

use std::{path::Path, time::Duration};

use cpattn::{
    Element, Plan,
    report::{timeline, trace},
    schedule::Direction,
};

use crate::json::{Json, Text};

use super::{
    check::Checked,
    team::{Lap, Results},
};

/// Smallest, median and largest, in milliseconds.
fn spread(mut ns: Vec<u64>) -> String {
    ns.sort_unstable();
    let ms = |ns: u64| ns as f64 / 1e6;
    match (ns.first(), ns.get(ns.len() / 2), ns.last()) {
        (Some(&min), Some(&median), Some(&max)) => format!("{:>9.2}{:>9.2}{:>9.2}", ms(min), ms(median), ms(max)),
        _ => String::new(),
    }
}

fn counted(n: usize, one: &str, more: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { more })
}

/// Times of all ranks and repeats.
pub fn times(text: Text, plan: &Plan, laps: &[Vec<Lap>], planning: &[Duration], kind: &str) -> Result<(), String> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (ranks, repeats) = (plan.mesh().world(), laps.first().map_or(0, |l| l.len() / 2));
    text.line(format_args!(
        "times in ms: smallest, median and largest of {} × {}, as {kind} on {}",
        counted(ranks, "rank", "ranks"),
        counted(repeats, "repeat", "repeats"),
        counted(cores, "core", "cores")
    ))?;
    text.line(format_args!("{:10}{:>27}{:>27}{:>27}{:>27}", "", "wall", "compute", "communication*", "both at once"))?;
    for (name, direction) in [("forward", Direction::Forward), ("backward", Direction::Backward)] {
        let all: Vec<&Lap> = laps.iter().flatten().filter(|l| l.direction == direction).collect();
        let of = |f: &dyn Fn(&Lap) -> u64| spread(all.iter().map(|l| f(l)).collect());
        text.line(format_args!(
            "{name:10}{}{}{}{}",
            of(&|l| l.wall.as_nanos() as u64),
            of(&|l| trace::Overlap::of(&l.events).compute_ns),
            of(&|l| trace::Overlap::of(&l.events).communication_ns),
            of(&|l| trace::Overlap::of(&l.events).hidden_ns),
        ))?;
    }
    text.line(format_args!("{:10}{}", "planning", spread(planning.iter().map(|d| d.as_nanos() as u64).collect())))?;
    text.line("* waiting for peers included\n")
}

/// Wall times by direction: of each rank and repeat, in seconds.
pub fn times_as_json(laps: &[Vec<Lap>]) -> Json {
    let of = |direction: Direction| {
        let all = laps.iter().flatten().filter(|l| l.direction == direction);
        Json::list(all.map(|l| Json::Number(l.wall.as_secs_f64())))
    };
    Json::Object(vec![("forward_seconds", of(Direction::Forward)), ("backward_seconds", of(Direction::Backward))])
}

/// Writes the lanes of all ranks: Chrome trace events of all repeats, and a picture of the last one.
pub fn pictures(text: Text, laps: &[Vec<Lap>], chrome: Option<&Path>, timeline: Option<&Path>) -> Result<(), String> {
    let write = |path: &Path, content: String, what: &str| -> Result<(), String> {
        std::fs::write(path, content).map_err(|e| format!("{}: {e}", path.display()))?;
        text.line(format_args!("{what} written to {}", path.display()))
    };
    if let Some(path) = chrome {
        let all: Vec<_> = laps.iter().flatten().flat_map(|l| l.events.iter().copied()).collect();
        write(path, trace::chrome_trace(&all), "trace")?;
    }
    if let Some(path) = timeline {
        let last = laps.iter().flat_map(|l| &l[l.len().saturating_sub(2)..]);
        let events: Vec<_> = last.flat_map(|l| l.events.iter().copied()).collect();
        write(path, timeline::timeline_svg(&events), "timeline")?;
    }
    if chrome.is_some() || timeline.is_some() {
        text.line("")?;
    }
    Ok(())
}

/// Errors and their bounds.
pub fn errors(text: Text, against: &str, checked: &[Checked]) -> Result<(), String> {
    text.line(format_args!("errors against {against}"))?;
    text.line(format_args!(
        "{:10}{:>15}{:>12}{:>15}{:>18}{:>16}",
        "", "max abs error", "bound", "error / bound", "max of reference", "RMS of it"
    ))?;
    for c in checked {
        text.line(format_args!(
            "{:10}{:>15.2e}{:>12.2e}{:>15.3}{:>18.2e}{:>16.2e}{}",
            c.name,
            c.error,
            c.bound,
            c.ratio(),
            c.max,
            c.rms,
            if c.passes() { "" } else { "   OVER THE BOUND" }
        ))?;
    }
    text.line("")
}

/// Errors and their bounds, tensor by tensor.
pub fn errors_as_json(checked: &[Checked]) -> Json {
    Json::list(checked.iter().map(|c| {
        Json::Object(vec![
            ("tensor", Json::text(c.name)),
            ("max_abs_error", Json::Number(c.error)),
            ("bound", Json::Number(c.bound)),
            ("within", Json::Bool(c.passes())),
            ("max_of_reference", Json::Number(c.max)),
            ("rms_of_reference", Json::Number(c.rms)),
        ])
    }))
}

/// Whether results over processes have the bits of the same ranks as threads of one process, by replica; says so.
pub fn bits<T: Element>(
    text: Text,
    processes: &[Results<T>],
    one: &[Results<T>],
    world: usize,
) -> Result<bool, String> {
    let hash = |all: &[Results<T>]| all.iter().fold(0, |n: u64, r| n.rotate_left(1) ^ r.hash());
    let (ours, theirs) = (hash(processes), hash(one));
    // Compared bit by bit, NaN too; the hashes are for the reader and for runs elsewhere.
    let equal = ours == theirs && processes.iter().zip(one).all(|(a, b)| a.same_bits(b));
    let verdict = if equal { "bit-equal" } else { "NOT bit-equal" };
    let (processes, threads) = (counted(world, "process", "processes"), counted(world, "thread", "threads"));
    text.line(format_args!(
        "{verdict} to the same ranks as threads of one process: {processes} {ours:016x}, {threads} {theirs:016x}"
    ))?;
    Ok(equal)
}

/// The last line.
pub fn summary(text: Text, checked: &[Checked]) -> Result<(), String> {
    let of = |name: &str| checked.iter().find(|c| c.name == name).map_or(f64::NAN, |c| c.error);
    text.line(format_args!(
        "max abs error: o={:.2e} lse={:.2e} dq={:.2e} dk={:.2e} dv={:.2e}",
        of("o"),
        of("lse"),
        of("dq"),
        of("dk"),
        of("dv")
    ))
}
