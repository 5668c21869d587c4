// SPDX-License-Identifier: MIT OR Apache-2.0
//! Determines the rank at fault from the ranks' answers.
//!
//! The search is that of [`fault`](crate::transport::fault); here its answers are read, and its result is put into
//! words. While the group is being made no rank waits for another in particular: then ranks that have not come are at
//! fault, or one that does not answer, or one that came late.
//!
//! This module does not wait and does not ask the ranks itself: [`Ranks`] does.

use std::{
    format,
    string::{String, ToString},
    time::Duration,
    vec::Vec,
};

use super::contract::{Failed, LONGEST_VALUE};
use crate::{
    error::{Error, Label},
    transport::fault::{Answer, AtFault, GroupFailure, Search},
};

pub(super) const SAME: &str = concat!(
    "all ranks of a group must make the same calls in the same order, with the same documents and options, and one version of cpattn (",
    env!("CARGO_PKG_VERSION"),
    " here)"
);
const SILENT: &str = "gives no answer: it was killed, is stopped, or is cut off";
/// The most ranks that one text lists.
const SHOWN: usize = 8;

/// The ranks that can be asked.
pub(super) trait Ranks {
    /// Whether the rank has started.
    fn has_opened(&self, rank: usize) -> Result<bool, Failed>;

    /// The rank's answer; none if it does not answer in time.
    fn answer(&self, rank: usize) -> Result<Option<RankState>, Failed>;
}

/// The answer of a rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RankState {
    /// Why it has ended, if it has.
    pub(super) ended: Option<String>,
    pub(super) wait: Option<WaitState>,
    /// How long it has been waiting, or idle.
    pub(super) time: Duration,
}

/// The wait and the run of a rank, in words.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct WaitState {
    pub(super) call: String,
    pub(super) doing: String,
    /// None while the group is being made: it waits for no rank in particular.
    pub(super) peer: Option<usize>,
    pub(super) bytes: u64,
    pub(super) run: String,
}

/// The rank that asks. `Joining`: it was making its transport, when no rank waits for one other rank in particular.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SearchOrigin {
    Rank(usize),
    Joining,
}

/// The rank at fault (none if it cannot be determined), and why. Of two ranks that differ, each names the `other`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Verdict {
    pub(super) peer: Option<usize>,
    pub(super) text: String,
    pub(super) other: Option<usize>,
    /// Whether the two differ in their runs or calls.
    pub(super) differ: bool,
    /// What `peer` and `other` run, by the fingerprints that ranks compare, if that is known.
    pub(super) runs: Option<[u64; 2]>,
}

impl Verdict {
    pub(super) fn unknown(why: &str) -> Self {
        Self { text: format!("which rank is at fault cannot be told: {why}"), ..Self::default() }
    }

    pub(super) fn of(rank: usize, what: &str) -> Self {
        Self { peer: Some(rank), text: format!("rank {rank} {what}"), ..Self::default() }
    }

    /// The disagreement as `rank` reports it, in whose call the ranks compare `number`; none if it is not known what
    /// the two ranks run.
    pub(super) fn disagreement(&self, rank: usize, number: Option<u64>) -> Option<Error> {
        let (Some(peer), Some(other), true) = (self.peer, self.other, self.differ) else { return None };
        let failure = GroupFailure::crossed(peer, other).of_runs(self.runs.map(|r| r[0]), self.runs.map(|r| r[1]));
        let error = failure.error(rank, Label::new("agree", 0), number);
        matches!(error, Error::Disagreement { .. }).then_some(error)
    }

    /// The rank that `rank` names.
    pub(super) fn on(&self, rank: usize) -> Option<usize> {
        if self.peer == Some(rank) { self.other.or(self.peer) } else { self.peer }
    }

    pub(super) fn write(&self) -> Vec<u8> {
        let runs = self.runs.map_or_else(String::new, |[of_peer, of_other]| format!("{of_peer} {of_other}"));
        lines([&number(self.peer), &number(self.other), if self.differ { "1" } else { "" }, &runs, &self.text])
    }

    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let [peer, other, differ, runs, text] = fields(bytes)?;
        let runs = match runs.split_once(' ') {
            Some((of_peer, of_other)) => Some([of_peer.parse().ok()?, of_other.parse().ok()?]),
            None => None,
        };
        Some(Self { peer: optional(peer)?, other: optional(other)?, differ: differ == "1", runs, text: text.into() })
    }
}

impl RankState {
    pub(super) fn write(&self) -> Vec<u8> {
        let wait = self.wait.clone().unwrap_or_default();
        lines([
            self.ended.as_deref().unwrap_or(""),
            &self.time.as_millis().to_string(),
            if self.wait.is_some() { "1" } else { "" },
            &wait.call,
            &wait.doing,
            &number(wait.peer),
            &wait.bytes.to_string(),
            &wait.run,
        ])
    }

    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let [ended, ms, waits, call, doing, peer, count, run] = fields(bytes)?;
        let [call, doing, run] = [call, doing, run].map(String::from);
        let wait = WaitState { call, doing, peer: optional(peer)?, bytes: count.parse().ok()?, run };
        Some(Self {
            ended: (!ended.is_empty()).then(|| ended.into()),
            wait: (waits == "1").then_some(wait),
            time: Duration::from_millis(ms.parse().ok()?),
        })
    }
}

