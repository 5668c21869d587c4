// SPDX-License-Identifier: MIT OR Apache-2.0
//! Draws a run as an SVG picture.
//!
//! Each rank has a row with its compute lane above and its communication lane below, on one time axis. The colour of a
//! bar shows the kind of operation, its number the ring step. At the right of each row: how busy the compute lane was
//! and how much of the communication overlapped with compute. The file is self-contained (no script, font or network),
//! follows the reader's light or dark scheme, and shows name, time and bytes of a bar under the pointer.

use alloc::{format, string::String};
use core::fmt::Write;

use super::trace::{Event, Overlap, label, lane_name, overlap_of, ranks};
use crate::schedule::Lane;

/// The style of an event: legend, colour, whether ink on it is dark, and the names of operations.
type Category = (&'static str, &'static str, bool, &'static [&'static str]);

const CATEGORIES: [Category; 8] = [
    ("attend", "#3b6fd4", false, &["attend"]),
    ("attend backward", "#7a4fc9", false, &["attend backward"]),
    ("pack, unpack, delta", "#2f9e6e", false, &["transform", "delta", "sink gradient"]),
    ("all-to-all", "#f0b429", true, &["exchange"]),
    ("ring fetch", "#ee7733", true, &["fetch"]),
    ("partials home", "#d6336c", false, &["return"]),
    ("add or merge", "#a8795a", false, &["reduce", "merge"]),
    ("other", "#8b919a", true, &[]),
];

const WIDTH: f64 = 1280.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 150.0;

