// SPDX-License-Identifier: MIT OR Apache-2.0
//! What was added to a running result or a sum, call by call.

use alloc::{collections::BTreeMap, vec, vec::Vec};

/// What one call added to a sum: of q heads `head..head + heads`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Atom {
    pub call: u32,
    pub head: u32,
    pub heads: u32,
}

/// Lists of contributions, each stored once, in the order in which they were added. A list is its last entry after
/// another list; entry 0 is empty.
pub(super) struct Contributions {
    all: Vec<(u32, Atom)>,
    index: BTreeMap<(u32, Atom), u32>,
    /// The last sum: runs one after another usually add the same.
    last: (u32, u32, u32),
}

impl Contributions {
    pub fn new() -> Self {
        Self { all: vec![(0, Atom { call: 0, head: 0, heads: 0 })], index: BTreeMap::new(), last: (0, 0, 0) }
    }

    pub fn get(&self, list: u32) -> Vec<Atom> {
        let mut atoms = Vec::new();
        let mut at = list;
        while at > 0 {
            let (before, atom) = self.all[at as usize];
            atoms.push(atom);
            at = before;
        }
        atoms.reverse();
        atoms
    }

    fn add(&mut self, list: u32, atom: Atom) -> u32 {
        let all = &mut self.all;
        *self.index.entry((list, atom)).or_insert_with(|| {
            all.push((list, atom));
            all.len() as u32 - 1
        })
    }

    pub fn one(&mut self, atom: Atom) -> u32 {
        self.add(0, atom)
    }

    /// `a` followed by `b`.
    pub fn join(&mut self, a: u32, b: u32) -> u32 {
        if a == 0 || b == 0 {
            return a.max(b);
        }
        if (self.last.0, self.last.1) != (a, b) {
            let sum = match self.all[b as usize] {
                (0, atom) => self.add(a, atom),
                _ => self.get(b).into_iter().fold(a, |list, atom| self.add(list, atom)),
            };
            self.last = (a, b, sum);
        }
        self.last.2
    }
}
