// SPDX-License-Identifier: MIT OR Apache-2.0
//! ALiBi slopes of each document: every form against the f64 reference, and the bits of each document alone.

use crate::common::{Data, Random, Results, any_slopes, check, one_rank, reference, rms, run};
use crate::context_parallel::{LAYOUTS, every_way, forms, mesh};
use crate::refused::refused;
use cpattn::{Batch, Dtype, Element, Layout, Mask, Options, Plan, Problem, Side, Slice, plan::Circulate};
use half::bf16;

const HEADS: usize = 6;

/// Slopes of each document that have little in common.
fn slopes(documents: usize) -> Vec<f32> {
    let of = |d: usize, h: usize| [0.0, 0.5, -0.2, 2.0, 0.03][d % 5] / (1 + h) as f32;
    (0..documents * HEADS).map(|i| of(i / HEADS, i % HEADS)).collect()
}

fn problem(batch: Batch, dtype: Dtype) -> Problem {
    let n = batch.documents();
    Problem::new(batch, HEADS, 2, 16, dtype).with_value_dim(8).with_alibi_slopes_per_document(&slopes(n))
}

/// Documents, other k tokens, and slices that read other documents: there a pair has the slope of its q token.
fn batches() -> Vec<(&'static str, Batch)> {
    let three = Batch::from_lengths(&[31, 2, 26]).unwrap();
    let across =
        [Slice::new(0..31, 0..31).causal(), Slice::new(31..59, 0..20).q_start(20), Slice::new(31..59, 31..59).causal()];
    vec![
        ("three", three.clone()),
        ("cross", Batch::cross(&[0, 9, 9, 30], &[0, 21, 25, 37], Some(&[12, 0, -2])).unwrap()),
        ("slices", three.with_slices(&across).unwrap()),
    ]
}

#[test]
fn every_form() {
    let layouts = [Layout::Contiguous, Layout::Zigzag, Layout::Striped { stripe: 2 }, Layout::Balanced { chunks: 2 }];
    for (what, batch) in batches() {
        let p = problem(batch, Dtype::F32);
        every_way::<f32>(what, &p, &[mesh(1, 3), mesh(4, 2), mesh(6, 1)], &layouts, &forms());
        let all = p.with_softcap(3.0).with_sinks_per_head(2).with_dropout(0.3).with_mask(Mask::window(14, 14));
        every_way::<f32>(what, &all, &[mesh(2, 2), mesh(3, 1)], &layouts[1..2], &forms());
        let nodes = forms().map(|form| form.ranks_per_node(2));
        every_way::<f32>(what, &all, &[mesh(1, 4), mesh(4, 1)], &layouts[..1], &nodes);
    }
}

#[test]
fn every_element_type() {
    for (what, batch) in batches() {
        every_way::<f64>(what, &problem(batch.clone(), Dtype::F64), &[mesh(2, 2)], &LAYOUTS[..2], &forms());
        every_way::<bf16>(what, &problem(batch, Dtype::Bf16), &[mesh(2, 2)], &LAYOUTS[..2], &forms());
    }
}

/// A few new tokens over a cache that is spread over the ranks, whose partial results travel.
#[test]
fn a_cache() {
    let batch = Batch::cross(&[0, 1, 2, 2, 9], &[0, 64, 101, 110, 140], Some(&[63, 36, 0, 23])).unwrap();
    let travels = Options::new().circulate_forward(Circulate::Queries);
    let options = [travels, travels.pack_inputs(true), travels.ranks_per_node(2)];
    every_way::<f32>("cache", &problem(batch, Dtype::F32), &[mesh(1, 4), mesh(2, 2)], &LAYOUTS, &options);
}

/// Rows `tokens` of a `[tokens, width]` tensor.
fn rows<T: Clone>(all: &[T], tokens: std::ops::Range<usize>, width: usize) -> Vec<T> {
    all[tokens.start * width..tokens.end * width].to_vec()
}

/// Tokens of short and of long documents, on one rank and on four: each document has the bits of a plan of it alone
/// with its slopes in one row. A kernel that took another document's slopes would differ.
fn each_document_alone<T: Element>(dtype: Dtype) {
    let lengths = [3, 40, 0, 300, 1, 17];
    let batch = Batch::from_lengths(&lengths).unwrap();
    let p = problem(batch.clone(), dtype);
    let data = Data::<T>::random(&p, 5);
    let same = Options::new().reproducible(true);
    let whole = |ulysses, ring| {
        run(&Plan::with_options(&p, mesh(ulysses, ring), Layout::Zigzag, same).unwrap(), &data).unwrap()
    };
    let (one, four) = (whole(1, 1), whole(2, 2));
    assert!(one == four, "bits depend on the mesh");
    for (d, &n) in lengths.iter().enumerate() {
        let at = batch.document(Side::Q, d);
        let alone = Problem::new(Batch::from_lengths(&[n]).unwrap(), HEADS, 2, 16, dtype).with_value_dim(8);
        let alone = alone.with_alibi_slopes(&slopes(6)[d * HEADS..][..HEADS]);
        let part = |x: &[T], width: usize| rows(x, at.clone(), width);
        let mut own = Data::<T>::random(&alone, 5);
        (own.q, own.k) = (part(&data.q, HEADS * 16), part(&data.k, 2 * 16));
        (own.v, own.d_o) = (part(&data.v, 2 * 8), part(&data.d_o, HEADS * 8));
        own.d_lse = data.d_lse.as_ref().map(|x| rows(x, at.clone(), HEADS));
        let plan = Plan::with_options(&alone, mesh(1, 1), Layout::Contiguous, same).unwrap();
        let Results { o, lse, dq, dk, dv, .. } = run(&plan, &own).unwrap();
        assert!(o == part(&one.o, HEADS * 8), "o of document {d}");
        assert!(lse == rows(&one.lse, at.clone(), HEADS), "lse of document {d}");
        assert!(dq == part(&one.dq, HEADS * 16), "dq of document {d}");
        assert!(dk == part(&one.dk, 2 * 16) && dv == part(&one.dv, 2 * 8), "dk, dv of document {d}");
    }
}

