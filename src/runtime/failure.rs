// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keeps a failed group failed, whatever its transport returns afterwards.
//!
//! The transports of this crate remember their first failure and return it from every later call. A caller's own
//! transport may not do so: after an exchange that missed its deadline it may match the *next* one with it and complete
//! it, mixing the messages of two runs. So the rank keeps the first error of a run, an agreement or a poll, aborts the
//! transport, and from then on returns that error. If the error was a refusal with a hint, later calls return another
//! hint: make a new group.
//!
//! Different numbers in `agree` are not a failure: every rank of the group gets the error before any data has moved.
//! They are one if another rank does not agree but runs what was agreed on before; the transport has then failed.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    string::String,
    sync::{Arc, OnceLock},
};

#[cfg(feature = "cuda")]
use std::sync::Weak;

use crate::{
    error::{Cause, Error, Result},
    transport::{Label, Transport},
};

/// The hint of calls after a refusal that ended the group.
const ENDED: &str = "an earlier call failed with this, which has ended the group: make its transports and ranks again";

/// Failures that a device records while the host does not wait for it.
#[cfg(feature = "cuda")]
pub(super) trait Found: Send + Sync {
    /// The error, and whether it is certain even if the transport has failed too. Never waits.
    fn found(&self) -> Option<(Error, bool)>;
}

/// The first failure of a rank, shared with its handles.
#[derive(Clone, Default)]
pub(super) struct FirstFailure {
    first: Arc<OnceLock<Error>>,
    /// Weak: a handle keeps no memory of a device.
    #[cfg(feature = "cuda")]
    device: Option<Weak<dyn Found>>,
}

impl FirstFailure {
    /// As `default`, and also reports the failures of a device.
    #[cfg(feature = "cuda")]
    pub(super) fn with_device(device: &Arc<impl Found + 'static>) -> Self {
        let device: Arc<dyn Found> = device.clone();
        Self { first: Arc::default(), device: Some(Arc::downgrade(&device)) }
    }

    /// Returns the first failure, if there is one. Notifies the peers of a failure that the device recorded.
    pub(super) fn check(&self, transport: &dyn Transport) -> Result<()> {
        #[cfg(feature = "cuda")]
        self.poll_transport(transport);
        let _ = transport;
        self.first.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Keeps a failure that the device recorded, unless there is an earlier one.
    #[cfg(feature = "cuda")]
    fn poll_transport(&self, transport: &dyn Transport) {
        if self.first.get().is_none()
            && let Some((error, certain)) = self.device.as_ref().and_then(Weak::upgrade).and_then(|d| d.found())
        {
            // After a failed exchange the data that the device compared may be incomplete.
            let error = if certain { error } else { transport.poll().err().unwrap_or(error) };
            self.keep(&error);
            abort(transport, cause_of(&error));
        }
    }

    /// Keeps an error, unless there is one already.
    pub(super) fn keep(&self, error: &Error) {
        // Later errors follow from the first. The hint of the first call does not help a later one.
        let _ = self.first.set(error.clone().hint(ENDED));
    }

    /// Asks the transport, unless an error is kept already.
    pub(super) fn poll(&self, transport: &dyn Transport) -> Result<()> {
        self.check(transport)?;
        transport.poll().inspect_err(|error| {
            self.keep(error);
            abort(transport, Cause::Failed);
        })
    }

    /// Records that this rank ended the group.
    pub(super) fn ended(&self, rank: usize, cause: Cause) {
        self.keep(&Label::new("agree", 0).error(rank, rank, cause));
    }
}

/// Ends the group when it is dropped, that is, when the watched code unwinds: the peers will wait for this rank, and
/// the code that catches the panic may keep the rank.
struct AbortOnUnwind<'a> {
    transport: &'a dyn Transport,
    failure: &'a FirstFailure,
}

impl Drop for AbortOnUnwind<'_> {
    fn drop(&mut self) {
        self.failure.ended(self.transport.rank(), Cause::Panicked);
        abort(self.transport, Cause::Panicked);
    }
}

/// Runs `body`, whose result the other ranks will wait for. If `body` unwinds, the group ends; if it fails, its caller
/// ends the group.
pub(super) fn abort_on_unwind<T>(transport: &dyn Transport, failure: &FirstFailure, body: impl FnOnce() -> T) -> T {
    let watch = AbortOnUnwind { transport, failure };
    let outcome = body();
    std::mem::forget(watch);
    outcome
}

/// Runs `body`, whose result the other ranks will wait for. If `body` fails or unwinds, the group ends: the error is
/// kept, and the peers are notified.
pub(super) fn watched<T>(
    transport: &dyn Transport,
    failure: &FirstFailure,
    body: impl FnOnce() -> Result<T>,
) -> Result<T> {
    abort_on_unwind(transport, failure, body).inspect_err(|error| {
        failure.keep(error);
        abort(transport, Cause::Failed);
    })
}

/// The outcome of an agreement inside of [`watched`], where a disagreement does not end the group unless `transport`
/// has failed: it is given the call in words.
pub(super) fn described<T>(
    transport: &dyn Transport,
    agreed: Result<T>,
    in_words: impl FnOnce() -> String,
) -> Result<Result<T>> {
    match agreed {
        Err(error @ Error::Disagreement { .. }) => {
            let error = error.described(in_words);
            if transport.poll().is_ok() { Ok(Err(error)) } else { Err(error) }
        }
        other => other.map(Ok),
    }
}

/// The cause that peers get for an error of this rank.
pub(super) const fn cause_of(error: &Error) -> Cause {
    match error {
        Error::Disagreement { peer, .. } => Cause::Disagreed { with: *peer },
        _ => Cause::Failed,
    }
}

/// Notifies the peers. This must not unwind, since a lane may still use the caller's memory or a panic may be in
/// progress; the transport may be the caller's code, so a panic of its `abort` is caught here.
pub(super) fn abort(transport: &dyn Transport, cause: Cause) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| transport.abort(cause))) {
        // Dropping the payload of a panic may panic too.
        std::mem::forget(panic);
    }
}
