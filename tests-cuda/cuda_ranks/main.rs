// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a rank on a CUDA device and its transport refuse, in words that name the argument, and that both go on after
//! it; and that a group whose exchange fails on one side hears of it on the other at once.
//!
//! Runs on whatever driver is found, see `cuda_plans`.

#[path = "../../tests/common/driver.rs"]
mod driver;
#[path = "../../tests/common/refused.rs"]
mod refused;
mod second_device;

use cpattn::Fault;
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cpattn::{
    Backward, Batch, Cause, Device, DeviceView, DeviceViewMut, Dtype, Error, Forward, Layout, Mesh, Plan, Problem,
    Rank, Result, Side, View, ViewMut,
    call::RawTensor,
    kernel::{
        cpu::Isa,
        cuda::{Cuda, DeviceMemory},
    },
    runtime::Bindings,
    schedule::{Direction, Schedule, TensorId},
    transport::{DeviceTransport, Label, Message, Transport, peer},
};
use driver::{device, emulated_count};
use half::f16;
use refused::refused;

fn problem(tokens: usize) -> Problem {
    Problem::new(Batch::from_lengths(&[tokens]).unwrap(), 2, 2, 16, Dtype::F16)
}

fn alone(p: &Problem) -> Plan {
    Plan::new(p, Mesh::single(), Layout::Contiguous).unwrap()
}

fn rank(cuda: &Arc<Cuda>) -> Rank {
    Rank::on_device(peer::group(&[Arc::clone(cuda)], Duration::from_secs(60)).unwrap().remove(0)).unwrap()
}

/// All tensors of a backward, of zeros, and the memory they lie in.
fn tensors(cuda: &Cuda, plan: &Plan, rank: usize) -> (Bindings, Vec<DeviceMemory>) {
    let n = plan.local_tokens(Side::Q, rank).len();
    let mut memory = Vec::new();
    let mut bindings = Bindings::default();
    use TensorId::{DO, Dk, Dq, Dv, K, Lse, O, Q, V};
    for tensor in [Q, K, V, O, Lse, DO, Dq, Dk, Dv] {
        let (dtype, dim) = if tensor == Lse { (Dtype::F32, 1) } else { (Dtype::F16, 16) };
        let m = cuda.allocate(n * 2 * dim * dtype.size()).unwrap();
        m.upload(&vec![0; m.bytes()]).unwrap();
        bindings.set(tensor, RawTensor::compact(m.ptr(), dtype, n as u64, 2, dim as u32));
        memory.push(m);
    }
    (bindings, memory)
}

fn wait(cuda: &Cuda) {
    // SAFETY: the default stream.
    unsafe { cuda.synchronize(std::ptr::null_mut()) }.unwrap();
}

#[test]
fn tensors_are_refused_by_name() {
    let Some(cuda) = device() else { return };
    let plan = alone(&problem(12));
    let (good, _memory) = tensors(&cuda, &plan, 0);
    let mut rank = rank(&cuda);
    let mut run = |bindings: &Bindings, direction| {
        // SAFETY: refused, or the tensors live until the end; the default stream.
        unsafe { rank.run(&plan, direction, bindings) }
    };
    let without = |tensor| good.with(tensor, RawTensor::NONE);
    refused(run(&without(TensorId::Q), Direction::Forward), &["q is not given, expected f16 of shape [12, 2, 16]"]);
    refused(run(&without(TensorId::Lse), Direction::Forward), &["lse is not given, expected f32 of shape [12, 2, 1]"]);
    refused(run(&without(TensorId::Dv), Direction::Backward), &["dv is not given"]);
    run(&without(TensorId::Dv), Direction::Forward).unwrap();
    run(&good, Direction::Backward).unwrap();
    wait(&cuda);
}

/// What no run could honour is found when planning, where it ends no run.
#[test]
fn plans_are_refused_before_the_group_meets() {
    let Some(cuda) = device() else { return };
    let mut rank = rank(&cuda);
    let forward = Direction::Forward;
    for (p, words) in [
        (problem(4).with_scale(3e38), "scale is 3e38"),
        (problem(4).with_scale(1e20).with_softcap(1e-20), "softcap is 1e-20"),
        (Problem::new(Batch::from_lengths(&[4]).unwrap(), 2, 2, 12, Dtype::F16), "head_dim 12"),
        (Problem::new(Batch::from_lengths(&[4]).unwrap(), 2, 2, 16, Dtype::F64), "dtype f64"),
    ] {
        refused(rank.prepare(&alone(&p), forward), &[words]);
        refused(rank.workspace().bytes(&alone(&p), forward), &[words]);
    }
    let two = Plan::new(&problem(4), Mesh::ring(2).unwrap(), Layout::Contiguous).unwrap();
    refused(rank.workspace().bytes(&two, forward), &["mesh", "world of 1"]);
    rank.prepare(&alone(&problem(4)), forward).unwrap();
    refused(rank.set_isa(Some(Isa::Portable)), &["instruction set portable on CUDA device 0", "leave it out"]);
    rank.set_isa(None).unwrap();
}

