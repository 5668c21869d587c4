// SPDX-License-Identifier: MIT OR Apache-2.0
//! The record of a run, as JSON.

use crate::table::case::Case;
use std::fmt::Write as _;

/// What became of a case on the device.
pub enum Outcome {
    /// The buffer after the launch.
    Ran(Vec<u8>),
    /// It needs a later architecture.
    Skipped,
    Failed(String),
}

/// A case that was tried.
pub struct Entry {
    pub case: Case,
    pub emulated: Vec<u8>,
    pub device: Outcome,
    pub agrees: bool,
}

/// A JSON string.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c < ' ' => {
                // Writing to a string cannot fail.
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out + "\""
}

/// Letters and digits of a device's name, and the date to the minute.
pub fn file_name(device: &str, date: &str) -> String {
    let words = device.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
    let name = words.map(str::to_lowercase).collect::<Vec<_>>().join("-");
    format!("{name}-{}Z", date[..16].replace(':', ""))
}

/// The date and time of day, UTC.
pub fn now() -> String {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, second) = ((since / 86_400) as i64, since % 86_400);
    // Years that begin in March put the leap day last; 400 of them have 146,097 days.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month, year) =
        (day - (153 * month + 2) / 5 + 1, (month + 2) % 12 + 1, era * 400 + year + i64::from(month > 9));
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

/// All of it.
pub fn json(date: &str, machine: [(&str, &str); 3], entries: &[Entry]) -> String {
    let count = |f: fn(&Entry) -> bool| entries.iter().filter(|e| f(e)).count();
    let mut out = String::from("{\n");
    // Writing to a string cannot fail, here and below.
    let _ = writeln!(out, "\"date\": {}, \"version\": {},", quoted(date), quoted(env!("CARGO_PKG_VERSION")));
    let machine: Vec<String> = machine.iter().map(|(k, v)| format!("{}: {}", quoted(k), quoted(v))).collect();
    let _ = writeln!(out, "\"machine\": {{{}}},", machine.join(", "));
    let skipped = count(|e| matches!(e.device, Outcome::Skipped));
    let _ = writeln!(out, "\"cases\": {}, \"agree\": {}, \"skipped\": {skipped},", entries.len(), count(|e| e.agrees));
    out += "\"results\": [\n";
    for (k, e) in entries.iter().enumerate() {
        let list = |buffer: &[u8]| {
            e.case.shown(buffer).iter().map(|s| format!("\"{:x}\"", s.found)).collect::<Vec<_>>().join(",")
        };
        let expected: Vec<String> = e.case.shown(&e.emulated).iter().map(|s| quoted(&s.want.to_string())).collect();
        let (family, name) = (quoted(e.case.family), quoted(&e.case.name));
        let _ = write!(
            out,
            "{{\"family\": {family}, \"name\": {name}, \"sm\": {}, \"digest\": \"{:016x}\", ",
            e.case.sm,
            e.case.digest()
        );
        let _ = write!(out, "\"expected\": [{}], \"emulated\": [{}], ", expected.join(","), list(&e.emulated));
        let _ = match &e.device {
            Outcome::Ran(buffer) => write!(out, "\"device\": [{}], \"agrees\": {}", list(buffer), e.agrees),
            Outcome::Skipped => {
                write!(out, "\"skipped\": \"needs compute capability {}.{}\"", e.case.sm / 10, e.case.sm % 10)
            }
            Outcome::Failed(why) => write!(out, "\"error\": {}, \"agrees\": false", quoted(why)),
        };
        out += if k + 1 < entries.len() { "},\n" } else { "}\n" };
    }
    out + "]}\n"
}
