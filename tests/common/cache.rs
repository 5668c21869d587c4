// SPDX-License-Identifier: MIT OR Apache-2.0
//! A cache of one rank in pages, for tests of forwards that find rows of k and v through a table.

use crate::common::Random;
use cpattn::{
    Element, Plan, Side,
    runtime::{BlockTable, Pages},
};

/// A cache of one rank: its pages, in an order that has nothing to do with the documents.
pub struct Cache<T> {
    pub k: Vec<T>,
    pub v: Vec<T>,
    /// Of k and of v.
    pub rows: usize,
    /// Entries that no row needs are −1.
    pub table: Vec<i32>,
    pub per_document: usize,
    pub size: usize,
    pub stride: usize,
}

impl<T: Element> Cache<T> {
    /// Of a rank's rows of k and v. Rows that no entry names are NaN.
    pub fn new(plan: &Plan, rank: usize, [k, v]: [&[T]; 2], size: usize, stride: usize, r: &mut Random) -> Self {
        let p = plan.problem();
        let mut held = vec![Vec::new(); p.batch().documents()];
        let mut row = 0;
        plan.local_tokens(Side::K, rank).for_each(|_, _, doc| {
            held[doc].push(row);
            row += 1;
        });
        let per_document = 2 + held.iter().map(|rows| rows.len().div_ceil(size)).max().unwrap_or(0);
        let used: usize = held.iter().map(|rows| rows.len().div_ceil(size)).sum();
        let pages = used + 3;
        let mut free: Vec<usize> = (0..pages).collect();
        (1..pages).for_each(|i| free.swap(i, r.below(i + 1)));
        let rows = if pages == 0 { 0 } else { (pages - 1) * stride + size };
        let widths = [p.kv_heads() * p.head_dim(), p.kv_heads() * p.value_dim()];
        let mut pool = widths.map(|width| vec![T::from_f64(f64::NAN); rows * width]);
        let mut table = vec![-1; per_document * held.len()];
        for (doc, own) in held.iter().enumerate() {
            for (i, &row) in own.iter().enumerate() {
                let entry = &mut table[doc * per_document + i / size];
                if i % size == 0 {
                    *entry = free.pop().unwrap() as i32;
                }
                let to = *entry as usize * stride + i % size;
                for ((pool, from), width) in pool.iter_mut().zip([k, v]).zip(widths) {
                    pool[to * width..][..width].copy_from_slice(&from[row * width..][..width]);
                }
            }
        }
        let [k, v] = pool;
        Self { k, v, rows, table, per_document, size, stride }
    }

    #[allow(dead_code, reason = "each test binary uses its part")]
    pub fn pages(&self) -> Pages<'_> {
        Pages {
            block_table: BlockTable::new(&self.table),
            pages_per_document: self.per_document,
            page_size: self.size,
            page_stride: self.stride,
        }
    }
}
