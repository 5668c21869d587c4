// SPDX-License-Identifier: MIT OR Apache-2.0
//! Figures and tables in readable form.

use alloc::{
    string::{String, ToString},
    vec::Vec,
};
use core::fmt::Write;

/// 1234567 as `1,234,567`.
pub(super) fn grouped(n: u128) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// Rows of cells, each column as wide as its widest cell: the first `left` columns to the left, figures to the right.
pub(super) struct TextTable {
    left: usize,
    rows: Vec<Vec<String>>,
}

impl TextTable {
    pub(super) fn new(left: usize) -> Self {
        Self { left, rows: Vec::new() }
    }

    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = impl ToString>) {
        self.rows.push(cells.into_iter().map(|cell| cell.to_string()).collect());
    }

    pub(super) fn write(&self, out: &mut String) {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| self.rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::from("  ");
            for (c, (cell, &w)) in row.iter().zip(&widths).enumerate() {
                if c < self.left {
                    let _ = write!(line, "{cell:<w$}  ");
                } else {
                    let _ = write!(line, "{cell:>w$}  ");
                }
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }
}

/// Least, mean (rounded to the nearest) and largest, in figures.
pub(super) fn spread(values: &[u128]) -> [String; 3] {
    let n = values.len().max(1) as u128;
    let (least, largest) = (values.iter().min().copied(), values.iter().max().copied());
    let mean = (values.iter().sum::<u128>() + n / 2) / n;
    [least.unwrap_or(0), mean, largest.unwrap_or(0)].map(grouped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_grouped_by_three() {
        let text: Vec<String> = [0, 7, 999, 1000, 1234567].into_iter().map(grouped).collect();
        assert_eq!(text, ["0", "7", "999", "1,000", "1,234,567"]);
    }
}
