// SPDX-License-Identifier: MIT OR Apache-2.0
//! The order in which work is done.
//!
//! Nothing runs when it is enqueued. It runs when the host waits for something, and then in a seeded order: sometimes
//! only what the host waits for, sometimes anything that may run. Whatever relies on work being done earlier, or in the
//! order of the calls, fails.

use super::calls::Piece;
use super::codes;
use super::entry::inside;
use super::machine::{Goal, Machine, default_stream, name_of};
use super::perform::Ran;
use super::queue::{Clock, Op, Work};
use crate::mem::Owner;

impl Machine {
    /// Adds an operation to a stream.
    pub(crate) fn enqueue(&mut self, id: u64, mut after: Vec<(u64, u64)>, extra: Option<&Clock>, work: Work) {
        self.count(&work);
        if self.config.idle {
            self.pretend(id, work);
            return;
        }
        if let Work::Exchange(x) = &work {
            x.queued();
        }
        let Some(s) = self.streams.get(&id) else { return };
        let (device, independent) = (s.device, s.independent);
        let mut clock = s.tail.clone();
        clock.join(&self.host);
        // The default stream waits for all streams that are not independent of it, and they for it.
        let default = default_stream(device);
        for (&other, o) in self.streams.iter().filter(|(k, o)| **k != id && o.device == device) {
            let ordered = !independent && (id == default && !o.independent || other == default);
            if ordered && o.enqueued > 0 {
                after.push((other, o.enqueued));
                clock.join(&o.tail);
            }
        }
        let event = if matches!(work, Work::Wait) { after.first().copied() } else { None };
        if let Some(extra) = extra {
            clock.join(extra);
        }
        let Some(s) = self.streams.get_mut(&id) else { return };
        s.enqueued += 1;
        let number = s.enqueued;
        clock.raise(id, number);
        s.tail = clock.clone();
        if let Some(trace) = &mut self.trace {
            trace.enqueued((id, number), &after, event);
        }
        if let Work::Record { event, .. } = &work
            && let Some(e) = self.events.get_mut(event)
        {
            e.record = Some((id, number, clock.clone()));
        }
        s.queue.push_back(Op { number, after, clock, work, device });
        if self.config.eager {
            while self.step() {}
        }
    }

    /// Counts work by what it is.
    fn count(&mut self, work: &Work) {
        let piece = match work {
            Work::Launch { .. } => Piece::Launch,
            Work::Copy { dst, src, .. } => match (self.home(*dst), self.home(*src)) {
                ((_, Owner::Host), (_, Owner::Host)) => return,
                ((_, Owner::Host), _) => Piece::DeviceToHost,
                (_, (_, Owner::Host)) => Piece::HostToDevice,
                ((to, _), (from, _)) if to == from => Piece::DeviceCopy,
                ((to, _), (from, _)) if self.direct(to, from) => Piece::PeerCopy,
                _ => Piece::StagedCopy,
            },
            Work::Write { .. } => Piece::HostToDevice,
            Work::Read { .. } => Piece::DeviceToHost,
            Work::Fill { .. } => Piece::Fill,
            Work::Host { .. } => Piece::HostFunction,
            Work::Record { .. } => Piece::Record,
            Work::Wait => Piece::StreamWait,
            Work::Exchange(_) => Piece::Exchange,
            Work::Alloc { .. } | Work::Free { .. } | Work::Await { .. } | Work::Join => return,
        };
        self.counts.piece(piece);
        if let Work::Launch { kernel, .. } = work {
            self.counts.kernel(kernel.name());
        }
    }

    /// With `CPATTN_EMU_IDLE`: work is over as soon as it is put in, and was never done. Functions of the host are
    /// called.
    fn pretend(&mut self, id: u64, work: Work) {
        match work {
            Work::Host { f, data } => {
                // SAFETY: the caller gave this function and its argument for exactly this call.
                inside(|| unsafe { f(data as *mut std::ffi::c_void) });
            }
            Work::Record { event, version } => {
                if let Some(e) = self.events.get_mut(&event) {
                    e.record = Some((id, 0, Clock::default()));
                    e.ran = Some((version, self.time));
                }
            }
            Work::Free { base, .. } => {
                self.mem.free(base);
            }
            _ => {}
        }
    }

    fn ready(&self, id: u64) -> bool {
        let Some(op) = self.streams.get(&id).and_then(|s| s.queue.front()) else { return false };
        op.after.iter().all(|&(s, n)| self.streams.get(&s).is_none_or(|s| s.done >= n))
    }

    /// Runs one operation that may run, chosen at random. False when there is none, or none that can go on.
    pub(crate) fn step(&mut self) -> bool {
        let mut ready: Vec<u64> = self.streams.keys().copied().filter(|&s| self.ready(s)).collect();
        while !ready.is_empty() {
            let pick = self.below(ready.len());
            if self.run_head(ready.swap_remove(pick)) {
                return true;
            }
        }
        false
    }

