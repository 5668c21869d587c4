// SPDX-License-Identifier: MIT OR Apache-2.0
//! The types of cudarc: views of its slices, ranks on its contexts, runs on its streams; nothing is copied.
//!
//! cudarc orders the uses of a slice by events: it asks for the address on a stream, and is told when the work there
//! has been enqueued. [`StreamSlice`] and [`StreamSliceMut`] do both. Making one lets its stream wait for earlier
//! writes of the slice; dropping it records that the work which was enqueued on the stream in between has used it. So:
//!
//! - make the slices of a run with the stream of the run ([`stream`]),
//! - drop them after the call that enqueues the run, and not before.
//!
//! The borrows see to the second: a [`DeviceView`] cannot outlive the slice that it comes from.
//!
//! The features that your program gives to cudarc name the version of CUDA and how the driver is loaded. Without them
//! it is the version of the toolkit that the build finds, or the latest that cudarc knows, and the driver is loaded
//! when the program runs.
//!
//! ```no_run
//! use cpattn::{Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, Side, cudarc, transport::peer};
//! use ::cudarc::driver::CudaContext;
//! use half::bf16;
//! use std::time::Duration;
//!
//! let context = CudaContext::new(0)?;
//! let stream = context.new_stream()?;
//! let device = cudarc::device(&context)?;
//! let mut rank = Rank::on_device(peer::group(&[device], Duration::from_secs(10))?.remove(0))?;
//! let plan = Plan::new(&Problem::new(Batch::new(&[0, 5, 12])?, 4, 2, 64, Dtype::Bf16), Mesh::single(), Layout::Contiguous)?;
//! let n = plan.local_tokens(Side::Q, 0).len();
//! let (q, k, v) = (stream.alloc_zeros::<bf16>(n * 4 * 64)?, stream.alloc_zeros(n * 2 * 64)?, stream.alloc_zeros(n * 2 * 64)?);
//! let (mut o, mut lse) = (stream.alloc_zeros::<bf16>(n * 4 * 64)?, stream.alloc_zeros::<f32>(n * 4)?);
//! {
//!     let slice = |t, heads| cudarc::StreamSlice::compact(t, &stream, [n, heads, 64]);
//!     let (q, k, v) = (slice(&q, 4)?, slice(&k, 2)?, slice(&v, 2)?);
//!     let (mut o, mut lse) = (
//!         cudarc::StreamSliceMut::compact(&mut o, &stream, [n, 4, 64])?,
//!         cudarc::StreamSliceMut::new(&mut lse, &stream, 0, [n, 4, 1], [1, n])?, // [heads, tokens]
//!     );
//!     let call = Forward::new(q.view(), k.view(), v.view(), o.view(), lse.view());
//!     // SAFETY: the stream was not destroyed.
//!     rank.forward(&plan, unsafe { call.on(cudarc::stream(&stream)) })?;
//! }
//! let o: Vec<bf16> = stream.clone_dtoh(&o)?; // waits for the run, as for a kernel of your own
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use ::cudarc::driver::{CudaContext, CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use alloc::{format, sync::Arc};
use core::fmt;

use crate::{
    call::RawStream,
    device::Device,
    element::Element,
    error::{Error, Result},
    kernel::cuda::Cuda,
    tensor::{DeviceView, DeviceViewMut},
};

/// The device of a context, for transports and kernels: [`Cuda::shared`] of the same number.
///
/// # Errors
/// [`Error::Unsupported`] for a context that is not the device's primary one, because ranks use that one; and as
/// [`Cuda::shared`].
pub fn device(context: &CudaContext) -> Result<Arc<Cuda>> {
    let ordinal = context.ordinal();
    if !context.is_primary() {
        return Err(Error::unsupported(
            "a CudaContext that is not the primary one of its device",
            format!("ranks on device {ordinal} use its primary context"),
            "make the context with new of CudaContext, which retains the primary one",
        ));
    }
    let ordinal = i32::try_from(ordinal).map_err(|_| Error::invalid("context", ordinal, "the number of a device"))?;
    Cuda::shared(ordinal)
}

/// A stream as runs and kernel calls take it. It stays valid as long as the `CudaStream` lives.
pub fn stream(stream: &CudaStream) -> RawStream {
    stream.cu_stream().cast()
}

/// A `[tokens, heads, dim]` tensor in a slice that work on a stream reads.
pub struct StreamSlice<'a, T> {
    view: DeviceView<'a, T>,
    _order: SyncOnDrop<'a>,
}

/// A `[tokens, heads, dim]` tensor in a slice that work on a stream writes.
pub struct StreamSliceMut<'a, T> {
    view: DeviceViewMut<'a, T>,
    _order: SyncOnDrop<'a>,
}

