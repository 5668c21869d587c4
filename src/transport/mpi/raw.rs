// SPDX-License-Identifier: MIT OR Apache-2.0
//! The calls of MPI that the transport makes, with Rust's results.
//!
//! Handles of MPI are numbers in one implementation and addresses in another; here they are only passed back. Every
//! call is made with `MPI_THREAD_MULTIPLE`, which `Mpi::new` asks for, so any thread may make it.

use std::{
    ffi::{c_char, c_int, c_void},
    ptr,
    string::{String, ToString},
    sync::{Mutex, PoisonError},
};

use ::mpi::ffi::{self, MPI_Comm, MPI_Errhandler};

use crate::error::{Error, Result};

/// A call that MPI refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refused {
    pub call: &'static str,
    pub code: c_int,
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        let Refused { call, code } = refused;
        Self::Device { call, code: code.into(), message: text(code) }
    }
}

pub(super) fn check(call: &'static str, code: c_int) -> Result<(), Refused> {
    if code == ffi::MPI_SUCCESS as c_int { Ok(()) } else { Err(Refused { call, code }) }
}

/// MPI's text for an error code.
fn text(code: c_int) -> String {
    let mut room = [0 as c_char; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: the room has the size that MPI asks for, and one byte more.
    let status = unsafe { ffi::MPI_Error_string(code, room.as_mut_ptr(), &raw mut len) };
    if status != ffi::MPI_SUCCESS as c_int {
        return "unknown to MPI".to_string();
    }
    let bytes: std::vec::Vec<u8> =
        room.iter().map(|&c| c as u8).take(len.clamp(0, room.len() as c_int) as usize).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A communicator.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Comm(pub(super) MPI_Comm);

// SAFETY: a handle; MPI_THREAD_MULTIPLE allows every thread to use it.
unsafe impl Send for Comm {}
// SAFETY: a handle; MPI_THREAD_MULTIPLE allows every thread to use it.
unsafe impl Sync for Comm {}

impl Comm {
    /// MPI's null.
    pub(super) fn null() -> Self {
        // SAFETY: a constant of the library.
        Self(unsafe { ffi::RSMPI_COMM_NULL })
    }

    /// Refuses a null communicator, and one that joins two groups.
    ///
    /// # Safety
    /// `comm` is a live communicator or MPI's null, and MPI is usable.
    pub(super) unsafe fn new(comm: MPI_Comm) -> Result<Self> {
        if comm == Self::null().0 {
            return Err(Error::invalid("comm", "MPI_COMM_NULL", "a communicator"));
        }
        let mut inter = 0;
        // SAFETY: `comm` is live or MPI's null, and MPI is usable (the contract of this function).
        check("MPI_Comm_test_inter", unsafe { ffi::MPI_Comm_test_inter(comm, &raw mut inter) })?;
        if inter != 0 {
            return Err(Error::invalid("comm", "an intercommunicator", "a communicator of one group")
                .hint("merge the groups with MPI_Intercomm_merge"));
        }
        Ok(Self(comm))
    }

    /// This process's rank, and how many there are.
    pub(super) fn place(self) -> Result<(usize, usize)> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: a live communicator.
        unsafe {
            check("MPI_Comm_rank", ffi::MPI_Comm_rank(self.0, &raw mut rank))?;
            check("MPI_Comm_size", ffi::MPI_Comm_size(self.0, &raw mut size))?;
        }
        Ok((rank as usize, size as usize))
    }

    /// For each rank, the lowest rank on its node. A collective call.
    pub(super) fn nodes(self) -> Result<std::vec::Vec<u64>> {
        let (rank, world) = self.place()?;
        // The communicator of the node inherits this error handler.
        let _errors = self.return_errors_for_now()?;
        let mut node = Self::null();
        // SAFETY: a live communicator, constants of the library, and room for a handle.
        check("MPI_Comm_split_type", unsafe {
            let kind = ffi::RSMPI_COMM_TYPE_SHARED;
            ffi::MPI_Comm_split_type(self.0, kind, rank as c_int, ffi::RSMPI_INFO_NULL, &raw mut node.0)
        })?;
        let (mut lowest, mut nodes) = (rank as u64, std::vec![0u64; world]);
        // SAFETY: live communicators, and room for as many numbers as are sent.
        let gathered = unsafe {
            check("MPI_Bcast", ffi::MPI_Bcast((&raw mut lowest).cast(), 1, ffi::RSMPI_UINT64_T, 0, node.0)).and_then(
                |()| {
                    let (from, to) = ((&raw const lowest).cast(), nodes.as_mut_ptr().cast());
                    let kind = ffi::RSMPI_UINT64_T;
                    check("MPI_Allgather", ffi::MPI_Allgather(from, 1, kind, to, 1, kind, self.0))
                },
            )
        };
        node.free();
        gathered?;
        Ok(nodes)
    }

    /// Makes failed calls return an error instead of ending the job.
    pub(super) fn return_errors(self) -> Result<(), Refused> {
        // SAFETY: a live communicator of our own and a constant of the library.
        check("MPI_Comm_set_errhandler", unsafe { ffi::MPI_Comm_set_errhandler(self.0, ffi::RSMPI_ERRORS_RETURN) })
    }

    /// Makes failed calls on a communicator of the caller's return an error instead of ending the job, as long as the
    /// result lives.
    pub(super) fn return_errors_for_now(self) -> Result<ErrorsReturn, Refused> {
        // SAFETY: a constant of the library.
        let mut before = unsafe { ffi::RSMPI_ERRORS_RETURN };
        // SAFETY: a live communicator, and room for a handle.
        check("MPI_Comm_get_errhandler", unsafe { ffi::MPI_Comm_get_errhandler(self.0, &raw mut before) })?;
        let guard = ErrorsReturn { comm: self, before };
        self.return_errors()?;
        Ok(guard)
    }

    /// Whether a message with this tag can be received now. Lets MPI work.
    pub(super) fn has_arrived(self, tag: c_int) -> Result<bool, Refused> {
        let mut flag = 0;
        // SAFETY: a live communicator, and constants of the library.
        check("MPI_Iprobe", unsafe {
            ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, tag, self.0, &raw mut flag, ffi::RSMPI_STATUS_IGNORE)
        })?;
        Ok(flag != 0)
    }

    /// The value that this crate keeps on the communicator: made by `new` when it is asked for the first time, and
    /// dropped when the communicator is freed. Duplicates do not inherit it.
    ///
    /// # Safety
    /// Every call is for the same type, and the communicator is not freed while the result is used.
    pub(super) unsafe fn attribute<'a, T: Send + Sync + 'static>(
        self,
        new: impl FnOnce() -> T,
    ) -> Result<&'a T, Refused> {
        static KEY: Mutex<Option<c_int>> = Mutex::new(None);
        let mut key = KEY.lock().unwrap_or_else(PoisonError::into_inner);
        let key = match *key {
            Some(made) => made,
            None => {
                let mut made = 0;
                // SAFETY: two functions that live as long as the program, and room for the key.
                check("MPI_Comm_create_keyval", unsafe {
                    ffi::MPI_Comm_create_keyval(
                        Some(not_copied),
                        Some(drop_attribute::<T>),
                        &raw mut made,
                        ptr::null_mut(),
                    )
                })?;
                *key.insert(made)
            }
        };
        let (mut value, mut flag) = (ptr::null_mut::<c_void>(), 0);
        // SAFETY: a live communicator, a live key, and room for an address.
        check("MPI_Comm_get_attr", unsafe {
            ffi::MPI_Comm_get_attr(self.0, key, (&raw mut value).cast(), &raw mut flag)
        })?;
        if flag == 0 {
            value = Box::into_raw(Box::new(new())).cast();
            // SAFETY: a live communicator and a live key, whose function drops the value at the address.
            let set = check("MPI_Comm_set_attr", unsafe { ffi::MPI_Comm_set_attr(self.0, key, value) });
            if let Err(refused) = set {
                // SAFETY: made by Box above; MPI has refused to keep it.
                drop(unsafe { Box::from_raw(value.cast::<T>()) });
                return Err(refused);
            }
        }
        // SAFETY: made by Box above, in this call or an earlier one, for the same type; it is dropped with the
        // communicator, which lives (both the contract of this function).
        Ok(unsafe { &*value.cast::<T>() })
    }

    /// Frees the communicator.
    pub(super) fn free(mut self) {
        // SAFETY: our own duplicate, with no operation in progress. An error is ignored.
        let _ = unsafe { ffi::MPI_Comm_free(&raw mut self.0) };
    }
}

