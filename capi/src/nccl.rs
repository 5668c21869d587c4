// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks over NCCL: a unique id, and a transport made from one or from a communicator that a framework has.

use core::ffi::c_void;
#[cfg(feature = "nccl")]
use core::mem::MaybeUninit;

#[cfg(feature = "nccl")]
use super::{dlpack::device, handle, transport::Any, transport::deadline};
use super::{
    input::{array, array_mut, flag, result},
    transport::cpattn_transport,
};
use cpattn::Error;
#[cfg(feature = "nccl")]
use cpattn::transport::nccl::{Nccl, OnFailure, UniqueId};

/// Bytes of a unique id.
const ID: usize = 128;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_nccl_unique_id(unique_id: *mut u8) -> i32 {
    boundary!({
        let out = given!(array_mut("unique_id", unique_id, ID));
        with_feature!("nccl", cpattn_nccl_unique_id, (out), {
            out.copy_from_slice(&UniqueId::new()?.to_bytes().map(MaybeUninit::new));
        });
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_nccl_group(
    unique_id: *const u8, comm: *mut c_void, may_abort: i32, rank: u32, world: u32, device_id: i32, deadline_ms: u64,
    transport: *mut *mut cpattn_transport,
) -> i32 {
    boundary!({
        let out = given!(result("transport", transport));
        let may_abort = flag("may_abort", may_abort)?;
        if unique_id.is_null() == comm.is_null() {
            let found = if comm.is_null() { "NULL, and so is comm" } else { "given, and so is comm" };
            return Err(Error::invalid("unique_id", found, "one of the two").into());
        }
        if may_abort && comm.is_null() {
            let expected = "0 with a unique_id: such a communicator is the transport's own";
            return Err(Error::invalid("may_abort", 1, expected).into());
        }
        with_feature!("nccl", cpattn_nccl_group, (out, rank, world, device_id, deadline_ms, array::<u8>), {
            let (rank, world, deadline) = (rank as usize, world as usize, deadline(deadline_ms)?);
            let cuda = device("device_id", device_id)?;
            let end = if comm.is_null() {
                let mut id = [0; ID];
                id.copy_from_slice(given!(array("unique_id", unique_id, ID)));
                Nccl::new(&UniqueId::from_bytes(id), rank, world, &cuda, deadline)?
            } else {
                let on_failure = if may_abort { OnFailure::Abort } else { OnFailure::Leave };
                // SAFETY: the header's promise: a communicator that lives as long as the transport, and that others
                // leave alone meanwhile.
                unsafe { Nccl::from_raw(comm, rank, world, &cuda, deadline, on_failure) }?
            };
            out.write(handle::create(Any::Device(std::sync::Arc::new(end))));
        });
    })
}
