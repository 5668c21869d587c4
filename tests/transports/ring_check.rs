// SPDX-License-Identifier: MIT OR Apache-2.0
//! The ring check finds what was put there to be found: a rank that is silent, fails or leaves, bytes that change on
//! the way, a slow link; and it measures every link both ways when nothing is wrong.

use crate::through::{Fault, Hook, Through};
use cpattn::transport::{
    Label, Message, Transport,
    local::{self, Local},
    ring_check::{Link, RingFault},
};
use cpattn::{Cause, Error, Rank, Result};
use std::thread;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(20);

fn run<T: Transport + 'static>(
    world: usize,
    deadline: Duration,
    wrap: impl Fn(Local) -> T,
) -> Vec<Result<Vec<Link>, RingFault>> {
    let ends: Vec<T> = local::group(world, deadline).unwrap().into_iter().map(wrap).collect();
    thread::scope(|scope| {
        let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(move || Link::check_all(&end, 100_000))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_link_is_measured_both_ways() {
    for world in [2, 3, 5] {
        let all: Vec<_> = run(world, LONG, |end| end).into_iter().map(Result::unwrap).collect();
        let there = (0..world).map(|r| (r, (r + 1) % world));
        let back = (0..world).map(|r| ((world - r) % world, (2 * world - r - 1) % world));
        let want: Vec<_> = there.chain(back).collect();
        let links: Vec<_> = all[0].iter().map(|link| (link.from, link.to)).collect();
        assert_eq!(links, want);
        assert!(all[0].iter().all(|l| l.latency > Duration::ZERO && l.bytes_per_second > 1e6), "{:?}", all[0]);
        // What a rank knows is what rank 0 knows.
        assert!(all.iter().all(|known| *known == all[0][..known.len()]));
    }
}

#[test]
fn a_silent_rank_is_the_end_of_a_link_that_failed() {
    // Rank 2 is asked first at link 1 → 2.
    let wrap = |end: Local| {
        let fault = if end.rank() == 2 { Fault::Silence } else { Fault::None };
        Through::faulty(end, 0, fault)
    };
    let all = run(4, Duration::from_millis(400), wrap);
    let Err(RingFault::Failed {
        link: Some((1, 2)),
        error: Error::Peer { fault: cpattn::Fault::One { peer: 2, cause }, .. },
    }) = &all[1]
    else {
        panic!("{:?}", all[1])
    };
    assert!(matches!(cause, Cause::Deadline { bytes: 8, .. }), "{cause}");
    let text = all[1].as_ref().unwrap_err().to_string();
    assert!(text.starts_with("link 1 → 2 failed: rank 1, ring check, step 1: rank 2 did not answer"), "{text}");
    assert!(text.contains("try: see whether the process of that rank runs"), "{text}");
    // Rank 0 waits at its last link, 1 → 0 or 3 → 0, for one who waits.
    let Err(RingFault::Failed { link: None, error: Error::Peer { fault: cpattn::Fault::One { peer: 2, .. }, .. } }) =
        &all[0]
    else {
        panic!("{:?}", all[0])
    };
}

#[test]
fn a_rank_that_fails_or_leaves_is_named() {
    for (fault, cause) in [(Fault::Fail, Cause::Failed), (Fault::Leave, Cause::Left)] {
        // Well inside link 2 → 0.
        let all = run(3, LONG, |end| {
            let fault = if end.rank() == 0 { fault } else { Fault::None };
            Through::faulty(end, 50, fault)
        });
        for result in all {
            let Err(RingFault::Failed {
                error: Error::Peer { fault: cpattn::Fault::One { peer, cause: found }, .. },
                ..
            }) = result
            else {
                panic!("{result:?}")
            };
            assert_eq!((peer, found), (0, cause));
        }
    }
}

/// Changes one byte of the large messages that reach rank 2.
struct Lossy;

impl Hook<Local> for Lossy {
    unsafe fn exchange(&self, end: &Local, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        // SAFETY: the caller's promise about the lists is handed on.
        unsafe { end.exchange(label, sends, recvs) }?;
        for recv in recvs.iter().filter(|recv| end.rank() == 2 && recv.bytes == 100_000) {
            // SAFETY: within the message, which is still the caller's.
            unsafe { *recv.ptr.add(77_777) ^= 4 };
        }
        Ok(())
    }
}

#[test]
fn bytes_that_change_on_the_way_are_noticed() {
    let all = run(3, LONG, |end| Through::new(end, Lossy));
    assert_eq!(all[2], Err(RingFault::OtherBytes { link: (1, 2), at: 77_777 }));
    let text = all[2].as_ref().unwrap_err().to_string();
    assert!(text.starts_with("link 1 → 2 delivered other bytes than were sent, from byte 77777 on; try:"), "{text}");
    assert!(all[0].is_err() && all[1].is_err(), "every rank hears of it");
}

#[test]
fn numbers_of_bytes_that_differ_are_named_on_both_sides() {
    for odd in 0..3 {
        let ends = local::group(3, LONG).unwrap();
        let all: Vec<_> = thread::scope(|scope| {
            let one = |end: Local| move || Link::check_all(&end, if end.rank() == odd { 7 } else { 100_000 });
            let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(one(end))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap().unwrap_err()).collect()
        });
        // Link 0 → 1 finds it, or link 1 → 2 where the first two ranks have the same.
        let (from, to) = if odd == 2 { (1, 2) } else { (0, 1) };
        let bytes = |rank| if rank == odd { 7 } else { 100_000 };
        for (here, there) in [(from, to), (to, from)] {
            let found = format!("bytes is {} on rank {here} and {} on rank {there}", bytes(here), bytes(there));
            let expected = format!("the same number on every rank (or rank {there} is in another call)");
            let want = format!("the ring was not checked: {found}, expected {expected}; try: give what");
            assert!(all[here].to_string().starts_with(&want), "{}", all[here]);
        }
        // It hears that the sender failed, or finds that a neighbour has left.
        let here = 3 - from - to;
        let RingFault::Failed { link, error: Error::Peer { fault: cpattn::Fault::One { peer, cause }, .. } } =
            &all[here]
        else {
            panic!("{}", all[here])
        };
        let neighbours = [(here, (here + 1) % 3), ((here + 2) % 3, here)];
        match cause {
            Cause::Failed => assert_eq!((link.is_none(), *peer), (true, from), "{}", all[here]),
            Cause::Left => assert!(link.is_some_and(|l| neighbours.contains(&l)) && *peer != here, "{}", all[here]),
            _ => panic!("{}", all[here]),
        }
    }
}

#[test]
fn ranks_check_their_ring() {
    let ranks: Vec<_> = local::group(3, LONG).unwrap().into_iter().map(Rank::new).collect();
    let all: Vec<_> = thread::scope(|scope| {
        let twice = |mut rank: Rank| move || (rank.check_ring(1), rank.check_ring(100_000), rank.poll());
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(twice(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (first, second, state) in all {
        let links = |known: Result<Vec<Link>, RingFault>| known.unwrap().into_iter().map(|l| (l.from, l.to)).collect();
        let (first, second): (Vec<_>, Vec<_>) = (links(first), links(second));
        assert_eq!(first, [(0, 1), (1, 2), (2, 0), (0, 2), (2, 1), (1, 0)][..first.len()]);
        assert_eq!(first, second);
        assert_eq!(state, Ok(()));
    }
}

/// A transport may go on after a failure; the rank does not.
#[test]
fn a_rank_whose_ring_has_failed_stays_failed() {
    let ends: Vec<_> =
        local::group(2, LONG).unwrap().into_iter().map(|end| Through::faulty(end, 0, Fault::Fail)).collect();
    thread::scope(|scope| {
        for end in ends {
            scope.spawn(move || {
                let mut rank = Rank::new(end);
                // Refusals of this rank alone touch nothing.
                assert!(rank.check_ring(0).unwrap_err().to_string().contains("bytes is 0"));
                let trouble = rank.check_ring(8).unwrap_err();
                let RingFault::Failed { error, .. } = &trouble else { panic!("{trouble}") };
                let Error::Peer { fault: cpattn::Fault::One { peer, .. }, .. } = error else { panic!("{trouble}") };
                let again = rank.check_ring(8).unwrap_err();
                assert!(
                    matches!(&again, RingFault::Failed { link: None, error: Error::Peer { fault: cpattn::Fault::One { peer: p, .. }, .. } } if p == peer)
                );
                assert!(rank.poll().is_err());
            });
        }
    });
}

#[test]
fn a_ring_of_one_and_empty_messages_are_refused() {
    let end = local::group(1, LONG).unwrap().remove(0);
    let text = Link::check_all(&end, 1).unwrap_err().to_string();
    assert!(text.starts_with("the ring was not checked: world is 1, expected at least 2 ranks"), "{text}");
    let end = local::group(2, LONG).unwrap().remove(0);
    assert!(Link::check_all(&end, 0).unwrap_err().to_string().contains("bytes is 0"));
    let text = Link::check_all(&end, 1 << 60).unwrap_err().to_string();
    assert!(text.contains("bytes is 1152921504606846976, expected a number that fits into memory"), "{text}");
}
