// SPDX-License-Identifier: MIT OR Apache-2.0
//! Drawn plans and lists: the schedules are proved, the rows that arrive are counted, and wrong rows are found.

use super::*;
use crate::{
    batch::Batch,
    element::Dtype,
    layout::Layout,
    mask::Mask,
    mesh::Mesh,
    plan::{Circulate, Gather, Options, Problem, Wire},
};
use alloc::collections::BTreeSet;
use fastrand::Rng;

fn drawn_batch(r: &mut Rng) -> Batch {
    let lengths = |r: &mut Rng| (0..r.usize(1..5)).map(|_| [0, 1, r.usize(..9), r.usize(..40)][r.usize(..4)]).collect();
    let q: Vec<usize> = lengths(r);
    if r.bool() {
        return Batch::from_lengths(&q).unwrap();
    }
    let ends = |list: &[usize]| {
        let mut cu = alloc::vec![0];
        list.iter().for_each(|&n| cu.push(cu[cu.len() - 1] + n as i32));
        cu
    };
    let k: Vec<usize> = q.iter().map(|_| r.usize(..40)).collect();
    let starts: Vec<i64> = q.iter().map(|_| r.i64(-5..30)).collect();
    Batch::cross(&ends(&q), &ends(&k), r.bool().then_some(&starts)).unwrap()
}

fn drawn_plan(r: &mut Rng) -> Plan {
    let (kv_heads, group) = (r.usize(1..4), r.usize(1..4));
    let mask = [Mask::full(), Mask::causal(), Mask::sliding(r.u32(1..12)), Mask::window(3, 5)][r.usize(..4)];
    let dtype = [Dtype::F32, Dtype::Bf16][r.usize(..2)];
    let p = Problem::new(drawn_batch(r), kv_heads * group, kv_heads, 8, dtype).with_value_dim(4).with_mask(mask);
    let ulysses = r.usize(1..=(kv_heads * group).min(3));
    let mesh = Mesh { replicas: 1, ring: r.usize(1..6), ulysses };
    let layout = [
        Layout::Contiguous,
        Layout::Zigzag,
        Layout::ZigzagPack,
        Layout::Striped { stripe: 1 },
        Layout::Striped { stripe: 3 },
        Layout::Balanced { chunks: 2 },
    ][r.usize(..6)];
    let options = Options::new()
        .circulate(Circulate::Keys)
        .circulate_forward(Circulate::Keys)
        .gather([Gather::Steps, Gather::Others, Gather::Together][r.usize(..3)])
        .passes(r.usize(1..=kv_heads))
        .wire([Wire::Full, Wire::Bf16][r.usize(..2)])
        .pack_inputs(r.bool())
        .ranks_per_node([0, 1, 2][r.usize(..3)]);
    Plan::builder(&p).mesh(mesh).layout(layout).options(options).build().unwrap_or_else(|_| drawn_plan(r))
}

/// By ring rank: allowed keys of some of its q tokens, perhaps of its own share, perhaps twice.
fn drawn_keys(r: &mut Rng, plan: &Plan) -> Vec<Vec<u32>> {
    let (score, batch) = (plan.problem().score(), plan.problem().batch());
    let mut keys = alloc::vec![Vec::new(); plan.mesh().ring];
    let often = [0.0, 0.05, 0.3, 1.0][r.usize(..4)];
    for rank in 0..plan.mesh().group() {
        let of_rank = &mut keys[plan.mesh().coordinates(rank).ring];
        plan.local_tokens(Side::Q, rank).for_each(|_, position, doc| {
            let tokens = batch.document(Side::K, doc);
            let allowed = tokens.clone().filter(|&t| score.allows(position, (t - tokens.start) as i64));
            of_rank.extend(allowed.filter(|_| r.f64() < often).map(|t| t as u32));
        });
    }
    keys
}

/// Tokens of k in each ring rank's share.
fn shares(plan: &Plan) -> Vec<BTreeSet<u32>> {
    let mut shares = alloc::vec![BTreeSet::new(); plan.mesh().ring];
    for rank in 0..plan.mesh().group() {
        let tokens = plan.local_tokens(Side::K, rank).indices();
        shares[plan.mesh().coordinates(rank).ring].extend(tokens.into_iter().map(|t| t as u32));
    }
    shares
}

/// Every drawn schedule is proved, and of k and v each rank receives exactly the rows that its ring rank lists and that
/// are not its own.
#[test]
fn listed_rows_arrive_and_no_other() {
    let mut r = Rng::with_seed(48);
    let (mut rows, mut empty) = (0, 0);
    for _ in 0..if cfg!(miri) { 3 } else { 1_500 } {
        let plan = drawn_plan(&mut r);
        let keys = drawn_keys(&mut r, &plan);
        let (forward, backward) =
            Schedule::verify_listed(&plan, &keys).unwrap_or_else(|e| panic!("{:?} {:?}: {e}", plan, plan.options()));
        let (p, own) = (plan.problem(), shares(&plan));
        for (rank, report) in forward.ranks.iter().enumerate() {
            let ring = plan.mesh().coordinates(rank).ring;
            let listed: BTreeSet<u32> = keys[ring].iter().copied().filter(|t| !own[ring].contains(t)).collect();
            let row = plan.heads_of(rank).kv.len() * (p.head_dim() + p.value_dim());
            let got: u64 = report.traffic.iter().filter(|t| t.phase == "ring").map(|t| t.bytes_in).sum();
            assert_eq!(got, (listed.len() * row * p.dtype().size()) as u64, "{:?}", plan.options());
            let returned = backward.ranks[rank].traffic.iter().filter(|t| t.phase == "ring" && t.kind == "return");
            let returned: u64 = returned.map(|t| t.bytes_out).sum();
            assert_eq!(returned, (listed.len() * row * plan.gradient_bytes()) as u64);
            rows += listed.len();
            empty += usize::from(listed.is_empty());
        }
    }
    assert!(cfg!(miri) || rows > 10_000 && empty > 500, "{rows} {empty}");
}

