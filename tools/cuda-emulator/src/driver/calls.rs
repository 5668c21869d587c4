// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the program asked of the driver: every call by name, every piece of work and every wait by kind.
//!
//! Calls are counted as they are made. Work is counted when it is put into a stream, by what it is: a launch of a graph
//! counts what the graph does. A wait is a call that returns only after work of the device; its copies are counted too.
//! `boxes` are what tensor copies inside of kernels loaded, of the launches that are over.
//!
//! `cuEmuCount(name)` answers for the name of a function or of a kind below, `cuEmuCounts` gives all of them as lines
//! of name and number, `cuEmuCountReset` sets them to 0. `CPATTN_EMU_CALLS` names a file that the lines are appended to
//! when the program ends.

use std::collections::HashMap;
use std::fmt::Write as _;

/// What a call is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Memory is had or given back.
    Allocation,
    /// Something is asked and nothing changes.
    Query,
    /// Returns after work of the device.
    Wait,
    /// Puts work into a stream.
    Work,
    /// Makes or ends a stream, an event, a graph, a module; encodes a tensor map.
    Object,
    /// The current context.
    Context,
    /// The emulator's own.
    Own,
}

use Kind::{Allocation, Context, Object, Own, Query, Wait, Work};

/// The kind of a function, and whether it is "potentially unsafe" while a stream is being captured: allocations, calls
/// that loads code, and whatever asks or waits for streams and events.
#[rustfmt::skip]
pub(crate) fn kind(name: &str) -> (Kind, bool) {
    match name {
        "cuMemAlloc_v2" | "cuMemFree_v2" | "cuMemHostAlloc" | "cuMemFreeHost" => (Allocation, true),
        "cuMemAllocAsync" | "cuMemFreeAsync" => (Allocation, false),
        "cuModuleLoadData" | "cuModuleUnload" => (Object, true),
        "cuStreamSynchronize" | "cuEventSynchronize" | "cuCtxSynchronize" => (Wait, true),
        "cuStreamQuery" | "cuEventQuery" => (Query, true),
        "cuMemcpy" | "cuMemcpyHtoD_v2" | "cuMemcpyDtoH_v2" => (Work, true),
        "cuDevicePrimaryCtxReset_v2" => (Wait, true),
        "cuStreamCreateWithPriority" | "cuStreamDestroy_v2" | "cuEventCreate" | "cuEventDestroy_v2" | "cuModuleGetFunction"
        | "cuGraphInstantiate" | "cuGraphExecDestroy" | "cuGraphDestroy" | "cuStreamBeginCapture_v2" | "cuStreamEndCapture"
        | "cuFuncSetAttribute" | "cuFuncSetCacheConfig" | "cuGraphUpload"
        | "cuTensorMapEncodeTiled" | "cuTensorMapReplaceAddress" => (Object, false),
        "cuDevicePrimaryCtxRetain" | "cuDevicePrimaryCtxRelease_v2" | "cuDevicePrimaryCtxSetFlags_v2" | "cuCtxSetCurrent"
        | "cuCtxPushCurrent_v2" | "cuCtxPopCurrent_v2" | "cuCtxSetFlags" | "cuCtxSetLimit" | "cuCtxSetCacheConfig"
        | "cuCtxEnablePeerAccess" | "cuCtxDisablePeerAccess" | "cuThreadExchangeStreamCaptureMode" => (Context, false),
        "cuMemGetInfo_v2" | "cuMemGetAddressRange_v2" | "cuMemHostGetDevicePointer_v2" => (Query, false),
        n if n.starts_with("cuEmu") => (Own, false),
        n if n.contains("Get") || n.starts_with("cuOccupancy") || n.contains("Is") || n.contains("ElapsedTime")
            || n.contains("CanAccess") => (Query, false),
        _ => (Work, false),
    }
}

/// Work by what it is, and waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    Launch,
    HostToDevice,
    DeviceToHost,
    /// Inside one device.
    DeviceCopy,
    /// Between devices, directly.
    PeerCopy,
    /// Between devices without access to each other, through the host.
    StagedCopy,
    Fill,
    HostFunction,
    Record,
    StreamWait,
    Exchange,
    GraphLaunch,
    /// A call that returned only after work of the device.
    HostWait,
}

