// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks the outputs: every row of every output is final, and made of exactly the pairs that the mask allows, each
//! once.

use alloc::{format, string::String, vec::Vec};

use super::{
    cell::{Cell, What},
    contributions::Atom,
    execute::Prover,
    geometry::rows_between,
    memory::side_of,
    parallel,
    promise::all_heads,
};
use crate::{
    batch::Side,
    call::Range,
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
    let needed = p.plan.problem().area() * p.plan.problem().heads() as u128;
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
        let mut all: Vec<usize> = p.ranks.iter().flat_map(|s| p.plan.token_indices(side, s.rank())).collect();
        all.sort_unstable();
        if !all.iter().copied().eq(0..p.plan.problem().batch().tokens(side)) {
            return Err(p.err(0, 0, format!("the ranks together do not hold every token of side {side:?} once")));
        }
    }
    Ok(())
}

/// One output of one rank.
fn tensor(p: &Prover, r: usize, tensor: TensorId, want: What) -> Result<(), String> {
    let side = side_of(tensor);
    let tokens = p.plan.token_indices(side, p.ranks[r].rank());
    let (heads, group) = (all_heads(p.plan, side), p.plan.problem().group() as u32);
    let view = BufferView::whole(Buf::User(tensor), tokens.len() as u64, heads);
    let cells: Vec<u32> = p.memories[r].heads(&view).collect();
    let mut first = 0;
    while first < tokens.len() {
        let mut rows = alike(p, r, &view, &tokens[first..], first as u64, side);
        let token = tokens[first];
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
    }
    Ok(())
}

/// The number of these rows, from the first on, that are one run in every column and have consecutive tokens of one
/// document. In the ordered form 1, because order is checked token by token.
fn alike(p: &Prover, r: usize, view: &BufferView, tokens: &[usize], first: u64, side: Side) -> usize {
    if p.plan.form() == Form::Ordered {
        return 1;
    }
    let memory = &p.memories[r];
    let run = memory.heads(view).map(|h| memory.at(view, first, h).1).min().unwrap_or(1);
    let batch = p.plan.problem().batch();
    let end = batch.document(side, batch.document_of(side, tokens[0])).end;
    let most = tokens.len().min(run as usize).min(end - tokens[0]);
    (0..most).take_while(|&n| tokens[n] == tokens[0] + n).count()
}

/// The positions of the other side that a token may be paired with, as `low..=high` (empty if `high < low`).
fn allowed(p: &Prover, side: Side, token: usize) -> (i64, i64) {
    let batch = p.plan.problem().batch();
    let doc = batch.document_of(side, token);
    let pos = token as i64 - batch.document(side, doc).start as i64 + batch.start(side, doc);
    let mask = p.plan.problem().mask();
    let (mask, other) = if side == Side::Q { (mask, Side::K) } else { (mask.transposed(), Side::Q) };
    let start = batch.start(other, doc);
    let end = start + batch.document(other, doc).len() as i64 - 1;
    (pos.saturating_sub(mask.left_limit()).max(start), pos.saturating_add(mask.right_limit()).min(end))
}

/// Checks that over all `calls` the token meets every allowed partner once. Returns for how many of the `rows` tokens
/// from it on this holds; these are tokens of one document, in the same calls.
///
/// Tokens in the same range of each call meet the same ranges, and their allowed intervals move forward from token to
/// token. So if those ranges have each position once, from the begin of the first token's interval to the end of the
/// last token's, then each token meets its own interval once.
fn exactly_once(p: &Prover, side: Side, token: usize, mut rows: usize, calls: &[u32]) -> Result<usize, String> {
    let mut met: Vec<&Range> = Vec::new();
    for &c in calls {
        let Some((partners, tokens)) = p.calls.partners(c, side, token as u32) else {
            rows = 1;
            continue;
        };
        rows = rows.min(tokens);
        met.extend(partners);
    }
    let (low, high) = allowed(p, side, token);
    if rows > 1 && tile(&met, low, allowed(p, side, token + rows - 1).1).is_ok() {
        return Ok(rows);
    }
    tile(&met, low, high).map(|()| 1)
}

/// Checks that ranges have each of the positions `low..=high` once.
fn tile(ranges: &[&Range], low: i64, high: i64) -> Result<(), String> {
    let mut met: Vec<(i64, i64)> = Vec::new();
    for range in ranges {
        let (a, e) = rows_between(range, low, high);
        let mut i = a;
        while i < e {
            let n = if range.is_plain() { e - i } else { (range.block - i % range.block).min(e - i) };
            met.push((range.position(i), range.position(i + n - 1)));
            i += n;
        }
    }
    met.sort_unstable();
    let mut next = low;
    for (a, e) in met {
        if a < next {
            return Err(format!("position {a} is met twice"));
        }
        if a > next {
            return Err(format!("position {next} is not met"));
        }
        next = e + 1;
    }
    if next <= high {
        return Err(format!("position {next} is not met"));
    }
    Ok(())
}

/// Checks the ordered form: one call for each q head, heads ascending, and in each call partners by ascending position.
fn in_order(p: &Prover, atoms: &[Atom], side: Side, token: usize) -> Result<(), String> {
    if atoms.windows(2).any(|w| w[0].head >= w[1].head) || atoms.iter().any(|a| a.heads != 1) {
        return Err(format!("token {token} is not summed head by head: {atoms:?}"));
    }
    for a in atoms {
        let Some((partners, _)) = p.calls.partners(a.call, side, token as u32) else { continue };
        let found: Vec<&Range> = partners.collect();
        if found.windows(2).any(|w| w[0].last() >= w[1].pos) {
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
