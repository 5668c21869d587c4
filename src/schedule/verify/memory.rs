// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank's memory as the proof models it: the caller's tensors and the buffers of the workspace, each a table of
//! cells, one for each row and head, stored as runs of rows (`column`). Buffers that share bytes have separate tables;
//! a write to one makes the others undefined in those bytes.
//!
//! If every view of every rank takes all heads of its buffer, all heads of a row always have the same content, except
//! for the head's number. Then one cell, with the number of the first head, stands for the row (`whole_rows`).

use alloc::{format, vec::Vec};
use core::ops::{Deref, DerefMut};

use super::{cell::Cell, column::Column, flaw::flaw};
use crate::{
    batch::Side,
    element::Dtype,
    error::Result,
    schedule::{Buf, BufferView, Schedule, TensorForm, TensorId},
};

/// One column for each head, or one for all; none for an absent tensor. A single column is stored inline, because
/// nearly every step of the proof reads a column of another rank.
#[derive(Clone, Debug)]
pub(super) enum Columns {
    One(Column),
    Each(Vec<Column>),
}

impl Columns {
    /// Columns of undefined rows.
    fn unset(rows: u64, columns: u32) -> Self {
        (0..columns).map(|_| Column::unset(rows)).collect()
    }
}

impl FromIterator<Column> for Columns {
    fn from_iter<I: IntoIterator<Item = Column>>(columns: I) -> Self {
        let mut each: Vec<Column> = columns.into_iter().collect();
        if each.len() == 1 { each.pop().map_or(Self::Each(each), Self::One) } else { Self::Each(each) }
    }
}

impl Deref for Columns {
    type Target = [Column];

    fn deref(&self) -> &[Column] {
        match self {
            Self::One(column) => core::slice::from_ref(column),
            Self::Each(columns) => columns,
        }
    }
}

impl DerefMut for Columns {
    fn deref_mut(&mut self) -> &mut [Column] {
        match self {
            Self::One(column) => core::slice::from_mut(column),
            Self::Each(columns) => columns,
        }
    }
}

/// A table of cells.
#[derive(Clone, Debug)]
pub(super) struct CellTable {
    pub name: &'static str,
    pub rows: u64,
    pub heads: u32,
    pub dim: u32,
    pub dtype: Dtype,
    columns: Columns,
    /// First byte in the workspace.
    offset: u64,
    /// Tables that share some of its bytes.
    aliases: Vec<usize>,
}

impl CellTable {
    /// A tensor of the caller and its initial content; absent if it has no form.
    pub(super) fn of_user(tensor: TensorId, form: Option<TensorForm>, columns: Columns) -> Self {
        let ([rows, heads, dim], dtype) = form.map_or(([0; 3], Dtype::F32), |f| (f.shape, f.dtype));
        let (name, rows, heads, dim) = (tensor.name(), rows as u64, heads as u32, dim as u32);
        Self { name, rows, heads, dim, dtype, columns, offset: 0, aliases: Vec::new() }
    }

    /// Bytes of a head of a row.
    pub(super) fn cell_bytes(&self) -> u64 {
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
    /// Cell of the first row.
    pub cell: Cell,
}

#[derive(Clone, Debug)]
pub(super) struct Memory {
    rank: usize,
    whole_rows: bool,
    tables: Vec<CellTable>,
}

fn table_of(buf: Buf) -> usize {
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
    /// The caller's tensors, in the order of [`TensorId`], and the buffers of a schedule, which lie in its workspace.
    /// `whole_rows`: a cell for a row.
    pub(super) fn new(s: &Schedule, mut tables: Vec<CellTable>, whole_rows: bool) -> Self {
        tables.extend(s.buffers.iter().map(|b| CellTable {
            columns: Columns::unset(b.rows, if whole_rows { b.heads.min(1) } else { b.heads }),
            name: b.name,
            rows: b.rows,
            heads: b.heads,
            dim: b.dim,
            dtype: b.dtype,
            offset: b.offset,
            aliases: Vec::new(),
        }));
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
        Self { rank: s.rank, whole_rows, tables }
    }

    pub(super) fn table(&self, buf: Buf) -> &CellTable {
        &self.tables[table_of(buf)]
    }

    pub(super) fn name(&self, buf: Buf) -> &'static str {
        self.table(buf).name
    }

    fn column(&self, v: &BufferView, head: u32) -> usize {
        if self.whole_rows { 0 } else { (v.head + head) as usize }
    }

    /// The heads of a view that have cells of their own: all of them, or only the first, which stands for all.
    pub(super) fn heads(&self, v: &BufferView) -> core::iter::StepBy<core::ops::Range<u32>> {
        (0..v.heads).step_by(if self.whole_rows { v.heads.max(1) as usize } else { 1 })
    }

    /// The content of a row of a view, and the number of rows from it to the end of its run.
    pub(super) fn at(&self, v: &BufferView, row: u64, head: u32) -> (Cell, u64) {
        self.table(v.buf).columns[self.column(v, head)].at(v.row + row)
    }

    /// The runs of rows `row..row + rows` of a view: the first row of each, the number of rows, the content.
    pub(super) fn runs(
        &self,
        v: &BufferView,
        row: u64,
        rows: u64,
        head: u32,
    ) -> impl Iterator<Item = (u64, u64, Cell)> + '_ {
        let (first, from) = (v.row + row, v.row);
        let runs = self.table(v.buf).columns[self.column(v, head)].runs(first, first + rows);
        runs.map(move |(row, rows, cell)| (row - from, rows, cell))
    }

    /// Sets the initial content of a row of a view.
    pub(super) fn set(&mut self, v: &BufferView, row: u64, head: u32, cell: Cell) {
        let (column, at) = (self.column(v, head), v.row + row);
        self.tables[table_of(v.buf)].columns[column].write(at, at + 1, core::iter::once((at, cell)));
    }

    /// Marks those cells of rows `row..row + rows` of a view as read for which `counts` is true.
    pub(super) fn read(&mut self, v: &BufferView, row: u64, rows: u64, head: u32, counts: impl Fn(&Cell) -> bool) {
        let (column, first) = (self.column(v, head), v.row + row);
        self.tables[table_of(v.buf)].columns[column].read(first, first + rows, counts);
    }

    /// Writes rows `row..row + rows` of all heads of a view, head by head, in pieces, by operation `op`.
    pub(super) fn write(&mut self, op: usize, v: &BufferView, row: u64, rows: u64, pieces: &[Piece]) -> Result<()> {
        if v.heads == 0 || rows == 0 {
            return Ok(());
        }
        let t = table_of(v.buf);
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

    /// Makes the content of other tables in bytes `low..high` undefined.
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

    /// Checks that no unread row is overwritten.
    fn lost(&self, t: usize, column: usize, first: u64, end: u64) -> Result<()> {
        let table = &self.tables[t];
        let Some((row, cell)) = table.columns[column].unread(first, end) else { return Ok(()) };
        let how = if cell.strict { "is fetched but meets no key or query" } else { "is written but never read" };
        let text = format!("row {row}, head {column} of {} ({}) {how}", table.name, cell.describe());
        Err(flaw(self.rank, cell.unread as usize - 1, text))
    }

    /// Checks at the end that every row written has been read, except the caller's results.
    pub(super) fn check_all_read(&self) -> Result<()> {
        let mut buffers = self.tables.iter().enumerate().skip(TensorId::COUNT);
        buffers.try_for_each(|(t, table)| {
            (0..table.columns.len()).try_for_each(|column| self.lost(t, column, 0, table.rows))
        })
    }
}
