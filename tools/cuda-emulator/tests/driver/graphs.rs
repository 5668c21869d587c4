// SPDX-License-Identifier: MIT OR Apache-2.0
//! Capture of streams into graphs, and replays.

use super::{N, Raw, event, passes, reports, stream};
use cudarc::driver::result;
use cudarc::driver::sys::{
    self, CUgraph, CUgraphExec, CUresult,
    CUresult::{
        CUDA_ERROR_CAPTURED_EVENT, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
        CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, CUDA_ERROR_STREAM_CAPTURE_ISOLATION, CUDA_ERROR_STREAM_CAPTURE_MERGE,
        CUDA_ERROR_STREAM_CAPTURE_UNJOINED, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, CUDA_SUCCESS,
    },
    CUstream,
    CUstreamCaptureMode_enum::{
        self as Mode, CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_RELAXED,
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    },
};
use std::ptr::null_mut;

pub fn case(name: &str) -> bool {
    match name {
        "replay" => replay(),
        "fork and join" => fork_and_join(true),
        "fork without order" => fork_and_join(false),
        "replays in two streams" => replays_in_two_streams(),
        "graph behind nothing" => unordered(false),
        "graph behind an event" => unordered(true),
        "graph in a graph" => graph_in_a_graph(),
        "external events" => external_events(),
        "illegal" => illegal(),
        "modes" => modes(),
        "legacy" => legacy(),
        "unjoined" => unjoined(),
        _ => return false,
    }
    true
}

/// Calls and gives the code.
macro_rules! code {
    ($f:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: handles that the cases made, and pointers to their locals.
        unsafe { sys::$f($($arg),*) }
    }};
}

macro_rules! ok {
    ($($call:tt)*) => { assert_eq!(code!($($call)*), CUDA_SUCCESS) };
}

fn begin(s: CUstream, mode: Mode) {
    ok!(cuStreamBeginCapture_v2(s, mode));
}

fn end(s: CUstream) -> CUgraph {
    let mut graph = null_mut();
    ok!(cuStreamEndCapture(s, &raw mut graph));
    graph
}

fn instance(graph: CUgraph) -> CUgraphExec {
    let mut exec = null_mut();
    ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
    exec
}

fn status(s: CUstream) -> u32 {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    ok!(cuStreamIsCapturing(s, &raw mut status));
    status as u32
}

unsafe extern "C" fn count(data: *mut std::ffi::c_void) {
    // SAFETY: the cases give a counter that outlives the graph, and read it only after waiting.
    unsafe { *data.cast::<u32>() += 1 };
}

fn replay() {
    let raw = Raw::new();
    let s = stream();
    let mut calls = 0u32;
    begin(s, CU_STREAM_CAPTURE_MODE_GLOBAL);
    assert_eq!(status(s), 1);
    ok!(cuMemsetD32Async(raw.x, 7, N as usize, s));
    raw.launch(s, raw.x, N).unwrap();
    raw.launch(s, raw.x, N).unwrap();
    ok!(cuLaunchHostFunc(s, Some(count), (&raw mut calls).cast()));
    let graph = end(s);
    assert_eq!(status(s), 0);
    // Nothing ran.
    result::ctx::synchronize().unwrap();
    assert_eq!((raw.read(), calls), (vec![0; N as usize], 0));
    let (mut nodes, mut edges) = (0, 0);
    ok!(cuGraphGetNodes(graph, null_mut(), &raw mut nodes));
    ok!(cuGraphGetEdges_v2(graph, null_mut(), null_mut(), null_mut(), &raw mut edges));
    assert_eq!((nodes, edges), (4, 3));
    let exec = instance(graph);
    ok!(cuGraphDestroy(graph));
    for times in 1..4 {
        ok!(cuGraphLaunch(exec, s));
        ok!(cuStreamSynchronize(s));
        assert_eq!((raw.read(), calls), (vec![9; N as usize], times));
    }
    // Work behind a replay comes behind all of it, also when the instance is gone meanwhile.
    ok!(cuGraphLaunch(exec, s));
    raw.launch(s, raw.x, N).unwrap();
    ok!(cuGraphExecDestroy(exec));
    ok!(cuStreamSynchronize(s));
    assert_eq!((raw.read(), calls), (vec![10; N as usize], 4));
    assert_ne!(code!(cuGraphLaunch(exec, s)), CUDA_SUCCESS);
}

