// SPDX-License-Identifier: MIT OR Apache-2.0
//! The contract of `docs/transport_contract.md`, as tests that an author of a transport can take over: only `connected`
//! knows the transport. Ranks are threads here.

use super::sockets::Sockets;
use cpattn::Fault;
use cpattn::{
    Cause, Error, Result,
    transport::{Label, Message, Transport},
};
use std::{
    fs,
    sync::{
        Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// Runs `rank` on a thread for each of `world` connected ranks, and returns their results in rank order.
fn connected<T: Send>(world: usize, deadline_ms: u64, rank: impl Fn(Sockets) -> T + Sync) -> Vec<T> {
    static GROUPS: AtomicUsize = AtomicUsize::new(0);
    let group = GROUPS.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("own_transport_test_{}_{group}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let deadline = Duration::from_millis(deadline_ms);
    let start = |r| rank(Sockets::connect(&folder, r, world, deadline).unwrap());
    let results = thread::scope(|scope| {
        let threads: Vec<_> = (0..world).map(|r| scope.spawn(move || start(r))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    fs::remove_dir_all(&folder).unwrap();
    results
}

/// One exchange: what goes to each peer, and what comes from each.
fn exchange(end: &dyn Transport, sends: &[(usize, &[u8])], recvs: &mut [(usize, &mut [u8])]) -> Result<()> {
    let send = |&(peer, bytes): &(usize, &[u8])| Message { peer, ptr: bytes.as_ptr().cast_mut(), bytes: bytes.len() };
    let recv =
        |(peer, bytes): &mut (usize, &mut [u8])| Message { peer: *peer, ptr: bytes.as_mut_ptr(), bytes: bytes.len() };
    let sends: Vec<_> = sends.iter().map(send).collect();
    let recvs: Vec<_> = recvs.iter_mut().map(recv).collect();
    // SAFETY: the slices are borrowed during the call, and those that are received by nothing else.
    unsafe { end.exchange(Label::new("test", 7), &sends, &recvs) }
}

#[test]
fn messages_match_in_order_and_exchanges_need_not_pair_up() {
    connected(2, 20_000, |end| {
        if end.rank() == 0 {
            exchange(&end, &[(1, &[1]), (1, &[2, 2]), (1, &[3])], &mut []).unwrap();
        } else {
            let (mut a, mut b, mut c) = ([0], [0; 2], [0]);
            exchange(&end, &[], &mut [(0, &mut a)]).unwrap();
            exchange(&end, &[], &mut [(0, &mut b), (0, &mut c)]).unwrap();
            assert_eq!((a, b, c), ([1], [2, 2], [3]));
        }
    });
}

#[test]
fn large_messages_cross_each_other() {
    connected(3, 20_000, |end| {
        let mine = vec![end.rank() as u8; 3_000_000];
        let others: Vec<usize> = (0..3).filter(|&peer| peer != end.rank()).collect();
        let mut theirs = vec![vec![9; mine.len()]; 2];
        let sends: Vec<_> = others.iter().map(|&peer| (peer, &mine[..])).collect();
        let mut recvs: Vec<_> = others.iter().copied().zip(theirs.iter_mut().map(|v| &mut v[..])).collect();
        exchange(&end, &sends, &mut recvs).unwrap();
        for (peer, bytes) in others.iter().zip(theirs) {
            assert!(bytes.iter().all(|&b| usize::from(b) == *peer));
        }
    });
}

#[test]
fn different_sizes_are_named() {
    let errors = connected(2, 20_000, |end| {
        if end.rank() == 0 {
            // The message is small, so it may be sent; the next call then fails.
            exchange(&end, &[(1, &[0; 4])], &mut [])
                .and_then(|()| exchange(&end, &[], &mut [(1, &mut [0])]))
                .unwrap_err()
        } else {
            exchange(&end, &[], &mut [(0, &mut [0; 5])]).unwrap_err()
        }
    });
    let cause = |e: &Error| {
        if let Error::Peer { fault: Fault::One { peer, cause }, .. } = e { Some((*peer, *cause)) } else { None }
    };
    assert_eq!(cause(&errors[1]), Some((0, Cause::Size { ours: 5, theirs: 4 })));
    assert_eq!(errors[0].peer(), Some(1));
}

#[test]
fn lists_that_break_the_contract_are_refused() {
    connected(2, 20_000, |end| {
        let me = end.rank();
        for (peer, bytes) in [(me, &[1][..]), (2, &[1]), (1 - me, &[])] {
            assert!(matches!(exchange(&end, &[(peer, bytes)], &mut []), Err(Error::Invalid { .. })));
        }
        assert!(end.poll().is_ok());
    });
}

#[test]
fn agree_and_exchange_overlap() {
    connected(2, 20_000, |end| {
        let mut byte = [9];
        if end.rank() == 0 {
            // Waits in an exchange while another thread waits in an agreement.
            thread::scope(|scope| {
                scope.spawn(|| end.agree(0..2, 5).unwrap());
                exchange(&end, &[], &mut [(1, &mut byte)]).unwrap();
            });
            assert_eq!(byte, [1]);
        } else {
            end.agree(0..2, 5).unwrap();
            exchange(&end, &[(0, &[1])], &mut []).unwrap();
        }
    });
}

#[test]
fn ranks_that_disagree_all_know_it_and_stay_usable() {
    connected(3, 20_000, |end| {
        let mine = if end.rank() == 2 { 8 } else { 7 };
        let peer = if end.rank() == 2 { 0 } else { 2 };
        assert_eq!(end.agree(0..3, mine), Err(Error::disagreement(end.rank(), peer, mine, 15 - mine)));
        end.agree(0..3, 1).unwrap();
        // A part of the group.
        if end.rank() > 0 {
            end.agree(1..3, 2).unwrap();
        }
    });
}

#[test]
fn the_deadline_names_the_silent_rank_and_the_group_stays_failed() {
    let ended = Barrier::new(2);
    connected(2, 200, |end| {
        if end.rank() == 0 {
            let begin = Instant::now();
            let error = exchange(&end, &[], &mut [(1, &mut [0; 3])]).unwrap_err();
            assert!((200..5_000).contains(&begin.elapsed().as_millis()), "{:?}", begin.elapsed());
            assert!(
                matches!(
                    &error,
                    Error::Peer {
                        at: Label { step: 7, .. },
                        fault: Fault::One { peer: 1, cause: Cause::Deadline { .. } },
                        ..
                    }
                ),
                "{error}"
            );
            assert_eq!(end.poll(), Err(error.clone()));
            assert_eq!(end.agree(0..2, 1), Err(error));
        }
        ended.wait();
    });
}

#[test]
fn an_abort_by_another_thread_ends_a_wait_on_every_rank() {
    let begin = Instant::now();
    let errors = connected(3, 20_000, |end| {
        if end.rank() == 0 {
            thread::scope(|scope| {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(50));
                    end.abort(Cause::Aborted);
                    end.abort(Cause::Aborted);
                });
                exchange(&end, &[], &mut [(1, &mut [0])]).unwrap_err()
            })
        } else {
            let e = exchange(&end, &[], &mut [(0, &mut [0])]).unwrap_err();
            end.abort(Cause::Failed);
            e
        }
    });
    assert!(begin.elapsed() < Duration::from_secs(10));
    assert!(errors.iter().all(|e| e.peer() == Some(0)), "{errors:?}");
}

#[test]
fn a_rank_that_leaves_is_named() {
    let errors = connected(2, 20_000, |end| match end.rank() {
        0 => None,
        _ => exchange(&end, &[], &mut [(0, &mut [0])]).err(),
    });
    assert!(
        matches!(errors[1], Some(Error::Peer { fault: Fault::One { peer: 0, cause: Cause::Left }, .. })),
        "{errors:?}"
    );
}
