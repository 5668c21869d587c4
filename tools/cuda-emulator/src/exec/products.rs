// SPDX-License-Identifier: MIT OR Apache-2.0
//! Products of warpgroups under way (`wgmma`).
//!
//! Four warps issue a product together, each with its quarter of the rows. Their groups are the warpgroup's: one is
//! complete when all four warps have committed it, and then for all four. What a product reads from shared memory is
//! held until then, and who has waited for it knows the warpgroup's clock.
//!
//! The numbers are computed when the product is issued, since everything that could change them before the wait is a
//! fault: memory it reads is held, and its registers are watched. The [`Guard`] does the watching. It only knows the
//! registers that some product of the kernel uses.

use crate::mem::shared::SharedMemory;
use std::collections::VecDeque;

/// Bits of one group's lines: the line and its bytes.
pub(crate) type Lines = Vec<(u32, u16)>;

/// What one product of the warpgroup is: all four warps have to issue the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Issue {
    pub(crate) pc: usize,
    pub(crate) descriptors: [u64; 2],
}

#[derive(Default)]
struct WarpState {
    issued: u32,
    /// The last product, and whether it is in a group.
    last: usize,
    open: bool,
    committed: u32,
    waited: u32,
}

/// One warpgroup.
#[derive(Default)]
struct Warpgroup {
    warps: [WarpState; 4],
    /// Products that not all warps have issued: the number of the first, and each.
    first: u32,
    issues: VecDeque<Issue>,
    /// Groups that not all warps have committed: the number of the first, and how many products each ends.
    first_end: u32,
    ends: VecDeque<u32>,
    /// Lines held by groups that are not complete: the number of the first, and each.
    complete: u32,
    held: VecDeque<Lines>,
}

/// The warpgroups of a block.
pub(crate) struct Products(Vec<Warpgroup>);

impl Products {
    pub(crate) fn new(groups: usize) -> Self {
        Self((0..groups).map(|_| Warpgroup::default()).collect())
    }

    /// A warp issues a product. What another warp of its warpgroup issued in its place, when that differs.
    pub(crate) fn issue(&mut self, warp: usize, issue: Issue) -> Result<(), Issue> {
        let g = &mut self.0[warp / 4];
        let me = &mut g.warps[warp % 4];
        let k = (me.issued - g.first) as usize;
        me.issued += 1;
        (me.last, me.open) = (issue.pc, true);
        match g.issues.get(k) {
            Some(&other) if other != issue => return Err(other),
            Some(_) => {}
            None => g.issues.push_back(issue),
        }
        while g.warps.iter().all(|w| w.issued > g.first) {
            g.issues.pop_front();
            g.first += 1;
        }
        Ok(())
    }

    /// Notes lines that a warp's product, not committed yet, holds.
    pub(crate) fn hold(&mut self, warp: usize, lines: Lines) {
        let g = &mut self.0[warp / 4];
        let k = (g.warps[warp % 4].committed - g.complete) as usize;
        while g.held.len() <= k {
            g.held.push_back(Lines::new());
        }
        g.held[k].extend(lines);
    }

    /// A warp commits a group. When it is another group than an earlier warp's: how many products each had issued.
    pub(crate) fn commit(&mut self, warp: usize) -> Result<(), (u32, u32)> {
        let g = &mut self.0[warp / 4];
        let me = &mut g.warps[warp % 4];
        let (k, issued) = ((me.committed - g.first_end) as usize, me.issued);
        me.committed += 1;
        me.open = false;
        match g.ends.get(k) {
            Some(&other) if other != issued => return Err((issued, other)),
            Some(_) => {}
            None => g.ends.push_back(issued),
        }
        while g.warps.iter().all(|w| w.committed > g.first_end) {
            g.ends.pop_front();
            g.first_end += 1;
        }
        Ok(())
    }

