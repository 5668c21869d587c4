// SPDX-License-Identifier: MIT OR Apache-2.0
//! Slices, contexts and streams of cudarc, on a device or on the stand-in driver: two ranks forward and backward over
//! slices, beside the same plan over host memory; and the refusals.
#![allow(missing_docs, reason = "tests have no users")]

use ::cudarc::driver::{CudaContext, CudaSlice};
use cpattn::transport::{local, peer};
use cpattn::{Backward, Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, Side, View, ViewMut, cudarc};
use fastrand::Rng;
use half::f16;
use std::sync::Arc;
use std::time::Duration;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const DEADLINE: Duration = Duration::from_secs(100);

/// A context, or `None` where no driver is and none is required.
fn context() -> Option<Arc<CudaContext>> {
    let found = std::panic::catch_unwind(|| CudaContext::new(0)).ok().and_then(Result::ok);
    assert!(
        found.is_some() || std::env::var_os("CPATTN_REQUIRE_CUDA").is_none(),
        "no CUDA driver, but one is required"
    );
    found
}

fn drawn(seed: u64, len: usize) -> Vec<f16> {
    let mut rng = Rng::with_seed(seed);
    (0..len).map(|_| f16::from_f32(rng.f32() * 2.0 - 1.0)).collect()
}

/// o, dq, dk and dv of a rank.
type Outputs = [Vec<f16>; 4];

fn inputs(rank: usize, n: usize) -> [Vec<f16>; 4] {
    [HEADS, KV_HEADS, KV_HEADS, HEADS].map(|heads| drawn((rank * 10 + heads) as u64, n * heads * DIM))
}

fn on_the_host(plan: &Plan) -> Vec<Outputs> {
    local::run(2, DEADLINE, |end| {
        let mut rank = Rank::new(end);
        let n = plan.local_tokens(Side::Q, rank.rank()).len();
        let [q, k, v, d_o] = inputs(rank.rank(), n);
        let [mut o, mut dq] = [HEADS; 2].map(|heads| vec![f16::NAN; n * heads * DIM]);
        let [mut dk, mut dv] = [KV_HEADS; 2].map(|heads| vec![f16::NAN; n * heads * DIM]);
        let mut lse = vec![f32::NAN; n * HEADS];
        let view = |t, heads| View::new(t, n, heads, DIM);
        let (q, k, v, d_o) = (view(&q, HEADS)?, view(&k, KV_HEADS)?, view(&v, KV_HEADS)?, view(&d_o, HEADS)?);
        let out = ViewMut::new(&mut o, n, HEADS, DIM)?;
        rank.forward(plan, Forward::new(q, k, v, out, ViewMut::head_major(&mut lse, n, HEADS)?))?;
        rank.backward(
            plan,
            Backward::new(
                q,
                k,
                v,
                View::new(&o, n, HEADS, DIM)?,
                View::head_major(&lse, n, HEADS)?,
                d_o,
                [
                    ViewMut::new(&mut dq, n, HEADS, DIM)?,
                    ViewMut::new(&mut dk, n, KV_HEADS, DIM)?,
                    ViewMut::new(&mut dv, n, KV_HEADS, DIM)?,
                ],
            ),
        )?;
        Ok([o, dq, dk, dv])
    })
    .unwrap()
}

