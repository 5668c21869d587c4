// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs that are captured into CUDA graphs and replayed with new data.

use crate::{
    bits::{both, expected, ranks},
    device::{Counters, Stream, enter},
    ok, plans,
    tensors::{Form, Tensors, awkward},
    wrapped::Wrapped,
};
use cpattn::{Layout, Mesh, Plan, Rank, kernel::cuda::Cuda, schedule::Direction, transport::peer};
use cudarc::driver::sys::{self, CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_GLOBAL};
use std::{ptr::null_mut, sync::Arc, thread, time::Duration};

const BOTH: [Direction; 2] = [Direction::Forward, Direction::Backward];

/// An event without timing.
fn event() -> sys::CUevent {
    let mut event = null_mut();
    ok!(cuEventCreate(&raw mut event, 2));
    event
}

/// Has `to` come behind `from`.
pub fn behind(from: Stream, to: Stream) {
    let event = event();
    ok!(cuEventRecord(event, from.0));
    ok!(cuStreamWaitEvent(to.0, event, 0));
}

pub fn begin(stream: Stream) {
    ok!(cuStreamBeginCapture_v2(stream.0, CU_STREAM_CAPTURE_MODE_GLOBAL));
}

/// Ends a capture and makes its graph ready.
pub fn end(stream: Stream) -> sys::CUgraphExec {
    let (mut graph, mut exec) = (null_mut(), null_mut());
    ok!(cuStreamEndCapture(stream.0, &raw mut graph));
    ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
    ok!(cuGraphDestroy(graph));
    exec
}

/// While a capture is under way in the strictest mode, a rank can be asked whether anything failed, on any thread.
fn watched(rank: &Rank) {
    rank.poll().unwrap();
    let handle = rank.handle();
    thread::scope(|scope| scope.spawn(|| handle.poll()).join()).unwrap().unwrap();
}

/// One rank: every plan is captured once, and replayed between runs of the same rank.
fn alone(cuda: &Arc<Cuda>) {
    let stream = Stream::new();
    let end_of = peer::group(&[Arc::clone(cuda)], Duration::from_secs(300)).unwrap().remove(0);
    let mut rank = Rank::on_device(end_of).unwrap();
    let list = plans::of(1);
    let mut captured = Vec::new();
    // A capture that the rank has no part in.
    begin(stream);
    watched(&rank);
    end(stream);
    for (name, plan) in &list {
        let tensors = Tensors::new(cuda, plan, 0, awkward(plan));
        BOTH.iter().for_each(|&d| rank.prepare(plan, d).unwrap());
        begin(stream);
        for direction in BOTH {
            // SAFETY: the tensors live until the last replay was waited for.
            unsafe { rank.run(plan, direction, &tensors.bindings().on(stream.raw().cast())) }.unwrap();
            watched(&rank);
        }
        captured.push((*name, plan, tensors, end(stream)));
    }
    let counters = Counters::find();
    for seed in 1..3 {
        for (name, plan, tensors, exec) in &captured {
            let expected = expected(cuda, plan, seed);
            tensors.fill(seed, 0);
            if let Some(c) = counters {
                c.reset();
            }
            ok!(cuGraphLaunch(*exec, stream.0));
            if let Some(c) = counters {
                assert_eq!((c.get("calls"), c.get("graph launches")), (1, 1), "{name}: a replay is one call");
                assert!(c.get("launches") > 2, "{name}: the graph holds the launches");
            }
            // A run right behind the replay: it comes second in the workspace that they share, on whatever stream.
            let (beside, other) = (Tensors::new(cuda, plan, 0, |_| Form::Compact), Stream::new());
            beside.fill(seed, 0);
            both(&mut rank, plan, &beside, other);
            // And a replay right behind that run, without a wait between.
            for direction in BOTH {
                // SAFETY: the tensors live until the streams were waited for.
                unsafe { rank.run(plan, direction, &beside.bindings().on(other.raw().cast())) }.unwrap();
            }
            ok!(cuGraphLaunch(*exec, stream.0));
            stream.wait();
            other.wait();
            for (found, what) in [(tensors, "replay"), (&beside, "run")] {
                let what = format!("{name}, {what} {seed}");
                for ((tensor, found), (_, expected)) in found.results(&what).iter().zip(&expected[0]) {
                    assert!(found == expected, "{what}: {} has other bits", tensor.name());
                }
            }
        }
    }
    // Other plans push what is remembered out, but not what graphs use.
    let lists = rank.workspace().metadata_bytes();
    let bytes = |plan: &Plan| plan.costs(0, Direction::Forward).unwrap().device_metadata;
    for tokens in 1..20 {
        let p =
            cpattn::Problem::new(cpattn::Batch::from_lengths(&[4000 * tokens]).unwrap(), 4, 4, 64, cpattn::Dtype::Bf16);
        let plan = Plan::new(&p, cpattn::Mesh::single(), cpattn::Layout::Contiguous).unwrap();
        // The last ones need more workspace than the graphs were captured with.
        rank.prepare(&plan, Direction::Backward).unwrap();
        assert!(bytes(&plan) > 0);
    }
    assert!(rank.workspace().metadata_bytes() > lists);
    for (name, plan, tensors, exec) in &captured {
        tensors.fill(77, 0);
        ok!(cuGraphLaunch(*exec, stream.0));
        stream.wait();
        let expected = expected(cuda, plan, 77);
        for ((tensor, found), (_, expected)) in tensors.results(name).iter().zip(&expected[0]) {
            assert!(found == expected, "{name}, after others: {} has other bits", tensor.name());
        }
        ok!(cuGraphExecDestroy(*exec));
    }
}

