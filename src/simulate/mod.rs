// SPDX-License-Identifier: MIT OR Apache-2.0
//! Predicts the time of a plan on a machine by running its schedules as a discrete-event simulation.
//!
//! The schedules of all ranks are executed in simulated time: both lanes of each rank in list order, waits between
//! lanes if an operation names a predecessor, and exchanges under the contract of transports, without buffering. A
//! message starts when both its ranks have reached it; links and network cards are shared evenly by the messages that
//! use them. There is no randomness, no thread and no tensor memory, so a simulation always gives the same figures on
//! every machine.
//!
//! - `tasks` converts the operations of a schedule to seconds and messages, by a [`Machine`];
//! - `bucket` is a rate limit's bucket, which passes some bytes at once after a pause;
//! - `resources` shares cores, links and cards among what uses them at the same time;
//! - `engine` executes the tasks of all ranks.
//!
//! The effects in the model, and those left out, are listed in [`machine`](crate::machine). Replicas work on their own
//! batches, so only the first group is simulated, and it does not share its cards.

mod bucket;
mod engine;
mod resources;
mod tasks;

use alloc::vec::Vec;

use engine::Span;
use tasks::Task;
pub(crate) use tasks::kernel_rate;

use crate::{
    error::Result,
    machine::{Level, Machine},
    plan::Plan,
    report::trace::{Event, common},
    schedule::{Lane, Purpose, Schedule},
};

/// One rank's part of a [`Simulation`]; times are seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct RankTime {
    /// When its last operation ends.
    pub end: f64,
    /// Time in which its compute lane works.
    pub compute: f64,
    /// Time in which its compute lane does not work, until the end of the last rank.
    pub idle: f64,
    /// Time that its communication lane spends in operations, waits for peers included.
    pub communication: f64,
    /// The part of `communication` in which its compute lane does not work.
    pub exposed: f64,
    /// Bytes that it sends to ranks of its node.
    pub bytes_inside: u64,
    /// Bytes that it sends to ranks of other nodes.
    pub bytes_between: u64,
    /// Bytes of its workspace.
    pub workspace: u64,
}

/// The result of a simulation.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Simulation {
    /// Seconds until the last rank ends.
    pub makespan: f64,
    /// The ranks of the group, in order.
    pub ranks: Vec<RankTime>,
    /// Whether the machine has rates for the kernels of exactly this type and these dims; otherwise the nearest
    /// kernels' rates were used ([`Machine::kernel`]).
    pub exact_kernels: bool,
    /// Every operation with its times, as a run would have recorded it, for
    /// [`chrome_trace`](crate::report::trace::chrome_trace) and the timeline.
    pub events: Vec<Event>,
}

impl Simulation {
    /// The longest time of exposed communication of any rank.
    pub fn exposed(&self) -> f64 {
        self.ranks.iter().map(|r| r.exposed).fold(0.0, f64::max)
    }

    /// The largest workspace of any rank, in bytes.
    pub fn workspace(&self) -> u64 {
        self.ranks.iter().map(|r| r.workspace).max().unwrap_or(0)
    }

    /// The most bytes that the ranks of one card send to other nodes.
    pub fn bytes_of_card(&self, machine: &Machine) -> u64 {
        let nodes = self.ranks.len().div_ceil(machine.ranks_per_node);
        let mut cards = alloc::vec![0; nodes * machine.cards_per_node];
        for (rank, r) in self.ranks.iter().enumerate() {
            cards[machine.card(rank)] += r.bytes_between;
        }
        cards.into_iter().max().unwrap_or(0)
    }
}

impl Plan {
    /// Simulates a run of the first group on a machine: a direction of attention, an all-to-all, a combine or a scan.
    ///
    /// Makes the schedules of all ranks of the group, so it takes as long as planning all of them, and about a
    /// microsecond for each message.
    ///
    /// # Errors
    /// A machine without a kernel of the problem's element type, or with a field that no description has, such as a
    /// rate of 0; those of scheduling.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Layout, Machine, Mesh, Plan, Problem, schedule::Direction};
    /// let machine = Machine::parse(include_str!("../../machines/h100_8x400g.machine"))?;
    /// let problem = Problem::new(Batch::from_lengths(&[65536])?, 32, 8, 128, Dtype::Bf16);
    /// let plan = Plan::new(&problem, Mesh::ring(16)?, Layout::Zigzag)?;
    /// let run = plan.simulate(Direction::Forward, &machine)?;
    /// assert!(run.makespan > 0.0 && run.ranks.len() == 16);
    /// // Ranks 0 to 7 are in one node: what they send to others crosses to the second.
    /// assert!(run.ranks[0].bytes_between > 0);
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn simulate(&self, purpose: impl Into<Purpose>, machine: &Machine) -> Result<Simulation> {
        machine.check()?;
        let purpose = purpose.into();
        let schedules = (0..self.mesh().group()).map(|r| Schedule::of(self, r, purpose)).collect::<Result<Vec<_>>>()?;
        let mut exact = true;
        let mut lists = Vec::with_capacity(schedules.len());
        for schedule in &schedules {
            let (list, fits) = tasks::tasks(self, schedule, machine)?;
            exact &= fits;
            lists.push(list);
        }
        let spans = engine::run(&lists, machine)?;
        let makespan = spans.iter().flatten().map(|s| s.1).fold(0.0, f64::max);
        let mut ranks = Vec::with_capacity(schedules.len());
        let mut events = Vec::new();
        for ((list, spans), schedule) in lists.iter().zip(&spans).zip(&schedules) {
            ranks.push(RankTime::new(schedule, list, spans, makespan, machine));
            events.extend(list.iter().zip(spans).zip(&schedule.ops).map(|((task, span), op)| Event {
                rank: schedule.rank,
                lane: task.lane,
                name: op.kind.name(),
                phase: op.phase,
                step: op.step,
                start_ns: nanoseconds(span.0),
                end_ns: nanoseconds(span.1),
                bytes: task.messages.iter().map(|m| m.bytes).sum(),
            }));
        }
        Ok(Simulation { makespan, ranks, exact_kernels: exact, events })
    }
}

fn nanoseconds(seconds: f64) -> u64 {
    (seconds * 1e9 + 0.5) as u64
}

impl RankTime {
    /// The figures of one rank, from the times of its tasks.
    fn new(schedule: &Schedule, tasks: &[Task], spans: &[Span], makespan: f64, machine: &Machine) -> Self {
        // Both lists ascend: an operation begins after the one before has ended.
        let of = |lane: Lane| -> Vec<Span> {
            tasks.iter().zip(spans).filter(|(task, _)| task.lane == lane).map(|(_, span)| *span).collect()
        };
        let [computing, communicating] = [Lane::Compute, Lane::Communication].map(of);
        let [compute, communication] = [&computing, &communicating].map(|list| list.iter().map(|(a, e)| e - a).sum());
        let sent = |level| {
            let messages = tasks.iter().flat_map(|task| &task.messages).filter(|m| m.send);
            messages.filter(|m| machine.level(schedule.rank, m.peer) == level).map(|m| m.bytes).sum()
        };
        Self {
            end: spans.iter().map(|s| s.1).fold(0.0, f64::max),
            compute,
            idle: makespan - compute,
            communication,
            exposed: (communication - common(&computing, &communicating)).max(0.0),
            bytes_inside: sent(Level::Inside),
            bytes_between: sent(Level::Between),
            workspace: schedule.workspace_bytes(),
        }
    }
}

#[cfg(test)]
mod tests;
