// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ring check over devices: it measures each link both ways, names the link at which a rank is silent, and is there
//! in C. And what else ranks on devices do between runs: they shift rows of the host, and gather a trace.
//!
//! Runs on whatever driver is found, see `cuda_plans`.

#[path = "../tests/common/between_runs.rs"]
mod between_runs;
#[path = "../tests/common/driver.rs"]
mod driver;

use cpattn::Fault;
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cpattn::{
    Cause, Error, Rank,
    kernel::cuda::Cuda,
    transport::{
        DeviceTransport, Transport,
        peer::{self, Peer},
        ring_check::{Link, RingFault},
    },
};

/// Ranks on the devices that there are, in turn.
fn group(world: usize, deadline: Duration) -> Option<Vec<Peer>> {
    let first = driver::device()?;
    let second = Cuda::new(1).map_or_else(|_| Arc::clone(&first), Arc::new);
    let devices: Vec<_> = (0..world).map(|r| Arc::clone([&first, &second][r % 2])).collect();
    Some(peer::group(&devices, deadline).unwrap())
}

#[test]
fn every_link_of_devices_is_measured_both_ways() {
    for world in [2, 3] {
        let Some(ends) = group(world, Duration::from_secs(60)) else { return };
        let all: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> =
                ends.iter().map(|end| scope.spawn(|| Link::check_all_on_device(end, 100_000))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
        });
        let there = (0..world).map(|r| (r, (r + 1) % world));
        let back = (0..world).map(|r| ((world - r) % world, (2 * world - r - 1) % world));
        let links: Vec<_> = all[0].iter().map(|link| (link.from, link.to)).collect();
        assert_eq!(links, there.chain(back).collect::<Vec<_>>());
        assert!(all[0].iter().all(|l| l.latency > Duration::ZERO && l.bytes_per_second > 1e3), "{:?}", all[0]);
        assert!(all.iter().all(|known| *known == all[0][..known.len()]));
    }
}

#[test]
fn a_silent_rank_on_a_device_is_the_end_of_a_link_that_failed() {
    let Some(mut ends) = group(3, Duration::from_millis(500)) else { return };
    let silent = ends.pop().unwrap();
    let all: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = ends.iter().map(|end| scope.spawn(|| Link::check_all_on_device(end, 1000))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap().unwrap_err()).collect()
    });
    let RingFault::Failed {
        link: Some((1, 2)),
        error: Error::Peer { fault: Fault::One { peer: 2, cause: Cause::Deadline { .. } }, .. },
    } = &all[1]
    else {
        panic!("{:?}", all[1])
    };
    assert!(
        all[1].to_string().contains("link 1 → 2 failed: rank 1, ring check, step 1: rank 2 did not answer"),
        "{}",
        all[1]
    );
    let RingFault::Failed { error: Error::Peer { fault: Fault::One { peer: 2, .. }, .. }, .. } = &all[0] else {
        panic!("{:?}", all[0])
    };
    assert!(silent.poll().is_err());
}

#[test]
fn a_ring_of_devices_refuses_what_it_cannot_check() {
    let Some(ends) = group(2, Duration::from_secs(5)) else { return };
    let text = Link::check_all_on_device(&ends[0], 0).unwrap_err().to_string();
    assert!(text.contains("bytes is 0, expected at least 1"), "{text}");
    // Refused alone: nothing has moved, and the group lives.
    assert!(ends[0].poll().is_ok() && ends[0].synchronize().is_ok());
    let Some(alone) = group(1, Duration::from_secs(5)) else { return };
    let text = Link::check_all_on_device(&alone[0], 8).unwrap_err().to_string();
    assert!(text.contains("world is 1, expected at least 2 ranks"), "{text}");
}

#[test]
fn ranks_on_devices_check_their_ring() {
    let Some(ends) = group(3, Duration::from_secs(60)) else { return };
    let check = |end: Peer| {
        let mut rank = Rank::on_device(end).unwrap();
        let links = rank.check_ring(1000).unwrap();
        rank.poll().unwrap();
        // Again, and the group goes on.
        assert_eq!(rank.check_ring(77).unwrap().len(), links.len());
        links.into_iter().map(|link| (link.from, link.to)).collect::<Vec<_>>()
    };
    let all: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(move || check(end))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(all[0], [(0, 1), (1, 2), (2, 0), (0, 2), (2, 1), (1, 0)]);
    assert!(all.iter().all(|known| *known == all[0][..known.len()]));
    // Rank 2 is there and takes no part.
    let Some(ends) = group(3, Duration::from_millis(500)) else { return };
    let mut ranks: Vec<_> = ends.into_iter().map(|end| Rank::on_device(end).unwrap()).collect();
    thread::scope(|scope| {
        for rank in &mut ranks[..2] {
            scope.spawn(move || {
                let trouble = rank.check_ring(1000).unwrap_err().to_string();
                assert!(trouble.contains("rank 2 did not answer"), "{trouble}");
                assert_eq!(trouble.starts_with("link 1 → 2 failed"), rank.rank() == 1, "{trouble}");
                assert!(rank.poll().is_err(), "the group has failed");
            });
        }
    });
}

#[test]
fn rows_are_shifted_and_traces_gathered() {
    let Some(ends) = group(3, Duration::from_secs(60)) else { return };
    let began = Instant::now();
    let one = |end| between_runs::one_rank(Rank::on_device(end).unwrap(), 3, began);
    thread::scope(|scope| ends.into_iter().for_each(|end| drop(scope.spawn(move || one(end)))));
}
