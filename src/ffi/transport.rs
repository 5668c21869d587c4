// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transports: the in-process group, and a table of the caller's functions.

use core::{
    ffi::{c_char, c_void},
    ops::Range,
};
use std::{
    format,
    sync::{Mutex, PoisonError},
    time::Duration,
    vec::Vec,
};

use super::{
    handle::{self, Handle, Kind},
    input::{array_mut, result, sized},
    status::boundary,
};
use crate::{
    error::{Cause, Error, Result},
    transport::{Label, Message, Transport, local},
};

/// Threads of one process beyond this number are a mistake.
const MOST_THREADS: u32 = 4096;

/// Layout as [`Message`], which is handed to the caller's functions as it is.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct cpattn_message {
    pub peer: usize,
    pub data: *mut c_void,
    pub bytes: usize,
}

static_assertions::assert_eq_size!(cpattn_message, Message);
static_assertions::const_assert_eq!(core::mem::offset_of!(cpattn_message, peer), core::mem::offset_of!(Message, peer));
static_assertions::const_assert_eq!(core::mem::offset_of!(cpattn_message, data), core::mem::offset_of!(Message, ptr));
static_assertions::const_assert_eq!(
    core::mem::offset_of!(cpattn_message, bytes),
    core::mem::offset_of!(Message, bytes)
);

#[derive(Clone, Copy)]
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
            blame: *mut i64,
        ) -> i32,
    >,
    pub poll: Option<unsafe extern "C" fn(context: *mut c_void, blame: *mut i64) -> i32>,
    pub abort: Option<unsafe extern "C" fn(context: *mut c_void)>,
    pub release: Option<unsafe extern "C" fn(context: *mut c_void)>,
}

/// The caller's functions as a transport.
#[doc(hidden)]
pub struct Table {
    table: cpattn_transport_table,
    /// Room for an all-gather: runs allocate nothing.
    numbers: Mutex<Vec<u64>>,
}

// SAFETY: the header says on which threads each function is called, and that `context` may be used there.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

impl Table {
    fn outcome(&self, status: i32, blame: i64, label: Label) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let (rank, world) = (self.table.rank as usize, i64::from(self.table.world));
        let peer = if (0..world).contains(&blame) { blame as usize } else { rank };
        Err(Error::Peer { rank, operation: label.operation, step: label.step, peer, cause: Cause::Failed })
    }
}

impl Transport for Table {
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
        // A function that writes nothing must not look like agreement.
        all.fill(!fingerprint);
        let mut blame = -1;
        let status = match self.table.agree {
            // SAFETY: the table's own functions, as the header describes them; `all` has room for the group.
            Some(agree) => unsafe {
                let (first, end) = (group.start as u32, group.end as u32);
                agree(self.table.context, first, end, fingerprint, all.as_mut_ptr(), &raw mut blame)
            },
            None => 1,
        };
        self.outcome(status, blame, Label { operation: "agree", step: 0 })?;
        match group.clone().zip(all.iter()).find(|&(_, &theirs)| theirs != fingerprint) {
            Some((peer, &theirs)) => Err(Error::Disagreement { rank, peer, ours: fingerprint, theirs }),
            None => Ok(()),
        }
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        // The name with a zero at its end; names of operations are short.
        let mut name = [0u8; 32];
        for (to, &from) in name[..31].iter_mut().zip(label.operation.as_bytes()) {
            *to = from;
        }
        let mut blame = -1;
        let status = match self.table.exchange {
            // SAFETY: as in `agree`; a Message has the layout of cpattn_message; the lists live through the call.
            Some(exchange) => unsafe {
                exchange(
                    self.table.context,
                    name.as_ptr().cast(),
                    label.step,
                    sends.as_ptr().cast(),
                    sends.len(),
                    recvs.as_ptr().cast(),
                    recvs.len(),
                    &raw mut blame,
                )
            },
            None => 1,
        };
        self.outcome(status, blame, label)
    }

    fn poll(&self) -> Result<()> {
        let mut blame = -1;
        let status = match self.table.poll {
            // SAFETY: as in `agree`.
            Some(poll) => unsafe { poll(self.table.context, &raw mut blame) },
            None => 1,
        };
        self.outcome(status, blame, Label { operation: "poll", step: 0 })
    }

    fn abort(&self, _cause: Cause) {
        if let Some(abort) = self.table.abort {
            // SAFETY: as in `agree`.
            unsafe { abort(self.table.context) };
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        if let Some(release) = self.table.release {
            // SAFETY: as in `agree`; nothing calls the table afterwards.
            unsafe { release(self.table.context) };
        }
    }
}

/// Either kind, until it becomes a rank.
#[doc(hidden)]
pub enum Any {
    Local(local::Local),
    Table(Table),
}

pub type cpattn_transport = Handle<Any>;

impl Kind for Any {
    const NAME: &'static str = "transport";
    const MAGIC: u64 = u64::from_le_bytes(*b"cpatWIRE");
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_local_group(
    world: u32,
    deadline_ms: u64,
    transports: *mut *mut cpattn_transport,
) -> i32 {
    boundary!({
        if world == 0 || world > MOST_THREADS {
            return Err(Error::invalid("world", world, format!("1 to {MOST_THREADS}")).into());
        }
        if deadline_ms == 0 {
            return Err(Error::invalid("deadline_ms", 0, "at least 1").into());
        }
        // SAFETY: the header's promise about arrays.
        let out = unsafe { array_mut("transports", transports, world as usize) }?;
        for (to, rank) in out.iter_mut().zip(local::group(world as usize, Duration::from_millis(deadline_ms))?) {
            to.write(handle::create(Any::Local(rank)));
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_transport_create(
    table: *const cpattn_transport_table,
    transport: *mut *mut cpattn_transport,
) -> i32 {
    boundary!({
        // SAFETY: the header's promise about structs and results.
        let (table, out) = unsafe { (sized("table", table)?, result("transport", transport)?) };
        if table.world == 0 || table.world > 1 << 20 {
            return Err(Error::invalid("table.world", table.world, "1 to 1048576").into());
        }
        if table.rank >= table.world {
            return Err(Error::invalid("table.rank", table.rank, format!("below the world of {}", table.world)).into());
        }
        for (name, missing) in [
            ("table.agree", table.agree.is_none()),
            ("table.exchange", table.exchange.is_none()),
            ("table.poll", table.poll.is_none()),
            ("table.abort", table.abort.is_none()),
        ] {
            if missing {
                return Err(Error::invalid(name, "NULL", "a function").into());
            }
        }
        let numbers = Mutex::new(std::vec![0; table.world as usize]);
        out.write(handle::create(Any::Table(Table { table, numbers })));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_transport_destroy(transport: *mut cpattn_transport) -> i32 {
    // SAFETY: the header's promise about handles.
    boundary!({ unsafe { handle::destroy(transport) } })
}
