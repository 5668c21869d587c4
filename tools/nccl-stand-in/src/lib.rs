// SPDX-License-Identifier: MIT OR Apache-2.0
//! A stand-in for NCCL on the stand-in CUDA driver: the calls that a transport of point-to-point messages needs,
//! between threads of one process and between processes of one machine.
//!
//! It keeps what NCCL's manual promises and nothing else:
//!
//! - a group is one piece of work of its stream: its messages go on together, and it is over when all of them are;
//! - a send meets the receive of the same number between the same two ranks. It is over no earlier than that receive
//!   has begun: nothing is buffered. Groups that do not fit each other hang, as they do with NCCL, and a report says
//!   why;
//! - the groups of a communicator run in the order in which they were issued, whatever streams they are in, and their
//!   streams are not ordered by that;
//! - with a non-blocking communicator a call may return `ncclInProgress`, and its work is in the stream only after
//!   `ncclCommGetAsyncError` was asked until it gave `ncclSuccess`;
//! - errors come later, by `ncclCommGetAsyncError`, and work that failed hangs until `ncclCommAbort`, which ends it on
//!   this rank only and leaves what it was to write undefined.
//!
//! ```text
//! api, group, reduce    the exported functions; what a group collects; sums
//! comm, rendezvous      communicators, and how ranks find each other
//! link                  one peer: frames over a socket, never blocking
//! work                  a group as work of a stream, asked by the driver until it is over
//! driver                the few functions of the stand-in driver
//! config, codes         variables and faults; results and types
//! ```

#![allow(clippy::missing_safety_doc, missing_docs, reason = "the functions are those of NCCL's manual")]
#![allow(non_snake_case, reason = "as above")]

mod api;
mod codes;
mod comm;
mod config;
mod driver;
mod group;
mod link;
mod reduce;
mod rendezvous;
mod work;
