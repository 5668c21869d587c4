// SPDX-License-Identifier: MIT OR Apache-2.0
//! Views against an index formula, refusals by name, and, in `overlap`, whether tensors share memory.

mod overlap;

use crate::seeds::each_seed;
use cpattn::{Dtype, Element, Error, View, ViewMut, call::RawTensor, disjoint};
use half::{bf16, f16};
use overlap::footprint;

/// The parts of an `Error::Invalid`.
#[track_caller]
fn refusal<T>(result: Result<T, Error>) -> (String, String, String, &'static str) {
    match result {
        Err(Error::Invalid { argument, found, expected, hint }) => (argument, found, expected, hint),
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("accepted"),
    }
}

#[track_caller]
fn refuses<T>(result: Result<T, Error>, argument: &str, found: &str, expected: &str) {
    let (a, f, e, _) = refusal(result);
    assert!(
        a == argument && f.contains(found) && e.contains(expected),
        "{a} is {f}, expected {e}; not: {argument} is {found}, expected {expected}"
    );
}

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| i as f32).collect()
}

#[test]
fn a_compact_view_borrows_its_data() {
    let data = numbers(2 * 3 * 4);
    let view = View::new(&data, 2, 3, 4).unwrap();
    assert_eq!((view.shape(), view.token_stride(), view.head_stride()), ([2, 3, 4], 12, 4));
    assert!(view.is_compact());
    assert_eq!(view.as_slice().unwrap().as_ptr(), data.as_ptr());
    assert_eq!(view.row(1, 2), &data[20..24]);
    assert_eq!(view.raw(), RawTensor::compact(data.as_ptr().cast_mut().cast(), Dtype::F32, 2, 3, 4));
}

#[test]
fn lse_is_head_major() {
    let data = numbers(3 * 5);
    let lse = View::head_major(&data, 5, 3).unwrap();
    assert_eq!((lse.shape(), lse.token_stride(), lse.head_stride()), ([5, 3, 1], 1, 5));
    assert_eq!(lse.row(4, 1), &[9.0]);
    assert!(lse.as_slice().is_none());
    let mut out = vec![0f32; 15];
    ViewMut::head_major(&mut out, 5, 3).unwrap().row_mut(4, 1)[0] = 9.0;
    assert_eq!(out[9], 9.0);
    refuses(View::head_major(&data, 5, 2), "data.len", "15", "5 × 2 × 1 = 10");
    refuses(ViewMut::head_major(&mut out, 4, 3), "data.len", "15", "4 × 3 × 1 = 12");
}

#[test]
fn wrong_lengths_are_refused() {
    let data = numbers(23);
    refuses(View::new(&data, 2, 3, 4), "data.len", "23", "2 × 3 × 4 = 24");
    refuses(View::new(&data, 1, 3, 4), "data.len", "23", "1 × 3 × 4 = 12");
    refuses(View::strided(&data, [2, 3, 4], [12, 4]), "data.len", "23", "at least 24 for shape [2, 3, 4]");
    let mut data = data;
    refuses(ViewMut::new(&mut data, 2, 3, 4), "data.len", "23", "24");
    refuses(ViewMut::strided(&mut data, [3, 1, 4], [10, 4]), "data.len", "23", "at least 24");
    assert!(View::strided(&data, [2, 3, 4], [11, 4]).is_ok());
}

#[test]
fn shapes_without_elements_are_legal() {
    for shape in [[0, 3, 4], [2, 0, 4], [2, 3, 0], [0, 0, 0]] {
        let [tokens, heads, dim] = shape;
        let view = View::<f64>::new(&[], tokens, heads, dim).unwrap();
        assert_eq!(view.shape(), shape);
        assert_eq!(view.as_slice().map(<[f64]>::len), Some(0));
        assert!(View::<f64>::strided(&[], shape, [100, 7]).is_ok());
        let mut view = ViewMut::<f64>::strided(&mut [], shape, [0, 0]).unwrap();
        view.fill(1.0);
        assert_eq!(view.rows(tokens..tokens).tokens(), 0);
    }
    let view = View::<f64>::new(&[], 2, 3, 0).unwrap();
    assert!(view.row(1, 2).is_empty());
    // SAFETY: a tensor without elements has no memory that could be wrong.
    assert_eq!(unsafe { View::<f32>::from_raw(RawTensor::NONE) }.unwrap().shape(), [0, 0, 0]);
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let data = numbers(8);
    let many = usize::MAX;
    refuses(View::new(&data, 1, many, 2), "heads", &many.to_string(), "at most");
    refuses(View::new(&data, 1, 1 << 32, 1), "heads", "4294967296", "at most 4294967295");
    refuses(View::new(&data, 1, 1, 1 << 32), "dim", "4294967296", "at most 4294967295");
    refuses(View::new(&data, many, 2, 2), "token_stride", "4 for", "a span of at most");
    refuses(View::strided(&data, [2, 1, 1], [many, 1]), "token_stride", "for 2 tokens", "a span of at most");
    refuses(View::strided(&data, [1, 2, 1], [1, many / 2]), "head_stride", "for 2 heads", "a span of at most");
    // No elements, but sub-views would overflow all the same.
    refuses(View::strided(&data, [many, 0, 1], [2, 1]), "token_stride", "2 for", "a span of at most");
    // Each span fits, their sum does not.
    let half = (i64::MAX as usize / 4 / 2) + 1;
    refuses(View::strided(&data, [1, 1, 1], [half, half]), "token_stride", "for 1 tokens", "a span of at most");
    // A broadcast addresses little memory and still has too many elements.
    refuses(View::strided(&data, [1 << 40, 1 << 30, 1], [0, 0]), "tokens", "1099511627776", "elements with");
}