#[test]
fn documents_have_the_bits_of_each_alone() {
    each_document_alone::<f32>(Dtype::F32);
    each_document_alone::<bf16>(Dtype::Bf16);
}

/// One row for all documents, and as many equal rows as there are documents, are one computation; rows that differ are
/// another.
#[test]
fn equal_rows_are_one_row() {
    let batch = Batch::from_lengths(&[31, 2, 26]).unwrap();
    let base = Problem::new(batch, HEADS, 2, 16, Dtype::F32);
    let row = &slopes(2)[HEADS..];
    let (single, repeated) =
        (base.clone().with_alibi_slopes(row), base.clone().with_alibi_slopes_per_document(&row.repeat(3)));
    let data = Data::<f32>::random(&single, 3);
    let on = |p: &Problem| run(&Plan::new(p, mesh(2, 2), Layout::Zigzag).unwrap(), &data).unwrap();
    assert!(on(&single) == on(&repeated));
    let different = base.with_alibi_slopes_per_document(&slopes(3));
    let (a, b) = (reference(&single, &data), reference(&different, &data));
    let apart = rms(a.o.iter().zip(&b.o).map(|(a, b)| a - b)) / rms(a.o.iter().copied());
    assert!(apart > 0.05, "{apart}");
    check("different rows", &on(&different), &one_rank(&different, &data), &b);
}

/// Ranks that give slopes in different ways plan different things, unless the two ways mean the same.
#[test]
fn fingerprints() {
    let of = |lengths: &[usize], slopes: &[f32], each: bool| {
        let p = Problem::new(Batch::from_lengths(lengths).unwrap(), HEADS, 2, 16, Dtype::F32);
        let p = if each { p.with_alibi_slopes_per_document(slopes) } else { p.with_alibi_slopes(slopes) };
        Plan::new(&p, mesh(1, 2), Layout::Contiguous).unwrap().fingerprint()
    };
    let all = slopes(2);
    assert_eq!(of(&[9], &all[..HEADS], true), of(&[9], &all[..HEADS], false));
    let row = &all[HEADS..];
    assert_ne!(of(&[9, 4], &all, true), of(&[9, 4], row, false));
    assert_ne!(of(&[9, 4], &row.repeat(2), true), of(&[9, 4], row, false));
    assert_ne!(of(&[9, 4], &all, true), of(&[9, 4], &[row, &all[..HEADS]].concat(), true));
}

#[test]
fn refusals() {
    let batch = Batch::from_lengths(&[5, 0, 7]).unwrap();
    let base = || Problem::new(batch.clone(), 2, 2, 8, Dtype::F32);
    for (n, text) in [(2, "2"), (5, "5"), (0, "0"), (8, "8")] {
        let expected = "expected 3 x 2: one for each of 3 documents and each of 2 q heads";
        let text = format!("alibi_slopes is of length {text}, {expected}");
        refused(base().with_alibi_slopes_per_document(&vec![0.5; n]).check(), &[&text]);
    }
    let mut numbers = [0.5; 6];
    numbers[3] = f32::NAN;
    refused(base().with_alibi_slopes_per_document(&numbers).check(), &["alibi_slopes[1][1] is NaN", "-1e18 to 1e18"]);
    // The last of two ways to give them counts.
    base().with_alibi_slopes_per_document(&numbers).with_alibi_slopes(&[0.5; 2]).check().unwrap();
    let none = Problem::new(Batch::new(&[0]).unwrap(), 2, 2, 8, Dtype::F32);
    none.with_alibi_slopes_per_document(&[]).check().unwrap();
    // Another batch has other documents: the slopes before are not taken over, even if the numbers fit.
    let kind = base().with_alibi_slopes_per_document(&[0.5; 6]);
    let plan = Plan::new(&kind, mesh(1, 2), Layout::Contiguous).unwrap();
    refused(
        Plan::auto_like(&plan, &Batch::from_lengths(&[1, 2, 3]).unwrap()),
        &["slopes per document in auto_like", "Plan::with_tokens_of"],
    );
    let next = Plan::auto_like(
        &Plan::new(&base(), mesh(1, 2), Layout::Contiguous).unwrap(),
        &Batch::from_lengths(&[1, 2]).unwrap(),
    );
    let next = next.unwrap();
    let kind = Problem::new(next.problem().batch().clone(), 2, 2, 8, Dtype::F32);
    Plan::with_tokens_of(&next, &kind.with_alibi_slopes_per_document(&[0.5; 4]), Options::new()).unwrap();
}

/// Drawn slopes of both kinds are drawn.
#[test]
fn both_kinds_are_drawn() {
    let mut r = Random::new(1);
    let base = Problem::new(Batch::from_lengths(&[5, 7]).unwrap(), 2, 2, 8, Dtype::F32);
    let rows: Vec<_> = (0..20).map(|_| any_slopes(&mut r, base.clone()).alibi_rows()).collect();
    assert!(rows.contains(&1) && rows.contains(&2));
}
