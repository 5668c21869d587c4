// SPDX-License-Identifier: MIT OR Apache-2.0
//! The mesh: `replicas × ring × ulysses`.
//!
//! Ulysses ranks are adjacent (they share a node), ring ranks come next, replicas outermost: rank
//! `(replica · ring + r) · ulysses + u`. Replicas work on their own batches and do not communicate with each other.

use alloc::{format, string::String};

use crate::error::{Error, Result};

/// A decomposition of the world. A literal names its parts: `Mesh { replicas: 1, ring: 2, ulysses: 4 }`; a plan refuses
/// one without ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    /// Independent groups, each with its own batch.
    pub replicas: usize,
    /// Ring ranks: tokens stay sharded over them while k and v are sent.
    pub ring: usize,
    /// Ulysses ranks: ranks of one all-to-all, which exchange tokens for heads.
    pub ulysses: usize,
}

/// A rank's coordinates in its mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coordinates {
    /// Index of the replica.
    pub replica: usize,
    /// Index of the ring rank.
    pub ring: usize,
    /// Index of the Ulysses rank.
    pub ulysses: usize,
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl Mesh {
    /// One rank.
    pub const fn single() -> Self {
        Self { replicas: 1, ring: 1, ulysses: 1 }
    }

    /// Ulysses of `gcd(heads, world)`, ring for the rest: all ranks hold equally many heads.
    pub fn gcd(heads: usize, world: usize) -> Result<Self> {
        world_is(world)?;
        if heads == 0 {
            return Err(Error::invalid("heads", 0, "at least 1"));
        }
        let ulysses = gcd(heads, world);
        Ok(Self { replicas: 1, ring: world / ulysses, ulysses })
    }

    /// All ranks exchange tokens for heads; needs `world ≤ heads`.
    pub fn ulysses(world: usize) -> Result<Self> {
        world_is(world)?;
        Ok(Self { replicas: 1, ring: 1, ulysses: world })
    }

    /// All ranks form one ring.
    pub fn ring(world: usize) -> Result<Self> {
        world_is(world)?;
        Ok(Self { replicas: 1, ring: world, ulysses: 1 })
    }

    /// The same `ulysses × ring`, repeated in as many replicas as fill a world.
    ///
    /// # Errors
    /// A world that is not a whole number of `ulysses × ring`.
    pub fn in_world(self, world: usize) -> Result<Self> {
        world_is(world)?;
        let Self { ring, ulysses, .. } = self;
        let group = ulysses
            .checked_mul(ring)
            .filter(|&g| g > 0)
            .ok_or_else(|| Error::invalid("mesh", format!("ulysses {ulysses} × ring {ring}"), "both at least 1"))?;
        if !world.is_multiple_of(group) {
            return Err(Error::invalid(
                "mesh",
                format!("ulysses {ulysses} × ring {ring} = {group}"),
                format!("a divisor of the world of {world}"),
            )
            .hint("the world must be a whole number of replicas of ulysses × ring ranks"));
        }
        Ok(Self { replicas: world / group, ring, ulysses })
    }

    /// The number of ranks.
    pub const fn world(&self) -> usize {
        self.replicas.saturating_mul(self.group())
    }

    /// The number of ranks that share one batch.
    pub const fn group(&self) -> usize {
        self.ring.saturating_mul(self.ulysses)
    }

    /// A rank's coordinates.
    pub const fn coordinates(&self, rank: usize) -> Coordinates {
        Coordinates {
            replica: rank / at_least_1(self.group()),
            ring: rank / at_least_1(self.ulysses) % at_least_1(self.ring),
            ulysses: rank % at_least_1(self.ulysses),
        }
    }

    /// The rank at these coordinates.
    pub const fn rank(&self, at: Coordinates) -> usize {
        let ring = at.replica.saturating_mul(self.ring).saturating_add(at.ring);
        ring.saturating_mul(self.ulysses).saturating_add(at.ulysses)
    }

    /// The ranks that share `rank`'s batch.
    pub const fn group_of(&self, rank: usize) -> core::ops::Range<usize> {
        let first = rank - rank % at_least_1(self.group());
        first..first.saturating_add(self.group())
    }
}

