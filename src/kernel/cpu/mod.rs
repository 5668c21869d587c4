// SPDX-License-Identifier: MIT OR Apache-2.0
//! The CPU kernels.
//!
//! A function for each structure of [`crate::call`] (but [`merge`], which takes the four tensors of a call, and
//! [`sink_total`]). Each checks what it is given (shapes, types, rows
//! against tensors) and answers with a typed error before it touches memory; none allocates unless it refuses; all
//! sums are in the accumulator's type. They are unsafe because a [`crate::call::RawTensor`] is an address: that it is
//! valid, and in no other use while the call runs, is the caller's promise.
//!
//! ```text
//! attention  forward: a unit is a block of q rows with a kv head (row_blocks); keys stream by in tiles of 128 (stream, tile);
//!            softmax: scores to p; small: few rows with few keys, without panels and tiles
//!            queries: the same for dq; keys: a unit is a tile of a document's keys with a kv head (key_units), rows inside:
//!            dk, dv, and dq on the way, to which units add in turn (dq_order); tiled: the same on matrix units
//! product    engine: what the forward asks of a machine; gemm: products over vectors; tile_engine: matrix units (amx: whether
//!            they are there; forms: what tiles hold; amx_interleaved: products between the vectors of the softmax;
//!            dots: vectors in their place)
//! vector     the vectors (simd) of each instruction set; routine: what kernels call and do not inline
//! memory     transform: copies, casts, ordered sums, rows that no pair covers; delta: row sums before the backward;
//!            convert: f16, bf16, f32 as vectors of f32 and back; rows: elements to sums and back; panel: rows to lanes
//!            and back
//! listed     each q row over the keys that a list names: calls of the attention above, row by row
//! isa        which instruction sets there are, and which one is used
//! choice     which documents take matrix units, and which take vectors
//! units, workers, pool, executor, scratch   how work is cut, spread over threads, and where it is computed
//! ```
//!
//! Results have the same bits for any number of workers. Between machines they may differ: an instruction set with
//! fused multiply-adds rounds less often than one without, and AMX rounds p and ds of half-precision calls to their
//! type before it multiplies them, as every flash attention of half precision does, and so do dot products of bf16; all
//! sums are f32 there too. AMX multiplies f32 as sums of three bf16, with no larger an error than multiply-adds of f32
//! (`forms.rs`). Aligned calls keep their promise on each instruction set: their backward does without matrix units.
//!
//! Without the feature `kernels` there is no attention: [`attend`] and [`attend_backward`] check their arguments and
//! refuse, and none of its code is in the library. A rank refuses such a run before anything moves (`has_kernels`).
#![cfg_attr(not(feature = "kernels"), allow(dead_code, unused_imports, reason = "what attention alone needs"))]

mod attention;
mod check;
mod choice;
mod executor;
mod isa;
mod job;
pub(crate) mod listed;
mod memory;
#[cfg(feature = "rayon")]
mod pool;
mod product;
mod scratch;
mod units;
mod vector;
mod workers;

pub use super::merge::merge;
pub use super::sinks::{sink_gradient, sink_total};
#[cfg(cpattn_loom)]
pub use attention::dq_order;
pub use executor::Executor;
pub use isa::Isa;
pub use scratch::Scratch;

use crate::call::{Attend, AttendBackward, Delta, Finish, Gradients, RawTensor, Transform};
use crate::element::Dtype;
use crate::error::{Error, Result};
use attention::{backward, dq_order::DqOrder, forward as forward_pass, keys, queries, row_blocks};
use choice::{Documents, EngineChoice};
use job::{Job, SumType};
use memory::convert;
use memory::delta::{check_delta, delta as row_sums};
use memory::transform::{check_finish, check_transform, finish as empty_rows, transform as transform_rows};
use scratch::Dims;
use workers::{Crew, Units};

