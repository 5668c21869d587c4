// SPDX-License-Identifier: MIT OR Apache-2.0
//! What fails leaves a rank usable, or refused with the error.

use crate::{
    bits::{both, expected},
    device::{Stream, enter},
    plans,
    tensors::{Form, Tensors},
    wrapped::Wrapped,
};
use cpattn::{
    Batch, Dtype, Error, Layout, Mesh, Plan, Problem, Rank, Result,
    call::RawTensor,
    kernel::cuda::Cuda,
    schedule::{Direction, TensorId},
    transport::{Transport, peer},
};
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// A run that fails half way ends on every rank at once, nothing of it is left on the device, and the next run of each
/// rank is refused.
fn half_way(cuda: &Arc<Cuda>) {
    let plan = &plans::of(2)[0].1;
    for (fails, nth) in [(0, 2), (1, 2), (0, 1)] {
        let begin = Instant::now();
        let ends = peer::group(&vec![Arc::clone(cuda); 2], Duration::from_secs(120)).unwrap();
        let said: Vec<[Result<()>; 3]> = thread::scope(|scope| {
            let threads: Vec<_> = ends
                .into_iter()
                .map(|end| {
                    scope.spawn(move || {
                        enter();
                        let me = end.rank();
                        let nth = if me == fails { nth } else { usize::MAX };
                        let mut rank = Rank::on_device(Wrapped::watched(end).failing(nth)).unwrap();
                        let tensors = Tensors::new(cuda, plan, me, |_| Form::Compact);
                        tensors.fill(3, me);
                        let stream = Stream::new();
                        let mut run = |direction| {
                            // SAFETY: the tensors live until the stream was waited for.
                            unsafe { rank.run(plan, direction, &tensors.bindings().on(stream.raw().cast())) }
                        };
                        let first = run(Direction::Forward).and_then(|()| run(Direction::Backward));
                        let (second, poll) = (run(Direction::Forward), rank.poll());
                        stream.wait();
                        [first, second, poll]
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(begin.elapsed() < Duration::from_secs(60), "a rank waited for the deadline");
        for (me, said) in said.iter().enumerate() {
            assert!(said.iter().all(Result::is_err), "rank {me} of {fails} failing: {said:?}");
        }
        let first = said[fails][0].as_ref().unwrap_err();
        assert!(matches!(first, Error::Device { code: 999, .. }), "{first:?}");
    }
}

/// What is refused or cannot be had leaves the rank as it was.
fn refused(cuda: &Arc<Cuda>) {
    let plan = &plans::of(1)[0].1;
    let expected = expected(cuda, plan, 9);
    let end = peer::group(&[Arc::clone(cuda)], Duration::from_secs(120)).unwrap().remove(0);
    let (mut rank, stream) = (Rank::on_device(end).unwrap(), Stream::new());
    let tensors = Tensors::new(cuda, plan, 0, |_| Form::Compact);
    tensors.fill(9, 0);
    let bindings = tensors.bindings();
    let check = |rank: &mut Rank, what: &str| {
        both(rank, plan, &tensors, stream);
        assert!(tensors.results(what) == expected[0], "{what}: other bits");
    };
    check(&mut rank, "before");
    let k = *bindings.get(TensorId::K);
    let host = vec![0u8; 1 << 16];
    for (ptr, word) in [(host.as_ptr().cast_mut(), "k.ptr"), (k.ptr.wrapping_add(2), "aligned to 16 bytes")] {
        let wrong = bindings.with(TensorId::K, RawTensor { ptr, ..k });
        // SAFETY: refused.
        let error =
            unsafe { rank.run(plan, Direction::Forward, &wrong.on(stream.raw().cast())) }.unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
        check(&mut rank, word);
    }
    // No device has this much memory.
    let p = Problem::new(Batch::from_lengths(&[8_000_000]).unwrap(), 16, 16, 128, Dtype::Bf16);
    let huge = Plan::new(&p, Mesh::single(), Layout::Contiguous).unwrap();
    let error = rank.prepare(&huge, Direction::Backward).unwrap_err();
    assert!(matches!(error, Error::Device { code: 2, .. }), "{error}");
    check(&mut rank, "after a plan that is too large");
}

/// Rows of NaN, with a sink and without, are rows of NaN: no kernel reads or writes beside its tensors for them.
fn not_numbers(cuda: &Arc<Cuda>) {
    for (name, plan) in &plans::of(1) {
        let end = peer::group(&[Arc::clone(cuda)], Duration::from_secs(120)).unwrap().remove(0);
        let (mut rank, stream) = (Rank::on_device(end).unwrap(), Stream::new());
        // New tensors hold 0xff, which is NaN in every type.
        let tensors = Tensors::new(cuda, plan, 0, |_| Form::Compact);
        both(&mut rank, plan, &tensors, stream);
        rank.synchronize().unwrap_or_else(|e| panic!("{name}: {e}"));
        let found = tensors.results(name);
        let (_, o) = found.iter().find(|(t, _)| *t == TensorId::O).unwrap();
        let is_nan = |x: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([x[0], x[1]])) << 16).is_nan();
        assert!(o.chunks(2).all(is_nan), "{name}: o has numbers");
    }
}

pub fn run(cuda: &Arc<Cuda>) {
    enter();
    not_numbers(cuda);
    refused(cuda);
    half_way(cuda);
}
