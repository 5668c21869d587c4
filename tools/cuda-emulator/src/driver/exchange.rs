// SPDX-License-Identifier: MIT OR Apache-2.0
//! Work that another library does in a stream: what a stand-in for NCCL puts between kernels and copies.
//!
//! Such work names the bytes it reads and writes, so that the race detector knows it, and is asked again and again,
//! while it is the next of its stream, until it says that it is over. Nothing behind it in the stream runs before. It
//! is asked under the driver's lock: it must answer at once and may not call the driver, and reaches device memory only
//! through [`Access`].
//!
//! This is no part of CUDA: `cuEmuExchange` and `cuEmuProgress` are for stand-ins of libraries beside the driver.

use super::codes;
use super::entry::{call, in_context, inside, stream_of};
use super::machine::Machine;
use super::queue::{Op, Stream, Work};
use crate::mem::Footprint;
use crate::report::{Fault, Report};
use std::ffi::{CStr, c_char, c_int, c_void};

/// Bytes of device memory that such work reads or writes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub ptr: u64,
    pub bytes: usize,
    pub writes: c_int,
}

/// Device memory, while the work is being asked. Each function returns 0, or 1 when the bytes are not there.
#[repr(C)]
pub struct Access {
    pub machine: *mut c_void,
    pub read: unsafe extern "C" fn(machine: *mut c_void, ptr: u64, to: *mut u8, bytes: usize) -> c_int,
    pub write: unsafe extern "C" fn(machine: *mut c_void, ptr: u64, from: *const u8, bytes: usize) -> c_int,
}

/// Not over yet.
pub const PENDING: c_int = 0;
/// Over.
pub const DONE: c_int = 1;

/// What the work consists of.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Calls {
    /// It was put into a stream that runs.
    pub queued: unsafe extern "C" fn(data: *mut c_void),
    /// How far it is: [`PENDING`], [`DONE`], or another number when it ended before its time and what it was to write
    /// holds nothing.
    pub poll: unsafe extern "C" fn(data: *mut c_void, memory: *const Access) -> c_int,
    /// The same work once more, for a replay.
    pub again: unsafe extern "C" fn(data: *mut c_void) -> *mut c_void,
    /// It is not needed any more.
    pub drop: unsafe extern "C" fn(data: *mut c_void),
}

/// Work of another library.
pub(crate) struct Exchange {
    what: String,
    parts: Vec<Part>,
    calls: Calls,
    data: *mut c_void,
    begun: bool,
}

// SAFETY: the data is the other library's, which promises with `cuEmuExchange` that any thread may ask.
unsafe impl Send for Exchange {}

impl Exchange {
    /// The same once more.
    pub(crate) fn again(&self) -> Self {
        // SAFETY: the library's own function on its own data, which lives until `drop` was called.
        let data = inside(|| unsafe { (self.calls.again)(self.data) });
        Self { what: self.what.clone(), parts: self.parts.clone(), calls: self.calls, data, begun: false }
    }

    pub(crate) fn what(&self) -> &str {
        &self.what
    }

    pub(crate) fn queued(&self) {
        // SAFETY: as above.
        inside(|| unsafe { (self.calls.queued)(self.data) });
    }
}

impl Clone for Exchange {
    fn clone(&self) -> Self {
        self.again()
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        // SAFETY: as above; once.
        inside(|| unsafe { (self.calls.drop)(self.data) });
    }
}

unsafe extern "C" fn read(machine: *mut c_void, ptr: u64, to: *mut u8, bytes: usize) -> c_int {
    // SAFETY: `ask` made the pointer from the machine that it holds alone, and calls only while it does.
    let m = unsafe { &mut *machine.cast::<Machine>() };
    match m.mem.read(ptr, bytes) {
        Ok(found) => {
            // SAFETY: the library gives room for as many bytes.
            unsafe { std::ptr::copy_nonoverlapping(found.as_ptr(), to, bytes) };
            0
        }
        Err(_) => 1,
    }
}

