// SPDX-License-Identifier: MIT OR Apache-2.0
//! What moves memory around attention: transforms in every form, delta, finish.

use crate::harness::*;
use cpattn::kernel::cpu::{self};
use cpattn::kernel::{Block, Delta, Finish, Range, RawTensor, Transform};
use cpattn::{Dtype, Element};
use half::{bf16, f16};

#[test]
fn transforms() {
    fn raw<T: Element>(x: &mut [T], strides: (i64, i64), shape: (u64, u32, u32)) -> RawTensor {
        RawTensor {
            ptr: x.as_mut_ptr().cast(),
            token_stride: strides.0,
            head_stride: strides.1,
            tokens: shape.0,
            heads: shape.1,
            dim: shape.2,
            dtype: T::DTYPE,
        }
    }
    let shape = (3, 2, 300);
    // A cast and an ordered sum, into head-major memory; zeros; and a sum added to in place.
    let mut a: Vec<f32> = (0..1800).map(|i| i as f32 * 0.37 - 200.0).collect();
    let mut b: Vec<bf16> = (0..1800).map(|i| bf16::from_f32(1e3 - i as f32)).collect();
    let mut sum = vec![bf16::ZERO; 1800];
    let mut wide = vec![f64::NAN; 1800];
    let mut zeros = vec![f16::NAN; 1800];
    let mut total = a.clone();
    let compact = (600, 300);
    let sources = [
        raw(&mut a, compact, shape),
        raw(&mut b, compact, shape),
        raw(&mut b, compact, shape),
        raw(&mut total, compact, shape),
        raw(&mut a, compact, shape),
    ];
    let block = |dst, sources_begin, sources_end| Block { dst, sources_begin, sources_end };
    let blocks = [
        block(raw(&mut sum, (300, 900), shape), 0, 2),
        block(raw(&mut wide, compact, shape), 2, 3),
        block(raw(&mut zeros, compact, shape), 0, 0),
        block(sources[3], 3, 5),
    ];
    // SAFETY: the tensors are the vectors above.
    unsafe { cpu::transform(&Transform { blocks: &blocks, sources: &sources }) }.unwrap();
    for t in 0..3 {
        for h in 0..2 {
            for d in 0..300 {
                let (i, j) = (t * 600 + h * 300 + d, t * 300 + h * 900 + d);
                assert_eq!(sum[j], bf16::from_f32(a[i] + b[i].to_f32()));
                assert_eq!(wide[i], b[i].to_f64());
                assert_eq!(total[i], a[i] + a[i]);
            }
        }
    }
    assert!(zeros.iter().all(|x| x.to_bits() == 0));
    let wrong = [block(sources[0].rows(0, 2), 1, 2)];
    // SAFETY: refused before anything is touched.
    let refused = unsafe { cpu::transform(&Transform { blocks: &wrong, sources: &sources }) };
    assert_eq!(
        refused.unwrap_err().to_string(),
        "blocks[0].sources[0] [tokens, heads, dim] is [3, 2, 300], expected [2, 2, 300]"
    );
    // What lies where the block does may only be the block itself, and first.
    let strided = RawTensor { token_stride: 1200, ..sources[0] };
    let wrong = [sources[1], sources[0], strided, RawTensor { dtype: Dtype::Bf16, ..sources[0] }];
    for (begin, end, text) in [
        (0, 2, "blocks[0].sources[1] is dst, expected another tensor: only the first source may be dst"),
        (
            2,
            3,
            "blocks[0].sources[0] is f32 with strides (1200, 300), expected f32 with strides (600, 300), as dst, where it \
             lies",
        ),
        (
            3,
            4,
            "blocks[0].sources[0] is bf16 with strides (600, 300), expected f32 with strides (600, 300), as dst, where \
             it lies",
        ),
    ] {
        let blocks = [block(sources[0], begin, end)];
        // SAFETY: refused before anything is touched.
        let refused = unsafe { cpu::transform(&Transform { blocks: &blocks, sources: &wrong }) };
        assert_eq!(refused.unwrap_err().to_string(), text);
    }
    // Nothing steps by the token stride of a single token.
    let one = sources[3].rows(0, 1);
    let call = Transform { blocks: &[block(one, 0, 1)], sources: &[RawTensor { token_stride: 7, ..one }] };
    // SAFETY: the tensors are the vectors above.
    unsafe { cpu::transform(&call) }.unwrap();

    let (mut delta, mut lse) = (vec![f32::NAN; 6], vec![f32::NAN; 6]);
    let o = raw(&mut b, compact, shape);
    let sums = raw(&mut delta, (1, 3), (3, 2, 1));
    // SAFETY: as above.
    unsafe { cpu::delta(&Delta { o, d_o: o, delta: sums }) }.unwrap();
    for t in 0..3 {
        for h in 0..2 {
            let exact: f64 = b[t * 600 + h * 300..][..300].iter().map(|x| x.to_f64() * x.to_f64()).sum();
            assert!((f64::from(delta[h * 3 + t]) / exact - 1.0).abs() < 1e-6);
        }
    }
    let mut sinks = [1.5f32, f32::NEG_INFINITY];
    let rows = [Range::plain(1, 2, 0, 0)];
    let before = b.clone();
    let o = raw(&mut b, compact, shape);
    let finish = Finish { o, lse: raw(&mut lse, (2, 1), (3, 2, 1)), sinks: per_head(&mut sinks, true), rows: &rows };
    // SAFETY: as above.
    unsafe { cpu::finish(&finish) }.unwrap();
    assert_eq!(b[..600], before[..600]);
    assert!(b[600..].iter().all(|x| x.to_f32() == 0.0));
    assert!(lse[..2].iter().all(|x| x.is_nan()));
    assert_eq!(lse[2..], [1.5, f32::NEG_INFINITY, 1.5, f32::NEG_INFINITY]);
}
