// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a schedule is for: a direction of attention, or one all-to-all.

use super::{AllToAll, Direction};

/// What the schedules of a group are to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Attention(Direction),
    AllToAll(AllToAll),
}
