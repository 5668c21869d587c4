// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks whether two tensors overlap, and whether a tensor overlaps itself.
//!
//! Hulls are not enough: dq, dk and dv cut from one `[tokens, 3, heads, dim]` buffer have overlapping hulls and no byte
//! in common. A tensor is a set of equal rows at `base + i · token_stride + j · head_stride`. Two rows meet when their
//! distance is smaller than a row, so two tensors meet when some sum of stride multiples, each multiple within bounds,
//! falls into a short interval. Strides are taken from the largest down. For each stride, the search tries only the
//! multiples from which the smaller strides can still reach the interval. For nested layouts these are one or two, the
//! last stride is a division, and equal strides of both tensors count as one. Common divisors settle most of the rest
//! without a search.
//!
//! The search counts its steps and gives up after [`BUDGET`] of them. This needs strides that neither nest nor agree
//! nor divide, and extents in the tens of thousands. Such a pair is refused, with an error that names this reason: the
//! caller can copy a tensor, but an unnoticed overlap would give a wrong result. All arithmetic is in bytes and in
//! `i128`, where it cannot wrap: 64-bit strides are bounded by [`hull`] first. Nothing here allocates unless it
//! refuses, and no memory is touched.

use super::extent::{hull, is_empty, part, refuse_unaddressable};
use crate::{
    call::RawTensor,
    error::{Error, Result},
};
use alloc::format;

/// Steps after which a search gives up: some milliseconds at worst.
const BUDGET: u32 = 1 << 16;

/// The answer to whether memory is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SharesBytes {
    /// No byte is shared.
    No,
    /// Some byte is shared.
    Yes,
    /// The strides are too irregular to tell within the budget.
    Undecided,
}

/// A stride, with bounds of its multiples.
#[derive(Clone, Copy)]
struct Term {
    least: i128,
    most: i128,
    stride: i128,
}

impl Term {
    const NONE: Self = Self { least: 0, most: 0, stride: 0 };

    /// The same sums, with a positive stride.
    fn positive(self) -> Self {
        if self.stride < 0 { Self { least: -self.most, most: -self.least, stride: -self.stride } } else { self }
    }
}

/// Whether a sum of one multiple per term lies in `low..=high`; terms by falling stride, every stride positive.
fn reaches(low: i128, high: i128, terms: &[Term], budget: &mut u32) -> SharesBytes {
    let Some((term, rest)) = terms.split_first() else {
        return if low <= 0 && 0 <= high { SharesBytes::Yes } else { SharesBytes::No };
    };
    let rest_least: i128 = rest.iter().map(|t| t.least * t.stride).sum();
    let rest_most: i128 = rest.iter().map(|t| t.most * t.stride).sum();
    // Floor and ceiling: `div_euclid` by a positive number rounds down.
    let first = term.least.max(-((rest_most - low).div_euclid(term.stride)));
    let last = term.most.min((high - rest_least).div_euclid(term.stride));
    if rest.is_empty() {
        return if first <= last { SharesBytes::Yes } else { SharesBytes::No };
    }
    let mut multiple = first;
    while multiple <= last {
        if *budget == 0 {
            return SharesBytes::Undecided;
        }
        *budget -= 1;
        let taken = multiple * term.stride;
        match reaches(low - taken, high - taken, rest, budget) {
            SharesBytes::No => multiple += 1,
            answer => return answer,
        }
    }
    SharesBytes::No
}

/// Sorts, merges equal strides, drops terms that are always 0, and searches.
fn search(low: i128, high: i128, mut terms: [Term; 4]) -> SharesBytes {
    for term in &mut terms {
        *term = term.positive();
        if term.stride == 0 {
            *term = Term::NONE;
        }
    }
    terms.sort_unstable_by_key(|t| -t.stride);
    let mut count = 0;
    for i in 0..terms.len() {
        let term = terms[i];
        if count > 0 && terms[count - 1].stride == term.stride {
            terms[count - 1].least += term.least;
            terms[count - 1].most += term.most;
        } else if term.stride > 0 {
            terms[count] = term;
            count += 1;
        }
    }
    let terms = &terms[..count];
    if divisors_exclude(low, high, terms) {
        return SharesBytes::No;
    }
    let mut budget = BUDGET;
    reaches(low, high, terms, &mut budget)
}

/// Whether divisibility alone shows that no sum lies in `low..=high`: the larger strides only make multiples of their
/// common divisor, and the smaller ones shift these by at least their least sum and at most their largest sum.
fn divisors_exclude(low: i128, high: i128, terms: &[Term]) -> bool {
    let mut divisor = 0;
    (0..terms.len()).any(|i| {
        divisor = common_divisor(divisor, terms[i].stride);
        let rest = &terms[i + 1..];
        let from = low - rest.iter().map(|t| t.most * t.stride).sum::<i128>();
        let to = high - rest.iter().map(|t| t.least * t.stride).sum::<i128>();
        to.div_euclid(divisor) * divisor < from
    })
}

fn common_divisor(a: i128, b: i128) -> i128 {
    if a == 0 { b } else { common_divisor(b % a, a) }
}

/// Whether two (token, head) rows of a tensor share an element. Exact when tokens or heads are at most [`BUDGET`], or
/// one dimension nests in the other. The tensor must have a [`hull`].
pub(super) fn within(t: &RawTensor) -> SharesBytes {
    if is_empty(t) {
        return SharesBytes::No;
    }
    let (tokens, heads, dim) = (i128::from(t.tokens), i128::from(t.heads), i128::from(t.dim));
    let token = |least| Term { least, most: tokens - 1, stride: t.token_stride.into() };
    let head = |least| Term { least, most: heads - 1, stride: t.head_stride.into() };
    // Every pair of different rows, once: an earlier and a later token with any two heads, or one token with an
    // earlier and a later head.
    if tokens > 1 {
        let answer = search(1 - dim, dim - 1, [token(1), head(1 - heads), Term::NONE, Term::NONE]);
        if answer != SharesBytes::No {
            return answer;
        }
    }
    if heads > 1 { search(1 - dim, dim - 1, [head(1), Term::NONE, Term::NONE, Term::NONE]) } else { SharesBytes::No }
}

