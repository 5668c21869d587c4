// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks the outputs: every row of every output is final, and made of exactly the pairs that the mask allows, each
//! once.

use alloc::{format, string::String, vec::Vec};

use super::{
    cell::{Cell, What},
    contributions::Atom,
    execute::Prover,
    geometry::{NO_WINDOW, runs},
    listed_keys::Span,
    memory::side_of,
    parallel,
    promise::{TokenRun, all_heads, token_runs},
    reaches::{BandKey, band_key},
};
use crate::{
    batch::Side,
    call::{Band, Range},
    error::Result,
    schedule::{Buf, BufferView, Direction, Form, TensorId},
};

/// Checks all ranks, on at most `threads` threads; returns the number of (q, k, q head) triples attended.
pub(super) fn check(p: &Prover, direction: Direction, threads: usize) -> Result<u128> {
    tokens_are_dealt_once(p)?;
    let of_rank = |r: usize, (): &mut ()| {
        p.memories[r].check_all_read()?;
        let complete = match direction {
            Direction::Forward => {
                [TensorId::O, TensorId::Lse].into_iter().try_for_each(|t| tensor(p, r, t, What::Final(t)))
            }
            Direction::Backward => [TensorId::Dq, TensorId::Dk, TensorId::Dv]
                .into_iter()
                .try_for_each(|t| tensor(p, r, t, What::Sum(t)))
                .and_then(|()| if p.plan.problem().sinks() { sinks(p, r) } else { Ok(()) }),
        };
        complete.map_err(|text| p.err(r, p.ranks[r].last(), text))
    };
    parallel::each(p.ranks.len(), threads, of_rank).into_iter().collect::<Result<()>>()?;
    // Each output is complete and has each pair once, so any further pairs were computed without need.
    let area = if p.listed.is_some() { listed_area(p) } else { p.plan.problem().area() };
    let needed = area * p.plan.problem().heads() as u128;
    let last = p.ranks[0].last();
    let wrong = |name: &str, met: u128| format!("calls meet {met} pairs for {name} where {needed} are allowed");
    if p.met_for_queries != needed {
        return Err(p.err(0, last, wrong("queries", p.met_for_queries)));
    }
    if direction == Direction::Backward && p.met_for_keys != needed {
        return Err(p.err(0, last, wrong("keys", p.met_for_keys)));
    }
    Ok(needed)
}

/// Checks that the ranks of the group have every token of the batch once.
pub(super) fn tokens_are_dealt_once(p: &Prover) -> Result<()> {
    for side in [Side::Q, Side::K] {
        let mut all: Vec<TokenRun> = p.ranks.iter().flat_map(|s| token_runs(p.plan, side, s.rank())).collect();
        all.sort_unstable();
        let end = all.iter().try_fold(0, |end, run| (run.token as usize == end).then_some(end + run.tokens as usize));
        if end != Some(p.plan.problem().batch().tokens(side)) {
            return Err(p.err(0, 0, format!("the ranks together do not hold every token of side {side:?} once")));
        }
    }
    Ok(())
}

