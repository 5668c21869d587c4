// SPDX-License-Identifier: MIT OR Apache-2.0
use super::*;
use std::{collections::BTreeMap, vec};

const DEADLINE: Duration = Duration::from_secs(2);

/// What each rank says; one that is not there gives no answer. `absent` never came.
#[derive(Default)]
struct Told {
    said: BTreeMap<usize, RankState>,
    absent: Vec<usize>,
}

impl Ranks for Told {
    fn has_opened(&self, rank: usize) -> Result<bool, Failed> {
        Ok(!self.absent.contains(&rank))
    }

    fn answer(&self, rank: usize) -> Result<Option<RankState>, Failed> {
        Ok(self.said.get(&rank).cloned())
    }
}

fn waits(peer: usize, seconds: f64, call: &str, run: &str) -> RankState {
    let wait = WaitState { call: call.into(), doing: "receiving".into(), peer: Some(peer), bytes: 16, run: run.into() };
    RankState { ended: None, wait: Some(wait), time: Duration::from_secs_f64(seconds) }
}

fn ring(peer: usize, seconds: f64) -> RankState {
    waits(peer, seconds, "ring, step 3", "no plan")
}

fn idle(seconds: f64) -> RankState {
    RankState { time: Duration::from_secs_f64(seconds), ..RankState::default() }
}

fn joining(seconds: f64) -> RankState {
    let wait = WaitState { call: "making the transport".into(), doing: "connecting".into(), ..WaitState::default() };
    RankState { wait: Some(wait), ..idle(seconds) }
}

fn found(
    asker: SearchOrigin,
    world: usize,
    said: impl IntoIterator<Item = (usize, RankState)>,
    absent: &[usize],
) -> Verdict {
    let told = Told { said: said.into_iter().collect(), absent: absent.to_vec() };
    find(asker, world, DEADLINE, &told).unwrap()
}

#[track_caller]
fn names(verdict: &Verdict, peer: Option<usize>, begins: &str) {
    assert!(verdict.peer == peer && verdict.text.starts_with(begins), "{verdict:?}");
}

#[test]
fn the_end_of_a_chain_is_at_fault_and_not_those_who_wait() {
    let chain = || [(0, ring(1, 2.0)), (1, ring(2, 1.2)), (2, ring(3, 0.4))];
    let silent = found(SearchOrigin::Rank(0), 4, chain(), &[]);
    names(
        &silent,
        Some(3),
        "rank 3 gives no answer: it was killed, is stopped, or is cut off; rank 0 waited for rank 1 ",
    );
    assert!(silent.text.ends_with("; rank 2 waited for rank 3 (ring, step 3: receiving 16 bytes)"), "{silent:?}");
    let left = RankState { ended: Some("has left the group".into()), ..RankState::default() };
    names(
        &found(SearchOrigin::Rank(1), 4, chain().into_iter().chain([(3, left)]), &[]),
        Some(3),
        "rank 3 has left the group; ",
    );
    let busy = found(SearchOrigin::Rank(0), 4, chain().into_iter().chain([(3, idle(5.0))]), &[]);
    names(&busy, Some(3), "rank 3 is in no call of the group, while others wait for it; ");
}

#[test]
fn a_rank_that_has_just_come_is_not_blamed_by_one_that_was_stopped() {
    // Rank 1 was stopped, gave up at once, and rank 0 has been in no call for a short time.
    let verdict = found(SearchOrigin::Rank(1), 2, [(1, ring(0, 0.2)), (0, idle(0.3))], &[]);
    names(&verdict, Some(1), "rank 1 came late: it has waited for 0.2 s, and was in no call or stopped before; ");
    let verdict = found(SearchOrigin::Rank(1), 2, [(1, ring(0, 2.0)), (0, idle(0.3))], &[]);
    names(&verdict, Some(0), "rank 0 is in no call of the group");
}

