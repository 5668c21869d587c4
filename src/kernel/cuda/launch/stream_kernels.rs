// SPDX-License-Identifier: MIT OR Apache-2.0
//! Single kernel calls on a stream of the caller's choice, with all resources allocated beforehand.
//!
//! [`StreamKernels`] is a device and what a call needs there: kernels, a recorder that makes its launches, and a ring
//! for scheduler metadata. [`StreamKernels::new`], [`StreamKernels::reserve`] and [`StreamKernels::reserve_metadata`]
//! load and allocate everything; a call that needs more is refused, with the size it needs. A call is recorded like one
//! of a plan, and started at once. The host waits only where the metadata of calls in flight fills the ring.

use crate::call::{Attend, AttendBackward, Delta, Finish, Merge, RawStream, RawTensor, SinkGradient, Transform};
use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::kernel::cuda::Cuda;
use crate::kernel::cuda::launch::Launches;
use crate::kernel::cuda::launch::recorded::{COUNTER_BYTES, LaunchRecorder};
use crate::kernel::cuda::memory::metadata_ring::MetadataRing;
use crate::kernel::cuda::sm_margin::SmMargin;
use alloc::boxed::Box;
use alloc::format;
use alloc::sync::Arc;

/// Bytes of the ring unless the caller says otherwise: about a thousand ranges for each of many calls.
const BYTES: usize = 256 << 10;
const CALLS: usize = 64;

/// The kernels of a device for single calls, with a ring for scheduler metadata. Calls allocate nothing.
///
/// Each call checks its arguments, writes its metadata (ranges, tiles), copies it to the device in stream order unless
/// the ring has the same metadata there, and launches. Calls may be on any streams of the device's primary context, in
/// any order; streams that are being captured are refused.
///
/// Dropping it waits for its own calls, and for nothing else on the device; it does not invalidate stream captures. The
/// ring buffer is kept by the [`Cuda`] for the next user, up to 16 MiB in all. Beyond that memory is freed, and when
/// the last holder of the [`Cuda`] is dropped kernels are unloaded too; the driver may then wait until the device is
/// idle.
#[derive(Debug)]
pub struct StreamKernels {
    recorder: Box<LaunchRecorder>,
    /// `None` in `drop` alone.
    ring: Option<MetadataRing>,
    margin: Option<SmMargin>,
    cuda: Arc<Cuda>,
}

impl StreamKernels {
    /// Loads the kernels that do not depend on head dims, and allocates a ring buffer of 256 KiB for 64 calls in
    /// flight.
    ///
    /// # Errors
    /// [`Error::Device`] when the driver refuses.
    pub fn new(cuda: Arc<Cuda>) -> Result<Self> {
        Self::with_metadata(cuda, BYTES, CALLS)
    }