/// One output of one rank.
fn tensor(p: &Prover, r: usize, tensor: TensorId, want: What) -> Result<(), String> {
    let side = side_of(tensor);
    let runs = token_runs(p.plan, side, p.ranks[r].rank());
    let (heads, group) = (all_heads(p.plan, side), p.plan.problem().group() as u32);
    let count: usize = runs.iter().map(|run| run.tokens as usize).sum();
    let view = BufferView::whole(Buf::User(tensor), count as u64, heads);
    let cells: Vec<u32> = p.memories[r].heads(&view).collect();
    let (mut first, mut runs) = (0, runs.into_iter());
    let mut rest = TokenRun::default();
    while first < count {
        while rest.tokens == 0 {
            rest = runs.next().expect("the rows are those of the runs");
        }
        let mut rows = alike(p, r, &view, rest, first as u64, side);
        let token = rest.token as usize;
        for &h in &cells {
            p.expect(r, &view, (first as u64, rows as u64), h, Cell::new(want, token as u32, h, 0))?;
        }
        // Adjacent heads usually have contributions of the same calls.
        let mut checked: Vec<Vec<u32>> = Vec::new();
        for &h in &cells {
            let cell = p.memories[r].at(&view, first as u64, h).0;
            let end = if p.whole_rows { heads } else { h + 1 };
            let q_heads = if side == Side::K { h * group..end * group } else { h..end };
            let atoms = p.lists.get(cell.list);
            // If a cell stands for all heads of a row, every contribution must be to all of them: checked below.
            let tell_apart = if p.whole_rows { 1 } else { q_heads.len() };
            for q_head in q_heads.clone().take(tell_apart) {
                let calls: Vec<u32> =
                    atoms.iter().filter(|a| (a.head..a.head + a.heads).contains(&q_head)).map(|a| a.call).collect();
                if !checked.contains(&calls) {
                    rows = exactly_once(p, side, token, rows, &calls).map_err(|text| {
                        format!("{} of token {token}, head {h} (q head {q_head}): {text}", tensor.name())
                    })?;
                    checked.push(calls);
                }
            }
            if let Some(a) = atoms.iter().find(|a| !q_heads.contains(&a.head) || a.head + a.heads > q_heads.end) {
                return Err(format!("{} of head {h} has a contribution for q head {}", tensor.name(), a.head));
            }
            if let Some(a) = atoms.iter().find(|a| p.whole_rows && a.heads as usize != q_heads.len()) {
                return Err(format!(
                    "{} has contributions for {} of {} q heads",
                    tensor.name(),
                    a.heads,
                    q_heads.len()
                ));
            }
            if p.plan.form() == Form::Ordered {
                in_order(p, &atoms, side, token)?;
            }
        }
        first += rows;
        rest = rest.from(rows as u32);
    }
    Ok(())
}

/// The number of rows of a run of tokens, from the first on, that are one run in every column and of one document. In
/// the ordered form 1, because order is checked token by token.
fn alike(p: &Prover, r: usize, view: &BufferView, of: TokenRun, first: u64, side: Side) -> usize {
    if p.plan.form() == Form::Ordered {
        return 1;
    }
    let memory = &p.memories[r];
    let run = memory.heads(view).map(|h| memory.at(view, first, h).1).min().unwrap_or(1);
    let batch = p.plan.problem().batch();
    let token = of.token as usize;
    let end = batch.document(side, batch.document_of(side, token)).end;
    (of.tokens as usize).min(run as usize).min(end - token)
}

/// The number of allowed pairs of q and k, over listed keys.
fn listed_area(p: &Prover) -> u128 {
    let wanted = |token| wanted(p, Side::Q, token).iter().map(|(_, a, e)| (e - a + 1) as u128).sum::<u128>();
    (0..p.plan.problem().batch().tokens(Side::Q)).map(wanted).sum()
}

/// The positions that a token meets.
fn wanted(p: &Prover, side: Side, token: usize) -> Vec<Span> {
    let (doc, pos) = place(p, side, token);
    let allowed = p.reaches.of(side, doc, pos, pos);
    let spans = allowed.filter_map(|of| span(p, side, (pos, 1), of.document, &of.limits));
    let Some(listed) = &p.listed else { return spans.collect() };
    let mut parts = Vec::new();
    spans.for_each(|span| listed.clip(p.plan, side, token, span, &mut parts));
    parts
}

/// A range of the other side and the band of the pair, seen from `side`.
type Partner<'a> = (&'a Range, Band);

/// The document and the position of a token.
fn place(p: &Prover, side: Side, token: usize) -> (u32, i64) {
    let batch = p.plan.problem().batch();
    let doc = batch.document_of(side, token);
    (doc as u32, token as i64 - batch.document(side, doc).start as i64 + batch.start(side, doc))
}

