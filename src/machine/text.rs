// SPDX-License-Identifier: MIT OR Apache-2.0
//! Machine descriptions as text: a line for each figure, `#` begins a comment.
//!
//! ```text
//! name = one host
//! estimate = no
//! ranks_per_node = 4
//! cards_per_node = 1
//! cores = 2                       # only where ranks compute and copy on the cores of their node
//! nodes_share_cores = yes         # only where all nodes run on the same cores: hosts made on one machine
//! memory = 8e9                    # bytes of a rank
//! operation = 2e-6                # seconds
//! copy = 1e10                     # bytes per second
//! inside.latency = 4e-6           # seconds
//! inside.rate = 8e9               # bytes per second
//! between.latency = 3e-5
//! between.rate = 1.25e9
//! between.burst = 2.6e5           # bytes; only where a rate limit lets so many pass at once after a pause
//! between.work = 4e-10            # seconds of a core per byte; only where messages between nodes need cores
//! kernel f32 64/64 forward = rate 6e10, row 2e-7, key 1e-8, edge 3e-8, call 3e-6
//! ```
//!
//! Every key without "only" must be there, once. An error names the line.

use alloc::{
    collections::BTreeMap,
    format,
    string::{String, ToString},
    vec::Vec,
};
use core::fmt;

use super::figures::{KernelRate, KernelShape, LinkRate, Machine, direction, figure_fits};
use crate::{
    element::Dtype,
    error::{Error, Result},
};

/// The keys that every description has, and those that only some have.
const KEYS: [&str; 11] = [
    "name",
    "estimate",
    "ranks_per_node",
    "cards_per_node",
    "memory",
    "operation",
    "copy",
    "inside.latency",
    "inside.rate",
    "between.latency",
    "between.rate",
];
const OPTIONAL_KEYS: [&str; 4] = ["cores", "nodes_share_cores", "between.burst", "between.work"];
const KERNEL_FIGURES: [&str; 5] = ["rate", "row", "key", "edge", "call"];
const DTYPES: [Dtype; 4] = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64];

/// A line without its comment.
#[derive(Clone, Copy)]
struct FigureLine<'a> {
    line: usize,
    key: &'a str,
    value: &'a str,
}

impl FigureLine<'_> {
    fn place(&self) -> String {
        format!("line {} of the machine description", self.line)
    }

    fn refuse(&self, figure: &str, expected: &str) -> Error {
        let found = if figure.is_empty() { "empty" } else { figure };
        Error::invalid(format!("{}, {}", self.place(), self.key), found, expected)
    }

    /// A number: above 0, or if `zero` is true also 0.
    fn number(&self, figure: &str, zero: bool) -> Result<f64> {
        let number = figure.trim().parse().unwrap_or(f64::NAN);
        figure_fits(number, zero).map_err(|expected| self.refuse(figure.trim(), expected))?;
        Ok(number)
    }

    fn above_zero(&self) -> Result<f64> {
        self.number(self.value, false)
    }

    fn zero_or_more(&self) -> Result<f64> {
        self.number(self.value, true)
    }

    fn count(&self) -> Result<usize> {
        self.value.parse().ok().filter(|n| *n > 0).ok_or_else(|| self.refuse(self.value, "a whole number above 0"))
    }

    fn yes(&self) -> Result<bool> {
        match self.value {
            "yes" => Ok(true),
            "no" => Ok(false),
            other => Err(self.refuse(other, "yes or no")),
        }
    }
}

impl Machine {
    /// Reads a description.
    ///
    /// # Errors
    /// [`Error::Invalid`] that names the line and the key: a line that is not `key = value`, an unknown key, a key
    /// given twice, a figure that is missing, negative or not a number.
    ///
    /// ```
    /// use cpattn::Machine;
    /// let text = Machine::parse("copy = -1").unwrap_err().to_string();
    /// assert_eq!(text, "line 1 of the machine description, copy is -1, expected a number above 0");
    /// ```
    pub fn parse(description: &str) -> Result<Self> {
        parse(description)
    }
}

