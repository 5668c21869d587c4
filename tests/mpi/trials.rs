// SPDX-License-Identifier: MIT OR Apache-2.0
//! Many jobs in which one process goes wrong, at a moment drawn from a seed: `-- --trials 1000 --seed 1`.
//!
//! Four ranks run a plan again and again. One of them is killed, is stopped for good or for a while, never makes its
//! transport, leaves in good order, or goes over to another plan. Each of the others must end with an error that names
//! it, after nothing but right results; so must one that was stopped for a while, or all of them end well. No job may
//! outlast its limit or leave a process behind.

use std::{
    env, fs,
    path::Path,
    process::{self, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use cpattn::transport::{local, mpi::Mpi};
use cpattn::{
    Batch, Cause, Dtype, Error, Fault, Forward, Layout, Mesh, Plan, Problem, Rank, Result, Side, View, ViewMut,
};

use crate::{
    exchange::init,
    launch::{FINE, ROLE, mpirun, reader, wait},
};

const WORLD: usize = 4;
const RUNS: usize = 40;
const DEADLINE: Duration = Duration::from_millis(2000);
/// No job takes that long, of processes that wait for a core among them.
const LIMIT: Duration = Duration::from_secs(180);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Killed,
    Stopped,
    Paused,
    NeverStarts,
    Leaves,
    AnotherPlan,
}

/// What a seed says: what happens to whom, in which run, how far into it.
fn draw(seed: u64) -> (Act, usize, usize, Duration) {
    let mut r = fastrand::Rng::with_seed(seed);
    let all = [Act::Killed, Act::Stopped, Act::Paused, Act::NeverStarts, Act::Leaves, Act::AnotherPlan];
    let act = all[r.usize(..all.len())];
    (act, r.usize(..WORLD), r.usize(..RUNS - 10), Duration::from_micros(r.u64(..5000)))
}

fn plan(layout: Layout) -> Plan {
    let problem = Problem::new(Batch::from_lengths(&[190, 66]).unwrap(), 4, 2, 16, Dtype::F32);
    Plan::new(&problem, Mesh { replicas: 1, ring: 2, ulysses: 2 }.in_world(WORLD).unwrap(), layout).unwrap()
}

/// o of this rank, of a plan of 256 tokens.
pub fn forward(rank: &mut Rank, plan: &Plan) -> Result<Vec<u32>> {
    let (r, mut random) = (rank.rank(), fastrand::Rng::with_seed(3));
    let mut tensor = |side, heads: usize| {
        let all: Vec<f32> = (0..256 * heads * 16).map(|_| random.f32() - 0.5).collect();
        plan.local_tokens(side, r).shard(&all, heads * 16).unwrap()
    };
    let (q, k, v) = (tensor(Side::Q, 4), tensor(Side::K, 2), tensor(Side::K, 2));
    let n = plan.local_tokens(Side::Q, r).len();
    let (mut o, mut lse) = (vec![f32::NAN; n * 64], vec![f32::NAN; n * 4]);
    rank.forward(
        plan,
        Forward::new(
            View::new(&q, n, 4, 16)?,
            View::new(&k, n, 2, 16)?,
            View::new(&v, n, 2, 16)?,
            ViewMut::new(&mut o, n, 4, 16)?,
            ViewMut::new(&mut lse, n, 4, 1)?,
        ),
    )?;
    Ok(o.into_iter().map(f32::to_bits).collect())
}

/// Has a shell of its own do something to this process.
pub fn do_to_me(script: &str) {
    let script = script.replace("ME", &process::id().to_string());
    // Not ours to wait for; and nothing of it may keep the job's pipes open.
    let _ = Command::new("sh").args(["-c", &script]).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
}

/// Plays one rank.
pub fn rank(seed: u64) -> ! {
    let (act, culprit, at, after) = draw(seed);
    let (universe, comm) = init();
    let me = mpi::traits::Communicator::rank(&comm) as usize;
    let plan = plan(Layout::Zigzag);
    let threads: Vec<_> = local::group(WORLD, LIMIT)
        .unwrap()
        .into_iter()
        .map(|end| {
            let plan = plan.clone();
            thread::spawn(move || forward(&mut Rank::new(end), &plan).unwrap())
        })
        .collect();
    let want = threads.into_iter().map(|t| t.join().unwrap()).nth(me).unwrap();
    if me == culprit && act == Act::NeverStarts {
        thread::sleep(DEADLINE * 3);
        process::exit(3);
    }
    let mut found = None;
    // On a busy machine processes start seconds apart; only who waits in vain may lose patience with that.
    match Mpi::new(&comm, if act == Act::NeverStarts { DEADLINE } else { LIMIT / 2 }) {
        Err(error) => found = Some((0, error)),
        Ok(end) => {
            end.set_deadline(DEADLINE);
            let mut rank = Rank::new(end);
            for run in 0..RUNS {
                let now = me == culprit && run == at;
                match act {
                    Act::Killed if now => {
                        thread::spawn(move || {
                            thread::sleep(after);
                            do_to_me("kill -9 ME");
                        });
                    }
                    Act::Stopped if now => {
                        thread::spawn(move || {
                            thread::sleep(after);
                            // Ended when the others have long had their errors. MPICH's launcher signals the whole
                            // group.
                            do_to_me("trap '' USR1 TERM; kill -STOP ME; sleep 10; kill -9 ME");
                        });
                    }
                    Act::Paused if now => {
                        // For less than the deadline, about as long, or until the others have given up.
                        let part = fastrand::Rng::with_seed(!seed).f64() * 2.3 + 0.3;
                        let asleep = DEADLINE.as_secs_f64() * part;
                        thread::spawn(move || {
                            thread::sleep(after);
                            // Whatever MPICH's launcher signals to the whole group when another process ends.
                            do_to_me(&format!("trap '' USR1 TERM; kill -STOP ME; sleep {asleep}; kill -CONT ME"));
                        });
                    }
                    Act::Leaves if now => {
                        drop(rank);
                        thread::sleep(DEADLINE);
                        process::exit(3);
                    }
                    Act::AnotherPlan if me == culprit && run >= at => {
                        if let Err(error) = forward(&mut rank, &self::plan(Layout::Contiguous)) {
                            found = Some((run, error));
                            break;
                        }
                        continue;
                    }
                    _ => {}
                }
                // The others have to be in the middle of it when it happens.
                if me == culprit && run > at {
                    thread::sleep(Duration::from_millis(20));
                }
                match forward(&mut rank, &plan) {
                    Ok(got) => assert!(got == want, "run {run} has other bits"),
                    Err(error) => {
                        found = Some((run, error));
                        break;
                    }
                }
            }
            std::mem::forget(rank);
        }
    }
    match found {
        Some((run, error)) => {
            let right = match (&error, act) {
                (
                    Error::Peer { fault: Fault::One { peer, cause: Cause::Absent { others: 0, .. } }, .. },
                    Act::NeverStarts,
                ) => *peer == culprit,
                (Error::Disagreement { .. }, Act::AnotherPlan) => true,
                // One agrees on a new plan while others exchange for the old one: each names one on the other side. A
                // process that got no core in time to say for whom it waits has missed the deadline, and names itself.
                (Error::Peer { fault: Fault::One { peer, cause: Cause::Disagreed { .. } }, .. }, Act::AnotherPlan) => {
                    (*peer == culprit) != (me == culprit)
                }
                (Error::Peer { fault: Fault::One { peer, cause: Cause::Deadline { .. } }, .. }, Act::AnotherPlan) => {
                    *peer == culprit || me == culprit
                }
                (Error::Peer { fault: Fault::One { peer, .. }, .. }, Act::Killed | Act::Stopped | Act::Paused) => {
                    *peer == culprit
                }
                (Error::Peer { fault: Fault::One { peer, cause: Cause::Left }, .. }, Act::Leaves) => *peer == culprit,
                _ => false,
            };
            println!("{} {run} {error}", if right { FINE } else { "WRONG" });
        }
        None if act == Act::Paused => {
            println!("{FINE} all runs ended well");
            // Until it goes on, which would miss this process.
            thread::sleep(DEADLINE * 3);
        }
        None => println!("WRONG: all runs ended well"),
    }
    // Others may still want to hear from this one.
    thread::sleep(Duration::from_millis(400));
    std::mem::forget(universe);
    process::exit(3);
}

/// Processes of this program beside this one.
fn left_behind(program: &Path) -> usize {
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let other = |e: &fs::DirEntry| e.file_name().to_string_lossy().parse::<u32>().is_ok_and(|pid| pid != process::id());
    all.filter(other).filter(|e| fs::read_link(e.path().join("exe")).is_ok_and(|exe| exe == program)).count()
}

/// Plays that many jobs and prints a table; whether all went as they should.
pub fn all(count: u64, seed: u64) -> bool {
    let program = env::current_exe().expect("this program");
    println!("{:>6}  {:12}{:>8}{:>5}{:>9}  outcome", "seed", "what", "culprit", "run", "seconds");
    let mut failed = 0;
    for seed in seed..seed + count {
        let (act, culprit, run, _) = draw(seed);
        let began = Instant::now();
        let mut child = mpirun(WORLD, true, &program)
            .env(ROLE, format!("trial {seed}"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("mpirun starts");
        let texts = [reader(child.stdout.take().expect("piped")), reader(child.stderr.take().expect("piped"))];
        let ended = wait(&mut child, LIMIT).is_some();
        let took = began.elapsed();
        let [out, err] = texts.map(|text| text.join().expect("a reader"));
        // A killed process's last writes may follow its launcher's end by a moment.
        let mut left = left_behind(&program);
        for _ in 0..50 {
            if left == 0 {
                break;
            }
            thread::sleep(Duration::from_millis(100));
            left = left_behind(&program);
        }
        let fine = out.matches(FINE).count();
        let wanted = if matches!(act, Act::AnotherPlan | Act::Paused) { WORLD } else { WORLD - 1 };
        let ended_well = out.matches("all runs ended well").count();
        let right = [0, WORLD].contains(&ended_well)
            && ended
            && left == 0
            && fine == wanted
            && !out.contains("WRONG")
            && !err.contains("panicked");
        failed += u64::from(!right);
        let said = out.lines().find_map(|l| l.strip_prefix(FINE)).unwrap_or("").trim();
        let verdict = if right { said } else { "FAILED" };
        println!("{seed:>6}  {:12}{culprit:>8}{run:>5}{:>9.1}  {verdict:.150}", format!("{act:?}"), took.as_secs_f64());
        if !right {
            println!("ended {ended}, {fine} of {wanted} as expected, {left} left behind\n{out}{err}");
        }
    }
    println!("{count} trials, {failed} failed");
    failed == 0
}
