// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CUDA backend: executes the calls of [`crate::call`] on the caller's stream.
//!
//! [`Cuda`] is one device. Its kernels are PTX for compute capability 8.0, with kernels of their own for Hopper (9.0a)
//! in both directions, embedded in the crate; the driver compiles them when [`Cuda::prepare`] (or the first call) needs
//! them. Tensors are device addresses, streams are raw driver handles of the device's primary context.
//! [`StreamKernels`] makes single calls: each is recorded like a call of a plan, and started at once.
//!
//! Not supported in attention, and refused with an error: f32 and f64 elements, head dims above 576, value dims above
//! 512, or either not a multiple of 8, rows that are not aligned to 16 bytes, and
//! [`Attend::aligned`](crate::call::Attend::aligned). [`Merge`](crate::call::Merge) takes f32 only, dims that are
//! multiples of 4 and rows of o at multiples of 16 bytes; transforms take f16, bf16 and f32 of any dim and alignment.
//! The `Safety` section of each call lists what it cannot check: that tensors do not overlap
//! ([`tensor::disjoint`](crate::tensor::disjoint) checks that), and that memory is as large as the shape and strides
//! say.
//!
//! Scores may be as large as f32 holds. From 2²⁴ on, as logarithms to the base 2, they have no digits below 1: o and
//! lse are those of the scores as they were rounded. In gradients a key whose score exceeds lse but for these digits
//! has weight 1: right in a row with one largest score, too much for each in a row with several.
//!
//! A [`RawStream`] is a `CUstream` or `cudaStream_t` of any binding, cast; null is the legacy
//! default stream. Memory may come from any allocator; [`Cuda::allocate`] is for programs that have none.
//!
//! ```text
//! embedded  the PTX; ptx_format: how it is packed; replaced: kernels from a folder in its place
//! abi       what kernels and host agree on: params, the parameters of kernels; shapes, tiles and threads of the compiled
//!           kernels; base_addresses, symbols for addresses that are known later
//! memory    the scheduler metadata of a call: metadata, ranges as runs, partners and tiles (unread, bands); dq_semaphore,
//!           those of the fused backward, and which tile waits for which; metadata_writer, how they are written;
//!           metadata_ring, where those of single calls are on the device
//! launch    a launch as data. check, the checks of calls; attention, fused, dropped, blocks, the launches of each call;
//!           recorded, from calls to launches, for plans and single calls; stream_kernels, single calls; max_logit, the
//!           largest scores of a run before its first launch; tags, what runs carry along, so that ranks which differ are
//!           found
//! hopper    the forward kernels for compute capability 9.0 (hopper_backward: the backward; either_backward: its
//!           parameters); maps, kept_maps: tensor maps; shared_tiles, which tiles several heads share; clusters of two
//!           blocks; switches of other kernels that the host follows
//! family    which forward kernels a device runs, and how that is forced
//! modules   the kernels that were loaded so far, and what each is compiled for; load: how each is loaded
//! shared    one device for all callers that name it
//! sm_margin multiprocessors that attention leaves free
//! ```

mod abi;
mod embedded;
mod family;
mod hopper;
pub(crate) mod launch;
mod load;
mod margin_requests;
mod memory;
mod modules;
mod ptx_format;
mod replaced;
mod shared;
pub(crate) mod sm_margin;

pub(crate) use abi::base_addresses;
pub(crate) use abi::params::PageTable;
pub(crate) use launch::paged::{HeldDocuments, HeldRows};
pub(crate) use launch::{recorded, tags};

pub use crate::device::memory::{DeviceMemory, OwnStream};
pub use family::Family;
pub use launch::stream_kernels::StreamKernels;

use abi::shapes::{self, Shape};
use hopper::{clusters, kept_maps::KeptMaps};
use memory::metadata_ring::SpareRings;
use modules::{Instance, LoadedKernels};
use replaced::Replaced;

use crate::call::RawStream;
use crate::device::driver::{Context, Entered, check, sys};
use crate::element::Dtype;
use crate::error::{Error, Result};
use alloc::format;
use alloc::sync::Arc;
use margin_requests::MarginRequests;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One device, with the kernels that were loaded so far.
#[derive(Debug)]
pub struct Cuda {
    context: Arc<Context>,
    multiprocessors: u32,
    shared_limit: u32,
    l2_bytes: u64,
    /// Whether this `Cuda` runs the kernels for `sm_90a`.
    hopper: bool,
    /// Whether also those kernels for `sm_90a` run that need to be forced.
    every_hopper: bool,
    /// Whether calls run in clusters of two blocks where they can.
    clusters: bool,
    /// Kernels in the place of embedded ones.
    replaced: Option<&'static Replaced>,
    maps: KeptMaps,
    margin_requests: MarginRequests,
    kernels: Mutex<LoadedKernels>,
    spare_rings: SpareRings,
}

