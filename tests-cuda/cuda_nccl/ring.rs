// SPDX-License-Identifier: MIT OR Apache-2.0
//! The check of a ring's links over NCCL.

use cpattn::Fault;
use cpattn::transport::Label;
use std::time::Duration;

use cpattn::{
    Cause, Error, Rank,
    transport::ring_check::{Link, RingFault},
};

use crate::group::{LONG, devices, threads};

#[test]
fn every_link_is_measured_both_ways() {
    let Some(devices) = devices(3) else { return };
    let all = threads(&devices, LONG, |end| Link::check_all_on_device(&end, 70_000).unwrap());
    let all: Vec<_> = all.into_iter().map(Result::unwrap).collect();
    let links: Vec<_> = all[0].iter().map(|link| (link.from, link.to)).collect();
    assert_eq!(links, [(0, 1), (1, 2), (2, 0), (0, 2), (2, 1), (1, 0)]);
    assert!(all[0].iter().all(|l| l.latency > Duration::ZERO && l.bytes_per_second > 1e3), "{:?}", all[0]);
    assert!(all.iter().all(|known| *known == all[0][..known.len()]));
}

/// Rank 1 is in no call: the ledger stops at the first link.
#[test]
fn a_silent_rank_is_at_the_link_of_the_lowest_step() {
    let Some(devices) = devices(3) else { return };
    let deadline = Duration::from_secs(2);
    let all = threads(&devices, deadline, |end| {
        if cpattn::transport::Transport::rank(&end) == 1 {
            std::thread::sleep(4 * deadline);
            return None;
        }
        Some(Link::check_all_on_device(&end, 1000).unwrap_err())
    });
    let mut steps = Vec::new();
    for (rank, trouble) in all.into_iter().map(Result::unwrap).enumerate() {
        let Some(trouble) = trouble else { continue };
        let RingFault::Failed { link: Some(link), error } = &trouble else { panic!("{trouble}") };
        let (Error::Peer { at: Label { step, .. }, fault: Fault::OneOf { cause: Cause::Deadline { .. }, .. }, .. }
        | Error::Peer { at: Label { step, .. }, fault: Fault::One { cause: Cause::Deadline { .. }, .. }, .. }) = error
        else {
            panic!("{trouble}")
        };
        assert!(trouble.to_string().contains("failed: rank"), "{trouble}");
        steps.push((*step, *link, rank));
    }
    assert_eq!(steps.iter().min(), Some(&(0, (0, 1), 0)), "{steps:?}");
}

#[test]
fn ranks_check_their_ring() {
    let Some(devices) = devices(3) else { return };
    let all = threads(&devices, LONG, |end| {
        let mut rank = Rank::on_device(end).unwrap();
        let links = [rank.check_ring(3000).unwrap(), rank.check_ring(1).unwrap()];
        rank.poll().unwrap();
        links.map(|known| known.into_iter().map(|link| (link.from, link.to)).collect::<Vec<_>>())
    });
    for [first, second] in all.into_iter().map(Result::unwrap) {
        assert_eq!(first, [(0, 1), (1, 2), (2, 0), (0, 2), (2, 1), (1, 0)][..first.len()]);
        assert_eq!(first, second);
    }
}
