// SPDX-License-Identifier: MIT OR Apache-2.0
//! From instructions as written to instructions as executed.
//!
//! Anything that is not understood in full, down to the last modifier, is an error that names it: an instruction that
//! is executed almost right would be worse than none.

use super::rows::Kind;
use super::table::Table;
use super::{Code, Ins, NO_GUARD, Special, Value, control, moves};
use crate::ptx::Space;
use crate::ptx::ast::{Class, Entry, Inst, Operand, Var};
use crate::report::LoadError;
use std::collections::HashMap;

/// What an operand or opcode is refused with.
pub(super) type Refused = String;

/// Decodes one kernel.
pub(super) struct Decoder<'a> {
    pub(super) entry: &'a Entry,
    pub(super) table: &'a Table,
    pub(super) code: Code,
    row_of: Vec<u32>,
    values: HashMap<(Value, bool), u32>,
    /// Name → value of its address.
    symbols: HashMap<String, Value>,
    /// Register → its number among those of asynchronous products.
    pub(super) matrix: HashMap<u32, u16>,
    /// Scratch for results that are not used.
    sink: u32,
    pub(super) sink_pred: u32,
}

/// The kind of a PTX type.
pub(super) fn kind_of(ty: &str) -> Option<Kind> {
    Some(match ty {
        "b16" | "u16" | "s16" | "f16" | "bf16" | "b8" | "u8" | "s8" => Kind::B16,
        "b32" | "u32" | "s32" | "f16x2" | "bf16x2" => Kind::B32,
        "f32" => Kind::F32,
        "b64" | "u64" | "s64" => Kind::B64,
        "f64" => Kind::F64,
        _ => return None,
    })
}

/// Bytes of a PTX type.
pub(super) fn bytes_of(ty: &str) -> Option<u32> {
    Some(match ty {
        "b8" | "u8" | "s8" => 1,
        "b16" | "u16" | "s16" | "f16" | "bf16" => 2,
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" => 4,
        "b64" | "u64" | "s64" | "f64" => 8,
        _ => return None,
    })
}

impl<'a> Decoder<'a> {
    /// Row of a register.
    pub(super) fn register(&self, reg: u32, wide: bool) -> Result<u32, Refused> {
        let class = self.entry.class(reg);
        if class == Class::Pred || (class == Class::B64) != wide {
            return Err(format!("register {} has another width", self.entry.regs[reg as usize].name));
        }
        Ok(self.row_of[reg as usize])
    }

    /// Whether a register operand takes 64-bit slots; `None` for anything else.
    pub(super) fn wide(&self, o: &Operand) -> Option<bool> {
        match o {
            Operand::Reg(r) => Some(self.entry.class(*r) == Class::B64),
            _ => None,
        }
    }

    fn fresh(&mut self, rows: u32) -> u32 {
        let row = self.code.rows;
        self.code.rows += rows;
        row
    }

    /// The row that holds a value in every lane.
    pub(super) fn value(&mut self, v: Value, wide: bool) -> u32 {
        if let Some(&row) = self.values.get(&(v, wide)) {
            return row;
        }
        let row = self.fresh(1 + u32::from(wide));
        self.values.insert((v, wide), row);
        self.code.values.push((row, v, wide));
        row
    }

    fn named(&self, name: &str) -> Result<Value, Refused> {
        if let Some(s) = Special::named(name) {
            return Ok(Value::Special(s));
        }
        self.symbols.get(name).copied().ok_or_else(|| format!("`{name}` is not known"))
    }

