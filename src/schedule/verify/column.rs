// SPDX-License-Identifier: MIT OR Apache-2.0
//! The contents of one column of a table, as runs of rows.
//!
//! Rows of a rank's share are runs of a document, and operations move, add to and read whole runs. So rows with equal
//! content, except for a token that increases by one from row to row, are stored as one entry. The cost of the proof
//! then grows with the ranges of operations, not with rows. A run is split where an operation ends inside it, and
//! joined again when its parts have equal content, so that a column depends only on the content of its rows.

use alloc::{vec, vec::Vec};

use super::cell::Cell;

/// Runs in ascending order, each with its first row; the first begins at row 0.
#[derive(Clone, Debug)]
pub(super) struct Column {
    rows: u64,
    runs: Vec<(u64, Cell)>,
}

impl Column {
    /// A column of undefined rows.
    pub(super) fn unset(rows: u64) -> Self {
        Self { rows, runs: if rows > 0 { vec![(0, Cell::UNSET)] } else { Vec::new() } }
    }

    /// Runs that follow each other: their rows, and the cell of the first.
    pub(super) fn of(runs: impl Iterator<Item = (u64, Cell)>) -> Self {
        let mut column = Self { rows: 0, runs: Vec::new() };
        for (rows, cell) in runs.filter(|run| run.0 > 0) {
            column.runs.push((column.rows, cell));
            column.rows += rows;
            column.join(column.runs.len() - 1, column.runs.len());
        }
        column
    }

    /// The index of the run that holds a row.
    fn find(&self, row: u64) -> usize {
        self.runs.partition_point(|run| run.0 <= row) - 1
    }

    fn end(&self, run: usize) -> u64 {
        self.runs.get(run + 1).map_or(self.rows, |next| next.0)
    }

    /// The content of a row, and the number of rows from it to the end of its run.
    pub(super) fn at(&self, row: u64) -> (Cell, u64) {
        let i = self.find(row);
        let (first, cell) = self.runs[i];
        (cell.after(row - first), self.end(i) - row)
    }

    /// The runs that hold rows `first..end`, cut to these rows: the first row of each, the number of rows, the content.
    pub(super) fn runs(&self, first: u64, end: u64) -> impl Iterator<Item = (u64, u64, Cell)> + '_ {
        let from = if first < end { self.find(first) } else { self.runs.len() };
        let within = self.runs[from..].iter().take_while(move |run| run.0 < end);
        (from..).zip(within).map(move |(i, &(row, cell))| {
            let at = row.max(first);
            (at, self.end(i).min(end) - at, cell.after(at - row))
        })
    }

    /// The first of these rows that was written and has not been read.
    pub(super) fn unread(&self, first: u64, end: u64) -> Option<(u64, Cell)> {
        self.runs(first, end).find(|run| run.2.unread > 0).map(|(row, _, cell)| (row, cell))
    }

    /// Writes rows `first..end`: runs that cover them, each with its first row.
    pub(super) fn write(&mut self, first: u64, end: u64, runs: impl Iterator<Item = (u64, Cell)>) {
        if first >= end {
            return;
        }
        let (i, j) = (self.split(first), self.split(end));
        let before = self.runs.len() - (j - i);
        self.runs.splice(i..j, runs);
        self.join(i, i + self.runs.len() - before + 1);
    }

    /// Marks those rows of `first..end` as read for which `counts` is true.
    pub(super) fn read(&mut self, first: u64, end: u64, counts: impl Fn(&Cell) -> bool) {
        let Some((from, _)) = self.unread(first, end) else { return };
        let (i, j) = (self.split(from), self.split(end));
        for (_, cell) in self.runs[i..j].iter_mut().filter(|run| counts(&run.1)) {
            cell.unread = 0;
        }
        self.join(i, j + 1);
    }

    /// Splits a run at a row, and returns the index of the run that begins there.
    fn split(&mut self, row: u64) -> usize {
        if row >= self.rows {
            return self.runs.len();
        }
        let i = self.find(row);
        let (first, cell) = self.runs[i];
        if first == row {
            return i;
        }
        self.runs.insert(i + 1, (row, cell.after(row - first)));
        i + 1
    }

    /// Joins each of runs `from..to` to the run before it, if it continues that run.
    fn join(&mut self, from: usize, to: usize) {
        let (from, to) = (from.max(1), to.min(self.runs.len()));
        if from >= to {
            return;
        }
        let mut kept = from - 1;
        for i in from..to {
            let ((first, before), (row, cell)) = (self.runs[kept], self.runs[i]);
            if before.after(row - first) != cell {
                kept += 1;
                self.runs[kept] = (row, cell);
            }
        }
        self.runs.drain(kept + 1..to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{TensorId, verify::cell::What};

    /// Random writes and reads, against a cell for each row.
    #[test]
    fn runs_hold_what_rows_hold() {
        let mut draw = fastrand::Rng::with_seed(5);
        for rows in [1, 2, 7, 40] {
            let mut column = Column::unset(rows);
            let mut cells = vec![Cell::UNSET; rows as usize];
            for step in 0..3000 {
                let first = draw.u64(..rows);
                let end = draw.u64(first..=rows);
                let span = first as usize..end as usize;
                if draw.bool() {
                    let cell = |row: u64, d: &mut fastrand::Rng| {
                        let what = [What::Zero, What::Delta, What::Input(TensorId::Q)][d.usize(..3)];
                        let token = if what == What::Zero { 0 } else { row as u32 + d.u32(..2) };
                        Cell { unread: d.u32(..2), ..Cell::new(what, token, 0, d.u32(..2)) }
                    };
                    let mut runs = Vec::new();
                    let mut row = first;
                    while row < end {
                        let n = draw.u64(1..=end - row);
                        runs.push((row, cell(row, &mut draw)));
                        (0..n).for_each(|i| cells[(row + i) as usize] = runs[runs.len() - 1].1.after(i));
                        row += n;
                    }
                    column.write(first, end, runs.into_iter());
                } else {
                    let unread = cells[span.clone()].iter().position(|c| c.unread > 0);
                    let want = unread.map(|i| (first + i as u64, cells[first as usize + i]));
                    assert_eq!(column.unread(first, end), want, "step {step}");
                    let counts = |c: &Cell| c.list == 0;
                    column.read(first, end, counts);
                    cells[span].iter_mut().filter(|c| counts(c)).for_each(|c| c.unread = 0);
                }
                (0..rows).for_each(|row| assert_eq!(column.at(row).0, cells[row as usize], "step {step}"));
                let run = |(row, rows, cell): (u64, u64, Cell)| (0..rows).map(move |i| (row + i, cell.after(i)));
                let listed: Vec<_> = column.runs(first, end).flat_map(run).collect();
                let want: Vec<_> = (first..end).map(|row| (row, cells[row as usize])).collect();
                assert_eq!(listed, want, "step {step}");
                assert_eq!(column.runs, Column::of(cells.iter().map(|&cell| (1, cell))).runs, "step {step}");
            }
        }
    }
}
