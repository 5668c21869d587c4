// SPDX-License-Identifier: MIT OR Apache-2.0
//! What tests of kernels that leave something out share: the text without it, and that it is reported in every order.

use cuda_emulator::Fault;

/// How many orders a kernel is tried in.
pub const SEEDS: u64 = 24;

/// The words that a kernel's text leaves in an order, or the fault and its message.
pub type Outcome = Result<Vec<u32>, (Fault, String)>;

/// Is reported in every order that `run` takes, as one of these; the last message.
#[track_caller]
pub fn fires(ptx: &str, faults: &[Fault], run: impl Fn(&str, u64) -> Outcome) -> String {
    let mut last = String::new();
    for seed in 0..SEEDS {
        match run(ptx, seed) {
            Err((fault, said)) => {
                assert!(faults.contains(&fault), "seed {seed}: {said}");
                last = said;
            }
            Ok(_) => panic!("seed {seed}: none of {faults:?} in\n{ptx}"),
        }
    }
    last
}

/// Text without one of its parts, which has to be there once.
#[track_caller]
pub fn without(text: &str, part: &str) -> String {
    replaced(text, part, "")
}

/// Text with something else in the place of a part that is there once.
#[track_caller]
pub fn replaced(text: &str, part: &str, by: &str) -> String {
    assert_eq!(text.matches(part).count(), 1, "`{part}` in\n{text}");
    text.replace(part, by)
}