    /// Row of a source operand of a kind.
    pub(super) fn src(&mut self, o: &Operand, kind: Kind) -> Result<u32, Refused> {
        let wide = kind.wide();
        let bits = match o {
            Operand::Reg(r) => return self.register(*r, wide),
            Operand::Int(v) => match kind {
                Kind::F32 => u64::from((*v as f32).to_bits()),
                Kind::F64 => (*v as f64).to_bits(),
                _ => *v as u64,
            },
            Operand::F32(v) => u64::from(*v),
            Operand::F64(v) if kind == Kind::F32 => u64::from((f64::from_bits(*v) as f32).to_bits()),
            Operand::F64(v) => *v,
            Operand::Name(n) => {
                let v = self.named(n)?;
                return Ok(self.value(v, wide));
            }
            Operand::Address(base, offset) => match &**base {
                Operand::Name(n) => {
                    let v = match self.named(n)? {
                        Value::Bits(b) => Value::Bits(b.wrapping_add_signed(*offset)),
                        Value::Global(g, o) => Value::Global(g, o + offset),
                        Value::Special(_) => return Err(format!("`{n}` has no address")),
                    };
                    return Ok(self.value(v, wide));
                }
                _ => return Err("a source cannot be an address".into()),
            },
            _ => return Err(format!("{o:?} is not a source")),
        };
        Ok(self.value(Value::Bits(if wide { bits } else { bits & 0xffff_ffff }), wide))
    }

    /// Row of a result of a kind.
    pub(super) fn dst(&mut self, o: &Operand, kind: Kind) -> Result<u32, Refused> {
        match o {
            Operand::Reg(r) => self.register(*r, kind.wide()),
            Operand::Sink => Ok(self.sink),
            _ => Err(format!("{o:?} is not a result")),
        }
    }

    /// A result whose width the register decides: row and whether it is wide.
    pub(super) fn dst_any(&mut self, o: &Operand) -> Result<(u32, bool), Refused> {
        match o {
            Operand::Sink => Ok((self.sink, true)),
            _ => {
                let wide = self.wide(o).ok_or("the result must be a register")?;
                Ok((self.dst(o, if wide { Kind::B64 } else { Kind::B32 })?, wide))
            }
        }
    }

    /// A predicate, which may be negated: its number and whether it is.
    pub(super) fn pred(&self, o: &Operand) -> Result<(u32, bool), Refused> {
        let (r, negated) = match o {
            Operand::Reg(r) => (*r, false),
            Operand::NotReg(r) => (*r, true),
            Operand::Sink => return Ok((self.sink_pred, false)),
            _ => return Err(format!("{o:?} is not a predicate")),
        };
        if self.entry.class(r) != Class::Pred {
            return Err(format!("register {} is not a predicate", self.entry.regs[r as usize].name));
        }
        Ok((self.row_of[r as usize], negated))
    }

    /// The items of a vector operand, or the operand itself.
    pub(super) fn items(o: &Operand) -> Vec<Operand> {
        match o {
            Operand::Vector(v) => v.clone(),
            other => vec![other.clone()],
        }
    }

    /// Appends to the list of rows; returns where.
    pub(super) fn list(&mut self, rows: &[u32]) -> u32 {
        let at = self.code.lists.len() as u32;
        self.code.lists.extend_from_slice(rows);
        at
    }

