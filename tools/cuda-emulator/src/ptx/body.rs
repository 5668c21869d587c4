// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel bodies: declarations, labels, instructions and operands.
//!
//! Inline assembly opens scopes of its own and likes to reuse names (`%p1`, `LOOP`), so registers are resolved to
//! numbers here, while the scopes are known, and labels carry the scope they were declared in.

use super::ast::{Class, Entry, Inst, Operand, Reg, Space};
use super::lex::Tok;
use super::parse::Parser;
use super::vars::type_class;
use crate::report::LoadError;
use std::collections::HashMap;

#[derive(Default)]
struct Scope {
    id: u32,
    single: HashMap<String, u32>,
    /// prefix → (first register, count)
    ranges: HashMap<String, (u32, u32)>,
}

struct Names(Vec<Scope>);

impl Names {
    fn register(&self, name: &str) -> Option<u32> {
        self.0.iter().rev().find_map(|s| {
            if let Some(&r) = s.single.get(name) {
                return Some(r);
            }
            let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
            let &(first, count) = s.ranges.get(prefix)?;
            let n: u32 = name[prefix.len()..].parse().ok()?;
            (n < count).then_some(first + n)
        })
    }
}

impl Parser {
    pub(super) fn body(&mut self, entry: &mut Entry) -> Result<(), LoadError> {
        self.expect('{')?;
        let mut names = Names(vec![Scope::default()]);
        while let Some(scope) = names.0.last().map(|s| s.id) {
            if self.eat('}') {
                names.0.pop();
            } else if self.eat('{') {
                let id = entry.scopes.len() as u32;
                entry.scopes.push(scope);
                names.0.push(Scope { id, ..Scope::default() });
            } else {
                self.statement(entry, &mut names, scope)?;
            }
        }
        Ok(())
    }

    fn statement(&mut self, entry: &mut Entry, names: &mut Names, scope: u32) -> Result<(), LoadError> {
        if self.eat(';') {
            return Ok(());
        }
        let line = self.line();
        let guard = if self.eat('@') {
            let negated = self.eat('!');
            let name = self.word()?;
            let Some(r) = names.register(&name) else {
                return self.error(format!("predicate `{name}` is not declared"));
            };
            Some((r, negated))
        } else {
            None
        };
        let word = self.word()?;
        if guard.is_none() && self.is_sym(':') {
            self.expect(':')?;
            if !self.eat_word(".branchtargets") {
                entry.labels.push((scope, word, entry.body.len()));
                return Ok(());
            }
            let mut targets = vec![self.word()?];
            while self.eat(',') {
                targets.push(self.word()?);
            }
            entry.tables.push((scope, word, targets));
            return self.expect(';');
        }
        match word.as_str() {
            ".reg" => return self.registers(entry, names),
            ".shared" | ".local" => {
                let space = if word == ".shared" { Space::Shared } else { Space::Local };
                entry.vars.push(self.variable(space, false)?);
                return self.expect(';');
            }
            ".pragma" => {
                while !self.eat(';') {
                    self.take()?;
                }
                return Ok(());
            }
            ".loc" | ".file" => {
                while self.peek().is_some() && self.line() == line {
                    self.take()?;
                }
                return Ok(());
            }
            _ if word == "call" || word.starts_with("call.") => {
                return self.error(format!("`{word}` is not supported: compile with everything inlined"));
            }
            _ if word.starts_with('.') => return self.error(format!("unknown directive `{word}`")),
            _ => {}
        }
        // Operands of a form that is not known here belong to an instruction that is not: that one is named.
        let operands = self.operands(names).map_err(|e| LoadError::new(e.line, format!("`{word}`: {}", e.what)))?;
        entry.body.push(Inst { line, guard, opcode: word, operands, scope });
        Ok(())
    }

    fn operands(&mut self, names: &Names) -> Result<Vec<Operand>, LoadError> {
        let mut operands = Vec::new();
        while !self.eat(';') {
            operands.push(self.operand(names)?);
            if !self.eat(',') {
                self.expect(';')?;
                break;
            }
        }
        Ok(operands)
    }

