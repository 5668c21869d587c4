// SPDX-License-Identifier: MIT OR Apache-2.0
//! Single calls whose [`StreamKernels`] is dropped while they run, beside work and captures of others.

use crate::{
    device::{Counters, Stream, enter},
    graphs::{begin, end},
    ok,
};
use cpattn::{
    Dtype,
    call::{Block, Delta, Finish, Merge, RawTensor, SinkGradient, Transform},
    kernel::cuda::{Cuda, DeviceMemory, StreamKernels},
};
use std::{sync::Arc, thread};

const TOKENS: usize = 8;
const DIM: usize = 16;
const BYTES: usize = TOKENS * DIM * 2;
/// 1, 2 and 3 as bf16.
const NUMBERS: [u16; 3] = [0x3f80, 0x4000, 0x4040];

/// A copy of rows of one number, which takes a part of the ring, and their delta with themselves, which takes none.
struct Case {
    from: DeviceMemory,
    to: DeviceMemory,
    delta: DeviceMemory,
    number: u16,
}

impl Case {
    fn new(cuda: &Cuda, number: u16) -> Self {
        let filled = |bytes: Vec<u8>| {
            let memory = cuda.allocate(bytes.len()).unwrap();
            memory.upload(&bytes).unwrap();
            memory
        };
        let from = filled(number.to_le_bytes().repeat(TOKENS * DIM));
        Self { from, to: filled(vec![0xff; BYTES]), delta: filled(vec![0xff; TOKENS * 4]), number }
    }

    fn enqueue(&self, kernels: &mut StreamKernels, stream: Stream) {
        let rows = |m: &DeviceMemory| RawTensor::compact(m.ptr(), Dtype::Bf16, TOKENS as u64, 1, DIM as u32);
        let (from, to) = (rows(&self.from), rows(&self.to));
        let blocks = [Block { dst: to, sources_begin: 0, sources_end: 1 }];
        let delta = RawTensor::compact(self.delta.ptr(), Dtype::F32, TOKENS as u64, 1, 1);
        // SAFETY: the memory lives until the stream was waited for, and nothing else uses it until then.
        unsafe {
            kernels.transform(&Transform { blocks: &blocks, sources: &[from] }, stream.raw()).unwrap();
            kernels.delta(&Delta::new([from, from, delta]), stream.raw()).unwrap();
        }
    }

    /// After the stream was waited for.
    fn check(&self, what: &str) {
        let (mut rows, mut delta) = (vec![0; BYTES], vec![0; TOKENS * 4]);
        self.to.download(&mut rows).unwrap();
        self.delta.download(&mut delta).unwrap();
        let x = f32::from_bits(u32::from(self.number) << 16);
        assert!(rows == self.number.to_le_bytes().repeat(TOKENS * DIM), "{what}: rows {rows:x?}");
        assert!(delta == (x * x * DIM as f32).to_le_bytes().repeat(TOKENS), "{what}: delta {delta:x?}");
    }
}

/// Dropped with calls in flight on several streams: with the device going on for others, so that the ring is used anew
/// at once, and as the device's last holder, so that the kernels are unloaded.
fn dropped_with_calls_in_flight(cuda: &Arc<Cuda>) {
    let streams = [(); 3].map(|()| Stream::new());
    for last_holder in [false, true] {
        let cases: Vec<_> = NUMBERS.iter().map(|&x| Case::new(cuda, x)).collect();
        for (case, &stream) in cases.iter().zip(&streams) {
            let cuda = if last_holder { Arc::new(Cuda::new(0).unwrap()) } else { Arc::clone(cuda) };
            let mut kernels = StreamKernels::new(cuda).unwrap();
            case.enqueue(&mut kernels, stream);
            drop(kernels);
        }
        streams.iter().for_each(|stream| stream.wait());
        cases.iter().for_each(|case| case.check(&format!("last holder: {last_holder}")));
    }
    // One for all streams, and more streams than it has events for.
    let many: Vec<_> = (0..20).map(|i| (Stream::new(), Case::new(cuda, NUMBERS[i % 3]))).collect();
    let mut kernels = StreamKernels::new(Arc::new(Cuda::new(0).unwrap())).unwrap();
    for _ in 0..2 {
        many.iter().for_each(|(stream, case)| case.enqueue(&mut kernels, *stream));
    }
    drop(kernels);
    many.iter().for_each(|(stream, _)| stream.wait());
    many.iter().for_each(|(_, case)| case.check("many streams"));
}

