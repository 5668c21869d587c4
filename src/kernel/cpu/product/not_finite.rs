// SPDX-License-Identifier: MIT OR Apache-2.0
//! Rows with numbers that tiles cannot hold, or that must not be multiplied by p = 0. They are processed one by one.

use super::amx_product::{PANEL, TILE};
use super::engine::Values;
use super::forms::TileForm;
use crate::call::RawTensor;
use crate::kernel::cpu::attention::tile::Lanes;
use crate::kernel::cpu::memory::rows::address;
use core::ops::Range;

/// Recomputes the scores of keys and lanes with a number that tiles cannot hold.
///
/// # Safety
/// As [`AttentionEngine::scores_again`](super::engine::AttentionEngine::scores_again).
#[cold]
pub(crate) unsafe fn row_by_row<H: TileForm>(
    lanes: &Lanes<f32>,
    first: usize,
    q: &RawTensor,
    k: &Values<u16>,
    s: *mut f32,
    keys: Range<usize>,
) {
    let dim = q.dim as usize;
    // SAFETY: rows are those of the tensors, and `s` has a number for each key and lane (the contract).
    unsafe {
        let number = |row: *const u8, d: usize| H::read(row.add(d * H::SIZE));
        let tame = |row: *const u8| (0..dim).all(|d| H::in_exact_range(number(row, d)));
        for j in keys.start..keys.end.min(k.rows.len()) {
            if k.rows[j] < 0 {
                continue;
            }
            let key = address(k.tensor, k.rows[j], k.head);
            let tame_key = tame(key);
            for lane in first..lanes.n.min(first + PANEL) {
                let query = address(q, lanes.row[lane], lanes.head[lane]);
                if !tame_key || !tame(query) {
                    let score = (0..dim).map(|d| number(query, d) * number(key, d)).sum();
                    *s.add(j * PANEL + lane - first) = score;
                }
            }
        }
    }
}

/// Adds `p · v` where v is not finite and p is not 0; the tile has zeros there.
///
/// # Safety
/// As [`AttentionEngine::weigh`](super::engine::AttentionEngine::weigh).
#[cold]
pub(crate) unsafe fn not_finite<H: TileForm>(v: &Values<u16>, p: *const u16, o: *mut f32, keys: Range<usize>) {
    for j in keys.start..keys.end.min(v.rows.len()) {
        if v.rows[j] >= 0 {
            // SAFETY: rows are those of the tensor; p and o are as large as for the product.
            unsafe {
                let row = address(v.tensor, v.rows[j], v.head);
                add_where_not_finite::<H>(row, v.tensor.dim as usize, p, j, o);
            }
        }
    }
}

/// `to[dim][..] += p[j][..] · row[dim]` for the row's numbers that are not finite and weights other than 0. `p` is
/// `[j / 32][lane / 16][16 pairs][16 lanes][2]`.
///
/// # Safety
/// `p` has that shape, the row has `dim` elements, and `to` is `[dim][PANEL]`.
pub(crate) unsafe fn add_where_not_finite<H: TileForm>(
    row: *const u8,
    dim: usize,
    p: *const u16,
    j: usize,
    to: *mut f32,
) {
    let mut weights = [0.0; PANEL];
    for (lane, weight) in weights.iter_mut().enumerate() {
        let tile = (j / 32 * (PANEL / 16) + lane / 16) * H::PARTS;
        let at = tile * TILE + j % 32 / 2 * 32 + lane % 16 * 2 + j % 2;
        // SAFETY: within p.
        *weight = (0..H::PARTS).map(|part| H::widen(unsafe { *p.add(at + part * TILE) })).sum();
    }
    for d in 0..dim {
        // SAFETY: within the row.
        let x = unsafe { H::read(row.add(d * H::SIZE)) };
        // SAFETY: row `d` of `to`, which nothing else refers to.
        let to = unsafe { core::slice::from_raw_parts_mut(to.add(d * PANEL), PANEL) };
        if !H::in_exact_range(x) {
            for (to, weight) in to.iter_mut().zip(weights) {
                *to = if weight == 0.0 { *to } else { *to + weight * x };
            }
        }
    }
}
