// SPDX-License-Identifier: MIT OR Apache-2.0
//! Determines the rank at fault from the ranks' answers.
//!
//! An engine only knows the peer whose connection closed or whose message did not come. That peer may itself be waiting
//! for another one, or may have closed its connections because of another one. So the search begins at the rank that
//! asked and follows the chain of ranks that wait for each other, to one that does not answer, has left, or waits for
//! nobody. If all wait for each other, the rank at fault is the one that has waited much less than the deadline: it
//! came late, or was stopped.
//!
//! This module does not wait and does not ask the ranks itself: [`Ranks`] does.

use std::{
    format,
    string::{String, ToString},
    time::Duration,
    vec::Vec,
};

use super::contract::{Failed, LONGEST_VALUE};

pub(super) const SAME: &str = concat!(
    "all ranks of a group must make the same calls in the same order, with the same documents and options, and one version of cpattn (",
    env!("CARGO_PKG_VERSION"),
    " here)"
);
const SILENT: &str = "gives no answer: it was killed, is stopped, or is cut off";
/// Ranks in one text.
const SHOWN: usize = 8;

/// The ranks that can be asked.
pub(super) trait Ranks {
    /// Whether it has ever come.
    fn came(&mut self, rank: usize) -> Result<bool, Failed>;

    /// What it says; none where it says nothing in time.
    fn answer(&mut self, rank: usize) -> Result<Option<Said>, Failed>;
}

/// What a rank says of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Said {
    /// Why it takes part in nothing any more.
    pub(super) ended: Option<String>,
    pub(super) wait: Option<SaidWait>,
    /// For which it has waited, or waited for nothing.
    pub(super) time: Duration,
}

/// What a rank waits for, and what it runs, in words.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct SaidWait {
    pub(super) call: String,
    pub(super) doing: String,
    /// None while the group is being made: it waits for no rank in particular.
    pub(super) peer: Option<usize>,
    pub(super) bytes: u64,
    pub(super) run: String,
}

/// Who asked: a rank, or one that made its transport, where none waits for another in particular yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asker {
    Rank(usize),
    Joining,
}

/// The rank at fault (none if it cannot be determined), and why. Of two ranks that differ, each names the `other`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Verdict {
    pub(super) peer: Option<usize>,
    pub(super) text: String,
    pub(super) other: Option<usize>,
    /// In what they run.
    pub(super) differ: bool,
}

impl Verdict {
    pub(super) fn unknown(why: &str) -> Self {
        Self { text: format!("which rank is at fault cannot be told: {why}"), ..Self::default() }
    }

    pub(super) fn of(rank: usize, what: &str) -> Self {
        Self { peer: Some(rank), text: format!("rank {rank} {what}"), ..Self::default() }
    }

    /// The rank that `rank` names.
    pub(super) fn on(&self, rank: usize) -> Option<usize> {
        if self.peer == Some(rank) { self.other.or(self.peer) } else { self.peer }
    }

    pub(super) fn write(&self) -> Vec<u8> {
        lines([&number(self.peer), &number(self.other), if self.differ { "1" } else { "" }, &self.text])
    }

    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let [peer, other, differ, text] = fields(bytes)?;
        Some(Self { peer: optional(peer)?, other: optional(other)?, differ: differ == "1", text: text.into() })
    }
}

impl Said {
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
        let wait = SaidWait { call, doing, peer: optional(peer)?, bytes: count.parse().ok()?, run };
        Some(Self {
            ended: (!ended.is_empty()).then(|| ended.into()),
            wait: (waits == "1").then_some(wait),
            time: Duration::from_millis(ms.parse().ok()?),
        })
    }
}

/// What the store holds, of this version.
pub(super) fn read<T>(value: Option<T>) -> Result<T, Failed> {
    value.ok_or_else(|| Failed::of_group("the store holds what no rank of this version has written"))
}

fn number(rank: Option<usize>) -> String {
    rank.map_or_else(String::new, |rank| rank.to_string())
}

fn optional(text: &str) -> Option<Option<usize>> {
    if text.is_empty() { Some(None) } else { text.parse().ok().map(Some) }
}

