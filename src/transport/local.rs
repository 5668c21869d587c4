// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks as threads of one process.