#[test]
fn reading_may_broadcast_and_writing_may_not() {
    let mut data = numbers(8);
    let view = View::strided(&data, [5, 3, 8], [0, 0]).unwrap();
    assert_eq!(view.row(4, 2), &data[..]);
    refuses(ViewMut::strided(&mut data, [2, 1, 4], [0, 4]), "token_stride", "0", "at least 4, the extent of the heads");
    refuses(ViewMut::strided(&mut data, [1, 2, 4], [4, 3]), "head_stride", "3", "at least 4");
    // Tokens at 0 and 3, heads at 0 and 4 of each: [0, 2) [4, 6) and [3, 5) [7, 9).
    let mut data = numbers(12);
    refuses(
        ViewMut::strided(&mut data, [2, 2, 2], [3, 4]),
        "token_stride",
        "3 with head_stride 4",
        "at least 6, or a head_stride of at least 5",
    );
    // Interleaved, neither dimension nested in the other, and yet apart: 0 5 and 3 8.
    assert!(ViewMut::strided(&mut data, [2, 2, 1], [3, 5]).is_ok());
    assert!(ViewMut::strided(&mut data, [2, 3, 2], [2, 4]).is_ok());
    // One token: its stride does not matter.
    assert!(ViewMut::strided(&mut data, [1, 3, 4], [0, 4]).is_ok());
}

#[test]
fn casts_do_not_copy() {
    fn check<T: Element>() {
        let mut words = vec![0u64; 16];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        let (address, count) = (bytes.as_ptr(), bytes.len() / size_of::<T>());
        let view = View::<T>::from_bytes(bytes, count / 4, 2, 2).unwrap();
        assert_eq!((view.raw().ptr.cast_const(), view.raw().dtype), (address, T::DTYPE));
        ViewMut::<T>::from_bytes(bytes, count / 4, 2, 2).unwrap().fill(T::from_f64(1.5));
        let view = View::<T>::from_bytes(bytes, count, 1, 1).unwrap();
        assert!(view.as_slice().unwrap().iter().all(|x| x.to_f64() == 1.5));

        let size = size_of::<T>();
        refuses(View::<T>::from_bytes(&bytes[1..1 + size], 1, 1, 1), "bytes.ptr", "0x", &format!("multiple of {size}"));
        refuses(View::<T>::from_bytes(&bytes[..size + 1], 1, 1, 1), "bytes.len", &(size + 1).to_string(), "multiple");
        refuses(ViewMut::<T>::from_bytes(&mut bytes[1..1 + size], 1, 1, 1), "bytes.ptr", "0x", T::DTYPE.name());
        refuses(
            ViewMut::<T>::from_bytes(&mut bytes[..size + 1], 1, 1, 1),
            "bytes.len",
            &(size + 1).to_string(),
            T::DTYPE.name(),
        );
        refuses(View::<T>::from_bytes(bytes, 1, 1, 1), "data.len", &count.to_string(), "= 1");
    }
    check::<f16>();
    check::<bf16>();
    check::<f32>();
    check::<f64>();
}

#[test]
fn raw_tensors_are_checked() {
    let mut data = numbers(24);
    let raw = RawTensor::compact(data.as_mut_ptr().cast(), Dtype::F32, 2, 3, 4);
    // SAFETY: `raw` describes `data`, which outlives every view here and is not otherwise used; the altered
    // descriptions are refused before anything is read.
    unsafe {
        assert_eq!(View::<f32>::from_raw(raw).unwrap().row(1, 2), [20.0, 21.0, 22.0, 23.0]);
        assert!(ViewMut::<f32>::from_raw(raw).is_ok());
        refuses(View::<bf16>::from_raw(raw), "dtype", "f32", "bf16");
        refuses(View::<f32>::from_raw(RawTensor { ptr: std::ptr::null_mut(), ..raw }), "ptr", "null", "address");
        refuses(View::<f32>::from_raw(RawTensor { ptr: raw.ptr.wrapping_add(2), ..raw }), "ptr", "0x", "multiple of 4");
        refuses(View::<f32>::from_raw(RawTensor { token_stride: -12, ..raw }), "token_stride", "-12", "at least 0");
        refuses(View::<f32>::from_raw(RawTensor { head_stride: -1, ..raw }), "head_stride", "-1", "at least 0");
        let far = RawTensor { token_stride: i64::MAX / 4, ..raw };
        refuses(View::<f32>::from_raw(far), "token_stride", "for 2 tokens", "a span of at most");
        let far = RawTensor { tokens: u64::MAX, heads: 0, ..raw };
        refuses(ViewMut::<f32>::from_raw(far), "token_stride", "12 for", "a span of at most");
        refuses(ViewMut::<f32>::from_raw(RawTensor { token_stride: 0, ..raw }), "token_stride", "0", "at least 12");
    }
}

