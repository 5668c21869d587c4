// SPDX-License-Identifier: MIT OR Apache-2.0
//! One rank's forward over k and v in pages on its device, whatever the transport, beside a run without pages: used
//! with transports of one process and with NCCL.

use super::{
    cache::Cache,
    common::{Data, Random, error, gather, reference, scatter},
    held::{Held, of_forward},
};
use cpattn::{
    Element, Plan, Problem, Rank, Result, Side,
    call::RawTensor,
    kernel::cuda::{Cuda, DeviceMemory},
    runtime::{Bindings, BlockTable, Keys, Pages},
    schedule::{Direction, TensorId},
};

/// Whether v is the first columns of k.
pub fn is_latent(p: &Problem) -> bool {
    p.head_dim() == 576
}

/// o, lse and the largest scores, of a rank or of the whole batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Found<T> {
    pub o: Vec<T>,
    pub lse: Vec<f32>,
    pub max_logit: Vec<f32>,
}

/// A cache on a device, and its table.
struct DeviceCache {
    k: Held,
    v: Held,
    /// As long as `pages` is used.
    _table: DeviceMemory,
    pages: Pages<'static>,
}

impl DeviceCache {
    fn new<T: Element>(cuda: &Cuda, p: &Problem, cache: &Cache<T>) -> Self {
        let (k, v) = (&cache.k, &cache.v);
        let table = cuda.allocate(4 * cache.table.len().max(1)).unwrap();
        table.upload(bytemuck::cast_slice(&cache.table)).unwrap();
        let pages = Pages {
            // SAFETY: the table lives as long as the cache, and its entries are pages of k and v.
            block_table: unsafe { BlockTable::on_device(table.ptr().cast()) },
            pages_per_document: cache.per_document,
            page_size: cache.size,
            page_stride: cache.stride,
        };
        let k = Held::new(cuda, k, cache.rows, p.kv_heads(), p.head_dim());
        let mut v = Held::new(cuda, v, cache.rows, p.kv_heads(), p.value_dim());
        if is_latent(p) {
            // The first columns of k, in its memory; v's own holds what must not be read.
            v.0.upload(&vec![0xff; v.0.bytes()]).unwrap();
            v.1 = RawTensor { dim: p.value_dim() as u32, ..k.1 };
        }
        Self { k, v, _table: table, pages }
    }
}

/// What a rank finds for its own tokens: in pages of this size and stride, or without pages.
pub fn of_rank<T: Element<Acc = f32>>(
    mut rank: Rank,
    plan: &Plan,
    data: &Data<T>,
    pages: Option<(usize, usize)>,
) -> Result<Found<T>> {
    let p = plan.problem();
    let (hq, hk, d, dv) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim());
    let (r, cuda) = (rank.rank(), rank.cuda().unwrap().clone());
    let cuda = &*cuda;
    let [tq, tk] = [Side::Q, Side::K].map(|side| plan.local_tokens(side, r).indices());
    let q = Held::new(cuda, &gather(&data.q, &tq, hq * d), tq.len(), hq, d);
    let (own_k, own_v) = (gather(&data.k, &tk, hk * d), gather(&data.v, &tk, hk * dv));
    let (o, lse) = (Held::nan::<T>(cuda, tq.len(), hq, dv), Held::nan::<f32>(cuda, tq.len(), hq, 1));
    let largest = Held::new(cuda, &vec![f32::MAX; hq], 1, hq, 1);
    let sinks = data.sinks.as_ref().map(|s| Held::new(cuda, s, 1, hq, p.sinks_per_head()));
    let rows = |[k, v]: [&Held; 2]| {
        let bindings = of_forward([&q, k, v, &o, &lse]).with(TensorId::MaxLogit, largest.1);
        sinks.iter().fold(bindings, |bindings, sinks| bindings.with(TensorId::Sinks, sinks.1))
    };
    let cache = pages.map(|(size, stride)| {
        let mut random = Random::new(1 + r as u64);
        DeviceCache::new(cuda, p, &Cache::new(plan, r, [&own_k, &own_v], size, stride, &mut random))
    });
    let plain = [Held::new(cuda, &own_k, tk.len(), hk, d), Held::new(cuda, &own_v, tk.len(), hk, dv)];
    let mut run = |bindings: &Bindings| -> Result<_> {
        // SAFETY: the memory lives until the rank is gone, and the entries of the table are pages.
        unsafe { rank.run(plan, Direction::Forward, bindings) }?;
        rank.synchronize()?;
        Ok(Found { o: o.read::<T>(), lse: lse.read::<f32>(), max_logit: largest.read::<f32>() })
    };
    let Some(cache) = &cache else { return run(&rows([&plain[0], &plain[1]])) };
    let paged = rows([&cache.k, &cache.v]).with_keys(Keys::Pages(cache.pages));
    let first = run(&paged)?;
    // A run without pages between two others changes nothing.
    run(&rows([&plain[0], &plain[1]]))?;
    assert!(run(&paged)? == first, "another run has other bits");
    Ok(first)
}

/// Of the whole batch, from what each rank found.
pub fn of_all<T: Element>(plan: &Plan, parts: &[Found<T>]) -> Found<T> {
    let p = plan.problem();
    let (tokens, heads, dim) = (p.batch().tokens(Side::Q), p.heads(), p.value_dim());
    let mut all = Found {
        o: vec![T::from_f64(f64::NAN); tokens * heads * dim],
        lse: vec![f32::NAN; tokens * heads],
        max_logit: vec![f32::NEG_INFINITY; heads],
    };
    for (rank, part) in parts.iter().enumerate() {
        let own = plan.local_tokens(Side::Q, rank).indices();
        scatter(&mut all.o, &part.o, &own, heads * dim);
        scatter(&mut all.lse, &part.lse, &own, heads);
        all.max_logit.iter_mut().zip(&part.max_logit).for_each(|(all, &own)| *all = all.max(own));
    }
    all
}

/// The error of o at most that of a run without pages, whose tiles are other ones, and half as much; lse and the
/// largest scores as those of other runs.
pub fn check<T: Element<Acc = f32>>(what: &str, p: &Problem, data: &Data<T>, got: &Found<T>, plain: &Found<T>) {
    let want = reference(p, data);
    let (e, e1) = (error(&got.o, &want.o), error(&plain.o, &want.o));
    assert!(e <= 1.5 * e1 + 1e-6, "{what}: RMS error of o is {e:e}, without pages {e1:e}");
    for (i, (&g, &w)) in got.lse.iter().zip(&want.lse).enumerate() {
        let close = (f64::from(g) - w).abs() <= 1e-5 * w.abs().max(1.0);
        assert!(f64::from(g) == w || close, "{what}: lse[{i}] is {g}, expected {w}");
    }
    for (h, (&g, &w)) in got.max_logit.iter().zip(&want.max_logit).enumerate() {
        assert!(g == w || (g - w).abs() <= 2e-6 * w.abs().max(1.0), "{what}: max_logit[{h}] is {g}, expected {w}");
    }
}
