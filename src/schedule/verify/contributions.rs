// SPDX-License-Identifier: MIT OR Apache-2.0
//! Contributions to a running result or a sum, call by call.

use alloc::{vec, vec::Vec};

/// The contribution of one call to a sum, for q heads `head..head + heads`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Atom {
    pub call: u32,
    pub head: u32,
    pub heads: u32,
}

/// Lists of contributions, each stored once, in the order of addition. A list is a pair of another list and a last
/// entry; list 0 is empty.
pub(super) struct Contributions {
    all: Vec<(u32, Atom)>,
    /// For each call, the first lists whose last entry is of that call; 0 is a free place. Most calls have no more, and
    /// consecutive calls are near each other in memory, which suits the cache.
    of_calls: Vec<[u32; FIRST]>,
    /// A hash table, with linear probing, of the other lists in `all`. Its size is a power of two, and at least twice
    /// the number of these lists.
    places: Vec<u32>,
    /// The number of lists in the hash table.
    hashed: usize,
    /// The last operands of `join` and its result: consecutive runs usually join the same lists.
    last: (u32, u32, u32),
}

/// The number of lists of a call that are stored outside the hash table.
const FIRST: usize = 4;

fn hash((list, atom): (u32, Atom)) -> usize {
    // Factors of a multiplicative hash: odd, with bits spread evenly.
    let word = u64::from(list) << 32 | u64::from(atom.call);
    let heads = u64::from(atom.head) << 32 | u64::from(atom.heads);
    let mixed = (word ^ heads.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (mixed ^ mixed >> 32) as usize
}

impl Contributions {
    pub(super) fn new() -> Self {
        Self {
            all: vec![(0, Atom { call: 0, head: 0, heads: 0 })],
            of_calls: Vec::new(),
            places: vec![0; 16],
            hashed: 0,
            last: (0, 0, 0),
        }
    }

    pub(super) fn get(&self, list: u32) -> Vec<Atom> {
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

    /// The place of a list in the hash table, or the free place for it.
    fn place(&self, entry: (u32, Atom)) -> usize {
        let mask = self.places.len() - 1;
        let mut at = hash(entry) & mask;
        while self.places[at] > 0 && self.all[self.places[at] as usize] != entry {
            at = (at + 1) & mask;
        }
        at
    }

    fn add(&mut self, list: u32, atom: Atom) -> u32 {
        let new = self.all.len() as u32;
        let call = atom.call as usize;
        if self.of_calls.len() <= call {
            self.of_calls.resize(call + 1, [0; FIRST]);
        }
        for first in &mut self.of_calls[call] {
            if *first == 0 {
                *first = new;
                self.all.push((list, atom));
                return new;
            }
            if self.all[*first as usize] == (list, atom) {
                return *first;
            }
        }
        let at = self.place((list, atom));
        if self.places[at] > 0 {
            return self.places[at];
        }
        self.all.push((list, atom));
        self.places[at] = new;
        self.hashed += 1;
        if 2 * self.hashed > self.places.len() {
            let places = vec![0; 2 * self.places.len()];
            for entry in core::mem::replace(&mut self.places, places).into_iter().filter(|&entry| entry > 0) {
                let at = self.place(self.all[entry as usize]);
                self.places[at] = entry;
            }
        }
        new
    }

    pub(super) fn one(&mut self, atom: Atom) -> u32 {
        self.add(0, atom)
    }

    /// `a` followed by `b`.
    pub(super) fn join(&mut self, a: u32, b: u32) -> u32 {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Random joins, compared with explicit lists: equal lists have equal numbers, different lists different ones.
    #[test]
    fn lists_are_kept_once_each() {
        let mut draw = fastrand::Rng::with_seed(7);
        let mut c = Contributions::new();
        let mut known: Vec<(u32, Vec<Atom>)> = vec![(0, Vec::new())];
        let mut found = 0;
        for _ in 0..4000 {
            let atom = Atom { call: draw.u32(..3), head: draw.u32(..2), heads: draw.u32(1..3) };
            let (a, x) = known[draw.usize(..known.len())].clone();
            let (b, y) = match draw.bool() {
                true => (c.one(atom), vec![atom]),
                false => known[draw.usize(..known.len())].clone(),
            };
            let sum = [x, y].concat();
            if sum.len() > 6 {
                continue;
            }
            let list = c.join(a, b);
            assert_eq!(c.get(list), sum);
            match known.iter().find(|k| k.1 == sum) {
                Some(k) => {
                    assert_eq!(k.0, list);
                    found += 1;
                }
                None => {
                    assert!(known.iter().all(|k| k.0 != list));
                    known.push((list, sum));
                }
            }
        }
        assert!(known.len() > 500 && found > 100, "{} {found}", known.len());
    }
}
