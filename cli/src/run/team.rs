// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks as threads that live as long as the team.
//!
//! Copy this part into your own program: each thread owns a [`Rank`], takes its tokens out of the batch, runs forward
//! and backward, and returns its part. A rank outlives its plans, so a team runs many plans, one after another.

use cpattn::Fault;
use std::{
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use cpattn::{
    Backward, Cause, Element, Error, Forward, Plan, Rank, Side, View, ViewMut,
    report::trace::Event,
    schedule::{Direction, Schedule},
    transport::local,
};

/// The whole batch's inputs: compact `[tokens, heads, dim]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Inputs<T> {
    pub q: Vec<T>,
    pub k: Vec<T>,
    pub v: Vec<T>,
    pub d_o: Vec<T>,
    pub sinks: Option<Vec<f32>>,
}

/// The whole batch's results, tokens in the order of the batch; lse is `[tokens, heads]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Results<T: Element> {
    pub o: Vec<T>,
    pub lse: Vec<T::Acc>,
    pub dq: Vec<T>,
    pub dk: Vec<T>,
    pub dv: Vec<T>,
    pub dsinks: Vec<T::Acc>,
}

/// Wall times of one rank in one repeat, and what its lanes did meanwhile.
#[derive(Clone, Debug)]
pub struct Lap {
    pub direction: Direction,
    pub wall: Duration,
    pub events: Vec<Event>,
}

/// How to run.
#[derive(Clone)]
pub struct How {
    /// Times forward and backward are run; results are those of the last.
    pub repeat: usize,
    /// Record what the lanes do.
    pub record: bool,
    /// Called by every rank after each direction.
    pub tick: Arc<dyn Fn() + Send + Sync>,
}

/// What a run gives.
pub struct Outcome<T: Element> {
    /// One for each replica.
    pub results: Vec<Results<T>>,
    /// By rank: forward and backward of each repeat.
    pub laps: Vec<Vec<Lap>>,
    /// By rank: the time that writing the schedules took.
    pub planning: Vec<Duration>,
}

/// One rank's part of it.
pub struct Part<T: Element> {
    pub results: Results<T>,
    pub laps: Vec<Lap>,
    pub planning: Duration,
}

type Task = Box<dyn FnOnce(&mut Rank) + Send>;

/// Threads with a rank each.
pub struct Team {
    tasks: Vec<mpsc::Sender<Task>>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Team {
    fn drop(&mut self) {
        self.tasks.clear();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so where its part was missed.
            let _ = thread.join();
        }
    }
}

impl Team {
    pub fn new(world: usize, deadline: Duration) -> Result<Self, String> {
        let mut team = Self { tasks: Vec::new(), threads: Vec::new() };
        for transport in local::group(world, deadline).map_err(|e| e.to_string())? {
            let (task, tasks) = mpsc::channel::<Task>();
            let thread = std::thread::Builder::new()
                .name(format!("rank-{}", team.threads.len()))
                .spawn(move || {
                    let mut rank = Rank::new(transport);
                    tasks.into_iter().for_each(|task| task(&mut rank));
                })
                .map_err(|e| format!("cannot start a thread for rank {} of {world}: {e}", team.threads.len()))?;
            team.tasks.push(task);
            team.threads.push(thread);
        }
        Ok(team)
    }

