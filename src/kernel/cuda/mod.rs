// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CUDA backend: executes the calls of [`crate::call`] on the caller's stream.
//!
//! [`Cuda`] is one device. Its kernels are PTX for compute capability 8.0, with a separate forward for 9.0, embedded in
//! the crate; the driver compiles them when [`Cuda::prepare`] (or the first call) needs them. Tensors are device
//! addresses, streams are raw driver handles of the device's primary context. A call checks its arguments, writes its
//! ranges into a [`Staging`] ring buffer, copies them to the device unless an earlier call has, and launches. It waits
//! for the device only if that ring buffer is full, and allocates nothing once the kernels are loaded. Before you drop
//! a [`Cuda`], wait for its launches.
//!
//! Not supported in attention, and refused with an error: f32 and f64 elements, head dims above 256 or not a multiple
//! of 8, rows that are not aligned to 16 bytes, and [`Attend::aligned`](crate::call::Attend::aligned). [`Merge`] takes
//! f32 only, dims that are multiples of 4 and rows of o at multiples of 16 bytes; transforms take f16, bf16 and f32 of
//! any dim and alignment. The `Safety` section of each call lists what it cannot check: that tensors do not overlap
//! ([`tensor::disjoint`](crate::tensor::disjoint) checks that), and that memory is as large as the shape and strides
//! say.
//!
//! A [`RawStream`](crate::kernel::RawStream) is a `CUstream` or `cudaStream_t` of any binding, cast; null is the legacy
//! default stream. Memory may come from any allocator; [`Cuda::allocate`] is for programs that have none.
//!
//! ```text
//! driver    contexts, modules, events; the check of every call
//! embedded  the PTX
//! shapes    tiles and threads of the compiled kernels
//! params    what a kernel is handed
//! metadata  the scheduler metadata of a call: ranges as runs, partners and tiles; metadata_buffer: where it is written
//! dq_semaphore  the metadata of the fused backward, and which tile waits for which
//! staging   how metadata reaches the device, through a mirror of host and device memory
//! check     what a call is refused for
//! attention, fused, blocks, sinks   the launches
//! family    which forward kernels a device runs, and how that is forced
//! hopper    the forward kernels for compute capability 9.0; shared_tiles: which of their tiles several heads share
//! memory    streams and memory for what sits on top; shared: one device for all callers that name it
//! tags      what runs on devices carry along, so that ranks which differ are found
//! stream_kernels  single calls of a caller's, with the ring they need
//! spare_rings, lent_ring, last_calls   what such calls share, and what is waited for when they end
//! ```

mod attention;
pub(crate) mod bases;
mod blocks;
mod check;
mod dq_semaphore;
pub(crate) mod driver;
mod embedded;
mod family;
mod fused;
mod hopper;
mod hopper_calls;
pub(crate) mod kept;
mod kept_maps;
mod last_calls;
mod launch;
mod lent_ring;
mod margins;
pub(crate) mod memory;
mod metadata;
mod metadata_buffer;
mod params;
mod pinned_mirror;
mod ready;
mod shapes;
mod shared;
mod shared_tiles;
mod sinks;
pub(crate) mod sm_margin;
mod spare_rings;
mod staging;
mod stream_kernels;
pub(crate) mod tags;

pub use crate::call::Merge;
pub use family::Family;
pub use memory::DeviceMemory;
pub use staging::Staging;
pub use stream_kernels::StreamKernels;

use ready::{ELEMENTS, Ready};

use crate::element::Dtype;
use crate::error::{Error, Result};
use alloc::format;
use alloc::sync::Arc;
use core::ffi::CStr;
use driver::{Context, Entered, Function, Module, sys};
use kept_maps::KeptMaps;
use margins::Margins;
use shapes::{SHAPES, Shape, Shaped};
use spare_rings::SpareRings;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One device, with the kernels that were loaded so far.
#[derive(Debug)]
pub struct Cuda {
    context: Arc<Context>,
    multiprocessors: u32,
    shared_limit: u32,
    l2_bytes: u64,
    /// Whether it runs the kernels for `sm_90a`.
    hopper: bool,
    /// Whether it runs those of them, too, that are not taken unless they are asked for.
    every_hopper: bool,
    maps: KeptMaps,
    margins: Margins,
    kernels: Mutex<LoadedKernels>,
    rings: SpareRings,
}

