// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranges, heads and scores, as the kernels take them.
//!
//! Ranges and pairs are not copied: their structs have the layout of the crate's own (asserted below). Modes, which
//! must be values of an enum, and positions, whose arithmetic must not overflow, are checked first.

use core::mem::offset_of;

use super::{input::array, problem::window};
use cpattn::{
    Error, Result,
    call::{HeadMap, Mode, QRange, Range, Ranges, RawTensor, Score},
};

/// Positions and windows beyond this are a mistake; within it, no sum of a few of them overflows.
const FAR: u64 = 1 << 40;

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_range {
    pub row: i64,
    pub pos: i64,
    pub len: u32,
    pub block: u32,
    pub period: u32,
    pub doc: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_q_range {
    pub range: cpattn_range,
    pub document: [u32; 2],
    pub keys_begin: u32,
    pub keys_end: u32,
    pub mode: u8,
    pub reserved: [u8; 7],
}

macro_rules! same_layout {
    ($ours:ty, $theirs:ty: $($field:ident),*) => {
        const _: () = {
            assert!(size_of::<$ours>() == size_of::<$theirs>() && align_of::<$ours>() == align_of::<$theirs>());
            $(assert!(offset_of!($ours, $field) == offset_of!($theirs, $field));)*
        };
    };
}
same_layout!(cpattn_range, Range: row, pos, len, block, period, doc);
same_layout!(cpattn_q_range, QRange: range, document, keys_begin, keys_end, mode);

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_ranges {
    pub q: *const cpattn_q_range,
    pub q_count: usize,
    pub k: *const cpattn_range,
    pub k_count: usize,
    pub pairs: *const u32,
    pub pair_count: usize,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_head_map {
    pub q_offset: u32,
    pub kv_offset: u32,
    pub group: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_score {
    pub scale: f64,
    pub softcap: f64,
    pub window_left: i64,
    pub window_right: i64,
}

/// A range whose positions can be computed.
fn range(name: &'static str, i: usize, r: &cpattn_range) -> Result<()> {
    if r.block == 0 || r.period < r.block {
        let found = format!("block {} and period {}", r.block, r.period);
        return Err(Error::invalid(format!("{name}[{i}]"), found, "1 <= block <= period"));
    }
    if r.pos.unsigned_abs() > FAR {
        return Err(Error::invalid(format!("{name}[{i}].pos"), r.pos, "within ±2^40"));
    }
    if u64::from(r.len / r.block) * u64::from(r.period) > FAR {
        let found = format!("len {} by blocks of {} every {}", r.len, r.block, r.period);
        return Err(Error::invalid(format!("{name}[{i}]"), found, "positions within 2^40 of the first"));
    }
    Ok(())
}

/// # Safety
/// The pointers of `r` are null or as long as its counts say, as long as the result lives.
pub(super) unsafe fn ranges<'a>(r: &cpattn_ranges) -> Result<Ranges<'a>> {
    let (q, k) = given!(array("ranges.q", r.q, r.q_count), array("ranges.k", r.k, r.k_count));
    let pairs = given!(array("ranges.pairs", r.pairs, r.pair_count));
    for (i, q) in q.iter().enumerate() {
        range("ranges.q", i, &q.range)?;
        if q.mode > Mode::Only as u8 {
            return Err(Error::invalid(format!("ranges.q[{i}].mode"), q.mode, "CPATTN_FIRST (0) to CPATTN_ONLY (3)"));
        }
        if q.reserved != [0; 7] {
            return Err(Error::invalid(format!("ranges.q[{i}].reserved"), "set", "0"));
        }
    }
    for (i, k) in k.iter().enumerate() {
        range("ranges.k", i, k)?;
    }
    // SAFETY: the layouts are equal (asserted above), and every mode is one of the enum's (just checked).
    let (q, k) = unsafe {
        (
            core::slice::from_raw_parts(q.as_ptr().cast::<QRange>(), q.len()),
            core::slice::from_raw_parts(k.as_ptr().cast::<Range>(), k.len()),
        )
    };
    Ok(Ranges { q, k, pairs })
}

pub(super) fn score(s: &cpattn_score) -> Result<Score> {
    window("score.window_left", s.window_left)?;
    window("score.window_right", s.window_right)?;
    let cpattn_score { scale, softcap, window_left, window_right } = *s;
    Ok(Score { scale, softcap, window_left, window_right })
}

pub(super) fn head_map(m: &cpattn_head_map, q: &RawTensor) -> Result<HeadMap> {
    if m.q_offset.checked_add(q.heads).is_none() {
        return Err(Error::invalid("heads.q_offset", m.q_offset, format!("at most {}", u32::MAX - q.heads)));
    }
    Ok(HeadMap { q_offset: m.q_offset, kv_offset: m.kv_offset, group: m.group })
}

/// Rows by themselves.
///
/// # Safety
/// `rows` is null or `count` long, as long as the result lives.
pub(super) unsafe fn rows<'a>(rows: *const cpattn_range, count: usize) -> Result<&'a [Range]> {
    let rows = given!(array("rows", rows, count));
    for (i, r) in rows.iter().enumerate() {
        range("rows", i, r)?;
    }
    // SAFETY: the layouts are equal, as asserted above.
    Ok(unsafe { core::slice::from_raw_parts(rows.as_ptr().cast::<Range>(), rows.len()) })
}
