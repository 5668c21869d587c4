// SPDX-License-Identifier: MIT OR Apache-2.0
//! The stand-in for NCCL as a program sees it: ranks as threads of one process on a device each, and as processes.
//!
//! Every case runs in child processes, with the folder of the two stand-ins in `LD_LIBRARY_PATH`.

mod cases;
mod library;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A process that runs a case as some of its ranks.
fn child(case: &str, ranks: &str, world: usize, folder: &str, env: &[(&str, String)]) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "run_case", "--nocapture"])
        .env("LD_LIBRARY_PATH", cuda_emulator::driver::library_dir().unwrap())
        .env("NCCL_CASE", case)
        .env("NCCL_RANKS", ranks)
        .env("NCCL_WORLD", world.to_string())
        .env("NCCL_FOLDER", folder)
        .envs(env.iter().map(|(k, v)| (k, v)))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Whether it ended well, and what it said. A child that takes more than a minute is ended and fails.
fn finish(mut child: Child) -> (bool, String) {
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let out = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    (out.status.success(), text)
}

/// A folder that is removed at the end, for the unique id of a case.
struct Folder(String);

impl Folder {
    fn new() -> Self {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("nccl-case-{}-{n}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path.to_str().unwrap().to_owned())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// All ranks as threads of one process, each on a device of its own.
fn as_threads(case: &str, world: usize, seed: u64, env: &[(&str, &str)]) -> (bool, String) {
    let folder = Folder::new();
    let ranks = (0..world).map(|r| r.to_string()).collect::<Vec<_>>().join(",");
    let mut all: Vec<(&str, String)> = env.iter().map(|&(k, v)| (k, v.to_owned())).collect();
    all.extend([("CPATTN_EMU_DEVICES", world.to_string()), ("CPATTN_EMU_SEED", seed.to_string())]);
    finish(child(case, &ranks, world, &folder.0, &all))
}

/// Every rank a process, as on hosts of their own.
fn as_processes(case: &str, world: usize, seed: u64, env: &[(&str, &str)]) -> Vec<(bool, String)> {
    let folder = Folder::new();
    let children: Vec<Child> = (0..world)
        .map(|r| {
            let mut all: Vec<(&str, String)> = env.iter().map(|&(k, v)| (k, v.to_owned())).collect();
            all.extend([("NCCL_HOSTID", format!("host{r}")), ("CPATTN_EMU_SEED", (seed + r as u64).to_string())]);
            child(case, &r.to_string(), world, &folder.0, &all)
        })
        .collect();
    children.into_iter().map(finish).collect()
}

#[track_caller]
fn passes(case: &str, world: usize) {
    for seed in 0..4 {
        let (ok, text) = as_threads(case, world, seed, &[]);
        assert!(ok, "{case}, seed {seed}: {text}");
        assert!(!text.contains("cuda-emulator:") && !text.contains("nccl-stand-in:"), "{case}, seed {seed}: {text}");
    }
    for (rank, (ok, text)) in as_processes(case, world, 7, &[]).into_iter().enumerate() {
        assert!(ok, "{case}, process {rank}: {text}");
        assert!(!text.contains("cuda-emulator:") && !text.contains("nccl-stand-in:"), "{case}, rank {rank}: {text}");
    }
}

/// Every rank ends by itself, and says so; at least one reports this.
#[track_caller]
fn reports(case: &str, world: usize, what: &str, env: &[(&str, &str)]) {
    let (ok, text) = as_threads(case, world, 1, env);
    assert!(ok && text.contains(what), "{case}: `{what}` is not in: {text}");
    let all = as_processes(case, world, 1, env);
    assert!(all.iter().all(|p| p.0), "{case}: {all:?}");
    assert!(all.iter().any(|p| p.1.contains(what)), "{case}: `{what}` is not in: {all:?}");
}

/// Does nothing unless it is the child of another test.
#[test]
fn run_case() {
    let Ok(case) = std::env::var("NCCL_CASE") else { return };
    let number = |name: &str| std::env::var(name).unwrap();
    let ranks: Vec<usize> = number("NCCL_RANKS").split(',').map(|r| r.parse().unwrap()).collect();
    cases::run(&case, &ranks, number("NCCL_WORLD").parse().unwrap(), &number("NCCL_FOLDER"));
}

#[test]
fn messages_go_round() {
    passes("ring", 2);
    passes("ring", 4);
}

#[test]
fn several_messages_of_a_pair_keep_their_order() {
    passes("all to all", 3);
}

#[test]
fn collectives() {
    passes("collectives", 3);
}

#[test]
fn a_rank_sends_to_itself() {
    passes("self", 2);
}

#[test]
fn work_around_a_group_is_ordered_by_its_stream() {
    passes("two streams", 2);
    reports("race", 2, "StreamRace", &[]);
}

#[test]
fn communicators_that_do_not_block() {
    passes("non-blocking", 2);
}

#[test]
fn groups_are_captured_and_replayed() {
    passes("graph", 2);
}

#[test]
fn groups_that_do_not_fit() {
    let env = [("CPATTN_NCCL_PATIENCE", "1")];
    reports("missing receive", 2, "Deadlock: rank 0, group 0 has not moved for 1 s: message 0 to rank 1", &env);
    reports("send before receive", 2, "Deadlock: rank", &env);
    reports("other size", 2, "has 64 bytes here and 32 there: the groups do not fit", &env);
}

#[test]
fn a_peer_that_leaves() {
    let env = [("CPATTN_NCCL_PATIENCE", "1")];
    reports("abort", 2, "rank 1 hears 6", &env);
    reports("abort", 2, "rank 1 hears nothing", &[("CPATTN_NCCL_PATIENCE", "1"), ("CPATTN_NCCL_SILENT", "1")]);
    let all = as_processes("fault", 2, 1, &[("CPATTN_NCCL_FAULT", "exit@0#1"), ("CPATTN_NCCL_PATIENCE", "1")]);
    assert!(!all[0].0 && all[1].0 && all[1].1.contains("rank 1 hears 6"), "{all:?}");
}

#[test]
fn faults() {
    let fault = |f| [("CPATTN_NCCL_FAULT", f), ("CPATTN_NCCL_PATIENCE", "1"), ("CPATTN_NCCL_INIT", "2")];
    reports("fault", 2, "rank 1 hears 3", &fault("error@1#1"));
    reports("fault", 2, "rank 1 hears 2", &fault("error@1#1=2"));
    reports("fault", 2, "Deadlock: rank 0, group 1 has not moved", &fault("stall@1#1"));
    reports("absent", 2, "rank 0 of 2 waited 2 s for the others", &fault("absent@1"));
    reports("absent non-blocking", 2, "rank 0 is in progress, then gone", &fault("absent@1"));
}

#[test]
fn bad_arguments() {
    passes("arguments", 1);
    reports("wrong world", 2, "rank 1 expects 3 ranks", &[("CPATTN_NCCL_INIT", "2")]);
    let (ok, text) = as_threads("same device", 2, 0, &[("CPATTN_NCCL_INIT", "2")]);
    assert!(ok && text.contains("duplicate GPU"), "{text}");
}
