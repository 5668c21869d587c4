// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transports from outside: what arrives, which rank is at fault, and that every rank comes back.
//!
//! - `local`: threads; `engine`: the transport over sends and receives, on an engine of the test's own; `fault`: faults
//!   on purpose;
//! - `rules`: transports of the caller that break the rules; `ring_check`: the check of all links.
#![cfg(feature = "std")]

#[cfg(all(target_os = "linux", not(miri)))]
#[path = "../common/child.rs"]
mod child;
mod engine;
mod fault;
mod local;
mod ring_check;
mod rules;
#[allow(dead_code, reason = "each test program uses its part")]
#[path = "../common/through.rs"]
mod through;
