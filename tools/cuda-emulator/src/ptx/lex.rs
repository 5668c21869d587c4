// SPDX-License-Identifier: MIT OR Apache-2.0
//! Cuts PTX text into tokens, each with its line.
//!
//! PTX has one habit that makes this short: everything that belongs to an opcode, a directive or a special register is
//! joined by dots (`cp.async.cg.shared.global.L2::128B`, `.maxntid`, `%tid.x`), so a dotted word is one token here and
//! is cut later by the parser.

use crate::report::LoadError;

/// What a token is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Tok {
    /// A dotted word: opcode, directive, register, label or symbol.
    Word(String),
    /// An integer.
    Int(i128),
    /// A `0f` literal (bits of an f32).
    F32(u32),
    /// A `0d` or decimal literal (bits of an f64).
    F64(u64),
    /// The text of a string.
    Str(String),
    /// Any other character.
    Sym(char),
}

/// A token and the line it is on, counted from 1.
#[derive(Clone, Debug)]
pub(crate) struct Token {
    pub(crate) tok: Tok,
    pub(crate) line: u32,
}

fn word_start(c: u8) -> bool {
    c.is_ascii_alphabetic() || matches!(c, b'_' | b'$' | b'%' | b'.')
}

fn word_more(c: u8) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$' | b'%' | b'.')
}

/// Cuts the text into tokens.
pub(crate) fn tokens(text: &str) -> Result<Vec<Token>, LoadError> {
    let b = text.as_bytes();
    let mut out = Vec::with_capacity(b.len() / 4);
    let (mut i, mut line) = (0, 1u32);
    while i < b.len() {
        let c = b[i];
        match c {
            b'\n' => {
                line += 1;
                i += 1;
            }
            _ if c.is_ascii_whitespace() || c == 0 => i += 1,
            b'/' if b.get(i + 1) == Some(&b'/') => {
                while i < b.len() && b[i] != b'\n' {
                    i += 1;
                }
            }
            b'/' if b.get(i + 1) == Some(&b'*') => {
                i += 2;
                while i < b.len() && !(b[i] == b'*' && b.get(i + 1) == Some(&b'/')) {
                    line += u32::from(b[i] == b'\n');
                    i += 1;
                }
                i += 2;
            }
            b'"' => {
                let start = i + 1;
                i = start;
                while i < b.len() && b[i] != b'"' {
                    line += u32::from(b[i] == b'\n');
                    i += 1;
                }
                out.push(Token { tok: Tok::Str(text[start..i.min(b.len())].to_owned()), line });
                i += 1;
            }
            b'0'..=b'9' => {
                let start = i;
                while i < b.len() && (b[i].is_ascii_alphanumeric() || b[i] == b'.') {
                    i += 1;
                }
                out.push(Token { tok: number(&text[start..i], line)?, line });
            }
            _ if word_start(c) => {
                let start = i;
                i += 1;
                loop {
                    if i < b.len() && word_more(b[i]) {
                        i += 1;
                    } else if b.get(i) == Some(&b':')
                        && b.get(i + 1) == Some(&b':')
                        && b.get(i + 2).is_some_and(u8::is_ascii_alphanumeric)
                    {
                        i += 3;
                    } else {
                        break;
                    }
                }
                out.push(Token { tok: Tok::Word(text[start..i].to_owned()), line });
            }
            _ if c.is_ascii() => {
                out.push(Token { tok: Tok::Sym(c as char), line });
                i += 1;
            }
            _ => return Err(LoadError::new(line, format!("byte {c:#04x} is not PTX"))),
        }
    }
    Ok(out)
}

fn number(s: &str, line: u32) -> Result<Tok, LoadError> {
    let bad = || LoadError::new(line, format!("`{s}` is not a number"));
    let lower = s.to_ascii_lowercase();
    if let Some(h) = lower.strip_prefix("0f") {
        return u32::from_str_radix(h, 16).map(Tok::F32).map_err(|_| bad());
    }
    if let Some(h) = lower.strip_prefix("0d") {
        return u64::from_str_radix(h, 16).map(Tok::F64).map_err(|_| bad());
    }
    if lower.contains('.') || (lower.contains('e') && !lower.starts_with("0x")) {
        return lower.parse::<f64>().map(|v| Tok::F64(v.to_bits())).map_err(|_| bad());
    }
    let digits = lower.trim_end_matches('u');
    let value = if let Some(h) = digits.strip_prefix("0x") {
        u64::from_str_radix(h, 16)
    } else if let Some(h) = digits.strip_prefix("0b") {
        u64::from_str_radix(h, 2)
    } else if digits.len() > 1 && digits.starts_with('0') {
        u64::from_str_radix(&digits[1..], 8)
    } else {
        digits.parse()
    };
    value.map(|v| Tok::Int(i128::from(v))).map_err(|_| bad())
}