/// A second stream joins by an event and is joined back by another; both work on the same numbers, in order if
/// `ordered`.
fn fork_and_join(ordered: bool) {
    let raw = Raw::new();
    let (a, b, fork, join) = (stream(), stream(), event(), event());
    begin(a, CU_STREAM_CAPTURE_MODE_RELAXED);
    ok!(cuMemsetD32Async(raw.x, 1, N as usize, a));
    ok!(cuEventRecord(fork, a));
    ok!(cuStreamWaitEvent(b, fork, 0));
    assert_eq!(status(b), 1);
    raw.launch(b, raw.x, N).unwrap();
    if !ordered {
        raw.launch(a, raw.x, N).unwrap();
    }
    ok!(cuEventRecord(join, b));
    ok!(cuStreamWaitEvent(a, join, 0));
    raw.launch(a, raw.x, N).unwrap();
    let exec = instance(end(a));
    assert_eq!(status(b), 0);
    ok!(cuGraphLaunch(exec, a));
    let done = code!(cuStreamSynchronize(a));
    assert_eq!(done == CUDA_SUCCESS, ordered);
    if ordered {
        assert_eq!(raw.read(), [3; N as usize]);
    }
}

/// Replays of one instance come one after the other, whatever streams they are in.
fn replays_in_two_streams() {
    let raw = Raw::new();
    let (a, b) = (stream(), stream());
    begin(a, CU_STREAM_CAPTURE_MODE_GLOBAL);
    raw.launch(a, raw.x, N).unwrap();
    let exec = instance(end(a));
    for s in [a, b, a, b] {
        ok!(cuGraphLaunch(exec, s));
    }
    ok!(cuStreamSynchronize(b));
    assert_eq!(raw.read(), [4; N as usize]);
}

/// A replay is ordered with other streams by nothing but events.
fn unordered(with_event: bool) {
    let raw = Raw::new();
    let (a, b, e) = (stream(), stream(), event());
    begin(a, CU_STREAM_CAPTURE_MODE_GLOBAL);
    raw.launch(a, raw.x, N).unwrap();
    let exec = instance(end(a));
    raw.launch(b, raw.x, N).unwrap();
    ok!(cuEventRecord(e, b));
    if with_event {
        ok!(cuStreamWaitEvent(a, e, 0));
    }
    ok!(cuGraphLaunch(exec, a));
    let done = (code!(cuStreamSynchronize(a)), code!(cuStreamSynchronize(b)));
    assert_eq!(done == (CUDA_SUCCESS, CUDA_SUCCESS), with_event);
}

fn graph_in_a_graph() {
    let raw = Raw::new();
    let (a, b) = (stream(), stream());
    begin(a, CU_STREAM_CAPTURE_MODE_GLOBAL);
    raw.launch(a, raw.x, N).unwrap();
    raw.launch(a, raw.x, N).unwrap();
    let inner = instance(end(a));
    begin(b, CU_STREAM_CAPTURE_MODE_GLOBAL);
    ok!(cuMemsetD32Async(raw.x, 5, N as usize, b));
    ok!(cuGraphLaunch(inner, b));
    raw.launch(b, raw.x, N).unwrap();
    let outer = instance(end(b));
    ok!(cuGraphLaunch(outer, b));
    ok!(cuStreamSynchronize(b));
    assert_eq!(raw.read(), [8; N as usize]);
}

/// Events that order a replay with streams outside of it.
fn external_events() {
    let raw = Raw::new();
    let (a, b, before, after) = (stream(), stream(), event(), event());
    begin(a, CU_STREAM_CAPTURE_MODE_GLOBAL);
    ok!(cuStreamWaitEvent(a, before, 1));
    raw.launch(a, raw.x, N).unwrap();
    ok!(cuEventRecordWithFlags(after, a, 1));
    let exec = instance(end(a));
    for _ in 0..2 {
        raw.launch(b, raw.x, N).unwrap();
        ok!(cuEventRecord(before, b));
        ok!(cuGraphLaunch(exec, a));
        ok!(cuStreamWaitEvent(b, after, 0));
        raw.launch(b, raw.x, N).unwrap();
    }
    ok!(cuEventSynchronize(after));
    ok!(cuStreamSynchronize(b));
    assert_eq!(raw.read(), [6; N as usize]);
}

