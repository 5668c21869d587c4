// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of support in the docs is that of the code.

use super::*;
use crate::schedule::TensorId;
use alloc::vec::Vec;

/// Options, as the docs call them, with what decides where they are honoured: of a tensor that a backward alone has,
/// the backward; `max_logit` has a row of its own, and other tensors clash with nothing.
fn options() -> Vec<(String, Option<RunTrait>)> {
    let tensors = TensorId::ALL.into_iter().filter(|t| t.is_optional() || t.is_of_sinks());
    let of_backward = |t: TensorId| t.is_written(Direction::Forward, true).is_none().then_some(RunTrait::Backward);
    let of = |t| if t == TensorId::MaxLogit { Some(RunTrait::MaxLogit) } else { of_backward(t) };
    let tensors = tensors.map(|t| (format!("`{}`", t.name()), of(t)));
    let others = [
        ("`dropout_seed`", RunTrait::Dropout),
        ("`keys` in pages", RunTrait::Pages),
        ("`keys` that tokens list", RunTrait::KeyIndices),
        ("`lse_base` 2", RunTrait::LseBaseTwo),
        ("ALiBi slopes of each document", RunTrait::SlopesOfDocuments),
        ("slices", RunTrait::Slices),
        ("`reproducible`", RunTrait::Reproducible),
        ("a backward", RunTrait::Backward),
    ];
    tensors.chain(others.map(|(name, option)| (name.into(), Some(option)))).collect()
}

const MODES: [(&str, RunTrait); 7] = [
    ("CUDA", RunTrait::Device),
    ("captured", RunTrait::Capture),
    ("pages", RunTrait::Pages),
    ("lists", RunTrait::KeyIndices),
    ("slices", RunTrait::Slices),
    ("`reproducible`", RunTrait::Reproducible),
    ("kernel", RunTrait::OwnKernel),
];

fn table() -> String {
    let pair = |a, b| CLASHES.iter().any(|(x, y, ..)| (*x, *y) == (a, b) || (*x, *y) == (b, a));
    // What is captured is on a device.
    let clash = |a, b| pair(a, b) || b == RunTrait::Capture && pair(a, RunTrait::Device);
    // A call has one `keys`.
    let is_keys = |x| matches!(x, RunTrait::Pages | RunTrait::KeyIndices);
    let mut text = String::from("| option | CPU |");
    MODES.iter().for_each(|(name, _)| text += &format!(" {name} |"));
    text += &format!("\n|---|---|{}\n", "---|".repeat(MODES.len()));
    for (name, option) in options() {
        text += &format!("| {name} | yes |");
        for (_, mode) in MODES {
            text += match option {
                Some(option) if option == mode || is_keys(option) && is_keys(mode) => " |",
                Some(option) if clash(option, mode) => " refused |",
                _ => " yes |",
            };
        }
        text.push('\n');
    }
    text
}

#[test]
fn the_table_of_the_docs_is_that_of_the_code() {
    let docs = include_str!("../../../docs/support.md");
    let table = table();
    assert!(docs.contains(&table), "docs/support.md does not have this table:\n\n{table}");
    for (option, mode, limit, way_out) in CLASHES {
        let (limit, way_out) = (limit.to_string(), way_out.to_string());
        assert!(docs.contains(&*limit) && docs.contains(&*way_out), "docs/support.md: {option:?} {}", mode.place());
    }
}

#[test]
fn a_pair_stands_once() {
    for (i, (a, b, ..)) in CLASHES.iter().enumerate() {
        assert!(
            a != b && CLASHES[i + 1..].iter().all(|(x, y, ..)| (x, y) != (a, b) && (x, y) != (b, a)),
            "{a:?} {b:?}"
        );
    }
}
