// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plans, proved whole: every rank's schedule of both directions goes through the verifier.

use cpattn::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem, Side,
    plan::{Circulate, Wire},
    schedule::{
        Direction, Scratch,
        build::trade::{Trade, Way},
        verify::Report,
    },
};

const LAYOUTS: [Layout; 7] = [
    Layout::Contiguous,
    Layout::Zigzag,
    Layout::ZigzagPack,
    Layout::Striped { stripe: 1 },
    Layout::Striped { stripe: 3 },
    Layout::Balanced { chunks: 1 },
    Layout::Balanced { chunks: 3 },
];

const MASKS: [Mask; 6] = [
    Mask::full(),
    Mask::causal(),
    Mask::window(3, 0),
    Mask::window(2, 4),
    Mask { left: Some(5), right: None },
    Mask { left: None, right: Some(2) },
];

fn options() -> Vec<Options> {
    let o = Options::new;
    vec![
        o(),
        o().gather(true),
        o().passes(2),
        o().passes(3).gather(true).wire(Wire::Bf16),
        o().circulate(Circulate::Keys),
        o().circulate(Circulate::Keys).wire(Wire::Bf16).pack_inputs(true),
        o().circulate(Circulate::Queries),
        o().circulate(Circulate::Queries).gather(true),
        o().circulate(Circulate::Queries).wire(Wire::Bf16).pack_inputs(true),
        o().reproducible(true),
        o().reproducible(true).pack_inputs(true),
        o().pack_inputs(true),
    ]
}

fn verify(problem: &Problem, mesh: Mesh, layout: Layout, options: Options) -> (Report, Report) {
    let plan = Plan::with_options(problem, mesh, layout, options)
        .unwrap_or_else(|e| panic!("{problem:?} on {mesh}, {layout}, {options:?}: {e}"));
    plan.verify().unwrap_or_else(|e| panic!("{problem:?} on {mesh}, {layout}, {options:?}: {e}"))
}

/// Every layout, mask and option on one problem shape; returns how many plans were proved.
fn grid(batch: &Batch, heads: usize, kv_heads: usize, mesh: Mesh) -> usize {
    let mut proved = 0;
    for layout in LAYOUTS {
        for mask in MASKS {
            for o in options() {
                if o.passes > kv_heads {
                    continue;
                }
                let dtype = if proved % 2 == 0 { Dtype::Bf16 } else { Dtype::F32 };
                let problem = Problem::new(batch.clone(), heads, kv_heads, 8, dtype)
                    .value_dim(4)
                    .mask(mask)
                    .sinks(proved % 3 == 0);
                let (forward, backward) = verify(&problem, mesh, layout, o);
                assert_eq!(forward.pairs, problem.area() * heads as u128);
                assert_eq!(backward.pairs, forward.pairs);
                proved += 1;
            }
        }
    }
    proved
}

fn pack() -> Batch {
    Batch::from_lengths(&[7, 0, 1, 13, 3, 22]).unwrap()
}

#[test]
fn nine_heads_on_six_ranks() {
    let mesh = Mesh::gcd(9, 6).unwrap();
    assert_eq!((mesh.ulysses, mesh.ring), (3, 2));
    assert_eq!(grid(&pack(), 9, 3, mesh), 504);
}

#[test]
fn nine_heads_on_three_ranks() {
    let mesh = Mesh::gcd(9, 3).unwrap();
    assert_eq!((mesh.ulysses, mesh.ring), (3, 1));
    assert_eq!(grid(&pack(), 9, 3, mesh), 504);
}

#[test]
fn nine_heads_on_four_ranks() {
    let mesh = Mesh::gcd(9, 4).unwrap();
    assert_eq!((mesh.ulysses, mesh.ring), (1, 4));
    assert_eq!(grid(&pack(), 9, 3, mesh), 504);
}

#[test]
fn nine_heads_on_eight_ranks_four_by_two() {
    let mesh = Mesh::explicit(8, 4, 2).unwrap();
    assert_eq!((mesh.ulysses, mesh.ring), (4, 2));
    assert_eq!(grid(&pack(), 9, 3, mesh), 504);
}

#[test]
fn nine_heads_on_one_rank() {
    assert_eq!(grid(&pack(), 9, 3, Mesh::single()), 504);
}

