// SPDX-License-Identifier: MIT OR Apache-2.0
//! k and v in pages: the bits of the same call without pages, on one rank and over a ring, with pages in any order that
//! documents share, and NaN in every row that no page of the batch holds.

use crate::cache::Cache;
use crate::common::Random;
use crate::context_parallel::mesh;
use crate::refused::refused;
use cpattn::{
    Batch, Dtype, Element, Forward, Layout, Mask, Options, Plan, Problem, Rank, Result, Side, Slice, View, ViewMut,
    call::RawTensor,
    plan::Circulate,
    runtime::{Bindings, BlockTable, Keys, Pages},
    schedule::TensorId,
    transport::local,
};
use half::bf16;
use std::time::Duration;

/// o, lse.
type Outputs<T> = (Vec<T>, Vec<<T as Element>::Acc>);

/// o and lse of all ranks, with and without pages of this size and stride.
fn both<T: Element>(plan: &Plan, size: usize, stride: usize, seed: u64) -> Vec<[Outputs<T>; 2]> {
    let p = plan.problem().clone();
    let world = plan.mesh().world();
    local::run(world, Duration::from_secs(60), |end| {
        let (mut rank, mut r) = (Rank::new(end), Random::new(seed));
        let me = rank.rank();
        let (h, hk, d, dv) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim());
        let mut whole = |side, width: usize| {
            let all: Vec<T> = (0..p.batch().tokens(side) * width).map(|_| T::from_f64(r.normal())).collect();
            plan.local_tokens(side, me).shard(&all, width).unwrap()
        };
        let (q, k, v) = (whole(Side::Q, h * d), whole(Side::K, hk * d), whole(Side::K, hk * dv));
        let [n, m] = [Side::Q, Side::K].map(|side| plan.local_tokens(side, me).len());
        let cache = Cache::new(plan, me, [&k, &v], size, stride, &mut r);
        let sinks: Vec<f32> = (0..h).map(|i| i as f32 - 1.0).collect();
        let mut run = |paged: bool| -> Result<_> {
            let nan = <T::Acc as Element>::from_f64(f64::NAN);
            let (mut o, mut lse) = (vec![T::from_f64(f64::NAN); n * h * dv], vec![nan; n * h]);
            let mut largest = vec![0.0; h];
            let ((k, v), rows) = if paged { ((&cache.k, &cache.v), cache.rows) } else { ((&k, &v), m) };
            let tensors = Forward::<T>::new(
                View::new(&q, n, h, d)?,
                View::new(k, rows, hk, d)?,
                View::new(v, rows, hk, dv)?,
                ViewMut::new(&mut o, n, h, dv)?,
                ViewMut::head_major(&mut lse, n, h)?,
            )
            .sinks(p.sinks().then_some(&sinks[..]))
            .max_logit(&mut largest[..]);
            match paged {
                true => rank.forward(plan, tensors.keys(Keys::Pages(cache.pages())))?,
                false => rank.forward(plan, tensors)?,
            }
            lse.extend(largest.iter().map(|&x| <T::Acc as Element>::from_f64(f64::from(x))));
            Ok((o, lse))
        };
        // With pages, without, and with them again.
        let first = run(true)?;
        let plain = run(false)?;
        assert!(run(true)? == first, "a run between two others changes them");
        Ok([first, plain])
    })
    .unwrap()
}