/// One rank over slices. Inputs are on one stream of cudarc's and the run on another, so that the events of slices
/// order them.
fn over_slices(context: &Arc<CudaContext>, plan: &Plan, end: peer::Peer) -> Outputs {
    let mut rank = Rank::on_device(end).unwrap();
    let n = plan.local_tokens(Side::Q, rank.rank()).len();
    let (before, stream) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let [q, k, v, d_o] = inputs(rank.rank(), n).map(|t| before.clone_htod(&t).unwrap());
    // o begins behind 64 elements that belong to nobody.
    let mut o = before.clone_htod(&vec![f16::NAN; 64 + n * HEADS * DIM]).unwrap();
    let mut lse = before.clone_htod(&vec![f32::NAN; n * HEADS]).unwrap();
    let [mut dq, mut dk, mut dv] =
        [HEADS, KV_HEADS, KV_HEADS].map(|heads| before.clone_htod(&vec![f16::NAN; n * heads * DIM]).unwrap());
    let strides = [HEADS * DIM, DIM];
    let read =
        |t: &CudaSlice<f16>, heads| cudarc::StreamSlice::compact(t, &stream, [n, heads, DIM]).unwrap().view().raw();
    assert_eq!(read(&q, HEADS).tokens as usize, n);
    {
        let [q, k, v] = [(&q, HEADS), (&k, KV_HEADS), (&v, KV_HEADS)]
            .map(|(t, heads)| cudarc::StreamSlice::compact(t, &stream, [n, heads, DIM]).unwrap());
        let mut o = cudarc::StreamSliceMut::new(&mut o, &stream, 64, [n, HEADS, DIM], strides).unwrap();
        let mut lse = cudarc::StreamSliceMut::new(&mut lse, &stream, 0, [n, HEADS, 1], [1, n]).unwrap();
        let tensors = Forward::new(q.view(), k.view(), v.view(), o.view(), lse.view());
        // SAFETY: the stream lives.
        unsafe { rank.forward(plan, tensors.on(cudarc::stream(&stream))) }.unwrap();
    }
    {
        let [q, k, v, d_o] = [(&q, HEADS), (&k, KV_HEADS), (&v, KV_HEADS), (&d_o, HEADS)]
            .map(|(t, heads)| cudarc::StreamSlice::compact(t, &stream, [n, heads, DIM]).unwrap());
        let o = cudarc::StreamSlice::new(&o, &stream, 64, [n, HEADS, DIM], strides).unwrap();
        let lse = cudarc::StreamSlice::new(&lse, &stream, 0, [n, HEADS, 1], [1, n]).unwrap();
        let mut dq = cudarc::StreamSliceMut::compact(&mut dq, &stream, [n, HEADS, DIM]).unwrap();
        let [mut dk, mut dv] =
            [&mut dk, &mut dv].map(|t| cudarc::StreamSliceMut::compact(t, &stream, [n, KV_HEADS, DIM]).unwrap());
        let tensors = Backward::new(
            q.view(),
            k.view(),
            v.view(),
            o.view(),
            lse.view(),
            d_o.view(),
            [dq.view(), dk.view(), dv.view()],
        );
        // SAFETY: the stream lives.
        unsafe { rank.backward(plan, tensors.on(cudarc::stream(&stream))) }.unwrap();
    }
    // Copies on the other stream wait for the run by the events that the slices recorded.
    let o = before.clone_dtoh(&o).unwrap();
    assert!(o[..64].iter().all(|x| x.is_nan()), "elements before the tensor were written");
    let [dq, dk, dv] = [&dq, &dk, &dv].map(|t| before.clone_dtoh(t).unwrap());
    before.synchronize().unwrap();
    rank.synchronize().unwrap();
    [o[64..].to_vec(), dq, dk, dv]
}

#[test]
fn ranks_over_slices_give_what_ranks_over_host_memory_give() {
    let Some(context) = context() else { return };
    let problem = Problem::new(Batch::from_lengths(&[19, 30, 8]).unwrap(), HEADS, KV_HEADS, DIM, Dtype::F16);
    let plan = &Plan::new(&problem, Mesh::ring(2).unwrap(), Layout::Zigzag).unwrap();
    let device = cudarc::device(&context).unwrap();
    let ends = peer::group(&[device.clone(), device], DEADLINE).unwrap();
    let found: Vec<Outputs> = std::thread::scope(|scope| {
        let ranks: Vec<_> = ends.into_iter().map(|end| scope.spawn(|| over_slices(&context, plan, end))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for (rank, (found, expected)) in found.iter().zip(on_the_host(plan)).enumerate() {
        for ((name, found), expected) in ["o", "dq", "dk", "dv"].iter().zip(found).zip(expected) {
            for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
                let (a, b) = (a.to_f32(), b.to_f32());
                // Two kernels in f16: a unit in the last place or two of numbers up to a few.
                assert!((a - b).abs() <= 4e-3 * (1.0 + b.abs()), "rank {rank}, {name}[{i}]: {a}, expected {b}");
            }
        }
    }
}

#[test]
fn slices_that_are_too_short_are_refused() {
    let Some(context) = context() else { return };
    let stream = context.default_stream();
    let mut t = stream.clone_htod(&drawn(1, 100)).unwrap();
    let text = |e: cpattn::Error| e.to_string();
    let short = cudarc::StreamSlice::<f16>::compact(&t, &stream, [4, 2, 16]).map(drop).map_err(text).unwrap_err();
    assert!(short.contains("is of length 100") && short.contains("at least 128"), "{short}");
    assert!(cudarc::StreamSlice::<f16>::compact(&t, &stream, [3, 2, 16]).is_ok());
    assert!(cudarc::StreamSlice::<f16>::new(&t, &stream, 4, [3, 2, 16], [32, 16]).is_ok());
    assert!(cudarc::StreamSlice::<f16>::new(&t, &stream, 5, [3, 2, 16], [32, 16]).is_err());
    assert!(cudarc::StreamSlice::<f16>::new(&t, &stream, 101, [0, 2, 16], [32, 16]).is_err());
    assert!(cudarc::StreamSlice::<f16>::new(&t, &stream, 0, [3, 2, 16], [usize::MAX, 16]).is_err());
    // Rows that share elements cannot be written.
    let shared = cudarc::StreamSliceMut::<f16>::new(&mut t, &stream, 0, [3, 2, 16], [16, 16])
        .map(drop)
        .map_err(text)
        .unwrap_err();
    assert!(shared.contains("share"), "{shared}");
}
