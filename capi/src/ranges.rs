// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranges, heads and scores, as the kernels take them.
//!
//! Ranges, heads and scores are the crate's own structs, and lists of them are not copied, unless the program was
//! compiled with another header and its q ranges or pairs have another size. A q range has its mode as a number, which
//! is checked before the list is read as the crate's: there it is a value of an enum. Positions are checked too, since
//! arithmetic with them must not overflow.

use super::{
    input::{Element, array, not_one_of, sized_array},
    problem::window,
};
pub use cpattn::call::{
    Band as cpattn_band, HeadMap as cpattn_head_map, Pair as cpattn_pair, Range as cpattn_range, Score as cpattn_score,
};
use cpattn::{
    Error, Result,
    call::{Mode, QRange, Ranges, RawTensor},
};

const MODES: [&str; 4] = ["CPATTN_FIRST", "CPATTN_MERGE", "CPATTN_LAST", "CPATTN_ONLY"];

/// Positions and windows beyond this are a mistake; within it, no sum of a few of them overflows.
const FAR: u64 = 1 << 40;

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

same_layout!(
    cpattn_q_range, QRange:
    range = range, document = document, keys_begin = keys_begin, keys_end = keys_end, mode = mode
);

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_ranges {
    pub q: *const cpattn_q_range,
    pub q_count: usize,
    pub k: *const cpattn_range,
    pub k_count: usize,
    pub pairs: *const cpattn_pair,
    pub pair_count: usize,
    pub bands: *const cpattn_band,
    pub band_count: usize,
}

// SAFETY: declared so, of integers.
unsafe impl Element for cpattn_q_range {
    const FIRST: usize = 56;
}

// SAFETY: declared so, of integers.
unsafe impl Element for cpattn_pair {
    const FIRST: usize = 8;
}

/// The sizes of q ranges and of pairs in the program's arrays; 0 for those of the first header that had them.
#[derive(Clone, Copy)]
pub(super) struct ElementSizes {
    pub q_range: usize,
    pub pair: usize,
}

/// The arrays of a program with other sizes, in ours.
#[derive(Default)]
pub(super) struct RangeCopies {
    q: Vec<cpattn_q_range>,
    pairs: Vec<cpattn_pair>,
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

/// A band whose sums with positions do not overflow.
fn band(i: usize, b: &cpattn_band) -> Result<()> {
    if b.shift.unsigned_abs() > 4 * FAR {
        return Err(Error::invalid(format!("ranges.bands[{i}].shift"), b.shift, "within ±2^42"));
    }
    Ok(())
}

/// # Safety
/// The pointers of `r` are null or as long as its counts and `sizes` say, as long as the result lives.
pub(super) unsafe fn ranges<'a>(
    r: &cpattn_ranges, sizes: ElementSizes, copies: &'a mut RangeCopies,
) -> Result<Ranges<'a>> {
    let (q_size, pair_size) = (("args.q_range_size", sizes.q_range), ("args.pair_size", sizes.pair));
    let (q, k) =
        given!(sized_array("ranges.q", r.q, r.q_count, q_size, &mut copies.q), array("ranges.k", r.k, r.k_count));
    let pairs = given!(sized_array("ranges.pairs", r.pairs, r.pair_count, pair_size, &mut copies.pairs));
    let bands = given!(array("ranges.bands", r.bands, r.band_count));
    for (i, q) in q.iter().enumerate() {
        range("ranges.q", i, &q.range)?;
        if q.mode > Mode::Only as u8 {
            return Err(not_one_of(format!("ranges.q[{i}].mode"), q.mode.into(), MODES.into_iter()));
        }
        if q.reserved != [0; 7] {
            return Err(Error::invalid(format!("ranges.q[{i}].reserved"), "set", "0"));
        }
    }
    for (i, k) in k.iter().enumerate() {
        range("ranges.k", i, k)?;
    }
    bands.iter().enumerate().try_for_each(|(i, b)| band(i, b))?;
    // SAFETY: the layouts are equal (asserted above), and every mode is one of the enum's (just checked).
    let q = unsafe { core::slice::from_raw_parts(q.as_ptr().cast::<QRange>(), q.len()) };
    Ok(Ranges { q, k, pairs, bands })
}

/// Refuses windows that no mask has.
pub(super) fn score(s: cpattn_score) -> Result<cpattn_score> {
    window("score.window_left", s.window_left)?;
    window("score.window_right", s.window_right)?;
    Ok(s)
}

/// Refuses heads that cannot be numbered.
pub(super) fn head_map(m: cpattn_head_map, q: &RawTensor) -> Result<cpattn_head_map> {
    if m.q_offset.checked_add(q.heads).is_none() {
        return Err(Error::invalid("heads.q_offset", m.q_offset, format!("at most {}", u32::MAX - q.heads)));
    }
    Ok(m)
}

/// Rows by themselves.
///
/// # Safety
/// `rows` is null or `count` long, as long as the result lives.
pub(super) unsafe fn rows<'a>(rows: *const cpattn_range, count: usize) -> Result<&'a [cpattn_range]> {
    let rows = given!(array("rows", rows, count));
    for (i, r) in rows.iter().enumerate() {
        range("rows", i, r)?;
    }
    Ok(rows)
}
