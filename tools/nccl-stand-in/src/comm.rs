// SPDX-License-Identifier: MIT OR Apache-2.0
//! Communicators: what a handle stands for, what the work in streams shares with it, and the thread that lets devices
//! go on while no host of this process waits.

use crate::codes::{Failure, IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, Outcome, SUCCESS, SYSTEM_ERROR, keep};
use crate::config::{Config, report};
use crate::driver::{Device, driver};
use crate::link::Link;
use crate::rendezvous::{UniqueId, Who, connect};
use crate::work::Launch;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

/// What work in streams needs of its communicator. It may outlive the handle.
pub(crate) struct Shared {
    pub(crate) rank: usize,
    pub(crate) config: Config,
    inner: Mutex<Inner>,
    /// Groups in streams that are not over.
    pub(crate) outstanding: AtomicU64,
}

/// The part that changes.
#[derive(Default)]
pub(crate) struct Inner {
    pub(crate) links: Vec<Option<Link>>,
    /// Groups that were put into streams.
    pub(crate) issued: u64,
    /// The group whose turn it is.
    pub(crate) turn: u64,
    /// Messages so far, by peer: sent and received, and the same of collectives.
    pub(crate) numbers: HashMap<(usize, bool, bool), u64>,
    pub(crate) error: c_int,
    pub(crate) aborted: bool,
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Making {
    Running,
    Done,
    Failed(c_int),
}

struct State {
    making: Making,
    /// Groups that a non-blocking communicator has not put into their streams yet.
    later: Vec<Launch>,
    /// Questions that are still answered with "in progress".
    answers: u32,
    finalised: bool,
    random: u64,
}

/// A communicator.
pub(crate) struct Comm {
    pub(crate) world: usize,
    pub(crate) device: Device,
    pub(crate) blocking: bool,
    pub(crate) shared: Arc<Shared>,
    ended: AtomicBool,
    state: Mutex<State>,
}

static LIVE: Mutex<Option<HashMap<usize, Arc<Comm>>>> = Mutex::new(None);

fn live<R>(f: impl FnOnce(&mut HashMap<usize, Arc<Comm>>) -> R) -> R {
    f(LIVE.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// The communicator of a handle.
pub(crate) fn find(handle: usize) -> Outcome<Arc<Comm>> {
    let found = live(|l| l.get(&handle).cloned());
    found.ok_or_else(|| Failure::new(INVALID_ARGUMENT, format!("comm is {handle:#x}, which is no communicator")))
}

/// Takes a handle away.
pub(crate) fn forget(handle: usize) {
    live(|l| l.remove(&handle));
}

impl Comm {
    /// A communicator whose ranks have not met yet, and its handle.
    pub(crate) fn new(world: usize, rank: usize, blocking: bool) -> Outcome<(usize, Arc<Self>)> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let config = Config::from_env();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let random = config.seed.wrapping_add(number).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let comm = Arc::new(Self {
            world,
            device: Device::current()?,
            blocking,
            shared: Arc::new(Shared { rank, config, inner: Mutex::default(), outstanding: AtomicU64::new(0) }),
            ended: AtomicBool::new(false),
            state: Mutex::new(State {
                making: Making::Running,
                later: Vec::new(),
                answers: 0,
                finalised: false,
                random,
            }),
        });
        // Not null, and no address of anything.
        let handle = 0xcc1_0000 + number as usize * 16;
        live(|l| l.insert(handle, Arc::clone(&comm)));
        keep_going();
        Ok((handle, comm))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the ranks meet.
    pub(crate) fn make(&self, id: &UniqueId) -> Outcome {
        let config = &self.shared.config;
        let device = format!("{}/{}", config.host, self.device.bus);
        let me = Who { world: self.world, rank: self.shared.rank, device };
        let done = connect(id, &me, config, &self.ended);
        let making = match &done {
            Ok(_) => Making::Done,
            Err(failure) => Making::Failed(failure.code),
        };
        let done = done.map(|links| self.shared.lock().links = links);
        self.state().making = making;
        done
    }

    /// Whether calls may be made with it.
    pub(crate) fn usable(&self) -> Outcome {
        let state = self.state();
        let why = match state.making {
            Making::Running => "it is still being made",
            Making::Failed(_) => "it could not be made",
            Making::Done if state.finalised => "it was finalised",
            Making::Done if !state.later.is_empty() => "its last call is still in progress: ask ncclCommGetAsyncError",
            Making::Done => return Ok(()),
        };
        Err(Failure::new(INVALID_USAGE, format!("the communicator cannot be used: {why}")))
    }

    /// Puts a group into its streams: now, or, with a non-blocking communicator, often later.
    pub(crate) fn launch(&self, launch: Launch) -> Outcome<c_int> {
        if self.blocking {
            launch.put_in(self)?;
            return Ok(SUCCESS);
        }
        let mut state = self.state();
        state.random = state.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let answers = (state.random >> 33) % 4;
        if answers == 0 && state.later.is_empty() {
            drop(state);
            launch.put_in(self)?;
            return Ok(SUCCESS);
        }
        state.answers = answers as u32;
        state.later.push(launch);
        Ok(IN_PROGRESS)
    }

    /// What `ncclCommGetAsyncError` says.
    pub(crate) fn ask(&self) -> c_int {
        let later = {
            let mut state = self.state();
            match state.making {
                Making::Running => return IN_PROGRESS,
                Making::Failed(code) => return code,
                Making::Done => {}
            }
            if !state.later.is_empty() && state.answers > 0 {
                state.answers -= 1;
                return IN_PROGRESS;
            }
            std::mem::take(&mut state.later)
        };
        for launch in later {
            if let Err(failure) = launch.put_in(self) {
                self.shared.lock().error = keep(&failure);
            }
        }
        let error = self.shared.lock().error;
        if error != SUCCESS {
            return error;
        }
        let finalised = self.state().finalised;
        if finalised && self.shared.outstanding.load(Ordering::Relaxed) > 0 { IN_PROGRESS } else { SUCCESS }
    }

    /// No more calls; those that were made end. A blocking communicator waits for that.
    pub(crate) fn finalise(&self) -> Outcome<c_int> {
        self.usable()?;
        self.state().finalised = true;
        if self.blocking { self.settle().map(|()| SUCCESS) } else { Ok(IN_PROGRESS) }
    }

    /// Waits until nothing is in streams any more.
    pub(crate) fn settle(&self) -> Outcome {
        let begin = Instant::now();
        // Work that a program never asked for is done all the same.
        self.state().answers = 0;
        while self.ask() == IN_PROGRESS || self.shared.outstanding.load(Ordering::Relaxed) > 0 {
            if self.shared.lock().error != SUCCESS || begin.elapsed() > self.shared.config.init {
                let why = "work of the communicator does not end: abort it";
                return Err(Failure::new(SYSTEM_ERROR, why));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Ends everything on this rank.
    pub(crate) fn abort(&self) {
        self.ended.store(true, Ordering::Relaxed);
        self.state().later.clear();
        let mut inner = self.shared.lock();
        inner.aborted = true;
        inner.links.clear();
    }
}

/// Devices go on by themselves; the stand-in driver's go on when a thread waits. While groups are in streams, this
/// thread lets it work on them, so that a process whose hosts do something else does not hold up the others.
fn keep_going() {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| {
        let run = || {
            loop {
                let busy = live(|l| l.values().any(|c| c.shared.outstanding.load(Ordering::Relaxed) > 0));
                if busy && let Ok(d) = driver() {
                    for _ in 0..16 {
                        // SAFETY: the driver's own function, without arguments.
                        if unsafe { (d.progress)() } != 0 {
                            break;
                        }
                    }
                }
                std::thread::sleep(Duration::from_micros(if busy { 300 } else { 2000 }));
            }
        };
        if let Err(e) = std::thread::Builder::new().name("nccl-stand-in".to_owned()).spawn(run) {
            report(&format!("no thread for progress: {e}"));
        }
    });
}
