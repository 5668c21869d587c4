// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks on devices that do not run the same: the first run of a plan is agreed on, later runs carry the check along,
//! and what a rank met that runs something else makes of its results is NaN and an error.

use crate::{
    bits::both,
    device::{Stream, enter},
    plans,
    tensors::{Form, Tensors},
    wrapped::Wrapped,
};
use cpattn::Fault;
use cpattn::{
    Batch, Cause, Dtype, Error, Layout, Mask, Mesh, Options, Plan, Problem, Rank, Result,
    kernel::cuda::Cuda,
    plan::Circulate,
    schedule::{Direction, TensorId},
    transport::peer,
};
use std::{
    sync::{Arc, Barrier, atomic::Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

/// A deadline that no test may reach.
const FAR: Duration = Duration::from_secs(300);

fn plan(lengths: &[usize], mesh: Mesh, layout: Layout, options: Options) -> Plan {
    scaled(0.2, lengths, mesh, layout, options)
}

/// Plans that differ in the scale alone have messages of the very same sizes.
fn scaled(scale: f64, lengths: &[usize], mesh: Mesh, layout: Layout, options: Options) -> Plan {
    let batch = Batch::from_lengths(lengths).unwrap();
    let p = Problem::new(batch, 4, 2, 32, Dtype::Bf16).with_mask(Mask::full()).with_scale(scale);
    Plan::builder(&p).mesh(mesh).layout(layout).options(options).build().unwrap()
}

/// Each rank of a group on a thread, with a barrier of all.
fn on_ranks<T: Send>(cuda: &Arc<Cuda>, world: usize, body: impl Fn(Rank, &Barrier) -> T + Sync) -> Vec<T> {
    let begin = Instant::now();
    let (ends, barrier) = (peer::group(&vec![Arc::clone(cuda); world], FAR).unwrap(), Barrier::new(world));
    let results = thread::scope(|scope| {
        let (body, barrier) = (&body, &barrier);
        let run = |end| {
            scope.spawn(move || {
                enter();
                body(Rank::on_device(end).unwrap(), barrier)
            })
        };
        let threads: Vec<_> = ends.into_iter().map(run).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(begin.elapsed() < FAR, "the ranks waited for a deadline");
    results
}

/// One rank's tensors of a plan.
struct Own<'a> {
    plan: &'a Plan,
    tensors: Tensors,
    stream: Stream,
}

impl<'a> Own<'a> {
    fn new(cuda: &Arc<Cuda>, plan: &'a Plan, rank: &Rank) -> Self {
        let tensors = Tensors::new(cuda, plan, rank.rank(), |_| Form::Compact);
        tensors.fill(3, rank.rank());
        Self { plan, tensors, stream: Stream::new() }
    }

    fn run(&self, rank: &mut Rank, direction: Direction) -> Result<()> {
        // SAFETY: the tensors live until the stream was waited for.
        unsafe { rank.run(self.plan, direction, &self.tensors.bindings().on(self.stream.raw().cast())) }
    }

    fn both(&self, rank: &mut Rank) {
        both(rank, self.plan, &self.tensors, self.stream);
    }

    /// Whether o has a NaN.
    fn is_nan(&self) -> bool {
        let all = self.tensors.results("o");
        let (_, o) = all.iter().find(|(t, _)| *t == TensorId::O).unwrap();
        o.chunks_exact(2).any(|b| half::bf16::from_le_bytes([b[0], b[1]]).is_nan())
    }
}

/// A plan and direction is agreed on in its first run, whatever a rank has prepared and forgotten since.
fn only_first_runs_agree(cuda: &Arc<Cuda>) {
    let list = plans::of(2);
    let ends = peer::group(&vec![Arc::clone(cuda); 2], FAR).unwrap();
    thread::scope(|scope| {
        for end in ends {
            let list = &list;
            scope.spawn(move || {
                enter();
                let end = Wrapped::watched(end);
                let agreements = Arc::clone(&end.hook.agreements.0);
                let mut rank = Rank::on_device(end).unwrap();
                let own: Vec<_> = list.iter().map(|(_, plan)| Own::new(cuda, plan, &rank)).collect();
                for round in 0..3 {
                    own.iter().for_each(|own| own.both(&mut rank));
                    assert_eq!(agreements.load(SeqCst), 2 * own.len());
                    if round == rank.rank() {
                        // More than a rank remembers.
                        for tokens in 1..18 {
                            let other = plan(&[tokens], Mesh::ring(2).unwrap(), Layout::Contiguous, Options::new());
                            rank.prepare(&other, Direction::Forward).unwrap();
                        }
                    }
                }
                rank.synchronize().unwrap();
            });
        }
    });
}

/// One rank of a group runs something else that was agreed on before: every rank that it exchanges with finds out.
fn found(cuda: &Arc<Cuda>, what: &str, odds: &[usize], ours: &Plan, other: &Plan) {
    let world = ours.mesh().world();
    for &odd in odds {
        let errors = on_ranks(cuda, world, |mut rank, barrier| {
            let (own, others) = (Own::new(cuda, ours, &rank), Own::new(cuda, other, &rank));
            own.both(&mut rank);
            others.both(&mut rank);
            assert!(!own.is_nan() && !others.is_nan(), "{what}");
            let is_odd = rank.rank() == odd;
            let ran =
                if is_odd { others.run(&mut rank, Direction::Forward) } else { own.run(&mut rank, Direction::Forward) };
            if ran.is_ok() {
                if is_odd { others.stream } else { own.stream }.wait();
            }
            // Until all devices are done, no host has told another.
            barrier.wait();
            let first = rank.synchronize().and(ran).expect_err(what);
            assert_eq!(rank.poll(), Err(first.clone()), "{what}");
            assert_eq!(rank.handle().poll(), Err(first.clone()), "{what}");
            assert_eq!(own.run(&mut rank, Direction::Forward), Err(first.clone()), "{what}");
            if matches!(first, Error::Disagreement { .. }) && !is_odd {
                assert!(own.is_nan(), "{what}: results of rank {} can be used", rank.rank());
            }
            // What a rank offered before it failed may still be copied.
            barrier.wait();
            first
        });
        for (r, error) in errors.iter().enumerate() {
            match error {
                Error::Disagreement { rank, peer, ours, theirs, what: run, runs: Some([a, b]) } => {
                    assert!(*rank == r && ours != theirs && a == b, "{what}: {error}");
                    assert!(r == odd || *peer == odd, "{what}: rank {r} blames rank {peer}, not {odd}");
                    assert!(run.contains("ward of "), "{run}");
                }
                other => panic!("{what}, rank {odd} is odd: rank {r} returned {other:?}"),
            }
        }
    }
}

/// A rank that is a run ahead sends messages of the very same plan, direction and sizes.
fn one_run_more(cuda: &Arc<Cuda>) {
    let ring = || Mesh::ring(2).unwrap();
    let ours = plan(&[15, 6], ring(), Layout::Zigzag, Options::new());
    // Each rank has a document of its own: its run meets no other rank.
    let apart = plan(&[8, 8], ring(), Layout::Contiguous, Options::new());
    let errors = on_ranks(cuda, 2, |mut rank, barrier| {
        let (own, alone) = (Own::new(cuda, &ours, &rank), Own::new(cuda, &apart, &rank));
        own.both(&mut rank);
        for _ in 0..=usize::from(rank.rank() == 0) {
            alone.run(&mut rank, Direction::Forward).unwrap();
        }
        own.run(&mut rank, Direction::Forward).unwrap();
        own.stream.wait();
        barrier.wait();
        let error = rank.synchronize().unwrap_err();
        assert!(own.is_nan());
        error
    });
    for (r, error) in errors.iter().enumerate() {
        let Error::Disagreement { rank, ours, theirs, runs, .. } = error else { panic!("{error:?}") };
        assert!(*rank == r && ours == theirs, "{error}");
        assert_eq!(*runs, Some(if r == 0 { [5, 4] } else { [4, 5] }));
    }
    assert!(errors[0].to_string().contains("run 5 of rank 0"), "{}", errors[0]);
}

/// What a rank hands on is NaN too, so that one which never exchanges with the wrong one makes no results of it.
fn handed_on(cuda: &Arc<Cuda>) {
    let world = 4;
    // Ranks 0 and 3 never meet: what each has reaches the other through rank 1 or 2.
    let mesh = || Mesh { replicas: 1, ring: 2, ulysses: 2 }.in_world(world).unwrap();
    let of = |scale| scaled(scale, &[18], mesh(), Layout::Contiguous, Options::new().circulate(Circulate::Keys));
    let (ours, other) = (of(0.2), of(0.3));
    let said = on_ranks(cuda, world, |mut rank, barrier| {
        let (own, others) = (Own::new(cuda, &ours, &rank), Own::new(cuda, &other, &rank));
        own.both(&mut rank);
        others.both(&mut rank);
        let used = if rank.rank() == 0 { &others } else { &own };
        used.run(&mut rank, Direction::Forward).unwrap();
        used.stream.wait();
        barrier.wait();
        let error = rank.synchronize().err();
        // The rank that found out tells the others.
        barrier.wait();
        let later = rank.poll().unwrap_err();
        (error, later, used.is_nan())
    });
    let direct = |e: &Option<Error>| matches!(e, Some(Error::Disagreement { .. }));
    assert!(direct(&said[0].0) && direct(&said[1].0), "{said:?}");
    assert!(!direct(&said[3].0), "rank 3 met rank 0: {said:?}");
    for (rank, (_, later, is_nan)) in said.iter().enumerate() {
        assert!(*is_nan, "rank {rank} has results: {said:?}");
        let told = matches!(
            later,
            Error::Disagreement { .. } | Error::Peer { fault: Fault::One { cause: Cause::Disagreed { .. }, .. }, .. }
        );
        assert!(told, "{later:?}");
    }
}

pub fn run(cuda: &Arc<Cuda>) {
    enter();
    only_first_runs_agree(cuda);
    let world = 3;
    let ring = || Mesh::ring(world).unwrap();
    let ours = plan(&[15, 6], ring(), Layout::Zigzag, Options::new());
    // Nothing but the tag tells.
    let other = scaled(0.3, &[15, 6], ring(), Layout::Zigzag, Options::new());
    found(cuda, "scale", &[0, 2], &ours, &other);
    let ulysses = |scale| scaled(scale, &[15, 6], Mesh::ulysses(2).unwrap(), Layout::Contiguous, Options::new());
    found(cuda, "scale, Ulysses", &[0], &ulysses(0.2), &ulysses(0.3));
    one_run_more(cuda);
    handed_on(cuda);
}
