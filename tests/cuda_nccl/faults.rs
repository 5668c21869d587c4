// SPDX-License-Identifier: MIT OR Apache-2.0
//! What goes wrong between ranks: each rank gets an error that says what it was doing, streams go on, and nothing is left.
//!
//! Ranks pass bytes round a ring, without kernels. What a real engine and real signals can do is tested on processes; what only the
//! stand-in can be asked for (`CPATTN_NCCL_FAULT`) is tested where the loader finds the stand-in.

use std::{
    path::Path,
    process::{Child, Command},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cpattn::{
    Cause, Error, Rank, Result,
    kernel::cuda::{Cuda, DeviceMemory},
    schedule::Direction,
    transport::{
        DeviceTransport, Label, Message, Transport,
        nccl::{Nccl, UniqueId},
    },
};

use crate::{
    group::{Folder, LONG, devices, finish, process, threads},
    work,
};

const DEADLINE: Duration = Duration::from_millis(400);
/// What a test allows beyond a deadline, on a machine that does other things too.
const SLACK: Duration = Duration::from_secs(30);
const BYTES: usize = 4096;

/// A rank that passes bytes on.
struct Ring {
    end: Nccl,
    from: DeviceMemory,
    to: DeviceMemory,
}

impl Ring {
    fn new(end: Nccl) -> Self {
        let [from, to] = [(); 2].map(|()| end.device().allocate(BYTES).unwrap());
        from.upload(&[end.rank() as u8 + 1; BYTES]).unwrap();
        Self { end, from, to }
    }

    fn message(peer: usize, memory: &DeviceMemory, bytes: usize) -> Message {
        Message { peer, ptr: memory.ptr(), bytes }
    }

    /// Enqueues a step of so many bytes each way.
    fn step(&self, step: u32, sent: usize, received: usize) -> Result<()> {
        let (rank, world) = (self.end.rank(), self.end.world());
        let send = Self::message((rank + 1) % world, &self.from, sent);
        let recv = Self::message((rank + world - 1) % world, &self.to, received);
        // SAFETY: both lie on the device until the transport is dropped, which waits; nothing else uses them.
        unsafe { self.end.exchange(Label::new("ring", step), &[send], &[recv]) }
    }

    /// A step and its check.
    fn round(&self, step: u32) -> Result<()> {
        self.step(step, BYTES, BYTES)?;
        self.end.synchronize()?;
        let (rank, world) = (self.end.rank(), self.end.world());
        let mut bytes = vec![0; BYTES];
        self.to.download(&mut bytes)?;
        let from = (rank + world - 1) % world;
        assert!(bytes.iter().all(|&b| b == from as u8 + 1), "rank {rank}, step {step}: {:?}", &bytes[..4]);
        Ok(())
    }

    /// After a failure: every call gives it, and the device and the stream are as good as before.
    fn is_over(&self, error: &Error) {
        let again =
            [self.step(99, 8, 8), self.end.poll(), self.end.synchronize(), self.end.agree(0..self.end.world(), 1)];
        for result in again {
            assert_eq!(result.as_ref().err(), Some(error));
        }
        usable(self.end.device(), self.end.stream());
    }
}

/// Copies something on that stream.
pub fn usable(cuda: &Arc<Cuda>, stream: cpattn::call::RawStream) {
    use cudarc::driver::sys;
    let [a, b] = [(); 2].map(|()| cuda.allocate(64).unwrap());
    a.upload(&[5; 64]).unwrap();
    b.upload(&[0; 64]).unwrap();
    let mut context = std::ptr::null_mut();
    // SAFETY: memory and a stream of the device, whose primary context is retained by `cuda`.
    unsafe {
        sys::cuDevicePrimaryCtxRetain(&raw mut context, cuda.ordinal()).result().unwrap();
        sys::cuCtxPushCurrent_v2(context).result().unwrap();
        sys::cuMemcpyDtoDAsync_v2(b.ptr() as u64, a.ptr() as u64, 64, stream.cast()).result().unwrap();
        sys::cuStreamSynchronize(stream.cast()).result().unwrap();
        sys::cuCtxPopCurrent_v2(&raw mut context).result().unwrap();
    }
    let mut bytes = [0; 64];
    b.download(&mut bytes).unwrap();
    assert_eq!(bytes, [5; 64]);
    // SAFETY: as above.
    unsafe { sys::cuDevicePrimaryCtxRelease_v2(cuda.ordinal()).result().unwrap() };
}

/// Whether these are the stand-ins.
pub fn stand_in() -> bool {
    std::env::var("LD_LIBRARY_PATH").is_ok_and(|p| p.contains("cuda-emulator"))
}

/// The threads of this process that watch exchanges.
fn watchdogs() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok());
    names.filter(|n| n.starts_with("cpattn-nccl-")).count()
}

