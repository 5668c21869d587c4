// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two all-to-alls as calls of their own: the bits of ranks on the CPU, what their runs ask of the driver, their
//! replays in graphs, and what is refused.

use crate::{
    bits::ranks,
    cases::{self, DIMS, SIDES, Tensors},
    counts,
    device::{Counters, Stream, enter},
    graphs::{begin, behind, end},
    ok,
    refused::refused,
};
use cpattn::{
    Device, DeviceView, DeviceViewMut, Dtype, Element, Plan, Rank, Side, View, ViewMut, kernel::cuda::Cuda,
    schedule::AllToAll, transport::peer,
};
use half::{bf16, f16};
use std::{
    sync::{Arc, Barrier},
    thread,
    time::Duration,
};

/// Prepares both all-to-alls of such tensors.
fn prepare(rank: &mut Rank, plan: &Plan, side: Side, dim: usize, dtype: Dtype) -> cpattn::Result<()> {
    AllToAll::both(side, dim, dtype)?.into_iter().try_for_each(|all_to_all| rank.prepare(plan, all_to_all))
}

/// Every plan, both sides, both dims: the bits of ranks on the CPU, twice, in tensors that lie differently.
fn bits<T: Element>(cuda: &Arc<Cuda>) {
    for world in [1, 2, 4] {
        for (name, plan) in &cases::plans(world) {
            for (side, dim) in SIDES.into_iter().flat_map(|s| DIMS.map(|d| (s, d))) {
                let expected = [1, 2].map(|seed| cases::on_the_cpu::<T>(plan, side, dim, seed));
                ranks(cuda, world, |mut rank| {
                    let (me, stream) = (rank.rank(), Stream::new());
                    for (expected, seed) in expected.iter().zip(1..) {
                        let tensors = Tensors::new::<T>(cuda, plan, me, side, dim, seed == 1);
                        tensors.fill::<T>(seed);
                        // SAFETY: the tensors live until the stream was waited for.
                        unsafe { tensors.enqueue::<T>(&mut rank, plan, stream.raw()) }.unwrap();
                        stream.wait();
                        let what = format!("{name}, {side:?}, dim {dim}, {}, rank {me}", T::DTYPE);
                        assert!(tensors.arrived() == expected[me], "{what}: other bits than on the CPU");
                    }
                    rank.synchronize().unwrap();
                });
            }
        }
    }
}

/// Runs of prepared all-to-alls set addresses and launch, as runs of attention do.
fn counted(cuda: &Arc<Cuda>, counters: Option<Counters>, world: usize) {
    let list = cases::plans(world);
    let (ends, barrier) =
        (peer::group(&vec![Arc::clone(cuda); world], Duration::from_secs(300)).unwrap(), Barrier::new(world + 1));
    let (found, allocated) = thread::scope(|scope| {
        for end in ends {
            let (list, barrier) = (&list, &barrier);
            scope.spawn(move || {
                enter();
                let (mut rank, stream) = (Rank::on_device(end).unwrap(), Stream::new());
                let me = rank.rank();
                let mut runs = Vec::new();
                for ((_, plan), side) in list.iter().flat_map(|p| SIDES.map(|s| (p, s))) {
                    prepare(&mut rank, plan, side, 5, Dtype::Bf16).unwrap();
                    let tensors = Tensors::new::<bf16>(cuda, plan, me, side, 5, false);
                    tensors.fill::<bf16>(3);
                    runs.push((plan, tensors));
                }
                // A stream is looked at when it is new to the rank.
                // SAFETY: the tensors live until the stream was waited for, below; so they do for the runs after it.
                unsafe { runs[0].1.enqueue::<bf16>(&mut rank, runs[0].0, stream.raw()) }.unwrap();
                stream.wait();
                barrier.wait();
                barrier.wait();
                let mut outcome = Ok(());
                for (plan, tensors) in &runs {
                    // SAFETY: as above.
                    outcome = outcome.and_then(|()| unsafe { tensors.enqueue::<bf16>(&mut rank, plan, stream.raw()) });
                }
                barrier.wait();
                barrier.wait();
                outcome.unwrap();
                stream.wait();
            });
        }
        counts::between(&barrier, counters)
    });
    // Both sides, both ways, two tensors each; tensors without rows are not looked at.
    let runs = (list.len() * 2 * 2 * world) as u64;
    let shapes = list.iter().flat_map(|(_, plan)| {
        (0..world).flat_map(move |r| SIDES.into_iter().flat_map(move |s| cases::shapes(plan, r, s, 5)))
    });
    let asked = 2 * shapes.filter(|s| s.iter().all(|&n| n > 0)).count() as u64;
    if let Some(found) = found {
        let expected = [0, 0, 0, 0, 0, 0, asked + runs, asked, runs];
        assert_eq!(found.map(|f| f.1)[..9], expected, "world of {world}, {runs} all-to-alls: {found:?}");
        assert!(found[10].1 >= runs, "{found:?}");
    }
    assert_eq!(allocated, 0, "world of {world}: host allocations in {runs} all-to-alls");
}

