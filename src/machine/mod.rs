// SPDX-License-Identifier: MIT OR Apache-2.0
//! The description of a machine: how fast its kernels, copies and links are.
//!
//! Predictions read nothing else about a machine. A description is a text file of `key = value` lines (`text` reads and
//! writes it); `examples/machine` measures one, and the folder `machines` has some that are marked as estimates.
//!
//! The model is small on purpose, so that each figure can be measured alone:
//!
//! - *Kernels*: a call takes `call + heads · (pairs · flops / rate + rows · row + keys · key)` seconds. `pairs` are the
//!   allowed (q, k) pairs of one head, `rows` and `keys` the q rows and k rows that the call reads. `row` and `key` stand
//!   for what does not grow with pairs: loading, merging, the unused corners of tiles at the edge of the mask.
//! - *Copies*: packing, unpacking and sums take their bytes, read and written, over `copy`; each operation of any kind
//!   takes `operation` seconds besides.
//! - *Links*: a message takes the latency of its level and its bytes over the level's rate. Inside a node each rank has
//!   that rate out and in; between nodes each network card has, and a node's ranks share its cards evenly.
//! - *Cores*: where `cores` is given, ranks have no engines of their own. Kernels, copies and messages inside a node then
//!   need a core of the node while they run, and if there are more of them than cores, all slow down alike.
//!
//! What is not here: topologies deeper than two levels, and contention between kernels and copies for memory.

mod text;

use alloc::{format, string::String, vec::Vec};

use crate::{
    element::Dtype,
    error::{Error, Result},
};

/// Where two ranks are to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Level {
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

/// Which kernel.
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

/// How fast it is.
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
    /// Cores of one node, where ranks compute and copy on them; none where each rank has engines of its own.
    pub cores: Option<usize>,
    /// Bytes of memory of one rank.
    pub memory: f64,
    /// Seconds of any operation beside its work.
    pub operation: f64,
    /// Bytes that packing, unpacking and sums read and write per second.
    pub copy: f64,
    /// Links inside a node.
    pub inside: LinkRate,
    /// Links between nodes.
    pub between: LinkRate,
    /// Kernels.
    pub kernels: Vec<KernelRate>,
}

impl Machine {
    /// Reads a description.
    ///
    /// # Errors
    /// [`Error::Invalid`] that names the line and the key: a line that is not `key = value`, an unknown key, a key given
    /// twice, a figure that is missing, negative or not a number.
    ///
    /// ```
    /// use cpattn::machine::Machine;
    /// let text = Machine::parse("copy = -1").unwrap_err().to_string();
    /// assert_eq!(text, "line 1 of the machine description, copy is -1, expected a number above 0");
    /// ```
    pub fn parse(description: &str) -> Result<Self> {
        text::parse(description)
    }

    /// The level of the links between two ranks.
    pub const fn level(&self, a: usize, b: usize) -> Level {
        if a / self.ranks_per_node == b / self.ranks_per_node { Level::Inside } else { Level::Between }
    }

    /// The links of a level.
    pub const fn link(&self, level: Level) -> LinkRate {
        match level {
            Level::Inside => self.inside,
            Level::Between => self.between,
        }
    }

    /// The card of its node that a rank's messages to other nodes leave by: ranks are spread evenly, in order.
    pub const fn card(&self, rank: usize) -> usize {
        let node = rank / self.ranks_per_node;
        node * self.cards_per_node + rank % self.ranks_per_node * self.cards_per_node / self.ranks_per_node
    }

    /// The most ranks that share one card.
    pub const fn ranks_per_card(&self) -> usize {
        self.ranks_per_node.div_ceil(self.cards_per_node)
    }

    /// The rate of a kernel: that of its shape, or where the description does not have it that of the shape with the
    /// same element type and direction whose dims are nearest. The second value says whether the shape is the one asked
    /// for.
    ///
    /// # Errors
    /// [`Error::Invalid`] if no kernel has that element type and direction.
    pub fn kernel(&self, shape: KernelShape) -> Result<(KernelRate, bool)> {
        let distance =
            |k: &KernelRate| k.shape.head_dim.abs_diff(shape.head_dim) + k.shape.value_dim.abs_diff(shape.value_dim);
        let fits = |k: &&KernelRate| (k.shape.dtype, k.shape.backward) == (shape.dtype, shape.backward);
        match self.kernels.iter().filter(fits).min_by_key(|k| distance(k)) {
            Some(k) => Ok((*k, distance(k) == 0)),
            None => Err(Error::invalid(
                "machine",
                format!("{} without a {} kernel of {}", self.name, direction(shape.backward), shape.dtype),
                "one for the problem's element type and both directions",
            )
            .hint("add a line `kernel DTYPE HEAD_DIM/VALUE_DIM forward = rate …` to the description, and one for backward")),
        }
    }
}

impl KernelRate {
    /// Seconds of one call: `flops` of all heads together, `rows` and `keys` times heads.
    pub fn seconds(&self, flops: f64, rows: f64, keys: f64) -> f64 {
        self.call + flops / self.rate + rows * self.row + keys * self.key
    }
}

const fn direction(backward: bool) -> &'static str {
    if backward { "backward" } else { "forward" }
}

#[cfg(test)]
mod tests;