/// Changes the rows of one reader and owner, at both ends or at one; and whether there were any before.
fn mutated(r: &mut Rng, all: &[ListedRows], plan: &Plan) -> Option<(Vec<ListedRows>, bool)> {
    let ring = all.len();
    let (reader, owner) = (r.usize(..ring), r.usize(..ring));
    if reader == owner {
        return None;
    }
    let rows = plan.shares().rows(Side::K, owner) as u32;
    let mut runs = all[reader].incoming[owner].clone();
    match r.usize(..3) {
        // A row less.
        0 => {
            let at = r.usize(..runs.len().max(1));
            let run = runs.get_mut(at)?;
            run.1 -= 1;
            if run.0 == run.1 {
                runs.remove(at);
            }
        }
        // A row more.
        1 => match runs.last_mut() {
            Some(run) if run.1 < rows => run.1 += 1,
            None if rows > 0 => runs.push((0, 1)),
            _ => return None,
        },
        // Another row.
        _ => {
            let run = runs.last_mut().filter(|run| run.1 < rows)?;
            *run = (run.0 + 1, run.1 + 1);
        }
    }
    let mut changed = all.to_vec();
    let ends = r.usize(..3);
    if ends != 1 {
        changed[reader].incoming[owner] = runs.clone();
    }
    if ends != 0 {
        changed[owner].outgoing[reader] = runs;
    }
    Some((changed, !all[reader].incoming[owner].is_empty()))
}

/// The proof finds rows too many, too few and other ones, whether one end of the message has them wrong or both; with
/// steps that were measured for them, and with those of the right rows.
#[test]
fn wrong_rows_are_found() {
    let mut r = Rng::with_seed(7);
    let (mut found, mut tried) = (0, 0);
    while tried < if cfg!(miri) { 2 } else { 600 } {
        let plan = drawn_plan(&mut r);
        let keys = drawn_keys(&mut r, &plan);
        let named = sets(&plan, &keys).unwrap();
        let right: Vec<ListedRows> =
            (0..plan.mesh().ring).map(|me| ListedRows::of(plan.shares(), me, &named)).collect();
        let Some((wrong, any)) = mutated(&mut r, &right, &plan) else { continue };
        tried += 1;
        let direction = [Direction::Forward, Direction::Backward][r.usize(..2)];
        // Without a step there is none to use for other rows.
        let stale = any && r.bool();
        let of_rank = |rank: usize| {
            let me = plan.mesh().coordinates(rank).ring;
            let p = plan.problem();
            let steps =
                |rows: &ListedRows| RingSteps::listed(plan.shares(), p.allowed(), plan.form(), me, rows.clone());
            let steps = if stale { steps(&right[me]).with_listed(wrong[me].clone()) } else { steps(&wrong[me]) };
            Schedule::over_listed_steps(&plan, rank, direction, Arc::new(steps))
        };
        let schedules: Result<Vec<_>> = (0..plan.mesh().group()).map(of_rank).collect();
        let outcome = schedules.and_then(|schedules| plan.verify_listed_schedules(&schedules, &keys));
        assert!(outcome.is_err(), "{:?}\n{keys:?}\n{right:?}\n{wrong:?}", plan.options());
        found += 1;
    }
    assert_eq!(found, tried);
}

#[test]
fn what_is_refused() {
    let p = Problem::new(Batch::from_lengths(&[8]).unwrap(), 2, 1, 8, Dtype::F32);
    let plan = |options| {
        Plan::builder(&p).mesh(Mesh::ring(2).unwrap()).layout(Layout::Contiguous).options(options).build().unwrap()
    };
    let text = |plan: &Plan, rank, keys: &[Vec<u32>]| {
        Schedule::listed(plan, rank, Direction::Forward, keys).unwrap_err().to_string()
    };
    let right = plan(Options::new());
    assert!(text(&right, 2, &[Vec::new(), Vec::new()]).contains("rank is 2"));
    assert!(text(&right, 0, &[Vec::new()]).contains("keys is of 1 ring ranks, expected of 2"));
    assert!(text(&right, 0, &[Vec::new(), alloc::vec![8]]).contains("keys[1] is 8, expected below the 8 k tokens"));
    let queries = plan(Options::new().circulate_forward(Circulate::Queries));
    assert!(text(&queries, 0, &[Vec::new(), Vec::new()]).contains("listed keys in a ring whose q circulates"));
    let ordered = plan(Options::new().reproducible(true));
    assert!(text(&ordered, 0, &[Vec::new(), Vec::new()]).contains("listed keys in a reproducible plan"));
}
