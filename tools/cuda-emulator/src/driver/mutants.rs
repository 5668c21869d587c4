// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mutants of kernels: what happens when one barrier, wait or fence is missing, or one number in them is wrong.
//!
//! With `CPATTN_EMU_MUTANTS` set, every launch of any program is also a trial. The launch runs as it is; then memory is
//! put back, and it runs again with one synchronising instruction removed or wrong (`mutation`), for each of the
//! kernel. A mutant is caught when the emulator reports it or when any byte of memory differs afterwards. One that was
//! caught is not tried again; one that survives is tried at later launches, up to a limit. Addresses are the same in
//! every run, so the workload needs no description: it is whatever the program launches.
//!
//! The file gets a line for each mutant when its kernel is first launched, and one when it is caught:
//! `mutant <module> <kernel> <line> <text>` (the line with the change behind it where more is wrong than that it is
//! gone), `caught <module> <kernel> <line> <how>`, `tried <module> <kernel> <line>`. `unstable <module> <kernel> -`
//! says that the kernel itself gave other bytes in another order. What is in the file already counts: a mutant that an
//! earlier program caught is not tried again.
//!
//! `CPATTN_EMU_MUTANTS_ONLY` names the kernels to try, `<module> <kernel>` separated by commas;
//! `CPATTN_EMU_MUTANTS_PART` is `<k>/<n>` when this process is to try every n-th mutant only, because others try the
//! rest. With `CPATTN_EMU_MUTANTS_KINDS=1` one caught mutant speaks for all of its kind in the kernel (the same change
//! of the same opcode): they are not tried, and logged as caught `OfItsKind`.

use crate::exec::{Launch, Options, launch};
use crate::mem::{Memory, Snapshot};
use crate::module::Kernel;
use crate::mutation::Mutant;
use std::collections::{HashMap, HashSet};
use std::io::Write as _;
use std::path::PathBuf;

/// Launches a mutant may survive before it is left alone.
const TRIALS: u32 = 24;
/// Seeds tried at each launch.
const SEEDS: u64 = 2;

struct Tried {
    mutant: Mutant,
    kind: String,
    trials: u32,
    caught: bool,
}

/// The mutants of all kernels launched so far.
pub(crate) struct Mutants {
    path: PathBuf,
    /// By module and name.
    kernels: HashMap<(u64, String), Vec<Tried>>,
    /// Module, kernel and line of those that were caught before this program began.
    caught: HashSet<String>,
    /// Module and kernel of those to try, when not all.
    only: Option<HashSet<String>>,
    /// Which of how many parts.
    part: (usize, usize),
    /// Whether one of each kind is enough.
    kinds: bool,
}

impl Mutants {
    /// From the environment.
    pub(crate) fn from_env() -> Option<Self> {
        let path = PathBuf::from(std::env::var_os("CPATTN_EMU_MUTANTS")?);
        // A file that cannot be read is one that is not there yet.
        let before = std::fs::read_to_string(&path).unwrap_or_default();
        let key = |line: &str| Some(line.strip_prefix("caught ")?.rsplit_once(' ')?.0.to_owned());
        let caught = before.lines().filter_map(key).collect();
        let text = |name: &str| std::env::var(name).ok();
        let kinds = text("CPATTN_EMU_MUTANTS_KINDS").is_some_and(|t| t == "1");
        let only = text("CPATTN_EMU_MUTANTS_ONLY").map(|t| t.split(',').map(|k| k.trim().to_owned()).collect());
        let part = text("CPATTN_EMU_MUTANTS_PART").and_then(|t| {
            let (k, n) = t.split_once('/')?;
            Some((k.parse().ok()?, n.parse().ok().filter(|&n: &usize| n > 0)?))
        });
        Some(Self { path, kernels: HashMap::new(), caught, only, part: part.unwrap_or((0, 1)), kinds })
    }

    fn say(&self, text: &str) {
        if let Ok(mut f) = std::fs::OpenOptions::new().create(true).append(true).open(&self.path) {
            // A line that cannot be written shows up as a mutant that was never tried.
            let _ = writeln!(f, "{text}");
        }
    }

