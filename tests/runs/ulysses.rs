// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two all-to-alls on their own, and a kernel that no ring could merge between them.

use std::time::{Duration, Instant};

use cpattn::{
    Batch, Dtype, Layout, Mesh, Plan, Problem, Rank, Side, View, ViewMut,
    plan::AttentionKind,
    schedule::{AllToAll, Schedule},
    transport::local,
};

const D: usize = 4;

fn value(token: usize, head: usize, i: usize) -> f64 {
    ((token * 31 + head * 7 + i * 3) % 97) as f64 / 16.0 - 3.0
}

/// Runs `each` on every rank of a plan.
fn ranks(plan: &Plan, each: impl Fn(&Plan, &mut Rank) + Sync) {
    local::run(plan.mesh().world(), Duration::from_secs(30), |end| {
        each(plan, &mut Rank::new(end));
        Ok(())
    })
    .unwrap();
}

fn local_rows(plan: &Plan, rank: &Rank, side: Side, heads: usize) -> Vec<f64> {
    let tokens = plan.local_tokens(side, rank.rank()).indices();
    tokens.iter().flat_map(|&t| (0..heads * D).map(move |i| value(t, i / D, i % D))).collect()
}

/// `o_t = Σ_{s ≤ t} (q_t · k_s) v_s` within each document: linear attention, here in its quadratic form.
fn linear_attention(
    cu: &[i32],
    group: usize,
    first: (usize, usize),
    q: &View<f64>,
    k: &View<f64>,
    v: &View<f64>,
    o: &mut ViewMut<f64>,
) {
    for d in cu.windows(2) {
        for t in d[0] as usize..d[1] as usize {
            for h in 0..q.heads() {
                let kv = (first.0 + h) / group - first.1;
                let mut sum = [0.0; D];
                for s in d[0] as usize..=t {
                    let dot: f64 = q.row(t, h).iter().zip(k.row(s, kv)).map(|(a, b)| a * b).sum();
                    sum.iter_mut().zip(v.row(s, kv)).for_each(|(x, y)| *x += dot * y);
                }
                o.row_mut(t, h).copy_from_slice(&sum);
            }
        }
    }
}

#[test]
fn linear_attention_between_two_all_to_alls() {
    let cu = [0, 9, 9, 24, 31];
    for (heads, kv_heads) in [(6, 6), (6, 2), (9, 3)] {
        let p = Problem::new(Batch::new(&cu).unwrap(), heads, kv_heads, D, Dtype::F64).with_kind(AttentionKind::Other);
        let group = heads / kv_heads;
        let n = cu[4] as usize;
        let all =
            |heads: usize| (0..n * heads * D).map(|i| value(i / heads / D, i / D % heads, i % D)).collect::<Vec<_>>();
        let (q, kv, mut o) = (all(heads), all(kv_heads), vec![0.0; n * heads * D]);
        let whole = View::new(&kv, n, kv_heads, D).unwrap();
        let out = &mut ViewMut::new(&mut o, n, heads, D).unwrap();
        linear_attention(&cu, group, (0, 0), &View::new(&q, n, heads, D).unwrap(), &whole, &whole, out);
        for world in [1, 2, 4, 5] {
            let plan = Plan::new(&p, Mesh::ulysses(world).unwrap(), Layout::Contiguous).unwrap();
            ranks(&plan, |plan, rank| {
                let tokens = plan.local_tokens(Side::Q, rank.rank()).indices();
                let n = tokens.len();
                let (q, k) = (local_rows(plan, rank, Side::Q, heads), local_rows(plan, rank, Side::K, kv_heads));
                let mut y = vec![f64::NAN; n * heads * D];
                let q = View::new(&q, n, heads, D).unwrap();
                let k = View::new(&k, n, kv_heads, D).unwrap();
                let out = ViewMut::new(&mut y, n, heads, D).unwrap();
                let inputs = [(Side::Q, q), (Side::K, k), (Side::K, k)];
                rank.all_to_all(plan)
                    .ulysses(&inputs, &mut [(Side::Q, out)], |share, x, y| {
                        let first = (share.q.start as usize, share.kv.start as usize);
                        linear_attention(&cu, group, first, &x[0], &x[1], &x[2], &mut y[0]);
                        Ok(())
                    })
                    .unwrap();
                for (i, &t) in tokens.iter().enumerate() {
                    assert_eq!(y[i * heads * D..(i + 1) * heads * D], o[t * heads * D..(t + 1) * heads * D]);
                }
            });
        }
    }
}

