// SPDX-License-Identifier: MIT OR Apache-2.0
//! The first failure of a group, and how each rank reports it.
//!
//! The same failure reads differently on different ranks. Of two ranks that contradict each other, each names the
//! other, with its own value first; a third rank names both.

use std::mem::swap;

use super::{super::Label, AtFault};
use crate::error::{Cause, Error};

/// The operation of agreements, in errors.
pub(in crate::transport) const AGREEMENT: &str = "agree";

/// The first failure of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::transport) struct GroupFailure {
    pub(in crate::transport) peer: usize,
    pub(in crate::transport) cause: Cause,
    /// The rank that `peer` itself names; `peer` again if no other rank is involved.
    pub(in crate::transport) other: usize,
    /// What `peer` and `other` run, by the fingerprints that ranks compare, if that is known.
    pub(in crate::transport) runs: Option<[u64; 2]>,
}

impl GroupFailure {
    /// One rank alone is the cause.
    pub(in crate::transport) fn of(peer: usize, cause: Cause) -> Self {
        Self { peer, cause, other: peer, runs: None }
    }

    /// `rank` expects a message of `ours` bytes, and `peer` offers `theirs`.
    pub(in crate::transport) fn of_size(rank: usize, peer: usize, [ours, theirs]: [u64; 2]) -> Self {
        Self { peer, cause: Cause::Size { ours, theirs }, other: rank, runs: None }
    }

    /// Two ranks wait for each other, one in an agreement and one in an exchange.
    pub(in crate::transport) fn crossed(agreeing: usize, exchanging: usize) -> Self {
        Self { peer: agreeing, cause: Cause::Disagreed { with: exchanging }, other: exchanging, runs: None }
    }

    /// The same where it is known what they run: the number that the one compares, and that of the other's run.
    pub(in crate::transport) fn of_runs(self, agreeing: Option<u64>, exchanging: Option<u64>) -> Self {
        Self { runs: agreeing.zip(exchanging).map(|(agreeing, exchanging)| [agreeing, exchanging]), ..self }
    }

    /// The deadline of `rank` has passed, and the search has ended. Calls are told apart by whether they are
    /// agreements.
    pub(in crate::transport) fn of_deadline(rank: usize, at_fault: AtFault<bool>, ms: u64, bytes: u64) -> Self {
        let cause = Cause::Deadline { ms, bytes };
        match at_fault {
            AtFault::Silent(peer) | AtFault::Idle(peer) | AtFault::Late(peer, _) => Self::of(peer, cause),
            AtFault::Circle(peer) => Self { peer, cause, other: rank, runs: None },
            AtFault::Differ([(agreeing, true), (exchanging, _)] | [(exchanging, _), (agreeing, _)]) => {
                Self::crossed(agreeing, exchanging)
            }
        }
    }

    /// The failure as `rank` reports it, which is or was last in the call `label`; `number` is what the ranks compare
    /// in it. Of two ranks that run different things each names the other; a third rank names the one that runs
    /// something else than itself.
    pub(in crate::transport) fn error(self, rank: usize, label: Label, number: Option<u64>) -> Error {
        let Self { mut peer, mut cause, mut other, runs } = self;
        if let (Some([first, second]), Some(number)) = (runs, number) {
            let names_other = rank == peer || (rank != other && number == first);
            let (named, theirs) = if names_other { (other, second) } else { (peer, first) };
            let ours = if rank == peer {
                first
            } else if rank == other {
                second
            } else {
                number
            };
            return Error::disagreement(rank, named, ours, theirs);
        }
        // Of ranks that agree and ranks that exchange, each names one of the other kind.
        let crossed = matches!(cause, Cause::Disagreed { .. }) && label.operation == AGREEMENT && rank != other;
        if rank == peer || crossed {
            match &mut cause {
                Cause::Size { ours, theirs } => swap(ours, theirs),
                Cause::Disagreed { with } if other != peer => *with = peer,
                _ => {}
            }
            swap(&mut peer, &mut other);
        } else if matches!(cause, Cause::Size { .. }) && ![peer, rank].contains(&other) {
            // Neither of the sizes is this rank's.
            cause = Cause::Disagreed { with: other };
        }
        label.error(rank, peer, cause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Fault;

    #[test]
    fn each_rank_reports_a_failure_from_its_own_side() {
        let named = |failure: GroupFailure, rank, operation| match failure.error(rank, Label::new(operation, 0), None) {
            Error::Peer { fault: Fault::One { peer, cause }, .. } => (peer, cause),
            error => panic!("{error}"),
        };
        let size = GroupFailure::of_size(0, 1, [4, 8]);
        assert_eq!(named(size, 0, "ring"), (1, Cause::Size { ours: 4, theirs: 8 }));
        assert_eq!(named(size, 1, "ring"), (0, Cause::Size { ours: 8, theirs: 4 }));
        assert_eq!(named(size, 2, "ring"), (1, Cause::Disagreed { with: 0 }));
        let crossed = GroupFailure::of_deadline(5, AtFault::Differ([(0, false), (1, true)]), 9, 9);
        assert_eq!(crossed, GroupFailure::of_deadline(5, AtFault::Differ([(1, true), (0, false)]), 9, 9));
        assert_eq!(named(crossed, 0, "ring"), (1, Cause::Disagreed { with: 0 }));
        assert_eq!(named(crossed, 1, AGREEMENT), (0, Cause::Disagreed { with: 1 }));
        assert_eq!(named(crossed, 2, "ring"), (1, Cause::Disagreed { with: 0 }));
        assert_eq!(named(crossed, 2, AGREEMENT), (0, Cause::Disagreed { with: 1 }));
        // Where it is known what they run, each names a rank that runs something else, or the first of the two.
        let known = GroupFailure::crossed(1, 0).of_runs(Some(71), Some(70));
        let differs = |rank, number| match known.error(rank, Label::new("ring", 0), Some(number)) {
            Error::Disagreement { rank: r, peer, ours, theirs, .. } if r == rank => (peer, ours, theirs),
            error => panic!("{error}"),
        };
        assert_eq!([differs(0, 70), differs(1, 71)], [(1, 70, 71), (0, 71, 70)]);
        assert_eq!([differs(2, 70), differs(2, 71), differs(2, 72)], [(1, 70, 71), (0, 71, 70), (1, 72, 71)]);
        assert!(matches!(known.error(2, Label::new("ring", 0), None), Error::Peer { .. }));
        // A rank that waits as all do does not name itself; one that is alone at fault does.
        let deadline = Cause::Deadline { ms: 9, bytes: 8 };
        let circle = GroupFailure::of_deadline(0, AtFault::Circle(1), 9, 8);
        assert_eq!([0, 1, 2].map(|rank| named(circle, rank, "ring").0), [1, 0, 1]);
        let silent = GroupFailure::of_deadline(0, AtFault::Silent(1), 9, 8);
        assert_eq!([0, 1, 2].map(|rank| named(silent, rank, "ring")), [(1, deadline); 3]);
    }
}
