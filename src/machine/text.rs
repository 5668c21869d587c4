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

const KERNEL_FIGURES: [&str; 5] = ["rate", "row", "key", "edge", "call"];
const DTYPES: [Dtype; 4] = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64];

/// A line without its comment.
struct FigureLine<'a> {
    line: usize,
    key: &'a str,
    value: &'a str,
}

impl FigureLine<'_> {
    fn refuse(&self, figure: &str, expected: &str) -> Error {
        let found = if figure.is_empty() { "empty" } else { figure };
        Error::invalid(format!("line {} of the machine description, {}", self.line, self.key), found, expected)
    }

    /// A number: above 0, or if `zero` is true also 0.
    fn number(&self, figure: &str, zero: bool) -> Result<f64> {
        let number = figure.trim().parse().unwrap_or(f64::NAN);
        figure_fits(number, zero).map_err(|expected| self.refuse(figure.trim(), expected))?;
        Ok(number)
    }

    fn count(&self) -> Result<usize> {
        self.value.parse().ok().filter(|n| *n > 0).ok_or_else(|| self.refuse(self.value, "a whole number above 0"))
    }
}

/// All entries; no key occurs twice.
struct FigureLines<'a> {
    list: Vec<FigureLine<'a>>,
    lines: usize,
}

impl<'a> FigureLines<'a> {
    fn read(text: &'a str) -> Result<Self> {
        let (mut list, mut line_of) = (Vec::new(), BTreeMap::new());
        // Some editors begin a file with a byte order mark.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        for (i, line) in text.lines().enumerate() {
            let content = line.split('#').next().unwrap_or("").trim();
            if content.is_empty() {
                continue;
            }
            let place = format!("line {} of the machine description", i + 1);
            let Some((key, value)) = content.split_once('=') else {
                let error = Error::invalid(place, format!("{content:?}"), "key = value");
                let alone = text.lines().nth(1).is_none();
                return Err(if alone { error.hint("give the text of the file, not its path") } else { error });
            };
            let entry = FigureLine { line: i + 1, key: key.trim(), value: value.trim() };
            if let Some(first) = line_of.insert(entry.key, entry.line) {
                return Err(twice(entry.line, entry.key, first));
            }
            list.push(entry);
        }
        Ok(Self { list, lines: text.lines().count() })
    }

    fn take_if_there(&mut self, key: &str) -> Option<FigureLine<'a>> {
        self.list.iter().position(|e| e.key == key).map(|i| self.list.remove(i))
    }

    fn take(&mut self, key: &str) -> Result<FigureLine<'a>> {
        self.take_if_there(key).ok_or_else(|| {
            let found = format!("without {key} in its {} lines", self.lines);
            Error::invalid("the machine description", found, format!("a line {key} = …"))
        })
    }

    fn figure(&mut self, key: &str, zero: bool) -> Result<f64> {
        let entry = self.take(key)?;
        entry.number(entry.value, zero)
    }

    /// A figure that may be missing; then it is 0.
    fn figure_if_there(&mut self, key: &str) -> Result<f64> {
        self.take_if_there(key).map_or(Ok(0.0), |entry| entry.number(entry.value, true))
    }

    /// Refuses a key about cores if the description has no cores.
    fn needs_cores(&self, key: &str, cores: Option<usize>) -> Result<()> {
        match self.list.iter().find(|e| e.key == key && cores.is_none()) {
            Some(e) => Err(e.refuse(&format!("{}, without cores", e.value), "a line cores = … beside it")),
            None => Ok(()),
        }
    }
}