fn same_bits<T: Element>(dtype: Dtype) {
    let queries = Options::new().circulate_forward(Circulate::Queries);
    let ends = |lengths: &[i32]| lengths.iter().fold(vec![0], |mut e, n| (e.push(e[e.len() - 1] + n), e).1);
    // One new token each, a chunk, sequences without new tokens or without keys; and slices.
    let cached = [300, 17, 0, 64, 131];
    let decode = Batch::cross(&ends(&[1; 5]), &ends(&cached), None).unwrap();
    let chunks = Batch::cross(&ends(&[40, 3, 2, 0, 9]), &ends(&cached), None).unwrap();
    let sliced = Batch::cross(&ends(&[20, 9]), &ends(&[150, 90]), None).unwrap().with_slices(&[
        Slice::new(0..20, 0..150).causal(),
        Slice::new(5..25, 160..200),
        Slice::new(20..29, 100..140),
    ]);
    for (i, batch) in [decode, chunks, sliced.unwrap()].into_iter().enumerate() {
        for (heads, kv_heads, d, dv) in [(6, 2, 16, 24), (4, 1, 64, 64)] {
            let p = Problem::new(batch.clone(), heads, kv_heads, d, dtype).with_value_dim(dv).with_sinks(i == 1);
            let slopes: Vec<f32> = (0..batch.documents() * heads).map(|i| 0.02 * (i % 7) as f32).collect();
            let p = match i {
                0 => p.with_mask(Mask::sliding(90)),
                1 => p,
                _ => p.with_alibi_slopes_per_document(&slopes),
            };
            for (ring, layout) in [
                (1, Layout::Contiguous),
                (3, Layout::Striped { stripe: 8 }),
                (3, Layout::Contiguous),
                (2, Layout::Zigzag),
            ] {
                let plan = Plan::builder(&p)
                    .mesh(mesh(1, ring))
                    .layout(layout)
                    .options(if ring > 1 { queries } else { Options::new() })
                    .build();
                let plan = plan.unwrap();
                for (size, stride) in [(1, 1), (16, 16), (5, 5), (16, 32), (64, 64)] {
                    for (r, [paged, plain]) in both::<T>(&plan, size, stride, i as u64).into_iter().enumerate() {
                        let what = format!("{dtype} {i} ring {ring} {layout} pages of {size} every {stride}, rank {r}");
                        assert!(paged == plain, "{what}");
                        assert!(paged.0.iter().all(|x| x.to_f64().is_finite()), "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn pages_have_the_bits_of_rows_f32() {
    same_bits::<f32>(Dtype::F32);
}

#[test]
fn pages_have_the_bits_of_rows_bf16() {
    same_bits::<bf16>(Dtype::Bf16);
}

#[test]
fn pages_have_the_bits_of_rows_f64() {
    same_bits::<f64>(Dtype::F64);
}

/// A page beyond the rows whose numbers kernels hold is refused for that, and not for the rows that k and v have.
#[test]
fn rows_beyond_32_bits() {
    let p = Problem::new(Batch::cross(&[0, 1], &[0, 5], None).unwrap(), 1, 1, 4, Dtype::F32);
    let plan = Plan::new(&p, mesh(1, 1), Layout::Contiguous).unwrap();
    let mut rank = Rank::new(local::group(1, Duration::from_secs(10)).unwrap().remove(0));
    let (mut own, rows) = ([0.0f32; 9], 1 << 33);
    let mut small = |at: usize, heads, dim| RawTensor::compact((&raw mut own[at]).cast(), Dtype::F32, 1, heads, dim);
    let large = RawTensor::compact(std::ptr::without_provenance_mut(1 << 45), Dtype::F32, rows, 1, 4);
    let pages = Pages {
        block_table: BlockTable::new(&[1 << 13]),
        pages_per_document: 1,
        page_size: 1 << 19,
        page_stride: 1 << 19,
    };
    let bindings = Bindings::default()
        .with(TensorId::Q, small(0, 1, 4))
        .with(TensorId::K, large)
        .with(TensorId::V, large)
        .with(TensorId::O, small(4, 1, 4))
        .with(TensorId::Lse, small(8, 1, 1))
        .with_keys(Keys::Pages(pages));
    // SAFETY: refused before a tensor is read.
    let refusal = unsafe { rank.run(&plan, cpattn::schedule::Direction::Forward, &bindings) };
    refused(refusal, &["block_table[0][0] is 8192, expected 0 to 8190: a table finds the first 4294967295 rows"]);
}

#[test]
fn refusals() {
    let batch = Batch::cross(&[0, 1, 2], &[0, 5, 7], None).unwrap();
    let p = Problem::new(batch, 2, 2, 4, Dtype::F32);
    let try_with = |mesh, layout, options, pages: Pages<'_>, rows: usize| {
        let plan = Plan::builder(&p).mesh(mesh).layout(layout).options(options).build().unwrap();
        let mut outcomes = local::run(mesh.world(), Duration::from_secs(10), |end| {
            let mut rank = Rank::new(end);
            let n = plan.local_tokens(Side::Q, rank.rank()).len();
            let (q, x) = (vec![0.0f32; n * 8], vec![0.0f32; rows * 8]);
            let (mut o, mut lse) = (q.clone(), vec![0.0f32; n * 2]);
            let tensors = Forward::new(
                View::new(&q, n, 2, 4)?,
                View::new(&x, rows, 2, 4)?,
                View::new(&x, rows, 2, 4)?,
                ViewMut::new(&mut o, n, 2, 4)?,
                ViewMut::head_major(&mut lse, n, 2)?,
            );
            Ok(rank.forward(&plan, tensors.keys(Keys::Pages(pages))))
        })
        .unwrap();
        outcomes.remove(0)
    };
    let one = |pages: Pages<'_>, rows| try_with(mesh(1, 1), Layout::Contiguous, Options::new(), pages, rows);
    let good = Pages {
        block_table: BlockTable::new(&[0, 2, -1, 1, 7, 7]),
        pages_per_document: 3,
        page_size: 4,
        page_stride: 4,
    };
    one(good, 12).unwrap();
    refused(one(good, 11), &["block_table[0][1] is 2, expected 0 to 1: k and v have 11 rows, pages of 4 rows"]);
    refused(
        one(Pages { block_table: BlockTable::new(&[0, -1, 0, 1, 0, 0]), ..good }, 12),
        &["block_table[0][1] is -1, expected 0 to 2"],
    );
    refused(
        one(Pages { pages_per_document: 2, ..good }, 12),
        &["block_table is of 6 entries, expected 2 documents of 2 pages"],
    );
    let short = Pages { block_table: BlockTable::new(&[0, 2]), pages_per_document: 1, ..good };
    refused(one(short, 12), &["block_table is 1 pages of 4 rows", "rows of document 0 on rank 0"]);
    refused(one(Pages { page_size: 0, ..good }, 12), &["page_size is 0, expected at least 1"]);
    refused(one(Pages { page_stride: 3, ..good }, 12), &["page_stride is 3, expected at least 4"]);
    refused(one(good, 0), &["block_table[0][0] is 0, expected a page of 4 rows: k and v have 0"]);
    let keys = Options::new().circulate_forward(Circulate::Keys);
    for (ring, ulysses, options) in [(2, 1, keys), (1, 2, Options::new())] {
        let words = ["pages in a plan that copies or sends k and v", "circulate_forward queries"];
        refused(try_with(mesh(ulysses, ring), Layout::Contiguous, options, good, 12), &words);
    }
    let dropped = p.clone().with_dropout(0.25);
    let plan = Plan::new(&dropped, mesh(1, 1), Layout::Contiguous).unwrap();
    let outcome = local::run(1, Duration::from_secs(10), |end| {
        let (q, x) = (vec![0.0f32; 16], vec![0.0f32; 12 * 8]);
        let (mut o, mut lse) = (q.clone(), vec![0.0f32; 4]);
        let tensors = Forward::new(
            View::new(&q, 2, 2, 4)?,
            View::new(&x, 12, 2, 4)?,
            View::new(&x, 12, 2, 4)?,
            ViewMut::new(&mut o, 2, 2, 4)?,
            ViewMut::head_major(&mut lse, 2, 2)?,
        )
        .dropout_seed(1);
        Ok(Rank::new(end).forward(&plan, tensors.keys(Keys::Pages(good))))
    });
    refused(outcome.unwrap().remove(0), &["dropout 0.25 with pages is not supported", "plan without dropout"]);
}
