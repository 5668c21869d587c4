// SPDX-License-Identifier: MIT OR Apache-2.0
//! A kernel of one's own: loops in f64, for every element type and option, and ways to go wrong.

use cpattn::{
    Dtype, Error, Result,
    kernel::varlen::{Elements, ElementsMut, Honours, Rectangles, VarlenKernel},
};

fn wide(x: Elements<'_>) -> Vec<f64> {
    match x {
        Elements::F16(x) => x.iter().map(|&x| x.into()).collect(),
        Elements::Bf16(x) => x.iter().map(|&x| x.into()).collect(),
        Elements::F32(x) => x.iter().map(|&x| x.into()).collect(),
        Elements::F64(x) => x.to_vec(),
    }
}

fn store(to: ElementsMut<'_>, from: &[f64]) {
    match to {
        ElementsMut::F16(to) => to.iter_mut().zip(from).for_each(|(to, &x)| *to = half::f16::from_f64(x)),
        ElementsMut::Bf16(to) => to.iter_mut().zip(from).for_each(|(to, &x)| *to = half::bf16::from_f64(x)),
        ElementsMut::F32(to) => to.iter_mut().zip(from).for_each(|(to, &x)| *to = x as f32),
        ElementsMut::F64(to) => to.copy_from_slice(from),
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn row(x: &[f64], row: usize, heads: usize, head: usize, dim: usize) -> &[f64] {
    &x[(row * heads + head) * dim..][..dim]
}

fn row_mut(x: &mut [f64], row: usize, heads: usize, head: usize, dim: usize) -> &mut [f64] {
    &mut x[(row * heads + head) * dim..][..dim]
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Wrong {
    Nothing,
    /// The n-th call fails.
    Fails(usize),
    /// The n-th call panics.
    Panics(usize),
    /// lse of the last row is NaN, or −∞.
    Lse(f32),
    /// The last row of lse is not written.
    Unwritten,
    /// Limits count from the top-left corner.
    TopLeft,
}

pub struct PlainKernel {
    pub name: &'static str,
    pub honours: Honours,
    pub wrong: Wrong,
    pub calls: usize,
}

impl PlainKernel {
    /// All that there is.
    pub fn new() -> Self {
        let mut honours = Honours::new(&[Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64], 1024);
        (honours.value_dim, honours.windows, honours.softcap, honours.alibi_slopes) = (true, true, true, true);
        (honours.groups, honours.backward) = (true, true);
        Self { name: "plain", honours, wrong: Wrong::Nothing, calls: 0 }
    }

    fn check(&mut self, call: &Rectangles<'_>) -> Result<()> {
        let (n, honours) = (self.calls, &self.honours);
        self.calls += 1;
        assert!(honours.dtypes.contains(&call.dtype) && call.heads.is_multiple_of(call.kv_heads));
        assert!(honours.groups || call.heads == call.kv_heads);
        assert!(honours.windows || call.window_left.is_none() && call.window_right.unwrap_or(0) == 0, "{call:?}");
        assert!(call.alibi_slopes.is_empty() || call.alibi_slopes.len() == call.heads * call.len());
        assert!(!call.is_empty() && (0..call.len()).all(|i| call.sequence(i).iter().all(|rows| !rows.is_empty())));
        assert!(self.wrong != Wrong::Panics(n), "on purpose");
        if self.wrong == Wrong::Fails(n) {
            return Err(Error::Device { call: "launch", code: 7, message: "out of luck".into() });
        }
        Ok(())
    }

    /// For a row and a head, the keys that it sees, each with its score and the derivative of that by q·k.
    fn scores(
        &self,
        call: &Rectangles<'_>,
        (q, k): (&[f64], &[f64]),
        sequence: usize,
        (at, head): (usize, usize),
    ) -> Vec<(usize, f64, f64)> {
        let [rows, keys] = call.sequence(sequence);
        let (sq, sk) = (rows.len() as i64, keys.len() as i64);
        let r = (at - rows.start) as i64;
        let here = r + if self.wrong == Wrong::TopLeft { 0 } else { sk - sq };
        let kv = head / (call.heads / call.kv_heads);
        let seen = (0..sk).filter(|&j| {
            call.window_left.is_none_or(|left| j >= here - i64::from(left))
                && call.window_right.is_none_or(|right| j <= here + i64::from(right))
        });
        let dim = call.head_dim;
        seen.map(|j| {
            let key = keys.start + j as usize;
            let product = dot(row(q, at, call.heads, head, dim), row(k, key, call.kv_heads, kv, dim));
            let (mut s, mut derivative) = (call.scale * product, call.scale);
            if call.softcap != 0.0 {
                let t = (s / call.softcap).tanh();
                (s, derivative) = (call.softcap * t, derivative * (1.0 - t * t));
            }
            if !call.alibi_slopes.is_empty() {
                let distance = call.corners[sequence] + (j - sk) - (r - sq);
                s -= f64::from(call.alibi_slopes[sequence * call.heads + head]) * distance.abs() as f64;
            }
            (key, s, derivative)
        })
        .collect()
    }

    /// All rows with their sequence.
    fn rows(call: &Rectangles<'_>) -> Vec<(usize, usize)> {
        (0..call.len()).flat_map(|s| call.sequence(s)[0].clone().map(move |row| (s, row))).collect()
    }
}

impl VarlenKernel for PlainKernel {
    fn name(&self) -> &str {
        self.name
    }

    fn honours(&self) -> Honours {
        self.honours.clone()
    }

    fn forward(
        &mut self,
        call: &Rectangles<'_>,
        [q, k, v]: [Elements<'_>; 3],
        o: ElementsMut<'_>,
        lse: ElementsMut<'_>,
    ) -> Result<()> {
        self.check(call)?;
        let [q, k, v] = [q, k, v].map(wide);
        let n = *call.cu_seqlens_q.last().unwrap() as usize;
        let mut sums = vec![0.0; n * call.heads * call.value_dim];
        let mut lses = vec![0.0; n * call.heads];
        for (sequence, at) in Self::rows(call) {
            for head in 0..call.heads {
                let scores = self.scores(call, (&q, &k), sequence, (at, head));
                let most = scores.iter().fold(f64::NEG_INFINITY, |most, x| most.max(x.1));
                let total: f64 = scores.iter().map(|x| (x.1 - most).exp()).sum();
                lses[head * n + at] = most + total.ln();
                let kv = head / (call.heads / call.kv_heads);
                let to = row_mut(&mut sums, at, call.heads, head, call.value_dim);
                for (key, s, _) in scores {
                    let p = (s - most).exp() / total;
                    let v = row(&v, key, call.kv_heads, kv, call.value_dim);
                    to.iter_mut().zip(v).for_each(|(to, v)| *to += p * v);
                }
            }
        }
        if let Wrong::Lse(x) = self.wrong {
            lses[n * call.heads - 1] = x.into();
        }
        if self.wrong == Wrong::Unwritten {
            lses.pop();
        }
        store(o, &sums);
        store(lse, &lses);
        Ok(())
    }

    fn backward(
        &mut self,
        call: &Rectangles<'_>,
        [q, k, v, d_o]: [Elements<'_>; 4],
        lse: Elements<'_>,
        delta: Elements<'_>,
        [dq, dk, dv]: [ElementsMut<'_>; 3],
    ) -> Result<()> {
        self.check(call)?;
        let ([q, k, v, d_o], [lse, delta]) = ([q, k, v, d_o].map(wide), [lse, delta].map(wide));
        let n = *call.cu_seqlens_q.last().unwrap() as usize;
        let (h, hk, d, e) = (call.heads, call.kv_heads, call.head_dim, call.value_dim);
        let [mut q_sum, mut k_sum, mut v_sum] = [&q, &k, &v].map(|x| vec![0.0; x.len()]);
        for (sequence, at) in Self::rows(call) {
            for head in 0..h {
                let kv = head / (h / hk);
                for (key, s, derivative) in self.scores(call, (&q, &k), sequence, (at, head)) {
                    let p = (s - lse[head * n + at]).exp();
                    let dp = dot(row(&d_o, at, h, head, e), row(&v, key, hk, kv, e));
                    let ds = p * (dp - delta[head * n + at]) * derivative;
                    let add = |to: &mut [f64], by: f64, from: &[f64]| {
                        to.iter_mut().zip(from).for_each(|(to, from)| *to += by * from);
                    };
                    add(row_mut(&mut q_sum, at, h, head, d), ds, row(&k, key, hk, kv, d));
                    add(row_mut(&mut k_sum, key, hk, kv, d), ds, row(&q, at, h, head, d));
                    add(row_mut(&mut v_sum, key, hk, kv, e), p, row(&d_o, at, h, head, e));
                }
            }
        }
        store(dq, &q_sum);
        store(dk, &k_sum);
        store(dv, &v_sum);
        Ok(())
    }
}
