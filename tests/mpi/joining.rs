// SPDX-License-Identifier: MIT OR Apache-2.0
//! Processes that come to make their transports too late, never, or in several attempts: the others name those that are
//! absent, and a later attempt in which all come succeeds.

use cpattn::Fault;
use cpattn::transport::Label;
use std::{process, thread, time::Duration};

use cpattn::{
    Cause, Error, Result,
    transport::{Transport, mpi::Mpi},
};
use mpi::traits::*;

use crate::{
    exchange::{LONG, exchange, init, label},
    failure::SHORT,
    launch::FINE,
    trials::do_to_me,
};

/// The peer that is named by a rank to which not all others came, and how many did not besides.
#[track_caller]
fn absent(result: Result<Mpi>, me: usize) -> (usize, usize) {
    let Err(Error::Peer {
        rank,
        at: Label { operation: "making the transport", step: 0, run: None },
        fault: Fault::One { peer, cause: Cause::Absent { ms, others } },
    }) = result
    else {
        panic!("{result:?}")
    };
    assert_eq!(rank, me);
    assert!((700..20_000).contains(&ms), "{ms}");
    (peer, others)
}

pub fn never_starts() {
    let (universe, comm) = init();
    let me = comm.rank() as usize;
    if me == 2 {
        thread::sleep(SHORT * 4);
        std::mem::forget(universe);
        process::exit(3);
    }
    let error = Mpi::new(&comm, SHORT).unwrap_err();
    assert!(error.to_string().contains("rank 2 did not come to make its transport within 7"), "{error}");
    assert_eq!(absent(Err(error), me), (2, 0));
    println!("{FINE}");
    std::mem::forget(universe);
    process::exit(3);
}

/// Two of four come too late, to find that the others have given up; then all of them come again.
pub fn too_late() {
    let (_universe, comm) = init();
    let me = comm.rank() as usize;
    if me == 1 || me == 3 {
        thread::sleep(SHORT * 4);
    }
    let (peer, others) = absent(Mpi::new(&comm, SHORT), me);
    match me {
        0 | 2 => assert_eq!((peer, others), (1, 1)),
        _ => assert!((peer == 1 || peer == 3) && others == 0, "{peer}, {others}"),
    }
    comm.barrier();
    let rank = Mpi::new(&comm, LONG).unwrap();
    rank.agree(0..4, 1).unwrap();
    println!("{FINE}");
}

/// Attempts that fail on some ranks or on all, one right after the other; then all of them come, and their messages
/// meet. Duplicates of earlier attempts are still under way when later ones begin.
pub fn come_and_go() {
    let (_universe, comm) = init();
    let me = comm.rank() as usize;
    for attempt in 0..5 {
        thread::sleep(Duration::from_millis((attempt * 7 + me as u64 * 5) % 4 * 60));
        if let Err(error) = Mpi::new(&comm, Duration::from_millis(40)) {
            assert!(matches!(error, Error::Peer { .. }), "{error}");
        }
    }
    let rank = Mpi::new(&comm, LONG).unwrap();
    rank.agree(0..4, 1).unwrap();
    let (sent, mut got) = ([me as u8; 8], [9_u8; 8]);
    exchange(&rank, label("around", 0), &[((me + 1) % 4, &sent)], &mut [((me + 3) % 4, &mut got)]).unwrap();
    assert_eq!(got, [(me as u8 + 3) % 4; 8]);
    println!("{FINE}");
}

/// A process that is stopped while it waits for the others to make their transport. If it goes on in time all meet,
/// though more than the deadline has passed since it came; else all name it, itself too.
pub fn stopped_while_made() {
    let (_universe, comm) = init();
    let me = comm.rank() as usize;
    let deadline = 2 * SHORT;
    // Of rank 2: when it is stopped, and for how long. It goes on in time, just after the others have given up, and
    // long after.
    for (round, (stop, asleep)) in [(0.2, 1.5), (0.9, 1.8), (0.2, 3.8)].into_iter().enumerate() {
        comm.barrier();
        if me == 2 {
            do_to_me(&format!("sleep {stop}; kill -STOP ME; sleep {asleep}; kill -CONT ME"));
        } else {
            // In the second round rank 0 has waited for less time than rank 2 when rank 1 gives up.
            let late = if round == 1 && me == 0 { 900 } else { 0 };
            thread::sleep(Duration::from_millis(1000 + late));
        }
        match Mpi::new(&comm, deadline) {
            Ok(rank) => {
                assert_eq!(round, 0, "rank {me}");
                rank.agree(0..3, 1).unwrap();
            }
            Err(Error::Peer {
                at: Label { operation: "making the transport", .. },
                fault: Fault::One { peer: 2, cause },
                ..
            }) if round > 0 => match cause {
                Cause::Absent { others: 0, .. } => assert_ne!(me, 2, "it was there"),
                Cause::Deadline { ms, bytes: 0 } => assert!((1300..20_000).contains(&ms), "{ms}"),
                other => panic!("rank {me}: {other}"),
            },
            Err(error) => panic!("round {round}: {error}"),
        }
    }
    comm.barrier();
    let rank = Mpi::new(&comm, LONG).unwrap();
    rank.agree(0..3, 1).unwrap();
    println!("{FINE}");
}
