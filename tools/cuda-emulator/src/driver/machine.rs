// SPDX-License-Identifier: MIT OR Apache-2.0
//! The stand-in machine: devices, contexts, modules, streams, and what is said of them.

use super::calls::Counts;
use super::capture::Capture;
use super::codes;
use super::config::Config;
use super::graph::{Exec, Graph};
use super::mutants::Mutants;
use super::queue::{Clock, Event, Past, Stream};
use super::trace::Trace;
use crate::mem::{Memory, Owner};
use crate::module::Kernel;
use crate::report::{Fault, Report};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write as _;

/// A device and its primary context.
#[derive(Default)]
pub(crate) struct Device {
    pub(crate) retained: u32,
    pub(crate) flags: u32,
    /// The error every call gives from now on.
    pub(crate) sticky: Option<i32>,
    /// The devices whose memory kernels of this one may use.
    pub(crate) peers: BTreeSet<usize>,
}

/// What a call waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    Nothing,
    /// A stream has done so many operations.
    Stream(u64, u64),
    /// A device has nothing left to do.
    Device(usize),
}

/// A kernel handle.
pub(crate) struct Function {
    pub(crate) module: u64,
    pub(crate) kernel: Kernel,
    /// Dynamic shared memory it may be launched with.
    pub(crate) most_dynamic: u32,
    pub(crate) name: std::ffi::CString,
    pub(crate) target: u32,
}

/// A loaded module.
pub(crate) struct Loaded {
    pub(crate) device: usize,
    pub(crate) module: crate::module::Loaded,
    pub(crate) functions: BTreeMap<String, u64>,
    pub(crate) target: u32,
}

/// Everything.
pub(crate) struct Machine {
    pub(crate) config: Config,
    pub(crate) mem: Memory,
    pub(crate) devices: Vec<Device>,
    pub(crate) modules: HashMap<u64, Loaded>,
    pub(crate) functions: HashMap<u64, Function>,
    pub(crate) streams: BTreeMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) captures: BTreeMap<u64, Capture>,
    pub(crate) graphs: HashMap<u64, Graph>,
    pub(crate) execs: HashMap<u64, Exec>,
    pub(crate) counts: Counts,
    /// Device of each allocation.
    pub(crate) homes: BTreeMap<u64, usize>,
    next: u64,
    random: u64,
    pub(super) past: Vec<Past>,
    /// What the host knows to be done.
    pub(super) host: Clock,
    pub(crate) last_report: String,
    /// Instructions executed so far: the machine's clock.
    pub(super) time: u64,
    pub(super) mutants: Option<Mutants>,
    pub(super) trace: Option<Trace>,
}

/// The default stream of a device.
pub(crate) fn default_stream(device: usize) -> u64 {
    1 + device as u64
}

impl Machine {
    pub(crate) fn new(config: Config) -> Self {
        let devices = (0..config.devices).map(|_| Device::default()).collect();
        let mut streams = BTreeMap::new();
        for d in 0..config.devices as usize {
            streams.insert(default_stream(d), stream(d, false, 0));
        }
        Self {
            random: config.seed ^ 0x5851_f42d_4c95_7f2d,
            config,
            mem: Memory::new(),
            devices,
            modules: HashMap::new(),
            functions: HashMap::new(),
            streams,
            events: HashMap::new(),
            captures: BTreeMap::new(),
            graphs: HashMap::new(),
            execs: HashMap::new(),
            counts: Counts::default(),
            homes: BTreeMap::new(),
            next: 0x1000,
            past: Vec::new(),
            host: Clock::default(),
            last_report: String::new(),
            time: 0,
            mutants: Mutants::from_env(),
            trace: Trace::from_env(),
        }
    }

    /// A new handle: never null, never one of the special stream handles.
    pub(crate) fn handle(&mut self) -> u64 {
        self.next += 0x10;
        self.next
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.random >> 33) as usize) % n.max(1)
    }

    /// Reports a fault and makes it stick to the device's context.
    pub(crate) fn fail(&mut self, device: usize, report: Report) {
        let code = match report.fault {
            Fault::OutOfBounds | Fault::UseAfterFree | Fault::ReadOnly => codes::ILLEGAL_ADDRESS,
            Fault::Misaligned => codes::MISALIGNED_ADDRESS,
            Fault::Livelock => codes::LAUNCH_TIMEOUT,
            _ => codes::LAUNCH_FAILED,
        };
        self.devices[device].sticky = Some(code);
        self.tell(&report.to_string());
    }

    /// Prints a report and keeps it.
    pub(crate) fn tell(&mut self, text: &str) {
        self.last_report = text.to_owned();
        eprintln!("cuda-emulator: {text}");
        if let Some(path) = &self.config.report {
            // A report that cannot be kept in the file was printed already.
            if let Ok(mut f) = std::fs::OpenOptions::new().create(true).append(true).open(path) {
                let _ = writeln!(f, "{text}");
            }
        }
    }

    /// Forgets a device's error, as a reset of the primary context does. Its work is over.
    pub(crate) fn reset(&mut self, device: usize) {
        self.devices[device].sticky = None;
        self.devices[device].peers.clear();
        self.past.clear();
    }

    /// The device of an address, and whose memory it is.
    pub(crate) fn home(&self, ptr: u64) -> (usize, Owner) {
        let (base, _, owner) = self.mem.find(ptr).unwrap_or((0, 0, Owner::Device));
        (self.homes.get(&base).copied().unwrap_or(0), owner)
    }

    /// As [`Machine::home`], of memory that is there.
    pub(super) fn owner(&self, ptr: u64) -> Option<(usize, Owner)> {
        self.mem.find(ptr).map(|_| self.home(ptr))
    }

    /// Whether copies between two devices need not go through the host.
    pub(super) fn direct(&self, a: usize, b: usize) -> bool {
        self.devices[a].peers.contains(&b) || self.devices[b].peers.contains(&a)
    }
}

/// A stream without work.
pub(crate) fn stream(device: usize, independent: bool, priority: i32) -> Stream {
    Stream {
        device,
        independent,
        priority,
        queue: std::collections::VecDeque::new(),
        enqueued: 0,
        done: 0,
        tail: Clock::default(),
        destroyed: false,
        capture: None,
    }
}

/// A stream, for a report.
pub(super) fn name_of(id: u64) -> String {
    if id < 0x1000 { format!("default:{}", id - 1) } else { format!("{id:#x}") }
}
