// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which rank waits for which: peers that are gone, ranks whose calls can never match, and the rank at fault for a
//! wait.

use super::{Board, Phase};
use crate::transport::{
    Message,
    fault::{Answer, AtFault, GroupFailure, Search},
};

impl Board {
    /// Calls `see` with every peer that `rank` waits for, receives first, until it returns true.
    fn waits_for(&self, rank: usize, mut see: impl FnMut(usize) -> bool) {
        let world = self.ranks.len();
        let place = &self.ranks[rank];
        match place.phase {
            Phase::Exchange => {
                let open = |list: &[Message], claimed: &[usize], see: &mut dyn FnMut(usize) -> bool| {
                    list.iter().enumerate().any(|(at, message)| at >= claimed[message.peer] && see(message.peer))
                };
                let row = rank * world..(rank + 1) * world;
                let _ = open(place.recvs.list(), &self.received[row.clone()], &mut see)
                    || open(place.sends.list(), &self.sent[row], &mut see);
            }
            Phase::Agree => {
                let here = |peer: &usize| {
                    let other = &self.ranks[*peer];
                    other.phase == Phase::Agree && other.group == place.group
                };
                let _ = place.group.clone().filter(|peer| !here(peer)).any(see);
            }
            Phase::Idle | Phase::Answered | Phase::Ending | Phase::Gone => {}
        }
    }

    /// Bytes of the messages that `rank` waits for: those of its exchange that no rank has begun to copy.
    pub(in crate::transport::local) fn waiting(&self, rank: usize) -> u64 {
        let (world, place) = (self.ranks.len(), &self.ranks[rank]);
        let row = rank * world..(rank + 1) * world;
        let open = |list: &[Message], claimed: &[usize]| -> u64 {
            let waiting = list.iter().enumerate().filter(|&(at, message)| at >= claimed[message.peer]);
            waiting.map(|(_, message)| message.bytes as u64).sum()
        };
        match place.phase {
            Phase::Exchange => {
                open(place.recvs.list(), &self.received[row.clone()]) + open(place.sends.list(), &self.sent[row])
            }
            _ => 0,
        }
    }

    /// A peer that `rank` waits for and that was dropped.
    pub(in crate::transport::local) fn gone(&self, rank: usize) -> Option<usize> {
        let mut gone = None;
        self.waits_for(rank, |peer| {
            gone = (self.ranks[peer].phase == Phase::Gone).then_some(peer);
            gone.is_some()
        });
        gone
    }

    /// The failure if `rank` and a peer wait for each other, one in an agreement and the other in an exchange: neither
    /// call can end.
    pub(in crate::transport::local) fn crossed(&self, rank: usize) -> Option<GroupFailure> {
        let agrees_with = |a: usize, b: usize| self.ranks[a].phase == Phase::Agree && self.ranks[a].group.contains(&b);
        let exchanges = |a: usize| self.ranks[a].phase == Phase::Exchange;
        let mut found = None;
        self.waits_for(rank, |peer| {
            let crossed = (exchanges(rank) && agrees_with(peer, rank))
                || (agrees_with(rank, peer) && exchanges(peer) && {
                    let mut mutual = false;
                    self.waits_for(peer, |other| {
                        mutual |= other == rank;
                        mutual
                    });
                    mutual
                });
            let (agreeing, exchanging) = if exchanges(rank) { (peer, rank) } else { (rank, peer) };
            found = crossed.then(|| GroupFailure::crossed(agreeing, exchanging));
            crossed
        });
        found
    }

    /// The rank at fault for the wait of `rank`. If all ranks wait for each other, there is none while a copy is in
    /// progress that `rank` waits for, directly or indirectly: a copy ends by itself.
    pub(in crate::transport::local) fn at_fault(&self, rank: usize) -> Option<AtFault<bool>> {
        let deadline = self.ranks[rank].deadline;
        let (mut search, mut copying) = (Search::new(rank, deadline), self.ranks[rank].readers > 0);
        let found = loop {
            let asked = search.asked();
            let place = &self.ranks[asked];
            copying |= asked != rank && place.copying;
            // The board does not record how long a rank has waited: none counts as late.
            let answer = match place.phase {
                Phase::Idle | Phase::Answered | Phase::Gone => Answer::Idle(deadline),
                Phase::Exchange | Phase::Agree | Phase::Ending => {
                    let mut on = Vec::new();
                    self.waits_for(asked, |peer| {
                        on.push(peer);
                        false
                    });
                    Answer::Waits { on, call: place.phase == Phase::Agree, time: deadline }
                }
            };
            if let Some(found) = search.hear(answer) {
                break found;
            }
        };
        match found {
            AtFault::Circle(peer) if copying || peer == rank => None,
            found => Some(found),
        }
    }
}
