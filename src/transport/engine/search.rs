// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds the rank at fault: the ranks ask each other through the engine's store.
//!
//! A thread of each rank waits for a question in the store, which costs nothing while nothing fails. The rank that
//! fails first writes a question for every rank; each answers what it waits for, and closes its engine. The first
//! verdict in the store counts for every rank. [`verdict`](super::verdict) draws it from the answers.
//!
//! A call into the store may never return if the process that holds it is stopped or dead, so each call is made on a
//! separate thread that nothing joins. The process that holds the store may end as soon as a call has returned its
//! error, so that waits, at most a second, until the other ranks have the verdict too. Keys, each written once:
//! `here/RANK` when a rank has started, `ask/RANK` the question to it, `asker` the first rank that asked, `says/RANK`
//! its answer, `verdict` the verdict, `knows/RANK` when a rank has the verdict or has left. A forked child has none of
//! these threads. How a rank ends is in [`ending`].

mod ending;

use std::{
    boxed::Box,
    format, io,
    string::{String, ToString},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::Duration,
    vec::Vec,
};

use super::{
    contract::{Engine, Failed},
    pulse::{Pulse, detached},
    verdict::{self, RankState, Ranks, SearchOrigin, Verdict, read},
    waits::Wait,
};
use crate::{sync::Process, transport::fault::grace};

/// The shortest timeout for the store: its process may share a core with many starting processes.
const STORE: Duration = Duration::from_secs(10);
/// The value of keys that carry no information but their existence.
const THERE: &[u8] = b"1";
/// Stands for the rank that asks.
const JOINING: &[u8] = b"joining";

/// The state that the threads of one rank share.
pub(super) struct EngineGroup<E> {
    pub(super) engine: E,
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) deadline: Duration,
    pulse: Arc<Pulse>,
    state: Mutex<SearchState>,
    known: Condvar,
    threads: Arc<Threads>,
    process: Process,
}

#[derive(Default)]
struct SearchState {
    /// Why the group has failed.
    failed: Option<String>,
    /// Why this rank has ended.
    ended: Option<String>,
    wait: Option<Wait>,
    /// When `wait` was set last.
    since: Duration,
    verdict: Option<Verdict>,
    connected: bool,
    listening: bool,
    known: bool,
    left: bool,
}

/// The number of threads that a leaving rank waits for.
#[derive(Default)]
struct Threads {
    count: Mutex<usize>,
    fewer: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<E: Engine> EngineGroup<E> {
    pub(super) fn new(engine: E, deadline: Duration) -> Self {
        Self {
            rank: engine.rank(),
            world: engine.world(),
            engine,
            deadline,
            pulse: Arc::new(Pulse::new(deadline)),
            state: Mutex::default(),
            known: Condvar::new(),
            threads: Arc::default(),
            process: Process::this(),
        }
    }

    fn state(&self) -> MutexGuard<'_, SearchState> {
        lock(&self.state)
    }

    /// The time allowed for an answer: a thread of that rank may first have to get a core.
    fn grace(&self) -> Duration {
        grace(self.deadline, Duration::from_millis(500))
    }

    /// The longest time for the search.
    fn limit(&self) -> Duration {
        2 * self.grace() + Duration::from_secs(1)
    }

    pub(super) fn wait(&self) -> Option<Wait> {
        self.state().wait
    }

    pub(super) fn set_wait(&self, wait: Option<Wait>) {
        let now = self.pulse.time();
        let mut state = self.state();
        (state.wait, state.since) = (wait, now);
    }

    pub(super) fn is_connected(&self) -> bool {
        self.state().connected
    }

    pub(super) fn set_connected(&self) {
        self.state().connected = true;
    }

    pub(super) fn has_failed(&self) -> bool {
        self.state().failed.is_some()
    }

    pub(super) fn failed(&self) -> String {
        self.state().failed.clone().unwrap_or_default()
    }

    /// Marks the group as failed; the first reason stays.
    pub(super) fn set_failed(&self, why: &str) {
        self.state().failed.get_or_insert_with(|| why.into());
    }

    pub(super) fn has_ended(&self) -> bool {
        self.state().ended.is_some()
    }

    /// Sets the verdict without a search, if the ranks cannot be asked.
    pub(super) fn publish(&self, verdict: Verdict) {
        self.state().verdict.get_or_insert(verdict);
    }

