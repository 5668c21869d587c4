// SPDX-License-Identifier: MIT OR Apache-2.0
//! A transport made of a table of the caller's functions, for frameworks with their own communicator.
//!
//! For a rank on the CPU a call of `exchange` moves the batch. For a rank on a device it enqueues the batch on the
//! given stream, which belongs to the rank and which the runtime orders by events; later failures are reported by
//! `poll`.

use core::{
    ffi::{c_char, c_void},
    ops::Range,
    ptr::null_mut,
};
#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::sync::{Mutex, PoisonError};

use super::trace;
use cpattn::{
    Cause, Error, Result,
    call::RawStream,
    transport::{Label, Message, Transport},
};
#[cfg(feature = "cuda")]
use cpattn::{
    kernel::cuda::{Cuda, OwnStream},
    transport::DeviceTransport,
};

/// Has the layout of [`Message`]: lists are passed to the caller's functions without a copy.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_message {
    pub peer: usize,
    pub data: *mut c_void,
    pub bytes: usize,
}

same_layout!(cpattn_message, Message: peer = peer, data = ptr, bytes = bytes);

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_transport_table {
    pub struct_size: usize,
    pub context: *mut c_void,
    pub rank: u32,
    pub world: u32,
    pub agree: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            first: u32,
            end: u32,
            number: u64,
            all: *mut u64,
            blame: *mut i64,
        ) -> i32,
    >,
    pub exchange: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            operation: *const c_char,
            step: u32,
            sends: *const cpattn_message,
            send_count: usize,
            recvs: *const cpattn_message,
            recv_count: usize,
            stream: *mut c_void,
            blame: *mut i64,
        ) -> i32,
    >,
    pub poll: Option<unsafe extern "C" fn(context: *mut c_void, blame: *mut i64) -> i32>,
    pub abort: Option<unsafe extern "C" fn(context: *mut c_void)>,
    pub release: Option<unsafe extern "C" fn(context: *mut c_void)>,
}

versioned! { cpattn_transport_table through release; }

/// A table without one of its functions is refused (`functions!`).
pub(super) const CHECKED: &str = "checked when the transport was made";

/// Refuses a rank outside its world.
pub(super) fn place(rank: u32, world: u32) -> Result<()> {
    if world == 0 || world > 1 << 20 {
        return Err(Error::invalid("table.world", world, "1 to 1048576"));
    }
    if rank >= world {
        return Err(Error::invalid("table.rank", rank, format!("below the world of {world}")));
    }
    Ok(())
}

/// The caller's functions as a transport.
#[doc(hidden)]
#[derive(Debug)]
pub struct TableTransport {
    table: cpattn_transport_table,
    /// Memory for an all-gather, so that runs allocate nothing.
    numbers: Mutex<Vec<u64>>,
}

// SAFETY: the header says on which threads each function is called, and that `context` may be used there.
unsafe impl Send for TableTransport {}
// SAFETY: the header says on which threads each function is called, and that `context` may be used there.
unsafe impl Sync for TableTransport {}

impl TableTransport {
    /// The result of one of the caller's functions.
    fn outcome(&self, function: &'static str, code: i32, blame: i64, label: Label) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let (rank, world) = (self.table.rank as usize, i64::from(self.table.world));
        let peer = if (0..world).contains(&blame) { blame as usize } else { rank };
        Err(label.error(rank, peer, Cause::Returned { function, code }))
    }

    pub(super) fn new(table: cpattn_transport_table) -> Self {
        Self { table, numbers: Mutex::new(vec![0; table.world as usize]) }
    }

    /// Moves a batch, in the order of `stream` where there is one.
    ///
    /// # Safety
    /// As [`Transport::exchange`].
    unsafe fn exchange_on(&self, label: Label, sends: &[Message], recvs: &[Message], stream: RawStream) -> Result<()> {
        let (mut blame, name, step) = (-1, trace::name(label.operation), label.step);
        let (exchange, context) = (self.table.exchange.expect(CHECKED), self.table.context);
        let (send_list, recv_list) = (sends.as_ptr().cast(), recvs.as_ptr().cast());
        // SAFETY: the table's own function, as the header describes it; a Message has the layout of cpattn_message; the
        // lists are valid during the call.
        let status = unsafe {
            exchange(
                context,
                name.as_ptr(),
                step,
                send_list,
                sends.len(),
                recv_list,
                recvs.len(),
                stream,
                &raw mut blame,
            )
        };
        self.outcome("exchange", status, blame, label)
    }
}

