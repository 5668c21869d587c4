// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls that are made while a graph is being captured: refused by name where they would end the capture, made
//! otherwise, and the capture gives the bits of a run in both cases.

use crate::{
    bits::{both, expected, ranks},
    device::{Stream, enter},
    graphs::{begin, behind, end},
    ok, plans,
    tensors::{Form, Tensors},
};
use cpattn::{
    Error, Plan, Rank, Result,
    kernel::cuda::Cuda,
    schedule::AllToAll,
    schedule::Direction::{self, Backward, Forward},
    transport::peer,
};
use cudarc::driver::sys;
use std::{
    ptr::null_mut,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

const BOTH: [Direction; 2] = [Forward, Backward];

fn alone(cuda: &Arc<Cuda>) -> Rank {
    Rank::on_device(peer::group(&[Arc::clone(cuda)], Duration::from_secs(300)).unwrap().remove(0)).unwrap()
}

fn prepared(cuda: &Arc<Cuda>, plan: &Plan) -> Rank {
    let mut rank = alone(cuda);
    BOTH.iter().for_each(|&d| rank.prepare(plan, d).unwrap());
    rank
}

fn run(rank: &mut Rank, plan: &Plan, direction: Direction, tensors: &Tensors, stream: Stream) -> Result<()> {
    // SAFETY: the tensors live until the stream, or the last replay of what is captured, was waited for.
    unsafe { rank.run(plan, direction, &tensors.bindings().on(stream.raw().cast())) }
}

/// Refused by name, with the way out.
fn refused(outcome: Result<()>, words: [&str; 2]) {
    let error = outcome.expect_err(words[0]);
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    let text = error.to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
}

/// Launches a captured run and compares what it wrote with a run of another rank.
fn replay(cuda: &Arc<Cuda>, plan: &Plan, tensors: &Tensors, exec: sys::CUgraphExec, stream: Stream, what: &str) {
    tensors.fill(7, 0);
    ok!(cuGraphLaunch(exec, stream.0));
    stream.wait();
    assert!(tensors.results(what) == expected(cuda, plan, 7)[0], "{what}: other bits");
    ok!(cuGraphExecDestroy(exec));
}

/// Every call that would end the capture of its own rank's run.
fn own_capture(cuda: &Arc<Cuda>) {
    const ENDS: &str = "end the capture before the call";
    let [(_, plan), (_, other)] = &plans::of(1)[..] else { panic!("two plans") };
    type Call = (&'static str, fn(&mut Rank, &Plan, &Cuda) -> Result<()>);
    let calls: [Call; 5] = [
        ("synchronize", |rank, _, _| rank.synchronize()),
        ("record", |rank, _, _| rank.trace().record(Instant::now(), 8)),
        ("lend_workspace", |rank, _, cuda| {
            let memory = cuda.allocate(1 << 20)?;
            // SAFETY: refused; the memory would have to live on otherwise.
            unsafe { rank.workspace().lend(memory.ptr(), memory.bytes()) }
        }),
        ("prepare", |rank, other, _| rank.prepare(other, Forward)),
        ("prepare", |rank, other, _| rank.prepare(other, AllToAll::both(cpattn::Side::Q, 8, cpattn::Dtype::Bf16)?[0])),
    ];
    let (tensors, stream, plain) = (Tensors::new(cuda, plan, 0, |_| Form::Compact), Stream::new(), Stream::new());
    // One capture for each call, so that each is seen to leave its own valid; the last for what is allowed.
    for i in 0..=calls.len() {
        let mut rank = prepared(cuda, plan);
        tensors.fill(1, 0);
        both(&mut rank, plan, &tensors, plain);
        begin(stream);
        run(&mut rank, plan, Forward, &tensors, stream).unwrap();
        let what = match calls.get(i) {
            Some((name, call)) => {
                refused(call(&mut rank, other, cuda), [&format!("{name} while a run of the rank"), ENDS]);
                name
            }
            None => {
                rank.poll().unwrap();
                rank.prepare(plan, Forward).unwrap();
                rank.workspace().take_back().unwrap();
                rank.trace().record(Instant::now(), 0).unwrap();
                assert!(rank.trace().events().is_empty());
                rank.workspace().bytes(other, Forward).unwrap();
                "calls that do not wait"
            }
        };
        // A run on another stream, and one of the legacy default stream, which orders itself with no other here.
        refused(
            run(&mut rank, plan, Forward, &tensors, plain),
            ["a run outside of the capture", "join it by an event"],
        );
        refused(run(&mut rank, plan, Forward, &tensors, Stream(null_mut())), ["a run outside of the capture", ENDS]);
        run(&mut rank, plan, Backward, &tensors, stream).unwrap();
        let exec = end(stream);
        replay(cuda, plan, &tensors, exec, stream, what);
        // The rank goes on, and so does the call.
        rank.synchronize().unwrap();
        both(&mut rank, plan, &tensors, plain);
        if let Some((name, call)) = calls.get(i).filter(|(name, _)| *name != "lend_workspace") {
            call(&mut rank, other, cuda).unwrap_or_else(|e| panic!("{name}, after the capture: {e}"));
        }
    }

    // Memory that is lent cannot be taken back meanwhile.
    let mut rank = alone(cuda);
    let needed = BOTH.map(|d| rank.workspace().bytes(plan, d).unwrap()).into_iter().max().unwrap();
    let lent = cuda.allocate(needed as usize).unwrap();
    // SAFETY: the memory lives until it is taken back.
    unsafe { rank.workspace().lend(lent.ptr(), lent.bytes()) }.unwrap();
    BOTH.iter().for_each(|&d| rank.prepare(plan, d).unwrap());
    begin(stream);
    BOTH.iter().for_each(|&d| run(&mut rank, plan, d, &tensors, stream).unwrap());
    refused(rank.workspace().take_back(), ["take_workspace_back while a run of the rank", ENDS]);
    let exec = end(stream);
    replay(cuda, plan, &tensors, exec, stream, "take_workspace_back");
    rank.workspace().take_back().unwrap();
}

/// All calls of a rank that has no part in a capture leave it valid: one of the thread that captures, and one of
/// another.
fn capture_of_others(cuda: &Arc<Cuda>) {
    let [(_, plan), (_, other)] = &plans::of(1)[..] else { panic!("two plans") };
    let (tensors, stream) = (Tensors::new(cuda, plan, 0, |_| Form::Compact), Stream::new());
    let mut rank = prepared(cuda, plan);
    begin(stream);
    BOTH.iter().for_each(|&d| run(&mut rank, plan, d, &tensors, stream).unwrap());
    let beside = || {
        enter();
        let (mut rank, stream) = (alone(cuda), Stream::new());
        let lent = cuda.allocate(1 << 22).unwrap();
        rank.trace().record(Instant::now(), 64).unwrap();
        for plan in [plan, other] {
            let theirs = Tensors::new(cuda, plan, 0, |_| Form::Compact);
            theirs.fill(2, 0);
            // Not prepared: the run loads, allocates and uploads.
            BOTH.iter().for_each(|&d| run(&mut rank, plan, d, &theirs, stream).unwrap());
            rank.synchronize().unwrap();
            assert!(!rank.trace().events().is_empty());
        }
        // SAFETY: the memory lives until it is taken back.
        unsafe { rank.workspace().lend(lent.ptr(), lent.bytes()) }.unwrap();
        rank.workspace().take_back().unwrap();
        // SAFETY: a live stream.
        unsafe { cuda.synchronize(stream.raw().cast()) }.unwrap();
        drop(rank);
    };
    beside();
    thread::scope(|scope| scope.spawn(beside).join()).unwrap();
    let exec = end(stream);
    replay(cuda, plan, &tensors, exec, stream, "beside a rank of its own");
}

/// While a stream is captured that waits for the default stream, the default stream takes no work.
fn default_stream(cuda: &Arc<Cuda>) {
    let [(_, plan), (_, other)] = &plans::of(1)[..] else { panic!("two plans") };
    let mut blocking = null_mut();
    ok!(cuStreamCreate(&raw mut blocking, 0));
    let (stream, tensors) = (Stream(blocking), Tensors::new(cuda, plan, 0, |_| Form::Compact));
    let (mut rank, mut second) = (prepared(cuda, plan), prepared(cuda, plan));
    let memory = cuda.allocate(64).unwrap();
    tensors.fill(7, 0);
    begin(stream);
    BOTH.iter().for_each(|&d| run(&mut rank, plan, d, &tensors, stream).unwrap());
    let words = ["the default stream while a stream", "CU_STREAM_NON_BLOCKING"];
    refused(run(&mut second, plan, Forward, &tensors, Stream(null_mut())), words);
    refused(second.prepare(other, Forward), words);
    refused(memory.upload(&[0; 64]), words);
    refused(memory.download(&mut [0; 64]), words);
    // SAFETY: a live stream.
    let waited = unsafe { cuda.synchronize(stream.raw().cast()) };
    refused(waited, ["waiting for a stream that is being captured", "launch its graph"]);
    let exec = end(stream);
    replay(cuda, plan, &tensors, exec, stream, "beside the default stream");
    second.prepare(other, Forward).unwrap();
}

/// Of a group, the rank that is asked to wait while all are captured refuses, and the graph of all is whole.
fn in_a_group(cuda: &Arc<Cuda>) {
    let plan = &plans::of(2)[0].1;
    let mut members: Vec<_> = peer::group(&vec![Arc::clone(cuda); 2], Duration::from_secs(300))
        .unwrap()
        .into_iter()
        .map(|end| {
            let mut rank = Rank::on_device(end).unwrap();
            BOTH.iter().for_each(|&d| rank.prepare(plan, d).unwrap());
            let tensors = Tensors::new(cuda, plan, rank.rank(), |_| Form::Compact);
            (rank, tensors, Stream::new())
        })
        .collect();
    let (first, second) = (members[0].2, members[1].2);
    begin(first);
    behind(first, second);
    thread::scope(|scope| {
        for (rank, tensors, stream) in &mut members {
            scope.spawn(move || {
                enter();
                for d in BOTH {
                    run(rank, plan, d, tensors, *stream).unwrap();
                    refused(rank.synchronize(), ["synchronize while a run", "end the capture"]);
                    refused(run(rank, plan, d, tensors, Stream::new()), ["a run outside", "end the capture"]);
                }
            });
        }
    });
    behind(second, first);
    let exec = end(first);
    let expected = expected(cuda, plan, 3);
    members.iter().enumerate().for_each(|(me, (_, tensors, _))| tensors.fill(3, me));
    ok!(cuGraphLaunch(exec, first.0));
    first.wait();
    for (me, (rank, tensors, _)) in members.iter().enumerate() {
        assert!(tensors.results("a group") == expected[me], "rank {me}: other bits");
        rank.synchronize().unwrap();
    }
    ok!(cuGraphExecDestroy(exec));
}

/// A capture that something else has ended is refused as that, and the rank is as it was; so is one that is dropped
/// meanwhile.
fn failed_capture(cuda: &Arc<Cuda>) {
    let plan = &plans::of(1)[0].1;
    let (tensors, stream) = (Tensors::new(cuda, plan, 0, |_| Form::Compact), Stream::new());
    let mut rank = prepared(cuda, plan);
    let mut graph = null_mut();
    begin(stream);
    run(&mut rank, plan, Forward, &tensors, stream).unwrap();
    // SAFETY: a live stream; the driver refuses the question and makes the capture invalid.
    assert_ne!(unsafe { sys::cuStreamQuery(stream.0) }, sys::CUresult::CUDA_SUCCESS);
    refused(run(&mut rank, plan, Forward, &tensors, stream), ["a stream whose capture has failed", "capture again"]);
    refused(rank.synchronize(), ["synchronize while", "end the capture"]);
    // SAFETY: the stream is being captured.
    assert_ne!(unsafe { sys::cuStreamEndCapture(stream.0, &raw mut graph) }, sys::CUresult::CUDA_SUCCESS);
    tensors.fill(7, 0);
    both(&mut rank, plan, &tensors, stream);
    assert!(tensors.results("after a failed capture") == expected(cuda, plan, 7)[0]);
    // Another capture of the thread goes on when a rank is dropped.
    begin(stream);
    drop(rank);
    ok!(cuGraphExecDestroy(end(stream)));
}

pub fn all(cuda: &Arc<Cuda>) {
    enter();
    own_capture(cuda);
    capture_of_others(cuda);
    default_stream(cuda);
    in_a_group(cuda);
    failed_capture(cuda);
    ranks(cuda, 1, |mut rank| {
        let plan = &plans::of(1)[0].1;
        let tensors = Tensors::new(cuda, plan, 0, |_| Form::Compact);
        tensors.fill(1, 0);
        both(&mut rank, plan, &tensors, Stream::new());
    });
}