#[test]
fn awkward_lengths_on_eight_ranks() {
    let batches = [
        Batch::from_lengths(&[]).unwrap(),
        Batch::from_lengths(&[0, 0]).unwrap(),
        Batch::from_lengths(&[1]).unwrap(),
        Batch::from_lengths(&[2]).unwrap(),
        Batch::from_lengths(&[3]).unwrap(),
        Batch::from_lengths(&[31]).unwrap(),
        Batch::from_lengths(&[0, 1, 0, 90, 2, 0]).unwrap(),
    ];
    for batch in &batches {
        for mesh in [Mesh::ring(8).unwrap(), Mesh::explicit(8, 4, 2).unwrap()] {
            assert_eq!(grid(batch, 4, 2, mesh), 7 * 6 * 11);
        }
    }
}

#[test]
fn cross_attention_and_prefixes() {
    let batches = [
        Batch::cross(&[0, 3, 3, 10], &[0, 8, 9, 21], None).unwrap(),
        Batch::cross(&[0, 6, 11], &[0, 2, 14], Some(&[-2, 5])).unwrap(),
        Batch::cross(&[0, 4, 9], &[0, 0, 7], Some(&[0, 1 << 40])).unwrap(),
        Batch::cross(&[0, 0, 0], &[0, 5, 9], None).unwrap(),
    ];
    for batch in &batches {
        for mesh in [Mesh::ring(5).unwrap(), Mesh::explicit(6, 3, 2).unwrap()] {
            assert_eq!(grid(batch, 4, 2, mesh), 7 * 6 * 11);
        }
    }
}

#[test]
fn query_groups_of_every_ratio() {
    for (heads, kv_heads) in [(1, 1), (5, 1), (6, 2), (6, 3), (6, 6), (7, 7), (12, 4)] {
        for ulysses in [1, heads.min(3), heads.min(5), heads] {
            let mesh = Mesh::explicit(2 * ulysses, ulysses, 2).unwrap();
            let problem = Problem::new(pack(), heads, kv_heads, 8, Dtype::Bf16).sinks(true);
            for o in options().into_iter().filter(|o| o.passes <= kv_heads) {
                verify(&problem, mesh, Layout::Zigzag, o);
            }
        }
    }
}

#[test]
fn replicas_run_the_same_lists() {
    use cpattn::schedule::verify::verify;
    let mesh = Mesh::explicit(8, 2, 2).unwrap();
    let plan = Plan::new(&Problem::new(pack(), 4, 2, 8, Dtype::F32), mesh, Layout::Zigzag).unwrap();
    for direction in [Direction::Forward, Direction::Backward] {
        let of = |ranks: std::ops::Range<usize>| {
            let all: Vec<_> = ranks.map(|r| plan.schedule(r, direction).unwrap()).collect();
            verify(&all, &plan).unwrap()
        };
        let (first, second) = (of(0..4), of(4..8));
        assert_eq!(first.pairs, second.pairs);
        assert_eq!(first.ranks[3].traffic, second.ranks[3].traffic);
    }
}

fn indices(batch: &Batch, layout: Layout, ring: usize) -> Vec<Vec<usize>> {
    let problem = Problem::new(batch.clone(), 1, 1, 8, Dtype::F32);
    let plan = Plan::new(&problem, Mesh::ring(ring).unwrap(), layout).unwrap();
    (0..ring).map(|r| plan.token_indices(Side::Q, r)).collect()
}

/// Written by hand: borders `⌊i·n/2R⌋`, rank r takes chunk r, then chunk 2R − 1 − r.
#[test]
fn zigzag_tokens_of_each_document() {
    let one = |n: usize, ring| indices(&Batch::from_lengths(&[n]).unwrap(), Layout::Zigzag, ring);
    assert_eq!(one(8, 2), [vec![0, 1, 6, 7], vec![2, 3, 4, 5]]);
    // 7 tokens, 4 chunks: borders 0 1 3 5 7.
    assert_eq!(one(7, 2), [vec![0, 5, 6], vec![1, 2, 3, 4]]);
    // 3 tokens, 4 chunks: borders 0 0 1 2 3.
    assert_eq!(one(3, 2), [vec![2], vec![0, 1]]);
    // 1 token, 6 chunks: borders 0 0 0 0 0 0 1.
    assert_eq!(one(1, 3), [vec![0], vec![], vec![]]);
    // 11 tokens, 6 chunks: borders 0 1 3 5 7 9 11.
    assert_eq!(one(11, 3), [vec![0, 9, 10], vec![1, 2, 7, 8], vec![3, 4, 5, 6]]);
    // Documents of 5 (borders 0 1 2 3 5), 0 and 4 (0 1 2 3 4) tokens, one after another.
    let batch = Batch::from_lengths(&[5, 0, 4]).unwrap();
    assert_eq!(indices(&batch, Layout::Zigzag, 2), [vec![0, 3, 4, 5, 8], vec![1, 2, 6, 7]]);
}