    fn registers(&mut self, entry: &mut Entry, names: &mut Names) -> Result<(), LoadError> {
        let ty = self.word()?;
        let Some(class) = type_class(&ty) else { return self.error(format!("unknown register type `{ty}`")) };
        loop {
            let name = self.word()?;
            let first = entry.regs.len() as u32;
            let Some(scope) = names.0.last_mut() else { return self.error("no scope") };
            if self.eat('<') {
                let count = u32::try_from(self.int()?).unwrap_or(0);
                if count > 1 << 20 {
                    return self.error(format!("{count} registers are too many"));
                }
                self.expect('>')?;
                scope.ranges.insert(name.clone(), (first, count));
                for i in 0..count {
                    entry.regs.push(Reg { name: format!("{name}{i}"), class });
                }
            } else {
                scope.single.insert(name.clone(), first);
                entry.regs.push(Reg { name, class });
            }
            if !self.eat(',') {
                return self.expect(';');
            }
        }
    }

    fn operand(&mut self, names: &Names) -> Result<Operand, LoadError> {
        let first = self.simple(names)?;
        if self.eat('|') {
            return Ok(Operand::Pair(Box::new(first), Box::new(self.simple(names)?)));
        }
        Ok(first)
    }

    fn simple(&mut self, names: &Names) -> Result<Operand, LoadError> {
        if self.eat('{') {
            let mut items = Vec::new();
            while !self.eat('}') {
                items.push(self.operand(names)?);
                self.eat(',');
            }
            return Ok(Operand::Vector(items));
        }
        if self.eat('[') {
            let (base, mut offset) = match self.simple(names)? {
                Operand::Address(base, offset) => (*base, offset),
                base => (base, 0),
            };
            if self.eat(',') {
                let Operand::Vector(coordinates) = self.simple(names)? else {
                    return self.error("coordinates of a tensor are `{x, y, …}`");
                };
                if offset != 0 {
                    return self.error("a tensor map's address has no offset");
                }
                self.expect(']')?;
                return Ok(Operand::Tensor(Box::new(base), coordinates));
            }
            while !self.is_sym(']') {
                if self.eat('+') || self.is_sym('-') {
                    offset = offset.wrapping_add(self.int()? as i64);
                } else {
                    return self.error("an address is `[base + offset]`; anything more is not supported");
                }
            }
            self.expect(']')?;
            return Ok(Operand::Address(Box::new(base), offset));
        }
        if self.eat('!') {
            let name = self.word()?;
            return match names.register(&name) {
                Some(r) => Ok(Operand::NotReg(r)),
                None => self.error(format!("predicate `{name}` is not declared")),
            };
        }
        let negative = self.eat('-');
        Ok(match self.take()? {
            Tok::Int(v) => Operand::Int(if negative { -v } else { v }),
            Tok::F32(v) => Operand::F32(if negative { v ^ 0x8000_0000 } else { v }),
            Tok::F64(v) => Operand::F64(v ^ (u64::from(negative) << 63)),
            Tok::Word(w) if w == "_" => Operand::Sink,
            Tok::Word(w) => match names.register(&w) {
                Some(r) => Operand::Reg(r),
                None => {
                    // `name+4` outside brackets: a symbol's address with an offset.
                    if self.is_sym('+') && matches!(self.peek_at(1), Some(Tok::Int(_))) {
                        self.expect('+')?;
                        let offset = self.int()? as i64;
                        return Ok(Operand::Address(Box::new(Operand::Name(w)), offset));
                    }
                    Operand::Name(w)
                }
            },
            other => return self.error(format!("{other:?} is not an operand")),
        })
    }
}

impl Entry {
    /// The instruction a label stands before, looked up from the scope outwards.
    pub(crate) fn label(&self, scope: u32, name: &str) -> Option<usize> {
        self.outwards(scope, |s| self.labels.iter().find(|l| l.0 == s && l.1 == name).map(|l| l.2))
    }

    /// The labels of a table of branch targets.
    pub(crate) fn table(&self, scope: u32, name: &str) -> Option<&[String]> {
        self.outwards(scope, |s| self.tables.iter().find(|t| t.0 == s && t.1 == name).map(|t| &t.2[..]))
    }

    /// Looks something up in a scope, then in those around it.
    fn outwards<T>(&self, scope: u32, find: impl Fn(u32) -> Option<T>) -> Option<T> {
        let mut s = scope;
        loop {
            match find(s) {
                None if s != 0 => s = self.scopes[s as usize],
                found => return found,
            }
        }
    }

    /// The class of a register.
    pub(crate) fn class(&self, reg: u32) -> Class {
        self.regs[reg as usize].class
    }
}
