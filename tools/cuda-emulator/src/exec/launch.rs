// SPDX-License-Identifier: MIT OR Apache-2.0
//! Launches: which blocks are resident, which warp runs next and for how long.

use super::block::Block;
use super::grid::Grid;
use super::warp::{self, State, Stop, Warp};
use crate::mem::Memory;
use crate::mem::shared::SharedMemory;
use crate::module::Kernel;
use crate::op::{Code, Cx, LaneFault, Special, Value};
use crate::report::{Fault, Report};

/// How a launch is run and what is checked.
#[derive(Clone, Debug)]
pub struct Options {
    /// Seed of every choice.
    pub seed: u64,
    /// Asynchronous copies land at once and warps run in order: what a friendly machine would do.
    pub eager: bool,
    /// Report loads of shared memory that nothing wrote.
    pub uninitialised_shared: bool,
    /// Report loads of global memory that nothing wrote.
    pub uninitialised_global: bool,
    /// Report races in shared memory.
    pub shared_races: bool,
    /// Report races in global memory between warps of the launch.
    pub global_races: bool,
    /// Report lanes of one warp that touch the same global memory without `bar.warp.sync` in between.
    pub global_lanes: bool,
    /// Count bank conflicts.
    pub count: bool,
    /// Record which bytes the launch reads and writes.
    pub footprints: bool,
    /// Blocks that are resident at a time.
    pub resident: u32,
    /// Multiprocessors reported to the kernel.
    pub multiprocessors: u32,
    /// Instructions without any change of memory after which a launch is said to spin for ever.
    pub spin_limit: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            seed: 0,
            eager: false,
            uninitialised_shared: true,
            uninitialised_global: true,
            shared_races: true,
            global_races: true,
            global_lanes: true,
            count: true,
            footprints: false,
            resident: 4,
            multiprocessors: 4,
            spin_limit: 20_000_000,
        }
    }
}

/// The configuration of a launch.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: u32,
    /// The parameter buffer, laid out as [`Kernel::params`] says.
    pub params: &'a [u8],
    /// How it is run.
    pub options: Options,
}

/// What a launch did.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Warp instructions.
    pub instructions: u64,
    /// Boxes that tensor copies loaded into shared memory.
    pub boxes: u64,
    /// Per instruction: line, executions by a warp, extra passes through shared memory.
    pub lines: Vec<(u32, u64, u64)>,
}

impl Stats {
    /// All extra passes through shared memory.
    pub fn bank_conflicts(&self) -> u64 {
        self.lines.iter().map(|l| l.2).sum()
    }

    /// Executions of instructions whose line the filter accepts.
    pub fn executed(&self, mut accept: impl FnMut(u32) -> bool) -> u64 {
        self.lines.iter().filter(|l| accept(l.0)).map(|l| l.1).sum()
    }
}

struct Resident {
    block: Block,
    warps: Vec<Option<Warp>>,
    left: usize,
    /// Turns taken, for the fair order of eager runs.
    turns: usize,
    /// Turns in a row in which warps asked for something and did not get it.
    polls: u32,
    /// One turn in so many lets a bulk copy move; 0: none does before no warp can go on without it.
    patience: u32,
}

/// Polls in a row, for each warp, after which no other lane is coming: a group of lanes that could go on would have been chosen.
const HOPELESS: u32 = 4096;
/// Instructions without a poll after which a warp is not waiting for anything.
const BUSY: u64 = 256;

