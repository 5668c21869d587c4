// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank's memory, as the proof sees it: the caller's tensors and the buffers of the workspace, each a table of
//! cells, one for each row and head. Buffers that share bytes are kept apart; a write to one forgets what the others
//! held in those bytes.
//!
//! Where every view of every rank takes all heads of its buffer, all heads of a row hold the same at any time, but for their
//! number. One cell, named by the first head, then stands for the row (`whole_rows`).

use alloc::{format, string::String, vec, vec::Vec};

use super::flaw::flaw;
use crate::{
    batch::Side,
    element::Dtype,
    error::Result,
    schedule::{ALIGNMENT, Buf, BufferView, Schedule, TensorId},
};

/// What a cell holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum What {
    /// Nothing that may be read.
    Unset,
    /// Zeros.
    Zero,
    /// The caller's, as it was given.
    Input(TensorId),
    /// `rowsum(do ∘ o)`.
    Delta,
    /// A running o or lse.
    Running(TensorId),
    /// A final o or lse.
    Final(TensorId),
    /// A sum of contributions to a gradient.
    Sum(TensorId),
}

/// One head of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    pub what: What,
    /// Token of the packed batch, on the side that `what` belongs to.
    pub token: u32,
    /// Head of the whole problem: a kv head for k, v, dk, dv.
    pub head: u32,
    /// Which contributions; an entry of `Contributions`.
    pub list: u32,
    /// 1 + the operation that wrote it, until it is read.
    pub unread: u32,
    /// It was fetched: only an allowed pair counts as reading it.
    pub strict: bool,
    /// It was fetched from another node: passing it on inside this one counts as well.
    pub crossed: bool,
    /// A sum that was rounded to this type.
    pub rounded: Option<Dtype>,
}

impl Cell {
    pub const UNSET: Self =
        Self { what: What::Unset, token: 0, head: 0, list: 0, unread: 0, strict: false, crossed: false, rounded: None };

    pub const fn new(what: What, token: u32, head: u32, list: u32) -> Self {
        Self { what, token, head, list, ..Self::UNSET }
    }

    pub fn describe(&self) -> String {
        match self.what {
            What::Unset => "nothing".into(),
            What::Zero => "zeros".into(),
            What::Input(t) => format!("{} of token {}, head {}", t.name(), self.token, self.head),
            What::Delta => format!("delta of token {}, head {}", self.token, self.head),
            What::Running(t) => format!("running {} of token {}, head {}", t.name(), self.token, self.head),
            What::Final(t) => format!("final {} of token {}, head {}", t.name(), self.token, self.head),
            What::Sum(t) => format!("a sum of {} of token {}, head {}", t.name(), self.token, self.head),
        }
    }
}

/// Which operations may touch a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Absent,
    Input,
    Output,
    Work,
}

/// A table of cells.
#[derive(Clone, Debug)]
pub(super) struct CellTable {
    pub name: &'static str,
    pub rows: u64,
    pub heads: u32,
    pub dim: u32,
    pub dtype: Dtype,
    pub access: Access,
    /// Cells of a row: one for each head, or one.
    columns: u32,
    /// First byte in the workspace.
    offset: u64,
    /// Tables that share some of its bytes.
    aliases: Vec<usize>,
    cells: Vec<Cell>,
}

impl CellTable {
    /// A tensor of the caller's, by rows of heads: what it holds at first, or that it is absent.
    pub fn of_user(tensor: TensorId, shape: [u64; 3], dtype: Dtype, access: Access, cells: Vec<Cell>) -> Self {
        let [rows, heads, dim] = shape;
        let (name, heads, dim) = (tensor.name(), heads as u32, dim as u32);
        let columns = (cells.len() as u64).checked_div(rows).map_or(heads, |n| n as u32);
        Self { name, rows, heads, dim, dtype, access, columns, offset: 0, aliases: Vec::new(), cells }
    }

    /// Bytes of a head of a row.
    pub fn cell_bytes(&self) -> u64 {
        u64::from(self.dim) * self.dtype.size() as u64
    }

    /// Bytes that a cell stands for.
    fn column_bytes(&self) -> u64 {
        self.cell_bytes() * u64::from(self.heads / self.columns.max(1))
    }
}

/// Rows and heads of a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rect {
    pub table: usize,
    pub row: u64,
    pub rows: u64,
    pub head: u32,
    pub heads: u32,
}

#[derive(Clone, Debug)]
pub(super) struct Memory {
    rank: usize,
    whole_rows: bool,
    tables: Vec<CellTable>,
}

pub(super) fn table_of(buf: Buf) -> usize {
    match buf {
        Buf::User(t) => t as usize,
        Buf::Work(i) => TensorId::COUNT + i as usize,
    }
}

