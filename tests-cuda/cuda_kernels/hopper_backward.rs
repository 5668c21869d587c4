// SPDX-License-Identifier: MIT OR Apache-2.0
//! The backward kernels for `sm_90a` against attention in f64, with every option and kind of range; which calls they
//! take; and that they give the same bits in every order of blocks and warps.
//!
//! Tiles are 64 q rows by 128 keys; at head dims 192 and 128 (`MLA`) the steps have an order of their own. At 256
//! (`LARGE`) tiles have 64 keys, and the two warpgroups make different products. On a device of another compute
//! capability the same cases run on the kernels for `sm_80`.

use crate::case::{Case, Cut, encode, random};
use crate::device::{Device, Memory, emulated_count};
use crate::hopper::{alone, alone_with, of, turn};
use crate::run::check;
use crate::runs_repeat_of;
use crate::slow::{self, Turn};
use cpattn::Dtype;
use cpattn::call::{AttendBackward, Band, Gradients, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score};
use cpattn::kernel::cuda::{Cuda, Family};

const DIMS: (usize, usize) = (128, 128);
const MLA: (usize, usize) = (192, 128);
const LARGE: (usize, usize) = (256, 256);

pub fn all(cases: &[Case]) {
    let _turn = turn();
    let Some(device) = Device::open_hopper() else { return };
    for case in cases {
        check(&device, case);
    }
}

/// Lengths around the tiles, documents without queries or keys.
#[test]
fn lengths() {
    let new = |documents: &[(usize, usize, i64)], dtype| Case {
        documents: documents.to_vec(),
        ..Case::new("hopper backward lengths", dtype, DIMS)
    };
    all(&[
        new(&[(76, 270, 194), (20, 0, 0), (0, 20, 0)], Dtype::Bf16),
        new(&[(1, 1, 0), (1, 3, 2), (2, 1, -1), (0, 5, 5), (5, 0, -5)], Dtype::F16),
        new(&[(63, 127, 64), (65, 129, 64)], Dtype::Bf16),
        new(&[(64, 128, 64), (128, 128, 0), (129, 40, -80)], Dtype::F16),
        of(Dtype::F16, MLA, &new(&[(76, 270, 194), (20, 0, 0), (0, 20, 0)], Dtype::F16)),
        of(Dtype::Bf16, MLA, &new(&[(1, 1, 0), (63, 127, 64), (65, 129, 64), (5, 0, -5)], Dtype::Bf16)),
        of(Dtype::F16, LARGE, &new(&[(76, 150, 74), (20, 0, 0), (0, 20, 0)], Dtype::F16)),
        of(Dtype::Bf16, LARGE, &new(&[(1, 1, 0), (63, 65, 2), (65, 63, -2), (5, 0, -5)], Dtype::Bf16)),
        of(Dtype::F16, LARGE, &new(&[(64, 64, 0), (129, 40, -80)], Dtype::F16)),
    ]);
}

/// Head dims that do not fill the shape.
#[test]
fn dims() {
    let base = Case { documents: vec![(70, 150, 80)], ..Case::new("hopper backward dims", Dtype::F16, (8, 8)) };
    all(&[(104, 128), (128, 72), (8, 104), (120, 8)].map(|dims| of(Dtype::Bf16, dims, &base)));
    all(&[(64, 64), (40, 24), (8, 56), (64, 8)].map(|dims| of(Dtype::F16, dims, &base)));
    all(&[MLA, (136, 128), (184, 72), (160, 8), (144, 120)].map(|dims| of(Dtype::Bf16, dims, &base)));
    all(&[(200, 256), (256, 72), (8, 232), (248, 8)].map(|dims| of(Dtype::F16, dims, &base)));
}