    /// The same with a ring buffer of `bytes` bytes for at most `calls` calls in flight that differ in metadata or
    /// stream. [`StreamKernels::attend_metadata`] and similar functions return the bytes of one call.
    ///
    /// # Errors
    /// As [`StreamKernels::new`].
    pub fn with_metadata(cuda: Arc<Cuda>, bytes: usize, calls: usize) -> Result<Self> {
        cuda.prepare_blocks()?;
        let ring = cuda.spare_rings.take(cuda.context(), bytes, calls)?;
        let recorder = Box::new(LaunchRecorder::of_single_calls(ring.bytes()));
        Ok(Self { recorder, ring: Some(ring), margin: None, cuda })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    /// Loads the attention kernels for an element type and head dims.
    ///
    /// # Errors
    /// As [`Cuda::prepare`].
    pub fn reserve(&mut self, dtype: Dtype, head_dim: u32, value_dim: u32) -> Result<()> {
        self.cuda.prepare(dtype, head_dim, value_dim)
    }

    /// Sets a margin: as long as this object lives, attention on the device leaves at least `n` multiprocessors free;
    /// the largest of all margins applies. See [`Cuda::set_sm_margin`].
    ///
    /// # Errors
    /// [`Error::Invalid`] when the device does not have more than `n`.
    pub fn set_sm_margin(&mut self, n: u32) -> Result<()> {
        self.margin = SmMargin::new(&self.cuda, n)?;
        Ok(())
    }

    /// Enlarges the ring buffer to `bytes` bytes of scheduler metadata of at most `calls` calls in flight. It never
    /// shrinks; to grow, it waits for the calls that use the old one.
    ///
    /// # Errors
    /// [`Error::Device`] when the driver has no memory for it; the old ring then stays.
    pub fn reserve_metadata(&mut self, bytes: usize, calls: usize) -> Result<()> {
        let now = (self.ring().bytes(), self.ring().max_parts());
        let (bytes, calls) = (bytes.max(now.0), calls.max(now.1));
        if (bytes, calls) != now {
            let larger = self.cuda.spare_rings.take(self.cuda.context(), bytes, calls)?;
            *self.recorder = LaunchRecorder::of_single_calls(larger.bytes());
            if let Some(old) = self.ring.replace(larger) {
                self.cuda.spare_rings.put(old);
            }
        }
        Ok(())
    }

    /// Waits on the host until all calls that were made with this object are done.
    ///
    /// # Errors
    /// [`Error::Device`] when one of them failed.
    pub fn wait(&self) -> Result<()> {
        self.ring().wait()
    }

    fn ring(&self) -> &MetadataRing {
        self.ring.as_ref().expect("taken by drop alone")
    }

    fn loaded(&self, q: &RawTensor, v: &RawTensor) -> Result<()> {
        if self.cuda.is_prepared(q.dtype, q.dim, v.dim)? {
            return Ok(());
        }
        let expected = format!("reserved for {} with head_dim {} and value_dim {}", q.dtype, q.dim, v.dim);
        Err(Error::invalid("scratch", "not reserved for this call", expected).hint("reserve it when planning"))
    }

    /// Records a call and starts its launches.
    ///
    /// # Safety
    /// The stream was not destroyed. The tensors of the call are as its launches need them.
    unsafe fn call(
        &mut self,
        stream: RawStream,
        make: impl FnOnce(&Cuda, &mut LaunchRecorder) -> Result<Launches>,
    ) -> Result<()> {
        let Self { recorder, ring, cuda, .. } = self;
        // SAFETY: a live stream (the contract).
        unsafe { cuda.accept_stream(stream) }?;
        let _entered = cuda.enter()?;
        recorder.clear();
        recorder.add(|recorder| make(cuda, recorder))?;
        if recorder.is_empty() {
            return Ok(());
        }
        let ring = ring.as_mut().expect("taken by drop alone");
        let part = ring.place(recorder.metadata(), recorder.words(), stream)?;
        // SAFETY: the ring has put the metadata on the device, in stream order, and keeps it and the words for this
        // stream until `end`; tensors are as promised.
        let started = unsafe { recorder.start(ring.address(part), cuda, stream) };
        // Also after a failed launch: the copy may still be in progress.
        started.and(ring.end(part, stream))
    }

    /// Bytes of the ring that [`StreamKernels::attend`] needs for this call.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for types and dims there is no kernel for.
    pub fn attend_metadata(&self, call: &Attend<'_>) -> Result<usize> {
        Ok(self.cuda.attend_bytes(call)? + COUNTER_BYTES)
    }

    /// Bytes of the ring that [`StreamKernels::attend_backward`] needs for this call.
    ///
    /// # Errors
    /// As [`StreamKernels::attend_metadata`].
    pub fn attend_backward_metadata(&self, call: &AttendBackward<'_>) -> Result<usize> {
        self.cuda.attend_backward_bytes(call)
    }

    /// Bytes of the ring that [`StreamKernels::transform`] needs for this call.
    pub fn transform_metadata(&self, call: &Transform<'_>) -> usize {
        crate::kernel::cuda::launch::blocks::transform_bytes(call)
    }

    /// Bytes of the ring that [`StreamKernels::finish`] needs for this call.
    pub fn finish_metadata(&self, call: &Finish<'_>) -> usize {
        crate::kernel::cuda::launch::blocks::finish_bytes(call)
    }

    /// Forward attention: see [`Attend`].
    ///
    /// # Errors
    /// [`Error::Invalid`] and [`Error::Unsupported`] before anything is launched, also for kernels or metadata memory
    /// that were not reserved, and for a stream that is being captured into a graph: the ring's metadata would not last
    /// for replays. [`Error::Device`] when the driver fails.
    ///
    /// # Safety
    /// The stream was not destroyed. When the launch runs, in stream order, the rows of the ranges are valid device
    /// memory in every tensor: for reads in q, k, v, slopes and sinks, for writes too in running, running_lse, o, lse
    /// and max_logit, which overlap nothing (but running_lse may be lse) and which nothing else accesses meanwhile.
    pub unsafe fn attend(&mut self, call: &Attend<'_>, stream: RawStream) -> Result<()> {
        self.loaded(&call.q, &call.v)?;
        // SAFETY: tensors and stream are as promised.
        unsafe { self.call(stream, |cuda, recorder| cuda.attend_launches(call, recorder)) }
    }

    /// Backward attention: see [`AttendBackward`]. All gradients are one launch where a block of the device has the
    /// shared memory for it:
    ///
    /// | shared memory of a block | head dims |
    /// |---|---|
    /// | 99 KB | up to 64, and of 97 to 128 |
    /// | 163 KB | up to 192 |
    /// | 227 KB | up to 256 |
    ///
    /// Otherwise, and with dropout, dq is one launch, dk and dv another. (At head dims of 193 to 256 without dropout
    /// they are one each.)
    ///
    /// # Errors
    /// As [`StreamKernels::attend`].
    ///
    /// # Safety
    /// As [`StreamKernels::attend`], with dq, dk and dv in the place of o.
    pub unsafe fn attend_backward(&mut self, call: &AttendBackward<'_>, stream: RawStream) -> Result<()> {
        self.loaded(&call.q, &call.v)?;
        // SAFETY: tensors and stream are as promised.
        unsafe { self.call(stream, |cuda, recorder| cuda.attend_backward_launches(call, recorder)) }
    }

    /// Copies, casts and ordered sums: see [`Transform`].
    ///
    /// # Errors
    /// As [`StreamKernels::attend`]; f64 is refused.
    ///
    /// # Safety
    /// As [`StreamKernels::attend`]: sources are valid for reads and blocks for writes; blocks overlap no other block
    /// and no source, but for a first source that is the block itself, and nothing else accesses them.
    pub unsafe fn transform(&mut self, call: &Transform<'_>, stream: RawStream) -> Result<()> {
        // SAFETY: tensors and stream are as promised.
        unsafe { self.call(stream, |cuda, recorder| cuda.transform_launches(call, recorder)) }
    }

    /// Row sums before the backward: see [`Delta`].
    ///
    /// # Errors
    /// As [`StreamKernels::attend`].
    ///
    /// # Safety
    /// As [`StreamKernels::attend`]: o, d_o, lse and d_lse are valid for reads, delta for writes, and delta overlaps
    /// none.
    pub unsafe fn delta(&mut self, call: &Delta, stream: RawStream) -> Result<()> {
        // SAFETY: tensors and stream are as promised.
        unsafe { self.call(stream, |cuda, recorder| cuda.delta_launches(call, recorder.checker(cuda))) }
    }

    /// Rows that no pair covers: see [`Finish`].
    ///
    /// # Errors
    /// As [`StreamKernels::attend`].
    ///
    /// # Safety
    /// As [`StreamKernels::attend`]: the rows of o and lse are valid for writes, sinks for reads.
    pub unsafe fn finish(&mut self, call: &Finish<'_>, stream: RawStream) -> Result<()> {
        // SAFETY: tensors and stream are as promised.
        unsafe { self.call(stream, |cuda, recorder| cuda.finish_launches(call, recorder)) }
    }

    /// Merges two partial results: see [`Merge`].
    ///
    /// # Errors
    /// As [`StreamKernels::attend`].
    ///
    /// # Safety
    /// As [`StreamKernels::attend`]: o and lse are valid for reads and writes, the others for reads, and nothing
    /// overlaps.
    pub unsafe fn merge(&mut self, call: &Merge, stream: RawStream) -> Result<()> {
        // SAFETY: tensors and stream are as promised.
        unsafe { self.call(stream, |cuda, recorder| cuda.merge_launches(call, recorder.checker(cuda))) }
    }

    /// The gradient of the sinks: see [`SinkGradient`]. Everything is f32.
    ///
    /// # Errors
    /// As [`StreamKernels::attend`].
    ///
    /// # Safety
    /// As [`StreamKernels::attend`]: lse, delta and sinks are valid for reads, dsinks for writes, and dsinks overlaps
    /// none.
    pub unsafe fn sink_gradient(&mut self, call: &SinkGradient, stream: RawStream) -> Result<()> {
        // SAFETY: tensors and stream are as promised.
        unsafe { self.call(stream, |cuda, recorder| cuda.sink_gradient_launches(call, recorder.checker(cuda))) }
    }
}

impl Drop for StreamKernels {
    fn drop(&mut self) {
        // Waits for the calls, so that the kernels, which `cuda` holds, outlive them.
        if let Some(ring) = self.ring.take() {
            self.cuda.spare_rings.put(ring);
        }
    }
}
