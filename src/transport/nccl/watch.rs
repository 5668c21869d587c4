// SPDX-License-Identifier: MIT OR Apache-2.0
//! The watchdog: detects exchanges that do not end, since no host thread waits for them.
//!
//! Every exchange records one event before and one after its group, and adds an entry to a queue. A thread of the
//! transport checks the oldest entry regularly. Its time counts from the first event, so earlier work on the stream,
//! such as the caller's own kernels, does not count; it ends with the second event. If the exchange's host call has not
//! returned (a framework's communicator may block there), its time counts from the beginning of the call.
//!
//! When the oldest exchange is past the deadline, when NCCL reports an error of the communicator, or when a thread
//! calls `abort`, the first thread to notice records the failure, with the oldest exchange, and aborts the
//! communicator: its kernels end, and the stream continues with the work after them.

use super::comm::Communicator;
use super::sys::{IN_PROGRESS, SUCCESS, describe};
use crate::call::RawStream;
use crate::device::driver::CudaEvent;
use crate::error::{Cause, Error, Result};
use crate::kernel::cuda::Cuda;
use crate::transport::{Label, Message, fault::millis};
use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
    vec::Vec,
};

/// The label of errors while no exchange is under way.
const NO_EXCHANGE: Label = Label::new("no exchange", 0);

/// Initial capacity for exchanges in flight.
const ROOM: usize = 64;

/// An exchange that may not be over.
struct Pending {
    label: Label,
    begin: CudaEvent,
    end: CudaEvent,
    /// Each once, in rank order.
    peers: Vec<usize>,
    bytes: u64,
    number: u64,
    /// Both events are in the stream.
    issued: bool,
    /// When its clock began.
    since: Option<Instant>,
}

#[derive(Default)]
struct Queue {
    pending: VecDeque<Pending>,
    /// Entries that are over, kept for their events and their room.
    free: Vec<Pending>,
    next: u64,
    /// The transport is dropped.
    leaving: bool,
}

/// The state that the transport and its watchdog share.
pub(super) struct Watchdog {
    pub(super) comm: Communicator,
    cuda: Arc<Cuda>,
    rank: usize,
    /// In nanoseconds.
    deadline: AtomicU64,
    queue: Mutex<Queue>,
    bell: Condvar,
    failure: OnceLock<Error>,
}

fn nanos(time: Duration) -> u64 {
    time.as_nanos().try_into().unwrap_or(u64::MAX)
}

fn fresh(cuda: &Cuda) -> Result<Pending> {
    let event = || CudaEvent::new(cuda.context());
    Ok(Pending {
        label: Label::new("", 0),
        begin: event()?,
        end: event()?,
        peers: Vec::with_capacity(8),
        bytes: 0,
        number: 0,
        issued: false,
        since: None,
    })
}

impl Watchdog {
    pub(super) fn new(comm: Communicator, cuda: &Arc<Cuda>, rank: usize, deadline: Duration) -> Result<Self> {
        let free = (0..ROOM).map(|_| fresh(cuda)).collect::<Result<Vec<_>>>()?;
        let queue = Queue { pending: VecDeque::with_capacity(ROOM), free, ..Queue::default() };
        Ok(Self {
            comm,
            cuda: Arc::clone(cuda),
            rank,
            deadline: AtomicU64::new(nanos(deadline)),
            queue: Mutex::new(queue),
            bell: Condvar::new(),
            failure: OnceLock::new(),
        })
    }

    pub(super) fn deadline(&self) -> Duration {
        Duration::from_nanos(self.deadline.load(Ordering::Relaxed))
    }

