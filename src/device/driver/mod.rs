// SPDX-License-Identifier: MIT OR Apache-2.0
//! The few driver objects the backend owns, each released when dropped, and the check of every driver call.
//!
//! Contexts are here, with the check of every call; `event` and `module` have what their names say. The driver is found
//! at run time, when the first [`Context`] is made: [`sys`] lists its functions and [`table`] finds them. Every method
//! makes the context current for its own duration and restores what was current before, so that a caller's context
//! stays current for the caller.

mod event;
mod module;
pub(crate) mod sys;
mod table;

pub(crate) use event::CudaEvent;
pub(crate) use module::{Function, Image, Module};

use crate::error::{Error, Result};
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use core::ffi::{CStr, c_int};
use core::marker::PhantomData;
use core::ptr::null_mut;

/// An error unless the driver said success.
pub(crate) fn check(call: &'static str, code: sys::CUresult) -> Result<()> {
    if code == sys::SUCCESS {
        return Ok(());
    }
    let mut text = core::ptr::null();
    // SAFETY: the library is loaded, since `call` was made; `text` is written with a static string or left alone.
    let known = unsafe { sys::cuGetErrorString(code, &raw mut text) } == sys::SUCCESS;
    let message = if known && !text.is_null() {
        // SAFETY: the driver answered with one of its own zero-terminated strings, which live as long as it does.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        String::from("unknown error")
    };
    // The name that programs use; a macro of the driver's header maps it to the name with `_v2`.
    let call = call.strip_suffix("_v2").unwrap_or(call);
    Err(Error::Device { call, code: i64::from(code), message })
}

/// As [`check`], for a call that allocates: the error contains the number of bytes.
pub(crate) fn check_room(call: &'static str, code: sys::CUresult, bytes: usize) -> Result<()> {
    check(call, code).map_err(|error| match error {
        Error::Device { call, code: number, message } if code == sys::OUT_OF_MEMORY => {
            Error::Device { call, code: number, message: format!("{message} ({bytes} bytes were asked for)") }
        }
        other => other,
    })
}

/// Makes a driver call and checks it: `call!(cuInit(0))`.
macro_rules! call {
    ($f:ident($($arg:expr),* $(,)?)) => {
        $crate::device::driver::check(stringify!($f), $crate::device::driver::sys::$f($($arg),*))
    };
}
pub(crate) use call;

/// See [`Context::enter_beside_captures`].
pub(crate) struct Beside<'a> {
    before: core::ffi::c_uint,
    _entered: Entered<'a>,
}

impl Drop for Beside<'_> {
    fn drop(&mut self) {
        // SAFETY: the pointer is to the mode that this thread had before.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.before) };
    }
}

/// A device and its primary context.
#[derive(Debug)]
pub(crate) struct Context {
    ordinal: i32,
    device: sys::CUdevice,
    handle: sys::CUcontext,
}

// SAFETY: driver handles are valid on every thread; a context must be current on the thread, which `enter` ensures.
unsafe impl Send for Context {}
// SAFETY: driver handles are valid on every thread; a context must be current on the thread, which `enter` ensures; the
// driver synchronises itself.
unsafe impl Sync for Context {}

impl Context {
    /// Loads the driver and retains the primary context of a device.
    pub(crate) fn new(ordinal: i32) -> Result<Arc<Self>> {
        sys::load()?;
        // SAFETY: a call without conditions.
        unsafe { call!(cuInit(0)) }?;
        let (mut count, mut device, mut handle) = (0, 0, null_mut());
        // SAFETY: the driver is initialised; the pointers are to locals.
        unsafe { call!(cuDeviceGetCount(&raw mut count)) }?;
        if ordinal < 0 || ordinal >= count {
            return Err(Error::invalid("device", ordinal, format!("a number below {count}, of the devices there are")));
        }
        // SAFETY: the driver is initialised; the pointers are to locals; the ordinal is one of a device.
        unsafe {
            call!(cuDeviceGet(&raw mut device, ordinal))?;
            call!(cuDevicePrimaryCtxRetain(&raw mut handle, device))?;
        }
        Ok(Arc::new(Self { ordinal, device, handle }))
    }

    /// The device's number.
    pub(crate) fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// An attribute of the device.
    pub(crate) fn attribute(&self, attribute: c_int) -> Result<i32> {
        let mut value = 0;
        // SAFETY: the device is valid, `value` is a local.
        unsafe { call!(cuDeviceGetAttribute(&raw mut value, attribute, self.device)) }?;
        Ok(value)
    }

