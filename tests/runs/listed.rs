// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attention over listed keys, against a dense f64 computation whose mask is made of the lists: every mesh, layout and
//! option, rows without keys, NaN in rows that no list names; and what is refused.

use crate::common::{Data, Lists, Random, Results, check, dsinks_of_o, error, rms, run};
use crate::context_parallel::mesh;
use crate::refused::refused;
use cpattn::{
    Batch, Dtype, Element, Error, Forward, Layout, Mask, Mesh, Options, Plan, Problem, Rank, Result, Side, Slice, View,
    ViewMut,
    call::DropoutMask,
    plan::{Circulate, Gather, KeyRows},
    runtime::{Bindings, BlockTable, KeyIndices, Keys, Pages},
    schedule::{AllToAll, AllToAllDirection, Combine, CombineTo, Purpose},
    transport::local,
};
use half::{bf16, f16};
use std::time::Duration;

/// Lists of allowed keys, in any order, some with fewer than `entries`, some empty. Every fifth key is in none.
fn lists(p: &Problem, heads: usize, entries: usize, seed: u64) -> Lists {
    let (mut r, mut all) = (Random::new(seed), Vec::new());
    let (plan, score) = (Plan::new(p, Mesh::single(), Layout::Contiguous).unwrap(), p.score());
    plan.local_tokens(Side::Q, 0).for_each(|token, position, doc| {
        let keys = p.batch().document(Side::K, doc).len() as i64;
        for _ in 0..heads {
            let mut allowed: Vec<i32> =
                (0..keys).filter(|&k| score.allows(position, k) && k % 5 != 3).map(|k| k as i32).collect();
            (1..allowed.len()).for_each(|i| allowed.swap(i, r.below(i + 1)));
            let some = if token % 7 == 2 {
                0
            } else if token % 3 == 0 {
                entries
            } else {
                r.below(entries + 1)
            };
            allowed.truncate(some);
            // None, wherever it is.
            allowed.resize(entries, -1);
            (1..entries).for_each(|i| allowed.swap(i, r.below(i + 1)));
            all.extend(allowed);
        }
    });
    Lists { all, heads, entries }
}

/// Random data; rows of k and v that no list names are NaN.
fn data<T: Element>(p: &Problem, lists: &Lists, seed: u64) -> Data<T> {
    let mut data = Data::<T>::random(p, seed);
    for doc in 0..p.batch().documents() {
        for (i, token) in p.batch().document(Side::K, doc).enumerate() {
            if i % 5 == 3 {
                let nan = T::from_f64(f64::NAN);
                data.k[token * p.kv_heads() * p.head_dim()..][..p.kv_heads() * p.head_dim()].fill(nan);
                data.v[token * p.kv_heads() * p.value_dim()..][..p.kv_heads() * p.value_dim()].fill(nan);
            }
        }
    }
    data.key_indices = Some(lists.clone());
    data
}

