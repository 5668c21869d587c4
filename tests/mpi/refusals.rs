// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is refused from the start: each with what was found, what is needed, and the way out.

use std::time::Duration;

use cpattn::{
    Batch, Dtype, Layout, Mesh, Plan, Problem, Rank,
    schedule::Direction,
    transport::{Message, Transport, mpi::Mpi},
};
use mpi::{environment::Universe, ffi, raw::AsRaw, topology::SimpleCommunicator, traits::*};

use crate::{
    exchange::{LONG, init, label},
    launch::FINE,
};

pub fn arguments() {
    let (_universe, comm) = init();
    let refused = |result: cpattn::Result<Mpi>| result.unwrap_err().to_string();
    let text = refused(Mpi::new(&comm, Duration::ZERO));
    assert!(text.contains("deadline is 0, expected longer than 0"), "{text}");
    // SAFETY: null is allowed.
    let text = refused(unsafe { Mpi::from_raw(ffi::RSMPI_COMM_NULL, LONG) });
    assert!(text.contains("comm is MPI_COMM_NULL, expected a communicator"), "{text}");

    // Each process as a group of its own, joined.
    // SAFETY: a constant of the library.
    let mut inter = unsafe { ffi::RSMPI_COMM_NULL };
    let alone = comm.split_by_color(mpi::topology::Color::with_value(comm.rank())).unwrap();
    // SAFETY: live communicators of two processes; each leads its own group.
    let status =
        unsafe { ffi::MPI_Intercomm_create(alone.as_raw(), 0, comm.as_raw(), 1 - comm.rank(), 5, &raw mut inter) };
    assert_eq!(status, 0);
    // SAFETY: a live communicator.
    let text = refused(unsafe { Mpi::from_raw(inter, LONG) });
    assert!(text.contains("comm is an intercommunicator") && text.contains("MPI_Intercomm_merge"), "{text}");
    // SAFETY: a live communicator that is not used any more.
    unsafe { ffi::MPI_Comm_free(&raw mut inter) };

    let rank = Mpi::new(&comm, LONG).unwrap();
    let mut got = [0_u8; 2];
    let me = rank.rank();
    for (peer, bytes, ptr, expected) in [
        (2, 1, got.as_mut_ptr(), "sends[0].peer is 2, expected a rank below 2"),
        (me, 1, got.as_mut_ptr(), "expected another rank"),
        (1 - me, 0, got.as_mut_ptr(), "sends[0].bytes is 0, expected at least 1"),
        (1 - me, 1, std::ptr::null_mut(), "sends[0].ptr is null"),
    ] {
        // SAFETY: refused before anything is touched.
        let text = unsafe { rank.exchange(label("bad", 0), &[Message { peer, ptr, bytes }], &[]) };
        let text = text.unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
    }
    // One call at a time: rank 0 is in an agreement that rank 1 delays until the other call was refused.
    std::thread::scope(|scope| {
        if me == 0 {
            let (begun, begins) = std::sync::mpsc::channel();
            let rank = &rank;
            let waiting = scope.spawn(move || {
                begun.send(()).unwrap();
                rank.agree(0..2, 1)
            });
            begins.recv().unwrap();
            std::thread::sleep(Duration::from_millis(500));
            let text = rank.agree(0..2, 1).unwrap_err().to_string();
            assert!(
                text.contains("called on rank 0 while it is in agree, step 0, expected one call at a time"),
                "{text}"
            );
            comm.process_at_rank(1).send(&1_u8);
            waiting.join().unwrap().unwrap();
        } else {
            comm.process_at_rank(0).receive::<u8>();
            rank.agree(0..2, 1).unwrap();
        }
    });
    println!("{FINE}");
}

pub fn thread_level() {
    let _universe: (Universe, _) = mpi::initialize_with_threading(mpi::Threading::Funneled).unwrap();
    let text = Mpi::new(&SimpleCommunicator::world(), LONG).unwrap_err().to_string();
    let provided = "MPI's thread level is MPI_THREAD_FUNNELED, expected MPI_THREAD_MULTIPLE";
    assert!(text.contains(provided) && text.contains("MPI_Init_thread"), "{text}");
    println!("{FINE}");
}

/// As the launcher of another MPI leaves it: each of its processes is alone in its world.
pub fn another_launcher() {
    let (_universe, comm) = init();
    for name in ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"] {
        let own = std::env::var_os(name);
        // SAFETY: this program's other threads, if MPI has some, read no variables while nothing is sent.
        unsafe { std::env::set_var(name, "4") };
        let text = Mpi::new(&comm, LONG).unwrap_err().to_string();
        let found = format!("MPI_COMM_WORLD is 1 process, expected 4, as many as the launcher started ({name})");
        assert!(text.contains(&found) && text.contains("the mpirun of the MPI that it was built with"), "{text}");
        match own {
            // SAFETY: as above.
            Some(own) => unsafe { std::env::set_var(name, own) },
            // SAFETY: as above.
            None => unsafe { std::env::remove_var(name) },
        }
        assert_eq!(Mpi::new(&comm, LONG).unwrap().world(), 1);
    }
    println!("{FINE}");
}

pub fn before_and_after() {
    // SAFETY: refused before the handle is used.
    let before = unsafe { Mpi::from_raw(ffi::RSMPI_COMM_WORLD, LONG) }.unwrap_err().to_string();
    assert!(before.contains("MPI is not initialised, expected initialised and not finalised"), "{before}");
    let (universe, comm) = init();
    let rank = Mpi::new(&comm, LONG).unwrap();
    drop(universe);
    for after in [Mpi::new(&comm, LONG).map(drop), rank.poll(), rank.agree(0..1, 1)] {
        let after = after.unwrap_err().to_string();
        assert!(after.contains("MPI is finalised") && after.contains("before MPI_Finalize"), "{after}");
    }
    rank.abort(cpattn::Cause::Aborted);
    drop(rank);
    println!("{FINE}");
}

/// Processes with another version of the library: all of them are told, before anything is exchanged.
pub fn another_version() {
    let (_universe, comm) = init();
    let rank = Mpi::new(&comm, LONG).unwrap();
    let me = rank.rank();
    let (version, other) = if me == 2 { ("0.0.9", 0) } else { ("0.1.0", 2) };
    let text = rank.same_version(version).unwrap_err().to_string();
    let found = format!("cpattn of the group is {version} here, another on rank {other}, expected one version");
    assert!(text.contains(&found) && text.contains("build all processes alike"), "{text}");
    println!("{FINE}");
}

/// A communicator of the wrong size for a plan.
pub fn plans() {
    let (_universe, comm) = init();
    let problem = Problem::new(Batch::from_lengths(&[64]).unwrap(), 4, 4, 16, Dtype::F32);
    let plan = Plan::new(&problem, Mesh::ring(4).unwrap(), Layout::Contiguous).unwrap();
    let mut rank = Rank::new(Mpi::new(&comm, LONG).unwrap());
    let text = rank.prepare(&plan, Direction::Forward).unwrap_err().to_string();
    let found = "mesh is ulysses 1 × ring 4 = 4 ranks, expected the transport's world of 2; plan with a mesh of as many ranks as the transport has";
    assert!(text.contains(found), "{text}");
    println!("{FINE}");
}