#[test]
fn workspaces_are_lent_whole_and_apart() {
    let Some(cuda) = device() else { return };
    let plan = alone(&problem(12));
    let (good, _memory) = tensors(&cuda, &plan, 0);
    let mut rank = rank(&cuda);

    // To ask takes no memory: no device has the 200 TB that this plan would take.
    let huge = alone(&Problem::new(Batch::from_lengths(&[i32::MAX as usize]).unwrap(), 96, 96, 256, Dtype::F16));
    let bytes = rank.workspace().bytes(&huge, Direction::Backward).unwrap();
    assert_eq!(bytes, Schedule::new(&huge, 0, Direction::Backward).unwrap().workspace_bytes());
    assert!(bytes > 100 << 40, "{bytes}");

    let needed = rank.workspace().bytes(&plan, Direction::Backward).unwrap() as usize;
    let memory = cuda.allocate(needed + Schedule::ALIGNMENT as usize).unwrap();
    // SAFETY: refused, or `memory` outlives the rank; here and below.
    let lend = |rank: &mut Rank, bytes| unsafe { rank.workspace().lend(memory.ptr(), bytes) };
    refused(lend(&mut rank, 1 << 50), &["workspace is 1125899906842624 bytes", "memory of device 0: the last, at "]);
    lend(&mut rank, needed - 1).unwrap();
    let words = format!("at least {needed} bytes");
    refused(rank.prepare(&plan, Direction::Backward), &[&words, "lend"]);
    lend(&mut rank, needed).unwrap();
    let mut run = |bindings: &Bindings| {
        // SAFETY: refused, or the tensors live until the end; the default stream.
        unsafe { rank.run(&plan, Direction::Backward, bindings) }
    };
    let at = |tensor: TensorId, ptr| good.with(tensor, RawTensor { ptr, ..*good.get(tensor) });
    refused(run(&at(TensorId::Dq, memory.ptr())), &["dq", "overlaps", "workspace"]);
    refused(run(&at(TensorId::K, memory.ptr().wrapping_add(needed - 16))), &["k", "overlaps", "workspace"]);
    run(&good).unwrap();
    wait(&cuda);
    drop(rank);
}