/// The fields of a mesh are public, so any of them may be 0 until a plan refuses it.
const fn at_least_1(n: usize) -> usize {
    if n == 0 { 1 } else { n }
}

impl core::fmt::Display for Mesh {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        if self.replicas > 1 {
            write!(f, "{} replicas of ", self.replicas)?;
        }
        write!(f, "ulysses {} × ring {}", self.ulysses, self.ring)
    }
}

impl Mesh {
    /// Checks the product of the fields, which are public.
    pub(crate) fn check_world(&self) -> Result<()> {
        match self.replicas.checked_mul(self.ring).and_then(|n| n.checked_mul(self.ulysses)) {
            Some(world) if world <= MAX_WORLD => Ok(()),
            _ => Err(Error::invalid("mesh", self.factors(), format!("at most {MAX_WORLD} ranks"))),
        }
    }

    /// All three factors, as refusals print them.
    pub(crate) fn factors(&self) -> String {
        format!("replicas {} × ring {} × ulysses {}", self.replicas, self.ring, self.ulysses)
    }
}

const MAX_WORLD: usize = 1 << 20;

fn world_is(world: usize) -> Result<()> {
    if world == 0 || world > MAX_WORLD {
        return Err(Error::invalid("world", world, format!("1 to {MAX_WORLD} ranks")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    /// The fields are public: whatever they are, no function panics.
    #[test]
    fn an_unchecked_mesh_can_be_asked_anything() {
        let some = [0, 1, 3, usize::MAX];
        for (replicas, ring, ulysses) in
            some.into_iter().flat_map(|a| some.map(|b| (a, b))).flat_map(|(a, b)| some.map(|c| (a, b, c)))
        {
            let mesh = Mesh { replicas, ring, ulysses };
            for rank in some {
                let (at, group) = (mesh.coordinates(rank), mesh.group_of(rank));
                assert!(at.ulysses <= rank && group.start <= rank && mesh.rank(at) <= rank.max(mesh.world()));
            }
            assert!(mesh.group() <= mesh.world() || replicas == 0, "{mesh}");
        }
    }

    #[test]
    fn decompositions_users_know() {
        let mesh = |u, r| Mesh { replicas: 1, ring: r, ulysses: u };
        assert_eq!(Mesh::gcd(9, 6).unwrap(), mesh(3, 2));
        assert_eq!(Mesh::gcd(9, 3).unwrap(), mesh(3, 1));
        assert_eq!(Mesh::gcd(9, 4).unwrap(), mesh(1, 4));
        assert_eq!(mesh(4, 2).in_world(8).unwrap(), mesh(4, 2));
        assert_eq!(mesh(2, 2).in_world(8).unwrap().replicas, 2);
        assert_eq!(mesh(2, 2).in_world(8).unwrap().in_world(4).unwrap(), mesh(2, 2));
        let text = mesh(3, 2).in_world(8).unwrap_err().to_string();
        assert!(text.contains("ulysses 3 × ring 2 = 6") && text.contains("world of 8"), "{text}");
        assert!(mesh(0, 2).in_world(8).is_err() && Mesh::ring(0).is_err());
        assert_eq!(Mesh::gcd(0, 4).unwrap_err().to_string(), "heads is 0, expected at least 1");
    }

    #[test]
    fn a_mesh_made_by_hand_has_a_world_that_can_be_counted() {
        for (replicas, ring) in [(usize::MAX, 2), (1, 1 << 60), (1 << 20, 2)] {
            let text = Mesh { replicas, ring, ulysses: 2 }.check_world().unwrap_err().to_string();
            assert!(text.contains(&format!("ring {ring} × ulysses 2")) && text.contains("1048576"), "{text}");
        }
        Mesh { replicas: 1, ring: 1 << 10, ulysses: 1 << 10 }.check_world().unwrap();
    }

    #[test]
    fn coordinates_and_ranks_are_inverse() {
        let m = Mesh { replicas: 2, ring: 3, ulysses: 4 };
        for rank in 0..m.world() {
            assert_eq!(m.rank(m.coordinates(rank)), rank);
            assert!(m.group_of(rank).contains(&rank));
        }
        assert_eq!(m.coordinates(13), Coordinates { replica: 1, ring: 0, ulysses: 1 });
    }
}