/// Runs a kernel to its end.
pub fn launch(kernel: &Kernel, mem: &mut Memory, how: &Launch<'_>) -> Result<Stats, Box<Report>> {
    let code = &*kernel.code;
    let refuse = |detail: String| {
        Box::new(Report {
            fault: Fault::Launch,
            kernel: code.name.clone(),
            line: 0,
            text: String::new(),
            block: [0; 3],
            thread: None,
            detail,
        })
    };
    let threads = u64::from(how.block[0]) * u64::from(how.block[1]) * u64::from(how.block[2]);
    let blocks = u64::from(how.grid[0]) * u64::from(how.grid[1]) * u64::from(how.grid[2]);
    if threads == 0 || threads > 1024 || blocks == 0 || blocks > 1 << 31 {
        return Err(refuse(format!("grid {:?} of blocks {:?}", how.grid, how.block)));
    }
    if let Some(most) = code.max_threads {
        let most = most.iter().map(|&n| u64::from(n)).product::<u64>();
        if threads > most {
            return Err(refuse(format!("{threads} threads in a block, .maxntid allows {most}")));
        }
    }
    if code.required_threads.is_some_and(|r| r != how.block) {
        return Err(refuse(format!("blocks {:?}, .reqntid wants {:?}", how.block, code.required_threads)));
    }
    if how.params.len() != code.param_bytes {
        return Err(refuse(format!("{} bytes of parameters, the kernel has {}", how.params.len(), code.param_bytes)));
    }
    let first = mem.new_launch(blocks as u32);
    let mut grid = Grid::new(how.options.clone(), how.params.to_vec(), how.grid, first, code.ins.len());
    let mut order: Vec<u32> = (0..blocks as u32).collect();
    if !how.options.eager {
        for i in (1..order.len()).rev() {
            order.swap(i, grid.random(i as u32 + 1) as usize);
        }
    }
    order.reverse();
    let mut resident: Vec<Resident> = Vec::new();
    loop {
        while resident.len() < how.options.resident.max(1) as usize {
            let Some(b) = order.pop() else { break };
            resident.push(start(kernel, &mut grid, how, b));
        }
        if resident.is_empty() {
            break;
        }
        let k = if how.options.eager { 0 } else { grid.random(resident.len() as u32) as usize };
        // An eager run changes blocks as well, or flags between blocks would never be seen.
        let turns = if how.options.eager { 4 } else { 1 + grid.random(32) };
        let r = &mut resident[k];
        for _ in 0..turns {
            if let Err((trouble, pc)) = turn(kernel, &mut grid, mem, r) {
                return Err(Box::new(report(kernel, r, trouble, pc)));
            }
            if r.left == 0 {
                break;
            }
        }
        if r.left == 0 {
            resident.swap_remove(k);
        } else if how.options.eager {
            resident.rotate_left(1);
        }
    }
    let lines = code.ins.iter().enumerate().map(|(pc, i)| (i.line, grid.counts[pc], grid.conflicts[pc])).collect();
    Ok(Stats { instructions: grid.executed, boxes: grid.boxes, lines })
}

fn start(kernel: &Kernel, grid: &mut Grid, how: &Launch<'_>, b: u32) -> Resident {
    let code = &*kernel.code;
    let id = [b % how.grid[0], b / how.grid[0] % how.grid[1], b / how.grid[0] / how.grid[1]];
    let threads = how.block[0] * how.block[1] * how.block[2];
    let count = threads.div_ceil(32) as usize;
    let products = !code.matrix_registers.is_empty();
    let bytes = code.dynamic_offset + how.dynamic_shared;
    let shared = SharedMemory::new(bytes, count, products, how.options.shared_races);
    let block = Block::new(id, grid.first_block + b, how.block, shared, code);
    let mut warps = Vec::with_capacity(count);
    for w in 0..count {
        let here = (threads - w as u32 * 32).min(32);
        let exist = if here == 32 { !0 } else { (1u32 << here) - 1 };
        let mut warp = Warp::new(w, exist, code.rows, code.preds, code.local_bytes, code.matrix_registers.len());
        fill(kernel, &mut warp, grid, how, &block);
        warps.push(Some(warp));
    }
    let patience = [2, 16, 128, 0][grid.random(4) as usize];
    Resident { block, left: warps.len(), warps, turns: 0, polls: 0, patience }
}

