// SPDX-License-Identifier: MIT OR Apache-2.0
//! Executes the tasks of all ranks in simulated time.
//!
//! Each lane runs its tasks in order. A task begins when the task before it in its lane and its predecessor in the
//! other lane have ended. An exchange first takes the time of an operation, then posts its messages; a task without
//! messages ends after its work. A message starts when both ends are posted, waits for the latency, and then uses the
//! resources of its level: the two ranks' ports inside a node, the two cards between nodes. On a machine with cores a
//! message inside a node is a copy by the receiver, and one between nodes needs a copy at each end, at the same time as
//! it uses the cards; a rank makes one copy after another. An exchange ends when all its messages have ended.

use alloc::{
    collections::{BTreeMap, VecDeque},
    format, vec,
    vec::Vec,
};

use super::{
    bucket::Bucket,
    resources::{JobId, Resources},
    tasks::Task,
};
use crate::{
    error::{Error, Result},
    machine::{Level, Machine},
    schedule::Lane,
};

/// Begin and end of a task.
pub(super) type Span = (f64, f64);

/// The purpose of a job.
#[derive(Clone, Copy, Debug)]
enum JobPart {
    /// The work of a rank's task, before its messages are posted.
    Work(usize, usize),
    /// The latency of a message.
    Latency(Flight),
    /// The bytes of a message on ports or cards.
    Bytes(Flight),
    /// A copy of a message by this rank.
    Copy(Flight, usize),
}

/// A message under way.
#[derive(Clone, Copy, Debug)]
struct Flight {
    from: usize,
    to: usize,
    bytes: u64,
}

struct SimulatedRank<'a> {
    tasks: &'a [Task],
    spans: Vec<Span>,
    /// For each lane, in the order of [`Lane`]: its tasks, and how many have ended.
    lanes: [(Vec<usize>, usize); 2],
    busy: [bool; 2],
    /// Unfinished messages of the exchange in progress.
    open: usize,
    /// Copies that wait for the one in progress, each with its seconds.
    copies: VecDeque<(Flight, f64)>,
    copying: bool,
}

/// Indices of the machine's resources.
struct MachineParts {
    /// The cores of each node; one entry if all nodes share them.
    cores: Vec<usize>,
    /// Each rank's ports, out and in, inside its node.
    ports: Vec<[usize; 2]>,
    /// Each card's two directions, out and in.
    cards: Vec<[usize; 2]>,
    /// The bucket of each direction of each card.
    buckets: Vec<[Bucket; 2]>,
}

struct EventLoop<'a> {
    machine: &'a Machine,
    resources: Resources,
    shared: MachineParts,
    ranks: Vec<SimulatedRank<'a>>,
    parts: Vec<Option<JobPart>>,
    /// Messages posted by one side, by sender and receiver: whether the sender posted, and bytes.
    posted: BTreeMap<(usize, usize), (bool, u64)>,
    /// Unfinished jobs of messages in progress, by sender and receiver.
    under_way: BTreeMap<(usize, usize), usize>,
    now: f64,
}

/// Begin and end of all tasks of all ranks.
///
/// # Errors
/// [`Error::Schedule`] if messages do not meet, which a proved schedule rules out.
pub(super) fn run(lists: &[Vec<Task>], machine: &Machine) -> Result<Vec<Vec<Span>>> {
    let mut engine = EventLoop::new(lists, machine);
    for rank in 0..lists.len() {
        engine.advance(rank)?;
    }
    while let Some((now, job)) = engine.resources.next() {
        engine.now = now;
        engine.ended(job)?;
    }
    for (rank, r) in engine.ranks.iter().enumerate() {
        if let Some((list, done)) = r.lanes.iter().find(|(list, done)| *done < list.len()) {
            return Err(Error::Schedule {
                rank,
                operation: list[*done],
                flaw: format!("it waits forever: {} of {} operations of its lane have ended", done, list.len()),
            });
        }
    }
    Ok(engine.ranks.into_iter().map(|r| r.spans).collect())
}

