// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tokens of each rank, the bytes that it fetches and returns, and the balance of work.
//!
//! A verifier proves that every rank receives the rows it needs; it does not notice a rank that receives too many. So
//! the expected numbers here do not come from the planner: tokens follow from the borders that define a layout, bytes
//! from counting rows on paper.

use cpattn::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem, Side,
    plan::{Circulate, Wire},
    schedule::{Direction, Schedule, verify::Report},
};

use crate::verify;

fn indices(batch: &Batch, layout: Layout, ring: usize) -> Vec<Vec<usize>> {
    let problem = Problem::new(batch.clone(), 1, 1, 8, Dtype::F32);
    let plan = Plan::new(&problem, Mesh::ring(ring).unwrap(), layout).unwrap();
    (0..ring).map(|r| plan.local_tokens(Side::Q, r).indices()).collect()
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
    assert_eq!(plan.local_tokens(Side::Q, 0).positions(), [0, 1, 2, 2, 3, 4]);
    assert_eq!(plan.local_tokens(Side::Q, 1).positions(), [3, 0, 1]);
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

/// Bytes that all ranks together receive, computed by hand: (forward, backward).
#[test]
fn expected_bytes() {
    let one = |n: usize| Batch::from_lengths(&[n]).unwrap();
    let totals = |r: &Report| (r.bytes("exchange"), r.bytes("fetch"), r.bytes("return"));
    // Full attention, ring of 4, 64 tokens, 2 heads of 8, f32: each k and v row visits 3 ranks; dk and dv come home in
    // f32 from each.
    let full = Problem::new(one(64), 2, 2, 8, Dtype::F32).with_mask(Mask::full());
    let keys = Options::new().circulate(Circulate::Keys);
    let (f, b) = verify(&full, Mesh::ring(4).unwrap(), Layout::Contiguous, keys);
    let kv = 64 * 3 * 2 * 2 * 8 * 4;
    assert_eq!((totals(&f), totals(&b)), ((0, kv, 0), (0, kv, kv)));
    // The q side instead: q, do, lse and delta are sent, dq is returned.
    let queries = Options::new().circulate(Circulate::Queries);
    let (_, b) = verify(&full, Mesh::ring(4).unwrap(), Layout::Contiguous, queries);
    assert_eq!(totals(&b), (0, 64 * 3 * 2 * (2 * 8 + 2) * 4, 64 * 3 * 2 * 8 * 4));
    // bf16, and gradients in bf16: half of everything.
    let half = Problem::new(one(64), 2, 2, 8, Dtype::Bf16).with_mask(Mask::full());
    let (f, b) = verify(&half, Mesh::ring(4).unwrap(), Layout::Contiguous, keys.wire(Wire::Bf16));
    assert_eq!((totals(&f), totals(&b)), ((0, kv / 2, 0), (0, kv / 2, kv / 2)));
    // Contiguous and causal: rank j's rows visit the 3 − j ranks after it: 16 · (3 + 2 + 1) rows.
    let causal = Problem::new(one(64), 2, 2, 8, Dtype::F32);
    let (f, _) = verify(&causal, Mesh::ring(4).unwrap(), Layout::Contiguous, keys);
    assert_eq!(totals(&f), (0, 16 * 6 * 2 * 2 * 8 * 4, 0));
    // Ulysses on 4 ranks, 8 q heads, 4 kv heads, dims 8 and 4, bf16: of each rank's 16 rows three quarters of the heads
    // leave. In: q, k (dim 8), v (dim 4); out: o (dim 4) and lse (f32).
    let heads = Problem::new(one(64), 8, 4, 8, Dtype::Bf16).with_value_dim(4);
    let (f, b) = verify(&heads, Mesh::ulysses(4).unwrap(), Layout::Contiguous, Options::new());
    let away = 64 * 3 / 4;
    assert_eq!(totals(&f), (away * (8 * 8 * 2 + 4 * 8 * 2 + 4 * 4 * 2 + 8 * 4 * 2 + 8 * 4), 0, 0));
    // Backward, in: the same and do, lse, delta; out: dq, dk, dv, rounded before they travel.
    let brought = 8 * 8 * 2 + 4 * 8 * 2 + 4 * 4 * 2 + 8 * 4 * 2 + 2 * 8 * 4;
    let given = 8 * 8 * 2 + 4 * 8 * 2 + 4 * 4 * 2;
    assert_eq!(totals(&b), (away * (brought + given), 0, 0));
    // Two documents of 32 on a ring of 4: rows visit the one other rank of their document.
    let two = Problem::new(Batch::from_lengths(&[32, 32]).unwrap(), 2, 2, 8, Dtype::F32).with_mask(Mask::full());
    let (f, _) = verify(&two, Mesh::ring(4).unwrap(), Layout::Contiguous, keys);
    assert_eq!(totals(&f), (0, 64 * 2 * 2 * 8 * 4, 0));
}

/// Document lengths whose logarithm is the sum of twelve uniform draws (nearly normal), deviation about 1.2.
fn long_tailed(documents: usize, median: f64, seed: u64) -> Batch {
    let mut draw = fastrand::Rng::with_seed(seed);
    let lengths: Vec<usize> = (0..documents)
        .map(|_| {
            let normal: f64 = (0..12).map(|_| draw.f64()).sum::<f64>() - 6.0;
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
        plan.local_tokens(Side::Q, r).for_each(|_, pos, doc| {
            area += mask.row_area(pos, batch.document(Side::K, doc).len() as i64) as f64;
        });
        work.push(area);
        tokens.push(plan.local_tokens(Side::Q, r).len() as f64);
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

/// 300 documents on a ring of 4: causal zigzag leaves two runs of rows for each document in a share, of which a peer
/// may need one. They are packed: eight messages to a peer at most (the verifier holds every exchange to it), and as
/// many bytes as without.
#[test]
fn many_documents_travel_in_few_messages() {
    let batch = Batch::from_lengths(&[20; 300]).unwrap();
    for (layout, options) in [
        (Layout::Zigzag, Options::new()),
        (Layout::Zigzag, Options::new().circulate(cpattn::plan::Circulate::Queries)),
        (Layout::Zigzag, Options::new().gather(true)),
        (Layout::Striped { stripe: 1 }, Options::new()),
    ] {
        let p = Problem::new(batch.clone(), 2, 2, 8, Dtype::F32).with_mask(Mask::causal());
        let plan = Plan::builder(&p).mesh(Mesh::ring(4).unwrap()).layout(layout).options(options).build().unwrap();
        let packs =
            Schedule::new(&plan, 0, Direction::Forward).unwrap().operations().filter(|op| op.name == "pack").count();
        assert!(packs > 0 || layout != Layout::Zigzag, "{layout}, {options:?}: nothing is packed");
        let (forward, backward) = plan.verify().unwrap();
        let exchanges = |r: &Report| r.ranks.iter().map(|rank| 3 * rank.exchanges as u64).sum::<u64>();
        assert!(forward.messages() <= 8 * exchanges(&forward), "{layout}: {} messages", forward.messages());
        assert!(backward.messages() <= 8 * exchanges(&backward), "{layout}: {} messages", backward.messages());
        for direction in [Direction::Forward, Direction::Backward] {
            for rank in 0..4 {
                let found = Schedule::new(&plan, rank, direction).unwrap().workspace_bytes();
                let bound = plan.workspace_bound(rank, direction);
                assert!(found <= bound, "{found} of {bound} bytes, rank {rank} {direction:?}, {layout}");
            }
        }
    }
}
