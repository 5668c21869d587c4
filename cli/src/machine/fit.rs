// SPDX-License-Identifier: MIT OR Apache-2.0
//! Fits the figures of a kernel to measured calls: the non-negative ones with the least squares of relative errors.

/// A call: what the time may grow with (flops, rows, keys, edges, 1), and the time.
pub type Sample = ([f64; 5], f64);

/// Seconds for each of the five, none of them negative.
///
/// Coordinate descent: each unknown in turn takes the value that is best with the others held, or 0. The problem is
/// convex, so this ends at its minimum; the columns are scaled first, since they differ by ten orders of magnitude.
pub fn non_negative(samples: &[Sample]) -> [f64; 5] {
    // Relative errors: each row is divided by its time.
    let rows: Vec<[f64; 5]> = samples.iter().map(|(x, t)| x.map(|x| x / t)).collect();
    let scale: [f64; 5] = std::array::from_fn(|i| rows.iter().map(|r| r[i] * r[i]).sum::<f64>().sqrt().max(1e-300));
    let mut y = [0.0; 5];
    for _ in 0..20_000 {
        for i in 0..5 {
            let part = |r: &[f64; 5], j: usize| r[j] / scale[j];
            let rest = |r: &[f64; 5]| 1.0 - (0..5).filter(|&j| j != i).map(|j| part(r, j) * y[j]).sum::<f64>();
            y[i] = rows.iter().map(|r| part(r, i) * rest(r)).sum::<f64>().max(0.0);
        }
    }
    std::array::from_fn(|i| y[i] / scale[i])
}
