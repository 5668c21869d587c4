// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which rank waits for which: peers that are gone, ranks whose calls can never match, and the rank at fault for a
//! wait.

use super::{Board, Phase, RankOnBoard};
use crate::transport::{
    Message,
    fault::{Answer, AtFault, GroupFailure, Search},
};

impl Board {
    /// The messages of the exchange of `rank`, if it is in one, that are not claimed; receives first.
    fn open(&self, rank: usize) -> impl Iterator<Item = &Message> {
        let (world, place) = (self.ranks.len(), &self.ranks[rank]);
        let row = rank * world..(rank + 1) * world;
        [(&place.recvs, &self.received[row.clone()]), (&place.sends, &self.sent[row])].into_iter().flat_map(
            |(list, claimed)| {
                let all = list.list().iter().enumerate();
                all.filter(|&(at, message)| at >= claimed[message.peer]).map(|(_, message)| message)
            },
        )
    }

    /// The peers that `rank` waits for, in an exchange those of receives first. A peer may be named several times.
    fn waits_for(&self, rank: usize) -> impl Iterator<Item = usize> {
        let place = &self.ranks[rank];
        let group = if place.phase == Phase::Agree { place.group.clone() } else { 0..0 };
        let is_here = |other: &RankOnBoard| other.phase == Phase::Agree && other.group == place.group;
        let missing = group.filter(move |&peer| !is_here(&self.ranks[peer]));
        self.open(rank).map(|message| message.peer).chain(missing)
    }

    /// Bytes of the messages that `rank` waits for: those of its exchange that no rank has begun to copy.
    pub(in crate::transport::local) fn waiting(&self, rank: usize) -> u64 {
        self.open(rank).map(|message| message.bytes as u64).sum()
    }

    /// A peer that `rank` waits for and that was dropped.
    pub(in crate::transport::local) fn gone(&self, rank: usize) -> Option<usize> {
        self.waits_for(rank).find(|&peer| self.ranks[peer].phase == Phase::Gone)
    }

    /// For a rank in an agreement: a rank of its group that waits for it in the agreement of another group, and that
    /// rank's number. Neither agreement can end.
    pub(in crate::transport::local) fn other_group(&self, rank: usize) -> Option<(usize, u64)> {
        let group = &self.ranks[rank].group;
        let differs = |peer: &usize| {
            let place = &self.ranks[*peer];
            place.phase == Phase::Agree && place.group != *group && place.group.contains(&rank)
        };
        group.clone().find(differs).map(|peer| (peer, self.ranks[peer].number.unwrap_or_default()))
    }

    /// The failure if `rank` and a peer wait for each other, one in an agreement and the other in an exchange: neither
    /// call can end.
    pub(in crate::transport::local) fn crossed(&self, rank: usize) -> Option<GroupFailure> {
        let agrees_with = |a: usize, b: usize| self.ranks[a].phase == Phase::Agree && self.ranks[a].group.contains(&b);
        let exchanges = |a: usize| self.ranks[a].phase == Phase::Exchange;
        let crossed = |agreeing: usize, exchanging: usize| {
            let [agreed, runs] = [agreeing, exchanging].map(|rank| self.ranks[rank].number);
            GroupFailure::crossed(agreeing, exchanging).of_runs(agreed, runs)
        };
        self.waits_for(rank).find_map(|peer| {
            if exchanges(rank) {
                agrees_with(peer, rank).then(|| crossed(peer, rank))
            } else {
                (exchanges(peer) && self.waits_for(peer).any(|other| other == rank)).then(|| crossed(rank, peer))
            }
        })
    }

    /// The rank at fault for the wait of `rank`. If all ranks wait for each other, there is none while a copy is in
    /// progress that `rank` waits for, directly or indirectly: a copy ends by itself.
    pub(in crate::transport::local) fn at_fault(&self, rank: usize) -> Option<AtFault<bool>> {
        let deadline = self.ranks[rank].deadline;
        let (mut search, mut copying) = (Search::new(rank, deadline), self.ranks[rank].readers > 0);
        let found = loop {
            let asked = search.current_rank();
            let place = &self.ranks[asked];
            copying |= asked != rank && place.copying;
            // The board does not record how long a rank has waited: none counts as late.
            let answer = match place.phase {
                Phase::Idle | Phase::Answered | Phase::Gone => Answer::Idle(deadline),
                Phase::Exchange | Phase::Agree | Phase::Ending => {
                    let on = self.waits_for(asked).collect();
                    Answer::Waits { on, call: place.phase == Phase::Agree, time: deadline }
                }
            };
            if let Some(found) = search.record_answer(answer) {
                break found;
            }
        };
        match found {
            AtFault::Circle(peer) if copying || peer == rank => None,
            found => Some(found),
        }
    }
}
