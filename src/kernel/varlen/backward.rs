// SPDX-License-Identifier: MIT OR Apache-2.0
//! A backward operation by calls of a kernel, whose gradients are added to those of the operation.

use super::{
    calls::KernelCalls,
    memory::{head_major, read, replace, strided, write},
    pieces::RowRun,
    table::{CallGroup, CallTable},
};
use crate::{
    call::{AttendBackward, Gradients, HeadMap, RawTensor},
    error::Result,
};

impl KernelCalls {
    /// See [`AttendBackward`].
    ///
    /// # Errors
    /// The kernel's, as [`Error::Kernel`](crate::Error::Kernel).
    ///
    /// # Safety
    /// As [`cpu::attend_backward`](crate::kernel::cpu::attend_backward); the table is of the same ranges.
    pub(crate) unsafe fn attend_backward(&mut self, args: &AttendBackward<'_>, table: &CallTable) -> Result<()> {
        if args.gradients != Gradients::Keys {
            for q in args.ranges.q.iter().filter(|q| !q.mode.continues()) {
                self.list(args.dq.rows(q.range.row as u64, q.range.len.into()), []);
            }
        }
        if args.gradients != Gradients::Queries && !args.accumulate_keys {
            for k in args.ranges.k {
                for to in [args.dk, args.dv] {
                    self.list(to.rows(k.row as u64, k.len.into()), []);
                }
            }
        }
        // SAFETY: rows of the ranges, each in one of them, which are the operation's to write (the contract).
        unsafe { self.move_rows() }?;
        for group in &table.groups {
            // SAFETY: the contract; the group's rows are those of the ranges.
            unsafe { self.backward_group(args, group) }?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`KernelCalls::attend_backward`].
    unsafe fn backward_group(&mut self, args: &AttendBackward<'_>, group: &CallGroup) -> Result<()> {
        let (dtype, acc) = (args.q.dtype, args.q.dtype.accumulator());
        let (rows, keys, heads) = (group.rows(), group.keys(), args.q.heads);
        let expands = args.per_q_head || self.expands(&args.heads, heads, args.k.heads);
        let map = expands.then_some(&args.heads);
        let kv_heads = if expands { heads } else { args.k.heads };
        let [q, k, v, d_o, lse, delta, dq, dk, dv] = self.packed.place([
            (dtype, rows, heads, args.q.dim),
            (dtype, keys, kv_heads, args.k.dim),
            (dtype, keys, kv_heads, args.v.dim),
            (dtype, rows, heads, args.v.dim),
            (acc, rows, heads, 1),
            (acc, rows, heads, 1),
            (acc, rows, heads, args.q.dim),
            (acc, keys, kv_heads, args.k.dim),
            (acc, keys, kv_heads, args.v.dim),
        ]);
        // SAFETY: rows of the ranges are valid for reads (the contract); packed ones are our own memory, in which no
        // two tensors overlap, and the slopes are valid.
        let (q, k, v, d_o, lse, delta, slopes) = unsafe {
            (
                self.gather(args.q, &group.q_runs, None, q)?,
                self.gather(args.k, &group.k_runs, map, k)?,
                self.gather(args.v, &group.k_runs, map, v)?,
                self.gather(args.d_o, &group.q_runs, None, d_o)?,
                self.gather(args.lse, &group.q_runs, None, head_major(lse))?,
                self.gather(args.delta, &group.q_runs, None, head_major(delta))?,
                Self::slopes(&args.alibi_slopes, group),
            )
        };
        for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            // SAFETY: our own memory. exp(s − ∞) is the 0 that exp(s − lse) is for an lse of −∞.
            unsafe { replace(&lse, row, head, 0, |x| if x == f64::NEG_INFINITY { f64::INFINITY } else { x }) };
        }
        let call = group.call(&args.score, &slopes, [&q, &k, &v]);
        // SAFETY: compact tensors of rows that are valid, and of our own memory, in which the gradients overlap
        // nothing.
        let outcome = unsafe {
            let inputs = [read(&q), read(&k), read(&v), read(&d_o)];
            let gradients = [write(&dq), write(&dk), write(&dv)];
            self.kernel.backward(&call, inputs, read(&lse), read(&delta), gradients)
        };
        outcome.map_err(|error| self.failed(error))?;
        let sums = (expands && !args.per_q_head).then_some(&args.heads);
        // SAFETY: rows of the ranges, which are the operation's to write (the contract).
        unsafe {
            if args.gradients != Gradients::Keys {
                self.add(args.dq, &group.q_runs, None, dq)?;
            }
            if args.gradients != Gradients::Queries {
                self.add(args.dk, &group.k_runs, sums, dk)?;
                self.add(args.dv, &group.k_runs, sums, dv)?;
            }
        }
        Ok(())
    }

    /// Adds packed rows to those of runs, run by run, since a row may be in several. `map`: those of all q heads of a
    /// kv head, in their order.
    ///
    /// # Safety
    /// The rows are valid for writes, and used by nothing else.
    unsafe fn add(&mut self, to: RawTensor, runs: &[RowRun], map: Option<&HeadMap>, from: RawTensor) -> Result<()> {
        let mut at = 0;
        for &run in runs {
            let (dst, rows) = (strided(to, run), from.rows(at, run.count.into()));
            match map {
                None => self.list(dst, [dst, rows]),
                Some(map) => {
                    for kv in 0..to.heads {
                        let of = (0..from.heads).filter(|&h| map.kv(h) == kv).map(|h| rows.heads(h, 1));
                        let dst = dst.heads(kv, 1);
                        self.list(dst, core::iter::once(dst).chain(of));
                    }
                }
            }
            at += u64::from(run.count);
            // SAFETY: the blocks of one run do not overlap; the contract.
            unsafe { self.move_rows() }?;
        }
        Ok(())
    }
}