/// A drop waits for events of its own calls alone, and gives nothing back to the driver.
fn waits_for_its_own(cuda: &Arc<Cuda>, counters: Option<Counters>) {
    let (mine, theirs) = (Stream::new(), Stream::new());
    let [own, others] = [0, 1].map(|i| Case::new(cuda, NUMBERS[i]));
    let [mut kernels, mut other] = [(); 2].map(|()| StreamKernels::new(Arc::clone(cuda)).unwrap());
    own.enqueue(&mut kernels, mine);
    others.enqueue(&mut other, theirs);
    if let Some(c) = counters {
        c.reset();
    }
    drop(kernels);
    if let Some(c) = counters {
        let calls = ["cuMemFree_v2", "cuMemFreeHost", "cuModuleUnload", "cuCtxSynchronize", "cuStreamSynchronize"];
        assert_eq!(calls.map(|name| c.get(name)), [0; 5], "{calls:?}");
        assert_eq!(c.get("cuEventSynchronize"), 2, "one event of the ring, one of the call without");
    }
    // The next one has the ring.
    if let Some(c) = counters {
        c.reset();
    }
    let mut kernels = StreamKernels::new(Arc::clone(cuda)).unwrap();
    if let Some(c) = counters {
        assert_eq!(c.get("allocations"), 0, "the ring is there");
    }
    own.enqueue(&mut kernels, mine);
    [mine, theirs].iter().for_each(|stream| stream.wait());
    [own, others].iter().for_each(|case| case.check("beside each other"));
}

/// A stream is captured in the strictest mode, which allows no thread to wait, allocate or free; scratches come and go.
fn beside_a_capture(cuda: &Arc<Cuda>) {
    let (captured, memory) = (Stream::new(), cuda.allocate(64).unwrap());
    memory.upload(&[0; 64]).unwrap();
    begin(captured);
    ok!(cuMemsetD8Async(memory.ptr() as u64, 7, 64, captured.0));
    let beside = move || {
        enter();
        for cuda in [Arc::clone(cuda), Arc::new(Cuda::new(0).unwrap())] {
            let (stream, case) = (Stream::new(), Case::new(&cuda, NUMBERS[2]));
            let mut kernels = StreamKernels::new(Arc::clone(&cuda)).unwrap();
            case.enqueue(&mut kernels, stream);
            kernels.reserve_metadata(1 << 20, 8).unwrap();
            case.enqueue(&mut kernels, stream);
            // A call of its own is refused there, so that no graph uses what it leaves behind.
            let rows = RawTensor::compact(case.from.ptr(), Dtype::Bf16, 0, 1, 16);
            let numbers = RawTensor::compact(case.from.ptr(), Dtype::F32, 0, 1, 1);
            let (o, lse, with_o, with_lse) = (numbers, numbers, numbers, numbers);
            let block = [Block { dst: rows, sources_begin: 0, sources_end: 1 }];
            let target = captured.raw();
            // SAFETY: refused, all of them: with metadata in the ring, and without any.
            let refused = unsafe {
                [
                    kernels.transform(&Transform { blocks: &block, sources: &[rows] }, target),
                    kernels.finish(&Finish { o: rows, lse, sinks: RawTensor::NONE, rows: &[] }, target),
                    kernels.delta(&Delta::new([rows, rows, numbers]), target),
                    kernels
                        .sink_gradient(&SinkGradient { lse, delta: numbers, sinks: numbers, dsinks: numbers }, target),
                    kernels.merge(&Merge { o, lse, with_o, with_lse }, target),
                ]
            };
            for refused in refused {
                let Err(cpattn::Error::Unsupported { option, limit, .. }) = refused else { panic!("{refused:?}") };
                assert_eq!(option, "a stream that is being captured");
                // Of calls with metadata and of calls without.
                assert_eq!(
                    limit,
                    "what a single call uses is kept until the call is over, and not for replays of a graph"
                );
            }
            drop(kernels);
            // SAFETY: a live stream. The driver's own wait would end the capture.
            unsafe { cuda.synchronize(stream.raw()) }.unwrap();
            case.check("beside a capture");
        }
    };
    // On a thread of its own, and on the one that captures.
    thread::scope(|scope| scope.spawn(beside).join()).unwrap();
    beside();
    ok!(cuMemsetD8Async(memory.ptr() as u64 + 32, 9, 32, captured.0));
    let exec = end(captured);
    ok!(cuGraphLaunch(exec, captured.0));
    captured.wait();
    let mut bytes = [0; 64];
    memory.download(&mut bytes).unwrap();
    assert_eq!(bytes, std::array::from_fn(|i| if i < 32 { 7 } else { 9 }));
    ok!(cuGraphExecDestroy(exec));
}

pub fn run(cuda: &Arc<Cuda>) {
    enter();
    dropped_with_calls_in_flight(cuda);
    waits_for_its_own(cuda, Counters::find());
    beside_a_capture(cuda);
}