/// All ranks of a group, captured into one graph and replayed with new data.
fn replayed(cuda: &Arc<Cuda>, world: usize) {
    type T = f16;
    for ((name, plan), side) in cases::plans(world).iter().flat_map(|p| SIDES.map(|s| (p, s))) {
        let ends = peer::group(&vec![Arc::clone(cuda); world], Duration::from_secs(300)).unwrap();
        let streams: Vec<Stream> = (0..world).map(|_| Stream::new()).collect();
        let mut members: Vec<(Rank, Tensors)> = ends
            .into_iter()
            .map(|end| {
                let mut rank = Rank::on_device(end).unwrap();
                prepare(&mut rank, plan, side, 16, T::DTYPE).unwrap();
                let tensors = Tensors::new::<T>(cuda, plan, rank.rank(), side, 16, false);
                (rank, tensors)
            })
            .collect();
        begin(streams[0]);
        streams[1..].iter().for_each(|&s| behind(streams[0], s));
        thread::scope(|scope| {
            for ((rank, tensors), &stream) in members.iter_mut().zip(&streams) {
                scope.spawn(move || {
                    enter();
                    // SAFETY: the tensors live until the last replay was waited for.
                    unsafe { tensors.enqueue::<T>(rank, plan, stream.raw()) }.unwrap();
                });
            }
        });
        streams[1..].iter().for_each(|&s| behind(s, streams[0]));
        let exec = end(streams[0]);
        for seed in [4, 5, 4] {
            let expected = cases::on_the_cpu::<T>(plan, side, 16, seed);
            members.iter().for_each(|(_, tensors)| tensors.fill::<T>(seed));
            ok!(cuGraphLaunch(exec, streams[0].0));
            streams[0].wait();
            for (me, (_, tensors)) in members.iter().enumerate() {
                assert!(tensors.arrived() == expected[me], "{name}, {side:?}, replay {seed}, rank {me}: other bits");
            }
        }
        members.iter().for_each(|(rank, _)| rank.synchronize().unwrap());
        ok!(cuGraphExecDestroy(exec));
    }
}

