// SPDX-License-Identifier: MIT OR Apache-2.0
//! What instructions do, and the form they are executed in.
//!
//! An instruction is a function pointer and the rows of its operands. A row is the 32 lanes of one register, in 32-bit
//! slots (64-bit registers take two rows, one after the other). Immediates, symbols and special registers are rows too,
//! filled when a warp starts, so that no opcode needs to tell them apart from registers. Predicates are masks.
//!
//! Each family of opcodes is a file: its functions, and its part of the decoder. A family that is added later is
//! another file and a line in [`decode`].

pub(crate) mod atomic;
pub(crate) mod bits;
pub(crate) mod bulk;
pub(crate) mod cluster;
pub(crate) mod control;
pub(crate) mod convert;
pub(crate) mod copy;
pub(crate) mod decode;
mod decode_bulk;
mod decode_cluster;
mod decode_mbarrier;
mod decode_move;
mod decode_sync;
mod decode_wgmma;
pub(crate) mod exchange;
pub(crate) mod flags;
pub(crate) mod float;
pub(crate) mod global;
pub(crate) mod half;
pub(crate) mod int;
pub(crate) mod mbarrier;
pub(crate) mod memory;
pub(crate) mod moves;
pub(crate) mod rows;
pub(crate) mod select;
pub(crate) mod shared;
pub(crate) mod sync;
pub(crate) mod table;
pub(crate) mod tensor;
pub(crate) mod tensor_copy;
pub(crate) mod wgmma;

use crate::exec::block::Block;
use crate::exec::cluster::{Cluster, Peers};
use crate::exec::grid::Grid;
use crate::exec::warp::Warp;
use crate::mem::Memory;
use crate::ptx::{Param, Space};
use crate::report::Fault;

/// What happens after an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// On to the next one.
    Next,
    /// The executing lanes go to [`Cx::target`], the others of the group to the next one.
    Jump,
    /// The executing lanes end.
    Exit,
    /// The group waits here until the other lanes of its warp arrive.
    Park,
    /// The warp waits for other warps and then executes this instruction again.
    Wait,
    /// As `Next`, but other warps run first.
    Yield,
    /// As `Yield`, after asking for something that is not there yet.
    Poll,
    /// Other warps run first; then this instruction is executed again, because something is not there yet.
    Again,
    /// The lanes of the group go where [`Cx::scattered`] says.
    Scatter,
    /// [`Cx::fault`] says why.
    Fault,
}

/// Executes an instruction for the lanes of a mask.
pub(crate) type OpFn = unsafe fn(&mut Cx, &Ins, u32) -> Flow;

/// A decoded instruction.
#[derive(Clone, Debug)]
pub(crate) struct Ins {
    pub(crate) f: OpFn,
    /// Row (or predicate) of the result.
    pub(crate) dst: u32,
    /// Rows of the operands, or what the opcode keeps there.
    pub(crate) a: u32,
    pub(crate) b: u32,
    pub(crate) c: u32,
    pub(crate) e: u32,
    /// Index of further particulars in one of [`Code`]'s lists.
    pub(crate) x: u32,
    /// Predicate, or `NO_GUARD`.
    pub(crate) guard: u32,
    pub(crate) guard_negated: bool,
    /// Line of the PTX.
    pub(crate) line: u32,
}

pub(crate) const NO_GUARD: u32 = u32::MAX;

/// A value that rows are filled with before a warp starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Value {
    /// The same bits in every lane.
    Bits(u64),
    /// Address of a module variable plus an offset.
    Global(usize, i64),
    /// A special register.
    Special(Special),
}

/// Special registers that do not change while a warp runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    ClusterCtaid(u8),
    ClusterNctaid(u8),
    Clusterid(u8),
    Nclusterid(u8),
    ClusterCtarank,
    ClusterNctarank,
    Lane,
    Warp,
    Warps,
    Sm,
    Sms,
    GridId,
    LaneMask(u8),
    DynamicShared,
    TotalShared,
    WarpSize,
}

