// SPDX-License-Identifier: MIT OR Apache-2.0
//! Events as bytes, to send a trace to another process.
//!
//! An event's names are `'static`. So names from other processes are leaked, each once ([`Event::text`]); operations
//! have about a dozen names.

use std::{
    format,
    string::String,
    sync::{Mutex, PoisonError},
    vec::Vec,
};

use super::trace::Event;
use crate::{
    error::{Error, Result},
    schedule::Lane,
};

/// Numbers of an event: start, end, bytes, step, lane, and the lengths of name and phase, which follow.
const NUMBERS: usize = 7;

impl Event {
    /// A text as the name or the phase of an event. It is stored for as long as the program runs; equal texts are
    /// stored once.
    ///
    /// ```
    /// use cpattn::report::trace::{Event, chrome_trace};
    /// use cpattn::schedule::Lane;
    ///
    /// let (name, phase) = (Event::text(&format!("layer {}", 3)), Event::text("optimizer"));
    /// let event = Event { rank: 0, lane: Lane::Compute, name, phase, step: 0, start_ns: 0, end_ns: 1000, bytes: 0 };
    /// assert!(chrome_trace(&[event]).contains("layer 3"));
    /// ```
    pub fn text(text: &str) -> &'static str {
        // Sorted.
        static NAMES: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        match names.binary_search(&text) {
            Ok(at) => names[at],
            Err(at) => {
                let kept = String::leak(text.into());
                names.insert(at, kept);
                kept
            }
        }
    }
}

/// Events of one rank as bytes.
pub(crate) fn pack(events: &[Event]) -> Vec<u8> {
    let mut out = Vec::new();
    for e in events {
        let numbers: [u64; NUMBERS] =
            [e.start_ns, e.end_ns, e.bytes, e.step.into(), e.lane as u64, e.name.len() as u64, e.phase.len() as u64];
        out.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
        out.extend(e.name.bytes().chain(e.phase.bytes()));
    }
    out
}

/// The events of `rank` that [`pack`] wrote, `offset_ns` later; none before 0.
///
/// # Errors
/// [`Error::Invalid`] for other bytes.
pub(crate) fn unpack(bytes: &[u8], rank: usize, offset_ns: i64) -> Result<Vec<Event>> {
    let (mut out, mut left) = (Vec::new(), bytes);
    while !left.is_empty() {
        let event = take(&mut left, rank, offset_ns).ok_or_else(|| {
            let found = format!("{} bytes, of which the last {} are no event", bytes.len(), left.len());
            Error::invalid(format!("the trace of rank {rank}"), found, "events as this library writes them")
                .hint("run the same version of the library on all ranks")
        })?;
        out.push(event);
    }
    Ok(out)
}

fn take(left: &mut &[u8], rank: usize, offset_ns: i64) -> Option<Event> {
    let mut rest = *left;
    let mut number = || {
        let (first, behind) = rest.split_first_chunk::<8>()?;
        rest = behind;
        Some(u64::from_le_bytes(*first))
    };
    let (start, end, bytes) = (number()?, number()?, number()?);
    let step = u32::try_from(number()?).ok()?;
    let lane = match number()? {
        0 => Lane::Compute,
        1 => Lane::Communication,
        _ => return None,
    };
    let lengths = [number()?, number()?];
    let mut name = |length: u64| {
        let (text, behind) = rest.split_at_checked(usize::try_from(length).ok()?)?;
        rest = behind;
        Some(Event::text(core::str::from_utf8(text).ok()?))
    };
    let (name, phase) = (name(lengths[0])?, name(lengths[1])?);
    *left = rest;
    let here = |ns: u64| ns.saturating_add_signed(offset_ns);
    Some(Event { rank, lane, name, phase, step, start_ns: here(start), end_ns: here(end), bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::trace::tests::event;
    use std::string::ToString;

    #[test]
    fn events_come_back_later() {
        let events = [
            event(3, Lane::Compute, "attend", 2, 1_000, 2_500),
            event(3, Lane::Communication, "exchange", 0, 20, 70),
            event(3, Lane::Compute, "", u32::MAX, 0, 0),
        ];
        let later = |ns: i64| {
            events.map(|e| Event {
                start_ns: e.start_ns.saturating_add_signed(ns),
                end_ns: e.end_ns.saturating_add_signed(ns),
                ..e
            })
        };
        for offset in [0, 5_000_000_000, -50, i64::MIN] {
            assert_eq!(unpack(&pack(&events), 3, offset).unwrap(), later(offset), "{offset}");
        }
        assert_eq!(unpack(&pack(&events), 3, -50).unwrap()[1].start_ns, 0, "nothing lies before the clock began");
        assert_eq!(unpack(&[], 0, 0).unwrap(), []);
    }

    #[test]
    fn other_bytes_are_refused() {
        let whole = pack(&[event(0, Lane::Communication, "fetch", 1, 5, 6)]);
        for cut in 1..whole.len() {
            assert!(unpack(&whole[..cut], 0, 0).is_err(), "{cut}");
        }
        for (at, byte) in [(28, 1), (32, 2), (40, 200), (47, 255), (56, 0xff)] {
            let mut other = whole.clone();
            other[at] = byte;
            let text = unpack(&other, 7, 0).unwrap_err().to_string();
            assert!(text.contains("the trace of rank 7") && text.contains("same version"), "{text}");
        }
    }

    #[test]
    fn a_name_is_kept_once() {
        let text = String::from("a name that no operation has");
        let kept = Event::text(&text);
        assert_eq!(kept, text);
        assert!(core::ptr::eq(kept, Event::text(&text)));
    }
}
