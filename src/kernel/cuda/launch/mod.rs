// SPDX-License-Identifier: MIT OR Apache-2.0
//! A launch as plain data: the kernel, its grid, and its parameters as bytes.
//!
//! A call is first converted into launches, and these are launched then
//! ([`recorded`](crate::kernel::cuda::launch::recorded)).

pub(super) mod attention;
pub(super) mod blocks;
pub(super) mod check;
pub(super) mod dropped;
pub(super) mod fused;
pub(super) mod max_logit;
mod merges;
pub(crate) mod paged;
pub(crate) mod recorded;
pub(super) mod stream_kernels;
pub(crate) mod tags;

use super::Cuda;
use crate::call::RawStream;
use crate::device::driver::Function;
use crate::error::{Error, Result};
use crate::kernel::cuda::abi::params::{Addresses, BASES, PageTable, Parameters, Tensor};
use crate::kernel::cuda::hopper::either_backward::use_sm80_params;
use crate::kernel::cuda::hopper::maps::MapShape;
use crate::kernel::cuda::hopper::{Hopper, Maps, Sm80Fallback};
use crate::kernel::cuda::memory::metadata_writer::Part;
use crate::kernel::cuda::modules::{AttentionModule, LoadedKernel};
use alloc::format;

/// The most bytes of a kernel's parameters.
pub(super) const PARAMETER_BYTES: usize = 448;
const WORDS: usize = PARAMETER_BYTES / 8;

/// The number of blocks.
#[derive(Clone, Copy, Debug)]
enum Grid {
    /// This number.
    Blocks(u32),
    /// One for each of `items` tiles. If multiprocessors are left free, and always if `resident`, at most as many as
    /// run at a time; each then takes several tiles. A multiprocessor holds `each` blocks.
    Tiles { items: u32, each: u32, resident: bool },
}

/// One kernel with everything that its launch needs.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    kernel: Kernel,
    pub(super) addresses: Addresses,
    params: [u64; WORDS],
}

/// The kernel of a launch.
#[derive(Clone, Copy, Debug)]
enum Kernel {
    Loaded {
        function: Function,
        grid: Grid,
        threads: u32,
        shared: u32,
    },
    /// A kernel for `sm_90a`, with parameters that begin with q, k and v. If it cannot do the launch, the kernel for
    /// `sm_80` is loaded and does it.
    Hopper(Hopper),
}

impl Launch {
    /// A launch of `blocks` blocks, at most 2^30, of a kernel whose blocks take several steps where needed.
    pub(super) fn blocks<P: Parameters>(function: Function, blocks: u64, threads: u32, params: &P) -> Self {
        let grid = Grid::Blocks(blocks.min(1 << 30) as u32);
        Self::of(Kernel::Loaded { function, grid, threads, shared: 0 }, params)
    }

    /// A launch of an attention kernel over `items` tiles.
    pub(super) fn tiles<P: Parameters>(kernel: LoadedKernel, items: u32, resident: bool, params: &P) -> Self {
        let LoadedKernel { function, launch, each } = kernel;
        let grid = Grid::Tiles { items, each, resident };
        Self::of(Kernel::Loaded { function, grid, threads: launch.threads, shared: launch.shared }, params)
    }

    /// A launch of a kernel for `sm_90a`, or of the other one where tensor maps cannot describe its tensors.
    pub(super) fn hopper_or_other<P: Parameters>(hopper: Hopper, params: &P) -> Self {
        Self::of(Kernel::Hopper(hopper), params)
    }

    fn of<P: Parameters>(kernel: Kernel, params: &P) -> Self {
        const { assert!(size_of::<P>() <= PARAMETER_BYTES && align_of::<P>() <= 8) };
        let mut words = [0; WORDS];
        bytemuck::cast_slice_mut(&mut words)[..size_of::<P>()].copy_from_slice(bytemuck::bytes_of(params));
        Self { kernel, addresses: P::ADDRESSES, params: words }
    }

    /// The word at a byte offset of the parameters.
    pub(super) fn word(&self, offset: usize) -> u64 {
        self.params[offset / 8]
    }

    /// Sets the word at a byte offset of the parameters.
    pub(super) fn set_word(&mut self, offset: usize, word: u64) {
        self.params[offset / 8] = word;
    }

    /// Sets the tensor at a byte offset of the parameters.
    pub(super) fn set_tensor(&mut self, offset: usize, tensor: Tensor) {
        self.params[offset / 8..][..3].copy_from_slice(bytemuck::cast_slice(&[tensor]));
    }

