// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which q rows the kernels for `sm_90a` take in tiles that the q heads of a group share.
//!
//! A tile has 128 or 192 rows. A tile of a single head holds that many q rows of it; at the end of a range the rest of
//! a tile is wasted. A shared tile holds 16, 32 or 64 q rows of as many heads as fill it, all of which read one kv
//! head: less is wasted at the end of a range, and the keys that its rows meet are loaded once for these heads.
//!
//! A range is divided into stretches of a tile's rows. Shared tiles take a stretch if that makes fewer steps: one step
//! for each tile of keys, and one more for each tile of q for the work before and after the keys. In ranges above
//! [`SHORT_ROWS`] rows only a last stretch of fewer rows is considered: the others have little to gain, and the
//! metadata stays small.

use crate::call::{HeadMap, QRange, Ranges};
use crate::kernel::cuda::abi::params::{SidedBand, Work};
use crate::kernel::cuda::memory::metadata::{TileRows, cut, met, work};
use crate::kernel::cuda::memory::metadata_writer::{SortBuffers, Writer, padded};
use crate::report::metadata::{SHORT_ROWS, shared_tiles};
use bytemuck::{Pod, Zeroable};

/// How a call's q heads share tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernel::cuda) struct Sharing {
    /// The logarithm to the base 2 of the q rows that a tile has of each of its heads.
    pub token_bits: u32,
    /// Items of a tile: all heads of the call.
    pub parts: u32,
    /// Items of a tile that read the same kv head.
    pub each: u32,
    /// q heads of the call that read its first kv head, and the most that read any other.
    pub first_heads: u32,
    pub group: u32,
}

impl Sharing {
    /// For tiles of `rows` rows. None where no two q heads read one kv head, or where kv heads would need different
    /// numbers of tiles.
    pub(in crate::kernel::cuda) fn of(held: u32, heads: &HeadMap, rows: u32) -> Option<Self> {
        let group = heads.group.min(held);
        if group <= 1 {
            return None;
        }
        let first_heads = (heads.group - heads.q_offset % heads.group).min(held);
        let (whole, last) = ((held - first_heads) / group, (held - first_heads) % group);
        let most = if whole > 0 { first_heads.max(group) } else { first_heads.max(last) };
        if most <= 1 {
            return None;
        }
        // The largest number of rows that leaves room for all heads.
        let token_bits = (4..=6).rev().find(|&bits| most <= rows >> bits).unwrap_or(4);
        let tiles = |heads: u32| heads.div_ceil(rows >> token_bits);
        let each = tiles(most);
        let same =
            tiles(first_heads) == each && (whole == 0 || tiles(group) == each) && (last == 0 || tiles(last) == each);
        let parts = each * (1 + whole + u32::from(last > 0));
        same.then_some(Self { token_bits, parts, each, first_heads, group })
    }

    /// q rows of a tile.
    pub(in crate::kernel::cuda) fn rows(&self) -> u32 {
        1 << self.token_bits
    }
}

/// `SharedTiles`.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub(in crate::kernel::cuda) struct SharedTiles {
    pub work: u64,
    pub begin: u32,
    pub tiles: u32,
    pub parts: u32,
    pub each: u32,
    pub first_heads: u32,
    pub group: u32,
    pub token_bits: u32,
    pub unused: u32,
}

/// The tiles of a call: tiles of one head each, and shared tiles.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::kernel::cuda) struct HopperTiles {
    pub work: u64,
    pub tiles: usize,
    pub shared: SharedTiles,
}

/// The most bytes that [`write`] writes for tiles of `rows` rows.
pub(in crate::kernel::cuda) fn bytes(ranges: &Ranges, rows: u32) -> usize {
    let single: usize = ranges.q.iter().map(|q| q.range.len.div_ceil(rows) as usize).sum();
    let shared: usize = ranges.q.iter().map(|q| shared_tiles(q.range.len) as usize).sum();
    padded(single * size_of::<Work>()) + padded(shared * size_of::<Work>())
}

/// Steps of a tile of q rows at positions `first..=last`; its costs are rows of keys.
struct TileCosts<'a> {
    ranges: &'a Ranges<'a>,
    bands: &'a [SidedBand],
    tile: TileRows,
}

impl TileCosts<'_> {
    fn met(&self, q: &QRange, first: i64, last: i64) -> impl Iterator<Item = u64> {
        met(self.ranges, self.bands, q, first, last)
    }

    fn steps(&self, q: &QRange, first: u32, end: u32) -> u64 {
        let (first, last) = (q.range.position(first), q.range.position(end - 1));
        1 + self.met(q, first, last).map(|rows| rows.div_ceil(self.tile.keys.into())).sum::<u64>()
    }

    fn shares(&self, q: &QRange, sharing: &Sharing, heads: u32, first: u32, end: u32) -> bool {
        if q.range.len > SHORT_ROWS && end - first == self.tile.queries {
            return false;
        }
        let (rows, heads) = (sharing.rows(), u64::from(heads));
        let single = heads * self.steps(q, first, end);
        let tiles = u64::from((end - first).div_ceil(rows)) * u64::from(sharing.parts);
        // A tile of some of these rows makes at least one step, and no more steps than a tile of all.
        if tiles != heads || single <= heads * 2 {
            return tiles < heads;
        }
        let mut shared = 0;
        for at in (first..end).step_by(rows as usize) {
            shared += u64::from(sharing.parts) * self.steps(q, at, end.min(at.saturating_add(rows)));
        }
        shared < single
    }
}

