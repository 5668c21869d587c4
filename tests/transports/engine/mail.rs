// SPDX-License-Identifier: MIT OR Apache-2.0
//! An engine between threads, with a store, in which ranks can be stopped and the store can be stopped or lost.
//!
//! A message is copied when it is posted, and arrives in the wait of its receiver. A rank that is stopped is in its
//! next call of the engine until it goes on.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cpattn::transport::engine::{Engine, EngineTransport, Failed, LONGEST_VALUE, MessageDirection};

/// From, to, tag, and which of these.
type Place = (usize, usize, u32, u64);

/// How long a call into the store takes a rank that is far from it.
const FAR: Duration = Duration::from_millis(60);

#[derive(Default)]
pub struct State {
    messages: BTreeMap<Place, Vec<u8>>,
    posted: BTreeMap<(bool, usize, usize, u32), u64>,
    requests: BTreeMap<u64, Request>,
    keys: BTreeMap<String, Vec<u8>>,
    pub connected: BTreeSet<usize>,
    closed: BTreeSet<usize>,
    pub stopped: BTreeSet<usize>,
    pub store_stopped: bool,
    pub store_gone: bool,
    pub no_store: bool,
    /// The rank whose calls into the store take [`FAR`] more.
    pub far: Option<usize>,
    /// The rank whose next `post` or `connect` fails by itself; while there is one, `connect` of others does not
    /// return.
    pub broken: Option<usize>,
}

#[derive(Clone, Copy)]
struct Request {
    way: MessageDirection,
    place: Place,
    data: usize,
    bytes: usize,
}

/// What the ranks have in common.
#[derive(Default)]
pub struct Office {
    state: Mutex<State>,
    changed: Condvar,
    /// Messages that were posted.
    pub posts: AtomicUsize,
}

impl Office {
    pub fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
    }

    /// All that was stopped goes on.
    pub fn release(&self) {
        self.change(|state| {
            state.stopped.clear();
            (state.store_stopped, state.store_gone) = (false, true);
        });
    }
}

pub struct Mail {
    pub office: Arc<Office>,
    rank: usize,
    world: usize,
}

impl Mail {
    pub fn end(office: &Arc<Office>, rank: usize, world: usize, deadline: Duration) -> EngineTransport<Self> {
        EngineTransport::new(Self { office: office.clone(), rank, world }, deadline).unwrap()
    }

    /// Waits until `ready` says something, where this rank is not stopped.
    fn until<T>(
        &self,
        end: Option<Instant>,
        ready: impl Fn(&mut State) -> Option<Result<T, Failed>>,
    ) -> Result<T, Failed> {
        let mut state = self.office.state.lock().unwrap();
        loop {
            let stopped = state.stopped.contains(&self.rank);
            if !stopped && let Some(outcome) = ready(&mut state) {
                return outcome;
            }
            if !stopped && end.is_some_and(|end| Instant::now() > end) {
                return Err(Failed::of_group("the time has passed"));
            }
            let left = end.map_or(Duration::from_secs(1), |end| end.saturating_duration_since(Instant::now()));
            let pause = left.max(Duration::from_millis(1));
            state = self.office.changed.wait_timeout(state, pause).unwrap().0;
        }
    }

    fn store<T>(&self, job: impl Fn(&mut State) -> Option<T>) -> Result<T, Failed> {
        if self.state().far == Some(self.rank) {
            thread::sleep(FAR);
        }
        self.until(None, |state| match () {
            () if state.store_gone => Some(Err(Failed::of_group("no connection to the store"))),
            () if state.store_stopped => None,
            () => job(state).map(Ok),
        })
    }

    fn changed<T>(&self, outcome: T) -> T {
        self.office.changed.notify_all();
        outcome
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.office.state.lock().unwrap()
    }
}