/// Fills the rows of immediates, symbols and special registers.
fn fill(kernel: &Kernel, warp: &mut Warp, grid: &Grid, how: &Launch<'_>, block: &Block) {
    let regs = warp.regs_ptr();
    let [nx, ny, _] = how.block;
    let sms = how.options.multiprocessors.max(1);
    for &(row, value, wide) in &kernel.code.values {
        for l in 0..32u32 {
            let thread = warp.index as u32 * 32 + l;
            let v = match value {
                Value::Bits(b) => b,
                Value::Global(var, offset) => kernel.globals[var].wrapping_add_signed(offset),
                Value::Special(s) => u64::from(match s {
                    Special::Tid(0) => thread % nx,
                    Special::Tid(1) => thread / nx % ny,
                    Special::Tid(_) => thread / nx / ny,
                    Special::Ntid(d) => how.block[usize::from(d)],
                    Special::Ctaid(d) => block.id[usize::from(d)],
                    Special::Nctaid(d) => grid.shape[usize::from(d)],
                    Special::Lane => l,
                    Special::Warp => warp.index as u32,
                    Special::Warps => block.threads().div_ceil(32),
                    Special::Sm => block.number % sms,
                    Special::Sms => sms,
                    Special::GridId => 1,
                    Special::LaneMask(0) => 1 << l,
                    Special::LaneMask(1) => (1 << l) - 1,
                    Special::LaneMask(2) => (1 << l) | ((1 << l) - 1),
                    Special::LaneMask(3) => !(1 << l) & !((1 << l) - 1),
                    Special::LaneMask(_) => !((1 << l) - 1),
                    Special::DynamicShared => how.dynamic_shared,
                    Special::TotalShared => block.shared.size(),
                    Special::WarpSize => 32,
                }),
            };
            // SAFETY: the decoder numbers rows below `Code::rows`; wide ones are followed by their second half.
            unsafe {
                let p = regs.add(row as usize * 32);
                if wide {
                    p.cast::<u64>().add(l as usize).write_unaligned(v);
                } else {
                    *p.add(l as usize) = v as u32;
                }
            }
        }
    }
}

/// Runs one warp of a block for a while.
fn turn(kernel: &Kernel, grid: &mut Grid, mem: &mut Memory, r: &mut Resident) -> Result<(), (LaneFault, usize)> {
    let ready = |w: &Option<Warp>| w.as_ref().is_some_and(|w| w.state == State::Ready);
    let n = r.warps.iter().filter(|w| ready(w)).count();
    if n == 0 {
        return Err(deadlock(&kernel.code, r));
    }
    r.turns += 1;
    if r.block.flights.any() {
        let impatient = r.polls as usize > 2 * n + 2;
        if impatient || r.patience > 0 && grid.random(r.patience) == 0 {
            let moving = r.block.flights.moving();
            let k = moving[grid.random(moving.len() as u32) as usize];
            r.block.advance(mem, k).map_err(|(fault, detail, pc)| (LaneFault { fault, lane: None, detail }, pc))?;
            grid.effect(true);
            r.polls = 0;
        }
    } else if r.polls > HOPELESS * n as u32 {
        return Err(deadlock(&kernel.code, r));
    }
    let nth = if grid.options.eager { r.turns % n } else { grid.random(n as u32) as usize };
    let Some(w) = (0..r.warps.len()).filter(|&w| ready(&r.warps[w])).nth(nth) else { return Ok(()) };
    // Short turns provoke interleavings, long ones provoke being far ahead.
    let quantum = match (grid.options.eager, grid.random(4)) {
        (true, _) => 4096,
        (_, 0) => 1 + u64::from(grid.random(8)),
        (_, 1 | 2) => 1 + u64::from(grid.random(256)),
        _ => 4096,
    };
    let Some(mut warp) = r.warps[w].take() else { return Ok(()) };
    let mut cx = Cx {
        regs: warp.regs_ptr(),
        preds: warp.preds_ptr(),
        warp: &mut warp,
        block: &mut r.block,
        grid,
        mem,
        code: &kernel.code,
        target: 0,
        scattered: Vec::new(),
        pc: 0,
        group: 0,
        fault: None,
    };
    let before = cx.grid.executed;
    let stop = warp::run(&mut cx, quantum);
    let executed = cx.grid.executed - before;
    let (pc, fault) = (cx.pc, cx.fault.take());
    match stop {
        Stop::Fault => {
            r.warps[w] = Some(warp);
            let unknown = LaneFault { fault: Fault::Illegal, lane: None, detail: String::new() };
            let mut trouble = fault.unwrap_or(unknown);
            // Remember whose lane it was.
            trouble.lane = trouble.lane.map(|l| l + w as u32 * 32);
            return Err((trouble, pc));
        }
        Stop::Done => {
            r.left -= 1;
            r.polls = 0;
            r.block.warp_ended();
            ended(r, mem, w)?;
        }
        Stop::Poll => {
            r.polls += 1;
            warp.since_poll = 0;
            r.warps[w] = Some(warp);
        }
        Stop::Quantum | Stop::Waiting => {
            // A turn may end between two polls. A warp that works on without any has something to do.
            warp.since_poll += executed;
            if stop == Stop::Waiting || warp.since_poll > BUSY {
                r.polls = 0;
            }
            r.warps[w] = Some(warp);
        }
    }
    for (w, value) in r.block.take_freed() {
        if let Some(warp) = &mut r.warps[w] {
            warp.released = Some(value);
            warp.state = State::Ready;
        }
    }
    if grid.spins() {
        let limit = grid.options.spin_limit;
        let detail = format!("{limit} instructions without any change of memory: this waits for what never comes");
        return Err((LaneFault { fault: Fault::Livelock, lane: None, detail }, pc));
    }
    Ok(())
}

