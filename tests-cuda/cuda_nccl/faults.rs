// SPDX-License-Identifier: MIT OR Apache-2.0
//! What goes wrong between ranks that are threads: each gets an error that says what it was doing, and streams go on.
//!
//! Ranks pass bytes round a ring, without kernels.

use cpattn::Fault;
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cpattn::{
    Cause, Error, Result,
    kernel::cuda::{Cuda, DeviceMemory},
    transport::{
        DeviceTransport, Label, Message, Transport,
        nccl::{Nccl, UniqueId},
    },
};

use crate::group::{LONG, devices, threads};

const DEADLINE: Duration = Duration::from_millis(400);
/// What a test allows beyond a deadline, on a machine that does other things too.
pub const SLACK: Duration = Duration::from_secs(30);
const BYTES: usize = 4096;

/// A rank that passes bytes on.
pub struct Ring {
    pub end: Nccl,
    from: DeviceMemory,
    to: DeviceMemory,
}

impl Ring {
    pub fn new(end: Nccl) -> Self {
        let [from, to] = [(); 2].map(|()| end.device().allocate(BYTES).unwrap());
        from.upload(&[end.rank() as u8 + 1; BYTES]).unwrap();
        Self { end, from, to }
    }

    fn message(peer: usize, memory: &DeviceMemory, bytes: usize) -> Message {
        Message { peer, ptr: memory.ptr(), bytes }
    }

    /// Enqueues a step of so many bytes each way.
    fn step(&self, step: u32, sent: usize, received: usize) -> Result<()> {
        let (rank, world) = (self.end.rank(), self.end.world());
        let send = Self::message((rank + 1) % world, &self.from, sent);
        let recv = Self::message((rank + world - 1) % world, &self.to, received);
        // SAFETY: both lie on the device until the transport is dropped, which waits; nothing else uses them.
        unsafe { self.end.exchange(Label::new("ring", step), &[send], &[recv]) }
    }

    /// A step and its check.
    pub fn round(&self, step: u32) -> Result<()> {
        self.step(step, BYTES, BYTES)?;
        self.end.synchronize()?;
        let (rank, world) = (self.end.rank(), self.end.world());
        let mut bytes = vec![0; BYTES];
        self.to.download(&mut bytes)?;
        let from = (rank + world - 1) % world;
        assert!(bytes.iter().all(|&b| b == from as u8 + 1), "rank {rank}, step {step}: {:?}", &bytes[..4]);
        Ok(())
    }

    /// After a failure: every call gives it, and the device and the stream are as good as before.
    pub fn is_over(&self, error: &Error) {
        let again =
            [self.step(99, 8, 8), self.end.poll(), self.end.synchronize(), self.end.agree(0..self.end.world(), 1)];
        for result in again {
            assert_eq!(result.as_ref().err(), Some(error));
        }
        usable(self.end.device(), self.end.stream());
    }
}

/// Copies something on that stream.
pub fn usable(cuda: &Arc<Cuda>, stream: cpattn::call::RawStream) {
    use cudarc::driver::sys;
    let [a, b] = [(); 2].map(|()| cuda.allocate(64).unwrap());
    a.upload(&[5; 64]).unwrap();
    b.upload(&[0; 64]).unwrap();
    let mut context = std::ptr::null_mut();
    // SAFETY: memory and a stream of the device, whose primary context is retained by `cuda`.
    unsafe {
        sys::cuDevicePrimaryCtxRetain(&raw mut context, cuda.ordinal()).result().unwrap();
        sys::cuCtxPushCurrent_v2(context).result().unwrap();
        sys::cuMemcpyDtoDAsync_v2(b.ptr() as u64, a.ptr() as u64, 64, stream.cast()).result().unwrap();
        sys::cuStreamSynchronize(stream.cast()).result().unwrap();
        sys::cuCtxPopCurrent_v2(&raw mut context).result().unwrap();
    }
    let mut bytes = [0; 64];
    b.download(&mut bytes).unwrap();
    assert_eq!(bytes, [5; 64]);
    // SAFETY: as above.
    unsafe { sys::cuDevicePrimaryCtxRelease_v2(cuda.ordinal()).result().unwrap() };
}

/// Whether these are the stand-ins.
pub fn stand_in() -> bool {
    std::env::var("LD_LIBRARY_PATH").is_ok_and(|p| p.contains("cuda-emulator"))
}

#[test]
fn a_rank_that_never_comes() {
    let Some(devices) = devices(2) else { return };
    let id = UniqueId::new().unwrap();
    let begin = Instant::now();
    let all: Vec<Error> = thread::scope(|scope| {
        let (id, devices) = (&id, &devices);
        let threads = [0, 1].map(|r| scope.spawn(move || Nccl::new(id, r, 3, &devices[r], DEADLINE).unwrap_err()));
        threads.map(|t| t.join().unwrap()).into()
    });
    assert!(begin.elapsed() >= DEADLINE && begin.elapsed() < SLACK);
    for (rank, error) in all.iter().enumerate() {
        let others: Vec<usize> = (0..3).filter(|&r| r != rank).collect();
        let Error::Peer {
            rank: who,
            at: Label { operation: "making the communicator", .. },
            fault: Fault::OneOf { peers, cause: Cause::Deadline { ms, .. } },
        } = error
        else {
            panic!("{error:?}")
        };
        assert!(*who == rank && *peers == others && *ms >= 400, "{error}");
    }
    // The same devices, a new id.
    let rounds = threads(&devices, LONG, |end| Ring::new(end).round(0));
    rounds.into_iter().for_each(|r| r.unwrap().unwrap());
}