/// What is wrong is said before anything moves, and the rank goes on.
fn refusals(cuda: &Arc<Cuda>) {
    type T = bf16;
    let plan: &Plan = &cases::plans(1)[0].1;
    let end_of = peer::group(&[Arc::clone(cuda)], Duration::from_secs(60)).unwrap().remove(0);
    let (mut rank, stream) = (Rank::on_device(end_of).unwrap(), Stream::new());
    let here = rank.device();
    let memory = cuda.allocate(1 << 16).unwrap();
    memory.upload(&vec![0; memory.bytes()]).unwrap();
    let (at, far) = (memory.ptr().cast::<T>(), memory.ptr().wrapping_add(1 << 15).cast::<T>());
    let mut to_heads = |from: Device, to: Device, shape: [usize; 3], strides: [usize; 2], out: *mut T| {
        // SAFETY: both lie in `memory`, or are refused.
        unsafe {
            let x = DeviceView::compact(from, at.cast_const(), [11, 4, 8]).unwrap();
            let y = DeviceViewMut::new(to, out, shape, strides).unwrap();
            rank.all_to_all(plan).on(stream.raw()).to_heads(Side::Q, x, y)
        }
    };
    refused(
        to_heads(Device::Cpu, here, [11, 4, 8], [32, 8], far),
        &["from is the CPU", "CUDA device 0, where the rank is"],
    );
    refused(to_heads(here, Device::Cuda(7), [11, 4, 8], [32, 8], far), &["to is CUDA device 7", "where the rank is"]);
    refused(to_heads(here, here, [12, 4, 8], [32, 8], far), &["to.tokens is 12, expected 11"]);
    refused(to_heads(here, here, [11, 2, 8], [16, 8], far), &["to.heads is 2, expected 4"]);
    refused(to_heads(here, here, [11, 4, 4], [16, 4], far), &["to.dim is 4, expected 8"]);
    refused(to_heads(here, here, [11, 4, 8], [40, 10], far), &["to.token_stride is 40", "32 (head stride 8)"]);
    refused(to_heads(here, here, [11, 4, 8], [32, 8], at.wrapping_add(8)), &["to", "overlaps", "from"]);
    let unknown = std::ptr::without_provenance_mut(4096);
    refused(to_heads(here, here, [11, 4, 8], [32, 8], unknown), &["to.ptr", "memory of device 0"]);
    to_heads(here, here, [11, 4, 8], [32, 8], far).unwrap();
    stream.wait();
    // SAFETY: refused.
    let double = unsafe {
        let x = DeviceView::<f64>::compact(here, memory.ptr().cast_const().cast(), [11, 4, 8]).unwrap();
        let y = DeviceViewMut::compact(here, memory.ptr().wrapping_add(1 << 15).cast(), [11, 4, 8]).unwrap();
        rank.all_to_all(plan).on(stream.raw()).to_heads(Side::Q, x, y)
    };
    refused(double, &["f64", "f16, bf16 and f32"]);
    refused(prepare(&mut rank, plan, Side::K, 8, Dtype::F64), &["f64"]);
    refused(prepare(&mut rank, plan, Side::K, 0, Dtype::F32), &["dim is 0"]);

    // A workspace that is lent is large enough, and apart from the tensors.
    let two = &cases::plans(2)[0].1;
    let mut ends = peer::group(&vec![Arc::clone(cuda); 2], Duration::from_secs(60)).unwrap();
    let (_other, mut first) = (ends.pop(), Rank::on_device(ends.remove(0)).unwrap());
    let both = AllToAll::both(Side::Q, 16, T::DTYPE).unwrap();
    let needed = both.map(|call| first.workspace().bytes(two, call).unwrap()).into_iter().max().unwrap() as usize;
    assert!(needed > 0);
    let lent = cuda.allocate(needed).unwrap();
    // SAFETY: the memory outlives the rank, which runs nothing.
    unsafe { first.workspace().lend(lent.ptr(), needed - 1) }.unwrap();
    let words = format!("at least {needed} bytes");
    refused(prepare(&mut first, two, Side::Q, 16, T::DTYPE), &[&words]);
    // SAFETY: as above.
    unsafe { first.workspace().lend(lent.ptr(), needed) }.unwrap();
    prepare(&mut first, two, Side::Q, 16, T::DTYPE).unwrap();
    let [tokens, held] = cases::shapes(two, 0, Side::Q, 16);
    // SAFETY: refused.
    let overlapping = unsafe {
        let x = DeviceView::<T>::compact(here, lent.ptr().cast_const().cast(), tokens).unwrap();
        let y = DeviceViewMut::compact(here, memory.ptr().cast(), held).unwrap();
        first.all_to_all(two).on(stream.raw()).to_heads(Side::Q, x, y)
    };
    refused(overlapping, &["from", "overlaps", "workspace"]);
    drop(first);

    // In a capture, what was not prepared.
    begin(stream);
    // SAFETY: refused.
    let captured = unsafe {
        let x = DeviceView::<f32>::compact(here, memory.ptr().cast_const().cast(), [11, 2, 3]).unwrap();
        let y = DeviceViewMut::compact(here, memory.ptr().wrapping_add(1 << 15).cast(), [11, 2, 3]).unwrap();
        rank.all_to_all(plan).on(stream.raw()).to_heads(Side::K, x, y)
    };
    refused(captured, &["a stream that is being captured", "make the same call once before the capture begins"]);
    ok!(cuGraphExecDestroy(end(stream)));

    // Views of the host are refused; what works on host memory alone names what to call instead.
    let host = [T::ZERO; 11 * 4 * 8];
    let mut out = host;
    let view = || View::new(&host, 11, 4, 8).unwrap();
    let words = ["from is the CPU, expected CUDA device 0, where the rank is"];
    refused(rank.all_to_all(plan).to_heads(Side::Q, view(), ViewMut::new(&mut out, 11, 4, 8).unwrap()), &words);
    refused(rank.all_to_all(plan).to_tokens(Side::Q, view(), ViewMut::new(&mut out, 11, 4, 8).unwrap()), &words);
    let outputs = &mut [(Side::Q, ViewMut::new(&mut out, 11, 4, 8).unwrap())];
    let around = rank.all_to_all(plan).ulysses(&[(Side::Q, view())], outputs, |_, _, _| panic!("called"));
    refused(around, &["ulysses of a rank on CUDA device 0", "to_heads and to_tokens around your kernel"]);
    rank.poll().unwrap();
}

pub fn run(cuda: &Arc<Cuda>) {
    enter();
    refusals(cuda);
    bits::<f32>(cuda);
    bits::<bf16>(cuda);
    bits::<f16>(cuda);
    let counters = Counters::find();
    for world in [1, 2, 4] {
        counted(cuda, counters, world);
        replayed(cuda, world);
    }
}
