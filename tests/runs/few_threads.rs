// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process that may start no more threads: each call that needs one says so, the ranks of other threads are told at
//! once, and all is well when the limit is lifted.

use crate::child::{in_a_child, limit};
use crate::forked::{WORKERS, forward, group, one, plan};
use cpattn::{Cause, Error, Fault, Rank, schedule::Direction, transport::local};
use std::{
    sync::Barrier,
    time::{Duration, Instant},
};

const FAR: Duration = Duration::from_secs(50);

#[track_caller]
fn is_of_a_thread(error: &Error) {
    let text = error.to_string();
    assert!(matches!(error, Error::Device { call: "thread spawn", .. }), "{text}");
    assert!(text.contains("the thread of ") && text.contains("ulimit -u"), "{text}");
}

#[test]
fn workers_that_cannot_start() {
    if WORKERS == 1 {
        return;
    }
    let status = in_a_child(|| {
        limit(Some(0));
        let mut rank = Rank::with_workers(local::group(1, FAR).unwrap().remove(0), WORKERS);
        let problem = plan().problem().clone();
        let single = cpattn::Plan::new(&problem, cpattn::Mesh::single(), cpattn::Layout::Contiguous).unwrap();
        for _ in 0..2 {
            is_of_a_thread(&rank.prepare(&single, Direction::Forward).unwrap_err());
        }
        limit(None);
        rank.prepare(&single, Direction::Forward).unwrap();
        forward(&mut group()).unwrap();
    });
    assert_eq!(status, 0);
}

/// Rank 1 has the threads that it needs, and rank 0 has not.
#[test]
fn a_rank_without_its_thread_tells_the_others() {
    let status = in_a_child(|| {
        let (limited, start) = (Barrier::new(3), Instant::now());
        let play = |number: usize, mut rank: Rank| {
            if number == 1 {
                rank.prepare(&plan(), Direction::Forward).unwrap();
            }
            limited.wait();
            limited.wait();
            (one(&mut rank).unwrap_err(), rank.poll().unwrap_err())
        };
        let results: Vec<_> = std::thread::scope(|scope| {
            let ends = local::group(2, FAR).unwrap().into_iter().map(Rank::new).enumerate();
            let play = &play;
            let threads: Vec<_> = ends.map(|(number, rank)| scope.spawn(move || play(number, rank))).collect();
            limited.wait();
            limit(Some(0));
            limited.wait();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(start.elapsed() < FAR / 2);
        is_of_a_thread(&results[0].0);
        for error in [&results[1].0, &results[1].1] {
            assert!(
                matches!(error, Error::Peer { fault: Fault::One { peer: 0, cause: Cause::Failed }, .. }),
                "{error}"
            );
        }
        assert_eq!(results[0].0, results[0].1);
        limit(None);
        forward(&mut group()).unwrap();
    });
    assert_eq!(status, 0);
}

#[test]
fn ranks_that_cannot_start() {
    let status = in_a_child(|| {
        limit(Some(0));
        let meet = |end: local::Local| cpattn::transport::Transport::agree(&end, 0..3, 1);
        is_of_a_thread(&local::run(3, FAR, meet).unwrap_err());
        limit(None);
        local::run(3, FAR, meet).unwrap();
    });
    assert_eq!(status, 0);
}
