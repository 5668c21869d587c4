// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process that was forked from one that has run plans: ranks of its parent are refused, also at their end nothing
//! waits for them, new ranks and the workers of calls are as in any other process, and the parent goes on.

use cpattn::{Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, Result, Side, View, ViewMut, transport::local};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

const HEADS: usize = 4;
const DIM: usize = 40;
const WORLD: usize = 2;
const WORKERS: usize = if cfg!(feature = "rayon") { 3 } else { 1 };

fn group() -> Vec<Rank> {
    let ends = local::group(WORLD, Duration::from_secs(60)).unwrap();
    ends.into_iter().map(|end| Rank::with_workers(end, WORKERS)).collect()
}

fn plan() -> Plan {
    let problem = Problem::new(Batch::new(&[0, 700, 701, 1100]).unwrap(), HEADS, HEADS, DIM, Dtype::F32);
    Plan::new(&problem, Mesh::ring(WORLD).unwrap(), Layout::Zigzag).unwrap()
}

/// Each rank's o.
fn forward(ranks: &mut [Rank]) -> Result<Vec<Vec<f32>>> {
    let plan = &plan();
    let one = |rank: &mut Rank| {
        let n = plan.local_tokens(Side::Q, rank.rank()).len();
        let x: Vec<f32> = (0..n * HEADS * DIM).map(|i| (i % 7) as f32 - 3.0).collect();
        let (mut o, mut lse) = (vec![f32::NAN; x.len()], vec![f32::NAN; n * HEADS]);
        let x = View::new(&x, n, HEADS, DIM)?;
        rank.forward(
            plan,
            Forward::new(x, x, x, ViewMut::new(&mut o, n, HEADS, DIM)?, ViewMut::new(&mut lse, n, HEADS, 1)?),
        )?;
        Ok(o)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(|| one(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `job` in a child of this process; whatever waits without end there is ended after a minute.
fn in_a_child(job: impl FnOnce()) -> i32 {
    // SAFETY: the child runs code of this test alone, and ends without unwinding into the harness.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: ends the child.
            unsafe { libc::alarm(60) };
            let panicked = catch_unwind(AssertUnwindSafe(job)).is_err();
            // SAFETY: ends the child, without what the parent's harness would do at its end.
            unsafe { libc::_exit(i32::from(panicked)) }
        }
        child => {
            let mut status = 0;
            // SAFETY: a child of this process, and a place for its status.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            status
        }
    }
}

#[test]
fn a_forked_process_needs_ranks_of_its_own() {
    let mut ranks = group();
    let expected = forward(&mut ranks).unwrap();
    let status = in_a_child(|| {
        for rank in &mut ranks {
            let refusal = rank.prepare(&plan(), cpattn::schedule::Direction::Backward).unwrap_err().to_string();
            assert!(refusal.contains("rank is of process ") && refusal.contains("make a new group"), "{refusal}");
        }
        assert!(matches!(forward(&mut ranks), Err(cpattn::Error::Invalid { argument, .. }) if argument == "rank"));
        drop(std::mem::take(&mut ranks));
        let mut own = group();
        assert_eq!(forward(&mut own).unwrap(), expected);
        // A grandchild is to its parent what that is to its own.
        assert_eq!(in_a_child(|| assert_eq!(forward(&mut group()).unwrap(), expected)), 0);
        assert_eq!(forward(&mut own).unwrap(), expected);
    });
    assert_eq!(status, 0, "14 is a wait without end");
    assert_eq!(forward(&mut ranks).unwrap(), expected);
}
