// SPDX-License-Identifier: MIT OR Apache-2.0
//! Operations that are listed already, as the one-rank check reads them; and whether the ranges of a call are ranges.

use alloc::{format, string::String, vec::Vec};

use super::one_rank::Lists;
use crate::{
    call::{Pair, Range},
    schedule::{
        BlockView, BufferView, MessageView, Schedule,
        expanded::{CallRanges, ExpandedOp, SumBlock},
    },
};

/// Lists of operations whose arguments are listed already.
impl Lists for &[ExpandedOp] {
    fn messages(&mut self, _: &Schedule, op: usize) -> &[MessageView] {
        match &self[op] {
            ExpandedOp::Exchange { messages, .. } => messages,
            _ => &[],
        }
    }

    fn blocks<E>(
        &mut self,
        _: &Schedule,
        op: usize,
        mut each: impl FnMut(&[BlockView], &[BufferView]) -> Result<(), E>,
    ) -> Result<(), E> {
        let parts = match &self[op] {
            ExpandedOp::Sums(parts) | ExpandedOp::Merges(parts) => parts.as_slice(),
            ExpandedOp::Combine(c) => &[alloc::vec![c.o.clone(), c.lse.clone()]],
            ExpandedOp::Compose(joins) => core::slice::from_ref(joins),
            _ => return Ok(()),
        };
        parts.iter().try_for_each(|part| {
            let mut sources = Vec::new();
            let block = |sum: &SumBlock| {
                let sources_begin = sources.len() as u32;
                sources.extend_from_slice(&sum.sources);
                BlockView { dst: sum.dst, sources_begin, sources_end: sources.len() as u32 }
            };
            let blocks: Vec<BlockView> = part.iter().map(block).collect();
            each(&blocks, &sources)
        })
    }
}

/// Checks that ranges lie in views of this many rows, and that pairs name ranges and bands that exist.
pub(super) fn check_met(met: &CallRanges, q_rows: u64, k_rows: u64) -> Result<(), String> {
    let sane = |r: &Range, rows: u64| {
        if r.len == 0 || r.block == 0 || r.period < r.block || r.row < 0 || (r.row as u64 + u64::from(r.len)) > rows {
            return Err(format!("{r:?} is not a range of a view of {rows} rows"));
        }
        Ok(())
    };
    met.k.iter().try_for_each(|k| sane(k, k_rows))?;
    for q in &met.q {
        sane(&q.range, q_rows)?;
        if q.keys_begin > q.keys_end || q.keys_end as usize > met.pairs.len() {
            return Err(format!("a q range names pairs {}..{} of {}", q.keys_begin, q.keys_end, met.pairs.len()));
        }
        for &Pair { k, band } in &met.pairs[q.keys_begin as usize..q.keys_end as usize] {
            match (met.k.get(k as usize), met.bands.get(band as usize)) {
                (None, _) => return Err(format!("a pair names k range {k} of {}", met.k.len())),
                (_, None) => return Err(format!("a pair names band {band} of {}", met.bands.len())),
                _ => {}
            }
        }
    }
    Ok(())
}