fn category(name: &str) -> usize {
    CATEGORIES.iter().position(|c| c.3.contains(&name)).unwrap_or(CATEGORIES.len() - 1)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Nanoseconds in the largest unit that keeps them above 1.
fn time(ns: f64) -> String {
    let (value, unit) = match ns {
        n if n >= 1e9 => (n / 1e9, "s"),
        n if n >= 1e6 => (n / 1e6, "ms"),
        n if n >= 1e3 => (n / 1e3, "µs"),
        n => (n, "ns"),
    };
    let digits = if value >= 100.0 || value.fract() == 0.0 { 0 } else { 2 };
    format!("{value:.digits$} {unit}")
}

/// The distance of ticks, so that there are at most `most`: 1, 2 or 5 times a power of ten.
fn tick(span: f64, most: f64) -> f64 {
    let mut step = 1.0;
    loop {
        for factor in [1.0, 2.0, 5.0] {
            if span / (step * factor) <= most {
                return step * factor;
            }
        }
        step *= 10.0;
    }
}

const STYLE: &str = "<style>\
.bg{fill:#fff}.ink{fill:#1f2328}.dim{fill:#59636e}.grid{stroke:#d1d9e0}.lane{fill:#f3f5f8}.row{stroke:#d1d9e0}\
text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}\
.light{fill:#fff}.dark{fill:#1f2328}\
@media(prefers-color-scheme:dark){.bg{fill:#0d1117}.ink{fill:#e6edf3}.dim{fill:#9198a1}.grid{stroke:#30363d}.lane{fill:#161b22}.row{stroke:#30363d}}\
</style>";

/// An SVG of `events`, in any order. Times count from the earliest.
pub fn timeline_svg(events: &[Event]) -> String {
    let ranks = ranks(events);
    let zero = events.iter().map(|e| e.start_ns).min().unwrap_or(0);
    let end = events.iter().map(|e| e.end_ns).max().unwrap_or(0);
    let span = (end.saturating_sub(zero)).max(1) as f64;
    let plot = WIDTH - LEFT - RIGHT;
    let x = |ns: u64| LEFT + (ns - zero) as f64 / span * plot;
    // With more ranks, lanes are thinner.
    let (lane, gap) = match ranks.len() {
        0..=16 => (15.0, 12.0),
        17..=64 => (7.0, 5.0),
        _ => (3.0, 2.0),
    };
    let row = 2.0 * lane + 1.0 + gap;
    let top = 92.0;
    let bottom = top + row * ranks.len() as f64;
    let height = bottom + 40.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" role=\"img\">{STYLE}\n<rect class=\"bg\" width=\"{WIDTH}\" height=\"{height}\"/>\n"
    );
    let text = |out: &mut String, x: f64, y: f64, size: f64, class: &str, anchor: &str, body: &str| {
        let _ = writeln!(
            out,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" class=\"{class}\" text-anchor=\"{anchor}\">{}</text>",
            escaped(body)
        );
    };
    let total = Overlap::of(events);
    let hidden = match total.share() {
        Some(share) => {
            // A rank can overlap at most as much as it computes: for a tiny model, almost nothing.
            let (most, all) = ranks
                .iter()
                .map(|&rank| overlap_of(events, rank))
                .fold((0, 0), |(most, all), o| (most + o.compute_ns.min(o.communication_ns), all + o.communication_ns));
            let most = most as f64 / all as f64;
            let why = if most < 0.9 {
                format!("; {:.1} % could be at most, because attention takes no longer", 100.0 * most)
            } else {
                String::new()
            };
            format!("{:.1} % of communication time hidden under compute{why}", 100.0 * share)
        }
        None => "no communication".to_string(),
    };
    let count = if ranks.len() == 1 { "1 rank".to_string() } else { format!("{} ranks", ranks.len()) };
    text(&mut out, 16.0, 30.0, 18.0, "ink", "start", &hidden);
    text(
        &mut out,
        16.0,
        50.0,
        13.0,
        "dim",
        "start",
        &format!(
            "{count}, {} from first to last; each row: compute above, communication below{}",
            time(if events.is_empty() { 0.0 } else { span }),
            if lane > 10.0 { "; figures in bars are ring steps" } else { "" }
        ),
    );
    let mut at = 16.0;
    for (i, (name, colour, ..)) in CATEGORIES.iter().enumerate() {
        if !events.iter().any(|e| category(e.name) == i) {
            continue;
        }
        let _ = writeln!(out, "<rect x=\"{at:.1}\" y=\"62\" width=\"12\" height=\"12\" rx=\"2\" fill=\"{colour}\"/>");
        text(&mut out, at + 17.0, 72.5, 12.0, "ink", "start", name);
        at += 17.0 + 7.0 * name.len() as f64 + 20.0;
    }
    text(&mut out, WIDTH - RIGHT + 68.0, 80.0, 11.0, "dim", "end", "compute busy");
    text(&mut out, WIDTH - 16.0, 80.0, 11.0, "dim", "end", "hidden");
    for i in 0..ranks.len() {
        let y = top + row * i as f64;
        for l in 0..2 {
            let _ = writeln!(
                out,
                "<rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{plot}\" height=\"{lane}\" class=\"lane\"/>",
                y + f64::from(l) * (lane + 1.0)
            );
        }
    }
    if !events.is_empty() {
        let step = tick(span, 10.0);
        let mut t = 0.0;
        while t <= span {
            let px = LEFT + t / span * plot;
            let _ = writeln!(
                out,
                "<line x1=\"{px:.1}\" x2=\"{px:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" class=\"grid\"/>",
                top - 6.0,
                bottom + 4.0
            );
            let label = if t == 0.0 { "0".to_string() } else { time(t) };
            text(&mut out, px, bottom + 20.0, 11.0, "dim", "middle", &label);
            t += step;
        }
    }
    let every = ranks.len().div_ceil(64).max(1);
    for (i, &rank) in ranks.iter().enumerate() {
        let y = top + row * i as f64;
        if i % every != 0 {
            continue;
        }
        let (size, middle) = (if lane > 10.0 { 12.0 } else { 9.0 }, y + lane + 0.5);
        let baseline = middle + 0.35 * size;
        text(&mut out, LEFT - 10.0, baseline, size, "ink", "end", &format!("rank {rank}"));
        let o = overlap_of(events, rank);
        let percent = |part: u64, whole: f64| format!("{:.0} %", 100.0 * part as f64 / whole);
        text(&mut out, WIDTH - RIGHT + 68.0, baseline, size, "ink", "end", &percent(o.compute_ns, span));
        let share = if o.communication_ns > 0 { percent(o.hidden_ns, o.communication_ns as f64) } else { "–".into() };
        text(&mut out, WIDTH - 16.0, baseline, size, "ink", "end", &share);
    }
    for e in events {
        let Ok(i) = ranks.binary_search(&e.rank) else { continue };
        let y = top + row * i as f64 + if e.lane == Lane::Compute { 0.0 } else { lane + 1.0 };
        let (a, b) = (x(e.start_ns), x(e.end_ns.max(e.start_ns)));
        // Wide enough to be visible, with a thin gap between neighbours.
        let width = (b - a - 0.4).max(0.6);
        let (_, colour, dark, _) = CATEGORIES[category(e.name)];
        let _ = writeln!(
            out,
            "<rect x=\"{a:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{lane}\" fill=\"{colour}\"><title>{}</title></rect>",
            escaped(&describe(e))
        );
        let number = e.step.to_string();
        if e.phase == "ring" && lane > 10.0 && width > 7.0 * number.len() as f64 + 4.0 {
            let class = if dark { "dark" } else { "light" };
            text(&mut out, a + width / 2.0, y + lane - 4.0, 10.0, class, "middle", &number);
        }
    }
    out.push_str("</svg>\n");
    out
}

