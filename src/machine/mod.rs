// SPDX-License-Identifier: MIT OR Apache-2.0
//! The description of a machine: how fast its kernels, copies and links are.
//!
//! Predictions know a machine only by its description. A description is a text file of `key = value` lines (`text`
//! reads and writes it); `cpattn machine` measures one, and the folder `machines` has some that are marked as
//! estimates.
//!
//! The model is small on purpose, so that each figure can be measured alone:
//!
//! - *Kernels*: a call takes `call + heads · (pairs · flops / rate + rows · row + keys · key + edges · edge)` seconds.
//!   `pairs` are the allowed (q, k) pairs of one head, `rows` and `keys` the q rows and k rows that the call reads.
//!   `row` and `key` stand for what does not grow with pairs: loading and merging. `edges` are the pairs on an edge of
//!   the mask ([`Range::edges`](crate::call::Range::edges)): where it crosses a tile, the pairs beyond it are computed
//!   too, and the others masked.
//! - *Copies*: packing, unpacking and sums take the bytes that they read and write, divided by `copy`; each operation
//!   of any kind takes `operation` seconds in addition.
//! - *Links*: a message takes the latency of its level and its bytes over the level's rate. Inside a node each rank has
//!   that rate out and in; between nodes each network card has, and a node's ranks share its cards evenly.
//! - *Cores*: where `cores` is given, ranks have no engines of their own. Kernels, copies and messages inside a node
//!   then need a core of the node while they run, and if there are more of them than cores, all slow down alike.
//!   `nodes_share_cores` says that all nodes are made on one machine: they have these cores together.
//! - *Messages between nodes over cores*: each byte takes `between.work` seconds of a core, half at the sender and half
//!   at the receiver, in addition to its time on the cards. On a machine with `between.burst` a bucket of this many
//!   bytes (`tc tbf`) limits the rate of a card: the bucket's bytes pass at once after a pause, and the bucket fills
//!   again at the card's rate.
//!
//! Not in the model: topologies deeper than two levels, and contention between kernels and copies for memory.

pub(crate) mod figures;
mod text;

pub use figures::{KernelRate, KernelShape, LinkRate};
pub(crate) use figures::{Level, Machine};
