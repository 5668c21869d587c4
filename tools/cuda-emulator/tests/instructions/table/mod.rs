// SPDX-License-Identifier: MIT OR Apache-2.0
//! Small kernels with results computed by hand: what the instructions of these kernels do, one table for all.
//!
//! The tests run it on the interpreter. The program `conformance` runs it on whatever driver is there, so that on a GPU
//! the same numbers say whether the interpreter tells the truth. Nothing in here may use the interpreter's own
//! arithmetic, and every kernel has to be valid for the device's assembler.

pub mod approximations;
pub mod atomics;
pub mod barriers;
pub mod bits;
pub mod bulk;
pub mod case;
pub mod clusters;
pub mod compare;
pub mod control;
pub mod conversions;
pub mod copies;
pub mod exchange;
pub mod floats;
pub mod halves;
pub mod integers;
pub mod matrices;
pub mod mbarriers;
pub mod memory;
pub mod moves;
pub mod products;
mod rows;
pub mod run;
pub mod tensors;

/// Every case, family by family.
pub fn all() -> Vec<case::Case> {
    [
        integers::cases,
        bits::cases,
        floats::cases,
        approximations::cases,
        halves::cases,
        conversions::cases,
        compare::cases,
        moves::cases,
        memory::cases,
        atomics::cases,
        exchange::cases,
        copies::cases,
        matrices::cases,
        barriers::cases,
        control::cases,
        mbarriers::cases,
        bulk::cases,
        tensors::cases,
        products::cases,
        clusters::cases,
    ]
    .into_iter()
    .flat_map(|family| family())
    .collect()
}
