// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which keys a query reads.
//!
//! A query attends to a key when both are in the same document, `q_pos − k_pos ≤ left` and `k_pos − q_pos ≤ right`;
//! `None` means no limit on that side. Causal is `right = 0`. Positions count within the document, never within a
//! shard, so a mask means the same however the batch is sharded.

/// A window around the query's position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mask {
    /// How many positions back a query attends; `None`: to the document's start.
    pub left: Option<u32>,
    /// How many positions ahead; `None`: to the document's end.
    pub right: Option<u32>,
}

impl Mask {
    /// Every key of the document.
    pub const fn full() -> Self {
        Self { left: None, right: None }
    }

    /// Keys at or before the query.
    pub const fn causal() -> Self {
        Self { left: None, right: Some(0) }
    }

    /// Keys from `left` before to `right` after the query, both inclusive, and the query's own position.
    pub const fn window(left: u32, right: u32) -> Self {
        Self { left: Some(left), right: Some(right) }
    }

    /// The causal window of `w` tokens that includes the query itself, as model configurations count it. 0 is treated
    /// as 1.
    pub const fn sliding(w: u32) -> Self {
        Self { left: Some(w.saturating_sub(1)), right: Some(0) }
    }

    /// `left` as kernels take it; `i64::MAX` without a limit.
    pub const fn left_limit(self) -> i64 {
        match self.left {
            Some(n) => n as i64,
            None => i64::MAX,
        }
    }

    /// `right` as kernels take it; `i64::MAX` without a limit.
    pub const fn right_limit(self) -> i64 {
        match self.right {
            Some(n) => n as i64,
            None => i64::MAX,
        }
    }

    /// Whether the query attends to the key. Accepts any positions.
    pub const fn allows(self, q_pos: i64, k_pos: i64) -> bool {
        let distance = q_pos as i128 - k_pos as i128;
        let left = match self.left {
            Some(n) => distance <= n as i128,
            None => true,
        };
        let right = match self.right {
            Some(n) => -distance <= n as i128,
            None => true,
        };
        left && right
    }

    /// The mask with the roles of q and k exchanged.
    pub const fn transposed(self) -> Self {
        Self { left: self.right, right: self.left }
    }

    /// How many keys of positions `0..len_k` a query at `q_pos` reads.
    pub fn row_area(self, q_pos: i64, len_k: i64) -> i64 {
        let low = q_pos.saturating_sub(self.left_limit()).max(0);
        let high = q_pos.saturating_add(self.right_limit()).min(len_k.saturating_sub(1));
        high.saturating_sub(low).saturating_add(1).max(0)
    }

    /// The number of allowed (q, k) pairs between queries at positions `a..b` and keys at `0..len_k`. Accepts any
    /// positions; more pairs than an i64 can hold give `i64::MAX`.
    ///
    /// `Σ max(0, min(q + right, len_k − 1) − max(q − left, 0) + 1)`, in closed form: each of the two bounds is a ramp
    /// with one bend.
    pub fn area(self, a: i64, b: i64, len_k: i64) -> i64 {
        if len_k <= 0 {
            return 0;
        }
        // Queries that read at least one key. From here on in i128, where no product of two positions can wrap.
        let a = i128::from(a.max(0i64.saturating_sub(self.right_limit())));
        let b = i128::from(b.min(len_k.saturating_add(self.left_limit())));
        let len_k = i128::from(len_k);
        if b <= a {
            return 0;
        }
        // Σ over q in a..b of min(q + shift, cap).
        let ramp = |shift: i128, cap: i128| -> i128 {
            let bend = (cap - shift).clamp(a, b);
            let n = bend - a;
            let rising = if n > 0 { n * (a + bend - 1) / 2 + n * shift } else { 0 };
            rising + (b - bend) * cap
        };
        let high =
            if self.right.is_none() { (b - a) * (len_k - 1) } else { ramp(self.right_limit().into(), len_k - 1) };
        // max(q − left, 0) = (q − left) − min(q − left, 0)
        let low = if let Some(left) = self.left {
            let n = b - a;
            n * (a + b - 1) / 2 - n * i128::from(left) - ramp(-i128::from(left), 0)
        } else {
            0
        };
        i64::try_from(high - low + (b - a)).unwrap_or(i64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_any_position_have_an_area() {
        for mask in [Mask::full(), Mask::causal(), Mask::window(u32::MAX, 3)] {
            for q_pos in [i64::MIN, -1, 0, i64::MAX] {
                for len_k in [i64::MIN, 0, 5, i64::MAX] {
                    assert!((0..=len_k.max(0)).contains(&mask.row_area(q_pos, len_k)), "{mask:?} {q_pos} {len_k}");
                }
            }
        }
    }

    #[test]
    fn area_is_the_sum_of_its_rows() {
        for mask in [
            Mask::full(),
            Mask::causal(),
            Mask::window(3, 0),
            Mask::window(0, 0),
            Mask::window(2, 4),
            Mask { left: Some(1), right: None },
            Mask { left: None, right: Some(2) },
        ] {
            for len_k in 0..9 {
                for a in -6..14i64 {
                    for b in a..15 {
                        let rows: i64 = (a..b).map(|q| (0..len_k).filter(|&k| mask.allows(q, k)).count() as i64).sum();
                        assert_eq!(mask.area(a, b, len_k), rows, "{mask:?} len_k {len_k} q {a}..{b}");
                        let by_row: i64 = (a..b).map(|q| mask.row_area(q, len_k)).sum();
                        assert_eq!(by_row, rows);
                    }
                }
            }
        }
    }

    #[test]
    fn positions_may_be_any() {
        let ends = [i64::MIN, i64::MIN + 1, -(1 << 62), -1, 0, 1 << 62, i64::MAX - 1, i64::MAX];
        for mask in [Mask::full(), Mask::causal(), Mask::window(3, 0), Mask::window(u32::MAX, u32::MAX)] {
            for q in ends {
                for k in ends {
                    let d = i128::from(q) - i128::from(k);
                    let left = mask.left.is_none_or(|n| d <= i128::from(n));
                    let right = mask.right.is_none_or(|n| -d <= i128::from(n));
                    assert_eq!(mask.allows(q, k), left && right, "{mask:?} {q} {k}");
                    assert!(mask.area(q, k, i64::MAX) >= 0);
                }
                assert!(mask.row_area(q, i64::MAX) >= 0);
            }
        }
        assert_eq!(Mask::full().area(0, 1 << 40, 1 << 40), i64::MAX);
        assert_eq!(Mask::window(3, 0).area((1 << 62) - 2, 1 << 62, i64::MAX), 8);
    }

    #[test]
    fn a_sliding_window_counts_the_query_itself() {
        assert_eq!(Mask::sliding(128), Mask::window(127, 0));
        assert_eq!((0..20).filter(|&k| Mask::sliding(4).allows(10, k)).count(), 4);
    }
}
