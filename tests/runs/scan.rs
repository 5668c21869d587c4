// SPDX-License-Identifier: MIT OR Apache-2.0
//! States passed on along documents: drawn layouts, meshes, documents and forms against a loop in f64, with NaN where
//! nobody may read; gradients as reverse scans; bits; refusals.

use crate::refused::refused;
use crate::seeds::each_seed;
use cpattn::{
    Accumulator, Batch, Dtype, Layout, Mesh, Plan, Problem, Rank, Side, View, ViewMut,
    plan::TokenSegment,
    runtime::ScanTensors,
    schedule::{Decay, Scan, ScanForm},
    transport::local,
};
use fastrand::Rng;
use std::time::Duration;

const FORMS: [ScanForm; 4] = [ScanForm::Auto, ScanForm::Chain, ScanForm::Tree, ScanForm::Direct];

/// Decay and state of each rank's segments.
struct Drawn {
    scan: Scan,
    decay: Vec<Vec<f64>>,
    state: Vec<Vec<f64>>,
}

fn segments(plan: &Plan) -> Vec<Vec<TokenSegment>> {
    plan.mesh().group_of(0).map(|r| plan.local_tokens(Side::Q, r).segments()).collect()
}

/// Every segment as (first token, rank, row, document), in the order of a scan.
fn in_order(plan: &Plan, reverse: bool) -> Vec<(usize, usize, usize, usize)> {
    let of = |(r, own): (usize, Vec<TokenSegment>)| {
        own.into_iter().enumerate().map(move |(row, s)| (s.token, r, row, s.document)).collect::<Vec<_>>()
    };
    let mut all: Vec<_> = segments(plan).into_iter().enumerate().flat_map(of).collect();
    all.sort_unstable();
    if reverse {
        all.reverse();
    }
    all
}

fn any_plan(draw: &mut Rng) -> Plan {
    let length = |draw: &mut Rng| [0, draw.usize(..4), draw.usize(..60)][draw.usize(..3)];
    let lengths: Vec<usize> = (0..draw.usize(1..7)).map(|_| length(draw)).collect();
    let layout = match draw.u32(..5) {
        0 => Layout::Contiguous,
        1 => Layout::Zigzag,
        2 => Layout::ZigzagPack,
        3 => Layout::Striped { stripe: draw.u32(1..6) },
        _ => Layout::Balanced { chunks: draw.u32(1..6) },
    };
    let mesh = Mesh { ring: draw.usize(1..5), ulysses: draw.usize(1..4), replicas: draw.usize(1..3) };
    let problem = Problem::new(Batch::from_lengths(&lengths).unwrap(), 4, 2, 8, Dtype::Bf16);
    Plan::new(&problem, mesh, layout).unwrap()
}

fn any_scan(draw: &mut Rng, dtype: Dtype) -> Scan {
    let decay = if draw.bool() { Decay::Diagonal } else { Decay::Matrix };
    let scan = Scan::new(decay, draw.u32(1..7), draw.u32(1..5), draw.u32(1..5));
    Scan { dtype, reverse: draw.bool(), form: FORMS[draw.usize(..4)], ..scan }
}

/// Slow decay: near 1 for diagonals, near rotations for matrices. What nobody may read is NaN.
fn draw_values(draw: &mut Rng, plan: &Plan, scan: Scan) -> Drawn {
    let (heads, key, dims) = (scan.heads as usize, scan.key_dim as usize, [scan.decay_dim(), scan.state_dim()]);
    let own = segments(plan);
    let [mut decay, mut state] =
        dims.map(|dim| own.iter().map(|s| vec![f64::NAN; s.len() * heads * dim as usize]).collect::<Vec<_>>());
    let order = in_order(plan, scan.reverse);
    for (i, &(_, r, row, document)) in order.iter().enumerate() {
        let first = i == 0 || order[i - 1].3 != document;
        let last = order.get(i + 1).is_none_or(|next| next.3 != document);
        let [of_decay, of_state] = dims.map(|dim| row * heads * dim as usize..(row + 1) * heads * dim as usize);
        if !last {
            state[r][of_state].fill_with(|| draw.f64() * 2.0 - 1.0);
        }
        if first || last {
            continue;
        }
        for (n, x) in decay[r][of_decay].iter_mut().enumerate() {
            let diagonal = scan.decay == Decay::Diagonal || n % (key * key) % (key + 1) == 0;
            *x = if diagonal { 1.0 - draw.f64() * 0.02 } else { (draw.f64() - 0.5) * 0.2 };
            // As the ranks have it.
            if scan.dtype == Dtype::F32 {
                *x = f64::from(*x as f32);
            }
        }
    }
    if scan.dtype == Dtype::F32 {
        state.iter_mut().flatten().for_each(|x| *x = f64::from(*x as f32));
    }
    Drawn { scan, decay, state }
}