#[test]
fn a_rank_that_never_comes() {
    let Some(devices) = devices(2) else { return };
    let id = UniqueId::new().unwrap();
    let begin = Instant::now();
    let all: Vec<Error> = thread::scope(|scope| {
        let (id, devices) = (&id, &devices);
        let threads = [0, 1].map(|r| scope.spawn(move || Nccl::new(id, r, 3, &devices[r], DEADLINE).unwrap_err()));
        threads.map(|t| t.join().unwrap()).into()
    });
    assert!(begin.elapsed() >= DEADLINE && begin.elapsed() < SLACK);
    for (rank, error) in all.iter().enumerate() {
        let others: Vec<usize> = (0..3).filter(|&r| r != rank).collect();
        let Error::Peers {
            rank: who,
            operation: "making the communicator",
            peers,
            cause: Cause::Deadline { ms, .. },
            ..
        } = error
        else {
            panic!("{error:?}")
        };
        assert!(*who == rank && *peers == others && *ms >= 400, "{error}");
    }
    // The same devices, a new id.
    let rounds = threads(&devices, LONG, |end| Ring::new(end).round(0));
    rounds.into_iter().for_each(|r| r.unwrap().unwrap());
}

#[test]
fn numbers_that_differ_do_not_end_the_group() {
    let Some(devices) = devices(4) else { return };
    let all = threads(&devices, LONG, |end| {
        let rank = end.rank();
        for (group, round) in [(0..4, 0), (2..4, 1), (0..4, 2)] {
            if !group.contains(&rank) {
                continue;
            }
            // The last rank says something else.
            let own = 10 + u64::from(rank == 3);
            let error = end.agree(group.clone(), own).unwrap_err();
            let peer = if rank == 3 { group.start } else { 3 };
            let theirs = if rank == 3 { 10 } else { 11 };
            assert_eq!(error, Error::disagreement(rank, peer, own, theirs));
            end.agree(group, 5 + round).unwrap();
        }
        Ring::new(end).round(0).unwrap();
    });
    all.into_iter().for_each(|r| r.unwrap());
}

/// Groups that do not fit hang, as NCCL documents it, until the deadline.
#[test]
fn sizes_that_differ() {
    let Some(devices) = devices(2) else { return };
    let begin = Instant::now();
    let all = threads(&devices, LONG, |end| {
        let ring = Ring::new(end);
        ring.round(0).unwrap();
        ring.round(1).unwrap();
        ring.end.set_deadline(DEADLINE).unwrap();
        let rank = ring.end.rank();
        // Rank 0 sends more than rank 1 expects; a good step is behind it.
        ring.step(2, [64, 32][rank], 32).unwrap();
        let _ = ring.step(3, 16, 16);
        let error = ring.end.synchronize().unwrap_err();
        ring.is_over(&error);
        error
    });
    assert!(begin.elapsed() < SLACK);
    for (rank, error) in all.into_iter().map(|r| r.unwrap()).enumerate() {
        let text = error.to_string();
        assert!(text.starts_with(&format!("rank {rank}, ring, step 2: rank {} ", 1 - rank)), "{text}");
        match error {
            // The other gave up first, and NCCL noticed.
            Error::Peer { cause: Cause::Engine { code: 6, bytes, .. }, .. } => assert_eq!(bytes, [96, 64][rank]),
            Error::Peer { cause: Cause::Deadline { ms, bytes }, .. } => {
                assert!(ms >= 400 && bytes == [96, 64][rank], "{text}");
            }
            other => panic!("{other:?}"),
        }
    }
    // The same devices, a new id.
    threads(&devices, LONG, |end| Ring::new(end).round(0)).into_iter().for_each(|r| r.unwrap().unwrap());
}

#[test]
fn somebody_aborts() {
    let Some(devices) = devices(3) else { return };
    let begin = Instant::now();
    let all = threads(&devices, LONG, |end| {
        let ring = Ring::new(end);
        ring.round(0).unwrap();
        ring.end.set_deadline(10 * DEADLINE).unwrap();
        if ring.end.rank() == 1 {
            // The others wait for this rank's step.
            thread::sleep(Duration::from_millis(50));
            ring.end.abort(Cause::Aborted);
            ring.end.abort(Cause::Failed);
        } else {
            ring.step(1, BYTES, BYTES).unwrap();
        }
        let error = ring.end.synchronize().unwrap_err();
        ring.is_over(&error);
        error.to_string()
    });
    assert!(begin.elapsed() < SLACK);
    let texts: Vec<String> = all.into_iter().map(|r| r.unwrap()).collect();
    // Whether the watchdog has seen yet that the exchange before is over.
    let ends = ["no exchange", "ring"].map(|at| format!("rank 1, {at}, step 0: rank 1 aborted the run"));
    assert!(ends.contains(&texts[1]), "{texts:?}");
    for rank in [0, 2] {
        let others: Vec<usize> = (0..3).filter(|&r| r != rank).collect();
        let begin = format!("rank {rank}, ring, step 1: one of the ranks {others:?} ");
        assert!(texts[rank].starts_with(&begin), "{texts:?}");
        assert!(texts[rank].contains("8192 bytes"), "{texts:?}");
    }
}

