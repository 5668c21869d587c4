// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mutants of the corpus: each arrival, announced byte, parity, proxy fence, commit and wait is lost or made wrong in
//! turn, and a report or a wrong number has to tell.
//!
//! Those that nothing can tell are listed here with the reason.

use crate::kernels::{self, Entry};
use crate::problems::solve;
use cuda_emulator::{Fault, Mutant, Options};
use std::collections::BTreeMap;

/// Seeds after which a mutant counts as a survivor.
const SEEDS: u64 = 4;

/// Kernel (its beginning), change (empty for what is removed), instruction (its beginning), how many survive in a
/// kernel, and why nothing can tell.
const EQUIVALENT: &[(&str, &str, &str, usize, &str)] = &[
    (
        "",
        "",
        "bar.sync",
        20,
        "the compiler puts barriers around whatever one thread or one warp does, also between steps of the same thread and \
         beside another barrier that orders the same",
    ),
    ("ring", "", "barrier.sync", 4, "loading and multiplying warps meet twice in a row where one meeting would do"),
    ("ragged", "", "fence.proxy.async", 1, "a copy wrote the tile that is stored, and nothing else did"),
    ("ring", "", "bar.warp.sync", 3, "the lane that waits for the tile is the one that is elected to load it"),
];

/// How a mutant is caught; `None` when it is not.
fn caught(e: &Entry, m: &Mutant) -> Option<String> {
    (0..SEEDS).find_map(|seed| {
        let options = Options { seed, spin_limit: 1_000_000, ..Options::default() };
        // A wrong number may also trip a check of the problem itself.
        let outcome = std::panic::catch_unwind(|| solve(e, Some(m), seed, options));
        match outcome {
            Err(_) => Some("WrongNumbers".to_owned()),
            Ok(Err(report)) => {
                assert_ne!(report.fault, Fault::Launch, "{report}");
                Some(format!("{:?}", report.fault))
            }
            Ok(Ok(o)) => o.wrong().map(|_| "WrongNumbers".to_owned()),
        }
    })
}

/// Tries the mutants of these kernels.
pub fn all_caught(names: &[&str]) {
    std::panic::set_hook(Box::new(|_| {}));
    let (mut how, mut survivors): (BTreeMap<String, usize>, Vec<String>) = Default::default();
    for e in kernels::all().iter().filter(|e| names.contains(&&*e.name)) {
        let mut excused = [0; EQUIVALENT.len()];
        for (m, text) in e.mutants() {
            if let Some(by) = caught(e, &m) {
                *how.entry(by).or_default() += 1;
                continue;
            }
            let change = if m.to_string().contains(':') { m.change.to_string() } else { String::new() };
            let text =
                text.split_once(' ').filter(|(guard, _)| guard.starts_with('@')).map_or(&*text, |(_, rest)| rest);
            let known =
                EQUIVALENT.iter().position(|k| e.name.starts_with(k.0) && change == k.1 && text.starts_with(k.2));
            match known {
                Some(k) if excused[k] < EQUIVALENT[k].3 => excused[k] += 1,
                _ => survivors.push(format!("{} {m} `{text}`", e.name)),
            }
        }
    }
    drop(std::panic::take_hook());
    println!("{names:?}: {how:?}");
    assert!(survivors.is_empty(), "{} survive:\n{}", survivors.len(), survivors.join("\n"));
    assert!(!how.is_empty(), "no mutant of {names:?}");
}
