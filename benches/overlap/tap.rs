// SPDX-License-Identifier: MIT OR Apache-2.0
//! A hook that records the exchanges of a transport, and can hold them back.
//!
//! An exchange that is held back returns at once and moves nothing: a run then takes the time of its attention, and its
//! results are meaningless. During the run only the tag of 16 bytes before the first message from each peer is checked:
//! a number of the plan and direction, and the number of the run. Ranks with the same run have the same tag, so the
//! rank is given its own tag: the one that it sends in this run or, before it has sent one, the tag of its last run
//! with the next run number.
//!
//! Recorded exchanges can be sent again, batch by batch, between runs: their addresses are those of the rank's
//! workspace and of tensors that outlive the rank.

use std::sync::{Arc, Mutex, MutexGuard};

use cpattn::{
    Result,
    transport::{Label, Message, Transport},
};

use crate::through::{Hook, Through};

/// Bytes of the tag that precedes the first message from a peer in a run.
const TAG: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Exchanges are passed on.
    Through,
    /// Exchanges are passed on and recorded.
    Record,
    /// Exchanges move nothing.
    Hold,
}

/// The messages of one recorded exchange.
struct Batch {
    label: Label,
    sends: Vec<Message>,
    recvs: Vec<Message>,
}

struct State {
    mode: Mode,
    batches: Vec<Batch>,
    /// The last tag that this rank sent, or would have sent, and whether it was in this run.
    tag: [u64; 2],
    fresh: bool,
}

impl State {
    /// # Safety
    /// The messages of an exchange.
    unsafe fn note(&mut self, sends: &[Message]) {
        if let Some(own) = sends.iter().find(|m| m.bytes == TAG) {
            // SAFETY: readable, with these bytes.
            self.tag = unsafe { own.ptr.cast::<[u64; 2]>().read_unaligned() };
            self.fresh = true;
        }
    }

    /// # Safety
    /// The messages of an exchange.
    unsafe fn answer(&mut self, recvs: &[Message]) {
        for tag in recvs.iter().filter(|m| m.bytes == TAG) {
            if !self.fresh {
                self.tag[1] += 1;
                self.fresh = true;
            }
            // SAFETY: writable, with these bytes.
            unsafe { tag.ptr.cast::<[u64; 2]>().write_unaligned(self.tag) };
        }
    }
}

/// The hook of one rank.
pub struct Recorder(Mutex<State>);

/// One end of a transport with the hook, shared by its rank and the code that sets the mode.
pub type Tap<T> = Arc<Through<T, Recorder>>;

/// Puts the hook before a transport.
pub fn tap<T: Transport>(end: T) -> Tap<T> {
    let state = State { mode: Mode::Through, batches: Vec::new(), tag: [0; 2], fresh: false };
    Arc::new(Through::new(end, Recorder(Mutex::new(state))))
}

impl Recorder {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("a hook that did not panic")
    }
}

impl<T: Transport> Through<T, Recorder> {
    /// Sets the mode of the next run. [`Mode::Record`] clears earlier records.
    pub fn set(&self, mode: Mode) {
        let mut state = self.hook.state();
        (state.mode, state.fresh) = (mode, false);
        if mode == Mode::Record {
            state.batches.clear();
        }
    }

    /// The number of recorded exchanges, and the bytes that they sent.
    pub fn written(&self) -> (usize, usize) {
        let state = self.hook.state();
        (state.batches.len(), state.batches.iter().flat_map(|b| &b.sends).map(|m| m.bytes).sum())
    }

    /// Repeats the recorded exchanges.
    ///
    /// # Safety
    /// The rank that listed it is alive and in no run, and has run no other plan since; its tensors are alive.
    pub unsafe fn again(&self) -> Result<()> {
        let end = self.end(Label::new("again", 0))?;
        for batch in &self.hook.state().batches {
            // SAFETY: the lists of a run's exchange, whose memory is still there and not in use (promised).
            unsafe { end.exchange(batch.label, &batch.sends, &batch.recvs) }?;
        }
        Ok(())
    }
}

impl<T: Transport> Hook<T> for Recorder {
    unsafe fn exchange(&self, end: &T, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        let mut state = self.state();
        // SAFETY: the bytes of messages are valid during the exchange (the contract of `Transport::exchange`).
        unsafe { state.note(sends) };
        match state.mode {
            Mode::Through => {}
            Mode::Record => state.batches.push(Batch { label, sends: sends.to_vec(), recvs: recvs.to_vec() }),
            Mode::Hold => {
                // SAFETY: as above; those of `recvs` may be written.
                unsafe { state.answer(recvs) };
                return Ok(());
            }
        }
        drop(state);
        // SAFETY: the lists as they were given, under the same contract.
        unsafe { end.exchange(label, sends, recvs) }
    }
}
