// SPDX-License-Identifier: MIT OR Apache-2.0
//! After a run over processes: sends all parts to rank 0, and waits while it compares them.
//!
//! Both use a second transport with the same deadline, so that a rank that dies or is stopped here is named too. Rank 0
//! may compare for longer than the deadline; meanwhile one of its threads regularly sends a sign of life. The others
//! send nothing meanwhile, and `MPI_Finalize` waits for each of them without a limit, so all ranks synchronise at the
//! end.

use std::{
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};

use cpattn::transport::{Label, Message, Transport};

/// Sends `out` to `to`, or receives as many bytes from each of `from`.
fn exchange(
    end: &impl Transport,
    operation: &'static str,
    out: &[(usize, &[u8])],
    into: &mut [(usize, Vec<u8>)],
) -> cpattn::Result<()> {
    let message = |peer, ptr, bytes| Message { peer, ptr, bytes };
    let sends: Vec<_> = out.iter().map(|(peer, b)| message(*peer, b.as_ptr().cast_mut(), b.len())).collect();
    let recvs: Vec<_> = into.iter_mut().map(|(peer, b)| message(*peer, b.as_mut_ptr(), b.len())).collect();
    // SAFETY: the ranges are borrowed, those of the receives mutably, until the call returns.
    unsafe { end.exchange(Label::new(operation, 0), &sends, &recvs) }
}

/// On rank 0 what each other rank gave, from rank 1 on; nothing elsewhere. `mine` is not empty.
pub fn gather(end: &impl Transport, mine: &[u8]) -> cpattn::Result<Vec<Vec<u8>>> {
    let what = "gathering results";
    if end.rank() != 0 {
        exchange(end, what, &[(0, &(mine.len() as u64).to_ne_bytes())], &mut [])?;
        exchange(end, what, &[(0, mine)], &mut [])?;
        return Ok(Vec::new());
    }
    let mut sizes: Vec<_> = (1..end.world()).map(|peer| (peer, vec![0; 8])).collect();
    exchange(end, what, &[], &mut sizes)?;
    let size = |bytes: Vec<u8>| u64::from_ne_bytes(bytes.try_into().expect("8 bytes")) as usize;
    let mut parts: Vec<_> = sizes.into_iter().map(|(peer, bytes)| (peer, vec![0; size(bytes)])).collect();
    exchange(end, what, &[], &mut parts)?;
    Ok(parts.into_iter().map(|part| part.1).collect())
}

/// Rank 0's thread that says that it is alive.
pub struct Alive {
    over: mpsc::Sender<()>,
    thread: JoinHandle<cpattn::Result<()>>,
}

impl Alive {
    /// Tells all other ranks so, every so often, until the end; they are in [`wait`].
    pub fn new(end: Arc<impl Transport + 'static>, every: Duration) -> Self {
        let (over, heard) = mpsc::channel();
        let thread = thread::spawn(move || {
            loop {
                // Anything but "not yet" is the end: it was said, or the one to say it is gone.
                let is_over = heard.recv_timeout(every) != Err(mpsc::RecvTimeoutError::Timeout);
                let word = [u8::from(is_over)];
                let words: Vec<_> = (1..end.world()).map(|peer| (peer, &word[..])).collect();
                exchange(&*end, "comparing results", &words, &mut [])?;
                if is_over {
                    return Ok(());
                }
            }
        });
        Self { over, thread }
    }

    /// Tells them that rank 0 is done.
    fn finish(self) -> Result<(), String> {
        let _ = self.over.send(());
        self.thread.join().map_err(|_| "the thread of signs of life panicked".to_owned())?.map_err(|e| e.to_string())
    }
}

/// On other ranks: waits until rank 0 is done, but no longer than the deadline after its last sign of life.
fn wait(end: &impl Transport) -> cpattn::Result<()> {
    let mut word = [(0, vec![0])];
    while word[0].1 == [0] {
        exchange(end, "waiting for rank 0's comparison", &[], &mut word)?;
    }
    Ok(())
}

/// The last call of every rank before MPI is finalised: rank 0, with its `alive`, is done, and the others have waited
/// for that. Then all agree, within the deadline: `MPI_Finalize` would wait without a limit for one that has died or
/// was stopped while rank 0 compared, and could not name it.
pub fn meet(end: &impl Transport, alive: Option<Alive>) -> Result<(), String> {
    match alive {
        Some(alive) => alive.finish()?,
        None if end.rank() == 0 => {}
        None => wait(end).map_err(|e| e.to_string())?,
    }
    end.agree(0..end.world(), 0).map_err(|e| format!("after rank 0's comparison: {e}"))
}

/// Several runs of bytes as one.
pub fn pack(runs: &[&[u8]]) -> Vec<u8> {
    let lengths = runs.iter().map(|run| run.len() as u64);
    let mut all: Vec<u8> = [runs.len() as u64].into_iter().chain(lengths).flat_map(u64::to_ne_bytes).collect();
    runs.iter().for_each(|run| all.extend_from_slice(run));
    all
}

/// What was packed.
pub fn unpack(all: &[u8]) -> Vec<&[u8]> {
    let number = |at: usize| u64::from_ne_bytes(all[8 * at..8 * at + 8].try_into().expect("8 bytes")) as usize;
    let mut at = 8 * (1 + number(0));
    (1..=number(0))
        .map(|run| {
            let begin = at;
            at += number(run);
            &all[begin..at]
        })
        .collect()
}
