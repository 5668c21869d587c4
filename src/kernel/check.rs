// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rules for the arguments of a call that do not depend on the backend. They allocate only to build an error.
//!
//! A backend adds its own: each that rows lie within their tensors, CUDA also alignment, the device of an address, and
//! how far positions may reach.

use alloc::{format, string::String};

use crate::{
    call::{Band, Delta, Dropout, HeadMap, QRange, Range, Ranges, RawTensor, Score},
    element::Dtype,
    error::{Error, Result},
};

/// Heads, dim and dtype of a tensor.
pub(super) fn tensor(name: &str, t: &RawTensor, heads: u32, dim: u32, dtype: Dtype) -> Result<()> {
    if t.heads != heads {
        return Err(Error::invalid(format!("{name}.heads"), t.heads, heads));
    }
    if t.dim != dim {
        return Err(Error::invalid(format!("{name}.dim"), t.dim, dim));
    }
    if t.dtype != dtype {
        return Err(Error::invalid(format!("{name}.dtype"), t.dtype, dtype));
    }
    Ok(())
}

/// lse and its gradient in a call of delta: none of them, lse alone, or both, as `each` accepts them, with the rows of
/// o.
pub(super) fn lse_gradient(d: &Delta, each: impl Fn(&'static str, &RawTensor) -> Result<()>) -> Result<()> {
    // Without rows, lse may be an empty tensor, which has no address.
    if !d.d_lse.is_none() && d.lse.is_none() && d.o.tokens > 0 {
        return Err(Error::invalid("lse", "none", "the final lse, since d_lse is not read where lse is −∞"));
    }
    for (name, t) in [("lse", &d.lse), ("d_lse", &d.d_lse)].into_iter().filter(|(_, t)| !t.is_none()) {
        each(name, t)?;
        if t.tokens != d.o.tokens {
            return Err(Error::invalid(format!("{name}.tokens"), t.tokens, d.o.tokens));
        }
    }
    Ok(())
}

/// A table of one f32 for each head, `[1, heads, 1]`, or nothing.
pub(super) fn per_head(name: &str, t: &RawTensor, heads: u32) -> Result<()> {
    if t.is_none() {
        return Ok(());
    }
    if t.tokens != 1 {
        return Err(Error::invalid(format!("{name}.tokens"), t.tokens, "1: there is one number for each head"));
    }
    tensor(name, t, heads, 1, Dtype::F32)
}

/// Slopes of ALiBi: nothing, one for each head, or a row of these for each document of the q ranges.
pub(super) fn slopes(t: &RawTensor, heads: u32, r: &Ranges) -> Result<()> {
    if t.is_none() {
        return Ok(());
    }
    tensor("alibi_slopes", t, heads, 1, Dtype::F32)?;
    let missing = |q: &QRange| t.tokens != 1 && u64::from(q.range.doc) >= t.tokens && q.range.len > 0;
    match r.q.iter().position(missing) {
        Some(i) => {
            let expected = format!("below {}, the rows of alibi_slopes", t.tokens);
            Err(Error::invalid(format!("ranges.q[{i}].range.doc"), r.q[i].range.doc, expected)
                .hint("give slopes a row for each document, or one row for all of them"))
        }
        None => Ok(()),
    }
}

/// The sinks of each head, `[1, heads, n]` f32, or nothing.
pub(super) fn sinks(t: &RawTensor, heads: u32) -> Result<()> {
    if t.is_none() {
        return Ok(());
    }
    if t.tokens != 1 {
        return Err(Error::invalid("sinks.tokens", t.tokens, "1: there is one row of sinks for each head"));
    }
    if t.dim == 0 {
        return Err(Error::invalid("sinks.dim", 0, "at least 1: the sinks of each head"));
    }
    tensor("sinks", t, heads, t.dim, Dtype::F32)
}

/// Every q head finds its kv head.
pub(super) fn heads(map: &HeadMap, q: u32, kv: u32) -> Result<()> {
    if map.group == 0 {
        return Err(Error::invalid("heads.group", 0, "at least 1"));
    }
    let of = |h: u64| (u64::from(map.q_offset) + h) / u64::from(map.group);
    let (first, end) = (of(0), of(u64::from(q).saturating_sub(1)) + 1);
    let (have, have_end) = (u64::from(map.kv_offset), u64::from(map.kv_offset) + u64::from(kv));
    if q > 0 && (first < have || end > have_end) {
        return Err(Error::invalid(
            "k.heads",
            format!("kv heads {have}..{have_end}"),
            format!("to hold {first}..{end}"),
        )
        .hint("q head h of the call reads kv head (q_offset + h) / group"));
    }
    Ok(())
}

/// Windows that a [`Mask`](crate::Mask) can have, and numbers that are finite in f64: the limits of plans, for single
/// calls too.
pub(super) fn score(s: &Score) -> Result<()> {
    for (name, limit) in [("window_left", s.window_left), ("window_right", s.window_right)] {
        if limit != i64::MAX && !(0..=i64::from(u32::MAX)).contains(&limit) {
            let expected = format!("0 to {}, or i64::MAX for no limit", u32::MAX);
            return Err(Error::invalid(name, limit, expected));
        }
    }
    if !s.scale.is_finite() {
        return Err(Error::invalid("scale", s.scale, "a finite number"));
    }
    if !(s.softcap >= 0.0 && s.softcap.is_finite()) {
        return Err(Error::invalid("softcap", s.softcap, "a finite number above 0, or 0 for none"));
    }
    Ok(())
}

/// The stripe of a range.
pub(super) fn stripe(argument: &str, i: usize, r: &Range) -> Result<()> {
    if r.block == 0 || r.period < r.block {
        return Err(Error::invalid(
            format!("{argument}[{i}]"),
            format!("block {} and period {}", r.block, r.period),
            "1 <= block <= period",
        ));
    }
    Ok(())
}

/// The largest shift of a band.
const SHIFT: i64 = 1 << 42;
/// The largest position, either way, that a band is computed with.
const POSITION: i64 = 1 << 61;

/// The shifts of bands. Their other limits may be any numbers: a band may allow nothing.
fn bands(bands: &[Band]) -> Result<()> {
    match bands.iter().position(|band| !(-SHIFT..=SHIFT).contains(&band.shift)) {
        Some(i) => Err(Error::invalid(format!("ranges.bands[{i}].shift"), bands[i].shift, "within ±2^42")),
        None => Ok(()),
    }
}

/// Positions of a range that has a band with limits: sums with a shift stay in range.
fn positions(argument: &str, i: usize, r: &Range) -> Result<()> {
    let (most, block) = (r.len.saturating_sub(1), r.block.max(1));
    let (blocks, rest) = (most / block, most % block);
    let last = i128::from(r.pos) + i128::from(blocks) * i128::from(r.period) + i128::from(rest);
    if r.pos < -POSITION || last > i128::from(POSITION) {
        let expected = "positions within ±2^61 under a band with limits";
        return Err(Error::invalid(
            format!("ranges.{argument}[{i}]"),
            format!("positions {}..={last}", r.pos),
            expected,
        ));
    }
    Ok(())
}

/// Pairs lie within the ranges, in one document each unless their band has limits, and as `each` accepts them; then the
/// lengths of documents.
pub(super) fn pairs(r: &Ranges, each: impl Fn(&Range, &Range) -> Result<()>) -> Result<()> {
    bands(r.bands)?;
    for (i, q) in r.q.iter().enumerate() {
        let (begin, end) = (q.keys_begin as usize, q.keys_end as usize);
        let Some(pairs) = r.pairs.get(begin..end) else {
            return Err(Error::invalid(
                format!("ranges.q[{i}].keys"),
                format!("{begin}..{end}"),
                format!("entries of pairs, which has {}", r.pairs.len()),
            ));
        };
        for &pair in pairs {
            let refused = |part: &str, found: u32, of: &str, n: usize| {
                let expected = format!("an index of ranges.{of}, which has {n}");
                Err(Error::invalid(format!("ranges.pairs of q range {i}: {part}"), found, expected))
            };
            let Some(k) = r.k.get(pair.k as usize) else { return refused("k", pair.k, "k", r.k.len()) };
            let Some(band) = r.bands.get(pair.band as usize) else {
                return refused("band", pair.band, "bands", r.bands.len());
            };
            if k.doc != q.range.doc && *band == Band::WHOLE {
                let expected = format!("{}, the document of q range {i}, under a band without limits", q.range.doc);
                return Err(Error::invalid(format!("ranges.k[{}].doc", pair.k), k.doc, expected));
            }
            if *band != Band::WHOLE {
                positions("q", i, &q.range)?;
                positions("k", pair.k as usize, k)?;
            }
            each(&q.range, k)?;
        }
    }
    documents(r)
}

/// Every row of the ranges is a token of the packed batch, whose places fit the counter of the hash.
pub(super) fn dropout(dropout: &Option<Dropout>, r: &Ranges) -> Result<()> {
    let Some(dropout) = dropout else { return Ok(()) };
    let q = r.q.iter().map(|q| &q.range).enumerate().map(|x| ("q", x, dropout.q_tokens));
    let k = r.k.iter().enumerate().map(|x| ("k", x, dropout.k_tokens));
    for (name, (i, range), tokens) in q.chain(k).filter(|(_, (_, range), _)| range.len > 0) {
        let Some(&base) = tokens.get(range.doc as usize) else {
            let expected = format!("below {}, the length of dropout.{name}_tokens", tokens.len());
            return Err(Error::invalid(format!("ranges.{name}[{i}].doc"), range.doc, expected));
        };
        let base = i128::from(base);
        let (first, last) = (base + i128::from(range.pos), base + range.wide_last());
        if first < 0 || last > i128::from(u32::MAX) {
            let expected = format!("tokens 0 to {} of the packed batch: dropout is by token", u32::MAX);
            return Err(Error::invalid(format!("ranges.{name}[{i}]"), format!("tokens {first}..={last}"), expected));
        }
    }
    Ok(())
}

/// Refuses lengths of a document that are shorter than a range of it, or that are not the same in all its q ranges, and
/// lengths in ranges that are in no order of documents, where the ranges of one would have to be searched for.
fn documents(r: &Ranges) -> Result<()> {
    if r.q.iter().all(|q| q.document == [0; 2]) {
        return Ok(());
    }
    for (i, q) in r.q.iter().enumerate() {
        let before = i.checked_sub(1).map(|at| (at, &r.q[at]));
        let refused =
            |expected| Err(Error::invalid(format!("ranges.q[{i}].document"), format!("{:?}", q.document), expected));
        if let Some((at, b)) = before.filter(|(_, b)| b.range.doc > q.range.doc) {
            let expected = format!("at least {}, as in ranges.q[{at}]", b.range.doc);
            return Err(Error::invalid(format!("ranges.q[{i}].range.doc"), q.range.doc, expected).hint(
                "lengths of documents need q ranges in the order of documents: sort them, or give [0, 0] in all",
            ));
        }
        if let Some((at, b)) = before.filter(|(_, b)| b.range.doc == q.range.doc && b.document != q.document) {
            return refused(format!("{:?}, as in ranges.q[{at}] of the same document", b.document));
        }
        if q.document == [0; 2] {
            continue;
        }
        if q.range.len > q.document[0] {
            let len = q.range.len;
            return refused(format!("at least {len} tokens of q, the rows of its range, or [0, 0] if not given"));
        }
        let keys = &r.pairs[q.keys_begin as usize..q.keys_end as usize];
        let longer = |k: &Range| k.doc == q.range.doc && k.len > q.document[1];
        if let Some(k) = keys.iter().map(|pair| pair.k).find(|&k| longer(&r.k[k as usize])) {
            let len = r.k[k as usize].len;
            return refused(format!("at least {len} tokens of k, the rows of ranges.k[{k}], or [0, 0] if not given"));
        }
    }
    Ok(())
}

/// Equal tokens, heads and dim.
pub(super) fn same_shape(name: impl Fn() -> String, t: &RawTensor, of: &RawTensor) -> Result<()> {
    if (t.tokens, t.heads, t.dim) == (of.tokens, of.heads, of.dim) {
        return Ok(());
    }
    let shape = |t: &RawTensor| format!("[{}, {}, {}]", t.tokens, t.heads, t.dim);
    Err(Error::invalid(format!("{} [tokens, heads, dim]", name()), shape(t), shape(of)))
}
