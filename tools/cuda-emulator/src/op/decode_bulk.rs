// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decodes bulk copies, tensor copies, their groups, and cache policies.

use super::decode::{Decoder, Refused, plain};
use super::rows::Kind;
use super::{Ins, bulk, control, moves, tensor_copy};
use crate::ptx::Space;
use crate::ptx::ast::Operand;

impl Decoder<'_> {
    pub(super) fn decode_bulk(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        // A hint for the cache has an operand, the last, and no effect here.
        let hints = parts.iter().filter(|p| **p == "L2::cache_hint").count();
        let words: Vec<&str> = parts.iter().copied().filter(|p| *p != "L2::cache_hint").collect();
        let o = match (hints, o) {
            (0, o) => o,
            (1, [o @ .., policy]) => {
                self.src(policy, Kind::B64)?;
                o
            }
            _ => return Err("a cache hint is one operand".into()),
        };
        match (&words[..], o) {
            (["cp", "async", "bulk", "commit_group"], []) if hints == 0 => Ok(plain(bulk::commit)),
            (["cp", "async", "bulk", "wait_group", read @ ..], [Operand::Int(n)]) if hints == 0 => match read {
                [] | ["read"] => Ok(Ins { b: read.len() as u32, c: *n as u32, ..plain(bulk::wait) }),
                _ => Err("unknown modifier".into()),
            },
            (
                [
                    "cp",
                    "async",
                    "bulk",
                    to_space @ ("shared::cluster" | "shared::cta"),
                    "global",
                    "mbarrier::complete_tx::bytes",
                    more @ ..,
                ],
                [to, from, bytes, barrier, mask @ ..],
            ) => {
                let a = self.src(bytes, Kind::B32)?;
                let cluster = *to_space == "shared::cluster";
                let (b, c) = self.multicast(cluster, more, mask)?;
                let x =
                    self.places(&[(to, Space::Shared), (from, Space::Global), (barrier, Space::Shared)], cluster)?;
                Ok(Ins { a, b, c, x, ..plain(bulk::load) })
            }
            (["cp", how @ ("async" | "reduce"), more @ ..], [to, from, bytes]) if more.contains(&"bulk_group") => {
                let c = match (*how, more) {
                    ("async", ["bulk", "global", "shared::cta", "bulk_group"]) => bulk::STORE,
                    ("reduce", ["async", "bulk", "global", "shared::cta", "bulk_group", "add", "f32"]) => bulk::ADD,
                    _ => return Err("this form is not known to the emulator".into()),
                };
                let a = self.src(bytes, Kind::B32)?;
                let x = self.places(&[(from, Space::Shared), (to, Space::Global)], false)?;
                Ok(Ins { a, c, x, ..plain(bulk::store) })
            }
            (["cp", "async", "bulk", "prefetch", "L2", "global"], [_, bytes]) => {
                self.src(bytes, Kind::B32)?;
                Ok(plain(control::nothing))
            }
            (["cp", "async", "bulk", "prefetch", "tensor", rank, "L2", "global", more @ ..], [from]) => {
                tile(more)?;
                let (x, _, b) = self.tensor(rank, None, from, None, false)?;
                Ok(Ins { b, x: x + 1, ..plain(tensor_copy::prefetch) })
            }
            (
                [
                    "cp",
                    "async",
                    "bulk",
                    "tensor",
                    rank,
                    to_space @ ("shared::cluster" | "shared::cta"),
                    "global",
                    more @ ..,
                ],
                [to, from, barrier, mask @ ..],
            ) => {
                let Some(at) = more.iter().position(|p| *p == "mbarrier::complete_tx::bytes") else {
                    return Err("this bulk copy is not known to the emulator".into());
                };
                tile(&more[..at])?;
                let cluster = *to_space == "shared::cluster";
                let (c, e) = self.multicast(cluster, &more[at + 1..], mask)?;
                let (x, a, b) = self.tensor(rank, Some(to), from, Some(barrier), cluster)?;
                Ok(Ins { a, b, c, e, x, ..plain(tensor_copy::load) })
            }
            (["cp", "async", "bulk", "tensor", rank, "global", "shared::cta", more @ .., "bulk_group"], [to, from]) => {
                tile(more)?;
                let (x, a, b) = self.tensor(rank, Some(from), to, None, false)?;
                Ok(Ins { a, b, c: bulk::STORE, x, ..plain(tensor_copy::store) })
            }
            (
                [
                    "cp",
                    "reduce",
                    "async",
                    "bulk",
                    "tensor",
                    rank,
                    "global",
                    "shared::cta",
                    "add",
                    more @ ..,
                    "bulk_group",
                ],
                [to, from],
            ) => {
                tile(more)?;
                let (x, a, b) = self.tensor(rank, Some(from), to, None, false)?;
                Ok(Ins { a, b, c: bulk::ADD, x, ..plain(tensor_copy::store) })
            }
            _ => Err("this bulk copy is not known to the emulator".into()),
        }
    }

    /// `createpolicy`: what a hint says has no effect, so any number will do.
    pub(super) fn decode_policy(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        let (["createpolicy", "fractional", first, more @ .., "b64"], [d, fraction @ ..]) = (parts, o) else {
            return Err("this form is not known to the emulator".into());
        };
        let known =
            |p: &str| matches!(p, "L2::evict_last" | "L2::evict_normal" | "L2::evict_first" | "L2::evict_unchanged");
        if !known(first) || more.len() > 1 || !more.iter().all(|p| known(p)) || fraction.len() > 1 {
            return Err("this form is not known to the emulator".into());
        }
        for f in fraction {
            self.src(f, Kind::F32)?;
        }
        let dst = self.dst(d, Kind::B64)?;
        Ok(Ins { dst, b: 1, ..plain(moves::clock) })
    }

    /// `prefetch.tensormap`, of a map at a generic address.
    pub(super) fn decode_map_prefetch(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        let (["prefetch", "tensormap"], [map]) = (parts, o) else {
            return Err("a map is prefetched from a generic address".into());
        };
        let x = self.places(&[(map, Space::Generic)], false)?;
        Ok(Ins { x, ..plain(tensor_copy::prefetch_map) })
    }

    /// The row of a multicast's mask, and 1 if it is one.
    fn multicast(&mut self, cluster: bool, more: &[&str], mask: &[Operand]) -> Result<(u32, u32), Refused> {
        match (more, mask) {
            ([], []) => Ok((0, 0)),
            (["multicast::cluster"], [mask]) if cluster => Ok((self.src(mask, Kind::B16)?, 1)),
            _ => Err("this bulk copy is not known to the emulator".into()),
        }
    }

    /// Adds accesses one after another; returns the first. Those of shared memory may be of another block of a cluster,
    /// or not.
    pub(super) fn places(&mut self, list: &[(&Operand, Space)], cluster: bool) -> Result<u32, Refused> {
        let x = self.code.accesses.len() as u32;
        for (o, space) in list {
            let mut access = self.access(o)?;
            (access.space, access.cluster) = (*space, cluster && *space == Space::Shared);
            self.code.accesses.push(access);
        }
        Ok(x)
    }

    /// Operands of a tensor copy: the first of the accesses to shared memory, map and barrier, the list of coordinates,
    /// and how many there are.
    fn tensor(
        &mut self,
        rank: &str,
        shared: Option<&Operand>,
        tensor: &Operand,
        barrier: Option<&Operand>,
        cluster: bool,
    ) -> Result<(u32, u32, u32), Refused> {
        let Operand::Tensor(map, coordinates) = tensor else {
            return Err("a tensor is `[map, {coordinates}]`".into());
        };
        let n = match rank {
            "1d" => 1,
            "2d" => 2,
            "3d" => 3,
            "4d" => 4,
            "5d" => 5,
            _ => return Err(format!("`{rank}`: 1d to 5d")),
        };
        if coordinates.len() != n {
            return Err(format!("{} coordinates, expected {n}", coordinates.len()));
        }
        let rows = coordinates.iter().map(|c| self.src(c, Kind::B32)).collect::<Result<Vec<_>, _>>()?;
        let map = Operand::Address(map.clone(), 0);
        let places =
            [(shared.unwrap_or(&map), Space::Shared), (&map, Space::Generic), (barrier.unwrap_or(&map), Space::Shared)];
        let x = self.places(&places, cluster)?;
        Ok((x, self.list(&rows), n as u32))
    }
}

/// Boxes are the only shape there is.
fn tile(more: &[&str]) -> Result<(), Refused> {
    if matches!(more, [] | ["tile"]) { Ok(()) } else { Err("only `.tile` copies of one block are known".into()) }
}
