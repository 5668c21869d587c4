// SPDX-License-Identifier: MIT OR Apache-2.0
//! Joins segments of a scan on the CPU: see [`Compose`].
//!
//! Sums run over the columns of the decay in their order, and the addend comes first, so the bits of a join depend on
//! its numbers alone. A row of the result is a sum of scaled rows, which the compiler makes vector code of.

use std::format;

use super::check;
use crate::{
    call::{Compose, RawTensor},
    element::{Accumulator, Dtype},
    error::{Error, Result},
};

/// Joins the blocks of a call.
///
/// # Errors
/// [`Error::Invalid`] when shapes or types do not fit; nothing of the block was written then.
///
/// # Safety
/// Every element of the tensors must be valid for reads, those of destinations for writes, on this thread alone;
/// destinations overlap nothing else.
pub(crate) unsafe fn compose(call: &Compose<'_>) -> Result<()> {
    for b in call.blocks {
        let sources = call.sources.get(b.sources_begin as usize..b.sources_end as usize).unwrap_or(&[]);
        let (decay, of, add) = match *sources {
            [decay, of] => (decay, of, None),
            [decay, of, add] => (decay, of, Some(add)),
            _ => return Err(Error::invalid("compose.sources", sources.len(), "2 or 3")),
        };
        check_shapes(call.matrix, &b.dst, &decay, &of, add.as_ref())?;
        // SAFETY: shapes and types fit (checked above); the elements are valid and the destination apart (the
        // contract).
        unsafe {
            match b.dst.dtype {
                Dtype::F64 => rows::<f64>(&b.dst, &decay, &of, add.as_ref(), call.matrix),
                _ => rows::<f32>(&b.dst, &decay, &of, add.as_ref(), call.matrix),
            }
        }
    }
    Ok(())
}

/// Refuses tensors that do not fit together.
fn check_shapes(
    matrix: bool,
    dst: &RawTensor,
    decay: &RawTensor,
    of: &RawTensor,
    add: Option<&RawTensor>,
) -> Result<()> {
    for (name, t) in [("compose.of", Some(of)), ("compose.add", add)] {
        let Some(t) = t else { continue };
        check::same_shape(|| name.into(), t, dst)?;
    }
    for (name, t) in [("of", of), ("decay", decay), ("add", add.unwrap_or(dst))] {
        if t.dtype != dst.dtype || !matches!(t.dtype, Dtype::F32 | Dtype::F64) {
            return Err(Error::invalid(format!("compose.{name}.dtype"), t.dtype, "f32 or f64, one for all"));
        }
    }
    let width = if matrix { (decay.dim as usize).isqrt() } else { 1 };
    let rows = decay.dim as usize / width.max(1);
    let fits = (decay.tokens, decay.heads) == (dst.tokens, dst.heads)
        && rows > 0
        && (!matrix || width * width == decay.dim as usize)
        && (dst.dim as usize).is_multiple_of(rows);
    if !fits {
        let found = format!("[{}, {}, {}]", decay.tokens, decay.heads, decay.dim);
        let expected = format!("to fit [{}, {}, {}]", dst.tokens, dst.heads, dst.dim);
        return Err(Error::invalid("compose.decay", found, expected));
    }
    Ok(())
}

