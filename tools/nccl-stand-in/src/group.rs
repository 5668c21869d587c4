// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a thread collects between `ncclGroupStart` and `ncclGroupEnd`; a call outside is a group of its own.

use crate::codes::{Failure, IN_PROGRESS, INVALID_USAGE, Outcome, SUCCESS, keep};
use crate::comm::{Comm, find};
use crate::rendezvous::UniqueId;
use crate::work::{Group, Launch, Local, Message};
use std::cell::RefCell;
use std::ffi::c_int;
use std::sync::Arc;

/// What one call adds to its group.
pub(crate) struct Call {
    pub(crate) comm: usize,
    pub(crate) stream: usize,
    pub(crate) messages: Vec<Message>,
    pub(crate) local: Vec<Local>,
}

#[derive(Default)]
struct Open {
    depth: u32,
    calls: Vec<Call>,
    /// Communicators to be made.
    making: Vec<(Arc<Comm>, UniqueId)>,
    failure: Option<Failure>,
}

thread_local! {
    static OPEN: RefCell<Open> = RefCell::default();
}

pub(crate) fn start() {
    OPEN.with_borrow_mut(|o| o.depth += 1);
}

/// Adds a call to the open group, or issues it alone.
pub(crate) fn add(call: Call) -> Outcome<c_int> {
    find(call.comm)?.usable()?;
    let alone = OPEN.with_borrow_mut(|o| {
        if o.depth == 0 {
            return Some(call);
        }
        o.calls.push(call);
        None
    });
    alone.map_or(Ok(SUCCESS), |call| issue(vec![call]))
}

/// Lets the ranks of a communicator meet: now, at the end of the open group, or behind the caller's back.
pub(crate) fn make(comm: Arc<Comm>, id: UniqueId) -> Outcome<c_int> {
    let alone = OPEN.with_borrow_mut(|o| {
        if o.depth == 0 {
            return Some((comm, id));
        }
        o.making.push((comm, id));
        None
    });
    match alone {
        Some((comm, id)) if comm.blocking => comm.make(&id).map(|()| SUCCESS),
        Some((comm, id)) => {
            std::thread::spawn(move || comm.make(&id));
            Ok(IN_PROGRESS)
        }
        None => Ok(SUCCESS),
    }
}

/// A call inside the group was refused: the group is, too.
pub(crate) fn spoil(failure: &Failure) {
    OPEN.with_borrow_mut(|o| {
        if o.depth > 0 && o.failure.is_none() {
            o.failure = Some(failure.clone());
        }
    });
}

pub(crate) fn end() -> Outcome<c_int> {
    let open = OPEN.with_borrow_mut(|o| match o.depth {
        0 => Err(Failure::new(INVALID_USAGE, "ncclGroupEnd without ncclGroupStart")),
        1 => Ok(Some(std::mem::take(o))),
        _ => {
            o.depth -= 1;
            Ok(None)
        }
    })?;
    let Some(open) = open else { return Ok(SUCCESS) };
    if let Some(failure) = open.failure {
        return Err(failure);
    }
    let made = meet(open.making)?;
    let issued = issue(open.calls)?;
    Ok(if made == IN_PROGRESS { made } else { issued })
}

/// All communicators of a group are made at once: they may wait for each other.
fn meet(making: Vec<(Arc<Comm>, UniqueId)>) -> Outcome<c_int> {
    let mut code = SUCCESS;
    let mut threads = Vec::new();
    for (comm, id) in making {
        let blocking = comm.blocking;
        let thread = std::thread::spawn(move || comm.make(&id));
        if blocking {
            threads.push(thread);
        } else {
            code = IN_PROGRESS;
        }
    }
    let mut failure = None;
    for t in threads {
        if let Ok(Err(f)) = t.join() {
            failure.get_or_insert(f);
        }
    }
    failure.map_or(Ok(code), Err)
}

/// Puts the calls into streams: one piece of work for each communicator, in the order in which they were first named.
fn issue(calls: Vec<Call>) -> Outcome<c_int> {
    let mut by_comm: Vec<(usize, Group, Vec<usize>)> = Vec::new();
    for call in calls {
        let at = match by_comm.iter().position(|g| g.0 == call.comm) {
            Some(at) => at,
            None => {
                by_comm.push((call.comm, Group::default(), Vec::new()));
                by_comm.len() - 1
            }
        };
        let (_, group, streams) = &mut by_comm[at];
        let base = group.messages.len();
        group.messages.extend(call.messages);
        for mut l in call.local {
            if let Local::Reduce { arrived, .. } = &mut l {
                arrived.iter_mut().for_each(|a| a.1 += base);
            }
            group.local.push(l);
        }
        if !streams.contains(&call.stream) {
            streams.push(call.stream);
        }
    }
    let mut code = SUCCESS;
    for (handle, group, streams) in by_comm {
        let comm = find(handle)?;
        let rank = comm.shared.rank;
        let own = |sends| group.messages.iter().filter(move |m| m.peer == rank && m.sends == sends);
        if !own(true).map(|m| m.bytes).eq(own(false).map(|m| m.bytes)) {
            let why = "sends of a rank to itself need receives of the same sizes in the same group";
            return Err(Failure::new(INVALID_USAGE, why));
        }
        match comm.launch(Launch { group: Arc::new(group), streams })? {
            SUCCESS => {}
            later => code = later,
        }
    }
    Ok(code)
}

/// What a call gives: its code, with the failure kept and the open group spoilt.
pub(crate) fn result(done: Outcome<c_int>) -> c_int {
    done.unwrap_or_else(|failure| {
        spoil(&failure);
        keep(&failure)
    })
}