/// Full, causal, windows on both sides, and windows that hide everything.
#[test]
fn windows() {
    if slow::left_out(Turn::Second) {
        return;
    }
    let base = Case {
        documents: vec![(140, 200, 60), (33, 47, 14)],
        ..Case::new("hopper backward windows", Dtype::Bf16, DIMS)
    };
    let windows = [(i64::MAX, i64::MAX), (10, 0), (0, 0), (70, 30), (i64::MAX, 5), (0, i64::MAX)];
    let with = |base: &Case, (window_left, window_right)| Case {
        score: Score { window_left, window_right, ..base.score },
        ..base.clone()
    };
    all(&windows.map(|window| with(&base, window)));
    for dims in [MLA, LARGE] {
        let base = of(Dtype::F16, dims, &base);
        all(&windows.map(|window| with(&base, window)));
    }
}

/// Softcap, ALiBi, sinks, and scales that are not positive or nearly 0.
#[test]
fn scores() {
    if slow::left_out(Turn::Second) {
        return;
    }
    let base = Case {
        documents: vec![(90, 140, 50)],
        heads: 4,
        kv_heads: 2,
        held: 0..4,
        ..Case::new("hopper backward scores", Dtype::F16, DIMS)
    };
    all(&base.with_scores());
    all(&of(Dtype::Bf16, (64, 64), &base).with_scores());
    for dims in [MLA, LARGE] {
        all(&of(Dtype::F16, dims, &base).with_scores());
        all(&of(Dtype::Bf16, dims, &base).with_scores());
    }
}

/// Groups of heads, calls that hold only some heads of the problem, dk and dv of each q head, and such that are added
/// to.
#[test]
fn heads() {
    if slow::left_out(Turn::Second) {
        return;
    }
    let base = Case {
        documents: vec![(70, 150, 80)],
        heads: 6,
        kv_heads: 2,
        held: 0..6,
        alibi_slopes: true,
        sinks: true,
        ..Case::new("hopper backward heads", Dtype::Bf16, DIMS)
    };
    all(&[
        base.clone(),
        Case { held: 1..5, ..base.clone() },
        Case { held: 4..6, per_q_head: true, ..base.clone() },
        Case { held: 2..5, accumulate: true, ..base.clone() },
        Case { heads: 16, kv_heads: 1, held: 0..16, documents: vec![(20, 40, 20)], ..base.clone() },
    ]);
    for dims in [MLA, LARGE] {
        let base = of(Dtype::Bf16, dims, &base);
        all(&[
            Case { held: 1..5, accumulate: true, ..base.clone() },
            Case { held: 4..6, per_q_head: true, ..base.clone() },
            Case { heads: 16, kv_heads: 1, held: 0..16, documents: vec![(20, 40, 20)], ..base },
        ]);
    }
}

/// Ranges of every kind, keys spread over several calls, tiles that meet others in every order in which lists may name
/// them.
#[test]
fn ranges() {
    if slow::left_out(Turn::Second) {
        return;
    }
    let base = Case {
        documents: vec![(100, 100, 0), (37, 161, 124)],
        sinks: true,
        ..Case::new("hopper backward ranges", Dtype::Bf16, DIMS)
    };
    let open = Score { window_right: i64::MAX, ..base.score };
    let narrow = Score { window_left: 20, ..base.score };
    let ahead = Score { window_left: 3, window_right: i64::MAX, ..base.score };
    let long = Case { documents: vec![(230, 400, 170), (0, 140, 0), (70, 0, 0)], shuffled: true, ..base.clone() };
    all(&[
        Case { cut: Cut::Chunks(3), ..base.clone() },
        Case { cut: Cut::Chunks(5), ring_steps: 3, ..base.clone() },
        Case { cut: Cut::Striped(3, 1), ring_steps: 3, ..base.clone() },
        Case { cut: Cut::Striped(2, 5), ring_steps: 2, alibi_slopes: true, score: narrow, ..base.clone() },
        Case { cut: Cut::Striped(4, 16), ring_steps: 2, score: open, accumulate: true, ..base.clone() },
        Case { cut: Cut::Chunks(4), ..long.clone() },
        Case { cut: Cut::Striped(2, 150), score: narrow, ring_steps: 2, dtype: Dtype::F16, ..long.clone() },
        Case { cut: Cut::Chunks(3), score: ahead, per_q_head: true, ..long.clone() },
    ]);
    for dims in [MLA, LARGE] {
        let short = of(Dtype::Bf16, dims, &base);
        all(&[
            Case { cut: Cut::Chunks(5), ring_steps: 3, ..short.clone() },
            Case { cut: Cut::Striped(2, 150), ring_steps: 2, accumulate: true, ..of(Dtype::F16, dims, &long) },
            Case { cut: Cut::Striped(2, 5), ring_steps: 2, alibi_slopes: true, score: narrow, ..short },
        ]);
    }
}