/// A tensor as bytes, rows joined where they leave no gap.
fn bytes(t: &RawTensor) -> (i128, [Term; 2]) {
    let size = t.dtype.size() as i128;
    let mut length = i128::from(t.dim) * size;
    let mut terms = [
        Term { least: 0, most: i128::from(t.tokens) - 1, stride: i128::from(t.token_stride) * size },
        Term { least: 0, most: i128::from(t.heads) - 1, stride: i128::from(t.head_stride) * size },
    ];
    if terms[0].stride.abs() < terms[1].stride.abs() {
        terms.swap(0, 1);
    }
    for i in [1, 0] {
        let term = terms[i];
        if term.most == 0 {
            terms[i] = Term::NONE;
        } else if (0..=length).contains(&term.stride) {
            length += term.most * term.stride;
            terms[i] = Term::NONE;
        }
    }
    (length, terms)
}

/// Whether two tensors share a byte. Both must have a [`hull`].
pub(super) fn between(a: &RawTensor, b: &RawTensor) -> SharesBytes {
    let (Some(hull_a), Some(hull_b)) = (hull(a), hull(b)) else { return SharesBytes::Undecided };
    if hull_a.is_empty() || hull_b.is_empty() || hull_a.end <= hull_b.start || hull_b.end <= hull_a.start {
        return SharesBytes::No;
    }
    let (length_a, terms_a) = bytes(a);
    let (length_b, terms_b) = bytes(b);
    // Row at x of a and row at y of b share a byte when -length_b < y - x < length_a.
    let distance = b.ptr.addr() as i128 - a.ptr.addr() as i128;
    let minus = |t: Term| Term { least: -t.most, most: -t.least, ..t };
    search(
        1 - length_b - distance,
        length_a - 1 - distance,
        [minus(terms_a[0]), minus(terms_a[1]), terms_b[0], terms_b[1]],
    )
}

/// Refuses strides by which a tensor that is written would share elements between its own rows. The tensor must have
/// a [`hull`]; its name may be empty.
pub(super) fn refuse_within(name: &str, t: &RawTensor) -> Result<()> {
    let answer = within(t);
    if answer == SharesBytes::No {
        return Ok(());
    }
    let (ts, hs, dim) = (t.token_stride, t.head_stride, i64::from(t.dim));
    // The smallest strides at which a token encloses its heads, and a head its tokens.
    let by_token = i128::from(t.heads - 1) * i128::from(hs.abs()) + i128::from(dim);
    let by_head = i128::from(t.tokens - 1) * i128::from(ts.abs()) + i128::from(dim);
    let error = if t.heads > 1 && hs.abs() < dim {
        Error::invalid(part(name, "head_stride"), hs, format!("at least {dim}, the length of a row"))
    } else if t.tokens > 1 && ts.abs() < dim {
        Error::invalid(part(name, "token_stride"), ts, format!("at least {by_token}, the extent of the heads"))
    } else {
        Error::invalid(
            part(name, "token_stride"),
            format!("{ts} with head_stride {hs}"),
            format!("a token_stride of at least {by_token}, or a head_stride of at least {by_head}"),
        )
    };
    Err(match answer {
        SharesBytes::Undecided => error.hint("the rows may share elements, and the strides are too irregular to tell"),
        _ => error.hint("rows of a tensor that is written must not share elements"),
    })
}

/// Refuses a set of arguments in which one that is written shares memory with another, or with itself.
///
/// Each entry is an argument's name, its tensor, and whether the call writes it. Tensors without elements pass, and so
/// do any that are only read. Interleaved tensors (slices of one fused `[tokens, 3, heads, dim]` buffer, parts of one
/// `[heads, tokens]` buffer) are told apart exactly. Strides that neither nest nor agree may take too long to tell
/// apart; they are refused, and the hint says so.
///
/// # Errors
///
/// [`Error::Invalid`] naming both arguments, or the stride by which a written tensor overlaps itself or leaves the
/// address space, or an argument that has elements at a null address.
pub fn disjoint(named: &[(&'static str, RawTensor, bool)]) -> Result<()> {
    for (i, (name, tensor, written)) in named.iter().enumerate() {
        if is_empty(tensor) {
            continue;
        }
        refuse_unaddressable(name, tensor)?;
        if *written {
            refuse_within(name, tensor)?;
        }
        for (other_name, other, other_written) in &named[..i] {
            if is_empty(other) || !(*written || *other_written) {
                continue;
            }
            let answer = between(tensor, other);
            if answer == SharesBytes::No {
                continue;
            }
            // The error names the written tensor first; if both are written, the later one.
            let (blamed, with) = if *written { (*name, *other_name) } else { (*other_name, *name) };
            return Err(match answer {
                SharesBytes::Undecided => Error::invalid(
                    blamed,
                    format!("memory interleaved with {with} by strides too irregular to tell apart"),
                    format!("memory that shares no byte with {with}"),
                )
                .hint("use separate buffers, or equal token strides"),
                _ => Error::invalid(
                    blamed,
                    format!("memory that overlaps {with}"),
                    format!("memory that shares no byte with {with}"),
                )
                .hint("a tensor that is written needs memory of its own"),
            });
        }
    }
    Ok(())
}
