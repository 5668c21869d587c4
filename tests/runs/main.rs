// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a rank does with its tensors: runs of whole plans on threads against the f64 reference, the bits that every way
//! of running must give, and what is refused.
//!
//! - `tensor`: views of memory; `plan_refusals`, `refusals`: bad input of plans and of runs;
//! - `context_parallel`, `nodes`, `drawn`, `accuracy`, `options`, `padding`, `ulysses`: results against the reference;
//!   `executor`, `poison`: against other runs; `forked`: in a forked process; `few_threads`: where no more
//!   threads may start;
//! - `agreement`, `new_plan`: ranks that do not run the same; `failed_transport`: one that is not used again;
//!   `between_runs`: what ranks do together besides runs;
//! - `combine`: partial results merged over the ring; `scan`: states passed on along documents; `paged`: k and v in
//!   pages; `listed`: keys that each token lists;
//! - `d_lse`, `lse_base`, `max_logit`, `dropout`, `slopes`: the gradient of lse, its base, the largest scores, dropout
//!   by token, ALiBi slopes of each document;
//! - `own_kernel`: attention by a kernel of the caller's;
//! - `distribution`: plans with the tokens of another plan;
//! - `slices`: masks made of slices, drawn and by name;
//! - `few_tokens`: small enough for Miri; `serving`: tokens generated from a cache that is spread over ranks.
#![cfg(feature = "std")]

mod accuracy;
mod agreement;
mod between_runs;
#[path = "../common/cache.rs"]
mod cache;
#[cfg(all(unix, not(miri)))]
#[path = "../common/child.rs"]
mod child;
mod combine;
#[path = "../common/mod.rs"]
mod common;
mod context_parallel;
mod d_lse;
mod distribution;
mod drawn;
mod dropout;
mod executor;
mod failed_transport;
#[cfg(all(target_os = "linux", not(miri)))]
mod few_threads;
mod few_tokens;
#[cfg(all(unix, not(miri)))]
mod forked;
mod huge_scores;
mod listed;
mod listed_rows;
mod lse_base;
mod max_logit;
mod new_plan;
mod nodes;
mod options;
mod own_kernel;
mod padding;
mod paged;
mod plan_refusals;
mod poison;
mod refusals;
#[path = "../common/refused.rs"]
mod refused;
mod scan;
#[path = "../common/seeds.rs"]
mod seeds;
mod serving;
mod slices;
mod slopes;
mod tensor;
mod ulysses;
