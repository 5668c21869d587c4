// SPDX-License-Identifier: MIT OR Apache-2.0
//! k and v in pages on a device: against f64, on one rank and over a ring whose q circulates, with pages in any order,
//! NaN in every row that no page of the batch holds and entries of −1 that nothing reads; the same bits for every size
//! of pages and in later runs; and what is refused.

use super::{Held, device, of_forward};
use crate::common::Data;
use crate::paged_on_device::{Found, check, is_latent, of_all, of_rank};
use cpattn::{
    Batch, Dtype, Element, Layout, Mask, Mesh, Options, Plan, Problem, Rank, Result, Side, Slice,
    kernel::cuda::Cuda,
    plan::Circulate,
    runtime::{Bindings, BlockTable, Keys, Pages},
    schedule::{Combine, CombineTo, Direction, Purpose},
    transport::peer,
};
use half::{bf16, f16};
use std::{sync::Arc, time::Duration};

fn on_ranks<T: Element<Acc = f32>>(
    cuda: &Arc<Cuda>,
    plan: &Plan,
    data: &Data<T>,
    pages: Option<(usize, usize)>,
) -> Result<Found<T>> {
    let peers = peer::group(&vec![Arc::clone(cuda); plan.mesh().world()], Duration::from_secs(120))?;
    let parts: Result<Vec<_>> = std::thread::scope(|scope| {
        let one = |peer| of_rank(Rank::on_device(peer)?, plan, data, pages);
        let threads: Vec<_> = peers.into_iter().map(|peer| scope.spawn(move || one(peer))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    Ok(of_all(plan, &parts?))
}

fn ends(lengths: &[i32]) -> Vec<i32> {
    lengths.iter().fold(vec![0], |mut ends, n| {
        ends.push(ends[ends.len() - 1] + n);
        ends
    })
}

/// New tokens of sequences, of which some have no new ones or no keys; and slices.
fn batches() -> [Batch; 3] {
    let cached = [150, 17, 0, 64, 131];
    let sliced = Batch::cross(&ends(&[20, 9]), &ends(&[110, 90]), None).unwrap().with_slices(&[
        Slice::new(0..20, 0..110).causal(),
        // Keys of both documents.
        Slice::new(5..25, 120..160),
        Slice::new(20..29, 60..120),
    ]);
    [
        Batch::cross(&ends(&[1; 5]), &ends(&cached), None).unwrap(),
        Batch::cross(&ends(&[70, 3, 2, 0, 9]), &ends(&cached), None).unwrap(),
        sliced.unwrap(),
    ]
}

fn every_way<T: Element<Acc = f32>>(dims: &[(usize, usize, usize, usize)], sizes: &[(usize, usize)]) {
    let Some(cuda) = device() else { return };
    let queries = Options::new().circulate_forward(Circulate::Queries);
    for (i, batch) in batches().into_iter().enumerate() {
        for &(heads, kv_heads, d, dv) in dims {
            let p = Problem::new(batch.clone(), heads, kv_heads, d, T::DTYPE).with_value_dim(dv);
            let slopes: Vec<f32> = (0..heads).map(|h| 0.02 * (1 + h) as f32).collect();
            let p = match i {
                0 => p.with_mask(Mask::sliding(90)),
                1 => p.with_sinks_per_head(2).with_softcap(8.0),
                _ => p.with_alibi_slopes(&slopes),
            };
            let mut data = Data::<T>::random(&p, 10 + i as u64);
            if is_latent(&p) {
                data.v = data.k.chunks(d).flat_map(|row| &row[..dv]).copied().collect();
            }
            for (ring, layout) in [(1, Layout::Contiguous), (3, Layout::Striped { stripe: 8 }), (2, Layout::Zigzag)] {
                let options = if ring > 1 { queries } else { Options::new() };
                let mesh = Mesh::ring(ring).unwrap();
                let plan = Plan::builder(&p).mesh(mesh).layout(layout).options(options).build().unwrap();
                let plain = on_ranks(&cuda, &plan, &data, None).unwrap();
                let mut first = None;
                for &(size, stride) in sizes {
                    let what = format!("{} {i} {heads}:{kv_heads} {d}/{dv} ring {ring} pages of {size}", T::DTYPE);
                    let got =
                        on_ranks(&cuda, &plan, &data, Some((size, stride))).unwrap_or_else(|e| panic!("{what}: {e}"));
                    check(&what, &p, &data, &got, &plain);
                    assert!(*first.get_or_insert(got.clone()) == got, "{what}: other bits than the first size");
                }
            }
        }
    }
}

#[test]
fn pages_of_bf16() {
    every_way::<bf16>(&[(4, 2, 64, 64)], &[(16, 16), (1, 1), (5, 7), (64, 128)]);
    every_way::<bf16>(&[(3, 1, 128, 96)], &[(16, 16), (7, 9)]);
}

#[test]
fn pages_of_f16() {
    every_way::<f16>(&[(2, 1, 40, 24)], &[(16, 16), (3, 3)]);
}

/// MLA in its latent form: v is the first columns of k, in the same pages.
#[test]
fn pages_of_latent_heads() {
    every_way::<bf16>(&[(2, 1, 576, 512)], &[(64, 64)]);
}

#[test]
fn what_is_refused() {
    let Some(cuda) = device() else { return };
    let batch = Batch::cross(&[0, 1, 2], &[0, 5, 7], None).unwrap();
    let p = Problem::new(batch, 2, 2, 16, Dtype::Bf16);
    let table = cuda.allocate(64).unwrap();
    table.upload(bytemuck::cast_slice(&[0i32, 2, -1, 1, 7, 7])).unwrap();
    // SAFETY: the table lives until the end, and its entries for rows are pages; what a run refuses is not read.
    let at = |table: *const i32| unsafe { BlockTable::on_device(table) };
    let block_table = at(table.ptr().cast());
    let good = Pages { block_table, pages_per_document: 3, page_size: 4, page_stride: 4 };
    let run_as = |plan: &Plan, run: Purpose, change: &(dyn Fn(Bindings) -> Bindings + Sync)| -> Result<()> {
        let one = |peer| -> Result<()> {
            let mut rank = Rank::on_device(peer)?;
            let (h, kv) = (p.heads(), p.kv_heads());
            let n = plan.local_tokens(Side::Q, rank.rank()).len();
            let [q, o] = [n, n].map(|n| Held::new(&cuda, &vec![bf16::ONE; n * h * 16], n, h, 16));
            let [k, v] = [12, 12].map(|n| Held::new(&cuda, &vec![bf16::ONE; n * kv * 16], n, kv, 16));
            let lse = Held::new(&cuda, &vec![0.0f32; n * h], n, h, 1);
            let bindings = change(of_forward([&q, &k, &v, &o, &lse]));
            // SAFETY: the memory lives until the rank is gone.
            unsafe { rank.run(plan, run, &bindings) }?;
            rank.synchronize()?;
            assert!(o.read::<bf16>().iter().all(|&x| x == bf16::ONE), "a mean of equal values");
            Ok(())
        };
        let one = &one;
        let peers = peer::group(&vec![Arc::clone(&cuda); plan.mesh().world()], Duration::from_secs(60))?;
        std::thread::scope(|scope| {
            let threads: Vec<_> = peers.into_iter().map(|peer| scope.spawn(move || one(peer))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().unwrap())
        })
    };
    let run = |plan: &Plan, direction, change: &(dyn Fn(Bindings) -> Bindings + Sync)| {
        run_as(plan, Purpose::Attention(direction), change)
    };
    let plan_of = |p: &Problem, ulysses: usize, ring: usize, options| {
        let mesh = Mesh { replicas: 1, ring, ulysses };
        Plan::builder(p).mesh(mesh).layout(Layout::Contiguous).options(options).build().unwrap()
    };
    let plan = plan_of(&p, 1, 1, Options::new());
    let over = |pages: Pages<'static>| move |bindings: Bindings| bindings.with_keys(Keys::Pages(pages));
    let with = |pages: Pages<'static>| run(&plan, Direction::Forward, &over(pages));
    with(good).unwrap();
    let refused = |outcome: Result<()>, words: &[&str]| {
        let error = outcome.unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    let host = Pages {
        block_table: BlockTable::new(&[0, 2, -1, 1, 7, 7]),
        pages_per_document: 3,
        page_size: 4,
        page_stride: 4,
    };
    let on_host = run(&plan, Direction::Forward, &|bindings| bindings.with_keys(Keys::Pages(host)));
    refused(on_host, &["block_table is in memory of the host, expected in memory of CUDA device 0"]);
    refused(with(Pages { page_size: 0, ..good }), &["page_size is 0, expected at least 1"]);
    refused(with(Pages { page_stride: 3, ..good }), &["page_stride is 3, expected at least 4"]);
    refused(with(Pages { pages_per_document: 1, ..good }), &["1 pages of 4 rows", "5 k rows of document 0 on rank 0"]);
    let unaligned = at(table.ptr().wrapping_add(2).cast());
    refused(with(Pages { block_table: unaligned, ..good }), &["block_table is at", "a multiple of 4 bytes"]);
    let wide = Pages { page_stride: 1 << 32, ..good };
    refused(with(wide), &["page_stride is 4294967296, expected at most 4294967295 on a device"]);
    let none = Pages { block_table: at(std::ptr::null()), ..good };
    refused(with(none), &["block_table"]);

    let paged = over(good);
    let dropped = plan_of(&p.clone().with_dropout(0.25), 1, 1, Options::new());
    let of_dropout = run(&dropped, Direction::Forward, &|bindings| paged(bindings).with_dropout_seed(Some(1)));
    refused(of_dropout, &["dropout 0.25 with pages is not supported"]);
    refused(run(&plan, Direction::Backward, &paged), &["a backward with pages is not supported"]);
    let of_combine = run_as(&plan, Purpose::Combine(Combine { to: CombineTo::All, partial: Dtype::Bf16 }), &paged);
    refused(of_combine, &["pages in a combine is not supported"]);
    let keys = Options::new().circulate_forward(Circulate::Keys);
    for (ulysses, ring, options) in [(1, 2, keys), (2, 1, Options::new())] {
        let moved = run(&plan_of(&p, ulysses, ring, options), Direction::Forward, &paged);
        refused(moved, &["pages in a plan that copies or sends k and v"]);
    }
}
