// SPDX-License-Identifier: MIT OR Apache-2.0
//! Draws six masks that slices describe, as SVG: a row for each query, a column for each key.
//!
//!     cargo run --example masks > docs/masks.svg

use cpattn::{Batch, Dtype, Problem, Result, Side, Slice, slices};

/// Pixels of a token, and the gap between drawings.
const CELL: usize = 6;
const GAP: usize = 28;

/// The masks: name, documents, slices.
fn masks() -> Result<[(&'static str, Batch, Vec<Slice>); 6]> {
    let one = |n| Batch::from_lengths(&[n]);
    Ok([
        ("packed documents", Batch::new(&[0, 9, 13, 24])?, slices::documents(&[0, 9, 13, 24])),
        ("answers to one prompt", one(24)?, slices::shared_prefix(9, &[4, 6, 5])),
        (
            "a tree of turns",
            one(24)?,
            slices::tree(&[None, Some(0), Some(1), Some(1), Some(0), Some(4)], &[6, 4, 3, 4, 3, 4])?,
        ),
        ("prefixes seen in both directions", Batch::new(&[0, 11, 24])?, slices::prefix_lm(&[0, 11, 24], &[5, 7])?),
        ("images in causal text", one(24)?, slices::spans(&[0, 24], &[3..9, 13..20])?),
        ("block diffusion: noisy, clean", one(24)?, slices::block_diffusion(12, 4)?),
    ])
}

fn main() -> Result<()> {
    let side = 24 * CELL;
    let (width, height) = (3 * side + 4 * GAP, 2 * (side + GAP) + GAP);
    println!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">"#
    );
    println!(r#"<rect width="{width}" height="{height}" fill="white"/>"#);
    for (i, (name, batch, slices)) in masks()?.into_iter().enumerate() {
        let (x, y) = (GAP + i % 3 * (side + GAP), GAP + i / 3 * (side + GAP));
        println!(r#"<text x="{x}" y="{}">{name}</text>"#, y - 6);
        println!(r##"<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="#f3f3f3"/>"##);
        let tokens = batch.tokens(Side::Q);
        assert_eq!(tokens, 24);
        let problem = Problem::new(batch.with_slices(&slices)?, 1, 1, 64, Dtype::Bf16);
        let picture = problem.picture().expect("a small mask");
        for (row, line) in picture.lines().enumerate() {
            // Runs of allowed keys as one rectangle each.
            let mut at = 0;
            for run in line.split_inclusive('.') {
                let keys = run.trim_end_matches('.').len();
                if keys > 0 {
                    let (x, y, width) = (x + at * CELL, y + row * CELL, keys * CELL - 1);
                    println!(r##"<rect x="{x}" y="{y}" width="{width}" height="{}" fill="#3465a4"/>"##, CELL - 1);
                }
                at += run.len();
            }
        }
    }
    println!("</svg>");
    Ok(())
}
