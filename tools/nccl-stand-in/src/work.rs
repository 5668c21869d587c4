// SPDX-License-Identifier: MIT OR Apache-2.0
//! A group as work of a stream: the driver asks, and each time the messages that can go on do.
//!
//! It begins when it is the next of its stream and all groups that its communicator issued before are over. Then every
//! receive tells its sender that it is ready, and every send answers when its receiver is.

use crate::codes::{Outcome, REMOTE_ERROR, SUCCESS};
use crate::comm::{Comm, Inner, Shared};
use crate::config::{What, report};
use crate::driver::{Access, Calls, DONE, ENDED, PENDING, Part, check};
use crate::link::Tag;
use crate::reduce::Reduction;
use std::ffi::{CString, c_int, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// One message.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub(crate) sends: bool,
    pub(crate) peer: usize,
    pub(crate) collective: bool,
    pub(crate) bytes: usize,
    /// Where it lies on the device; none for what a reduction only reads.
    pub(crate) ptr: Option<u64>,
}

/// What is done with device memory of this rank alone, once all messages are through.
#[derive(Clone, Debug)]
pub(crate) enum Local {
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
    /// Of this rank's elements and those that came in messages, which are listed by their place in the group.
    Reduce {
        reduction: Reduction,
        to: u64,
        from: u64,
        bytes: usize,
        arrived: Vec<(usize, usize)>,
    },
}

/// The messages of a group on one communicator.
#[derive(Debug, Default)]
pub(crate) struct Group {
    pub(crate) messages: Vec<Message>,
    pub(crate) local: Vec<Local>,
}

/// A group and the streams that its calls named.
pub(crate) struct Launch {
    pub(crate) group: Arc<Group>,
    pub(crate) streams: Vec<usize>,
}

#[derive(Default)]
struct State {
    number: Option<u64>,
    begun: bool,
    tags: Vec<Tag>,
    answered: Vec<bool>,
    done: Vec<bool>,
    arrived: Vec<Vec<u8>>,
    moved: Option<Instant>,
    told: bool,
    over: bool,
}

/// What the driver is given.
struct Work {
    shared: Arc<Shared>,
    group: Arc<Group>,
    state: Mutex<State>,
}

const CALLS: Calls = Calls { queued, poll, again, drop: release };

unsafe fn work<'a>(data: *mut c_void) -> &'a Work {
    // SAFETY: what `put_in` and `again` made, and `release` has not taken yet.
    unsafe { &*data.cast::<Work>() }
}

unsafe extern "C" fn queued(data: *mut c_void) {
    // SAFETY: as the driver promises.
    let work = unsafe { work(data) };
    work.shared.outstanding.fetch_add(1, Ordering::Relaxed);
    let mut inner = work.shared.lock();
    work.state.lock().unwrap_or_else(PoisonError::into_inner).number = Some(inner.issued);
    inner.issued += 1;
}

unsafe extern "C" fn poll(data: *mut c_void, memory: *const Access) -> c_int {
    // SAFETY: as the driver promises; the access is good during the call.
    let (work, memory) = unsafe { (work(data), &*memory) };
    let mut state = work.state.lock().unwrap_or_else(PoisonError::into_inner);
    let mut inner = work.shared.lock();
    let outcome = if inner.aborted { ENDED } else { work.ask(&mut state, &mut inner, memory) };
    if outcome != PENDING {
        inner.turn += 1;
        state.over = true;
        work.shared.outstanding.fetch_sub(1, Ordering::Relaxed);
    }
    outcome
}

unsafe extern "C" fn again(data: *mut c_void) -> *mut c_void {
    // SAFETY: as the driver promises.
    let old = unsafe { work(data) };
    let new =
        Work { shared: Arc::clone(&old.shared), group: Arc::clone(&old.group), state: Mutex::new(State::default()) };
    Box::into_raw(Box::new(new)).cast()
}

