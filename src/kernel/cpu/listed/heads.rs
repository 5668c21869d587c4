// SPDX-License-Identifier: MIT OR Apache-2.0
//! The heads of a call that share their lists: all of them, or those of one kv head.

use super::lists::KeyLists;
use crate::call::{Attend, AttendBackward, HeadMap, RawTensor};
use core::ops::Range;

/// q heads of a call with the kv heads that they read, and their head of the lists.
pub(super) struct HeadGroup {
    q: Range<u32>,
    kv: Range<u32>,
    map: HeadMap,
    pub list: usize,
}

/// The groups of a call with `heads` q heads and `kv_heads` kv heads.
pub(super) fn head_groups(
    map: &HeadMap,
    heads: u32,
    kv_heads: u32,
    lists: &KeyLists,
) -> impl Iterator<Item = HeadGroup> + use<> {
    let (map, shared) = (*map, lists.heads == 1);
    (0..if shared { 1 } else { kv_heads }).filter_map(move |kv| {
        if shared {
            return Some(HeadGroup { q: 0..heads, kv: 0..kv_heads, map, list: 0 });
        }
        // The q heads of the problem that read this kv head, of which the call may have some.
        let first = (map.kv_offset + kv) * map.group;
        let q = first.max(map.q_offset) - map.q_offset..(first + map.group).saturating_sub(map.q_offset).min(heads);
        let list = (map.kv_offset + kv) as usize;
        (q.start < q.end).then_some(HeadGroup { q, kv: kv..kv + 1, map, list })
    })
}

impl HeadGroup {
    fn of(range: &Range<u32>, t: RawTensor) -> RawTensor {
        if t.is_none() { t } else { t.heads(range.start, range.end - range.start) }
    }

    fn q(&self, t: RawTensor) -> RawTensor {
        Self::of(&self.q, t)
    }

    fn kv(&self, t: RawTensor) -> RawTensor {
        Self::of(&self.kv, t)
    }

    fn map(&self) -> HeadMap {
        let HeadMap { q_offset, kv_offset, group } = self.map;
        HeadMap { q_offset: q_offset + self.q.start, kv_offset: kv_offset + self.kv.start, group }
    }

    /// The part of a call that has these heads.
    pub(super) fn attend<'a>(&self, c: &Attend<'a>) -> Attend<'a> {
        Attend {
            q: self.q(c.q),
            k: self.kv(c.k),
            v: self.kv(c.v),
            running: self.q(c.running),
            running_lse: self.q(c.running_lse),
            o: self.q(c.o),
            lse: self.q(c.lse),
            alibi_slopes: self.q(c.alibi_slopes),
            sinks: self.q(c.sinks),
            max_logit: self.q(c.max_logit),
            heads: self.map(),
            ..*c
        }
    }

    /// The part of a backward call that has these heads.
    pub(super) fn backward<'a>(&self, c: &AttendBackward<'a>) -> AttendBackward<'a> {
        let gradient = |t| if c.per_q_head { self.q(t) } else { self.kv(t) };
        AttendBackward {
            q: self.q(c.q),
            k: self.kv(c.k),
            v: self.kv(c.v),
            d_o: self.q(c.d_o),
            lse: self.q(c.lse),
            delta: self.q(c.delta),
            dq: self.q(c.dq),
            dk: gradient(c.dk),
            dv: gradient(c.dv),
            alibi_slopes: self.q(c.alibi_slopes),
            heads: self.map(),
            ..*c
        }
    }
}