/// The positions of document `doc` of the other side that one of `tokens` positions from `pos` on may meet within
/// `limits`; `None` if there are none.
fn span(p: &Prover, side: Side, (pos, tokens): (i64, usize), doc: u32, limits: &Band) -> Option<Span> {
    let whole = p.plan.problem().batch().whole(side.other(), doc as usize);
    let (first, last) = (pos.max(limits.q_begin), pos.saturating_add(tokens as i64).min(limits.q_end) - 1);
    if first > last || whole.len == 0 {
        return None;
    }
    let low = first.saturating_add(limits.low).max(limits.k_begin).max(whole.pos);
    let high = last.saturating_add(limits.high).min(limits.k_end.saturating_sub(1)).min(whole.last());
    (low <= high).then_some((doc, low, high))
}

/// Checks that over all `calls` the token meets every allowed partner once. Returns for how many of the `rows` tokens
/// from it on this holds; these are tokens of one document, in the same calls.
fn exactly_once(p: &Prover, side: Side, token: usize, mut rows: usize, calls: &[u32]) -> Result<usize, String> {
    let window = p.window();
    let mut met: Vec<Partner> = Vec::new();
    for &c in calls {
        let Some((partners, tokens)) = p.calls.partners(c, side, token as u32) else {
            rows = 1;
            continue;
        };
        rows = rows.min(tokens);
        met.extend(partners.map(|(range, band)| {
            let limits = band.within(window);
            (range, if side == Side::Q { limits } else { limits.transposed() })
        }));
    }
    if rows > 1 && p.listed.is_none() && together(p, side, token, rows, &met) {
        return Ok(rows);
    }
    let pos = place(p, side, token).1;
    let met = met.iter().flat_map(|(range, limits)| {
        let (begin, end) = limits.keys(pos, NO_WINDOW);
        clipped(range, begin, end.saturating_sub(1))
    });
    tile(met.collect(), wanted(p, side, token)).map(|()| 1)
}

/// Whether the tokens from `token` on, which have the same partners in all calls, meet every allowed partner once. If
/// the answer is no, they may still do.
///
/// In each band their allowed intervals move forward from token to token. So if the ranges of a band have each position
/// once, from the begin of the first token's interval to the end of the last token's, then each token meets its own
/// interval once. Bands of calls are those of the problem, and the
/// bands of one pair of documents differ.
fn together(p: &Prover, side: Side, token: usize, rows: usize, met: &[Partner]) -> bool {
    let (doc, pos) = place(p, side, token);
    let last = pos.saturating_add(rows as i64 - 1);
    let mut spans: Vec<(u32, BandKey, Span)> = p
        .reaches
        .of(side, doc, pos, last)
        .filter_map(|of| {
            let span = span(p, side, (pos, rows), of.document, &of.limits)?;
            Some((of.document, band_key(&of.limits), span))
        })
        .collect();
    spans.sort_unstable();
    // Index of the span, first and last position.
    let mut runs: Vec<(usize, i64, i64)> = Vec::with_capacity(met.len());
    for (range, limits) in met {
        let key = (range.doc, band_key(limits));
        let at = spans.partition_point(|span| (span.0, span.1) < key);
        if let Some(&(.., of)) = spans.get(at).filter(|span| (span.0, span.1) == key) {
            runs.extend(clipped(range, of.1, of.2).map(|(_, a, e)| (at, a, e)));
        }
    }
    runs.sort_unstable();
    let mut rest = runs.as_slice();
    spans.iter().enumerate().all(|(at, &(.., (_, first, last)))| {
        let of_span = rest.iter().take_while(|run| run.0 == at).count();
        let (own, others) = rest.split_at(of_span);
        rest = others;
        let adjacent = own.windows(2).all(|w| w[0].2 + 1 == w[1].1);
        adjacent && own.first().is_some_and(|run| run.1 == first) && own.last().is_some_and(|run| run.2 == last)
    })
}

/// The runs of consecutive positions of a range that are in `low..=high`.
fn clipped(r: &Range, low: i64, high: i64) -> impl Iterator<Item = Span> + '_ {
    runs_of(r).map(move |(doc, a, e)| (doc, a.max(low), e.min(high))).filter(|(_, a, e)| a <= e)
}

/// The runs of consecutive positions of a range.
fn runs_of(r: &Range) -> impl Iterator<Item = Span> + '_ {
    runs(r).map(|(first, rows)| (r.doc, r.position(first), r.position(first + rows - 1)))
}

