// SPDX-License-Identifier: MIT OR Apache-2.0
//! A rank that runs another plan, which all had agreed on before.
//!
//! What shows it first depends on timing: the tag in front of the first message, a message of another size, or what
//! another rank tells. Each says which two ranks differ, and the odd one is always one of them.

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
