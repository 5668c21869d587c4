// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decodes moves, comparisons, selections and memory accesses.

use super::atomic::{self, Rmw};
use super::decode::{Decoder, Refused, bytes_of, kind_of, plain};
use super::rows::Kind;
use super::select::{self, Combine, Compare};
use super::{Access, Ins, Order, memory, moves};
use crate::mem::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};
use crate::ptx::Space;
use crate::ptx::ast::Operand;

impl Decoder<'_> {
    pub(super) fn decode_mov(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        let [_, ty] = parts[..] else { return Err("unknown modifier".into()) };
        let [d, s] = o else { return Err("two operands are needed".into()) };
        if ty == "pred" {
            let (dst, _) = self.pred(d)?;
            return Ok(match s {
                Operand::Int(v) => Ins { dst, e: if *v != 0 { !0 } else { 0 }, ..plain(moves::constant) },
                _ => {
                    let (a, negated) = self.pred(s)?;
                    Ins { dst, a, b: a, e: if negated { 0b0101 } else { 0b1010 }, ..plain(moves::logic) }
                }
            });
        }
        if let Operand::Vector(items) = s {
            let kind = kind_of(ty).ok_or("unknown type")?;
            let part = bytes_of(ty).unwrap_or(0) * 8 / items.len() as u32;
            let item = self.part_kind(part)?;
            let rows = items.iter().map(|i| self.src(i, item)).collect::<Result<Vec<_>, _>>()?;
            let (dst, x) = (self.dst(d, kind)?, self.list(&rows));
            return Ok(Ins { dst, b: kind.wide().into(), c: rows.len() as u32, e: part, x, ..plain(moves::pack) });
        }
        if let Operand::Vector(items) = d {
            let kind = kind_of(ty).ok_or("unknown type")?;
            let part = bytes_of(ty).unwrap_or(0) * 8 / items.len() as u32;
            let item = self.part_kind(part)?;
            let rows = items.iter().map(|i| self.dst(i, item)).collect::<Result<Vec<_>, _>>()?;
            let (a, x) = (self.src(s, kind)?, self.list(&rows));
            return Ok(Ins { a, b: kind.wide().into(), c: rows.len() as u32, e: part, x, ..plain(moves::unpack) });
        }
        if let Operand::Name(n) = s
            && matches!(n.as_str(), "%clock" | "%clock64" | "%clock_hi" | "%globaltimer")
        {
            let (dst, wide) = self.dst_any(d)?;
            return Ok(Ins { dst, b: wide.into(), ..plain(moves::clock) });
        }
        self.decode_plain(&parts.join("."), o)
    }

    fn part_kind(&self, bits: u32) -> Result<Kind, Refused> {
        match bits {
            8 | 16 => Ok(Kind::B16),
            32 => Ok(Kind::B32),
            _ => Err(format!("parts of {bits} bits")),
        }
    }

    pub(super) fn decode_cvta(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        let (to, space) = match parts[1..] {
            ["to", space, "u64"] => (1, space),
            [space, "u64"] => (0, space),
            _ => return Err("unknown form".into()),
        };
        let window = match space {
            "global" | "const" => 0,
            "shared" | "shared::cta" => SHARED_WINDOW,
            "local" => LOCAL_WINDOW,
            "param" | "param::entry" => PARAM_WINDOW,
            _ => return Err(format!("unknown space `{space}`")),
        };
        let [d, s] = o else { return Err("two operands are needed".into()) };
        let (dst, a) = (self.dst(d, Kind::B64)?, self.src(s, Kind::B64)?);
        let x = self.list(&[(window >> 32) as u32]);
        Ok(Ins { dst, a, e: to, x, ..plain(moves::window) })
    }

    pub(super) fn decode_logic(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        // A bit per (a, b): index a + 2b.
        let (mut truth, n): (u32, usize) = match parts {
            ["and", "pred"] => (0b1000, 2),
            ["or", "pred"] => (0b1110, 2),
            ["xor", "pred"] => (0b0110, 2),
            ["not", "pred"] => (0b0101, 1),
            _ => return Err("unknown modifier".into()),
        };
        if o.len() != n + 1 {
            return Err(format!("{} operands, expected {}", o.len(), n + 1));
        }
        let (dst, _) = self.pred(&o[0])?;
        let (a, not_a) = self.pred(&o[1])?;
        let at = |t: u32, k: u32| t >> k & 1;
        let (b, not_b) = match o.get(2) {
            // As for every b: what it is for this one.
            Some(Operand::Int(b)) => {
                let k = if *b != 0 { 2 } else { 0 };
                truth = (at(truth, k) | at(truth, k + 1) << 1) * 0b101;
                (a, false)
            }
            Some(b) => self.pred(b)?,
            None => (a, false),
        };
        if not_a {
            truth = at(truth, 1) | at(truth, 0) << 1 | at(truth, 3) << 2 | at(truth, 2) << 3;
        }
        if not_b {
            truth = at(truth, 2) | at(truth, 3) << 1 | at(truth, 0) << 2 | at(truth, 1) << 3;
        }
        Ok(Ins { dst, a, b, e: truth, ..plain(moves::logic) })
    }

    pub(super) fn decode_compare(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        let ftz = parts.contains(&"ftz");
        let rest: Vec<&str> = parts[1..].iter().copied().filter(|p| *p != "ftz").collect();
        let is_set = parts[0] == "set";
        let (cmp, combine, types) = match rest[..] {
            [cmp, "and", ref t @ ..] => (cmp, Combine::And, t),
            [cmp, "or", ref t @ ..] => (cmp, Combine::Or, t),
            [cmp, "xor", ref t @ ..] => (cmp, Combine::Xor, t),
            [cmp, ref t @ ..] => (cmp, Combine::None, t),
            [] => return Err("no comparison".into()),
        };
        let (out, ty) = match (is_set, types) {
            (false, [ty]) => ("", *ty),
            (true, [out @ ("u32" | "s32" | "f32"), ty]) => (*out, *ty),
            _ => return Err("unknown modifier".into()),
        };
        let (f, kind) = select::comparison(cmp, ty, ftz).ok_or("this comparison is not known to the emulator")?;
        let want = if combine == Combine::None { 3 } else { 4 };
        if o.len() != want {
            return Err(format!("{} operands, expected {want}", o.len()));
        }
        let (with, negated) = if want == 4 { self.pred(&o[3])? } else { (0, false) };
        let mut second = u32::MAX;
        let dst = match &o[0] {
            d if is_set => self.dst(d, Kind::B32)?,
            Operand::Pair(p, q) => {
                second = self.pred(q)?.0;
                self.pred(p)?.0
            }
            p => self.pred(p)?.0,
        };
        let (a, b) = (self.src(&o[1], kind)?, self.src(&o[2], kind)?);
        let x = self.code.compares.len() as u32;
        self.code.compares.push(Compare { f, combine, with, negated, second });
        if is_set {
            let e = if out == "f32" { 1f32.to_bits() } else { !0 };
            return Ok(Ins { dst, a, b, e, x, ..plain(select::set) });
        }
        Ok(Ins { dst, a, b, x, ..plain(select::setp) })
    }

    pub(super) fn decode_select(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        let [d, a, b, c] = o else { return Err("four operands are needed".into()) };
        let kind = parts.get(1).and_then(|t| kind_of(t)).ok_or("unknown type")?;
        let (dst, a, b) = (self.dst(d, kind)?, self.src(a, kind)?, self.src(b, kind)?);
        match parts {
            ["selp", _] => {
                let (p, negated) = self.pred(c)?;
                let (a, b) = if negated { (b, a) } else { (a, b) };
                Ok(Ins { dst, a, b, c: p, ..plain(if kind.wide() { select::selp64 } else { select::selp32 }) })
            }
            ["slct", _, by @ ("s32" | "f32")] => {
                let float = *by == "f32";
                let c = self.src(c, if float { Kind::F32 } else { Kind::B32 })?;
                Ok(Ins { dst, a, b, c, e: kind.wide().into(), x: float.into(), ..plain(select::slct) })
            }
            _ => Err("unknown modifier".into()),
        }
    }

    /// The address part of an access: base row, its width, offset.
    pub(super) fn address(&mut self, o: &Operand) -> Result<(u32, bool, i64), Refused> {
        let Operand::Address(base, offset) = o else { return Err(format!("{o:?} is not an address")) };
        match &**base {
            b @ Operand::Reg(_) => {
                let wide = self.wide(b).unwrap_or(true);
                Ok((self.src(b, if wide { Kind::B64 } else { Kind::B32 })?, wide, *offset))
            }
            b @ (Operand::Name(_) | Operand::Int(_)) => Ok((self.src(b, Kind::B64)?, true, *offset)),
            other => Err(format!("{other:?} is not an address")),
        }
    }

    pub(super) fn decode_access(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        let is_store = parts[0] == "st";
        let [first, second] = o else { return Err("two operands are needed".into()) };
        let (data, addr) = if is_store { (second, first) } else { (first, second) };
        let mut a = self.access(addr)?;
        let mut ty = None;
        for &p in &parts[1..] {
            match p {
                _ if self.common(p, &mut a) => {}
                "ca" | "cg" | "cs" | "lu" | "cv" | "wb" | "wt" | "nc" | "weak" => {}
                _ if p.starts_with("L1::") || p.starts_with("L2::") && !p.contains("hint") => {}
                "v2" => a.count = 2,
                "v4" => a.count = 4,
                "v8" => a.count = 8,
                _ if bytes_of(p).is_some() && ty.is_none() => ty = Some(p),
                _ => return Err(format!("unknown modifier `{p}`")),
            }
        }
        let ty = ty.ok_or("no type")?;
        a.size = bytes_of(ty).unwrap_or(0);
        a.signed = ty.starts_with('s');
        if is_store && a.order.acquires() || !is_store && a.order.releases() {
            return Err("this order does not fit".into());
        }
        if a.size * a.count > 16 {
            return Err(format!("{} bytes at once are not known to the emulator", a.size * a.count));
        }
        let items = Self::items(data);
        if items.len() != a.count as usize {
            return Err(format!("{} data operands, expected {}", items.len(), a.count));
        }
        let natural = kind_of(ty).ok_or("unknown type")?;
        a.wide = items.iter().find_map(|i| self.wide(i)).unwrap_or(natural.wide());
        let kind = match (natural, a.wide) {
            (k, w) if k.wide() == w => k,
            (_, true) => Kind::B64,
            (_, false) => return Err("the register is too narrow".into()),
        };
        for (k, item) in items.iter().enumerate() {
            a.rows[k] = if is_store { self.src(item, kind)? } else { self.dst(item, kind)? };
        }
        let x = self.code.accesses.len() as u32;
        self.code.accesses.push(a);
        Ok(Ins { x, ..plain(if is_store { memory::store } else { memory::load }) })
    }

    /// An access to an address, with nothing else known of it.
    pub(super) fn access(&mut self, addr: &Operand) -> Result<Access, Refused> {
        let (base, base_wide, offset) = self.address(addr)?;
        Ok(Access {
            space: Space::Generic,
            size: 0,
            count: 1,
            signed: false,
            wide: false,
            base_wide,
            base,
            offset,
            order: Order::Weak,
            device_scope: true,
            cluster: false,
            rows: [0; 8],
        })
    }

    /// Modifiers that all accesses know: space, order, scope.
    fn common(&self, p: &str, a: &mut Access) -> bool {
        match p {
            "global" => a.space = Space::Global,
            "const" => a.space = Space::Const,
            "shared" | "shared::cta" => a.space = Space::Shared,
            "local" => a.space = Space::Local,
            "param" | "param::entry" => a.space = Space::Param,
            "volatile" => a.order = Order::Volatile,
            "relaxed" | "mmio" => a.order = Order::Relaxed,
            "acquire" => a.order = Order::Acquire,
            "release" => a.order = Order::Release,
            "acq_rel" => a.order = Order::AcquireRelease,
            "cta" => a.device_scope = false,
            "gpu" | "sys" | "cluster" => a.device_scope = true,
            _ => return false,
        }
        true
    }

    /// `red` of two or four f32 of global memory: each element is added by itself, in no order that may be relied on.
    fn decode_vector_reduction(
        &mut self,
        op: &str,
        ty: &str,
        mut a: Access,
        rmw: Rmw,
        o: &[Operand],
    ) -> Result<Ins, Refused> {
        let [_, items] = o else { return Err("vectors are known of `red` alone".into()) };
        if (op, ty, a.space) != ("add", "f32", Space::Global) {
            return Err("vectors are known of `red.global.add.f32` alone".into());
        }
        let items = Self::items(items);
        if items.len() != a.count as usize {
            return Err(format!("{} data operands, expected {}", items.len(), a.count));
        }
        for (k, item) in items.iter().enumerate() {
            a.rows[k] = self.src(item, Kind::F32)?;
        }
        let x = self.code.accesses.len() as u32;
        self.code.accesses.push(a);
        Ok(Ins { c: rmw as u32, x, ..plain(atomic::vector) })
    }

    pub(super) fn decode_atomic(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        let has_result = parts[0] == "atom";
        let (mut op, mut ty) = (None, None);
        let at = usize::from(has_result);
        let mut a = self.access(o.get(at).ok_or("no address")?)?;
        a.order = Order::Relaxed;
        for &p in &parts[1..] {
            match p {
                _ if self.common(p, &mut a) => {}
                "add" | "exch" | "cas" | "and" | "or" | "xor" | "min" | "max" | "inc" | "dec" if op.is_none() => {
                    op = Some(p);
                }
                "noftz" => {}
                "v2" => a.count = 2,
                "v4" => a.count = 4,
                _ if bytes_of(p).is_some() && ty.is_none() => ty = Some(p),
                _ => return Err(format!("unknown modifier `{p}`")),
            }
        }
        let (op, ty) = (op.ok_or("no operation")?, ty.ok_or("no type")?);
        let rmw = Rmw::of(op, ty).ok_or("this operation is not known to the emulator")?;
        let kind = kind_of(ty).ok_or("unknown type")?;
        a.size = bytes_of(ty).unwrap_or(0);
        if a.size < 4 {
            return Err("atomics of less than four bytes are not known to the emulator".into());
        }
        a.wide = kind.wide();
        if a.count > 1 {
            return self.decode_vector_reduction(op, ty, a, rmw, o);
        }
        let sources = if op == "cas" { 2 } else { 1 };
        if o.len() != at + 1 + sources {
            return Err(format!("{} operands, expected {}", o.len(), at + 1 + sources));
        }
        for k in 0..sources {
            a.rows[k] = self.src(&o[at + 1 + k], kind)?;
        }
        if sources == 1 {
            a.rows[1] = a.rows[0];
        }
        let dst = if has_result { self.dst(&o[0], kind)? } else { 0 };
        let x = self.code.accesses.len() as u32;
        self.code.accesses.push(a);
        Ok(Ins { dst, c: rmw as u32, e: has_result.into(), x, ..plain(atomic::atomic) })
    }
}