// SAFETY: memory of a message is touched in `post` and `wait` only, on the thread that called.
unsafe impl Engine for Mail {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn open(&self) -> Result<(), Failed> {
        if self.state().no_store { Err(Failed::of_group("there is none")) } else { self.store(|_| Some(())) }
    }

    fn connect(&self) -> Result<(), Failed> {
        self.state().connected.insert(self.rank);
        self.office.changed.notify_all();
        let end = self.state().broken.is_none().then(|| Instant::now() + Duration::from_secs(3));
        self.until(end, |state| match state.broken {
            _ if state.store_gone => Some(Err(Failed::of_group("no connection to the store"))),
            _ if state.connected.len() < self.world => None,
            Some(rank) if rank != self.rank => None,
            Some(_) => Some(Err(Failed::own("the engine broke"))),
            None => Some(Ok(())),
        })
    }

    unsafe fn post(
        &self,
        way: MessageDirection,
        peer: usize,
        tag: u32,
        data: *mut u8,
        bytes: usize,
    ) -> Result<u64, Failed> {
        let number = self.office.posts.fetch_add(1, Ordering::Relaxed) as u64;
        let outcome = self.until(None, |state| {
            if state.broken == Some(self.rank) {
                return Some(Err(Failed::own("the engine broke")));
            }
            let (from, to) = if way == MessageDirection::Send { (self.rank, peer) } else { (peer, self.rank) };
            let count = state.posted.entry((way == MessageDirection::Send, from, to, tag)).or_default();
            let place = (from, to, tag, *count);
            *count += 1;
            if way == MessageDirection::Send {
                // SAFETY: readable (the contract of `post`).
                let message = unsafe { std::slice::from_raw_parts(data, bytes) }.to_vec();
                state.messages.insert(place, message);
            }
            state.requests.insert(number, Request { way, place, data: data.expose_provenance(), bytes });
            Some(Ok(number))
        });
        self.changed(outcome)
    }

    fn wait(&self, posted: u64, limit: Duration) -> Result<(), Failed> {
        let outcome = self.until(Some(Instant::now() + limit), |state| {
            let request = state.requests[&posted];
            let (from, to, ..) = request.place;
            let peer = if from == self.rank { to } else { from };
            if state.closed.contains(&self.rank) {
                return Some(Err(Failed::of_group("closed")));
            }
            let small = request.bytes <= 70_000;
            let there = state.messages.contains_key(&request.place);
            match request.way {
                // Large ones are taken before their sender goes on.
                MessageDirection::Send if small || !there => return Some(Ok(())),
                MessageDirection::Receive if there => {
                    let message = state.messages.remove(&request.place).unwrap();
                    assert!(message.len() <= request.bytes, "{} bytes into {}", message.len(), request.bytes);
                    let to = std::ptr::with_exposed_provenance_mut::<u8>(request.data);
                    // SAFETY: writable, with as many bytes (the contract of `post`), until this returns or `close` has.
                    unsafe { to.copy_from_nonoverlapping(message.as_ptr(), message.len()) };
                    return Some(Ok(()));
                }
                _ => {}
            }
            let gone = state.closed.contains(&peer);
            gone.then(|| Err(Failed::of_group(format!("connection closed by {peer}"))))
        });
        self.changed(outcome)
    }

    fn close(&self) {
        self.state().closed.insert(self.rank);
        self.office.changed.notify_all();
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<Vec<u8>, Failed> {
        assert!(!value.is_empty() && value.len() <= LONGEST_VALUE);
        let there = self.store(|state| Some(state.keys.entry(key.into()).or_insert_with(|| value.into()).clone()));
        self.changed(there)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, Failed> {
        self.store(|state| Some(state.keys.get(key).cloned()))
    }

    fn wait_for(&self, key: &str) -> Result<(), Failed> {
        self.store(|state| state.keys.contains_key(key).then_some(()))
    }
}

impl Drop for Mail {
    fn drop(&mut self) {
        self.close();
    }
}
