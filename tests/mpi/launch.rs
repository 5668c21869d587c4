// SPDX-License-Identifier: MIT OR Apache-2.0
//! Starting this program under `mpirun`, and what is expected of it.
//!
//! The library that was linked says which MPI it is, and that decides on the launcher: `MPIRUN`, or `mpirun.openmpi` or
//! `mpirun.mpich` where Debian has both, or `mpirun`.

use std::{
    env,
    ffi::{c_char, c_int},
    io::Read,
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use mpi::ffi;

/// No trial takes that long: the longest deadline in one is a few seconds.
const LIMIT: Duration = Duration::from_secs(90);

/// Tells a process which trial it is in.
pub const ROLE: &str = "CPATTN_MPI_TRIAL";

/// What a rank prints when it has found what it expects; a failing rank may not be able to end MPI well.
pub const FINE: &str = "as expected";

/// How a job ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Ends {
    /// Every process exits with 0.
    Well,
    /// All processes but one, with MPI told to let the others live, find what they expect.
    Survivors,
    /// MPI ends the job, well before the limit.
    Killed,
}

/// Takes 5 GB of memory: played when it is named.
const BY_NAME: &str = "a_message_beyond_2_gib";

pub struct Trial {
    pub name: &'static str,
    pub world: usize,
    pub rank: fn(),
    pub ends: Ends,
}

/// What a process is here for.
pub enum Role {
    /// A rank of this entry of the table.
    Trial(usize),
    /// A rank of the trial that this seed draws.
    Drawn(u64),
}

/// The part that this process plays, if any.
pub fn role() -> Option<Role> {
    let role = env::var(ROLE).ok()?;
    Some(match role.strip_prefix("trial ") {
        Some(seed) => Role::Drawn(seed.parse().expect("a seed")),
        None => Role::Trial(role.parse().expect("a trial's number")),
    })
}

/// How many drawn trials were asked for, and the first seed.
pub fn drawn() -> Option<(u64, u64)> {
    let arguments: Vec<String> = env::args().collect();
    let after = |name: &str| {
        let at = arguments.iter().position(|a| a == name)?;
        Some(arguments.get(at + 1).and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{name} needs a number")))
    };
    after("--trials").map(|count| (count, after("--seed").unwrap_or(1)))
}

fn is_open_mpi() -> bool {
    let mut room = [0 as c_char; 1 << 14];
    let mut len: c_int = 0;
    // SAFETY: may be called before MPI is initialised; MPI's longest version text is half as long as the room.
    unsafe { ffi::MPI_Get_library_version(room.as_mut_ptr(), &raw mut len) };
    let text: Vec<u8> = room[..len as usize].iter().map(|&c| c as u8).collect();
    String::from_utf8_lossy(&text).contains("Open MPI")
}

/// `mpirun` with that many processes of `program`; `recover`: others live on when one dies.
pub fn mpirun(world: usize, recover: bool, program: &Path) -> Command {
    let open = is_open_mpi();
    let own = if open { "mpirun.openmpi" } else { "mpirun.mpich" };
    let launcher = env::var("MPIRUN").unwrap_or_else(|_| {
        let installed = env::var_os("PATH").is_some_and(|all| env::split_paths(&all).any(|p| p.join(own).exists()));
        if installed { own.into() } else { "mpirun".into() }
    });
    let mut command = Command::new(launcher);
    if open {
        command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
        // Otherwise every look at a request gives the core away, where there are more processes than cores.
        command.args(["--mca", "mpi_yield_when_idle", "0"]);
        if recover {
            command.arg("--enable-recovery");
        }
    } else if recover {
        command.arg("-disable-auto-cleanup");
    }
    command.args(["-n", &world.to_string()]);
    if recover && !open {
        // MPICH's mpiexec ends the survivors of a process that it sees die, and tells those of others by SIGUSR1.
        command.args(["sh", "-c", r#"trap "" USR1; "$0"; exit 0"#]);
    }
    command.arg(program);
    command
}

/// What a pipe says, read on a thread.
pub fn reader(mut pipe: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut text = Vec::new();
        let _ = pipe.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    })
}

/// Waits, but not for ever; the exit code unless it was killed, by us or otherwise.
pub fn wait(child: &mut Child, limit: Duration) -> Option<i32> {
    let began = Instant::now();
    loop {
        match child.try_wait().expect("a child of ours") {
            Some(status) => return status.code(),
            None if began.elapsed() > limit => {
                // mpirun hands SIGTERM on to its processes; std can only send SIGKILL.
                let _ = Command::new("kill").arg(child.id().to_string()).status();
                thread::sleep(Duration::from_secs(2));
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
            None => thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn play(at: usize, trial: &Trial, program: &Path) -> Result<Duration, String> {
    let began = Instant::now();
    let mut child = mpirun(trial.world, trial.ends == Ends::Survivors, program)
        .env(ROLE, at.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("mpirun does not start: {e}"))?;
    let texts = [reader(child.stdout.take().expect("piped")), reader(child.stderr.take().expect("piped"))];
    let code = wait(&mut child, LIMIT);
    let took = began.elapsed();
    let [out, err] = texts.map(|text| text.join().expect("a reader"));
    let fine = out.matches(FINE).count();
    let right = match trial.ends {
        Ends::Well => code == Some(0) && fine == trial.world,
        Ends::Survivors => took < LIMIT && fine == trial.world - 1,
        Ends::Killed => took < LIMIT && code != Some(0),
    };
    if right {
        return Ok(took);
    }
    Err(format!("exit code {code:?}, {fine} of {} fine, after {took:?}\n{out}{err}", trial.world))
}

/// Plays all trials that were asked for.
pub fn all(trials: &[Trial]) -> ExitCode {
    let wanted: Vec<String> = env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let program = env::current_exe().expect("this program");
    let mut failed = 0;
    for (at, trial) in trials.iter().enumerate() {
        let by_name = !wanted.is_empty() || trial.name == BY_NAME;
        if by_name && !wanted.iter().any(|w| trial.name.contains(w.as_str())) {
            continue;
        }
        match play(at, trial, &program) {
            Ok(took) => println!("test {} on {} processes ... ok ({took:.1?})", trial.name, trial.world),
            Err(text) => {
                failed += 1;
                println!("test {} on {} processes ... FAILED\n{text}", trial.name, trial.world);
            }
        }
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
