// SPDX-License-Identifier: MIT OR Apache-2.0
//! The memory of the kernels' buffers, allocated once and used by every call.
//!
//! A kernel call allocates nothing. The caller owns a [`Scratch`], reserves the largest head dims that it will use with
//! [`Scratch::reserve`], and passes it to each call, which divides it into one part per worker and each part into
//! buffers. The contents do not survive a call.

use super::attention::dropout;
#[cfg(target_arch = "x86_64")]
use super::attention::forward::MAX_TILES;
use super::executor::Executor;
use super::isa::Isa;
use super::memory::arena::{KEYS, LANES, LANES_BACK, Line, MAX_LANES, PANEL, VECTOR, row};
use super::workers::Crew;
use crate::element::Dtype;
use crate::error::{Error, Result};
use alloc::{format, sync::Arc, vec::Vec};
use bytemuck::Zeroable;

/// The parameters that determine the size of the buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dims {
    /// Head dim of q and k.
    pub head_dim: u32,
    /// Head dim of v.
    pub value_dim: u32,
    /// Element type of q, k and v.
    pub dtype: Dtype,
}

/// Tile memory for one call at a time.
pub struct Scratch {
    lines: Vec<Line>,
    workers: usize,
    /// The instruction set of calls, or the error of every call.
    isa: Result<Isa>,
    executor: Option<Arc<dyn Executor>>,
}

impl core::fmt::Debug for Scratch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Scratch").field("workers", &self.workers).field("isa", &self.isa).finish_non_exhaustive()
    }
}

impl Scratch {
    /// Memory for `workers` (at least one) parallel workers; results do not depend on their number. More than one need
    /// the feature `rayon` or an [`Executor`]: without, every call is refused. With the feature they run in a pool of
    /// this crate, which the first such call of a process starts; if its threads cannot start, that call fails with
    /// [`Error::Device`], and the next one tries again.
    ///
    /// Calls run on [`Isa::chosen`]. If that is an error (the environment asks for an instruction set that the machine
    /// lacks), every call returns it.
    pub fn new(workers: usize) -> Self {
        Self { lines: Vec::new(), workers: workers.max(1), isa: Isa::chosen(), executor: None }
    }

    /// As [`Scratch::new`], for an instruction set of the caller's choice.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) when the machine lacks it.
    pub fn with_isa(workers: usize, isa: Isa) -> Result<Self> {
        Ok(Self { lines: Vec::new(), workers: workers.max(1), isa: Ok(isa.required()?), executor: None })
    }

    /// From now on calls run on this instruction set; on [`Isa::chosen`] for `None`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) when the machine lacks it, and as [`Isa::chosen`]; the scratch
    /// then stays as it was.
    pub fn set_isa(&mut self, isa: Option<Isa>) -> Result<()> {
        self.isa = Ok(isa.map_or_else(Isa::chosen, Isa::required)?);
        Ok(())
    }

    /// Runs the workers on threads of the caller's.
    #[must_use]
    pub fn with_executor(mut self, executor: Arc<dyn Executor>) -> Self {
        self.executor = Some(executor);
        self
    }

    /// The instruction set that calls run on.
    ///
    /// # Errors
    /// As [`Isa::chosen`]; more than one worker without threads for them (see [`Scratch::new`]).
    pub fn isa(&self) -> Result<Isa> {
        if self.workers > 1 && self.executor.is_none() && !cfg!(feature = "rayon") {
            return Err(Error::unsupported(
                format!("workers = {}", self.workers),
                "the kernels start no threads of their own",
                "build with the feature rayon, or give an executor",
            ));
        }
        self.isa.clone()
    }

    /// Starts the threads of the workers, if there are several and no executor has threads for them.
    ///
    /// # Errors
    /// [`Error::Device`] if a thread cannot start. A later call tries again.
    pub(crate) fn start_threads(&self) -> Result<()> {
        #[cfg(feature = "rayon")]
        if self.workers > 1 && self.executor.is_none() {
            return super::pool::ready();
        }
        Ok(())
    }

    /// Grows to the size that calls with this element type of q, k and v and these head dims need, forward or backward.
    /// Allocates nothing if it is large enough already.
    pub fn reserve(&mut self, dtype: Dtype, head_dim: u32, value_dim: u32) {
        let lines = Self::bytes(self.workers, &Dims { head_dim, value_dim, dtype }) / size_of::<Line>();
        if self.lines.len() < lines {
            self.lines = Vec::new();
            self.lines.resize(lines, Line::zeroed());
        }
    }

    /// The number of workers.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Bytes that `workers` workers need for calls of these dims, forward or backward.
    pub(super) fn bytes(workers: usize, dims: &Dims) -> usize {
        workers.max(1) * Self::worker_lines(dims) * size_of::<Line>()
    }

    /// Lines of one worker: the larger of the forward's and the backward's tiles.
    pub(super) fn worker_lines(dims: &Dims) -> usize {
        let size = dims.dtype.accumulator().size();
        let (d, dv) = (row(dims.head_dim as usize, size), row(dims.value_dim as usize, size));
        let keys = KEYS * (d + dv + 2) * size + KEYS * 16;
        // Matrix units pad value_dim to blocks of 32, and keep p apart from the scores.
        let lanes = if dims.dtype.size() == 2 { MAX_LANES } else { LANES };
        let forward = lanes * (d + dv.next_multiple_of(32) + 13) * size + lanes * 64 + 2 * KEYS * PANEL * size;
        let backward = LANES_BACK * (3 * d + 2 * dv + 2 * KEYS + 12) * size
            + LANES_BACK * 64
            + 2 * KEYS * (d + dv) * size
            + 2 * LANES_BACK * d * size;
        let rows = 2 * VECTOR * d.max(dv);
        #[cfg(target_arch = "x86_64")]
        let (forward, backward) = match dims.dtype.size() {
            2 => {
                let (d, dv) = (d.next_multiple_of(32), dv.next_multiple_of(32));
                let tiles = MAX_TILES * KEYS * (2 * (d + dv) + 24) + 4 * KEYS * PANEL;
                let parts = if dims.dtype == Dtype::F16 { 2 } else { 1 };
                (forward + tiles, backward.max(super::attention::tiled::bytes(d, dv, parts)))
            }
            4 => {
                // Three parts of an element take 6 bytes.
                let d = (dims.head_dim as usize).next_multiple_of(32);
                let dv = (dims.value_dim as usize).next_multiple_of(32);
                let lanes = MAX_LANES * (6 * d + 4 * dv + 52 + 64);
                (
                    forward.max(lanes + 2 * KEYS * (6 * (d + dv) + 24) + 16 * KEYS * PANEL),
                    backward.max(super::attention::tiled::bytes(d, dv, 3)),
                )
            }
            _ => (forward, backward),
        };
        // Each of at most eighty slices begins on a line of its own.
        (keys + forward.max(backward) + rows + dropout::BYTES).div_ceil(size_of::<Line>()) + 80
    }

    /// Bytes of the memory so far.
    pub(super) fn held(&self) -> usize {
        size_of_val(&*self.lines)
    }

    /// The workers with their memory, if it is large enough, and their threads.
    pub(super) fn crew(&mut self, dims: &Dims) -> Option<Crew<'_>> {
        let each = Self::worker_lines(dims);
        let lines = self.lines.get_mut(..self.workers * each)?;
        Some(Crew { lines, each, executor: self.executor.as_deref() })
    }
}
