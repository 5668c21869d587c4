// SPDX-License-Identifier: MIT OR Apache-2.0
//! Order between the lanes of one warp.
//!
//! Lanes are threads: what one writes to memory another may read only after `bar.warp.sync` or a barrier of the
//! block. Shuffles, votes and matrix instructions bring lanes together but order no memory. For every byte the last
//! writing and the last reading lane are kept, with the warp and how often that warp had synchronised by then.

/// A byte that several lanes read.
const MANY: u8 = 0xfe;

#[derive(Clone, Copy, Default)]
struct Line {
    /// Warp and its count of synchronisations, of the writers and of the readers.
    written: u64,
    read: u64,
    writer: [u8; 16],
    reader: [u8; 16],
}

/// The shadow of a piece of memory: a block's shared memory, or an allocation.
#[derive(Default)]
pub(crate) struct LaneShadow(Vec<Line>);

/// An access that is not ordered with another lane's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaneRace {
    pub(crate) at: u32,
    /// The other lane, if it is one.
    pub(crate) other: Option<u8>,
    /// Whether the other one wrote.
    pub(crate) wrote: bool,
}

/// Who accesses: every lane's bytes, and whether all lanes get what each address holds (`ldmatrix`).
pub(crate) struct LaneAccess<'a> {
    pub(crate) at: &'a [u64; 32],
    pub(crate) size: u32,
    pub(crate) mask: u32,
    pub(crate) write: bool,
    pub(crate) collective: bool,
    /// Block, warp and its count of synchronisations.
    pub(crate) key: u64,
}

/// Names a warp and how often it has synchronised.
pub(crate) fn key(block: u32, warp: usize, count: u32) -> u64 {
    u64::from(block) << 32 | (warp as u64) << 27 | u64::from(count & 0x7ff_ffff)
}

impl LaneShadow {
    pub(crate) fn new(lines: usize) -> Self {
        Self(vec![Line::default(); lines])
    }

    /// Whether it has no lines yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks an instruction and then records it. Lanes of one instruction do not race with each other.
    pub(crate) fn access(&mut self, a: &LaneAccess<'_>) -> Result<(), LaneRace> {
        for l in crate::op::lanes(a.mask) {
            let (line, bytes) = self.place(a, l);
            let mine = if a.collective { MANY } else { l as u8 };
            if line.written == a.key
                && let Some(b) = bytes.clone().find(|&b| line.writer[b] != mine && line.writer[b] != u8::MAX)
            {
                return Err(race(a.at[l], bytes.start, b, line.writer[b], true));
            }
            if a.write
                && line.read == a.key
                && let Some(b) = bytes.clone().find(|&b| line.reader[b] != mine && line.reader[b] != u8::MAX)
            {
                return Err(race(a.at[l], bytes.start, b, line.reader[b], false));
            }
        }
        for l in crate::op::lanes(a.mask) {
            let mine = if a.collective { MANY } else { l as u8 };
            let (line, bytes) = self.place(a, l);
            if a.write {
                if line.written != a.key {
                    (line.written, line.writer) = (a.key, [u8::MAX; 16]);
                }
                line.writer[bytes].fill(mine);
            } else {
                if line.read != a.key {
                    (line.read, line.reader) = (a.key, [u8::MAX; 16]);
                }
                for r in &mut line.reader[bytes] {
                    *r = if *r == u8::MAX || *r == mine { mine } else { MANY };
                }
            }
        }
        Ok(())
    }

    /// Records that a copy of a lane arrived.
    pub(crate) fn arrived(&mut self, offset: u32, size: u32, lane: u32, key: u64) {
        let line = &mut self.0[(offset >> 4) as usize];
        if line.written != key {
            (line.written, line.writer) = (key, [u8::MAX; 16]);
        }
        let first = (offset & 15) as usize;
        line.writer[first..first + size as usize].fill(lane as u8);
    }

    /// A copy wrote a line: who accessed it before is no lane's business any more.
    pub(crate) fn forget(&mut self, line: u32) {
        if let Some(l) = self.0.get_mut(line as usize) {
            *l = Line::default();
        }
    }

    fn place(&mut self, a: &LaneAccess<'_>, l: usize) -> (&mut Line, std::ops::Range<usize>) {
        let first = (a.at[l] & 15) as usize;
        (&mut self.0[(a.at[l] >> 4) as usize], first..first + a.size as usize)
    }
}

fn race(at: u64, first: usize, byte: usize, other: u8, wrote: bool) -> LaneRace {
    let other = (other != MANY).then_some(other);
    LaneRace { at: at as u32 + (byte - first) as u32, other, wrote }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_race_until_they_synchronise() {
        let mut s = LaneShadow::new(8);
        let mut at = [0; 32];
        at.iter_mut().enumerate().for_each(|(l, a)| *a = 4 * l as u64);
        let own = LaneAccess { at: &at, size: 4, mask: !0, write: true, collective: false, key: key(1, 0, 1) };
        assert_eq!(s.access(&own), Ok(()));
        assert_eq!(s.access(&LaneAccess { write: false, ..own }), Ok(()));
        let mut turned = at;
        turned.rotate_left(1);
        let read = LaneAccess { at: &turned, write: false, ..own };
        assert_eq!(s.access(&read), Err(LaneRace { at: 4, other: Some(1), wrote: true }));
        assert_eq!(s.access(&LaneAccess { key: key(1, 0, 2), ..read }), Ok(()));
        // Reading and then overwriting what another lane read.
        let write = LaneAccess { key: key(1, 0, 2), ..own };
        assert_eq!(s.access(&write), Err(LaneRace { at: 0, other: Some(31), wrote: false }));
        assert_eq!(s.access(&LaneAccess { key: key(1, 0, 3), ..own }), Ok(()));
        // Another warp is not this detector's business.
        assert_eq!(s.access(&LaneAccess { key: key(1, 1, 3), ..read }), Ok(()));
    }
}