impl<'a> EventLoop<'a> {
    fn new(lists: &'a [Vec<Task>], machine: &'a Machine) -> Self {
        let mut resources = Resources::default();
        let nodes = lists.len().div_ceil(machine.ranks_per_node);
        let pools = if machine.nodes_share_cores { 1 } else { nodes };
        let cores = machine.cores.map_or(Vec::new(), |n| (0..pools).map(|_| resources.add(n as f64)).collect());
        let mut pair = |rate: f64| [resources.add(rate), resources.add(rate)];
        let shared = MachineParts {
            cores,
            ports: lists.iter().map(|_| pair(machine.inside.rate)).collect(),
            cards: (0..nodes * machine.cards_per_node).map(|_| pair(machine.between.rate)).collect(),
            buckets: vec![[Bucket::new(machine); 2]; nodes * machine.cards_per_node],
        };
        let rank = |tasks: &'a Vec<Task>| {
            let of = |lane| (0..tasks.len()).filter(|&i| tasks[i].lane == lane).collect();
            SimulatedRank {
                tasks,
                spans: vec![(0.0, 0.0); tasks.len()],
                lanes: [(of(Lane::Compute), 0), (of(Lane::Communication), 0)],
                busy: [false; 2],
                open: 0,
                copies: VecDeque::new(),
                copying: false,
            }
        };
        let ranks = lists.iter().map(rank).collect();
        let (posted, under_way) = (BTreeMap::new(), BTreeMap::new());
        Self { machine, resources, shared, ranks, parts: Vec::new(), posted, under_way, now: 0.0 }
    }

    /// Begins all tasks that a rank can begin.
    fn advance(&mut self, rank: usize) -> Result<()> {
        for lane in 0..2 {
            let r = &self.ranks[rank];
            let (list, done) = &r.lanes[lane];
            let Some(&task) = list.get(*done).filter(|_| !r.busy[lane]) else { continue };
            if let Some(after) = r.tasks[task].after {
                // The predecessor has ended if it comes before the other lane's next task.
                let (other, ended) = &r.lanes[1 - lane];
                if other.get(*ended).is_some_and(|&next| next <= after) {
                    continue;
                }
            }
            let r = &mut self.ranks[rank];
            r.busy[lane] = true;
            r.spans[task].0 = self.now;
            let seconds = r.tasks[task].seconds;
            self.compute(rank, seconds, JobPart::Work(rank, task));
        }
        Ok(())
    }

    /// Begins work of a rank itself; it uses a core if the machine has cores.
    fn compute(&mut self, rank: usize, seconds: f64, part: JobPart) {
        let cores: Option<&usize> = self.shared.cores.get(self.machine.pool(rank));
        let job = self.resources.begin(self.now, seconds, 1.0, cores.map_or(&[], core::slice::from_ref));
        self.keep(job, part);
    }

    fn keep(&mut self, job: JobId, part: JobPart) {
        if self.parts.len() <= job {
            self.parts.resize(job + 1, None);
        }
        self.parts[job] = Some(part);
    }

    fn ended(&mut self, job: JobId) -> Result<()> {
        match self.parts[job].take().expect("a job that was begun") {
            JobPart::Work(rank, task) => self.post(rank, task),
            JobPart::Latency(flight) => {
                self.transfer(flight);
                Ok(())
            }
            JobPart::Bytes(flight) => self.arrived(flight),
            JobPart::Copy(flight, rank) => {
                self.ranks[rank].copying = false;
                self.copy(rank);
                self.arrived(flight)
            }
        }
    }

    fn complete(&mut self, rank: usize, task: usize) -> Result<()> {
        let r = &mut self.ranks[rank];
        let lane = r.tasks[task].lane as usize;
        r.spans[task].1 = self.now;
        r.busy[lane] = false;
        r.lanes[lane].1 += 1;
        self.advance(rank)
    }

    /// Posts the messages of a task; without messages the task has ended.
    fn post(&mut self, rank: usize, task: usize) -> Result<()> {
        let messages = &self.ranks[rank].tasks[task].messages;
        if messages.is_empty() {
            return self.complete(rank, task);
        }
        self.ranks[rank].open = messages.len();
        for m in messages {
            let flight = if m.send {
                Flight { from: rank, to: m.peer, bytes: m.bytes }
            } else {
                Flight { from: m.peer, to: rank, bytes: m.bytes }
            };
            let key = (flight.from, flight.to);
            match self.posted.remove(&key) {
                None => drop(self.posted.insert(key, (m.send, m.bytes))),
                Some((send, bytes)) if send != m.send && bytes == m.bytes => {
                    let latency = self.machine.link(self.machine.level(flight.from, flight.to)).latency;
                    let job = self.resources.begin(self.now, latency, 1.0, &[]);
                    self.keep(job, JobPart::Latency(flight));
                }
                Some((_, bytes)) => {
                    let Flight { from, to, .. } = flight;
                    let flaw = format!("{} bytes from {from} to {to} are {bytes} at the other end", m.bytes);
                    return Err(Error::Schedule { rank, operation: task, flaw });
                }
            }
        }
        Ok(())
    }

    /// The latency is over: the bytes move.
    fn transfer(&mut self, flight: Flight) {
        let (machine, bytes) = (self.machine, flight.bytes as f64);
        let has_cores = !self.shared.cores.is_empty();
        let (used, copies) = match machine.level(flight.from, flight.to) {
            Level::Inside if has_cores => (None, [Some((flight.to, bytes / machine.inside.rate)), None]),
            Level::Inside => (Some([self.shared.ports[flight.from][0], self.shared.ports[flight.to][1]]), [None; 2]),
            Level::Between => {
                let card = |rank| self.shared.cards[machine.card(rank)];
                let half = bytes * machine.between_work / 2.0;
                let copies = [flight.from, flight.to].map(|rank| (half > 0.0).then_some((rank, half)));
                (Some([card(flight.from)[0], card(flight.to)[1]]), copies)
            }
        };
        let copies = copies.into_iter().flatten();
        let jobs = copies.clone().count() + usize::from(used.is_some());
        self.under_way.insert((flight.from, flight.to), jobs);
        if let Some(used) = used {
            let left = bytes - self.at_once(flight);
            let job = self.resources.begin(self.now, left, f64::INFINITY, &used);
            self.keep(job, JobPart::Bytes(flight));
        }
        for (rank, seconds) in copies {
            self.ranks[rank].copies.push_back((flight, seconds));
            self.copy(rank);
        }
    }

    /// The bytes of a message that both cards' buckets let pass at once.
    fn at_once(&mut self, flight: Flight) -> f64 {
        let machine = self.machine;
        if machine.between_burst == 0.0 || machine.level(flight.from, flight.to) == Level::Inside {
            return 0.0;
        }
        let ways = [(machine.card(flight.from), 0), (machine.card(flight.to), 1)];
        let filled = ways.map(|(card, way)| {
            let passed = self.resources.passed(self.now, self.shared.cards[card][way]);
            self.shared.buckets[card][way].fill(self.now, passed)
        });
        let bytes = filled[0].min(filled[1]).min(flight.bytes as f64);
        ways.iter().for_each(|&(card, way)| self.shared.buckets[card][way].take(bytes));
        bytes
    }

    /// Begins the next copy of a rank, unless one is in progress.
    fn copy(&mut self, rank: usize) {
        let r = &mut self.ranks[rank];
        if r.copying {
            return;
        }
        if let Some((flight, seconds)) = r.copies.pop_front() {
            r.copying = true;
            self.compute(rank, seconds, JobPart::Copy(flight, rank));
        }
    }

    /// One job of a message has ended.
    fn arrived(&mut self, flight: Flight) -> Result<()> {
        let key = (flight.from, flight.to);
        let left = self.under_way.get_mut(&key).expect("a message under way");
        *left -= 1;
        if *left > 0 {
            return Ok(());
        }
        self.under_way.remove(&key);
        for rank in [flight.from, flight.to] {
            let r = &mut self.ranks[rank];
            r.open -= 1;
            if r.open == 0 {
                let (list, done) = &r.lanes[Lane::Communication as usize];
                let task = list[*done];
                self.complete(rank, task)?;
            }
        }
        Ok(())
    }
}
