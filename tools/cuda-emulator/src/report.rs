// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the emulator says when something is wrong: with the module, or with what a kernel did.

use std::fmt;

/// A module that cannot be loaded: syntax, or an instruction that is not understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// Line of the PTX text, from 1.
    pub line: u32,
    /// What is wrong with it.
    pub what: String,
}

impl LoadError {
    pub(crate) fn new(line: u32, what: String) -> Self {
        Self { line, what }
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PTX line {}: {}", self.line, self.what)
    }
}

impl std::error::Error for LoadError {}

/// What a kernel (or a stream) did wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Fault {
    /// An address outside every allocation, or in a red zone.
    OutOfBounds,
    /// An address that is not a multiple of the access size.
    Misaligned,
    /// A load of bytes that nothing wrote.
    Uninitialised,
    /// An address in an allocation that was freed.
    UseAfterFree,
    /// A store to `.const` memory or to a parameter.
    ReadOnly,
    /// Two warps of a block touch the same bytes of shared memory without a barrier between them.
    SharedRace,
    /// A shared-memory access to bytes an asynchronous copy has not delivered, or has not read yet.
    AsyncPending,
    /// The asynchronous proxy touches what the generic proxy wrote, without `fence.proxy.async` in between.
    ProxyFence,
    /// A barrier in shared memory that is used wrongly: more arrivals or bytes than it expects, a phase that laps its
    /// waiter, an access that is not an instruction for barriers.
    Barrier,
    /// The shared memory of another block of the cluster, which may not have begun, or which may have ended.
    Cluster,
    /// Registers of an asynchronous product, touched before its wait or without `wgmma.fence` before it.
    ProductRegisters,
    /// Two warps touch the same bytes of global memory without an order between them.
    GlobalRace,
    /// A warp-wide instruction that not all lanes reach.
    Divergence,
    /// No warp of a block can go on.
    Deadlock,
    /// `trap`, or operands an instruction does not allow.
    Illegal,
    /// More instructions without effect than the limit allows.
    Livelock,
    /// Two streams (or a stream and the host) touch the same bytes without an order between them.
    StreamRace,
    /// A device uses memory of another without access to it.
    PeerAccess,
    /// A launch configuration the device does not have.
    Launch,
}

/// A report of a fault: where, who, what.
#[derive(Clone, Debug)]
pub struct Report {
    /// What kind of fault.
    pub fault: Fault,
    /// The kernel, or the driver function for faults outside kernels.
    pub kernel: String,
    /// Line of the PTX text, 0 outside kernels.
    pub line: u32,
    /// The text of that line.
    pub text: String,
    /// Block index.
    pub block: [u32; 3],
    /// Thread index, when one thread is to blame.
    pub thread: Option<[u32; 3]>,
    /// The particulars: addresses, allocations, the other side of a race.
    pub detail: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} in `{}`", self.fault, self.kernel)?;
        if self.line != 0 {
            write!(f, ", line {}: `{}`", self.line, self.text)?;
            write!(f, ", block ({}, {}, {})", self.block[0], self.block[1], self.block[2])?;
        }
        if let Some(t) = self.thread {
            write!(f, ", thread ({}, {}, {})", t[0], t[1], t[2])?;
        }
        write!(f, ": {}", self.detail)
    }
}

impl std::error::Error for Report {}
