// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a call is refused for, before anything is touched.

use crate::bits::backward_call;
use crate::harness::*;
use cpattn::Dtype;
use cpattn::call::{Attend, Band, Gradients, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor, Score};
use cpattn::kernel::cpu::{self, Scratch};

/// What is refused, and how it is said. Nothing is touched: the tensors have addresses that would fault.
#[test]
fn refusals() {
    let nowhere = |heads, dim| RawTensor::compact(std::ptr::without_provenance_mut(64), Dtype::F32, 8, heads, dim);
    let range = Range::plain(0, 8, 0, 0);
    let rows = [QRange { range, document: [0; 2], keys_begin: 0, keys_end: 1, mode: Mode::Only }];
    let ranges = Ranges { q: &rows, k: &[range], pairs: &[Pair { k: 0, band: 0 }], bands: &[Band::WHOLE] };
    let good = Attend {
        lse: nowhere(4, 1),
        ..Attend::new(
            [nowhere(4, 16), nowhere(2, 16), nowhere(2, 8), nowhere(4, 8)],
            HeadMap { q_offset: 0, kv_offset: 0, group: 2 },
            score(16, UNLIMITED, 0),
            ranges,
        )
    };
    let mut scratch = Scratch::new(1);
    let mut refused = |call: Attend, text: &str| {
        // SAFETY: refused before anything is touched, which is what is tested.
        let error = unsafe { cpu::attend(&call, &mut scratch) }.unwrap_err();
        assert_eq!(error.to_string(), text);
    };
    let of = |document, len| QRange { range: Range { len, ..range }, document, ..rows[0] };
    for (q, text) in [
        (
            &[of([7, 8], 8)][..],
            "[0].document is [7, 8], expected at least 8 tokens of q, the rows of its range, or [0, 0] if not given",
        ),
        (
            &[of([8, 7], 8)],
            "[0].document is [8, 7], expected at least 8 tokens of k, the rows of ranges.k[0], or [0, 0] if not given",
        ),
        (
            &[of([9, 8], 4), of([8, 8], 4)],
            "[1].document is [8, 8], expected [9, 8], as in ranges.q[0] of the same document",
        ),
        (
            &[of([9, 8], 4), of([0, 0], 4)],
            "[1].document is [0, 0], expected [9, 8], as in ranges.q[0] of the same document",
        ),
    ] {
        let ranges = Ranges { q, ..ranges };
        refused(Attend { ranges, ..good }, &format!("ranges.q{text}"));
    }
    // Lengths in ranges that are in no order of documents.
    let apart = [of([9, 8], 4), of([0, 0], 4), of([9, 8], 4)];
    let of_doc = |(doc, q): (u32, QRange)| QRange { range: Range { doc, ..q.range }, keys_begin: 0, keys_end: 0, ..q };
    let q: Vec<QRange> = [1, 2, 1].into_iter().zip(apart).map(of_doc).collect();
    let way = "lengths of documents need q ranges in the order of documents: sort them, or give [0, 0] in all";
    refused(
        Attend { ranges: Ranges { q: &q, k: &[], pairs: &[], bands: &[] }, ..good },
        &format!("ranges.q[2].range.doc is 1, expected at least 2, as in ranges.q[1]; {way}"),
    );
    let with = |score: Score| Attend { score, ..good };
    refused(Attend { k: nowhere(2, 15), ..good }, "k.dim is 15, expected 16");
    refused(Attend { k: RawTensor { dtype: Dtype::Bf16, ..good.k }, ..good }, "k.dtype is bf16, expected f32");
    refused(Attend { v: nowhere(3, 8), ..good }, "v.heads is 3, expected 2");
    refused(Attend { q: nowhere(4, 0), ..good }, "q.dim is 0, expected at least 1");
    refused(Attend { lse: nowhere(4, 2), ..good }, "lse.dim is 2, expected 1");
    let several = "tokens is 8, expected 1: there is one number for each head";
    let of_sinks = "sinks.tokens is 8, expected 1: there is one row of sinks for each head";
    refused(Attend { sinks: nowhere(4, 3), ..good }, of_sinks);
    let none = RawTensor { tokens: 1, dim: 0, ..nowhere(4, 1) };
    refused(Attend { sinks: none, ..good }, "sinks.dim is 0, expected at least 1: the sinks of each head");
    refused(Attend { max_logit: nowhere(4, 1), ..good }, &format!("max_logit.{several}"));
    let slopes = RawTensor { tokens: 2, ..nowhere(4, 1) };
    refused(Attend { alibi_slopes: nowhere(3, 1), ..good }, "alibi_slopes.heads is 3, expected 4");
    let third = [QRange { range: Range { doc: 2, ..rows[0].range }, keys_begin: 0, keys_end: 0, ..rows[0] }];
    let of_document = "ranges.q[0].range.doc is 2, expected below 2, the rows of alibi_slopes; give slopes a row for \
                       each document, or one row for all of them";
    refused(Attend { alibi_slopes: slopes, ranges: Ranges { q: &third, ..ranges }, ..good }, of_document);
    refused(with(Score { scale: f64::NAN, ..good.score }), "scale is NaN, expected a finite number");
    let window = "expected 0 to 4294967295, or i64::MAX for no limit";
    for limit in [-1, i64::MIN, 1 << 32, i64::MAX - 1] {
        refused(with(Score { window_left: limit, ..good.score }), &format!("window_left is {limit}, {window}"));
        refused(with(Score { window_right: limit, ..good.score }), &format!("window_right is {limit}, {window}"));
    }
    refused(
        with(Score { softcap: -1.0, ..good.score }),
        "softcap is -1, expected a finite number above 0, or 0 for none",
    );
    refused(
        with(Score { scale: 1e300, ..good.score }),
        "scale is 1e300, expected at most 3.4028234663852886e38, the largest f32",
    );
    refused(
        with(Score { softcap: 1e-42, ..good.score }),
        "softcap is 1e-42, expected 1.1754943508222875e-38 to 3.4028234663852886e38 (f32); 0 means no softcap",
    );
    refused(
        Attend { heads: HeadMap { q_offset: 2, ..good.heads }, ..good },
        "k.heads is kv heads 0..2, expected to hold 1..3; q head h of the call reads kv head (q_offset + h) / group",
    );
    let long = [Range::plain(1, 8, 0, 0)];
    refused(
        Attend { ranges: Ranges { k: &long, ..good.ranges }, ..good },
        "ranges.k[0].row is 1 with len 8, expected rows of k, which has 8",
    );
    let other = [Range { doc: 3, ..range }];
    refused(
        Attend { ranges: Ranges { k: &other, ..good.ranges }, ..good },
        "ranges.k[0].doc is 3, expected 0, the document of q range 0, under a band without limits",
    );
    refused(
        Attend { ranges: Ranges { pairs: &[Pair { k: 1, band: 0 }], ..good.ranges }, ..good },
        "ranges.pairs of q range 0: k is 1, expected an index of ranges.k, which has 1",
    );
    refused(
        Attend { ranges: Ranges { pairs: &[], ..good.ranges }, ..good },
        "ranges.q[0].keys is 0..1, expected entries of pairs, which has 0",
    );
    let shifted = [Band::WHOLE, Band { shift: -(1 << 42) - 1, ..Band::WHOLE }];
    refused(
        Attend { ranges: Ranges { bands: &shifted, ..good.ranges }, ..good },
        "ranges.bands[1].shift is -4398046511105, expected within ±2^42",
    );
    let elsewhere = [Range { doc: 1, ..range }];
    refused(
        Attend { ranges: Ranges { k: &elsewhere, ..good.ranges }, ..good },
        "ranges.k[0].doc is 1, expected 0, the document of q range 0, under a band without limits",
    );
    let limited = [Band { high: 0, ..Band::WHOLE }];
    let far = [Range { pos: (1 << 61) - 6, ..elsewhere[0] }];
    refused(
        Attend { ranges: Ranges { k: &far, bands: &limited, ..good.ranges }, ..good },
        "ranges.k[0] is positions 2305843009213693946..=2305843009213693953, expected positions within ±2^61 under a \
         band with limits",
    );
    let stripe = [Range { block: 4, period: 3, ..range }];
    refused(
        Attend { ranges: Ranges { k: &stripe, ..good.ranges }, ..good },
        "ranges.k[0] is block 4 and period 3, expected 1 <= block <= period",
    );
    let first = [QRange { mode: Mode::First, ..rows[0] }];
    refused(
        Attend { ranges: Ranges { q: &first, ..good.ranges }, ..good },
        "running is none, expected a tensor of dim 8: the mode of ranges.q[0] needs it",
    );
    refused(
        Attend { running: good.o, ranges: Ranges { q: &first, ..good.ranges }, ..good },
        "running_lse is none, expected a tensor of dim 2: the mode of ranges.q[0] needs it",
    );
    refused(Attend { running_lse: nowhere(4, 3), ..good }, "running_lse.dim is 3, expected 2");
    refused(
        Attend { lse: RawTensor::NONE, ..good },
        "lse is none, expected a tensor of dim 1: the mode of ranges.q[0] needs it",
    );
    // SAFETY: as above.
    let error = unsafe { cpu::attend(&good, &mut scratch) }.unwrap_err();
    assert!(error.to_string().starts_with("scratch is"), "{error}");
    let backward = backward_call(&good, good.o, good.lse, Gradients::All, [good.q, good.q, nowhere(4, 7)]);
    // SAFETY: as above.
    let error = unsafe { cpu::attend_backward(&backward, &mut scratch) }.unwrap_err();
    assert_eq!(error.to_string(), "dv.dim is 7, expected 8");
}
