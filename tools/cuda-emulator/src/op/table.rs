// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of plain opcodes: those that map rows to a row, lane by lane.

use super::OpFn;
use super::rows::{self, Kind, Lane};
use std::collections::HashMap;

/// A plain opcode: its function and the kinds of its operands.
#[derive(Clone, Debug)]
pub(crate) struct Plain {
    pub(crate) f: OpFn,
    pub(crate) dst: Kind,
    pub(crate) src: Vec<Kind>,
}

/// Opcode → function. Built when a module is loaded.
#[derive(Default)]
pub(crate) struct Table(HashMap<String, Plain>);

impl Table {
    /// All plain opcodes.
    pub(crate) fn new() -> Self {
        let mut t = Self::default();
        super::int::fill(&mut t);
        super::bits::fill(&mut t);
        super::float::fill(&mut t);
        super::half::fill(&mut t);
        super::convert::fill(&mut t);
        t
    }

    /// Looks an opcode up.
    pub(crate) fn get(&self, opcode: &str) -> Option<&Plain> {
        self.0.get(opcode)
    }

    /// Their names.
    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    fn put(&mut self, names: &str, f: OpFn, dst: Kind, src: Vec<Kind>) {
        for name in names.split_whitespace() {
            self.0.insert(name.to_owned(), Plain { f, dst, src: src.clone() });
        }
    }

    /// Opcodes (separated by spaces) of one operand.
    pub(crate) fn un<A: Lane, R: Lane, F: Fn(A) -> R + Copy>(&mut self, names: &str, f: F) {
        self.put(names, rows::un(f), R::KIND, vec![A::KIND]);
    }

    /// Opcodes of two operands.
    pub(crate) fn bin<A: Lane, B: Lane, R: Lane, F: Fn(A, B) -> R + Copy>(&mut self, names: &str, f: F) {
        self.put(names, rows::bin(f), R::KIND, vec![A::KIND, B::KIND]);
    }

    /// Opcodes of three operands.
    pub(crate) fn tri<A: Lane, B: Lane, C: Lane, R: Lane, F: Fn(A, B, C) -> R + Copy>(&mut self, names: &str, f: F) {
        self.put(names, rows::tri(f), R::KIND, vec![A::KIND, B::KIND, C::KIND]);
    }

    /// Opcodes of four operands.
    pub(crate) fn rare_quad<A: Lane, B: Lane, C: Lane, E: Lane, R: Lane, F: Fn(A, B, C, E) -> R + Copy>(
        &mut self,
        names: &str,
        f: F,
    ) {
        self.put(names, rows::rare_quad(f), R::KIND, vec![A::KIND, B::KIND, C::KIND, E::KIND]);
    }

    /// As [`Table::un`], compiled once and without vectors.
    pub(crate) fn rare_un<A: Lane, R: Lane, F: Fn(A) -> R + Copy>(&mut self, names: &str, f: F) {
        self.put(names, rows::rare_un(f), R::KIND, vec![A::KIND]);
    }

    /// As [`Table::bin`], compiled once and without vectors.
    pub(crate) fn rare_bin<A: Lane, B: Lane, R: Lane, F: Fn(A, B) -> R + Copy>(&mut self, names: &str, f: F) {
        self.put(names, rows::rare_bin(f), R::KIND, vec![A::KIND, B::KIND]);
    }

    /// As [`Table::tri`], compiled once and without vectors.
    pub(crate) fn rare_tri<A: Lane, B: Lane, C: Lane, R: Lane, F: Fn(A, B, C) -> R + Copy>(
        &mut self,
        names: &str,
        f: F,
    ) {
        self.put(names, rows::rare_tri(f), R::KIND, vec![A::KIND, B::KIND, C::KIND]);
    }
}
