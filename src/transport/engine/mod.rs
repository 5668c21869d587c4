// SPDX-License-Identifier: MIT OR Apache-2.0
//! A transport over send and receive functions and a key-value store, such as those of a framework's process group.
//!
//! Most frameworks can send and receive between two processes, and have a key-value store through which the processes
//! found each other. The author of an [`Engine`] implements how to connect, start a message and wait for it, and how to
//! read and write the store. [`EngineTransport`] makes a [`Transport`] of it, and does the rest:
//!
//! - Small messages to one peer are sent as one packet (`packets`). Each packet begins with a header: the number and
//!   the sizes of its messages, and what its sender runs. The receiver has room for the header and a small packet; a
//!   larger packet is sent separately, after the receiver has compared the sizes. Engines need not compare them.
//! - `agree` and `exchange` of different ranks can overlap in time. They use one order of messages between two ranks:
//!   if one of the two agrees and the other exchanges, both find it with the first header that arrives.
//! - The deadline goes to [`Engine::wait`]: a call fails once it has waited that long for one of its messages.
//! - After any failure the engine is closed on every rank: posted messages end with an error, so that nothing writes
//!   into the caller's memory afterwards. The group stays failed.
//! - Errors name the rank at fault if it can be determined: the ranks ask each other through the store (`search`,
//!   `verdict`). That takes another half of the deadline, at least 0.5 s and at most 5 s; if the store does not answer,
//!   twice that and 1 s. Nothing waits without a limit: a call into the engine that may not return is made on a
//!   separate thread that nothing joins.

mod agreement;
mod contract;
mod moves;
mod packets;
mod pulse;
mod search;
mod verdict;
mod waits;

use std::{
    format,
    string::{String, ToString},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
    vec::Vec,
};

use core::ops::Range;

use super::{Label, Message, Transport, rules};
use crate::error::{Cause, Error, Fault, Result, RunName};
pub use contract::{Engine, Failed, LONGEST_VALUE, MessageDirection};
use moves::{MessageBuffers, Moves, Stop};
use search::EngineGroup;
use verdict::Verdict;
use waits::{MAKING, Wait};

const AGREEMENT: Label = Label::new("agreement", 0);

/// One rank's transport over an engine. Every rank makes one, and calls [`connect`](Self::connect) before anything
/// else.
pub struct EngineTransport<E: Engine> {
    group: Arc<EngineGroup<E>>,
    /// Held by a call that waits.
    rooms: Mutex<MessageBuffers>,
    /// The run that the rank has announced.
    run: Mutex<Option<RunName>>,
}

impl<E: Engine> core::fmt::Debug for EngineTransport<E> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let EngineGroup { rank, world, deadline, .. } = &*self.group;
        f.debug_struct("EngineTransport")
            .field("rank", rank)
            .field("world", world)
            .field("deadline", deadline)
            .finish_non_exhaustive()
    }
}

impl<E: Engine> EngineTransport<E> {
    /// Makes a transport that is not connected yet. `deadline` is a timeout: a call fails if it waits so long while
    /// none of its messages moves. It must be longer than the longest time that a peer computes between two calls.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the world is not 1 to 1,048,576, the rank is not below it, or the deadline is 0.
    pub fn new(engine: E, deadline: Duration) -> Result<Self> {
        let (rank, world) = (engine.rank(), engine.world());
        if world == 0 || world > 1 << 20 {
            return Err(Error::invalid("world", world, "1 to 1048576"));
        }
        if rank >= world {
            return Err(Error::invalid("rank", rank, format_args!("below the world of {world}")));
        }
        rules::check_deadline(deadline)?;
        let group = Arc::new(EngineGroup::new(engine, deadline));
        Ok(Self { group, rooms: Mutex::default(), run: Mutex::default() })
    }

    /// The engine.
    pub fn engine(&self) -> &E {
        &self.group.engine
    }

