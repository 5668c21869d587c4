// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that come again: their lists are on the device already, and their tensor maps are encoded. Counted on the
//! stand-in driver, in a process of its own.

use crate::case::{decode, encode, random};
use crate::device::{Device, Memory, emulated_count};
use crate::hopper::alone;
use cpattn::Dtype;
use cpattn::call::{Attend, AttendBackward, Band, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score};
use cpattn::{call::RawStream, kernel::cuda::StreamKernels};
use cudarc::driver::sys;

const TOKENS: usize = 90;
const HEADS: usize = 2;
const DIM: usize = 64;

/// Tensors of a small call, forward and backward.
pub struct Tensors {
    input: [Memory; 4],
    o: Memory,
    lse: Memory,
    delta: Memory,
    gradients: [Memory; 3],
}

impl Tensors {
    pub fn new(device: &Device) -> Self {
        let numbers = |seed| {
            let numbers = random(TOKENS * HEADS * DIM, seed);
            device.upload(&numbers.into_iter().flat_map(|x| encode(Dtype::Bf16, x)).collect::<Vec<_>>())
        };
        let empty = |bytes: usize| device.upload(&vec![0xff; bytes]);
        Self {
            input: [1, 2, 3, 4].map(numbers),
            o: empty(TOKENS * HEADS * DIM * 2),
            lse: empty(TOKENS * HEADS * 4),
            delta: device.upload(&[0; TOKENS * HEADS * 4]),
            gradients: [0; 3].map(|_| empty(TOKENS * HEADS * DIM * 4)),
        }
    }

    /// The forward of documents of so many tokens each, which leave no token out.
    fn forward(&self, device: &Device, kernels: &mut StreamKernels, stream: RawStream, lens: &[u32]) {
        self.try_forward(device, kernels, stream, lens, |_| ()).expect("a legal call");
    }

    /// The same with other tensors in the same memory, which may be refused.
    pub fn try_forward(
        &self,
        device: &Device,
        kernels: &mut StreamKernels,
        stream: RawStream,
        lens: &[u32],
        change: impl Fn(&mut Attend),
    ) -> cpattn::Result<()> {
        let (q, k, pairs) = ranges(lens);
        let [q_, k_, v, _] = [0, 1, 2, 3].map(|i| self.input[i].tensor(Dtype::Bf16, TOKENS, 2, 64, 128));
        let mut call = Attend {
            lse: self.lse.tensor(Dtype::F32, TOKENS, 2, 1, 2),
            ..Attend::new(
                [q_, k_, v, self.o.tensor(Dtype::Bf16, TOKENS, 2, 64, 128)],
                HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
                SCORE,
                Ranges { q: &q, k: &k, pairs: &pairs, bands: &[Band::WHOLE] },
            )
        };
        change(&mut call);
        // SAFETY: everything lives until the stream was waited for.
        unsafe { device.attend(&call, kernels, stream) }
    }

    fn backward(&self, device: &Device, kernels: &mut StreamKernels, lens: &[u32]) {
        let (q, k, pairs) = ranges(lens);
        let [q_, k_, v, d_o] = [0, 1, 2, 3].map(|i| self.input[i].tensor(Dtype::Bf16, TOKENS, 2, 64, 128));
        let [dq, dk, dv] = [0, 1, 2].map(|i| self.gradients[i].tensor(Dtype::F32, TOKENS, 2, 64, 128));
        let lines = |m: &Memory| m.tensor(Dtype::F32, TOKENS, 2, 1, 2);
        let call = AttendBackward {
            lse: lines(&self.lse),
            delta: lines(&self.delta),
            dq,
            dk,
            dv,
            ..AttendBackward::new(
                [q_, k_, v, d_o],
                HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
                SCORE,
                Ranges { q: &q, k: &k, pairs: &pairs, bands: &[Band::WHOLE] },
            )
        };
        // SAFETY: as above.
        unsafe { device.attend_backward(&call, kernels, device.stream) }.expect("a legal call");
    }

