// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks of the program's MPI before a transport is made: it is initialised, allows calls of several threads, and is
//! the MPI of the launcher that started the process.

use ::mpi::ffi;

use super::raw::check;
use crate::error::{Error, Result};

/// Whether calls can be made: after MPI was initialised and before it was finalised.
pub(super) fn usable() -> Result<()> {
    let (mut initialized, mut finalized) = (0, 0);
    // SAFETY: these two may be called at any time.
    unsafe {
        check("MPI_Initialized", ffi::MPI_Initialized(&raw mut initialized))?;
        check("MPI_Finalized", ffi::MPI_Finalized(&raw mut finalized))?;
    }
    let expected = "initialised and not finalised";
    if initialized == 0 {
        return Err(Error::invalid("MPI", "not initialised", expected)
            .hint("call MPI_Init_thread with MPI_THREAD_MULTIPLE first"));
    }
    if finalized != 0 {
        return Err(Error::invalid("MPI", "finalised", expected).hint("drop transports and ranks before MPI_Finalize"));
    }
    Ok(())
}

/// Refuses an MPI that may not be called by several threads at a time.
pub(super) fn multiple_threads() -> Result<()> {
    let mut provided = 0;
    // SAFETY: MPI is usable, as the caller has checked.
    check("MPI_Query_thread", unsafe { ffi::MPI_Query_thread(&raw mut provided) })?;
    // SAFETY: constants of the library.
    let levels = unsafe {
        [
            (ffi::RSMPI_THREAD_SINGLE, "MPI_THREAD_SINGLE"),
            (ffi::RSMPI_THREAD_FUNNELED, "MPI_THREAD_FUNNELED"),
            (ffi::RSMPI_THREAD_SERIALIZED, "MPI_THREAD_SERIALIZED"),
            (ffi::RSMPI_THREAD_MULTIPLE, "MPI_THREAD_MULTIPLE"),
        ]
    };
    if provided >= levels[3].0 {
        return Ok(());
    }
    let found = levels.iter().find(|l| l.0 == provided).map_or("another level", |l| l.1);
    Err(Error::invalid("MPI's thread level", found, levels[3].1)
        .hint("a rank calls MPI from a thread of its own: ask MPI_Init_thread for MPI_THREAD_MULTIPLE"))
}

/// Environment variables with the number of processes that a launcher starts: Open MPI's, and PMI's (MPICH, Slurm).
const LAUNCHED: [&str; 2] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"];

/// Refuses a process that is one of several for its launcher and the only one for MPI. Another MPI's launcher started
/// it, and each process would do all of the work, as a world of its own.
pub(super) fn own_launcher() -> Result<()> {
    let mut world = 0;
    // SAFETY: a constant of the library; MPI is usable, as the caller has checked.
    check("MPI_Comm_size", unsafe { ffi::MPI_Comm_size(ffi::RSMPI_COMM_WORLD, &raw mut world) })?;
    let launched = |name| std::env::var(name).ok()?.parse().ok().filter(|&n: &u32| n > 1).map(|n| (name, n));
    match LAUNCHED.into_iter().find_map(launched) {
        Some((name, n)) if world == 1 => {
            let expected = std::format!("{n}, as many as the launcher started ({name})");
            Err(Error::invalid("MPI_COMM_WORLD", "1 process", expected)
                .hint("start the program with the mpirun of the MPI that it was built with"))
        }
        _ => Ok(()),
    }
}