#[test]
fn ranks_that_wait_for_each_other() {
    let all = |last| [(0, ring(1, 2.0)), (1, ring(2, 2.0)), (2, ring(0, last))];
    names(
        &found(SearchOrigin::Rank(0), 3, all(2.0), &[]),
        None,
        "which rank is at fault cannot be told: ranks wait for each other; ",
    );
    names(&found(SearchOrigin::Rank(0), 3, all(0.9), &[]), Some(2), "rank 2 came late: it has waited for 0.9 s");
    let differ = |time| {
        let agrees = waits(0, time, "agreement, step 0", "the forward of plan 2");
        found(SearchOrigin::Rank(0), 2, [(0, waits(1, 2.0, "ring, step 3", "the forward of plan 1")), (1, agrees)], &[])
    };
    let verdict = differ(0.9);
    let text =
        "rank 0 is in ring, step 3 of the forward of plan 1, rank 1 is in agreement, step 0 of the forward of plan 2: ";
    names(&verdict, Some(1), text);
    assert!(verdict.differ && verdict.on(1) == Some(0) && verdict.on(0) == Some(1));
    names(&differ(0.4), Some(1), "rank 1 came late");
    assert!(!differ(0.4).differ);
}

#[test]
fn while_the_group_is_made() {
    let all = |last: f64| [(0, joining(3.0)), (1, joining(2.9)), (2, joining(last))];
    names(&found(SearchOrigin::Joining, 3, all(3.0), &[1, 2]), Some(1), "ranks 1, 2 did not come");
    names(
        &found(SearchOrigin::Joining, 12, all(3.0), &[1, 2, 3, 4, 5, 6, 7, 8, 9]),
        Some(1),
        "ranks 1, 2, 3, 4, 5, 6, 7, 8, ... did",
    );
    names(&found(SearchOrigin::Joining, 4, all(3.0), &[]), Some(3), "rank 3 gives no answer");
    names(
        &found(SearchOrigin::Joining, 3, all(1.0), &[]),
        Some(2),
        "rank 2 came late, or was stopped: it has been there for 1.0 s, ",
    );
    let unknown = found(SearchOrigin::Joining, 3, all(2.5), &[]);
    names(&unknown, None, "all ranks came, and their connections were not made: which is at fault cannot be told");
}

#[test]
fn a_rank_that_makes_its_connections_is_not_blamed() {
    // Rank 2 has its connections and waits for rank 0, which is still at it, because of rank 1, which does not answer.
    let verdict = found(SearchOrigin::Rank(2), 3, [(2, ring(0, 0.5)), (0, joining(0.5))], &[]);
    names(&verdict, Some(1), "rank 1 gives no answer");
    assert!(
        verdict.text.contains("; rank 2 waited for rank 0 ")
            && verdict.text.ends_with("; rank 0 was making the transport")
    );
}

#[test]
fn long_chains_are_shortened() {
    let verdict = found(SearchOrigin::Rank(0), 20, (0..19).map(|rank| (rank, ring(rank + 1, 2.0))), &[]);
    assert_eq!(verdict.text.matches("waited for").count(), SHOWN);
    assert!(verdict.text.contains("; ...; rank 18 waited for rank 19 "), "{}", verdict.text);
    assert!(verdict.write().len() <= LONGEST_VALUE);
}

#[test]
fn what_is_written_is_read() {
    for said in
        [idle(0.25), ring(3, 1.5), joining(2.0), RankState { ended: Some("failed\nby itself".into()), ..idle(0.0) }]
    {
        let read = RankState::read(&said.write()).unwrap();
        assert_eq!(
            RankState { ended: read.ended.map(|e| e.replace(' ', "\n")).filter(|_| said.ended.is_none()), ..read },
            RankState { ended: None, ..said }
        );
    }
    for verdict in [
        Verdict::unknown("nothing"),
        Verdict { peer: Some(1), text: "rank 1 sends".into(), other: Some(0), differ: true, runs: Some([7, u64::MAX]) },
        Verdict { peer: Some(1), text: "rank 1 sends".into(), other: Some(0), differ: true, runs: None },
    ] {
        assert_eq!(Verdict::read(&verdict.write()), Some(verdict));
    }
    let long = RankState { ended: Some("é".repeat(10_000)), ..RankState::default() };
    assert!(long.write().len() <= LONGEST_VALUE && RankState::read(&long.write()).is_some());
    for wrong in [&b""[..], b"1\n2", b"\xff", b"x\n\n\n\n", b"\n\n\n\n\n\n\n\n\n"] {
        assert_eq!((Verdict::read(wrong), RankState::read(wrong)), (None, None));
    }
    let no_lines = vec![b'\n'; 4];
    assert_eq!(Verdict::read(&no_lines), Some(Verdict::default()));
}