fn parse(text: &str) -> Result<Machine> {
    // Some editors begin a file with a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let nothing = LinkRate { latency: 0.0, rate: 0.0 };
    let mut m = Machine {
        name: String::new(),
        estimate: false,
        ranks_per_node: 0,
        cards_per_node: 0,
        cores: None,
        nodes_share_cores: false,
        memory: 0.0,
        operation: 0.0,
        copy: 0.0,
        inside: nothing,
        between: nothing,
        between_burst: 0.0,
        between_work: 0.0,
        kernels: Vec::new(),
    };
    let mut seen: BTreeMap<String, FigureLine<'_>> = BTreeMap::new();
    for (i, line) in text.lines().enumerate() {
        let content = line.split('#').next().unwrap_or("").trim();
        if content.is_empty() {
            continue;
        }
        let (key, value) = content.split_once('=').map_or((content, None), |(key, value)| (key, Some(value)));
        let entry = FigureLine { line: i + 1, key: key.trim(), value: value.unwrap_or("").trim() };
        if value.is_none() {
            let error = Error::invalid(entry.place(), format!("{content:?}"), "key = value");
            let alone = text.lines().nth(1).is_none();
            return Err(if alone { error.hint("give the text of the file, not its path") } else { error });
        }
        let mut key = entry.key.to_string();
        match entry.key {
            "name" if entry.value.is_empty() => return Err(entry.refuse("", "a name")),
            "name" => m.name = entry.value.into(),
            "estimate" => m.estimate = entry.yes()?,
            "ranks_per_node" => m.ranks_per_node = entry.count()?,
            "cards_per_node" => m.cards_per_node = entry.count()?,
            "cores" => m.cores = Some(entry.count()?),
            "nodes_share_cores" => m.nodes_share_cores = entry.yes()?,
            "memory" => m.memory = entry.above_zero()?,
            "operation" => m.operation = entry.zero_or_more()?,
            "copy" => m.copy = entry.above_zero()?,
            "inside.latency" => m.inside.latency = entry.zero_or_more()?,
            "inside.rate" => m.inside.rate = entry.above_zero()?,
            "between.latency" => m.between.latency = entry.zero_or_more()?,
            "between.rate" => m.between.rate = entry.above_zero()?,
            "between.burst" => m.between_burst = entry.zero_or_more()?,
            "between.work" => m.between_work = entry.zero_or_more()?,
            other => match other.strip_prefix("kernel").filter(|shape| shape.starts_with(char::is_whitespace)) {
                Some(shape) => {
                    let rate = kernel(&entry, shape)?;
                    // One shape can be written in several ways: with more spaces, or with a 0 before a dim.
                    key = format!("kernel {}", rate.shape);
                    m.kernels.push(rate);
                }
                None => {
                    let expected = format!("{}, {} or kernel", KEYS.join(", "), OPTIONAL_KEYS.join(", "));
                    return Err(Error::invalid(entry.place(), format!("{other:?}"), expected));
                }
            },
        }
        if let Some(first) = seen.get(&key) {
            let expected = format!("one line for {key}: line {} has it", first.line);
            return Err(Error::invalid(entry.place(), format!("{key} again"), expected));
        }
        seen.insert(key, entry);
    }
    let missing = |key: &str, expected: String| {
        let found = format!("without {key} in its {} lines", text.lines().count());
        Err(Error::invalid("the machine description", found, expected))
    };
    if let Some(key) = KEYS.into_iter().find(|key| !seen.contains_key(*key)) {
        return missing(key, format!("a line {key} = …"));
    }
    if m.kernels.is_empty() {
        return missing("a kernel", "a line kernel DTYPE HEAD_DIM/VALUE_DIM forward = rate …".into());
    }
    for entry in ["nodes_share_cores", "between.work"].into_iter().filter_map(|key| seen.get(key)) {
        if m.cores.is_none() {
            return Err(entry.refuse(&format!("{}, without cores", entry.value), "a line cores = … beside it"));
        }
    }
    Ok(m)
}

