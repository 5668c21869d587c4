// SPDX-License-Identifier: MIT OR Apache-2.0
//! States passed on along documents: drawn layouts, meshes, documents and forms against a loop in f64, with NaN where
//! nobody may read; gradients as reverse scans; bits; refusals.

use crate::refused::refused;
use crate::seeds::each_seed;
use cpattn::{
    Accumulator, Batch, Dtype, Layout, Mesh, Plan, Problem, Rank, Side, View, ViewMut,
    plan::TokenSegment,
    runtime::ScanTensors,
    schedule::{Decay, ExpandedOp, Scan, ScanForm, Schedule},
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

fn of_ranks(ranks: usize, lengths: &[usize], layout: Layout) -> Plan {
    let problem = Problem::new(Batch::from_lengths(lengths).unwrap(), 2, 2, 8, Dtype::Bf16);
    Plan::new(&problem, Mesh::ring(ranks).unwrap(), layout).unwrap()
}

/// The most messages and exchanges that a rank sends or receives.
fn messages(plan: &Plan, scan: Scan) -> (usize, usize) {
    let (mut most, mut exchanges) = (0, 0);
    for rank in 0..plan.mesh().world() {
        let s = Schedule::scan(plan, rank, scan).unwrap();
        let lists = (0..s.operations().len()).map(|op| s.expand(op)).filter_map(|op| match op {
            ExpandedOp::Exchange { messages, .. } => Some(messages),
            _ => None,
        });
        let (mut moved, mut count) = ([0; 2], 0);
        for list in lists {
            count += 1;
            list.iter().for_each(|m| moved[usize::from(m.send)] += 1);
        }
        most = most.max(moved[0]).max(moved[1]);
        exchanges = exchanges.max(count);
    }
    (most, exchanges)
}

/// One document over R ranks: a chain passes each state once, a tree has log₂ R exchanges.
#[test]
fn forms_send_what_they_say() {
    for ranks in [2usize, 4, 8, 13, 64] {
        let plan = of_ranks(ranks, &[ranks * 10], Layout::Contiguous);
        let with = |form| Scan { form, ..Scan::new(Decay::Diagonal, 2, 2, 2) };
        let steps = ranks.next_power_of_two().ilog2() as usize;
        // Received and passed on: a message and an exchange each.
        assert_eq!(messages(&plan, with(ScanForm::Chain)), (1, 2.min(ranks - 1)), "{ranks}");
        let (most, exchanges) = messages(&plan, with(ScanForm::Tree));
        assert!(exchanges == steps && (steps..=2 * steps).contains(&most), "{ranks}: {most} in {exchanges}");
        assert_eq!(messages(&plan, with(ScanForm::Direct)), (2 * ranks - 3, 1), "{ranks}");
        assert!(messages(&plan, with(ScanForm::Auto)).0 <= 2 * ranks - 3, "{ranks}");
    }
}

/// A direct scan is quadratic in segments: the choice leaves it out for many of them, however small the states are;
/// many short documents in pieces are still planned.
#[test]
fn many_segments_are_not_sent_directly() {
    let exchanges = |segments| {
        let plan = of_ranks(segments, &[segments], Layout::Contiguous);
        messages(&plan, Scan::new(Decay::Diagonal, 1, 1, 1)).1
    };
    assert_eq!((exchanges(64), exchanges(65)), (1, 7));
    let plan = of_ranks(8, &[100; 300], Layout::Zigzag);
    plan.verify_purpose(Scan::new(Decay::Diagonal, 1, 1, 1)).unwrap();
    // As many as there may be of one document, and of a direct one.
    let schedule = |segments, form| {
        let plan = of_ranks(2, &[segments], Layout::Striped { stripe: 1 });
        Schedule::scan(&plan, 1, Scan { form, ..Scan::new(Decay::Diagonal, 1, 1, 1) })
    };
    let most = [(4096, ScanForm::Auto), (1024, ScanForm::Direct)];
    assert!(most.iter().all(|&(segments, form)| schedule(segments, form).is_ok()));
}

/// Documents that lie on one rank send nothing, and a rank without tokens takes no part.
#[test]
fn whole_documents_send_nothing() {
    let plan = of_ranks(4, &[1, 1, 1], Layout::Contiguous);
    assert_eq!(messages(&plan, Scan::new(Decay::Matrix, 1, 2, 3)), (0, 0));
    let empty = Schedule::scan(&plan, 0, Scan::new(Decay::Matrix, 1, 2, 3)).unwrap();
    assert_eq!((empty.operations().len(), empty.workspace_bytes()), (0, 0));
}

/// The bits of each form are those of another run, whatever else the machine does.
#[test]
fn runs_repeat_bit_for_bit() {
    each_seed(20, |draw| {
        let plan = any_plan(draw);
        for form in FORMS {
            let scan = Scan { form, ..any_scan(draw, Dtype::F32) };
            let drawn = draw_values(draw, &plan, scan);
            let [one, two] = [0, 1].map(|_| run::<f32>(&plan, &drawn));
            let bits = |x: &Vec<Vec<f32>>| x.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&one), bits(&two), "{scan:?} over {plan:?}");
        }
    });
}

