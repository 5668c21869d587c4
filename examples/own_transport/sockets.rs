// SPDX-License-Identifier: MIT OR Apache-2.0
//! A transport over Unix sockets: two to each peer, one for exchanges and one for agreements, because `agree` on one
//! rank and `exchange` on another may run at the same time.
//!
//! Sockets do not block, and the thread of the call moves all messages in turn. So a call sends and receives at the
//! same time, watches its deadline, and has left the memory of its messages when it returns. `tests.rs` has a test for
//! each rule of the contract (`docs/transport_contract.md`). One thing is simpler than in the transports of the crate:
//! a rank whose deadline passes names the first peer that owes it a message, and does not ask whether that peer waits
//! for another one.

use cpattn::{
    Cause, Error, Result, RunName,
    transport::{Label, Message, Transport},
};
use std::{
    io::{ErrorKind, Read, Write},
    net::Shutdown,
    ops::Range,
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

/// The streams to one peer.
#[derive(Debug)]
struct Peer {
    exchange: UnixStream,
    agree: UnixStream,
}

/// One rank's end.
#[derive(Debug)]
pub struct Sockets {
    rank: usize,
    /// By rank; none at this rank's own place.
    peers: Vec<Option<Peer>>,
    deadline: Duration,
    /// The first failure. A group that failed stays failed.
    failed: Mutex<Option<Error>>,
    announced: Mutex<Option<RunName>>,
}

/// One direction of one stream: messages in their order, each after a header with its size.
struct Queue<'a> {
    peer: usize,
    messages: Vec<&'a Message>,
    /// Bytes of the first message that have moved, its header included.
    moved: usize,
    header: [u8; 8],
}

/// The bytes of a header.
const HEADER: usize = size_of::<u64>();

impl<'a> Queue<'a> {
    /// The messages of each peer, in the order of the list.
    fn of(messages: &'a [Message]) -> Vec<Self> {
        let mut queues: Vec<Self> = Vec::new();
        for m in messages {
            match queues.iter_mut().find(|q| q.peer == m.peer) {
                Some(queue) => queue.messages.push(m),
                None => queues.push(Self { peer: m.peer, messages: vec![m], moved: 0, header: [0; HEADER] }),
            }
        }
        queues
    }

    fn left(&self) -> u64 {
        (self.messages.iter().map(|m| m.bytes + HEADER).sum::<usize>() - self.moved) as u64
    }

    /// Moves what the stream takes or has now, and returns the number of bytes.
    ///
    /// # Safety
    /// The bytes of the messages are valid for reads, and for writes if they are received; nothing else writes them.
    unsafe fn advance(&mut self, mut stream: &UnixStream, receive: bool) -> std::result::Result<usize, Cause> {
        let mut total = 0;
        while let Some(&message) = self.messages.first() {
            if !receive {
                self.header = (message.bytes as u64).to_le_bytes();
            }
            let done = if self.moved < HEADER {
                let rest = &mut self.header[self.moved..];
                if receive { stream.read(rest) } else { stream.write(rest) }
            } else {
                let at = self.moved - HEADER;
                // SAFETY: `at` is at most `bytes`, and the caller vouches for the memory.
                unsafe {
                    let (from, left) = (message.ptr.add(at), message.bytes - at);
                    match receive {
                        true => stream.read(std::slice::from_raw_parts_mut(from, left)),
                        false => stream.write(std::slice::from_raw_parts(from, left)),
                    }
                }
            };
            match done {
                Ok(0) => return Err(Cause::Left),
                Ok(n) => (self.moved, total) = (self.moved + n, total + n),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(total),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Err(Cause::Left),
            }
            let theirs = u64::from_le_bytes(self.header);
            if receive && self.moved == HEADER && theirs != message.bytes as u64 {
                return Err(Cause::Size { ours: message.bytes as u64, theirs });
            }
            if self.moved == HEADER + message.bytes {
                self.messages.remove(0);
                self.moved = 0;
            }
        }
        Ok(total)
    }
}

impl Sockets {
    /// Connects this process with the other ranks, whose sockets are in `folder`: the same one on every rank, for one
    /// group.
    pub fn connect(folder: &Path, rank: usize, world: usize, deadline: Duration) -> std::io::Result<Self> {
        let begin = Instant::now();
        let in_time = |waits_for: String| {
            thread::sleep(Duration::from_millis(1));
            let late = || std::io::Error::new(ErrorKind::TimedOut, format!("rank {rank} waited for {waits_for}"));
            if begin.elapsed() < deadline { Ok(()) } else { Err(late()) }
        };
        // A name that appears when the socket already listens.
        let (hidden, shown) = (folder.join(format!(".{rank}")), folder.join(rank.to_string()));
        let listener = UnixListener::bind(&hidden)?;
        listener.set_nonblocking(true)?;
        std::fs::rename(&hidden, &shown)?;
        let mut streams: Vec<[Option<UnixStream>; 2]> = (0..world).map(|_| [None, None]).collect();
        // Each rank calls the lower ones and says its number and the purpose of the stream.
        for (peer, pair) in streams[..rank].iter_mut().enumerate() {
            for (purpose, place) in pair.iter_mut().enumerate() {
                let mut stream = loop {
                    match UnixStream::connect(folder.join(peer.to_string())) {
                        Ok(stream) => break stream,
                        Err(_) => in_time(format!("rank {peer}"))?,
                    }
                };
                stream.write_all(&[rank, purpose].map(|n| n as u32).map(u32::to_le_bytes).concat())?;
                *place = Some(stream);
            }
        }
        for _ in 0..2 * (world - 1 - rank) {
            let mut stream = loop {
                match listener.accept() {
                    Ok((stream, _)) => break stream,
                    Err(e) if e.kind() == ErrorKind::WouldBlock => in_time("higher ranks".into())?,
                    Err(e) => return Err(e),
                }
            };
            let (mut who, mut purpose) = ([0; 4], [0; 4]);
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(Some(deadline))?;
            stream.read_exact(&mut who)?;
            stream.read_exact(&mut purpose)?;
            let [who, purpose] = [who, purpose].map(|n| u32::from_le_bytes(n) as usize);
            streams[who][purpose] = Some(stream);
        }
        let peers = streams.into_iter().map(|[exchange, agree]| exchange.zip(agree));
        let peers: Vec<_> = peers.map(|pair| pair.map(|(exchange, agree)| Peer { exchange, agree })).collect();
        for peer in peers.iter().flatten() {
            peer.exchange.set_nonblocking(true)?;
            peer.agree.set_nonblocking(true)?;
        }
        Ok(Self { rank, peers, deadline, failed: Mutex::default(), announced: Mutex::default() })
    }

