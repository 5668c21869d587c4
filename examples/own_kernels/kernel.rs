// SPDX-License-Identifier: MIT OR Apache-2.0
//! A kernel of f32 for packed sequences: loops over rows and keys, threads over kv heads. It knows nothing of plans.

use cpattn::{
    Dtype, Result,
    kernel::varlen::{Elements, ElementsMut, Honours, Rectangles, VarlenKernel},
};

pub struct Naive {
    pub threads: usize,
}

/// The keys that row `r` of `sq` sees of `sk`: limits count from the bottom-right corner.
fn keys(call: &Rectangles<'_>, r: usize, [sq, sk]: [usize; 2]) -> std::ops::Range<usize> {
    let here = (r + sk) as i64 - sq as i64;
    let begin = call.window_left.map_or(0, |left| (here - i64::from(left)).max(0));
    let end = call.window_right.map_or(sk as i64, |right| (here + i64::from(right) + 1).min(sk as i64));
    begin as usize..end as usize
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn add(to: &mut [f32], by: f32, from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to += by * x);
}

/// One of several heads of a compact tensor, `[rows, dim]`.
struct Head<'a>(&'a [f32], usize, usize, usize);

impl<'a> Head<'a> {
    fn row(&self, row: usize) -> &'a [f32] {
        let Self(all, heads, head, dim) = *self;
        &all[(row * heads + head) * dim..][..dim]
    }
}

/// Writes one head's rows to their places.
fn place(to: &mut [f32], heads: usize, head: usize, dim: usize, rows: &[f32]) {
    for (row, from) in rows.chunks(dim).enumerate() {
        to[(row * heads + head) * dim..][..dim].copy_from_slice(from);
    }
}

impl Naive {
    /// What `work` makes of each of `heads` heads, on the kernel's threads.
    fn each<T: Send>(&self, heads: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
        let work = &work;
        std::thread::scope(|scope| {
            let of_thread = |t: usize| (t..heads).step_by(self.threads).map(move |h| (h, work(h))).collect::<Vec<_>>();
            let threads: Vec<_> = (0..self.threads).map(|t| scope.spawn(move || of_thread(t))).collect();
            let mut all: Vec<_> = threads.into_iter().flat_map(|t| t.join().expect("no panic")).collect();
            all.sort_by_key(|(head, _)| *head);
            all.into_iter().map(|(_, x)| x).collect()
        })
    }
}

impl VarlenKernel for Naive {
    fn name(&self) -> &str {
        "naive"
    }

    fn honours(&self) -> Honours {
        let mut honours = Honours::new(&[Dtype::F32], 256);
        (honours.windows, honours.groups, honours.value_dim, honours.backward) = (true, true, true, true);
        honours
    }

    fn forward(
        &mut self,
        call: &Rectangles<'_>,
        inputs: [Elements<'_>; 3],
        o: ElementsMut<'_>,
        lse: ElementsMut<'_>,
    ) -> Result<()> {
        let [q, k, v] = [inputs[0].slice::<f32>()?, inputs[1].slice()?, inputs[2].slice()?];
        let (o, lse) = (o.slice::<f32>()?, lse.slice::<f32>()?);
        let (h, hk, d, e, n) = (call.heads, call.kv_heads, call.head_dim, call.value_dim, lse.len() / call.heads);
        let results = self.each(h, |head| {
            let kv = head / (h / hk);
            let (q, k, v) = (Head(q, h, head, d), Head(k, hk, kv, d), Head(v, hk, kv, e));
            let (mut o, mut lse) = (vec![0.0; n * e], vec![0.0; n]);
            for [rows, columns] in (0..call.len()).map(|i| call.sequence(i)) {
                for r in rows.clone() {
                    let seen = keys(call, r - rows.start, [rows.len(), columns.len()]);
                    let of = |j: usize| call.scale as f32 * dot(q.row(r), k.row(columns.start + j));
                    let scores: Vec<f32> = seen.clone().map(of).collect();
                    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let total: f32 = scores.iter().map(|s| (s - most).exp()).sum();
                    for (j, s) in seen.zip(&scores) {
                        add(&mut o[r * e..][..e], (s - most).exp() / total, v.row(columns.start + j));
                    }
                    lse[r] = most + total.ln();
                }
            }
            (o, lse)
        });
        for (head, (rows, sums)) in results.iter().enumerate() {
            place(o, h, head, e, rows);
            lse[head * n..][..n].copy_from_slice(sums);
        }
        Ok(())
    }

    fn backward(
        &mut self,
        call: &Rectangles<'_>,
        inputs: [Elements<'_>; 4],
        lse: Elements<'_>,
        delta: Elements<'_>,
        [dq, dk, dv]: [ElementsMut<'_>; 3],
    ) -> Result<()> {
        let [q, k, v, d_o] = [inputs[0].slice::<f32>()?, inputs[1].slice()?, inputs[2].slice()?, inputs[3].slice()?];
        let (lse, delta) = (lse.slice::<f32>()?, delta.slice::<f32>()?);
        let (dq, dk, dv) = (dq.slice::<f32>()?, dk.slice::<f32>()?, dv.slice::<f32>()?);
        let (h, hk, d, e, n) = (call.heads, call.kv_heads, call.head_dim, call.value_dim, lse.len() / call.heads);
        let m = k.len() / (hk * d);
        // A kv head has one writer: the thread that computes all of its q heads.
        let results = self.each(hk, |kv| {
            let (k, v) = (Head(k, hk, kv, d), Head(v, hk, kv, e));
            let (mut dq, mut dk, mut dv) = (vec![vec![0.0; n * d]; h / hk], vec![0.0; m * d], vec![0.0; m * e]);
            for (i, dq) in dq.iter_mut().enumerate() {
                let head = kv * (h / hk) + i;
                let (q, d_o) = (Head(q, h, head, d), Head(d_o, h, head, e));
                for [rows, columns] in (0..call.len()).map(|i| call.sequence(i)) {
                    for r in rows.clone() {
                        for j in keys(call, r - rows.start, [rows.len(), columns.len()]) {
                            let key = columns.start + j;
                            let p = (call.scale as f32 * dot(q.row(r), k.row(key)) - lse[head * n + r]).exp();
                            let ds = call.scale as f32 * p * (dot(d_o.row(r), v.row(key)) - delta[head * n + r]);
                            add(&mut dq[r * d..][..d], ds, k.row(key));
                            add(&mut dk[key * d..][..d], ds, q.row(r));
                            add(&mut dv[key * e..][..e], p, d_o.row(r));
                        }
                    }
                }
            }
            (dq, dk, dv)
        });
        for (kv, (queries, keys, values)) in results.iter().enumerate() {
            queries.iter().enumerate().for_each(|(i, rows)| place(dq, h, kv * (h / hk) + i, d, rows));
            place(dk, hk, kv, d, keys);
            place(dv, hk, kv, e, values);
        }
        Ok(())
    }
}
