// SPDX-License-Identifier: MIT OR Apache-2.0
//! Nothing of its own: see `Cargo.toml`.