impl Special {
    /// The one with a name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let axis = |s: &str| match s {
            "x" => Some(0),
            "y" => Some(1),
            "z" => Some(2),
            _ => None,
        };
        if let Some((base, dim)) = name.split_once('.') {
            return Some(match base {
                "%tid" => Self::Tid(axis(dim)?),
                "%ntid" => Self::Ntid(axis(dim)?),
                "%ctaid" => Self::Ctaid(axis(dim)?),
                "%nctaid" => Self::Nctaid(axis(dim)?),
                "%cluster_ctaid" => Self::ClusterCtaid(axis(dim)?),
                "%cluster_nctaid" => Self::ClusterNctaid(axis(dim)?),
                "%clusterid" => Self::Clusterid(axis(dim)?),
                "%nclusterid" => Self::Nclusterid(axis(dim)?),
                _ => return None,
            });
        }
        Some(match name {
            "%cluster_ctarank" => Self::ClusterCtarank,
            "%cluster_nctarank" => Self::ClusterNctarank,
            "%laneid" => Self::Lane,
            "%warpid" => Self::Warp,
            "%nwarpid" => Self::Warps,
            "%smid" => Self::Sm,
            "%nsmid" => Self::Sms,
            "%gridid" => Self::GridId,
            "%lanemask_eq" => Self::LaneMask(0),
            "%lanemask_lt" => Self::LaneMask(1),
            "%lanemask_le" => Self::LaneMask(2),
            "%lanemask_gt" => Self::LaneMask(3),
            "%lanemask_ge" => Self::LaneMask(4),
            "%dynamic_smem_size" => Self::DynamicShared,
            "%total_smem_size" => Self::TotalShared,
            "WARP_SZ" => Self::WarpSize,
            _ => return None,
        })
    }
}

/// Memory ordering of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Weak,
    /// Relaxed where it meets other blocks; in shared memory no more than a hint to the compiler.
    Volatile,
    Relaxed,
    Acquire,
    Release,
    AcquireRelease,
}

impl Order {
    pub(crate) fn strong(self) -> bool {
        self != Order::Weak
    }
    pub(crate) fn acquires(self) -> bool {
        matches!(self, Order::Acquire | Order::AcquireRelease)
    }
    pub(crate) fn releases(self) -> bool {
        matches!(self, Order::Release | Order::AcquireRelease)
    }
}

/// Particulars of a memory access.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub(crate) space: Space,
    /// Bytes of one element.
    pub(crate) size: u32,
    /// Elements.
    pub(crate) count: u32,
    /// Loads: sign-extend.
    pub(crate) signed: bool,
    /// The data registers have 64-bit slots.
    pub(crate) wide: bool,
    /// The base register has 64-bit slots.
    pub(crate) base_wide: bool,
    pub(crate) base: u32,
    pub(crate) offset: i64,
    pub(crate) order: Order,
    /// Orders other blocks too (`.gpu`, `.sys`), not only this one (`.cta`).
    pub(crate) device_scope: bool,
    /// The address may be one of another block of the cluster.
    pub(crate) cluster: bool,
    /// Data rows.
    pub(crate) rows: [u32; 8],
}

/// A kernel, decoded.
#[derive(Clone, Debug)]
pub(crate) struct Code {
    pub(crate) name: String,
    pub(crate) ins: Vec<Ins>,
    pub(crate) accesses: Vec<Access>,
    pub(crate) lists: Vec<u32>,
    pub(crate) compares: Vec<select::Compare>,
    /// Functions that others wrap.
    pub(crate) inner: Vec<OpFn>,
    pub(crate) rows: u32,
    pub(crate) preds: u32,
    /// Row, value, whether its slots have 64 bits.
    pub(crate) values: Vec<(u32, Value, bool)>,
    pub(crate) params: Vec<Param>,
    pub(crate) param_bytes: usize,
    pub(crate) static_shared: u32,
    /// Where the dynamic part begins.
    pub(crate) dynamic_offset: u32,
    pub(crate) local_bytes: u32,
    pub(crate) max_threads: Option<[u32; 3]>,
    pub(crate) required_threads: Option<[u32; 3]>,
    pub(crate) required_cluster: Option<[u32; 3]>,
    pub(crate) max_registers: Option<u32>,
    /// Names of the registers that asynchronous products use; empty when there are none.
    pub(crate) matrix_registers: Vec<String>,
    /// By instruction, which of these it touches (not as an asynchronous product).
    pub(crate) touches: Vec<Box<[u16]>>,
}

/// Everything an instruction can reach.
pub(crate) struct Cx<'a> {
    pub(crate) regs: *mut u32,
    pub(crate) preds: *mut u32,
    pub(crate) warp: &'a mut Warp,
    pub(crate) block: &'a mut Block,
    /// The other blocks of its cluster.
    pub(crate) peers: Peers<'a>,
    pub(crate) cluster: &'a mut Cluster,
    pub(crate) grid: &'a mut Grid,
    pub(crate) mem: &'a mut Memory,
    pub(crate) code: &'a Code,
    /// Where `Flow::Jump` leads.
    pub(crate) target: usize,
    /// Where `Flow::Scatter` leads.
    pub(crate) scattered: Vec<(usize, u32)>,
    pub(crate) pc: usize,
    /// Lanes of the executing group, whatever the guard says.
    pub(crate) group: u32,
    pub(crate) fault: Option<LaneFault>,
}

