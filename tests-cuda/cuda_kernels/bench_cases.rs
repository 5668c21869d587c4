// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cases of the bench that compare a kernel with another form of itself: the other form has to do the call. Else
//! the bench would compare a kernel with itself.
//!
//! The stand-in driver checks and counts launches and does nothing else (`CPATTN_EMU_IDLE`), so that calls have the
//! sizes of the bench and hardly any memory.

use crate::device::{Device, Memory, emulated_count, has_kernel};
use crate::hopper::alone_with;
use case::{Case, Kind};
use cpattn::Dtype;
use cpattn::call::{Attend, Band, HeadMap, Mode, Pair, QRange, Range, Ranges, Score};

/// What the bench's own reader returns.
type Result<T> = core::result::Result<T, String>;

/// That reader.
#[path = "../../benches/cuda/case.rs"]
#[allow(dead_code, reason = "the bench uses the rest")]
mod case;

/// The text of all cases, where the repository is: not on a machine that has the built program alone.
fn cases() -> Option<String> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = std::fs::read_to_string(root.join("benches/peers/cases.txt")).ok();
    assert!(text.is_some() || !root.join(".ci").exists(), "benches/peers/cases.txt is missing");
    text
}

/// Launches of both forward kernels for `sm_90a` by a case: in clusters, and without.
fn launched(device: &Device, memory: &Memory, case: &Case) -> [u64; 2] {
    let (mut row, mut k) = (0, Vec::new());
    for (doc, &len) in (0..).zip(&case.lengths) {
        k.push(Range::plain(row, len as u32, 0, doc));
        row += len as i64;
    }
    let q_range = |(i, &range)| QRange { range, document: [0; 2], keys_begin: i, keys_end: i + 1, mode: Mode::Only };
    let q: Vec<QRange> = (0..).zip(&k).map(q_range).collect();
    let pairs: Vec<Pair> = (0..k.len() as u32).map(Pair::of).collect();
    // All tensors begin where the memory does; the driver does not run the kernel.
    let of =
        |dtype, heads: usize, dim: usize| memory.tensor(dtype, case.tokens(), heads as u32, dim as u32, heads * dim);
    let [q_, k_, v, o] = [
        (case.heads, case.head_dim),
        (case.kv_heads, case.head_dim),
        (case.kv_heads, case.value_dim),
        (case.heads, case.value_dim),
    ]
    .map(|(heads, dim)| of(case.dtype, heads, dim));
    let window_right = if case.causal { 0 } else { i64::MAX };
    let call = Attend {
        lse: of(Dtype::F32, case.heads, 1),
        ..Attend::new(
            [q_, k_, v, o],
            HeadMap { q_offset: 0, kv_offset: 0, group: (case.heads / case.kv_heads) as u32 },
            Score { scale: 0.1, softcap: 0.0, window_left: i64::MAX, window_right },
            Ranges { q: &q, k: &k, pairs: &pairs, bands: &[Band::WHOLE] },
        )
    };
    let counts =
        || [c"cpattn_hopper_cluster", c"cpattn_hopper_forward"].map(|name| emulated_count(name).expect("asked before"));
    let before = counts();
    let bytes = device.attend_bytes(&call);
    let mut kernels = device.kernels(bytes, 1);
    // SAFETY: the driver runs nothing, and the call's lists are copied before this returns.
    unsafe { device.attend(&call, &mut kernels, device.stream) }.expect("a legal call");
    device.synchronize();
    let after = counts();
    [0, 1].map(|i| after[i] - before[i])
}

#[test]
fn cases_that_ask_for_clusters_have_them() {
    let test = "bench_cases::cases_that_ask_for_clusters_have_them";
    if !alone_with(test, &[("CPATTN_CUDA_CLUSTER", "1"), ("CPATTN_EMU_IDLE", "1")]) {
        return;
    }
    let Some(text) = cases() else { return };
    // Other drivers would run the calls, and devices without clusters refuse the variable.
    if emulated_count(c"boxes").is_none() || std::env::var("CPATTN_EMU_SM").is_ok_and(|sm| sm != "90") {
        return;
    }
    // So does a library without a folder that has them.
    if !has_kernel("hopper_cluster_bf16_128") {
        return;
    }
    let Some(device) = Device::open() else { return };
    let memory = device.upload(&[0; 16]);
    // Without clusters: short documents share tiles; with one head to a kv head there is no pair; a shape has none.
    let others = [
        "packed-forward-bf16-128-gqa64-4k",
        "forward-bf16-128-causal-8k",
        "forward-bf16-64-gqa-causal-8k",
        "forward-bf16-256-gqa-causal-8k",
    ];
    let mut seen = [0; 2];
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let case = Case::parse(line).expect("a case");
        let asked = line.contains("ours-clusters");
        assert!(!asked || case.kind == Kind::Forward, "{line}");
        if asked || others.contains(&&*case.name) {
            let expected = if asked { [1, 0] } else { [0, 1] };
            assert_eq!(launched(&device, &memory, &case), expected, "launches with and without clusters: {line}");
            seen[usize::from(asked)] += 1;
        }
    }
    assert!(seen[0] == others.len() && seen[1] > 0, "{seen:?}");
}

/// The share of the steps of a causal backward for `sm_90a` that heads save by sharing steps (tiles of 64 q rows by 128
/// keys), for the packs of the bench: `ptx/DESIGN.md` prints these figures.
#[test]
fn steps_that_heads_save_are_those_of_the_page() {
    let Some(text) = cases() else { return };
    let mut found = Vec::new();
    for line in text.lines().filter(|line| line.starts_with("packed-forward-bf16-128-gqa64")) {
        let case = Case::parse(line).expect("a case");
        let group = case.heads / case.kv_heads;
        let (mut single, mut shared) = (0, 0);
        for &len in &case.lengths {
            for tile in 0..len.div_ceil(64) {
                let rows = (len - tile * 64).min(64);
                // Tiles of keys that begin at or before the last of these rows.
                let keys = (tile * 64 + rows).div_ceil(128);
                let heads = if rows <= 16 { 4 } else { 1 + usize::from(rows <= 32) };
                single += keys * group;
                shared += keys * group.div_ceil(heads);
            }
        }
        found.push(format!("{:.1} %", 100.0 * (single - shared) as f64 / single as f64));
    }
    let page = include_str!("../../ptx/DESIGN.md");
    let said = page.split("with eight q heads to a kv head: ").nth(1).expect("the sentence");
    let mut said = said.split_inclusive('%').map(|part| part.rsplit(char::is_whitespace).nth(1).expect("a number"));
    assert!(
        found.len() == 4 && found.iter().all(|share| share.starts_with(said.next().expect("a share"))),
        "{found:?}"
    );
}
