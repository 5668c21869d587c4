// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies and fills, and how much of each is over when the call returns.
//!
//! The driver's manual ("API synchronization behavior") promises less than the names do, and nothing more is given
//! here:
//!
//! | call | when it returns |
//! |---|---|
//! | `cuMemcpyHtoD` from pageable memory | the default stream was waited for, then the bytes were staged: the copy itself is work of that stream, and still to come |
//! | `cuMemcpyHtoD` from page-locked memory, any copy to the host | the copy is over |
//! | `cuMemcpyDtoD` | nothing was waited for |
//! | `cuMemsetD*` | nothing was waited for, unless the memory is page-locked memory of the host |
//! | `…Async` to pageable memory | the copy is over |
//! | `…Async` from pageable memory | the bytes were staged |
//! | other `…Async` | nothing was waited for; page-locked memory is read and written when the copy runs |
//!
//! What is still to come is ordered with the default stream and with streams that are not independent of it. A stream
//! made with `CU_STREAM_NON_BLOCKING` is behind it only after a host wait.

use super::calls::Piece;
use super::codes;
use super::entry::{Outcome, device_of, in_context, reach, stream_of, waiting};
use super::machine::{Goal, Machine, default_stream};
use super::queue::Work;
use crate::mem::Owner;
use std::ffi::c_void;

/// All that a stream holds now.
fn all_of(m: &Machine, s: u64) -> Goal {
    Goal::Stream(s, m.streams.get(&s).map_or(0, |s| s.enqueued))
}

/// A copy by what the addresses are; `synchronous` is the form without a stream.
struct Copy {
    dst: u64,
    src: u64,
    len: usize,
    synchronous: bool,
}

impl Copy {
    /// Whose memory the two sides are; none for pageable memory of the host.
    fn owners(&self, m: &Machine) -> [Option<Owner>; 2] {
        [self.dst, self.src].map(|ptr| m.mem.find(ptr).map(|found| found.2))
    }

    fn put_in(&self, m: &mut Machine, s: u64) -> Outcome {
        let &Self { dst, src, len, .. } = self;
        let work = match self.owners(m) {
            [Some(_), Some(_)] => Work::Copy { dst, src, len },
            [Some(_), None] => {
                m.acceptable(s)?;
                let mut bytes = vec![0; len];
                // SAFETY: an address that is no memory of ours is the host's; the caller answers for `len` bytes.
                unsafe { std::ptr::copy_nonoverlapping(src as *const u8, bytes.as_mut_ptr(), len) };
                Work::Write { dst, bytes }
            }
            [None, Some(_)] => Work::Read { dst: dst as usize, src, len },
            [None, None] => return Err(codes::INVALID_VALUE),
        };
        m.submit(s, work)
    }

    /// Before the call goes on: the default stream, if pageable memory is to be staged for it.
    fn first(&self, m: &mut Machine, s: u64) -> Result<Goal, i32> {
        if self.len == 0 {
            return Ok(Goal::Nothing);
        }
        if self.dst == 0 || self.src == 0 {
            return Err(codes::INVALID_VALUE);
        }
        m.acceptable(s)?;
        let stages = self.synchronous && matches!(self.owners(m), [Some(_), None]);
        Ok(if stages { all_of(m, s) } else { Goal::Nothing })
    }

    /// Puts the copy in; what the call waits for then.
    fn then(&self, m: &mut Machine, s: u64) -> Result<Goal, i32> {
        if self.len == 0 {
            return Ok(Goal::Nothing);
        }
        let waits = match self.owners(m) {
            [None, _] => true,
            [Some(to), Some(from)] => self.synchronous && (to == Owner::Host || from == Owner::Host),
            _ => false,
        };
        self.put_in(m, s)?;
        if waits {
            m.counts.piece(Piece::HostWait);
        }
        Ok(if waits { all_of(m, s) } else { Goal::Nothing })
    }

    fn run(&self, name: &'static str, stream: Option<*mut c_void>, check: impl Fn(&Machine) -> Outcome) -> i32 {
        let s = |m: &Machine, d| stream.map_or_else(|| Ok(default_stream(d)), |handle| stream_of(m, d, handle));
        let first = |m: &mut Machine, d| {
            let s = s(m, d)?;
            check(m)?;
            self.first(m, s)
        };
        let mut last = Goal::Nothing;
        let code = waiting(name, first, |m, d| {
            let s = s(m, d)?;
            last = self.then(m, s)?;
            Ok(())
        });
        if code == codes::SUCCESS { reach(last) } else { code }
    }
}