/// Forward and backward in f64, one q row after another, over the listed keys.
pub fn dense<T: Element>(p: &Problem, data: &Data<T>) -> Results<f64> {
    let (h, hk, d, dv) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim());
    let lists = data.key_indices.as_ref().unwrap();
    let mut out = Results::<f64>::unwritten(p);
    for x in [&mut out.dq, &mut out.dk, &mut out.dv, &mut out.o] {
        x.fill(0.0);
    }
    let sinks = p.sinks_per_head();
    out.dsinks = vec![0.0; if p.sinks() { h * sinks } else { 0 }];
    let row = |x: &[T], token: usize, heads: usize, head: usize, dim: usize| -> Vec<f64> {
        x[(token * heads + head) * dim..][..dim].iter().map(|x| x.to_f64()).collect()
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let (score, batch) = (p.score(), p.batch());
    let dropout = p.dropout().zip(data.dropout_seed).map(|(p, seed)| DropoutMask::new(p, seed).unwrap());
    let plan = Plan::new(p, Mesh::single(), Layout::Contiguous).unwrap();
    plan.local_tokens(Side::Q, 0).for_each(|t, position, doc| {
        for head in 0..h {
            let kv = head / (h / hk);
            let list = t * lists.heads + if lists.heads == 1 { 0 } else { kv };
            let keys: Vec<i64> = lists.all[list * lists.entries..][..lists.entries]
                .iter()
                .filter(|&&k| k >= 0)
                .map(|&k| k.into())
                .collect();
            let tokens: Vec<usize> = keys.iter().map(|&k| batch.document(Side::K, doc).start + k as usize).collect();
            let (q, d_o) = (row(&data.q, t, h, head, d), row(&data.d_o, t, h, head, dv));
            // Scores, and their derivatives by scale · q·k.
            let scores: Vec<(f64, f64)> = keys
                .iter()
                .zip(&tokens)
                .map(|(&key, &token)| {
                    let x = score.scale * dot(&q, &row(&data.k, token, hk, kv, d));
                    let (x, by) = if score.softcap > 0.0 {
                        let tanh = (x / score.softcap).tanh();
                        (score.softcap * tanh, 1.0 - tanh * tanh)
                    } else {
                        (x, 1.0)
                    };
                    let slope = p.alibi_slopes().map_or(0.0, |s| f64::from(s[doc.min(p.alibi_rows() - 1) * h + head]));
                    (x - slope * (position - key).abs() as f64, by)
                })
                .collect();
            let own: Vec<f64> =
                data.sinks.as_ref().map_or(vec![], |s| s[head * sinks..][..sinks].iter().map(|&x| x.into()).collect());
            let largest = scores.iter().map(|s| s.0).fold(f64::NEG_INFINITY, f64::max);
            out.max_logit[head] = out.max_logit[head].max(largest as f32);
            let top = own.iter().copied().fold(largest, f64::max);
            let sum: f64 = scores.iter().map(|s| s.0).chain(own.iter().copied()).map(|s| (s - top).exp()).sum();
            let lse = if top == f64::NEG_INFINITY { top } else { top + sum.ln() };
            out.lse[t * h + head] = lse;
            // What is left of each probability.
            let kept: Vec<f64> = tokens
                .iter()
                .map(|&k| match &dropout {
                    Some(mask) if !mask.keeps(t as u32, k as u32, head as u32) => 0.0,
                    Some(mask) => mask.factor(),
                    None => 1.0,
                })
                .collect();
            let p_of = |i: usize| (scores[i].0 - lse).exp();
            let o = &mut out.o[(t * h + head) * dv..][..dv];
            for (i, &token) in tokens.iter().enumerate() {
                let v = row(&data.v, token, hk, kv, dv);
                o.iter_mut().zip(v).for_each(|(o, v)| *o += p_of(i) * kept[i] * v);
            }
            let d_lse = data.d_lse.as_ref().filter(|_| lse != f64::NEG_INFINITY).map_or(0.0, |x| x[t * h + head]);
            let delta = dot(o, &d_o) - d_lse;
            for (i, sink) in own.iter().enumerate() {
                out.dsinks[head * sinks + i] -= (sink - lse).exp() * delta;
            }
            for (i, &token) in tokens.iter().enumerate() {
                let (k, v) = (row(&data.k, token, hk, kv, d), row(&data.v, token, hk, kv, dv));
                let ds = p_of(i) * (kept[i] * dot(&d_o, &v) - delta) * scores[i].1 * score.scale;
                for j in 0..d {
                    out.dq[(t * h + head) * d + j] += ds * k[j];
                    out.dk[(token * hk + kv) * d + j] += ds * q[j];
                }
                let dv = &mut out.dv[(token * hk + kv) * dv..][..dv];
                dv.iter_mut().zip(&d_o).for_each(|(dv, d_o)| *dv += p_of(i) * kept[i] * d_o);
            }
        }
    });
    out.dsinks_of_o = dsinks_of_o(p, data, &out.lse);
    out
}

