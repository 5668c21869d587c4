// SPDX-License-Identifier: MIT OR Apache-2.0
//! A table of the caller's functions as an engine of sends and receives.
//!
//! A function that fails writes a text into our buffer; its status says whether the fault is its own.

use core::ffi::{CStr, c_char, c_void};
use std::{ffi::CString, time::Duration};

use super::table::CHECKED;
use cpattn::transport::engine::{Engine, Failed, LONGEST_VALUE, MessageDirection};

pub const CPATTN_ENGINE_TEXT: usize = 512;
pub const CPATTN_ENGINE_VALUE: usize = LONGEST_VALUE;
/// The status of a function that failed because of a peer or a connection.
pub const CPATTN_ENGINE_GROUP: i32 = 1;

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_engine_table {
    pub struct_size: usize,
    pub context: *mut c_void,
    pub rank: u32,
    pub world: u32,
    pub open: Option<unsafe extern "C" fn(context: *mut c_void, text: *mut c_char) -> i32>,
    pub connect: Option<unsafe extern "C" fn(context: *mut c_void, text: *mut c_char) -> i32>,
    pub post: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            receive: i32,
            peer: u32,
            tag: u32,
            data: *mut c_void,
            bytes: usize,
            request: *mut u64,
            text: *mut c_char,
        ) -> i32,
    >,
    pub wait:
        Option<unsafe extern "C" fn(context: *mut c_void, request: u64, timeout_ms: u64, text: *mut c_char) -> i32>,
    pub close: Option<unsafe extern "C" fn(context: *mut c_void)>,
    pub put: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            key: *const c_char,
            value: *const c_void,
            bytes: usize,
            there: *mut c_void,
            there_bytes: *mut usize,
            text: *mut c_char,
        ) -> i32,
    >,
    pub get: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            key: *const c_char,
            there: *mut c_void,
            there_bytes: *mut usize,
            text: *mut c_char,
        ) -> i32,
    >,
    pub wait_for: Option<unsafe extern "C" fn(context: *mut c_void, key: *const c_char, text: *mut c_char) -> i32>,
    pub release: Option<unsafe extern "C" fn(context: *mut c_void)>,
}

versioned! { cpattn_engine_table through release; }

/// The caller's functions as an engine.
#[doc(hidden)]
#[derive(Debug)]
pub struct EngineTable(pub(super) cpattn_engine_table);

// SAFETY: the header says on which threads each function is called, and that `context` may be used there.
unsafe impl Send for EngineTable {}
// SAFETY: as above.
unsafe impl Sync for EngineTable {}

/// The result of a function, from its status and text.
fn outcome(function: &str, code: i32, text: &mut [c_char; CPATTN_ENGINE_TEXT]) -> Result<(), Failed> {
    if code == 0 {
        return Ok(());
    }
    text[CPATTN_ENGINE_TEXT - 1] = 0;
    // SAFETY: it ends with a zero, as written above.
    let said = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy();
    let text = if said.is_empty() { format!("{function} returned {code}") } else { said.into_owned() };
    Err(if code == CPATTN_ENGINE_GROUP { Failed::of_group(text) } else { Failed::own(text) })
}

/// Calls a function of the table: the context, the arguments, and a buffer for the text of a failure.
macro_rules! call {
    ($engine:ident.$function:ident($($argument:expr),*)) => {{
        let mut text = [0; CPATTN_ENGINE_TEXT];
        let call = $engine.0.$function.expect(CHECKED);
        // SAFETY: the table's own function, as the header describes it; the arguments' memory is valid during the call.
        let code = unsafe { call($engine.0.context, $($argument,)* text.as_mut_ptr()) };
        outcome(stringify!($function), code, &mut text)
    }};
}

/// A value of the store, which `call` writes to an address, and its length to another.
fn value(function: &str, call: impl FnOnce(*mut c_void, *mut usize) -> Result<(), Failed>) -> Result<Vec<u8>, Failed> {
    let (mut value, mut bytes) = (vec![0u8; CPATTN_ENGINE_VALUE], 0);
    call(value.as_mut_ptr().cast(), &raw mut bytes)?;
    if bytes > value.len() {
        return Err(Failed::own(format!("{function} wrote {bytes} bytes, at most {CPATTN_ENGINE_VALUE} fit")));
    }
    value.truncate(bytes);
    Ok(value)
}

fn key(text: &str) -> Result<CString, Failed> {
    CString::new(text).map_err(|_| Failed::own("a key has a zero"))
}

// SAFETY: the header asks the caller for the same.
unsafe impl Engine for EngineTable {
    fn rank(&self) -> usize {
        self.0.rank as usize
    }

    fn world(&self) -> usize {
        self.0.world as usize
    }

    fn open(&self) -> Result<(), Failed> {
        call!(self.open())
    }

    fn connect(&self) -> Result<(), Failed> {
        call!(self.connect())
    }

    unsafe fn post(
        &self, way: MessageDirection, peer: usize, tag: u32, data: *mut u8, bytes: usize,
    ) -> Result<u64, Failed> {
        let (mut request, receive) = (0, i32::from(way == MessageDirection::Receive));
        call!(self.post(receive, peer as u32, tag, data.cast(), bytes, &raw mut request))?;
        Ok(request)
    }

    fn wait(&self, posted: u64, limit: Duration) -> Result<(), Failed> {
        let ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX).max(1);
        call!(self.wait(posted, ms))
    }

    fn close(&self) {
        // SAFETY: the table's own function, as the header describes it.
        unsafe { self.0.close.expect(CHECKED)(self.0.context) };
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<Vec<u8>, Failed> {
        let (key, from) = (self::key(key)?, value.as_ptr().cast());
        self::value("put", |there, bytes| call!(self.put(key.as_ptr(), from, value.len(), there, bytes)))
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, Failed> {
        let key = self::key(key)?;
        let value = value("get", |there, bytes| call!(self.get(key.as_ptr(), there, bytes)))?;
        Ok((!value.is_empty()).then_some(value))
    }

    fn wait_for(&self, key: &str) -> Result<(), Failed> {
        let key = self::key(key)?;
        call!(self.wait_for(key.as_ptr()))
    }
}

impl Drop for EngineTable {
    fn drop(&mut self) {
        if let Some(release) = self.0.release {
            // SAFETY: the table's own function; nothing calls the table afterwards.
            unsafe { release(self.0.context) };
        }
    }
}