#[test]
fn what_is_no_scan_is_refused() {
    let plan = &of_ranks(2, &[10], Layout::Contiguous);
    let good = Scan::new(Decay::Diagonal, 2, 3, 4);
    let scheduled = |scan: Scan| Schedule::scan(plan, 0, scan).map(drop);
    refused(scheduled(Scan { heads: 0, ..good }), &["scan.heads is 0, expected at least 1"]);
    refused(scheduled(Scan { key_dim: 0, ..good }), &["scan.key_dim is 0"]);
    refused(scheduled(Scan { value_dim: 0, ..good }), &["scan.value_dim is 0"]);
    refused(scheduled(Scan { dtype: Dtype::Bf16, ..good }), &["scan.dtype is bf16, expected f32 or f64", "convert"]);
    refused(scheduled(Scan { key_dim: 1 << 16, value_dim: 1 << 16, ..good }), &["with 2 heads"]);
    refused(Schedule::scan(plan, 2, good).map(drop), &["rank is 2, expected below the world of 2"]);
    // One long document in stripes of a token, many short ones, and a direct one.
    let stripes = Layout::Striped { stripe: 1 };
    let over = |lengths: &[usize], scan| Schedule::scan(&of_ranks(2, lengths, stripes), 0, scan).map(drop);
    refused(over(&[4097], good), &["a scan over layout striped", "with 4097 segments", "at most 4096", "contiguous"]);
    refused(over(&[1000; 66], good), &["a scan over layout striped", "with more than", "at most 65536", "contiguous"]);
    let direct = Scan { form: ScanForm::Direct, ..good };
    refused(
        over(&[3, 1025], direct),
        &[
            "a scan of form direct over layout striped",
            "with 1025 segments",
            "at most 1024",
            "form auto, chain or tree",
        ],
    );
    // Tensors of the wrong shape and type, on one rank alone: nothing has moved.
    let alone = &of_ranks(1, &[10], Layout::Contiguous);
    let mut rank = Rank::new(local::group(1, Duration::from_secs(10)).unwrap().pop().unwrap());
    let (decay, state, mut initial) = ([1.0f32; 6], [1.0f32; 48], [0.0f32; 24]);
    let mut call = |rows: usize, dim: usize| {
        let tensors = ScanTensors::new(
            View::new(&decay, 1, 2, 3).unwrap(),
            View::new(&state[..rows * 2 * dim], rows, 2, dim).unwrap(),
            ViewMut::new(&mut initial, 1, 2, 12).unwrap(),
        );
        rank.scan(alone, good, tensors)
    };
    refused(call(2, 12), &["state", "2", "expected 1", "a row for each of the rank's segments"]);
    refused(call(1, 4), &["state.dim is 4, expected 12"]);
    call(1, 12).unwrap();
}