/// What tells most mutants of the kernel, small cases first (`mutate --only` tries them on this test, which is named as
/// the kernel's file). One block takes all items, so that what is left of one shows in the next; q heads of a group in
/// several items; more steps than are prepared at once; tiles that meet nothing between others; steps that heads share.
#[test]
fn bf16_128() {
    by_one_block(DIMS);
}

#[test]
fn bf16_64() {
    by_one_block((64, 64));
}

#[test]
fn bf16_192128() {
    by_one_block(MLA);
}

#[test]
fn bf16_256() {
    by_one_block(LARGE);
}

fn by_one_block(dims: (usize, usize)) {
    let _turn = turn();
    let Some(device) = Device::open_hopper() else { return };
    device.cuda.set_sm_margin(u32::MAX);
    let base = Case::new("hopper backward alone", Dtype::Bf16, dims);
    let open = Score { window_right: i64::MAX, ..base.score };
    check(&device, &Case { documents: vec![(76, 270, 194), (20, 0, 0), (0, 20, 0)], ..base.clone() });
    let grouped = Case { heads: 4, held: 0..4, ..base.clone() };
    check(&device, &Case { documents: vec![(70, 150, 80)], cut: Cut::Striped(2, 8), ring_steps: 2, ..grouped.clone() });
    let documents = vec![(20, 0, 0), (0, 20, 0), (9, 200, 191), (7, 17, -100), (3, 0, 0), (140, 150, 10)];
    check(&device, &Case { documents, kv_heads: 2, ..grouped.clone() });
    check(&device, &Case { score: open, documents: vec![(600, 130, 0)], ..grouped });
    // Heads that share a step, and do not fill the last one.
    let three = Case { heads: 3, held: 0..3, alibi_slopes: true, ..base.clone() };
    check(&device, &Case { documents: vec![(76, 80, 4), (17, 40, 23)], ..three });
    device.cuda.set_sm_margin(0);
    check(&device, &Case { score: open, documents: vec![(40, 2, 0)], cut: Cut::Striped(40, 1), ..base });
}

/// The same call gives the same bits, whatever order blocks and warps ran in, and however many blocks there were.
#[test]
fn runs_repeat() {
    if slow::left_out(Turn::Second) {
        return;
    }
    let _turn = turn();
    let Some(device) = Device::open_hopper() else { return };
    runs_repeat_of(&device, "hopper backward repeat", &[DIMS, (64, 64), MLA, LARGE], check);
}

struct Call {
    // Freed before the device is.
    memory: Vec<Memory>,
    device: Device,
    dims: (usize, usize),
    tokens: usize,
}

impl Call {
    fn new(device: Device, (d, dv): (usize, usize), tokens: usize) -> Self {
        let input = |seed, dtype: Dtype, dim: usize| {
            let numbers = random(tokens * 2 * dim, seed);
            device.upload(&numbers.into_iter().flat_map(|x| encode(dtype, x)).collect::<Vec<_>>())
        };
        let mut memory: Vec<Memory> = (1..5).zip([d, d, dv, dv]).map(|(i, dim)| input(i, Dtype::Bf16, dim)).collect();
        memory.extend((5..7).map(|seed| input(seed, Dtype::F32, 1)));
        memory.extend((7..10).zip([d, d, dv]).map(|(seed, dim)| input(seed, Dtype::F32, dim)));
        Self { memory, device, dims: (d, dv), tokens }
    }

