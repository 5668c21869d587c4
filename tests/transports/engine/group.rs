// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups on threads, exchanges written as lists of peers and sizes, and what is expected of errors.

use cpattn::Fault;
use std::{
    collections::BTreeMap,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use cpattn::{
    Error, RunKind, RunName,
    transport::{Label, Message, Transport, engine::EngineTransport},
};

use super::mail::{Mail, Office};

pub type End = EngineTransport<Mail>;

/// What no test may reach.
pub const LONG: Duration = Duration::from_secs(60);
/// Of groups in which something fails by its deadline.
pub const SHORT: Duration = Duration::from_millis(800);

/// What `body` returns on each rank of `awaited`; the others may never return.
pub fn play<T: Send>(
    world: usize,
    deadline: Duration,
    awaited: &[usize],
    body: impl Fn(usize, End, &Office) -> T + Sync,
) -> BTreeMap<usize, T> {
    let office = Arc::new(Office::default());
    let (told, outcomes) = mpsc::channel();
    thread::scope(|scope| {
        for rank in 0..world {
            let (told, office, body) = (told.clone(), office.clone(), &body);
            scope.spawn(move || {
                let end = Mail::end(&office, rank, world, deadline);
                // Nobody waits for those that may never return.
                let _ = told.send((rank, body(rank, end, &office)));
            });
        }
        let (mut all, end) = (BTreeMap::new(), Instant::now() + 2 * LONG);
        while !awaited.iter().all(|rank| all.contains_key(rank)) {
            let left = end.saturating_duration_since(Instant::now());
            let Ok((rank, outcome)) = outcomes.recv_timeout(left) else {
                office.release();
                panic!("ranks {awaited:?} did not return; those that did: {:?}", all.keys());
            };
            all.insert(rank, outcome);
        }
        office.release();
        all
    })
}

/// Messages of some bytes each, of memory that is theirs.
pub fn messages(list: &[(usize, usize)], fill: u8) -> (Vec<Vec<u8>>, Vec<Message>) {
    let mut memory: Vec<_> = list.iter().map(|&(_, bytes)| vec![fill; bytes]).collect();
    let of = |(m, &(peer, bytes)): (&mut Vec<u8>, &(usize, usize))| Message { peer, ptr: m.as_mut_ptr(), bytes };
    let messages = memory.iter_mut().zip(list).map(of).collect();
    (memory, messages)
}

pub fn named(plan: u64) -> Label {
    Label { run: Some(RunName::new(RunKind::Forward, plan)), ..Label::new("ring", 3) }
}

/// Sends and receives so many bytes from ranks; what was received.
pub fn exchange(
    end: &End,
    label: Label,
    sends: &[(usize, usize)],
    recvs: &[(usize, usize)],
) -> Result<Vec<Vec<u8>>, Error> {
    let (_sent, out) = messages(sends, end.rank() as u8 + 1);
    let (received, into) = messages(recvs, 0);
    // SAFETY: memory of this call's.
    let outcome = unsafe { end.exchange(label, &out, &into) };
    assert!(outcome.is_ok() || received.iter().flatten().all(|&b| b == 0) || recvs.len() > 1, "memory was written");
    outcome.map(|()| received)
}

/// Rank at fault and text of an error that the ranks found.
pub fn found(outcome: Result<impl std::fmt::Debug, Error>) -> (Option<usize>, bool, String) {
    let error = outcome.unwrap_err();
    let Error::Peer { fault: Fault::Found { peer, differ, .. }, .. } = error else { panic!("{error}") };
    assert_eq!(error.peer(), peer);
    (peer, differ, error.to_string())
}

#[track_caller]
pub fn says(outcome: &(Option<usize>, bool, String), peer: Option<usize>, words: &str) {
    assert!(outcome.0 == peer && outcome.2.contains(words), "{outcome:?}, expected {peer:?} and {words:?}");
}
