// SPDX-License-Identifier: MIT OR Apache-2.0
//! The search for the rank at fault, along the ranks that wait for each other.
//!
//! The search begins at the rank that asks, and goes to the ranks that it waits for, then to those that these wait for,
//! the nearest first. The transport asks the rank that [`Search::asked`] names, in whatever way it can, and hands the
//! answer to [`Search::hear`], until that has found the rank at fault.

use std::{time::Duration, vec::Vec};

/// The answer of a rank. `C` is the call that it is in: ranks that wait for each other in equal calls run the same.
pub(in crate::transport) enum Answer<C> {
    /// It does not answer in time.
    Silent,
    /// It is in no call, for this long.
    Idle(Duration),
    /// It waits for other ranks, and none of its messages has moved for `time`.
    Waits { on: Vec<usize>, call: C, time: Duration },
}

/// The rank at fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::transport) enum AtFault<C> {
    /// It does not answer: it was killed, is stopped, or is cut off.
    Silent(usize),
    /// It is in no call.
    Idle(usize),
    /// It has waited only for this long: it was in no call, or stopped, until then.
    Late(usize, Duration),
    /// Two ranks that wait for each other in different calls: they run different things.
    Differ([(usize, C); 2]),
    /// Ranks wait for each other, all in the same call and for about as long. It is not known which is at fault; this
    /// is the first rank that the asking one waits for.
    Circle(usize),
}

/// A search that one rank has begun.
pub(in crate::transport) struct Search<C> {
    deadline: Duration,
    /// Ranks in the order of the search; those before `next` have answered that they wait.
    found: Vec<usize>,
    next: usize,
    waits: Vec<(usize, C, Duration)>,
}

impl<C: Clone + PartialEq> Search<C> {
    /// The asking rank is asked first.
    pub(in crate::transport) fn new(asking: usize, deadline: Duration) -> Self {
        Self { deadline, found: std::vec![asking], next: 0, waits: Vec::new() }
    }

    /// The rank whose answer is needed next.
    pub(in crate::transport) fn current_rank(&self) -> usize {
        self.found[self.next]
    }

    /// Takes the answer of [`current_rank`](Self::current_rank). If it does not decide, another rank is asked next.
    pub(in crate::transport) fn record_answer(&mut self, answer: Answer<C>) -> Option<AtFault<C>> {
        let rank = self.current_rank();
        match answer {
            Answer::Silent => Some(AtFault::Silent(rank)),
            // It may have come back from the very call in which others wait for it.
            Answer::Idle(time) if time < self.deadline / 2 => Some(self.late(2).unwrap_or(AtFault::Idle(rank))),
            Answer::Idle(_) => Some(AtFault::Idle(rank)),
            Answer::Waits { on, call, time } => {
                self.waits.push((rank, call, time));
                for peer in on {
                    if !self.found.contains(&peer) {
                        self.found.push(peer);
                    }
                }
                self.next += 1;
                (self.next == self.found.len()).then(|| self.circle())
            }
        }
    }

    /// The rank that has waited least, if that is less than this part of the deadline.
    fn late(&self, part: u32) -> Option<AtFault<C>> {
        let &(rank, _, time) = self.waits.iter().min_by_key(|(_, _, time)| *time)?;
        (time < self.deadline / part).then_some(AtFault::Late(rank, time))
    }

    /// All ranks that were found wait for each other.
    fn circle(&self) -> AtFault<C> {
        let (first, call, _) = &self.waits[0];
        match self.waits.iter().find(|(_, other, _)| other != call) {
            // Ranks that run different things have all waited for about as long.
            Some((other, theirs, _)) => {
                let differ = || AtFault::Differ([(*first, call.clone()), (*other, theirs.clone())]);
                self.late(4).unwrap_or_else(differ)
            }
            None => {
                self.late(2).unwrap_or_else(|| AtFault::Circle(self.found.get(1).copied().unwrap_or(self.found[0])))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(4);

    /// Searches from rank 0; `answers[r]` is rank r's: none for no answer, else the ranks it waits for (none: it is in
    /// no call), its call, and the seconds.
    fn found(answers: &[Option<(&[usize], char, f64)>]) -> AtFault<char> {
        let mut search = Search::new(0, DEADLINE);
        loop {
            let answer = match answers[search.current_rank()] {
                None => Answer::Silent,
                Some(([], _, time)) => Answer::Idle(Duration::from_secs_f64(time)),
                Some((on, call, time)) => Answer::Waits { on: on.to_vec(), call, time: Duration::from_secs_f64(time) },
            };
            if let Some(at_fault) = search.record_answer(answer) {
                return at_fault;
            }
        }
    }

    #[test]
    fn the_nearest_rank_that_does_not_wait_is_at_fault() {
        fn waits(on: &[usize]) -> Option<(&[usize], char, f64)> {
            Some((on, 'x', 4.0))
        }
        assert_eq!(found(&[waits(&[1]), waits(&[2]), None]), AtFault::Silent(2));
        assert_eq!(found(&[waits(&[1]), waits(&[0, 2]), Some((&[], ' ', 9.0))]), AtFault::Idle(2));
        // Rank 3 is one step nearer than rank 4, and rank 1 comes before rank 2.
        let far = [waits(&[1, 2]), waits(&[0, 4]), waits(&[3]), None, None];
        assert_eq!(found(&far), AtFault::Silent(4));
        let near = [waits(&[1, 2]), waits(&[0]), waits(&[3]), None, None];
        assert_eq!(found(&near), AtFault::Silent(3));
    }

    #[test]
    fn a_rank_that_has_just_begun_to_wait_is_late() {
        let two = |call, time| [Some((&[1][..], 'x', 4.0)), Some((&[0][..], call, time))];
        let late = |time| AtFault::Late(1, Duration::from_secs_f64(time));
        assert_eq!(found(&two('x', 1.9)), late(1.9));
        assert_eq!(found(&two('x', 2.0)), AtFault::Circle(1));
        assert_eq!(found(&two('y', 0.9)), late(0.9));
        assert_eq!(found(&two('y', 1.0)), AtFault::Differ([(0, 'x'), (1, 'y')]));
        // A rank that was stopped asks as soon as it goes on.
        assert_eq!(
            found(&[Some((&[1], 'x', 0.5)), Some((&[], ' ', 1.0))]),
            AtFault::Late(0, Duration::from_millis(500))
        );
        assert_eq!(found(&[Some((&[1], 'x', 0.5)), Some((&[], ' ', 2.0))]), AtFault::Idle(1));
    }
}
