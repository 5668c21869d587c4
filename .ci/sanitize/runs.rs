// SPDX-License-Identifier: MIT OR Apache-2.0
//! Those of `tests/runs` that need no tools but the crate's own.

#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "../../tests/runs/poison.rs"]
mod poison;
#[path = "../../tests/runs/ulysses.rs"]
mod ulysses;