    /// Sets all bases at a byte offset of the parameters.
    pub(super) fn set_bases(&mut self, offset: usize, bases: &[Tensor; BASES]) {
        self.params[offset / 8..][..3 * BASES].copy_from_slice(bytemuck::cast_slice(bases));
    }

    /// Sets the table of pages at a byte offset of the parameters.
    pub(super) fn set_pages(&mut self, offset: usize, table: PageTable) {
        self.params[offset / 8..][..4].copy_from_slice(bytemuck::cast_slice(&[table]));
    }

    fn first_tensors(&self) -> [Tensor; 4] {
        [0, 3, 6, 9].map(|i| {
            let [ptr, token, head] = [0, 1, 2].map(|k| self.params[i + k]);
            Tensor { ptr, token: token as i64, head: head as i64 }
        })
    }

    /// The kernel for `sm_90a` and its maps, if it can do the launch.
    fn hopper(&self, cuda: &Cuda) -> Result<Option<(Hopper, Maps)>> {
        let Kernel::Hopper(hopper) = self.kernel else { return Ok(None) };
        let map = |shape: MapShape, t| cuda.maps.find(shape, t, || shape.encode(t));
        Ok(hopper.maps(self.first_tensors(), map)?.map(|maps| (hopper, maps)))
    }

    /// Puts it on a stream. The context is current.
    ///
    /// # Safety
    /// All addresses in the parameters are those of device memory that is as the kernel expects it when the launch
    /// runs, in stream order; the stream is of the current context, which is that of `cuda`; the kernel's module is
    /// loaded.
    pub(super) unsafe fn start(&self, cuda: &Cuda, stream: RawStream) -> Result<()> {
        if let Some(hopper) = self.hopper(cuda)? {
            // SAFETY: the promise of this function.
            return unsafe { self.start_hopper(&hopper, cuda, stream) };
        }
        let mut params = self.params;
        let (function, grid, threads, shared) = match self.kernel {
            Kernel::Loaded { function, grid, threads, shared } => (function, grid, threads, shared),
            Kernel::Hopper(Hopper { other: Sm80Fallback { module, instance, items }, .. }) => {
                let resident = module == AttentionModule::Fused;
                if resident {
                    use_sm80_params(&mut params);
                }
                let LoadedKernel { function, launch, each } = cuda.load(module, instance)?;
                (function, Grid::Tiles { items, each, resident }, launch.threads, launch.shared)
            }
        };
        let blocks = match grid {
            Grid::Blocks(n) => n,
            Grid::Tiles { items, each, resident } => cuda.grid(items, each, resident),
        };
        // SAFETY: the parameters are those of the kernel (`Launch::of`), in a block that is not shorter; the rest is
        // the promise of this function.
        unsafe { function.launch(blocks, threads, shared, stream, [params.as_ptr().cast()]) }
    }

    /// The same by the kernel for `sm_90a`.
    ///
    /// # Safety
    /// As [`Launch::start`]; `hopper` is what [`Launch::hopper`] says of this launch.
    unsafe fn start_hopper(
        &self,
        (Hopper { kernel, cluster, items, .. }, maps): &(Hopper, Maps),
        cuda: &Cuda,
        stream: RawStream,
    ) -> Result<()> {
        let blocks = cuda.grid(*items, kernel.each, true);
        // In clusters, if there are two blocks or more; both kernels take the same parameters.
        let (kernel, blocks) = match cluster {
            Some(cluster) if blocks > 1 => (cluster, blocks & !1),
            _ => (kernel, blocks),
        };
        let params = [core::ptr::from_ref(maps).cast(), self.params.as_ptr().cast()];
        // SAFETY: the maps are those of the tensors in the parameters, which are in a block that is not shorter than
        // the kernel's; the rest is the promise of this function.
        unsafe { kernel.function.launch(blocks, kernel.launch.threads, kernel.launch.shared, stream, params) }
    }
}

/// The launches of one call, at most three, and its metadata.
#[derive(Debug, Default)]
pub(crate) struct Launches {
    pub(super) part: Part,
    pub(super) list: [Option<Launch>; 3],
}

impl Launches {
    pub(super) fn one(part: Part, launch: Option<Launch>) -> Self {
        Self { part, list: [launch, None, None] }
    }
}

/// Tiles times heads.
pub(super) fn items(tiles: usize, heads: u32) -> Result<u32> {
    let items = tiles as u64 * u64::from(heads);
    u32::try_from(items).ok().filter(|&items| items <= i32::MAX as u32).ok_or_else(|| {
        Error::unsupported(format!("{items} tiles in one call"), "a launch has at most 2^31 blocks", "cut the ranges")
    })
}
