// SPDX-License-Identifier: MIT OR Apache-2.0
//! A PTX module as read, before any instruction is understood.

/// A state space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// `.global`
    Global,
    /// `.const`
    Const,
    /// `.shared`
    Shared,
    /// `.local`
    Local,
    /// `.param`
    Param,
    /// No space named: decided by the address.
    Generic,
}

/// The class of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Pred,
    /// 16 bits and less; lanes lie in 32-bit slots.
    B16,
    B32,
    B64,
}

/// A variable of the module or of a kernel.
#[derive(Clone, Debug)]
pub(crate) struct Var {
    pub(crate) name: String,
    pub(crate) space: Space,
    pub(crate) align: u64,
    /// Bytes; 0 for an `extern` array, whose size the launch gives.
    pub(crate) size: u64,
    /// Initial bytes, possibly fewer than `size` (the rest is zero).
    pub(crate) init: Vec<u8>,
    /// Places in `init` that hold the address of another variable: (offset, name, addend).
    pub(crate) init_addresses: Vec<(u64, String, i64)>,
    pub(crate) external: bool,
}

/// A kernel parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    /// Its name in the PTX.
    pub name: String,
    /// First byte in the parameter buffer.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
}

/// A register as declared.
#[derive(Clone, Debug)]
pub(crate) struct Reg {
    pub(crate) name: String,
    pub(crate) class: Class,
}

/// An operand as written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    /// A register, by index into [`Entry::regs`].
    Reg(u32),
    /// `!p`
    NotReg(u32),
    /// A symbol, label or special register.
    Name(String),
    /// An integer.
    Int(i128),
    /// f32 bits.
    F32(u32),
    /// f64 bits.
    F64(u64),
    /// `{a, b, …}`
    Vector(Vec<Operand>),
    /// `[base + offset]`
    Address(Box<Operand>, i64),
    /// `[map, {coordinates}]`
    Tensor(Box<Operand>, Vec<Operand>),
    /// `p|q`
    Pair(Box<Operand>, Box<Operand>),
    /// `_`
    Sink,
}

/// An instruction as written.
#[derive(Clone, Debug)]
pub(crate) struct Inst {
    pub(crate) line: u32,
    /// Predicate register and whether it is negated.
    pub(crate) guard: Option<(u32, bool)>,
    pub(crate) opcode: String,
    pub(crate) operands: Vec<Operand>,
    /// The scope it was written in, for labels.
    pub(crate) scope: u32,
}

/// A kernel as read.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) params: Vec<Param>,
    pub(crate) param_bytes: usize,
    pub(crate) max_threads: Option<[u32; 3]>,
    pub(crate) required_threads: Option<[u32; 3]>,
    pub(crate) required_cluster: Option<[u32; 3]>,
    pub(crate) max_registers: Option<u32>,
    pub(crate) regs: Vec<Reg>,
    pub(crate) vars: Vec<Var>,
    pub(crate) body: Vec<Inst>,
    /// (scope, name) of each label and the instruction it precedes.
    pub(crate) labels: Vec<(u32, String, usize)>,
    /// (scope, name, labels) of each table of branch targets.
    pub(crate) tables: Vec<(u32, String, Vec<String>)>,
    /// Parent of each scope; scope 0 is its own.
    pub(crate) scopes: Vec<u32>,
}

/// A module as read.
#[derive(Clone, Debug)]
pub(crate) struct Ast {
    pub(crate) version: (u32, u32),
    pub(crate) target: String,
    pub(crate) vars: Vec<Var>,
    pub(crate) entries: Vec<Entry>,
}
