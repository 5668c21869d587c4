// SPDX-License-Identifier: MIT OR Apache-2.0
//! The pieces by themselves: kernels on the caller's tensors.
//!
//! Ranges and pairs are taken where they lie: their structs have the layout of the crate's own, which is asserted below,
//! and what an enum would refuse (a mode) or arithmetic could not hold (a position) is checked first. Calls allocate
//! nothing unless they refuse.

use core::{ffi::c_void, mem::offset_of};
use std::{
    format,
    sync::{Mutex, MutexGuard, PoisonError, TryLockError},
};

use super::{
    dlpack::{Form, cpattn_tensor, no_stream, optional, tensor},
    handle::{self, Handle, Kind},
    input::{array, flag, one_of, reserved, result, sized},
    plan::DTYPES,
    rank::workers,
    status::{Fail, Outcome, boundary},
};
use crate::{
    error::{Error, Result},
    kernel::{
        Attend, AttendBackward, Block, Delta, Finish, Gradients, HeadMap, Mode, QRange, Range, Ranges, RawTensor,
        Score, SinkGradient, Transform, cpu, merge, sinks,
    },
    plan::MAX_HEAD_DIM,
    tensor::disjoint,
};

/// Positions and windows beyond this are a mistake; within it, no sum of a few of them overflows.
const FAR: u64 = 1 << 40;
const MAX_SOURCES: usize = 64;