    /// Works towards a goal. False when it is not reached and nothing can go on for now.
    pub(crate) fn toward(&mut self, goal: Goal) -> bool {
        match goal {
            Goal::Nothing => {}
            Goal::Stream(id, number) => {
                let generous = self.below(2) == 0;
                while self.streams.get(&id).is_some_and(|s| s.done < number) {
                    let moved = if generous { self.step() } else { self.only(id) };
                    if !moved {
                        return false;
                    }
                }
                if let Some(s) = self.streams.get(&id) {
                    if s.done == s.enqueued {
                        let tail = s.tail.clone();
                        self.host.join(&tail);
                    } else {
                        self.host.raise(id, number);
                    }
                }
                self.host_knows(id, number);
                self.forget();
            }
            Goal::Device(device) => {
                while self.streams.values().any(|s| s.device == device && !s.queue.is_empty()) {
                    if !self.step() {
                        return false;
                    }
                }
                let ends: Vec<(u64, u64, Clock)> = (self.streams.iter())
                    .filter(|(_, s)| s.device == device)
                    .map(|(&id, s)| (id, s.done, s.tail.clone()))
                    .collect();
                for (id, number, tail) in &ends {
                    self.host_knows(*id, *number);
                    self.host.join(tail);
                }
                self.forget();
                let host = &self.host;
                let idle = self.streams.iter().all(|(&id, s)| s.enqueued == 0 || host.covers(id, s.enqueued));
                if let Some(trace) = self.trace.as_mut().filter(|_| idle) {
                    trace.judge();
                }
                self.streams.retain(|_, s| !s.destroyed || !s.queue.is_empty());
            }
        }
        true
    }

    /// A call has waited for too long: nothing will come of it any more.
    pub(crate) fn give_up(&mut self, goal: Goal) {
        let stuck: Vec<String> = (self.streams.iter())
            .filter_map(|(&id, s)| s.queue.front().map(|op| format!("stream {} at {}", name_of(id), op.work.what())))
            .collect();
        self.tell(&format!(
            "Deadlock: the host has waited for {goal:?} for {} s (CPATTN_EMU_PATIENCE): {}",
            self.config.patience.as_secs(),
            stuck.join(", ")
        ));
        for d in &mut self.devices {
            d.sticky.get_or_insert(codes::LAUNCH_TIMEOUT);
        }
    }

    /// Runs one operation that the head of a stream needs, or the head itself.
    pub(crate) fn only(&mut self, id: u64) -> bool {
        let mut at = id;
        for _ in 0..self.streams.len() + 1 {
            let Some(op) = self.streams.get(&at).and_then(|s| s.queue.front()) else { return false };
            let blocked = op.after.iter().find(|&&(s, n)| self.streams.get(&s).is_some_and(|s| s.done < n));
            match blocked {
                Some(&(s, _)) => at = s,
                // What another stream has to give, an exchange waits for.
                None => return self.run_head(at) || self.step(),
            }
        }
        self.step()
    }

    /// The host learned that a record ran, or a stream's last operation.
    pub(crate) fn host_learns(&mut self, id: u64, number: u64, clock: &Clock) {
        self.host_knows(id, number);
        self.host.join(clock);
    }

    fn host_knows(&mut self, id: u64, number: u64) {
        if let Some(trace) = &mut self.trace {
            trace.known((id, number));
        }
    }

    /// Drops what nothing can race with any more.
    fn forget(&mut self) {
        let queued = || self.streams.values().flat_map(|s| &s.queue);
        if queued().next().is_none() {
            let host = &self.host;
            self.past.retain(|p| !host.covers(p.stream, p.number));
        } else if self.past.len() > 256 {
            let (host, streams) = (&self.host, &self.streams);
            self.past.retain(|p| {
                !(host.covers(p.stream, p.number)
                    && streams.values().flat_map(|s| &s.queue).all(|o| o.clock.covers(p.stream, p.number)))
            });
        }
    }

    /// Runs the next operation of a stream, which may run. False when it is one that goes on later.
    fn run_head(&mut self, id: u64) -> bool {
        let Some(mut op) = self.streams.get_mut(&id).and_then(|s| s.queue.pop_front()) else { return false };
        let number = op.number;
        if self.devices[op.device].sticky.is_some() {
            if let Work::Record { event, version } = op.work {
                self.ran(event, version);
            }
        } else if matches!(op.work, Work::Exchange(_)) {
            match self.ask(&mut op) {
                Some((what, reads, writes, result)) => {
                    let Op { number, clock, device, .. } = op;
                    let ran = Ran { stream: id, number, clock, device, is_copy: false, what, reads, writes };
                    self.finish(ran, result);
                }
                None => {
                    if let Some(s) = self.streams.get_mut(&id) {
                        s.queue.push_front(op);
                    }
                    return false;
                }
            }
        } else {
            self.run(id, op);
        }
        if let Some(s) = self.streams.get_mut(&id) {
            s.done = number;
        }
        true
    }
}