/// Writes the tiles of a call of `heads` q heads, longest first; nothing where none are shared and `same` is the list.
pub(in crate::kernel::cuda) fn write(
    scratch: &mut SortBuffers,
    writer: &mut Writer<'_>,
    ranges: &Ranges,
    (sharing, heads): (&Sharing, u32),
    bands: &[SidedBand],
    tile: TileRows,
    same: Option<HopperTiles>,
) -> HopperTiles {
    let costs = TileCosts { ranges, bands, tile };
    let whole = tile.queries;
    scratch.tiles.clear();
    scratch.shared_tiles.clear();
    for (i, q) in ranges.q.iter().enumerate() {
        let mut first = 0;
        while first < q.range.len {
            let end = first + whole.min(q.range.len - first);
            let (tiles, rows) = match costs.shares(q, sharing, heads, first, end) {
                true => (&mut scratch.shared_tiles, sharing.rows()),
                false => (&mut scratch.tiles, whole),
            };
            cut(tiles, i, &q.range, first..end, rows, |first, last| costs.met(q, first, last).sum());
            first = end;
        }
    }
    if let Some(same) = same.filter(|_| scratch.shared_tiles.is_empty()) {
        return same;
    }
    let longest = |tiles: &[(u64, Work)]| tiles.iter().map(|t| t.0).max().unwrap_or(0);
    let shared_first = longest(&scratch.shared_tiles) > longest(&scratch.tiles);
    let (single, tiles) = work(&mut scratch.tiles, writer);
    let (shared, shared_tiles) = work(&mut scratch.shared_tiles, writer);
    let shared = SharedTiles {
        work: shared,
        begin: if shared_first { 0 } else { tiles as u32 * heads },
        tiles: shared_tiles as u32,
        parts: sharing.parts,
        each: sharing.each,
        first_heads: sharing.first_heads,
        group: sharing.group,
        token_bits: sharing.token_bits,
        unused: 0,
    };
    HopperTiles { work: single, tiles, shared }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Band, Mode, Pair, Range};
    use crate::kernel::cuda::memory::bands;
    use crate::report::metadata::SHARED_ROWS;
    use alloc::vec::Vec;

    /// Rows of a tile in most of these tests.
    const ROWS: u32 = 128;

    fn sharing(held: u32, q_offset: u32, group: u32) -> Option<(u32, u32, u32, u32)> {
        sharing_of(held, q_offset, group, ROWS)
    }

    fn sharing_of(held: u32, q_offset: u32, group: u32, rows: u32) -> Option<(u32, u32, u32, u32)> {
        let s = Sharing::of(held, &HeadMap { q_offset, kv_offset: 0, group }, rows)?;
        assert!(s.rows() >= SHARED_ROWS && s.group <= held);
        Some((s.rows(), s.parts, s.each, s.first_heads))
    }

    #[test]
    fn heads_that_share() {
        assert_eq!(sharing(8, 0, 1), None);
        assert_eq!(sharing(0, 0, 8), None);
        assert_eq!(sharing(1, 3, 8), None);
        // Two, four and eight of them; numbers that leave room.
        assert_eq!(sharing(8, 0, 2), Some((64, 4, 1, 2)));
        assert_eq!(sharing(8, 0, 4), Some((32, 2, 1, 4)));
        assert_eq!(sharing(16, 0, 8), Some((16, 2, 1, 8)));
        assert_eq!(sharing(6, 0, 3), Some((32, 2, 1, 3)));
        assert_eq!(sharing(6, 0, 6), Some((16, 1, 1, 6)));
        // More than a tile has room for.
        assert_eq!(sharing(32, 0, 16), Some((16, 4, 2, 16)));
        assert_eq!(sharing(9, 0, 9), Some((16, 2, 2, 9)));
        // Heads of a call that begin or end inside a group.
        assert_eq!(sharing(2, 6, 8), Some((64, 1, 1, 2)));
        assert_eq!(sharing(4, 1, 3), Some((64, 2, 1, 2)));
        assert_eq!(sharing(8, 6, 8), Some((16, 2, 1, 2)));
        assert_eq!(sharing(5, u32::MAX - 8, u32::MAX), Some((16, 1, 1, 5)));
        assert_eq!(sharing(5, u32::MAX - 3, u32::MAX), Some((32, 2, 1, 3)));
        // Two tiles of one kv head and one of the other.
        assert_eq!(sharing(20, 12, 16), None);
        // Tiles of 192 rows: three heads of 64 rows, six of 32, twelve of 16.
        for (group, rows, each) in
            [(2, 64, 1), (3, 64, 1), (4, 32, 1), (6, 32, 1), (7, 16, 1), (12, 16, 1), (13, 16, 2)]
        {
            assert_eq!(sharing_of(group, 0, group, 192), Some((rows, each, each, group)));
        }
    }

    /// Ranges, and first rows in them.
    type Tiles = Vec<(u32, u32)>;

    /// The tiles of one head, and the shared ones; whether these come first.
    fn split(heads: (u32, u32), q: &[(u32, i64)], k: &[u32], window: (i64, i64)) -> (Tiles, Tiles, bool) {
        split_of(heads, q, k, window, ROWS)
    }

    fn split_of(
        (held, group): (u32, u32),
        q: &[(u32, i64)],
        k: &[u32],
        window: (i64, i64),
        rows: u32,
    ) -> (Tiles, Tiles, bool) {
        let sharing = Sharing::of(held, &HeadMap { q_offset: 0, kv_offset: 0, group }, rows).expect("a group");
        let tile = TileRows { queries: rows, keys: 128 };
        let q: Vec<QRange> = (0..)
            .zip(q)
            .map(|(i, &(len, pos))| QRange {
                range: Range::plain(0, len, pos, i),
                document: [0; 2],
                keys_begin: i,
                keys_end: i + 1,
                mode: Mode::Only,
            })
            .collect();
        let k: Vec<Range> = (0..).zip(k).map(|(i, &len)| Range::plain(0, len, 0, i)).collect();
        let pairs: Vec<Pair> = (0..k.len() as u32).map(Pair::of).collect();
        let ranges = Ranges { q: &q, k: &k, pairs: &pairs, bands: &[Band::WHOLE] };
        let mut memory = alloc::vec![0u128; bytes(&ranges, rows).div_ceil(16)];
        let bands: Vec<SidedBand> = bands::of_queries(&ranges, window).collect();
        let mut scratch = SortBuffers::default();
        let mut writer = Writer::new(bytemuck::cast_slice_mut(&mut memory), 0);
        let split = write(&mut scratch, &mut writer, &ranges, (&sharing, held), &bands, tile, None);
        assert!(writer.part().filled <= bytes(&ranges, rows));
        let list = |tiles: &[(u64, Work)]| tiles.iter().map(|(_, w)| (w.run, w.first)).collect::<Tiles>();
        let items = split.tiles as u32 * held + split.shared.tiles * split.shared.parts;
        assert!(items as usize <= q.iter().map(|q| q.range.len.div_ceil(ROWS) * held).sum::<u32>() as usize);
        (list(&scratch.tiles), list(&scratch.shared_tiles), split.shared.tiles > 0 && split.shared.begin == 0)
    }

    #[test]
    fn short_ranges_are_shared() {
        let causal = (1 << 62, 0);
        // 40 rows of 8 heads: three tiles, not eight.
        assert_eq!(split((8, 8), &[(40, 0)], &[40], causal).1, [(0, 32), (0, 16), (0, 0)]);
        // A whole tile gains nothing, the rest of the range does.
        let (single, shared, _) = split((8, 8), &[(130, 0)], &[130], causal);
        assert_eq!((single, shared), (alloc::vec![(0, 0)], alloc::vec![(0, 128)]));
        // If rows meet fewer keys than all of them together, a whole tile gains too.
        let (single, shared, _) = split((8, 8), &[(128, 64)], &[192], causal);
        assert_eq!((single.len(), shared.len()), (0, 8));
        // In a long range only the last rows.
        let (single, shared, _) = split((8, 8), &[(2048 + 17, 64)], &[4000], causal);
        assert_eq!((single.len(), shared), (16, alloc::vec![(0, 2064), (0, 2048)]));
        // Five of eight places taken: 100 rows would be seven tiles, not five.
        let (single, shared, _) = split((5, 5), &[(100, 0), (60, 0)], &[100, 60], causal);
        assert_eq!((single, shared.len()), (alloc::vec![(0, 0)], 4));
        // Stretches of 192 rows: none of the first is worth more tiles, and the rest of a long range is up to 191 rows.
        let (single, shared, _) = split_of((8, 8), &[(192 + 17, 0)], &[209], causal, 192);
        assert_eq!((single, shared), (alloc::vec![(0, 0)], alloc::vec![(0, 208), (0, 192)]));
        let (single, shared, _) = split_of((12, 12), &[(5 * 192 + 191, 0)], &[5 * 192 + 191], causal, 192);
        assert_eq!((single.len(), shared.len()), (5, 12));
        // Ranges without rows have no tiles; those without keys have.
        assert_eq!(split((8, 8), &[(0, 0), (5, 0)], &[7, 0], causal).1, [(1, 0)]);
    }

    /// The longest work comes first: a row of many keys before tiles of fewer.
    #[test]
    fn the_longest_come_first() {
        let causal = (1 << 62, 0);
        assert!(split((8, 8), &[(128, 0), (1, 5000)], &[128, 5001], causal).2);
        assert!(!split((8, 8), &[(128, 4992), (1, 0)], &[5120, 1], causal).2);
    }
}