    /// How many launches of the three kernels it makes; dq, dk and dv after it.
    fn launched(&self, change: impl Fn(&mut AttendBackward)) -> ([u64; 3], Vec<Vec<f32>>) {
        self.try_launched(1, change).expect("a legal call")
    }

    /// The same call a second time, when the device has its metadata.
    fn launched_twice(&self, change: impl Fn(&mut AttendBackward)) -> ([u64; 3], Vec<Vec<f32>>) {
        self.try_launched(2, change).expect("a legal call")
    }

    fn try_launched(
        &self,
        times: usize,
        change: impl Fn(&mut AttendBackward),
    ) -> cpattn::Result<([u64; 3], Vec<Vec<f32>>)> {
        let of = |i: usize, dtype, dim: usize| self.memory[i].tensor(dtype, self.tokens, 2, dim as u32, 2 * dim);
        let range = Range::plain(0, self.tokens as u32, 0, 0);
        let (d, dv) = self.dims;
        let q = [QRange { range, document: [0; 2], keys_begin: 0, keys_end: 1, mode: Mode::Only }];
        let keys = [range];
        let mut call = AttendBackward {
            lse: of(4, Dtype::F32, 1),
            delta: of(5, Dtype::F32, 1),
            dq: of(6, Dtype::F32, d),
            dk: of(7, Dtype::F32, d),
            dv: of(8, Dtype::F32, dv),
            ..AttendBackward::new(
                [(0, d), (1, d), (2, dv), (3, dv)].map(|(i, dim)| of(i, Dtype::Bf16, dim)),
                HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
                Score { scale: 0.1, softcap: 0.0, window_left: i64::MAX, window_right: i64::MAX },
                Ranges { q: &q, k: &keys, pairs: &[Pair { k: 0, band: 0 }], bands: &[Band::WHOLE] },
            )
        };
        change(&mut call);
        let counts = || {
            [c"cpattn_hopper_backward", c"cpattn_backward_fused", c"cpattn_backward_queries"]
                .map(|name| emulated_count(name).unwrap_or(0))
        };
        let before = counts();
        let bytes = self.device.attend_backward_bytes(&call);
        let mut kernels = self.device.kernels(bytes, times);
        for _ in 0..times {
            // SAFETY: everything lives until the downloads below; changed tensors lie in the same memory.
            unsafe { self.device.attend_backward(&call, &mut kernels, self.device.stream) }?;
        }
        let found = (6..9).map(|i| self.device.download_f32(&self.memory[i])).collect();
        let after = counts();
        Ok(([0, 1, 2].map(|i| after[i] - before[i]), found))
    }
}

/// Heads from the last to the first.
fn backwards(t: &mut RawTensor) {
    t.ptr = t.ptr.wrapping_add(t.dim as usize * t.dtype.size());
    t.head_stride = -i64::from(t.dim);
}

/// All tensors' heads from the last to the first, which is the same problem.
fn all_backwards(c: &mut AttendBackward) {
    let all = [&mut c.q, &mut c.k, &mut c.v, &mut c.d_o, &mut c.dq, &mut c.dk, &mut c.dv, &mut c.lse, &mut c.delta];
    all.into_iter().for_each(backwards);
}

/// At head dims 192 and 128 the two kernels have tiles of 128 and of 64 keys, each in a list of its own. A launch takes
/// the list of the kernel that does it, in the first copy of the metadata and in one that the device has already.
#[test]
fn each_kernel_has_its_own_tiles() {
    strides_choose_the_kernel("hopper_backward::each_kernel_has_its_own_tiles", MLA, 330);
}

/// At 256 one list serves both kernels.
#[test]
fn the_kernel_for_sm_80_stands_in_at_256() {
    strides_choose_the_kernel("hopper_backward::the_kernel_for_sm_80_stands_in_at_256", LARGE, 150);
}