    /// Makes the context current until the guard is dropped.
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        // SAFETY: the context is retained for as long as `self` lives.
        unsafe { call!(cuCtxPushCurrent_v2(self.handle)) }?;
        Ok(Entered { _context: PhantomData })
    }

    /// Gives this device access to the memory of another, so that copies from there need not go through host memory.
    /// False if the machine or the driver has no such access; the access remains after `self` is dropped.
    pub(crate) fn enable_access_to(&self, other: &Self) -> Result<bool> {
        if self.handle == other.handle {
            return Ok(true);
        }
        let mut can = 0;
        // SAFETY: both devices are valid, `can` is a local.
        unsafe { call!(cuDeviceCanAccessPeer(&raw mut can, self.device, other.device)) }?;
        if can == 0 {
            return Ok(false);
        }
        let _entered = self.enter()?;
        // SAFETY: both contexts are retained.
        match unsafe { sys::cuCtxEnablePeerAccess(other.handle, 0) } {
            sys::SUCCESS | sys::PEER_ACCESS_ALREADY_ENABLED => Ok(true),
            sys::PEER_ACCESS_UNSUPPORTED | sys::TOO_MANY_PEERS => Ok(false),
            code => check("cuCtxEnablePeerAccess", code).map(|()| false),
        }
    }

    /// Refuses streams of another context, whose work could not be ordered.
    ///
    /// # Safety
    /// The stream is the driver's, and was not destroyed.
    pub(crate) unsafe fn accept(&self, stream: sys::CUstream) -> Result<()> {
        let _entered = self.enter()?;
        let mut owner = null_mut();
        // SAFETY: a live stream, as promised; `owner` is a local.
        let code = unsafe { sys::cuStreamGetCtx(stream, &raw mut owner) };
        if code == sys::INVALID_HANDLE || (owner != self.handle && !owner.is_null()) {
            let (found, expected) =
                (format!("{stream:p}, of another context"), format!("one of device {}", self.ordinal));
            return Err(Error::invalid("stream", found, expected)
                .hint("streams are those of the device's primary context, which is what the CUDA runtime uses"));
        }
        check("cuStreamGetCtx", code)
    }

    /// Whether a stream is being captured into a graph.
    ///
    /// # Safety
    /// As [`Context::accept`].
    pub(crate) unsafe fn is_capturing(&self, stream: sys::CUstream) -> Result<bool> {
        // SAFETY: a live stream (the contract of this function).
        Ok(unsafe { self.capture_of(stream) }?.is_some())
    }

    /// The capture that a stream is part of, or `None`: a number from 1 that no other capture of the process has. The
    /// number is 0 for a capture that an error has ended, until the caller ends it as well.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for the default stream, while a stream that it is ordered with is being captured.
    ///
    /// # Safety
    /// As [`Context::accept`].
    pub(crate) unsafe fn capture_of(&self, stream: sys::CUstream) -> Result<Option<u64>> {
        let _entered = self.enter()?;
        let (mut status, mut id) = (sys::STREAM_CAPTURE_NONE, 0);
        let none = null_mut();
        // SAFETY: a live stream, as promised; the pointers are to locals, or null where nothing is asked.
        let code = unsafe {
            sys::cuStreamGetCaptureInfo_v2(stream, &raw mut status, &raw mut id, null_mut(), null_mut(), none)
        };
        if code == sys::STREAM_CAPTURE_IMPLICIT {
            return Err(Error::unsupported(
                "the default stream while a stream that it is ordered with is being captured",
                "it takes no work until that capture ends",
                "end the capture first, or capture a stream made with CU_STREAM_NON_BLOCKING",
            ));
        }
        check("cuStreamGetCaptureInfo", code)?;
        Ok((status != sys::STREAM_CAPTURE_NONE).then_some(if status == sys::STREAM_CAPTURE_ACTIVE { id } else { 0 }))
    }

    /// Refuses while the default stream takes no work, as [`Context::capture_of`] does.
    pub(crate) fn accept_default_stream(&self) -> Result<()> {
        // SAFETY: there is always a default stream.
        unsafe { self.capture_of(null_mut()) }.map(|_| ())
    }

    /// As [`Context::enter`], for calls that query, wait, allocate or load code. While any thread captures a graph in
    /// the usual mode, such a call on any thread ends that capture with an error. Until the guard is dropped, calls of
    /// this thread do not. A stream or event that is part of a capture must still not be queried or waited for.
    pub(crate) fn enter_beside_captures(&self) -> Result<Beside<'_>> {
        let entered = self.enter()?;
        let mut mode = sys::STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is to a local, which holds a mode.
        unsafe { call!(cuThreadExchangeStreamCaptureMode(&raw mut mode)) }?;
        Ok(Beside { before: mode, _entered: entered })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `new`. A failure needs no handling, and none is possible.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// The context is current on this thread while this value lives. A raw pointer in the type keeps the value on its
/// thread.
pub(crate) struct Entered<'a> {
    _context: PhantomData<(&'a Context, *const ())>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut handle = null_mut();
        // SAFETY: pops what `enter` pushed on this very thread (guards are not `Send`).
        unsafe { sys::cuCtxPopCurrent_v2(&raw mut handle) };
    }
}

/// The device that an address belongs to, or `None` when the driver does not know it.
pub(crate) fn device_of(address: *const u8) -> Option<i32> {
    let mut ordinal: c_int = -1;
    let attribute = sys::POINTER_DEVICE_ORDINAL;
    // SAFETY: the driver writes one int to a local; an unknown address is an error code, never an access.
    let code = unsafe {
        sys::cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, address as usize as sys::CUdeviceptr)
    };
    (code == sys::SUCCESS && ordinal >= 0).then_some(ordinal)
}
