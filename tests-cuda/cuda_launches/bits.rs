// SPDX-License-Identifier: MIT OR Apache-2.0
//! Remembered plans, run in turn on changing memory, against ranks that know nothing yet.

use crate::{
    device::{Stream, enter},
    plans,
    tensors::{Form, Tensors, awkward},
};
use cpattn::{
    Plan, Rank,
    kernel::cuda::Cuda,
    schedule::{Direction, TensorId},
    transport::peer,
};
use std::{sync::Arc, thread, time::Duration};

type Results = Vec<(TensorId, Vec<u8>)>;

/// Has every rank of a group do something, each on a thread.
pub fn ranks<T: Send>(cuda: &Arc<Cuda>, world: usize, each: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let ends = peer::group(&vec![Arc::clone(cuda); world], Duration::from_secs(300)).unwrap();
    thread::scope(|scope| {
        let each = &each;
        let run = |end| {
            scope.spawn(move || {
                enter();
                each(Rank::on_device(end).unwrap())
            })
        };
        let threads: Vec<_> = ends.into_iter().map(run).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Both directions, waited for.
pub fn both(rank: &mut Rank, plan: &Plan, tensors: &Tensors, stream: Stream) {
    for direction in [Direction::Forward, Direction::Backward] {
        // SAFETY: the tensors live until the stream was waited for.
        unsafe { rank.run(plan, direction, &tensors.bindings().on(stream.raw().cast())) }.unwrap();
    }
    stream.wait();
}

/// What new ranks make of a plan and a seed.
pub fn expected(cuda: &Arc<Cuda>, plan: &Plan, seed: u64) -> Vec<Results> {
    ranks(cuda, plan.mesh().world(), |mut rank| {
        let tensors = Tensors::new(cuda, plan, rank.rank(), |_| Form::Compact);
        tensors.fill(seed, rank.rank());
        both(&mut rank, plan, &tensors, Stream::new());
        tensors.results("new ranks")
    })
}

/// A number that says whether results are those of another build of the library.
fn digest(results: &[Results]) -> u64 {
    let bytes = results.iter().flatten().flat_map(|(_, bytes)| bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, &b| (hash ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

pub fn run(cuda: &Arc<Cuda>) {
    for world in 1..=4 {
        let list = plans::of(world);
        let expected: Vec<_> =
            list.iter().zip(10..).map(|((_, plan), seed)| (seed, expected(cuda, plan, seed))).collect();
        for ((name, _), (_, results)) in list.iter().zip(&expected) {
            println!("  {name}: {:016x}", digest(results));
        }
        ranks(cuda, world, |mut rank| {
            let (me, stream) = (rank.rank(), Stream::new());
            let directions = [Direction::Forward, Direction::Backward];
            let needed = |rank: &mut Rank| {
                let all = list.iter().flat_map(|(_, plan)| directions.map(|d| (plan, d)));
                all.map(|(plan, d)| rank.workspace().bytes(plan, d).unwrap()).max().unwrap() as usize
            };
            let lent: Vec<_> = (0..2).map(|_| cuda.allocate(needed(&mut rank)).unwrap()).collect();
            for round in 0..4 {
                if round >= 2 {
                    // SAFETY: the memory lives until the rank is dropped, and is the rank's alone.
                    unsafe { rank.workspace().lend(lent[round - 2].ptr(), lent[round - 2].bytes()) }.unwrap();
                }
                for ((name, plan), (seed, expected)) in list.iter().zip(&expected) {
                    let awkward = awkward(plan);
                    let tensors =
                        Tensors::new(cuda, plan, me, |t| if round % 2 == 1 { awkward(t) } else { Form::Compact });
                    tensors.fill(*seed, me);
                    both(&mut rank, plan, &tensors, stream);
                    let what = format!("{name}, round {round}, rank {me}");
                    for ((tensor, found), (_, expected)) in tensors.results(&what).iter().zip(&expected[me]) {
                        assert!(found == expected, "{what}: {} has other bits", tensor.name());
                    }
                }
            }
            drop(rank);
        });
    }
}