fn twice(line: usize, key: &str, first: usize) -> Error {
    let (place, found) = (format!("line {line} of the machine description"), format!("{key} again"));
    Error::invalid(place, found, format!("one line for {key}: line {first} has it"))
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
    let mut entries = FigureLines::read(text)?;
    // Values are checked before missing keys are: a wrong value is reported first.
    let mut kernels: Vec<KernelRate> = Vec::new();
    // One shape can be written in several ways: with more spaces, or with a 0 before a dim.
    let mut line_of = BTreeMap::new();
    let mut rest = Vec::new();
    for entry in entries.list.drain(..) {
        match entry.key.strip_prefix("kernel").filter(|shape| shape.starts_with(char::is_whitespace)) {
            Some(shape) => {
                let rate = kernel(&entry, shape)?;
                if let Some(first) = line_of.insert(rate.shape.to_string(), entry.line) {
                    return Err(twice(entry.line, &format!("kernel {}", rate.shape), first));
                }
                kernels.push(rate);
            }
            None => {
                check(&entry)?;
                rest.push(entry);
            }
        }
    }
    entries.list = rest;
    let name = entries.take("name")?.value.to_string();
    let estimate = entries.take("estimate")?.value == "yes";
    let cores = entries.take_if_there("cores").map(|e| e.count()).transpose()?;
    for key in ["nodes_share_cores", "between.work"] {
        entries.needs_cores(key, cores)?;
    }
    let machine = Machine {
        name,
        estimate,
        nodes_share_cores: entries.take_if_there("nodes_share_cores").is_some_and(|e| e.value == "yes"),
        ranks_per_node: entries.take("ranks_per_node")?.count()?,
        cards_per_node: entries.take("cards_per_node")?.count()?,
        cores,
        memory: entries.figure("memory", false)?,
        operation: entries.figure("operation", true)?,
        copy: entries.figure("copy", false)?,
        inside: LinkRate {
            latency: entries.figure("inside.latency", true)?,
            rate: entries.figure("inside.rate", false)?,
        },
        between: LinkRate {
            latency: entries.figure("between.latency", true)?,
            rate: entries.figure("between.rate", false)?,
        },
        between_burst: entries.figure_if_there("between.burst")?,
        between_work: entries.figure_if_there("between.work")?,
        kernels,
    };
    if machine.kernels.is_empty() {
        let found = format!("without a kernel in its {} lines", entries.lines);
        let expected = "a line kernel DTYPE HEAD_DIM/VALUE_DIM forward = rate …";
        return Err(Error::invalid("the machine description", found, expected));
    }
    Ok(machine)
}

/// Refuses an unknown key, and a value that its key cannot have.
fn check(entry: &FigureLine<'_>) -> Result<()> {
    match entry.key {
        "name" if entry.value.is_empty() => Err(entry.refuse(entry.value, "a name")),
        "name" => Ok(()),
        "estimate" | "nodes_share_cores" if matches!(entry.value, "yes" | "no") => Ok(()),
        "estimate" | "nodes_share_cores" => Err(entry.refuse(entry.value, "yes or no")),
        "ranks_per_node" | "cards_per_node" | "cores" => entry.count().map(drop),
        "operation" | "inside.latency" | "between.latency" | "between.burst" | "between.work" => {
            entry.number(entry.value, true).map(drop)
        }
        "memory" | "copy" | "inside.rate" | "between.rate" => entry.number(entry.value, false).map(drop),
        key => Err(Error::invalid(
            format!("line {} of the machine description", entry.line),
            format!("{key:?}"),
            "name, estimate, ranks_per_node, cards_per_node, cores, nodes_share_cores, memory, operation, copy, inside.latency, \
             inside.rate, between.latency, between.rate, between.burst, between.work or kernel",
        )),
    }
}

/// `DTYPE HEAD_DIM/VALUE_DIM forward|backward` and its five figures.
fn kernel(entry: &FigureLine<'_>, shape: &str) -> Result<KernelRate> {
    let shape = kernel_shape(shape).ok_or_else(|| {
        Error::invalid(
            format!("line {} of the machine description", entry.line),
            format!("{:?}", entry.key),
            "kernel DTYPE HEAD_DIM/VALUE_DIM forward or backward, such as kernel bf16 128/128 forward",
        )
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
