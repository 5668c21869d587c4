// SPDX-License-Identifier: MIT OR Apache-2.0
//! Random problems, meshes, layouts and options: a plan is refused with a reason, or its schedules are correct.

use cpattn::{
    Batch, Dtype, Error, Layout, Mask, Mesh, Options, Plan, Problem, Side,
    plan::{Circulate, Gather, Wire},
    schedule::{AllToAll, AllToAllDirection},
};
use proptest::prelude::*;
use std::sync::atomic::{AtomicU32, Ordering};

/// The number of problems drawn, and of those with a plan.
static DRAWN: AtomicU32 = AtomicU32::new(0);
static ACCEPTED: AtomicU32 = AtomicU32::new(0);

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
    // Mostly values that are valid for any problem.
    let passes = prop_oneof![8 => Just(1usize), 2 => 2usize..4, 1 => Just(0)];
    let gather = prop_oneof![Just(Gather::Auto), Just(Gather::Steps), Just(Gather::Others), Just(Gather::Together)];
    let nodes = prop_oneof![2 => Just(0usize), 1 => 1usize..9];
    let queries = prop_oneof![4 => Just(false), 1 => Just(true)];
    (gather, passes, (circulate, queries), any::<bool>(), 0..4, any::<bool>(), nodes).prop_map(
        |(gather, passes, (circulate, queries), bf16, reproducible, pack, nodes)| {
            Options::new()
                .gather(gather)
                .passes(passes)
                .circulate(circulate)
                .circulate_forward(if queries { Circulate::Queries } else { Circulate::Auto })
                .wire(if bf16 { Wire::Bf16 } else { Wire::Full })
                .reproducible(reproducible == 0)
                .pack_inputs(pack)
                .ranks_per_node(nodes)
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

    /// A whole random problem is refused with an error that gives the reason, or each of its schedules is correct.
    #[test]
    fn problems_are_refused_or_right(
        batch in batch(), layout in layout(), mask in mask(), options in options(),
        (kv_heads, group) in (1usize..5, 1usize..5), (ulysses, ring, too_many) in (1usize..7, 1usize..7, 0..10),
        dtype in prop_oneof![Just(Dtype::F32), Just(Dtype::F16), Just(Dtype::Bf16), Just(Dtype::F64)],
        sinks in any::<bool>(),
    ) {
        let problem = Problem::new(batch, kv_heads * group, kv_heads, 8, dtype).with_value_dim(4).with_mask(mask).with_sinks(sinks);
        let ulysses = if too_many == 0 { ulysses } else { ulysses.min(kv_heads * group) };
        let mesh = Mesh { replicas: 1, ring, ulysses };
        let drawn = DRAWN.fetch_add(1, Ordering::Relaxed) + 1;
        match Plan::builder(&problem).mesh(mesh).layout(layout).options(options).build() {
            Ok(plan) => {
                ACCEPTED.fetch_add(1, Ordering::Relaxed);
                let (forward, backward) = plan.verify().map_err(|e| TestCaseError::fail(e.to_string()))?;
                prop_assert_eq!(forward.pairs, problem.area() * problem.heads() as u128);
                prop_assert_eq!(backward.pairs, forward.pairs);
                for (way, side) in [
                    (AllToAllDirection::ToHeads, Side::Q), (AllToAllDirection::ToHeads, Side::K), (AllToAllDirection::ToTokens, Side::Q), (AllToAllDirection::ToTokens, Side::K),
                ] {
                    let all_to_all = AllToAll { direction: way, side, dim: 3, dtype };
                    let report = plan.verify_purpose(all_to_all).map_err(|e| TestCaseError::fail(e.to_string()))?;
                    let moved = |rank: usize| {
                        let share = plan.heads_of(rank);
                        let heads = if side == Side::Q { share.q.len() } else { share.kv.len() };
                        heads * (plan.tokens_between_all_to_alls(side, rank) - plan.local_tokens(side, rank).len()) * 3 * dtype.size()
                    };
                    let expected: usize = (0..mesh.group()).map(moved).sum();
                    prop_assert_eq!(report.bytes("exchange"), expected as u64);
                }
            }
            Err(Error::Invalid { .. } | Error::Unsupported { .. }) => {}
            Err(e) => prop_assert!(false, "{}", e),
        }
        // Without this, refusing nearly everything would pass.
        let accepted = ACCEPTED.load(Ordering::Relaxed);
        prop_assert!(drawn < 200 || accepted >= drawn / 4, "{} of {} problems were accepted", accepted, drawn);
    }
}