/// What was loaded, by element type (f16, bf16) and shape.
#[derive(Debug, Default)]
struct LoadedKernels {
    attention: [[Option<AttentionKernels>; SHAPES.len()]; 2],
    hopper: hopper::LoadedForward,
    blocks: Option<Blocks>,
}

/// The kernels of one element type and shape. The modules keep them alive.
#[derive(Debug)]
struct AttentionKernels {
    forward: Ready,
    fused: Option<Ready>,
    /// Loaded when a call first needs them: where there is a fused kernel, only calls for one side do.
    sides: Option<Sides>,
    _modules: [Option<Module>; 2],
}

/// The backward kernels of one side each.
#[derive(Debug)]
struct Sides {
    queries: Ready,
    keys: Ready,
    values: Option<Ready>,
    _module: Module,
}

/// The kernels of `transform.ptx`, `sinks.ptx` and `tags.ptx`.
#[derive(Debug)]
struct Blocks {
    transform: Function,
    delta: Function,
    finish: Function,
    merge: Function,
    sinks: Function,
    begin_run: Function,
    arrived: Function,
    _modules: [Module; 3],
}

impl Cuda {
    /// Opens the device with this number. The environment variable [`Family::VARIABLE`], which is read only here,
    /// selects its forward kernels. Without it, devices of compute capability 9.0 use the kernels for `sm_90a` and all
    /// others those for `sm_80`. Compute capability 9.0 also uses those for `sm_80` where the larger of head dim and
    /// value dim is 65 to 96, or the value dim is 129 to 192 and the head dim at most 192 (neither was measured there
    /// yet).
    ///
    /// # Errors
    /// [`Error::Unsupported`] when no driver is installed, the device is older than compute capability 8.0, or it does
    /// not run the kernels that the environment variable names; [`Error::Invalid`] when there is no such device or the
    /// variable has no valid name; [`Error::Device`] when the driver fails (with code 100 when it sees no device at
    /// all, as when `CUDA_VISIBLE_DEVICES` is empty).
    pub fn new(ordinal: i32) -> Result<Self> {
        Self::open(ordinal, Family::of_environment()?)
    }

    /// The same with the given forward kernels instead of the environment variable's; [`Family::Sm90a`] uses them at
    /// every head dim.
    ///
    /// # Errors
    /// As [`Cuda::new`], except those of the variable; [`Error::Unsupported`] when the device or its driver does not
    /// run the kernels.
    pub fn with_family(ordinal: i32, family: Family) -> Result<Self> {
        Self::open(ordinal, Some(family))
    }