    /// Waits for all ranks to call it and to connect. The timeout is twice the deadline plus half of it (the half at
    /// most 5 s), and at least 10 s, since the store may share a core with many starting processes.
    /// [`abort`](Transport::abort) and a failure of any rank end the wait.
    ///
    /// # Errors
    /// [`Fault::Found`] if not all ranks connect in time; [`Error::Device`] if this rank cannot start a thread, of
    /// which it notifies the others. The group has then failed.
    pub fn connect(&self) -> Result<()> {
        let (group, began) = (&self.group, Instant::now());
        let deadline = group.deadline;
        let after = |what: &str| format!("{what}, after {} (deadline {})", seconds(began.elapsed()), seconds(deadline));
        let thread = |has_opened: bool, error: std::io::Error| {
            group.set_failed("this rank could not start a thread");
            group.give_up(has_opened);
            group.engine.close();
            Error::of_thread("a transport over an engine", &error)
        };
        match group.within(deadline, |group| group.open()).map_err(|error| thread(false, error))? {
            None if group.has_ended() => return Err(self.failed_before(MAKING)),
            None => {
                let verdict = Verdict::unknown("the process that holds the store does not answer");
                group.publish(verdict.clone());
                return Err(self.failed(after("no transport was made"), &verdict, None));
            }
            Some(Ok(None)) => group.listen().map_err(|error| thread(true, error))?,
            Some(Ok(Some(late))) => {
                let what = "the others gave up before this rank made its transport".to_string();
                group.publish(late.clone());
                return Err(self.failed(what, &late, None));
            }
            Some(Err(failed)) => {
                group.publish(Verdict::unknown(&format!("the store has no second connection ({})", failed.text)));
            }
        }
        group.set_wait(Some(Wait::MEETING));
        let connected = group.within(2 * deadline, |group| group.engine.connect());
        let failed = match connected.map_err(|error| thread(true, error))? {
            Some(Ok(())) => {
                group.set_wait(None);
                group.set_connected();
                return Ok(());
            }
            None if group.has_ended() => return Err(self.failed_before(MAKING)),
            Some(Err(failed)) if failed.own => return Err(self.failed_by_itself(MAKING, &failed)),
            outcome => outcome.and_then(Result::err),
        };
        let verdict = group.start_search(true, None);
        group.set_wait(None);
        Err(self.failed(after("not all ranks made their transport"), &verdict, failed.as_ref()))
    }

    /// Writes the numbers that the ranks of `ranks` give to `all`, in rank order: [`Transport::agree`] without the
    /// comparison.
    ///
    /// # Errors
    /// As [`Transport::agree`], without [`Error::Disagreement`].
    pub fn gather(&self, ranks: Range<usize>, number: u64, all: &mut [u64]) -> Result<()> {
        let EngineGroup { rank, world, .. } = *self.group;
        rules::check_group(rank, world, &ranks)?;
        self.gather_in(self.announced(), ranks, number, all)
    }

    /// The run that the rank has announced.
    fn announced(&self) -> Option<RunName> {
        *self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`gather`](Self::gather), of a rank that begins `run`.
    fn gather_in(&self, run: Option<RunName>, ranks: Range<usize>, number: u64, all: &mut [u64]) -> Result<()> {
        if all.len() != ranks.len() {
            return Err(Error::invalid(
                "all",
                format_args!("of length {}", all.len()),
                format_args!("{}: one for each rank", ranks.len()),
            ));
        }
        self.moving(Label { run, ..AGREEMENT }, |moves| moves.gather(ranks, number, all))
    }

