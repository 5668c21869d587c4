// SPDX-License-Identifier: MIT OR Apache-2.0
//! The transport of tests and benches: all calls go through to another transport, by way of a hook.
//!
//! A test writes the calls that it watches, fails or changes, and nothing else. Two hooks are here: [`Counted`] counts
//! agreements, and [`FaultAt`] makes one call fail, to test that nothing hangs and that errors name rank and step.

use cpattn::{
    Cause, Error, Result,
    transport::{Label, Message, Transport},
};
use std::{
    ops::Range,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

#[cfg(feature = "cuda")]
use std::sync::OnceLock;

#[cfg(feature = "cuda")]
use cpattn::{call::RawStream, kernel::cuda::Cuda, transport::DeviceTransport};

/// What becomes of each call of a transport `T`. By default it goes through.
pub trait Hook<T: Transport>: Send + Sync {
    fn agree(&self, end: &T, group: Range<usize>, number: u64) -> Result<()> {
        end.agree(group, number)
    }

    /// # Safety
    /// As [`Transport::exchange`].
    unsafe fn exchange(&self, end: &T, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        // SAFETY: the caller's promise about the lists is handed on.
        unsafe { end.exchange(label, sends, recvs) }
    }

    fn poll(&self, end: &T) -> Result<()> {
        end.poll()
    }

    fn abort(&self, end: &T, cause: Cause) {
        end.abort(cause);
    }

    /// Whether the rank leaves: its transport is dropped, and later calls return an error with [`Cause::Left`]. Asked
    /// after each agreement and exchange.
    fn leaves(&self) -> bool {
        false
    }

    /// Whether a transport that can be captured says so.
    fn captures(&self) -> bool {
        true
    }
}

/// Counts agreements.
#[derive(Clone, Default)]
pub struct Counted(pub Arc<AtomicUsize>);

impl<T: Transport> Hook<T> for Counted {
    fn agree(&self, end: &T, group: Range<usize>, number: u64) -> Result<()> {
        self.0.fetch_add(1, SeqCst);
        end.agree(group, number)
    }
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// The call is delayed, and then made.
    Delay(Duration),
    /// The calling thread panics.
    Panic,
    /// The call aborts the run with [`Cause::Failed`] and returns an error.
    Fail,
    /// The transport is dropped; this call and all later ones return an error with [`Cause::Left`].
    Leave,
    /// The call never answers. It returns when the group has failed, with the group's error.
    Silence,
}

/// Makes call number `at` go wrong; `agree` and `exchange` count, from 0. Give one rank of a group a fault and the
/// others [`Fault::None`], so that all ranks have the same type.
pub struct FaultAt {
    at: u64,
    fault: Fault,
    calls: AtomicU64,
    left: AtomicBool,
}

pub type Faulty<T> = Through<T, FaultAt>;

impl<T: Transport> Faulty<T> {
    pub fn faulty(end: T, at: u64, fault: Fault) -> Self {
        Self::new(end, FaultAt { at, fault, calls: AtomicU64::new(0), left: AtomicBool::new(false) })
    }

    /// The number of calls of `agree` and `exchange` so far. A run without a fault shows which values of `at` are
    /// possible.
    pub fn calls(&self) -> u64 {
        self.hook.calls.load(SeqCst)
    }
}

impl FaultAt {
    /// Counts a call, and injects the fault if it is its turn.
    fn enter(&self, end: &impl Transport, label: Label) -> Result<()> {
        if self.calls.fetch_add(1, SeqCst) != self.at {
            return Ok(());
        }
        let (rank, Label { operation, step, .. }) = (end.rank(), label);
        match self.fault {
            Fault::None => {}
            Fault::Delay(duration) => std::thread::sleep(duration),
            Fault::Panic => panic!("fault injected on rank {rank}, {operation}, step {step}"),
            Fault::Fail => {
                end.abort(Cause::Failed);
                return Err(label.error(rank, rank, Cause::Failed));
            }
            Fault::Leave => {
                self.left.store(true, SeqCst);
                return Err(label.error(rank, rank, Cause::Left));
            }
            Fault::Silence => loop {
                end.poll()?;
                std::thread::sleep(Duration::from_millis(1));
            },
        }
        Ok(())
    }
}

impl<T: Transport> Hook<T> for FaultAt {
    fn agree(&self, end: &T, group: Range<usize>, number: u64) -> Result<()> {
        self.enter(end, AGREE)?;
        end.agree(group, number)
    }

    unsafe fn exchange(&self, end: &T, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        self.enter(end, label)?;
        // SAFETY: the caller's promise about the lists is handed on.
        unsafe { end.exchange(label, sends, recvs) }
    }

    fn leaves(&self) -> bool {
        self.left.load(SeqCst)
    }
}

const AGREE: Label = Label::new("agree", 0);

/// One end of a transport, behind a hook.
pub struct Through<T, H> {
    pub hook: H,
    /// None once the rank has left.
    end: RwLock<Option<Arc<T>>>,
    rank: usize,
    world: usize,
    #[cfg(feature = "cuda")]
    device: OnceLock<Arc<Cuda>>,
}

impl<T: Transport, H> Through<T, H> {
    pub fn new(end: T, hook: H) -> Self {
        let (rank, world) = (end.rank(), end.world());
        Self {
            hook,
            end: RwLock::new(Some(Arc::new(end))),
            rank,
            world,
            #[cfg(feature = "cuda")]
            device: OnceLock::new(),
        }
    }

    /// The transport, unless the rank has left.
    pub fn end(&self, label: Label) -> Result<Arc<T>, Error> {
        let end = self.end.read().unwrap_or_else(PoisonError::into_inner).clone();
        end.ok_or_else(|| label.error(self.rank, self.rank, Cause::Left))
    }
}

impl<T: Transport, H: Hook<T>> Through<T, H> {
    /// Drops the transport if the rank leaves.
    fn after(&self, outcome: Result<()>) -> Result<()> {
        if self.hook.leaves() {
            *self.end.write().unwrap_or_else(PoisonError::into_inner) = None;
        }
        outcome
    }
}

impl<T: Transport, H: Hook<T>> Transport for Through<T, H> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn agree(&self, group: Range<usize>, number: u64) -> Result<()> {
        let end = self.end(AGREE)?;
        self.after(self.hook.agree(&end, group, number))
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        let end = self.end(label)?;
        // SAFETY: the caller's promise about the lists is handed on.
        self.after(unsafe { self.hook.exchange(&end, label, sends, recvs) })
    }

    fn poll(&self) -> Result<()> {
        self.hook.poll(&*self.end(Label::new("poll", 0))?)
    }

    fn abort(&self, cause: Cause) {
        if let Ok(end) = self.end(AGREE) {
            self.hook.abort(&end, cause);
        }
    }
}

#[cfg(feature = "cuda")]
impl<T: DeviceTransport, H> Through<T, H> {
    fn device_end(&self) -> Arc<T> {
        self.end(AGREE).expect("a rank of devices that has not left")
    }
}

#[cfg(feature = "cuda")]
impl<T: DeviceTransport, H: Hook<T>> DeviceTransport for Through<T, H> {
    fn device(&self) -> &Arc<Cuda> {
        self.device.get_or_init(|| self.device_end().device().clone())
    }

    fn stream(&self) -> RawStream {
        self.device_end().stream()
    }

    fn synchronize(&self) -> Result<()> {
        self.device_end().synchronize()
    }

    fn begin_run(&self, capture: Option<u64>) {
        self.device_end().begin_run(capture);
    }

    fn can_capture(&self) -> bool {
        self.hook.captures() && self.device_end().can_capture()
    }
}