/// The initial states by a loop over all segments, in f64.
fn expected(plan: &Plan, d: &Drawn) -> Vec<Vec<f64>> {
    let s = d.scan;
    let (heads, key, value) = (s.heads as usize, s.key_dim as usize, s.value_dim as usize);
    let (per_decay, per_state) = (heads * s.decay_dim() as usize, heads * key * value);
    let mut out: Vec<Vec<f64>> = d.state.iter().map(|x| vec![0.0; x.len()]).collect();
    let (mut running, mut of) = (vec![0.0; per_state], None);
    let order = in_order(plan, s.reverse);
    for (i, &(_, r, row, document)) in order.iter().enumerate() {
        let first = of != Some(document);
        if first {
            running.fill(0.0);
        }
        of = Some(document);
        out[r][row * per_state..(row + 1) * per_state].copy_from_slice(&running);
        if order.get(i + 1).is_none_or(|next| next.3 != document) {
            continue;
        }
        let decay = &d.decay[r][row * per_decay..(row + 1) * per_decay];
        let state = &d.state[r][row * per_state..(row + 1) * per_state];
        let before = running.clone();
        for h in 0..heads {
            for k in 0..key {
                for v in 0..value {
                    let at = |j: usize| before[(h * key + j) * value + v];
                    let decayed = match s.decay {
                        _ if first => 0.0,
                        Decay::Diagonal => decay[h * key + k] * at(k),
                        Decay::Matrix => (0..key).map(|j| decay[(h * key + k) * key + j] * at(j)).sum(),
                    };
                    let to = (h * key + k) * value + v;
                    running[to] = decayed + state[to];
                }
            }
        }
    }
    out
}

/// One run on threads, twice; the second result.
fn run<T: Accumulator>(plan: &Plan, d: &Drawn) -> Vec<Vec<T>> {
    let ends = local::group(plan.mesh().world(), Duration::from_secs(120)).unwrap();
    let (group, s) = (plan.mesh().group(), d.scan);
    std::thread::scope(|scope| {
        let run = |end: local::Local| {
            let mut rank = Rank::new(end);
            let r = rank.rank() % group;
            let narrow = |x: &[f64]| x.iter().map(|&x| T::from_f64(x)).collect::<Vec<T>>();
            let (decay, state) = (narrow(&d.decay[r]), narrow(&d.state[r]));
            let rows = plan.local_tokens(Side::Q, r).segments().len();
            let mut initial = vec![T::from_f64(f64::NAN); state.len()];
            for _ in 0..2 {
                let (heads, dim) = (s.heads as usize, s.state_dim() as usize);
                let tensors = ScanTensors::new(
                    View::new(&decay, rows, heads, s.decay_dim() as usize).unwrap(),
                    View::new(&state, rows, heads, dim).unwrap(),
                    ViewMut::new(&mut initial, rows, heads, dim).unwrap(),
                );
                rank.scan(plan, s, tensors).unwrap();
            }
            initial
        };
        let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(move || run(end))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn right<T: Accumulator>(dtype: Dtype, problems: u64, epsilon: f64) {
    each_seed(problems, |draw| {
        let plan = any_plan(draw);
        let scan = any_scan(draw, dtype);
        plan.verify_purpose(scan).unwrap_or_else(|error| panic!("{error}: {scan:?} over {plan:?}"));
        let drawn = draw_values(draw, &plan, scan);
        let want = expected(&plan, &drawn);
        for (r, found) in run::<T>(&plan, &drawn).iter().enumerate() {
            let want = &want[r % want.len()];
            let largest = want.iter().fold(1.0, |m: f64, x| m.max(x.abs()));
            for (x, y) in found.iter().zip(want) {
                let error = (x.to_f64() - y).abs();
                assert!(error <= epsilon * largest, "rank {r}: {x:?} for {y}, {scan:?} over {plan:?}");
            }
        }
    });
}

#[test]
fn states_of_f32_are_those_of_a_loop() {
    right::<f32>(Dtype::F32, 600, 2e-6);
}

#[test]
fn states_of_f64_are_those_of_a_loop() {
    right::<f64>(Dtype::F64, 300, 1e-14);
}