/// A duplicate does not inherit the attribute.
unsafe extern "C" fn not_copied(
    _comm: MPI_Comm,
    _key: c_int,
    _extra: *mut c_void,
    _value: *mut c_void,
    _copy: *mut c_void,
    flag: *mut c_int,
) -> c_int {
    // SAFETY: MPI gives room for the answer.
    unsafe { flag.write(0) };
    ffi::MPI_SUCCESS as c_int
}

/// The communicator is freed, and its attribute too.
unsafe extern "C" fn drop_attribute<T>(_comm: MPI_Comm, _key: c_int, value: *mut c_void, _extra: *mut c_void) -> c_int {
    // SAFETY: made by Box in `Comm::attribute` for this type, and used by nothing any more (the contract of
    // `attribute`).
    drop(unsafe { Box::from_raw(value.cast::<T>()) });
    ffi::MPI_SUCCESS as c_int
}

/// Restores the error handler of a communicator of the caller's.
pub(super) struct ErrorsReturn {
    comm: Comm,
    before: MPI_Errhandler,
}

impl Drop for ErrorsReturn {
    fn drop(&mut self) {
        // SAFETY: a live communicator, and the handle that `MPI_Comm_get_errhandler` gave, which is not used after
        // this.
        unsafe {
            let _ = ffi::MPI_Comm_set_errhandler(self.comm.0, self.before);
            let _ = ffi::MPI_Errhandler_free(&raw mut self.before);
        }
    }
}
