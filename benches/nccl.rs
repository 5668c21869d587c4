// SPDX-License-Identifier: MIT OR Apache-2.0
//! Host time of an exchange over NCCL on the stand-ins, which move no data: this crate's transport, compared with the
//! same calls of the library and the driver, written by hand.
//!
//! `cargo build -p cuda-emulator -p nccl-stand-in`, then `LD_LIBRARY_PATH=$(cargo run -q -p cuda-emulator --bin libdir)
//! CPATTN_EMU_DEVICES=2 CPATTN_EMU_IDLE=1 cargo bench --features nccl --bench nccl [-- --json FILE]`. The times are CPU
//! time of the thread, which other load on the machine increases little. The stand-in is an optimised build for this
//! purpose, because its own calls take most of the time.

use std::{
    ffi::c_void,
    ptr::null_mut,
    time::{Duration, Instant},
};

use cpattn::{
    kernel::cuda::Cuda,
    transport::{
        DeviceTransport, Label, Message, Transport,
        nccl::{Nccl, UniqueId},
    },
};
use cudarc::driver::sys;

const ROUNDS: u32 = 20_000;
const BYTES: usize = 64;
/// Messages each way, as k and v of a ring step.
const EACH_WAY: usize = 2;

/// CPU time of this thread so far.
fn cpu() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = text.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    Duration::from_nanos(nanos)
}

/// Nanoseconds of CPU time, and of wall time, of one round.
fn timed(mut round: impl FnMut(u32)) -> [f64; 2] {
    (0..1000).for_each(&mut round);
    let (begin, clock) = (cpu(), Instant::now());
    (0..ROUNDS).for_each(&mut round);
    [cpu() - begin, clock.elapsed()].map(|t| t.as_nanos() as f64 / f64::from(ROUNDS))
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Id([u8; 128]);

/// The minimal calls of an exchange: a group, and two events for the deadline.
fn by_hand(id: UniqueId, rank: usize, cuda: &Cuda, ptr: *mut u8) -> [f64; 2] {
    type Move = unsafe extern "C" fn(*mut c_void, usize, i32, i32, *mut c_void, *mut c_void) -> i32;
    // SAFETY: NCCL's prototypes, handles made here, memory of the device of enough bytes; the context stays current.
    unsafe {
        let library = libloading::Library::new("libnccl.so.2").unwrap();
        let init =
            library.get::<unsafe extern "C" fn(*mut *mut c_void, i32, Id, i32) -> i32>("ncclCommInitRank").unwrap();
        let start = library.get::<unsafe extern "C" fn() -> i32>("ncclGroupStart").unwrap();
        let end = library.get::<unsafe extern "C" fn() -> i32>("ncclGroupEnd").unwrap();
        let send = library.get::<Move>("ncclSend").unwrap();
        let recv = library.get::<Move>("ncclRecv").unwrap();
        let (mut context, mut comm, mut stream) = (null_mut(), null_mut(), null_mut());
        sys::cuDevicePrimaryCtxRetain(&raw mut context, cuda.ordinal()).result().unwrap();
        sys::cuCtxSetCurrent(context).result().unwrap();
        sys::cuStreamCreate(&raw mut stream, 1).result().unwrap();
        let mut events = [null_mut(); 2];
        events.iter_mut().for_each(|e| sys::cuEventCreate(e, 2).result().unwrap());
        assert_eq!(init(&raw mut comm, 2, Id(id.to_bytes()), rank as i32), 0);
        let peer = 1 - rank as i32;
        timed(|_| {
            sys::cuEventRecord(events[0], stream).result().unwrap();
            start();
            for k in 0..EACH_WAY {
                send(ptr.add(k * BYTES).cast(), BYTES, 1, peer, comm, stream.cast());
            }
            for k in EACH_WAY..2 * EACH_WAY {
                recv(ptr.add(k * BYTES).cast(), BYTES, 1, peer, comm, stream.cast());
            }
            assert_eq!(end(), 0);
            sys::cuEventRecord(events[1], stream).result().unwrap();
        })
    }
}

fn main() {
    if std::env::args().any(|a| a == "--test") {
        return;
    }
    let (Ok(first), Ok(second), Ok(id)) = (Cuda::shared(0), Cuda::shared(1), UniqueId::new()) else {
        println!("not run: needs two devices and NCCL, or the stand-ins");
        return;
    };
    let other = UniqueId::new().unwrap();
    let devices = [first, second];
    let times: Vec<([f64; 2], [f64; 2])> = std::thread::scope(|scope| {
        let threads: Vec<_> = devices
            .iter()
            .enumerate()
            .map(|(rank, cuda)| {
                scope.spawn(move || {
                    let memory = cuda.allocate(2 * EACH_WAY * BYTES).unwrap();
                    let end = Nccl::new(&id, rank, 2, cuda, Duration::from_secs(60)).unwrap();
                    let message =
                        |k: usize| Message { peer: 1 - rank, ptr: memory.ptr().wrapping_add(k * BYTES), bytes: BYTES };
                    let sends: Vec<_> = (0..EACH_WAY).map(message).collect();
                    let recvs: Vec<_> = (EACH_WAY..2 * EACH_WAY).map(message).collect();
                    let ours = timed(|step| {
                        // SAFETY: the memory lives until the transport was dropped, and nothing is moved.
                        unsafe { end.exchange(Label::new("bench", step), &sends, &recvs) }.unwrap();
                    });
                    end.synchronize().unwrap();
                    drop(end);
                    (ours, by_hand(other, rank, cuda, memory.ptr()))
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let mut rows = Vec::new();
    for (rank, ([cpu, clock], [raw_cpu, raw_clock])) in times.into_iter().enumerate() {
        rows.push(format!(
            "{{\"rank\": {rank}, \"cpu_ns\": {cpu:.0}, \"clock_ns\": {clock:.0}, \"by_hand_cpu_ns\": {raw_cpu:.0}, \
             \"by_hand_clock_ns\": {raw_clock:.0}}}"
        ));
        println!(
            "rank {rank}: an exchange of {EACH_WAY} messages each way takes {cpu:.0} ns of CPU time ({clock:.0} ns by the \
             clock), of which the library and the driver take {raw_cpu:.0} ({raw_clock:.0}): {:.0} ns are ours",
            cpu - raw_cpu
        );
    }
    let args: Vec<String> = std::env::args().collect();
    if let Some(file) = args.iter().position(|a| a == "--json").and_then(|i| args.get(i + 1)) {
        std::fs::write(file, format!("[\n  {}\n]\n", rows.join(",\n  "))).expect("a file that can be written");
    }
}
