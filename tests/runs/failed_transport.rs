// SPDX-License-Identifier: MIT OR Apache-2.0
//! A transport that failed once, which is not used again.

use crate::agreement::{FAR, Job};
use crate::common::through::{Hook, Through};
use cpattn::Fault;
use cpattn::{
    Cause, Error, Rank, Result,
    transport::{
        Label, Message, Transport,
        local::{self, Local},
    },
};
use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread,
};

/// Fails one call and knows nothing of it afterwards; counts how often it is told to abort.
struct Forgetful {
    calls: AtomicUsize,
    at: usize,
    aborts: Arc<AtomicUsize>,
}

impl Forgetful {
    fn call(&self, end: &Local, label: Label) -> Result<()> {
        if self.calls.fetch_add(1, SeqCst) != self.at {
            return Ok(());
        }
        let (rank, peer) = (end.rank(), 1 - end.rank());
        Err(label.error(rank, peer, Cause::Deadline { ms: 7, bytes: 0 }))
    }
}

impl Hook<Local> for Forgetful {
    fn agree(&self, end: &Local, group: Range<usize>, number: u64) -> Result<()> {
        self.call(end, Label::new("agree", 0))?;
        end.agree(group, number)
    }
    unsafe fn exchange(&self, end: &Local, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        self.call(end, label)?;
        // SAFETY: handed on.
        unsafe { end.exchange(label, sends, recvs) }
    }
    fn poll(&self, _: &Local) -> Result<()> {
        Ok(())
    }
    fn abort(&self, _: &Local, _: Cause) {
        self.aborts.fetch_add(1, SeqCst);
    }
}

/// A transport that failed once is not used again, at whatever call it failed, and is told to abort.
#[test]
fn a_failed_transport_is_not_used_again() {
    let job = Job::ring(&[30, 6], 2);
    // Calls of two rounds: agree, exchange and return of the first; exchanges alone of the second.
    for at in 0..8 {
        let aborts: Vec<_> = (0..2).map(|_| Arc::new(AtomicUsize::new(0))).collect();
        let ends = local::group(2, FAR).unwrap().into_iter().zip(&aborts);
        thread::scope(|scope| {
            for (end, aborts) in ends {
                let job = &job;
                // Both miss the same deadline, so both are free for what comes next.
                let hook = Forgetful { calls: AtomicUsize::new(0), at, aborts: Arc::clone(aborts) };
                scope.spawn(move || {
                    let mut rank = Rank::new(Through::new(end, hook));
                    let mut first = None;
                    for _ in 0..4 {
                        let mut own = job.own(&rank);
                        let made = own.forward(&mut rank, &job.plan).and_then(|()| own.backward(&mut rank, &job.plan));
                        match (&first, made) {
                            (None, Ok(())) => {}
                            (None, Err(error)) => first = Some(error),
                            (Some(first), made) => assert_eq!(made, Err(first.clone()), "call {at}"),
                        }
                    }
                    let first = first.expect("a call failed");
                    assert!(
                        matches!(
                            first,
                            Error::Peer { fault: Fault::One { cause: Cause::Deadline { ms: 7, bytes: 0 }, .. }, .. }
                        ),
                        "call {at}: {first}"
                    );
                    assert_eq!(rank.poll(), Err(first), "call {at}");
                });
            }
        });
        assert!(aborts.iter().all(|a| a.load(SeqCst) > 0), "call {at}: the transport was not told");
    }
}

/// A handle's abort ends the rank even where the transport takes no notice.
#[test]
fn an_abort_is_kept() {
    let job = Job::ring(&[30, 6], 2);
    let end = local::group(2, FAR).unwrap().remove(0);
    let hook = Forgetful { calls: AtomicUsize::new(0), at: usize::MAX, aborts: Arc::default() };
    let mut rank = Rank::new(Through::new(end, hook));
    let handle = rank.handle();
    handle.abort();
    let error = job.forward(&mut rank).unwrap_err();
    assert_eq!(error.to_string(), "rank 0, agree, step 0: rank 0 aborted the run");
    assert_eq!(handle.poll(), Err(error));
}
