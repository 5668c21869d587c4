// SPDX-License-Identifier: MIT OR Apache-2.0
//! Single calls whose [`StreamKernels`] is dropped while they run, beside work and captures of others; and the ring of
//! their metadata, which is written anew while earlier calls have not run.

use crate::{
    device::{Counters, Stream, enter},
    graphs::{begin, end},
    ok,
};
use cpattn::{
    Dtype,
    call::{Block, Delta, Finish, Merge, Range, RawTensor, SinkGradient, Transform},
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

    fn rows(memory: &DeviceMemory) -> RawTensor {
        RawTensor::compact(memory.ptr(), Dtype::Bf16, TOKENS as u64, 1, DIM as u32)
    }

    /// The copy alone.
    fn copy(&self, kernels: &mut StreamKernels, stream: Stream) {
        self.copy_in(1, kernels, stream);
    }

    /// The copy alone, in so many blocks: one takes 160 bytes of the ring, two take 320.
    fn copy_in(&self, blocks: usize, kernels: &mut StreamKernels, stream: Stream) {
        let rows = TOKENS / blocks;
        let of = |memory, i: usize| Self::rows(memory).rows((i * rows) as u64, rows as u64);
        let block = |i: usize| Block { dst: of(&self.to, i), sources_begin: i as u32, sources_end: i as u32 + 1 };
        let sources: Vec<_> = (0..blocks).map(|i| of(&self.from, i)).collect();
        let blocks: Vec<_> = (0..blocks).map(block).collect();
        // SAFETY: the memory lives until the stream was waited for, and nothing else uses it until then.
        unsafe { kernels.transform(&Transform { blocks: &blocks, sources: &sources }, stream.raw()) }.unwrap();
    }

    fn enqueue(&self, kernels: &mut StreamKernels, stream: Stream) {
        self.copy(kernels, stream);
        let (from, delta) =
            (Self::rows(&self.from), RawTensor::compact(self.delta.ptr(), Dtype::F32, TOKENS as u64, 1, 1));
        // SAFETY: the memory lives until the stream was waited for, and nothing else uses it until then.
        unsafe { kernels.delta(&Delta::new([from, from, delta]), stream.raw()) }.unwrap();
    }

    /// Zeros, by a call whose metadata is that of every case.
    fn finish(&self, kernels: &mut StreamKernels, stream: Stream) {
        let lse = RawTensor::compact(self.delta.ptr(), Dtype::F32, TOKENS as u64, 1, 1);
        let rows = [Range::plain(0, TOKENS as u32, 0, 0)];
        let call = Finish { o: Self::rows(&self.to), lse, sinks: RawTensor::NONE, rows: &rows };
        // SAFETY: the memory lives until the stream was waited for, and nothing else uses it until then.
        unsafe { kernels.finish(&call, stream.raw()) }.unwrap();
    }

    /// Whether the copy was made; after the stream was waited for.
    fn is_copied(&self) -> bool {
        let mut rows = vec![0; BYTES];
        self.to.download(&mut rows).unwrap();
        rows == self.number.to_le_bytes().repeat(TOKENS * DIM)
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
        assert_eq!(c.get("cuEventSynchronize"), 1, "the event of the stream");
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

/// Many calls that nothing waits for, each with metadata of its own, on two streams in turn: through a ring that holds
/// three of them, and through one that grows on the way; and calls that differ in no byte of it, but lie on both
/// streams.
fn calls_ahead_of_the_device(cuda: &Arc<Cuda>) {
    let streams = [(); 2].map(|()| Stream::new());
    let ring = |bytes, calls| StreamKernels::with_metadata(Arc::clone(cuda), bytes, calls).unwrap();
    let cases: Vec<_> = (0..24).map(|i| Case::new(cuda, NUMBERS[i % 3])).collect();
    let all_copied = |what: &str| {
        streams.iter().for_each(|stream| stream.wait());
        let missing: Vec<_> = (0..cases.len()).filter(|&i| !cases[i].is_copied()).collect();
        assert!(missing.is_empty(), "{what}: calls {missing:?}");
        cases.iter().for_each(|case| case.to.upload(&[0xff; BYTES]).unwrap());
    };
    // Fewer bytes than calls, and fewer events than calls: 160 bytes each.
    for (bytes, calls) in [(3 * 160 + 64, 64), (1 << 16, 3), (160, 1)] {
        let mut kernels = ring(bytes, calls);
        for (i, case) in cases.iter().enumerate() {
            case.copy(&mut kernels, streams[i % 2]);
        }
        kernels.wait().unwrap();
        all_copied(&format!("a ring of {bytes} bytes for {calls} calls"));
    }

    // Where the end of the ring is too short for a call, what is there is older than what is at its beginning.
    let mut kernels = ring(4 * 160, 64);
    for (i, case) in cases.iter().enumerate() {
        case.copy_in(1 + usize::from(i % 8 == 7), &mut kernels, streams[i % 2]);
    }
    kernels.wait().unwrap();
    all_copied("calls of two sizes");

    // The same metadata for all calls, on both streams in turn: each stream has a copy of its own.
    let mut kernels = ring(1 << 12, 8);
    for (i, case) in cases.iter().enumerate() {
        case.finish(&mut kernels, streams[i % 2]);
    }
    kernels.wait().unwrap();
    for (i, case) in cases.iter().enumerate() {
        let mut rows = vec![0xff; BYTES];
        case.to.download(&mut rows).unwrap();
        assert!(rows.iter().all(|&byte| byte == 0), "the same metadata on two streams: call {i}");
    }

    // Larger and larger, with calls in flight in the old ring, which others take over at once.
    let mut kernels = ring(1 << 10, 4);
    let mut other = ring(1 << 10, 4);
    for (i, case) in cases.iter().enumerate() {
        case.copy(&mut kernels, streams[i % 2]);
        if i % 6 == 5 {
            // One after the other, in the place of calls that were made in the other order.
            kernels.reserve_metadata(1024 + 256 * i, 4 + i).unwrap();
            other = ring(1 << 10, 4);
            for j in (i - 3..=i).rev() {
                cases[j].copy(&mut other, streams[j % 2]);
            }
        }
    }
    kernels.wait().unwrap();
    drop(other);
    all_copied("a ring that grows");
}

pub fn run(cuda: &Arc<Cuda>) {
    enter();
    calls_ahead_of_the_device(cuda);
    dropped_with_calls_in_flight(cuda);
    waits_for_its_own(cuda, Counters::find());
    beside_a_capture(cuda);
}
