// SPDX-License-Identifier: MIT OR Apache-2.0
//! The median of measured values, for benchmarks.

/// The upper of the two middle values where their number is even.
pub fn median(mut x: Vec<f64>) -> f64 {
    x.sort_unstable_by(f64::total_cmp);
    x[x.len() / 2]
}
