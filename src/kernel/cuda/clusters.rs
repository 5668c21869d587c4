// SPDX-License-Identifier: MIT OR Apache-2.0
//! The forward kernels for `sm_90a` in clusters of two blocks: whether clusters are asked for, and which calls can use
//! them.
//!
//! Two q heads of one kv head read the same k and v under any mask. The two blocks of a cluster multiply a tile of one
//! head each, and each block copies half of every tile of keys to both: k and v come from L2 once for two heads. The
//! bits are those of the kernels without clusters, which do all other calls. The speed has not been measured, so
//! clusters are off unless they are asked for.

use super::shapes::SHAPES;
use crate::call::Attend;
use crate::error::{Error, Result};
use alloc::string::String;
use std::ffi::OsString;

/// The environment variable that asks for clusters.
pub(super) const VARIABLE: &str = "CPATTN_CUDA_CLUSTER";

/// Whether there is such a kernel, by the index of [`SHAPES`].
pub(super) const HAS_KERNEL: [bool; SHAPES.len()] = [true, false, true, false, false, false];

/// Whether the environment asks for clusters.
pub(super) fn of_environment() -> Result<bool> {
    from_variable(std::env::var_os(VARIABLE))
}

/// The meaning of a value of the environment variable.
fn from_variable(value: Option<OsString>) -> Result<bool> {
    match value {
        Some(value) if value == "1" => Ok(true),
        Some(value) if !value.is_empty() && value != "0" => {
            Err(Error::invalid(VARIABLE, std::format!("{value:?}"), "0 or 1")
                .hint("or unset it: there are no clusters then"))
        }
        _ => Ok(false),
    }
}

/// The refusal of clusters: `why` the device cannot run kernels for `sm_90a`, or none if other kernels are forced.
pub(super) fn refused(why: Option<String>) -> Error {
    let (why, way_out) = match why {
        Some(why) => (why, "unset CPATTN_CUDA_CLUSTER, or set it to 0"),
        None => (
            "they are kernels for sm_90a, and those for sm_80 are forced".into(),
            "unset CPATTN_CUDA_CLUSTER, or CPATTN_CUDA_FAMILY, or name the family sm_90a",
        ),
    };
    Error::unsupported("clusters of two blocks (CPATTN_CUDA_CLUSTER=1)", why, way_out)
}

/// Whether the q heads of a call are pairs, each of one kv head.
pub(super) fn are_pairs(call: &Attend) -> bool {
    call.heads.group.is_multiple_of(2) && call.heads.q_offset.is_multiple_of(2) && call.q.heads.is_multiple_of(2)
}

#[cfg(test)]
mod tests {
    use super::super::hopper_calls::{split, work_bytes};
    use super::super::metadata_buffer::{SortBuffers, Writer};
    use super::super::shapes;
    use super::*;
    use crate::call::{HeadMap, Mode, QRange, Range, Ranges, RawTensor, Score};
    use crate::element::Dtype;
    use alloc::vec::Vec;
    use std::string::ToString;

