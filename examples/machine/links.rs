// SPDX-License-Identifier: MIT OR Apache-2.0
//! Links between ranks that are threads, and what an operation takes beside its work.

use std::{
    sync::Barrier,
    time::{Duration, Instant},
};

use cpattn::{
    Batch, Dtype, Error, Layout, Mesh, Plan, Problem, Rank, Result,
    machine::LinkRate,
    schedule::{Direction, Schedule},
    transport::{local, ring_check::RingFault},
};

use crate::cases::Tensors;

pub const DEADLINE: Duration = Duration::from_secs(120);

/// The shortest latency and the highest rate of the links of two ranks.
pub fn link(rounds: usize) -> Result<LinkRate> {
    let ends = local::run(2, DEADLINE, |end| {
        let mut rank = Rank::new(end);
        let mut best = LinkRate { latency: f64::INFINITY, rate: 0.0 };
        for _ in 0..rounds {
            let links = rank.check_ring(1 << 19).map_err(|fault| match fault {
                RingFault::Failed { error, .. } => error,
                fault => Error::Unsupported { option: "links".into(), limit: fault.to_string(), hint: "" },
            })?;
            for l in links {
                best.latency = best.latency.min(l.latency.as_secs_f64());
                best.rate = best.rate.max(l.bytes_per_second);
            }
        }
        Ok(best)
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