/// Checks that `met` has each position of `wanted`, whose spans do not overlap, once, and no other.
fn tile(mut met: Vec<Span>, mut wanted: Vec<Span>) -> Result<(), String> {
    wanted.sort_unstable();
    met.sort_unstable();
    // Both as joined runs.
    let joined = |list: Vec<Span>| -> Result<Vec<Span>, String> {
        let mut runs: Vec<Span> = Vec::new();
        for (doc, a, e) in list {
            match runs.last_mut() {
                Some(last) if last.0 == doc && a <= last.2 => return Err(format!("position {a} is met twice")),
                Some(last) if last.0 == doc && a == last.2 + 1 => last.2 = e,
                _ => runs.push((doc, a, e)),
            }
        }
        Ok(runs)
    };
    let (met, wanted) = (joined(met)?, joined(wanted)?);
    for (i, &(doc, a, e)) in wanted.iter().enumerate() {
        let missing = match met.get(i) {
            Some(m) if (m.0, m.1) < (doc, a) => return Err(format!("position {} is met without being allowed", m.1)),
            Some(m) if *m == (doc, a, e) => continue,
            Some(m) if m.0 == doc && m.1 == a && m.2 > e => {
                return Err(format!("position {} is met without being allowed", e + 1));
            }
            Some(m) if m.0 == doc && m.1 == a => m.2 + 1,
            _ => a,
        };
        return Err(format!("position {missing} is not met"));
    }
    match met.get(wanted.len()) {
        Some(m) => Err(format!("position {} is met without being allowed", m.1)),
        None => Ok(()),
    }
}

/// Checks the ordered form: one call for each q head, heads ascending, and in each call partners by ascending position.
fn in_order(p: &Prover, atoms: &[Atom], side: Side, token: usize) -> Result<(), String> {
    if atoms.windows(2).any(|w| w[0].head >= w[1].head) || atoms.iter().any(|a| a.heads != 1) {
        return Err(format!("token {token} is not summed head by head: {atoms:?}"));
    }
    let doc = place(p, side, token).0;
    for a in atoms {
        let Some((partners, _)) = p.calls.partners(a.call, side, token as u32) else { continue };
        let mut found: Vec<(&Range, &Band)> = partners.collect();
        if side == Side::K {
            // dk and dv are added up band by band, in the order of the call's list.
            found.sort_by_key(|(_, band)| core::ptr::from_ref(*band).addr());
        }
        // Slice by slice, and then row by row.
        let slice_of = |&(range, band): &(&Range, &Band)| match side {
            Side::Q => p.reaches.part(doc, range.doc, band),
            Side::K => p.reaches.part(range.doc, doc, band),
        };
        let order = |a: &(&Range, &Band), b: &(&Range, &Band)| match slice_of(a) == slice_of(b) {
            true => (a.0.doc, a.0.last()) < (b.0.doc, b.0.pos),
            false => slice_of(a) < slice_of(b),
        };
        if found.windows(2).any(|w| !order(&w[0], &w[1])) {
            let call = p.calls.get(a.call);
            let (rank, op) = (p.ranks[call.rank as usize].rank(), call.op);
            return Err(format!(
                "token {token} does not meet its partners in ascending order (rank {rank}, operation {op})"
            ));
        }
    }
    Ok(())
}

/// Checks a rank's gradient of the sinks: every rank's partial once, in rank order.
fn sinks(p: &Prover, r: usize) -> Result<(), String> {
    let view = BufferView::whole(Buf::User(TensorId::Dsinks), 1, all_heads(p.plan, Side::Q));
    for h in p.memories[r].heads(&view) {
        p.expect(r, &view, (0, 1), h, Cell::new(What::Sum(TensorId::Dsinks), 0, h, 0))?;
        let atoms = p.lists.get(p.memories[r].at(&view, 0, h).0.list);
        if !atoms.iter().map(|a| p.calls.get(a.call).rank as usize).eq(0..p.ranks.len()) {
            return Err(format!("dsinks of head {h} is not the sum over all ranks in order"));
        }
    }
    Ok(())
}
