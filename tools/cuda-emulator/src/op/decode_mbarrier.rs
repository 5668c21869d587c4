// SPDX-License-Identifier: MIT OR Apache-2.0
//! Decodes barriers in shared memory.

use super::decode::{Decoder, Refused, plain};
use super::mbarrier::{self, NONE};
use super::rows::Kind;
use super::{Ins, OpFn};
use crate::ptx::Space;
use crate::ptx::ast::Operand;

impl Decoder<'_> {
    pub(super) fn decode_mbarrier(&mut self, parts: &[&str], o: &[Operand]) -> Result<Ins, Refused> {
        let Some((&"b64", parts)) = parts.split_last() else { return Err("a barrier is `.b64`".into()) };
        let (mut words, mut space, mut cluster, mut far) = (Vec::new(), Space::Generic, false, false);
        for &p in &parts[1..] {
            match p {
                "shared" | "shared::cta" => space = Space::Shared,
                "shared::cluster" => (space, far) = (Space::Shared, true),
                // What an arrival releases and a wait acquires, when nothing is said.
                "release" if words.first() == Some(&"arrive") => {}
                "acquire" if matches!(words.first(), Some(&"test_wait" | &"try_wait")) => {}
                "relaxed" if words.first() == Some(&"expect_tx") => {}
                "cta" => {}
                "cluster" if matches!(words.first(), Some(&("arrive" | "test_wait" | "try_wait"))) => cluster = true,
                p => words.push(p),
            }
        }
        if far && (words.first() != Some(&"arrive") || o.first() != Some(&Operand::Sink)) {
            return Err("in another block, arrivals without a state are known to the emulator and nothing else".into());
        }
        let space = (space, cluster, far);
        match (&words[..], o) {
            (["init"], [at, count]) => {
                let a = self.src(count, Kind::B32)?;
                self.barrier(at, space, Ins { a, ..plain(mbarrier::init) })
            }
            (["inval"], [at]) => self.barrier(at, space, plain(mbarrier::inval)),
            (["expect_tx"], [at, bytes]) => {
                let a = self.src(bytes, Kind::B32)?;
                self.barrier(at, space, Ins { dst: NONE, a, b: NONE, ..plain(mbarrier::arrive) })
            }
            (["arrive"], [state, at, more @ ..]) if more.len() <= 1 => {
                let b = more.first().map_or(Ok(NONE), |n| self.src(n, Kind::B32))?;
                let dst = self.state(state)?;
                self.barrier(at, space, Ins { dst, a: NONE, b, e: 1, ..plain(mbarrier::arrive) })
            }
            (["arrive", "expect_tx"], [state, at, bytes]) => {
                let (dst, a) = (self.state(state)?, self.src(bytes, Kind::B32)?);
                self.barrier(at, space, Ins { dst, a, b: NONE, e: 1, ..plain(mbarrier::arrive) })
            }
            // The last operand of `try_wait` is how long it may take before it gives up.
            ([how @ ("test_wait" | "try_wait"), more @ ..], [p, at, what, time @ ..])
                if time.is_empty() || *how == "try_wait" && time.len() == 1 =>
            {
                let (dst, c) = (self.pred(p)?.0, (*how == "try_wait").into());
                let (a, b) = match more {
                    ["parity"] => (self.src(what, Kind::B32)?, NONE),
                    [] => (NONE, self.src(what, Kind::B64)?),
                    _ => return Err("unknown modifier".into()),
                };
                self.barrier(at, space, Ins { dst, a, b, c, ..plain(mbarrier::wait as OpFn) })
            }
            _ => Err("this form is not known to the emulator".into()),
        }
    }

    fn state(&mut self, o: &Operand) -> Result<u32, Refused> {
        if *o == Operand::Sink { Ok(NONE) } else { self.dst(o, Kind::B64) }
    }

    /// Adds the access to a barrier.
    fn barrier(&mut self, at: &Operand, (space, cluster, far): (Space, bool, bool), ins: Ins) -> Result<Ins, Refused> {
        let mut access = self.access(at)?;
        (access.space, access.device_scope, access.cluster) = (space, cluster, far);
        let x = self.code.accesses.len() as u32;
        self.code.accesses.push(access);
        Ok(Ins { x, ..ins })
    }
}