pub(super) fn side_of(tensor: TensorId) -> Side {
    match tensor {
        TensorId::K | TensorId::V | TensorId::Dk | TensorId::Dv => Side::K,
        _ => Side::Q,
    }
}

impl Memory {
    /// The caller's tensors, in the order of [`TensorId`], and the buffers of a schedule. `whole_rows`: a cell for a row.
    ///
    /// # Errors
    /// A buffer that does not lie in the workspace.
    pub fn new(s: &Schedule, mut tables: Vec<CellTable>, whole_rows: bool) -> Result<Self> {
        for b in &s.buffers {
            let bytes = b
                .rows
                .checked_mul(u64::from(b.heads))
                .and_then(|n| n.checked_mul(u64::from(b.dim) * b.dtype.size() as u64))
                .and_then(|n| n.checked_add(b.offset));
            let text = if b.dim == 0 {
                format!("buffer {} has no dim", b.name)
            } else if !b.offset.is_multiple_of(ALIGNMENT) {
                format!("buffer {} begins at byte {}, not at a multiple of {ALIGNMENT}", b.name, b.offset)
            } else if bytes.is_none_or(|end| end > s.workspace) {
                format!("buffer {} does not end inside the workspace of {} bytes", b.name, s.workspace)
            } else {
                let columns = if whole_rows { b.heads.min(1) } else { b.heads };
                tables.push(CellTable {
                    columns,
                    name: b.name,
                    rows: b.rows,
                    heads: b.heads,
                    dim: b.dim,
                    dtype: b.dtype,
                    access: Access::Work,
                    offset: b.offset,
                    aliases: Vec::new(),
                    cells: vec![Cell::UNSET; (b.rows * u64::from(columns)) as usize],
                });
                continue;
            };
            return Err(flaw(s.rank, 0, text));
        }
        let span = |t: &CellTable| (t.offset, t.offset + t.cells.len() as u64 * t.column_bytes());
        let mut by_offset: Vec<usize> =
            (TensorId::COUNT..tables.len()).filter(|&i| !tables[i].cells.is_empty()).collect();
        by_offset.sort_by_key(|&i| tables[i].offset);
        for (n, &i) in by_offset.iter().enumerate() {
            let end = span(&tables[i]).1;
            for &j in &by_offset[n + 1..] {
                if tables[j].offset >= end {
                    break;
                }
                tables[i].aliases.push(j);
                tables[j].aliases.push(i);
            }
        }
        Ok(Self { rank: s.rank, whole_rows, tables })
    }

    pub fn table(&self, buf: Buf) -> &CellTable {
        &self.tables[table_of(buf)]
    }

    pub fn shape(&self, buf: Buf) -> &CellTable {
        self.table(buf)
    }

