// SPDX-License-Identifier: MIT OR Apache-2.0
//! The forward for `sm_90a` in clusters of two blocks, as `CPATTN_CUDA_CLUSTER` asks for: against attention in f64, and
//! bit by bit against the same kernels without clusters; and which calls take it.
//!
//! A tile of keys is copied by both blocks of a cluster to both. The cases are such that no heads share a tile: q
//! ranges that fill more than half of their last tile, whose rows meet equally many tiles of keys from its beginning to
//! its end. Devices without these kernels refuse the variable.

use crate::case::{Case, Cut};
use crate::device::{Device, emulated_count, has_kernel};
use crate::hopper::{alone_with, of};
use crate::run::forward;
use cpattn::call::Score;
use cpattn::kernel::cuda::{Cuda, Family};
use cpattn::{Dtype, Error};

pub const VARIABLE: &str = "CPATTN_CUDA_CLUSTER";
const ASKED: &[(&str, &str)] = &[(VARIABLE, "1")];

/// The one kernel, which no library has.
const KERNEL: &str = "hopper_cluster_bf16_128";

/// Head dims of the one shape that has a kernel for clusters.
const DIMS: (usize, usize) = (128, 128);

/// A device whose calls take clusters, and the same without them; none where there are no clusters, which the
/// variable's refusal has to say. Only in a process with one test, in which the variable asks for clusters.
pub fn devices() -> Option<[Device; 2]> {
    let with = Cuda::new(0);
    // SAFETY: this process runs one test, and no other thread of it reads or writes the environment meanwhile.
    unsafe { std::env::remove_var(VARIABLE) };
    let without = Device::open()?;
    if without.cuda.family(Dtype::Bf16, 64, 64) == Ok(Family::Sm80) {
        refused(with, &["9.0"]);
        return None;
    }
    if !has_kernel(KERNEL) {
        apart(with);
        return None;
    }
    Some([Device::of(with)?, without])
}

/// That the device could not be opened, since no library has the kernel, and the message says how to make it.
#[track_caller]
fn apart(opened: cpattn::Result<Cuda>) {
    let error = opened.map(|_| ()).expect_err("no kernel");
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let said = error.to_string();
    let way_out = "ptx/compile --with CLUSTER FOLDER and set CPATTN_CUDA_KERNELS=FOLDER, or unset CPATTN_CUDA_CLUSTER";
    assert!(said.contains(KERNEL) && said.contains(way_out), "{said}");
}

/// That the device could not be opened, for want of clusters, and the message names these too.
#[track_caller]
fn refused(opened: cpattn::Result<Cuda>, named: &[&str]) {
    let error = opened.map(|_| ()).expect_err("no clusters");
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let said = error.to_string();
    for name in ["CPATTN_CUDA_CLUSTER=1", "unset CPATTN_CUDA_CLUSTER"].iter().chain(named) {
        assert!(said.contains(name), "{said}: no `{name}`");
    }
}

/// Launches so far with clusters and without; none where nobody counts.
fn launches() -> Option<[u64; 2]> {
    let of = |name| emulated_count(name);
    Some([of(c"cpattn_hopper_cluster")?, of(c"cpattn_hopper_forward")?])
}

fn is_hopper() -> bool {
    std::env::var("CPATTN_EMU_SM").is_ok_and(|sm| sm == "90")
}

/// Right, and the same bits on both devices. All launches on the first are clustered, or none is.
#[track_caller]
fn same(devices: &[Device; 2], case: &Case, clustered: bool) {
    let before = launches();
    let with = forward(&devices[0], case);
    let between = launches();
    let without = forward(&devices[1], case);
    assert!(with == without, "{case:?}: other bits in clusters");
    let (Some(before), Some(between), Some(after)) = (before, between, launches()) else { return };
    if is_hopper() {
        let [clusters, others] = [between[0] - before[0], between[1] - before[1]];
        let all = after[1] - between[1];
        let expected = if clustered { [all, 0] } else { [0, all] };
        assert_eq!([clusters, others], expected, "{case:?}: launches with and without clusters");
        assert!(all > 0 && after[0] == between[0]);
    }
}

/// Four q heads to two kv heads.
fn base(name: &'static str, dims: (usize, usize)) -> Case {
    let documents = vec![(100, 300, 200), (0, 20, 0)];
    Case { documents, heads: 4, kv_heads: 2, held: 0..4, ..Case::new(name, Dtype::Bf16, dims) }
}