    pub(super) fn set_deadline(&self, deadline: Duration) {
        self.deadline.store(nanos(deadline), Ordering::Relaxed);
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The failure, if there was one.
    pub(super) fn verdict(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Records the first failure, and ends the communicator. Returns the failure that counts.
    pub(super) fn fail(&self, error: Error) -> Error {
        let first = self.failure.get_or_init(|| error).clone();
        self.comm.abort();
        first
    }

    /// The error about the oldest exchange, if there is one.
    fn about_oldest(&self, cause: impl FnOnce(u64, u64) -> Cause) -> Error {
        let queue = self.queue();
        let rank = self.rank;
        match queue.pending.front() {
            Some(p) => {
                let ms = p.since.map_or(0, |since| millis(since.elapsed()));
                p.error(rank, cause(ms, p.bytes))
            }
            None => NO_EXCHANGE.error(rank, rank, cause(0, 0)),
        }
    }

    /// The run is ended.
    pub(super) fn abort(&self, cause: Cause) {
        if self.failure.get().is_some() {
            return;
        }
        let (rank, label) = (self.rank, self.queue().pending.front().map(|p| p.label));
        self.fail(label.unwrap_or(NO_EXCHANGE).error(rank, rank, cause));
    }

    /// Notes an exchange and puts its first event into the stream, whose context is current.
    pub(super) fn begin(&self, label: Label, messages: [&[Message]; 2], stream: RawStream) -> Result<u64> {
        let mut guard = self.queue();
        let queue = &mut *guard;
        if queue.free.is_empty() {
            queue.retire()?;
        }
        let mut p = match queue.free.pop() {
            Some(p) => p,
            None => fresh(&self.cuda)?,
        };
        p.peers.clear();
        p.peers.extend(messages.iter().flat_map(|list| list.iter()).map(|m| m.peer));
        p.peers.sort_unstable();
        p.peers.dedup();
        p.bytes = messages.iter().flat_map(|list| list.iter()).map(|m| m.bytes as u64).sum();
        (p.label, p.number, p.issued, p.since) = (label, queue.next, false, Some(Instant::now()));
        let number = queue.next;
        queue.next += 1;
        let recorded = p.begin.record(stream);
        queue.pending.push_back(p);
        recorded.map(|()| number)
    }

    /// Puts the second event of the exchange that was begun last into the stream.
    pub(super) fn issued(&self, stream: RawStream) -> Result<()> {
        let mut queue = self.queue();
        if let Some(p) = queue.pending.back_mut() {
            p.end.record(stream)?;
            (p.issued, p.since) = (true, None);
        }
        Ok(())
    }

    /// Whether the exchange of this number is over.
    pub(super) fn is_over(&self, number: u64) -> Result<bool> {
        let mut queue = self.queue();
        queue.retire()?;
        Ok(queue.pending.front().is_none_or(|p| p.number > number))
    }

    /// Ends the watchdog.
    pub(super) fn leave(&self) {
        self.queue().leaving = true;
        self.bell.notify_all();
    }

    /// The thread's whole life.
    pub(super) fn run(&self) {
        loop {
            let tick = (self.deadline() / 20).clamp(Duration::from_millis(1), Duration::from_millis(50));
            let queue = self.bell.wait_timeout_while(self.queue(), tick, |queue| !queue.leaving);
            if queue.unwrap_or_else(PoisonError::into_inner).0.leaving {
                return;
            }
            if self.failure.get().is_some() {
                // An abort during a call takes effect after it.
                self.comm.abort();
                continue;
            }
            if let Some(error) = self.check() {
                self.fail(error);
            }
        }
    }

    /// The failure, if there is one. NCCL's report says more than an expired deadline, so it counts first.
    fn check(&self) -> Option<Error> {
        let (late, idle) = {
            let _entered = self.cuda.context().enter().ok()?;
            let mut queue = self.queue();
            let late = queue.retire().and_then(|()| queue.late(self.deadline()));
            (late, queue.pending.is_empty())
        };
        // The owner of a borrowed communicator may have ended it after the last run.
        if idle && self.comm.is_borrowed() {
            return late.err();
        }
        match late {
            Ok(late) => self
                .engines_report()
                .or_else(|| late.map(|late| self.about_oldest(|_, bytes| Cause::Deadline { ms: millis(late), bytes }))),
            Err(error) => Some(error),
        }
    }

    /// An error of the communicator. A call that is under way asks for it itself.
    pub(super) fn engines_report(&self) -> Option<Error> {
        match self.comm.try_lock_calls()?.state() {
            Ok(SUCCESS | IN_PROGRESS) => None,
            Ok(code) => Some(self.about_oldest(|ms, bytes| Cause::Library { code, text: describe(code), ms, bytes })),
            Err(error) => Some(error),
        }
    }
}

impl Pending {
    fn error(&self, rank: usize, cause: Cause) -> Error {
        match self.peers[..] {
            [peer] => self.label.error(rank, peer, cause),
            _ => self.label.error_of_one(rank, self.peers.clone(), cause),
        }
    }
}

impl Queue {
    /// Removes exchanges that have ended. Exchanges end in the order of their stream, so halving finds the last of them
    /// with a few questions to the driver.
    fn retire(&mut self) -> Result<()> {
        let (mut over, mut unknown) = (0, self.pending.iter().take_while(|p| p.issued).count());
        while over < unknown {
            let middle = over.midpoint(unknown);
            if self.pending[middle].end.is_done()? {
                over = middle + 1;
            } else {
                unknown = middle;
            }
        }
        self.free.extend(self.pending.drain(..over));
        Ok(())
    }

    /// Starts the clock of the oldest exchange when its first event is over. Returns its time so far, if that is past
    /// the deadline.
    fn late(&mut self, deadline: Duration) -> Result<Option<Duration>> {
        let Some(p) = self.pending.front_mut() else { return Ok(None) };
        if p.issued && p.since.is_none() && p.begin.is_done()? {
            p.since = Some(Instant::now());
        }
        Ok(p.since.map(|since| since.elapsed()).filter(|&time| time >= deadline))
    }
}
