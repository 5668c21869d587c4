// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decodes what blocks of a cluster do with each other.

use super::decode::{Decoder, Refused, bytes_of, kind_of, plain};
use super::rows::Kind;
use super::{Ins, cluster};
use crate::ptx::Space;
use crate::ptx::ast::Operand;

impl Decoder<'_> {
    /// `barrier.cluster`, whose modifiers are `parts`.
    pub(super) fn decode_cluster_barrier(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        let words: Vec<&str> = parts.iter().copied().filter(|p| *p != "aligned").collect();
        let e = u32::from(words.len() != parts.len());
        match (&words[..], o) {
            (["arrive"] | ["arrive", "release"], []) => Ok(Ins { e, ..plain(cluster::arrive) }),
            (["arrive", "relaxed"], []) => Ok(Ins { c: 1, e, ..plain(cluster::arrive) }),
            (["wait"] | ["wait", "acquire"], []) => Ok(Ins { e, ..plain(cluster::wait) }),
            _ => Err("this form is not known to the emulator".into()),
        }
    }

    /// `mapa`, `getctarank`: of addresses in shared memory, not of generic ones.
    pub(super) fn decode_rank(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        let kind = match parts {
            [_, "shared::cluster", "u32"] => Kind::B32,
            [_, "shared::cluster", "u64"] => Kind::B64,
            _ => return Err("only `.shared::cluster` addresses are known to the emulator".into()),
        };
        let c = u32::from(kind == Kind::B64);
        match (parts[0], o) {
            ("mapa", [d, at, rank]) => {
                let (dst, a, b) = (self.dst(d, kind)?, self.src(at, kind)?, self.src(rank, Kind::B32)?);
                Ok(Ins { dst, a, b, c, ..plain(cluster::map) })
            }
            ("getctarank", [d, at]) => {
                let (dst, a) = (self.dst(d, Kind::B32)?, self.src(at, kind)?);
                Ok(Ins { dst, a, c, ..plain(cluster::rank) })
            }
            _ => Err("wrong operands".into()),
        }
    }

    /// `st.async`.
    pub(super) fn decode_send(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        let words: Vec<&str> = parts.iter().copied().filter(|p| !matches!(*p, "weak" | "shared::cluster")).collect();
        let (count, ty) = match words[..] {
            ["st", "async", "mbarrier::complete_tx::bytes", ty] => (1, ty),
            ["st", "async", "mbarrier::complete_tx::bytes", "v2", ty] => (2, ty),
            ["st", "async", "mbarrier::complete_tx::bytes", "v4", ty] => (4, ty),
            _ => return Err("this form is not known to the emulator".into()),
        };
        let [to, data, barrier] = o else { return Err("three operands are needed".into()) };
        let (size, kind) = (bytes_of(ty).unwrap_or(0), kind_of(ty).ok_or("unknown type")?);
        let items = Self::items(data);
        if !matches!(size, 4 | 8) || size * count > 16 || items.len() != count as usize {
            return Err("one, two or four elements of 4 or 8 bytes, 16 bytes in all".into());
        }
        let x = self.places(&[(to, Space::Shared), (barrier, Space::Shared)], true)?;
        let rows = items.iter().map(|i| self.src(i, kind)).collect::<Result<Vec<_>, _>>()?;
        let access = &mut self.code.accesses[x as usize];
        (access.size, access.count, access.wide) = (size, count, kind.wide());
        access.rows[..rows.len()].copy_from_slice(&rows);
        Ok(Ins { x, ..plain(cluster::send) })
    }
}