    /// Memory before a launch that still has mutants to try.
    pub(crate) fn before(&mut self, kernel: &Kernel, mem: &Memory) -> Option<Snapshot> {
        let key = (kernel.module_hash(), kernel.name().to_owned());
        if !self.kernels.contains_key(&key) {
            let mut list = Vec::new();
            let name = format!("{:016x} {}", key.0, key.1);
            let wanted = self.only.as_ref().is_none_or(|only| only.contains(&name));
            let mine = |k: &(usize, Mutant)| wanted && k.0 % self.part.1 == self.part.0;
            for (_, mutant) in kernel.mutants().into_iter().enumerate().filter(mine) {
                self.say(&format!("mutant {name} {mutant} {}", kernel.text(mutant.line)));
                let caught = self.caught.contains(&format!("{name} {mutant}"));
                list.push(Tried { mutant, kind: kernel.kind(&mutant), trials: 0, caught });
            }
            self.kernels.insert(key.clone(), list);
        }
        let alive = self.kernels.get(&key)?.iter().any(|m| !m.caught && m.trials < TRIALS);
        alive.then(|| mem.snapshot())
    }

    /// Tries the mutants of a launch that went well. Memory is afterwards as it was.
    pub(crate) fn after(&mut self, kernel: &Kernel, mem: &mut Memory, how: &Launch<'_>, before: &Snapshot) {
        let key = (kernel.module_hash(), kernel.name().to_owned());
        let good = mem.snapshot();
        let Some(mut list) = self.kernels.remove(&key) else { return };
        // The order between lanes in global memory is held against mutants where the kernel itself keeps it.
        mem.restore(before);
        let strict = Options { global_lanes: true, ..how.options.clone() };
        let lanes = launch(kernel, mem, &Launch { options: strict, ..how.clone() }).is_ok();
        mem.take_footprints();
        // In other orders of warps and blocks, and as a single block or cluster: what is only needed between two tiles
        // of a block shows there. Only where the kernel itself gives the same bytes, or the mutant would be blamed for
        // the order.
        let options =
            |seed: u64| Options { seed: how.options.seed ^ seed << 40, global_lanes: lanes, ..how.options.clone() };
        let (one, mut ways) = (kernel.required_cluster().unwrap_or(how.cluster), vec![(0, how.grid)]);
        for (seed, grid) in (0..SEEDS).flat_map(|s| [(s, how.grid), (s, one)]) {
            if !ways.contains(&(seed, grid)) {
                mem.restore(before);
                let same = launch(kernel, mem, &Launch { options: options(seed), grid, ..how.clone() }).is_ok()
                    && !mem.differs(&good);
                mem.take_footprints();
                if same {
                    ways.push((seed, grid));
                } else if grid == how.grid {
                    self.say(&format!("unstable {:016x} {} -", key.0, key.1));
                }
            }
        }
        for i in 0..list.len() {
            let m = &mut list[i];
            if m.caught || m.trials == TRIALS {
                continue;
            }
            m.trials += 1;
            let (mutant, line) = (kernel.mutated(&m.mutant), m.mutant);
            for &(seed, grid) in &ways {
                mem.restore(before);
                let fault = match launch(&mutant, mem, &Launch { options: options(seed), grid, ..how.clone() }) {
                    Err(report) => Some(format!("{:?}", report.fault)),
                    Ok(_) if mem.differs(&good) => Some("OtherResult".to_owned()),
                    Ok(_) => None,
                };
                mem.take_footprints();
                if let Some(fault) = fault {
                    m.caught = true;
                    self.say(&format!("caught {:016x} {} {line} {fault}", key.0, key.1));
                    break;
                }
            }
            if !m.caught && m.trials == TRIALS {
                self.say(&format!("tried {:016x} {} {line}", key.0, key.1));
            }
            if m.caught && self.kinds {
                let kind = m.kind.clone();
                for other in list.iter_mut().filter(|other| other.kind == kind && !other.caught) {
                    other.caught = true;
                    self.say(&format!("caught {:016x} {} {} OfItsKind", key.0, key.1, other.mutant));
                }
            }
        }
        mem.restore(&good);
        self.kernels.insert(key, list);
    }
}
