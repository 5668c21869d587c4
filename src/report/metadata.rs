// SPDX-License-Identifier: MIT OR Apache-2.0
//! Memory that a device keeps for a plan: the scheduler metadata that its kernels read (ranges, tiles, counters), which
//! is uploaded when the plan is prepared.
//!
//! The number of tiles of a range depends on the device's kernels. Here every tile has the fewest rows of any kernel,
//! so that the result is an upper bound for all devices. The sizes are those of the structs in `ptx/shared/params.cuh`;
//! the CUDA backend asserts that they agree.

use alloc::collections::BTreeSet;

use crate::{
    call::{Band, Ranges},
    plan::Plan,
    schedule::{OpKind, Schedule, expand::Expansion},
};

/// Bytes of a range.
pub(crate) const RUN: u64 = 56;
/// Bytes of a tile of work.
pub(crate) const WORK: u64 = 8;
/// Bytes of an entry of a list of partners.
pub(crate) const PARTNER: u64 = 8;
/// Bytes of a band, as one side sees it.
pub(crate) const BAND: u64 = 56;
/// Bytes of a block of a transform.
pub(crate) const BLOCK: u64 = 104;
/// Bytes of a source of a block.
pub(crate) const SOURCE: u64 = 40;
/// Bytes of a tag that a run sends with its messages.
pub(crate) const TAG: u64 = 24;
/// Bytes of the entry for a message that arrives.
pub(crate) const ARRIVED: u64 = 24;
/// The fewest rows of a tile of a problem with these head dims.
pub(crate) fn tile_rows(head_dim: u32, value_dim: u32) -> u64 {
    if head_dim.max(value_dim) > 256 { 32 } else { 64 }
}

/// The same of the kernels with dropout, whose tiles of head dims above 128 are those of head dims above 256.
pub(crate) fn dropped_tile_rows(head_dim: u32, value_dim: u32) -> u64 {
    if head_dim.max(value_dim) > 128 { 32 } else { 64 }
}

/// q heads share tiles of at least so many rows, in ranges of at most so many rows, and at the end of longer ones.
pub(crate) const SHARED_ROWS: u32 = 16;
pub(crate) const SHORT_ROWS: u32 = 1024;
/// Rows of the pieces that a longer range is cut into first, by each of the two kernels.
const STRETCHES: [u32; 2] = [128, 192];
/// Upper bound on the padding of one call's lists: thirteen lists, each padded to a multiple of 16 bytes.
const PADDING: u64 = 13 * 16;

fn tiles(lens: impl Iterator<Item = u32>, rows: u64) -> u64 {
    lens.map(|len| u64::from(len).div_ceil(rows)).sum()
}

/// The most tiles that q heads share in a range of so many rows.
pub(crate) fn shared_tiles(len: u32) -> u32 {
    let [a, b] = STRETCHES.map(|rows| len % rows);
    (if len <= SHORT_ROWS { len } else { a.max(b) }).div_ceil(SHARED_ROWS)
}

/// Bytes of the lists of one attention call, and bytes of the counters of a backward, with these numbers of heads of q
/// and of dk. Two kernels may each have their own tiles (of q rows in a forward, of keys in a backward), and q heads
/// may share some tiles. Beside each run lies the number of tiles before it, or with dropout its first token.
fn attention(r: &Ranges<'_>, rows: u64, is_shared: bool, (q_heads, key_heads): (u64, u64)) -> (u64, u64) {
    let (q, k) = (tiles(r.q.iter().map(|q| q.range.len), rows), tiles(r.k.iter().map(|k| k.len), rows));
    let shared: u64 = if is_shared { r.q.iter().map(|q| u64::from(shared_tiles(q.range.len))).sum() } else { 0 };
    let met: u64 = r.q.iter().map(|q| u64::from(q.keys_end - q.keys_begin)).sum();
    let backward = u64::from(q_heads > 0);
    // A backward cuts off rows that no band reads: at each pair, once before and once behind on either side.
    let cut = if r.bands.iter().any(|band| *band != Band::WHOLE) { 2 * backward * met } else { 0 };
    let (q, k) = (q + cut, k + cut);
    let (q_runs, k_runs) = (r.q.len() as u64 + cut, r.k.len() as u64 + cut);
    let runs = (q_runs + k_runs) * (RUN + 4) + backward * k_runs * 4;
    let bands = (1 + backward) * r.bands.len() as u64 * BAND;
    let work = (2 * q + shared + (1 + backward) * k) * WORK;
    let lists = runs + bands + (r.pairs.len() as u64 + met + cut) * PARTNER + work + PADDING;
    (lists, (1 + q * q_heads + k * key_heads) * 4 + PADDING)
}

/// The most bytes of metadata that a device keeps for a schedule of this plan.
pub(crate) fn bound(plan: &Plan, schedule: &Schedule) -> u64 {
    let mut expansion = Expansion::new(schedule);
    let (mut lists, mut words) = (plan.problem().alibi_slopes().map_or(0, |s| s.len() as u64 * 4 + PADDING), 0);
    // Peers that send a message: each sends a tag.
    let mut peers = BTreeSet::new();
    for (i, op) in schedule.ops.iter().enumerate() {
        let heads = match &op.kind {
            OpKind::Attend(a) => {
                schedule.attend_ranges(a, &mut expansion.scratch);
                None
            }
            OpKind::Backward(b) => {
                let key_heads = if b.per_q_head { b.q.heads } else { b.k.heads };
                schedule.ring_steps(b.side).ranges(b.ring_step as usize, &mut expansion.scratch);
                Some((u64::from(b.q.heads), u64::from(key_heads)))
            }
            kind if kind.is_exchange() => {
                let arriving = expansion.messages(schedule, i).iter().filter(|m| !m.send);
                lists += PADDING;
                for message in arriving {
                    lists += ARRIVED;
                    peers.insert(message.peer);
                }
                continue;
            }
            _ => {
                let moved: Result<(), core::convert::Infallible> = expansion.blocks(schedule, i, |blocks, _| {
                    let sources: u64 = blocks.iter().map(|b| u64::from(b.sources_end - b.sources_begin)).sum();
                    lists += blocks.len() as u64 * BLOCK + sources * SOURCE + PADDING;
                    Ok(())
                });
                let Ok(()) = moved;
                continue;
            }
        };
        // Only in the forward, if several q heads read one kv head.
        let is_shared = heads.is_none() && plan.problem().heads() > plan.problem().kv_heads();
        let (head_dim, value_dim) = (plan.problem().head_dim() as u32, plan.problem().value_dim() as u32);
        let rows = match plan.problem().dropout() {
            None => tile_rows(head_dim, value_dim),
            Some(_) => dropped_tile_rows(head_dim, value_dim),
        };
        let (bytes, counted) = attention(&expansion.scratch.ranges(), rows, is_shared, heads.unwrap_or((0, 0)));
        lists += bytes;
        if heads.is_some() {
            // Calls run one after another and reuse the same counters.
            words = words.max(counted);
        }
    }
    if schedule.group.len() > 1 {
        lists += (1 + peers.len() as u64) * TAG + PADDING;
    }
    lists + words
}