    /// A warp waits until at most `n` groups are incomplete. `None` when other warps have not committed them; else the
    /// warpgroup's clock and how many groups the warp newly knows to be complete.
    pub(crate) fn wait(&mut self, warp: usize, n: u32, warps: usize, shared: &mut SharedMemory) -> Option<(u32, u32)> {
        let number = warp / 4;
        let g = &mut self.0[number];
        let wanted = g.warps[warp % 4].committed.saturating_sub(n);
        if g.warps.iter().any(|w| w.committed < wanted) {
            return None;
        }
        while g.complete < wanted {
            g.complete += 1;
            for (line, mask) in g.held.pop_front().unwrap_or_default() {
                shared.release(line, mask, warps + number, g.complete);
            }
        }
        let me = &mut g.warps[warp % 4];
        let newly = wanted.saturating_sub(me.waited);
        me.waited += newly;
        Some((me.waited, newly))
    }

    /// A product that a warp has not waited for.
    pub(crate) fn open(&self, warp: usize) -> Option<usize> {
        let me = &self.0.get(warp / 4)?.warps[warp % 4];
        (me.open || me.issued > 0 && me.waited < me.committed).then_some(me.last)
    }
}

/// A set of registers.
type Set = Vec<u64>;

fn has(set: &Set, r: u16) -> bool {
    set[usize::from(r) / 64] >> (r % 64) & 1 == 1
}

fn put(set: &mut Set, r: u16) {
    set[usize::from(r) / 64] |= 1 << (r % 64);
}

/// How a product uses a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Accumulator of a product with so many columns.
    Sum(u16),
    /// Part of matrix A.
    Factor,
}

/// Watches the registers of one warp.
pub(crate) struct Guard {
    /// Touched since the last `wgmma.fence`.
    touched: Set,
    fenced: bool,
    /// In use by products that have not been waited for.
    busy: Set,
    /// How, and by which instruction: what was noted last.
    uses: Vec<(Use, u32)>,
    /// Registers of products that are in no group, and of each group.
    open: Set,
    groups: VecDeque<Set>,
}

impl Guard {
    pub(crate) fn new(registers: usize) -> Self {
        let none = vec![0; registers.div_ceil(64)];
        let uses = vec![(Use::Factor, 0); registers];
        Self { touched: none.clone(), fenced: false, busy: none.clone(), uses, open: none, groups: VecDeque::new() }
    }

    /// An instruction touches registers: the first that belongs to a product under way.
    pub(crate) fn touch(&mut self, registers: &[u16]) -> Option<u16> {
        for &r in registers {
            if has(&self.busy, r) {
                return Some(r);
            }
            put(&mut self.touched, r);
        }
        None
    }

    /// The instruction that uses a register.
    pub(crate) fn user(&self, register: u16) -> usize {
        self.uses[usize::from(register)].1 as usize
    }

    /// `wgmma.fence`.
    pub(crate) fn fence(&mut self) {
        self.fenced = true;
        self.touched.fill(0);
    }

    /// A product takes a register; the reason when it may not.
    pub(crate) fn take(&mut self, r: u16, how: Use, pc: usize) -> Result<(), &'static str> {
        if !self.fenced {
            return Err("there is no `wgmma.fence` before the first product");
        }
        if has(&self.touched, r) {
            return Err("it was touched since the last `wgmma.fence`");
        }
        let old = &mut self.uses[usize::from(r)];
        if has(&self.busy, r) {
            match (old.0, how) {
                (a, b) if a == b => {}
                (Use::Sum(_), Use::Sum(_)) => {
                    return Err("a product of another shape that adds to it has not been waited for");
                }
                (Use::Sum(_), Use::Factor) => return Err("the product that computes it has not been waited for"),
                _ => return Err("a product that reads it as matrix A has not been waited for"),
            }
        }
        *old = (how, pc as u32);
        put(&mut self.busy, r);
        put(&mut self.open, r);
        Ok(())
    }

    /// Products issued so far become a group.
    pub(crate) fn commit(&mut self) {
        let none = vec![0; self.open.len()];
        self.groups.push_back(std::mem::replace(&mut self.open, none));
    }

    /// The oldest `n` groups are complete.
    pub(crate) fn complete(&mut self, n: u32) {
        self.groups.drain(..(n as usize).min(self.groups.len()));
        self.busy.clone_from(&self.open);
        for group in &self.groups {
            self.busy.iter_mut().zip(group).for_each(|(b, g)| *b |= g);
        }
    }
}