/// A rank that panics is no rank that waits.
#[test]
fn a_thread_that_panics() {
    let Some(devices) = devices(2) else { return };
    let id = UniqueId::new().unwrap();
    let begin = Instant::now();
    thread::scope(|scope| {
        let (id, devices) = (&id, &devices);
        let rank = |r: usize| Ring::new(Nccl::new(id, r, 2, &devices[r], LONG).unwrap());
        let (second, first) = (scope.spawn(move || rank(1)), rank(0));
        let second = second.join().unwrap();
        let panics = scope.spawn(move || {
            let _ring = second;
            panic!("as the test wants it");
        });
        assert!(panics.join().is_err());
        first.end.set_deadline(DEADLINE).unwrap();
        let error = first.step(7, 8, 8).and_then(|()| first.end.synchronize()).unwrap_err();
        first.is_over(&error);
    });
    assert!(begin.elapsed() < SLACK);
}

#[test]
fn nothing_is_left_of_a_group() {
    if devices(2).is_none() {
        return;
    }
    // A process of its own: the threads of other tests do not count there.
    let (ok, text) = finish(process("threads", 0, 2, &Folder::new().0, &[("CPATTN_EMU_DEVICES", "2")]), LONG);
    assert!(ok && text.contains("two watchdogs, then none"), "{text}");
}

/// What a process does until something fails: steps, and a file that says that it is under way.
fn rounds(end: Nccl, folder: &Path) {
    let ring = Ring::new(end);
    let rank = ring.end.rank();
    let begin = Instant::now();
    for step in 0.. {
        assert!(begin.elapsed() < LONG, "nothing failed");
        if let Err(error) = ring.round(step) {
            ring.is_over(&error);
            println!("rank {rank} ends with: {error}");
            return;
        }
        if step == 3 {
            std::fs::write(folder.join(format!("under way {rank}")), "").unwrap();
        }
    }
}

/// What one rank of a child process does.
pub fn one_process(case: &str, id: &UniqueId, rank: usize, world: usize, device: &Arc<Cuda>, folder: &Path) {
    let deadline = Duration::from_millis(1500);
    // Processes of a busy machine start when they can.
    let late = || {
        let end = Nccl::new(id, rank, world, device, LONG).unwrap();
        end.set_deadline(deadline).unwrap();
        end
    };
    match case {
        "rounds" => rounds(late(), folder),
        "plans" => plans(late(), folder),
        "threads" => {
            let devices = devices(2).unwrap();
            let seen = threads(&devices, LONG, |end| {
                let ring = Ring::new(end);
                // Both ranks are there when the first round is over.
                ring.round(0).unwrap();
                // A thread names itself, a little later than it begins.
                let begin = Instant::now();
                while watchdogs() != 2 && begin.elapsed() < SLACK {
                    thread::sleep(Duration::from_millis(1));
                }
                let seen = watchdogs();
                ring.round(1).unwrap();
                seen
            });
            assert!(seen.iter().all(|n| *n.as_ref().unwrap() == 2), "{seen:?}");
            assert_eq!(watchdogs(), 0);
            println!("two watchdogs, then none");
        }
        "new" => {
            let error = Nccl::new(id, rank, world, device, deadline).unwrap_err();
            println!("rank {rank} ends with: {error}");
        }
        _ => panic!("no case {case}"),
    }
}

/// Runs of a plan, until one fails.
fn plans(end: Nccl, folder: &Path) {
    let plan = work::plan("ring 2");
    let mut rank = Rank::on_device(end).unwrap();
    let (cuda, r) = (rank.cuda().unwrap().clone(), rank.rank());
    let all = work::tensors(&cuda, &plan, r, &work::data(&plan));
    for round in 0.. {
        let outcome = all.enqueue(&mut rank, &plan, Direction::Forward).and_then(|()| {
            work::wait(&cuda)?;
            rank.poll()
        });
        if let Err(error) = outcome {
            assert!(rank.poll().is_err());
            assert!(all.enqueue(&mut rank, &plan, Direction::Forward).is_err());
            println!("rank {r} ends with: {error}");
            return;
        }
        if round == 1 {
            std::fs::write(folder.join(format!("under way {r}")), "").unwrap();
        }
    }
}

