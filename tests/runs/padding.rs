// SPDX-License-Identifier: MIT OR Apache-2.0
//! Padding: rows that stand for nothing are documents of their own, q rows one without keys, k rows one without
//! queries. They attend to nothing, nothing attends to them, and their gradients are zero, whatever they hold.

use crate::common::{
    Data,
    own::{Own, compact},
};
use cpattn::{Batch, Dtype, Layout, Mask, Mesh, Plan, Problem, Rank, Side, transport::local};
use std::time::Duration;

const HEADS: usize = 4;
const KV: usize = 2;
const DIM: usize = 8;

/// By rank: q tokens, k tokens, and o, lse, dq, dk, dv as numbers.
type Results = Vec<(Vec<usize>, Vec<usize>, [Vec<f32>; 5])>;

fn run(batch: &Batch, data: &Data<f32>, mesh: Mesh, mask: Mask) -> Results {
    let p = Problem::new(batch.clone(), HEADS, KV, DIM, Dtype::F32).with_mask(mask);
    let plan = Plan::new(&p, mesh, Layout::Zigzag).unwrap();
    let one = |end| {
        let mut rank = Rank::new(end);
        let mut own = Own::new(&plan, data, rank.rank(), compact);
        own.forward(&mut rank, &plan).unwrap();
        own.backward(&mut rank, &plan).unwrap();
        let numbers = |bytes: Vec<u8>| -> Vec<f32> {
            bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
        };
        let mut results = own.results().into_iter().map(numbers);
        let tokens = |side| plan.local_tokens(side, rank.rank()).indices();
        (tokens(Side::Q), tokens(Side::K), std::array::from_fn(|_| results.next().unwrap()))
    };
    local::run(mesh.world(), Duration::from_secs(60), |end| Ok(one(end))).unwrap()
}

#[test]
fn padded_rows_get_zeros_and_change_nothing() {
    // Two documents of 9 and 6 tokens; then 5 q rows without keys, and 3 k rows without queries.
    let real = Batch::new(&[0, 9, 15]).unwrap();
    let padded = Batch::cross(&[0, 9, 15, 20, 20], &[0, 9, 15, 15, 18], None).unwrap();
    let p = Problem::new(padded.clone(), HEADS, KV, DIM, Dtype::F32);
    let mut data = Data::<f32>::random(&p, 11);
    // What is in padding must not matter.
    for (tensor, heads, from) in
        [(&mut data.q, HEADS, 15), (&mut data.d_o, HEADS, 15), (&mut data.k, KV, 15), (&mut data.v, KV, 15)]
    {
        tensor[from * heads * DIM..].fill(1e30);
    }
    let cut = |tensor: &[f32], heads: usize| tensor[..15 * heads * DIM].to_vec();
    let alone = Data {
        q: cut(&data.q, HEADS),
        k: cut(&data.k, KV),
        v: cut(&data.v, KV),
        d_o: cut(&data.d_o, HEADS),
        sinks: None,
        d_lse: data.d_lse.as_ref().map(|x| x[..15 * HEADS].to_vec()),
        dropout_seed: None,
        key_indices: None,
    };
    for mask in [Mask::causal(), Mask::full(), Mask::sliding(4)] {
        let good = &run(&real, &alone, Mesh::single(), mask)[0].2;
        let widths = [HEADS * DIM, HEADS, HEADS * DIM, KV * DIM, KV * DIM];
        for mesh in [Mesh::single(), Mesh::ring(3).unwrap(), Mesh::ulysses(2).unwrap()] {
            for (q, k, results) in run(&padded, &data, mesh, mask) {
                for (i, (found, width)) in results.iter().zip(widths).enumerate() {
                    let tokens = if i < 3 { &q } else { &k };
                    for (row, &token) in tokens.iter().enumerate() {
                        let found = &found[row * width..][..width];
                        if token >= 15 {
                            let nothing = if i == 1 { f32::NEG_INFINITY } else { 0.0 };
                            assert!(
                                found.iter().all(|&x| x == nothing),
                                "{mesh}, result {i}, token {token}: {found:?}"
                            );
                            continue;
                        }
                        let wanted = &good[i][token * width..][..width];
                        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-5 * (1.0 + b.abs());
                        assert!(found.iter().zip(wanted).all(near), "{mesh}, result {i}, token {token}");
                    }
                }
            }
        }
    }
}