unsafe extern "C" fn write(machine: *mut c_void, ptr: u64, from: *const u8, bytes: usize) -> c_int {
    // SAFETY: as in `read`; the library gives as many bytes.
    let (m, from) = unsafe { (&mut *machine.cast::<Machine>(), std::slice::from_raw_parts(from, bytes)) };
    m.mem.write(ptr, from).is_err().into()
}

impl Machine {
    /// Works towards an exchange, one chosen at random.
    fn progress(&mut self) -> bool {
        let holds = |s: &Stream| s.queue.iter().any(|op| matches!(op.work, Work::Exchange(_)));
        let streams: Vec<u64> = self.streams.iter().filter(|(_, s)| holds(s)).map(|(&id, _)| id).collect();
        if streams.is_empty() {
            return false;
        }
        let pick = streams[self.below(streams.len())];
        self.only(pick)
    }

    /// Asks the exchange at the head of a stream. None while it is not over; otherwise what it read and wrote.
    pub(super) fn ask(&mut self, op: &mut Op) -> Option<(String, Footprint, Footprint, Result<(), Report>)> {
        let Work::Exchange(x) = &mut op.work else { return None };
        let (mut reads, mut writes) = (Footprint::default(), Footprint::default());
        let mut fault: Option<(Fault, String)> = None;
        for p in &x.parts {
            let side = if p.writes != 0 { &mut writes } else { &mut reads };
            side.add(p.ptr, p.bytes as u64);
            if !x.begun && fault.is_none() {
                fault = self.mem.locate(p.ptr, p.bytes).err();
            }
        }
        let report = |(fault, detail)| Report {
            fault,
            kernel: x.what.clone(),
            line: 0,
            text: String::new(),
            block: [0; 3],
            thread: None,
            detail,
        };
        if let Some(found) = fault {
            return Some((x.what.clone(), reads, writes, Err(report(found))));
        }
        x.begun = true;
        let access = Access { machine: std::ptr::from_mut(self).cast(), read, write };
        // SAFETY: the library's own function on its own data; the machine is not touched here meanwhile.
        let state = inside(|| unsafe { (x.calls.poll)(x.data, &access) });
        match state {
            PENDING => None,
            DONE => Some((x.what.clone(), reads, writes, Ok(()))),
            _ => {
                // A later read finds nothing of use.
                for (start, end) in writes.iter() {
                    let nothing = vec![0xff; (end - start) as usize];
                    // That the bytes are there was checked above.
                    let _ = self.mem.write(start, &nothing);
                }
                Some((x.what.clone(), reads, writes, Ok(())))
            }
        }
    }
}

/// Puts work of another library into a stream. `what` names it in reports. Takes `data` over if it succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEmuExchange(
    stream: *mut c_void,
    parts: *const Part,
    count: usize,
    calls: *const Calls,
    data: *mut c_void,
    what: *const c_char,
) -> i32 {
    in_context("cuEmuExchange", |m, d| {
        let s = stream_of(m, d, stream)?;
        // SAFETY: the caller gives `count` parts, the calls, and a text that ends in a zero byte.
        let (parts, calls, what) = unsafe {
            let parts = if count == 0 { Vec::new() } else { std::slice::from_raw_parts(parts, count).to_vec() };
            (parts, *calls, CStr::from_ptr(what).to_string_lossy().into_owned())
        };
        // Only what is accepted is dropped: until then the data is the caller's.
        m.acceptable(s)?;
        m.submit(s, Work::Exchange(Exchange { what, parts, calls, data, begun: false }))
    })
}

/// Lets the device work towards one of the exchanges that streams hold, as a device does without being asked. Returns 0
/// when something moved.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEmuProgress() -> i32 {
    call("cuEmuProgress", |m| if m.progress() { Ok(()) } else { Err(codes::NOT_READY) })
}
