// SPDX-License-Identifier: MIT OR Apache-2.0
//! The error type.
//!
//! No option or argument is silently ignored; what cannot be done is refused with an error. The error names the
//! argument by the caller's name for it, the value found, the value expected, and the way out, so that it can be
//! understood from a log of a thousand ranks without reading the source.

use alloc::{format, string::String, vec::Vec};
use core::{fmt, num::NonZeroU64};

/// The result of every fallible call of the crate.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Why a call was refused or a run ended.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// An argument contradicts another one, or is invalid by itself. Nothing was written.
    Invalid {
        /// The argument by the caller's name for it (`cu_seqlens_q`, `k.head_dim`, …).
        argument: String,
        /// The value that was given.
        found: String,
        /// The values that are accepted.
        expected: String,
        /// The way out; empty when `expected` says it all.
        hint: &'static str,
    },
    /// A valid request that this build, backend or mode does not support.
    Unsupported {
        /// The option that is not supported.
        option: String,
        /// The limit.
        limit: String,
        /// The way out.
        hint: &'static str,
    },
    /// Two ranks make different calls or run different plans. If the plan and direction are new to all ranks of the
    /// group, this is found before any data moves, and the group stays usable. Otherwise it is found with the first
    /// message between two ranks, or when one of them compares a plan that is new to it while the other runs one that
    /// was compared before; the group has then failed.
    Disagreement {
        /// The rank that reports.
        rank: usize,
        /// The first rank that differs.
        peer: usize,
        /// Fingerprint of what this rank runs: plan, direction and kind of run.
        ours: u64,
        /// Fingerprint of what the peer runs.
        theirs: u64,
        /// A description of what this rank runs: direction, tokens, heads, mesh, layout, and all else that is compared.
        /// Empty if the error comes from a transport used without a rank.
        what: String,
        /// The number of runs that this rank and the peer have begun in this group; `None` if that was not compared.
        runs: Option<[u64; 2]>,
    },
    /// A peer failed, left, or did not answer in time. The run is over on every rank of the group.
    Peer {
        /// The rank that reports.
        rank: usize,
        /// The exchange it was in, and the run that it belongs to.
        at: Label,
        /// The peer at fault, as far as it is known.
        fault: Fault,
    },
    /// The schedule verifier found a flaw.
    Schedule {
        /// The rank whose schedule is wrong.
        rank: usize,
        /// Index of the operation in that rank's list.
        operation: usize,
        /// The flaw, with the buffers, rows or peers concerned.
        flaw: String,
    },
    /// A call into a device driver, MPI or the operating system failed.
    Device {
        /// The call.
        call: &'static str,
        /// The status code that the call returned.
        code: i64,
        /// The text of the driver, of MPI, or of this crate.
        message: String,
    },
    /// A kernel of the caller's (`VarlenKernel`) failed, or returned what cannot be. The group has failed.
    Kernel {
        /// The rank whose kernel it is.
        rank: usize,
        /// The operation of the schedule that called it.
        at: Label,
        /// The kernel's name.
        kernel: String,
        /// The kernel's text, or what is wrong.
        message: String,
    },
}

/// Names an exchange in errors and traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// The operation, as the schedule names it.
    pub operation: &'static str,
    /// The step of the schedule.
    pub step: u32,
    /// The run that the call belongs to, if any.
    pub run: Option<RunName>,
}

impl Label {
    /// An exchange outside of runs.
    pub const fn new(operation: &'static str, step: u32) -> Self {
        Self { operation, step, run: None }
    }

    /// The same call of a run in which the ranks compare `fingerprint`.
    #[cfg(feature = "cuda")]
    pub(crate) fn comparing(self, fingerprint: u64) -> Self {
        Self { run: self.run.map(|run| run.comparing(fingerprint)), ..self }
    }

    /// What the ranks compare in the run that the call belongs to.
    #[cfg(feature = "std")]
    pub(crate) fn number(self) -> Option<u64> {
        self.run.and_then(|run| run.fingerprint).map(NonZeroU64::get)
    }

    /// The error of `rank` when `peer` made an exchange with this label fail.
    pub const fn error(self, rank: usize, peer: usize, cause: Cause) -> Error {
        Error::Peer { rank, at: self, fault: Fault::One { peer, cause } }
    }

    /// As [`error`](Self::error), when it is not known which of several peers is at fault.
    pub const fn error_of_one(self, rank: usize, peers: Vec<usize>, cause: Cause) -> Error {
        Error::Peer { rank, at: self, fault: Fault::OneOf { peers, cause } }
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, step {}", self.operation, self.step)?;
        self.run.map_or(Ok(()), |RunName { kind, plan, .. }| write!(f, " of the {kind} of plan {plan:016x}"))
    }
}

