// SPDX-License-Identifier: MIT OR Apache-2.0
//! Iterates over own segments and fragments of the circulating side, document by document.

use crate::{layout::Segment, schedule::join::Fragment};

/// Calls `each(first stationary index, stationary segments, first index in order, fragments)` for every document that
/// both sides hold; `order` lists fragments by document.
pub(super) fn documents<'a>(
    stationary: &'a [Segment],
    fragments: &[Fragment],
    order: &'a [u32],
    mut each: impl FnMut(usize, &'a [Segment], usize, &'a [u32]),
) {
    let (mut i, mut j) = (0, 0);
    while i < stationary.len() && j < order.len() {
        let (a, b) = (stationary[i].range.doc, fragments[order[j] as usize].range.doc);
        match a.cmp(&b) {
            core::cmp::Ordering::Less => i += 1,
            core::cmp::Ordering::Greater => j += 1,
            core::cmp::Ordering::Equal => {
                let ie = i + stationary[i..].iter().take_while(|s| s.range.doc == a).count();
                let je = j + order[j..].iter().take_while(|&&f| fragments[f as usize].range.doc == a).count();
                each(i, &stationary[i..ie], j, &order[j..je]);
                (i, j) = (ie, je);
            }
        }
    }
}