#[test]
fn numbers_that_differ_do_not_end_the_group() {
    let Some(devices) = devices(4) else { return };
    let all = threads(&devices, LONG, |end| {
        let rank = end.rank();
        for (group, round) in [(0..4, 0), (2..4, 1), (0..4, 2)] {
            if !group.contains(&rank) {
                continue;
            }
            // The last rank says something else.
            let own = 10 + u64::from(rank == 3);
            let error = end.agree(group.clone(), own).unwrap_err();
            let peer = if rank == 3 { group.start } else { 3 };
            let theirs = if rank == 3 { 10 } else { 11 };
            assert_eq!(error, Error::disagreement(rank, peer, own, theirs));
            end.agree(group, 5 + round).unwrap();
        }
        Ring::new(end).round(0).unwrap();
    });
    all.into_iter().for_each(|r| r.unwrap());
}

/// Groups that do not fit hang, as NCCL documents it, until the deadline.
#[test]
fn sizes_that_differ() {
    let Some(devices) = devices(2) else { return };
    let begin = Instant::now();
    let all = threads(&devices, LONG, |end| {
        let ring = Ring::new(end);
        ring.round(0).unwrap();
        ring.round(1).unwrap();
        ring.end.set_deadline(DEADLINE).unwrap();
        let rank = ring.end.rank();
        // Rank 0 sends more than rank 1 expects; a good step is behind it.
        ring.step(2, [64, 32][rank], 32).unwrap();
        let _ = ring.step(3, 16, 16);
        let error = ring.end.synchronize().unwrap_err();
        ring.is_over(&error);
        error
    });
    assert!(begin.elapsed() < SLACK);
    for (rank, error) in all.into_iter().map(|r| r.unwrap()).enumerate() {
        let text = error.to_string();
        assert!(text.starts_with(&format!("rank {rank}, ring, step 2: rank {} ", 1 - rank)), "{text}");
        match error {
            // The other gave up first, and NCCL noticed.
            Error::Peer { fault: Fault::One { cause: Cause::Library { code: 6, bytes, .. }, .. }, .. } => {
                assert_eq!(bytes, [96, 64][rank])
            }
            Error::Peer { fault: Fault::One { cause: Cause::Deadline { ms, bytes }, .. }, .. } => {
                assert!(ms >= 400 && bytes == [96, 64][rank], "{text}");
            }
            other => panic!("{other:?}"),
        }
    }
    // The same devices, a new id.
    threads(&devices, LONG, |end| Ring::new(end).round(0)).into_iter().for_each(|r| r.unwrap().unwrap());
}

#[test]
fn somebody_aborts() {
    let Some(devices) = devices(3) else { return };
    let begin = Instant::now();
    let all = threads(&devices, LONG, |end| {
        let ring = Ring::new(end);
        ring.round(0).unwrap();
        ring.end.set_deadline(10 * DEADLINE).unwrap();
        if ring.end.rank() == 1 {
            // The others wait for this rank's step.
            thread::sleep(Duration::from_millis(50));
            ring.end.abort(Cause::Aborted);
            ring.end.abort(Cause::Failed);
        } else {
            ring.step(1, BYTES, BYTES).unwrap();
        }
        let error = ring.end.synchronize().unwrap_err();
        ring.is_over(&error);
        error.to_string()
    });
    assert!(begin.elapsed() < SLACK);
    let texts: Vec<String> = all.into_iter().map(|r| r.unwrap()).collect();
    // Whether the watchdog has seen yet that the exchange before is over.
    let ends = ["no exchange", "ring"].map(|at| format!("rank 1, {at}, step 0: rank 1 aborted the run"));
    assert!(ends.contains(&texts[1]), "{texts:?}");
    for rank in [0, 2] {
        let others: Vec<usize> = (0..3).filter(|&r| r != rank).collect();
        let begin = format!("rank {rank}, ring, step 1: one of the ranks {others:?} ");
        assert!(texts[rank].starts_with(&begin), "{texts:?}");
        assert!(texts[rank].contains("8192 bytes"), "{texts:?}");
    }
}

/// A rank that panics is no rank that waits.
#[test]
fn a_thread_that_panics() {
    let Some(devices) = devices(2) else { return };
    let id = UniqueId::new().unwrap();
    let begin = Instant::now();
    thread::scope(|scope| {
        let (id, devices) = (&id, &devices);
        let rank = |r: usize| Ring::new(Nccl::new(id, r, 2, &devices[r], LONG).unwrap());
        let (second, first) = (scope.spawn(move || rank(1)), rank(0));
        let second = second.join().unwrap();
        let panics = scope.spawn(move || {
            let _ring = second;
            panic!("as the test wants it");
        });
        assert!(panics.join().is_err());
        first.end.set_deadline(DEADLINE).unwrap();
        let error = first.step(7, 8, 8).and_then(|()| first.end.synchronize()).unwrap_err();
        first.is_over(&error);
    });
    assert!(begin.elapsed() < SLACK);
}