/// All ranks of a group, in one graph: the capture begins on the stream of rank 0, the others join it and join back.
fn together(cuda: &Arc<Cuda>, world: usize) {
    for (name, plan) in &plans::of(world) {
        let ends = peer::group(&vec![Arc::clone(cuda); world], Duration::from_secs(300)).unwrap();
        let streams: Vec<Stream> = (0..world).map(|_| Stream::new()).collect();
        let mut members: Vec<(Rank, Tensors)> = ends
            .into_iter()
            .map(|end| {
                let mut rank = Rank::on_device(end).unwrap();
                BOTH.iter().for_each(|&d| rank.prepare(plan, d).unwrap());
                let tensors = Tensors::new(cuda, plan, rank.rank(), awkward(plan));
                (rank, tensors)
            })
            .collect();
        begin(streams[0]);
        streams[1..].iter().for_each(|&s| behind(streams[0], s));
        thread::scope(|scope| {
            for ((rank, tensors), &stream) in members.iter_mut().zip(&streams) {
                scope.spawn(move || {
                    enter();
                    for direction in BOTH {
                        // SAFETY: the tensors live until the last replay was waited for.
                        unsafe { rank.run(plan, direction, &tensors.bindings().on(stream.raw().cast())) }.unwrap();
                    }
                });
            }
        });
        streams[1..].iter().for_each(|&s| behind(s, streams[0]));
        let exec = end(streams[0]);
        // Each replay is a run of its own: ranks that counted otherwise would have NaN.
        for seed in [1, 2, 1] {
            let expected = expected(cuda, plan, seed);
            members.iter().enumerate().for_each(|(me, (_, tensors))| tensors.fill(seed, me));
            ok!(cuGraphLaunch(exec, streams[0].0));
            streams[0].wait();
            for (me, (_, tensors)) in members.iter().enumerate() {
                let what = format!("{name}, replay {seed}, rank {me}");
                for ((tensor, found), (_, expected)) in tensors.results(&what).iter().zip(&expected[me]) {
                    assert!(found == expected, "{what}: {} has other bits", tensor.name());
                }
            }
        }
        members.iter().for_each(|(rank, _)| rank.synchronize().unwrap());
        ok!(cuGraphExecDestroy(exec));
    }
}