/// One rank within `8 u` of the dense result, and every mesh and layout within the rule of that.
fn every_way<T: Element>(what: &str, p: &Problem, list_heads: usize, entries: usize, ways: &[(Mesh, Layout, Options)]) {
    let data = data::<T>(p, &lists(p, list_heads, entries, 3), 7);
    let want = dense(p, &data);
    let one = run(&Plan::new(p, Mesh::single(), Layout::Contiguous).unwrap(), &data).unwrap();
    // The rounding errors of a product grow with the root of its dims.
    let bound = 8.0 * T::DTYPE.unit_roundoff() * (p.value_dim() as f64 / 64.0).sqrt().max(1.0);
    for (name, got, want) in
        [("o", &one.o, &want.o), ("dq", &one.dq, &want.dq), ("dk", &one.dk, &want.dk), ("dv", &one.dv, &want.dv)]
    {
        let (e, scale) = (error(got, want), rms(want.iter().copied()));
        assert!(scale > 1e-3 && e <= bound * scale, "{what}: {name} of one rank {e:e}, {scale:e}");
    }
    check(&format!("{what}, one rank"), &one, &one, &want);
    for &(mesh, layout, options) in ways {
        let options = options.circulate(Circulate::Keys).circulate_forward(Circulate::Keys);
        let [listed, allowed] = [KeyRows::Listed, KeyRows::Allowed].map(|rows| {
            let options = options.key_rows(rows);
            let plan = Plan::builder(p).mesh(mesh).layout(layout).options(options).build().unwrap();
            let what = format!("{what}, {mesh}, {layout}, {options:?}");
            let got = run(&plan, &data).unwrap_or_else(|e| panic!("{what}: {e}"));
            check(&what, &got, &one, &want);
            assert!(rows == KeyRows::Allowed || run(&plan, &data).unwrap() == got, "{what}: a run repeats bit for bit");
            got
        });
        // Kernels attend to the same pairs in the same calls. In nodes, gradients are summed in another order.
        if options.ranks_per_node == 0 {
            assert!(listed == allowed, "{what}, {mesh}, {layout}: listed rows give the same bits");
        }
    }
}

/// A plan that chooses by itself which side circulates would send q, in a forward and in a backward, and has no lists
/// there: a run over lists sends k and v.
#[test]
fn the_plan_may_choose_the_side() {
    let batch = Batch::cross(&[0, 3, 9], &[0, 120, 200], None).unwrap();
    let p = Problem::new(batch, 4, 4, 16, Dtype::F32);
    for (ulysses, ring) in [(1, 3), (2, 2)] {
        let plan = Plan::new(&p, mesh(ulysses, ring), Layout::Contiguous).unwrap();
        let both = [cpattn::schedule::Direction::Forward, cpattn::schedule::Direction::Backward];
        assert!(both.iter().any(|&d| plan.circulates(d) == cpattn::schedule::CirculatingSide::Queries));
        let data = data::<f32>(&p, &lists(&p, 1, 7, 3), 7);
        let one = run(&Plan::new(&p, Mesh::single(), Layout::Contiguous).unwrap(), &data).unwrap();
        check("chosen", &run(&plan, &data).unwrap(), &one, &dense(&p, &data));
    }
}

/// Lists without entries are lists of no key.
#[test]
fn no_entries() {
    let p = Problem::new(uneven(), 6, 3, 16, Dtype::F32).with_sinks(true);
    for mesh in [Mesh::single(), mesh(1, 3), mesh(3, 1)] {
        let options = Options::new().circulate(Circulate::Keys).circulate_forward(Circulate::Keys);
        let plan = Plan::builder(&p).mesh(mesh).layout(Layout::Zigzag).options(options).build().unwrap();
        for heads in [1, 3] {
            let mut data = Data::<f32>::random(&p, 9);
            let of =
                |entries: usize| Lists { all: vec![-1; p.batch().tokens(Side::Q) * heads * entries], heads, entries };
            data.key_indices = Some(of(1));
            let want = run(&plan, &data).unwrap();
            data.key_indices = Some(of(0));
            assert!(run(&plan, &data).unwrap() == want, "{mesh}, {heads}");
        }
    }
}

fn uneven() -> Batch {
    Batch::from_lengths(&[29, 0, 1, 40, 5]).unwrap()
}

