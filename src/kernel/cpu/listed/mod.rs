// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attention over listed keys: each q row attends to those keys of its ranges that a list names.
//!
//! A call is any call of [`attend`](super::attend) or [`attend_backward`](super::attend_backward), so one of several
//! over the parts of a sequence too. Of the positions that a row lists, it takes those that the call's k ranges hold:
//! the others are in another call. Each q row becomes a range of its own, whose keys are found through a table in the
//! forward and copied one after another in the backward. So the kernels are those of dense attention, and the masked
//! dense result is the same number. Rows are taken in parts, so that tables and copies need little memory.
//!
//! Positions are within the mask and occur once in a row: whoever takes the lists from a caller checks it.

mod heads;
mod lists;
mod rows;

use super::{Scratch, attend, attend_backward, attend_through};
use crate::call::{Attend, AttendBackward, Band, Gradients, RawTensor, Score};
use crate::error::Result;
use heads::head_groups;
pub(crate) use lists::KeyLists;
pub(crate) use rows::ListScratch;
use rows::{NextPart, add_rows, bytes_of_row, clear_rows};

/// Entries of a part's table, unless one row has more.
const TABLE: usize = 1 << 16;
/// Bytes of a part's copies, unless those of one row are more.
const COPIES: usize = 16 << 20;

/// The score of a call whose keys are listed: the lists are within its window.
fn without_window(score: Score) -> Score {
    Score { window_left: i64::MAX, window_right: i64::MAX, ..score }
}

/// [`attend`] over listed keys.
///
/// # Errors
/// As [`attend`].
///
/// # Safety
/// As [`attend`], of the listed rows of k and v.
pub(crate) unsafe fn attend_listed(
    call: &Attend,
    lists: &KeyLists,
    room: &mut ListScratch,
    scratch: &mut Scratch,
) -> Result<()> {
    debug_assert!(!call.aligned && call.ranges.bands.iter().all(|band| *band == Band::WHOLE));
    // What depends on a key's position needs a range for each key.
    let each = !call.alibi_slopes.is_none() || call.dropout.is_some();
    for group in head_groups(&call.heads, call.q.heads, call.k.heads, lists) {
        let of = group.attend(call);
        let entry = [of.k, of.v].iter().map(bytes_of_row).sum::<usize>();
        let most = if call.dropout.is_some() { COPIES / entry.max(1) } else { TABLE };
        let mut cursor = NextPart::default();
        while room.fill(&call.ranges, lists, group.list, each, most, &mut cursor) {
            let copied = call.dropout.is_some().then(|| {
                let [k, v, ..] = room.reserve([of.k, of.v, RawTensor::NONE, RawTensor::NONE]);
                // SAFETY: the table has rows of k and v, which are valid; the copies have as many rows as the table.
                unsafe { [room.copy(&of.k, k), room.copy(&of.v, v)] }
            });
            let (score, ranges) = (without_window(call.score), room.ranges());
            match copied {
                // Which pairs are dropped depends on rows of ranges, which a table would change.
                // SAFETY: the contract; the copies are valid until the next part.
                Some([k, v]) => unsafe { attend(&Attend { k, v, score, ranges, ..of }, scratch) }?,
                // SAFETY: the contract; every entry of the table is a row of k and v.
                None => unsafe { attend_through(&Attend { score, ranges, ..of }, room.table(), scratch) }?,
            }
        }
    }
    Ok(())
}

/// [`attend_backward`] over listed keys: rows of k ranges that no row lists get zeros, or nothing is added to them.
/// Each element is added up in the order of the q rows.
///
/// # Errors
/// As [`attend_backward`].
///
/// # Safety
/// As [`attend_backward`], of the listed rows of k and v.
pub(crate) unsafe fn attend_backward_listed(
    call: &AttendBackward,
    lists: &KeyLists,
    room: &mut ListScratch,
    scratch: &mut Scratch,
) -> Result<()> {
    debug_assert!(!call.aligned && call.ranges.bands.iter().all(|band| *band == Band::WHOLE));
    let keys = call.gradients != Gradients::Queries;
    if keys && !call.accumulate_keys {
        // SAFETY: the rows of the k ranges are valid for writes (the contract).
        unsafe { [call.dk, call.dv].iter().for_each(|t| clear_rows(t, call.ranges.k)) };
    }
    let each = !call.alibi_slopes.is_none() || call.dropout.is_some();
    for group in head_groups(&call.heads, call.q.heads, call.k.heads, lists) {
        let of = group.backward(call);
        let entry = [of.k, of.v, of.dk, of.dv].iter().map(bytes_of_row).sum::<usize>();
        let mut cursor = NextPart::default();
        while room.fill(&call.ranges, lists, group.list, each, COPIES / entry.max(1), &mut cursor) {
            let [k, v, dk, dv] = room.reserve([of.k, of.v, of.dk, of.dv]);
            // SAFETY: the table has rows of k and v, which are valid; the copies have as many rows as the table.
            let [k, v] = unsafe { [room.copy(&of.k, k), room.copy(&of.v, v)] };
            let (score, ranges) = (without_window(call.score), room.ranges());
            let part = AttendBackward { k, v, dk, dv, accumulate_keys: false, score, ranges, ..of };
            // SAFETY: the contract; the copies are valid until the next part, and nothing else uses them.
            unsafe { attend_backward(&part, scratch) }?;
            if keys {
                // SAFETY: the table has rows of dk and dv, which are valid (the contract).
                unsafe { [(of.dk, dk), (of.dv, dv)].iter().for_each(|(to, from)| add_rows(to, from, room.table())) };
            }
        }
    }
    Ok(())
}
