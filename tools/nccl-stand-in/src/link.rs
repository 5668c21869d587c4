// SPDX-License-Identifier: MIT OR Apache-2.0
//! A peer: frames over a socket that never blocks.
//!
//! Messages from one rank to another are numbered, those of collectives apart from the others. Who is to receive
//! message n says so and how large it is (`Ready`); the sender answers with the bytes (`Data`). Nothing is sent that no
//! receiver has said to be ready for, so that a send is over no earlier than its receive began.

use std::collections::HashMap;
use std::io::{ErrorKind, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;

/// Point-to-point or collective, and the number of the message between these two ranks in this direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tag {
    pub(crate) collective: bool,
    pub(crate) number: u64,
}

const READY: u8 = 1;
const DATA: u8 = 2;
const HEADER: usize = 24;

/// One peer.
pub(crate) struct Link {
    socket: UnixStream,
    out: Vec<u8>,
    /// Bytes of `out` that are gone.
    sent: usize,
    arriving: Vec<u8>,
    ready: HashMap<Tag, u64>,
    data: HashMap<Tag, Vec<u8>>,
    /// The peer is gone: nothing more will come.
    pub(crate) closed: bool,
}

unsafe extern "C" {
    fn send(socket: i32, bytes: *const u8, len: usize, flags: i32) -> isize;
}

/// No signal when the other end is gone; not all programs ignore it.
const NO_SIGNAL: i32 = 0x4000;

impl Link {
    pub(crate) fn new(socket: UnixStream) -> std::io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            out: Vec::new(),
            sent: 0,
            arriving: Vec::new(),
            ready: HashMap::new(),
            data: HashMap::new(),
            closed: false,
        })
    }

    fn put(&mut self, kind: u8, tag: Tag, bytes: u64) {
        let mut header = [0; HEADER];
        header[0] = kind;
        header[1] = tag.collective.into();
        header[8..16].copy_from_slice(&tag.number.to_le_bytes());
        header[16..].copy_from_slice(&bytes.to_le_bytes());
        self.out.extend(header);
    }

    /// Says that message `tag` of so many bytes may come.
    pub(crate) fn say_ready(&mut self, tag: Tag, bytes: u64) {
        self.put(READY, tag, bytes);
    }

    /// Sends a message that the peer is ready for.
    pub(crate) fn send_data(&mut self, tag: Tag, bytes: &[u8]) {
        self.put(DATA, tag, bytes.len() as u64);
        self.out.extend(bytes);
    }

    /// The bytes that the peer expects as this message, once it does.
    pub(crate) fn expected(&self, tag: Tag) -> Option<u64> {
        self.ready.get(&tag).copied()
    }

    /// Takes a message that has come.
    pub(crate) fn take(&mut self, tag: Tag) -> Option<Vec<u8>> {
        self.data.remove(&tag)
    }

    /// The answer to this message is on its way: it will not be asked for again.
    pub(crate) fn answered(&mut self, tag: Tag) {
        self.ready.remove(&tag);
    }

    /// Nothing waits to be written.
    pub(crate) fn flushed(&self) -> bool {
        self.out.is_empty()
    }

    /// Writes and reads what goes without waiting. Whether anything did.
    pub(crate) fn pump(&mut self) -> bool {
        let mut moved = false;
        while self.sent < self.out.len() && !self.closed {
            let rest = &self.out[self.sent..];
            // SAFETY: an open socket, and a slice with its length.
            let n = unsafe { send(self.socket.as_raw_fd(), rest.as_ptr(), rest.len(), NO_SIGNAL) };
            if n < 0 {
                match std::io::Error::last_os_error().kind() {
                    ErrorKind::WouldBlock => break,
                    ErrorKind::Interrupted => continue,
                    // What it sent before it left may still be read below.
                    _ => {
                        self.out.clear();
                        self.sent = 0;
                        break;
                    }
                }
            }
            self.sent += n as usize;
            moved = true;
        }
        // What is for a peer that is gone is lost, as on a wire.
        if self.closed || self.sent == self.out.len() {
            self.out.clear();
            self.sent = 0;
        }
        let mut buffer = [0; 1 << 16];
        while !self.closed {
            match self.socket.read(&mut buffer) {
                Ok(0) => self.closed = true,
                Ok(n) => {
                    self.arriving.extend(&buffer[..n]);
                    moved = true;
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.closed = true,
            }
        }
        self.parse();
        moved
    }

    fn parse(&mut self) {
        let mut at = 0;
        while let Some(header) = self.arriving.get(at..at + HEADER) {
            let number =
                |from: usize| header[from..from + 8].iter().rev().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte));
            let tag = Tag { collective: header[1] != 0, number: number(8) };
            let bytes = number(16);
            if header[0] == READY {
                self.ready.insert(tag, bytes);
                at += HEADER;
                continue;
            }
            let Some(body) = self.arriving.get(at + HEADER..at + HEADER + bytes as usize) else { break };
            self.data.insert(tag, body.to_vec());
            at += HEADER + bytes as usize;
        }
        self.arriving.drain(..at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank that is killed may have said that it is ready just before: what is then sent to it holds up nothing.
    #[test]
    fn what_is_for_a_peer_that_is_gone_is_lost() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut a, mut b) = (Link::new(a).unwrap(), Link::new(b).unwrap());
        let tag = Tag { collective: false, number: 0 };
        a.say_ready(tag, 4);
        a.pump();
        drop(a);
        b.pump();
        assert!(b.closed);
        assert_eq!(b.expected(tag), Some(4));
        b.send_data(tag, &[4; 4]);
        b.pump();
        assert!(b.flushed());
    }

    #[test]
    fn frames_cross_in_pieces() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut a, mut b) = (Link::new(a).unwrap(), Link::new(b).unwrap());
        let tag = |number| Tag { collective: number % 2 == 1, number };
        let big: Vec<u8> = (0..3_000_000u32).map(|i| i as u8).collect();
        a.say_ready(tag(1), 7);
        a.send_data(tag(2), &big);
        a.send_data(tag(3), &[]);
        assert_eq!(b.expected(tag(1)), None);
        let mut turns = 0;
        while !a.flushed() || b.data.len() < 2 {
            a.pump();
            b.pump();
            turns += 1;
            assert!(turns < 10_000);
        }
        assert_eq!(b.expected(tag(1)), Some(7));
        assert_eq!(b.expected(Tag { collective: false, number: 1 }), None);
        assert_eq!((b.take(tag(2)), b.take(tag(3)), b.take(tag(3))), (Some(big), Some(vec![]), None));
        a.send_data(tag(4), &[4]);
        a.pump();
        drop(a);
        b.pump();
        assert!(b.closed);
        assert_eq!(b.take(tag(4)), Some(vec![4]), "what was sent before the end arrives");
    }
}