    /// For a group that has failed: whether the search for the rank at fault is not over. Without a listening thread
    /// there is none.
    pub(super) fn is_searching(&self) -> bool {
        let state = self.state();
        state.listening && !state.known
    }

    /// The verdict. Waits for it while a search runs.
    pub(super) fn wait_for_verdict(&self) -> Option<Verdict> {
        if self.is_searching() {
            self.wait_until_known();
        }
        self.state().verdict.clone()
    }

    /// Waits at most for the limit; time in which the process does not run does not count.
    fn wait_until_known(&self) {
        let end = self.pulse.time() + self.limit();
        let mut state = self.state();
        while !state.known && self.pulse.time() < end {
            state = self.known.wait_timeout(state, self.pulse.every).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Runs `job` on a thread of its own and returns its result. `None` if it does not return within `time` and the
    /// grace (at least [`STORE`]), or if the group fails meanwhile: the thread then continues without a reader. If the
    /// process is stopped meanwhile, one interval of the pulse counts at most.
    ///
    /// # Errors
    /// If the thread cannot start.
    pub(super) fn within<T: Send + 'static>(
        self: &Arc<Self>,
        time: Duration,
        job: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> io::Result<Option<T>> {
        let (done, outcome) = mpsc::channel();
        let (group, every) = (self.clone(), self.pulse.every);
        let run = move || {
            let outcome = job(&group);
            // Dropped before the answer is sent: its receiver may leave at once, and the engine must not be dropped
            // later, on this thread.
            drop(group);
            // The receiver may be gone.
            let _ = done.send(outcome);
        };
        detached("cpattn engine", Box::new(run))?;
        let looks = (time + self.grace()).max(STORE).as_micros().div_ceil(every.as_micros());
        for _ in 0..looks {
            match outcome.recv_timeout(every) {
                Ok(outcome) => return Ok(Some(outcome)),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(None),
                Err(mpsc::RecvTimeoutError::Timeout) if self.has_failed() => return Ok(None),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
        }
        Ok(None)
    }

    /// Writes to the store that this rank has started. Returns the verdict, if there is one already.
    pub(super) fn open(&self) -> Result<Option<Verdict>, Failed> {
        self.engine.open()?;
        self.engine.put(&format!("here/{}", self.rank), THERE)?;
        match self.engine.get("verdict")? {
            Some(verdict) => read(Verdict::read(&verdict)).map(Some),
            None => Ok(None),
        }
    }

    /// Starts a thread that this rank waits for when it leaves.
    fn spawn(self: &Arc<Self>, name: &str, job: impl FnOnce(&Arc<Self>) + Send + 'static) -> io::Result<()> {
        let (group, threads) = (self.clone(), self.threads.clone());
        *lock(&threads.count) += 1;
        let run = move || {
            job(&group);
            // May drop the engine too; a wait for the threads must include that.
            drop(group);
            *lock(&threads.count) -= 1;
            threads.fewer.notify_all();
        };
        detached(name, Box::new(run)).inspect_err(|_| *lock(&self.threads.count) -= 1)
    }

    /// The same for a job that must be done: on this thread if none can start, where it may wait for the store.
    fn spawn_or_run(self: &Arc<Self>, name: &str, job: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let once = Arc::new(Mutex::new(Some(job)));
        let take = once.clone();
        let run = move |group: &Arc<Self>| {
            let job = lock(&take).take();
            if let Some(job) = job {
                job(group);
            }
        };
        if self.spawn(name, run).is_err()
            && let Some(job) = lock(&once).take()
        {
            job(self);
        }
    }

    /// Starts to answer questions.
    ///
    /// # Errors
    /// If a thread cannot start. The other ranks then have no answer from this one: it must end the group.
    pub(super) fn listen(self: &Arc<Self>) -> io::Result<()> {
        if self.world > 1 {
            self.pulse.start()?;
            self.state().listening = true;
            self.spawn("cpattn listener", |group| group.answer_query())
                .inspect_err(|_| self.state().listening = false)?;
        }
        Ok(())
    }

    /// Ends a group that is being made, on all ranks, because this one cannot start a thread. The verdict.
    pub(super) fn give_up(&self, has_opened: bool) -> Verdict {
        let found = Verdict::of(self.rank, "could not start a thread; see its own error");
        // On this thread, for want of another: if the store does not answer, this waits as long as the engine does.
        let opened = if has_opened { Ok(None) } else { self.open() };
        let _ = opened.and_then(|_| self.write_query(true, Some(found.clone())));
        self.publish(found.clone());
        found
    }

    fn answer_query(&self) {
        let outcome = self.engine.wait_for(&format!("ask/{}", self.rank)).and_then(|()| {
            if !self.state().left {
                self.publish_state()?;
                self.set_failed("another rank ended it");
                self.engine.close();
                let found = self.find()?;
                self.agree_on(&found)?;
            }
            self.engine.put(&format!("knows/{}", self.rank), THERE)?;
            // The process, and the store in it, may end as soon as the error is returned.
            self.wait_until_all_know()
        });
        if let Err(failed) = outcome {
            let why = "the store of the process group, or the process that holds it, is gone";
            self.publish(Verdict::unknown(&format!("{why} ({})", failed.text)));
        }
        self.state().known = true;
        self.known.notify_all();
    }

    /// Writes the verdict. If the store has one already, that one counts on every rank.
    fn agree_on(&self, found: &Verdict) -> Result<(), Failed> {
        let first = read(Verdict::read(&self.engine.put("verdict", &found.write())?))?;
        self.state().verdict = Some(first);
        Ok(())
    }

    fn publish_state(&self) -> Result<(), Failed> {
        let now = self.pulse.time();
        let said = {
            let state = self.state();
            RankState {
                ended: state.ended.clone(),
                wait: state.wait.map(|wait| wait.said()),
                time: now - state.since.min(now),
            }
        };
        self.engine.put(&format!("says/{}", self.rank), &said.write()).map(|_| ())
    }

    fn find(&self) -> Result<Verdict, Failed> {
        if self.engine.get("verdict")?.is_some() {
            return Ok(Verdict::default()); // which is not the first
        }
        let asker = self.engine.get("asker")?.unwrap_or_default();
        let rank = || str::from_utf8(&asker).ok()?.parse().ok().filter(|&rank| rank < self.world);
        let asker = if asker == JOINING { SearchOrigin::Joining } else { SearchOrigin::Rank(read(rank())?) };
        verdict::find(asker, self.world, self.deadline, self)
    }

    /// The verdict of the search for the rank at fault, after a failure on this rank. `joining`: the group was being
    /// made. `found`: the verdict that this rank already has.
    pub(super) fn start_search(self: &Arc<Self>, joining: bool, found: Option<Verdict>) -> Verdict {
        let asked = found.clone();
        if self.is_searching() {
            self.spawn_or_run("cpattn question", move |group| _ = group.write_query(joining, asked));
            self.wait_until_known();
        }
        let verdict = self.state().verdict.clone();
        verdict.or(found).unwrap_or_else(|| {
            let limit = self.limit().as_secs_f64();
            Verdict::unknown(&format!(
                "the store of the process group did not answer within {limit:.1} s; see whether the process that holds it runs"
            ))
        })
    }

    /// Writes the question to all ranks, after the verdict if this rank has `found` one.
    fn write_query(&self, joining: bool, found: Option<Verdict>) -> Result<(), Failed> {
        if let Some(found) = found {
            self.agree_on(&found)?;
        }
        let mine = if joining { JOINING.to_vec() } else { self.rank.to_string().into_bytes() };
        let first = self.engine.put("asker", &mine)?;
        let asked: Vec<usize> = if first == mine { (0..self.world).collect() } else { std::vec![self.rank] };
        for rank in asked {
            self.engine.put(&format!("ask/{rank}"), THERE)?;
        }
        Ok(())
    }
}

/// The ranks are asked through the store.
impl<E: Engine> Ranks for EngineGroup<E> {
    fn has_opened(&self, rank: usize) -> Result<bool, Failed> {
        Ok(self.engine.get(&format!("here/{rank}"))?.is_some())
    }

    fn answer(&self, rank: usize) -> Result<Option<RankState>, Failed> {
        let (key, end) = (format!("says/{rank}"), self.pulse.time() + self.grace());
        while !self.state().left {
            let over = self.pulse.time() > end; // and one more look
            if let Some(said) = self.engine.get(&key)? {
                return read(RankState::read(&said)).map(Some);
            }
            // Another rank has found the verdict.
            if over || self.engine.get("verdict")?.is_some() {
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(None)
    }
}