#[derive(Clone, Copy)]
#[repr(C)]
pub struct cpattn_range {
    pub row: i64,
    pub pos: i64,
    pub len: u32,
    pub block: u32,
    pub period: u32,
    pub doc: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct cpattn_q_range {
    pub range: cpattn_range,
    pub keys_begin: u32,
    pub keys_end: u32,
    pub mode: u8,
    pub reserved: [u8; 7],
}

macro_rules! same_layout {
    ($ours:ty, $theirs:ty: $($field:ident),*) => {
        static_assertions::assert_eq_size!($ours, $theirs);
        static_assertions::assert_eq_align!($ours, $theirs);
        $(static_assertions::const_assert_eq!(offset_of!($ours, $field), offset_of!($theirs, $field));)*
    };
}
same_layout!(cpattn_range, Range: row, pos, len, block, period, doc);
same_layout!(cpattn_q_range, QRange: range, keys_begin, keys_end, mode);

#[derive(Clone, Copy)]
#[repr(C)]
pub struct cpattn_ranges {
    pub q: *const cpattn_q_range,
    pub q_count: usize,
    pub k: *const cpattn_range,
    pub k_count: usize,
    pub pairs: *const u32,
    pub pair_count: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct cpattn_head_map {
    pub q_offset: u32,
    pub kv_offset: u32,
    pub group: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct cpattn_score {
    pub scale: f64,
    pub softcap: f64,
    pub window_left: i64,
    pub window_right: i64,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct cpattn_attend_args {
    pub struct_size: usize,
    pub q: *const cpattn_tensor,
    pub k: *const cpattn_tensor,
    pub v: *const cpattn_tensor,
    pub running: *const cpattn_tensor,
    pub o: *const cpattn_tensor,
    pub lse: *const cpattn_tensor,
    pub slopes: *const cpattn_tensor,
    pub sinks: *const cpattn_tensor,
    pub heads: cpattn_head_map,
    pub aligned: i32,
    pub score: cpattn_score,
    pub ranges: cpattn_ranges,
    pub stream: *mut c_void,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct cpattn_attend_backward_args {
    pub struct_size: usize,
    pub q: *const cpattn_tensor,
    pub k: *const cpattn_tensor,
    pub v: *const cpattn_tensor,
    pub d_o: *const cpattn_tensor,
    pub lse: *const cpattn_tensor,
    pub delta: *const cpattn_tensor,
    pub dq: *const cpattn_tensor,
    pub dk: *const cpattn_tensor,
    pub dv: *const cpattn_tensor,
    pub slopes: *const cpattn_tensor,
    pub heads: cpattn_head_map,
    pub accumulate_keys: i32,
    pub per_q_head: i32,
    pub gradients: i32,
    pub aligned: i32,
    pub reserved: i32,
    pub score: cpattn_score,
    pub ranges: cpattn_ranges,
    pub stream: *mut c_void,
}

/// What a scratch's handle holds.
#[doc(hidden)]
pub struct Tiles(Mutex<cpu::Scratch>);

pub type cpattn_scratch = Handle<Tiles>;

impl Kind for Tiles {
    const NAME: &'static str = "scratch";
    const MAGIC: u64 = u64::from_le_bytes(*b"cpatTILE");
}

impl Tiles {
    fn lock(&self) -> Outcome<MutexGuard<'_, cpu::Scratch>> {
        match self.0.try_lock() {
            Ok(scratch) => Ok(scratch),
            Err(TryLockError::Poisoned(poisoned)) => Ok(PoisonError::into_inner(poisoned)),
            Err(TryLockError::WouldBlock) => Err(Fail::Busy("scratch")),
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_scratch_create(workers: u32, scratch: *mut *mut cpattn_scratch) -> i32 {
    boundary!({
        // SAFETY: the header's promise about results.
        let out = unsafe { result("scratch", scratch) }?;
        out.write(handle::create(Tiles(Mutex::new(cpu::Scratch::new(self::workers("workers", workers)?)))));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_scratch_destroy(scratch: *mut cpattn_scratch) -> i32 {
    boundary!({
        if scratch.is_null() {
            return Ok(());
        }
        // SAFETY: the header's promise about handles.
        drop(unsafe { handle::borrow(scratch.cast_const()) }?.lock()?);
        // SAFETY: as above.
        unsafe { handle::destroy(scratch) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_scratch_reserve(
    scratch: *mut cpattn_scratch,
    dtype: i32,
    head_dim: u32,
    value_dim: u32,
) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles.
        let scratch = unsafe { handle::borrow(scratch.cast_const()) }?;
        let dtype = one_of("dtype", dtype, &DTYPES)?;
        for (name, dim) in [("head_dim", head_dim), ("value_dim", value_dim)] {
            if dim == 0 || dim as usize > MAX_HEAD_DIM {
                return Err(Error::invalid(name, dim, format!("1 to {MAX_HEAD_DIM}")).into());
            }
        }
        scratch.lock()?.reserve(&cpu::Dims { head_dim, value_dim, dtype });
        Ok(())
    })
}

/// A range whose positions can be computed.
fn range(name: &'static str, i: usize, r: &cpattn_range) -> Result<()> {
    if r.block == 0 || r.period < r.block {
        let found = format!("block {} and period {}", r.block, r.period);
        return Err(Error::invalid(format!("{name}[{i}]"), found, "1 <= block <= period"));
    }
    if r.pos.unsigned_abs() > FAR {
        return Err(Error::invalid(format!("{name}[{i}].pos"), r.pos, "within ±2^40"));
    }
    if u64::from(r.len / r.block) * u64::from(r.period) > FAR {
        let found = format!("len {} by blocks of {} every {}", r.len, r.block, r.period);
        return Err(Error::invalid(format!("{name}[{i}]"), found, "positions within 2^40 of the first"));
    }
    Ok(())
}

/// # Safety
/// The pointers of `r` are null or as long as its counts say, as long as the result lives.
unsafe fn ranges<'a>(r: &cpattn_ranges) -> Result<Ranges<'a>> {
    // SAFETY: the caller's promise.
    let (q, k, pairs) = unsafe {
        (
            array("ranges.q", r.q, r.q_count)?,
            array("ranges.k", r.k, r.k_count)?,
            array("ranges.pairs", r.pairs, r.pair_count)?,
        )
    };
    for (i, q) in q.iter().enumerate() {
        range("ranges.q", i, &q.range)?;
        if q.mode > Mode::Only as u8 {
            return Err(Error::invalid(format!("ranges.q[{i}].mode"), q.mode, "CPATTN_FIRST (0) to CPATTN_ONLY (3)"));
        }
        if q.reserved != [0; 7] {
            return Err(Error::invalid(format!("ranges.q[{i}].reserved"), "set", "0"));
        }
    }
    for (i, k) in k.iter().enumerate() {
        range("ranges.k", i, k)?;
    }
    // SAFETY: the layouts are equal (asserted above), and every mode is one of the enum's (just checked).
    let (q, k) = unsafe {
        (
            core::slice::from_raw_parts(q.as_ptr().cast::<QRange>(), q.len()),
            core::slice::from_raw_parts(k.as_ptr().cast::<Range>(), k.len()),
        )
    };
    Ok(Ranges { q, k, pairs })
}

fn score(s: &cpattn_score) -> Result<Score> {
    for (name, limit) in [("score.window_left", s.window_left), ("score.window_right", s.window_right)] {
        if limit != i64::MAX && limit.unsigned_abs() > FAR {
            return Err(Error::invalid(name, limit, "within ±2^40, or CPATTN_UNLIMITED"));
        }
    }
    let cpattn_score { scale, softcap, window_left, window_right } = *s;
    Ok(Score { scale, softcap, window_left, window_right })
}

fn head_map(m: &cpattn_head_map, q: &RawTensor) -> Result<HeadMap> {
    if m.q_offset.checked_add(q.heads).is_none() {
        return Err(Error::invalid("heads.q_offset", m.q_offset, format!("at most {}", u32::MAX - q.heads)));
    }
    Ok(HeadMap { q_offset: m.q_offset, kv_offset: m.kv_offset, group: m.group })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_attend(scratch: *mut cpattn_scratch, args: *const cpattn_attend_args) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles and structs.
        let (scratch, a) = unsafe { (handle::borrow(scratch.cast_const())?, sized("args", args)?) };
        no_stream(a.stream)?;
        // SAFETY: the header's promise about tensors and arrays.
        let call = unsafe {
            let q = tensor("q", a.q, Form::Rows)?;
            Attend {
                q,
                k: tensor("k", a.k, Form::Rows)?,
                v: tensor("v", a.v, Form::Rows)?,
                running: optional("running", a.running, Form::Rows)?,
                o: optional("o", a.o, Form::Rows)?,
                lse: tensor("lse", a.lse, Form::HeadMajor)?,
                slopes: optional("slopes", a.slopes, Form::PerHead)?,
                sinks: optional("sinks", a.sinks, Form::PerHead)?,
                heads: head_map(&a.heads, &q)?,
                score: score(&a.score)?,
                ranges: ranges(&a.ranges)?,
                aligned: flag("aligned", a.aligned)?,
            }
        };
        let running = if call.running == call.o { RawTensor::NONE } else { call.running };
        disjoint(&[
            ("q", call.q, false),
            ("k", call.k, false),
            ("v", call.v, false),
            ("slopes", call.slopes, false),
            ("sinks", call.sinks, false),
            ("running", running, true),
            ("o", call.o, true),
            ("lse", call.lse, true),
        ])?;
        // SAFETY: valid memory by the header's promise, aligned and disjoint as checked.
        unsafe { cpu::attend(&call, &mut *scratch.lock()?) }?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_attend_backward(
    scratch: *mut cpattn_scratch,
    args: *const cpattn_attend_backward_args,
) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles and structs.
        let (scratch, a) = unsafe { (handle::borrow(scratch.cast_const())?, sized("args", args)?) };
        no_stream(a.stream)?;
        reserved("args.reserved", a.reserved == 0)?;
        let gradients = one_of("gradients", a.gradients, &[Gradients::All, Gradients::Queries, Gradients::Keys])?;
        let (keys, queries) = (gradients != Gradients::Queries, gradients != Gradients::Keys);
        for (name, given, made) in
            [("dq", !a.dq.is_null(), queries), ("dk", !a.dk.is_null(), keys), ("dv", !a.dv.is_null(), keys)]
        {
            if given != made {
                let (found, expected) = if made { ("NULL", "a tensor") } else { ("given", "NULL") };
                return Err(Error::invalid(name, found, format!("{expected} with gradients {}", a.gradients)).into());
            }
        }
        // SAFETY: the header's promise about tensors and arrays.
        let call = unsafe {
            let q = tensor("q", a.q, Form::Rows)?;
            AttendBackward {
                q,
                k: tensor("k", a.k, Form::Rows)?,
                v: tensor("v", a.v, Form::Rows)?,
                d_o: tensor("d_o", a.d_o, Form::Rows)?,
                lse: tensor("lse", a.lse, Form::HeadMajor)?,
                delta: tensor("delta", a.delta, Form::HeadMajor)?,
                dq: optional("dq", a.dq, Form::Rows)?,
                dk: optional("dk", a.dk, Form::Rows)?,
                dv: optional("dv", a.dv, Form::Rows)?,
                accumulate_keys: flag("accumulate_keys", a.accumulate_keys)?,
                per_q_head: flag("per_q_head", a.per_q_head)?,
                gradients,
                slopes: optional("slopes", a.slopes, Form::PerHead)?,
                heads: head_map(&a.heads, &q)?,
                score: score(&a.score)?,
                ranges: ranges(&a.ranges)?,
                aligned: flag("aligned", a.aligned)?,
            }
        };
        disjoint(&[
            ("q", call.q, false),
            ("k", call.k, false),
            ("v", call.v, false),
            ("d_o", call.d_o, false),
            ("lse", call.lse, false),
            ("delta", call.delta, false),
            ("slopes", call.slopes, false),
            ("dq", call.dq, true),
            ("dk", call.dk, true),
            ("dv", call.dv, true),
        ])?;
        // SAFETY: as in `cpattn_attend`.
        unsafe { cpu::attend_backward(&call, &mut *scratch.lock()?) }?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_delta(
    o: *const cpattn_tensor,
    d_o: *const cpattn_tensor,
    delta: *const cpattn_tensor,
    stream: *mut c_void,
) -> i32 {
    boundary!({
        no_stream(stream)?;
        // SAFETY: the header's promise about tensors.
        let call = unsafe {
            Delta {
                o: tensor("o", o, Form::Rows)?,
                d_o: tensor("d_o", d_o, Form::Rows)?,
                delta: tensor("delta", delta, Form::HeadMajor)?,
            }
        };
        disjoint(&[("o", call.o, false), ("d_o", call.d_o, false), ("delta", call.delta, true)])?;
        if call.o.tokens == 0 || call.o.heads == 0 {
            return Ok(());
        }
        // SAFETY: as in `cpattn_attend`.
        unsafe { cpu::delta(&call) }?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_finish(
    o: *const cpattn_tensor,
    lse: *const cpattn_tensor,
    sinks: *const cpattn_tensor,
    rows: *const cpattn_range,
    row_count: usize,
    stream: *mut c_void,
) -> i32 {
    boundary!({
        no_stream(stream)?;
        // SAFETY: the header's promise about tensors and arrays.
        let (o, lse, sinks, rows) = unsafe {
            (
                tensor("o", o, Form::Rows)?,
                tensor("lse", lse, Form::HeadMajor)?,
                optional("sinks", sinks, Form::PerHead)?,
                array("rows", rows, row_count)?,
            )
        };
        for (i, r) in rows.iter().enumerate() {
            range("rows", i, r)?;
        }
        // SAFETY: the layouts are equal, as asserted above.
        let rows = unsafe { core::slice::from_raw_parts(rows.as_ptr().cast::<Range>(), rows.len()) };
        disjoint(&[("sinks", sinks, false), ("o", o, true), ("lse", lse, true)])?;
        // SAFETY: as in `cpattn_attend`.
        unsafe { cpu::finish(&Finish { o, lse, sinks, rows }) }?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_sink_gradient(
    lse: *const cpattn_tensor,
    delta: *const cpattn_tensor,
    sinks: *const cpattn_tensor,
    dsinks: *const cpattn_tensor,
    stream: *mut c_void,
) -> i32 {
    boundary!({
        no_stream(stream)?;
        // SAFETY: the header's promise about tensors.
        let call = unsafe {
            SinkGradient {
                lse: tensor("lse", lse, Form::HeadMajor)?,
                delta: tensor("delta", delta, Form::HeadMajor)?,
                sinks: tensor("sinks", sinks, Form::PerHead)?,
                dsinks: tensor("dsinks", dsinks, Form::PerHead)?,
            }
        };
        disjoint(&[
            ("lse", call.lse, false),
            ("delta", call.delta, false),
            ("sinks", call.sinks, false),
            ("dsinks", call.dsinks, true),
        ])?;
        // SAFETY: as in `cpattn_attend`.
        unsafe { sinks::sink_gradient(&call) }?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_merge(
    o: *const cpattn_tensor,
    lse: *const cpattn_tensor,
    other_o: *const cpattn_tensor,
    other_lse: *const cpattn_tensor,
    stream: *mut c_void,
) -> i32 {
    boundary!({
        no_stream(stream)?;
        // SAFETY: the header's promise about tensors.
        let (o, lse, other_o, other_lse) = unsafe {
            (
                tensor("o", o, Form::Rows)?,
                tensor("lse", lse, Form::HeadMajor)?,
                tensor("other_o", other_o, Form::Rows)?,
                tensor("other_lse", other_lse, Form::HeadMajor)?,
            )
        };
        disjoint(&[("other_o", other_o, false), ("other_lse", other_lse, false), ("o", o, true), ("lse", lse, true)])?;
        if o.dim == 0 {
            return Err(Error::invalid("o.shape[2]", 0, "at least 1").into());
        }
        // SAFETY: as in `cpattn_attend`.
        unsafe { merge::merge(&o, &lse, &other_o, &other_lse) }?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_transform(
    dst: *const cpattn_tensor,
    sources: *const *const cpattn_tensor,
    source_count: usize,
    stream: *mut c_void,
) -> i32 {
    boundary!({
        no_stream(stream)?;
        if source_count > MAX_SOURCES {
            return Err(Error::invalid("source_count", source_count, format!("at most {MAX_SOURCES}"))
                .hint("sum in several calls, with dst as the first source of the later ones")
                .into());
        }
        // SAFETY: the header's promise about tensors and arrays.
        let (dst, pointers) = unsafe { (tensor("dst", dst, Form::Rows)?, array("sources", sources, source_count)?) };
        let mut list = [RawTensor::NONE; MAX_SOURCES];
        let mut named = [("", RawTensor::NONE, false); MAX_SOURCES + 1];
        for (i, (to, &from)) in list.iter_mut().zip(pointers).enumerate() {
            // SAFETY: as above.
            *to = unsafe { tensor("sources", from, Form::Rows) }?;
            let itself = i == 0 && *to == dst;
            named[i] = ("sources", if itself { RawTensor::NONE } else { *to }, false);
        }
        named[source_count] = ("dst", dst, true);
        disjoint(&named[..=source_count])?;
        let block = Block { dst, sources_begin: 0, sources_end: source_count as u32 };
        let call = Transform { blocks: &[block], sources: &list[..source_count] };
        if dst.tokens == 0 || dst.heads == 0 || dst.dim == 0 {
            return Ok(());
        }
        // SAFETY: as in `cpattn_attend`.
        unsafe { cpu::transform(&call) }?;
        Ok(())
    })
}
