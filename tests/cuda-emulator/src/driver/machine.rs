// SPDX-License-Identifier: MIT OR Apache-2.0
//! The stand-in machine: devices, streams and the order in which their work is done.
//!
//! Nothing runs when it is enqueued. It runs when the host waits for something, and then in a seeded order: sometimes
//! only what the host waits for, sometimes anything that may run. Whatever relies on work being done earlier, or in the
//! order of the calls, fails.

use super::codes;
use super::config::Config;
use super::mutants::Mutants;
use super::queue::{Clock, Event, Op, Past, Stream, Work};
use super::trace::Trace;
use crate::mem::Memory;
use crate::module::Kernel;
use crate::report::{Fault, Report};
use std::collections::{BTreeMap, HashMap};
use std::io::Write as _;

/// A device and its primary context.
#[derive(Default)]
pub(crate) struct Device {
    pub(crate) retained: u32,
    pub(crate) flags: u32,
    /// The error every call gives from now on.
    pub(crate) sticky: Option<i32>,
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
    /// Device of each allocation.
    pub(crate) homes: BTreeMap<u64, usize>,
    next: u64,
    random: u64,
    pub(super) past: Vec<Past>,
    /// What the host knows to be done.
    host: Clock,
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

    /// Adds an operation to a stream.
    pub(crate) fn enqueue(&mut self, id: u64, mut after: Vec<(u64, u64)>, extra: Option<&Clock>, work: Work) {
        let Some(s) = self.streams.get(&id) else { return };
        let (device, independent) = (s.device, s.independent);
        let mut clock = s.tail.clone();
        clock.join(&self.host);
        // The default stream waits for all streams that are not independent of it, and they for it.
        let default = default_stream(device);
        for (&other, o) in self.streams.iter().filter(|(k, o)| **k != id && o.device == device) {
            let ordered = !independent && (id == default && !o.independent || other == default);
            if ordered && o.enqueued > 0 {
                after.push((other, o.enqueued));
                clock.join(&o.tail);
            }
        }
        let event = if matches!(work, Work::Wait) { after.first().copied() } else { None };
        if let Some(extra) = extra {
            clock.join(extra);
        }
        let Some(s) = self.streams.get_mut(&id) else { return };
        s.enqueued += 1;
        let number = s.enqueued;
        clock.raise(id, number);
        s.tail = clock.clone();
        if let Some(trace) = &mut self.trace {
            trace.enqueued((id, number), &after, event);
        }
        if let Work::Record { event, .. } = &work
            && let Some(e) = self.events.get_mut(event)
        {
            e.record = Some((id, number, clock.clone()));
        }
        s.queue.push_back(Op { number, after, clock, work, device });
        if self.config.eager {
            while self.step() {}
        }
    }

    fn ready(&self, id: u64) -> bool {
        let Some(op) = self.streams.get(&id).and_then(|s| s.queue.front()) else { return false };
        op.after.iter().all(|&(s, n)| self.streams.get(&s).is_none_or(|s| s.done >= n))
    }

    /// Runs one operation that may run, chosen at random. False when there is none.
    pub(crate) fn step(&mut self) -> bool {
        let ready: Vec<u64> = self.streams.keys().copied().filter(|&s| self.ready(s)).collect();
        if ready.is_empty() {
            return false;
        }
        let pick = ready[self.below(ready.len())];
        self.run_head(pick);
        true
    }

    /// Runs until a stream has done this many operations.
    pub(crate) fn drain(&mut self, id: u64, number: u64) {
        let generous = self.below(2) == 0;
        while self.streams.get(&id).is_some_and(|s| s.done < number) {
            let moved = if generous { self.step() } else { self.only(id) };
            if !moved {
                break;
            }
        }
        if let Some(s) = self.streams.get(&id) {
            if s.done == s.enqueued {
                let tail = s.tail.clone();
                self.host.join(&tail);
            } else {
                self.host.raise(id, number);
            }
        }
        self.host_knows(id, number);
        self.forget();
    }

    /// Runs one operation that the head of a stream needs, or the head itself.
    fn only(&mut self, id: u64) -> bool {
        let mut at = id;
        for _ in 0..self.streams.len() + 1 {
            let Some(op) = self.streams.get(&at).and_then(|s| s.queue.front()) else { return false };
            let blocked = op.after.iter().find(|&&(s, n)| self.streams.get(&s).is_some_and(|s| s.done < n));
            match blocked {
                Some(&(s, _)) => at = s,
                None => {
                    self.run_head(at);
                    return true;
                }
            }
        }
        self.step()
    }

    /// Runs everything.
    pub(crate) fn drain_all(&mut self) {
        while self.step() {}
        let ends: Vec<(u64, u64)> = self.streams.iter().map(|(&id, s)| (id, s.done)).collect();
        for (id, number) in ends {
            self.host_knows(id, number);
        }
        let tails: Vec<Clock> = self.streams.values().map(|s| s.tail.clone()).collect();
        for t in &tails {
            self.host.join(t);
        }
        self.forget();
        if let Some(trace) = &mut self.trace {
            trace.judge();
        }
        self.streams.retain(|_, s| !s.destroyed || !s.queue.is_empty());
    }

    /// The host learned that a record ran, or a stream's last operation.
    pub(crate) fn host_learns(&mut self, id: u64, number: u64, clock: &Clock) {
        self.host_knows(id, number);
        self.host.join(clock);
    }

    fn host_knows(&mut self, id: u64, number: u64) {
        if let Some(trace) = &mut self.trace {
            trace.known((id, number));
        }
    }

    /// Drops what nothing can race with any more.
    fn forget(&mut self) {
        let queued = || self.streams.values().flat_map(|s| &s.queue);
        if queued().next().is_none() {
            let host = &self.host;
            self.past.retain(|p| !host.covers(p.stream, p.number));
        } else if self.past.len() > 256 {
            let (host, streams) = (&self.host, &self.streams);
            self.past.retain(|p| {
                !(host.covers(p.stream, p.number)
                    && streams.values().flat_map(|s| &s.queue).all(|o| o.clock.covers(p.stream, p.number)))
            });
        }
    }

    fn run_head(&mut self, id: u64) {
        let Some(op) = self.streams.get_mut(&id).and_then(|s| s.queue.pop_front()) else { return };
        let number = op.number;
        if self.devices[op.device].sticky.is_none() {
            self.run(id, op);
        } else if let Work::Record { event, version } = op.work {
            self.ran(event, version);
        }
        if let Some(s) = self.streams.get_mut(&id) {
            s.done = number;
        }
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

    /// Forgets a device's error and all its work, as a reset of the primary context does.
    pub(crate) fn reset(&mut self, device: usize) {
        self.drain_all();
        self.devices[device].sticky = None;
        self.past.clear();
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
        capturing: false,
    }
}

/// A stream, for a report.
pub(super) fn name_of(id: u64) -> String {
    if id < 0x1000 { format!("default:{}", id - 1) } else { format!("{id:#x}") }
}
