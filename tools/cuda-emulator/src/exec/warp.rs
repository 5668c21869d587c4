// SPDX-License-Identifier: MIT OR Apache-2.0
//! A warp: its registers and the groups of lanes that stand at different instructions.
//!
//! The group at the lowest instruction runs first, and groups that meet become one again: structured control flow
//! reconverges where compilers expect it. Now and then another group is chosen, because lanes of one warp may wait for
//! each other. An instruction that lanes execute together parks its group until the others arrive.

use super::clock::Published;
use super::products::Guard;
use crate::op::copy::Pending;
use crate::op::{Cx, Flow, NO_GUARD};
use crate::report::Fault;

/// Lanes at one instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub(crate) pc: usize,
    pub(crate) mask: u32,
    pub(crate) parked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Ready,
    /// At a barrier.
    Waiting,
    Done,
}

/// One warp.
pub(crate) struct Warp {
    pub(crate) index: usize,
    regs: Vec<u128>,
    preds: Vec<u32>,
    local: Vec<u64>,
    pub(crate) groups: Vec<Group>,
    /// Lanes that exist.
    pub(crate) exist: u32,
    /// Lanes that have not exited.
    pub(crate) alive: u32,
    pub(crate) state: State,
    /// Set when a barrier lets this warp go: the value of its reduction.
    pub(crate) released: Option<u32>,
    pub(crate) pending: Vec<Pending>,
    /// How often the lanes have synchronised.
    pub(crate) syncs: u32,
    /// Groups of asynchronous copies each lane has committed.
    pub(crate) committed: [u32; 32],
    /// Groups of bulk stores each lane has committed.
    pub(crate) bulk_committed: [u32; 32],
    /// Lanes that wait at a barrier on their own: the barrier and its phase.
    pub(crate) apart: Vec<(u32, usize, u32)>,
    /// Instructions since it asked for something that was not there.
    pub(crate) since_poll: u64,
    /// Which registers of products are touched or in use.
    pub(crate) guard: Guard,
    /// What relaxed reads have seen and no fence has taken up yet.
    pub(crate) observed: Published,
    /// What relaxed writes publish: what was known at the last fence.
    pub(crate) fenced: Option<Published>,
    /// The same for a fence that only orders the block.
    pub(crate) fenced_block: Option<Published>,
    /// What a fence has published to the cluster of the block's barriers.
    pub(crate) made: Option<Published>,
}

/// Why a warp stopped running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Quantum,
    /// It asked for something that is not there yet.
    Poll,
    Waiting,
    Done,
    Fault,
}

impl Warp {
    pub(crate) fn new(
        index: usize,
        exist: u32,
        rows: u32,
        preds: u32,
        local_bytes: u32,
        matrix_registers: usize,
    ) -> Self {
        Self {
            index,
            regs: vec![0; rows as usize * 8],
            preds: vec![0; preds as usize],
            local: vec![0; local_bytes.div_ceil(8) as usize * 32],
            groups: vec![Group { pc: 0, mask: exist, parked: false }],
            exist,
            alive: exist,
            state: State::Ready,
            released: None,
            pending: Vec::new(),
            syncs: 1,
            committed: [0; 32],
            bulk_committed: [0; 32],
            apart: Vec::new(),
            since_poll: 0,
            guard: Guard::new(matrix_registers),
            observed: Published::default(),
            fenced: None,
            fenced_block: None,
            made: None,
        }
    }

    pub(crate) fn regs_ptr(&mut self) -> *mut u32 {
        self.regs.as_mut_ptr().cast()
    }

    pub(crate) fn preds_ptr(&mut self) -> *mut u32 {
        self.preds.as_mut_ptr()
    }

    /// A byte of a lane's local memory; the caller has checked the offset.
    pub(crate) fn local_ptr(&mut self, lane: usize, bytes: usize, offset: usize) -> *mut u8 {
        self.local.as_mut_ptr().cast::<u8>().wrapping_add(lane * bytes.next_multiple_of(8) + offset)
    }

    fn pick(&self, odd: u32) -> Option<usize> {
        let free = || self.groups.iter().enumerate().filter(|(_, g)| !g.parked);
        if odd != 0 && self.groups.len() > 1 {
            let n = free().count();
            if n > 0 {
                return free().nth(odd as usize % n).map(|(k, _)| k);
            }
        }
        free().min_by_key(|(_, g)| g.pc).map(|(k, _)| k)
    }

    /// Puts lanes where a group may stand already.
    fn join(&mut self, pc: usize, mask: u32) {
        match self.groups.iter_mut().find(|g| g.pc == pc) {
            _ if mask == 0 => {}
            Some(g) => (g.mask, g.parked) = (g.mask | mask, false),
            None => self.groups.push(Group { pc, mask, parked: false }),
        }
    }

    /// Stores where a group stands, joining it with another that stands there already.
    fn settle(&mut self, k: usize, pc: usize, mask: u32) {
        if mask == 0 {
            self.groups.swap_remove(k);
            return;
        }
        self.groups[k] = Group { pc, mask, parked: false };
        if let Some(o) = (0..self.groups.len()).find(|&o| o != k && self.groups[o].pc == pc) {
            self.groups[o].mask |= mask;
            self.groups[o].parked = false;
            self.groups.swap_remove(k);
        }
    }
}

/// Runs the warp of `cx` for up to `quantum` instructions.
pub(crate) fn run(cx: &mut Cx, quantum: u64) -> Stop {
    // Registers are watched only in kernels that have products whose registers must not be touched.
    if cx.code.matrix_registers.is_empty() { run_as::<false>(cx, quantum) } else { run_as::<true>(cx, quantum) }
}