/// Who ended a run, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// One rank.
    One {
        /// The peer at fault.
        peer: usize,
        /// What the peer did.
        cause: Cause,
    },
    /// A rank that the communication library (NCCL) does not name.
    OneOf {
        /// The peers of that operation, one of which failed.
        peers: Vec<usize>,
        /// What that peer did.
        cause: Cause,
    },
    /// In a group over an [engine](crate::transport::engine), the ranks have asked each other which of them is at
    /// fault.
    Found {
        /// The rank at fault, which may be the one that reports; `None` if it cannot be determined. Of two ranks that
        /// run different plans, each names the other.
        peer: Option<usize>,
        /// Whether the cause is that ranks run different plans or make different calls.
        differ: bool,
        /// The operation that this rank waited for, and the answers of the ranks.
        text: String,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One { peer, cause } => write!(f, "rank {peer} {cause}"),
            Self::OneOf { peers, cause } => match peers[..] {
                [peer] => write!(f, "rank {peer} {cause}"),
                _ => write!(f, "one of the ranks {peers:?} {cause}"),
            },
            Self::Found { text, .. } => f.write_str(text),
        }
    }
}

/// The kind of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunKind {
    /// The forward of attention.
    Forward,
    /// The backward of attention.
    Backward,
    /// The all-to-all from tokens to heads.
    ToHeads,
    /// The all-to-all from heads to tokens.
    ToTokens,
    /// The merge of partial results of several ranks.
    Combine,
    /// States passed on along documents.
    Scan,
}

impl fmt::Display for RunKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::ToHeads => "all-to-all to heads",
            Self::ToTokens => "all-to-all to tokens",
            Self::Combine => "combine",
            Self::Scan => "scan",
        })
    }
}

/// Which run of a rank, as errors name it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RunName {
    /// Its kind.
    pub kind: RunKind,
    /// The fingerprint of its plan, which [`Plan::explain`](crate::Plan::explain) begins with.
    pub plan: u64,
    /// The fingerprint that the ranks compare before the run, inside of which transports are called. It is no part of
    /// the name: two runs of one kind and plan may differ in it.
    pub(crate) fingerprint: Option<NonZeroU64>,
}

impl PartialEq for RunName {
    fn eq(&self, other: &Self) -> bool {
        (self.kind, self.plan) == (other.kind, other.plan)
    }
}

impl Eq for RunName {}

impl RunName {
    /// A run of the plan with this fingerprint.
    pub const fn new(kind: RunKind, plan: u64) -> Self {
        Self { kind, plan, fingerprint: None }
    }

    /// The same run, in which the ranks compare `fingerprint`.
    #[cfg(feature = "std")]
    pub(crate) const fn comparing(self, fingerprint: u64) -> Self {
        Self { fingerprint: NonZeroU64::new(fingerprint), ..self }
    }
}

/// The reason why a peer ended a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// It did not answer within the deadline.
    Deadline {
        /// Milliseconds in which none of the call's messages moved.
        ms: u64,
        /// Bytes, sent and received, that the rank whose deadline passed still waited for; 0 in `agree`, which has
        /// none.
        bytes: u64,
    },
    /// It did not make its transport within the time that the others waited, or made it later.
    Absent {
        /// The longest time that a rank waited, in milliseconds.
        ms: u64,
        /// How many other ranks did not make theirs.
        others: usize,
    },
    /// It panicked.
    Panicked,
    /// Its rank was dropped while peers still needed it.
    Left,
    /// `abort` was called on it.
    Aborted,
    /// It sent or expected a message of another size, in bytes.
    Size {
        /// Bytes this rank expected.
        ours: u64,
        /// Bytes the peer offered.
        theirs: u64,
    },
    /// Its own operation failed; its own error says how.
    Failed,
    /// The peer found that ranks differ, or differs itself: it runs another plan, makes another call, or two other
    /// ranks have different sizes for a message.
    Disagreed {
        /// The other of the two ranks that differ.
        with: usize,
    },
    /// The library below the transport (NCCL) reports an error, which can be this rank's own.
    Library {
        /// The library's error code.
        code: i32,
        /// The meaning of the code.
        text: &'static str,
        /// Milliseconds since the exchange began.
        ms: u64,
        /// Bytes of its messages, sent and received.
        bytes: u64,
    },
    /// The caller's own transport reported a failure: which function, and what it returned.
    Returned {
        /// `agree`, `exchange` or `poll`.
        function: &'static str,
        /// Not 0; the meaning is the transport's.
        code: i32,
    },
}

impl Error {
    /// An argument that is wrong, what was found, and what was expected.
    pub fn invalid(argument: impl Into<String>, found: impl fmt::Display, expected: impl fmt::Display) -> Self {
        Self::Invalid {
            argument: argument.into(),
            found: format!("{found}"),
            expected: format!("{expected}"),
            hint: "",
        }
    }

    /// An option that is not supported here, with its limit and the way out.
    pub fn unsupported(option: impl Into<String>, limit: impl fmt::Display, hint: &'static str) -> Self {
        Self::Unsupported { option: option.into(), limit: format!("{limit}"), hint }
    }

    /// Two ranks gave different numbers: what a [`Transport`](crate::transport::Transport) returns from `agree`.
    pub fn disagreement(rank: usize, peer: usize, ours: u64, theirs: u64) -> Self {
        Self::Disagreement { rank, peer, ours, theirs, what: String::new(), runs: None }
    }

