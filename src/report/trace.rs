// SPDX-License-Identifier: MIT OR Apache-2.0
//! Recorded operations with their times.
//!
//! Recorded [`Event`]s can be written as Chrome trace events ([`chrome_trace`]; for Perfetto and `chrome://tracing`),
//! or as a picture ([`timeline_svg`](super::timeline::timeline_svg)) that shows which communication overlaps with
//! compute. Both are made afterwards from plain data; nothing here reads a clock or a running rank.
//!
//! [`Overlap`] is how much of the communication lane's time overlapped with work of the compute lane of the same
//! rank. The rest is time that a rank waited.

use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};
use core::{fmt::Write, iter::Sum, ops::Sub};

use crate::schedule::Lane;

/// One operation that ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The rank that ran it.
    pub rank: usize,
    /// The lane.
    pub lane: Lane,
    /// The operation's name, from [`Operation::name`](crate::schedule::Operation::name).
    pub name: &'static str,
    /// The part of the run, from [`Operation::phase`](crate::schedule::Operation::phase).
    pub phase: &'static str,
    /// The ring step.
    pub step: u32,
    /// Its start, in nanoseconds of a clock that all ranks share.
    pub start_ns: u64,
    /// Its end, on the same clock.
    pub end_ns: u64,
    /// Bytes sent and received; 0 for operations other than exchanges.
    pub bytes: u64,
}

/// Time on the communication lane, and how much of it overlapped with compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Overlap {
    /// Nanoseconds in which the compute lane was busy, summed over ranks.
    pub compute_ns: u64,
    /// Nanoseconds in which the communication lane was busy, summed over ranks.
    pub communication_ns: u64,
    /// Of these, nanoseconds in which the compute lane of the same rank was busy too.
    pub hidden_ns: u64,
}

impl Overlap {
    /// The overlap over all ranks of `events`, in any order. Operations of one lane that overlap count once.
    ///
    /// ```
    /// use cpattn::{report::trace::{Event, Overlap}, schedule::Lane};
    /// let event =
    ///     |lane, start_ns, end_ns| Event { rank: 0, lane, name: "", phase: "", step: 0, start_ns, end_ns, bytes: 0 };
    /// let o = Overlap::of(&[event(Lane::Compute, 0, 70), event(Lane::Communication, 20, 120)]);
    /// assert_eq!(o.share(), Some(0.5));
    /// ```
    pub fn of(events: &[Event]) -> Self {
        let mut total = Self::default();
        for rank in ranks(events) {
            total.add(overlap_of(events, rank));
        }
        total
    }

    /// The hidden share of communication, 0 to 1; `None` when nothing was communicated.
    pub fn share(&self) -> Option<f64> {
        (self.communication_ns > 0).then(|| self.hidden_ns as f64 / self.communication_ns as f64)
    }

    fn add(&mut self, other: Self) {
        // Events may be given by any caller, so sums must not overflow.
        self.compute_ns = self.compute_ns.saturating_add(other.compute_ns);
        self.communication_ns = self.communication_ns.saturating_add(other.communication_ns);
        self.hidden_ns = self.hidden_ns.saturating_add(other.hidden_ns);
    }
}

