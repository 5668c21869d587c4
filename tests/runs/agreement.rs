// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks that do not run the same: found in the first run of a plan by an agreement, in later runs by what their
//! messages carry along.
//!
//! Every group has a deadline that no test may reach: what differs is found at once, or the test takes too long and
//! fails.

use crate::common::{
    Data,
    own::{Own, compact},
    through::{Counted, Through},
};
use cpattn::Fault;
use cpattn::{
    Batch, Cause, Dtype, Error, Layout, Mask, Mesh, Options, Plan, Problem, Rank, Result, Side, View, ViewMut,
    plan::{Circulate, Gather},
    schedule::Direction,
    transport::local,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

pub const FAR: Duration = Duration::from_secs(120);

/// What must be found without waiting; generous for a busy machine.
const SOON: Duration = Duration::from_secs(40);

/// One rank's part of a test.
pub fn on_ranks<T: Send>(world: usize, deadline: Duration, body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let start = Instant::now();
    let results = local::run(world, deadline, |end| Ok(body(Rank::new(end)))).unwrap();
    assert!(start.elapsed() < SOON, "the ranks waited for a deadline");
    results
}

/// A plan with data and what a run of it needs.
pub struct Job {
    pub plan: Plan,
    data: Data<f32>,
}

impl Job {
    pub fn new(lengths: &[usize], heads: [usize; 2], mesh: Mesh, layout: Layout, options: Options) -> Self {
        let batch = Batch::from_lengths(lengths).unwrap();
        let p = Problem::new(batch, heads[0], heads[1], 8, Dtype::F32).with_mask(Mask::full());
        let plan = Plan::builder(&p).mesh(mesh).layout(layout).options(options).build().unwrap();
        Self { data: Data::random(&p, 7), plan }
    }

    pub fn ring(lengths: &[usize], world: usize) -> Self {
        Self::new(lengths, [4, 2], Mesh::ring(world).unwrap(), Layout::Zigzag, Options::new())
    }

    pub fn own(&self, rank: &Rank) -> Own<f32> {
        Own::new(&self.plan, &self.data, rank.rank(), compact)
    }

    /// Both directions, so that both are agreed on.
    pub fn both(&self, rank: &mut Rank) {
        let mut own = self.own(rank);
        own.forward(rank, &self.plan).unwrap();
        own.backward(rank, &self.plan).unwrap();
    }

    pub fn forward(&self, rank: &mut Rank) -> Result<()> {
        self.own(rank).forward(rank, &self.plan)
    }

    /// A backward of tensors that no forward has filled: it moves what a right one moves.
    pub fn backward(&self, rank: &mut Rank) -> Result<()> {
        self.own(rank).backward(rank, &self.plan)
    }
}

/// A plan and direction is agreed on in its first run, whatever a rank prepared before or forgot since.
#[test]
fn only_first_runs_agree() {
    let world = 3;
    let jobs: Vec<Job> = (0..20).map(|i| Job::ring(&[9 + i, 4], world)).collect();
    let asked: Vec<_> = (0..world).map(|_| Arc::new(AtomicUsize::new(0))).collect();
    thread::scope(|scope| {
        for (end, asked) in local::group(world, FAR).unwrap().into_iter().zip(&asked) {
            let jobs = &jobs;
            scope.spawn(move || {
                let mut rank = Rank::new(Through::new(end, Counted(Arc::clone(asked))));
                // One rank prepares more than it can remember, and others something else.
                let some = rank.rank() * 10;
                for job in &jobs[..some] {
                    rank.prepare(&job.plan, Direction::Forward).unwrap();
                }
                for round in 0..3 {
                    for (i, job) in jobs.iter().enumerate() {
                        job.forward(&mut rank).unwrap();
                        if i % 2 == 0 {
                            job.both(&mut rank);
                        }
                        if rank.rank() == 1 && round == 1 {
                            rank.prepare(&jobs[(i * 7) % 20].plan, Direction::Backward).unwrap();
                        }
                    }
                }
            });
        }
    });
    for asked in &asked {
        assert_eq!(asked.load(SeqCst), 20 + 10);
    }
}

/// Replicas run as many batches as they like between two runs of the whole world.
#[test]
fn groups_count_for_themselves() {
    let mesh = Mesh { replicas: 2, ring: 2, ulysses: 1 };
    let small = Job::new(&[11], [4, 2], mesh, Layout::Contiguous, Options::new());
    let large = Job::ring(&[23], 4);
    on_ranks(4, FAR, |mut rank| {
        for round in 0..3 {
            large.both(&mut rank);
            for _ in 0..round * (rank.rank() / 2) {
                small.both(&mut rank);
            }
        }
    });
}

/// What the ranks say when one of them runs something else that was agreed on before, in `warm`.
fn expect_disagreement(
    what: &str,
    world: usize,
    ours: &Job,
    warm: impl Fn(&mut Rank) + Sync,
    other: impl Fn(&mut Rank) -> Result<()> + Sync,
) {
    for odd in 0..world {
        let errors = on_ranks(world, FAR, |mut rank| {
            ours.both(&mut rank);
            warm(&mut rank);
            ours.both(&mut rank);
            let first = if rank.rank() == odd { other(&mut rank) } else { ours.forward(&mut rank) };
            let first = first.expect_err(what);
            // It stays so, on this rank too.
            assert_eq!(ours.forward(&mut rank), Err(first.clone()), "{what}");
            assert_eq!(rank.poll(), Err(first.clone()), "{what}");
            assert_eq!(rank.handle().poll(), Err(first.clone()), "{what}");
            first
        });
        let mut found = 0;
        for (r, error) in errors.iter().enumerate() {
            match error {
                Error::Disagreement { rank, peer, ours, theirs, what: run, runs: Some(_) } => {
                    found += 1;
                    assert!(*rank == r && ours != theirs, "{what}: {error}");
                    assert!(r == odd || *peer == odd, "{what}: rank {r} blames rank {peer}, not {odd}");
                    assert!(run.contains("ward of ") && run.contains("ring"), "{run}");
                }
                Error::Peer { fault: Fault::One { peer, cause: Cause::Disagreed { with } }, .. } => {
                    assert_eq!([*peer, *with].iter().filter(|&&n| n == odd).count(), 1, "{what}, rank {r}: {error}");
                }
                Error::Peer { fault: Fault::One { peer, cause: Cause::Size { .. } }, .. } => {
                    assert!(r == odd || *peer == odd, "{what}, rank {odd} is odd: rank {r}: {error}");
                }
                other => panic!("{what}, rank {odd} is odd: rank {r} returned {other:?}"),
            }
        }
        assert!(found > 0, "{what}, rank {odd} is odd: {errors:?}");
    }
}

/// Ranks that were told of different nodes find it before any data moves, and each says which nodes it was told of.
#[test]
fn nodes_that_differ() {
    for mesh in [Mesh::ring(4).unwrap(), Mesh::ulysses(4).unwrap()] {
        let of = |ranks: usize| {
            let options = Options::new().circulate(Circulate::Keys).ranks_per_node(ranks);
            Job::new(&[64], [4, 2], mesh, Layout::Zigzag, options)
        };
        let (one, two) = (of(0), of(2));
        let errors = on_ranks(4, FAR, |mut rank| {
            let job = if rank.rank() == 3 { &two } else { &one };
            job.forward(&mut rank).unwrap_err().to_string()
        });
        let odd = &errors[3];
        assert!(odd.contains("zigzag, nodes of 2 ranks") && odd.contains("runs something else"), "{errors:?}");
        assert!(errors[..3].iter().all(|e| !e.contains("nodes of") && e.contains("something else")), "{errors:?}");
    }
}

#[test]
fn another_plan_that_was_agreed_on() {
    let world = 3;
    let ours = Job::ring(&[30, 6], world);
    let options = Options::new;
    let ring = Mesh::ring(world).unwrap();
    for (what, other) in [
        // Messages of the very same sizes: nothing but the tag tells.
        ("documents", Job::ring(&[29, 7], world)),
        ("sizes", Job::ring(&[60, 6], world)),
        ("fewer tokens", Job::ring(&[6, 3], world)),
        ("layout", Job::new(&[30, 6], [4, 2], ring, Layout::Contiguous, options())),
        ("gather", Job::new(&[30, 6], [4, 2], ring, Layout::Zigzag, options().gather(true))),
        ("together", Job::new(&[30, 6], [4, 2], ring, Layout::Zigzag, options().gather(Gather::Together))),
        ("circulate", Job::new(&[30, 6], [4, 2], ring, Layout::Zigzag, options().circulate(Circulate::Queries))),
        ("mesh", Job::new(&[30, 6], [4, 2], Mesh::ulysses(world).unwrap(), Layout::Zigzag, options())),
    ] {
        expect_disagreement(what, world, &ours, |rank| other.both(rank), |rank| other.forward(rank));
    }
}

#[test]
fn forward_against_backward() {
    for world in [2, 4] {
        let ours = Job::ring(&[30, 6], world);
        expect_disagreement("backward", world, &ours, |_| {}, |rank| ours.backward(rank));
    }
}

/// A rank that is a run ahead meets messages of the very same plan, direction and sizes.
#[test]
fn one_run_more() {
    let ours = Job::ring(&[30, 6], 2);
    // Each rank has a document of its own: its run meets no other rank.
    let apart = Job::new(&[8, 8], [4, 2], Mesh::ring(2).unwrap(), Layout::Contiguous, Options::new());
    let errors = on_ranks(2, FAR, |mut rank| {
        ours.both(&mut rank);
        apart.forward(&mut rank).unwrap();
        if rank.rank() == 0 {
            apart.forward(&mut rank).unwrap();
        }
        ours.forward(&mut rank).unwrap_err()
    });
    let ahead = |e: &Error| match e {
        Error::Disagreement { rank, ours, theirs, runs, .. } => {
            ours == theirs && *runs == Some(if *rank == 0 { [5, 4] } else { [4, 5] })
        }
        _ => false,
    };
    assert!(errors.iter().any(ahead), "{errors:?}");
    assert!(
        errors
            .iter()
            .all(|e| ahead(e)
                || matches!(e, Error::Peer { fault: Fault::One { cause: Cause::Disagreed { .. }, .. }, .. })),
        "{errors:?}"
    );
    assert!(errors.iter().any(|e| e.to_string().contains("run 5 of rank 0")), "{errors:?}");
}

/// An extra run that no other rank joins ends with the deadline, on every rank, and not in a later run.
#[test]
fn a_run_that_no_other_rank_makes() {
    let ours = Job::ring(&[30, 6], 2);
    let errors = on_ranks(2, Duration::from_millis(300), |mut rank| {
        ours.both(&mut rank);
        if rank.rank() == 1 {
            // It does not come until the other has given up.
            while rank.poll().is_ok() {
                thread::sleep(Duration::from_millis(5));
            }
        }
        ours.forward(&mut rank).unwrap_err()
    });
    for e in &errors {
        assert!(
            matches!(e, Error::Peer { fault: Fault::One { peer: 1, cause: Cause::Deadline { ms: 300.., .. } }, .. }),
            "{errors:?}"
        );
    }
}

/// All-to-alls of tensors of other sides and dims are jobs of their own.
#[test]
fn all_to_alls() {
    let mesh = Mesh::ulysses(2).unwrap();
    let job = Job::new(&[12], [4, 4], mesh, Layout::Contiguous, Options::new());
    let n = |rank: &Rank| job.plan.local_tokens(Side::Q, rank.rank()).len();
    let all_to_all = |rank: &mut Rank, side: Side, dim: usize| {
        let n = n(rank);
        let (x, mut y) = (vec![1.0f32; n * 4 * dim], vec![0.0f32; 12 * 2 * dim]);
        rank.all_to_all(&job.plan).to_heads(
            side,
            View::new(&x, n, 4, dim).unwrap(),
            ViewMut::new(&mut y, 12, 2, dim).unwrap(),
        )
    };
    for other in [(Side::K, 8), (Side::Q, 4)] {
        let errors = on_ranks(2, FAR, |mut rank| {
            for (side, dim) in [(Side::Q, 8), (Side::K, 8), (Side::Q, 4), (Side::Q, 8)] {
                all_to_all(&mut rank, side, dim).unwrap();
            }
            let (side, dim) = if rank.rank() == 1 { other } else { (Side::Q, 8) };
            all_to_all(&mut rank, side, dim).unwrap_err()
        });
        assert!(errors.iter().any(|e| matches!(e, Error::Disagreement { .. })), "{errors:?}");
        assert!(errors.iter().any(|e| e.to_string().contains("the all-to-all to heads of 12 tokens")), "{errors:?}");
    }
}

/// Plans of different numbers of replicas have different groups, so that ranks wait for each other in different
/// agreements: found at once, and every rank says what it runs. The two ranks that find it name each other.
#[test]
fn another_number_of_replicas() {
    let ours = Job::ring(&[11, 6], 4);
    let other = Job::new(&[11, 6], [4, 2], Mesh { replicas: 2, ring: 2, ulysses: 1 }, Layout::Zigzag, Options::new());
    for odd in 0..4 {
        let errors = on_ranks(4, FAR, |mut rank| {
            let job = if rank.rank() == odd { &other } else { &ours };
            job.forward(&mut rank).unwrap_err()
        });
        let other_of_two = odd ^ 1;
        for (r, error) in errors.iter().enumerate() {
            let pair = [odd, other_of_two];
            match error {
                Error::Disagreement { rank, peer, what, .. } => {
                    assert_eq!(*rank, r, "rank {odd} is odd: {error}");
                    assert_eq!(*peer, if pair.contains(&r) { r ^ 1 } else { odd }, "rank {odd} is odd: {error}");
                    assert_eq!(what.contains("2 replicas"), r == odd, "rank {odd} is odd: {error}");
                }
                error => panic!("rank {odd} is odd: {error:?}"),
            }
        }
    }
}
