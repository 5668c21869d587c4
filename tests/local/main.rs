// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transport `local` from outside: what arrives, who is blamed, and that everybody comes back.

mod cost;
mod delivery;
mod failure;
mod harness;