/// A value of the store; an error if another version wrote it.
pub(super) fn read<T>(value: Option<T>) -> Result<T, Failed> {
    value.ok_or_else(|| Failed::of_group("the store holds a value that no rank of this version wrote"))
}

fn number(rank: Option<usize>) -> String {
    rank.map_or_else(String::new, |rank| rank.to_string())
}

fn optional(text: &str) -> Option<Option<usize>> {
    if text.is_empty() { Some(None) } else { text.parse().ok().map(Some) }
}

/// The texts as a value of the store, one line each.
fn lines<const N: usize>(all: [&str; N]) -> Vec<u8> {
    let room = LONGEST_VALUE / 2;
    let line = |text: &str| text.replace(['\n', '\0'], " ").chars().take(room / 4).collect::<String>();
    all.map(line).join("\n").into_bytes()
}

fn fields<const N: usize>(bytes: &[u8]) -> Option<[&str; N]> {
    let all: Vec<&str> = str::from_utf8(bytes).ok()?.split('\n').collect();
    all.try_into().ok()
}

/// The verdict of all ranks' answers. `deadline` is that of each of them.
pub(super) fn find(
    asker: SearchOrigin,
    world: usize,
    deadline: Duration,
    ranks: &dyn Ranks,
) -> Result<Verdict, Failed> {
    let SearchOrigin::Rank(asker) = asker else { return find_joining(world, deadline, ranks) };
    let (mut chain, mut search) = (Vec::new(), Search::new(asker, deadline));
    let end = loop {
        let at = search.current_rank();
        let answer = match ranks.answer(at)? {
            None => Answer::Silent,
            Some(RankState { ended: Some(ended), .. }) => break Verdict::of(at, &ended),
            Some(RankState { wait: None, time, .. }) => Answer::Idle(time),
            Some(RankState { wait: Some(wait), time, .. }) => {
                let WaitState { call, doing, peer, bytes, run } = wait;
                let Some(peer) = peer else {
                    chain.push(format!("rank {at} was {call}"));
                    break find_joining(world, deadline, ranks)?;
                };
                chain.push(format!("rank {at} waited for rank {peer} ({call}: {doing} {bytes} bytes)"));
                Answer::Waits { on: std::vec![peer], call: format!("{call} of {run}"), time }
            }
        };
        if let Some(found) = search.record_answer(answer) {
            break found.into();
        }
    };
    if chain.len() > SHOWN {
        chain.splice(SHOWN - 1..chain.len() - 1, ["...".to_string()]);
    }
    chain.insert(0, end.text);
    Ok(Verdict { text: chain.join("; "), ..end })
}

impl From<AtFault<String>> for Verdict {
    fn from(found: AtFault<String>) -> Self {
        match found {
            AtFault::Silent(rank) => Self::of(rank, SILENT),
            AtFault::Idle(rank) => Self::of(rank, "is in no call of the group, while others wait for it"),
            AtFault::Late(rank, time) => {
                let time = time.as_secs_f64();
                Self::of(
                    rank,
                    &format!("came late: it has waited for {time:.1} s, and was in no call or stopped before"),
                )
            }
            AtFault::Differ([(first, call), (other, theirs)]) => Self {
                peer: Some(other),
                text: format!("rank {first} is in {call}, rank {other} is in {theirs}: {SAME}"),
                other: Some(first),
                differ: true,
                runs: None,
            },
            AtFault::Circle(_) => Self::unknown("ranks wait for each other"),
        }
    }
}

/// The ranks that have not come; otherwise the first that does not answer; otherwise the one that has been there
/// for much less time than others.
fn find_joining(world: usize, deadline: Duration, ranks: &dyn Ranks) -> Result<Verdict, Failed> {
    let mut missing = Vec::new();
    for rank in 0..world {
        if !ranks.has_opened(rank)? {
            missing.push(rank);
        }
    }
    if let Some(&first) = missing.first() {
        let shown: Vec<_> = missing.iter().take(SHOWN).map(|rank| rank.to_string()).collect();
        let more = if missing.len() > SHOWN { ", ..." } else { "" };
        let plural = if missing.len() > 1 { "s" } else { "" };
        let text = format!("rank{plural} {}{more} did not come", shown.join(", "));
        return Ok(Verdict { peer: Some(first), text, ..Verdict::default() });
    }
    let mut there = Vec::new();
    for rank in 0..world {
        match ranks.answer(rank)? {
            None => return Ok(Verdict::of(rank, SILENT)),
            Some(said) => there.push((said.time, rank)),
        }
    }
    let (least, most) = (there.iter().min(), there.iter().max());
    if let (Some(&(least, rank)), Some(&(most, _))) = (least, most)
        && most - least > deadline / 2
    {
        let (least, most) = (least.as_secs_f64(), most.as_secs_f64());
        let what = format!("came late, or was stopped: it has been there for {least:.1} s, others {most:.1} s");
        return Ok(Verdict::of(rank, &what));
    }
    let text = "all ranks came, and their connections were not made: which is at fault cannot be told".into();
    Ok(Verdict { text, ..Verdict::default() })
}

#[cfg(test)]
mod tests;
