// SPDX-License-Identifier: MIT OR Apache-2.0
//! A cluster that is resident: its blocks and warps, how they begin, and what is said when none of them can go on.

use super::block::Block;
use super::cluster::Cluster;
use super::grid::Grid;
use super::launch::Launch;
use super::warp::Warp;
use crate::mem::shared::SharedMemory;
use crate::module::Kernel;
use crate::op::{Code, LaneFault, Special, Value};
use crate::report::Fault;

/// A cluster that runs, of one block as a rule.
pub(crate) struct Resident {
    pub(crate) blocks: Vec<Block>,
    /// Those of one block after those of another.
    pub(crate) warps: Vec<Option<Warp>>,
    /// Warps of a block.
    pub(crate) each: usize,
    pub(crate) cluster: Cluster,
    pub(crate) left: usize,
    /// Turns taken, for the fair order of eager runs.
    pub(crate) turns: usize,
    /// Turns in a row in which warps asked for something and did not get it.
    pub(crate) polls: u32,
    /// One turn in so many lets a bulk copy move; 0: none does before no warp can go on without it.
    pub(crate) patience: u32,
}

/// A fault, its instruction, and the block it is about.
pub(crate) type Found = (LaneFault, (usize, Where));

/// A block's index and shape.
pub(crate) type Where = ([u32; 3], [u32; 3]);

pub(crate) fn place(block: &Block) -> Where {
    (block.id, block.shape)
}

/// The cluster that is the `c`-th of its grid, before its first instruction.
pub(crate) fn start(kernel: &Kernel, grid: &mut Grid, how: &Launch<'_>, shape: [u32; 3], c: u32) -> Resident {
    let code = &*kernel.code;
    let clusters = [how.grid[0] / shape[0], how.grid[1] / shape[1]];
    let first = [
        c % clusters[0] * shape[0],
        c / clusters[0] % clusters[1] * shape[1],
        c / clusters[0] / clusters[1] * shape[2],
    ];
    let threads = how.block[0] * how.block[1] * how.block[2];
    let count = threads.div_ceil(32) as usize;
    let products = !code.matrix_registers.is_empty();
    let bytes = code.dynamic_offset + how.dynamic_shared;
    let mut cluster = Cluster::new(shape, count);
    let (mut blocks, mut warps) = (Vec::new(), Vec::new());
    for rank in 0..cluster.blocks() {
        let within = [rank % shape[0], rank / shape[0] % shape[1], rank / shape[0] / shape[1]];
        let id = [0, 1, 2].map(|d| first[d] + within[d]);
        let b = id[0] + how.grid[0] * (id[1] + how.grid[1] * id[2]);
        let shared = SharedMemory::new(bytes, count, products, how.options.shared_races);
        let block = Block::new((id, grid.first_block + b, rank as usize), how.block, shared, code);
        for w in 0..count {
            let here = (threads - w as u32 * 32).min(32);
            let exist = if here == 32 { !0 } else { (1u32 << here) - 1 };
            let mut warp = Warp::new(w, exist, code.rows, code.preds, code.local_bytes, code.matrix_registers.len());
            fill(kernel, &mut warp, grid, how, (&block, &cluster));
            cluster.set_alive((rank as usize, w), exist);
            warps.push(Some(warp));
        }
        blocks.push(block);
    }
    let patience = [2, 16, 128, 0][grid.random(4) as usize];
    Resident { blocks, left: warps.len(), warps, each: count, cluster, turns: 0, polls: 0, patience }
}

/// Fills the rows of immediates, symbols and special registers.
fn fill(kernel: &Kernel, warp: &mut Warp, grid: &Grid, how: &Launch<'_>, (block, cluster): (&Block, &Cluster)) {
    let regs = warp.regs_ptr();
    let [nx, ny, _] = how.block;
    let sms = how.options.multiprocessors.max(1);
    for &(row, value, wide) in &kernel.code.values {
        for l in 0..32u32 {
            let thread = warp.index as u32 * 32 + l;
            let v = match value {
                Value::Bits(b) => b,
                Value::Global(var, offset) => kernel.globals[var].wrapping_add_signed(offset),
                Value::Special(s) => u64::from(match s {
                    Special::Tid(0) => thread % nx,
                    Special::Tid(1) => thread / nx % ny,
                    Special::Tid(_) => thread / nx / ny,
                    Special::Ntid(d) => how.block[usize::from(d)],
                    Special::Ctaid(d) => block.id[usize::from(d)],
                    Special::Nctaid(d) => grid.shape[usize::from(d)],
                    Special::ClusterCtaid(d) => block.id[usize::from(d)] % cluster.shape[usize::from(d)],
                    Special::ClusterNctaid(d) => cluster.shape[usize::from(d)],
                    Special::Clusterid(d) => block.id[usize::from(d)] / cluster.shape[usize::from(d)],
                    Special::Nclusterid(d) => grid.shape[usize::from(d)] / cluster.shape[usize::from(d)],
                    Special::ClusterCtarank => block.rank as u32,
                    Special::ClusterNctarank => cluster.blocks(),
                    Special::Lane => l,
                    Special::Warp => warp.index as u32,
                    Special::Warps => block.threads().div_ceil(32),
                    Special::Sm => block.number % sms,
                    Special::Sms => sms,
                    Special::GridId => 1,
                    Special::LaneMask(0) => 1 << l,
                    Special::LaneMask(1) => (1 << l) - 1,
                    Special::LaneMask(2) => (1 << l) | ((1 << l) - 1),
                    Special::LaneMask(3) => !(1 << l) & !((1 << l) - 1),
                    Special::LaneMask(_) => !((1 << l) - 1),
                    Special::DynamicShared => how.dynamic_shared,
                    Special::TotalShared => block.shared.size(),
                    Special::WarpSize => 32,
                }),
            };
            // SAFETY: the decoder numbers rows below `Code::rows`; wide ones are followed by their second half.
            unsafe {
                let p = regs.add(row as usize * 32);
                if wide {
                    p.cast::<u64>().add(l as usize).write_unaligned(v);
                } else {
                    *p.add(l as usize) = v as u32;
                }
            }
        }
    }
}

/// Nobody in a cluster can go on: who waits where, and for what.
#[cold]
pub(crate) fn deadlock(code: &Code, r: &Resident) -> Found {
    let (mut at, mut more) = (Vec::new(), Vec::new());
    let mut found = None;
    for (w, warp) in r.warps.iter().enumerate() {
        if let Some(g) = warp.as_ref().and_then(|w| w.groups.first()) {
            found = Some((g.pc, w / r.each));
            let of = if r.blocks.len() > 1 { format!(" of rank {}", w / r.each) } else { String::new() };
            at.push(format!("warp {}{of} at line {}", w % r.each, code.ins[g.pc].line));
        }
    }
    for b in &r.blocks {
        let waiting = b.waiting_barriers();
        more.push(if r.blocks.len() > 1 { format!("rank {}: {waiting}", b.rank) } else { waiting });
    }
    more.extend(Some(r.cluster.missing()).filter(|m| !m.is_empty()));
    let ended = r.warps.iter().filter(|w| w.is_none()).count();
    let detail = format!("no warp can go on: {} ({ended} warps have ended); {}", at.join(", "), more.join("; "));
    let (pc, rank) = found.unwrap_or_default();
    (LaneFault { fault: Fault::Deadlock, lane: None, detail }, (pc, place(&r.blocks[rank])))
}
