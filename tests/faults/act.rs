// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a rank does wrong, what the others say about it, and how long they wait before they say it.

use crate::common::through::Fault;
use cpattn::Cause;
use std::time::Duration;

/// Nothing that fails at once may wait for this.
pub const FAR: Duration = Duration::from_secs(60);

/// For faults that only a deadline finds.
pub const NEAR: Duration = Duration::from_millis(400);

/// What a busy machine may add to any trial.
pub const SLACK: Duration = Duration::from_secs(20);

/// What a rank does wrong.
#[derive(Clone, Copy, Debug)]
pub enum Act {
    /// Nothing.
    Nothing,
    /// Something at one call of its transport.
    At(u64, Fault),
    /// Its rank is dropped before the forward.
    DropFirst,
    /// Its rank is dropped between forward and backward.
    DropBetween,
    /// The caller's code panics before the forward.
    PanicFirst,
    /// The caller's code panics between forward and backward.
    PanicBetween,
    /// Another thread aborts through a handle, after so many microseconds.
    Abort(u64),
}

impl Act {
    /// What the others say the culprit did; of an expired deadline, the shortest time that they may name.
    pub fn cause(self, deadline: Duration) -> Option<Cause> {
        let late = Cause::Deadline { ms: deadline.as_millis() as u64, bytes: 0 };
        match self {
            Self::Nothing => None,
            Self::At(_, Fault::Delay(by)) => (by > deadline).then_some(late),
            Self::At(_, Fault::Silence) => Some(late),
            Self::At(_, Fault::Panic) | Self::PanicFirst | Self::PanicBetween => Some(Cause::Panicked),
            Self::At(_, Fault::Fail) => Some(Cause::Failed),
            Self::At(_, Fault::Leave) | Self::DropFirst | Self::DropBetween => Some(Cause::Left),
            Self::At(..) => None,
            Self::Abort(_) => Some(Cause::Aborted),
        }
    }

    pub fn deadline(self) -> Duration {
        match self {
            Self::At(_, Fault::Silence) => NEAR,
            Self::At(_, Fault::Delay(by)) if by > NEAR => NEAR,
            _ => FAR,
        }
    }
}

/// Everything that can go wrong without costing more than a few milliseconds.
pub fn swift(at: u64) -> [Act; 4] {
    [Fault::Panic, Fault::Fail, Fault::Leave, Fault::Delay(Duration::from_millis(15))].map(|f| Act::At(at, f))
}