/// Launches that maps cannot describe, between others that they can.
fn strides_choose_the_kernel(test: &str, dims: (usize, usize), tokens: usize) {
    if !alone(test) {
        return;
    }
    let Some(device) = Device::open() else { return };
    let family = device.cuda.backward_family(Dtype::Bf16, dims.0 as u32, dims.1 as u32);
    if family != Ok(Family::Sm90a) || emulated_count(c"boxes").is_none() {
        return;
    }
    let call = Call::new(device, dims, tokens);
    let (by, plain) = call.launched(|_| ());
    assert_eq!(by, [1, 0, 0]);
    let (by, found) = call.launched_twice(all_backwards);
    assert_eq!(by, [0, 2, 0]);
    for (a, b) in found.iter().zip(&plain) {
        let largest = b.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            assert!((a - b).abs() <= 1e-2 * largest, "element {i} is {a}, not {b}; the largest is {largest}");
        }
    }
    assert_eq!(call.launched_twice(|_| ()), ([2, 0, 0], plain));
}

/// Devices of compute capability 9.0 take these kernels at the head dims that have one, for all gradients, and the
/// fused ones for `sm_80` where maps cannot describe a tensor: they compute the same.
#[test]
fn the_family_follows_device_dims_and_tensors() {
    if !alone("hopper_backward::the_family_follows_device_dims_and_tensors") {
        return;
    }
    let Some(device) = Device::open() else { return };
    if emulated_count(c"boxes").is_none() {
        return;
    }
    let is_hopper = std::env::var("CPATTN_EMU_SM").is_ok_and(|sm| sm == "90");
    for (d, dv) in
        [(64, 64), (96, 96), (104, 96), (128, 128), (64, 128), (192, 128), (192, 192), (136, 200), (256, 256)]
    {
        let taken = is_hopper && !matches!((d, dv), (96, 96) | (192, 192));
        let expected = if taken { Family::Sm90a } else { Family::Sm80 };
        assert_eq!(device.cuda.backward_family(Dtype::F16, d, dv), Ok(expected), "{d}/{dv}");
    }
    let forced = Cuda::with_family(0, Family::Sm80).expect("every device runs them");
    assert_eq!(forced.backward_family(Dtype::F16, 128, 128), Ok(Family::Sm80));
    if !is_hopper {
        return;
    }
    let call = Call::new(device, DIMS, 40);
    let (by, plain) = call.launched(|_| ());
    assert_eq!(by, [1, 0, 0]);
    let (by, found) = call.launched(all_backwards);
    assert_eq!(by, [0, 1, 0], "negative strides");
    for (i, (a, b)) in found.iter().flatten().zip(plain.iter().flatten()).enumerate() {
        assert!((a - b).abs() <= 2e-3 * b.abs().max(1.0), "element {i} is {a}, not {b}");
    }
    let (by, _) = call.launched(|c| backwards(&mut c.d_o));
    assert_eq!(by, [0, 1, 0], "negative strides of do alone");
    let (by, _) = call.launched(|c| c.gradients = Gradients::Queries);
    assert_eq!(by, [0, 0, 1], "one side");
    let (by, again) = call.launched(|_| ());
    assert!(by == [1, 0, 0] && again == plain, "twice the same bits");
    let by_sm_80 = Call { device: Device::of(Ok(forced)).expect("a device"), ..call };
    assert_eq!(by_sm_80.launched(|_| ()).0, [0, 1, 0]);
}

/// A driver whose compiler fails on the text: the call fails, and says what to do.
#[test]
fn a_driver_that_refuses_the_text_is_not_hidden() {
    let test = "hopper_backward::a_driver_that_refuses_the_text_is_not_hidden";
    if alone_with(test, &[("CPATTN_EMU_REFUSE", "sm_90a")]) && std::env::var("CPATTN_EMU_SM").is_ok_and(|sm| sm == "90")
    {
        let call = Call::new(Device::open().expect("a device"), DIMS, 40);
        let said = call.try_launched(1, |_| ()).expect_err("refused").to_string();
        // Reserving loads both directions, the forward first.
        assert!(said.contains("hopper_forward_bf16_128.ptx") && said.contains("CPATTN_CUDA_FAMILY=sm_80"), "{said}");
    }
}