    /// A thread that the system did not start.
    #[cfg(feature = "std")]
    pub(crate) fn of_thread(what: &str, error: &std::io::Error) -> Self {
        Self::Device {
            call: "thread spawn",
            code: error.raw_os_error().unwrap_or(-1).into(),
            message: format!(
                "the thread of {what} did not start ({error}): allow this process more threads (ulimit -u, pids.max)"
            ),
        }
    }

    /// The other rank that the error names, if any: the rank at fault, or a rank that runs another plan.
    pub const fn peer(&self) -> Option<usize> {
        match self {
            Self::Disagreement { peer, .. } | Self::Peer { fault: Fault::One { peer, .. }, .. } => Some(*peer),
            Self::Peer { fault: Fault::Found { peer, .. }, .. } => *peer,
            _ => None,
        }
    }

    /// Adds the name of the failed run, if the error has none yet.
    #[must_use]
    pub fn of_run(mut self, name: RunName) -> Self {
        if let Self::Peer { at, .. } | Self::Kernel { at, .. } = &mut self {
            at.run.get_or_insert(name);
        }
        self
    }

    /// Adds the run of this rank in words to a disagreement, if it has none yet.
    #[cfg(feature = "std")]
    #[must_use]
    pub(crate) fn described(mut self, in_words: impl FnOnce() -> String) -> Self {
        if let Self::Disagreement { what, .. } = &mut self
            && what.is_empty()
        {
            *what = in_words();
        }
        self
    }

    /// Adds the way out to an [`Error::Invalid`].
    #[must_use]
    pub fn hint(mut self, way_out: &'static str) -> Self {
        if let Self::Invalid { hint, .. } | Self::Unsupported { hint, .. } = &mut self {
            *hint = way_out;
        }
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid { argument, found, expected, hint } => {
                write!(f, "{argument} is {found}, expected {expected}")?;
                if hint.is_empty() { Ok(()) } else { write!(f, "; {hint}") }
            }
            Self::Unsupported { option, limit, hint } => {
                write!(f, "{option} is not supported: {limit}")?;
                if hint.is_empty() { Ok(()) } else { write!(f, "; {hint}") }
            }
            Self::Disagreement { rank, peer, ours, theirs, what, runs } => {
                let run = if what.is_empty() { "a plan" } else { what };
                write!(f, "rank {rank} runs {run} ({ours:016x}), rank {peer} runs ")?;
                if ours == theirs {
                    f.write_str("the same")?
                } else {
                    write!(f, "something else ({theirs:016x})")?
                }
                if let Some([ours, theirs]) = runs {
                    write!(f, "; it is run {ours} of rank {rank} in the group, and run {theirs} of rank {peer}")?;
                }
                f.write_str(concat!(
                    ": all ranks of a group must make the same calls in the same order, with the same problem, mesh, layout and options, \
                     and one version of cpattn (",
                    env!("CARGO_PKG_VERSION"),
                    " here)"
                ))?;
                if ours == theirs || what.is_empty() {
                    return Ok(());
                }
                write!(f, "; the message of rank {peer} names the same settings of its run: compare both messages")
            }
            Self::Peer { rank, at, fault } => write!(f, "rank {rank}, {at}: {fault}"),
            Self::Schedule { rank, operation, flaw } => {
                write!(f, "schedule of rank {rank}, operation {operation}: {flaw}")
            }
            Self::Device { call, code, message } => write!(f, "{call} failed with {code}: {message}"),
            Self::Kernel { rank, at, kernel, message } => {
                write!(f, "rank {rank}, {at}: kernel {kernel:?} failed: {message}")
            }
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deadline { ms, bytes: 0 } => write!(f, "did not answer within {ms} ms"),
            Self::Deadline { ms, bytes } => {
                write!(f, "did not answer within {ms} ms, with {bytes} bytes still to move")
            }
            Self::Absent { ms, others } => {
                write!(f, "did not come to make its transport within {ms} ms")?;
                match others {
                    0 => {}
                    1 => f.write_str(", nor did another rank")?,
                    _ => write!(f, ", nor did {others} other ranks")?,
                }
                f.write_str(": see what it does before, or give all ranks a longer deadline")
            }
            Self::Panicked => f.write_str("panicked"),
            Self::Left => f.write_str("left"),
            Self::Aborted => f.write_str("aborted the run"),
            Self::Size { ours, theirs } => write!(f, "offered {theirs} bytes where {ours} were expected"),
            Self::Failed => f.write_str("failed; see its own error"),
            Self::Disagreed { with } => write!(f, "runs something else than rank {with}; see their own errors"),
            Self::Library { code, text, ms, bytes } => {
                write!(f, "failed: the engine reports {code}, {text}, after {ms} ms of an exchange of {bytes} bytes")
            }
            Self::Returned { function, code } => {
                write!(f, "failed: the transport's {function} returned {code}")
            }
        }
    }
}

impl core::error::Error for Error {}