    /// Forward and backward of `plan`, whose world must be the team's. After an error the team is spent.
    pub fn run<T: Element>(&self, plan: &Plan, inputs: &Arc<Inputs<T>>, how: &How) -> Result<Outcome<T>, String> {
        plan.fits_world(self.tasks.len()).map_err(|e| e.to_string())?;
        let (done, parts) = mpsc::channel();
        let epoch = Instant::now();
        for task in &self.tasks {
            let (plan, inputs, how, done) = (plan.clone(), Arc::clone(inputs), how.clone(), done.clone());
            let work = move |rank: &mut Rank| {
                let part = part(rank, &plan, &inputs, &how, epoch);
                // Nothing receives any more once a rank has failed.
                let _ = done.send((rank.rank(), part));
            };
            // A thread that has ended is noticed below: its part is missing.
            let _ = task.send(Box::new(work));
        }
        drop(done);
        let mut all: Vec<Option<Part<T>>> = self.tasks.iter().map(|_| None).collect();
        let mut errors = Vec::new();
        for (rank, part) in parts {
            match part {
                Ok(part) => all[rank] = Some(part),
                Err(e) => errors.push((rank, e)),
            }
        }
        // An error that refers to that of another rank explains nothing by itself.
        let refers = |e: &Error| {
            matches!(e, Error::Peer { fault: Fault::One { cause: Cause::Failed | Cause::Disagreed { .. }, .. }, .. })
        };
        if let Some((_, error)) = errors.into_iter().min_by_key(|(rank, e)| (refers(e), *rank)) {
            return Err(error.to_string());
        }
        let mut whole: Vec<_> = (0..plan.mesh().replicas).map(|_| Results::unwritten(plan)).collect();
        let (mut laps, mut planning) = (Vec::new(), Vec::new());
        for (rank, part) in all.into_iter().enumerate() {
            let part = part.ok_or_else(|| format!("rank {rank} panicked"))?;
            let into = &mut whole[plan.mesh().coordinates(rank).replica];
            into.put(plan, rank, &part.results).map_err(|e| e.to_string())?;
            laps.push(part.laps);
            planning.push(part.planning);
        }
        Ok(Outcome { results: whole, laps, planning })
    }
}

impl<T: Element> Results<T> {
    /// NaN everywhere: a row that no rank writes must show.
    pub fn unwritten(plan: &Plan) -> Self {
        let p = plan.problem();
        let (nq, nk) = (p.batch().tokens(Side::Q), p.batch().tokens(Side::K));
        Self::nan(nq, nk, p)
    }

    /// Whether all bits are equal, those of NaN too.
    pub fn same_bits(&self, other: &Self) -> bool {
        fn same<E: bytemuck::Pod>(a: &[E], b: &[E]) -> bool {
            bytemuck::cast_slice::<E, u8>(a) == bytemuck::cast_slice::<E, u8>(b)
        }
        same(&self.o, &other.o)
            && same(&self.lse, &other.lse)
            && same(&self.dq, &other.dq)
            && same(&self.dk, &other.dk)
            && same(&self.dv, &other.dv)
            && same(&self.dsinks, &other.dsinks)
    }

