// SPDX-License-Identifier: MIT OR Apache-2.0
//! Drawn slices: what planning makes of them, compared with counting pair by pair.

use alloc::{format, string::ToString, vec, vec::Vec};

use crate::{Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem, Side, Slice, plan::Circulate, plan::Gather};
use fastrand::Rng;

/// Lengths of documents, some of them empty.
fn lengths(draw: &mut Rng, most: usize) -> Vec<usize> {
    (0..draw.usize(1..5)).map(|_| draw.usize(0..most)).collect()
}

/// A batch with up to `most` slices of every sort that do not overlap; a slice that does is left out.
pub(crate) fn batch(draw: &mut Rng, most: usize) -> Batch {
    let q = lengths(draw, 14);
    let documents = match draw.usize(0..3) {
        0 => {
            let k: Vec<usize> = q.iter().map(|_| draw.usize(0..16)).collect();
            let cu = |n: &[usize]| {
                let mut sum = 0;
                core::iter::once(0)
                    .chain(n.iter().map(|&n| {
                        sum += n as i32;
                        sum
                    }))
                    .collect::<Vec<i32>>()
            };
            let starts: Vec<i64> = q.iter().map(|_| draw.i64(-3..9)).collect();
            Batch::cross(&cu(&q), &cu(&k), Some(&starts)).unwrap()
        }
        _ => Batch::from_lengths(&q).unwrap(),
    };
    let mut slices: Vec<Slice> = Vec::new();
    for _ in 0..draw.usize(0..=most) {
        let mut run = |side| {
            let n = documents.tokens(side);
            let (a, b) = (draw.usize(0..=n), draw.usize(0..=n));
            a.min(b)..a.max(b)
        };
        let (q, k) = (run(Side::Q), run(Side::K));
        let mut slice = Slice::new(q, k);
        if draw.bool() {
            slice = slice.q_start([draw.i64(-9..20), 1 << 40, -(1 << 40)][draw.usize(..30).saturating_sub(27)]);
        }
        let near = |draw: &mut Rng, slice: &Slice| -slice.q_start + draw.i64(-12..12);
        slice = match draw.usize(0..6) {
            0 => slice,
            1 => slice.causal(),
            2 => slice.band(0, i64::MAX),
            3 => slice.band(i64::MIN, near(draw, &slice)),
            4 => slice.band(near(draw, &slice), i64::MAX),
            _ => {
                let low = near(draw, &slice);
                slice.band(low, low + draw.i64(-1..9))
            }
        };
        slices.push(slice);
        if documents.clone().with_slices(&slices).is_err() {
            slices.pop();
        }
    }
    documents.with_slices(&slices).unwrap()
}

/// Whether some slice allows a pair of tokens.
fn allows(batch: &Batch, mask: Mask, q: usize, k: usize) -> bool {
    let of = |s: &Slice| {
        let distance = (k as i64 - i64::from(s.k_begin)) - (q as i64 - i64::from(s.q_begin) + s.q_start);
        s.allows(q, k) && mask.allows(0, distance)
    };
    batch.slices().unwrap().iter().any(of)
}

const MASKS: [Mask; 4] = [Mask::full(), Mask::causal(), Mask::window(3, 1), Mask::window(2, 0)];

