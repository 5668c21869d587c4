// SPDX-License-Identifier: MIT OR Apache-2.0
//! Variables of the environment, the faults they ask for, and reports. Read when a communicator is made.

use std::io::Write as _;
use std::time::Duration;

/// How the stand-in behaves.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// `CPATTN_NCCL_VERSION`: what `ncclGetVersion` says.
    pub(crate) version: i32,
    /// `CPATTN_NCCL_PATIENCE`: seconds without progress before a group that hangs is reported.
    pub(crate) patience: Duration,
    /// `CPATTN_NCCL_INIT`: seconds that ranks wait for each other when a communicator is made, and for work to end
    /// when it is finalised.
    pub(crate) init: Duration,
    /// `CPATTN_NCCL_SILENT=1`: that a peer is gone is not noticed, as over shared memory.
    pub(crate) silent: bool,
    /// `CPATTN_EMU_SEED`.
    pub(crate) seed: u64,
    /// `CPATTN_NCCL_FAULT`: faults, separated by commas.
    pub(crate) faults: Vec<Fault>,
    /// `NCCL_HOSTID`: the name of this host, so that ranks of one device count as ranks of several hosts.
    pub(crate) host: String,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// The rank never arrives when the communicator is made.
    Absent,
    /// This group never begins.
    Stall,
    /// The communicator turns to an error when this group begins.
    Error(i32),
    /// The process ends when this group begins.
    Exit,
}

/// `absent@RANK`, `stall@RANK#GROUP`, `error@RANK#GROUP` (ncclInternalError), `error@RANK#GROUP=CODE`,
/// `exit@RANK#GROUP`; groups of a communicator count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) what: What,
    pub(crate) rank: usize,
    pub(crate) group: u64,
}

fn fault(text: &str) -> Option<Fault> {
    let (what, rest) = text.trim().split_once('@')?;
    let (rest, code) = match rest.split_once('=') {
        Some((rest, code)) => (rest, code.parse().ok()?),
        None => (rest, 3),
    };
    let (rank, group) = match rest.split_once('#') {
        Some((rank, group)) => (rank.parse().ok()?, group.parse().ok()?),
        None => (rest.parse().ok()?, 0),
    };
    let what = match what {
        "absent" => What::Absent,
        "stall" => What::Stall,
        "error" => What::Error(code),
        "exit" => What::Exit,
        _ => return None,
    };
    Some(Fault { what, rank, group })
}

impl Config {
    pub(crate) fn from_env() -> Self {
        let text = |name: &str| std::env::var(name).ok();
        let number = |name: &str, default: u64| text(name).and_then(|v| v.trim().parse().ok()).unwrap_or(default);
        let mut faults = Vec::new();
        for part in text("CPATTN_NCCL_FAULT").iter().flat_map(|t| t.split(',')).filter(|t| !t.trim().is_empty()) {
            match fault(part) {
                Some(f) => faults.push(f),
                None => report(&format!("CPATTN_NCCL_FAULT has `{part}`, which is no fault known here")),
            }
        }
        Self {
            version: number("CPATTN_NCCL_VERSION", 22809) as i32,
            patience: Duration::from_secs(number("CPATTN_NCCL_PATIENCE", 10)),
            init: Duration::from_secs(number("CPATTN_NCCL_INIT", 60)),
            silent: number("CPATTN_NCCL_SILENT", 0) != 0,
            seed: number("CPATTN_EMU_SEED", 0),
            faults,
            host: text("NCCL_HOSTID").unwrap_or_default(),
        }
    }

    /// What goes wrong when this rank's group begins.
    pub(crate) fn at(&self, rank: usize, group: u64) -> Option<What> {
        self.faults.iter().find(|f| f.what != What::Absent && f.rank == rank && f.group == group).map(|f| f.what)
    }

    pub(crate) fn absent(&self, rank: usize) -> bool {
        self.faults.iter().any(|f| f.what == What::Absent && f.rank == rank)
    }
}

/// Says what is wrong, on standard error and in the file that the stand-in driver's reports go to.
pub(crate) fn report(text: &str) {
    eprintln!("nccl-stand-in: {text}");
    if let Some(path) = std::env::var_os("CPATTN_EMU_REPORT")
        && let Ok(mut f) = std::fs::OpenOptions::new().create(true).append(true).open(path)
    {
        // It was printed already.
        let _ = writeln!(f, "nccl-stand-in: {text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults() {
        assert_eq!(fault("absent@2"), Some(Fault { what: What::Absent, rank: 2, group: 0 }));
        assert_eq!(fault(" stall@1#7"), Some(Fault { what: What::Stall, rank: 1, group: 7 }));
        assert_eq!(fault("error@0#3"), Some(Fault { what: What::Error(3), rank: 0, group: 3 }));
        assert_eq!(fault("error@0#3=6"), Some(Fault { what: What::Error(6), rank: 0, group: 3 }));
        assert_eq!(fault("exit@0#3"), Some(Fault { what: What::Exit, rank: 0, group: 3 }));
        for wrong in ["", "stall", "stall@x", "late@1", "stall@1#", "error@1#2=x"] {
            assert_eq!(fault(wrong), None, "{wrong}");
        }
    }
}