    /// Begins a call that waits.
    fn enter(&self, label: Label) -> Result<MutexGuard<'_, MessageBuffers>> {
        let rooms = rules::begin_call(self, &self.rooms, label, || None)?;
        if self.group.has_failed() {
            return Err(self.failed_before(label));
        }
        if !self.group.is_connected() {
            return Err(Error::invalid(
                label.operation,
                "called on a transport that is not connected",
                "a connected one",
            )
            .hint("connect it first, on all ranks"));
        }
        Ok(rooms)
    }

    /// Runs a call that waits. After a failure, closes the engine and searches for the rank at fault.
    fn moving(&self, label: Label, run: impl FnOnce(&mut Moves<'_, E>) -> Result<(), Stop>) -> Result<()> {
        let mut rooms = self.enter(label)?;
        let (group, began) = (&self.group, Instant::now());
        let watch = CloseOnUnwind(group);
        let outcome = run(&mut Moves { group, label, rooms: &mut rooms });
        core::mem::forget(watch);
        let error = match outcome {
            Ok(()) => {
                rooms.reuse();
                group.set_wait(None);
                return Ok(());
            }
            Err(Stop::Differs(verdict)) => {
                group.set_failed(&verdict.text);
                let verdict = self.group.start_search(false, Some(verdict));
                group.engine.close();
                self.error(label, "", Some(&verdict), None)
            }
            Err(Stop::Failed(failed)) => match group.wait().filter(|_| !failed.own) {
                None => self.failed_by_itself(label, &failed),
                Some(wait) => {
                    let text = format!(
                        "{}, after {} (deadline {})",
                        wait.failed(),
                        seconds(began.elapsed()),
                        seconds(group.deadline)
                    );
                    group.set_failed(&format!("{}, step {}: {text}", label.operation, label.step));
                    group.engine.close();
                    let verdict = self.group.start_search(false, None);
                    self.error(label, &text, Some(&verdict), Some(&failed))
                }
            },
        };
        group.set_wait(None);
        Err(error)
    }

    fn failed_by_itself(&self, label: Label, failed: &Failed) -> Error {
        let what = format!("failed by itself ({})", failed.text);
        self.group.end(&what);
        let verdict = self.group.wait_for_verdict().unwrap_or_else(|| Verdict::of(self.group.rank, &what));
        self.error(label, "", Some(&verdict), None)
    }

    /// The error of a group that could not be made. Closes the engine.
    fn failed(&self, what: String, verdict: &Verdict, failed: Option<&Failed>) -> Error {
        self.group.set_failed(&what);
        self.group.engine.close();
        self.error(MAKING, &what, Some(verdict), failed)
    }

    /// The error of a call after the group has failed. Waits for the end of the search for the rank at fault.
    fn failed_before(&self, label: Label) -> Error {
        let verdict = self.group.wait_for_verdict();
        let what = format!("the group failed before: {}", self.group.failed());
        self.error(label, &what, verdict.as_ref(), None)
    }

    fn error(&self, label: Label, what: &str, verdict: Option<&Verdict>, failed: Option<&Failed>) -> Error {
        if let Some(error) = verdict.and_then(|verdict| verdict.disagreement(self.group.rank, label.number())) {
            return error;
        }
        let engine = failed.map(|failed| format!("engine: {}", failed.text));
        let said = [what, verdict.map_or("", |v| &v.text), engine.as_deref().unwrap_or("")];
        let said: Vec<_> = said.into_iter().filter(|text| !text.is_empty()).collect();
        let rank = self.group.rank;
        let (peer, differ) = (verdict.and_then(|v| v.on(rank)), verdict.is_some_and(|v| v.differ));
        Error::Peer { rank, at: label, fault: Fault::Found { peer, differ, text: said.join("; ") } }
    }
}

/// Closes the engine when a call unwinds out of it: its messages are the caller's memory.
struct CloseOnUnwind<'a, E: Engine>(&'a EngineGroup<E>);

impl<E: Engine> Drop for CloseOnUnwind<'_, E> {
    fn drop(&mut self) {
        self.0.engine.close();
    }
}

fn seconds(time: Duration) -> String {
    let time = time.as_secs_f64();
    if time < 1.0 { format!("{} s", (time * 1e3).round() / 1e3) } else { format!("{time:.1} s") }
}

impl<E: Engine> Transport for EngineTransport<E> {
    fn rank(&self) -> usize {
        self.group.rank
    }

    fn world(&self) -> usize {
        self.group.world
    }

    fn announce(&self, run: Option<RunName>) {
        *self.run.lock().unwrap_or_else(PoisonError::into_inner) = run;
    }

    fn agree(&self, group: Range<usize>, fingerprint: u64) -> Result<()> {
        let EngineGroup { rank, world, .. } = *self.group;
        rules::check_group(rank, world, &group)?;
        let mut all = std::vec![!fingerprint; group.len()];
        let run = self.announced().map(|run| run.comparing(fingerprint));
        self.gather_in(run, group.clone(), fingerprint, &mut all)?;
        rules::compare(rank, group, fingerprint, &all)
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        let EngineGroup { rank, world, .. } = *self.group;
        rules::check_messages(rank, world, sends, recvs)?;
        // SAFETY: the messages are valid until this returns (the contract of `exchange`): all of them have moved then,
        // or the engine is closed.
        self.moving(label, |moves| unsafe { moves.exchange(sends, recvs) })
    }

    fn poll(&self) -> Result<()> {
        // Never waits: a failure is reported once the ranks know which of them is at fault.
        if self.group.has_failed() && !self.group.is_searching() {
            return Err(self.failed_before(Label::new("poll", 0)));
        }
        Ok(())
    }

    fn abort(&self, cause: Cause) {
        let _ = cause;
        self.group.end("aborted the run");
    }
}

impl<E: Engine> Drop for EngineTransport<E> {
    fn drop(&mut self) {
        self.group.leave();
    }
}
