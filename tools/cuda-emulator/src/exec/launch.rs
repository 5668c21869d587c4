// SPDX-License-Identifier: MIT OR Apache-2.0
//! Launches: which blocks are resident, which warp runs next and for how long.

use super::block::Block;
use super::cluster::{MAX_BLOCKS, Peers};
use super::grid::Grid;
use super::resident::{Found, Resident, Where, deadlock, place, start};
use super::warp::{self, State, Stop, Warp};
use crate::mem::Memory;
use crate::module::Kernel;
use crate::op::{Cx, LaneFault};
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
    /// Blocks of a cluster; `[1; 3]` leaves it to the kernel, which may name a number.
    pub cluster: [u32; 3],
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

/// Polls in a row, for each warp, after which no other lane is coming: a group of lanes that could go on would have
/// been chosen.
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
    let cluster = match code.required_cluster {
        Some(required) if how.cluster != [1; 3] && how.cluster != required => {
            return Err(refuse(format!("clusters {:?}, .reqnctapercluster wants {required:?}", how.cluster)));
        }
        Some(required) => required,
        None => how.cluster,
    };
    let size = cluster.iter().map(|&n| u64::from(n)).product::<u64>();
    if size == 0 || size > MAX_BLOCKS.into() || (0..3).any(|d| !how.grid[d].is_multiple_of(cluster[d])) {
        return Err(refuse(format!("clusters {cluster:?} of at most {MAX_BLOCKS} blocks in a grid {:?}", how.grid)));
    }
    if how.params.len() != code.param_bytes {
        return Err(refuse(format!("{} bytes of parameters, the kernel has {}", how.params.len(), code.param_bytes)));
    }
    let first = mem.new_launch(blocks as u32);
    let mut grid = Grid::new(how.options.clone(), how.params.to_vec(), how.grid, first, code.ins.len());
    let mut order: Vec<u32> = (0..(blocks / size) as u32).collect();
    if !how.options.eager {
        for i in (1..order.len()).rev() {
            order.swap(i, grid.random(i as u32 + 1) as usize);
        }
    }
    order.reverse();
    let mut resident: Vec<Resident> = Vec::new();
    loop {
        while resident.len() < (how.options.resident / size as u32).max(1) as usize {
            let Some(c) = order.pop() else { break };
            resident.push(start(kernel, &mut grid, how, cluster, c));
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
                return Err(Box::new(report(kernel, trouble, pc)));
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

/// Runs one warp of a cluster for a while.
fn turn(kernel: &Kernel, grid: &mut Grid, mem: &mut Memory, r: &mut Resident) -> Result<(), Found> {
    let ready = |w: &Option<Warp>| w.as_ref().is_some_and(|w| w.state == State::Ready);
    let n = r.warps.iter().filter(|w| ready(w)).count();
    if n == 0 {
        return Err(deadlock(&kernel.code, r));
    }
    r.turns += 1;
    if r.blocks.iter().any(|b| b.flights.any()) {
        let impatient = r.polls as usize > 2 * n + 2;
        if impatient || r.patience > 0 && grid.random(r.patience) == 0 {
            let moving = |(rank, b): (usize, &Block)| b.flights.moving().into_iter().map(move |k| (rank, k));
            let moving: Vec<(usize, usize)> = r.blocks.iter().enumerate().flat_map(moving).collect();
            let (rank, k) = moving[grid.random(moving.len() as u32) as usize];
            let block = &mut r.blocks[rank];
            let done = block.advance(mem, k);
            done.map_err(|(fault, detail, pc)| (LaneFault { fault, lane: None, detail }, (pc, place(block))))?;
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
    let rank = w / r.each;
    let (before, rest) = r.blocks.split_at_mut(rank);
    let Some((block, after)) = rest.split_first_mut() else { return Ok(()) };
    let at = place(block);
    let mut cx = Cx {
        regs: warp.regs_ptr(),
        preds: warp.preds_ptr(),
        warp: &mut warp,
        block,
        peers: Peers { before, after },
        cluster: &mut r.cluster,
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
    r.cluster.set_alive((rank, warp.index), warp.alive);
    match stop {
        Stop::Fault => {
            r.warps[w] = Some(warp);
            let unknown = LaneFault { fault: Fault::Illegal, lane: None, detail: String::new() };
            let mut trouble = fault.unwrap_or(unknown);
            // Remember whose lane it was.
            trouble.lane = trouble.lane.map(|l| l + (w % r.each) as u32 * 32);
            return Err((trouble, (pc, at)));
        }
        Stop::Done => {
            r.left -= 1;
            r.polls = 0;
            r.blocks[rank].warp_ended(w % r.each);
            ended(&mut r.blocks[rank], mem, (kernel, grid.first_block), w % r.each)?;
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
    for (w, value) in r.blocks[rank].take_freed() {
        if let Some(warp) = &mut r.warps[rank * r.each + w] {
            warp.released = Some(value);
            warp.state = State::Ready;
        }
    }
    if grid.spins() {
        let limit = grid.options.spin_limit;
        let detail = format!("{limit} instructions without any change of memory: this waits for what never comes");
        return Err((LaneFault { fault: Fault::Livelock, lane: None, detail }, (pc, at)));
    }
    Ok(())
}

/// A warp has ended: what it began has to be waited for. With the last one the block ends.
fn ended(b: &mut Block, mem: &mut Memory, (kernel, first): (&Kernel, u32), warp: usize) -> Result<(), Found> {
    let at = place(b);
    let trouble = |fault, detail: String, pc| (LaneFault { fault, lane: None, detail }, (pc, at));
    if let Some(pc) = b.unread(warp) {
        let text = format!("warp {warp} has ended without waiting until this store was read from shared memory");
        return Err(trouble(Fault::AsyncPending, text, pc));
    }
    if let Some(pc) = b.products.open(warp) {
        let text = format!("warp {warp} has ended without waiting for this product");
        return Err(trouble(Fault::AsyncPending, text, pc));
    }
    if !b.has_ended() {
        return Ok(());
    }
    b.finish(mem).map_err(|(fault, text, pc)| trouble(fault, text, pc))?;
    if let Some((other, warp, pc)) = b.unknown_visit() {
        let text = format!(
            "this block has ended, and warp {warp} of block number {} of its cluster has reached into its shared memory at \
             line {} without an order between the two",
            other - first,
            kernel.code.ins[pc].line
        );
        return Err(trouble(Fault::Cluster, text, pc));
    }
    Ok(())
}

fn report(kernel: &Kernel, t: LaneFault, (pc, (block, [nx, ny, _])): (usize, Where)) -> Report {
    let line = kernel.code.ins.get(pc).map_or(0, |i| i.line);
    Report {
        fault: t.fault,
        kernel: kernel.code.name.clone(),
        line,
        text: kernel.text.get(line.wrapping_sub(1) as usize).map_or(String::new(), |t| t.trim().to_owned()),
        block,
        thread: t.lane.map(|l| [l % nx, l / nx % ny, l / nx / ny]),
        detail: t.detail,
    }
}
