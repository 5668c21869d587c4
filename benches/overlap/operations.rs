// SPDX-License-Identifier: MIT OR Apache-2.0
//! The cost of an operation without its copy and its kernel: a plan of a few tokens, run thousands of times.
//!
//! With eight tokens a rank and one head of 16, kernels and copies take almost no time, so the measured time is that of
//! the runtime and the transport. The same runs over a transport that moves nothing (`tap.rs`) give the runtime alone;
//! the difference, divided by the exchanges, is the cost of an exchange. The time of kernels is measured in recorded
//! runs: the median time of each operation of the compute lane, which an interruption does not change. CPU time is that
//! of all ranks and all of their threads, so it hardly depends on other users of the machine; wall time includes waits
//! for a core. A real-time priority keeps other work away (`chrt -f 10 benches/overlap/run --operations 3000`).

use std::time::Instant;

use cpattn::{
    Batch, Dtype, Layout, Mesh, Plan, Problem, Rank, Result, Side,
    call::RawTensor,
    runtime::Bindings,
    schedule::{Direction, Lane, Schedule, TensorId},
    transport::{Label, Message, Transport},
};

use crate::{
    case::cpu,
    tap::{Mode, Tap, tap},
};

const DIM: usize = 16;

/// Microseconds of a run, as wall time and CPU time: with exchanges held back, with exchanges, and (twice) of kernels.
type Times = [[f64; 2]; 3];

/// The number of recorded runs.
const RECORDED: usize = 101;

fn measure<T: Transport + 'static>(tap: &Tap<T>, plan: &Plan, runs: usize, counts: bool) -> Result<Times> {
    use TensorId::{K, Lse, O, Q, V};
    let n = plan.local_tokens(Side::Q, tap.rank()).len();
    let mut memory = [DIM, DIM, DIM, DIM, 1].map(|dim| vec![0.5_f32; n * dim]);
    let mut tensors = Bindings::default();
    for (tensor, values) in [Q, K, V, O, Lse].into_iter().zip(&mut memory) {
        let dim = if tensor == Lse { 1 } else { DIM as u32 };
        tensors.set(tensor, RawTensor::compact(values.as_mut_ptr().cast(), Dtype::F32, n as u64, 1, dim));
    }
    let mut rank = Rank::new(tap.clone());
    // SAFETY: the tensors are of this function, of the plan's shapes, and live longer than the rank.
    let mut run = || unsafe { rank.run(plan, Direction::Forward, &tensors) };
    tap.set(Mode::Through);
    (0..20).try_for_each(|_| run())?;
    let mut times = Times::default();
    for (mode, time) in [Mode::Hold, Mode::Through].into_iter().zip(&mut times) {
        tap.agree(0..tap.world(), 1)?;
        let (clock, spent) = (Instant::now(), cpu());
        for _ in 0..runs {
            tap.set(mode);
            run()?;
        }
        let clock = clock.elapsed().as_secs_f64();
        tap.agree(0..tap.world(), 2)?;
        *time = [clock, if counts { cpu() - spent } else { 0.0 }].map(|t| t * 1e6 / runs as f64);
    }
    times[2] = [kernels(tap, &mut rank, plan, &tensors)?; 2];
    Ok(times)
}

/// Microseconds that the kernels of a run take, over a transport that moves nothing: the sum of each operation's
/// median.
fn kernels<T: Transport + 'static>(tap: &Tap<T>, rank: &mut Rank, plan: &Plan, tensors: &Bindings) -> Result<f64> {
    let mut all: Vec<Vec<u64>> = Vec::new();
    rank.trace().record(Instant::now(), 64)?;
    for _ in 0..RECORDED {
        tap.set(Mode::Hold);
        // SAFETY: the tensors are the caller's, of the plan's shapes, and outlive the rank.
        unsafe { rank.run(plan, Direction::Forward, tensors) }?;
        let events = rank.trace().events().into_iter().filter(|event| event.lane == Lane::Compute);
        for (at, event) in events.enumerate() {
            if at == all.len() {
                all.push(Vec::new());
            }
            all[at].push(event.end_ns - event.start_ns);
        }
    }
    rank.trace().record(Instant::now(), 0)?;
    tap.set(Mode::Through);
    let median = |times: &mut Vec<u64>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    Ok(all.iter_mut().map(median).sum::<u64>() as f64 * 1e-3)
}

/// Rank 0 receives the sum of all ranks' times.
fn sum<T: Transport>(tap: &Tap<T>, mine: Times) -> Result<Times> {
    let mut all = vec![mine; tap.world()];
    let message = |peer, times: &mut Times| Message { peer, ptr: times.as_mut_ptr().cast(), bytes: size_of::<Times>() };
    let (first, others) = all.split_first_mut().expect("a rank");
    let lists = if tap.rank() == 0 {
        (vec![], others.iter_mut().enumerate().map(|(i, t)| message(i + 1, t)).collect())
    } else {
        (vec![message(0, first)], vec![])
    };
    // SAFETY: a vector of this function, each entry listed once.
    unsafe { tap.exchange(Label::new("sum", 0), &lists.0, &lists.1) }?;
    Ok([0, 1, 2].map(|mode| [0, 1].map(|k| all.iter().map(|t| t[mode][k]).sum())))
}

/// The figures of each mesh as JSON objects, on rank 0.
pub fn all<T: Transport + 'static>(name: &str, end: T, counts: bool, runs: usize) -> Vec<String> {
    let (tap, mut lines) = (tap(end), Vec::new());
    let world = tap.world();
    let single = Problem::new(Batch::from_lengths(&[8 * world]).expect("a length"), 1, 1, DIM, Dtype::F32);
    let mesh = Mesh::ring(world).expect("a mesh");
    let plan = Plan::new(&single, mesh, Layout::Zigzag).expect("a plan");
    let of = |rank| Schedule::new(&plan, rank, Direction::Forward).expect("a schedule");
    let operations: usize = (0..world).map(|r| of(r).operations().len()).sum();
    let meets = |name: &str| ["exchange", "fetch", "return"].contains(&name);
    let exchanges: usize = (0..world).map(|r| of(r).operations().filter(|op| meets(op.name)).count()).sum();
    let mine = measure(&tap, &plan, runs, counts).unwrap_or_else(|e| panic!("{e}"));
    let [held, through, kernels] = sum(&tap, mine).unwrap_or_else(|e| panic!("{e}"));
    if tap.rank() == 0 {
        let (o, x) = (operations as f64, exchanges as f64);
        lines.push(format!(
            "{{\"transport\": \"{name}\", \"mesh\": \"ring\", \"operations\": {operations}, \"exchanges\": {exchanges}, \
             \"kernels_us_per_operation\": {:.3}, \"runtime_cpu_us_per_operation\": {:.3}, \"cpu_us_per_operation\": {:.3}, \
             \"beyond_kernels_cpu_us_per_operation\": {:.3}, \"cpu_us_per_exchange\": {:.3}, \"clock_us_per_operation\": {:.3}}}",
            kernels[0] / o,
            held[1] / o,
            through[1] / o,
            (through[1] - kernels[0]) / o,
            (through[1] - held[1]) / x,
            through[0] / o
        ));
    }
    lines
}