impl<'a, T: Element> StreamSlice<'a, T> {
    /// The tensor whose first element is element `start` of `slice`, with strides of tokens and heads in elements; the
    /// innermost dimension is contiguous. `stream` is the one whose work reads it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the slice ends before the tensor, or is of another device than the stream.
    pub fn new(
        slice: &'a impl DevicePtr<T>,
        stream: &'a CudaStream,
        start: usize,
        shape: [usize; 3],
        strides: [usize; 2],
    ) -> Result<Self> {
        let device = fits(slice.stream(), stream, slice.len(), start, shape, strides)?;
        let (address, order) = slice.device_ptr(stream);
        let first = (address as usize as *const T).wrapping_add(start);
        // SAFETY: the rows are in the slice, which is borrowed for as long as the view lives. After that its owner
        // waits for the event that `order` records before it frees or writes the memory.
        let view = unsafe { DeviceView::new(device, first, shape, strides) }?;
        Ok(Self { view, _order: order })
    }

    /// A compact token-major tensor at the beginning of `slice`.
    ///
    /// # Errors
    /// As [`StreamSlice::new`].
    pub fn compact(slice: &'a impl DevicePtr<T>, stream: &'a CudaStream, shape: [usize; 3]) -> Result<Self> {
        Self::new(slice, stream, 0, shape, [shape[1].saturating_mul(shape[2]), shape[2]])
    }

    /// The tensor.
    pub fn view(&self) -> DeviceView<'_, T> {
        self.view
    }
}

impl<'a, T: Element> StreamSliceMut<'a, T> {
    /// As [`StreamSlice::new`], of a slice that work on `stream` writes.
    ///
    /// # Errors
    /// As [`StreamSlice::new`], and rows that share elements.
    pub fn new(
        slice: &'a mut impl DevicePtrMut<T>,
        stream: &'a CudaStream,
        start: usize,
        shape: [usize; 3],
        strides: [usize; 2],
    ) -> Result<Self> {
        let device = fits(slice.stream(), stream, slice.len(), start, shape, strides)?;
        let (address, order) = slice.device_ptr_mut(stream);
        let address = (address as usize as *mut T).wrapping_add(start);
        // SAFETY: the rows are in the slice, which is borrowed for as long as the view lives, by this view alone. After
        // that its owner waits for the event that `order` records before it frees or uses the memory.
        let view = unsafe { DeviceViewMut::new(device, address, shape, strides) }?;
        Ok(Self { view, _order: order })
    }

    /// A compact token-major tensor at the beginning of `slice`.
    ///
    /// # Errors
    /// As [`StreamSliceMut::new`].
    pub fn compact(slice: &'a mut impl DevicePtrMut<T>, stream: &'a CudaStream, shape: [usize; 3]) -> Result<Self> {
        Self::new(slice, stream, 0, shape, [shape[1].saturating_mul(shape[2]), shape[2]])
    }

    /// The tensor.
    pub fn view(&mut self) -> DeviceViewMut<'_, T> {
        let (view, address) = (&self.view, self.view.raw().ptr.cast());
        // SAFETY: the tensor of `self.view`, which is borrowed for as long as this view lives.
        unsafe { DeviceViewMut::new(view.device(), address, view.shape(), view.strides()) }.expect("checked by `new`")
    }
}

/// Refuses a tensor that the slice does not hold, and a stream of another device.
fn fits(
    owner: &CudaStream,
    stream: &CudaStream,
    len: usize,
    start: usize,
    shape: [usize; 3],
    strides: [usize; 2],
) -> Result<Device> {
    let [of_slice, of_stream] = [owner, stream].map(|stream| stream.context().ordinal());
    if of_slice != of_stream {
        return Err(Error::invalid(
            "stream",
            format!("of device {of_stream}"),
            format!("of device {of_slice}, the slice's"),
        ));
    }
    let end = if shape.contains(&0) {
        Some(start)
    } else {
        let last = |extent: usize, stride: usize| (extent - 1).checked_mul(stride);
        last(shape[0], strides[0])
            .zip(last(shape[1], strides[1]))
            .and_then(|(tokens, heads)| tokens.checked_add(heads)?.checked_add(shape[2])?.checked_add(start))
    };
    match end {
        Some(end) if end <= len => Ok(Device::Cuda(
            i32::try_from(of_slice).map_err(|_| Error::invalid("stream", of_slice, "a device number"))?,
        )),
        _ => Err(Error::invalid(
            "slice",
            format!("of length {len}"),
            format!(
                "at least {} for {shape:?} from element {start} with strides {strides:?}",
                end.unwrap_or(usize::MAX)
            ),
        )),
    }
}

impl<T: Element> fmt::Debug for StreamSlice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamSlice").field("view", &self.view).finish_non_exhaustive()
    }
}

impl<T: Element> fmt::Debug for StreamSliceMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamSliceMut").field("view", &self.view).finish_non_exhaustive()
    }
}
