// SPDX-License-Identifier: MIT OR Apache-2.0
//! Code that waits, model-checked by loom: every interleaving of the transport `local`, of a rank's lanes, and of the
//! order in which units of the backward add to dq. Empty without `--cfg cpattn_loom`; run by `.ci/loom`.
#![cfg(cpattn_loom)]

mod dq_order;
mod lanes;
mod local;
