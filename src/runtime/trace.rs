// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the lanes of each rank did, and when.

use crate::schedule::Lane;

/// One operation that a rank ran.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Which rank.
    pub rank: usize,
    /// On which lane.
    pub lane: Lane,
    /// The operation, as the schedule names it.
    pub name: &'static str,
    /// What it was for.
    pub phase: &'static str,
    /// The step of the schedule.
    pub step: u32,
    /// When it began: nanoseconds since the epoch that ranks share.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// Bytes it sent and received; 0 for operations of the compute lane.
    pub bytes: u64,
}