const PIECES: [&str; 13] = [
    "launches",
    "host-to-device copies",
    "device-to-host copies",
    "device copies",
    "peer copies",
    "staged copies",
    "fills",
    "host functions",
    "event records",
    "event waits",
    "exchanges",
    "graph launches",
    "host waits",
];

/// The counters.
#[derive(Default)]
pub(crate) struct Counts {
    calls: HashMap<&'static str, u64>,
    pieces: [u64; PIECES.len()],
    /// Launches of each kernel.
    kernels: HashMap<String, u64>,
    boxes: u64,
}

impl Counts {
    pub(crate) fn call(&mut self, name: &'static str) {
        *self.calls.entry(name).or_insert(0) += 1;
    }

    pub(crate) fn piece(&mut self, piece: Piece) {
        self.pieces[piece as usize] += 1;
    }

    pub(crate) fn kernel(&mut self, name: &str) {
        *self.kernels.entry(name.to_owned()).or_insert(0) += 1;
    }

    /// Adds boxes that the tensor copies of a launch that is over loaded into shared memory.
    pub(crate) fn boxes(&mut self, n: u64) {
        self.boxes += n;
    }

    fn of_kind(&self, wanted: Kind) -> u64 {
        self.calls.iter().filter(|(name, _)| kind(name).0 == wanted).map(|(_, n)| n).sum()
    }

    /// By the name of a function, of a piece of work, of a kernel, or `allocations`, `queries`, `calls`, `boxes`.
    pub(crate) fn get(&self, name: &str) -> u64 {
        match name {
            "allocations" => self.of_kind(Allocation),
            "queries" => self.of_kind(Query),
            "boxes" => self.boxes,
            "calls" => self.calls.iter().filter(|(name, _)| kind(name).0 != Own).map(|(_, n)| n).sum(),
            _ => match PIECES.iter().position(|p| *p == name) {
                Some(p) => self.pieces[p],
                None => self.calls.get(name).or_else(|| self.kernels.get(name)).copied().unwrap_or(0),
            },
        }
    }

    /// Lines of name, tab and number: kinds, then functions in order of their names. What is 0 is left out.
    pub(crate) fn text(&self) -> String {
        let mut names: Vec<&str> = self.calls.keys().copied().filter(|n| kind(n).0 != Own).collect();
        names.sort_unstable();
        let mut out = String::new();
        for name in ["calls", "allocations", "queries", "boxes"].into_iter().chain(PIECES).chain(names) {
            let n = self.get(name);
            if n > 0 {
                // Text into a string cannot fail.
                let _ = writeln!(out, "{name}\t{n}");
            }
        }
        out
    }

    pub(crate) fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds() {
        for (name, expected) in [
            ("cuPointerGetAttribute", (Query, false)),
            ("cuStreamIsCapturing", (Query, false)),
            ("cuStreamGetCtx", (Query, false)),
            ("cuEventQuery", (Query, true)),
            ("cuOccupancyMaxActiveBlocksPerMultiprocessor", (Query, false)),
            ("cuMemcpyHtoD_v2", (Work, true)),
            ("cuMemcpyHtoDAsync_v2", (Work, false)),
            ("cuLaunchKernel", (Work, false)),
            ("cuEventRecord", (Work, false)),
            ("cuMemAlloc_v2", (Allocation, true)),
            ("cuCtxPushCurrent_v2", (Context, false)),
        ] {
            assert_eq!(kind(name), expected, "{name}");
        }
    }

    #[test]
    fn sums() {
        let mut c = Counts::default();
        for name in ["cuMemAlloc_v2", "cuMemFree_v2", "cuStreamQuery", "cuEmuCount", "cuLaunchKernel"] {
            c.call(name);
        }
        c.piece(Piece::Launch);
        c.kernel("forward");
        assert_eq!([c.get("forward"), c.get("backward")], [1, 0]);
        c.piece(Piece::HostWait);
        assert_eq!(
            ["calls", "allocations", "queries", "launches", "host waits", "cuMemAlloc_v2"].map(|n| c.get(n)),
            [4, 2, 1, 1, 1, 1]
        );
        assert!(
            c.text().starts_with("calls\t4\nallocations\t2\nqueries\t1\nlaunches\t1\nhost waits\t1\n"),
            "{}",
            c.text()
        );
        c.reset();
        assert_eq!(c.text(), "");
    }
}
