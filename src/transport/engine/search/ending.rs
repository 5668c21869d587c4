// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a rank ends: by an abort, of which it notifies all other ranks, or by leaving, which they notice when they ask.
//!
//! The process may end right after either, and with it its threads, its connections and perhaps the store. So a rank
//! that aborts writes its answer before the question, because nobody can ask it afterwards, and returns when all other
//! ranks have the verdict, and so does a call that returns the verdict as an error. Neither waits for a rank that has
//! not connected, and every wait has a limit.

use std::{
    format,
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
    thread,
    time::Duration,
};

use super::{
    super::contract::{Engine, Failed},
    EngineGroup, Ranks, THERE, lock,
};

/// How long a rank that leaves waits for its threads, and a rank that aborts for ranks that do not answer.
const ENDING: Duration = Duration::from_secs(1);

impl<E: Engine> EngineGroup<E> {
    /// This rank stops taking part, by its own decision. Returns when all connected ranks know of it, after the grace
    /// at the latest.
    pub(in super::super) fn end(self: &Arc<Self>, why: &str) {
        let first = {
            let mut state = self.state();
            let first = state.failed.is_none();
            if first {
                (state.failed, state.ended) = (Some(why.into()), Some(why.into()));
            }
            first
        };
        let notified = first.then(|| self.notify());
        self.engine.close();
        if let Some(notified) = notified {
            let _ = notified.recv_timeout(self.grace());
        }
    }

    /// Notifies all others why this rank has ended, on a thread; the receiver is disconnected when that thread ends.
    fn notify(self: &Arc<Self>) -> Receiver<()> {
        let (ending, ended) = mpsc::channel();
        if self.state().listening {
            self.spawn_or_run("cpattn question", move |group| {
                let _ending = ending;
                // A rank that the store does not reach cannot be notified.
                let _ = group
                    .publish_state()
                    .and_then(|()| group.write_query(false, None))
                    .and_then(|()| group.wait_until_all_know());
            });
        }
        ended
    }

    /// Waits for all ranks that have started, except a rank at fault that has not answered.
    pub(super) fn wait_until_all_know(&self) -> Result<(), Failed> {
        let end = self.pulse.time() + self.grace().min(ENDING);
        for rank in (0..self.world).filter(|&rank| rank != self.rank) {
            while self.engine.get(&format!("knows/{rank}"))?.is_none() && self.has_opened(rank)? {
                let at_fault = self.state().verdict.as_ref().is_some_and(|verdict| verdict.peer == Some(rank));
                let gone = at_fault && self.engine.get(&format!("says/{rank}"))?.is_none();
                if gone || self.pulse.time() > end {
                    break;
                }
                thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(())
    }

    /// This rank leaves; ranks that still need it find that out when they ask.
    pub(in super::super) fn leave(self: &Arc<Self>) {
        if !self.process.is_this() {
            return;
        }
        {
            let mut state = self.state();
            state.left = true;
            state.ended.get_or_insert_with(|| "has left the group".into());
            state.failed.get_or_insert_with(|| "this rank has left it".into());
        }
        self.pulse.close();
        if self.is_searching() {
            self.spawn_or_run("cpattn leaving", |group| {
                // Without the store no other rank can ask either.
                let _ = group.publish_state();
                let _ = group.engine.put(&format!("ask/{}", group.rank), THERE);
            });
        }
        let threads = lock(&self.threads.count);
        let waited = self.threads.fewer.wait_timeout_while(threads, ENDING, |count| *count > 0);
        if waited.is_ok_and(|(threads, _)| *threads > 0) {
            // The engine outlives this rank; peers must not wait for it.
            self.engine.close();
        }
    }
}