    fn open(ordinal: i32, family: Option<Family>) -> Result<Self> {
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
        let (is_hopper, has_maps) = ((major, minor) == (9, 0), hopper::driver_makes_maps());
        if family == Some(Family::Sm90a) && !(is_hopper && has_maps) {
            return Err(Family::refused(match is_hopper {
                true => format!("the driver of device {ordinal} encodes no tensor maps"),
                false => format!("device {ordinal} has compute capability {major}.{minor}, and they run on 9.0 alone"),
            }));
        }
        let hopper = is_hopper && has_maps && family != Some(Family::Sm80);
        Ok(Self {
            context,
            multiprocessors,
            shared_limit,
            l2_bytes,
            hopper,
            every_hopper: family == Some(Family::Sm90a),
            maps: KeptMaps::new(hopper),
            margins: Margins::default(),
            kernels: Mutex::new(LoadedKernels::default()),
            rings: SpareRings::default(),
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
        let (_, shape, _) = find(dtype, head_dim, value_dim)?;
        Ok(if self.hopper_shape(shape).is_some() { Family::Sm90a } else { Family::Sm80 })
    }

    /// Loads the kernels for an element type and head dims, which can take the driver seconds. Call it when you make
    /// the plan; otherwise the first call loads its kernels. If the device runs the backward as one kernel, the kernels
    /// for one side's gradients are not loaded here, but by the first call that needs only one side.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for types and dims there is no kernel for, [`Error::Device`] when the driver refuses the
    /// PTX.
    pub fn prepare(&self, dtype: Dtype, head_dim: u32, value_dim: u32) -> Result<()> {
        let (element, shape, _) = find(dtype, head_dim, value_dim)?;
        let mut kernels = self.kernels();
        self.attention(&mut kernels, element, shape)?;
        self.load_hopper(&mut kernels.hopper, element, shape)?;
        self.blocks(&mut kernels)?;
        Ok(())
    }

    /// Loads the kernels that do not depend on head dims: transforms, delta, finish, merge, the sinks' gradient.
    ///
    /// # Errors
    /// [`Error::Device`] when the driver refuses the PTX.
    pub fn prepare_blocks(&self) -> Result<()> {
        self.blocks(&mut self.kernels()).map(|_| ())
    }

    /// Whether the kernels for this type and these dims are loaded.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for types and dims there is no kernel for.
    pub fn is_prepared(&self, dtype: Dtype, head_dim: u32, value_dim: u32) -> Result<bool> {
        let (element, shape, _) = find(dtype, head_dim, value_dim)?;
        Ok(self.kernels().attention[element][shape].is_some())
    }

    /// Allocates a ring buffer of `bytes` bytes for the scheduler metadata of calls, up to `launches` of them in
    /// flight. [`Cuda::attend_bytes`] and similar functions return the bytes of one call.
    ///
    /// # Errors
    /// [`Error::Device`] when the driver has no memory for it.
    pub fn staging(&self, bytes: usize, launches: usize) -> Result<Staging> {
        Staging::new(&self.context, bytes, launches)
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

    fn module(&self, name: &str) -> Result<Module> {
        let text = embedded::find(name).ok_or_else(|| {
            Error::unsupported(format!("kernel {name}"), "it is not embedded in this build", "build from a whole tree")
        })?;
        Module::new(&self.context, name, &text)
    }

    fn function(&self, module: &Module, name: &CStr, launch: Shaped) -> Result<Ready> {
        if launch.shared > self.shared_limit {
            return Err(Error::unsupported(
                format!("{} bytes of shared memory for {name:?}", launch.shared),
                format!("device {} has {}", self.context.ordinal(), self.shared_limit),
                "use the CPU kernels",
            ));
        }
        let function = module.function(name, launch.shared)?;
        let _entered = self.enter()?;
        let each = function.blocks_per_multiprocessor(launch.threads, launch.shared)?;
        Ok(Ready { function, launch, each })
    }

    fn attention<'a>(
        &self,
        kernels: &'a mut LoadedKernels,
        element: usize,
        shape: usize,
    ) -> Result<&'a mut AttentionKernels> {
        let slot = &mut kernels.attention[element][shape];
        if slot.is_none() {
            let s = &SHAPES[shape];
            let name = ELEMENTS[element];
            let forward = self.module(&format!("forward_{name}_{}", s.name))?;
            let (fused, fused_module) = match self.fused(s) {
                Some(f) => {
                    let module = self.module(&format!("fused_{name}_{}", s.name))?;
                    (Some(self.function(&module, c"cpattn_backward_fused", f.launch)?), Some(module))
                }
                None => (None, None),
            };
            *slot = Some(AttentionKernels {
                forward: self.forward(&forward, s)?,
                // Without a fused kernel every backward needs them, so `prepare` loads them.
                sides: if fused.is_none() { Some(self.load_sides(element, s)?) } else { None },
                fused,
                _modules: [Some(forward), fused_module],
            });
        }
        Ok(slot.as_mut().expect("filled above"))
    }

    /// The kernels that make one side's gradients each, loaded if they are not.
    fn sides<'a>(&self, kernels: &'a mut LoadedKernels, element: usize, shape: usize) -> Result<&'a Sides> {
        let attention = self.attention(kernels, element, shape)?;
        if attention.sides.is_none() {
            attention.sides = Some(self.load_sides(element, &SHAPES[shape])?);
        }
        Ok(attention.sides.as_ref().expect("filled above"))
    }

    fn load_sides(&self, element: usize, s: &Shape) -> Result<Sides> {
        let module = self.module(&format!("backward_{}_{}", ELEMENTS[element], s.name))?;
        Ok(Sides {
            queries: self.function(&module, c"cpattn_backward_queries", s.queries)?,
            keys: self.function(&module, c"cpattn_backward_keys", s.keys)?,
            values: match s.split {
                true => Some(self.function(&module, c"cpattn_backward_values", s.keys)?),
                false => None,
            },
            _module: module,
        })
    }

    fn blocks<'a>(&self, kernels: &'a mut LoadedKernels) -> Result<&'a Blocks> {
        if kernels.blocks.is_none() {
            let module = self.module("transform")?;
            let sinks = self.module("sinks")?;
            let tags = self.module("tags")?;
            kernels.blocks = Some(Blocks {
                transform: module.function(c"cpattn_transform", 0)?,
                delta: module.function(c"cpattn_delta", 0)?,
                finish: module.function(c"cpattn_finish", 0)?,
                merge: module.function(c"cpattn_merge", 0)?,
                sinks: sinks.function(c"cpattn_sinks", 0)?,
                begin_run: tags.function(c"cpattn_begin_run", 0)?,
                arrived: tags.function(c"cpattn_arrived", 0)?,
                _modules: [module, sinks, tags],
            });
        }
        Ok(kernels.blocks.as_ref().expect("filled above"))
    }

    /// The shape's forward, of the tiles of which two blocks share a multiprocessor, if any does.
    fn forward(&self, module: &Module, shape: &Shape) -> Result<Ready> {
        let Some(narrow) = shape.narrow else { return self.function(module, c"cpattn_forward", shape.forward) };
        if shape.forward.shared <= self.shared_limit {
            let wide = self.function(module, c"cpattn_forward", shape.forward)?;
            if wide.each >= 2 {
                return Ok(wide);
            }
        }
        self.function(module, c"cpattn_forward_narrow", narrow)
    }

    /// The shape's fused backward, where the device has the shared memory for it.
    fn fused(&self, shape: &Shape) -> Option<shapes::Fused> {
        Some(shape.fused).filter(|f| f.launch.shared + f.control <= self.shared_limit)
    }

    /// Blocks of a launch over `items` tiles, of which a multiprocessor holds `each`: one for each tile, or, if `resident`
    /// or where multiprocessors are left free, no more than run at a time.
    fn grid(&self, items: u32, each: u32, resident: bool) -> u32 {
        let sm_margin = self.sm_margin();
        if sm_margin == 0 && !resident {
            return items.min(i32::MAX as u32);
        }
        items.min(each.saturating_mul(self.multiprocessors.saturating_sub(sm_margin).max(1)))
    }
}

/// Index of the element type, and the shape that holds the head dims.
fn find(dtype: Dtype, head_dim: u32, value_dim: u32) -> Result<(usize, usize, &'static Shape)> {
    check::element(dtype)?;
    let largest = &SHAPES[SHAPES.len() - 1];
    check::dim("head_dim", head_dim, largest.head_dim)?;
    check::dim("value_dim", value_dim, largest.value_dim)?;
    let (shape, s) = shapes::find(head_dim, value_dim).expect("the largest shape holds every dim that passed");
    Ok((usize::from(dtype == Dtype::Bf16), shape, s))
}