    fn instruction(&mut self, inst: &Inst) -> Result<Ins, Refused> {
        let op = inst.opcode.as_str();
        let o = &inst.operands;
        let parts: Vec<&str> = op.split('.').collect();
        let mut ins = match parts[0] {
            "mov" => self.decode_mov(&parts, o)?,
            "cvta" => self.decode_cvta(&parts, o)?,
            "and" | "or" | "xor" | "not" if parts.last() == Some(&"pred") => self.decode_logic(&parts, o)?,
            "st" if parts.contains(&"async") => self.decode_send(&parts, o)?,
            "ld" | "ldu" | "st" => self.decode_access(&parts, o)?,
            "atom" | "red" => self.decode_atomic(&parts, o)?,
            "setp" | "set" => self.decode_compare(&parts, o)?,
            "selp" | "slct" => self.decode_select(&parts, o)?,
            "shfl" | "vote" | "match" | "redux" | "elect" | "activemask" => self.decode_exchange(&parts, o)?,
            "bar" | "barrier" | "membar" | "fence" => self.decode_sync(&parts, o)?,
            "mbarrier" => self.decode_mbarrier(&parts, o)?,
            "mapa" | "getctarank" => self.decode_rank(&parts, o)?,
            "cp" if parts.contains(&"bulk") => self.decode_bulk(&parts, o)?,
            "cp" => self.decode_copy(&parts, o)?,
            "createpolicy" => self.decode_policy(&parts, o)?,
            "wgmma" => self.decode_wgmma(&parts, o)?,
            "setmaxnreg" => self.decode_registers(&parts, o)?,
            // Nothing was launched that would wait for this kernel, or that this one would have to wait for.
            "griddepcontrol" if matches!(parts[1..], ["launch_dependents" | "wait"]) => plain(control::nothing),
            "brx" => self.decode_table(&parts, o, inst.scope)?,
            "ldmatrix" | "stmatrix" | "movmatrix" | "mma" => self.decode_tensor(&parts, o)?,
            "bra" => {
                let [Operand::Name(label)] = &o[..] else { return Err("a branch needs a label".into()) };
                if !matches!(parts[1..], [] | ["uni"]) {
                    return Err("unknown modifier".into());
                }
                let target = self.entry.label(inst.scope, label).ok_or_else(|| format!("no label `{label}`"))?;
                Ins { x: target as u32, ..plain(control::branch) }
            }
            "ret" | "exit" if matches!(parts[1..], [] | ["uni"]) => plain(control::exit),
            "trap" | "brkpt" if parts.len() == 1 => plain(control::trap),
            "nanosleep" => plain(control::sleep),
            "prefetch" if parts.contains(&"tensormap") => self.decode_map_prefetch(&parts, o)?,
            "prefetch" | "prefetchu" | "discard" | "applypriority" | "pmevent" => plain(control::nothing),
            _ => self.decode_plain(op, o)?,
        };
        if let Some((reg, negated)) = inst.guard {
            (ins.guard, _) = self.pred(&Operand::Reg(reg))?;
            ins.guard_negated = negated;
        }
        ins.line = inst.line;
        Ok(ins)
    }

    fn decode_table(&mut self, parts: &[&str], o: &[Operand], scope: u32) -> Result<Ins, Refused> {
        let (["brx", "idx"] | ["brx", "idx", "uni"], [index, Operand::Name(table)]) = (parts, o) else {
            return Err("an index and a table of labels are needed".into());
        };
        let names = self.entry.table(scope, table).ok_or_else(|| format!("no table `{table}`"))?;
        let mut targets = Vec::with_capacity(names.len());
        for name in names {
            targets.push(self.entry.label(scope, name).ok_or_else(|| format!("no label `{name}`"))? as u32);
        }
        let (a, x) = (self.src(index, Kind::B32)?, self.list(&targets));
        Ok(Ins { a, b: targets.len() as u32, x, ..plain(control::branch_table) })
    }

    pub(super) fn decode_plain(&mut self, op: &str, o: &[Operand]) -> Result<Ins, Refused> {
        let Some(p) = self.table.get(op) else { return Err("this instruction is not known to the emulator".into()) };
        if o.len() != p.src.len() + 1 {
            return Err(format!("{} operands, expected {}", o.len(), p.src.len() + 1));
        }
        let mut rows = [0; 4];
        let mut narrow = false;
        for (k, &kind) in p.src.iter().enumerate() {
            // `cvt` may read a register that is wider than the type: its lower half.
            narrow = op.starts_with("cvt.") && p.src.len() == 1 && !kind.wide() && self.wide(&o[1]) == Some(true);
            rows[k] = self.src(&o[k + 1], if narrow { Kind::B64 } else { kind })?;
        }
        if narrow {
            let (dst, x) = (self.dst(&o[0], p.dst)?, self.code.inner.len() as u32);
            self.code.inner.push(p.f);
            return Ok(Ins { dst, a: rows[0], b: self.sink, x, ..plain(moves::narrow) });
        }
        let dst = self.dst(&o[0], p.dst)?;
        Ok(Ins { dst, a: rows[0], b: rows[1], c: rows[2], e: rows[3], ..plain(p.f) })
    }
}

