// SPDX-License-Identifier: MIT OR Apache-2.0
//! A program that has its own bindings to the CUDA driver, with a stream that it made with them.

/// The device of this crate and the stream of the other.
///
/// # Errors
/// When there is no driver.
pub fn both(
    stream: cudarc::driver::sys::CUstream,
) -> cpattn::Result<(cpattn::kernel::cuda::Cuda, cpattn::call::RawStream)> {
    Ok((cpattn::kernel::cuda::Cuda::new(0)?, stream.cast()))
}
