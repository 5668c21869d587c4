// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whole plans on a CUDA device: several ranks of one process, each with streams of its own, exchanging by device
//! copies that events alone order.
//!
//! Runs on whatever driver is found; an emulated one on `LD_LIBRARY_PATH` serves as well as a real one. Without any,
//! these tests say so and pass; with `CPATTN_REQUIRE_CUDA` set, that is a failure.

#[path = "../../tests/common/cache.rs"]
mod cache;
mod combine;
#[path = "../../tests/common/combined_on_device.rs"]
mod combined_on_device;
#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "../../tests/common/driver.rs"]
mod driver;
#[path = "../../tests/common/held.rs"]
mod held;
mod paged;
#[path = "../../tests/common/paged_on_device.rs"]
mod paged_on_device;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use common::{Data, Results, check_on_device as check, d_lse_of, gather, reference, scatter};
use cpattn::{
    Batch, Dtype, Element, Layout, Mask, Mesh, Options, Plan, Problem, Rank, Result, Side,
    call::{Attend, Band, Dropout, DropoutMask, HeadMap, Mode, Pair, QRange, Range, Ranges, RawTensor},
    kernel::cuda::{Cuda, StreamKernels},
    plan::{Circulate, Gather, Wire},
    runtime::Bindings,
    schedule::{Direction, TensorId},
    slices,
    transport::peer,
};
use driver::device;
use half::{bf16, f16};
use held::{Held, of_forward};

