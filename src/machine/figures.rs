// SPDX-License-Identifier: MIT OR Apache-2.0
//! The figures of a machine, and questions about them.
//!
//! Values without any text: this file defines the meaning of a description's lines, `text` their syntax.

use alloc::{format, string::String, vec::Vec};

use crate::{
    element::Dtype,
    error::{Error, Result},
};

/// The place of two ranks relative to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Level {
    /// In one node.
    Inside,
    /// In two nodes.
    Between,
}

/// The links of one level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkRate {
    /// Seconds from the moment that both sides are ready until the first byte arrives.
    pub latency: f64,
    /// Bytes per second, in each direction: of a rank inside a node, of a card between nodes.
    pub rate: f64,
}

/// The kernel that a rate belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelShape {
    /// Element type.
    pub dtype: Dtype,
    /// q's and k's head dim.
    pub head_dim: usize,
    /// v's head dim.
    pub value_dim: usize,
    /// The backward's kernel.
    pub backward: bool,
}

/// The speed of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelRate {
    /// Which kernel.
    pub shape: KernelShape,
    /// Floating-point operations per second, two for each multiply-add of an allowed pair.
    pub rate: f64,
    /// Seconds for each q row and head.
    pub row: f64,
    /// Seconds for each k row and q head.
    pub key: f64,
    /// Seconds for each q row, head and edge of the mask among the keys: the cost, per row, of the pairs that a tile on
    /// the edge computes but masks.
    pub edge: f64,
    /// Seconds for each call.
    pub call: f64,
}

/// A machine.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// Whether its figures come from data sheets and publications; otherwise they were measured.
    pub estimate: bool,
    /// Ranks of one node.
    pub ranks_per_node: usize,
    /// Network cards of one node.
    pub cards_per_node: usize,
    /// Cores of one node, if ranks compute and copy on them; `None` if each rank has engines of its own.
    pub cores: Option<usize>,
    /// Whether all nodes run on the same `cores`: hosts simulated on one machine.
    pub nodes_share_cores: bool,
    /// Bytes of memory of one rank.
    pub memory: f64,
    /// Seconds of any operation in addition to its work.
    pub operation: f64,
    /// Bytes that packing, unpacking and sums read and write per second.
    pub copy: f64,
    /// Links inside a node.
    pub inside: LinkRate,
    /// Links between nodes.
    pub between: LinkRate,
    /// Bytes that a card passes at once after a pause, in each direction, before its rate limits them: the size of a
    /// rate limit's bucket. The bucket fills at the card's rate. 0 if there is no such limit.
    pub between_burst: f64,
    /// Seconds of a core for each byte of a message between nodes, half at each end: copies and protocols. 0 if cards
    /// move bytes without cores.
    pub between_work: f64,
    /// Kernels.
    pub kernels: Vec<KernelRate>,
}

impl Machine {
    /// Refuses values that a description cannot have; the fields are public, so callers can set them.
    pub(crate) fn check(&self) -> Result<()> {
        let counts = [self.ranks_per_node, self.cards_per_node, self.cores.unwrap_or(1)];
        for (field, count) in ["ranks_per_node", "cards_per_node", "cores"].into_iter().zip(counts) {
            if count == 0 {
                return Err(Error::invalid(format!("machine.{field}"), 0, "a whole number above 0"));
            }
        }
        let own = [
            ("memory", self.memory, false),
            ("operation", self.operation, true),
            ("copy", self.copy, false),
            ("inside.latency", self.inside.latency, true),
            ("inside.rate", self.inside.rate, false),
            ("between.latency", self.between.latency, true),
            ("between.rate", self.between.rate, false),
            ("between_burst", self.between_burst, true),
            ("between_work", self.between_work, true),
        ];
        let own = own.map(|(field, figure, zero)| (format!("machine.{field}"), figure, zero));
        let of_kernels = self.kernels.iter().flat_map(|k| {
            [("rate", k.rate), ("row", k.row), ("key", k.key), ("edge", k.edge), ("call", k.call)]
                .map(|(field, figure)| (format!("machine.kernels, {}: {field}", k.shape), figure, field != "rate"))
        });
        for (field, figure, zero) in own.into_iter().chain(of_kernels) {
            figure_fits(figure, zero).map_err(|expected| Error::invalid(field, figure, expected))?;
        }
        let needs_cores = [("nodes_share_cores", self.nodes_share_cores), ("between_work", self.between_work > 0.0)];
        match needs_cores.into_iter().find(|(_, is_set)| *is_set && self.cores.is_none()) {
            Some((field, _)) => {
                Err(Error::invalid(format!("machine.{field}"), "set, without cores", "machine.cores beside it"))
            }
            None => Ok(()),
        }
    }