#[test]
fn mutable_views_split_and_fill() {
    let (tokens, heads, dim) = (3, 2, 4);
    let mut fused = vec![0f32; tokens * 3 * heads * dim + 1];
    *fused.last_mut().unwrap() = -1.0;
    let mut all = ViewMut::strided(&mut fused, [tokens, 3 * heads, dim], [3 * heads * dim, dim]).unwrap();
    assert!(all.is_compact());
    assert_eq!(all.as_mut_slice().unwrap().len(), tokens * 3 * heads * dim);
    let (mut dq, rest) = all.reborrow().split_heads(heads);
    let (mut dk, dv) = rest.split_heads(heads);
    let (mut early, mut late) = dv.split_rows(1);
    let named = [("dq", dq.raw(), true), ("dk", dk.raw(), true), ("dv", late.raw(), true), ("d_o", early.raw(), true)];
    assert_eq!(disjoint(&named), Ok(()));
    dq.fill(1.0);
    dk.fill(2.0);
    early.fill(3.0);
    late.fill(4.0);
    assert!(dq.as_mut_slice().is_none());
    assert_eq!(dk.row(2, 1), [2.0; 4]);
    dk.rows(1..2).heads_range(1..2).fill(5.0);
    assert_eq!((dk.as_view().row(1, 1), dk.as_view().row(1, 0)), (&[5.0; 4][..], &[2.0; 4][..]));
    for (i, &x) in fused.iter().enumerate() {
        let (token, head) = (i / 24, i % 24 / 4);
        let expected = match (token, head) {
            (3, _) => -1.0,
            (_, 0 | 1) => 1.0,
            (1, 3) => 5.0,
            (_, 2 | 3) => 2.0,
            (0, _) => 3.0,
            _ => 4.0,
        };
        assert_eq!(x, expected, "element {i}");
    }
}

#[test]
fn indices_out_of_range_panic() {
    let data = numbers(24);
    let view = View::new(&data, 2, 3, 4).unwrap();
    type Attempt = fn(View<'_, f32>) -> usize;
    let tries: [(&str, Attempt); 6] = [
        ("token 2 of 2", |v| v.row(2, 0).len()),
        ("head 3 of 3", |v| v.row(0, 3).len()),
        ("rows 1..3 of 2", |v| v.rows(1..3).tokens()),
        ("heads 4..4 of 3", |v| v.heads_range(4..4).tokens()),
        #[expect(clippy::reversed_empty_ranges, reason = "that is what must be refused")]
        ("rows 2..1 of 2", |v| v.rows(2..1).tokens()),
        ("token 0 of 0", |v| v.rows(1..1).row(0, 0).len()),
    ];
    for (message, attempt) in tries {
        let panic = std::panic::catch_unwind(|| attempt(view)).expect_err(message);
        assert_eq!(panic.downcast_ref::<String>().map(String::as_str), Some(message));
    }
}

#[test]
fn strided_views_follow_the_index_formula() {
    each_seed(10_000, |draw| {
        let shape = [draw.usize(..6), draw.usize(..5), draw.usize(..5)];
        let (strides, spare) = ([draw.usize(..24), draw.usize(..24)], draw.usize(..3));
        let [tokens, heads, dim] = shape;
        let index = |t: usize, h: usize, d: usize| t * strides[0] + h * strides[1] + d;
        let empty = tokens * heads * dim == 0;
        let needed = if empty { 0 } else { index(tokens - 1, heads - 1, dim - 1) + 1 };
        let mut data = numbers(needed + spare);
        if needed > 0 {
            refuses(View::strided(&data[..needed - 1], shape, strides), "data.len", "", &format!("at least {needed} "));
        }
        let view = View::strided(&data, shape, strides).unwrap();
        let part = view.rows(tokens / 2..tokens).heads_range(heads / 3..heads);
        for t in 0..tokens {
            for h in 0..heads {
                for d in 0..dim {
                    assert_eq!(view.row(t, h)[d], index(t, h, d) as f32);
                }
                if t >= tokens / 2 && h >= heads / 3 {
                    assert_eq!(part.row(t - tokens / 2, h - heads / 3).as_ptr(), view.row(t, h).as_ptr());
                }
            }
        }
        if let Some(all) = view.as_slice() {
            assert_eq!(all, &numbers(tokens * heads * dim)[..]);
        }

        let raw = view.raw();
        let (_, twice) = footprint(&raw);
        let mut written = data.clone();
        match ViewMut::strided(&mut data, shape, strides) {
            Err(error) => assert!(twice, "{}", error),
            Ok(mut view) => {
                assert!(!twice);
                view.fill(-1.0);
                for t in 0..tokens {
                    for h in 0..heads {
                        (0..dim).for_each(|d| written[index(t, h, d)] = -1.0);
                    }
                }
                assert_eq!(data, written);
            }
        }
    });
}
