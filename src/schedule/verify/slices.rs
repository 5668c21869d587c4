// SPDX-License-Identifier: MIT OR Apache-2.0
//! Slices of buffers and tensors: whether each lies within its buffer or tensor, and which slices share bytes.

#[cfg(test)]
use alloc::collections::BTreeSet;
use alloc::{format, string::String, vec::Vec};

use super::flaw::flaw;

use crate::{
    batch::Side,
    element::Dtype,
    error::{Error, Result},
    schedule::{ALIGNMENT, Buf, BufferView, Schedule, TensorForm, TensorId},
};

/// A buffer, or a tensor of the caller.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    pub name: &'static str,
    pub rows: u64,
    pub heads: u32,
    pub dim: u32,
    /// Bytes of one head of one row.
    pub cell: u64,
    /// First byte in one address space: the workspace, and after it the tensors, which do not overlap.
    pub base: u64,
    /// `None` if the tensor is not given; otherwise whether it may be written.
    pub writable: Option<bool>,
}

/// A slice, in the space of [`Extent::base`].
#[derive(Clone, Copy)]
pub(super) struct Touch {
    pub view: BufferView,
    pub write: bool,
    /// First byte and one past the last. If the view leaves out heads, bytes in between are not accessed.
    pub low: u64,
    pub high: u64,
}

pub(super) struct ScheduleCheck<'a> {
    pub schedule: &'a Schedule,
    pub extents: Vec<Extent>,
}

impl<'a> ScheduleCheck<'a> {
    /// Refuses buffers that do not lie in the workspace, and ring steps whose lists cannot be made.
    pub(super) fn new(schedule: &'a Schedule, tensors: &[Option<TensorForm>; TensorId::COUNT]) -> Result<Self> {
        let extents = extents(schedule, tensors)?;
        ring_steps(schedule).map_err(|text| flaw(schedule.rank, 0, text))?;
        Ok(Self { schedule, extents })
    }

    /// Whether a slice takes all heads of its buffer or tensor.
    pub(super) fn takes_whole_rows(&self, t: &Touch) -> bool {
        t.view.head == 0 && self.extent(t.view.buf).is_ok_and(|extent| extent.heads == t.view.heads)
    }

    pub(super) fn extent(&self, buf: Buf) -> Result<&Extent, String> {
        let at = match buf {
            Buf::User(t) => t as usize,
            Buf::Work(i) => TensorId::COUNT + i as usize,
        };
        self.extents.get(at).ok_or_else(|| format!("{buf:?} is not a buffer of this schedule"))
    }

    /// The byte range of a slice, after checking that it lies inside its buffer or tensor.
    pub(super) fn touch(&self, view: BufferView, write: bool) -> Result<Touch, String> {
        let t = self.extent(view.buf)?;
        match t.writable {
            None => return Err(format!("{} is not an argument of this run", t.name)),
            Some(false) if write => return Err(format!("writes {}, which is only read", t.name)),
            Some(_) => {}
        }
        let rows = view.row.checked_add(view.rows).is_some_and(|end| end <= t.rows);
        let heads = view.head.checked_add(view.heads).is_some_and(|end| end <= t.heads);
        if !rows || !heads {
            return Err(format!(
                "rows {}+{}, heads {}+{} do not lie in {} of {} rows × {} heads",
                view.row, view.rows, view.head, view.heads, t.name, t.rows, t.heads
            ));
        }
        if view.rows == 0 || view.heads == 0 {
            return Ok(Touch { view, write, low: t.base, high: t.base });
        }
        // The slice lies inside the extent, so this does not overflow.
        let cell = |row: u64, head: u32| t.base + (row * u64::from(t.heads) + u64::from(head)) * t.cell;
        let low = cell(view.row, view.head);
        let high = cell(view.row + view.rows - 1, view.head + view.heads - 1) + t.cell;
        Ok(Touch { view, write, low, high })
    }

    /// Whether two slices may share a byte. Conservative for different buffers if a view leaves out heads.
    pub(super) fn overlap(a: &Touch, b: &Touch) -> bool {
        if a.low >= b.high || b.low >= a.high {
            return false;
        }
        let (v, w) = (&a.view, &b.view);
        v.buf != w.buf
            || (v.row < w.row + w.rows
                && w.row < v.row + v.rows
                && v.head < w.head + w.heads
                && w.head < v.head + v.heads)
    }

    /// The bytes that are read, and those that are written, one by one.
    #[cfg(test)]
    pub(super) fn bytes_of(&self, touched: &[Touch]) -> [BTreeSet<u64>; 2] {
        let mut bytes = [BTreeSet::new(), BTreeSet::new()];
        for Touch { view: v, write, .. } in touched {
            let t = self.extent(v.buf).unwrap();
            for cell in (v.row..v.row + v.rows).flat_map(|row| (v.head..v.head + v.heads).map(move |head| (row, head)))
            {
                let first = t.base + (cell.0 * u64::from(t.heads) + u64::from(cell.1)) * t.cell;
                bytes[usize::from(*write)].extend(first..first + t.cell);
            }
        }
        bytes
    }

