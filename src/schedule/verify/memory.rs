// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank's memory, as the proof sees it: the caller's tensors and the buffers of the workspace, each a table of
//! cells, one for each row and head, kept as runs of rows (`column`). Buffers that share bytes are kept apart; a write to one forgets what the others
//! held in those bytes.
//!
//! Where every view of every rank takes all heads of its buffer, all heads of a row hold the same at any time, but for their
//! number. One cell, named by the first head, then stands for the row (`whole_rows`).

use alloc::{format, string::String, vec, vec::Vec};

use super::{cell::Cell, column::Column, flaw::flaw};
use crate::{
    batch::Side,
    element::Dtype,
    error::Result,
    schedule::{ALIGNMENT, Buf, BufferView, Schedule, TensorId},
};

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
    /// One for each head, or one; none of an absent tensor.
    columns: Vec<Column>,
    /// First byte in the workspace.
    offset: u64,
    /// Tables that share some of its bytes.
    aliases: Vec<usize>,
}

impl CellTable {
    /// A tensor of the caller's, by rows of heads: what it holds at first, or that it is absent.
    pub fn of_user(tensor: TensorId, shape: [u64; 3], dtype: Dtype, access: Access, columns: Vec<Column>) -> Self {
        let [rows, heads, dim] = shape;
        let (name, heads, dim) = (tensor.name(), heads as u32, dim as u32);
        Self { name, rows, heads, dim, dtype, access, columns, offset: 0, aliases: Vec::new() }
    }

    /// Bytes of a head of a row.
    pub fn cell_bytes(&self) -> u64 {
        u64::from(self.dim) * self.dtype.size() as u64
    }

    /// Bytes that a cell stands for.
    fn column_bytes(&self) -> u64 {
        self.cell_bytes() * u64::from(self.heads / (self.columns.len() as u32).max(1))
    }

    fn cells(&self) -> u64 {
        self.rows * self.columns.len() as u64
    }
}

/// A run of rows of one head of a view, up to the next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub head: u32,
    pub row: u64,
    /// Of the first row.
    pub cell: Cell,
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
                    columns: vec![Column::unset(b.rows); columns as usize],
                    name: b.name,
                    rows: b.rows,
                    heads: b.heads,
                    dim: b.dim,
                    dtype: b.dtype,
                    access: Access::Work,
                    offset: b.offset,
                    aliases: Vec::new(),
                });
                continue;
            };
            return Err(flaw(s.rank, 0, text));
        }
        let span = |t: &CellTable| (t.offset, t.offset + t.cells() * t.column_bytes());
        let mut by_offset: Vec<usize> = (TensorId::COUNT..tables.len()).filter(|&i| tables[i].cells() > 0).collect();
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

    /// Whether a cell stands for all heads of a row.
    pub fn takes_whole_rows(&self) -> bool {
        self.whole_rows
    }

    fn column(&self, v: &BufferView, head: u32) -> usize {
        if self.whole_rows { 0 } else { (v.head + head) as usize }
    }

    /// The heads of a view that have cells of their own: all, or the first for all.
    pub fn heads(&self, v: &BufferView) -> core::iter::StepBy<core::ops::Range<u32>> {
        (0..v.heads).step_by(if self.whole_rows { v.heads.max(1) as usize } else { 1 })
    }

    /// What a row of a view holds, and for how many rows from it on the run goes.
    pub fn at(&self, v: &BufferView, row: u64, head: u32) -> (Cell, u64) {
        self.table(v.buf).columns[self.column(v, head)].at(v.row + row)
    }

    /// Lets a row of a view hold something from the beginning.
    pub fn set(&mut self, v: &BufferView, row: u64, head: u32, cell: Cell) {
        let (column, at) = (self.column(v, head), v.row + row);
        self.tables[table_of(v.buf)].columns[column].write(at, at + 1, core::iter::once((at, cell)));
    }

    /// Marks those cells of rows `row..row + rows` of a view as read that `counts` says.
    pub fn read(&mut self, v: &BufferView, row: u64, rows: u64, head: u32, counts: impl Fn(&Cell) -> bool) {
        let (column, first) = (self.column(v, head), v.row + row);
        self.tables[table_of(v.buf)].columns[column].read(first, first + rows, counts);
    }

    /// Writes rows `row..row + rows` of all heads of a view, head by head in pieces. `op` is the operation that writes.
    pub fn write(&mut self, op: usize, v: &BufferView, row: u64, rows: u64, pieces: &[Piece]) -> Result<()> {
        if v.heads == 0 || rows == 0 {
            return Ok(());
        }
        let t = table_of(v.buf);
        if matches!(self.tables[t].access, Access::Input | Access::Absent) {
            return Err(flaw(self.rank, op, format!("writes {}, which is only read", self.tables[t].name)));
        }
        let (first, end) = (v.row + row, v.row + row + rows);
        for of_head in pieces.chunk_by(|a, b| a.head == b.head) {
            let column = self.column(v, of_head[0].head);
            self.lost(t, column, first, end)?;
            let runs = of_head.iter().map(|p| (v.row + p.row, Cell { unread: op as u32 + 1, ..p.cell }));
            self.tables[t].columns[column].write(first, end, runs);
        }
        if self.tables[t].aliases.is_empty() {
            return Ok(());
        }
        let (offset, heads, bytes) =
            (self.tables[t].offset, u64::from(self.tables[t].heads), self.tables[t].cell_bytes());
        let at = |row: u64, head: u32| offset + (row * heads + u64::from(head)) * bytes;
        if u64::from(v.heads) == heads {
            return self.forget(t, at(first, 0), at(end, 0));
        }
        (first..end).try_for_each(|row| self.forget(t, at(row, v.head), at(row, v.head + v.heads)))
    }

    /// Forgets what other tables held in bytes `low..high`.
    fn forget(&mut self, writer: usize, low: u64, high: u64) -> Result<()> {
        for n in 0..self.tables[writer].aliases.len() {
            let j = self.tables[writer].aliases[n];
            let (bytes, offset) = (self.tables[j].column_bytes(), self.tables[j].offset);
            let from = low.saturating_sub(offset) / bytes;
            let to = high.saturating_sub(offset).div_ceil(bytes).min(self.tables[j].cells());
            let columns = self.tables[j].columns.len() as u64;
            for c in 0..columns {
                let row = |cell: u64| cell.saturating_sub(c).div_ceil(columns);
                let (first, end) = (row(from), row(to));
                self.lost(j, c as usize, first, end)?;
                self.tables[j].columns[c as usize].write(first, end, core::iter::once((first, Cell::UNSET)));
            }
        }
        Ok(())
    }

    /// That nothing unread is overwritten.
    fn lost(&self, t: usize, column: usize, first: u64, end: u64) -> Result<()> {
        let table = &self.tables[t];
        let Some((row, cell)) = table.columns[column].unread(first, end) else { return Ok(()) };
        let how = if cell.strict { "is fetched but meets no key or query" } else { "is written but never read" };
        let text = format!("row {row}, head {column} of {} ({}) {how}", table.name, cell.describe());
        Err(flaw(self.rank, cell.unread as usize - 1, text))
    }

    /// That, at the end, everything written but the caller's results was read.
    pub fn check_all_read(&self) -> Result<()> {
        for (t, table) in self.tables.iter().enumerate() {
            if table.access == Access::Work {
                (0..table.columns.len()).try_for_each(|column| self.lost(t, column, 0, table.rows))?;
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