#[test]
fn zigzag_tokens_of_the_pack() {
    // 9 tokens, 4 chunks: borders 0 2 4 6 9, whatever the documents.
    let batch = Batch::from_lengths(&[5, 0, 4]).unwrap();
    assert_eq!(indices(&batch, Layout::ZigzagPack, 2), [vec![0, 1, 6, 7, 8], vec![2, 3, 4, 5]]);
    // 13 tokens, 6 chunks: borders 0 2 4 6 8 10 13.
    let batch = Batch::from_lengths(&[1, 12]).unwrap();
    assert_eq!(indices(&batch, Layout::ZigzagPack, 3), [vec![0, 1, 10, 11, 12], vec![2, 3, 8, 9], vec![4, 5, 6, 7]]);
}

#[test]
fn striped_tokens_and_positions() {
    let batch = Batch::from_lengths(&[4, 5]).unwrap();
    assert_eq!(indices(&batch, Layout::Striped { stripe: 1 }, 2), [vec![0, 2, 4, 6, 8], vec![1, 3, 5, 7]]);
    assert_eq!(indices(&batch, Layout::Striped { stripe: 3 }, 2), [vec![0, 1, 2, 6, 7, 8], vec![3, 4, 5]]);
    let plan =
        Plan::new(&Problem::new(batch, 1, 1, 8, Dtype::F32), Mesh::ring(2).unwrap(), Layout::Striped { stripe: 3 })
            .unwrap();
    assert_eq!(plan.positions(Side::Q, 0), [0, 1, 2, 2, 3, 4]);
    assert_eq!(plan.positions(Side::Q, 1), [3, 0, 1]);
}

/// The ring ranks whose rows arrive at each rank, its own included.
fn sources(plan: &Plan) -> Vec<Vec<usize>> {
    (0..plan.mesh().ring)
        .map(|me| {
            let s = plan.schedule(me, Direction::Forward).unwrap();
            let visits = s.keys.as_ref().unwrap();
            let mut scratch = Scratch::default();
            let mut from = vec![me];
            for i in 1..visits.list().len() {
                visits.incoming(i, &mut scratch);
                from.extend(scratch.fragments.iter().map(|f| f.peer as usize));
            }
            from.sort_unstable();
            from.dedup();
            from
        })
        .collect()
}

/// Three documents of 120, 1,128 and 2,984 tokens over eight ranks of 529: who needs whom, written by hand from where
/// documents begin (ranks 0, 0 and 2).
#[test]
fn steps_that_nobody_needs_are_left_out() {
    let batch = Batch::new(&[0, 120, 1248, 4232]).unwrap();
    let problem = Problem::new(batch, 2, 1, 8, Dtype::Bf16);
    let plan = Plan::new(&problem, Mesh::ring(8).unwrap(), Layout::Contiguous).unwrap();
    let want: [&[usize]; 8] =
        [&[0], &[0, 1], &[0, 1, 2], &[2, 3], &[2, 3, 4], &[2, 3, 4, 5], &[2, 3, 4, 5, 6], &[2, 3, 4, 5, 6, 7]];
    assert_eq!(sources(&plan), want);
    let (forward, _) = plan.verify().unwrap();
    // Rank 1 takes document 1's 409 tokens of rank 0; rank 2 takes the same and all of rank 1; ranks 3 to 7 take
    // document 2's 339 tokens of rank 2 and all of the ranks between.
    let rows = [0, 409, 409 + 529, 339, 339 + 529, 339 + 2 * 529, 339 + 3 * 529, 339 + 4 * 529];
    let token = 2 * 8 * 2;
    let bytes: Vec<u64> = forward.ranks.iter().map(|r| r.bytes_in("fetch")).collect();
    assert_eq!(bytes, rows.map(|n| n * token));
}