fn run_as<const WATCHED: bool>(cx: &mut Cx, mut quantum: u64) -> Stop {
    let code = cx.code;
    loop {
        if cx.warp.groups.is_empty() {
            cx.warp.state = State::Done;
            return Stop::Done;
        }
        let odd = if cx.warp.groups.len() > 1 && cx.grid.random(64) == 0 { 1 + cx.grid.random(31) } else { 0 };
        let Some(k) = cx.warp.pick(odd) else {
            return stuck(cx);
        };
        let Group { mut pc, mut mask, .. } = cx.warp.groups[k];
        // Groups ahead: when this one reaches the nearest, they merge.
        let mut stop = nearest(cx.warp, k, pc);
        loop {
            if quantum == 0 {
                cx.warp.settle(k, pc, mask);
                return Stop::Quantum;
            }
            quantum -= 1;
            let ins = &code.ins[pc];
            let m = if ins.guard == NO_GUARD {
                mask
            } else {
                let p = cx.pred(ins.guard);
                mask & if ins.guard_negated { !p } else { p }
            };
            cx.grid.executed += 1;
            if m != 0 {
                cx.grid.counts[pc] += 1;
                cx.pc = pc;
                cx.group = mask;
                if WATCHED
                    && !code.touches[pc].is_empty()
                    && let Some(r) = cx.warp.guard.touch(&code.touches[pc])
                {
                    cx.warp.groups[k] = Group { pc, mask, parked: false };
                    return touched(cx, r);
                }
                // SAFETY: the decoder paired this function with operands of the right kind and width, and `fast` ones
                // are only chosen where the machine has their features.
                match unsafe { (ins.f)(cx, ins, m) } {
                    Flow::Next => pc += 1,
                    Flow::Jump => {
                        if m == mask {
                            pc = cx.target;
                            if cx.warp.groups.len() > 1 {
                                cx.warp.settle(k, pc, mask);
                                break;
                            }
                        } else {
                            cx.warp.groups[k] = Group { pc: pc + 1, mask: mask & !m, parked: false };
                            cx.warp.groups.push(Group { pc: cx.target, mask: m, parked: false });
                            let last = cx.warp.groups.len() - 1;
                            cx.warp.settle(last, cx.target, m);
                            // The fall-through may meet a group as well.
                            if let Some(k) = cx.warp.groups.iter().position(|g| g.mask == mask & !m && g.pc == pc + 1) {
                                cx.warp.settle(k, pc + 1, mask & !m);
                            }
                            break;
                        }
                    }
                    Flow::Exit => {
                        mask &= !m;
                        cx.warp.alive &= !m;
                        cx.warp.settle(k, pc + 1, mask);
                        // Others may have parked for lanes that are gone now.
                        cx.warp.groups.iter_mut().for_each(|g| g.parked = false);
                        cx.grid.effect(true);
                        break;
                    }
                    Flow::Park => {
                        cx.warp.groups[k] = Group { pc, mask, parked: true };
                        cx.grid.counts[pc] -= 1;
                        break;
                    }
                    Flow::Wait => {
                        cx.warp.groups[k] = Group { pc, mask, parked: false };
                        cx.warp.state = State::Waiting;
                        cx.grid.counts[pc] -= 1;
                        return Stop::Waiting;
                    }
                    Flow::Poll => {
                        cx.warp.settle(k, pc + 1, mask);
                        return Stop::Poll;
                    }
                    Flow::Again => {
                        cx.warp.groups[k] = Group { pc, mask, parked: false };
                        cx.grid.counts[pc] -= 1;
                        return Stop::Poll;
                    }
                    Flow::Scatter => {
                        cx.warp.groups.swap_remove(k);
                        for (pc, lanes) in std::mem::take(&mut cx.scattered) {
                            cx.warp.join(pc, lanes);
                        }
                        break;
                    }
                    Flow::Yield => {
                        cx.warp.settle(k, pc + 1, mask);
                        return Stop::Quantum;
                    }
                    Flow::Fault => {
                        cx.warp.groups[k] = Group { pc, mask, parked: false };
                        return Stop::Fault;
                    }
                }
            } else {
                pc += 1;
            }
            if pc == stop {
                cx.warp.settle(k, pc, mask);
                break;
            }
            if stop != usize::MAX && pc > stop {
                stop = nearest(cx.warp, k, pc);
            }
        }
    }
}

fn nearest(warp: &Warp, k: usize, pc: usize) -> usize {
    let ahead = warp.groups.iter().enumerate().filter(|(o, g)| *o != k && g.pc > pc);
    ahead.map(|(_, g)| g.pc).min().unwrap_or(usize::MAX)
}

/// A register of a product under way was touched.
#[cold]
fn touched(cx: &mut Cx, register: u16) -> Stop {
    let line = cx.code.ins[cx.warp.guard.user(register)].line;
    let name = &cx.code.matrix_registers[usize::from(register)];
    let text =
        format!("register {name} belongs to the asynchronous product of line {line}, which has not been waited for");
    cx.fail(Fault::ProductRegisters, None, text);
    Stop::Fault
}

/// Every group waits for another: the lanes of this warp stand at different instructions for good.
#[cold]
fn stuck(cx: &mut Cx) -> Stop {
    let mut groups = cx.warp.groups.clone();
    groups.sort_by_key(|g| g.pc);
    cx.pc = groups[0].pc;
    let list: Vec<String> =
        groups.iter().map(|g| format!("{:#010x} at line {}", g.mask, cx.code.ins[g.pc].line)).collect();
    let text = format!("lanes of one warp wait for each other at different instructions: {}", list.join(", "));
    cx.fail(Fault::Divergence, None, text);
    Stop::Fault
}
