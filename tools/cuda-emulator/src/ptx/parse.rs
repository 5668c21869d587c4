// SPDX-License-Identifier: MIT OR Apache-2.0
//! The module level of PTX: header, variables and kernels.
//!
//! `.func` and `call` are refused: the kernels this crate is for are compiled without separate functions, and a call
//! that was silently wrong would be worse than none.

use super::ast::{Ast, Entry, Param, Space};
use super::lex::{self, Tok, Token};
use crate::report::LoadError;

pub(super) struct Parser {
    tokens: Vec<Token>,
    at: usize,
}

impl Parser {
    pub(super) fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(0, |t| t.line)
    }

    pub(super) fn peek(&self) -> Option<&Tok> {
        self.tokens.get(self.at).map(|t| &t.tok)
    }

    pub(super) fn peek_at(&self, ahead: usize) -> Option<&Tok> {
        self.tokens.get(self.at + ahead).map(|t| &t.tok)
    }

    pub(super) fn error<T>(&self, what: impl Into<String>) -> Result<T, LoadError> {
        Err(LoadError::new(self.line(), what.into()))
    }

    pub(super) fn take(&mut self) -> Result<Tok, LoadError> {
        match self.tokens.get(self.at) {
            Some(t) => {
                self.at += 1;
                Ok(t.tok.clone())
            }
            None => self.error("the text ends in the middle of a statement"),
        }
    }

    pub(super) fn is_sym(&self, c: char) -> bool {
        self.peek() == Some(&Tok::Sym(c))
    }

    pub(super) fn is_word(&self, w: &str) -> bool {
        matches!(self.peek(), Some(Tok::Word(x)) if x == w)
    }

    pub(super) fn eat(&mut self, c: char) -> bool {
        let hit = self.is_sym(c);
        self.at += usize::from(hit);
        hit
    }

    pub(super) fn eat_word(&mut self, w: &str) -> bool {
        let hit = self.is_word(w);
        self.at += usize::from(hit);
        hit
    }

    pub(super) fn expect(&mut self, c: char) -> Result<(), LoadError> {
        if self.eat(c) {
            return Ok(());
        }
        let found = self.peek().map_or("the end".into(), |t| format!("{t:?}"));
        self.error(format!("expected `{c}`, found {found}"))
    }

    pub(super) fn word(&mut self) -> Result<String, LoadError> {
        match self.take()? {
            Tok::Word(w) => Ok(w),
            other => {
                self.at -= 1;
                self.error(format!("expected a name, found {other:?}"))
            }
        }
    }

    pub(super) fn int(&mut self) -> Result<i128, LoadError> {
        let negative = self.eat('-');
        match self.take()? {
            Tok::Int(v) => Ok(if negative { -v } else { v }),
            other => {
                self.at -= 1;
                self.error(format!("expected a number, found {other:?}"))
            }
        }
    }

    fn count3(&mut self) -> Result<[u32; 3], LoadError> {
        let mut out = [1; 3];
        for (i, o) in out.iter_mut().enumerate() {
            if i > 0 && !self.eat(',') {
                break;
            }
            *o = u32::try_from(self.int()?).map_err(|_| LoadError::new(self.line(), "thread count".into()))?;
        }
        Ok(out)
    }

    fn skip_to(&mut self, end: char) -> Result<(), LoadError> {
        while !self.eat(end) {
            self.take()?;
        }
        Ok(())
    }

    fn entry(&mut self) -> Result<Entry, LoadError> {
        let name = self.word()?;
        let mut entry = Entry {
            name,
            params: Vec::new(),
            param_bytes: 0,
            max_threads: None,
            required_threads: None,
            required_cluster: None,
            max_registers: None,
            regs: Vec::new(),
            vars: Vec::new(),
            body: Vec::new(),
            labels: Vec::new(),
            tables: Vec::new(),
            scopes: vec![0],
        };
        if self.eat('(') {
            while !self.eat(')') {
                if !self.eat_word(".param") {
                    return self.error("expected `.param`");
                }
                let var = self.variable(Space::Param, false)?;
                let (size, align) = (var.size as usize, var.align as usize);
                let offset = entry.param_bytes.next_multiple_of(align);
                entry.param_bytes = offset + size;
                entry.params.push(Param { name: var.name, offset, size });
                self.eat(',');
            }
        }
        while !self.is_sym('{') {
            match self.word()?.as_str() {
                ".maxntid" => entry.max_threads = Some(self.count3()?),
                ".reqntid" => entry.required_threads = Some(self.count3()?),
                ".reqnctapercluster" => entry.required_cluster = Some(self.count3()?),
                // A launch may leave the shape of clusters to the kernel whether this stands here or not.
                ".explicitcluster" => {}
                ".maxclusterrank" => {
                    self.int()?;
                }
                ".maxnreg" => entry.max_registers = u32::try_from(self.int()?).ok(),
                ".minnctapersm" | ".maxnctapersm" => {
                    self.int()?;
                }
                ".noreturn" => {}
                ".pragma" => self.skip_to(';')?,
                other => return self.error(format!("unknown kernel directive `{other}`")),
            }
        }
        self.body(&mut entry)?;
        Ok(entry)
    }
}

/// Reads a module.
pub(crate) fn parse(text: &str) -> Result<Ast, LoadError> {
    let mut p = Parser { tokens: lex::tokens(text)?, at: 0 };
    let mut ast = Ast { version: (0, 0), target: String::new(), vars: Vec::new(), entries: Vec::new() };
    while p.peek().is_some() {
        let word = p.word()?;
        match word.as_str() {
            ".version" => {
                let Tok::F64(bits) = p.take()? else { return p.error("expected a version such as 8.0") };
                let tenths = (f64::from_bits(bits) * 10.0).round() as u32;
                ast.version = (tenths / 10, tenths % 10);
            }
            ".target" => {
                ast.target = p.word()?;
                while p.eat(',') {
                    p.word()?;
                }
            }
            ".address_size" => {
                if p.int()? != 64 {
                    return p.error("only 64-bit addresses are supported");
                }
            }
            ".visible" | ".weak" | ".common" => {}
            ".extern" => {
                let space = p.word()?;
                match space.as_str() {
                    ".shared" => ast.vars.push(p.variable(Space::Shared, true)?),
                    _ => return p.error(format!("`.extern {space}` is not supported: link the module first")),
                }
                p.expect(';')?;
            }
            ".global" | ".const" | ".shared" => {
                let space = match word.as_str() {
                    ".global" => Space::Global,
                    ".const" => Space::Const,
                    _ => Space::Shared,
                };
                ast.vars.push(p.variable(space, false)?);
                p.expect(';')?;
            }
            ".entry" => {
                let entry = p.entry()?;
                ast.entries.push(entry);
            }
            ".file" | ".loc" => {
                let line = p.line();
                while p.peek().is_some() && p.line() == line {
                    p.take()?;
                }
            }
            ".section" => {
                p.skip_to('{')?;
                p.skip_to('}')?;
            }
            ".pragma" => p.skip_to(';')?,
            ".func" => return p.error("`.func` is not supported: compile with everything inlined"),
            other => return p.error(format!("unknown directive `{other}`")),
        }
    }
    if ast.version == (0, 0) || ast.target.is_empty() {
        return Err(LoadError::new(1, "no `.version` or `.target`: this is not PTX".into()));
    }
    Ok(ast)
}
