// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks as processes, over an MPI communicator of the caller's.

use core::ffi::c_void;

#[cfg(feature = "mpi")]
use super::{handle, transport::Any};
use super::{
    input::result,
    transport::{cpattn_transport, deadline},
};
#[cfg(feature = "mpi")]
use cpattn::transport::mpi::Mpi;
use cpattn::{Error, Result};

fn check_comm(comm: *const c_void) -> Result<()> {
    if comm.is_null() {
        return Err(Error::invalid("comm", "NULL", "the address of an MPI_Comm"));
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_mpi_group(
    comm: *const c_void, deadline_ms: u64, transport: *mut *mut cpattn_transport,
) -> i32 {
    boundary!({
        let deadline = deadline(deadline_ms)?;
        let out = given!(result("transport", transport));
        check_comm(comm)?;
        with_feature!("mpi", cpattn_mpi_group, (deadline, out), {
            // SAFETY: the header's promise that this is the address of a communicator, of the MPI of this build.
            let end = unsafe { Mpi::from_raw(core::ptr::read(comm.cast()), deadline) }?;
            out.write(handle::create(Any::Host(std::sync::Arc::new(end))));
        });
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_mpi_ranks_per_node(comm: *const c_void, ranks_per_node: *mut u32) -> i32 {
    boundary!({
        let out = given!(result("ranks_per_node", ranks_per_node));
        check_comm(comm)?;
        with_feature!("mpi", cpattn_mpi_ranks_per_node, (out), {
            // SAFETY: the header's promise that this is the address of a communicator, of the MPI of this build.
            let ranks = unsafe { Mpi::ranks_per_node_of_raw(core::ptr::read(comm.cast())) }?;
            out.write(ranks as u32);
        });
    })
}