#[test]
fn parts_allow_what_slices_allow() {
    let mut draw = Rng::with_seed(3);
    let mut pairs = 0;
    for _ in 0..4000 {
        let batch = batch(&mut draw, 8);
        let mask = MASKS[draw.usize(..4)];
        let allowed = batch.allowed(mask);
        let problem = Problem::new(batch.clone(), 1, 1, 8, Dtype::F32).with_mask(mask);
        let mut area = 0;
        for q in 0..batch.tokens(Side::Q) {
            for k in 0..batch.tokens(Side::K) {
                let place = |side, token| {
                    let d = batch.document_of(side, token);
                    (d as u32, token as i64 - batch.document(side, d).start as i64 + batch.start(side, d))
                };
                let ((a, x), (b, y)) = (place(Side::Q, q), place(Side::K, k));
                let window = (mask.left_limit(), mask.right_limit());
                let count = allowed.of(Side::Q, a).filter(|of| of.document == b).filter(|of| {
                    let (begin, end) = of.band.keys(x, window);
                    let (from, to) = of.limits.keys(x, (i64::MAX, i64::MAX));
                    assert_eq!((begin..end).contains(&y), (from..to).contains(&y), "{of:?} {x} {y}");
                    (begin..end).contains(&y)
                });
                let (count, want) = (count.count(), usize::from(allows(&batch, mask, q, k)));
                assert_eq!(count, want, "{batch:?} {mask:?}: q {q} k {k}");
                let seen = allowed.of(Side::K, b).filter(|of| of.document == a).filter(|of| {
                    let (begin, end) = of.limits.keys(y, (i64::MAX, i64::MAX));
                    (begin..end).contains(&x)
                });
                assert_eq!(seen.count(), want, "{batch:?} {mask:?}: q {q} k {k}");
                area += want as u128;
            }
        }
        assert_eq!(problem.area(), area, "{batch:?} {mask:?}");
        pairs += area;
    }
    assert!(pairs > 50_000, "{pairs}");
}

#[test]
fn plans_of_slices_are_proved() {
    let mut draw = Rng::with_seed(7);
    let layouts = [
        Layout::Contiguous,
        Layout::Zigzag,
        Layout::ZigzagPack,
        Layout::Striped { stripe: 1 },
        Layout::Striped { stripe: 3 },
        Layout::Balanced { chunks: 3 },
    ];
    let (mut proved, mut pairs) = (0, 0);
    for _ in 0..300 {
        let batch = batch(&mut draw, 8);
        let mask = MASKS[draw.usize(..4)];
        let problem = Problem::new(batch, 4, 2, 8, Dtype::F32).with_mask(mask);
        let layout = layouts[draw.usize(..layouts.len())];
        let (ring, ulysses) = [(1, 2), (2, 1), (3, 1), (4, 1), (2, 2), (5, 1), (4, 2)][draw.usize(..7)];
        let mesh = Mesh { replicas: 1, ring, ulysses };
        let o = Options::new;
        let options = [
            o().circulate(Circulate::Keys),
            o().circulate(Circulate::Queries).circulate_forward(Circulate::Queries),
            o().gather(true),
            o().gather(Gather::Together),
            o().reproducible(true),
            o().passes(2).circulate(Circulate::Keys),
            o().ranks_per_node(2),
            o().ranks_per_node(2).circulate(Circulate::Queries),
            o().ranks_per_node(2).gather(Gather::Together),
        ][draw.usize(..9)];
        let Ok(plan) = Plan::builder(&problem).mesh(mesh).layout(layout).options(options).build() else { continue };
        let what = || format!("{problem:?} {mesh} {layout} {options:?}");
        let proof = plan.verify().unwrap_or_else(|e| panic!("{e}\n{}", what()));
        assert_eq!(proof.0.pairs, problem.area() * 4, "{}", what());
        pairs += proof.0.pairs;
        proved += 1;
        for rank in 0..mesh.world() {
            for direction in [crate::schedule::Direction::Forward, crate::schedule::Direction::Backward] {
                let costs = plan.costs(rank, direction).unwrap();
                assert!(costs.workspace <= plan.workspace_bound(rank, direction), "{}", what());
            }
        }
    }
    assert!(proved > 250 && pairs > 20_000, "{proved} {pairs}");
}