    /// The level of the links between two ranks.
    pub(crate) const fn level(&self, a: usize, b: usize) -> Level {
        if a / self.ranks_per_node == b / self.ranks_per_node { Level::Inside } else { Level::Between }
    }

    /// The links of a level.
    pub(crate) const fn link(&self, level: Level) -> LinkRate {
        match level {
            Level::Inside => self.inside,
            Level::Between => self.between,
        }
    }

    /// The card of its node that carries a rank's messages to other nodes: ranks are spread evenly, in order.
    pub const fn card(&self, rank: usize) -> usize {
        let node = rank / self.ranks_per_node;
        node * self.cards_per_node + rank % self.ranks_per_node * self.cards_per_node / self.ranks_per_node
    }

    /// The most ranks that share one card.
    pub const fn ranks_per_card(&self) -> usize {
        self.ranks_per_node.div_ceil(self.cards_per_node)
    }

    /// Index of the pool of cores that a rank works on, if there are cores.
    pub const fn pool(&self, rank: usize) -> usize {
        if self.nodes_share_cores { 0 } else { rank / self.ranks_per_node }
    }

    /// How many of `ranks` ranks can work at the same time; ranks fill one node after another.
    pub fn ranks_at_once(&self, ranks: usize) -> f64 {
        let Some(cores) = self.cores else { return ranks as f64 };
        if self.nodes_share_cores {
            return cores.min(ranks) as f64;
        }
        let (whole, rest) = (ranks / self.ranks_per_node, ranks % self.ranks_per_node);
        (whole * cores.min(self.ranks_per_node) + cores.min(rest)) as f64
    }

    /// The rate of a kernel. If the description does not have its shape: the rate of the nearest dims with the same
    /// element type and direction. If it has no kernel of that type: one is derived from the type whose elements are
    /// nearest in size. As the peak of vector and tensor units, the rate is inverse to the bytes of an element, so the
    /// seconds of an edge grow with these bytes, and so do those of a row and a key, which are bytes of memory. The
    /// shape of a rate is that of the line it was taken from. The second value is whether the description has the
    /// shape.
    ///
    /// # Errors
    /// [`Error::Invalid`] if no kernel has that direction.
    pub fn kernel(&self, shape: KernelShape) -> Result<(KernelRate, bool)> {
        let bits = |dtype: Dtype| dtype.size().ilog2();
        let distance = |k: &KernelRate| {
            let of_type = (k.shape.dtype != shape.dtype, bits(k.shape.dtype).abs_diff(bits(shape.dtype)));
            let dims = k.shape.head_dim.abs_diff(shape.head_dim) + k.shape.value_dim.abs_diff(shape.value_dim);
            (of_type, dims)
        };
        let Some(k) = self.kernels.iter().filter(|k| k.shape.backward == shape.backward).min_by_key(|k| distance(k))
        else {
            return Err(Error::invalid(
                "machine",
                format!("{} without a {} kernel", self.name, direction(shape.backward)),
                "one for both directions",
            )
            .hint("add the line kernel DTYPE HEAD_DIM/VALUE_DIM forward = rate … to the description, and one for backward"));
        };
        let bytes = shape.dtype.size() as f64 / k.shape.dtype.size() as f64;
        let derived =
            KernelRate { rate: k.rate / bytes, row: k.row * bytes, key: k.key * bytes, edge: k.edge * bytes, ..*k };
        Ok((derived, k.shape == shape))
    }
}

impl KernelRate {
    /// Seconds of one call: `flops` of all heads together; `rows`, `keys` and `edges` times heads.
    pub fn seconds(&self, flops: f64, rows: f64, keys: f64, edges: f64) -> f64 {
        self.call + flops / self.rate + rows * self.row + keys * self.key + edges * self.edge
    }
}

/// Checks whether a figure is valid; the error names the valid values.
pub(super) fn figure_fits(figure: f64, zero: bool) -> core::result::Result<(), &'static str> {
    match zero {
        _ if figure.is_finite() && (figure > 0.0 || zero && figure == 0.0) => Ok(()),
        true => Err("a number from 0"),
        false => Err("a number above 0"),
    }
}

pub(super) const fn direction(backward: bool) -> &'static str {
    if backward { "backward" } else { "forward" }
}