fn meshes() -> Vec<(Mesh, Layout, Options)> {
    let o = Options::new;
    vec![
        (mesh(1, 2), Layout::Zigzag, o()),
        (mesh(1, 3), Layout::Contiguous, o().gather(true)),
        (mesh(1, 3), Layout::Striped { stripe: 2 }, o().gather(Gather::Together)),
        (mesh(2, 1), Layout::Contiguous, o()),
        (mesh(3, 1), Layout::Balanced { chunks: 3 }, o()),
        (mesh(2, 2), Layout::Zigzag, o().pack_inputs(true)),
        (mesh(1, 4), Layout::ZigzagPack, o().ranks_per_node(2)),
        (mesh(4, 2), Layout::Striped { stripe: 5 }, o().ranks_per_node(2)),
    ]
}

#[test]
fn every_element_type_shared_and_by_kv_head() {
    fn of<T: Element>() {
        for list_heads in [1, 3] {
            let p = Problem::new(uneven(), 6, 3, 16, T::DTYPE).with_value_dim(8);
            every_way::<T>(&format!("{}, {list_heads}", T::DTYPE), &p, list_heads, 9, &meshes());
        }
    }
    of::<f16>();
    of::<bf16>();
    of::<f32>();
    of::<f64>();
}

/// Latent attention: one kv head of 576 and 512, and more entries than some rows have keys.
#[test]
fn latent() {
    let ways = [(mesh(1, 2), Layout::Zigzag, Options::new()), (mesh(3, 1), Layout::Contiguous, Options::new())];
    let batch = Batch::from_lengths(&[70, 23]).unwrap();
    let p = |dtype| Problem::new(batch.clone(), 16, 1, 576, dtype).with_value_dim(512);
    every_way::<bf16>("latent, bf16", &p(Dtype::Bf16), 1, 40, &ways);
    every_way::<f32>("latent, f32", &p(Dtype::F32), 1, 40, &ways[..1]);
}

#[test]
fn every_option() {
    let base = || Problem::new(uneven(), 6, 2, 16, Dtype::F32);
    let slopes = [0.5, 0.25, 0.125, 0.0625, 0.03, 0.7];
    let of_documents: Vec<f32> = (0..uneven().documents() * 6).map(|i| 0.9 / (1 + i) as f32).collect();
    let all = base().with_softcap(3.0).with_alibi_slopes(&slopes).with_sinks_per_head(2).with_dropout(0.3);
    let problems = [
        ("softcap and scale", base().with_softcap(2.0).with_scale(0.4)),
        ("ALiBi", base().with_alibi_slopes(&slopes)),
        ("ALiBi of each document", base().with_alibi_slopes_per_document(&of_documents)),
        ("sinks", base().with_sinks(true)),
        ("dropout", base().with_dropout(0.3)),
        ("window", base().with_mask(Mask::window(6, 2))),
        ("all, in a window", all.clone().with_mask(Mask::sliding(11))),
        ("all, full", all.with_mask(Mask::full())),
    ];
    for (what, p) in problems {
        for list_heads in [1, 2] {
            every_way::<f32>(what, &p, list_heads, 7, &meshes());
        }
    }
    let cross = Batch::cross(&[0, 12, 20, 33], &[0, 40, 60, 67], Some(&[28, 4, -6])).unwrap();
    every_way::<f32>("cross", &Problem::new(cross, 6, 2, 16, Dtype::F32), 2, 7, &meshes());
}

