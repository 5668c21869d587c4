// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank's part of the measurement, over any transport.

use std::{fmt::Write as _, time::Instant};

use cpattn::{
    Batch, Dtype, Layout, Mesh, Plan, Problem, Rank, Result, Side,
    call::RawTensor,
    runtime::Bindings,
    schedule::{Direction, TensorId},
    transport::{Label, Message, Transport},
};

use crate::{
    Options,
    median::median,
    tap::{Mode, Tap, tap},
};

const HEADS: usize = 8;
const HEAD_DIM: usize = 128;

const PHASES: [&str; 3] = ["attention", "exchanges", "both"];

/// CPU seconds used by all threads of this process so far.
pub fn cpu() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    let seconds = tasks.flatten().filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    seconds.sum::<f64>() * 1e-9
}

/// The tensors of a rank's own tokens. Inputs are random; o and lse are too, until a forward writes them.
struct Tensors {
    bindings: Bindings,
    // The memory that the bindings point to.
    memory: Vec<Vec<f32>>,
}

impl Tensors {
    fn new(plan: &Plan, rank: usize) -> Self {
        use TensorId::{DO, Dk, Dq, Dv, K, Lse, O, Q, V};
        let n = plan.local_tokens(Side::Q, rank).len();
        let mut random = fastrand::Rng::with_seed(rank as u64);
        let (mut bindings, mut memory) = (Bindings::default(), Vec::new());
        for tensor in [Q, K, V, O, Lse, DO, Dq, Dk, Dv] {
            let dim = if tensor == Lse { 1 } else { HEAD_DIM };
            let mut values: Vec<f32> = (0..n * HEADS * dim).map(|_| random.f32() - 0.5).collect();
            let ptr = values.as_mut_ptr().cast();
            bindings.set(tensor, RawTensor::compact(ptr, Dtype::F32, n as u64, HEADS as u32, dim as u32));
            memory.push(values);
        }
        Self { bindings, memory }
    }

    /// Hash of the results' bits.
    fn bits(&self) -> u64 {
        let all = self.memory.iter().flatten();
        all.fold(0, |n, x| (n ^ u64::from(x.to_bits())).wrapping_mul(0x0100_0000_01b3))
    }
}

/// Wall time of this rank, and CPU time: of attention, of exchanges, and of both.
type Round = [[f64; 2]; 3];

/// Rounds of one plan and direction on this rank; also the number of exchanges, and the bytes it sends in them.
fn measure<T: Transport + 'static>(
    rank: &mut Rank,
    tap: &Tap<T>,
    (plan, direction): (&Plan, Direction),
    tensors: &Tensors,
    counts: bool,
    rounds: usize,
) -> Result<(Vec<Round>, (usize, usize))> {
    let all_ranks = 0..tap.world();
    // SAFETY: the tensors are the bench's own, of the plan's shapes, and live longer than the rank.
    let run = |rank: &mut Rank| unsafe { rank.run(plan, direction, &tensors.bindings) };
    tap.set(Mode::Record);
    run(rank)?;
    let want = tensors.bits();
    let mut all = Vec::new();
    for _ in 0..rounds {
        let mut round = Round::default();
        for (phase, times) in round.iter_mut().enumerate() {
            tap.set(if phase == 0 { Mode::Hold } else { Mode::Through });
            tap.agree(all_ranks.clone(), phase as u64)?;
            let (wall, spent) = (Instant::now(), cpu());
            if phase == 1 {
                // SAFETY: the rank is in no run, its last was of this plan, and its tensors are alive.
                unsafe { tap.again() }?;
            } else {
                run(rank)?;
            }
            let wall = wall.elapsed().as_secs_f64();
            tap.agree(all_ranks.clone(), phase as u64)?;
            *times = [wall, if counts { cpu() - spent } else { 0.0 }];
        }
        assert_eq!(tensors.bits(), want, "a run has other bits than the first one");
        all.push(round);
    }
    Ok((all, tap.written()))
}

