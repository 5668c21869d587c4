// SPDX-License-Identifier: MIT OR Apache-2.0
//! A rank that runs another plan, which all had agreed on before.
//!
//! What shows it first depends on timing: the tag in front of the first message, a message of another size, or what
//! another rank tells. Each says which two ranks differ, and the odd one is always one of them.

use std::time::Instant;

use cpattn::{Batch, Cause, Dtype, Error, Fault, Layout, Mesh, Plan, Problem, Rank, transport::mpi::Mpi};

use crate::{
    exchange::{LONG, init},
    launch::FINE,
    trials::forward,
};

pub fn named() {
    let (_universe, comm) = init();
    let plan = |lengths: &[usize]| {
        let problem = Problem::new(Batch::from_lengths(lengths).unwrap(), 4, 2, 16, Dtype::F32);
        Plan::new(&problem, Mesh::ring(3).unwrap(), Layout::Zigzag).unwrap()
    };
    let plans = [plan(&[190, 66]), plan(&[160, 96])];
    for round in 0..12 {
        let odd = round % 3;
        let mut rank = Rank::new(Mpi::new(&comm, LONG).unwrap());
        let me = rank.rank();
        for plan in &plans {
            forward(&mut rank, plan).unwrap();
        }
        let error = forward(&mut rank, &plans[usize::from(me == odd)]).unwrap_err();
        let differ = match error {
            Error::Disagreement { peer, .. }
            | Error::Peer { fault: Fault::One { peer, cause: Cause::Size { .. } }, .. } => [me, peer],
            Error::Peer { fault: Fault::One { peer, cause: Cause::Disagreed { with } }, .. } => [peer, with],
            other => panic!("{other:?}"),
        };
        assert_eq!(differ.iter().filter(|&&rank| rank == odd).count(), 1, "rank {me}, of which {odd} is odd: {error}");
    }
    println!("{FINE}");
}

/// A rank that runs a plan which is new to it, where the others run what all agreed on before: found without a
/// deadline, on every rank.
pub fn new() {
    let (_universe, comm) = init();
    let plan = |lengths: &[usize], layout: Layout| {
        let problem = Problem::new(Batch::from_lengths(lengths).unwrap(), 4, 2, 16, Dtype::F32);
        Plan::new(&problem, Mesh::ring(3).unwrap(), layout).unwrap()
    };
    for round in 0..9 {
        let layout = if round < 6 { Layout::Zigzag } else { Layout::Contiguous };
        let odd = round % 3;
        let (old, new) = (plan(&[256], layout), plan(&[250, 6], layout));
        let mut rank = Rank::new(Mpi::new(&comm, LONG).unwrap());
        let (me, began) = (rank.rank(), Instant::now());
        // A rank that is still in the first run gets the error there if the others go on.
        let first = forward(&mut rank, &old).err();
        let mine = if me == odd { &new } else { &old };
        // A rank that needs nothing of the odd one finds it in a later run: at once, or where MPI sends without waiting
        // for the receiver, once the notice of another rank is there.
        let mut error = first;
        while error.is_none() {
            assert!(began.elapsed() < LONG / 2, "rank {me} of which {odd} is odd has found nothing");
            error = forward(&mut rank, mine).err();
        }
        let error = error.unwrap();
        assert_eq!(rank.poll(), Err(error.clone()));
        assert!(began.elapsed() < LONG / 2, "rank {me} of which {odd} is odd: {error}");
        let Error::Disagreement { rank, peer, ours, theirs, ref what, runs: None } = error else {
            panic!("rank {me} of which {odd} is odd: {error}")
        };
        assert!(rank == me && ours != theirs && (peer == odd) != (me == odd), "{odd} is odd: {error}");
        assert!(
            what.contains(if me == odd { "256 tokens in 2 documents" } else { "256 tokens in 1 documents" }),
            "{what}"
        );
    }
    println!("{FINE}");
}
