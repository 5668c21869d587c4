// SPDX-License-Identifier: MIT OR Apache-2.0
//! Scores beyond 2^24, which have no digits below 1: the exponent of a row's largest score is 0 whatever rounding does
//! to it, so one key gives o = v, and p of a backward is at most 1.
//!
//! A row of such scores attends to one key (others are some 1e6 away), so f64 has the same result. dq and dk are sums
//! of do·v − delta, which is 0 but for rounding, times the scale: `run::compare` allows for that.

use crate::case::{Case, Cut};
use crate::device::Device;
use crate::run::{check, forward};
use crate::{all, hopper};
use cpattn::Dtype;
use cpattn::call::Score;

/// Head dims of every compiled shape, and such that do not fill one.
const DIMS: [(usize, usize); 8] =
    [(64, 64), (8, 8), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (320, 264)];

/// Scales at which scores are about 2^30, 2^36 and 2^103: in f16, in bf16, and far beyond both, weights would overflow.
const SCALES: [f64; 3] = [1e8, 1e10, 1e30];

fn large(name: &'static str, dtype: Dtype, dims: (usize, usize), scale: f64) -> Case {
    let base = Case::new(name, dtype, dims);
    Case { documents: vec![(1, 1, 0), (70, 90, 20)], score: Score { scale, ..base.score }, ..base }
}

/// Both types at every shape, forward and all backwards.
#[test]
fn every_kernel() {
    let cases = DIMS
        .iter()
        .zip(SCALES.iter().cycle())
        .enumerate()
        .map(|(i, (&dims, &scale))| large("large scores", [Dtype::F16, Dtype::Bf16][i % 2], dims, scale));
    all(&cases.collect::<Vec<_>>());
}

/// The forwards for `sm_90a`, where the device has them.
#[test]
fn forwards_of_hopper() {
    let mut cases = Vec::new();
    for dims in [(64, 64), (128, 128), (192, 128), (256, 256)] {
        for (dtype, scale) in [(Dtype::F16, 1e8), (Dtype::Bf16, 1e30)] {
            let case = large("large scores", dtype, dims, scale);
            // Tiles without a mask too, and a step that is not the first.
            let open = Score { window_right: i64::MAX, ..case.score };
            cases.extend([Case { documents: vec![(130, 300, 170)], score: open, ..case.clone() }, case]);
        }
    }
    hopper::all(&cases);
}

/// Dropout's own kernels: what is kept is divided by the probability to be kept.
#[test]
fn dropout() {
    for dims in [(64, 64), (128, 128), (320, 264)] {
        let case = large("large scores", Dtype::Bf16, dims, 1e10);
        all(&[Case { dropout: Some((0.3, 7)), ..case }]);
    }
}

/// Calls that are merged, every option, and scales that make scores before the exponent.
#[test]
fn options() {
    let base = Case { heads: 4, kv_heads: 2, held: 0..4, ..large("large scores", Dtype::Bf16, (64, 64), 1e10) };
    let scaled = |scale| Score { scale, ..base.score };
    let open = Score { window_right: i64::MAX, ..base.score };
    all(&[
        Case { sinks: true, ..base.clone() },
        Case { alibi_slopes: true, ..base.clone() },
        Case { score: scaled(-1e10), ..base.clone() },
        Case { cut: Cut::Chunks(3), ring_steps: 2, sinks: true, ..base.clone() },
        Case { cut: Cut::Striped(2, 5), ring_steps: 2, score: open, ..base.clone() },
        // Whole tiles on both sides.
        Case { documents: vec![(128, 256, 128)], score: open, ..base.clone() },
    ]);
}

/// Rows of usual scores have the bits that they have without large rows beside them.
#[test]
fn rows_beside_large_ones() {
    let Some(device) = Device::open() else { return };
    for dims in [(64, 64), (128, 128), (256, 256), (320, 264)] {
        let usual = Case { documents: vec![(70, 90, 20)], ..Case::new("beside large rows", Dtype::Bf16, dims) };
        let mixed = Case { q_factor: |token| if token % 2 == 1 { 1e10 } else { 1.0 }, ..usual.clone() };
        let rows = |o: &[f64], dim: usize| -> Vec<Vec<f64>> {
            o.chunks(usual.heads * dim).step_by(2).map(<[f64]>::to_vec).collect()
        };
        assert_eq!(rows(&forward(&device, &usual), dims.1), rows(&forward(&device, &mixed), dims.1), "o, {dims:?}");
        let [usual, mixed] = [&usual, &mixed].map(|case| check(&device, case));
        for (a, b) in [(&usual.all, &mixed.all), (&usual.apart, &mixed.apart)] {
            assert_eq!(rows(&a[0], dims.0), rows(&b[0], dims.0), "dq, {dims:?}");
        }
    }
}