/// The ranks that occur, ascending.
pub(super) fn ranks(events: &[Event]) -> Vec<usize> {
    let mut ranks: Vec<usize> = events.iter().map(|e| e.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

pub(super) fn overlap_of(events: &[Event], rank: usize) -> Overlap {
    let compute = busy(events, rank, Lane::Compute);
    let communication = busy(events, rank, Lane::Communication);
    let length = |list: &[(u64, u64)]| list.iter().map(|(a, e)| e - a).sum();
    let hidden_ns = common(&compute, &communication);
    Overlap { compute_ns: length(&compute), communication_ns: length(&communication), hidden_ns }
}

/// The time that is in both of two lists of disjoint ascending intervals.
pub(crate) fn common<T: Copy + PartialOrd + Sub<Output = T> + Sum>(one: &[(T, T)], other: &[(T, T)]) -> T {
    let mut first = 0;
    let of_interval = |&(a, e): &(T, T)| {
        while first < one.len() && one[first].1 <= a {
            first += 1;
        }
        let part = |&(b, f): &(T, T)| (if f < e { f } else { e }) - (if b > a { b } else { a });
        one[first..].iter().take_while(|i| i.0 < e).map(part).sum()
    };
    other.iter().map(of_interval).sum()
}

/// When a lane was busy: disjoint intervals, ascending.
fn busy(events: &[Event], rank: usize, lane: Lane) -> Vec<(u64, u64)> {
    let mut list: Vec<(u64, u64)> = events
        .iter()
        .filter(|e| e.rank == rank && e.lane == lane && e.end_ns > e.start_ns)
        .map(|e| (e.start_ns, e.end_ns))
        .collect();
    list.sort_unstable();
    let mut out: Vec<(u64, u64)> = Vec::new();
    for (a, e) in list {
        match out.last_mut() {
            Some(last) if a <= last.1 => last.1 = last.1.max(e),
            _ => out.push((a, e)),
        }
    }
    out
}

/// A string literal of JSON.
fn json(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if (c as u32) < 0x20 => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Chrome trace events: a process for each rank, a thread for each lane, a complete event (`"X"`) for each operation.
/// Times are microseconds since the first event, to the nanosecond.
pub fn chrome_trace(events: &[Event]) -> String {
    let zero = events.iter().map(|e| e.start_ns).min().unwrap_or(0);
    let micros = |ns: u64| format!("{}.{:03}", ns / 1000, ns % 1000);
    let mut lines = Vec::new();
    for rank in ranks(events) {
        let meta = |name: &str, tid: usize, key: &str, value: String| {
            format!(r#"{{"name":"{name}","ph":"M","pid":{rank},"tid":{tid},"args":{{"{key}":{value}}}}}"#)
        };
        lines.push(meta("process_name", 0, "name", json(&format!("rank {rank}"))));
        lines.push(meta("process_sort_index", 0, "sort_index", rank.to_string()));
        for lane in [Lane::Compute, Lane::Communication] {
            lines.push(meta("thread_name", lane as usize, "name", json(lane_name(lane))));
            lines.push(meta("thread_sort_index", lane as usize, "sort_index", (lane as usize).to_string()));
        }
    }
    for e in events {
        lines.push(format!(
            r#"{{"name":{},"cat":{},"ph":"X","pid":{},"tid":{},"ts":{},"dur":{},"args":{{"phase":{},"step":{},"bytes":{}}}}}"#,
            json(&label(e)),
            json(e.phase),
            e.rank,
            e.lane as usize,
            micros(e.start_ns - zero),
            micros(e.end_ns.saturating_sub(e.start_ns)),
            json(e.phase),
            e.step,
            e.bytes
        ));
    }
    format!("{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n{}\n]}}\n", lines.join(",\n"))
}

pub(super) const fn lane_name(lane: Lane) -> &'static str {
    match lane {
        Lane::Compute => "compute",
        Lane::Communication => "communication",
    }
}

/// The name of an event, with its step if the phase has steps.
pub(super) fn label(e: &Event) -> String {
    if e.phase == "ring" { format!("{} {}", e.name, e.step) } else { e.name.to_string() }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn event(rank: usize, lane: Lane, name: &'static str, step: u32, start_ns: u64, end_ns: u64) -> Event {
        let phase = match name {
            "exchange" | "transform" => "ulysses in",
            _ => "ring",
        };
        Event { rank, lane, name, phase, step, start_ns, end_ns, bytes: u64::from(lane == Lane::Communication) * 4096 }
    }

    /// Counts nanosecond by nanosecond.
    fn slowly(events: &[Event]) -> Overlap {
        let mut o = Overlap::default();
        for rank in 0..3 {
            for t in 0..200 {
                let on = |lane| {
                    events.iter().any(|e| e.rank == rank && e.lane == lane && (e.start_ns..e.end_ns).contains(&t))
                };
                let (a, b) = (on(Lane::Compute), on(Lane::Communication));
                o.add(Overlap { compute_ns: a.into(), communication_ns: b.into(), hidden_ns: (a && b).into() });
            }
        }
        o
    }

    #[test]
    fn overlap_is_what_counting_gives() {
        let mut draw = fastrand::Rng::with_seed(1);
        let mut next = |n: u64| draw.u64(..n);
        let mut hidden = 0;
        for _ in 0..300 {
            let events: Vec<Event> = (0..next(12))
                .map(|_| {
                    let lane = if next(2) == 0 { Lane::Compute } else { Lane::Communication };
                    let start = next(150);
                    event(next(3) as usize, lane, "attend", 0, start, start + next(50))
                })
                .collect();
            assert_eq!(Overlap::of(&events), slowly(&events), "{events:?}");
            hidden += Overlap::of(&events).hidden_ns;
        }
        assert!(hidden > 1000);
        assert_eq!(Overlap::of(&[]).share(), None);
    }

    #[test]
    fn a_chrome_trace_has_a_process_for_each_rank() {
        let text = chrome_trace(&[
            event(0, Lane::Compute, "attend", 2, 1_000, 2_500),
            event(1, Lane::Communication, "exchange", 0, 1_001, 1_002),
        ]);
        for part in [
            r#"{"name":"process_name","ph":"M","pid":1,"tid":0,"args":{"name":"rank 1"}}"#,
            r#"{"name":"thread_name","ph":"M","pid":0,"tid":1,"args":{"name":"communication"}}"#,
            r#"{"name":"attend 2","cat":"ring","ph":"X","pid":0,"tid":0,"ts":0.000,"dur":1.500,"args":{"phase":"ring","step":2,"bytes":0}}"#,
            r#""ts":0.001,"dur":0.001,"args":{"phase":"ulysses in","step":0,"bytes":4096}}"#,
        ] {
            assert!(text.contains(part), "no {part} in\n{text}");
        }
        assert_eq!(text.matches('{').count(), text.matches('}').count());
        assert!(!text.contains(",\n]"));
        assert_eq!(json("a\"\\\n"), r#""a\"\\\u000a""#);
        assert!(chrome_trace(&[]).contains("\"traceEvents\":["));
    }
}