    /// o, after everything launched so far, and nothing in its place.
    pub fn take_o(&self, device: &Device) -> Vec<u8> {
        let bytes = device.download(&self.o);
        device.overwrite(&self.o, &vec![0xff; bytes.len()]);
        assert!(bytes.chunks_exact(2).all(|b| decode(Dtype::Bf16, b).is_finite()), "a row was not written");
        bytes
    }
}

const SCORE: Score = Score { scale: 0.125, softcap: 0.0, window_left: i64::MAX, window_right: 0 };

fn ranges(lens: &[u32]) -> (Vec<QRange>, Vec<Range>, Vec<Pair>) {
    assert_eq!(lens.iter().sum::<u32>() as usize, TOKENS);
    let mut row = 0;
    let k: Vec<Range> = (0..)
        .zip(lens)
        .map(|(i, &len)| {
            row += i64::from(len);
            Range::plain(row - i64::from(len), len, 0, i)
        })
        .collect();
    let q = (0..)
        .zip(&k)
        .map(|(i, &range)| QRange { range, document: [0; 2], keys_begin: i, keys_end: i + 1, mode: Mode::Only })
        .collect();
    (q, k, (0..lens.len() as u32).map(Pair::of).collect())
}

/// With documents of no tokens, so that lists do not fit into a kernel's parameters.
pub fn long(lens: &[u32]) -> Vec<u32> {
    [lens, &[0; 40]].concat()
}

const COPIES: &std::ffi::CStr = c"host-to-device copies";
const MAPS: &std::ffi::CStr = c"cuTensorMapEncodeTiled";

/// Copies and maps that `f` makes.
fn counted(f: impl FnOnce()) -> [u64; 2] {
    let now = || [COPIES, MAPS].map(|name| emulated_count(name).expect("asked before"));
    let before = now();
    f();
    let after = now();
    [after[0] - before[0], after[1] - before[1]]
}

/// The same ranges again are not copied, nor are maps of the same tensors encoded; other ranges and tensors are.
/// Results are those of the first call, whose counters and semaphores were used up.
#[test]
fn lists_and_maps_stay() {
    if !alone("repeated::lists_and_maps_stay") {
        return;
    }
    let Some(device) = Device::open() else { return };
    if emulated_count(COPIES).is_none() {
        return;
    }
    let maps = if std::env::var("CPATTN_EMU_SM").is_ok_and(|sm| sm == "90") { 3 } else { 0 };
    let (one, two) = (Tensors::new(&device), Tensors::new(&device));
    let mut kernels = device.kernels(64 << 10, 8);
    let mut forward = |t: &Tensors, lens: &[u32]| counted(|| t.forward(&device, &mut kernels, device.stream, lens));
    let (some, others) = (long(&[40, 50]), long(&[30, 60]));
    // Calls that follow one another, and such that another came between; nothing waits for the device.
    assert_eq!(forward(&one, &some), [1, maps]);
    let first = one.take_o(&device);
    assert_eq!(forward(&one, &some), [0, 0]);
    assert_eq!(one.take_o(&device), first);
    // k and v are as long as their longest range, and so are maps.
    assert_eq!(forward(&one, &others), [1, maps]);
    let second = one.take_o(&device);
    assert!(second != first);
    for _ in 0..5 {
        assert_eq!(forward(&one, &some), [0, 0]);
        assert_eq!(forward(&two, &some)[0], 0);
        assert_eq!(forward(&two, &some), [0, 0]);
    }
    assert_eq!([one.take_o(&device), two.take_o(&device)], [first.clone(), first]);
    assert_eq!(forward(&one, &others), [0, 0]);
    assert_eq!(one.take_o(&device), second);

    // The backward has semaphores that must be zero again.
    let mut backward = || counted(|| one.backward(&device, &mut kernels, &others))[0];
    let read = || one.gradients.each_ref().map(|m| device.download(m));
    assert_eq!(backward(), 1);
    let first = read();
    one.gradients.iter().for_each(|m| device.overwrite(m, &vec![0xff; TOKENS * HEADS * DIM * 4]));
    assert_eq!(backward(), 0);
    assert!(read() == first, "the second backward differs");
}