impl Transport for TableTransport {
    fn rank(&self) -> usize {
        self.table.rank as usize
    }

    fn world(&self) -> usize {
        self.table.world as usize
    }

    fn agree(&self, group: Range<usize>, fingerprint: u64) -> Result<()> {
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        let (world, rank) = (self.table.world as usize, self.table.rank as usize);
        if group.end > world || !group.contains(&rank) {
            return Err(Error::invalid(
                "group",
                format!("{group:?}"),
                format!("within 0..{world} and around rank {rank}"),
            ));
        }
        let all = &mut numbers[..group.len()];
        // If the function writes nothing, the ranks must not seem to agree.
        all.fill(!fingerprint);
        let mut blame = -1;
        let (agree, first, end) = (self.table.agree.expect(CHECKED), group.start as u32, group.end as u32);
        // SAFETY: the table's own function, as the header describes it; `all` has room for the group.
        let status = unsafe { agree(self.table.context, first, end, fingerprint, all.as_mut_ptr(), &raw mut blame) };
        self.outcome("agree", status, blame, Label::new("agree", 0))?;
        match group.clone().zip(all.iter()).find(|&(_, &theirs)| theirs != fingerprint) {
            Some((peer, &theirs)) => Err(Error::disagreement(rank, peer, fingerprint, theirs)),
            None => Ok(()),
        }
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        // SAFETY: the lists are valid until the batch is complete: the contract of `exchange`.
        unsafe { self.exchange_on(label, sends, recvs, null_mut()) }
    }

    fn poll(&self) -> Result<()> {
        let mut blame = -1;
        // SAFETY: as in `agree`.
        let status = unsafe { self.table.poll.expect(CHECKED)(self.table.context, &raw mut blame) };
        self.outcome("poll", status, blame, Label::new("poll", 0))
    }

    fn abort(&self, _cause: Cause) {
        // SAFETY: as in `agree`.
        unsafe { self.table.abort.expect(CHECKED)(self.table.context) };
    }
}

impl Drop for TableTransport {
    fn drop(&mut self) {
        if let Some(release) = self.table.release {
            // SAFETY: as in `agree`; nothing calls the table afterwards.
            unsafe { release(self.table.context) };
        }
    }
}

/// The caller's functions, given a stream.
#[cfg(feature = "cuda")]
pub(super) struct DeviceTableTransport {
    // Dropped first: the table's `release` destroys objects that may still use the stream.
    table: Arc<TableTransport>,
    stream: OwnStream,
    cuda: Arc<Cuda>,
}

#[cfg(feature = "cuda")]
impl DeviceTableTransport {
    pub(super) fn new(table: Arc<TableTransport>, cuda: Arc<Cuda>) -> Result<Self> {
        Ok(Self { table, stream: cuda.new_stream()?, cuda })
    }
}

#[cfg(feature = "cuda")]
impl Transport for DeviceTableTransport {
    fn rank(&self) -> usize {
        self.table.rank()
    }

    fn world(&self) -> usize {
        self.table.world()
    }

    fn agree(&self, group: Range<usize>, fingerprint: u64) -> Result<()> {
        self.table.agree(group, fingerprint)
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        // SAFETY: the lists are valid until the batch is complete: the contract of `exchange`.
        unsafe { self.table.exchange_on(label, sends, recvs, self.stream.handle().cast()) }
    }

    fn poll(&self) -> Result<()> {
        self.table.poll()?;
        self.stream.query().map(|_| ())
    }

    fn abort(&self, cause: Cause) {
        self.table.abort(cause);
    }
}

#[cfg(feature = "cuda")]
impl DeviceTransport for DeviceTableTransport {
    fn device(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    fn stream(&self) -> RawStream {
        self.stream.handle()
    }

    fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }
}
