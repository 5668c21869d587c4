// SPDX-License-Identifier: MIT OR Apache-2.0
//! Links between ranks, and what an operation takes beside its work.
//!
//! `check_ring` measures one link at a time: half a round trip of eight bytes, and large messages of some size. A link
//! between hosts may have a rate limit with a bucket (`tc tbf`), so it is measured with three sizes. One that is
//! smaller than the bucket takes what cores need for it; the difference of two larger ones takes the rate; and what the
//! smaller of these two took less than its bytes over that rate is the bucket.

use std::{
    sync::Barrier,
    time::{Duration, Instant},
};

use cpattn::{
    Batch, Dtype, Error, Layout, Mesh, Plan, Problem, Rank, Result,
    machine::LinkRate,
    schedule::{Direction, Schedule},
    transport::{
        local,
        ring_check::{Link, RingFault},
    },
};

use super::cases::Tensors;

pub const DEADLINE: Duration = Duration::from_secs(120);

/// Bytes of messages: of links inside a node, below the bucket of a rate limit, and twice above it.
const INSIDE: usize = 1 << 19;
const BELOW: usize = 1 << 17;
const ABOVE: [usize; 2] = [1 << 20, 3 << 20];

/// The best latency of the links of a level, and the shortest seconds of a message of one size without it.
#[derive(Clone, Copy)]
struct Shortest {
    latency: f64,
    seconds: f64,
}

impl Shortest {
    const NONE: Self = Self { latency: f64::INFINITY, seconds: f64::INFINITY };

    fn add(&mut self, link: &Link, bytes: usize) {
        self.latency = self.latency.min(link.latency.as_secs_f64());
        self.seconds = self.seconds.min(bytes as f64 / link.bytes_per_second);
    }
}

/// What was found of the links so far.
pub struct Links {
    node: usize,
    inside: Shortest,
    below: Shortest,
    above: [Shortest; 2],
}

impl Links {
    /// Of ranks of which `node` are on each node.
    pub fn new(node: usize) -> Self {
        Self { node, inside: Shortest::NONE, below: Shortest::NONE, above: [Shortest::NONE; 2] }
    }

    /// Measures every link again; `pause` waits until all ranks have come and buckets are full. Rank 0 has the figures.
    pub fn round(&mut self, rank: &mut Rank, mut pause: impl FnMut() -> Result<()>) -> Result<()> {
        let node = self.node;
        let is_inside = |link: &Link| link.from / node == link.to / node;
        let Self { inside, below, above: [first, second], .. } = self;
        let within: (usize, bool, &mut Shortest) = (INSIDE, true, inside);
        let between = [(BELOW, false, below), (ABOVE[0], false, first), (ABOVE[1], false, second)];
        let (inner, outer) = (node > 1, rank.world() > node);
        let within = std::iter::once(within).filter(|_| inner);
        for (bytes, level, shortest) in within.chain(between.into_iter().filter(|_| outer)) {
            pause()?;
            let links = rank.check_ring(bytes).map_err(|fault| match fault {
                RingFault::Failed { error, .. } => error,
                fault => Error::Unsupported { option: "links".into(), limit: fault.to_string(), hint: "" },
            })?;
            links.iter().filter(|link| is_inside(link) == level).for_each(|link| shortest.add(link, bytes));
        }
        Ok(())
    }

    /// Latency and rate inside a node. With one rank on each node there is no such link: as between nodes.
    pub fn inside(&self) -> Result<LinkRate> {
        if self.inside.seconds.is_infinite() {
            return self.limited().map(|(link, ..)| link);
        }
        Ok(self.within())
    }

    /// Between nodes: latency and rate, the bytes of the bucket, and seconds of cores for a byte. With one node, as
    /// inside, where a message is a copy.
    #[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "of processes"))]
    pub fn between(&self) -> Result<(LinkRate, f64, f64)> {
        if self.below.seconds.is_infinite() {
            return Ok((self.within(), 0.0, 0.0));
        }
        self.limited()
    }

    fn within(&self) -> LinkRate {
        LinkRate { latency: self.inside.latency, rate: INSIDE as f64 / self.inside.seconds }
    }

    fn limited(&self) -> Result<(LinkRate, f64, f64)> {
        let [first, second] = self.above.map(|s| s.seconds);
        let [less, more] = ABOVE.map(|bytes| bytes as f64);
        let longer = second - first;
        // Not a number where nothing was measured.
        if longer.is_nan() || longer <= 0.0 {
            return Err(Error::Invalid {
                argument: format!("the shortest time of {more} bytes between nodes"),
                found: format!("{second:e} s"),
                expected: format!("more than {first:e} s, that of {less} bytes"),
                hint: "more --rounds, on a machine that does nothing else",
            });
        }
        let rate = (more - less) / longer;
        let latency = self.above.iter().map(|s| s.latency).fold(self.below.latency, f64::min);
        let burst = (less - first * rate).max(0.0);
        Ok((LinkRate { latency, rate }, burst, self.below.seconds / BELOW as f64))
    }
}

/// The links of two ranks that are threads.
pub fn of_threads(rounds: usize) -> Result<LinkRate> {
    let ends = local::run(2, DEADLINE, |end| {
        let (mut rank, mut links) = (Rank::new(end), Links::new(2));
        (0..rounds).try_for_each(|_| links.round(&mut rank, || Ok(())))?;
        links.inside()
    })?;
    Ok(ends[0])
}

/// Seconds of an operation: those of a run of two ranks on next to no tokens, over the operations of one of them.
pub fn operation(rounds: usize) -> Result<f64> {
    let problem = Problem::new(Batch::from_lengths(&[8])?, 2, 2, 16, Dtype::F32);
    let plan = Plan::new(&problem, Mesh::ulysses(2)?, Layout::Contiguous)?;
    let operations = Schedule::new(&plan, 0, Direction::Forward)?.operations().len();
    let barrier = Barrier::new(2);
    let times = local::run(2, DEADLINE, |end| {
        let mut rank = Rank::new(end);
        let tensors = Tensors::new(&plan, rank.rank(), Direction::Forward);
        let mut best = f64::INFINITY;
        for _ in 0..rounds {
            barrier.wait();
            let start = Instant::now();
            // SAFETY: the tensors are this function's, of the plan's shapes, and live longer than the rank.
            unsafe { rank.run(&plan, Direction::Forward, &tensors.bindings) }?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best)
    })?;
    Ok(times[0].max(times[1]) / operations as f64)
}
