// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups of ranks: as threads of this process, and as child processes that run one of the functions by name.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use cpattn::{
    Error, Result,
    kernel::cuda::Cuda,
    transport::nccl::{Nccl, UniqueId},
};

/// A deadline that nothing reaches unless it hangs.
pub const LONG: Duration = Duration::from_secs(240);

/// The devices of so many ranks, or `None` where there are fewer.
pub fn devices(n: usize) -> Option<Vec<Arc<Cuda>>> {
    let all: Result<Vec<_>> = (0..n).map(|d| Cuda::shared(d as i32)).collect();
    match all {
        Ok(all) => Some(all),
        Err(e @ (Error::Unsupported { .. } | Error::Invalid { .. })) if !required() => {
            eprintln!("not run: {e}");
            None
        }
        Err(e) => panic!("{n} devices: {e}"),
    }
}

pub fn required() -> bool {
    std::env::var_os("CPATTN_REQUIRE_CUDA").is_some()
}

/// Runs a function as every rank of a new group of threads, and gives what each returned.
pub fn threads<R: Send>(devices: &[Arc<Cuda>], deadline: Duration, run: impl Fn(Nccl) -> R + Sync) -> Vec<Result<R>> {
    let (id, world) = (UniqueId::new().unwrap(), devices.len());
    thread::scope(|scope| {
        let threads: Vec<_> = devices
            .iter()
            .enumerate()
            .map(|(rank, device)| {
                let (id, run) = (&id, &run);
                scope.spawn(move || Nccl::new(id, rank, world, device, deadline).map(run))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// A folder that is removed at the end.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("cpattn-nccl-{}-{n}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Rank `rank` of `world` as a process of its own, with one device, that runs the case of that name.
pub fn process(case: &str, rank: usize, world: usize, folder: &Path, env: &[(&str, &str)]) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "hosts::one_process", "--nocapture"])
        .env("CPATTN_EMU_DEVICES", "1")
        // Ranks on one device count as those of several hosts.
        .env("NCCL_HOSTID", format!("host{rank}"))
        .envs([("CPATTN_CASE", case), ("CPATTN_FOLDER", folder.to_str().unwrap())])
        .envs([("CPATTN_RANK", rank.to_string()), ("CPATTN_WORLD", world.to_string())])
        .envs(env.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Whether it ended well, and what it said. A child that takes longer than `limit` is ended, and fails.
pub fn finish(mut child: Child, limit: Duration) -> (bool, String) {
    let begin = Instant::now();
    let mut late = false;
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > limit {
            late = true;
            child.kill().unwrap();
            break;
        }
        thread::sleep(Duration::from_millis(2));
    }
    let out = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    (out.status.success() && !late, text)
}

/// The id that rank 0 leaves in the folder.
pub fn id(rank: usize, folder: &Path) -> UniqueId {
    let (path, fresh) = (folder.join("id"), folder.join("fresh"));
    if rank == 0 {
        let id = UniqueId::new().unwrap();
        std::fs::write(&fresh, id.to_bytes()).unwrap();
        std::fs::rename(&fresh, &path).unwrap();
        return id;
    }
    let begin = Instant::now();
    loop {
        if let Ok(bytes) = std::fs::read(&path) {
            return UniqueId::from_bytes(bytes.try_into().unwrap());
        }
        assert!(begin.elapsed() < LONG, "no id from rank 0");
        thread::sleep(Duration::from_millis(1));
    }
}
