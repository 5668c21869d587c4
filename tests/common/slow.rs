// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests that take long, marked where they are: `if slow::left_out(Turn::First) { return; }` is their first line.
//!
//! `CPATTN_SLOW` chooses which of them run:
//!
//! | `CPATTN_SLOW` | which run | who sets it |
//! |---|---|---|
//! | unset, `all` | all | |
//! | `first`, `second` | those of that turn, and those of every turn | `.ci/cuda --turn`, by days |
//! | `none` | none | `.ci/quick` |

/// When a slow test runs where not all do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "each test binary uses its part")]
pub enum Turn {
    First,
    Second,
    /// Left out by `none` alone.
    Every,
}

/// Whether a slow test is left out, which it then says.
pub fn left_out(turn: Turn) -> bool {
    let choice = std::env::var("CPATTN_SLOW").unwrap_or_else(|_| "all".into());
    let left_out = !runs(turn, &choice).unwrap_or_else(|error| panic!("{error}"));
    if left_out {
        println!("left out, since it is slow and CPATTN_SLOW is {choice}: CPATTN_SLOW=all runs it");
    }
    left_out
}

fn runs(turn: Turn, choice: &str) -> Result<bool, String> {
    match choice {
        "all" => Ok(true),
        "first" => Ok(turn != Turn::Second),
        "second" => Ok(turn != Turn::First),
        "none" => Ok(false),
        other => Err(format!("CPATTN_SLOW is {other:?}, expected all, first, second or none")),
    }
}

#[test]
fn each_slow_test_has_its_turn() {
    let of = |choice| [Turn::First, Turn::Second, Turn::Every].map(|turn| runs(turn, choice).unwrap());
    assert_eq!(of("all"), [true; 3]);
    assert_eq!(of("first"), [true, false, true]);
    assert_eq!(of("second"), [false, true, true]);
    assert_eq!(of("none"), [false; 3]);
    assert!(runs(Turn::First, "1").unwrap_err().starts_with("CPATTN_SLOW is \"1\""));
}
