// SPDX-License-Identifier: MIT OR Apache-2.0
//! The forward kernels for `sm_90a` on the cases of the others, at the head dims that they have shapes for. Their tiles
//! are 128 q rows by 128 keys (112 at head dims above 128, 80 above 192; 128 where those of v are at most 128), in two
//! warpgroups of 64 rows each; at head dims up to 64 there are three.
//!
//! On a device of another compute capability the same cases run on the kernels for `sm_80`.

use crate::case::{Case, Cut, decode, encode, random};
use crate::device::{Device, emulated_count};
use crate::run::{check, forward};
use crate::runs_repeat_of;
use crate::slow::{self, Turn};
use cpattn::Dtype;
use cpattn::call::{Attend, Band, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score};
use cpattn::kernel::cuda::StreamKernels;
use std::sync::Mutex;

/// Tests that change how many multiprocessors are left free wait for each other here.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Head dims of the shapes.
const EVERY: [(usize, usize); 6] = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)];

/// The same, and some that do not fill them.
const DIMS: [(usize, usize); 13] = [
    (64, 64),
    (40, 24),
    (96, 96),
    (72, 88),
    (128, 128),
    (104, 128),
    (128, 72),
    (192, 128),
    (168, 120),
    (192, 192),
    (136, 160),
    (256, 256),
    (216, 200),
];

pub fn all(cases: &[Case]) {
    let _turn = turn();
    let Some(device) = Device::open_hopper() else { return };
    for case in cases {
        forward(&device, case);
    }
}