    /// FNV-1a of all bits: equal results have equal hashes, on every machine.
    pub fn hash(&self) -> u64 {
        let of = |n: u64, bytes: &[u8]| bytes.iter().fold(n, |n, &b| (n ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let Self { o, lse, dq, dk, dv, dsinks } = self;
        [o, dq, dk, dv].into_iter().fold(
            of(of(0xcbf2_9ce4_8422_2325, bytemuck::cast_slice(lse)), bytemuck::cast_slice(dsinks)),
            |n, tensor| of(n, bytemuck::cast_slice(tensor)),
        )
    }

    fn nan(nq: usize, nk: usize, p: &cpattn::Problem) -> Self {
        let (nan, acc) = (T::from_f64(f64::NAN), T::Acc::from_f64(f64::NAN));
        Self {
            o: vec![nan; nq * p.heads() * p.value_dim()],
            lse: vec![acc; nq * p.heads()],
            dq: vec![nan; nq * p.heads() * p.head_dim()],
            dk: vec![nan; nk * p.kv_heads() * p.head_dim()],
            dv: vec![nan; nk * p.kv_heads() * p.value_dim()],
            dsinks: vec![acc; if p.sinks() { p.heads() } else { 0 }],
        }
    }

    pub fn put(&mut self, plan: &Plan, rank: usize, part: &Self) -> cpattn::Result<()> {
        let p = plan.problem();
        plan.local_tokens(Side::Q, rank).unshard_into(&part.o, &mut self.o, p.heads() * p.value_dim())?;
        plan.local_tokens(Side::Q, rank).unshard_into(&part.lse, &mut self.lse, p.heads())?;
        plan.local_tokens(Side::Q, rank).unshard_into(&part.dq, &mut self.dq, p.heads() * p.head_dim())?;
        plan.local_tokens(Side::K, rank).unshard_into(&part.dk, &mut self.dk, p.kv_heads() * p.head_dim())?;
        plan.local_tokens(Side::K, rank).unshard_into(&part.dv, &mut self.dv, p.kv_heads() * p.value_dim())?;
        // All ranks of a group have the same sum.
        self.dsinks.copy_from_slice(&part.dsinks);
        Ok(())
    }
}

/// What one rank does, be it a thread or a process.
pub fn part<T: Element>(
    rank: &mut Rank,
    plan: &Plan,
    inputs: &Inputs<T>,
    how: &How,
    epoch: Instant,
) -> cpattn::Result<Part<T>> {
    let (p, r) = (plan.problem(), rank.rank());
    let (heads, kv_heads, d, dv) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim());
    let (nq, nk) = (plan.local_tokens(Side::Q, r).len(), plan.local_tokens(Side::K, r).len());

    // This rank's tokens of the batch.
    let q = plan.local_tokens(Side::Q, r).shard(&inputs.q, heads * d)?;
    let k = plan.local_tokens(Side::K, r).shard(&inputs.k, kv_heads * d)?;
    let v = plan.local_tokens(Side::K, r).shard(&inputs.v, kv_heads * dv)?;
    let d_o = plan.local_tokens(Side::Q, r).shard(&inputs.d_o, heads * dv)?;
    let sinks = inputs.sinks.as_deref();
    let mut out = Results::<T>::nan(nq, nk, p);

    let began = Instant::now();
    rank.prepare(plan, Direction::Forward)?;
    rank.prepare(plan, Direction::Backward)?;
    let planning = began.elapsed();
    let operations = if how.record {
        Schedule::new(plan, r, Direction::Forward)?
            .operations()
            .len()
            .max(Schedule::new(plan, r, Direction::Backward)?.operations().len())
    } else {
        0
    };
    rank.trace().record(epoch, operations)?;

    let (q, k) = (View::new(&q, nq, heads, d)?, View::new(&k, nk, kv_heads, d)?);
    let v = View::new(&v, nk, kv_heads, dv)?;
    let d_o = View::new(&d_o, nq, heads, dv)?;
    let mut laps = Vec::with_capacity(2 * how.repeat);
    for _ in 0..how.repeat {
        let began = Instant::now();
        let forward =
            Forward::new(q, k, v, ViewMut::new(&mut out.o, nq, heads, dv)?, ViewMut::new(&mut out.lse, nq, heads, 1)?)
                .sinks(sinks);
        rank.forward(plan, forward)?;
        laps.push(Lap { direction: Direction::Forward, wall: began.elapsed(), events: rank.trace().events() });
        (how.tick)();

        let began = Instant::now();
        let backward = Backward::new(
            q,
            k,
            v,
            View::new(&out.o, nq, heads, dv)?,
            View::new(&out.lse, nq, heads, 1)?,
            d_o,
            [
                ViewMut::new(&mut out.dq, nq, heads, d)?,
                ViewMut::new(&mut out.dk, nk, kv_heads, d)?,
                ViewMut::new(&mut out.dv, nk, kv_heads, dv)?,
            ],
        )
        .sinks(sinks)
        .dsinks(sinks.map(|_| out.dsinks.as_mut_slice()));
        rank.backward(plan, backward)?;
        laps.push(Lap { direction: Direction::Backward, wall: began.elapsed(), events: rank.trace().events() });
        (how.tick)();
    }
    rank.trace().record(epoch, 0)?;
    Ok(Part { results: out, laps, planning })
}