/// Parts of many rows, and rows of more entries than a part: rows with every key that the mask allows are the dense
/// attention.
#[test]
fn lists_of_all_keys_are_the_dense_result() {
    let p = Problem::new(Batch::from_lengths(&[300, 211]).unwrap(), 2, 1, 8, Dtype::F32);
    let mut dense = Data::<f32>::random(&p, 5);
    let entries = 300;
    let of = |_: usize, position: i64| (0..entries as i32).map(move |k| if i64::from(k) <= position { k } else { -1 });
    let plan = Plan::new(&p, Mesh::single(), Layout::Contiguous).unwrap();
    let mut all = Vec::new();
    plan.local_tokens(Side::Q, 0).for_each(|_, position, doc| all.extend(of(doc, position)));
    let (one, want) = (run(&plan, &dense).unwrap(), crate::common::reference(&p, &dense));
    dense.key_indices = Some(Lists { all, heads: 1, entries });
    for (mesh, layout) in [(mesh(1, 1), Layout::Contiguous), (mesh(1, 3), Layout::Zigzag), (mesh(2, 1), Layout::Zigzag)]
    {
        let plan = Plan::builder(&p)
            .mesh(mesh)
            .layout(layout)
            .options(Options::new().circulate(Circulate::Keys))
            .build()
            .unwrap();
        check(&format!("all keys, {mesh}"), &run(&plan, &dense).unwrap(), &one, &want);
    }
}

/// A forward of one rank over these lists.
fn forward(plan: &Plan, rank: &mut Rank, keys: KeyIndices<'_>) -> Result<()> {
    let p = plan.problem();
    let [n, m] = [Side::Q, Side::K].map(|side| plan.local_tokens(side, rank.rank()).len());
    let (h, hk, d) = (p.heads(), p.kv_heads(), p.head_dim());
    let (q, k, v) = (vec![0.5f32; n * h * d], vec![0.5; m * hk * d], vec![0.5; m * hk * d]);
    let (mut o, mut lse) = (vec![0.0; n * h * d], vec![0.0; n * h]);
    let tensors = Forward::new(
        View::new(&q, n, h, d)?,
        View::new(&k, m, hk, d)?,
        View::new(&v, m, hk, d)?,
        ViewMut::new(&mut o, n, h, d)?,
        ViewMut::new(&mut lse, n, h, 1)?,
    );
    rank.forward(plan, tensors.keys(Keys::Listed(keys)))
}

#[test]
fn what_is_refused() {
    let batch = || Batch::cross(&[0, 3, 5], &[0, 4, 9], None).unwrap();
    let p = Problem::new(batch(), 4, 2, 8, Dtype::F32).with_mask(Mask::sliding(3));
    let one = |p: &Problem, options| {
        Plan::builder(p).mesh(Mesh::single()).layout(Layout::Contiguous).options(options).build().unwrap()
    };
    let plan = one(&p, Options::new());
    let mut rank = Rank::new(local::group(1, Duration::from_secs(10)).unwrap().remove(0));
    let mut with =
        |plan: &Plan, heads, entries, indices: &[i32]| forward(plan, &mut rank, KeyIndices { indices, heads, entries });
    // Positions of the q rows: 1, 2, 3 and 3, 4.
    let right = [-1, 0, 2, 1, 3, 2, 3, 1, -1, -1];
    with(&plan, 1, 2, &right).unwrap();
    let changed = |at: usize, key: i32| {
        let mut lists = right;
        lists[at] = key;
        lists
    };
    for (at, key, words) in [
        (0, 1000, ["key_indices[0][0][0]", "1000", "0 to 3: document 0 has 4 k tokens"]),
        (9, -2, ["key_indices[4][0][1]", "-2", "-1, or 0 to 4: document 1 has 5 k tokens"]),
        (0, 2, ["key_indices[0][0][0]", "2", "0 to 1, which the mask allows to the token at position 1 of document 0"]),
        (7, 0, ["key_indices[3][0][1]", "0", "1 to 3, which the mask allows to the token at position 3 of document 1"]),
        (3, 2, ["key_indices[1][0][1]", "2", "each key once in a list"]),
    ] {
        refused(with(&plan, 1, 2, &changed(at, key)), &words);
    }
    refused(with(&plan, 1, 2, &right[..8]), &["key_indices", "of 8 entries", "each of the 5 q tokens of rank 0"]);
    refused(with(&plan, 3, 2, &[-1; 30]), &["key_indices.heads", "3", "1, for all kv heads, or 2"]);
    let ordered = one(&p, Options::new().reproducible(true));
    refused(with(&ordered, 1, 2, &right), &["key_indices in a reproducible plan"]);
    let sliced = batch().with_slices(&[Slice::new(0..5, 0..9)]).unwrap();
    let sliced = one(&Problem::new(sliced, 4, 2, 8, Dtype::F32), Options::new());
    refused(with(&sliced, 1, 2, &right), &["key_indices in a batch with slices"]);
    // A ring whose q circulates, in each direction.
    for (options, word) in [
        (Options::new().circulate_forward(Circulate::Queries), "circulate_forward keys"),
        (Options::new().circulate(Circulate::Queries).circulate_forward(Circulate::Keys), "circulate keys"),
    ] {
        let plan = Plan::builder(&p).mesh(mesh(1, 2)).layout(Layout::Contiguous).options(options).build().unwrap();
        let mut data = Data::<f32>::random(&p, 4);
        data.key_indices = Some(Lists { all: right.to_vec(), heads: 1, entries: 2 });
        refused(run(&plan, &data), &["key_indices in a ring whose q circulates", word]);
    }
}

