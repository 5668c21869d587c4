// SPDX-License-Identifier: MIT OR Apache-2.0
//! Pictures of predictions: bars for candidates, lines for scaling. Self-contained SVG, for light and dark pages.

use std::fmt::Write;

use cpattn::predict::Outlook;

const STYLE: &str = "<style>.bg{fill:#fff}.ink{fill:#1f2328}.dim{fill:#59636e}.grid{stroke:#d1d9e0}\
text{font-family:system-ui,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}\
@media(prefers-color-scheme:dark){.bg{fill:#0d1117}.ink{fill:#e6edf3}.dim{fill:#9198a1}.grid{stroke:#30363d}}</style>";

/// Work, exposed communication, the rest.
const COLOURS: [(&str, &str); 3] = [("work", "#3b6fd4"), ("exposed communication", "#ee7733"), ("rest", "#8b919a")];
const LINES: [&str; 3] = ["#3b6fd4", "#d6336c", "#2f9e6e"];

fn open(width: u32, height: u32) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\">{STYLE}\n<rect class=\"bg\" width=\"{width}\" height=\"{height}\"/>\n"
    )
}

fn text(out: &mut String, x: f64, y: f64, size: u32, class: &str, anchor: &str, body: &str) {
    let body = body.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" class=\"{class}\" text-anchor=\"{anchor}\">{body}</text>"
    );
}

/// A bar for each of the first candidates: where its time goes.
pub fn candidates(outlook: &Outlook, most: usize) -> String {
    let shown = &outlook.candidates[..most.min(outlook.candidates.len())];
    let longest = shown.iter().map(|c| c.seconds()).fold(1e-30, f64::max);
    let height = 80 + 24 * shown.len() as u32;
    let mut out = open(900, height);
    let kind = if outlook.estimate { "from estimated figures" } else { "from measured figures" };
    let title = format!("Predicted forward and backward, {} ranks, {} ({kind})", outlook.world, outlook.machine);
    text(&mut out, 16.0, 26.0, 15, "ink", "start", &title);
    for (i, (name, colour)) in COLOURS.iter().enumerate() {
        let x = 16.0 + 190.0 * i as f64;
        let _ = writeln!(out, "<rect x=\"{x}\" y=\"40\" width=\"12\" height=\"12\" fill=\"{colour}\"/>");
        text(&mut out, x + 18.0, 50.5, 12, "ink", "start", name);
    }
    for (i, c) in shown.iter().enumerate() {
        let y = 70.0 + 24.0 * i as f64;
        let name = format!(
            "{} × {}, {}{}",
            c.mesh.ulysses,
            c.mesh.ring,
            c.layout,
            if c.levels == 2 { ", 2 levels" } else { "" }
        );
        text(&mut out, 218.0, y + 12.0, 12, "ink", "end", &name);
        let rest = (c.seconds() - outlook.ideal - c.exposed()).max(0.0);
        let mut x = 226.0;
        for (part, (_, colour)) in [outlook.ideal, c.exposed(), rest].into_iter().zip(COLOURS) {
            let width = 560.0 * part / longest;
            let _ =
                writeln!(out, "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"16\" fill=\"{colour}\"/>");
            x += width;
        }
        text(&mut out, x + 6.0, y + 12.0, 12, "dim", "start", &format!("{:.2} ms", 1e3 * c.seconds()));
    }
    out.push_str("</svg>\n");
    out
}

/// A panel's name, and its lines: name, and (ranks, part of the ideal).
pub type Panel = (&'static str, Vec<(&'static str, Vec<(usize, f64)>)>);

/// Panels side by side: the part of the ideal, over ranks on a logarithmic axis.
pub fn lines(title: &str, panels: &[Panel]) -> String {
    let mut out = open(940, 400);
    text(&mut out, 16.0, 26.0, 15, "ink", "start", title);
    for (p, (name, list)) in panels.iter().enumerate() {
        let (left, top, width, height) = (60.0 + 450.0 * p as f64, 100.0, 390.0, 240.0);
        text(&mut out, left, 62.0, 13, "ink", "start", name);
        let all = list.iter().flat_map(|l| &l.1).map(|x| (x.0 as f64).log2());
        let (low, high) = (all.clone().fold(f64::MAX, f64::min), all.fold(0.0, f64::max));
        let x = |ranks: usize| left + width * ((ranks as f64).log2() - low) / (high - low).max(1.0);
        let y = |part: f64| top + height * (1.0 - part.min(1.0));
        for percent in [0, 25, 50, 75, 100] {
            let at = y(f64::from(percent) / 100.0);
            let end = left + width;
            let _ = writeln!(out, "<line x1=\"{left}\" x2=\"{end}\" y1=\"{at:.1}\" y2=\"{at:.1}\" class=\"grid\"/>");
            text(&mut out, left - 6.0, at + 4.0, 11, "dim", "end", &format!("{percent} %"));
        }
        for (ranks, _) in list.first().map_or(&[][..], |l| &l.1) {
            text(&mut out, x(*ranks), top + height + 18.0, 11, "dim", "middle", &ranks.to_string());
        }
        text(&mut out, left + width / 2.0, top + height + 38.0, 11, "dim", "middle", "ranks");
        for ((i, (name, points)), colour) in list.iter().enumerate().zip(LINES) {
            let path: Vec<String> = points.iter().map(|&(r, part)| format!("{:.1},{:.1}", x(r), y(part))).collect();
            let _ = writeln!(
                out,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                path.join(" ")
            );
            for &(r, part) in points {
                let _ = writeln!(
                    out,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"><title>{name}, {r} ranks: {:.1} %</title></circle>",
                    x(r),
                    y(part),
                    100.0 * part
                );
            }
            let at = left + 130.0 * i as f64;
            let _ = writeln!(out, "<rect x=\"{at}\" y=\"74\" width=\"12\" height=\"12\" fill=\"{colour}\"/>");
            text(&mut out, at + 17.0, 84.0, 11, "ink", "start", name);
        }
    }
    out.push_str("</svg>\n");
    out
}