/// Begins a capture, does something that is not allowed, and ends it: the code of each step.
fn spoilt(s: CUstream, mode: Mode, wrong: impl FnOnce() -> CUresult) -> (CUresult, CUresult) {
    begin(s, mode);
    let first = wrong();
    if first != CUDA_SUCCESS {
        assert_eq!(status(s), 2, "{first:?}");
        assert_eq!(code!(cuMemsetD8Async(0x100, 0, 0, s)), CUDA_SUCCESS, "nothing to do, nothing to refuse");
    }
    let mut graph = null_mut();
    let last = code!(cuStreamEndCapture(s, &raw mut graph));
    assert_eq!(graph.is_null(), last != CUDA_SUCCESS);
    assert_eq!(status(s), 0);
    (first, last)
}

fn illegal() {
    let raw = Raw::new();
    let (s, other, e, captured) = (stream(), stream(), event(), event());
    let global = CU_STREAM_CAPTURE_MODE_GLOBAL;
    let relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
    let invalid = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    let unsupported = (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, invalid);
    for mode in [global, relaxed] {
        assert_eq!(spoilt(s, mode, || code!(cuStreamSynchronize(s))), unsupported);
        assert_eq!(spoilt(s, mode, || code!(cuStreamQuery(s))), unsupported);
        assert_eq!(spoilt(s, mode, || code!(cuCtxSynchronize())), unsupported);
        assert_eq!(spoilt(s, mode, || code!(cuStreamBeginCapture_v2(s, mode))), unsupported);
        // Copies of pageable memory.
        let host = [1u8; 16];
        let upload = || code!(cuMemcpyHtoDAsync_v2(raw.x, host.as_ptr().cast(), 16, s));
        assert_eq!(spoilt(s, mode, upload), unsupported);
        // An event that was recorded elsewhere.
        ok!(cuEventRecord(e, other));
        let isolation = (CUDA_ERROR_STREAM_CAPTURE_ISOLATION, invalid);
        assert_eq!(spoilt(s, mode, || code!(cuStreamWaitEvent(s, e, 0))), isolation);
    }
    // An event of the capture is no event that the host could wait for, during the capture and after it.
    let ask = || {
        ok!(cuEventRecord(captured, s));
        code!(cuEventSynchronize(captured))
    };
    assert_eq!(spoilt(s, relaxed, ask), (CUDA_ERROR_CAPTURED_EVENT, invalid));
    assert_eq!(code!(cuEventQuery(captured)), CUDA_ERROR_CAPTURED_EVENT);
    assert_eq!(code!(cuStreamWaitEvent(other, captured, 0)), CUDA_ERROR_CAPTURED_EVENT);
    ok!(cuEventRecord(captured, other));
    ok!(cuEventSynchronize(captured));
    // Work in a spoilt capture is refused as well.
    begin(s, relaxed);
    assert_eq!(code!(cuStreamSynchronize(s)), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!(raw.launch(s, raw.x, N).unwrap_err().0, invalid);
    assert_eq!(code!(cuEventRecord(e, s)), invalid);
    let mut graph = null_mut();
    assert_eq!(code!(cuStreamEndCapture(s, &raw mut graph)), invalid);
    // Two captures do not become one.
    begin(s, relaxed);
    begin(other, relaxed);
    ok!(cuEventRecord(captured, other));
    assert_eq!(code!(cuStreamWaitEvent(s, captured, 0)), CUDA_ERROR_STREAM_CAPTURE_MERGE);
    assert_eq!(code!(cuStreamEndCapture(s, &raw mut graph)), invalid);
    assert_eq!(code!(cuStreamEndCapture(other, &raw mut graph)), invalid);
    assert_eq!(code!(cuStreamEndCapture(s, &raw mut graph)), CUDA_ERROR_INVALID_VALUE);
    // The machine is as it was.
    raw.launch(s, raw.x, N).unwrap();
    ok!(cuStreamSynchronize(s));
    assert_eq!(raw.read(), [1; N as usize]);
}

fn modes() {
    Raw::new();
    let (s, other) = (stream(), stream());
    let allocate = || {
        let mut p = 0;
        code!(cuMemAlloc_v2(&raw mut p, 16))
    };
    let elsewhere = |f: &(dyn Fn() -> CUresult + Sync)| {
        let mut context = null_mut();
        ok!(cuCtxGetCurrent(&raw mut context));
        let context = context as usize;
        std::thread::scope(|scope| {
            let run = scope.spawn(|| {
                ok!(cuCtxSetCurrent(context as _));
                f()
            });
            run.join().unwrap()
        })
    };
    let other = other as usize;
    let wait = || code!(cuStreamSynchronize(other as CUstream));
    let (unsupported, invalid) = (CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    let (refused, fine) = ((unsupported, invalid), (CUDA_SUCCESS, CUDA_SUCCESS));
    for (mode, here, there) in [
        (CU_STREAM_CAPTURE_MODE_GLOBAL, refused, refused),
        (CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, refused, fine),
        (CU_STREAM_CAPTURE_MODE_RELAXED, fine, fine),
    ] {
        assert_eq!(spoilt(s, mode, allocate), here, "{mode:?}");
        assert_eq!(spoilt(s, mode, wait), here, "{mode:?}");
        assert_eq!(spoilt(s, mode, || elsewhere(&allocate)), there, "{mode:?}");
        assert_eq!(spoilt(s, mode, || elsewhere(&wait)), there, "{mode:?}");
        let relaxed = || {
            let mut mode = CU_STREAM_CAPTURE_MODE_RELAXED;
            ok!(cuThreadExchangeStreamCaptureMode(&raw mut mode));
            let done = allocate();
            ok!(cuThreadExchangeStreamCaptureMode(&raw mut mode));
            assert_eq!(mode, CU_STREAM_CAPTURE_MODE_RELAXED);
            done
        };
        assert_eq!(spoilt(s, mode, relaxed), fine, "{mode:?}");
        // Ended in another thread.
        begin(s, mode);
        let at = s as usize;
        let end = || {
            let mut graph = null_mut();
            code!(cuStreamEndCapture(at as CUstream, &raw mut graph))
        };
        if mode == CU_STREAM_CAPTURE_MODE_RELAXED {
            assert_eq!(elsewhere(&end), CUDA_SUCCESS);
        } else {
            assert_eq!(elsewhere(&end), CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
            assert_eq!(end(), invalid);
        }
    }
}

/// The default stream, while a stream that it is ordered with is being captured.
fn legacy() {
    let raw = Raw::new();
    let blocking = result::stream::create(result::stream::StreamKind::Default).unwrap();
    let implicit = (CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    let relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
    let fill = || code!(cuMemsetD8Async(raw.x, 0, 16, null_mut()));
    assert_eq!(spoilt(blocking, relaxed, fill), implicit);
    assert_eq!(spoilt(blocking, relaxed, || code!(cuStreamSynchronize(null_mut()))), implicit);
    let host = [1u8; 16];
    let upload = || code!(cuMemcpyHtoD_v2(raw.x, host.as_ptr().cast(), 16));
    assert_eq!(spoilt(blocking, relaxed, upload), implicit);
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    begin(blocking, relaxed);
    assert_eq!(code!(cuStreamIsCapturing(null_mut(), &raw mut status)), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    end(blocking);
    // It cannot be captured itself, and is free while an independent stream is.
    assert_eq!(code!(cuStreamBeginCapture_v2(null_mut(), relaxed)), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!(spoilt(stream(), relaxed, fill), (CUDA_SUCCESS, CUDA_SUCCESS));
}

fn unjoined() {
    let raw = Raw::new();
    let (a, b, e) = (stream(), stream(), event());
    begin(a, CU_STREAM_CAPTURE_MODE_GLOBAL);
    ok!(cuEventRecord(e, a));
    ok!(cuStreamWaitEvent(b, e, 0));
    raw.launch(b, raw.x, N).unwrap();
    let mut graph = null_mut();
    assert_eq!(code!(cuStreamEndCapture(a, &raw mut graph)), CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    assert_eq!((status(a), status(b)), (0, 0));
    begin(a, CU_STREAM_CAPTURE_MODE_GLOBAL);
    ok!(cuEventRecord(e, a));
    ok!(cuStreamWaitEvent(b, e, 0));
    assert_eq!(code!(cuStreamEndCapture(b, &raw mut graph)), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    assert_eq!(code!(cuStreamEndCapture(a, &raw mut graph)), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

#[test]
fn a_replay_does_what_was_captured() {
    passes("replay");
}

#[test]
fn streams_join_a_capture_by_events() {
    passes("fork and join");
    reports("fork without order", "StreamRace in `kernel `add_one``");
}

#[test]
fn replays_are_ordered_by_their_streams_and_their_instance() {
    passes("replays in two streams");
    passes("graph behind an event");
    reports("graph behind nothing", "StreamRace in `kernel `add_one``");
}

#[test]
fn graphs_are_captured_into_graphs() {
    passes("graph in a graph");
}

#[test]
fn external_events_are_nodes() {
    passes("external events");
}

#[test]
fn what_a_capture_does_not_allow() {
    reports("illegal", "a graph refused: copies of pageable memory");
    passes("modes");
    passes("legacy");
    passes("unjoined");
}