/// There and back gives each kv head once for every rank that held it; the sum of ones counts them.
#[test]
fn the_way_back_is_the_transpose_of_the_way_there() {
    let p = Problem::new(Batch::new(&[0, 10, 23]).unwrap(), 9, 3, D, Dtype::F64);
    for (ulysses, ring) in [(1, 1), (4, 1), (4, 2), (9, 1), (2, 3)] {
        let plan = Plan::new(&p, Mesh { replicas: 1, ring, ulysses }, Layout::Zigzag).unwrap();
        ranks(&plan, |plan, rank| {
            for (side, heads) in [(Side::Q, 9), (Side::K, 3)] {
                let n = plan.local_tokens(side, rank.rank()).len();
                let x = local_rows(plan, rank, side, heads);
                let share = plan.heads_of(rank.rank());
                let own = if side == Side::Q { share.q.len() } else { share.kv.len() };
                let rows = plan.tokens_between_all_to_alls(side, rank.rank());
                let mut held = vec![f64::NAN; rows * own * D];
                let from = View::new(&x, n, heads, D).unwrap();
                rank.all_to_all(plan).to_heads(side, from, ViewMut::new(&mut held, rows, own, D).unwrap()).unwrap();
                let mut back = vec![f64::NAN; x.len()];
                let held = View::new(&held, rows, own, D).unwrap();
                rank.all_to_all(plan).to_tokens(side, held, ViewMut::new(&mut back, n, heads, D).unwrap()).unwrap();
                for (i, (b, x)) in back.iter().zip(&x).enumerate() {
                    let head = (i / D % heads) as u32;
                    let holders = (0..ulysses)
                        .map(|u| plan.heads_of(u))
                        .filter(|s| side == Side::Q || s.kv.contains(&head))
                        .count();
                    let holders = if side == Side::Q { 1.0 } else { holders as f64 };
                    assert!((b - holders * x).abs() < 1e-12, "{side:?} {i}: {b} {x} {holders}");
                }
            }
        });
    }
}

#[test]
fn what_is_not_softmax_is_refused_a_ring() {
    let p = Problem::new(Batch::new(&[0, 8]).unwrap(), 4, 4, D, Dtype::F32).with_kind(AttentionKind::Other);
    let text = Plan::new(&p, Mesh::ring(2).unwrap(), Layout::Zigzag).unwrap_err().to_string();
    assert!(text.contains("kind other") && text.contains("2 ranks") && text.contains("ulysses"), "{text}");
}

#[test]
fn a_local_kernel_that_fails_ends_the_run_everywhere() {
    let p = Problem::new(Batch::new(&[0, 8]).unwrap(), 4, 4, D, Dtype::F64).with_kind(AttentionKind::Other);
    let plan = Plan::new(&p, Mesh::ulysses(2).unwrap(), Layout::Contiguous).unwrap();
    ranks(&plan, |plan, rank| {
        let n = plan.local_tokens(Side::Q, rank.rank()).len();
        let (x, mut y) = (vec![1.0f64; n * 4 * D], vec![0.0; n * 4 * D]);
        let x = View::new(&x, n, 4, D).unwrap();
        let out = ViewMut::new(&mut y, n, 4, D).unwrap();
        let fails = rank.rank() == 1;
        let outcome = rank.all_to_all(plan).ulysses(&[(Side::Q, x)], &mut [(Side::Q, out)], |_, _, _| {
            if fails { Err(cpattn::Error::invalid("local", "a failure", "none")) } else { Ok(()) }
        });
        let text = outcome.unwrap_err().to_string();
        assert_eq!(text.starts_with("local is a failure"), fails, "{text}");
        assert!(fails || text.contains("rank 1 failed"), "{text}");
    });
}

/// The code that catches the panic may keep the rank, so it is not its end that tells the others.
#[test]
fn a_local_kernel_that_panics_ends_the_run_everywhere() {
    let p = Problem::new(Batch::new(&[0, 8]).unwrap(), 4, 4, D, Dtype::F64).with_kind(AttentionKind::Other);
    let plan = Plan::new(&p, Mesh::ulysses(2).unwrap(), Layout::Contiguous).unwrap();
    let both_are_back = std::sync::Barrier::new(2);
    ranks(&plan, |plan, rank| {
        let n = plan.local_tokens(Side::Q, rank.rank()).len();
        let (x, mut y) = (vec![1.0f64; n * 4 * D], vec![0.0; n * 4 * D]);
        let x = View::new(&x, n, 4, D).unwrap();
        let out = ViewMut::new(&mut y, n, 4, D).unwrap();
        let panics = rank.rank() == 1;
        let began = std::time::Instant::now();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            rank.all_to_all(plan).ulysses(&[(Side::Q, x)], &mut [(Side::Q, out)], |_, _, _| {
                assert!(!panics, "on purpose");
                Ok(())
            })
        }));
        let waited = began.elapsed();
        both_are_back.wait();
        assert_eq!(outcome.is_err(), panics);
        if let Ok(outcome) = outcome {
            let text = outcome.unwrap_err().to_string();
            assert!(text.contains("rank 1 panicked"), "{text}");
            assert!(waited < Duration::from_secs(20), "found by the deadline only: {waited:?}");
        }
    });
}

