// SPDX-License-Identifier: MIT OR Apache-2.0
//! The form in which PTX is embedded: what `build.rs` writes and `embedded.rs` reads, compiled into both.
//!
//! Most lines of PTX differ in the numbers of registers and labels only. A line is therefore an index into a table of
//! *templates*, lines with a mark in the place of these numbers, and the numbers themselves as differences: each from
//! the one that stood in its place when the same template followed the same template, so that unrolled code repeats
//! small differences. Compressed, this takes a fifth of the compressed text.

use std::collections::HashMap;

/// In templates, in the place of a number. No text contains it.
pub(crate) const MARK: u8 = 1;

/// The numbers that the next ones are differences from.
#[derive(Default)]
pub(crate) struct Predictor {
    /// By the template before, the template, and the number's place in it.
    places: HashMap<(u32, u32, u32), u32>,
    /// By the last letter of a register's class.
    classes: HashMap<u8, u32>,
}

impl Predictor {
    /// The expected number at a place, of a register of `class`.
    pub(crate) fn expected(&self, place: (u32, u32, u32), class: u8) -> u32 {
        let of_class = || self.classes.get(&class).copied().unwrap_or(0);
        self.places.get(&place).copied().unwrap_or_else(of_class)
    }

    /// Notes the number that stands there.
    pub(crate) fn note(&mut self, place: (u32, u32, u32), class: u8, number: u32) {
        self.places.insert(place, number);
        self.classes.insert(class, number);
    }
}

/// Appends a number, in groups of seven bits from the lowest on; all but the last have the highest bit.
#[allow(dead_code, reason = "the build script's")]
pub(crate) fn write(to: &mut Vec<u8>, mut number: u32) {
    while number >= 128 {
        to.push(128 | number as u8);
        number >>= 7;
    }
    to.push(number as u8);
}

/// Reads what [`write`] has written, and moves `from` behind it.
#[allow(dead_code, reason = "the library's")]
pub(crate) fn read(from: &mut &[u8]) -> Option<u32> {
    let mut number = 0;
    for shift in (0..32).step_by(7) {
        let (&byte, rest) = from.split_first()?;
        *from = rest;
        number |= u32::from(byte & 127) << shift;
        if byte < 128 {
            return Some(number);
        }
    }
    None
}

/// Appends the difference of a number from the expected one, with its sign in the lowest bit.
#[allow(dead_code, reason = "the build script's")]
pub(crate) fn write_difference(to: &mut Vec<u8>, number: u32, expected: u32) {
    let difference = number.wrapping_sub(expected) as i32;
    write(to, (difference << 1 ^ difference >> 31) as u32);
}

/// The number whose difference is next.
#[allow(dead_code, reason = "the library's")]
pub(crate) fn read_difference(from: &mut &[u8], expected: u32) -> Option<u32> {
    let coded = read(from)?;
    Some(expected.wrapping_add(coded >> 1 ^ (coded & 1).wrapping_neg()))
}
