// SPDX-License-Identifier: MIT OR Apache-2.0
//! The functions that `libnccl.so.2` exports.

use crate::codes::{Failure, INVALID_ARGUMENT, Outcome, SUCCESS, Type, describe, last};
use crate::comm::{Comm, find, forget};
use crate::config::Config;
use crate::group::{self, Call, result};
use crate::reduce::Reduction;
use crate::rendezvous::UniqueId;
use crate::work::{Local, Message};
use std::ffi::{c_char, c_int, c_void};

/// `ncclConfig_t`, as far as it is read; longer ones are fine.
#[repr(C)]
pub struct CommConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

const CONFIG_MAGIC: u32 = 0xcafe_beef;
const UNDEFINED: c_int = c_int::MIN;

/// Writes through a result pointer.
unsafe fn put<T>(p: *mut T, name: &str, v: T) -> Outcome<c_int> {
    if p.is_null() {
        return Err(Failure::new(INVALID_ARGUMENT, format!("{name} is null")));
    }
    // SAFETY: not null; that it points to room for a T is the caller's part of NCCL's contract.
    unsafe { p.write_unaligned(v) };
    Ok(SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the caller's result pointer.
    result(unsafe { put(version, "version", Config::from_env().version) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    describe(code).as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLastError(_comm: *mut c_void) -> *const c_char {
    last()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(out: *mut UniqueId) -> c_int {
    // SAFETY: the caller's result pointer.
    result(UniqueId::new().and_then(|id| unsafe { put(out, "uniqueId", id) }))
}

fn make(out: *mut *mut c_void, world: c_int, id: UniqueId, rank: c_int, blocking: bool) -> Outcome<c_int> {
    if world < 1 || rank < 0 || rank >= world {
        let why = format!("rank is {rank}, expected one of the {world} ranks that nranks says");
        return Err(Failure::new(INVALID_ARGUMENT, why));
    }
    // SAFETY: the caller's result pointer, tried before anything is made.
    unsafe { put(out, "comm", std::ptr::null_mut()) }?;
    let (handle, comm) = Comm::new(world as usize, rank as usize, blocking)?;
    // SAFETY: as above. A communicator that is made in the background, or in a group, has its handle at once.
    unsafe { put(out, "comm", handle as *mut c_void) }?;
    let done = group::make(comm, id);
    if done.is_err() && blocking {
        forget(handle);
        // SAFETY: as above.
        unsafe { put(out, "comm", std::ptr::null_mut()) }?;
    }
    done
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(out: *mut *mut c_void, world: c_int, id: UniqueId, rank: c_int) -> c_int {
    result(make(out, world, id, rank, true))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    out: *mut *mut c_void,
    world: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const CommConfig,
) -> c_int {
    // SAFETY: null or the caller's configuration, which says its own size first.
    let config = unsafe { config.as_ref() };
    if let Some(c) = config
        && (c.magic != CONFIG_MAGIC || c.size < size_of::<CommConfig>())
    {
        let why = format!("config has magic {:#x}, expected {CONFIG_MAGIC:#x} of NCCL_CONFIG_INITIALIZER", c.magic);
        return result(Err(Failure::new(INVALID_ARGUMENT, why)));
    }
    let blocking = match config.map_or(UNDEFINED, |c| c.blocking) {
        0 => false,
        1 | UNDEFINED => true,
        other => {
            let why = format!("config.blocking is {other}, expected 0 or 1");
            return result(Err(Failure::new(INVALID_ARGUMENT, why)));
        }
    };
    result(make(out, world, id, rank, blocking))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(comm: *mut c_void, count: *mut c_int) -> c_int {
    // SAFETY: the caller's result pointer.
    result(find(comm as usize).and_then(|c| unsafe { put(count, "count", c.world as c_int) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(comm: *mut c_void, rank: *mut c_int) -> c_int {
    // SAFETY: the caller's result pointer.
    result(find(comm as usize).and_then(|c| unsafe { put(rank, "rank", c.shared.rank as c_int) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCuDevice(comm: *mut c_void, device: *mut c_int) -> c_int {
    // SAFETY: the caller's result pointer.
    result(find(comm as usize).and_then(|c| unsafe { put(device, "device", c.device.ordinal) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: *mut c_void, code: *mut c_int) -> c_int {
    // SAFETY: the caller's result pointer.
    result(find(comm as usize).and_then(|c| unsafe { put(code, "asyncError", c.ask()) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(comm: *mut c_void) -> c_int {
    result(find(comm as usize).and_then(|c| c.finalise()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(comm: *mut c_void) -> c_int {
    let done = find(comm as usize).and_then(|c| {
        c.settle()?;
        forget(comm as usize);
        c.abort();
        Ok(SUCCESS)
    });
    result(done)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: *mut c_void) -> c_int {
    let done = find(comm as usize).map(|c| {
        forget(comm as usize);
        c.abort();
        SUCCESS
    });
    result(done)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupStart() -> c_int {
    group::start();
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupEnd() -> c_int {
    result(group::end())
}

fn size(count: usize, element: c_int) -> Outcome<usize> {
    let bytes = Type::new(element)?.bytes();
    let size = count.checked_mul(bytes).filter(|&n| n <= isize::MAX as usize);
    size.ok_or_else(|| Failure::new(INVALID_ARGUMENT, format!("count is {count}, of {bytes} bytes each: too many")))
}

fn message(
    ptr: *const c_void,
    count: usize,
    element: c_int,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
    sends: bool,
) -> Outcome<c_int> {
    let bytes = size(count, element)?;
    let c = find(comm as usize)?;
    let peer = usize::try_from(peer).ok().filter(|&p| p < c.world);
    let peer = peer.ok_or_else(|| Failure::new(INVALID_ARGUMENT, format!("peer is no rank below {}", c.world)))?;
    if ptr.is_null() && bytes > 0 {
        return Err(Failure::new(INVALID_ARGUMENT, "the buffer is null"));
    }
    let messages = vec![Message { sends, peer, collective: false, bytes, ptr: Some(ptr as u64) }];
    group::add(Call { comm: comm as usize, stream: stream as usize, messages, local: Vec::new() })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    from: *const c_void,
    count: usize,
    element: c_int,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    result(message(from, count, element, peer, comm, stream, true))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    to: *mut c_void,
    count: usize,
    element: c_int,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    result(message(to, count, element, peer, comm, stream, false))
}

/// Every rank sends the same bytes to every other; `into` says where those of a rank go.
fn with_every_rank(c: &Comm, from: u64, bytes: usize, into: impl Fn(usize) -> Option<u64>) -> Vec<Message> {
    let others = (0..c.world).filter(|&r| r != c.shared.rank);
    let both = |peer| {
        [(true, Some(from)), (false, into(peer))].map(|(sends, ptr)| Message {
            sends,
            peer,
            collective: true,
            bytes,
            ptr,
        })
    };
    others.flat_map(both).collect()
}

fn present(from: *const c_void, to: *mut c_void, bytes: usize) -> Outcome {
    if bytes > 0 && (from.is_null() || to.is_null()) {
        return Err(Failure::new(INVALID_ARGUMENT, "a buffer is null"));
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    element: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let gather = || {
        let (bytes, c) = (size(count, element)?, find(comm as usize)?);
        present(from, to, bytes)?;
        let place = |rank: usize| to as u64 + (rank * bytes) as u64;
        let messages = with_every_rank(&c, from as u64, bytes, |rank| Some(place(rank)));
        let own = place(c.shared.rank);
        let copy = Local::Copy { to: own, from: from as u64, bytes };
        let local = if own == from as u64 { Vec::new() } else { vec![copy] };
        group::add(Call { comm: comm as usize, stream: stream as usize, messages, local })
    };
    result(gather())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    element: c_int,
    op: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let reduce = || {
        let (bytes, c) = (size(count, element)?, find(comm as usize)?);
        let reduction = Reduction::new(op, Type::new(element)?)?;
        present(from, to, bytes)?;
        let messages = with_every_rank(&c, from as u64, bytes, |_| None);
        let arrived = messages.iter().enumerate().filter(|(_, m)| !m.sends).map(|(k, m)| (m.peer, k)).collect();
        let local = vec![Local::Reduce { reduction, to: to as u64, from: from as u64, bytes, arrived }];
        group::add(Call { comm: comm as usize, stream: stream as usize, messages, local })
    };
    result(reduce())
}
