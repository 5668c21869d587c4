// SPDX-License-Identifier: MIT OR Apache-2.0
//! A kernel with the memory of its calls, and the moves of rows between tensors and packed copies.

use alloc::{
    boxed::Box,
    format,
    string::{String, ToString},
    vec::Vec,
};

use super::{
    Honours, VarlenKernel,
    memory::{Packed, in_place, strided},
    pieces::RowRun,
    table::{CallGroup, CallTable},
};
use crate::{
    call::{Block, HeadMap, Merge, QRange, Ranges, RawTensor, Score, Transform},
    error::{Error, Label, Result},
    plan::{Fingerprint, Plan},
    schedule::{Direction, Purpose},
};

/// A kernel with the memory of its calls.
pub(crate) struct KernelCalls {
    pub(super) kernel: Box<dyn VarlenKernel>,
    pub(super) honours: Honours,
    /// The rank and the operation that calls, for errors.
    at: (usize, Label),
    /// The packed rows of a call.
    pub(super) packed: Packed,
    /// Partial results of ranges that have no running result.
    pub(super) partial: Packed,
    blocks: Vec<Block>,
    sources: Vec<RawTensor>,
    pub(super) ranges: Vec<QRange>,
}

impl KernelCalls {
    pub(crate) fn new(kernel: Box<dyn VarlenKernel>, rank: usize) -> Self {
        Self {
            honours: kernel.honours(),
            kernel,
            at: (rank, Label::new("attend", 0)),
            packed: Packed::default(),
            partial: Packed::default(),
            blocks: Vec::new(),
            sources: Vec::new(),
            ranges: Vec::new(),
        }
    }

    /// # Errors
    /// The kernel's, as [`Error::Kernel`].
    ///
    /// # Safety
    /// As [`VarlenKernel::transform`].
    pub(crate) unsafe fn transform(&mut self, args: &Transform<'_>) -> Result<()> {
        // SAFETY: the contract.
        unsafe { self.kernel.transform(args) }.map_err(|error| self.failed(error))
    }

    /// # Errors
    /// The kernel's, as [`Error::Kernel`].
    ///
    /// # Safety
    /// As [`VarlenKernel::merge`].
    pub(crate) unsafe fn merge(&mut self, args: &Merge) -> Result<()> {
        // SAFETY: the contract.
        unsafe { self.kernel.merge(args) }.map_err(|error| self.failed(error))
    }

    pub(crate) fn name(&self) -> &str {
        self.kernel.name()
    }

    /// What the ranks of a group compare of a kernel, in words.
    pub(crate) fn description(&self) -> String {
        format!("kernel {:?} with {:?}", self.name(), self.honours)
    }

    /// The same as a number.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut h = Fingerprint::new();
        self.name().bytes().for_each(|byte| h.word(byte.into()));
        self.honours.words().into_iter().for_each(|word| h.word(word));
        h.finish()
    }

    /// Refuses the runs of a plan that the kernel does not honour.
    pub(crate) fn check(&self, plan: &Plan, run: Purpose) -> Result<()> {
        match run {
            Purpose::Attention(direction) => self.honours.check(self.name(), plan, direction == Direction::Backward),
            _ => Ok(()),
        }
    }

    /// The calls of an operation.
    pub(crate) fn table(&self, ranges: &Ranges<'_>, score: &Score, slopes: bool) -> CallTable {
        CallTable::new(ranges, score, slopes, self.honours.windows)
    }

    /// Names the operation that calls from now on.
    pub(crate) fn begin(&mut self, label: Label) {
        self.at.1 = label;
    }

    /// The rank and the operation that calls.
    pub(super) fn place(&self) -> (usize, Label) {
        self.at
    }

    /// The error of the operation that calls.
    pub(super) fn failed(&self, message: impl core::fmt::Display) -> Error {
        let (rank, at) = self.at;
        Error::Kernel { rank, at, kernel: self.name().to_string(), message: format!("{message}") }
    }

    /// Whether each q head needs a copy of its kv head: where heads do not come in groups of one size, and where the
    /// kernel does not take groups.
    pub(super) fn expands(&self, map: &HeadMap, heads: u32, kv_heads: u32) -> bool {
        let group = heads / kv_heads.max(1);
        let regular = group * kv_heads == heads && (0..heads).all(|h| map.kv(h) == h / group);
        !regular || group > 1 && !self.honours.groups
    }

    /// # Safety
    /// As [`VarlenKernel::transform`], of the blocks that were listed since the last call.
    pub(super) unsafe fn move_rows(&mut self) -> Result<()> {
        let Self { kernel, blocks, sources, .. } = self;
        if blocks.is_empty() {
            return Ok(());
        }
        // SAFETY: the contract.
        let outcome = unsafe { kernel.transform(&Transform { blocks, sources }) };
        blocks.clear();
        sources.clear();
        outcome.map_err(|error| self.failed(error))
    }

    /// Lists a block for the next [`KernelCalls::move_rows`].
    pub(super) fn list(&mut self, dst: RawTensor, sources: impl IntoIterator<Item = RawTensor>) {
        let sources_begin = self.sources.len() as u32;
        self.sources.extend(sources);
        self.blocks.push(Block { dst, sources_begin, sources_end: self.sources.len() as u32 });
    }

    /// The rows of some runs packed in `to`, or where they lie. `map`: a copy of its kv head for each q head of `to`.
    ///
    /// # Safety
    /// The rows are valid for reads, `to` for writes.
    pub(super) unsafe fn gather(
        &mut self,
        from: RawTensor,
        runs: &[RowRun],
        map: Option<&HeadMap>,
        to: RawTensor,
    ) -> Result<RawTensor> {
        if let Some(rows) = in_place(&from, runs)
            && map.is_none()
            && to.is_compact()
            && to.token_stride != 1
        {
            return Ok(rows);
        }
        let mut at = 0;
        for &run in runs {
            let (dst, rows) = (to.rows(at, run.count.into()), strided(from, run));
            match map {
                None => self.list(dst, [rows]),
                Some(map) => {
                    for h in 0..to.heads {
                        self.list(dst.heads(h, 1), [rows.heads(map.kv(h), 1)]);
                    }
                }
            }
            at += u64::from(run.count);
        }
        // SAFETY: the blocks are rows of `to`, each once, and sources are rows of `from`: other memory.
        unsafe { self.move_rows() }?;
        Ok(to)
    }

    /// The slopes of each sequence of a call, `[sequences, heads]`; empty without any.
    ///
    /// # Safety
    /// The tensor is valid for reads: f32, of one row or of one for each document.
    pub(super) unsafe fn slopes(slopes: &RawTensor, group: &CallGroup) -> Vec<f32> {
        if slopes.is_none() {
            return Vec::new();
        }
        let of = |document: u32| {
            let row = if slopes.tokens == 1 { 0 } else { document.into() };
            // SAFETY: a number of the tensor.
            (0..slopes.heads).map(move |h| unsafe { *slopes.rows(row, 1).heads(h, 1).ptr.cast::<f32>() })
        };
        group.documents.iter().flat_map(|&document| of(document)).collect()
    }
}