unsafe extern "C" fn release(data: *mut c_void) {
    // SAFETY: from `Box::into_raw`, and the driver releases once.
    let work = unsafe { Box::from_raw(data.cast::<Work>()) };
    let state = work.state.lock().unwrap_or_else(PoisonError::into_inner);
    if state.number.is_some() && !state.over {
        // A context that failed throws its work away.
        work.shared.outstanding.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Launch {
    /// Puts the group into its stream. Several streams wait for each other before and after it, as the manual says.
    pub(crate) fn put_in(&self, comm: &Comm) -> Outcome {
        let parts = self.group.parts();
        let what = format!("NCCL group of rank {}", comm.shared.rank);
        // No zero byte in it.
        let what = CString::new(what).unwrap_or_default();
        let [main, others @ ..] = &self.streams[..] else { return Ok(()) };
        comm.device.with(|d| {
            let order = |before: usize, after: usize| -> Outcome {
                let mut event = std::ptr::null_mut();
                // SAFETY: streams that the caller named and an event that is made here; 2 is one without times.
                unsafe {
                    check("cuEventCreate", (d.create_event)(&raw mut event, 2))?;
                    let done = check("cuEventRecord", (d.record)(event, before as *mut c_void))
                        .and_then(|()| check("cuStreamWaitEvent", (d.wait)(after as *mut c_void, event, 0)));
                    (d.destroy_event)(event);
                    done
                }
            };
            others.iter().try_for_each(|&s| order(s, *main))?;
            let shared = Arc::clone(&comm.shared);
            let work = Work { shared, group: Arc::clone(&self.group), state: Mutex::new(State::default()) };
            let data = Box::into_raw(Box::new(work)).cast();
            // SAFETY: the parts with their number, calls that fit the data, a text that ends in a zero byte.
            let code =
                unsafe { (d.exchange)(*main as *mut c_void, parts.as_ptr(), parts.len(), &CALLS, data, what.as_ptr()) };
            if code != 0 {
                // SAFETY: the driver takes over only what it accepts.
                drop(unsafe { Box::from_raw(data.cast::<Work>()) });
            }
            check("the group's stream", code)?;
            others.iter().try_for_each(|&s| order(*main, s))
        })
    }
}

impl Group {
    /// The bytes it reads and writes.
    fn parts(&self) -> Vec<Part> {
        let messages = self.messages.iter().filter(|m| m.bytes > 0);
        let mut parts: Vec<Part> =
            messages.filter_map(|m| Some(Part { ptr: m.ptr?, bytes: m.bytes, writes: (!m.sends).into() })).collect();
        for l in &self.local {
            let (Local::Copy { to, from, bytes } | Local::Reduce { to, from, bytes, .. }) = *l;
            if bytes > 0 {
                parts.push(Part { ptr: from, bytes, writes: 0 });
                parts.push(Part { ptr: to, bytes, writes: 1 });
            }
        }
        parts
    }
}

impl Work {
    fn ask(&self, state: &mut State, inner: &mut Inner, memory: &Access) -> c_int {
        if state.number != Some(inner.turn) {
            return PENDING;
        }
        if !state.begun {
            self.begin(state, inner);
        }
        if inner.error != SUCCESS || state.tags.len() < self.group.messages.len() {
            return PENDING;
        }
        let mut moved = false;
        for link in inner.links.iter_mut().flatten() {
            moved |= link.pump();
        }
        for k in 0..self.group.messages.len() {
            if !state.done[k] && self.go_on(k, state, inner, memory) {
                moved = true;
            }
        }
        for link in inner.links.iter_mut().flatten() {
            moved |= link.pump();
        }
        if moved {
            state.moved = Some(Instant::now());
        }
        let flushed = inner.links.iter().flatten().all(|l| l.flushed());
        if flushed && state.done.iter().all(|&d| d) {
            self.finish(state, memory);
            return DONE;
        }
        self.watch(state, inner);
        PENDING
    }

    /// Numbers the messages and tells the senders, unless something is to go wrong here.
    fn begin(&self, state: &mut State, inner: &mut Inner) {
        state.begun = true;
        state.moved = Some(Instant::now());
        let rank = self.shared.rank;
        match self.shared.config.at(rank, inner.turn) {
            None => {}
            Some(What::Error(code)) => {
                inner.error = code;
                return;
            }
            Some(What::Exit) => {
                unsafe extern "C" {
                    fn _exit(code: c_int) -> !;
                }
                // SAFETY: ends the process at once, as a crash would.
                unsafe { _exit(9) }
            }
            Some(_) => return,
        }
        for m in &self.group.messages {
            let next = inner.numbers.entry((m.peer, m.sends, m.collective)).or_insert(0);
            let tag = Tag { collective: m.collective, number: *next };
            *next += 1;
            state.tags.push(tag);
            if !m.sends
                && m.peer != rank
                && let Some(Some(link)) = inner.links.get_mut(m.peer)
            {
                link.say_ready(tag, m.bytes as u64);
            }
        }
        let n = self.group.messages.len();
        state.answered = vec![false; n];
        state.done = vec![false; n];
        state.arrived = vec![Vec::new(); n];
    }

    /// Lets a message go on. Whether it did.
    fn go_on(&self, k: usize, state: &mut State, inner: &mut Inner, memory: &Access) -> bool {
        let (m, tag) = (&self.group.messages[k], state.tags[k]);
        let read = || m.ptr.filter(|_| m.bytes > 0).map_or_else(Vec::new, |ptr| memory.read(ptr, m.bytes));
        if m.peer == self.shared.rank {
            // Both ends are in this group, in the same order; the receive takes the bytes.
            if m.sends {
                state.done[k] = true;
                return true;
            }
            let mine = |(i, _): &(usize, &Message)| state.tags[*i] == tag;
            let all = self.group.messages.iter().enumerate();
            let sends = all.filter(|(_, s)| s.sends && s.peer == m.peer && s.collective == m.collective);
            if let Some((_, Message { ptr: Some(from), bytes, .. })) = { sends }.find(mine)
                && let Some(to) = m.ptr
                && *bytes == m.bytes
            {
                memory.write(to, &memory.read(*from, m.bytes));
                state.done[k] = true;
            }
            return state.done[k];
        }
        let Some(Some(link)) = inner.links.get_mut(m.peer) else { return false };
        if m.sends {
            match link.expected(tag) {
                Some(bytes) if bytes == m.bytes as u64 => {
                    link.answered(tag);
                    link.send_data(tag, &read());
                    state.done[k] = true;
                }
                Some(bytes) if !state.answered[k] => {
                    state.answered[k] = true;
                    report(&format!(
                        "rank {}, group {}: message {} to rank {} has {} bytes here and {bytes} there: the groups do not fit",
                        self.shared.rank, inner.turn, tag.number, m.peer, m.bytes
                    ));
                }
                _ => {}
            }
        } else if let Some(bytes) = link.take(tag) {
            match m.ptr {
                Some(ptr) if m.bytes > 0 => memory.write(ptr, &bytes),
                _ => state.arrived[k] = bytes,
            }
            state.done[k] = true;
        }
        if !state.done[k] && link.closed && !self.shared.config.silent {
            inner.error = REMOTE_ERROR;
        }
        state.done[k]
    }

    fn finish(&self, state: &State, memory: &Access) {
        for l in &self.group.local {
            match l {
                Local::Copy { to, from, bytes } => memory.write(*to, &memory.read(*from, *bytes)),
                Local::Reduce { reduction, to, from, bytes, arrived } => {
                    let own = memory.read(*from, *bytes);
                    let mut all: Vec<(usize, &[u8])> =
                        arrived.iter().map(|&(rank, k)| (rank, &state.arrived[k][..])).collect();
                    all.push((self.shared.rank, &own));
                    all.sort_by_key(|a| a.0);
                    let terms: Vec<&[u8]> = all.into_iter().map(|a| a.1).collect();
                    memory.write(*to, &reduction.of(&terms));
                }
            }
        }
    }

    /// Reports a group that hangs, once.
    fn watch(&self, state: &mut State, inner: &Inner) {
        let quiet = state.moved.is_some_and(|at| at.elapsed() > self.shared.config.patience);
        if !quiet || state.told {
            return;
        }
        state.told = true;
        let open: Vec<String> = (self.group.messages.iter().zip(&state.tags).zip(&state.done))
            .filter(|(_, done)| !**done)
            .map(|((m, tag), _)| {
                let (way, what) = if m.sends { ("to", "no receive was posted") } else { ("from", "nothing came") };
                let kind = if m.collective { "collective message" } else { "message" };
                format!("{kind} {} {way} rank {} of {} bytes: {what}", tag.number, m.peer, m.bytes)
            })
            .collect();
        report(&format!(
            "Deadlock: rank {}, group {} has not moved for {} s: {}",
            self.shared.rank,
            inner.turn,
            self.shared.config.patience.as_secs(),
            open.join("; ")
        ));
    }
}