    pub fn name(&self, buf: Buf) -> &'static str {
        self.table(buf).name
    }

    /// That a view lies inside its table.
    pub fn check_view(&self, v: &BufferView) -> Result<(), String> {
        let Some(t) = self.tables.get(table_of(v.buf)) else {
            return Err(format!("{:?} is no buffer of this schedule", v.buf));
        };
        if t.access == Access::Absent {
            return Err(format!("{} is not given in this direction", t.name));
        }
        let rows = v.row.checked_add(v.rows).is_some_and(|end| end <= t.rows);
        let heads = v.head.checked_add(v.heads).is_some_and(|end| end <= t.heads);
        if !rows || !heads {
            return Err(format!(
                "rows {}+{}, heads {}+{} do not lie in {} of {} rows × {} heads",
                v.row, v.rows, v.head, v.heads, t.name, t.rows, t.heads
            ));
        }
        Ok(())
    }

    fn index(&self, v: &BufferView, row: u64, head: u32) -> (usize, usize) {
        let t = table_of(v.buf);
        let column = if self.whole_rows { 0 } else { v.head + head };
        (t, ((v.row + row) * u64::from(self.tables[t].columns) + u64::from(column)) as usize)
    }

    /// The heads of a view that have cells of their own: all, or the first for all.
    pub fn heads(&self, v: &BufferView) -> core::iter::StepBy<core::ops::Range<u32>> {
        (0..v.heads).step_by(if self.whole_rows { v.heads.max(1) as usize } else { 1 })
    }

    /// A cell of a view.
    pub fn cell(&mut self, v: &BufferView, row: u64, head: u32) -> &mut Cell {
        let (t, i) = self.index(v, row, head);
        &mut self.tables[t].cells[i]
    }

    /// Writes one row of a view, cell by cell. `op` is the operation that writes.
    pub fn write_row(&mut self, op: usize, v: &BufferView, row: u64, mut value: impl FnMut(u32) -> Cell) -> Result<()> {
        if v.heads == 0 {
            return Ok(());
        }
        let (t, first) = self.index(v, row, 0);
        if matches!(self.tables[t].access, Access::Input | Access::Absent) {
            return Err(flaw(self.rank, op, format!("writes {}, which is only read", self.tables[t].name)));
        }
        for (i, h) in (first..).zip(self.heads(v)) {
            self.lost(t, i)?;
            self.tables[t].cells[i] = Cell { unread: op as u32 + 1, ..value(h) };
        }
        if !self.tables[t].aliases.is_empty() {
            let low = self.tables[t].offset + first as u64 * self.tables[t].column_bytes();
            self.forget(t, low, low + u64::from(v.heads) * self.tables[t].cell_bytes())?;
        }
        Ok(())
    }

    /// Forgets what other tables held in bytes `low..high`.
    fn forget(&mut self, writer: usize, low: u64, high: u64) -> Result<()> {
        for n in 0..self.tables[writer].aliases.len() {
            let j = self.tables[writer].aliases[n];
            let (bytes, offset) = (self.tables[j].column_bytes(), self.tables[j].offset);
            let from = low.saturating_sub(offset) / bytes;
            let to = high.saturating_sub(offset).div_ceil(bytes).min(self.tables[j].cells.len() as u64);
            for i in from as usize..to as usize {
                self.lost(j, i)?;
                self.tables[j].cells[i] = Cell::UNSET;
            }
        }
        Ok(())
    }

    /// That nothing unread is overwritten.
    fn lost(&self, t: usize, i: usize) -> Result<()> {
        let (table, cell) = (&self.tables[t], self.tables[t].cells[i]);
        if cell.unread == 0 {
            return Ok(());
        }
        let (row, head) = (i / table.columns as usize, i % table.columns as usize);
        let how = if cell.strict { "is fetched but meets no key or query" } else { "is written but never read" };
        let text = format!("row {row}, head {head} of {} ({}) {how}", table.name, cell.describe());
        Err(flaw(self.rank, cell.unread as usize - 1, text))
    }

    /// That, at the end, everything written but the caller's results was read.
    pub fn check_all_read(&self) -> Result<()> {
        for (t, table) in self.tables.iter().enumerate() {
            if table.access == Access::Work {
                (0..table.cells.len()).try_for_each(|i| self.lost(t, i))?;
            }
        }
        Ok(())
    }

    /// Whether two rectangles share a byte.
    pub fn overlap(&self, a: &Rect, b: &Rect) -> bool {
        if a.rows == 0 || b.rows == 0 || a.heads == 0 || b.heads == 0 {
            return false;
        }
        if a.table == b.table {
            return a.row < b.row + b.rows
                && b.row < a.row + a.rows
                && a.head < b.head + b.heads
                && b.head < a.head + a.heads;
        }
        self.tables[a.table].aliases.contains(&b.table) && self.runs_overlap(a, b)
    }

    /// The bytes of row `i` of a rectangle; of all of it where rows are contiguous.
    fn run(&self, r: &Rect, i: u64) -> (u64, u64) {
        let t = &self.tables[r.table];
        let first = t.offset + ((r.row + i) * u64::from(t.heads) + u64::from(r.head)) * t.cell_bytes();
        let rows = if r.heads == t.heads { r.rows - 1 } else { 0 };
        (first, first + (rows * u64::from(t.heads) + u64::from(r.heads)) * t.cell_bytes())
    }

    fn runs_overlap(&self, a: &Rect, b: &Rect) -> bool {
        let runs = |r: &Rect| if r.heads == self.tables[r.table].heads { 1 } else { r.rows };
        (0..runs(a)).any(|i| {
            let (low, high) = self.run(a, i);
            (0..runs(b)).any(|j| {
                let (l, h) = self.run(b, j);
                low < h && l < high
            })
        })
    }

    /// Calls `each(space, byte)` for every byte of a cell; the workspace is one space.
    #[cfg(test)]
    pub fn bytes_of(&self, table: usize, row: u64, head: u32, mut each: impl FnMut(usize, u64)) {
        let t = &self.tables[table];
        let first = t.offset + (row * u64::from(t.heads) + u64::from(head)) * t.cell_bytes();
        (first..first + t.cell_bytes()).for_each(|byte| each(table.min(TensorId::COUNT), byte));
    }

    pub fn describe(&self, r: &Rect) -> String {
        format!("rows {}+{}, heads {}+{} of {}", r.row, r.rows, r.head, r.heads, self.tables[r.table].name)
    }
}