/// Forward and backward, one thread for each rank, all on one device.
fn run<T: Element<Acc = f32>>(cuda: &Arc<Cuda>, plan: &Plan, data: &Data<T>) -> Result<Results<T>> {
    let p = plan.problem();
    let (hq, hk, d, dv) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim());
    let all = Mutex::new(Results::<T>::unwritten(p));
    let devices = vec![Arc::clone(cuda); plan.mesh().world()];
    let peers = peer::group(&devices, Duration::from_secs(120))?;
    let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = peers
            .into_iter()
            .map(|peer| {
                let (plan, data, all) = (plan.clone(), &data, &all);
                scope.spawn(move || -> Result<()> {
                    let mut rank = Rank::on_device(peer)?;
                    let r = rank.rank();
                    let (tq, tk) = (plan.local_tokens(Side::Q, r).indices(), plan.local_tokens(Side::K, r).indices());
                    let (nq, nk) = (tq.len(), tk.len());
                    let q = Held::new(cuda, &gather(&data.q, &tq, hq * d), nq, hq, d);
                    let k = Held::new(cuda, &gather(&data.k, &tk, hk * d), nk, hk, d);
                    let v = Held::new(cuda, &gather(&data.v, &tk, hk * dv), nk, hk, dv);
                    let d_o = Held::new(cuda, &gather(&data.d_o, &tq, hq * dv), nq, hq, dv);
                    let sinks = data.sinks.as_ref().map(|s| Held::new(cuda, s, 1, hq, p.sinks_per_head()));
                    let o = Held::nan::<T>(cuda, nq, hq, dv);
                    let lse = Held::nan::<f32>(cuda, nq, hq, 1);
                    // It is written, not raised.
                    let max_logit = Held::new(cuda, &vec![f32::MAX; hq], 1, hq, 1);
                    let mut bindings = of_forward([&q, &k, &v, &o, &lse]).with(TensorId::MaxLogit, max_logit.1);
                    if let Some(s) = &sinks {
                        bindings = bindings.with(TensorId::Sinks, s.1);
                    }
                    bindings = bindings.with_dropout_seed(data.dropout_seed);
                    let stream = std::ptr::null_mut::<core::ffi::c_void>();
                    // SAFETY: the tensors live until the stream was waited for; the default stream is the context's.
                    unsafe { rank.run(&plan, Direction::Forward, &bindings.on(stream)) }?;
                    let (dq, dk) = (Held::nan::<T>(cuda, nq, hq, d), Held::nan::<T>(cuda, nk, hk, d));
                    let (d_v, dsinks) =
                        (Held::nan::<T>(cuda, nk, hk, dv), Held::nan::<f32>(cuda, 1, hq, p.sinks_per_head()));
                    let d_lse = data.d_lse.as_ref().map(|all| {
                        // Rows of heads, as `d_lse_of` has them, to rows of tokens.
                        let found = lse.read::<f32>();
                        let lse: Vec<f32> = (0..nq * hq).map(|i| found[i % nq * hq + i / nq]).collect();
                        let by_head = d_lse_of(all, &tq, &lse, hq);
                        let by_token: Vec<f32> = (0..nq * hq).map(|i| by_head[i % hq * nq + i / hq]).collect();
                        Held::new(cuda, &by_token, nq, hq, 1)
                    });
                    let bindings = bindings
                        .with(TensorId::DO, d_o.1)
                        .with(TensorId::DLse, d_lse.as_ref().map_or(RawTensor::NONE, |d_lse| d_lse.1))
                        .with(TensorId::Dq, dq.1)
                        .with(TensorId::Dk, dk.1)
                        .with(TensorId::Dv, d_v.1)
                        .with(TensorId::Dsinks, if sinks.is_some() { dsinks.1 } else { RawTensor::NONE });
                    // SAFETY: as above.
                    unsafe { rank.run(&plan, Direction::Backward, &bindings.on(stream)) }?;
                    // SAFETY: the default stream.
                    unsafe { cuda.synchronize(stream) }?;
                    let mut all = all.lock().unwrap();
                    scatter(&mut all.o, &o.read::<T>(), &tq, hq * dv);
                    scatter(&mut all.lse, &lse.read::<f32>(), &tq, hq);
                    all.max_logit.iter_mut().zip(max_logit.read::<f32>()).for_each(|(all, own)| *all = all.max(own));
                    scatter(&mut all.dq, &dq.read::<T>(), &tq, hq * d);
                    scatter(&mut all.dk, &dk.read::<T>(), &tk, hk * d);
                    scatter(&mut all.dv, &d_v.read::<T>(), &tk, hk * dv);
                    if sinks.is_some() {
                        all.dsinks = dsinks.read::<f32>();
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    outcomes.into_iter().collect::<Result<()>>()?;
    Ok(all.into_inner().unwrap())
}

fn every_way<T: Element<Acc = f32>>(what: &str, p: &Problem, ways: &[(usize, usize, Layout, Options)]) {
    let Some(cuda) = device() else { return };
    let data = Data::<T>::random(p, 7);
    let want = reference(p, &data);
    let one = run(&cuda, &Plan::new(p, Mesh::single(), Layout::Contiguous).unwrap(), &data).unwrap();
    check(&format!("{what}, one rank"), &one, &one, &want, 0.0);
    for &(ulysses, ring, layout, options) in ways {
        let mesh = Mesh { replicas: 1, ring, ulysses };
        let plan = Plan::builder(p).mesh(mesh).layout(layout).options(options).build().unwrap();
        let what = format!("{what}, {mesh}, {layout}, {options:?}");
        let got = run(&cuda, &plan, &data).unwrap_or_else(|e| panic!("{what}: {e}"));
        let slack = if options.wire == Wire::Bf16 { 3e-3 } else { 0.0 };
        check(&what, &got, &one, &want, slack);
        let again = run(&cuda, &plan, &data).unwrap();
        assert!(again == got, "{what}: a second run has other bits");
    }
}

#[test]
fn ulysses_ring_and_hybrid() {
    let p = Problem::new(Batch::from_lengths(&[29, 0, 70, 13]).unwrap(), 6, 2, 32, Dtype::Bf16);
    every_way::<bf16>(
        "causal",
        &p,
        &[
            (1, 3, Layout::Zigzag, Options::new()),
            (4, 1, Layout::Contiguous, Options::new()),
            (3, 2, Layout::ZigzagPack, Options::new().circulate(Circulate::Queries)),
            (1, 2, Layout::Striped { stripe: 4 }, Options::new().circulate(Circulate::Keys).pack_inputs(true)),
            (1, 3, Layout::Zigzag, Options::new().circulate_forward(Circulate::Queries)),
            (2, 2, Layout::Balanced { chunks: 2 }, Options::new().gather(true)),
            (1, 3, Layout::Zigzag, Options::new().gather(Gather::Together)),
            (1, 3, Layout::Contiguous, Options::new().wire(Wire::Bf16).passes(2)),
            (1, 4, Layout::Zigzag, Options::new().circulate(Circulate::Keys).ranks_per_node(2)),
            (1, 4, Layout::Contiguous, Options::new().circulate(Circulate::Queries).wire(Wire::Bf16).ranks_per_node(2)),
            (1, 4, Layout::Zigzag, Options::new().gather(Gather::Together).wire(Wire::Bf16).ranks_per_node(2)),
            (4, 1, Layout::Contiguous, Options::new().wire(Wire::Bf16).ranks_per_node(2)),
            (4, 2, Layout::Zigzag, Options::new().circulate(Circulate::Keys).ranks_per_node(4)),
            (2, 4, Layout::Contiguous, Options::new().circulate(Circulate::Keys).wire(Wire::Bf16).ranks_per_node(4)),
            (6, 2, Layout::Zigzag, Options::new().gather(true).circulate(Circulate::Keys).ranks_per_node(6)),
        ],
    );
}

/// MLA in its latent form: one kv head for all q heads, and k wider than v.
#[test]
fn latent_heads() {
    let p = Problem::new(Batch::from_lengths(&[9, 0, 75]).unwrap(), 3, 1, 576, Dtype::Bf16).with_value_dim(512);
    every_way::<bf16>(
        "latent",
        &p,
        &[
            (1, 2, Layout::Zigzag, Options::new()),
            (2, 1, Layout::Contiguous, Options::new()),
            (1, 2, Layout::Contiguous, Options::new().circulate(Circulate::Queries).wire(Wire::Bf16)),
        ],
    );
}

#[test]
fn every_option_at_once() {
    let batch = Batch::cross(&[0, 40, 61], &[0, 75, 96], None).unwrap();
    let p = Problem::new(batch, 4, 2, 64, Dtype::F16)
        .with_value_dim(32)
        .with_mask(Mask::window(30, 5))
        .with_softcap(5.0)
        .with_alibi_slopes(&[0.1, 0.2, 0.05, 0.3])
        .with_sinks_per_head(3);
    every_way::<f16>(
        "every option",
        &p,
        &[
            (1, 3, Layout::Zigzag, Options::new()),
            (2, 2, Layout::Contiguous, Options::new().circulate(Circulate::Queries)),
            (2, 2, Layout::Contiguous, Options::new().circulate_forward(Circulate::Queries)),
            (4, 1, Layout::Contiguous, Options::new()),
        ],
    );
}

#[test]
fn reproducible_plans_are_refused() {
    let Some(cuda) = device() else { return };
    let p = Problem::new(Batch::from_lengths(&[9]).unwrap(), 2, 2, 32, Dtype::F16);
    let plan = Plan::builder(&p)
        .mesh(Mesh::single())
        .layout(Layout::Contiguous)
        .options(Options::new().reproducible(true))
        .build()
        .unwrap();
    let error = run(&cuda, &plan, &Data::<f16>::random(&p, 1)).unwrap_err().to_string();
    assert!(error.contains("reproducible on a device"), "{error}");
}

/// The kernels take one slope for each head: slopes of documents are refused by name, with their way out. Those of one
/// document are one row.
#[test]
fn slopes_of_documents_are_refused() {
    let Some(cuda) = device() else { return };
    let outcome = |lengths: &[usize]| {
        let p = Problem::new(Batch::from_lengths(lengths).unwrap(), 2, 2, 32, Dtype::F16);
        let p = p.with_alibi_slopes_per_document(&vec![0.5; 2 * lengths.len()]);
        let plan = Plan::new(&p, Mesh::single(), Layout::Contiguous).unwrap();
        run(&cuda, &plan, &Data::<f16>::random(&p, 1))
    };
    let error = outcome(&[9, 4, 2]).unwrap_err().to_string();
    assert!(error.starts_with("alibi_slopes of 3 documents on a device is not supported"), "{error}");
    assert!(error.contains("use a rank on the CPU"), "{error}");
    outcome(&[9]).unwrap();
}

/// Dropout drops the same pairs on every mesh and layout, those of the reference, and cut documents on several ranks
/// give what one rank gives. Single calls refuse tokens that are none of the batch.
#[test]
fn dropout() {
    let batch = Batch::cross(&[0, 40, 61], &[0, 75, 96], Some(&[30, -3])).unwrap();
    let p = Problem::new(batch, 4, 2, 64, Dtype::F16).with_value_dim(32).with_softcap(5.0).with_sinks_per_head(2);
    let ways = [
        (1, 3, Layout::Zigzag, Options::new()),
        (2, 2, Layout::Striped { stripe: 3 }, Options::new().circulate(Circulate::Queries)),
        (2, 1, Layout::Contiguous, Options::new()),
        (1, 2, Layout::Balanced { chunks: 2 }, Options::new().gather(true)),
    ];
    every_way::<f16>("dropout", &p.with_mask(Mask::window(30, 5)).with_dropout(0.3), &ways);
    let batch = Batch::from_lengths(&[44, 20]).unwrap();
    let p = Problem::new(batch.with_slices(&slices::shared_prefix(40, &[9, 8, 7])).unwrap(), 2, 1, 80, Dtype::Bf16);
    every_way::<bf16>("dropout, slices", &p.with_dropout(0.5), &[(1, 2, Layout::Zigzag, Options::new())]);

    let Some(cuda) = device() else { return };
    let p = Problem::new(Batch::from_lengths(&[9]).unwrap(), 2, 2, 32, Dtype::F16);
    let (q, lse) = (Held::nan::<f16>(&cuda, 9, 2, 32), Held::nan::<f32>(&cuda, 9, 2, 1));
    let mask = DropoutMask::new(0.125, 1).unwrap();
    let dropout = Some(Dropout { mask, q_tokens: &[-1], k_tokens: &[0] });
    let rows =
        [QRange { range: Range::plain(0, 9, 0, 0), document: [0; 2], keys_begin: 0, keys_end: 0, mode: Mode::Only }];
    let ranges = Ranges { q: &rows, ..Ranges::default() };
    let heads = HeadMap { q_offset: 0, kv_offset: 0, group: 1 };
    let forward = Attend { lse: lse.1, dropout, ..Attend::new([q.1, q.1, q.1, q.1], heads, p.score(), ranges) };
    let mut kernels = StreamKernels::new(cuda).unwrap();
    kernels.reserve(Dtype::F16, 32, 32).unwrap();
    // SAFETY: refused before anything is launched.
    let error = unsafe { kernels.attend(&forward, std::ptr::null_mut()) }.unwrap_err().to_string();
    assert!(error.starts_with("ranges.q[0] is tokens -1..=7"), "{error}");
}

/// Ranks of other seeds are found in the first run, where they may go on, and in later ones. Later seeds may be any, if
/// they are equal, and give other results.
#[test]
fn seeds_of_dropout() {
    let Some(cuda) = device() else { return };
    let p = Problem::new(Batch::from_lengths(&[30]).unwrap(), 2, 1, 32, Dtype::F16).with_dropout(0.5);
    let plan = Plan::new(&p, Mesh::ring(2).unwrap(), Layout::Zigzag).unwrap();
    let data = Data::<f16>::random(&p, 4);
    let peers = || peer::group(&[Arc::clone(&cuda), Arc::clone(&cuda)], Duration::from_secs(120)).unwrap();
    // A forward with a seed, which returns o.
    type Forward<'a> = &'a mut dyn FnMut(Option<u64>) -> Result<Vec<f16>>;
    let on_ranks = |body: &(dyn Fn(Forward<'_>, usize) + Sync)| {
        std::thread::scope(|scope| {
            for end in peers() {
                let (plan, data, cuda) = (&plan, &data, &cuda);
                scope.spawn(move || {
                    let mut rank = Rank::on_device(end).unwrap();
                    let r = rank.rank();
                    let of = |x: &[f16], side, heads: usize| {
                        let tokens = plan.local_tokens(side, r).indices();
                        Held::new(cuda, &gather(x, &tokens, heads * 32), tokens.len(), heads, 32)
                    };
                    let (q, k, v) = (of(&data.q, Side::Q, 2), of(&data.k, Side::K, 1), of(&data.v, Side::K, 1));
                    let n = q.1.tokens as usize;
                    let (o, lse) = (Held::nan::<f16>(cuda, n, 2, 32), Held::nan::<f32>(cuda, n, 2, 1));
                    let bindings = of_forward([&q, &k, &v, &o, &lse]);
                    let mut forward = |seed| {
                        // SAFETY: the tensors live until the rank has waited.
                        unsafe { rank.run(plan, Direction::Forward, &bindings.with_dropout_seed(seed)) }?;
                        rank.synchronize()?;
                        Ok(o.read::<f16>())
                    };
                    body(&mut forward, r);
                });
            }
        });
    };
    on_ranks(&|forward, rank| {
        let own = 20 + rank as u64;
        let error = forward(Some(own)).unwrap_err();
        assert!(matches!(error, cpattn::Error::Disagreement { .. }), "{error}");
        assert!(error.to_string().contains(&format!("dropout 0.5, dropout_seed {own}")), "{error}");
        let missing = forward(None).unwrap_err().to_string();
        assert!(missing.starts_with("dropout_seed is not given"), "{missing}");
        let results = [3, u64::MAX, 1 << 32, 3].map(|seed| forward(Some(seed)).unwrap());
        assert!(results[0] == results[3] && results[0] != results[1] && results[1] != results[2]);
    });
    on_ranks(&|forward, rank| {
        forward(Some(1)).unwrap();
        let own = 20 + rank as u64;
        let error = forward(Some(own)).unwrap_err();
        // The one that is late may hear that its peer has left.
        let (found, text) = (matches!(error, cpattn::Error::Disagreement { .. }), error.to_string());
        let told = matches!(error, cpattn::Error::Peer { .. });
        assert!(told || found && text.contains(&format!("dropout_seed {own}")), "{error:?}");
    });
}

/// The largest scores, of a run that is asked for them and one that is not, in memory of strides of its own; a single
/// call raises what is there, and a wrong shape is refused before anything is written.
#[test]
fn largest_scores() {
    let Some(cuda) = device() else { return };
    let p = Problem::new(Batch::from_lengths(&[9]).unwrap(), 2, 2, 32, Dtype::F16);
    let plan = Plan::new(&p, Mesh::single(), Layout::Contiguous).unwrap();
    let mut rank =
        Rank::on_device(peer::group(&[Arc::clone(&cuda)], Duration::from_secs(9)).unwrap().remove(0)).unwrap();
    let data = Data::<f16>::random(&p, 2);
    let want = reference(&p, &data).max_logit;
    let [q, k, v] = [&data.q, &data.k, &data.v].map(|x| Held::new(&cuda, x, 9, 2, 32));
    let (o, lse) = (Held::nan::<f16>(&cuda, 9, 2, 32), Held::nan::<f32>(&cuda, 9, 2, 1));
    // Two heads with another number between them, from the last to the first.
    let largest = Held::new(&cuda, &[7f32; 3], 1, 3, 1);
    let apart = RawTensor { ptr: largest.1.ptr.wrapping_add(8), heads: 2, head_stride: -2, ..largest.1 };
    let bindings = of_forward([&q, &k, &v, &o, &lse]);
    let near = |found: &[f32], want: &[f32]| found.iter().zip(want).all(|(x, w)| (x - w).abs() <= 1e-5 * w.abs());
    let forward = |rank: &mut Rank, bindings: &Bindings| {
        // SAFETY: the tensors live until the stream was waited for; the default stream is the context's.
        unsafe { rank.run(&plan, Direction::Forward, bindings) }?;
        rank.synchronize()
    };
    let wrong = forward(&mut rank, &bindings.with(TensorId::MaxLogit, largest.1)).unwrap_err().to_string();
    assert!(wrong.starts_with("max_logit.heads is 3, expected 2"), "{wrong}");
    assert_eq!((largest.read::<f32>(), lse.read::<f32>()[0].is_nan()), (vec![7.0; 3], true));
    forward(&mut rank, &bindings.with(TensorId::MaxLogit, apart)).unwrap();
    let found = largest.read::<f32>();
    assert!(near(&[found[2], found[0]], &want) && found[1] == 7.0, "{found:?}, expected {want:?}");
    forward(&mut rank, &bindings).unwrap();
    assert_eq!(largest.read::<f32>(), found);

    let range = Range::plain(0, 9, 0, 0);
    let rows = [QRange { range, document: [0; 2], keys_begin: 0, keys_end: 1, mode: Mode::Only }];
    let (keys, pairs, bands) = ([range], [Pair::of(0)], [Band::WHOLE]);
    let call = |max_logit| Attend {
        lse: lse.1,
        max_logit,
        ..Attend::new(
            [q.1, k.1, v.1, o.1],
            HeadMap { q_offset: 0, kv_offset: 0, group: 1 },
            p.score(),
            Ranges { q: &rows, k: &keys, pairs: &pairs, bands: &bands },
        )
    };
    let mut kernels = StreamKernels::new(cuda.clone()).unwrap();
    kernels.reserve(q.1.dtype, q.1.dim, v.1.dim).unwrap();
    // SAFETY: refused before anything is launched.
    let wrong = unsafe { kernels.attend(&call(largest.1), std::ptr::null_mut()) }.unwrap_err().to_string();
    assert!(wrong.starts_with("max_logit.heads is 3, expected 2"), "{wrong}");
    // One head is above its scores, the other below all numbers.
    let one_above = Held::new(&cuda, &[1e3, f32::NEG_INFINITY], 1, 2, 1);
    // SAFETY: as above.
    unsafe { kernels.attend(&call(one_above.1), std::ptr::null_mut()) }.unwrap();
    // SAFETY: the default stream.
    unsafe { cuda.synchronize(std::ptr::null_mut()) }.unwrap();
    let found = one_above.read::<f32>();
    assert!(found[0] == 1e3 && near(&found[1..], &want[1..]), "{found:?}, expected {want:?}");
}
