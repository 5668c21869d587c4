// SPDX-License-Identifier: MIT OR Apache-2.0
//! All kernel calls, kept until the outputs are checked: the tokens that each call names, and the ranges that they
//! meet.
//!
//! There are ranks × ring steps calls, so they are stored in a few long lists, with places in 32 bits, and only for the
//! side that a call computes results for. Calls of one schedule mostly have the same bands, which are stored once then.

use alloc::{string::String, vec, vec::Vec};

use crate::{
    batch::Side,
    call::{Band, Range},
    schedule::expanded::CallRanges,
};

/// Consecutive tokens that a range of a call names.
#[derive(Clone, Copy, Debug)]
pub(super) struct NamedTokens {
    pub token: u32,
    pub tokens: u32,
    pub range: u32,
}

/// Tokens that a call names; the ranges of the other side that they meet are `links` entries of `AttendCalls::links`
/// from `first` on.
struct MetTokens {
    token: u32,
    tokens: u32,
    first: u32,
    links: u32,
}

/// A range of the other side, and the band of the pair.
#[derive(Clone, Copy, Default)]
struct PartnerLink {
    range: u32,
    band: u32,
}

/// A call of a kernel.
pub(super) struct AttendCall {
    /// Index of the rank in the group.
    pub rank: u32,
    pub op: u32,
    /// First entry of its q tokens, first entry of its k tokens, and end of those, in [`AttendCalls`]'s `tokens`.
    tokens: [u32; 3],
}

/// All calls so far.
#[derive(Default)]
pub(super) struct AttendCalls {
    list: Vec<AttendCall>,
    /// For each call and side in ascending order.
    tokens: Vec<MetTokens>,
    /// Entries of `ranges` and of `bands`.
    links: Vec<PartnerLink>,
    ranges: Vec<Range>,
    bands: Vec<Band>,
}

impl AttendCalls {
    pub(super) fn get(&self, call: u32) -> &AttendCall {
        &self.list[call as usize]
    }

    /// Adds a call with its tokens of q's side, of k's side, of both or of none; returns its number.
    pub(super) fn add(
        &mut self,
        rank: usize,
        op: usize,
        met: &CallRanges,
        q: Option<&Vec<NamedTokens>>,
        k: Option<&Vec<NamedTokens>>,
    ) -> Result<u32, String> {
        // All places are below this.
        let last = [
            self.list.len(),
            self.ranges.len() + met.k.len() + met.q.len(),
            self.bands.len() + met.bands.len(),
            self.links.len() + 2 * met.pairs.len(),
            self.tokens.len() + q.map_or(0, Vec::len) + k.map_or(0, Vec::len),
        ];
        if last.into_iter().any(|last| u32::try_from(last).is_err()) {
            return Err("is one of too many calls: a proof numbers calls and ranges in 32 bits".into());
        }
        let number = self.list.len() as u32;
        let begin = self.tokens.len() as u32;
        if !self.bands.ends_with(&met.bands) {
            self.bands.extend(&met.bands);
        }
        let bands = (self.bands.len() - met.bands.len()) as u32;
        if let Some(q) = q {
            let base = self.ranges.len() as u32;
            self.ranges.extend(&met.k);
            let mut at = Vec::with_capacity(met.q.len());
            for i in 0..met.q.len() {
                at.push((self.links.len() as u32, met.keys(i).len() as u32));
                self.links.extend(
                    met.keys(i).iter().map(|pair| PartnerLink { range: base + pair.k, band: bands + pair.band }),
                );
            }
            self.name(q, &at);
        }
        let middle = self.tokens.len() as u32;
        if let Some(k) = k {
            let base = self.ranges.len() as u32;
            self.ranges.extend(met.q.iter().map(|q| q.range));
            // The q ranges of each k range, in ascending order.
            let mut at = vec![(0, 0); met.k.len()];
            (0..met.q.len()).flat_map(|i| met.keys(i)).for_each(|pair| at[pair.k as usize].1 += 1);
            let mut next = self.links.len() as u32;
            for (first, links) in &mut at {
                *first = next;
                next += core::mem::take(links);
            }
            self.links.resize(next as usize, PartnerLink::default());
            for i in 0..met.q.len() {
                for pair in met.keys(i) {
                    let (first, links) = &mut at[pair.k as usize];
                    self.links[(*first + *links) as usize] =
                        PartnerLink { range: base + i as u32, band: bands + pair.band };
                    *links += 1;
                }
            }
            self.name(k, &at);
        }
        let tokens = [begin, middle, self.tokens.len() as u32];
        self.list.push(AttendCall { rank: rank as u32, op: op as u32, tokens });
        Ok(number)
    }

    fn name(&mut self, named: &[NamedTokens], at: &[(u32, u32)]) {
        self.tokens.extend(named.iter().map(|n| {
            let (first, links) = at[n.range as usize];
            MetTokens { token: n.token, tokens: n.tokens, first, links }
        }));
    }

    /// The ranges of the other side that a token meets in a call, with their bands, in the order of the call, and the
    /// number of tokens from it on that meet the same ranges. `None` if the call does not name the token.
    pub(super) fn partners(
        &self,
        call: u32,
        side: Side,
        token: u32,
    ) -> Option<(impl Iterator<Item = (&Range, &Band)>, usize)> {
        let [q, k, end] = self.get(call).tokens.map(|at| at as usize);
        let list = &self.tokens[if side == Side::Q { q..k } else { k..end }];
        let named = list[..list.partition_point(|n| n.token <= token)].last()?;
        let left = (named.token + named.tokens).checked_sub(token).filter(|&n| n > 0)?;
        let links = &self.links[named.first as usize..(named.first + named.links) as usize];
        let partners = links.iter().map(|link| (&self.ranges[link.range as usize], &self.bands[link.band as usize]));
        Some((partners, left as usize))
    }
}