/// Runs `$f::<A>($($arg),*)` with the type that sums of `$dtype` are kept in.
macro_rules! by_sums {
    ($dtype:expr, $f:ident($($arg:expr),*)) => {
        match $dtype {
            Dtype::F16 | Dtype::Bf16 | Dtype::F32 => $f::<f32>($($arg),*),
            Dtype::F64 => $f::<f64>($($arg),*),
        }
    };
}

/// Refuses attention in a library without it.
///
/// # Errors
/// Without the feature `kernels`.
pub(crate) fn has_kernels() -> Result<()> {
    if cfg!(feature = "kernels") {
        return Ok(());
    }
    Err(Error::unsupported(
        "attention on the CPU",
        "this library is the planner alone, built without the kernels",
        "use a library with the feature kernels (in Python the full wheel), or kernels=\"torch\" of cpattn.torch",
    ))
}

/// Forward attention: see [`Attend`] for the tensors, and [`crate::call::Mode`] for what becomes of a row.
///
/// # Errors
/// [`Error::Invalid`] when shapes, types, ranges or the scratch contradict each other; nothing was touched then.
///
/// # Safety
/// Rows of the ranges are valid in every tensor of the call: for reads in q, k, v, slopes and sinks, for writes too in
/// running, running_lse, o and lse, which overlap nothing but each other where [`Attend::running`] and
/// [`Attend::running_lse`] allow it, and which nothing else accesses meanwhile. Addresses are aligned to their type.
pub unsafe fn attend(call: &Attend, scratch: &mut Scratch) -> Result<()> {
    // SAFETY: the contract; without a table, rows of the ranges are rows of k and v.
    unsafe { attend_rows(call, call, &[], scratch) }
}

/// Forward attention whose keys are found through a table: row r of the k ranges is row `table[r]` of k and of v. The
/// result has the bits of a call whose k and v have these rows one after another.
///
/// # Errors
/// As [`attend`]; a range beyond the table.
///
/// # Safety
/// As [`attend`], of the rows that the table names. They are rows of the memory behind k and v, which may be more than
/// the call's k and v have.
pub(crate) unsafe fn attend_through(call: &Attend, table: &[u32], scratch: &mut Scratch) -> Result<()> {
    if table.is_empty() {
        let none = |t: RawTensor| RawTensor { tokens: 0, ..t };
        // SAFETY: the contract; a range with rows is refused.
        return unsafe { attend(&Attend { k: none(call.k), v: none(call.v), ..*call }, scratch) };
    }
    // To the ranges, k and v have as many rows as the table.
    let seen = |t: RawTensor| RawTensor { tokens: table.len() as u64, ..t };
    let as_seen = Attend { k: seen(call.k), v: seen(call.v), ..*call };
    // SAFETY: the contract; every entry is a row of k and v.
    unsafe { attend_rows(&as_seen, call, table, scratch) }
}

/// As [`attend`], with the call as it is to be checked.
///
/// # Safety
/// As [`attend_through`].
unsafe fn attend_rows(seen: &Attend, call: &Attend, table: &[u32], scratch: &mut Scratch) -> Result<()> {
    let dims = check::attend(seen)?;
    has_kernels()?;
    let isa = scratch.isa()?;
    scratch.start_threads()?;
    let crew = memory(scratch, &dims)?;
    #[cfg(feature = "kernels")]
    // SAFETY: shapes and ranges are checked; rows are valid, aligned and not shared (the contract of this function).
    unsafe {
        by_sums!(call.q.dtype, forward(call, table, isa, crew))
    };
    #[cfg(not(feature = "kernels"))]
    let _ = (call, table, isa, crew);
    Ok(())
}