/// Collects every rank's rounds on rank 0: wall times of the slowest rank, sums of CPU times.
fn gather<T: Transport>(tap: &Tap<T>, mine: &[Round]) -> Result<Vec<Round>> {
    let mut all: Vec<Vec<Round>> = vec![mine.to_vec(); tap.world()];
    let message = |peer, rounds: &mut Vec<Round>| Message {
        peer,
        ptr: rounds.as_mut_ptr().cast(),
        bytes: size_of_val(rounds.as_slice()),
    };
    let label = Label::new("gather", 0);
    let (first, others) = all.split_first_mut().expect("a rank");
    let lists = if tap.rank() == 0 {
        (vec![], others.iter_mut().enumerate().map(|(i, r)| message(i + 1, r)).collect())
    } else {
        (vec![message(0, first)], vec![])
    };
    // SAFETY: vectors of this function, each listed once.
    unsafe { tap.exchange(label, &lists.0, &lists.1) }?;
    let mut whole = mine.to_vec();
    for other in &all[1..] {
        for (to, from) in whole.iter_mut().flatten().zip(other.iter().flatten()) {
            *to = [to[0].max(from[0]), to[1] + from[1]];
        }
    }
    Ok(whole)
}

/// The figures of a case as a JSON object.
fn json(name: &str, (mesh, direction): (&str, Direction), rounds: &[Round], (count, bytes): (usize, usize)) -> String {
    let of = |f: &dyn Fn(&Round) -> f64| median(rounds.iter().map(f).collect());
    let mut text = format!(
        "{{\"transport\": \"{name}\", \"mesh\": \"{mesh}\", \"direction\": \"{}\", \"exchanges_of_rank_0\": {count}, \
         \"bytes_sent_by_rank_0\": {bytes}",
        format!("{direction:?}").to_lowercase()
    );
    for (i, phase) in PHASES.iter().enumerate() {
        let _ =
            write!(text, ", \"{phase}\": {{\"wall_s\": {:.6}, \"cpu_s\": {:.6}}}", of(&|r| r[i][0]), of(&|r| r[i][1]));
    }
    let _ = write!(
        text,
        ", \"exposed\": {{\"wall_s\": {:.6}, \"cpu_s\": {:.6}, \"wall_over_attention\": {:.4}, \"cpu_over_attention\": {:.4}}}}}",
        of(&|r| r[2][0] - r[0][0]),
        of(&|r| r[2][1] - r[0][1]),
        of(&|r| r[2][0] / r[0][0] - 1.0),
        of(&|r| r[2][1] / r[0][1] - 1.0)
    );
    text
}

/// Runs every case on this rank; `counts`: whether this rank reports the process's CPU time. Returns lines on rank 0.
pub fn all<T: Transport + 'static>(name: &str, end: T, counts: bool, options: Options) -> Vec<String> {
    let world = end.world();
    let tap = tap(end);
    let problem =
        Problem::new(Batch::from_lengths(&[options.tokens]).expect("a length"), HEADS, HEADS, HEAD_DIM, Dtype::F32);
    let mut lines = Vec::new();
    for (mesh, ulysses, ring, layout) in [("ring", 1, world, Layout::Zigzag), ("ulysses", world, 1, Layout::Contiguous)]
    {
        let plan = Plan::new(&problem, Mesh { replicas: 1, ring, ulysses }.in_world(world).expect("a mesh"), layout)
            .expect("a plan");
        let tensors = Tensors::new(&plan, tap.rank());
        let mut rank = Rank::new(tap.clone());
        for direction in [Direction::Forward, Direction::Backward] {
            let (mine, sent) = measure(&mut rank, &tap, (&plan, direction), &tensors, counts, options.rounds)
                .unwrap_or_else(|e| panic!("{e}"));
            let rounds = gather(&tap, &mine).unwrap_or_else(|e| panic!("{e}"));
            if tap.rank() == 0 {
                lines.push(json(name, (mesh, direction), &rounds, sent));
            }
        }
    }
    lines
}