/// An instruction of a function, without operands.
pub(super) fn plain(f: super::OpFn) -> Ins {
    Ins { f, dst: 0, a: 0, b: 0, c: 0, e: 0, x: 0, guard: NO_GUARD, guard_negated: false, line: 0 }
}

/// Decodes a kernel of a module with these variables.
pub(crate) fn decode(entry: &Entry, vars: &[Var], table: &Table) -> Result<Code, LoadError> {
    let mut d = Decoder {
        entry,
        table,
        code: Code {
            name: entry.name.clone(),
            ins: Vec::with_capacity(entry.body.len() + 1),
            accesses: Vec::new(),
            lists: Vec::new(),
            compares: Vec::new(),
            inner: Vec::new(),
            rows: 0,
            preds: 0,
            values: Vec::new(),
            params: entry.params.clone(),
            param_bytes: entry.param_bytes,
            static_shared: 0,
            dynamic_offset: 0,
            local_bytes: 0,
            max_threads: entry.max_threads,
            required_threads: entry.required_threads,
            required_cluster: entry.required_cluster,
            max_registers: entry.max_registers,
            matrix_registers: Vec::new(),
            touches: Vec::new(),
        },
        row_of: Vec::with_capacity(entry.regs.len()),
        values: HashMap::new(),
        symbols: HashMap::new(),
        matrix: HashMap::new(),
        sink: 0,
        sink_pred: 0,
    };
    layout(&mut d, vars);
    for reg in &entry.regs {
        let row = match reg.class {
            Class::Pred => {
                d.code.preds += 1;
                d.code.preds - 1
            }
            Class::B16 | Class::B32 => d.fresh(1),
            Class::B64 => d.fresh(2),
        };
        d.row_of.push(row);
    }
    d.sink = d.fresh(2);
    d.sink_pred = d.code.preds;
    d.code.preds += 1;
    for inst in &entry.body {
        match d.instruction(inst) {
            Ok(ins) => d.code.ins.push(ins),
            Err(why) => {
                return Err(LoadError::new(inst.line, format!("`{}` in kernel `{}`: {why}", inst.opcode, entry.name)));
            }
        }
    }
    // Running off the end is a return.
    d.code.ins.push(plain(control::exit));
    if !d.matrix.is_empty() {
        d.code.touches = entry.body.iter().map(|inst| d.touches(inst)).chain([Box::default()]).collect();
    }
    Ok(d.code)
}

/// Gives every variable its address.
fn layout(d: &mut Decoder<'_>, vars: &[Var]) {
    let (mut shared, mut local, mut dynamic_align) = (0u64, 0u64, 16);
    let shared_of = |v: &&Var| v.space == Space::Shared && !v.external;
    for v in vars.iter().filter(shared_of).chain(d.entry.vars.iter().filter(shared_of)) {
        shared = shared.next_multiple_of(v.align);
        d.symbols.insert(v.name.clone(), Value::Bits(shared));
        shared += v.size;
    }
    for v in vars.iter().filter(|v| v.external) {
        dynamic_align = dynamic_align.max(v.align);
    }
    let dynamic = shared.next_multiple_of(dynamic_align);
    for (n, v) in vars.iter().enumerate() {
        if v.external {
            d.symbols.insert(v.name.clone(), Value::Bits(dynamic));
        } else if v.space != Space::Shared {
            d.symbols.insert(v.name.clone(), Value::Global(n, 0));
        }
    }
    for v in d.entry.vars.iter().filter(|v| v.space == Space::Local) {
        local = local.next_multiple_of(v.align);
        d.symbols.insert(v.name.clone(), Value::Bits(local));
        local += v.size;
    }
    for p in &d.entry.params {
        d.symbols.insert(p.name.clone(), Value::Bits(p.offset as u64));
    }
    d.code.static_shared = shared as u32;
    d.code.dynamic_offset = dynamic as u32;
    d.code.local_bytes = local.next_multiple_of(16) as u32;
}