/// # Safety
/// As [`compose`], with tensors of type `A` whose shapes fit.
unsafe fn rows<A: Accumulator>(
    dst: &RawTensor,
    decay: &RawTensor,
    of: &RawTensor,
    add: Option<&RawTensor>,
    matrix: bool,
) {
    let dim = dst.dim as usize;
    // Columns of the decay.
    let width = if matrix { (decay.dim as usize).isqrt() } else { 1 };
    let count = decay.dim as usize / width;
    let columns = dim / count;
    for token in 0..dst.tokens {
        for head in 0..dst.heads {
            let at = |t: &RawTensor| t.rows(token, 1).heads(head, 1).ptr.cast::<A>();
            // SAFETY: the elements of one head of one row, which are contiguous, valid, and of type `A`; the
            // destination overlaps none of the others (the contract).
            let (to, by, from, add) = unsafe {
                (
                    core::slice::from_raw_parts_mut(at(dst), dim),
                    core::slice::from_raw_parts(at(decay).cast_const(), decay.dim as usize),
                    core::slice::from_raw_parts(at(of).cast_const(), dim),
                    add.map(|t| core::slice::from_raw_parts(at(t).cast_const(), dim)),
                )
            };
            match add {
                Some(add) => to.copy_from_slice(add),
                None => to.fill(A::ZERO),
            }
            for (i, to) in to.chunks_exact_mut(columns).enumerate() {
                for j in 0..width {
                    let (by, row) = (by[i * width + j], if matrix { j } else { i });
                    let from = &from[row * columns..(row + 1) * columns];
                    to.iter_mut().zip(from).for_each(|(x, &y)| *x = *x + by * y);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Block;
    use std::vec::Vec;

    fn tensor(values: &mut [f32], heads: u32) -> RawTensor {
        RawTensor::compact(values.as_mut_ptr().cast(), Dtype::F32, 1, heads, values.len() as u32 / heads)
    }

    fn joined(decay: &mut [f32], of: &mut [f32], add: Option<&mut [f32]>, heads: u32, matrix: bool) -> Vec<f32> {
        let mut dst = std::vec![f32::NAN; of.len()];
        let mut sources = std::vec![tensor(decay, heads), tensor(of, heads)];
        sources.extend(add.map(|add| tensor(add, heads)));
        let block = Block { dst: tensor(&mut dst, heads), sources_begin: 0, sources_end: sources.len() as u32 };
        // SAFETY: tensors of memory that lives here, apart from one another.
        unsafe { compose(&Compose { blocks: &[block], sources: &sources, matrix }) }.unwrap();
        dst
    }

    #[test]
    fn a_diagonal_scales_the_rows_of_each_head() {
        // Two heads, two key dims, three columns.
        let mut of: Vec<f32> = (1..=12).map(|x| x as f32).collect();
        let mut add = std::vec![100.0; 12];
        let found = joined(&mut [2.0, 3.0, -1.0, 0.5], &mut of, Some(&mut add), 2, false);
        assert_eq!(found, [102., 104., 106., 112., 115., 118., 93., 92., 91., 105., 105.5, 106.]);
        // A decay of a decay, number by number.
        assert_eq!(joined(&mut [2.0, 3.0], &mut [5.0, 7.0], None, 1, false), [10.0, 21.0]);
    }

    #[test]
    fn a_matrix_is_applied_from_the_left() {
        // [[1, 2], [3, 4]] · [[1, 0, 2], [0, 1, 5]] + 1
        let found = joined(&mut [1., 2., 3., 4.], &mut [1., 0., 2., 0., 1., 5.], Some(&mut [1.; 6]), 1, true);
        assert_eq!(found, [2., 3., 13., 4., 5., 27.]);
        // A head of one key dim, beside another of its own.
        assert_eq!(joined(&mut [2., 3.], &mut [1., 2., 3., 4.], None, 2, true), [2., 4., 9., 12.]);
    }

    #[test]
    fn shapes_that_do_not_fit_are_named() {
        let (mut a, mut b, mut c) = ([1.0f32; 3], [1.0f32; 4], [0.0f32; 4]);
        let sources = [tensor(&mut a, 1), tensor(&mut b, 1)];
        let block = Block { dst: tensor(&mut c, 1), sources_begin: 0, sources_end: 2 };
        for matrix in [false, true] {
            // SAFETY: refused before any access.
            let error = unsafe { compose(&Compose { blocks: &[block], sources: &sources, matrix }) }.unwrap_err();
            assert!(std::format!("{error}").contains("compose.decay is [1, 1, 3]"), "{error}");
        }
    }
}
