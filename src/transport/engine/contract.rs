// SPDX-License-Identifier: MIT OR Apache-2.0
//! The trait that the author of an engine implements.

use std::{string::String, time::Duration, vec::Vec};

/// The largest size of a value that is put into the engine's store, in bytes.
pub const LONGEST_VALUE: usize = 4096;

/// The direction of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageDirection {
    /// To the peer.
    Send,
    /// From the peer.
    Receive,
}

/// Why a call of an engine failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    pub(super) text: String,
    pub(super) own: bool,
}

impl Failed {
    /// A peer or a connection failed, or the time has passed. The ranks then ask each other which of them is at fault.
    pub fn of_group(text: impl Into<String>) -> Self {
        Self { text: text.into(), own: false }
    }

    /// This rank's own part of the engine failed: this rank is at fault.
    pub fn own(text: impl Into<String>) -> Self {
        Self { text: text.into(), own: true }
    }
}

/// Sends and receives between the ranks of a group, and a key-value store that all of them can access.
///
/// Each key of the store is written once. Values have 1 to [`LONGEST_VALUE`] bytes. Several threads
/// call the functions at the same time; while one thread waits in [`wait_for`](Self::wait_for), `put` and `get` must
/// still work on other threads, which may take a second connection to the store.
///
/// # Safety
/// After [`close`](Self::close) has returned, or [`wait`](Self::wait) has returned success for a message, nothing may
/// access the memory of that message.
pub unsafe trait Engine: Send + Sync + 'static {
    /// This rank.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world(&self) -> usize;

    /// Connects to the store. It may fail to return if the store does not answer. If it fails the group still works,
    /// but no error can name the rank at fault.
    fn open(&self) -> Result<(), Failed>;

    /// Waits until all ranks have called it and are connected. It may fail to return.
    fn connect(&self) -> Result<(), Failed>;

    /// Starts a send or a receive, and returns a number for it, for [`wait`](Self::wait). From one rank to another,
    /// messages of one tag match in the order in which they are posted. A receive has room for the longest possible
    /// message: fewer bytes may arrive.
    ///
    /// # Safety
    /// Until the message has moved, or the engine is closed: the bytes are valid for reads, and for writes in a
    /// receive; nothing else writes them, and nothing else accesses those of a receive.
    unsafe fn post(
        &self,
        way: MessageDirection,
        peer: usize,
        tag: u32,
        data: *mut u8,
        bytes: usize,
    ) -> Result<u64, Failed>;

    /// Waits until a posted message has moved, at most for `limit`; fails at once when the engine is closed or the peer
    /// is gone. Called at most once for each number.
    fn wait(&self, posted: u64, limit: Duration) -> Result<(), Failed>;

    /// Ends all posted messages, and all calls that wait, with an error. Any thread, at any time, any number of times.
    fn close(&self);

    /// Writes the value unless the key exists; returns the value now stored.
    fn put(&self, key: &str, value: &[u8]) -> Result<Vec<u8>, Failed>;

    /// The value of a key, if it exists; does not wait.
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, Failed>;

    /// Waits without a time limit until a key exists; fails when the store is gone.
    fn wait_for(&self, key: &str) -> Result<(), Failed>;
}