/// A warp has ended: what it began has to be waited for.
fn ended(r: &mut Resident, mem: &mut Memory, warp: usize) -> Result<(), (LaneFault, usize)> {
    let trouble = |detail: String, pc| (LaneFault { fault: Fault::AsyncPending, lane: None, detail }, pc);
    if let Some(pc) = r.block.unread(warp) {
        let text = format!("warp {warp} has ended without waiting until this store was read from shared memory");
        return Err(trouble(text, pc));
    }
    if let Some(pc) = r.block.products.open(warp) {
        return Err(trouble(format!("warp {warp} has ended without waiting for this product"), pc));
    }
    if r.left == 0 {
        r.block.finish(mem).map_err(|(fault, detail, pc)| (LaneFault { fault, lane: None, detail }, pc))?;
    }
    Ok(())
}

#[cold]
fn deadlock(code: &Code, r: &Resident) -> (LaneFault, usize) {
    let mut at = Vec::new();
    let mut pc = 0;
    for w in r.warps.iter().flatten() {
        if let Some(g) = w.groups.first() {
            pc = g.pc;
            at.push(format!("warp {} at line {}", w.index, code.ins[g.pc].line));
        }
    }
    let ended = r.warps.iter().filter(|w| w.is_none()).count();
    let detail =
        format!("no warp can go on: {} ({ended} warps have ended); {}", at.join(", "), r.block.waiting_barriers());
    (LaneFault { fault: Fault::Deadlock, lane: None, detail }, pc)
}

fn report(kernel: &Kernel, r: &Resident, t: LaneFault, pc: usize) -> Report {
    let line = kernel.code.ins.get(pc).map_or(0, |i| i.line);
    let [nx, ny, _] = r.block.shape;
    Report {
        fault: t.fault,
        kernel: kernel.code.name.clone(),
        line,
        text: kernel.text.get(line.wrapping_sub(1) as usize).map_or(String::new(), |t| t.trim().to_owned()),
        block: r.block.id,
        thread: t.lane.map(|l| [l % nx, l / nx % ny, l / nx / ny]),
        detail: t.detail,
    }
}