#[test]
fn dims_and_groups() {
    if !alone_with("clusters::dims_and_groups", ASKED) {
        return;
    }
    let Some(devices) = devices() else { return };
    for dims in [(128, 128), (104, 128), (128, 72), (8, 104)] {
        for dtype in [Dtype::Bf16, Dtype::F16] {
            same(&devices, &of(dtype, dims, &base("cluster dims", dims)), true);
        }
    }
    let base = base("cluster groups", DIMS);
    // Two kv heads; one, of which all are pairs; a part of the heads, which begins and ends inside a group.
    for (heads, kv_heads, held) in [(8, 2, 0..8), (16, 1, 0..16), (8, 2, 2..6), (8, 2, 4..8), (2, 1, 0..2)] {
        let documents = vec![(128, 320, 192)];
        let score = Score { window_right: i64::MAX, ..base.score };
        same(&devices, &Case { documents, heads, kv_heads, held, score, ..base.clone() }, true);
    }
}

/// Every mask and score, ranges over several calls, and stretches of many tiles, some of which meet nothing.
#[test]
fn options() {
    if !alone_with("clusters::options", ASKED) {
        return;
    }
    let Some(devices) = devices() else { return };
    let base = base("cluster options", DIMS);
    let open = Score { window_right: i64::MAX, ..base.score };
    for (window_left, window_right) in [(i64::MAX, i64::MAX), (i64::MAX, 0), (0, 0), (150, 40), (i64::MAX, 5)] {
        let score = Score { window_left, window_right, ..base.score };
        // Rows that meet their keys in one tile, so that no window makes a short one cheaper.
        let documents = vec![(100, 100, 0), (110, 120, 5)];
        same(&devices, &Case { documents, score, ..base.clone() }, true);
    }
    for scored in base.with_scores() {
        let documents = vec![(100, 300, 200)];
        same(&devices, &Case { documents, score: Score { window_left: i64::MAX, ..scored.score }, ..scored }, true);
    }
    // Stretches of many tiles, tiles that meet nothing, rows without keys; then ranges of which each fills its
    // tiles, in calls that begin a result, add to it and end it.
    let long = vec![(330, 700, 0), (0, 140, 0), (100, 0, 0), (128, 128, -900)];
    let long = Case { documents: long, score: open, ..base.clone() };
    same(&devices, &long, true);
    let striped = |tokens, cut| Case { documents: vec![(tokens, 560, 0)], cut, ..long.clone() };
    same(&devices, &Case { ring_steps: 3, sinks: true, ..striped(256, Cut::Striped(2, 8)) }, true);
    same(&devices, &Case { ring_steps: 2, ..striped(300, Cut::Striped(3, 1)) }, true);
    // Some of these are short.
    same(&devices, &Case { ring_steps: 2, sinks: true, ..striped(300, Cut::Chunks(3)) }, false);
}

/// A box of k or v is copied once for two heads, those of q as ever.
#[test]
fn keys_are_copied_once_for_two_heads() {
    if !alone_with("clusters::keys_are_copied_once_for_two_heads", ASKED) {
        return;
    }
    let Some(devices) = devices() else { return };
    if emulated_count(c"boxes").is_none() || !is_hopper() {
        return;
    }
    let (base, panels) = (base("cluster boxes", DIMS), 2);
    let score = Score { window_right: i64::MAX, ..base.score };
    let case = Case { documents: vec![(128, 640, 0)], score, ..base };
    let [with, without] = [0, 1].map(|d: usize| {
        let before = emulated_count(c"boxes").expect("asked before");
        forward(&devices[d], &case);
        emulated_count(c"boxes").expect("asked before") - before
    });
    // Four heads, one tile of q rows each; five tiles of keys, of k and of v.
    let (q, keys) = (4 * panels, 4 * 5 * 2 * panels);
    assert_eq!((with, without), (q + keys / 2, q + keys));
}

/// For the kernel of a shape, named as its file: mutants are tried on it (`mutate --only`), so it is small. One cluster
/// takes items of many tiles of keys and of none, and of a mask that begins late.
fn walk() {
    let Some(device) = devices().map(|[device, _]| device) else { return };
    device.cuda.set_sm_margin(device.cuda.multiprocessors() - 2);
    let case = Case { documents: vec![(128, 400, 256), (128, 0, 0)], ..base("cluster walk", DIMS) };
    let before = launches();
    forward(&device, &case);
    if let (Some(before), Some(after)) = (before, launches()) {
        assert_eq!((after[0] > before[0], after[1]), (true, before[1]), "{case:?}: all launches are clustered");
    }
}

#[test]
fn bf16_128() {
    if alone_with("clusters::bf16_128", ASKED) {
        walk();
    }
}

/// One cluster that takes all items, as many as fit, and one multiprocessor, on which there is no cluster.
#[test]
fn grids() {
    if !alone_with("clusters::grids", &[(VARIABLE, "1"), ("CPATTN_EMU_SMS", "5")]) {
        return;
    }
    let Some(devices) = devices() else { return };
    let base = base("cluster grids", DIMS);
    // Items of many tiles of keys, of none, of two and of one.
    let case = Case { documents: vec![(380, 500, 120), (100, 0, 0), (128, 200, 0), (128, 100, 0)], ..base };
    let case = Case { score: Score { window_right: i64::MAX, ..case.score }, ..case };
    for (left, clustered) in [(0, true), (3, true), (2, true), (4, false)] {
        devices.iter().for_each(|d| d.cuda.set_sm_margin(left));
        same(&devices, &case, clustered);
        // The counter is at zero again.
        same(&devices, &case, clustered);
    }
}