/// Loads and chunks by slices are those that counting gives.
#[test]
fn loads_of_slices_are_what_counting_gives() {
    let mut draw = Rng::with_seed(11);
    for _ in 0..300 {
        let batch = batch(&mut draw, 8);
        let mask = MASKS[draw.usize(..4)];
        let ring = draw.usize(1..5);
        let layout =
            [Layout::Contiguous, Layout::Zigzag, Layout::Striped { stripe: 2 }, Layout::Balanced { chunks: 2 }]
                [draw.usize(..4)];
        let problem = Problem::new(batch.clone(), 1, 1, 8, Dtype::F32).with_mask(mask);
        let plan = Plan::new(&problem, Mesh::ring(ring).unwrap(), layout).unwrap();
        let load = crate::plan::LayoutLoad::of(&problem, plan.shares(), crate::schedule::CirculatingSide::Keys);
        let (mut total, mut largest) = ((0, 0), 0);
        for r in 0..ring {
            let (q, k) = (plan.local_tokens(Side::Q, r).indices(), plan.local_tokens(Side::K, r).indices());
            let area: u64 = q
                .iter()
                .map(|&q| (0..batch.tokens(Side::K)).filter(|&k| allows(&batch, mask, q, k)).count() as u64)
                .sum();
            let needed = (0..batch.tokens(Side::K))
                .filter(|t| !k.contains(t) && q.iter().any(|&q| allows(&batch, mask, q, *t)))
                .count() as u64;
            total = (total.0 + area, total.1 + needed);
            largest = area.max(largest);
        }
        assert_eq!((load.total.area, load.total.needed), total, "{problem:?} {layout} {ring}");
        assert_eq!(load.largest.area, largest, "{problem:?} {layout} {ring}");
    }
}

#[test]
fn refusals_name_the_slice_and_both_values() {
    let batch = Batch::from_lengths(&[4, 6]).unwrap();
    let text = |slices: &[Slice]| batch.clone().with_slices(slices).unwrap_err().to_string();
    assert_eq!(
        text(&[Slice::new(0..4, 0..4), Slice::new(3..11, 0..4)]),
        "slices[1].q_end is 11, expected at most 10, the tokens of q"
    );
    assert_eq!(text(&[Slice::new(0..4, 0..12)]), "slices[0].k_end is 12, expected at most 10, the tokens of k");
    let reversed = Slice { k_begin: 5, k_end: 2, ..Slice::new(0..1, 0..1) };
    assert_eq!(text(&[reversed]), "slices[0].k_begin is 5, expected 0 to k_end = 2");
    let far = Slice::new(0..4, 0..4).q_start((1 << 40) + 1);
    assert_eq!(text(&[far]), "slices[0].q_start is 1099511627777, expected a position within ±2^40");
    assert_eq!(
        text(&[Slice::new(0..4, 0..4).causal(), Slice::new(8..10, 0..2), Slice::new(2..9, 1..5).band(0, 0).q_start(0)]),
        "slices[2] is one that allows q token 2 with k token 1, expected pairs that slices[0] does not allow: a pair may \
         be in one slice only"
    );
    // Nothing overlaps where a band allows nothing.
    let nothing = Slice::new(0..4, 0..4).band(3, 2);
    let batch = batch.with_slices(&[Slice::new(0..4, 0..4), nothing, nothing]).unwrap();
    assert_eq!(Problem::new(batch, 1, 1, 8, Dtype::F32).area(), 16);
}

/// Slices that are the documents are planned as documents.
#[test]
fn documents_as_slices_are_documents() {
    let documents = Batch::from_lengths(&[5, 0, 9]).unwrap();
    let slices = [Slice::new(0..5, 0..5).causal(), Slice::new(5..14, 5..14).causal()];
    let sliced = documents.clone().with_slices(&slices).unwrap();
    let whole = |batch: &Batch, mask| batch.allowed(mask).of(Side::Q, 2).map(|of| of.limits).collect::<Vec<_>>();
    assert_eq!(whole(&documents, Mask::causal()), whole(&sliced, Mask::full()));
    assert_eq!(vec![0], sliced.allowed(Mask::full()).of(Side::Q, 0).map(|of| of.document).collect::<Vec<_>>());
}