/// Lists that the ring had to give up are copied again; so are those that a launch of another stream may still read.
#[test]
fn what_is_not_there_is_copied() {
    if !alone("repeated::what_is_not_there_is_copied") {
        return;
    }
    let Some(device) = Device::open() else { return };
    if emulated_count(COPIES).is_none() {
        return;
    }
    let (one, two) = (Tensors::new(&device), Tensors::new(&device));
    let lens = long(&[40, 50]);
    let mut small = device.kernels(6500, 1);
    for _ in 0..3 {
        for (lens, copies) in [(long(&[30, 60]), 1), (lens.clone(), 1), (lens.clone(), 0)] {
            assert_eq!(counted(|| one.forward(&device, &mut small, device.stream, &lens))[0], copies);
        }
    }
    let first = one.take_o(&device);

    let mut kernels = device.kernels(64 << 10, 8);
    let mut other = core::ptr::null_mut();
    // SAFETY: a context is current, the pointer is to a local.
    let code = unsafe { sys::cuStreamCreate(&raw mut other, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    assert_eq!(counted(|| one.forward(&device, &mut kernels, device.stream, &lens))[0], 1);
    assert_eq!(counted(|| two.forward(&device, &mut kernels, other.cast(), &lens))[0], 1, "the first may still run");
    // Each stream has its own now.
    assert_eq!(counted(|| one.forward(&device, &mut kernels, device.stream, &lens))[0], 0);
    assert_eq!(counted(|| two.forward(&device, &mut kernels, other.cast(), &lens))[0], 0);
    // SAFETY: the stream was made above, and is not used after this.
    unsafe {
        assert_eq!(sys::cuStreamSynchronize(other), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuStreamDestroy_v2(other), sys::CUresult::CUDA_SUCCESS);
    }
    assert_eq!([one.take_o(&device), two.take_o(&device)], [first.clone(), first]);
}

/// Calls in flight do not share what the next ones write: the ring holds one list or two, and is written anew while the
/// stream has not reached the first call.
#[test]
fn calls_in_flight_keep_their_lists() {
    if !alone("repeated::calls_in_flight_keep_their_lists") {
        return;
    }
    let Some(device) = Device::open() else { return };
    if emulated_count(COPIES).is_none() {
        return;
    }
    let (tensors, other) = (Tensors::new(&device), Tensors::new(&device));
    let mut kernels = device.kernels(64 << 10, 8);
    let lens: [&[u32]; 3] = [&[40, 50], &[30, 60], &[10, 70, 10]];
    let expected = lens.map(|lens| {
        tensors.forward(&device, &mut kernels, device.stream, &long(lens));
        tensors.take_o(&device)
    });
    let mut ring = device.kernels(1000, 4);
    for (lens, expected) in lens.iter().zip(&expected) {
        let before = emulated_count(COPIES);
        tensors.forward(&device, &mut ring, device.stream, lens);
        for later in [&[90][..], &[1, 89], &[45, 45]] {
            other.forward(&device, &mut ring, device.stream, later);
        }
        assert_eq!(emulated_count(COPIES).zip(before).map(|(after, before)| after - before), Some(4));
        assert!(tensors.take_o(&device) == *expected, "{lens:?}");
        other.take_o(&device);
    }
    // Heads from the last to the first, by the kernel for `sm_80`, which has the same lists: no map says that.
    let backwards = |t: &mut RawTensor| {
        t.ptr = t.ptr.wrapping_add(DIM * 2);
        t.head_stride = -(DIM as i64);
    };
    let change = |call: &mut Attend| [&mut call.q, &mut call.k, &mut call.v].into_iter().for_each(backwards);
    tensors.try_forward(&device, &mut kernels, device.stream, &[41, 49], change).expect("a legal call");
    tensors.take_o(&device);
}
