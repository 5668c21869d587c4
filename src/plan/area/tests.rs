// SPDX-License-Identifier: MIT OR Apache-2.0
//! Areas, loads and reaches beside counting token by token.

use super::*;
use crate::{Batch, Layout};
use alloc::vec;

const MASKS: [Mask; 8] = [
    Mask::full(),
    Mask::causal(),
    Mask::window(3, 0),
    Mask::window(0, 0),
    Mask::window(2, 4),
    Mask::window(0, 1),
    Mask { left: Some(1), right: None },
    Mask { left: None, right: Some(2) },
];

/// Long stripes of one period, whose blocks are not looped over.
#[test]
fn areas_of_stripes_of_one_period_are_the_sums_of_their_blocks() {
    let masks = [Mask::window(700, 0), Mask::window(33, 450), Mask { left: Some(90), right: None }];
    let mut seen = 0;
    for (q_block, k_block, period) in [(1, 1, 2), (2, 2, 8), (4, 4, 4), (3, 1, 7), (1, 5, 5)] {
        for (q_len, k_len) in [(300, 300), (299, 120), (97, 301), (61, 1)] {
            for (q_pos, k_pos) in [(0, 0), (3, 1), (-40, 900), (1500, 2), (200, -1)] {
                let q = Range { row: 0, pos: q_pos, len: q_len, block: q_block, period, doc: 0 };
                let k = Range { row: 0, pos: k_pos, len: k_len, block: k_block, period, doc: 0 };
                for mask in MASKS.into_iter().chain(masks) {
                    let want: u64 = blocks(&q).map(|b| b.area(&k, mask)).sum();
                    assert_eq!(q.area(&k, mask), want, "{q:?} {k:?} {mask:?}");
                    seen += u64::from(want > 0);
                }
            }
        }
    }
    assert!(seen > 400, "{seen}");
    // A document as long as one can be, in stripes of 4 over two ranks: 8 i + (1 + 2 + 3 + 4) keys for block i,
    // twice.
    let blocks = (1u64 << 28) - 1;
    let part = |pos| Range { row: 0, pos, len: 4 * blocks as u32, block: 4, period: 8, doc: 0 };
    let (own, other) = (part(0).area(&part(0), Mask::causal()), part(4).area(&part(0), Mask::causal()));
    let below = 16 * (blocks * (blocks - 1) / 2);
    assert_eq!((own, other), (below + 10 * blocks, below + 16 * blocks));
}

#[test]
fn a_sum_of_many_blocks_looks_at_few_of_them() {
    let looked = core::cell::Cell::new(0);
    let bends = [-5, 100, 70_000, i64::MAX];
    let f = |i: u32| {
        looked.set(looked.get() + 1);
        u64::from(i.clamp(100, 70_000) - 100) + u64::from(i == 1 << 20)
    };
    let want: u64 = (0..=1 << 20).map(f).sum();
    looked.set(0);
    assert_eq!(piecewise_linear_sum((1 << 20) + 1, &bends, f), want);
    assert!(looked.get() < 30, "{}", looked.get());
}

#[test]
fn areas_and_edges_are_what_counting_gives() {
    let mut shapes = vec![];
    for (block, period) in [(1, 1), (1, 2), (2, 5), (3, 4), (4, 4), (1, 7)] {
        for len in [0u32, 1, 2, 5, 9] {
            for pos in [-4i64, 0, 3, 11] {
                shapes.push(Range { row: 0, pos, len, block, period, doc: 0 });
            }
        }
    }
    let (mut seen, mut crossed) = (0, 0);
    for q in &shapes {
        for k in &shapes {
            for mask in MASKS {
                let positions = |r: &Range| (0..r.len).map(|i| r.position(i)).collect::<Vec<_>>();
                let want: usize =
                    positions(q).iter().map(|&x| positions(k).iter().filter(|&&y| mask.allows(x, y)).count()).sum();
                assert_eq!(q.area(k, mask), want as u64, "{q:?} {k:?} {mask:?}");
                seen += want;
                let ends = |x: i64| [mask.right.map(|r| x + i64::from(r)), mask.left.map(|l| x - i64::from(l))];
                let ends = positions(q).into_iter().flat_map(ends).flatten();
                let want = ends.filter(|end| positions(k).contains(end)).count();
                assert_eq!(q.edges(k, mask), want as u64, "{q:?} {k:?} {mask:?}");
                crossed += want;
            }
        }
    }
    assert!(seen > 100_000 && crossed > 10_000, "{seen} {crossed}");
}

#[test]
fn loads_are_what_counting_gives() {
    let batches = [
        Batch::from_lengths(&[7, 0, 1, 13, 3]).unwrap(),
        Batch::cross(&[0, 3, 3, 10], &[0, 8, 9, 21], None).unwrap(),
        Batch::cross(&[0, 6, 11], &[0, 2, 14], Some(&[-2, 5])).unwrap(),
        Batch::from_lengths(&[40]).unwrap(),
    ];
    let layouts = [
        Layout::Contiguous,
        Layout::Zigzag,
        Layout::ZigzagPack,
        Layout::Striped { stripe: 1 },
        Layout::Striped { stripe: 3 },
        Layout::Balanced { chunks: 3 },
    ];
    let mut lists = Default::default();
    for batch in &batches {
        for mask in MASKS {
            for layout in layouts {
                for ring in [1, 2, 3, 5] {
                    let shares = Shares::new(batch, mask, layout, ring).unwrap();
                    for r in 0..ring {
                        let tokens = |side| {
                            let mut list = vec![];
                            shares.segments(side, r, &mut list);
                            list.iter()
                                .flat_map(|s| (0..s.range.len).map(|i| (s.range.doc, s.range.position(i))))
                                .collect::<Vec<_>>()
                        };
                        let (q, k) = (tokens(Side::Q), tokens(Side::K));
                        let [q_tokens, k_tokens] = [q.len(), k.len()].map(|n| n as u64);
                        // Of all tokens of one side: the pairs with a rank's tokens of the other side, and the
                        // tokens met that the rank does not hold.
                        let count = |of: Side, own: &[(u32, i64)], with: &[(u32, i64)]| {
                            let (mut area, mut needed) = (0, 0);
                            for d in 0..batch.documents() as u32 {
                                let begin = if of == Side::Q { batch.start(Side::Q, d as usize) } else { 0 };
                                let length = batch.document(of, d as usize).len() as i64;
                                for y in begin..begin + length {
                                    let pair = |x| if of == Side::K { mask.allows(x, y) } else { mask.allows(y, x) };
                                    let n = with.iter().filter(|&&(e, x)| d == e && pair(x)).count() as u64;
                                    area += n;
                                    needed += u64::from(n > 0 && !own.contains(&(d, y)));
                                }
                            }
                            Load { area, needed, q_tokens, k_tokens }
                        };
                        for (sent, want) in [
                            (CirculatingSide::Keys, count(Side::K, &k, &q)),
                            (CirculatingSide::Queries, count(Side::Q, &q, &k)),
                        ] {
                            let got = load(&shares, &mask.into(), r, sent, &mut lists);
                            assert_eq!(got, want, "{layout} ring {ring} rank {r} {mask:?} {sent:?}");
                        }
                    }
                }
            }
        }
    }
}