    /// Refuses lists that break the contract, before anything moves.
    fn check(&self, messages: &[Message]) -> Result<()> {
        for m in messages {
            if m.peer >= self.world() || m.peer == self.rank {
                let expected = format!("another rank of the world of {}", self.world());
                return Err(Error::invalid("message.peer", m.peer, expected));
            }
            if m.bytes == 0 {
                return Err(Error::invalid("message.bytes", 0, "at least 1"));
            }
        }
        Ok(())
    }

    /// Moves all messages over the chosen streams of the peers.
    ///
    /// # Safety
    /// As [`Transport::exchange`].
    unsafe fn transfer(
        &self,
        stream: impl Fn(&Peer) -> &UnixStream,
        label: Label,
        sends: &[Message],
        recvs: &[Message],
    ) -> Result<()> {
        self.poll()?;
        self.check(sends)?;
        self.check(recvs)?;
        let mut queues: Vec<_> = Queue::of(sends).into_iter().map(|q| (false, q)).collect();
        queues.extend(Queue::of(recvs).into_iter().map(|q| (true, q)));
        let mut since = Instant::now();
        while !queues.is_empty() {
            let mut moved = 0;
            for (receive, queue) in &mut queues {
                let Some(peer) = &self.peers[queue.peer] else { continue };
                // SAFETY: as this function's caller promises.
                match unsafe { queue.advance(stream(peer), *receive) } {
                    Ok(n) => moved += n,
                    Err(cause) => return Err(self.fail(label.error(self.rank, queue.peer, cause))),
                }
            }
            queues.retain(|(_, q)| !q.messages.is_empty());
            self.poll()?; // an abort by another thread
            if moved > 0 {
                since = Instant::now();
            } else if let Some((_, late)) = queues.iter().find(|_| since.elapsed() > self.deadline) {
                let bytes = queues.iter().map(|(_, q)| q.left()).sum();
                let cause = Cause::Deadline { ms: since.elapsed().as_millis() as u64, bytes };
                return Err(self.fail(label.error(self.rank, late.peer, cause)));
            } else {
                thread::sleep(Duration::from_micros(20));
            }
        }
        Ok(())
    }

    /// Keeps the first failure, and shuts all streams, so that no peer waits for this rank.
    fn fail(&self, error: Error) -> Error {
        let mut failed = self.failed.lock().unwrap_or_else(|e| e.into_inner());
        if failed.is_none() {
            for peer in self.peers.iter().flatten() {
                let _ = (peer.exchange.shutdown(Shutdown::Both), peer.agree.shutdown(Shutdown::Both));
            }
        }
        failed.get_or_insert(error).clone()
    }
}

impl Transport for Sockets {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.peers.len()
    }

    fn announce(&self, run: Option<RunName>) {
        *self.announced.lock().unwrap_or_else(|e| e.into_inner()) = run;
    }

    fn agree(&self, group: Range<usize>, fingerprint: u64) -> Result<()> {
        let mine = fingerprint.to_le_bytes();
        let mut numbers = vec![fingerprint.to_le_bytes(); group.len()];
        let others = || group.clone().filter(|&peer| peer != self.rank);
        let sends: Vec<_> =
            others().map(|peer| Message { peer, ptr: mine.as_ptr().cast_mut(), bytes: mine.len() }).collect();
        let all = numbers.as_mut_ptr().cast::<[u8; 8]>();
        // SAFETY: `peer` is in the group, so its number is in the vector.
        let place = |peer: usize| unsafe { all.add(peer - group.start).cast::<u8>() };
        let recvs: Vec<_> = others().map(|peer| Message { peer, ptr: place(peer), bytes: mine.len() }).collect();
        let label = Label { run: *self.announced.lock().unwrap_or_else(|e| e.into_inner()), ..Label::new("agree", 0) };
        // SAFETY: `mine` and `numbers` live until the call has returned, and each number is received once.
        unsafe { self.transfer(|p| &p.agree, label, &sends, &recvs) }?;
        // Ranks that differ are no failure of the transport: the group stays usable.
        let numbers = group.clone().zip(numbers.into_iter().map(u64::from_le_bytes));
        match numbers.into_iter().find(|&(_, number)| number != fingerprint) {
            Some((peer, theirs)) => Err(Error::disagreement(self.rank, peer, fingerprint, theirs)),
            None => Ok(()),
        }
    }

    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        // SAFETY: as the caller of this function promises.
        unsafe { self.transfer(|p| &p.exchange, label, sends, recvs) }
    }

    fn poll(&self) -> Result<()> {
        self.failed.lock().unwrap_or_else(|e| e.into_inner()).clone().map_or(Ok(()), Err)
    }

    fn abort(&self, cause: Cause) {
        self.fail(Label::new("abort", 0).error(self.rank, self.rank, cause));
    }
}