impl Cuda {
    /// Opens the device with this number. The environment variable [`Family::VARIABLE`], which is read only here,
    /// selects its attention kernels. Without it, devices of compute capability 9.0 use the kernels for `sm_90a` and
    /// all others those for `sm_80`. There are kernels for `sm_90a` at these head dims; the others run those for
    /// `sm_80` there too:
    ///
    /// | larger of head dim and value dim | kernels for `sm_90a` |
    /// |---|---|
    /// | up to 64, of 97 to 128, of 193 to 256 | used |
    /// | of 129 to 192, with a value dim of up to 128 | used |
    /// | of 65 to 96, other of 129 to 192 | a forward in no library (below), used only if the variable forces it; no backward |
    /// | above 256 | none |
    ///
    /// The variable `CPATTN_CUDA_CLUSTER`, which [`Cuda::with_family`] reads too, asks with `1` for clusters of two
    /// blocks that share what they copy of k and v, in the forward for `sm_90a`. They are used if the larger head dim
    /// is 97 to 128, the call holds whole pairs of q heads of a kv head, and no heads share tiles (as they do where
    /// ranges are short or end in short tiles). Results have the same bits; the speed has not been measured. `0`, empty
    /// or unset means no clusters. Where the kernels for `sm_90a` cannot run, or those for `sm_80` are forced, `1` is
    /// refused.
    ///
    /// No library has the kernels in clusters, nor those for `sm_90a` of 65 to 96 and of 129 to 192 but 192/128: their
    /// speed is not known. `ptx/compile --with CLUSTER,FORWARD_96_192 FOLDER` makes them, for the variable
    /// `CPATTN_CUDA_KERNELS`. Without them clusters are refused here, and a forced forward where its kernel is loaded.
    ///
    /// The variable `CPATTN_CUDA_KERNELS` names a folder, by an absolute path, whose kernels replace those of the
    /// library: the alternatives of `ptx/HARDWARE.md`, as `ptx/compile` makes them. It is read when the program opens
    /// its first device, and holds for all of them: a later open is refused if it has changed. Those kernels are
    /// trusted as the library itself is. The `Debug` form of a `Cuda` shows which they are.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when no driver is installed, the device is older than compute capability 8.0, or it does
    /// not run the kernels or the clusters that a variable asks for; [`Error::Invalid`] when there is no such device or
    /// a variable has no valid value; [`Error::Device`] when the driver fails (with code 100 when it sees no device at
    /// all, as when `CUDA_VISIBLE_DEVICES` is empty).
    pub fn new(ordinal: i32) -> Result<Self> {
        Self::open(ordinal, Family::of_environment()?)
    }

    /// The same with the given kernels instead of the environment variable's; [`Family::Sm90a`] uses the forward at
    /// every head dim up to 256.
    ///
    /// # Errors
    /// As [`Cuda::new`], except those of the variable that names a family; [`Error::Unsupported`] when the device or
    /// its driver does not run the kernels.
    pub fn with_family(ordinal: i32, family: Family) -> Result<Self> {
        Self::open(ordinal, Some(family))
    }