#[test]
fn exchanges_are_refused_or_end_on_both_sides() {
    let Some(cuda) = device() else { return };
    let label = Label::new("test", 0);
    let (from, to) = (cuda.allocate(64).unwrap(), cuda.allocate(64).unwrap());
    from.upload(&[7; 64]).unwrap();
    let message = |peer, ptr, bytes| Message { peer, ptr, bytes };
    let null = std::ptr::null_mut();
    let group = || peer::group(&[Arc::clone(&cuda), Arc::clone(&cuda)], Duration::from_secs(60)).unwrap();

    let ends = group();
    // SAFETY: refused before anything is posted.
    let send = |m| unsafe { ends[0].exchange(label, &[message(1, from.ptr(), 8), m], &[]) };
    refused(send(message(1, from.ptr(), 0)), &["sends[1].bytes is 0, expected at least 1"]);
    refused(send(message(0, from.ptr(), 8)), &["sends[1].peer is 0, expected another rank"]);
    refused(send(message(1, null, 8)), &["sends[1].ptr is null"]);
    // SAFETY: as above.
    let result = unsafe { ends[0].exchange(label, &[], &[message(2, to.ptr(), 8)]) };
    refused(result, &["recvs[0].peer is 2, expected a rank below 2"]);

    // One message, from rank 0 to rank 1; what either end says.
    let all_to_all = |ends: Vec<peer::Peer>, offered: usize, into: *mut u8, expected: usize| {
        let (from, into) = (from.ptr() as usize, into as usize);
        let begin = Instant::now();
        let said: Vec<Result<()>> = thread::scope(|scope| {
            let threads: Vec<_> = ends
                .iter()
                .map(|end| {
                    scope.spawn(move || {
                        let (sends, recvs) = if end.rank() == 0 {
                            (vec![message(1, from as *mut u8, offered)], vec![])
                        } else {
                            (vec![], vec![message(0, into as *mut u8, expected)])
                        };
                        // SAFETY: both ends live until the copy was waited for; what is no memory is refused.
                        unsafe { end.exchange(label, &sends, &recvs) }
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(begin.elapsed() < Duration::from_secs(30), "a rank waited for the deadline");
        ends.iter().for_each(|end| end.synchronize().unwrap());
        said
    };
    // Refused lists left the group as it was.
    let said = all_to_all(ends, 64, to.ptr(), 64);
    assert!(said.iter().all(Result::is_ok), "{said:?}");
    let mut arrived = [0; 64];
    to.download(&mut arrived).unwrap();
    assert_eq!(arrived, [7; 64]);

    let sizes = [Cause::Size { ours: 8, theirs: 16 }, Cause::Size { ours: 16, theirs: 8 }];
    for (me, error) in all_to_all(group(), 8, to.ptr(), 16).into_iter().enumerate() {
        let named = matches!(error, Err(Error::Peer { fault: Fault::One { peer, cause }, .. }) if peer == 1 - me && cause == sizes[me]);
        assert!(named, "rank {me}: {error:?}");
    }
    // An address that no driver knows: the copy is refused to the rank that came second, and the other hears of it. A
    // driver that shares the host's page tables may take it for the host's memory, and find out on the device, which
    // ends the context.
    if emulated_count(c"peer copies").is_none() {
        return;
    }
    let said = all_to_all(group(), 8, std::ptr::without_provenance_mut(64), 8);
    let second = usize::from(matches!(said[1], Err(Error::Device { .. })));
    assert!(matches!(said[second], Err(Error::Device { .. })), "{said:?}");
    let told = matches!(said[1 - second], Err(Error::Peer { fault: Fault::One { peer, cause: Cause::Failed }, .. }) if peer == second);
    assert!(told, "{said:?}");
}

/// A rank whose exchange fails has its stream wait for the copies out of its memory that are under way: what it has
/// waited for its stream it may free, although the copies are on the stream of the receiver.
#[test]
fn a_rank_that_fails_waits_for_copies_out_of_its_memory() {
    let Some(cuda) = device() else { return };
    let label = Label::new("test", 0);
    const BYTES: usize = 1 << 16;
    for _ in 0..4 {
        let (from, to) = (cuda.allocate(BYTES).unwrap(), cuda.allocate(BYTES).unwrap());
        from.upload(&[7; BYTES]).unwrap();
        to.upload(&[0; BYTES]).unwrap();
        let ends = peer::group(&vec![Arc::clone(&cuda); 3], Duration::from_secs(60)).unwrap();
        let message = |peer, ptr| Message { peer, ptr, bytes: BYTES };
        // Rank 0 sends to 1, which is there, and to 2, which comes to nothing and aborts.
        let (sends, recv) = ([message(1, from.ptr()), message(2, from.ptr())], [message(0, to.ptr())]);
        thread::scope(|scope| {
            let [first, second, third] = &ends[..] else { panic!("three ranks") };
            // SAFETY: the memory lives until both streams were waited for.
            let sender = scope.spawn(move || unsafe { first.exchange(label, &sends, &[]) });
            // SAFETY: as above.
            let received = unsafe { second.exchange(label, &[], &recv) };
            received.unwrap();
            third.abort(Cause::Aborted);
            let sent = sender.join().unwrap();
            assert!(
                matches!(sent, Err(Error::Peer { fault: Fault::One { peer: 2, cause: Cause::Aborted }, .. })),
                "{sent:?}"
            );
            first.synchronize().unwrap();
        });
        // The stream of rank 1 was not waited for, and yet its copy is over.
        from.upload(&[9; BYTES]).unwrap();
        ends[1].synchronize().unwrap();
        let mut arrived = vec![0; BYTES];
        to.download(&mut arrived).unwrap();
        assert!(arrived.iter().all(|&x| x == 7), "the sender's memory was still to be copied");
    }
}

/// Typed views that carry their device: the bits of untyped tensors; what lies elsewhere, or needs the host, is
/// refused.
#[test]
fn typed_views() {
    let Some(cuda) = device() else { return };
    let (here, plan) = (Device::Cuda(cuda.ordinal()), alone(&problem(12)));
    let (bindings, memory) = tensors(&cuda, &plan, 0);
    let mut rank = rank(&cuda);
    assert_eq!((rank.device(), rank.world()), (here, 1));
    let shape = |t: TensorId| if t == TensorId::Lse { [12, 2, 1] } else { [12, 2, 16] };
    // SAFETY: the memory lives until the end, and each tensor is given once to a run that is waited for.
    let read = |t: TensorId, at: Device| unsafe {
        DeviceView::<f16>::compact(at, bindings.get(t).ptr.cast(), shape(t)).unwrap()
    };
    // SAFETY: as above.
    let written =
        |t: TensorId| unsafe { DeviceViewMut::<f16>::compact(here, bindings.get(t).ptr.cast(), shape(t)).unwrap() };
    let lse = bindings.get(TensorId::Lse).ptr.cast::<f32>();
    let forward = |at| {
        let [q, k, v] = [(TensorId::Q, at), (TensorId::K, here), (TensorId::V, here)].map(|(t, at)| read(t, at));
        // SAFETY: as above.
        let lse = unsafe { DeviceViewMut::compact(here, lse, [12, 2, 1]) }.unwrap();
        Forward::new(q, k, v, written(TensorId::O), lse)
    };
    let backward = || {
        let [q, k, v, o, d_o] =
            [TensorId::Q, TensorId::K, TensorId::V, TensorId::O, TensorId::DO].map(|t| read(t, here));
        // SAFETY: as above.
        let lse = unsafe { DeviceView::compact(here, lse.cast_const(), [12, 2, 1]) }.unwrap();
        Backward::new(q, k, v, o, lse, d_o, [TensorId::Dq, TensorId::Dk, TensorId::Dv].map(written))
    };
    let stream = std::ptr::null_mut();
    let values: Vec<f16> = (0..12 * 2 * 16).map(|i| f16::from_f32(((i * 37) % 19) as f32 / 9.0 - 1.0)).collect();
    for (m, t) in memory.iter().zip([TensorId::Q, TensorId::K, TensorId::V, TensorId::O, TensorId::Lse, TensorId::DO]) {
        if !matches!(t, TensorId::O | TensorId::Lse) {
            m.upload(bytemuck::cast_slice(&values)).unwrap();
        }
    }
    let results = || {
        let bytes = |i: usize| {
            let mut bytes = vec![0; memory[i].bytes()];
            memory[i].download(&mut bytes).unwrap();
            bytes
        };
        [3, 4, 6, 7, 8].map(bytes)
    };
    // SAFETY: the default stream, which is waited for.
    unsafe {
        rank.forward(&plan, forward(here).on(stream)).unwrap();
        rank.backward(&plan, backward().on(stream)).unwrap();
    }
    rank.synchronize().unwrap();
    wait(&cuda);
    let typed = results();
    assert!(typed.iter().all(|bytes| bytes.iter().any(|&b| b != 0)), "a result is all zeros");
    [3, 4, 6, 7, 8].iter().for_each(|&i: &usize| memory[i].upload(&vec![0; memory[i].bytes()]).unwrap());
    // SAFETY: as above.
    unsafe {
        rank.run(&plan, Direction::Forward, &bindings).unwrap();
        rank.run(&plan, Direction::Backward, &bindings).unwrap();
    }
    wait(&cuda);
    assert!(results() == typed, "typed and untyped tensors differ");

    // SAFETY: refused.
    refused(unsafe { rank.forward(&plan, forward(Device::Cpu).on(stream)) }, &["q is the CPU", "CUDA device 0"]);
    let host = vec![f16::ZERO; 12 * 2 * 16];
    let (view, mut out) = (View::new(&host, 12, 2, 16).unwrap(), vec![f16::ZERO; 12 * 2 * 16]);
    let mut lse = vec![0f32; 24];
    let o = ViewMut::new(&mut out, 12, 2, 16).unwrap();
    let tensors = Forward::new(view, view, view, o, ViewMut::new(&mut lse, 12, 2, 1).unwrap());
    refused(rank.forward(&plan, tensors), &["q is the CPU, expected CUDA device 0, where the rank is"]);
    let to = ViewMut::new(&mut out, 12, 2, 16).unwrap();
    refused(
        rank.all_to_all(&plan).to_heads(Side::Q, view, to),
        &["from is the CPU, expected CUDA device 0, where the rank is"],
    );
    let to_base_2 = forward(here).lse_base(cpattn::runtime::LseBase::Two);
    refused(rank.forward(&plan, to_base_2), &["lse_base 2 on a device is not supported", "multiply lse on the device"]);
    // A rank on the CPU takes neither a stream nor tensors of a device.
    let mut cpu = Rank::new(cpattn::transport::local::group(1, Duration::from_secs(9)).unwrap().remove(0));
    assert_eq!((cpu.device(), cpu.synchronize()), (Device::Cpu, Ok(())));
    // SAFETY: refused.
    refused(unsafe { cpu.forward(&plan, forward(here).on(stream)) }, &["q is CUDA device 0, expected the CPU"]);
    // SAFETY: refused.
    let streamed = unsafe { cpu.run(&plan, Direction::Forward, &bindings.on(std::ptr::without_provenance_mut(16))) };
    refused(streamed, &["the CPU has no streams"]);
}