/// Pages and lists are refused in runs that have no keys.
#[test]
fn runs_without_keys() {
    let p = Problem::new(Batch::from_lengths(&[2]).unwrap(), 1, 1, 2, Dtype::F32);
    let plan = Plan::new(&p, Mesh::single(), Layout::Contiguous).unwrap();
    let mut rank = Rank::new(local::group(1, Duration::from_secs(10)).unwrap().remove(0));
    let combine = Purpose::from(Combine { to: CombineTo::All, partial: Dtype::F32 });
    let direction = AllToAllDirection::ToHeads;
    let to_heads = Purpose::from(AllToAll { direction, side: Side::Q, dim: 2, dtype: Dtype::F32 });
    let block_table = BlockTable::new(&[0]);
    let pages = Keys::Pages(Pages { block_table, pages_per_document: 1, page_size: 2, page_stride: 2 });
    let lists = Keys::Listed(KeyIndices { indices: &[0], heads: 1, entries: 1 });
    for (keys, name) in [(pages, "pages"), (lists, "key_indices")] {
        for (run, what) in [(combine, "a combine"), (to_heads, "an all-to-all")] {
            let words = [&*format!("{name} in {what} is not supported"), &*format!("leave {name} out")];
            // SAFETY: refused before a tensor is read.
            refused(unsafe { rank.run(&plan, run, &Bindings::default().with_keys(keys)) }, &words);
        }
    }
}

/// Ranks whose lists have other shapes, or of which one has none, are found in the first run, and in a later one.
#[test]
fn shapes_that_differ() {
    let p = Problem::new(Batch::from_lengths(&[24]).unwrap(), 4, 2, 8, Dtype::F32);
    for mesh in [mesh(1, 2), mesh(2, 1)] {
        let options = Options::new().circulate_forward(Circulate::Keys);
        let plan = Plan::builder(&p).mesh(mesh).layout(Layout::Zigzag).options(options).build().unwrap();
        for later in [false, true] {
            let start = std::time::Instant::now();
            let errors = local::run(2, Duration::from_secs(120), |end| {
                let mut rank = Rank::new(end);
                let n = plan.local_tokens(Side::Q, rank.rank()).len();
                let with = |rank: &mut Rank, entries| {
                    let indices = vec![-1; n * entries];
                    forward(&plan, rank, KeyIndices { indices: &indices, heads: 1, entries })
                };
                if later {
                    with(&mut rank, 2)?;
                    with(&mut rank, 3)?;
                }
                let entries = 2 + rank.rank();
                let found = with(&mut rank, entries).unwrap_err();
                if !later {
                    with(&mut rank, 5)?;
                }
                Ok(found)
            })
            .unwrap();
            assert!(start.elapsed() < Duration::from_secs(60), "found at once");
            for error in &errors {
                assert!(later || matches!(error, Error::Disagreement { .. }), "{mesh} {later}: {error}");
            }
            if !later {
                assert!(errors[0].to_string().contains("key_indices of 1 heads and 2 entries"), "{}", errors[0]);
            }
        }
    }
}
