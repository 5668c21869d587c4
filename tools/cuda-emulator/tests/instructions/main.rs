// SPDX-License-Identifier: MIT OR Apache-2.0
//! Every instruction the interpreter knows, against results computed by hand.
//!
//! The cases are `table/`, a file a family. Each is run in several orders of warps and lanes and as a friendly machine
//! would run it. That no instruction is without a case is a test as well.

mod coverage;
mod table;

use table::case::Case;
use table::run::interpret;

/// The first thing that is wrong with a case, in any order.
fn trouble(case: &Case) -> Option<String> {
    for (seed, eager) in [(0, true), (0, false), (1, false), (2, false)] {
        match interpret(case, seed, eager) {
            Ok(buffer) => {
                if let Some(w) = case.judge(&buffer).first() {
                    return Some(format!("{}: {} is {:x}, not {} (seed {seed})", case.name, w.place, w.found, w.want));
                }
            }
            Err(e) => return Some(format!("{}: {e}", case.name)),
        }
    }
    None
}

#[track_caller]
fn check(cases: &[Case]) {
    let wrong: Vec<String> = cases.iter().filter_map(trouble).collect();
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

macro_rules! families {
    ($($family:ident),*) => {$(
        #[test]
        fn $family() {
            check(&table::$family::cases());
        }
    )*};
}

families!(
    integers,
    bits,
    floats,
    approximations,
    halves,
    conversions,
    compare,
    moves,
    memory,
    atomics,
    exchange,
    copies,
    matrices,
    barriers,
    control,
    mbarriers,
    bulk,
    tensors,
    products
);