pub fn turn() -> impl Drop {
    // Another test's failure is its own.
    ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

pub fn of(dtype: Dtype, (head_dim, value_dim): (usize, usize), base: &Case) -> Case {
    let score = Score { scale: (head_dim as f64).sqrt().recip(), ..base.score };
    Case { dtype, head_dim, value_dim, score, ..base.clone() }
}

/// Lengths around the tiles and the rows of a warpgroup, documents without queries or keys.
#[test]
fn lengths() {
    let mut cases = Vec::new();
    for documents in [
        vec![(1, 1, 0), (1, 3, 2), (2, 1, -1), (0, 5, 5), (5, 0, -5)],
        vec![(63, 64, 1), (64, 127, 63), (65, 128, -2)],
        vec![(127, 129, 2), (128, 257, 129), (129, 255, 200)],
        vec![(300, 40, -260), (17, 500, 483)],
    ] {
        for dims in EVERY {
            for dtype in [Dtype::Bf16, Dtype::F16] {
                cases.push(Case { documents: documents.clone(), ..Case::new("hopper lengths", dtype, dims) });
            }
        }
    }
    all(&cases);
}

/// Head dims, filled and not.
#[test]
fn dims() {
    let base =
        Case { documents: vec![(5, 0, 0), (140, 290, 150), (0, 9, 0)], ..Case::new("hopper dims", Dtype::F16, (8, 8)) };
    all(&DIMS.map(|dims| of(Dtype::Bf16, dims, &base)));
    all(&DIMS.map(|dims| of(Dtype::F16, dims, &base)));
}

/// Full, causal, windows on both sides, windows that hide everything, and such that hide the first tiles of a row.
#[test]
fn windows() {
    let base =
        Case { documents: vec![(200, 330, 130), (33, 47, 14)], ..Case::new("hopper windows", Dtype::Bf16, (128, 128)) };
    let windows = [(i64::MAX, i64::MAX), (i64::MAX, 0), (10, 0), (0, 0), (130, 70), (i64::MAX, 5), (0, i64::MAX)];
    all(&windows.map(|(window_left, window_right)| Case {
        score: Score { window_left, window_right, ..base.score },
        ..base.clone()
    }));
}

/// Softcap, ALiBi, sinks, and scales that are not positive or nearly 0.
#[test]
fn scores() {
    let base = Case {
        documents: vec![(140, 300, 160)],
        heads: 4,
        kv_heads: 2,
        held: 0..4,
        ..Case::new("hopper scores", Dtype::F16, (128, 128))
    };
    all(&base.with_scores());
}

/// Groups of heads, and calls that hold only some heads of the problem.
#[test]
fn heads() {
    let base = Case {
        documents: vec![(140, 170, 30)],
        heads: 6,
        kv_heads: 2,
        held: 0..6,
        alibi_slopes: true,
        sinks: true,
        ..Case::new("hopper heads", Dtype::Bf16, (128, 128))
    };
    all(&[base.clone(), Case { held: 1..5, ..base.clone() }, Case { held: 4..6, ..base.clone() }]);
}

/// Ranges of every kind, keys spread over several calls, so that results are merged.
#[test]
fn ranges() {
    let base = Case {
        documents: vec![(200, 200, 0), (137, 361, 224)],
        sinks: true,
        ..Case::new("hopper ranges", Dtype::Bf16, (128, 128))
    };
    let open = Score { window_right: i64::MAX, ..base.score };
    let narrow = Score { window_left: 20, ..base.score };
    let cases = [
        Case { cut: Cut::Chunks(3), ..base.clone() },
        Case { cut: Cut::Chunks(5), ring_steps: 3, ..base.clone() },
        Case { cut: Cut::Striped(3, 1), ring_steps: 3, ..base.clone() },
        Case { cut: Cut::Striped(2, 5), ring_steps: 2, alibi_slopes: true, score: narrow, ..base.clone() },
        // Rows that meet their first key in the last call.
        Case { cut: Cut::Chunks(3), ring_steps: 2, score: narrow, ..base.clone() },
        Case { cut: Cut::Striped(4, 16), ring_steps: 2, score: open, ..base.clone() },
    ];
    all(&cases);
    all(&[
        of(Dtype::F16, (64, 64), &cases[1]),
        of(Dtype::F16, (192, 128), &cases[3]),
        of(Dtype::F16, (256, 256), &cases[1]),
        of(Dtype::F16, (96, 96), &cases[0]),
        of(Dtype::F16, (192, 192), &cases[3]),
    ]);
}

/// The same call gives the same bits, whatever order warps ran in, and however many blocks there were.
#[test]
fn runs_repeat() {
    if slow::left_out(Turn::Second) {
        return;
    }
    let _turn = turn();
    let Some(device) = Device::open_hopper() else { return };
    runs_repeat_of(&device, "hopper repeat", &EVERY, forward);
}

/// Forward by one family and backward by the other agree on lse and o.
#[test]
fn gradients_follow() {
    let _turn = turn();
    let Some(device) = Device::open_hopper() else { return };
    for dims in EVERY {
        check(&device, &Case { documents: vec![(150, 200, 50)], ..Case::new("hopper gradients", Dtype::Bf16, dims) });
    }
}

/// Whether this process runs one test only; if not, makes one that does. The stand-in driver counts what a process
/// does.
pub fn alone(test: &str) -> bool {
    alone_with(test, &[])
}

/// The same in a process with these environment variables.
pub fn alone_with(test: &str, variables: &[(&str, &str)]) -> bool {
    if std::env::var_os("CPATTN_COUNTS_ALONE").is_some() {
        return true;
    }
    let child = std::process::Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", test, "--nocapture"])
        .env("CPATTN_COUNTS_ALONE", "1")
        .envs(variables.iter().copied())
        .output()
        .expect("a process");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(child.status.success(), "{}{}", text(&child.stdout), text(&child.stderr));
    false
}

/// A call with two heads of q and k and one range each; `change` makes other tensors of the same memory.
pub fn launch(device: &Device, change: impl Fn(&mut Attend)) -> Vec<f64> {
    try_launch(device, change).expect("a legal call")
}

/// The same of a call that may fail.
pub fn try_launch(device: &Device, change: impl Fn(&mut Attend)) -> cpattn::Result<Vec<f64>> {
    let mut kernels = device.kernels(4096, 2);
    launch_with(device, &mut kernels, change)
}

/// o and lse of the same call.
pub fn launch_lse(device: &Device) -> (Vec<f64>, Vec<f64>) {
    let lse = device.upload(&[0; 40 * 2 * 4]);
    let o = launch(device, |call| call.lse = lse.tensor(Dtype::F32, 40, 2, 1, 2));
    (o, device.download(&lse).chunks_exact(4).map(|b| decode(Dtype::F32, b)).collect())
}

/// The same with a ring of the caller's.
fn launch_with(device: &Device, kernels: &mut StreamKernels, change: impl Fn(&mut Attend)) -> cpattn::Result<Vec<f64>> {
    const TOKENS: usize = 40;
    let input = |seed, heads: usize| {
        let numbers = random(TOKENS * heads * 64, seed);
        device.upload(&numbers.into_iter().flat_map(|x| encode(Dtype::Bf16, x)).collect::<Vec<_>>())
    };
    let [q, k, v, o] = [1, 2, 3, 4].map(|seed| input(seed, 2));
    let lse = device.upload(&[0; TOKENS * 2 * 4]);
    let tensor = |m: &crate::device::Memory| m.tensor(Dtype::Bf16, TOKENS, 2, 64, 128);
    let range = Range::plain(0, TOKENS as u32, 0, 0);
    let ranges = [QRange { range, document: [0; 2], keys_begin: 0, keys_end: 1, mode: Mode::Only }];
    let keys = [range];
    let mut call = Attend {
        lse: lse.tensor(Dtype::F32, TOKENS, 2, 1, 2),
        ..Attend::new(
            [tensor(&q), tensor(&k), tensor(&v), tensor(&o)],
            HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
            Score { scale: 0.125, softcap: 0.0, window_left: i64::MAX, window_right: i64::MAX },
            Ranges { q: &ranges, k: &keys, pairs: &[Pair { k: 0, band: 0 }], bands: &[Band::WHOLE] },
        )
    };
    change(&mut call);
    // SAFETY: everything lives until the download below; changed tensors lie in the same memory.
    unsafe { device.attend(&call, kernels, device.stream) }?;
    Ok(device.download(&o).chunks_exact(2).map(|b| decode(Dtype::Bf16, b)).collect())
}

/// A launch leaves the counter of its items at zero for the next one, and nothing is cleared in between: with blocks
/// that take several items and with one for each, after calls that failed, and after such that ran as the kernel for
/// `sm_80`.
#[test]
fn counters_come_back_to_zero() {
    if !alone("hopper::counters_come_back_to_zero") {
        return;
    }
    let Some(device) = Device::open_hopper() else { return };
    let expected = launch(&device, |_| ());
    let mut kernels = device.kernels(4096, 2);
    let before = emulated_count(c"fills");
    for n in 0..9 {
        device.cuda.set_sm_margin(if n % 2 == 0 { u32::MAX } else { 0 });
        match n {
            // Nothing is launched.
            3 | 4 => {
                let error = launch_with(&device, &mut kernels, |call| call.o = RawTensor::NONE);
                assert!(error.is_err_and(|e| e.to_string().contains("a tensor: a mode")), "{n}");
            }
            // No map describes a stride of 0.
            6 => {
                launch_with(&device, &mut kernels, |call| call.k.head_stride = 0).expect("a legal call");
            }
            _ => {
                let o = launch_with(&device, &mut kernels, |_| ()).expect("a legal call");
                assert!(o == expected, "launch {n}");
            }
        }
    }
    assert_eq!(emulated_count(c"fills"), before, "nothing is cleared between launches");
}

/// Devices of compute capability 9.0 take these kernels, all others those for `sm_80`, and so do calls whose tensors
/// maps cannot describe: they compute the same.
#[test]
fn the_family_follows_device_and_tensors() {
    if !alone("hopper::the_family_follows_device_and_tensors") {
        return;
    }
    let Some(device) = Device::open_hopper() else { return };
    let counts = || [c"cpattn_hopper_forward", c"cpattn_forward"].map(emulated_count);
    let launched = |change: &dyn Fn(&mut Attend)| {
        let before = counts();
        let o = launch(&device, change);
        let by: Vec<_> = before.iter().zip(counts()).map(|(a, b)| b.zip(*a).map(|(b, a)| b - a)).collect();
        (o, [by[0], by[1]])
    };
    let (plain, by) = launched(&|_| ());
    let [Some(hopper), Some(other)] = by else { return };
    let on_hopper = std::env::var("CPATTN_EMU_SM").is_ok_and(|sm| sm == "90");
    assert_eq!([hopper, other], [u64::from(on_hopper), u64::from(!on_hopper)]);

    let close = |what: &str, found: &[f64], expected: &[f64]| {
        for (i, (a, b)) in found.iter().zip(expected).enumerate() {
            assert!((a - b).abs() <= 0.02, "{what}: element {i} is {a}, not {b}");
        }
    };
    // Heads from the last to the first, in q, k and v alike.
    let backwards = |t: &mut RawTensor| {
        t.ptr = t.ptr.wrapping_add(64 * 2);
        t.head_stride = -64;
    };
    let (o, by) = launched(&|call| [&mut call.q, &mut call.k, &mut call.v].into_iter().for_each(backwards));
    assert_eq!(by, [Some(0), Some(1)], "negative strides");
    let swapped: Vec<f64> = plain.chunks(128).flat_map(|row| [&row[64..], &row[..64]].concat()).collect();
    close("heads backwards", &o, &swapped);
    // One head of k and v for both of q, by a stride of 0.
    let one = |t: &mut RawTensor| t.head_stride = 0;
    let (o, by) = launched(&|call| [&mut call.k, &mut call.v].into_iter().for_each(one));
    assert_eq!(by, [Some(0), Some(1)], "strides of 0");
    let grouped = |call: &mut Attend| {
        call.heads.group = 2;
        (call.k.heads, call.v.heads) = (1, 1);
    };
    let (expected, by) = launched(&grouped);
    assert_eq!(by, [Some(u64::from(on_hopper)), Some(u64::from(!on_hopper))], "a group");
    close("heads at one place", &o, &expected);
    // Heads 2^40 bytes apart, of which a call with one q head reads the first; and more rows than a map has coordinates
    // for. One step less of either is a map's.
    let one_head = |call: &mut Attend| [&mut call.q, &mut call.o, &mut call.lse].into_iter().for_each(|t| t.heads = 1);
    let apart = |stride: i64| {
        move |call: &mut Attend| {
            one_head(call);
            [&mut call.k, &mut call.v].into_iter().for_each(|t| t.head_stride = stride);
        }
    };
    let of_tokens =
        |tokens: u64| move |call: &mut Attend| [&mut call.k, &mut call.v].into_iter().for_each(|t| t.tokens = tokens);
    let first = |o: &[f64]| o.chunks(128).flat_map(|row| row[..64].to_vec()).collect::<Vec<_>>();
    for (what, change, is_mapped) in [
        ("heads 2^40 bytes apart", &apart(1 << 39) as &dyn Fn(&mut Attend), false),
        ("heads 16 bytes closer", &apart((1 << 39) - 8), true),
        ("2^31 rows", &of_tokens(1 << 31), false),
        ("a row less", &of_tokens((1 << 31) - 1), true),
    ] {
        let (o, by) = launched(change);
        let expected = u64::from(is_mapped && on_hopper);
        assert_eq!(by, [Some(expected), Some(1 - expected)], "{what}");
        close(what, &first(&o), &first(&plain));
    }
    // Such a group takes its 40 rows in one tile that it shares, for which q has a map of its own: there is none here.
    let (o, by) = launched(&|call| {
        grouped(call);
        backwards(&mut call.q);
    });
    assert_eq!(by, [Some(0), Some(1)], "a group, with negative strides of q");
    let swapped: Vec<f64> = expected.chunks(128).flat_map(|row| [&row[64..], &row[..64]].concat()).collect();
    // o lies where it did, so each head has the other one's rows.
    close("a group backwards", &o, &swapped);
}
