// SPDX-License-Identifier: MIT OR Apache-2.0
//! What ranks do together between runs: rows that lie some tokens on, and the trace of a group.
//!
//! A shift from the ranks' own rows is compared with that of the whole batch, and its messages are counted. Ranks that
//! call different things find out and go on; a rank that leaves ends the call on all others.

use crate::common::through::{Fault, Hook, Through};
use cpattn::{
    Batch, Cause, Dtype, Error, Forward, Layout, Mesh, Plan, Problem, Rank, Result, Side, View, ViewMut,
    report::trace::Event,
    runtime::SliceRows,
    schedule::Lane,
    transport::{
        Label, Message, Transport,
        local::{self, Local},
    },
};
use std::{
    collections::BTreeSet,
    thread,
    time::{Duration, Instant},
};

const LONG: Duration = Duration::from_secs(20);

/// Runs a function as every rank of a group of threads.
fn ranks<T, R>(world: usize, wrap: impl Fn(Local) -> T, run: impl Fn(Rank) -> R + Sync) -> Vec<R>
where
    T: Transport + 'static,
    R: Send,
{
    let ends: Vec<T> = local::group(world, LONG).unwrap().into_iter().map(wrap).collect();
    let run = &run;
    thread::scope(|scope| {
        let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(move || run(Rank::new(end)))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn plan(lengths: &[usize], mesh: Mesh, layout: Layout) -> Plan {
    Plan::new(&Problem::new(Batch::from_lengths(lengths).unwrap(), 4, 2, 8, Dtype::F32), mesh, layout).unwrap()
}

/// Fails an exchange that lists a peer twice in one direction.
struct OneEach;

impl Hook<Local> for OneEach {
    unsafe fn exchange(&self, end: &Local, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        assert_eq!(label.operation, "shift");
        for list in [sends, recvs] {
            let peers: BTreeSet<usize> = list.iter().map(|message| message.peer).collect();
            assert_eq!(peers.len(), list.len(), "one message with each peer");
        }
        // SAFETY: the caller's promise about the lists is handed on.
        unsafe { end.exchange(label, sends, recvs) }
    }
}

#[test]
fn a_shift_of_shares_is_that_of_the_whole() {
    let batches: [&[usize]; 4] = [&[17, 0, 1, 40, 3], &[2], &[], &[1, 1, 1, 1, 64]];
    let layouts = [
        Layout::Contiguous,
        Layout::Zigzag,
        Layout::ZigzagPack,
        Layout::Striped { stripe: 2 },
        Layout::Balanced { chunks: 3 },
    ];
    let meshes = [(1, 4, 1), (1, 2, 2), (2, 2, 1), (1, 1, 4), (4, 1, 1)];
    for (lengths, layout) in batches.into_iter().flat_map(|b| layouts.map(|l| (b, l))) {
        for (replicas, ring, ulysses) in meshes {
            let plan = &plan(lengths, Mesh { replicas, ring, ulysses }, layout);
            let total: usize = lengths.iter().sum();
            // Replicas have batches of their own.
            let whole = |rank: usize| {
                let replica = plan.mesh().coordinates(rank).replica;
                (0..total).map(|t| (1000 * replica + t) as i64).collect::<Vec<_>>()
            };
            ranks(
                4,
                |end| Through::new(end, OneEach),
                |mut rank| {
                    let r = rank.rank();
                    let mine = plan.local_tokens(Side::Q, r).shard(&whole(r), 1).unwrap();
                    for by in [1, -1, 0, 3, 70, -64, i64::MAX, i64::MIN] {
                        let want = plan.local_tokens(Side::Q, r).shift(&whole(r), -7, by).unwrap();
                        assert_eq!(
                            rank.shift(plan, by, SliceRows::new(&mine, 1, -7)).unwrap().into_shifted(),
                            want,
                            "by {by}, {}",
                            plan.explain()
                        );
                        // Rows of three values, and rows of none.
                        let wide: Vec<[u8; 3]> = mine.iter().map(|x| [*x as u8, 1, 2]).collect();
                        let shifted =
                            rank.shift(plan, by, SliceRows::new(wide.as_flattened(), 3, 9)).unwrap().into_shifted();
                        let want: Vec<[u8; 3]> =
                            want.iter().map(|x| if *x == -7 { [9; 3] } else { [*x as u8, 1, 2] }).collect();
                        assert_eq!(shifted, want.as_flattened());
                        assert!(
                            rank.shift(plan, by, SliceRows::<u64>::new(&[], 0, 0)).unwrap().into_shifted().is_empty()
                        );
                    }
                    rank.poll().unwrap();
                },
            );
        }
    }
}

fn forward(rank: &mut Rank, plan: &Plan) -> Result<()> {
    let n = plan.local_tokens(Side::Q, rank.rank()).len();
    let (q, kv) = (vec![0.5f32; n * 4 * 8], vec![0.25f32; n * 2 * 8]);
    let (mut o, mut lse) = (vec![0f32; n * 4 * 8], vec![0f32; n * 4]);
    rank.forward(
        plan,
        Forward::new(
            View::new(&q, n, 4, 8)?,
            View::new(&kv, n, 2, 8)?,
            View::new(&kv, n, 2, 8)?,
            ViewMut::new(&mut o, n, 4, 8)?,
            ViewMut::head_major(&mut lse, n, 4)?,
        ),
    )
}

/// Every difference is told to all ranks before anything moves, and the group goes on.
#[test]
fn ranks_that_call_different_things_find_out() {
    let plan = &plan(&[5, 20], Mesh::ring(3).unwrap(), Layout::Zigzag);
    let other = &Plan::new(plan.problem(), plan.mesh(), Layout::Contiguous).unwrap();
    ranks(
        3,
        |end| end,
        |mut rank| {
            let odd = rank.rank() == 1;
            let n = plan.local_tokens(Side::Q, rank.rank()).len();
            let rows = vec![7u32; n];
            let halves = vec![7u16; 2 * n];
            let words = |error: Error| {
                assert!(matches!(error, Error::Disagreement { .. }), "{error}");
                error.to_string()
            };
            let (by, at) = (if odd { 2 } else { 1 }, if odd { other } else { plan });
            let mine = vec![7u32; at.local_tokens(Side::Q, rank.rank()).len()];
            let said = words(rank.shift(plan, by, SliceRows::new(&rows, 1, 0)).unwrap_err());
            assert!(said.contains(&format!("runs a shift by {by} of rows of 4 bytes over plan")), "{said}");
            words(rank.shift(at, 1, SliceRows::new(&mine, 1, 0)).unwrap_err());
            // As many bytes, of another size of element.
            words(if odd {
                rank.shift(plan, 1, SliceRows::new(&halves, 2, 0)).unwrap_err()
            } else {
                rank.shift(plan, 1, SliceRows::new(&rows, 1, 0)).unwrap_err()
            });
            words(if odd {
                rank.trace().gather(Instant::now()).unwrap_err()
            } else {
                rank.shift(plan, 1, SliceRows::new(&rows, 1, 0)).unwrap_err()
            });
            let said = words(if odd {
                forward(&mut rank, plan).unwrap_err()
            } else {
                rank.trace().gather(Instant::now()).unwrap_err()
            });
            assert!(odd || said.contains("runs the gathering of a trace"), "{said}");
            forward(&mut rank, plan).unwrap();
            rank.shift(plan, 1, SliceRows::new(&rows, 1, 0)).unwrap();
            rank.trace().gather(Instant::now()).unwrap();
            // What is this rank's own mistake is refused on it alone.
            let said = rank.shift(plan, 1, SliceRows::new(&rows[1..], 1, 0)).unwrap_err().to_string();
            assert!(said.contains(&format!("expected 1 for each of {n} tokens of rank {}", rank.rank())), "{said}");
            assert!(rank.shift(plan, 1, SliceRows::new(&rows, usize::MAX, 0)).is_err());
            let wide = Plan::new(plan.problem(), Mesh::ring(4).unwrap(), Layout::Zigzag).unwrap();
            assert!(rank.shift(&wide, 1, SliceRows::new(&rows, 1, 0)).unwrap_err().to_string().contains("world"));
            rank.poll().unwrap();
        },
    );
}

/// At the agreement, and at the exchange or in the middle of a gathering.
#[test]
fn a_rank_that_leaves_ends_the_call_on_all_others() {
    let plan = &plan(&[40], Mesh::ring(3).unwrap(), Layout::Striped { stripe: 1 });
    for (call, gathers) in [(0, false), (1, false), (0, true), (1, true), (20, true)] {
        let wrap = |end: Local| {
            let fault = if end.rank() == 2 { Fault::Leave } else { Fault::None };
            Through::faulty(end, call, fault)
        };
        ranks(3, wrap, |mut rank| {
            let rows = vec![0u8; plan.local_tokens(Side::Q, rank.rank()).len()];
            let once = |rank: &mut Rank| match gathers {
                true => rank.trace().gather(Instant::now()).map(drop),
                false => rank.shift(plan, 1, SliceRows::new(&rows, 1, 0)).map(drop),
            };
            // Rank 1 may have given what it has when rank 2 leaves: it learns of it at its next call.
            let error = match once(&mut rank) {
                Ok(()) => once(&mut rank).unwrap_err(),
                Err(error) => error,
            };
            assert!(
                matches!(error, Error::Peer { fault: cpattn::Fault::One { peer: 2, cause: Cause::Left }, .. }),
                "{error}"
            );
            assert_eq!(once(&mut rank).unwrap_err(), error, "a group that failed stays failed");
            assert!(rank.poll().is_err());
        });
    }
}

/// Each rank has an epoch of its own, as processes have.
#[test]
fn a_trace_is_gathered_on_the_clock_of_rank_0() {
    let plan = &plan(&[64, 30], Mesh::ring(3).unwrap(), Layout::Contiguous);
    let began = Instant::now();
    thread::sleep(Duration::from_millis(900));
    // Of rank 0: 0.5 s after `began`.
    let epoch = |rank: usize| began + Duration::from_millis([500, 0, 700][rank]);
    let own = |rank| Event {
        rank,
        lane: Lane::Compute,
        name: "optimizer",
        phase: "step",
        step: 4,
        start_ns: 1_000_000_000,
        end_ns: 1_000_000_007,
        bytes: 0,
    };
    let all = ranks(
        3,
        |end| end,
        |mut rank| {
            let r = rank.rank();
            rank.trace().record(epoch(r), 1000).unwrap();
            let from = (began.elapsed() - Duration::from_millis(500)).as_nanos() as u64;
            forward(&mut rank, plan).unwrap();
            let to = (began.elapsed() - Duration::from_millis(500)).as_nanos() as u64;
            let events = rank.trace().gather(epoch(r)).unwrap();
            assert_eq!(rank.trace().gather(epoch(r)).unwrap(), [], "taken");
            assert_eq!(rank.trace().events(), []);
            // Events of the caller's, also with names that no operation has.
            let others = rank.trace().gather_events(epoch(r), &vec![own(9); r]).unwrap();
            (from, to, events, others)
        },
    );
    let (_, _, events, others) = &all[0];
    assert!(all[1..].iter().all(|(_, _, events, others)| events.is_empty() && others.is_empty()));
    assert!(events.is_sorted_by_key(|e| e.start_ns));
    for (rank, (from, to, ..)) in all.iter().enumerate() {
        let mine: Vec<_> = events.iter().filter(|e| e.rank == rank).collect();
        assert!(mine.len() > 2, "rank {rank}: {events:?}");
        assert!(mine.iter().any(|e| e.name == "fetch" && e.lane == Lane::Communication && e.bytes > 0) || rank == 0);
        // Off by half a round trip at most, which a busy machine stretches.
        let slack = 100_000_000;
        assert!(
            mine.iter().all(|e| from.saturating_sub(slack) <= e.start_ns && e.end_ns <= to + slack),
            "rank {rank}, {from} to {to}: {mine:?}"
        );
    }
    assert_eq!(others.len(), 3);
    for e in others {
        // What rank 1 calls 1 s is 0.5 s, and 1 s of rank 2 is 1.2 s.
        let exact = [0, 500_000_000, 1_200_000_000][e.rank];
        assert!((e.start_ns as i64 - exact).abs() < 100_000_000, "{e:?}");
        assert_eq!((e.name, e.phase, e.step, e.end_ns - e.start_ns), ("optimizer", "step", 4, 7));
    }
    // A rank by itself needs no one.
    ranks(
        1,
        |end| end,
        |mut rank| {
            assert_eq!(rank.trace().gather_events(began, &[own(0)]).unwrap(), [own(0)]);
            assert_eq!(rank.trace().gather(began).unwrap(), []);
        },
    );
}