fn children(case: &str, ranks: &[usize], world: usize, folder: &Folder, env: &[(&str, &str)]) -> Vec<Child> {
    ranks.iter().map(|&r| process(case, r, world, &folder.0, env)).collect()
}

fn all_under_way(world: usize, folder: &Folder) {
    let begin = Instant::now();
    while !(0..world).all(|r| folder.0.join(format!("under way {r}")).exists()) {
        assert!(begin.elapsed() < LONG, "the ranks do not get under way");
        thread::sleep(Duration::from_millis(2));
    }
}

/// A survivor ended by itself, with an error that says all of this.
#[track_caller]
fn ended_with(child: Child, words: &[&str]) {
    let (ok, text) = finish(child, LONG);
    assert!(ok, "{text}");
    let line = text.lines().find(|l| l.contains("ends with")).unwrap_or_else(|| panic!("no error: {text}"));
    for word in words {
        assert!(line.contains(word), "{line:?} lacks {word:?}");
    }
}

#[test]
fn a_process_that_never_starts() {
    if devices(1).is_none() {
        return;
    }
    let folder = Folder::new();
    for (child, others) in children("new", &[0, 2], 3, &folder, &[]).into_iter().zip(["[1, 2]", "[0, 1]"]) {
        ended_with(child, &["making the communicator", others, "did not answer within"]);
    }
}

/// Heard from the engine, or, where it notices nothing, at the deadline.
#[test]
fn a_process_that_is_killed() {
    if devices(1).is_none() {
        return;
    }
    for silent in ["0", "1"] {
        let (folder, world) = (Folder::new(), 3);
        let mut all = children("rounds", &[0, 1, 2], world, &folder, &[("CPATTN_NCCL_SILENT", silent)]);
        all_under_way(world, &folder);
        let mut dead = all.remove(1);
        dead.kill().unwrap();
        dead.wait().unwrap();
        let how = match (stand_in(), silent) {
            (true, "0") => "the engine reports 6",
            (true, _) => "did not answer within",
            _ => "one of the ranks",
        };
        for (child, others) in all.into_iter().zip(["[1, 2]", "[0, 1]"]) {
            ended_with(child, &[", ring, step ", others, "8192 bytes", " ms", how]);
        }
    }
}

#[test]
fn a_process_that_stops() {
    if devices(1).is_none() {
        return;
    }
    let (folder, world) = (Folder::new(), 3);
    let mut all = children("rounds", &[0, 1, 2], world, &folder, &[("CPATTN_NCCL_SILENT", "1")]);
    all_under_way(world, &folder);
    let stopped = all.remove(1);
    let signal = |name: &str| Command::new("kill").args([name, &stopped.id().to_string()]).status().unwrap();
    assert!(signal("-STOP").success());
    for (child, others) in all.into_iter().zip(["[1, 2]", "[0, 1]"]) {
        ended_with(child, &[", ring, step ", others, "did not answer within", "8192 bytes still to move"]);
    }
    // It goes on, and finds no peer.
    assert!(signal("-CONT").success());
    ended_with(stopped, &["rank 1, ring, step ", "[0, 2]", "8192 bytes"]);
}

/// What only the stand-in does on demand: errors of the communicator, a group that never begins, a crash in a run.
#[test]
fn faults_of_the_engine() {
    if devices(1).is_none() || !stand_in() {
        return;
    }
    let run = |case: &str, fault: &str| -> (Folder, [Child; 2]) {
        let (folder, env) = (Folder::new(), [("CPATTN_NCCL_FAULT", fault), ("CPATTN_NCCL_SILENT", "1")]);
        let both = children(case, &[0, 1], 2, &folder, &env);
        (folder, both.try_into().unwrap())
    };
    let (_folder, [first, second]) = run("rounds", "error@0#5=3");
    ended_with(
        first,
        &["rank 0, ring, step 5: rank 1 failed: the engine reports 3, internal error, after", "8192 bytes"],
    );
    ended_with(second, &["rank 1, ring, step 5: rank 0 did not answer within", "8192 bytes"]);
    let (_folder, both) = run("rounds", "stall@1#4");
    for child in both {
        ended_with(child, &["ring, step 4: rank ", "did not answer within", "8192 bytes"]);
    }
    // Inside the third run of a plan.
    let (_folder, [first, second]) = run("plans", "exit@1#4");
    assert!(!finish(second, LONG).0);
    ended_with(first, &["rank 0, ", "rank 1 did not answer within", " bytes"]);
}