/// What cannot be captured is refused before anything moves: the capture goes on, and so does the rank.
fn refusals(cuda: &Arc<Cuda>) {
    let stream = Stream::new();
    let refused = |rank: &mut Rank, plan: &Plan, tensors: &Tensors, word: &str| {
        // SAFETY: refused.
        let error =
            unsafe { rank.run(plan, Direction::Forward, &tensors.bindings().on(stream.raw().cast())) }.unwrap_err();
        assert!(matches!(error, cpattn::Error::Unsupported { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("a stream that is being captured") && text.contains(word), "{text}");
    };
    let plan = &plans::of(1)[0].1;
    let tensors = Tensors::new(cuda, plan, 0, |_| Form::Compact);
    tensors.fill(5, 0);
    let end_of = peer::group(&[Arc::clone(cuda)], Duration::from_secs(300)).unwrap().remove(0);
    let mut rank = Rank::on_device(end_of).unwrap();
    // Prepared in the other direction only.
    rank.prepare(plan, Direction::Backward).unwrap();
    begin(stream);
    refused(&mut rank, plan, &tensors, "call prepare before the capture begins");
    ok!(cuGraphExecDestroy(end(stream)));
    both(&mut rank, plan, &tensors, stream);
    let expected = expected(cuda, plan, 5);
    assert!(tensors.results("after a refusal") == expected[0]);
    let dropped = plan.problem().clone().with_dropout(0.5);
    let dropped = Plan::new(&dropped, Mesh::single(), Layout::Contiguous).unwrap();
    rank.prepare(&dropped, Direction::Forward).unwrap();
    begin(stream);
    refused(&mut rank, &dropped, &tensors, "a graph would keep the seed of dropout");
    ok!(cuGraphExecDestroy(end(stream)));

    // Over a transport that cannot be captured, a plan that exchanges is refused and one that does not is captured.
    let mut ends = peer::group(&vec![Arc::clone(cuda); 2], Duration::from_secs(300)).unwrap();
    let (_other, first) = (ends.pop(), ends.remove(0));
    let mut end_of = Wrapped::watched(first);
    end_of.hook.captures = false;
    let mut rank = Rank::on_device(end_of).unwrap();
    let ring = &plans::of(2)[0].1;
    let tensors = Tensors::new(cuda, ring, 0, |_| Form::Compact);
    tensors.fill(5, 0);
    rank.prepare(ring, Direction::Forward).unwrap();
    begin(stream);
    refused(&mut rank, ring, &tensors, "the transport's exchanges cannot be captured");
    ok!(cuGraphExecDestroy(end(stream)));
    rank.poll().unwrap();
}

/// Ranks of transport `peer` that are captured into different graphs, or of which one is in none, refuse their first
/// exchange.
fn apart(cuda: &Arc<Cuda>) {
    let plan = &plans::of(2)[1].1;
    for captured in [[true, true], [true, false]] {
        let errors = ranks(cuda, 2, |mut rank| {
            let (me, stream) = (rank.rank(), Stream::new());
            let tensors = Tensors::new(cuda, plan, me, |_| Form::Compact);
            tensors.fill(1, me);
            rank.prepare(plan, Direction::Forward).unwrap();
            if captured[me] {
                ok!(cuStreamBeginCapture_v2(stream.0, sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED));
            }
            // SAFETY: what is captured is never launched, and what is not is waited for.
            let outcome = unsafe { rank.run(plan, Direction::Forward, &tensors.bindings().on(stream.raw().cast())) };
            if captured[me] {
                let mut graph = null_mut();
                // SAFETY: the stream is being captured. A capture that others did not join back gives no graph.
                let code = unsafe { sys::cuStreamEndCapture(stream.0, &raw mut graph) };
                assert_ne!(code, sys::CUresult::CUDA_SUCCESS, "the graph of half a run");
            } else {
                stream.wait();
            }
            // SAFETY: as above: refused, or waited for.
            let later = unsafe { rank.run(plan, Direction::Forward, &tensors.bindings().on(stream.raw().cast())) };
            [outcome, later, rank.poll()].map(|outcome| outcome.expect_err("two graphs became one"))
        });
        // The first refusal says how to capture; what comes later, that the group has ended.
        for [_, later, polled] in &errors {
            let text = later.to_string();
            match later {
                cpattn::Error::Peer { .. } => {}
                cpattn::Error::Unsupported { .. } => {
                    let ended = ["in no graph", "ended the group", "make its transports and ranks again"];
                    let ended = &ended[usize::from(captured == [true, true])..];
                    assert!(
                        ended.iter().all(|word| text.contains(word)) && !text.contains("join one capture"),
                        "{text}"
                    );
                }
                _ => panic!("{captured:?}: {later:?}"),
            }
            assert_eq!(later, polled);
        }
        let errors: Vec<_> = errors.into_iter().map(|[first, ..]| first).collect();
        let words = ["captured into a graph", "join one capture by events"];
        let typed = |e: &cpattn::Error| {
            matches!(e, cpattn::Error::Unsupported { .. }) && words.iter().all(|word| e.to_string().contains(word))
        };
        // A rank that only sends is told by the other.
        let told = |e: &cpattn::Error| matches!(e, cpattn::Error::Peer { .. });
        assert!(errors.iter().any(typed) && errors.iter().all(|e| typed(e) || told(e)), "{captured:?}: {errors:?}");
    }
}

pub fn run(cuda: &Arc<Cuda>) {
    enter();
    refusals(cuda);
    apart(cuda);
    alone(cuda);
    for world in [2, 4] {
        together(cuda, world);
    }
    // Nothing of it is left in the way.
    ranks(cuda, 2, |mut rank| {
        let plan = &plans::of(2)[0].1;
        let tensors = Tensors::new(cuda, plan, rank.rank(), |_| Form::Compact);
        tensors.fill(1, rank.rank());
        both(&mut rank, plan, &tensors, Stream::new());
    });
}
