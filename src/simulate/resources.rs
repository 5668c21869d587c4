// SPDX-License-Identifier: MIT OR Apache-2.0
//! Jobs in progress, and the resources that they share: cores, links, cards.
//!
//! A job has an amount of work and uses up to three resources. A resource divides its capacity evenly among its jobs; a
//! job runs at the speed that the slowest of its resources allows, and never faster than its own limit. When a job
//! begins or ends, the speeds of all jobs that share a resource with it change, and so do their ends.
//!
//! An even division leaves some capacity unused if a job is limited elsewhere. With the few jobs that share a resource
//! here, that is close to real networks, and the cost of a change depends only on the jobs concerned.

use alloc::{collections::BinaryHeap, vec::Vec};
use core::cmp::Reverse;

/// Index of a job.
pub(super) type JobId = usize;

#[derive(Clone, Debug)]
struct SharedJob {
    left: f64,
    limit: f64,
    speed: f64,
    /// The time at which `left` was computed.
    since: f64,
    used: [usize; 3],
    count: usize,
    /// Entries of `ends` with another version are ignored: their speed has changed.
    version: u32,
}

impl SharedJob {
    /// The work done since its speed was computed; 0 if it has no speed yet.
    fn done(&self, now: f64) -> f64 {
        if self.speed > 0.0 { self.left.min((now - self.since) * self.speed) } else { 0.0 }
    }
}

/// Jobs and resources.
#[derive(Debug, Default)]
pub(super) struct Resources {
    capacity: Vec<f64>,
    /// The work that has passed each resource, without the work of its users since their speeds were last computed.
    passed: Vec<f64>,
    users: Vec<Vec<JobId>>,
    jobs: Vec<SharedJob>,
    free: Vec<JobId>,
    /// Heap of ends. Times are never negative, so their bits have the same order as their values.
    ends: BinaryHeap<Reverse<(u64, u64, JobId, u32)>>,
    /// If two jobs end at the same time, the one planned first comes first.
    sequence: u64,
}

impl Resources {
    /// Adds a resource.
    pub(super) fn add(&mut self, capacity: f64) -> usize {
        self.capacity.push(capacity);
        self.passed.push(0.0);
        self.users.push(Vec::new());
        self.capacity.len() - 1
    }

    /// Begins a job of some amount of work, at a speed of at most `limit`.
    pub(super) fn begin(&mut self, now: f64, work: f64, limit: f64, used: &[usize]) -> JobId {
        let mut list = [0; 3];
        list[..used.len()].copy_from_slice(used);
        let id = self.free.pop().unwrap_or(self.jobs.len());
        let version = self.jobs.get(id).map_or(0, |j| j.version + 1);
        let job = SharedJob { left: work, limit, speed: -1.0, since: now, used: list, count: used.len(), version };
        if id == self.jobs.len() {
            self.jobs.push(job)
        } else {
            self.jobs[id] = job
        }
        used.iter().for_each(|&r| self.users[r].push(id));
        if used.is_empty() {
            self.plan(now, id);
        }
        used.iter().for_each(|&r| self.share(now, r));
        id
    }

    /// Ends the job that ends next; returns its end and its index.
    pub(super) fn next(&mut self) -> Option<(f64, JobId)> {
        while let Some(Reverse((time, _, id, version))) = self.ends.pop() {
            if self.jobs[id].version != version {
                continue;
            }
            let now = f64::from_bits(time);
            let SharedJob { used, count, left, .. } = self.jobs[id];
            self.jobs[id].version += 1;
            for &r in &used[..count] {
                self.passed[r] += left;
                self.users[r].retain(|&j| j != id);
                self.share(now, r);
            }
            self.free.push(id);
            return Some((now, id));
        }
        None
    }

    /// The work that has passed a resource until `now`.
    pub(super) fn passed(&self, now: f64, resource: usize) -> f64 {
        self.passed[resource] + self.users[resource].iter().map(|&id| self.jobs[id].done(now)).sum::<f64>()
    }

    /// Computes the speeds of a resource's users again, because they have changed.
    fn share(&mut self, now: f64, resource: usize) {
        for i in 0..self.users[resource].len() {
            self.plan(now, self.users[resource][i]);
        }
    }

    fn plan(&mut self, now: f64, id: JobId) {
        let job = &self.jobs[id];
        let part = |&r: &usize| self.capacity[r] / self.users[r].len() as f64;
        let speed = job.used[..job.count].iter().map(part).fold(job.limit, f64::min);
        if speed == job.speed {
            return;
        }
        let done = job.done(now);
        job.used[..job.count].iter().for_each(|&r| self.passed[r] += done);
        let job = &mut self.jobs[id];
        job.left -= done;
        (job.since, job.speed) = (now, speed);
        job.version += 1;
        let end = if job.left > 0.0 { now + job.left / speed } else { now };
        self.sequence += 1;
        self.ends.push(Reverse((end.to_bits(), self.sequence, id, job.version)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_is_shared_evenly() {
        let mut r = Resources::default();
        let pool = r.add(2.0);
        // Three jobs of 4 on two cores: 2/3 of a core each until one ends, then a core each.
        let ids: Vec<JobId> = [4.0, 4.0, 8.0].map(|w| r.begin(0.0, w, 1.0, &[pool])).to_vec();
        assert_eq!(r.next(), Some((6.0, ids[0])));
        assert_eq!(r.next(), Some((6.0, ids[1])));
        assert_eq!(r.next(), Some((10.0, ids[2])));
        assert_eq!(r.next(), None);
    }

    #[test]
    fn a_job_is_as_fast_as_its_slowest_resource() {
        let mut r = Resources::default();
        let (wide, narrow) = (r.add(8.0), r.add(2.0));
        let a = r.begin(0.0, 16.0, f64::INFINITY, &[wide, narrow]);
        let b = r.begin(1.0, 8.0, f64::INFINITY, &[wide]);
        // b has half of 8 from second 1 on; a keeps 2.
        assert_eq!((r.passed(2.0, wide), r.passed(2.0, narrow)), (8.0, 4.0));
        assert_eq!(r.next(), Some((3.0, b)));
        assert_eq!((r.passed(3.0, wide), r.passed(3.0, narrow)), (14.0, 6.0));
        assert_eq!(r.next(), Some((8.0, a)));
        let c = r.begin(8.0, 0.0, 1.0, &[]);
        assert_eq!(r.next(), Some((8.0, c)));
    }
}