/// `DTYPE HEAD_DIM/VALUE_DIM forward|backward` and its five figures.
fn kernel(entry: &FigureLine<'_>, shape: &str) -> Result<KernelRate> {
    let shape = kernel_shape(shape).ok_or_else(|| {
        let expected = "kernel DTYPE HEAD_DIM/VALUE_DIM forward or backward, such as kernel bf16 128/128 forward";
        Error::invalid(entry.place(), format!("{:?}", entry.key), expected)
    })?;
    let mut figures = [None; 5];
    for part in entry.value.split(',').map(str::trim) {
        let (name, figure) = part.split_once(char::is_whitespace).unwrap_or((part, ""));
        let Some(i) = KERNEL_FIGURES.iter().position(|f| *f == name) else {
            return Err(entry.refuse(part, "rate, row, key, edge and call, each with a number"));
        };
        if figures[i].is_some() {
            return Err(entry.refuse(part, "each of rate, row, key, edge and call once"));
        }
        let named = FigureLine { key: &format!("{}: {name}", entry.key), ..*entry };
        figures[i] = Some(named.number(figure, i > 0)?);
    }
    if let Some(i) = figures.iter().position(Option::is_none) {
        let expected = format!("{} with a number, beside the others", KERNEL_FIGURES[i]);
        return Err(entry.refuse(entry.value, &expected));
    }
    let [rate, row, key, edge, call] = figures.map(|f| f.unwrap_or(0.0));
    Ok(KernelRate { shape, rate, row, key, edge, call })
}

fn kernel_shape(text: &str) -> Option<KernelShape> {
    let mut words = text.split_whitespace();
    let (dtype, dims, way) = (words.next()?, words.next()?, words.next()?);
    let (head_dim, value_dim) = dims.split_once('/')?;
    let dim = |text: &str| text.parse().ok().filter(|n| *n > 0);
    Some(KernelShape {
        dtype: DTYPES.into_iter().find(|d| d.name() == dtype)?,
        head_dim: dim(head_dim)?,
        value_dim: dim(value_dim)?,
        backward: match way {
            "forward" => false,
            "backward" => true,
            _ => return None,
        },
    })
    .filter(|_| words.next().is_none())
}

impl fmt::Display for KernelShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{} {}", self.dtype, self.head_dim, self.value_dim, direction(self.backward))
    }
}

/// The description in the form that [`Machine::parse`] reads, unless a field has a value that no description has.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A name must fit in one line and have no `#`, which would begin a comment.
        let name: String = self.name.chars().map(|c| if matches!(c, '\n' | '\r' | '#') { ' ' } else { c }).collect();
        writeln!(f, "name = {}", name.trim())?;
        writeln!(f, "estimate = {}", if self.estimate { "yes" } else { "no" })?;
        writeln!(f, "ranks_per_node = {}\ncards_per_node = {}", self.ranks_per_node, self.cards_per_node)?;
        if let Some(cores) = self.cores {
            writeln!(f, "cores = {cores}")?;
        }
        if self.nodes_share_cores {
            writeln!(f, "nodes_share_cores = yes")?;
        }
        writeln!(f, "memory = {:e}\noperation = {:e}\ncopy = {:e}", self.memory, self.operation, self.copy)?;
        for (name, link) in [("inside", self.inside), ("between", self.between)] {
            writeln!(f, "{name}.latency = {:e}\n{name}.rate = {:e}", link.latency, link.rate)?;
        }
        for (name, figure) in [("burst", self.between_burst), ("work", self.between_work)] {
            if figure > 0.0 {
                writeln!(f, "between.{name} = {figure:e}")?;
            }
        }
        for k in &self.kernels {
            let KernelRate { shape, rate, row, key, edge, call } = k;
            writeln!(f, "kernel {shape} = rate {rate:e}, row {row:e}, key {key:e}, edge {edge:e}, call {call:e}")?;
        }
        Ok(())
    }
}
