// SPDX-License-Identifier: MIT OR Apache-2.0
//! A forward operation by calls of a kernel.
//!
//! Each call's partial result is merged into the rows' running result, or into one of our own where a range begins and
//! ends in this operation. What finishes, sinks and the rounding of o, is then a call of the library's own kernel on q
//! ranges without keys.

use alloc::format;

use super::{
    call::{Elements, Rectangles},
    calls::KernelCalls,
    memory::{head_major, read, replace, strided, write},
    table::{CallGroup, CallTable},
};
use crate::{
    call::{Attend, Merge, Mode, QRange, Ranges, RawTensor},
    element::Dtype,
    error::{Error, Result},
    kernel::cpu,
};

impl KernelCalls {
    /// See [`Attend`].
    ///
    /// # Errors
    /// The kernel's, and the refusal of an lse that cannot be, as [`Error::Kernel`](crate::Error::Kernel).
    ///
    /// # Safety
    /// As [`cpu::attend`]; the table is of the same ranges.
    pub(crate) unsafe fn attend(
        &mut self,
        args: &Attend<'_>,
        table: &CallTable,
        scratch: &mut cpu::Scratch,
    ) -> Result<()> {
        let (acc, heads) = (args.q.dtype.accumulator(), args.q.heads);
        let alone = args.ranges.q.iter().any(|q| q.mode == Mode::Only);
        let rows = if alone { args.q.tokens } else { 0 };
        let own = self.partial.place([(acc, rows, heads, args.v.dim), (acc, rows, heads, 2)]);
        let running = [args.running, args.running_lse];
        for q in args.ranges.q.iter().filter(|q| !q.mode.continues() && q.range.len > 0) {
            let [o, lse] = if q.mode == Mode::Only { own } else { running };
            let (first, count) = (q.range.row as u64, u64::from(q.range.len));
            self.list(o.rows(first, count), []);
            for (row, head) in (first..first + count).flat_map(|row| (0..heads).map(move |head| (row, head))) {
                // SAFETY: a row of a running result, which is the operation's to write.
                unsafe {
                    replace(&lse, row, head, 0, |_| f64::NEG_INFINITY);
                    if lse.dim > 1 {
                        replace(&lse, row, head, 1, |_| 0.0);
                    }
                }
            }
        }
        // SAFETY: rows of running results, each in one range.
        unsafe { self.move_rows() }?;
        for group in &table.groups {
            // SAFETY: the contract; the group's rows are those of the ranges.
            unsafe { self.forward_group(args, group, running, own) }?;
        }
        for (of_own, [running, running_lse]) in [(false, running), (true, own)] {
            let mut ranges = core::mem::take(&mut self.ranges);
            ranges.clear();
            let finished = args.ranges.q.iter().filter(|q| q.mode.finishes() && (q.mode == Mode::Only) == of_own);
            ranges.extend(finished.map(|q| QRange { mode: Mode::Last, keys_begin: 0, keys_end: 0, ..*q }));
            let finish = Attend {
                running,
                running_lse,
                alibi_slopes: RawTensor::NONE,
                max_logit: RawTensor::NONE,
                dropout: None,
                ranges: Ranges { q: &ranges, ..Ranges::default() },
                ..*args
            };
            // SAFETY: the contract: some of its rows, without keys, and their running results.
            let outcome = if ranges.is_empty() { Ok(()) } else { unsafe { cpu::attend(&finish, scratch) } };
            self.ranges = ranges;
            outcome?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`KernelCalls::attend`]; `running` and `own` are the running results of ranges.
    unsafe fn forward_group(
        &mut self,
        args: &Attend<'_>,
        group: &CallGroup,
        running: [RawTensor; 2],
        own: [RawTensor; 2],
    ) -> Result<()> {
        let (dtype, acc) = (args.q.dtype, args.q.dtype.accumulator());
        let (rows, keys, heads) = (group.rows(), group.keys(), args.q.heads);
        let map = self.expands(&args.heads, heads, args.k.heads).then_some(&args.heads);
        let kv_heads = if map.is_some() { heads } else { args.k.heads };
        let rounded = self.honours.rounded_o && dtype != acc;
        let [q, k, v, o, lse, wide] = self.packed.place([
            (dtype, rows, heads, args.q.dim),
            (dtype, keys, kv_heads, args.k.dim),
            (dtype, keys, kv_heads, args.v.dim),
            (if rounded { dtype } else { acc }, rows, heads, args.v.dim),
            (acc, rows, heads, 1),
            (acc, if rounded { rows } else { 0 }, heads, args.v.dim),
        ]);
        let lse = head_major(lse);
        // SAFETY: rows of the ranges are valid for reads (the contract); packed ones are our own memory, in which no
        // two tensors overlap, and the slopes are valid.
        let (q, k, v, slopes) = unsafe {
            (
                self.gather(args.q, &group.q_runs, None, q)?,
                self.gather(args.k, &group.k_runs, map, k)?,
                self.gather(args.v, &group.k_runs, map, v)?,
                Self::slopes(&args.alibi_slopes, group),
            )
        };
        let call = group.call(&args.score, &slopes, [&q, &k, &v]);
        // SAFETY: compact tensors of rows that are valid, and of our own memory, in which o and lse overlap nothing.
        let outcome = unsafe {
            let inputs = [read(&q), read(&k), read(&v)];
            self.kernel.forward(&call, inputs, write(&o), write(&lse))
        };
        outcome.map_err(|error| self.failed(error))?;
        // SAFETY: the same tensors, which the kernel no longer writes.
        unsafe { self.check_lse(&call, &q, &k, &lse) }?;
        let o = if rounded {
            self.list(wide, [o]);
            // SAFETY: our own memory.
            unsafe { self.move_rows() }?;
            wide
        } else {
            o
        };
        let mut at = 0;
        for (&run, &q_range) in group.q_runs.iter().zip(&group.q_ranges) {
            let of_own = args.ranges.q[q_range as usize].mode == Mode::Only;
            let [to, to_lse] = if of_own { own } else { running };
            let count = u64::from(run.count);
            let [with_o, with_lse] = [o, lse].map(|t| t.rows(at, count));
            let merge = Merge { o: strided(to, run), lse: strided(to_lse, run), with_o, with_lse };
            // SAFETY: rows of the ranges, which are the operation's to write, and our own memory.
            unsafe { self.kernel.merge(&merge) }.map_err(|error| self.failed(error))?;
            at += count;
        }
        Ok(())
    }

    /// Refuses a row of which a score, or a sum on the way to it, is too large for the type of sums: then no kernel has
    /// a right lse, and this one is not to blame.
    ///
    /// # Errors
    /// [`Error::Invalid`], which names row, key and head of the call.
    fn check_scores(
        &self,
        [q, k]: [&Elements<'_>; 2],
        call: &Rectangles<'_>,
        (row, head): (usize, usize),
        keys: core::ops::Range<usize>,
    ) -> Result<()> {
        let sums = call.dtype.accumulator();
        let most = if sums == Dtype::F64 { f64::MAX } else { f32::MAX.into() };
        let (dim, kv_head) = (call.head_dim, head / (call.heads / call.kv_heads));
        for key in keys {
            let product =
                |i| q.get((row * call.heads + head) * dim + i) * k.get((key * call.kv_heads + kv_head) * dim + i);
            // A kernel may scale before or after, and may add in any order.
            let largest = (0..dim).map(|i| product(i).abs()).sum::<f64>() * call.scale.abs().max(1.0);
            if largest > most {
                let (rank, at) = self.place();
                let argument = format!("q·k of row {row}, key {key} and head {head} of a call (rank {rank}, {at})");
                let expected = format!("a number that {sums} holds, in which scores are summed");
                return Err(Error::invalid(argument, format!("up to {largest:e}"), expected)
                    .hint("make q, k or scale smaller: no kernel has an lse of such a score"));
            }
        }
        Ok(())
    }

    /// Refuses an lse of NaN or ±∞ of a row with finite q and keys: the kernel did not write it, or took no key.
    ///
    /// # Safety
    /// The packed tensors of the call are valid for reads.
    unsafe fn check_lse(&self, call: &Rectangles<'_>, q: &RawTensor, k: &RawTensor, lse: &RawTensor) -> Result<()> {
        // SAFETY: the contract.
        let [q, k, lse] = [q, k, lse].map(|t| unsafe { read(t) });
        let finite = |t: &Elements<'_>, row: core::ops::Range<usize>, of: usize| {
            (row.start * of..row.end * of).all(|i| t.get(i).is_finite())
        };
        let all = call.cu_seqlens_q[call.len()] as usize;
        for sequence in 0..call.len() {
            let [rows, keys] = call.sequence(sequence);
            // Looked at once: a NaN in a key that all rows see makes the lse of all of them NaN.
            let mut finite_keys = None;
            for (row, head) in rows.flat_map(|row| (0..call.heads).map(move |head| (row, head))) {
                let found = lse.get(head * all + row);
                if !found.is_finite()
                    && finite(&q, row..row + 1, call.heads * call.head_dim)
                    && *finite_keys.get_or_insert_with(|| finite(&k, keys.clone(), call.kv_heads * call.head_dim))
                {
                    self.check_scores([&q, &k], call, (row, head), keys.clone())?;
                    let sequence = format_args!("row {row} of the call, in sequence {sequence}, head {head}");
                    let cause = match found {
                        f64::NEG_INFINITY => "the row has keys",
                        f64::INFINITY => "no score of it is so large",
                        _ => "it is not written, or wrong",
                    };
                    return Err(
                        self.failed(format_args!("the lse of {sequence} is {found} for finite q and k: {cause}"))
                    );
                }
            }
        }
        Ok(())
    }
}