/// A fault before it is turned into a report.
#[derive(Clone, Debug)]
pub(crate) struct LaneFault {
    pub(crate) fault: Fault,
    pub(crate) lane: Option<u32>,
    pub(crate) detail: String,
}

impl Cx<'_> {
    /// The slots of a row.
    #[inline(always)]
    pub(crate) fn row(&self, row: u32) -> *mut u32 {
        // The decoder numbers rows below `Code::rows`, and every warp has that many.
        self.regs.wrapping_add(row as usize * 32)
    }

    /// The block of a rank of the cluster, which has that many.
    pub(crate) fn member(&mut self, rank: usize) -> &mut Block {
        match self.peers.get(rank) {
            Some(peer) => peer,
            None => self.block,
        }
    }

    /// A lane of a row with 32-bit slots.
    #[inline(always)]
    pub(crate) fn get32(&self, row: u32, lane: usize) -> u32 {
        // SAFETY: rows come from the decoder and lie inside the register file; lanes are below 32.
        unsafe { *self.row(row).add(lane) }
    }

    #[inline(always)]
    pub(crate) fn set32(&mut self, row: u32, lane: usize, v: u32) {
        // SAFETY: as in `get32`.
        unsafe { *self.row(row).add(lane) = v }
    }

    /// A lane of a row with 64-bit slots.
    #[inline(always)]
    pub(crate) fn get64(&self, row: u32, lane: usize) -> u64 {
        // SAFETY: as in `get32`; such a row is followed by its second half.
        unsafe { self.row(row).cast::<u64>().add(lane).read_unaligned() }
    }

    #[inline(always)]
    pub(crate) fn set64(&mut self, row: u32, lane: usize, v: u64) {
        // SAFETY: as in `get64`.
        unsafe { self.row(row).cast::<u64>().add(lane).write_unaligned(v) }
    }

    #[inline(always)]
    pub(crate) fn get(&self, row: u32, wide: bool, lane: usize) -> u64 {
        if wide { self.get64(row, lane) } else { u64::from(self.get32(row, lane)) }
    }

    #[inline(always)]
    pub(crate) fn set(&mut self, row: u32, wide: bool, lane: usize, v: u64) {
        if wide { self.set64(row, lane, v) } else { self.set32(row, lane, v as u32) }
    }

    #[inline(always)]
    pub(crate) fn pred(&self, p: u32) -> u32 {
        // SAFETY: predicates are numbered below `Code::preds`, and every warp has that many.
        unsafe { *self.preds.add(p as usize) }
    }

    /// Sets the bits of `m` in a predicate.
    #[inline(always)]
    pub(crate) fn set_pred(&mut self, p: u32, m: u32, v: u32) {
        // SAFETY: as in `pred`.
        unsafe {
            let at = self.preds.add(p as usize);
            *at = (*at & !m) | (v & m);
        }
    }

    #[cold]
    pub(crate) fn fail(&mut self, fault: Fault, lane: Option<u32>, detail: impl Into<String>) -> Flow {
        self.fault = Some(LaneFault { fault, lane, detail: detail.into() });
        Flow::Fault
    }

    /// For instructions that all lanes of a warp execute together: `None` when they do, else what to do about it.
    #[inline(always)]
    pub(crate) fn together(&mut self, m: u32, who: u32) -> Option<Flow> {
        if who & !m == 0 { None } else { Some(self.apart(m, who)) }
    }

    #[cold]
    fn apart(&mut self, m: u32, who: u32) -> Flow {
        let missing = who & !m;
        if missing & self.warp.alive & !self.group != 0 {
            return Flow::Park;
        }
        let why = if missing & self.group != 0 { "are kept out by the guard" } else { "have exited or do not exist" };
        self.fail(
            Fault::Divergence,
            None,
            format!("all lanes of mask {who:#010x} must execute this together; lanes {missing:#010x} {why}"),
        )
    }
}

/// The lanes of a mask.
#[inline(always)]
pub(crate) fn lanes(mut m: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        if m == 0 {
            return None;
        }
        let l = m.trailing_zeros() as usize;
        m &= m - 1;
        Some(l)
    })
}
