// SPDX-License-Identifier: MIT OR Apache-2.0
//! The contents of one column of a table, as runs of rows.
//!
//! Rows of a rank's share are runs of a document, and operations move, add to and read whole runs. So rows with equal
//! content, except for a token that increases by one from row to row, are stored as one entry. The cost of the proof
//! then grows with the ranges of operations, not with rows. A run is split where an operation ends inside it, and
//! joined again when its parts have equal content, so that a column depends only on the content of its rows.
//! The list of runs has a gap where it was last changed: operations go through the rows of a buffer in order, so each
//! change is near the one before, and a column of many runs costs no more for each of them than a short one.

use alloc::{vec, vec::Vec};

use super::cell::Cell;

/// Rows with equal content: the first row, and its cell.
type Run = (u64, Cell);

/// Memory for this many runs is not returned: a column of few runs would be allocated again and again.
const SMALL: usize = 64;

/// Runs in ascending order; the first begins at row 0.
#[derive(Clone, Debug)]
pub(super) struct Column {
    rows: u64,
    /// The runs before the gap.
    before: Vec<Run>,
    /// The runs after the gap, the next one last.
    after: Vec<Run>,
}

impl Column {
    /// A column of undefined rows.
    pub(super) fn unset(rows: u64) -> Self {
        Self { rows, before: if rows > 0 { vec![(0, Cell::UNSET)] } else { Vec::new() }, after: Vec::new() }
    }

    /// Runs that follow each other: their rows, and the cell of the first.
    pub(super) fn of(runs: impl Iterator<Item = (u64, Cell)>) -> Self {
        let mut column = Self { rows: 0, before: Vec::new(), after: Vec::new() };
        for (rows, cell) in runs.filter(|run| run.0 > 0) {
            column.add((column.rows, cell));
            column.rows += rows;
        }
        column.before.shrink_to_fit();
        column
    }

    fn run(&self, i: usize) -> Option<&Run> {
        match i.checked_sub(self.before.len()) {
            None => self.before.get(i),
            Some(i) => self.after.get(self.after.len().checked_sub(i + 1)?),
        }
    }

    /// The index of the run that holds a row.
    fn find(&self, row: u64) -> usize {
        match self.after.last() {
            Some(next) if next.0 <= row => {
                let later = self.after.partition_point(|run| run.0 > row);
                self.before.len() + self.after.len() - 1 - later
            }
            _ => self.before.partition_point(|run| run.0 <= row) - 1,
        }
    }

    fn end(&self, run: usize) -> u64 {
        self.run(run + 1).map_or(self.rows, |next| next.0)
    }

    /// The content of a row, and the number of rows from it to the end of its run.
    pub(super) fn at(&self, row: u64) -> (Cell, u64) {
        let i = self.find(row);
        let &(first, cell) = self.run(i).expect("the run that holds the row");
        (cell.after(row - first), self.end(i) - row)
    }

    /// The runs that hold rows `first..end`, cut to these rows: the first row of each, the number of rows, the content.
    pub(super) fn runs(&self, first: u64, end: u64) -> impl Iterator<Item = (u64, u64, Cell)> + '_ {
        let from = if first < end { self.find(first) } else { self.before.len() + self.after.len() };
        let within = (from..).map_while(move |i| self.run(i).filter(|run| run.0 < end).map(|run| (i, *run)));
        within.map(move |(i, (row, cell))| {
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
        self.cut(first);
        while self.take(end).is_some() {}
        runs.for_each(|run| self.add(run));
        self.close();
    }

    /// Marks those rows of `first..end` as read for which `counts` is true.
    pub(super) fn read(&mut self, first: u64, end: u64, counts: impl Fn(&Cell) -> bool) {
        let Some((from, _)) = self.unread(first, end) else { return };
        self.cut(from);
        while let Some((row, mut cell)) = self.take(end) {
            if counts(&cell) {
                cell.unread = 0;
            }
            self.add((row, cell));
        }
        self.close();
    }

    /// Moves the gap to a row; the run that holds it is cut there.
    fn cut(&mut self, row: u64) {
        while let Some(run) = self.before.pop_if(|run| run.0 >= row) {
            self.after.push(run);
        }
        while let Some(run) = self.after.pop_if(|run| run.0 < row) {
            self.before.push(run);
        }
        let next = self.after.last().map_or(self.rows, |next| next.0);
        if let Some(&(first, cell)) = self.before.last().filter(|_| row < next) {
            self.after.push((row, cell.after(row - first)));
        }
    }

    /// Takes the run after the gap, or its rows before `end`, out of the list.
    fn take(&mut self, end: u64) -> Option<Run> {
        let (row, cell) = self.after.pop_if(|run| run.0 < end)?;
        if end < self.after.last().map_or(self.rows, |next| next.0) {
            self.after.push((end, cell.after(end - row)));
        }
        Some((row, cell))
    }

    /// Adds a run before the gap; it is joined to the run before it if it continues that run.
    fn add(&mut self, run: Run) {
        if self.before.last().is_none_or(|last| last.1.after(run.0 - last.0) != run.1) {
            self.before.push(run);
        }
    }

    /// Joins the runs at both sides of the gap if the second continues the first. A gap at the end keeps no memory for
    /// the runs that were after it: most columns rest so.
    fn close(&mut self) {
        match self.after.pop() {
            Some(run) => self.add(run),
            None if self.after.capacity() > SMALL => self.after = Vec::new(),
            None => {}
        }
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
                let list = |c: &Column| c.before.iter().chain(c.after.iter().rev()).copied().collect::<Vec<_>>();
                assert_eq!(list(&column), list(&Column::of(cells.iter().map(|&cell| (1, cell)))), "step {step}");
            }
        }
    }
}
