// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the ranks do in each case. All of them run it, as threads or as processes.

use crate::library::{
    ById, IN_PROGRESS, Rank, SUM, UINT8, UINT64, asked, call, config, download, enter, id, last_error, nccl, ok,
    settled, stream, upload, wait,
};
use cudarc::driver::sys;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Runs the ranks of this process, each in a thread of its own.
pub fn run(case: &str, ranks: &[usize], world: usize, folder: &str) {
    let alone = ranks.len() == 1;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .iter()
            .map(|&rank| {
                scope.spawn(move || {
                    enter(if alone || case == "same device" { 0 } else { rank });
                    one(case, rank, world, folder);
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
}

fn one(case: &str, rank: usize, world: usize, folder: &str) {
    let new = |blocking| Rank::new(rank, world, folder, blocking);
    match case {
        "ring" => ring(new(true)),
        "non-blocking" => ring(new(false)),
        "all to all" => all_to_all(new(true)),
        "collectives" => collectives(new(true)),
        "self" => oneself(new(true)),
        "two streams" => two_streams(new(true), true),
        "race" => two_streams(new(true), false),
        "graph" => graph(new(true)),
        "missing receive" => unmatched(new(true), |r, p| {
            if r.rank == 0 {
                r.send(p, 64, 1)
            }
        }),
        "send before receive" => unmatched(new(true), |r, p| {
            r.send(p, 64, 1 - r.rank);
            r.recv(p + 64, 64, 1 - r.rank);
        }),
        "other size" => unmatched(new(true), |r, p| if r.rank == 0 { r.send(p, 64, 1) } else { r.recv(p, 32, 0) }),
        "abort" => abort(new(true)),
        "fault" => fault(new(true)),
        "absent" => absent(rank, world, folder, true),
        "absent non-blocking" => absent(rank, world, folder, false),
        "arguments" => arguments(new(true)),
        "wrong world" => refused(rank, world + rank, folder),
        "same device" => refused(rank, world, folder),
        _ => panic!("no case {case}"),
    }
}

/// Bytes that tell where they come from.
fn stamp(rank: usize, message: usize, n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * 7 + rank * 31 + message * 101) as u8).collect()
}

/// Every rank passes what it received on, until its own bytes are back.
fn ring(r: Rank) {
    let n = 70_000;
    let own = upload(&stamp(r.rank, 0, n));
    let buffers = [upload(&vec![0; n]), upload(&vec![0; n])];
    let (next, before) = ((r.rank + 1) % r.world, (r.rank + r.world - 1) % r.world);
    let mut from = own;
    for step in 0..r.world {
        let to = buffers[step % 2];
        r.start();
        r.send(from, n, next);
        r.recv(to, n, before);
        r.end();
        from = to;
    }
    r.wait();
    assert!(download(from, n) == stamp(r.rank, 0, n));
    let (mut count, mut rank, mut device) = (0, 0, 0);
    ok!(ncclCommCount(r.comm, &raw mut count));
    ok!(ncclCommUserRank(r.comm, &raw mut rank));
    ok!(ncclCommCuDevice(r.comm, &raw mut device));
    assert_eq!((count as usize, rank as usize), (r.world, r.rank));
    assert_eq!(asked(r.comm), 0);
    let code = call!(ncclCommFinalize(r.comm));
    assert!(code == 0 || code == IN_PROGRESS);
    assert_eq!(settled(r.comm), 0);
    r.destroy();
}

/// Three messages of different sizes between each two ranks, listed in another order by every rank.
fn all_to_all(r: Rank) {
    let size = |from: usize, to: usize, k: usize| 100 + 1000 * k + 10 * from + to;
    let mut received = Vec::new();
    for round in 0..3 {
        r.start();
        for step in 0..r.world {
            let peer = (r.rank * (round + 1) + step) % r.world;
            if peer == r.rank {
                continue;
            }
            for k in 0..3 {
                let n = size(r.rank, peer, k);
                let (out, n_in) = (upload(&stamp(r.rank, peer * 10 + k + round, n)), size(peer, r.rank, k));
                let into = upload(&vec![0; n_in]);
                r.send(out, n, peer);
                r.recv(into, n_in, peer);
                received.push((into, n_in, stamp(peer, r.rank * 10 + k + round, n_in)));
            }
        }
        r.end();
    }
    r.wait();
    for (p, n, expected) in received {
        assert!(download(p, n) == expected);
    }
    r.destroy();
}

fn collectives(r: Rank) {
    let values = |rank: usize| [rank as u64 + 1, u64::MAX - rank as u64].map(u64::to_le_bytes).concat();
    let (from, to) = (upload(&values(r.rank)), upload(&vec![0; 16 * r.world]));
    let (sum, most) = (upload(&[0; 16]), upload(&values(r.rank)));
    let stream = r.stream.cast();
    ok!(ncclAllGather(from as *const c_void, to as *mut c_void, 2, UINT64, r.comm, stream));
    r.start();
    ok!(ncclAllReduce(from as *const c_void, sum as *mut c_void, 2, UINT64, SUM, r.comm, stream));
    // In place.
    ok!(ncclAllReduce(most as *const c_void, most as *mut c_void, 2, UINT64, 2, r.comm, stream));
    r.end();
    r.wait();
    assert_eq!(download(to, 16 * r.world), (0..r.world).flat_map(values).collect::<Vec<u8>>());
    let n = r.world as u64;
    let expected = [n * (n + 1) / 2, 0u64.wrapping_sub(n).wrapping_sub(n * (n - 1) / 2)];
    assert_eq!(download(sum, 16), expected.map(u64::to_le_bytes).concat());
    assert_eq!(download(most, 16), [n, u64::MAX].map(u64::to_le_bytes).concat());
    r.destroy();
}

fn oneself(r: Rank) {
    let (a, b) = (upload(&stamp(r.rank, 0, 64)), upload(&[0; 128]));
    r.start();
    r.send(a, 64, r.rank);
    r.recv(b, 64, r.rank);
    r.recv(b + 64, 64, 1 - r.rank);
    r.send(a, 64, 1 - r.rank);
    r.end();
    r.wait();
    assert_eq!(download(b, 128), [stamp(r.rank, 0, 64), stamp(1 - r.rank, 0, 64)].concat());
    r.start();
    r.send(a, 64, r.rank);
    assert_eq!(call!(ncclGroupEnd()), 5, "{}", last_error());
    r.destroy();
}

/// What is sent is written by one stream and received for another, with events in between or without.
fn two_streams(r: Rank, ordered: bool) {
    let n = 4096;
    let (from, to) = (upload(&vec![0; n]), upload(&vec![0; n]));
    let other = stream();
    let mut event = null_mut();
    // SAFETY: handles that were just made, memory of that size.
    unsafe {
        sys::cuEventCreate(&raw mut event, 2).result().unwrap();
        sys::cuMemsetD8Async(from, r.rank as u8 + 1, n, other).result().unwrap();
        if ordered {
            sys::cuEventRecord(event, other).result().unwrap();
            sys::cuStreamWaitEvent(r.stream, event, 0).result().unwrap();
        }
    }
    r.start();
    r.send(from, n, 1 - r.rank);
    r.recv(to, n, 1 - r.rank);
    r.end();
    // SAFETY: as above.
    unsafe {
        if ordered {
            sys::cuEventRecord(event, r.stream).result().unwrap();
            sys::cuStreamWaitEvent(other, event, 0).result().unwrap();
        }
        // The first race that is found makes each later call of its device fail, these two included.
        let written = sys::cuMemsetD8Async(from, 9, n, other).result();
        let copied = sys::cuMemcpyDtoDAsync_v2(from, to, n, other).result();
        if ordered {
            written.and(copied).unwrap();
        }
    }
    let done = [wait(other), wait(r.stream)];
    if ordered {
        assert_eq!(done, [sys::CUresult::CUDA_SUCCESS; 2]);
        assert_eq!(download(from, n), vec![2 - r.rank as u8; n]);
        r.destroy();
    } else {
        // Either side may have been found out first; the other then waits in vain.
        ok!(ncclCommAbort(r.comm));
        wait(r.stream);
    }
}

fn graph(r: Rank) {
    let n = 512;
    let (from, to, result) = (upload(&stamp(r.rank, 0, n)), upload(&vec![0; n]), upload(&vec![0; n]));
    let (mut graph, mut exec) = (null_mut(), null_mut());
    // SAFETY: handles that were just made, memory of that size.
    unsafe {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        sys::cuStreamBeginCapture_v2(r.stream, mode).result().unwrap();
        r.start();
        r.send(from, n, 1 - r.rank);
        r.recv(to, n, 1 - r.rank);
        r.end();
        sys::cuMemcpyDtoDAsync_v2(result, to, n, r.stream).result().unwrap();
        sys::cuStreamEndCapture(r.stream, &raw mut graph).result().unwrap();
        sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0).result().unwrap();
        for round in 0..3 {
            let bytes = stamp(r.rank, round, n);
            sys::cuMemcpyHtoDAsync_v2(from, bytes.as_ptr().cast(), n, r.stream).result().unwrap();
            sys::cuGraphLaunch(exec, r.stream).result().unwrap();
            r.wait();
            assert!(download(result, n) == stamp(1 - r.rank, round, n), "round {round}");
        }
        sys::cuGraphExecDestroy(exec).result().unwrap();
        sys::cuGraphDestroy(graph).result().unwrap();
    }
    r.destroy();
}

/// Groups that hang: reported after a second, ended by an abort, after which the stream goes on.
fn unmatched(r: Rank, issue: impl Fn(&Rank, u64)) {
    let p = upload(&[3; 128]);
    issue(&r, p);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(1500) {
        // SAFETY: a stream that was made here.
        unsafe { sys::cuStreamQuery(r.stream) };
        std::thread::sleep(Duration::from_millis(1));
    }
    ok!(ncclCommAbort(r.comm));
    r.wait();
    // What did not arrive is not there.
    let found = download(p, 128);
    assert!(found.iter().all(|b| [3, 0xff].contains(b)), "{found:?}");
    assert_eq!(call!(ncclCommAbort(r.comm)), 4, "the handle is gone");
}

/// What the other rank hears, within two seconds.
fn hear(r: &Rank) -> c_int {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(2) {
        // SAFETY: a stream that was made here.
        unsafe { sys::cuStreamQuery(r.stream) };
        let code = asked(r.comm);
        if code != 0 {
            println!("rank {} hears {code}", r.rank);
            return code;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("rank {} hears nothing", r.rank);
    0
}

/// Rank 0 aborts; rank 1 waits for it in vain.
fn abort(r: Rank) {
    let p = upload(&[1; 64]);
    if r.rank == 0 {
        r.recv(p, 64, 1);
        std::thread::sleep(Duration::from_millis(50));
    } else {
        r.recv(p, 64, 0);
        hear(&r);
    }
    ok!(ncclCommAbort(r.comm));
    r.wait();
}

/// Two rounds, of which the second goes wrong.
fn fault(r: Rank) {
    let (from, to) = (upload(&[1; 64]), upload(&[0; 64]));
    for _ in 0..2 {
        r.start();
        r.send(from, 64, 1 - r.rank);
        r.recv(to, 64, 1 - r.rank);
        r.end();
    }
    hear(&r);
    ok!(ncclCommAbort(r.comm));
    r.wait();
    assert!(download(to, 64).iter().all(|b| [1, 0xff].contains(b)));
}

fn absent(rank: usize, world: usize, folder: &str, blocking: bool) {
    let mut comm = null_mut();
    let config = config(blocking);
    let id = id(rank, folder);
    let code = call!(ncclCommInitRankConfig(&raw mut comm, world as c_int, id, rank as c_int, &raw const config));
    if blocking {
        assert_eq!(code, 6);
        println!("{}", last_error());
    } else {
        assert_eq!(code, IN_PROGRESS);
        assert_eq!(call!(ncclSend(null_mut(), 0, UINT8, 0, comm, null_mut())), 5);
        ok!(ncclCommAbort(comm));
        assert_eq!(call!(ncclCommAbort(comm)), 4);
        println!("rank {rank} is in progress, then gone");
    }
}

fn refused(rank: usize, world: usize, folder: &str) {
    let mut comm = null_mut();
    let code = call!(ncclCommInitRank(&raw mut comm, world as c_int, id(rank, folder), rank as c_int));
    assert!([4, 5, 6].contains(&code), "{code}");
    assert!(comm.is_null());
    println!("{}", last_error());
}

fn arguments(r: Rank) {
    let p = upload(&[0; 64]);
    let send = |ptr: u64, count, element, peer, comm| {
        call!(ncclSend(ptr as *const c_void, count, element, peer, comm, r.stream.cast()))
    };
    assert_eq!(send(p, 64, 1, 1, r.comm), 4);
    assert_eq!(send(p, 64, 1, -1, r.comm), 4);
    assert_eq!(send(p, 64, 12, 0, r.comm), 4);
    assert_eq!(send(p, usize::MAX / 4, 4, 0, r.comm), 4);
    assert_eq!(send(0, 64, 1, 0, r.comm), 4);
    assert_eq!(send(p, 64, 1, 0, 0x1234 as *mut c_void), 4);
    assert!(last_error().contains("0x1234"), "{}", last_error());
    // A call that is refused inside a group takes the group with it.
    r.start();
    assert_eq!(send(p, 64, 1, 0, r.comm), 0);
    assert_eq!(send(p, 64, 1, 5, r.comm), 4);
    assert_eq!(call!(ncclGroupEnd()), 4);
    assert_eq!(call!(ncclGroupEnd()), 5);
    r.wait();
    let mut version = 0;
    ok!(ncclGetVersion(&raw mut version));
    assert_eq!(version, 22809);
    let mut comm = null_mut();
    let id = ById { bytes: [7; 128] };
    for (world, rank) in [(0, 0), (2, 2), (2, -1), (1, 0)] {
        assert_eq!(call!(ncclCommInitRank(&raw mut comm, world, id, rank)), 4, "{world} {rank}: {}", last_error());
    }
    // SAFETY: a text of the library's.
    let text = unsafe { std::ffi::CStr::from_ptr((nccl().ncclGetErrorString)(6)) };
    assert_eq!(text, c"remote process exited or there was a network error");
    r.destroy();
}