    /// Whether the call of a line of `benches/peers/cases.txt` runs in clusters, and the index of its shape.
    fn runs_in_clusters(line: &str) -> (bool, usize) {
        let value =
            |key: &str| line.split_whitespace().find_map(|w| w.strip_prefix(key)?.strip_prefix('=')).expect(key);
        let pair = |key: &str| -> [u32; 2] {
            let (a, b) = value(key).split_once('/').expect("a pair");
            [a, b].map(|n| n.parse().expect("a number"))
        };
        let lengths = value("lengths").split(',').flat_map(|word| {
            let [len, times] = <[u32; 2]>::from(word.split_once('*').map_or_else(
                || (word.parse().expect("a length"), 1),
                |(len, times)| (len.parse().expect("a length"), times.parse().expect("a number")),
            ));
            core::iter::repeat_n(len, times as usize)
        });
        let (mut row, mut k) = (0, Vec::new());
        for (doc, len) in (0..).zip(lengths) {
            k.push(Range::plain(row, len, 0, doc));
            row += i64::from(len);
        }
        let q: Vec<QRange> = (0..)
            .zip(&k)
            .map(|(i, &range)| QRange {
                range,
                document: [range.doc; 2],
                keys_begin: i,
                keys_end: i + 1,
                mode: Mode::Only,
            })
            .collect();
        let pairs: Vec<u32> = (0..k.len() as u32).collect();
        let ([heads, kv_heads], [head_dim, value_dim]) = (pair("heads"), pair("dims"));
        let dtype = if value("dtype") == "f16" { Dtype::F16 } else { Dtype::Bf16 };
        let of = |heads, dim| RawTensor::compact(core::ptr::null_mut(), dtype, row as u64, heads, dim);
        let tensors = [of(heads, head_dim), of(kv_heads, head_dim), of(kv_heads, value_dim), of(heads, value_dim)];
        let right = if value("mask") == "causal" { 0 } else { i64::MAX };
        let score = Score { scale: 1.0, softcap: 0.0, window_left: i64::MAX, window_right: right };
        let map = HeadMap { q_offset: 0, kv_offset: 0, group: heads / kv_heads };
        let call = Attend::new(tensors, map, score, Ranges { q: &q, k: &k, pairs: &pairs });
        let (shape, s) = shapes::find(head_dim, value_dim).expect("a shape");
        let rows = s.forward.rows;
        let mut memory = alloc::vec![0u128; work_bytes(&call, shape, rows).div_ceil(16)];
        let mut writer = Writer::new(bytemuck::cast_slice_mut(&mut memory), 0, 0, None);
        let tiles = split(&call, shape, (0, 0, rows), &mut SortBuffers::default(), &mut writer, (i64::MAX, right));
        (HAS_KERNEL[shape] && are_pairs(&call) && tiles.shared.tiles == 0, shape)
    }

    /// The bench checks only that a case has head dims with clusters. If the call itself could not use them, the bench
    /// would compare a kernel with itself.
    #[test]
    fn cases_of_the_bench_that_ask_for_clusters_have_them() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/peers/cases.txt");
        // The package has neither of the two folders.
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/.ci");
        let Ok(text) = std::fs::read_to_string(path) else {
            assert!(!std::path::Path::new(folder).exists(), "{path} is missing");
            return;
        };
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let asked = |line: &&str| line.contains("ours-clusters");
        let mut seen = [false; SHAPES.len()];
        for line in lines.clone().filter(asked) {
            assert!(line.contains(" kind=forward "), "{line}");
            let (in_clusters, shape) = runs_in_clusters(line);
            assert!(in_clusters, "{line}");
            seen[shape] = true;
        }
        assert_eq!(seen, HAS_KERNEL, "shapes with a case in clusters");
        // Some other calls cannot use clusters: short documents share tiles, and with one head to a kv head there is no
        // pair.
        for name in
            ["packed-forward-bf16-128-gqa64-4k ", "forward-bf16-128-causal-8k ", "forward-bf16-256-gqa-causal-8k "]
        {
            let line = lines.clone().find(|line| line.starts_with(name)).expect(name);
            assert!(!runs_in_clusters(line).0, "{line}");
        }
    }

    #[test]
    fn values_of_the_variable() {
        for (value, asked) in [(None, false), (Some(""), false), (Some("0"), false), (Some("1"), true)] {
            assert_eq!(from_variable(value.map(OsString::from)), Ok(asked));
        }
        for wrong in ["2", "on", " 1", "true"] {
            let error = from_variable(Some(wrong.into())).unwrap_err().to_string();
            assert!(error.starts_with(&std::format!("CPATTN_CUDA_CLUSTER is {wrong:?}, expected 0 or 1")), "{error}");
        }
    }
}