/// # Safety
/// As [`attend`], checked, with sums of `A`.
unsafe fn forward<'a, A: SumType>(call: &'a Attend<'a>, table: &'a [u32], isa: Isa, crew: Crew<'_>) {
    let (dtype, workers) = (call.q.dtype, crew.workers());
    let finished = call.ranges.q.iter().filter(|q| q.mode.finishes());
    let stream = convert::streams(&call.o, finished.map(|q| u64::from(q.range.len)).sum());
    let job = |documents: Documents<'a>| {
        let lanes = row_blocks::lanes(call, documents, workers);
        let few = documents.isa.roundoff(dtype) > 0.0 && call.dropout.is_none();
        forward_pass::ForwardPass { call, table, documents, lanes, few, stream }
    };
    // SAFETY: checked, valid and with sums of `A` (the contract of this function).
    unsafe { run::<A, _>(crew, EngineChoice::forward(call, isa), dtype, job) }
}

/// Backward attention: see [`AttendBackward`].
///
/// With [`AttendBackward::aligned`], queries and keys are two passes even when all gradients are wanted.
///
/// # Errors
/// As [`attend`].
///
/// # Safety
/// As [`attend`], with dq, dk and dv in the place of o.
pub unsafe fn attend_backward(call: &AttendBackward, scratch: &mut Scratch) -> Result<()> {
    let dims = check::backward(call)?;
    has_kernels()?;
    let isa = scratch.isa()?;
    scratch.start_threads()?;
    let crew = memory(scratch, &dims)?;
    #[cfg(feature = "kernels")]
    // SAFETY: shapes and ranges are checked; rows are valid, aligned and not shared (the contract of this function).
    unsafe {
        by_sums!(call.q.dtype, gradients(call, isa, crew))
    };
    #[cfg(not(feature = "kernels"))]
    let _ = (isa, crew);
    Ok(())
}

/// # Safety
/// As [`attend_backward`], checked, with sums of `A`.
unsafe fn gradients<A: SumType>(call: &AttendBackward, isa: Isa, mut crew: Crew<'_>) {
    let together = call.gradients == Gradients::All && !call.aligned;
    if call.gradients != Gradients::Keys && !together {
        let job = |documents| queries::Queries { call, documents };
        // SAFETY: checked, valid and with sums of `A` (the contract of this function), here and below.
        unsafe { run::<A, _>(crew.again(), EngineChoice::vectors(isa), call.q.dtype, job) }
    }
    if together {
        // SAFETY: as above.
        unsafe { backward::clear_queries::<A>(call) };
    }
    if call.gradients == Gradients::Queries {
        return;
    }
    let workers = crew.workers();
    let job = |documents| keys::KeyPass { call, documents, queries: together, workers, order: DqOrder::new() };
    // SAFETY: as above.
    unsafe { run::<A, _>(crew, EngineChoice::backward(call, isa), call.q.dtype, job) }
}

/// Runs a job over the documents on tiles and another over those on vectors.
///
/// # Safety
/// As [`attend`], checked, with sums of `A`; the instruction sets of `choice` are present.
unsafe fn run<'a, A: SumType, J: Job>(
    crew: Crew<'_>,
    choice: EngineChoice<'a>,
    dtype: Dtype,
    job: impl Fn(Documents<'a>) -> J,
) {
    let units = [choice.tiles, choice.vectors]
        .map(|documents| documents.map(|documents| Units::new(job(documents), documents.isa, dtype)));
    crew.run(&|lines| {
        for units in units.iter().flatten() {
            // SAFETY: the contract of this function.
            unsafe { units.work::<A>(lines) };
        }
    });
}

/// Copies, casts and ordered sums: see [`Transform`] and [`crate::call::Block`]. Sums with an f64 operand are kept
/// in f64, others in f32.
///
/// # Errors
/// [`Error::Invalid`] when a source has another shape than its block, or is not in the list; nothing was touched then.
///
/// # Safety
/// Sources are valid for reads, blocks for writes; blocks overlap no other block and no source, but for a first source
/// that is the block itself.
pub unsafe fn transform(call: &Transform) -> Result<()> {
    check_transform(call)?;
    // SAFETY: shapes and types are checked; sources and blocks are valid and apart (the contract of this function).
    unsafe { transform_rows(call) };
    Ok(())
}