/// A tensor in the part of a lent workspace that the all-to-all packs into would be lost.
#[test]
fn tensors_lie_apart_from_a_lent_workspace() {
    let p = Problem::new(Batch::new(&[0, 8]).unwrap(), 4, 4, D, Dtype::F64);
    let plan = Plan::new(&p, Mesh::ulysses(2).unwrap(), Layout::Contiguous).unwrap();
    let mut rank = Rank::new(local::group(2, Duration::from_secs(30)).unwrap().remove(0));
    let (n, bytes) = (4 * 4 * D, 1 << 14);
    let mut memory = vec![0f64; bytes / 8 + Schedule::ALIGNMENT as usize];
    let start = memory.as_ptr().cast::<u8>().align_offset(Schedule::ALIGNMENT as usize) / 8;
    // SAFETY: `memory` outlives the rank, which refuses to run while a tensor lies there.
    unsafe { rank.workspace().lend(memory[start..].as_mut_ptr().cast(), bytes) }.unwrap();
    let (mut held, tokens) = (vec![0f64; n], View::new(&memory[start..start + n], 4, 4, D).unwrap());
    let refused = rank.all_to_all(&plan).to_heads(Side::Q, tokens, ViewMut::new(&mut held, 8, 2, D).unwrap());
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("from") && text.contains("overlaps") && text.contains("workspace"), "{text}");
    drop(rank);
}

/// Planning and both calls refuse by name what no machine could address, and shapes are named as an all-to-all has
/// them.
#[test]
fn dims_are_refused_by_name() {
    let huge = Problem::new(Batch::from_lengths(&[1 << 30]).unwrap(), 128, 2, 4, Dtype::F32);
    let plan = Plan::new(&huge, Mesh::single(), Layout::Contiguous).unwrap();
    let mut rank = Rank::new(local::group(1, Duration::from_secs(1)).unwrap().remove(0));
    let most = i64::MAX as u64 / ((1 << 30) * 128 * 32);
    let words = format!("dim is 4294967295, expected at most {most}, for 1073741824 tokens of 128 heads");
    let dim = u32::MAX as usize;
    for call in AllToAll::both(Side::Q, dim, Dtype::F32).unwrap() {
        assert_eq!(rank.prepare(&plan, call).unwrap_err().to_string(), words);
        assert_eq!(rank.workspace().bytes(&plan, call).unwrap_err().to_string(), words);
    }
    for call in AllToAll::both(Side::Q, most as usize, Dtype::F32).unwrap() {
        assert_eq!(rank.workspace().bytes(&plan, call), Ok(0));
    }
    let above = AllToAll::both(Side::Q, dim + 1, Dtype::F32).unwrap_err().to_string();
    assert_eq!(above, "dim is 4294967296, expected at most 4294967295");

    let small = Problem::new(Batch::from_lengths(&[3]).unwrap(), 2, 2, 4, Dtype::F32);
    let plan = Plan::new(&small, Mesh::single(), Layout::Contiguous).unwrap();
    let (from, mut to) = ([0f32; 24], [0f32; 30]);
    let (from, to) = (View::new(&from, 3, 2, 4).unwrap(), ViewMut::new(&mut to, 3, 2, 5).unwrap());
    let error = rank.all_to_all(&plan).to_tokens(Side::Q, from, to).unwrap_err().to_string();
    assert!(error.starts_with("to.dim is 5, expected 4"), "{error}");
}

/// Times count from a moment that has passed.
#[test]
fn an_epoch_that_has_not_come_is_refused() {
    let mut rank = Rank::new(local::group(1, Duration::from_secs(1)).unwrap().remove(0));
    let later = Instant::now() + Duration::from_secs(3600);
    let error = rank.trace().record(later, 8).unwrap_err().to_string();
    assert!(error.contains("epoch is 3599.") && error.contains("a moment that has passed"), "{error}");
    rank.trace().record(later, 0).unwrap();
    rank.trace().record(Instant::now(), 8).unwrap();
}