/// Whether a device address lies in memory of ours.
fn known(m: &Machine, ptr: u64, len: usize) -> Outcome {
    if len == 0 || m.mem.find(ptr).is_some() { Ok(()) } else { Err(codes::INVALID_VALUE) }
}

macro_rules! copies {
    ($($now:ident, $later:ident, $to:ty, $from:ty, $check_to:literal, $check_from:literal;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $now(dst: $to, src: $from, len: usize) -> i32 {
            let copy = Copy { dst: dst as u64, src: src as u64, len, synchronous: true };
            copy.run(stringify!($now), None, |m| {
                if $check_to { known(m, dst as u64, len)?; }
                if $check_from { known(m, src as u64, len)?; }
                Ok(())
            })
        }
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $later(dst: $to, src: $from, len: usize, stream: *mut c_void) -> i32 {
            let copy = Copy { dst: dst as u64, src: src as u64, len, synchronous: false };
            copy.run(stringify!($later), Some(stream), |m| {
                if $check_to { known(m, dst as u64, len)?; }
                if $check_from { known(m, src as u64, len)?; }
                Ok(())
            })
        }
    )*};
}

copies! {
    cuMemcpy, cuMemcpyAsync, u64, u64, false, false;
    cuMemcpyHtoD_v2, cuMemcpyHtoDAsync_v2, u64, *const c_void, true, false;
    cuMemcpyDtoH_v2, cuMemcpyDtoHAsync_v2, *mut c_void, u64, false, true;
    cuMemcpyDtoD_v2, cuMemcpyDtoDAsync_v2, u64, u64, true, true;
}

/// Both sides are memory of the devices whose contexts are given.
fn at_home(m: &Machine, sides: [(u64, *mut c_void); 2], len: usize) -> Outcome {
    for (ptr, context) in sides {
        known(m, ptr, len)?;
        let device = device_of(m, context as u64)?;
        if len > 0 && m.home(ptr) != (device, Owner::Device) {
            return Err(codes::INVALID_VALUE);
        }
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyPeer(dst: u64, to: *mut c_void, src: u64, from: *mut c_void, len: usize) -> i32 {
    let copy = Copy { dst, src, len, synchronous: true };
    copy.run("cuMemcpyPeer", None, |m| at_home(m, [(dst, to), (src, from)], len))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyPeerAsync(
    dst: u64,
    to: *mut c_void,
    src: u64,
    from: *mut c_void,
    len: usize,
    stream: *mut c_void,
) -> i32 {
    let copy = Copy { dst, src, len, synchronous: false };
    copy.run("cuMemcpyPeerAsync", Some(stream), |m| at_home(m, [(dst, to), (src, from)], len))
}

/// Fills memory; what the call waits for then.
fn fill(m: &mut Machine, s: u64, dst: u64, value: u32, width: usize, count: usize) -> Result<Goal, i32> {
    if count == 0 {
        return Ok(Goal::Nothing);
    }
    if !dst.is_multiple_of(width as u64) || m.mem.find(dst).is_none() {
        return Err(codes::INVALID_VALUE);
    }
    m.submit(s, Work::Fill { dst, pattern: value.to_le_bytes(), width, count })?;
    let waits = m.home(dst).1 == Owner::Host;
    Ok(if waits { all_of(m, s) } else { Goal::Nothing })
}

macro_rules! fills {
    ($($now:ident, $later:ident, $t:ty;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $now(dst: u64, value: $t, count: usize) -> i32 {
            let goal = |m: &mut Machine, d| fill(m, default_stream(d), dst, value.into(), size_of::<$t>(), count);
            waiting(stringify!($now), goal, |_, _| Ok(()))
        }
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $later(dst: u64, value: $t, count: usize, stream: *mut c_void) -> i32 {
            in_context(stringify!($later), |m, d| {
                let s = stream_of(m, d, stream)?;
                fill(m, s, dst, value.into(), size_of::<$t>(), count).map(|_| ())
            })
        }
    )*};
}

fills! {
    cuMemsetD8_v2, cuMemsetD8Async, u8;
    cuMemsetD16_v2, cuMemsetD16Async, u16;
    cuMemsetD32_v2, cuMemsetD32Async, u32;
}
