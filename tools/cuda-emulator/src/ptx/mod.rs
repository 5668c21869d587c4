// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads PTX text. What an instruction means is decided elsewhere (`op`); here it is a word with operands.

pub(crate) mod ast;
mod body;
mod lex;
mod parse;
mod vars;

pub use ast::{Param, Space};
pub(crate) use parse::parse;