    fn open(ordinal: i32, family: Option<Family>) -> Result<Self> {
        let clusters = clusters::of_environment()?;
        let replaced = replaced::of_environment()?;
        let context = Context::new(ordinal)?;
        let major = context.attribute(sys::DEVICE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = context.attribute(sys::DEVICE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            return Err(Error::unsupported(
                format!("device {ordinal} of compute capability {major}.{minor}"),
                "the CUDA kernels need 8.0",
                "use the CPU kernels",
            ));
        }
        let multiprocessors = context.attribute(sys::DEVICE_MULTIPROCESSOR_COUNT)?.max(1) as u32;
        let shared_limit = context.attribute(sys::DEVICE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?.max(0) as u32;
        let l2_bytes = context.attribute(sys::DEVICE_L2_CACHE_SIZE)?.max(0) as u64;
        // Why it cannot run the kernels for `sm_90a`.
        let obstacle = match (major, minor) {
            (9, 0) if hopper::maps::driver_makes_maps() => None,
            (9, 0) => Some(format!("the driver of device {ordinal} encodes no tensor maps")),
            _ => Some(format!("device {ordinal} has compute capability {major}.{minor}, and they run on 9.0 alone")),
        };
        let hopper = obstacle.is_none() && family != Some(Family::Sm80);
        match obstacle {
            Some(why) if family == Some(Family::Sm90a) => return Err(Family::refused(why)),
            why if clusters && !hopper => return Err(clusters::refused(why)),
            _ if clusters => replaced::check_set(replaced, clusters::MODULE)?,
            _ => {}
        }
        Ok(Self {
            context,
            multiprocessors,
            shared_limit,
            l2_bytes,
            hopper,
            every_hopper: family == Some(Family::Sm90a),
            clusters,
            replaced,
            maps: KeptMaps::new(hopper),
            margin_requests: MarginRequests::default(),
            kernels: Mutex::new(LoadedKernels::default()),
            spare_rings: SpareRings::default(),
        })
    }

    /// The device's number.
    pub fn ordinal(&self) -> i32 {
        self.context.ordinal()
    }

    /// Multiprocessors of the device.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// The family of the forward kernels for calls with these head dims, if their tensors can be described by tensor
    /// maps.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for types and dims there is no kernel for.
    pub fn family(&self, dtype: Dtype, head_dim: u32, value_dim: u32) -> Result<Family> {
        let shape = Instance::find(dtype, head_dim, value_dim)?.index;
        Ok(if self.hopper_shape(shape).is_some() { Family::Sm90a } else { Family::Sm80 })
    }

    /// The family of the backward kernels for all gradients. Gradients of one side alone are always made by those for
    /// `sm_80`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for types and dims there is no kernel for.
    pub fn backward_family(&self, dtype: Dtype, head_dim: u32, value_dim: u32) -> Result<Family> {
        let shape = Instance::find(dtype, head_dim, value_dim)?.index;
        Ok(if self.hopper_backward(shape).is_some() { Family::Sm90a } else { Family::Sm80 })
    }

    /// Whether forward calls with these head dims run in clusters of two blocks where their q heads and tiles allow it:
    /// see [`Cuda::new`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] for types and dims there is no kernel for.
    pub fn clusters(&self, dtype: Dtype, head_dim: u32, value_dim: u32) -> Result<bool> {
        let shape = Instance::find(dtype, head_dim, value_dim)?.index;
        Ok(self.has_clusters(shape))
    }

    /// Allocates `bytes` bytes (at least one), with the alignment of the driver: 256 or more.
    ///
    /// # Errors
    /// [`Error::Device`] when the driver has no memory for it.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        DeviceMemory::new(&self.context, bytes)
    }

    /// Waits on the host until everything on the caller's stream is done.
    ///
    /// # Safety
    /// The stream is of the device's primary context.
    ///
    /// # Errors
    /// [`Error::Device`] when something on the device failed; [`Error::Unsupported`] for a stream that is being
    /// captured.
    pub unsafe fn synchronize(&self, stream: RawStream) -> Result<()> {
        // SAFETY: the stream is of the device's primary context (the contract of this function).
        if unsafe { self.context.is_capturing(stream) }? {
            return Err(Error::unsupported(
                "waiting for a stream that is being captured",
                "what is captured has not begun",
                "end the capture, launch its graph on a stream, and wait for that",
            ));
        }
        let _beside = self.context.enter_beside_captures()?;
        // SAFETY: the stream is of the device's primary context (the contract of this function).
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })
    }

    /// Makes a stream, for a transport of device memory.
    ///
    /// # Errors
    /// [`Error::Device`] when the driver makes none.
    pub fn new_stream(&self) -> Result<OwnStream> {
        OwnStream::new(&self.context)
    }

    /// The device's primary context.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    fn enter(&self) -> Result<Entered<'_>> {
        self.context.enter()
    }

    fn kernels(&self) -> MutexGuard<'_, LoadedKernels> {
        // A panic while loading leaves an entry empty or whole.
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The shape's fused backward, where the device has the shared memory for it.
    fn fused(&self, shape: &Shape) -> Option<shapes::Fused> {
        let fits = |f: &shapes::Fused| f.launch.shared + f.control <= self.shared_limit;
        shape.fused.filter(fits).or(shape.narrow_fused.filter(fits))
    }

    /// Blocks of a launch over `items` tiles, of which a multiprocessor holds `each`: one for each tile, or, if
    /// `resident` or where multiprocessors are left free, no more than run at a time.
    fn grid(&self, items: u32, each: u32, resident: bool) -> u32 {
        let sm_margin = self.sm_margin();
        if sm_margin == 0 && !resident {
            return items.min(i32::MAX as u32);
        }
        items.min(each.saturating_mul(self.multiprocessors.saturating_sub(sm_margin).max(1)))
    }
}