/// A window of 128 tokens over 64 ranks of 1,024: each rank but the first takes 127 tokens of one neighbour and sends
/// their gradients straight home.
#[test]
fn a_window_is_a_halo() {
    let batch = Batch::from_lengths(&[64 * 1024]).unwrap();
    let problem = Problem::new(batch, 1, 1, 64, Dtype::Bf16).mask(Mask::sliding(128));
    let options = Options::new().circulate(Circulate::Keys);
    let plan = Plan::with_options(&problem, Mesh::ring(64).unwrap(), Layout::Contiguous, options).unwrap();
    let (forward, backward) = plan.verify().unwrap();
    let sources = sources(&plan);
    assert_eq!(sources[0], [0]);
    for (rank, from) in sources.iter().enumerate().skip(1) {
        assert_eq!(*from, [rank - 1, rank]);
        let (f, b) = (&forward.ranks[rank], &backward.ranks[rank]);
        let kv = 127 * 2 * 64;
        assert_eq!((f.bytes_in("fetch"), b.bytes_in("fetch")), (kv * 2, kv * 2));
        assert_eq!((b.bytes_out("return"), f.exchanges), (kv * 4, 1));
        assert_eq!(b.traffic.iter().find(|t| t.kind == "return").map(|t| t.messages_out), Some(2));
    }
    assert_eq!(forward.ranks[0].bytes_in("fetch"), 0);
    assert_eq!(forward.bytes("fetch"), 63 * 127 * 2 * 64 * 2);
}

/// The back chunk of rank j is needed by ranks below j only: 1.5·R·(R − 1) chunks move, not 2·R·(R − 1).
#[test]
fn zigzag_moves_three_quarters() {
    for ring in [2usize, 3, 4, 8] {
        let chunk = 6;
        let batch = Batch::from_lengths(&[2 * ring * chunk]).unwrap();
        let plan =
            Plan::new(&Problem::new(batch, 1, 1, 8, Dtype::F32), Mesh::ring(ring).unwrap(), Layout::Zigzag).unwrap();
        let (forward, _) = plan.verify().unwrap();
        let chunk_bytes = (chunk * 2 * 8 * 4) as u64;
        assert_eq!(forward.bytes("fetch") / chunk_bytes, 3 * (ring * (ring - 1)) as u64 / 2);
    }
}

/// Bytes that all ranks together take in, worked out by hand: (forward, backward).
#[test]
fn expected_bytes() {
    let one = |n: usize| Batch::from_lengths(&[n]).unwrap();
    let totals = |r: &Report| (r.bytes("exchange"), r.bytes("fetch"), r.bytes("return"));
    // Full attention, ring of 4, 64 tokens, 2 heads of 8, f32: each k and v row visits 3 ranks; dk and dv come home in
    // f32 from each.
    let full = Problem::new(one(64), 2, 2, 8, Dtype::F32).mask(Mask::full());
    let keys = Options::new().circulate(Circulate::Keys);
    let (f, b) = verify(&full, Mesh::ring(4).unwrap(), Layout::Contiguous, keys);
    let kv = 64 * 3 * 2 * 2 * 8 * 4;
    assert_eq!((totals(&f), totals(&b)), ((0, kv, 0), (0, kv, kv)));
    // The q side instead: q and do, lse and delta there, dq home.
    let queries = Options::new().circulate(Circulate::Queries);
    let (_, b) = verify(&full, Mesh::ring(4).unwrap(), Layout::Contiguous, queries);
    assert_eq!(totals(&b), (0, 64 * 3 * 2 * (2 * 8 + 2) * 4, 64 * 3 * 2 * 8 * 4));
    // bf16, and gradients in bf16: half of everything.
    let half = Problem::new(one(64), 2, 2, 8, Dtype::Bf16).mask(Mask::full());
    let (f, b) = verify(&half, Mesh::ring(4).unwrap(), Layout::Contiguous, keys.wire(Wire::Bf16));
    assert_eq!((totals(&f), totals(&b)), ((0, kv / 2, 0), (0, kv / 2, kv / 2)));
    // Contiguous and causal: rank j's rows visit the 3 − j ranks after it: 16 · (3 + 2 + 1) rows.
    let causal = Problem::new(one(64), 2, 2, 8, Dtype::F32);
    let (f, _) = verify(&causal, Mesh::ring(4).unwrap(), Layout::Contiguous, keys);
    assert_eq!(totals(&f), (0, 16 * 6 * 2 * 2 * 8 * 4, 0));
    // Ulysses on 4 ranks, 8 q heads, 4 kv heads, dims 8 and 4, bf16: of each rank's 16 rows three quarters of the heads
    // leave. In: q, k (dim 8), v (dim 4); out: o (dim 4) and lse (f32).
    let heads = Problem::new(one(64), 8, 4, 8, Dtype::Bf16).value_dim(4);
    let (f, b) = verify(&heads, Mesh::ulysses(4).unwrap(), Layout::Contiguous, Options::new());
    let away = 64 * 3 / 4;
    assert_eq!(totals(&f), (away * (8 * 8 * 2 + 4 * 8 * 2 + 4 * 4 * 2 + 8 * 4 * 2 + 8 * 4), 0, 0));
    // Backward, in: the same and do, lse, delta; out: dq, dk, dv, rounded before they travel.
    let brought = 8 * 8 * 2 + 4 * 8 * 2 + 4 * 4 * 2 + 8 * 4 * 2 + 2 * 8 * 4;
    let given = 8 * 8 * 2 + 4 * 8 * 2 + 4 * 4 * 2;
    assert_eq!(totals(&b), (away * (brought + given), 0, 0));
    // Two documents of 32 on a ring of 4: rows visit the one other rank of their document.
    let two = Problem::new(Batch::from_lengths(&[32, 32]).unwrap(), 2, 2, 8, Dtype::F32).mask(Mask::full());
    let (f, _) = verify(&two, Mesh::ring(4).unwrap(), Layout::Contiguous, keys);
    assert_eq!(totals(&f), (0, 64 * 2 * 2 * 8 * 4, 0));
}

