// SPDX-License-Identifier: MIT OR Apache-2.0
//! The rank that errors name, when ranks wait for each other, do not come, or lose the store.

use std::{
    collections::BTreeMap,
    sync::{
        Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use cpattn::{
    Cause,
    transport::{Label, Transport},
};

use super::{
    group::{LONG, SHORT, exchange, found, named, play, says},
    mail, wait_for,
};

/// Each rank waits for a message of the next one; the last one does something else.
fn chain(how: &'static str) -> BTreeMap<usize, (Option<usize>, bool, String)> {
    let awaited: &[usize] = if matches!(how, "stopped" | "aborts, ends") { &[0, 1, 2] } else { &[0, 1, 2, 3] };
    // A rank that fails closes the engines of others, which may not have left the agreement yet.
    let met = Barrier::new(4);
    play(4, SHORT, awaited, |rank, end, office| {
        end.connect().unwrap();
        end.agree(0..4, 1).unwrap();
        met.wait();
        let next = (rank + 1) % 4;
        match how {
            _ if rank < 3 => thread::sleep(SHORT.mul_f64(0.3) * rank as u32),
            "stopped" => office.change(|state| state.stopped.extend([3])),
            "left" => {
                drop(end);
                return (Some(3), false, String::new());
            }
            "aborts" => end.abort(Cause::Aborted),
            // And holds the store, which ends with it.
            "aborts, ends" => {
                end.abort(Cause::Aborted);
                office.change(|state| {
                    state.store_gone = true;
                    state.stopped.extend([3]);
                });
            }
            "broken" => office.change(|state| state.broken = Some(3)),
            "idle" => {
                thread::sleep(4 * SHORT);
                return found(end.poll().inspect_err(|error| {
                    let again = end.poll().unwrap_err();
                    assert_eq!(again.peer(), error.peer());
                }));
            }
            _ => {}
        }
        let first = found(exchange(&end, Label::new("ring", 3), &[], &[(next, 16)]));
        // A group that failed stays failed, and says so at once.
        let began = Instant::now();
        let again = found(exchange(&end, Label::new("ring", 4), &[(next, 16)], &[]));
        assert!(again.0 == first.0 && began.elapsed() < SHORT / 2, "{first:?}, then {again:?}");
        says(&again, first.0, "the group failed before: ");
        first
    })
}

#[test]
fn the_rank_at_fault_is_named_and_not_those_who_wait() {
    let check = |(how, words)| {
        for (rank, said) in chain(how) {
            if how != "left" || rank < 3 {
                says(&said, Some(3), words);
            }
            if how == "stopped" {
                let begins = format!("rank {rank}, ring, step 3: receiving 16 bytes, rank {} failed", rank + 1);
                assert!(said.2.starts_with(&begins), "{}", said.2);
            }
        }
    };
    // They wait for deadlines, so all at once.
    thread::scope(|scope| {
        for case in [
            ("stopped", "; rank 3 gives no answer: it was killed, is stopped, or is cut off; "),
            ("left", "; rank 3 has left the group; "),
            ("aborts", "rank 3 aborted the run"),
            ("aborts, ends", "rank 3 aborted the run"),
            ("broken", "rank 3 failed by itself (the engine broke)"),
            ("idle", "rank 3 is in no call of the group, while others wait for it"),
        ] {
            scope.spawn(move || check(case));
        }
    });
}

/// Rank 0 holds the store and ends once it has its error; rank 1 needs longer to learn which rank is at fault.
#[test]
fn the_store_may_end_with_the_first_error() {
    let met = Barrier::new(3);
    let said = play(3, SHORT, &[0, 1], |rank, end, office| {
        end.connect().unwrap();
        end.agree(0..3, 1).unwrap();
        met.wait();
        office.change(|state| state.far = Some(1));
        if rank == 2 {
            office.change(|state| state.stopped.extend([2]));
        }
        let outcome = found(exchange(&end, Label::new("ring", 3), &[], &[((rank + 2) % 3, 16)]));
        if rank == 0 {
            office.change(|state| state.store_gone = true);
        }
        outcome
    });
    for rank in [0, 1] {
        says(&said[&rank], Some(2), "; rank 2 gives no answer: ");
    }
}

#[test]
fn ranks_that_wait_for_each_other_cannot_tell() {
    let said = play(3, SHORT, &[0, 1, 2], |rank, end, _| {
        end.connect().unwrap();
        end.agree(0..3, 1).unwrap();
        found(exchange(&end, Label::new("ring", 3), &[], &[((rank + 1) % 3, 16)]))
    });
    for said in said.values() {
        says(said, None, "which rank is at fault cannot be told: ranks wait for each other; ");
    }
}

#[test]
fn a_rank_that_does_not_come_or_comes_late() {
    // The library gives the store ten seconds at least; the engine gives up after three.
    let gave_up = AtomicUsize::new(0);
    let said = play(3, SHORT, &[0, 1, 2], |rank, end, _| {
        if rank == 1 {
            wait_for(&gave_up, 2);
        }
        let connected = end.connect();
        gave_up.fetch_add(1, Ordering::Release);
        assert!(end.agree(0..3, 1).is_err());
        found(connected)
    });
    for rank in [0, 2] {
        says(&said[&rank], Some(1), "making the transport, step 0: not all ranks made their transport, after ");
        says(&said[&rank], Some(1), "; rank 1 did not come");
    }
    // The first to give up may end the wait of the other before its engine has said why.
    assert!([0, 2].iter().any(|rank| said[rank].2.ends_with("; engine: the time has passed")), "{said:?}");
    says(&said[&1], Some(1), "the others gave up before this rank made its transport; rank 1 did not come");
}

#[test]
fn a_rank_that_fails_to_connect_ends_the_wait_of_the_others() {
    let said = play(3, LONG, &[0, 1, 2], |rank, end, office| {
        office.change(|state| state.broken = Some(1));
        let began = Instant::now();
        (rank, found(end.connect()), began.elapsed())
    });
    for (rank, outcome, took) in said.into_values() {
        says(&outcome, Some(1), "rank 1 failed by itself (the engine broke)");
        assert!(took < LONG / 4, "rank {rank} took {took:?}");
    }
}

#[test]
fn a_store_that_is_missing_stopped_or_gone() {
    let told = |change: fn(&mut mail::State)| {
        play(2, SHORT, &[0], move |rank, end, office| {
            end.connect().unwrap();
            end.agree(0..2, 1).unwrap();
            office.change(change);
            if rank == 1 { (None, false, String::new()) } else { found(exchange(&end, named(1), &[], &[(1, 16)])) }
        })
        .remove(&0)
        .unwrap()
    };
    let stopped = || {
        let said = told(|state| state.store_stopped = true);
        says(&said, None, "the store of the process group did not answer within 2.0 s; see ");
    };
    let gone = || says(&told(|state| state.store_gone = true), None, "is gone (no connection to the store)");
    let missing = || {
        let said = play(2, SHORT, &[0], |rank, end, office| {
            office.change(|state| state.no_store = true);
            end.connect().unwrap();
            if rank == 1 { (None, false, String::new()) } else { found(exchange(&end, named(1), &[], &[(1, 16)])) }
        });
        says(&said[&0], None, "cannot be told: the store has no second connection (there is none)");
    };
    let stopped_before_the_group_is_made = || {
        let began = Instant::now();
        let said = play(1, SHORT, &[0], |_, end, office| {
            office.change(|state| state.store_stopped = true);
            found(end.connect())
        });
        says(&said[&0], None, "no transport was made, after 1");
        says(&said[&0], None, "the process that holds the store does not answer");
        assert!(began.elapsed() < Duration::from_secs(30));
    };
    // They wait for deadlines, so all at once.
    thread::scope(|scope| {
        let cases: [&(dyn Fn() + Sync); 4] = [&stopped, &gone, &missing, &stopped_before_the_group_is_made];
        cases.into_iter().for_each(|case| drop(scope.spawn(case)));
    });
}