/// Calls that cannot: single heads, odd groups, pairs of which the call holds one, tiles that heads share, other head
/// dims.
#[test]
fn calls_without_pairs() {
    if !alone_with("clusters::calls_without_pairs", ASKED) {
        return;
    }
    let Some(devices) = devices() else { return };
    let base = Case { documents: vec![(128, 130, 2)], ..base("not clustered", (128, 128)) };
    let base = Case { score: Score { window_right: i64::MAX, ..base.score }, ..base };
    same(&devices, &base, true);
    for (heads, kv_heads, held) in [(1, 1, 0..1), (4, 4, 0..4), (6, 2, 0..6), (4, 2, 1..3), (4, 2, 1..4), (4, 2, 0..3)]
    {
        same(&devices, &Case { heads, kv_heads, held, ..base.clone() }, false);
    }
    same(&devices, &Case { per_q_head: true, ..base.clone() }, true);
    // Short ranges, and short ends of ranges.
    for documents in [vec![(20, 40, 20)], vec![(128, 130, 2), (7, 9, 0)], vec![(150, 160, 0)]] {
        same(&devices, &Case { documents, ..base.clone() }, false);
    }
    for dims in [(64, 64), (192, 128), (256, 256)] {
        same(&devices, &of(Dtype::Bf16, dims, &base), false);
    }
}

#[test]
fn a_variable_that_says_nothing_is_refused() {
    if alone_with("clusters::a_variable_that_says_nothing_is_refused", &[(VARIABLE, "2")]) {
        for opened in [Cuda::new(0), Cuda::with_family(0, Family::Sm80)] {
            let error = opened.map(|_| ()).expect_err("no such number of blocks").to_string();
            assert!(error.starts_with("CPATTN_CUDA_CLUSTER is \"2\", expected 0 or 1"), "{error}");
        }
    }
}

/// Kernels for `sm_80` that are forced have no clusters, whether the environment or the program names them.
#[test]
fn a_family_without_clusters_is_refused() {
    let test = "clusters::a_family_without_clusters_is_refused";
    if alone_with(test, &[(VARIABLE, "1"), (Family::VARIABLE, "sm_80")]) && is_hopper() {
        for opened in [Cuda::new(0), Cuda::with_family(0, Family::Sm80)] {
            refused(opened, &["sm_80 are forced", "CPATTN_CUDA_FAMILY"]);
        }
        let named = Cuda::with_family(0, Family::Sm90a);
        if !has_kernel(KERNEL) {
            return apart(named);
        }
        let cuda = named.expect("what a program names comes first");
        assert_eq!(cuda.clusters(Dtype::Bf16, 128, 128), Ok(true));
    }
}

#[test]
fn a_device_without_clusters_is_refused() {
    let test = "clusters::a_device_without_clusters_is_refused";
    if alone_with(test, &[(VARIABLE, "1"), ("CPATTN_EMU_SM", "80")]) && emulated_count(c"boxes").is_some() {
        for opened in [Cuda::new(0), Cuda::with_family(0, Family::Sm80)] {
            refused(opened, &["device 0 has compute capability 8.0", "9.0"]);
        }
        // Where both are asked for, the family is refused first.
        let said = Cuda::with_family(0, Family::Sm90a).map(|_| ()).expect_err("no kernels").to_string();
        assert!(said.contains("the kernels for sm_90a") && said.contains("CPATTN_CUDA_FAMILY"), "{said}");
    }
}

/// With clusters there is one kernel more to load, and it is loaded where the others are.
#[test]
fn kernels_are_prepared() {
    if alone_with("clusters::kernels_are_prepared", ASKED) && is_hopper() && has_kernel(KERNEL) {
        let Some(device) = Device::open() else { return };
        let Some(before) = emulated_count(c"cuModuleLoadData") else { return };
        let loaded = || emulated_count(c"cuModuleLoadData").expect("asked before") - before;
        device.cuda.prepare(Dtype::Bf16, 128, 128).expect("the kernels");
        // Two forwards, the backward, and the three that no head dim changes.
        assert_eq!(loaded(), 6);
        assert!(device.cuda.is_prepared(Dtype::Bf16, 128, 128).expect("a shape"));
        let before = launches().expect("counted");
        forward(&device, &Case { documents: vec![(100, 300, 200)], ..base("prepared", (128, 128)) });
        assert_eq!((loaded(), launches().expect("counted")), (6, [before[0] + 1, before[1]]));
    }
}