    pub(super) fn describe(&self, t: &Touch) -> String {
        let name = self.extent(t.view.buf).map_or("?", |t| t.name);
        let how = if t.write { "written" } else { "read" };
        format!("rows {}+{}, heads {}+{} of {name} ({how})", t.view.row, t.view.rows, t.view.head, t.view.heads)
    }

    /// The first two slices that share a byte, at least one of them written. `sorted` by first byte.
    pub(super) fn clash(&self, sorted: &[Touch]) -> Result<(), String> {
        let mut open: Vec<&Touch> = Vec::new();
        for t in sorted.iter().filter(|t| t.low < t.high) {
            open.retain(|o| o.high > t.low);
            if let Some(o) = open.iter().find(|o| (o.write || t.write) && Self::overlap(o, t)) {
                return Err(format!("touches the same bytes twice: {} and {}", self.describe(o), self.describe(t)));
            }
            open.push(t);
        }
        Ok(())
    }

    /// Checks that every part lies in one of the slices that stand for all of them, and is written only if that slice
    /// is.
    pub(super) fn inside(&self, parts: &[Touch], whole: &[Touch]) -> Result<(), String> {
        let holds = |w: &Touch, p: &Touch| {
            let (v, w_) = (&p.view, &w.view);
            v.buf == w_.buf
                && (w.write || !p.write)
                && w_.row <= v.row
                && v.row + v.rows <= w_.row + w_.rows
                && w_.head <= v.head
                && v.head + v.heads <= w_.head + w_.heads
        };
        match parts.iter().find(|p| !whole.iter().any(|w| holds(w, p))) {
            Some(p) => Err(format!("{} is not part of the slices that the operation names", self.describe(p))),
            None => Ok(()),
        }
    }
}

/// Checks the ring steps of a schedule, before a list of them is made.
fn ring_steps(s: &Schedule) -> Result<(), String> {
    if s.ulysses == 0 || !s.group.contains(&s.rank) || !s.group.len().is_multiple_of(s.ulysses) {
        return Err(format!("rank {} of group {:?} in Ulysses groups of {}", s.rank, s.group, s.ulysses));
    }
    let (ulysses, me) = (s.ulysses, (s.rank - s.group.start) / s.ulysses);
    for (side, steps) in [(Side::K, &s.keys), (Side::Q, &s.queries)] {
        let checked = steps.as_ref().map_or(Ok(()), |steps| steps.check(side, me, s.group.len() / ulysses, ulysses));
        checked.map_err(|text| format!("ring steps of side {side:?}: {text}"))?;
    }
    Ok(())
}

/// The caller's tensors in the order of their numbers, then the buffers.
fn extents(s: &Schedule, tensors: &[Option<TensorForm>; TensorId::COUNT]) -> Result<Vec<Extent>> {
    let too_large = || flaw(s.rank, 0, format!("a workspace of {} bytes", s.workspace));
    let mut base = s.workspace.checked_next_multiple_of(ALIGNMENT).ok_or_else(too_large)?;
    let mut extents = Vec::with_capacity(TensorId::COUNT + s.buffers.len());
    for (t, form) in TensorId::ALL.into_iter().zip(tensors) {
        let ([rows, heads, dim], dtype) = form.map_or(([0; 3], Dtype::F32), |f| (f.shape, f.dtype));
        let (name, writable) = (form.map_or(t.name(), |f| f.name), form.map(|f| f.written));
        let (rows, heads, dim) = (rows as u64, heads as u32, dim as u32);
        let cell = u64::from(dim) * dtype.size() as u64;
        extents.push(Extent { name, rows, heads, dim, cell, base, writable });
        let bytes = rows.checked_mul(u64::from(heads)).and_then(|n| n.checked_mul(cell));
        base = bytes.and_then(|n| base.checked_add(n)).ok_or_else(|| {
            Error::invalid(name, format!("{rows} rows of {heads} heads"), "tensors that a machine can address")
        })?;
    }
    for b in &s.buffers {
        let cell = u64::from(b.dim) * b.dtype.size() as u64;
        let end = b
            .rows
            .checked_mul(u64::from(b.heads))
            .and_then(|n| n.checked_mul(cell))
            .and_then(|n| n.checked_add(b.offset));
        if b.dim == 0 || !b.offset.is_multiple_of(ALIGNMENT) || end.is_none_or(|end| end > s.workspace) {
            let text = format!(
                "buffer {} of {} rows × {} heads × {} begins at byte {} of a workspace of {}",
                b.name, b.rows, b.heads, b.dim, b.offset, s.workspace
            );
            return Err(flaw(s.rank, 0, text));
        }
        let (name, rows, heads, dim, base) = (b.name, b.rows, b.heads, b.dim, b.offset);
        extents.push(Extent { name, rows, heads, dim, cell, base, writable: Some(true) });
    }
    Ok(extents)
}
