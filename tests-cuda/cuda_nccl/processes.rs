// SPDX-License-Identifier: MIT OR Apache-2.0
//! Failures between ranks that are processes: those that a real engine and real signals can cause, and that nothing is
//! left of a group.
//!
//! Faults that only the stand-in can make (`CPATTN_NCCL_FAULT`) are tested where the loader finds the stand-in.

use std::{
    path::Path,
    process::{Child, Command},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cpattn::{
    Rank,
    kernel::cuda::Cuda,
    schedule::Direction,
    transport::{
        Transport,
        nccl::{Nccl, UniqueId},
    },
};

use crate::{
    faults::{Ring, SLACK, stand_in},
    group::{Folder, LONG, devices, finish, process, threads},
    work,
};

/// The threads of this process that watch exchanges.
fn watchdogs() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok());
    names.filter(|n| n.starts_with("cpattn-nccl-")).count()
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
