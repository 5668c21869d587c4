// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decodes what lanes and warps do together: exchanges, barriers, asynchronous copies, matrices.

use super::decode::{Decoder, Refused, kind_of, plain};
use super::rows::Kind;
use super::{Ins, cluster, copy, exchange, sync, tensor};
use crate::ptx::ast::Operand;

impl Decoder<'_> {
    pub(super) fn decode_exchange(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        match (parts, o) {
            (["shfl", "sync", mode, "b32"], [d, a, b, c, mask]) => {
                let mode = match *mode {
                    "up" => 0,
                    "down" => 1,
                    "bfly" => 2,
                    "idx" => 3,
                    _ => return Err("unknown mode".into()),
                };
                let (d, p) = match d {
                    Operand::Pair(d, p) => (&**d, self.pred(p)?.0),
                    d => (d, u32::MAX),
                };
                let (dst, a, b) = (self.dst(d, Kind::B32)?, self.src(a, Kind::B32)?, self.src(b, Kind::B32)?);
                let (c, e) = (self.src(c, Kind::B32)?, self.src(mask, Kind::B32)?);
                let x = self.list(&[mode, p]);
                Ok(Ins { dst, a, b, c, e, x, ..plain(exchange::shuffle) })
            }
            (["vote", "sync", mode, out], [d, p, mask]) => {
                let c = match (*mode, *out) {
                    ("all", "pred") => 0,
                    ("any", "pred") => 1,
                    ("uni", "pred") => 2,
                    ("ballot", "b32") => 3,
                    _ => return Err("unknown mode".into()),
                };
                let dst = if c == 3 { self.dst(d, Kind::B32)? } else { self.pred(d)?.0 };
                let (a, negated) = self.pred(p)?;
                let e = self.src(mask, Kind::B32)?;
                Ok(Ins { dst, a, b: negated.into(), c, e, ..plain(exchange::vote) })
            }
            (["activemask", "b32"], [d]) => Ok(Ins { dst: self.dst(d, Kind::B32)?, ..plain(exchange::active) }),
            (["match", how @ ("any" | "all"), "sync", ty @ ("b32" | "b64")], [d, a, mask]) => {
                let (d, x) = match d {
                    Operand::Pair(d, p) => (&**d, self.pred(p)?.0),
                    d => (d, u32::MAX),
                };
                let kind = kind_of(ty).ok_or("unknown type")?;
                let (dst, a, e) = (self.dst(d, Kind::B32)?, self.src(a, kind)?, self.src(mask, Kind::B32)?);
                let c = (*how == "all").into();
                Ok(Ins { dst, a, b: kind.wide().into(), c, e, x, ..plain(exchange::matching) })
            }
            (["redux", "sync", op, ty], [d, a, mask]) => {
                let c = match (*op, *ty) {
                    ("add", "u32" | "s32") => 0,
                    ("min", "u32") => 1,
                    ("max", "u32") => 2,
                    ("min", "s32") => 3,
                    ("max", "s32") => 4,
                    ("and", "b32") => 5,
                    ("or", "b32") => 6,
                    ("xor", "b32") => 7,
                    _ => return Err("unknown operation".into()),
                };
                let (dst, a, e) = (self.dst(d, Kind::B32)?, self.src(a, Kind::B32)?, self.src(mask, Kind::B32)?);
                Ok(Ins { dst, a, c, e, ..plain(exchange::reduce) })
            }
            (["elect", "sync"], [Operand::Pair(d, p), mask]) => {
                let (dst, x, e) = (self.dst(d, Kind::B32)?, self.pred(p)?.0, self.src(mask, Kind::B32)?);
                Ok(Ins { dst, e, x, ..plain(exchange::elect) })
            }
            _ => Err("this form is not known to the emulator".into()),
        }
    }

    pub(super) fn decode_sync(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        if let (["bar", "warp", "sync"], [mask]) = (parts, o) {
            return Ok(Ins { e: self.src(mask, Kind::B32)?, ..plain(exchange::warp_barrier) });
        }
        match parts {
            ["membar", "cta"] | ["fence", "cta"] | ["fence", "acq_rel" | "sc", "cta"] => {
                return Ok(Ins { c: 0, ..plain(sync::fence) });
            }
            ["membar", "gl" | "sys"] | ["fence", "acq_rel" | "sc", "gpu" | "sys" | "cluster"] => {
                return Ok(Ins { c: 1, ..plain(sync::fence) });
            }
            ["fence", "proxy", "async"] => return Ok(Ins { c: 7, ..plain(sync::proxy_fence) }),
            ["fence", "proxy", "async", "shared::cluster"] => return Ok(Ins { c: 5, ..plain(sync::proxy_fence) }),
            ["fence", "proxy", "async", "shared::cta"] => return Ok(Ins { c: 1, ..plain(sync::proxy_fence) }),
            ["fence", "proxy", "async", "global"] => return Ok(Ins { c: 2, ..plain(sync::proxy_fence) }),
            ["fence", "mbarrier_init", "release", "cluster"] => return Ok(plain(cluster::made)),
            ["barrier", "cluster", how @ ..] => return self.decode_cluster_barrier(how, o),
            ["bar" | "barrier", ..] => {}
            _ => return Err("this fence is not known to the emulator".into()),
        }
        let rest: Vec<&str> = parts[1..].iter().copied().filter(|p| !matches!(*p, "cta" | "aligned")).collect();
        let whole = u32::MAX;
        let e = if parts[0] == "barrier" && !parts.contains(&"aligned") { sync::NOT_ALIGNED } else { 0 };
        match (&rest[..], o) {
            (["sync"], [id]) => {
                Ok(Ins { a: self.src(id, Kind::B32)?, b: whole, c: sync::SYNC, e, ..plain(sync::barrier) })
            }
            (["sync" | "arrive"], [id, count]) => {
                let (a, b) = (self.src(id, Kind::B32)?, self.src(count, Kind::B32)?);
                let c = if rest[0] == "sync" { sync::SYNC } else { sync::ARRIVE };
                Ok(Ins { a, b, c, e, ..plain(sync::barrier) })
            }
            (["red", op, ty], [d, id, more @ ..]) => {
                let (b, p) = match more {
                    [p] => (whole, p),
                    [count, p] => (self.src(count, Kind::B32)?, p),
                    _ => return Err("wrong operands".into()),
                };
                let (c, dst) = match (*op, *ty) {
                    ("popc", "u32") => (sync::RED_POPC, self.dst(d, Kind::B32)?),
                    ("and", "pred") => (sync::RED_AND, self.pred(d)?.0),
                    ("or", "pred") => (sync::RED_OR, self.pred(d)?.0),
                    _ => return Err("unknown reduction".into()),
                };
                let (a, (e, negated)) = (self.src(id, Kind::B32)?, self.pred(p)?);
                let x = self.list(&[negated.into()]);
                Ok(Ins { dst, a, b, c, e, x, ..plain(sync::barrier) })
            }
            _ => Err("this barrier is not known to the emulator".into()),
        }
    }

    pub(super) fn decode_registers(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        let (["setmaxnreg", how @ ("inc" | "dec"), "sync", "aligned", "u32"], [Operand::Int(n)]) = (parts, o) else {
            return Err("this form is not known to the emulator".into());
        };
        if !(24..=256).contains(n) || n % 8 != 0 {
            return Err(format!("{n} registers: a multiple of 8 from 24 to 256"));
        }
        Ok(Ins { b: (*how == "inc").into(), c: *n as u32, ..plain(sync::registers) })
    }

    pub(super) fn decode_copy(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        match (parts, o) {
            (["cp", "async", "commit_group"], []) => Ok(plain(copy::commit)),
            (["cp", "async", "wait_all"], []) => Ok(Ins { c: u32::MAX, ..plain(copy::wait) }),
            (["cp", "async", "wait_group"], [Operand::Int(n)]) => Ok(Ins { c: *n as u32, ..plain(copy::wait) }),
            (
                ["cp", "async", how @ ("ca" | "cg"), "shared" | "shared::cta", "global", more @ ..],
                [to, from, size, rest @ ..],
            ) => {
                if more.iter().any(|m| !m.starts_with("L2::") || m.contains("hint")) {
                    return Err("unknown modifier".into());
                }
                let Operand::Int(size @ (4 | 8 | 16)) = size else { return Err("4, 8 or 16 bytes".into()) };
                if *how == "cg" && *size != 16 {
                    return Err("`.cg` copies 16 bytes".into());
                }
                let (mut to, mut from) = (self.access(to)?, self.access(from)?);
                (to.size, from.size) = (*size as u32, *size as u32);
                let (mut a, mut b, mut negated) = (u32::MAX, u32::MAX, false);
                for r in rest {
                    match r {
                        Operand::Reg(_) | Operand::NotReg(_) if self.pred(r).is_ok() => (b, negated) = self.pred(r)?,
                        r if a == u32::MAX => a = self.src(r, Kind::B32)?,
                        _ => return Err("too many operands".into()),
                    }
                }
                let x = self.code.accesses.len() as u32;
                self.code.accesses.extend([to, from]);
                Ok(Ins { a, b, c: negated.into(), x, ..plain(copy::start) })
            }
            _ => Err("this copy is not known to the emulator".into()),
        }
    }

    pub(super) fn decode_tensor(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        match (parts, o) {
            (
                ["mma", "sync", "aligned", shape @ ("m16n8k16" | "m16n8k8"), "row", "col", "f32", ab, ab2, "f32"],
                [d, a, b, c],
            ) if ab == ab2 && matches!(*ab, "f16" | "bf16") => {
                let k: usize = if *shape == "m16n8k16" { 16 } else { 8 };
                let mut rows = Vec::with_capacity(14);
                for (vector, n, is_dst) in [(d, 4, true), (a, k / 4, false), (b, k / 8, false), (c, 4, false)] {
                    let items = Self::items(vector);
                    if items.len() != n {
                        return Err(format!("{} registers where {n} are needed", items.len()));
                    }
                    for i in &items {
                        rows.push(if is_dst { self.dst(i, Kind::F32)? } else { self.src(i, Kind::F32)? });
                    }
                }
                let x = self.list(&rows);
                Ok(Ins { x, ..plain(tensor::mma(*ab == "bf16", k as u32)) })
            }
            ([op @ ("ldmatrix" | "stmatrix"), "sync", "aligned", "m8n8", count, more @ .., "b16"], [x, y]) => {
                let store = *op == "stmatrix";
                let (data, addr) = if store { (y, x) } else { (x, y) };
                let n = match *count {
                    "x1" => 1,
                    "x2" => 2,
                    "x4" => 4,
                    _ => return Err("unknown count".into()),
                };
                let trans = match more {
                    [] | ["shared" | "shared::cta"] => false,
                    ["trans"] | ["trans", "shared" | "shared::cta"] => true,
                    _ => return Err("unknown modifier".into()),
                };
                let items = Self::items(data);
                if items.len() != n {
                    return Err(format!("{} registers, expected {n}", items.len()));
                }
                let mut rows = Vec::with_capacity(n);
                for i in &items {
                    rows.push(if store { self.src(i, Kind::B32)? } else { self.dst(i, Kind::B32)? });
                }
                let (access, a) = (self.access(addr)?, self.list(&rows));
                let x = self.code.accesses.len() as u32;
                self.code.accesses.push(access);
                let f = if store { tensor::store_matrix } else { tensor::load_matrix };
                Ok(Ins { a, b: trans.into(), c: n as u32, x, ..plain(f) })
            }
            (["movmatrix", "sync", "aligned", "m8n8", "trans", "b16"], [d, a]) => {
                let (dst, a) = (self.dst(d, Kind::B32)?, self.src(a, Kind::B32)?);
                Ok(Ins { dst, a, ..plain(tensor::move_matrix) })
            }
            _ => Err("this form is not known to the emulator".into()),
        }
    }
}