/// As a value of the store: a line each.
fn lines<const N: usize>(all: [&str; N]) -> Vec<u8> {
    let room = LONGEST_VALUE / 2;
    let line = |text: &str| text.replace(['\n', '\0'], " ").chars().take(room / 4).collect::<String>();
    all.map(line).join("\n").into_bytes()
}

fn fields<const N: usize>(bytes: &[u8]) -> Option<[&str; N]> {
    let all: Vec<&str> = str::from_utf8(bytes).ok()?.split('\n').collect();
    all.try_into().ok()
}

/// What the ranks find out together. `deadline` is what each of them waits for.
pub(super) fn find(asker: Asker, world: usize, deadline: Duration, ranks: &mut dyn Ranks) -> Result<Verdict, Failed> {
    let Asker::Rank(mut at) = asker else { return find_joining(world, deadline, ranks) };
    let (mut chain, mut waits): (Vec<String>, Vec<Waiting>) = Default::default();
    let end = loop {
        let Some(said) = ranks.answer(at)? else { break Verdict::of(at, SILENT) };
        if let Some(ended) = &said.ended {
            break Verdict::of(at, ended);
        }
        let Some(wait) = said.wait else {
            let idle = Verdict::of(at, "is in no call of the group, while others wait for it");
            break if said.time < deadline / 2 { late(&waits, deadline / 2).unwrap_or(idle) } else { idle };
        };
        let Some(peer) = wait.peer else {
            chain.push(format!("rank {at} was {}", wait.call));
            break find_joining(world, deadline, ranks)?;
        };
        let SaidWait { call, doing, bytes, .. } = &wait;
        chain.push(format!("rank {at} waited for rank {peer} ({call}: {doing} {bytes} bytes)"));
        waits.push(Waiting { rank: at, wait, time: said.time });
        if waits.iter().any(|w| w.rank == peer) {
            break circle(&waits, deadline);
        }
        at = peer;
    };
    if chain.len() > SHOWN {
        chain.splice(SHOWN - 1..chain.len() - 1, ["...".to_string()]);
    }
    chain.insert(0, end.text);
    Ok(Verdict { text: chain.join("; "), ..end })
}

/// A rank that waits for another one.
struct Waiting {
    rank: usize,
    wait: SaidWait,
    time: Duration,
}

/// Of all ranks those that have not come, or else the first that came and does not answer, or else the one that has been there
/// for much less time than others.
fn find_joining(world: usize, deadline: Duration, ranks: &mut dyn Ranks) -> Result<Verdict, Failed> {
    let mut missing = Vec::new();
    for rank in 0..world {
        if !ranks.came(rank)? {
            missing.push(rank);
        }
    }
    if let Some(&first) = missing.first() {
        let shown: Vec<_> = missing.iter().take(SHOWN).map(|rank| rank.to_string()).collect();
        let more = if missing.len() > SHOWN { ", ..." } else { "" };
        let text = format!("rank {}{more} did not come", shown.join(", "));
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

/// The rank that has waited least, if that is no more than `least`.
fn late(waits: &[Waiting], least: Duration) -> Option<Verdict> {
    let first = waits.iter().min_by_key(|w| w.time)?;
    let time = first.time.as_secs_f64();
    let what = format!("came late: it has waited for {time:.1} s, was in no call or stopped before");
    (first.time <= least).then(|| Verdict::of(first.rank, &what))
}

/// Ranks that wait for each other: one that came late, or two that run different things, if there are.
fn circle(waits: &[Waiting], deadline: Duration) -> Verdict {
    let what = |w: &Waiting| format!("rank {} is in {} of {}", w.rank, w.wait.call, w.wait.run);
    let first = &waits[0];
    let differs = |w: &&Waiting| (&w.wait.call, &w.wait.run) != (&first.wait.call, &first.wait.run);
    if let Some(other) = waits.iter().find(differs) {
        let text = format!("{}, {}: {SAME}", what(first), what(other));
        // Those that run different things have all waited for about as long.
        return late(waits, deadline / 4).unwrap_or(Verdict {
            peer: Some(other.rank),
            text,
            other: Some(first.rank),
            differ: true,
        });
    }
    late(waits, deadline / 2).unwrap_or_else(|| Verdict::unknown("ranks wait for each other"))
}

#[cfg(test)]
mod tests;
