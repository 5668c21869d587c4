// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loaded images, PTX or compiled, and the kernels in them.

use super::{Context, call, sys};
use crate::error::{Error, Result};
use alloc::borrow::ToOwned;
use alloc::ffi::CString;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ffi::{CStr, c_int, c_void};
use core::ptr::null_mut;

/// What the driver loads.
#[derive(Debug)]
pub(crate) enum Image {
    /// PTX, which it compiles.
    Text(CString),
    /// A whole ELF image for CUDA devices.
    Cubin(Vec<u8>),
}

/// A loaded image.
#[derive(Debug)]
pub(crate) struct Module {
    context: Arc<Context>,
    /// Where the image comes from.
    file: String,
    handle: sys::CUmodule,
}

// SAFETY: a module is a handle that the driver accepts on every thread.
unsafe impl Send for Module {}
// SAFETY: a module is a handle that the driver accepts on every thread.
unsafe impl Sync for Module {}

impl Module {
    /// Loads an image of this file, compiling it for the device if it is PTX.
    pub(crate) fn new(context: &Arc<Context>, file: &str, image: &Image) -> Result<Self> {
        let _beside = context.enter_beside_captures()?;
        let mut handle = null_mut();
        let at: *const c_void = match image {
            Image::Text(text) => text.as_ptr().cast(),
            Image::Cubin(bytes) => bytes.as_ptr().cast(),
        };
        // SAFETY: a text is zero-terminated, an ELF image whole; it outlives the call, which copies what it needs.
        unsafe { call!(cuModuleLoadData(&raw mut handle, at)) }.map_err(|error| of_file(file, error))?;
        Ok(Self { context: context.clone(), file: file.to_owned(), handle })
    }

    /// A kernel of the module, allowed `shared` bytes of dynamic shared memory.
    pub(crate) fn function(&self, name: &CStr, shared: u32) -> Result<Function> {
        let _entered = self.context.enter()?;
        let mut handle = null_mut();
        // SAFETY: the module is loaded, the name zero-terminated.
        unsafe { call!(cuModuleGetFunction(&raw mut handle, self.handle, name.as_ptr())) }
            .map_err(|error| of_file(&format!("{}, {name:?}", self.file), error))?;
        let attribute = sys::FUNCTION_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function was just found.
        unsafe { call!(cuFuncSetAttribute(handle, attribute, shared as c_int)) }?;
        Ok(Function(handle))
    }
}

/// The error with the place that it is about.
fn of_file(file: &str, error: Error) -> Error {
    match error {
        Error::Device { call, code, message } => Error::Device { call, code, message: format!("{file}: {message}") },
        other => other,
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_beside) = self.context.enter_beside_captures() {
            // SAFETY: loaded once; the backend is dropped after its launches were waited for (documented there).
            unsafe { sys::cuModuleUnload(self.handle) };
        }
    }
}

/// A kernel; lives as long as its module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(sys::CUfunction);

// SAFETY: a handle, as the module is.
unsafe impl Send for Function {}
// SAFETY: a handle, as the module is.
unsafe impl Sync for Function {}

impl Function {
    /// Blocks of `threads` that one multiprocessor holds.
    pub(crate) fn blocks_per_multiprocessor(self, threads: u32, shared: u32) -> Result<u32> {
        let mut blocks = 0;
        // SAFETY: the function is loaded and its context current (callers enter it); `blocks` is a local.
        unsafe {
            call!(cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &raw mut blocks,
                self.0,
                threads as c_int,
                shared as usize
            ))
        }?;
        Ok(blocks.max(1) as u32)
    }

    /// Launches `blocks` blocks with the parameters at N addresses.
    ///
    /// # Safety
    /// They are the kernel's parameters, and the memory that they point to is as the kernel expects; the stream is of
    /// the current context.
    pub(crate) unsafe fn launch<const N: usize>(
        self,
        blocks: u32,
        threads: u32,
        shared: u32,
        stream: sys::CUstream,
        params: [*const c_void; N],
    ) -> Result<()> {
        let mut arguments = params.map(<*const c_void>::cast_mut);
        // SAFETY: the driver copies the parameters before it returns; they are the kernel's, the stream of this
        // context (the contract).
        unsafe {
            call!(cuLaunchKernel(
                self.0,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared,
                stream,
                arguments.as_mut_ptr(),
                null_mut()
            ))
        }
    }
}
