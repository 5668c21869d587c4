// SPDX-License-Identifier: MIT OR Apache-2.0
//! The moves of a Ulysses exchange: heads of all tokens packed by destination, and unpacked again.

use crate::case::{Case, Kind};
use crate::device::{Device, normal, tensor, text};
use crate::{Prepared, Result};
use cpattn::call::{Block, RawTensor, Transform};
use cpattn::kernel::cuda::{DeviceMemory, StreamKernels};

pub struct Moves {
    case: Case,
    host: Vec<u16>,
    /// Source and destination.
    sets: Vec<[DeviceMemory; 2]>,
    kernels: StreamKernels,
}

/// The blocks of one move and where they come from.
fn blocks(case: &Case, [from, to]: &[DeviceMemory; 2]) -> (Vec<Block>, Vec<RawTensor>) {
    let width = case.heads / case.parts;
    let (whole, parts) = if case.kind == Kind::Pack { (from, to) } else { (to, from) };
    let all = tensor(whole, case.dtype, case.heads, case.head_dim);
    // The parts are stacked: all tokens of one part, then all tokens of the next.
    let stacked = tensor(parts, case.dtype, width, case.head_dim);
    let tokens = case.tokens() as u64;
    (0..case.parts)
        .map(|i| {
            let (a, b) = (all.heads((i * width) as u32, width as u32), stacked.rows(i as u64 * tokens, tokens));
            let (source, dst) = if case.kind == Kind::Pack { (a, b) } else { (b, a) };
            (Block { dst, sources_begin: i as u32, sources_end: i as u32 + 1 }, source)
        })
        .unzip()
}

impl Moves {
    pub fn new(device: &Device, case: &Case) -> Result<Self> {
        let host = normal(case.dtype, case.tokens() * case.heads * case.head_dim, 1);
        let bytes = host.len() * 2;
        let mut sets: Vec<[DeviceMemory; 2]> = Vec::new();
        for i in 0..device.sets(2 * bytes) {
            let set = [device.allocate(bytes)?, device.allocate(bytes)?];
            match i {
                0 => text(set[0].upload(bytemuck::cast_slice(&host)))?,
                _ => device.copy(&set[0], &sets[0][0])?,
            }
            sets.push(set);
        }
        let (blocks, sources) = blocks(case, &sets[0]);
        let mut kernels = device.kernels()?;
        let bytes = kernels.transform_metadata(&Transform { blocks: &blocks, sources: &sources });
        // For many calls, so that the host can run ahead without waiting.
        text(kernels.reserve_metadata(bytes * 16, 64))?;
        Ok(Self { case: case.clone(), host, sets, kernels })
    }
}

impl Prepared for Moves {
    fn launch(&mut self, device: &Device, set: usize) -> Result<()> {
        let (blocks, sources) = blocks(&self.case, &self.sets[set]);
        let call = Transform { blocks: &blocks, sources: &sources };
        // SAFETY: the buffers live as long as `self`, which is dropped after the stream was waited for.
        text(unsafe { self.kernels.transform(&call, device.stream) })
    }

    fn sets(&self) -> usize {
        self.sets.len()
    }

    fn check(&mut self, device: &Device) -> Result<f64> {
        device.poison(&self.sets[0][1])?;
        self.launch(device, 0)?;
        let found = device.download(&self.sets[0][1])?;
        let found: &[u16] = bytemuck::cast_slice(&found);
        let (tokens, width) = (self.case.tokens(), self.case.heads / self.case.parts * self.case.head_dim);
        for part in 0..self.case.parts {
            for token in 0..tokens {
                let (whole, packed) = ((token * self.case.parts + part) * width, (part * tokens + token) * width);
                let (from, to) = if self.case.kind == Kind::Pack { (whole, packed) } else { (packed, whole) };
                if self.host[from..from + width] != found[to..to + width] {
                    return Err(format!("part {part} of token {token} is not what was moved"));
                }
            }
        }
        Ok(0.0)
    }
}
