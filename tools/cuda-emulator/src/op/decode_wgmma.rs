// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decodes products of warpgroups, and finds the registers they use.

use super::decode::{Decoder, Refused, plain};
use super::rows::Kind;
use super::{Ins, wgmma};
use crate::ptx::ast::{Inst, Operand};

impl Decoder<'_> {
    pub(super) fn decode_wgmma(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        match (parts, o) {
            (["wgmma", "fence", "sync", "aligned"], []) => Ok(plain(wgmma::fence)),
            (["wgmma", "commit_group", "sync", "aligned"], []) => Ok(plain(wgmma::commit)),
            (["wgmma", "wait_group", "sync", "aligned"], [Operand::Int(n)]) => {
                Ok(Ins { c: *n as u32, ..plain(wgmma::wait) })
            }
            (
                ["wgmma", "mma_async", "sync", "aligned", shape, "f32", ab @ ("f16" | "bf16"), ab2],
                [d, a, b, scale, rest @ ..],
            ) if ab == ab2 => {
                let n = shape.strip_prefix("m64n").and_then(|s| s.strip_suffix("k16")).and_then(|n| n.parse().ok());
                let Some(n) = n.filter(|n: &u32| (8..=256).contains(n) && n.is_multiple_of(8)) else {
                    return Err(format!("shape `{shape}`: m64nNk16 with N a multiple of 8 up to 256"));
                };
                self.product(n, *ab == "bf16", [d, a, b, scale], rest)
            }
            _ => Err("this form is not known to the emulator".into()),
        }
    }

    fn product(&mut self, n: u32, brain: bool, o: [&Operand; 4], rest: &[Operand]) -> Result<Ins, Refused> {
        let [d, a, b, scale] = o;
        let from_registers = matches!(a, Operand::Vector(_));
        let mut flags = if brain { wgmma::BRAIN } else { 0 };
        let mut bits = [wgmma::NEGATE_A, wgmma::NEGATE_B, wgmma::TRANSPOSE_A, wgmma::TRANSPOSE_B].to_vec();
        if from_registers {
            flags |= wgmma::REGISTERS_A;
            bits.remove(2);
        }
        if rest.len() != bits.len() {
            return Err(format!("{} numbers after `scale-d`, expected {}", rest.len(), bits.len()));
        }
        for (k, (flag, o)) in bits.into_iter().zip(rest).enumerate() {
            match (k, o) {
                (0 | 1, Operand::Int(1)) | (2.., Operand::Int(0)) => {}
                (0 | 1, Operand::Int(-1)) | (2.., Operand::Int(1)) => flags |= flag,
                _ => return Err("scales are 1 or -1, transposes 0 or 1".into()),
            }
        }
        let mut dst = 0;
        match scale {
            Operand::Int(0) => flags |= wgmma::NEVER_ADDS,
            Operand::Int(_) => flags |= wgmma::ALWAYS_ADDS,
            p => {
                let (p, negated) = self.pred(p)?;
                if negated {
                    return Err("`scale-d` is a predicate or a number".into());
                }
                dst = p;
            }
        }
        let (sums, factors) = (Self::items(d), if from_registers { Self::items(a) } else { Vec::new() });
        if sums.len() != n as usize / 2 || from_registers && factors.len() != 4 {
            let want = if from_registers { " and 4" } else { "" };
            return Err(format!("{} and {} registers, expected {}{want}", sums.len(), factors.len(), n / 2));
        }
        let (mut rows, mut numbers) = (Vec::new(), Vec::new());
        for (o, kind) in sums.iter().map(|o| (o, Kind::F32)).chain(factors.iter().map(|o| (o, Kind::B32))) {
            let Operand::Reg(r) = o else { return Err(format!("{o:?} is not a register")) };
            rows.push(self.register(*r, kind.wide())?);
            numbers.push(u32::from(self.number(*r)));
        }
        let a = if from_registers { 0 } else { self.src(a, Kind::B64)? };
        let b = self.src(b, Kind::B64)?;
        rows.extend(numbers);
        let x = self.list(&rows);
        Ok(Ins { dst, a, b, c: n, e: flags, x, ..plain(wgmma::mma()) })
    }

    /// The number of a register among those of products.
    fn number(&mut self, r: u32) -> u16 {
        let next = self.matrix.len() as u16;
        let names = &mut self.code.matrix_registers;
        let name = &self.entry.regs[r as usize].name;
        *self.matrix.entry(r).or_insert_with(|| {
            names.push(name.clone());
            next
        })
    }

    /// The registers of products that an instruction touches; products themselves know how they use theirs.
    pub(super) fn touches(&self, inst: &Inst) -> Box<[u16]> {
        let mut out = Vec::new();
        if !inst.opcode.starts_with("wgmma.mma_async") {
            inst.operands.iter().for_each(|o| self.registers_of(o, &mut out));
        }
        out.into_boxed_slice()
    }

    fn registers_of(&self, o: &Operand, out: &mut Vec<u16>) {
        match o {
            Operand::Reg(r) | Operand::NotReg(r) => out.extend(self.matrix.get(r)),
            Operand::Vector(items) => items.iter().for_each(|o| self.registers_of(o, out)),
            Operand::Address(base, _) => self.registers_of(base, out),
            Operand::Tensor(base, items) => {
                self.registers_of(base, out);
                items.iter().for_each(|o| self.registers_of(o, out));
            }
            Operand::Pair(a, b) => {
                self.registers_of(a, out);
                self.registers_of(b, out);
            }
            _ => {}
        }
    }
}