/// Document lengths whose logarithm is the sum of twelve uniform draws (nearly normal), deviation about 1.2.
fn long_tailed(documents: usize, median: f64, seed: u64) -> Batch {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let lengths: Vec<usize> = (0..documents)
        .map(|_| {
            let normal: f64 = (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
            (median * (1.2 * normal).exp()) as usize
        })
        .collect();
    Batch::from_lengths(&lengths).unwrap()
}

/// The largest rank's mask area over the mean, and likewise of its tokens.
fn imbalance(batch: &Batch, layout: Layout, ring: usize) -> (f64, f64) {
    let mask = Mask::causal();
    let plan =
        Plan::new(&Problem::new(batch.clone(), 1, 1, 8, Dtype::Bf16), Mesh::ring(ring).unwrap(), layout).unwrap();
    let (mut work, mut tokens) = (Vec::new(), Vec::new());
    for r in 0..ring {
        let mut area = 0f64;
        plan.for_each_token(Side::Q, r, |_, pos, doc| {
            area += mask.row_area(pos, batch.document(Side::K, doc).len() as i64) as f64;
        });
        work.push(area);
        tokens.push(plan.local_tokens(Side::Q, r) as f64);
    }
    let over = |v: &[f64]| v.iter().copied().fold(0.0, f64::max) * v.len() as f64 / v.iter().sum::<f64>();
    (over(&work), over(&tokens))
}

/// Packs of 200 to 2,000 documents of about 500 to 4,000 tokens (0.2 to 2.3 million tokens in all).
#[test]
fn balanced_layouts_balance_long_tailed_packs() {
    for (documents, median, seed) in [(200, 500.0, 1), (200, 500.0, 2), (300, 1000.0, 3), (500, 2000.0, 4)] {
        let batch = long_tailed(documents, median, seed);
        for (ring, chunks) in [(8, 16), (64, 16)] {
            let (work, tokens) = imbalance(&batch, Layout::Balanced { chunks }, ring);
            let total = batch.tokens(Side::Q);
            assert!(
                work <= 1.05 && tokens <= 1.05,
                "seed {seed}, {total} tokens, {ring} ranks: work {work:.4}, tokens {tokens:.4}"
            );
            let (contiguous, _) = imbalance(&batch, Layout::Contiguous, ring);
            assert!(contiguous > work, "contiguous {contiguous:.3} against {work:.3}");
        }
    }
}

mod drawn {
    use super::*;
    use cpattn::Error;
    use proptest::prelude::*;

    fn layout() -> impl Strategy<Value = Layout> {
        prop_oneof![
            Just(Layout::Contiguous),
            Just(Layout::Zigzag),
            Just(Layout::ZigzagPack),
            (0u32..6).prop_map(|stripe| Layout::Striped { stripe }),
            (0u32..5).prop_map(|chunks| Layout::Balanced { chunks }),
        ]
    }

    fn mask() -> impl Strategy<Value = Mask> {
        let side = || prop_oneof![Just(None), (0u32..40).prop_map(Some)];
        (side(), side()).prop_map(|(left, right)| Mask { left, right })
    }

    fn options() -> impl Strategy<Value = Options> {
        let circulate = prop_oneof![Just(Circulate::Auto), Just(Circulate::Keys), Just(Circulate::Queries)];
        (any::<bool>(), 0usize..4, circulate, any::<bool>(), 0..4, any::<bool>()).prop_map(
            |(gather, passes, circulate, bf16, reproducible, pack)| {
                Options::new()
                    .gather(gather)
                    .passes(passes)
                    .circulate(circulate)
                    .wire(if bf16 { Wire::Bf16 } else { Wire::Full })
                    .reproducible(reproducible == 0)
                    .pack_inputs(pack)
            },
        )
    }

    fn batch() -> impl Strategy<Value = Batch> {
        let documents = proptest::collection::vec((0i32..40, 0i32..40, -20i64..60), 0..6);
        (documents, 0..3).prop_map(|(documents, kind)| {
            let cu = |of: &dyn Fn(&(i32, i32, i64)) -> i32| {
                let mut total = 0;
                let mut cu = vec![0];
                cu.extend(documents.iter().map(|d| {
                    total += of(d);
                    total
                }));
                cu
            };
            let (q, k) = (cu(&|d| d.0), cu(&|d| d.1));
            let starts: Vec<i64> = documents.iter().map(|d| d.2).collect();
            match kind {
                0 => Batch::new(&q).unwrap(),
                1 => Batch::cross(&q, &k, None).unwrap(),
                _ => Batch::cross(&q, &k, Some(&starts)).unwrap(),
            }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(600))]

        /// A whole problem is refused with an error that says why, or every schedule of it is right.
        #[test]
        fn problems_are_refused_or_right(
            batch in batch(), layout in layout(), mask in mask(), options in options(),
            (kv_heads, group) in (1usize..5, 1usize..5), (ulysses, ring) in (1usize..7, 1usize..7),
            dtype in prop_oneof![Just(Dtype::F32), Just(Dtype::F16), Just(Dtype::Bf16), Just(Dtype::F64)],
            sinks in any::<bool>(),
        ) {
            let problem = Problem::new(batch, kv_heads * group, kv_heads, 8, dtype).value_dim(4).mask(mask).sinks(sinks);
            let mesh = Mesh { replicas: 1, ring, ulysses };
            match Plan::with_options(&problem, mesh, layout, options) {
                Ok(plan) => {
                    let (forward, backward) = plan.verify().map_err(|e| TestCaseError::fail(e.to_string()))?;
                    prop_assert_eq!(forward.pairs, problem.area() * problem.heads() as u128);
                    prop_assert_eq!(backward.pairs, forward.pairs);
                    for (way, side) in [
                        (Way::ToHeads, Side::Q), (Way::ToHeads, Side::K), (Way::ToTokens, Side::Q), (Way::ToTokens, Side::K),
                    ] {
                        let trade = Trade { way, side, dim: 3, dtype };
                        let report = plan.verify_trade(trade).map_err(|e| TestCaseError::fail(e.to_string()))?;
                        let moved = |rank: usize| {
                            let (share, ring) = (plan.heads_of(rank), plan.mesh().place(rank).ring);
                            let heads = if side == Side::Q { share.q.len() } else { share.kv.len() };
                            heads * (plan.shares().rows(side, ring) - plan.local_tokens(side, rank)) * 3 * dtype.size()
                        };
                        let expected: usize = (0..mesh.group()).map(moved).sum();
                        prop_assert_eq!(report.bytes("exchange"), expected as u64);
                    }
                }
                Err(Error::Invalid { .. } | Error::Unsupported { .. }) => {}
                Err(e) => prop_assert!(false, "{}", e),
            }
        }
    }
}
