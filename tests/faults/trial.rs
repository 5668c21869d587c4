// SPDX-License-Identifier: MIT OR Apache-2.0
//! One trial with everything that must hold, and many trials, after which nothing may be left behind: no thread of a
//! rank and no memory.

use crate::act::{Act, FAR, SLACK};
use crate::common::through::Fault;
use crate::mode::Mode;
use crate::rank::{End, play};
use cpattn::{Cause, Error, RunKind, RunName, transport::Label};
use std::{
    alloc::{GlobalAlloc, Layout as Block, System},
    sync::{
        Once,
        atomic::{AtomicI64, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Counts the bytes that are allocated at the moment.
struct Counting;
static LIVE: AtomicI64 = AtomicI64::new(0);

// SAFETY: every call is handed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        LIVE.fetch_add(block.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(block) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, block: Block) {
        LIVE.fetch_sub(block.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, block) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

impl Mode {
    /// One trial; everything that must hold.
    pub fn trial(&self, culprit: usize, act: Act) {
        let what = format!("{}, rank {culprit}, {act:?}", self.name);
        let deadline = act.deadline();
        let cause = act.cause(deadline);
        let (ends, took) = play(self, culprit, act);
        let bound = if deadline == FAR { FAR / 2 } else { deadline * 2 + SLACK };
        assert!(took < bound, "{what}: took {took:?}");
        for (r, end) in ends.iter().enumerate() {
            let what = format!("{what}: rank {r}");
            let (forward, backward, again) = match end {
                End::Returned { forward, backward, again } => (forward, backward, again),
                End::Panicked => {
                    assert!(r == culprit && cause == Some(Cause::Panicked), "{what} panicked");
                    continue;
                }
                End::Gone => {
                    assert!(r == culprit && cause == Some(Cause::Left), "{what} is gone");
                    continue;
                }
            };
            let mut failed = None;
            match forward {
                Ok(parts) => assert!(*parts == self.good[r].0, "{what}: wrong o or lse"),
                Err(error) => failed = Some((RunKind::Forward, error)),
            }
            match backward {
                Some(Ok(parts)) => assert!(*parts == self.good[r].1, "{what}: wrong gradients"),
                Some(Err(error)) => failed = Some((RunKind::Backward, error)),
                None => {}
            }
            let Some((kind, error)) = failed else {
                let free = cause.is_none() || matches!(act, Act::Abort(_));
                let own = r == culprit && !free;
                assert!(!own && (free || !self.needs(r, culprit, act)), "{what} returned Ok");
                continue;
            };
            let Error::Peer {
                rank,
                at: Label { operation, step, run },
                fault: cpattn::Fault::One { peer, cause: found },
            } = *error
            else {
                panic!("{what}: {error}")
            };
            // An abort may come between two runs. The transport of a silent rank knows the call before.
            let between = matches!(act, Act::Abort(_)) && run.is_none();
            let silent = r == culprit && matches!(act, Act::At(_, Fault::Silence));
            let own = RunName::new(kind, self.plan.fingerprint());
            assert!(between || silent || run == Some(own), "{what}: {run:?}, which is not {own:?}: {error}");
            // How long it took and what had not moved is measured: it took at least as long.
            let found = match (found, cause) {
                (Cause::Deadline { ms, .. }, Some(late @ Cause::Deadline { ms: least, .. })) if ms >= least => late,
                _ => found,
            };
            assert_eq!((rank, peer, Some(found)), (r, culprit, cause), "{what}: {error}");
            let labels = &self.calls[r];
            let known = labels.iter().any(|c| (c.label.operation, c.label.step) == (operation, step));
            // A silent call never reaches the transport, which then still knows the call before.
            let known = known || matches!(act, Act::At(0, Fault::Silence)) && operation == "start";
            assert!(known, "{what}: no call is named {operation}, step {step}");
            if let (true, Act::At(at, Fault::Fail | Fault::Leave)) = (r == culprit, act) {
                let Label { operation: o, step: s, .. } = labels[at as usize].label;
                assert_eq!((operation, step), (o, s), "{what}: {error}");
            }
            let Some(Error::Peer { fault: cpattn::Fault::One { peer, .. }, .. }) = again else {
                panic!("{what}: {again:?}")
            };
            assert_eq!(*peer, culprit, "{what}: {again:?}");
        }
    }
}

/// Expected panics say nothing.
pub fn hush() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let payload = info.payload();
            let text = payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied());
            if !text.is_some_and(|s| s.starts_with("fault injected")) {
                before(info);
            }
        }));
    });
}

/// Threads of ranks that are alive.
fn ranks_alive() -> usize {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return 0 };
    let name = |t: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(t.ok()?.path().join("comm")).ok();
    tasks.filter_map(name).filter(|n| n.starts_with("cpattn-comm") || n.starts_with("fault-")).count()
}

/// Plays trials on some threads at once; nothing may be left behind.
pub fn play_all(modes: &[Mode], trials: &[(usize, usize, Act)]) {
    hush();
    // What is allocated once, on first use, is no leak.
    for &(mode, culprit, act) in trials.iter().take(8) {
        modes[mode].trial(culprit, act);
    }
    let (before, next) = (LIVE.load(Ordering::Relaxed), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| {
                while let Some(&(mode, culprit, act)) = trials.get(next.fetch_add(1, Ordering::Relaxed)) {
                    modes[mode].trial(culprit, act);
                }
            });
        }
    });
    // The kernel takes a thread off its list shortly after it was joined.
    let patience = Instant::now();
    while ranks_alive() > 0 && patience.elapsed() < SLACK {
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(ranks_alive(), 0, "threads are left behind");
    let after = LIVE.load(Ordering::Relaxed);
    assert!(after - before < 64 << 10, "{} bytes are left behind by {} trials", after - before, trials.len());
}
