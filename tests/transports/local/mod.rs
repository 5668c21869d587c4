// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transport `local` from outside: what arrives, which rank is blamed, and that every rank comes back.

mod cost;
mod delivery;
mod failure;
mod harness;
