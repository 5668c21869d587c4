// SPDX-License-Identifier: MIT OR Apache-2.0
//! Mutants: a kernel with one piece of its synchronisation lost or wrong.
//!
//! Every barrier, fence, commit, wait, arrival and release is removed in turn, and every addition of vectors to memory.
//! What names a number has mutants of that number too: bytes that are announced to a barrier, arrivals that it expects,
//! the parity of a wait. A test that cannot tell a mutant from the kernel does not test that piece.

use crate::module::Kernel;
use crate::op::{Code, control, mbarrier};
use std::fmt;
use std::sync::Arc;

/// What is wrong with an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Change {
    /// It is not there.
    Removed,
    /// It arrives, and announces no bytes.
    NoBytes,
    /// It announces 16 bytes more.
    MoreBytes,
    /// It announces 16 bytes fewer.
    FewerBytes,
    /// The barrier expects one more arrival.
    MoreArrivals,
    /// It waits for the other parity.
    OtherParity,
    /// It says at once that the phase has ended.
    NoWait,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Removed => "removed",
            Self::NoBytes => "no-bytes",
            Self::MoreBytes => "more-bytes",
            Self::FewerBytes => "fewer-bytes",
            Self::MoreArrivals => "more-arrivals",
            Self::OtherParity => "other-parity",
            Self::NoWait => "no-wait",
        })
    }
}

/// One change of one instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mutant {
    pc: usize,
    /// The line of the instruction.
    pub line: u32,
    /// What is wrong with it.
    pub change: Change,
}

impl fmt::Display for Mutant {
    /// The line alone for what is removed, as `120`; else with the change, as `120:no-bytes`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.change {
            Change::Removed => write!(f, "{}", self.line),
            change => write!(f, "{}:{change}", self.line),
        }
    }
}

/// Opcodes that only synchronise, by their beginnings; and additions to memory that blocks take turns in.
const REMOVED: &[&str] = &[
    "bar.",
    "barrier.",
    "membar",
    "fence",
    "cp.async.commit",
    "cp.async.wait",
    "cp.async.bulk.commit",
    "cp.async.bulk.wait",
    "mbarrier.init",
    "mbarrier.arrive",
    "mbarrier.expect_tx",
    "red.relaxed.gpu.global.add.v",
    "st.release",
    "wgmma.fence",
    "wgmma.commit",
    "wgmma.wait",
];

/// What can be wrong with an instruction.
fn changes(opcode: &str) -> Vec<Change> {
    let mut out = Vec::new();
    if REMOVED.iter().any(|r| opcode.starts_with(r)) {
        out.push(Change::Removed);
    }
    if opcode.starts_with("mbarrier.arrive.expect_tx") {
        out.push(Change::NoBytes);
    }
    if opcode.starts_with("mbarrier.") && opcode.contains("expect_tx") {
        out.extend([Change::MoreBytes, Change::FewerBytes]);
    }
    if opcode.starts_with("mbarrier.init") {
        out.push(Change::MoreArrivals);
    }
    if opcode.starts_with("mbarrier.t") {
        out.push(Change::NoWait);
        if opcode.contains(".parity") {
            out.push(Change::OtherParity);
        }
    }
    out
}

impl Kernel {
    /// All mutants, in the order of the instructions.
    pub fn mutants(&self) -> Vec<Mutant> {
        let lines: Vec<u32> = self.code.ins.iter().map(|i| i.line).collect();
        let mut out = Vec::new();
        for (pc, &line) in lines.iter().enumerate().filter(|(_, l)| **l != 0) {
            out.extend(changes(self.opcode(pc, line)).into_iter().map(|change| Mutant { pc, line, change }));
        }
        out
    }

    /// What kind of mutant it is: the change, and the opcode that is changed.
    pub fn kind(&self, m: &Mutant) -> String {
        format!("{} {}", m.change, self.opcode(m.pc, m.line))
    }

    /// The opcode of an instruction. A line may hold several: they are told apart by their order.
    fn opcode(&self, pc: usize, line: u32) -> &str {
        let nth = self.code.ins[..pc].iter().rev().take_while(|i| i.line == line).count();
        opcodes(self.text(line)).nth(nth).unwrap_or_default()
    }

    /// The kernel with one change.
    pub fn mutated(&self, m: &Mutant) -> Self {
        let mut code = Code::clone(&self.code);
        let ins = &mut code.ins[m.pc];
        match m.change {
            Change::Removed => ins.f = control::nothing,
            Change::NoBytes => ins.a = mbarrier::NONE,
            Change::MoreBytes => ins.c = 16,
            Change::FewerBytes => ins.c = 16u32.wrapping_neg(),
            Change::MoreArrivals | Change::OtherParity => ins.e = 1,
            Change::NoWait => ins.f = mbarrier::passes,
        }
        Self { code: Arc::new(code), ..self.clone() }
    }
}

/// The opcodes of a line, without guards and labels.
fn opcodes(line: &str) -> impl Iterator<Item = &str> {
    let statements = line.split("//").next().unwrap_or_default().split(';');
    let skipped = |w: &&str| w.starts_with('@') || w.ends_with(':') || matches!(*w, "{" | "}");
    statements.filter_map(move |s| s.split_whitespace().find(|w| !skipped(w))).filter(|w| !w.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use crate::{Memory, Module};
    use std::collections::BTreeSet;

    fn kinds(file: &str, kernel: &str) -> BTreeSet<String> {
        let path = format!("{}/../../ptx/compiled/{file}.ptx", env!("CARGO_MANIFEST_DIR"));
        let module = Module::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
        let loaded = module.load(&mut Memory::new()).unwrap();
        let kernel = loaded.kernel(kernel).unwrap();
        kernel.mutants().iter().map(|m| kernel.kind(m)).collect()
    }

    /// Of the kernels for `sm_90a`, everything that orders memory is among what `mutate --kinds` takes away.
    #[test]
    fn kinds_of_the_shipped_kernels() {
        let both = [
            "removed mbarrier.arrive.shared::cta.b64",
            "removed mbarrier.arrive.expect_tx.shared::cta.b64",
            "no-bytes mbarrier.arrive.expect_tx.shared::cta.b64",
            "more-bytes mbarrier.arrive.expect_tx.shared::cta.b64",
            "fewer-bytes mbarrier.arrive.expect_tx.shared::cta.b64",
            "more-arrivals mbarrier.init.shared::cta.b64",
            "other-parity mbarrier.try_wait.parity.shared::cta.b64",
            "no-wait mbarrier.try_wait.parity.shared::cta.b64",
            "removed fence.proxy.async.shared::cta",
            "removed wgmma.fence.sync.aligned",
            "removed wgmma.commit_group.sync.aligned",
            "removed wgmma.wait_group.sync.aligned",
            "removed bar.sync",
        ];
        let backward = ["removed red.relaxed.gpu.global.add.v2.f32", "removed st.release.gpu.global.u32"];
        let forward = kinds("hopper_forward_bf16_64", "cpattn_hopper_forward");
        let of_backward = kinds("hopper_backward_bf16_64", "cpattn_hopper_backward");
        for kind in both {
            assert!(forward.contains(kind) && of_backward.contains(kind), "{kind}: {forward:?}, {of_backward:?}");
        }
        for kind in backward {
            assert!(of_backward.contains(kind), "{kind}: {of_backward:?}");
        }
    }
}
