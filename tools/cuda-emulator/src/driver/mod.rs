// SPDX-License-Identifier: MIT OR Apache-2.0
//! The stand-in driver: what `libcuda.so.1` exports, on top of the interpreter.
//!
//! - [`machine`]: devices, streams, reports; [`schedule`]: the order of work; [`perform`]: what an operation does when
//!   its turn comes;
//! - [`queue`]: operations and vector clocks between streams;
//! - [`capture`] and [`graph`]: streams that are captured, and replays of what was; [`exchange`]: work of other
//!   stand-ins;
//! - [`calls`]: counts of what a program asks for;
//! - [`mutants`]: trials of launches with a barrier or a wait removed; [`trace`]: the same for event waits;
//! - [`entry`]: the one lock, the current context of a thread, and how a call becomes a result code;
//! - `api_*`: the exported functions, by chapter of the driver's manual.
//!
//! The exported functions have the names and signatures of `cuda.h`. They are not meant to be called from Rust.

#![allow(clippy::missing_safety_doc, missing_docs, reason = "the functions are those of the CUDA driver's manual")]
#![allow(non_snake_case, reason = "as above")]

mod api_context;
mod api_copy;
mod api_count;
mod api_device;
mod api_event;
mod api_graph;
mod api_kernel;
mod api_launch;
mod api_memory;
mod api_misc;
mod api_module;
mod api_stream;
mod api_tensor;
mod calls;
mod capture;
mod codes;
mod config;
mod entry;
mod exchange;
mod graph;
mod install;
mod machine;
mod mutants;
mod perform;
mod queue;
mod schedule;
mod trace;

pub use config::Config;
pub use install::{InstallError, install, library, library_dir};
