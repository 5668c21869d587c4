// SPDX-License-Identifier: MIT OR Apache-2.0
//! Variable declarations with their initialisers.

use super::ast::{Class, Space, Var};
use super::lex::Tok;
use super::parse::Parser;
use crate::report::LoadError;

/// Bytes of a fundamental type such as `.f32`.
pub(super) fn type_bytes(ty: &str) -> Option<u64> {
    Some(match ty {
        ".b8" | ".u8" | ".s8" => 1,
        ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => 2,
        ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => 4,
        ".b64" | ".u64" | ".s64" | ".f64" => 8,
        _ => return None,
    })
}

/// Class of a register declared with a type.
pub(super) fn type_class(ty: &str) -> Option<Class> {
    if ty == ".pred" {
        return Some(Class::Pred);
    }
    Some(match type_bytes(ty)? {
        1 | 2 => Class::B16,
        4 => Class::B32,
        _ => Class::B64,
    })
}

impl Parser {
    /// A declaration after its space: `.align 4 .b8 name[16] = {…}`, without the semicolon.
    pub(super) fn variable(&mut self, space: Space, external: bool) -> Result<Var, LoadError> {
        let (mut align, mut lanes, mut bytes) = (0, 1, 0);
        let name = loop {
            let w = self.word()?;
            match w.as_str() {
                ".align" => align = self.int()? as u64,
                ".v2" => lanes = 2,
                ".v4" => lanes = 4,
                ".ptr" | ".global" | ".shared" | ".const" | ".local" if space == Space::Param => {}
                ".attribute" => {
                    while !self.eat(')') {
                        self.take()?;
                    }
                }
                _ if type_bytes(&w).is_some() => bytes = type_bytes(&w).unwrap_or(0),
                _ if w.starts_with('.') => return self.error(format!("unknown type or attribute `{w}`")),
                _ => break w,
            }
        };
        if bytes == 0 {
            return self.error(format!("`{name}` has no type"));
        }
        let element = bytes * lanes;
        let mut size = element;
        let mut unsized_array = false;
        while self.eat('[') {
            if self.eat(']') {
                size = 0;
                unsized_array = true;
            } else {
                size *= self.int()? as u64;
                self.expect(']')?;
            }
        }
        let mut var = Var {
            name,
            space,
            align: if align == 0 { element } else { align },
            size,
            init: Vec::new(),
            init_addresses: Vec::new(),
            external,
        };
        if self.eat('=') {
            self.initialiser(&mut var, bytes)?;
            if unsized_array {
                var.size = var.init.len() as u64;
            }
        }
        if !var.align.is_power_of_two() {
            return self.error(format!("alignment {} of `{}` is not a power of two", var.align, var.name));
        }
        Ok(var)
    }

    fn initialiser(&mut self, var: &mut Var, bytes: u64) -> Result<(), LoadError> {
        if self.eat('{') {
            while !self.eat('}') {
                self.initialiser(var, bytes)?;
                self.eat(',');
            }
            return Ok(());
        }
        let negative = self.eat('-');
        let bits: u64 = match self.take()? {
            Tok::Int(v) => (if negative { -v } else { v }) as u64,
            Tok::F32(v) => u64::from(if negative { v ^ 0x8000_0000 } else { v }),
            Tok::F64(v) if bytes == 4 => {
                let f = f64::from_bits(v) as f32;
                u64::from((if negative { -f } else { f }).to_bits())
            }
            Tok::F64(v) => v ^ (u64::from(negative) << 63),
            Tok::Word(name) if bytes == 8 => {
                let name = if name == "generic" {
                    self.expect('(')?;
                    let inner = self.word()?;
                    self.expect(')')?;
                    inner
                } else {
                    name
                };
                let addend = if self.eat('+') { self.int()? as i64 } else { 0 };
                var.init_addresses.push((var.init.len() as u64, name, addend));
                0
            }
            other => return self.error(format!("{other:?} cannot initialise `{}`", var.name)),
        };
        var.init.extend_from_slice(&bits.to_le_bytes()[..bytes as usize]);
        Ok(())
    }
}
