// SPDX-License-Identifier: MIT OR Apache-2.0
//! The bands of a call as the kernels read them: which rows of an own tile meet which rows of a partner, by position.
//!
//! A kernel whose tiles are q rows reads the table of [`of_queries`], and one whose tiles are keys that of [`of_keys`].
//! The window of the call is in each band, so that kernels know of no other mask. `ptx/shared/ranges.cuh` computes the
//! same from a band as [`SidedBand::reach`].

use crate::call::{Band, Range, Ranges};
use crate::kernel::cuda::abi::params::SidedBand;
use crate::kernel::cuda::memory::metadata_writer::Writer;

/// No position is as far from 0.
const FAR: i64 = 1 << 61;
/// No two positions are as far apart.
const WIDE: i64 = 1 << 62;

impl SidedBand {
    /// A band that allows nothing.
    const NOTHING: Self =
        Self { own_from: 0, own_to: 0, partner_from: 0, partner_to: 0, before: 0, after: 0, shift: 0 };

    /// A band as q rows see it, with the window of the call.
    pub(in crate::kernel::cuda) fn of_queries(band: &Band, window: (i64, i64)) -> Self {
        let (low, high) = band.distances(window);
        let far = |x: i64| x.clamp(-FAR, FAR);
        // Of positions, the distance of a pair is less than `WIDE` either way. Both sums are exact: the shift is small.
        let least = i128::from(low) - i128::from(band.shift);
        let most = i128::from(high) - i128::from(band.shift);
        let (wide, least_wide) = (i128::from(WIDE), -i128::from(WIDE));
        let out = Self {
            own_from: far(band.q_begin),
            own_to: far(band.q_end),
            partner_from: far(band.k_begin),
            partner_to: far(band.k_end),
            before: if low == i64::MIN { WIDE } else { (-least).clamp(least_wide, wide) as i64 },
            after: if high == i64::MAX { WIDE } else { most.clamp(least_wide, wide) as i64 },
            shift: band.shift,
        };
        if out.own_from >= out.own_to || out.partner_from >= out.partner_to || low > high {
            return Self::NOTHING;
        }
        out
    }

    /// The band as the other side sees it.
    pub(in crate::kernel::cuda) fn transposed(&self) -> Self {
        Self {
            own_from: self.partner_from,
            own_to: self.partner_to,
            partner_from: self.own_from,
            partner_to: self.own_to,
            before: self.after,
            after: self.before,
            shift: -self.shift,
        }
    }

    /// The positions of partners that own rows at `lowest..=highest` may meet, first and last; `None` if there are
    /// none.
    pub(in crate::kernel::cuda) fn reach(&self, lowest: i64, highest: i64) -> Option<(i64, i64)> {
        let (from, to) = (lowest.max(self.own_from), highest.min(self.own_to - 1));
        if from > to {
            return None;
        }
        let (first, last) = ((from - self.before).max(self.partner_from), (to + self.after).min(self.partner_to - 1));
        (first <= last).then_some((first, last))
    }

    /// How many rows of a partner own rows at `lowest..=highest` may meet.
    pub(in crate::kernel::cuda) fn rows_met(&self, partner: &Range, lowest: i64, highest: i64) -> u64 {
        self.reach(lowest, highest)
            .map_or(0, |(first, last)| partner.rows_before(last + 1).saturating_sub(partner.rows_before(first)).into())
    }
}

/// The bands of a call, as q rows see them.
pub(in crate::kernel::cuda) fn of_queries(ranges: &Ranges, window: (i64, i64)) -> impl Iterator<Item = SidedBand> {
    ranges.bands.iter().map(move |band| SidedBand::of_queries(band, window))
}

/// Writes a table of bands.
pub(in crate::kernel::cuda) fn write<'a>(
    writer: &mut Writer<'a>,
    ranges: &Ranges,
    bands: impl Iterator<Item = SidedBand>,
) -> (&'a [SidedBand], u64) {
    let (table, at) = writer.array::<SidedBand>(ranges.bands.len());
    for (out, band) in table.iter_mut().zip(bands) {
        *out = band;
    }
    (table, at)
}
