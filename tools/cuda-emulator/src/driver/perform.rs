// SPDX-License-Identifier: MIT OR Apache-2.0
//! What an operation does when its turn comes, and whether it may: launches, copies, fills, allocations, callbacks.
//!
//! Every operation leaves the bytes it read and wrote. Two that overlap and that nothing orders are a race, whatever
//! came out this time.

use super::entry::inside;
use super::machine::{Machine, name_of};
use super::queue::{Clock, Op, Past, Work, find_race};
use crate::exec::{Launch, Options, launch};
use crate::mem::{Footprint, Owner};
use crate::module::Kernel;
use crate::report::{Fault, Report};

/// An operation that ran, and what it touched.
pub(super) struct Ran {
    pub(super) stream: u64,
    pub(super) number: u64,
    pub(super) clock: Clock,
    pub(super) device: usize,
    pub(super) is_copy: bool,
    pub(super) what: String,
    pub(super) reads: Footprint,
    pub(super) writes: Footprint,
}

impl Machine {
    pub(super) fn ran(&mut self, event: u64, version: u64) {
        let time = self.time;
        if let Some(e) = self.events.get_mut(&event) {
            e.ran = Some((version, time));
        }
    }

    pub(super) fn run(&mut self, id: u64, op: Op) {
        let (mut reads, mut writes) = (Footprint::default(), Footprint::default());
        let is_copy = matches!(op.work, Work::Copy { .. });
        let Op { number, clock, work, device, .. } = op;
        let (what, result) = match work {
            Work::Launch { kernel, module, .. } if !self.modules.contains_key(&module) => {
                let what = format!("kernel `{}`", kernel.name());
                let detail = "its module was unloaded before it ran".to_owned();
                (what.clone(), Err(plain(&what, (Fault::UseAfterFree, detail))))
            }
            Work::Launch { kernel, grid, block, cluster, shared, params, resident, .. } => {
                let what = format!("kernel `{}`", kernel.name());
                let options = self.options(resident);
                let how = Launch { grid, block, cluster, dynamic_shared: shared, params: &params, options };
                let before = self.mutants.as_mut().and_then(|m| m.before(&kernel, &self.mem));
                let result = launch(&kernel, &mut self.mem, &how);
                (reads, writes) = self.mem.take_footprints();
                if let (Some(mutants), Some(before), Ok(_)) = (&mut self.mutants, &before, &result) {
                    mutants.after(&kernel, &mut self.mem, &how, before);
                }
                match result {
                    Ok(stats) => {
                        self.time += stats.instructions;
                        self.counts.boxes(stats.boxes);
                        if self.config.count {
                            print_counts(&kernel, grid, &stats);
                        }
                        (what, Ok(()))
                    }
                    Err(report) => (what, Err(*report)),
                }
            }
            Work::Copy { dst, src, len } => {
                reads.add(src, len as u64);
                writes.add(dst, len as u64);
                let what = format!("copy of {len} bytes");
                let r = self.mem.copy(dst, src, len);
                (what.clone(), r.map_err(|e| plain(&what, e)))
            }
            Work::Write { dst, bytes } => {
                writes.add(dst, bytes.len() as u64);
                let what = format!("copy of {} bytes from the host", bytes.len());
                let r = self.mem.write(dst, &bytes);
                (what.clone(), r.map_err(|e| plain(&what, e)))
            }
            Work::Read { dst, src, len } => {
                reads.add(src, len as u64);
                let what = format!("copy of {len} bytes to the host");
                let r = self.mem.read(src, len).map(|bytes| {
                    // SAFETY: the caller of the copy gave this pointer for `len` bytes and is waiting inside the call.
                    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), dst as *mut u8, len) };
                });
                (what.clone(), r.map_err(|e| plain(&what, e)))
            }
            Work::Fill { dst, pattern, width, count } => {
                writes.add(dst, (width * count) as u64);
                let what = format!("memset of {} bytes", width * count);
                let r = self.mem.write(dst, &pattern[..width].repeat(count));
                (what.clone(), r.map_err(|e| plain(&what, e)))
            }
            Work::Alloc { base, len } => {
                writes.add(base, len as u64);
                ("asynchronous allocation".to_owned(), Ok(()))
            }
            Work::Free { base, len } => {
                writes.add(base, len as u64);
                self.homes.remove(&base);
                self.mem.free(base);
                ("asynchronous free".to_owned(), Ok(()))
            }
            Work::Host { f, data } => {
                // SAFETY: the caller gave this function and its argument for exactly this call.
                inside(|| unsafe { f(data as *mut std::ffi::c_void) });
                (String::new(), Ok(()))
            }
            Work::Record { event, version } => {
                self.ran(event, version);
                (String::new(), Ok(()))
            }
            // Exchanges are asked, not run.
            Work::Wait | Work::Join | Work::Await { .. } | Work::Exchange(_) => (String::new(), Ok(())),
        };
        let ran = Ran { stream: id, number, clock, device, is_copy, what, reads, writes };
        self.finish(ran, result);
    }

    /// Judges what an operation touched, and keeps it.
    pub(super) fn finish(&mut self, ran: Ran, result: Result<(), Report>) {
        let Ran { stream: id, number, clock, device, is_copy, what, reads, writes } = ran;
        let result = result.and_then(|()| {
            // Copies between devices find their way with or without access.
            if is_copy { Ok(()) } else { self.within_reach(device, &what, &reads, &writes) }
        });
        if let Err(report) = result {
            self.fail(device, report);
            return;
        }
        if reads.is_empty() && writes.is_empty() || !self.config.races {
            return;
        }
        if let Some(race) = find_race(&self.past, &clock, &reads, &writes) {
            let (start, end) = race.range;
            let whose = match self.mem.find(start) {
                Some((base, _, _)) => format!("byte {} of {}", start - base, self.mem.describe(base)),
                None => "freed memory".to_owned(),
            };
            let detail = format!(
                "{what} in stream {} and {} in stream {} are not ordered by any event or synchronisation, and {}: {} \
                 bytes from {start:#x}, {whose}",
                name_of(id),
                race.other,
                name_of(race.other_stream),
                race.how,
                end - start,
            );
            let report = Report {
                fault: Fault::StreamRace,
                kernel: what,
                line: 0,
                text: String::new(),
                block: [0; 3],
                thread: None,
                detail,
            };
            self.fail(device, report);
            return;
        }
        if let Some(trace) = &mut self.trace {
            trace.ran((id, number), &what, &reads, &writes);
        }
        self.past.push(Past { stream: id, number, what, reads, writes });
    }

    /// Whether a device may use these bytes: its own, the host's, or those of a device it was given access to.
    fn within_reach(&self, device: usize, what: &str, reads: &Footprint, writes: &Footprint) -> Result<(), Report> {
        if self.devices.len() == 1 {
            return Ok(());
        }
        for (start, _) in reads.iter().chain(writes.iter()) {
            let Some((home, owner)) = self.owner(start) else { continue };
            if owner != Owner::Host && home != device && !self.devices[device].peers.contains(&home) {
                let detail = format!(
                    "device {device} uses memory of device {home} at {start:#x} without access to it: see \
                     cuCtxEnablePeerAccess"
                );
                return Err(plain(what, (Fault::PeerAccess, detail)));
            }
        }
        Ok(())
    }

    fn options(&mut self, resident: u32) -> Options {
        let c = &self.config;
        let (eager, races, lanes, uninitialised, count, sms) =
            (c.eager, c.races, c.lanes, c.uninitialised, c.count, c.multiprocessors);
        let seed = (self.below(1 << 30) as u64) << 20 | self.below(1 << 20) as u64;
        Options {
            seed,
            eager,
            uninitialised_shared: uninitialised,
            uninitialised_global: uninitialised,
            shared_races: races,
            global_races: races,
            global_lanes: lanes,
            count,
            footprints: races,
            resident,
            multiprocessors: sms,
            ..Options::default()
        }
    }
}

fn plain(what: &str, (fault, detail): (Fault, String)) -> Report {
    Report { fault, kernel: what.to_owned(), line: 0, text: String::new(), block: [0; 3], thread: None, detail }
}

fn print_counts(kernel: &Kernel, grid: [u32; 3], stats: &crate::exec::Stats) {
    let conflicts = stats.bank_conflicts();
    eprintln!(
        "cuda-emulator: `{}`: {} blocks, {} warp instructions, {conflicts} bank conflicts",
        kernel.name(),
        grid.iter().map(|&n| u64::from(n)).product::<u64>(),
        stats.instructions
    );
    for &(line, times, extra) in stats.lines.iter().filter(|l| l.2 > 0) {
        eprintln!("  line {line}: {extra} extra passes in {times} executions: `{}`", kernel.text(line));
    }
}
