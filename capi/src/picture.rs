// SPDX-License-Identifier: MIT OR Apache-2.0
//! Events as files: a picture, and a trace for browsers.
//!
//! The events come from the caller: from ranks, from several groups, or its own with any names. The crate's events have
//! names that live as long as the program, so every new name is kept.

use core::ffi::{CStr, c_char};

use super::{
    input::{array, array_mut, result, write_text},
    status::Outcome,
    trace::cpattn_event,
};
use cpattn::{
    Error, Result,
    report::{
        timeline,
        trace::{self, Event},
    },
    schedule::Lane,
};

/// The name up to its 0, if it has one. Invalid UTF-8 becomes the replacement character; control characters are
/// removed.
fn text(name: &[c_char; 32]) -> &'static str {
    let bytes = name.map(|c| c as u8);
    let end = CStr::from_bytes_until_nul(&bytes).map_or(bytes.len(), CStr::count_bytes);
    let mut said = String::from_utf8_lossy(&bytes[..end]).into_owned();
    said.retain(|c| !c.is_control());
    Event::text(&said)
}

fn event(at: usize, e: &cpattn_event) -> Result<Event> {
    let field = |name: &str| format!("events[{at}].{name}");
    let lane = match e.lane {
        0 => Lane::Compute,
        1 => Lane::Communication,
        other => return Err(Error::invalid(field("lane"), other, "CPATTN_COMPUTE or CPATTN_COMMUNICATION")),
    };
    if e.end_ns < e.start_ns {
        return Err(Error::invalid(field("end_ns"), e.end_ns, format!("at least its start_ns, {}", e.start_ns)));
    }
    if e.reserved != 0 {
        return Err(Error::invalid(field("reserved"), e.reserved, 0));
    }
    Ok(Event {
        rank: e.rank as usize,
        lane,
        name: text(&e.name),
        phase: text(&e.phase),
        step: e.step,
        start_ns: e.start_ns,
        end_ns: e.end_ns,
        bytes: e.bytes,
    })
}

/// # Safety
/// The header's promise about arrays and results.
unsafe fn drawn(
    events: *const cpattn_event, count: usize, to: *mut c_char, capacity: usize, needed: *mut usize,
    draw: fn(&[Event]) -> String,
) -> Outcome {
    let (events, to) = given!(array("events", events, count), array_mut("text", to.cast::<u8>(), capacity));
    let needed = given!(result("needed", needed));
    let events = events.iter().enumerate().map(|(at, e)| event(at, e)).collect::<Result<Vec<_>>>()?;
    write_text(&draw(&events), to, needed);
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_timeline_svg(
    events: *const cpattn_event, count: usize, text: *mut c_char, capacity: usize, needed: *mut usize,
) -> i32 {
    boundary!({ given!(drawn(events, count, text, capacity, needed, timeline::timeline_svg)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_chrome_trace(
    events: *const cpattn_event, count: usize, text: *mut c_char, capacity: usize, needed: *mut usize,
) -> i32 {
    boundary!({ given!(drawn(events, count, text, capacity, needed, trace::chrome_trace)) })
}