/// Row sums before the backward: see [`Delta`].
///
/// # Errors
/// [`Error::Invalid`] when shapes or types differ; nothing was touched then.
///
/// # Safety
/// o, d_o, lse and d_lse are valid for reads, delta for writes, and delta overlaps none.
pub unsafe fn delta(call: &Delta) -> Result<()> {
    check_delta(call)?;
    // SAFETY: shapes and types are checked; the tensors are valid and delta is apart (the contract of this function).
    unsafe { by_sums!(call.o.dtype, row_sums(call)) };
    Ok(())
}

/// Rows that no pair covers: see [`Finish`].
///
/// # Errors
/// [`Error::Invalid`] when shapes or types differ or a row does not exist; nothing was touched then.
///
/// # Safety
/// The rows of o and lse are valid for writes, sinks for reads; nothing else accesses them meanwhile.
pub unsafe fn finish(call: &Finish) -> Result<()> {
    check_finish(call)?;
    // SAFETY: shapes and types are checked; the rows are valid and not shared (the contract of this function).
    unsafe { by_sums!(call.o.dtype, empty_rows(call)) };
    Ok(())
}

/// The workers with the scratch's memory, if it was reserved for these dims.
fn memory<'a>(scratch: &'a mut Scratch, dims: &Dims) -> Result<Crew<'a>> {
    let (workers, held) = (scratch.workers(), scratch.held());
    match scratch.crew(dims) {
        Some(crew) => Ok(crew),
        None => Err(Error::invalid(
            "scratch",
            alloc::format!("{held} bytes"),
            alloc::format!(
                "{} bytes for {workers} worker{} at head_dim {} and value_dim {} of {}",
                Scratch::bytes(workers, dims),
                if workers == 1 { "" } else { "s" },
                dims.head_dim,
                dims.value_dim,
                dims.dtype
            ),
        )
        .hint("reserve it for the largest head_dim and value_dim first")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Band, HeadMap, Mode, Pair, QRange, Range, Ranges, Score};
    use crate::element::{Accumulator, Element};
    use crate::kernel::reference::Attention;
    use alloc::{vec, vec::Vec};
    use core::sync::atomic::AtomicUsize;
    use half::bf16;
    use product::engine::Dense;
    use vector::simd::Vector;

    /// A causal problem of 150 tokens through the kernels of `V`, against the reference.
    ///
    /// # Safety
    /// The instruction set of `V` is present.
    unsafe fn check<E: Element<Acc: SumType>, V: Vector<T = E::Acc>>(bound: f64) {
        let (n, d) = (150, 40);
        let numbers = |seed: usize| -> Vec<E> {
            (0..n * d).map(|i| E::from_f64(((i * 7919 + seed * 104_729) % 2003) as f64 / 1000.0 - 1.0)).collect()
        };
        let mut inputs = [numbers(1), numbers(2), numbers(3), numbers(4)];
        let wide: Vec<Vec<f64>> = inputs.iter().map(|x| x.iter().map(|x| x.to_f64()).collect()).collect();
        let score = Score { scale: 0.3, softcap: 4.0, window_left: 90, window_right: 0 };
        let cu = [0, n as i32];
        let reference = Attention {
            q: &wide[0],
            k: &wide[1],
            v: &wide[2],
            cu_seqlens_q: &cu,
            cu_seqlens_k: &cu,
            q_start: &[0],
            heads: 1,
            kv_heads: 1,
            head_dim: d,
            value_dim: d,
            score,
            alibi_slopes: None,
            sinks: None,
            dropout: None,
        };
        let out = reference.forward();
        let gradient = reference.backward(&wide[3], &out);
        let round = |x: Vec<f64>| -> Vec<E::Acc> { x.into_iter().map(E::Acc::from_f64).collect() };
        let (mut lse, mut running_lse) = (round(out.lse.clone()), vec![E::Acc::ZERO; 2 * n]);
        let dot = |(a, b): (&[f64], &[f64])| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
        let mut delta = round(wide[3].chunks(d).zip(out.o.chunks(d)).map(dot).collect());
        let mut results = vec![vec![E::Acc::ZERO; n * d]; 4];
        fn raw<T: Element>(x: &mut [T], dim: usize) -> RawTensor {
            RawTensor::compact(x.as_mut_ptr().cast(), T::DTYPE, (x.len() / dim) as u64, 1, dim as u32)
        }
        let [q, k, v, d_o] = inputs.each_mut().map(|x| raw(x, d));
        let mut results_raw = results.iter_mut().map(|x| raw(x, d));
        let [running, dq, dk, dv] = core::array::from_fn(|_| results_raw.next().unwrap());
        let (lse, delta, running_lse) = (raw(&mut lse, 1), raw(&mut delta, 1), raw(&mut running_lse, 2));
        let range = Range::plain(0, n as u32, 0, 0);
        let rows = [QRange { range, document: [0; 2], keys_begin: 0, keys_end: 1, mode: Mode::First }];
        let ranges = Ranges { q: &rows, k: &[range], pairs: &[Pair { k: 0, band: 0 }], bands: &[Band::WHOLE] };
        let heads = HeadMap { q_offset: 0, kv_offset: 0, group: 1 };
        let none = RawTensor::NONE;
        let backward =
            AttendBackward { lse, delta, dq, dk, dv, ..AttendBackward::new([q, k, v, d_o], heads, score, ranges) };
        let forward = Attend { running, running_lse, lse, ..Attend::new([q, k, v, none], heads, score, ranges) };
        let dims = check::attend(&forward).unwrap();
        let mut scratch = Scratch::new(1);
        scratch.reserve(dims.dtype, dims.head_dim, dims.value_dim);
        let lines = scratch.crew(&dims).unwrap().lines;
        let documents = Documents::all(Isa::Portable);
        // SAFETY: the tensors are the vectors above; the caller has the instruction set.
        unsafe {
            // The backward first, while lse is the reference's.
            let job = keys::KeyPass { call: &backward, documents, queries: true, workers: 1, order: DqOrder::new() };
            job.work::<Dense<V>>(lines, &AtomicUsize::new(0));
            forward_pass::ForwardPass {
                call: &forward,
                table: &[],
                documents,
                lanes: [memory::arena::LANES; 2],
                few: false,
                stream: false,
            }
            .work::<Dense<V>>(lines, &AtomicUsize::new(0));
        }
        for (found, expected) in results.iter().zip([&out.o, &gradient.dq, &gradient.dk, &gradient.dv]) {
            let square = |x: f64| x * x;
            let error: f64 = found.iter().zip(expected).map(|(x, y)| square(x.to_f64() - y)).sum();
            let norm: f64 = expected.iter().map(|&y| square(y)).sum();
            assert!((error / norm).sqrt() < bound, "{}: {}", V::W, (error / norm).sqrt());
        }
    }

    #[test]
    fn every_instruction_set() {
        // SAFETY: arrays are always there, and the others are asked for.
        unsafe {
            check::<f32, <f32 as SumType>::Portable>(2e-6);
            check::<bf16, <f32 as SumType>::Portable>(2e-6);
            check::<f64, <f64 as SumType>::Portable>(1e-13);
            #[cfg(target_arch = "aarch64")]
            {
                check::<f32, <f32 as SumType>::Neon>(2e-6);
                check::<bf16, <f32 as SumType>::Neon>(2e-6);
                check::<f64, <f64 as SumType>::Neon>(1e-13);
            }
            #[cfg(target_arch = "x86_64")]
            if vector::x86::has_avx2() {
                check::<f32, <f32 as SumType>::Avx2>(2e-6);
                check::<f64, <f64 as SumType>::Avx2>(1e-13);
            }
            #[cfg(target_arch = "x86_64")]
            if vector::x86::has_avx512() {
                check::<f32, <f32 as SumType>::Avx512>(2e-6);
                check::<f64, <f64 as SumType>::Avx512>(1e-13);
            }
        }
    }
}
