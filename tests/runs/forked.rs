// SPDX-License-Identifier: MIT OR Apache-2.0
//! A process that was forked from one that has run plans: ranks of its parent are refused, also at their end nothing
//! waits for them, new ranks and the workers of calls are as in any other process, and the parent goes on.

use crate::child::in_a_child;
use cpattn::{Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, Result, Side, View, ViewMut, transport::local};
use std::time::Duration;

const HEADS: usize = 4;
const DIM: usize = 40;
const WORLD: usize = 2;
pub const WORKERS: usize = if cfg!(feature = "rayon") { 3 } else { 1 };

pub fn group() -> Vec<Rank> {
    let ends = local::group(WORLD, Duration::from_secs(60)).unwrap();
    ends.into_iter().map(|end| Rank::with_workers(end, WORKERS)).collect()
}

pub fn plan() -> Plan {
    let problem = Problem::new(Batch::new(&[0, 700, 701, 1100]).unwrap(), HEADS, HEADS, DIM, Dtype::F32);
    Plan::new(&problem, Mesh::ring(WORLD).unwrap(), Layout::Zigzag).unwrap()
}

/// A rank's o.
pub fn one(rank: &mut Rank) -> Result<Vec<f32>> {
    let plan = &plan();
    let n = plan.local_tokens(Side::Q, rank.rank()).len();
    let x: Vec<f32> = (0..n * HEADS * DIM).map(|i| (i % 7) as f32 - 3.0).collect();
    let (mut o, mut lse) = (vec![f32::NAN; x.len()], vec![f32::NAN; n * HEADS]);
    let x = View::new(&x, n, HEADS, DIM)?;
    rank.forward(
        plan,
        Forward {
            q: x,
            k: x,
            v: x,
            sinks: None,
            o: ViewMut::new(&mut o, n, HEADS, DIM)?,
            lse: ViewMut::new(&mut lse, n, HEADS, 1)?,
            max_logit: None,
            dropout_seed: None,
        },
    )?;
    Ok(o)
}

/// Each rank's o.
pub fn forward(ranks: &mut [Rank]) -> Result<Vec<Vec<f32>>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(|| one(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
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

/// A child that is the first to use the library, of a program that has used rayon: rayon's global pool has no threads
/// in the child, and the library cannot know that it had any.
#[cfg(feature = "rayon")]
#[test]
fn a_forked_process_may_be_the_first() {
    use rayon::prelude::*;
    const FRESH: &str = "CPATTN_TEST_FRESH_PROCESS";
    if std::env::var_os(FRESH).is_none() {
        let mut fresh = std::process::Command::new(std::env::current_exe().unwrap());
        fresh.args(["forked::a_forked_process_may_be_the_first", "--exact"]).env(FRESH, "1");
        let output = fresh.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    assert_eq!((0..10_000).into_par_iter().map(|i| i % 7).filter(|&i| i == 3).count(), 1429);
    let forward_of_own = || forward(&mut group()).unwrap();
    assert_eq!(in_a_child(|| _ = forward_of_own()), 0, "14 is a wait without end");
    // Nor does it matter that the parent follows, and is the parent of another.
    let expected = forward_of_own();
    assert_eq!(in_a_child(|| assert_eq!(forward_of_own(), expected)), 0);
    // A pool of the program's own, which a child does not have either, is used where the caller is in it.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    assert_eq!(pool.install(forward_of_own), expected);
}
