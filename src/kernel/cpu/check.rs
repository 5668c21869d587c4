// SPDX-License-Identifier: MIT OR Apache-2.0
//! The checks of a call, made before it accesses memory. They allocate only to build an error.

use super::scratch::Dims;
use crate::call::{Attend, AttendBackward, Gradients, HeadMap, Range, Ranges, RawTensor, Score};
use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::kernel::check::{self, heads, stripe};
pub(super) use crate::kernel::check::{per_head, same_shape, sinks, slopes, tensor};
use alloc::format;

/// Checks that the rows of a range lie within `t`, and that `t` has memory.
fn rows(name: &'static str, t: &RawTensor, argument: &'static str, i: usize, range: &Range) -> Result<()> {
    if range.len == 0 {
        return Ok(());
    }
    if t.is_none() && t.dim > 0 {
        return Err(Error::invalid(name, "none", format!("a tensor: {argument}[{i}] needs it")));
    }
    let end = range.row.checked_add(i64::from(range.len));
    if range.row < 0 || end.is_none_or(|end| end as u64 > t.tokens) {
        return Err(Error::invalid(
            format!("{argument}[{i}].row"),
            format!("{} with len {}", range.row, range.len),
            format!("rows of {name}, which has {}", t.tokens),
        ));
    }
    Ok(())
}

/// Checks the parameters of a score in the type in which scores are computed. `Problem::check` has the same limits.
fn score(s: &Score, acc: Dtype) -> Result<()> {
    check::score(s)?;
    let (least, most) = match acc {
        Dtype::F64 => (f64::MIN_POSITIVE, f64::MAX),
        _ => (f64::from(f32::MIN_POSITIVE), f64::from(f32::MAX)),
    };
    if s.scale.abs() > most {
        return Err(Error::invalid("scale", format!("{:e}", s.scale), format!("at most {most:e}, the largest {acc}")));
    }
    if s.softcap > 0.0 && !(least..=most).contains(&s.softcap) {
        let expected = format!("{least:e} to {most:e} ({acc})");
        return Err(Error::invalid("softcap", format!("{:e}", s.softcap), expected).hint("0 means no softcap"));
    }
    Ok(())
}

fn ranges(r: &Ranges, k: &RawTensor, v: &RawTensor) -> Result<()> {
    for (i, x) in r.k.iter().enumerate() {
        stripe("ranges.k", i, x)?;
        rows("k", k, "ranges.k", i, x)?;
        rows("v", v, "ranges.k", i, x)?;
    }
    for (i, x) in r.q.iter().enumerate() {
        stripe("ranges.q", i, &x.range)?;
    }
    check::pairs(r, |_, _| Ok(()))
}

fn qkv(q: &RawTensor, k: &RawTensor, v: &RawTensor, map: &HeadMap) -> Result<Dims> {
    for (name, dim) in [("q.dim", q.dim), ("v.dim", v.dim)] {
        if dim == 0 {
            return Err(Error::invalid(name, 0, "at least 1"));
        }
    }
    tensor("k", k, k.heads, q.dim, q.dtype)?;
    tensor("v", v, k.heads, v.dim, q.dtype)?;
    heads(map, q.heads, k.heads)?;
    Ok(Dims { head_dim: q.dim, value_dim: v.dim, dtype: q.dtype })
}

pub(super) fn attend(c: &Attend) -> Result<Dims> {
    let dims = qkv(&c.q, &c.k, &c.v, &c.heads)?;
    let acc = c.q.dtype.accumulator();
    score(&c.score, acc)?;
    slopes(&c.alibi_slopes, c.q.heads, &c.ranges)?;
    sinks(&c.sinks, c.q.heads)?;
    per_head("max_logit", &c.max_logit, c.q.heads)?;
    let (heads, dim) = (c.q.heads, c.v.dim);
    let words = if c.running_lse.dim == 1 { 1 } else { 2 };
    let running = [("running", &c.running, dim, acc), ("running_lse", &c.running_lse, words, acc)];
    let finished = [("o", &c.o, dim, c.q.dtype), ("lse", &c.lse, 1, acc)];
    for (name, t, dim, dtype) in running.into_iter().chain(finished).filter(|(_, t, ..)| !t.is_none()) {
        tensor(name, t, heads, dim, dtype)?;
    }
    ranges(&c.ranges, &c.k, &c.v)?;
    check::dropout(&c.dropout, &c.ranges)?;
    for (i, x) in c.ranges.q.iter().enumerate() {
        rows("q", &c.q, "ranges.q", i, &x.range)?;
        let runs = x.mode.continues() || !x.mode.finishes();
        let wanted = running.into_iter().filter(|_| runs).chain(finished.into_iter().filter(|_| x.mode.finishes()));
        for (name, t, dim, _) in wanted {
            needed(name, t, dim, i, &x.range)?;
        }
    }
    c.ranges.one_writer(true, false)?;
    Ok(dims)
}

/// Checks an optional tensor that a range needs.
fn needed(name: &'static str, t: &RawTensor, dim: u32, i: usize, range: &Range) -> Result<()> {
    if range.len > 0 && t.is_none() {
        return Err(Error::invalid(name, "none", format!("a tensor of dim {dim}: the mode of ranges.q[{i}] needs it")));
    }
    rows(name, t, "ranges.q", i, range)
}

pub(super) fn backward(c: &AttendBackward) -> Result<Dims> {
    let dims = qkv(&c.q, &c.k, &c.v, &c.heads)?;
    let acc = c.q.dtype.accumulator();
    score(&c.score, acc)?;
    slopes(&c.alibi_slopes, c.q.heads, &c.ranges)?;
    tensor("d_o", &c.d_o, c.q.heads, c.v.dim, c.q.dtype)?;
    tensor("lse", &c.lse, c.q.heads, 1, acc)?;
    tensor("delta", &c.delta, c.q.heads, 1, acc)?;
    ranges(&c.ranges, &c.k, &c.v)?;
    check::dropout(&c.dropout, &c.ranges)?;
    for (i, x) in c.ranges.q.iter().enumerate() {
        for (name, t) in [("q", &c.q), ("d_o", &c.d_o), ("lse", &c.lse), ("delta", &c.delta)] {
            rows(name, t, "ranges.q", i, &x.range)?;
        }
    }
    if c.gradients != Gradients::Keys {
        tensor("dq", &c.dq, c.q.heads, c.q.dim, acc)?;
        for (i, x) in c.ranges.q.iter().enumerate() {
            rows("dq", &c.dq, "ranges.q", i, &x.range)?;
        }
    }
    if c.gradients != Gradients::Queries {
        let heads = if c.per_q_head { c.q.heads } else { c.k.heads };
        tensor("dk", &c.dk, heads, c.q.dim, acc)?;
        tensor("dv", &c.dv, heads, c.v.dim, acc)?;
        for (i, x) in c.ranges.k.iter().enumerate() {
            rows("dk", &c.dk, "ranges.k", i, x)?;
            rows("dv", &c.dv, "ranges.k", i, x)?;
        }
    }
    c.ranges.one_writer(c.gradients != Gradients::Keys, c.gradients != Gradients::Queries)?;
    Ok(dims)
}

pub(super) fn finish_rows(t: &RawTensor, name: &'static str, r: &[Range]) -> Result<()> {
    for (i, x) in r.iter().enumerate() {
        rows(name, t, "rows", i, x)?;
    }
    Ok(())
}