fn describe(e: &Event) -> String {
    let took = time(e.end_ns.saturating_sub(e.start_ns) as f64);
    let mut text = format!("rank {}, {}: {} ({}), {took}", e.rank, lane_name(e.lane), label(e), e.phase);
    if e.bytes > 0 {
        let _ = write!(text, ", {} bytes", e.bytes);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{super::trace::tests::event, *};

    /// A forward and a backward of `n` ranks, with steps of different lengths.
    fn run(n: usize) -> Vec<Event> {
        let mut out = vec![];
        let mut draw = fastrand::Rng::with_seed(5);
        let mut jitter = |x: u64| x + x * draw.u64(..40) / 100;
        for rank in 0..n {
            let (mut t, mut c) = (jitter(20_000), 0);
            let d = jitter(60_000);
            out.push(event(rank, Lane::Compute, "transform", 0, t, t + d));
            t += d;
            out.push(event(rank, Lane::Communication, "exchange", 0, t, t + 240_000));
            t += 240_000;
            for (name, work, home) in [("attend", 400_000, false), ("attend backward", 900_000, true)] {
                c = t.max(c);
                let mut arrived = t;
                for step in 0..4u32 {
                    t = t.max(arrived);
                    if step < 3 {
                        let d = jitter(330_000);
                        out.push(event(rank, Lane::Communication, "fetch", step + 1, c, c + d));
                        c += d;
                        arrived = c;
                    }
                    let d = jitter(work);
                    out.push(event(rank, Lane::Compute, name, step, t, t + d));
                    t += d;
                    if home && step > 0 {
                        c = c.max(t);
                        out.push(event(rank, Lane::Communication, "return", step, c, c + 200_000));
                        out.push(event(rank, Lane::Communication, "reduce", step, c + 200_000, c + 240_000));
                        c += 240_000;
                    }
                }
            }
            t = t.max(c);
            out.push(event(rank, Lane::Compute, "delta", 0, t, t + jitter(50_000)));
        }
        out
    }

    #[test]
    fn every_event_is_a_bar_and_every_rank_a_row() {
        for n in [1, 8, 40, 200] {
            let events = run(n);
            let svg = timeline_svg(&events);
            assert_eq!(svg.matches("<title>").count(), events.len());
            assert_eq!(svg.matches("class=\"lane\"").count(), 2 * n);
            assert!(svg.contains("% of communication time hidden under compute"));
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
            assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
            if let Ok(folder) = std::env::var("CPATTN_TIMELINES") {
                std::fs::write(format!("{folder}/timeline{n}.svg"), &svg).unwrap();
            }
        }
        let little = [event(0, Lane::Compute, "attend", 0, 0, 10), event(0, Lane::Communication, "fetch", 0, 5, 105)];
        assert!(
            timeline_svg(&little).contains("5.0 % of communication time hidden under compute; 10.0 % could be at most")
        );
        assert!(timeline_svg(&run(8)).contains(">rank 7<"));
        assert!(timeline_svg(&[]).contains("no communication"));
    }

    #[test]
    fn the_axis_has_few_round_ticks() {
        assert_eq!((tick(1.0, 10.0), tick(95.0, 10.0), tick(2.1e6, 10.0)), (1.0, 10.0, 5e5));
        assert_eq!((time(1500.0), time(2e6), time(0.0)), ("1.50 µs".into(), "2 ms".into(), "0 ns".into()));
    }

    #[test]
    fn names_are_escaped() {
        let mut e = event(0, Lane::Compute, "a<b&\"c\"", 0, 5, 5);
        e.phase = "ring";
        assert!(timeline_svg(&[e]).contains("a&lt;b&amp;&quot;c&quot; 0 (ring), 0 ns"));
    }
}
