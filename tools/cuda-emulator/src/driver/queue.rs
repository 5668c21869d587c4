// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams as queues, and what is known to come before what.
//!
//! An operation carries a vector clock: for every stream, how far that stream has come for sure when this operation
//! runs. Stream order, event waits, the rules of the default stream and synchronisation by the host put entries into
//! it, and nothing else does. Two operations of which neither's clock covers the other may run at the same time.

use super::exchange::Exchange;
use crate::mem::Footprint;
use crate::module::Kernel;
use std::collections::{BTreeMap, VecDeque};

/// Stream → how many of its operations are known to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock(BTreeMap<u64, u64>);

impl Clock {
    pub(crate) fn join(&mut self, other: &Self) {
        for (&s, &n) in &other.0 {
            self.raise(s, n);
        }
    }

    pub(crate) fn raise(&mut self, stream: u64, done: u64) {
        let mine = self.0.entry(stream).or_insert(0);
        *mine = (*mine).max(done);
    }

    pub(crate) fn covers(&self, stream: u64, number: u64) -> bool {
        self.0.get(&stream).is_some_and(|&n| n >= number)
    }
}

/// What an operation does.
#[derive(Clone)]
pub(crate) enum Work {
    Launch {
        kernel: Kernel,
        module: u64,
        grid: [u32; 3],
        block: [u32; 3],
        cluster: [u32; 3],
        shared: u32,
        params: Vec<u8>,
        resident: u32,
    },
    /// Between addresses of this memory.
    Copy {
        dst: u64,
        src: u64,
        len: usize,
    },
    /// From pageable memory, taken at the call.
    Write {
        dst: u64,
        bytes: Vec<u8>,
    },
    /// To pageable memory; the call waits for it.
    Read {
        dst: usize,
        src: u64,
        len: usize,
    },
    /// A pattern of 1, 2 or 4 bytes, repeated.
    Fill {
        dst: u64,
        pattern: [u8; 4],
        width: usize,
        count: usize,
    },
    /// The memory of an asynchronous allocation begins to exist.
    Alloc {
        base: u64,
        len: usize,
    },
    Free {
        base: u64,
        len: usize,
    },
    /// A function of the host.
    Host {
        f: unsafe extern "C" fn(*mut std::ffi::c_void),
        data: usize,
    },
    Record {
        event: u64,
        version: u64,
    },
    /// A wait for an event: only its dependencies matter.
    Wait,
    /// A point behind others.
    Join,
    /// In graphs: a wait for whatever the event's last record is when the graph is launched.
    Await {
        event: u64,
    },
    /// Of another library.
    Exchange(Exchange),
}

impl Work {
    /// What it is, for a report.
    pub(crate) fn what(&self) -> String {
        match self {
            Self::Launch { kernel, .. } => format!("kernel `{}`", kernel.name()),
            Self::Exchange(x) => x.what().to_owned(),
            Self::Copy { .. } | Self::Write { .. } | Self::Read { .. } => "a copy".to_owned(),
            Self::Fill { .. } => "a memset".to_owned(),
            Self::Host { .. } => "a function of the host".to_owned(),
            _ => "an event or a wait".to_owned(),
        }
    }
}

/// An operation in a stream.
pub(crate) struct Op {
    pub(crate) number: u64,
    /// (stream, number) of operations that must be done first.
    pub(crate) after: Vec<(u64, u64)>,
    pub(crate) clock: Clock,
    pub(crate) work: Work,
    pub(crate) device: usize,
}

/// A stream.
pub(crate) struct Stream {
    pub(crate) device: usize,
    /// Not ordered with the default stream.
    pub(crate) independent: bool,
    pub(crate) priority: i32,
    pub(crate) queue: VecDeque<Op>,
    pub(crate) enqueued: u64,
    pub(crate) done: u64,
    /// Clock of the newest operation.
    pub(crate) tail: Clock,
    pub(crate) destroyed: bool,
    /// The capture it is part of.
    pub(crate) capture: Option<u64>,
}

/// An event.
#[derive(Default)]
pub(crate) struct Event {
    pub(crate) timed: bool,
    /// Counts records.
    pub(crate) version: u64,
    /// The newest record: stream, number, clock.
    pub(crate) record: Option<(u64, u64, Clock)>,
    /// Versions that ran, and when.
    pub(crate) ran: Option<(u64, u64)>,
    /// The capture of the newest record, and the nodes it stands for.
    pub(crate) captured: Option<(u64, Vec<usize>)>,
}

/// An operation that ran, for the race detector.
pub(crate) struct Past {
    pub(crate) stream: u64,
    pub(crate) number: u64,
    pub(crate) what: String,
    pub(crate) reads: Footprint,
    pub(crate) writes: Footprint,
}

/// A race between two operations: the earlier one, and where.
pub(crate) struct StreamRace {
    pub(crate) other: String,
    pub(crate) other_stream: u64,
    pub(crate) how: &'static str,
    pub(crate) range: (u64, u64),
}

/// Finds an earlier operation that is not ordered with this one and touches the same bytes.
pub(crate) fn find_race(past: &[Past], clock: &Clock, reads: &Footprint, writes: &Footprint) -> Option<StreamRace> {
    for p in past.iter().filter(|p| !clock.covers(p.stream, p.number)) {
        let found = [
            (writes.overlap(&p.writes), "both write"),
            (writes.overlap(&p.reads), "this one writes what the other reads"),
            (reads.overlap(&p.writes), "this one reads what the other writes"),
        ];
        for (range, how) in found {
            if let Some(range) = range {
                return Some(StreamRace { other: p.what.clone(), other_stream: p.stream, how, range });
            }
        }
    }
    None
}
