// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bad input of runs: a typed error that names the argument and both values, and nothing written.

use crate::common::{
    Data,
    own::{Own, compact, gaps},
};
use crate::refused::refused;
use cpattn::{
    Batch, Dtype, Error, Layout, Mask, Mesh, Options, Plan, Problem, Rank, Result, Side,
    call::RawTensor,
    plan::{Circulate, Gather, Wire},
    runtime::Bindings,
    schedule::{Direction, Schedule, TensorId},
    transport::local,
};
use std::time::Duration;

pub fn batch() -> Batch {
    Batch::from_lengths(&[7, 4]).unwrap()
}

pub fn problem() -> Problem {
    Problem::new(batch(), 6, 3, 8, Dtype::F32)
}

pub fn ring(world: usize) -> Mesh {
    Mesh::ring(world).unwrap()
}

/// One rank with a plan, and its tensors by name.
struct Bench {
    rank: Rank,
    plan: Plan,
    own: Own<f32>,
}

impl Bench {
    fn new(problem: &Problem, options: Options) -> Self {
        let plan =
            Plan::builder(problem).mesh(Mesh::single()).layout(Layout::Contiguous).options(options).build().unwrap();
        let own = Own::new(&plan, &Data::random(problem, 1), 0, compact);
        Self { rank: Rank::new(local::group(1, Duration::from_secs(9)).unwrap().remove(0)), plan, own }
    }

    fn tensors(&mut self, direction: Direction) -> Vec<(TensorId, RawTensor)> {
        use TensorId::{DO, Dk, Dq, Dv, K, Lse, O, Q, V};
        let own = &mut self.own;
        let (o, lse) = (own.o.view_mut().raw(), own.lse.view_mut().raw());
        let mut list =
            vec![(Q, own.q.view().raw()), (K, own.k.view().raw()), (V, own.v.view().raw()), (O, o), (Lse, lse)];
        if direction == Direction::Backward {
            list.push((DO, own.d_o.view().raw()));
            list.extend(
                [(Dq, &mut own.dq), (Dk, &mut own.dk), (Dv, &mut own.dv)].map(|(t, s)| (t, s.view_mut().raw())),
            );
        }
        list
    }

    fn run(&mut self, direction: Direction, list: &[(TensorId, RawTensor)]) -> Result<()> {
        let bindings = list.iter().fold(Bindings::default(), |b, &(t, raw)| b.with(t, raw));
        // SAFETY: every call of these tests is to be refused before it touches memory; tensors that are accepted are
        // those of `own`.
        unsafe { self.rank.run(&self.plan, direction, &bindings) }
    }
}

#[test]
fn every_tensor_of_both_directions() {
    for direction in [Direction::Forward, Direction::Backward] {
        let mut bench = Bench::new(&problem(), Options::new());
        let good = bench.tensors(direction);
        for (i, &(tensor, raw)) in good.iter().enumerate() {
            let name = tensor.name();
            let mut with = |change: &dyn Fn(&mut RawTensor), words: &[&str]| {
                let mut list = good.clone();
                change(&mut list[i].1);
                refused(bench.run(direction, &list), words);
                assert!(bench.own.is_untouched(), "{name}");
            };
            let part = |what: &str, found: u64, expected: u64| format!("{name}.{what} is {found}, expected {expected}");
            let (t, h, d) = (raw.tokens, u64::from(raw.heads), u64::from(raw.dim));
            with(&|r| r.dtype = Dtype::F16, &[&format!("{name}.dtype is f16, expected f32"), "convert"]);
            with(&|r| r.dtype = Dtype::F64, &[&format!("{name}.dtype is f64, expected f32")]);
            with(&|r| r.tokens += 1, &[&part("tokens", t + 1, t), "its shard of the plan", "cu_seqlens"]);
            if raw.dim > 1 {
                // As PyTorch's scaled_dot_product_attention takes it.
                with(&|r| (r.tokens, r.heads) = (h, t as u32), &[&part("tokens", h, t), "are [tokens, heads, dim]"]);
            }
            with(&|r| r.tokens = 0, &[&part("tokens", 0, t)]);
            with(&|r| r.heads += 1, &[&part("heads", h + 1, h)]);
            with(&|r| r.dim += 1, &[&part("head_dim", d + 1, d)]);
            with(&|r| r.ptr = std::ptr::null_mut(), &[&format!("{name}.ptr is null")]);
            with(&|r| r.ptr = r.ptr.wrapping_add(2), &[&format!("{name}.ptr"), "multiple of 4"]);
            with(&|r| r.token_stride = i64::MAX / 2, &[&format!("{name}.token_stride")]);
            with(&|r| *r = RawTensor::NONE, &[&format!("{name} is not given")]);
        }
        // What is written may share nothing with anything, itself included.
        let written: &[TensorId] = match direction {
            Direction::Forward => &[TensorId::O, TensorId::Lse],
            Direction::Backward => &[TensorId::Dq, TensorId::Dk, TensorId::Dv],
        };
        for (i, &(tensor, _)) in good.iter().enumerate().filter(|(_, (t, _))| written.contains(t)) {
            let mut list = good.clone();
            list[i].1.token_stride = 0;
            refused(bench.run(direction, &list), &[tensor.name()]);
            for &(other, raw) in good.iter().filter(|(t, _)| *t != tensor) {
                let last = raw.tokens as usize * raw.heads as usize * raw.dim as usize - 1;
                // All of the other, or its last element only; what lies behind that in memory may be named instead.
                for (first, name) in [(0, other.name()), (last, "")] {
                    let mut list = good.clone();
                    list[i].1.ptr = raw.ptr.wrapping_add(first * 4);
                    // If it is longer than the other, it may overlap a third one too, which may be named instead.
                    let size = |r: &RawTensor| r.tokens * u64::from(r.heads) * u64::from(r.dim);
                    let name = if size(&list[i].1) > size(&raw) { "" } else { name };
                    refused(bench.run(direction, &list), &[tensor.name(), "overlaps", name]);
                    assert!(bench.own.is_untouched(), "{tensor:?} over {other:?}");
                }
            }
        }
        // Inputs may share; and after all those refusals the same rank still runs.
        if direction == Direction::Forward {
            bench.run(direction, &good).unwrap();
            assert!(!bench.own.is_untouched());
        }
    }
}

#[test]
fn sinks_given_and_planned() {
    let plain = problem();
    let mut bench = Bench::new(&plain, Options::new());
    bench.own.sinks = Some(vec![0.0; 6]);
    refused(
        bench.own.forward(&mut bench.rank, &bench.plan),
        &["sinks is given", "no sinks", "plan a problem that has sinks"],
    );
    bench.own.sinks = None;
    bench.own.dsinks = Some(vec![0.0; 6]);
    refused(bench.own.backward(&mut bench.rank, &bench.plan), &["dsinks is given", "no sinks"]);
    let mut bench = Bench::new(&plain.with_sinks(true), Options::new());
    let sinks = bench.own.sinks.take();
    refused(bench.own.forward(&mut bench.rank, &bench.plan), &["sinks is not given", "6 numbers of f32", "has sinks"]);
    bench.own.sinks = Some(vec![0.0; 5]);
    refused(bench.own.forward(&mut bench.rank, &bench.plan), &["sinks.heads is 5", "expected 6"]);
    bench.own.sinks = sinks;
    let dsinks = bench.own.dsinks.take();
    refused(
        bench.own.backward(&mut bench.rank, &bench.plan),
        &["dsinks is not given", "6 numbers of f32", "has sinks"],
    );
    bench.own.dsinks = Some(vec![0.0; 7]);
    refused(bench.own.backward(&mut bench.rank, &bench.plan), &["dsinks.heads is 7", "expected 6"]);
    bench.own.dsinks = dsinks;
    assert!(bench.own.is_untouched());
    // Without types, too.
    let mut bare = Bench::new(&problem(), Options::new());
    let mut list = bare.tensors(Direction::Forward);
    list.push((TensorId::Sinks, list[0].1));
    refused(bare.run(Direction::Forward, &list), &["sinks is given"]);
}

/// Runs on threads; every rank's own result.
fn on_ranks<R: Send>(world: usize, each: impl Fn(Rank) -> R + Sync) -> Vec<R> {
    local::run(world, Duration::from_secs(30), |end| Ok(each(Rank::new(end)))).unwrap()
}

#[test]
fn traces_that_no_memory_holds() {
    let found = on_ranks(1, |mut rank| rank.trace().record(std::time::Instant::now(), usize::MAX));
    found.into_iter().for_each(|result| refused(result, &["capacity", "18446744073709551615", "16777216"]));
}

/// The parts of a description that the other one lacks, of both.
fn differing<'a>(one: &'a str, other: &'a str) -> Vec<&'a str> {
    let [one, other] = [one, other].map(|words| words.split(", ").collect::<Vec<_>>());
    let only = |a: &[&'a str], b: &[&'a str]| a.iter().filter(|part| !b.contains(part)).copied().collect::<Vec<_>>();
    [only(&one, &other), only(&other, &one)].concat()
}

/// Every way in which one rank may have planned something else: found on every rank, nothing written, and the ranks go
/// on with equal plans afterwards.
#[test]
fn ranks_that_planned_different_things() {
    let base = problem();
    let o = Options::new;
    let plan = |p: &Problem, mesh, layout, options| {
        Plan::builder(p).mesh(mesh).layout(layout).options(options).build().unwrap()
    };
    let (mesh, layout) = (ring(3), Layout::Striped { stripe: 2 });
    let of = |p: Problem| plan(&p, mesh, layout, o());
    let shifted = Batch::cross(&[0, 7, 11], &[0, 7, 11], Some(&[0, 1])).unwrap();
    let longer = Batch::cross(&[0, 7, 11], &[0, 7, 12], None).unwrap();
    let with = |b: Batch| Problem::new(b, 6, 3, 8, Dtype::F32);
    let others = [
        ("documents", of(with(Batch::from_lengths(&[4, 7]).unwrap()))),
        ("k's documents", of(with(longer))),
        ("q_start", of(with(shifted))),
        ("heads", of(Problem::new(batch(), 3, 3, 8, Dtype::F32))),
        ("kv_heads", of(Problem::new(batch(), 6, 6, 8, Dtype::F32))),
        ("head_dim", of(Problem::new(batch(), 6, 3, 4, Dtype::F32))),
        ("value_dim", of(base.clone().with_value_dim(4))),
        ("mask", of(base.clone().with_mask(Mask::full()))),
        ("window", of(base.clone().with_mask(Mask::sliding(3)))),
        ("scale", of(base.clone().with_scale(0.5))),
        ("softcap", of(base.clone().with_softcap(9.0))),
        ("alibi_slopes", of(base.clone().with_alibi_slopes(&[0.5; 6]))),
        ("alibi_slopes of each document", of(base.clone().with_alibi_slopes_per_document(&[0.5; 12]))),
        ("sinks", of(base.clone().with_sinks(true))),
        ("stripe", plan(&base, mesh, Layout::Striped { stripe: 3 }, o())),
        ("layout", plan(&base, mesh, Layout::Zigzag, o())),
        ("mesh", plan(&base, Mesh::ulysses(3).unwrap(), layout, o())),
        ("gather", plan(&base, mesh, layout, o().gather(true))),
        ("gather together", plan(&base, mesh, layout, o().gather(Gather::Together))),
        ("passes", plan(&base, mesh, layout, o().passes(2))),
        ("circulate", plan(&base, mesh, layout, o().circulate(Circulate::Queries))),
        ("circulate_forward", plan(&base, mesh, layout, o().circulate_forward(Circulate::Queries))),
        ("wire", plan(&base, mesh, layout, o().wire(Wire::Bf16))),
        ("reproducible", plan(&base, mesh, layout, o().reproducible(true))),
    ];
    let ours = of(base.clone());
    let half = Problem::new(batch(), 6, 3, 8, Dtype::Bf16);
    assert_ne!(ours.fingerprint(), plan(&half, mesh, layout, o()).fingerprint(), "dtype");
    for (what, other) in &others {
        for odd in 0..3 {
            let words = on_ranks(3, |mut rank| {
                let r = rank.rank();
                let plan = if r == odd { other } else { &ours };
                let data = Data::<f32>::random(plan.problem(), 5);
                let mut own = Own::new(plan, &data, r, compact);
                let error = own.forward(&mut rank, plan).unwrap_err();
                let text = error.to_string();
                let Error::Disagreement { rank: reporter, peer, ours: mine, theirs, what: words, .. } = error else {
                    panic!("{text}")
                };
                // The first rank whose plan differs.
                let expected = if r != odd { odd } else { usize::from(odd == 0) };
                assert_eq!((reporter, peer), (r, expected), "{what}: {text}");
                assert!(text.contains("the forward of") && text.contains(&plan.mesh().to_string()), "{what}: {text}");
                assert!(mine != theirs && own.is_untouched(), "{what}");
                // Equal plans run on the same ranks.
                let data = Data::<f32>::random(ours.problem(), 5);
                let mut own = Own::new(&ours, &data, r, compact);
                own.forward(&mut rank, &ours).unwrap();
                own.backward(&mut rank, &ours).unwrap();
                words
            });
            // The messages name the part that differs, and few other parts differ.
            let part = match *what {
                "k's documents" | "q_start" => "documents with fingerprint ",
                "window" => "mask ",
                "alibi_slopes" => "ALiBi slopes ",
                "alibi_slopes of each document" => "ALiBi slopes per document ",
                "stripe" | "layout" => "striped",
                "mesh" => "ulysses ",
                "gather together" => "gather ",
                what => what,
            };
            let differ = differing(&words[odd], &words[(odd + 1) % 3]);
            assert!(differ.iter().any(|p| p.starts_with(part)) && differ.len() <= 6, "{what}: {differ:?}");
        }
    }
    // One rank already runs the backward.
    let data = Data::<f32>::random(&base, 5);
    let errors = on_ranks(3, |mut rank| {
        let mut own = Own::new(&ours, &data, rank.rank(), compact);
        let back = rank.rank() == 1;
        let result = if back { own.backward(&mut rank, &ours) } else { own.forward(&mut rank, &ours) };
        assert!(own.is_untouched());
        result
    });
    assert!(errors.iter().all(|e| matches!(e, Err(Error::Disagreement { .. }))), "{errors:?}");
}

/// What is sent as it lies must lie end to end, unless the plan packs it; which tensors these are depends on the side
/// that travels.
#[test]
fn strides_of_what_is_sent() {
    let data = Data::<f32>::random(&problem(), 5);
    let o = Options::new;
    for (options, mesh, forward, backward) in [
        (o().circulate(Circulate::Keys), ring(3), Some("k.token_stride"), Some("k.token_stride")),
        (o().circulate(Circulate::Queries), ring(3), Some("k.token_stride"), Some("q.token_stride")),
        (
            o().circulate(Circulate::Keys).circulate_forward(Circulate::Queries),
            ring(3),
            Some("q.token_stride"),
            Some("k.token_stride"),
        ),
        (o(), Mesh::ulysses(3).unwrap(), None, None),
    ] {
        let plan = |pack| {
            Plan::builder(&problem())
                .mesh(mesh)
                .layout(Layout::Zigzag)
                .options(options.pack_inputs(pack))
                .build()
                .unwrap()
        };
        let run = |pack: bool, direction: Direction| {
            let plan = plan(pack);
            on_ranks(3, |mut rank| {
                let mut own = Own::new(&plan, &data, rank.rank(), gaps);
                let result = match direction {
                    Direction::Forward => own.forward(&mut rank, &plan),
                    Direction::Backward => own.backward(&mut rank, &plan),
                };
                assert!(result.is_ok() || own.is_untouched());
                result
            })
        };
        for (direction, words) in [(Direction::Forward, forward), (Direction::Backward, backward)] {
            for result in run(false, direction) {
                match words {
                    Some(words) => refused(result, &[words, "sent as it lies", "pack_inputs"]),
                    None => result.unwrap(),
                }
            }
            run(true, direction).into_iter().for_each(|r| r.unwrap());
        }
    }
}

/// One new token over a cache: q is sent though no option says so. It may have strides, as where it stays.
#[test]
fn strides_of_a_q_that_is_sent_by_default() {
    let problem = Problem::new(Batch::cross(&[0, 1], &[0, 40], None).unwrap(), 6, 3, 8, Dtype::F32);
    let data = Data::<f32>::random(&problem, 5);
    let run = |options| {
        let plan = Plan::builder(&problem)
            .mesh(ring(3))
            .layout(Layout::Striped { stripe: 2 })
            .options(options)
            .build()
            .unwrap();
        on_ranks(3, |mut rank| {
            let mut own = Own::new(&plan, &data, rank.rank(), compact);
            own.q = Own::new(&plan, &data, rank.rank(), gaps).q;
            own.forward(&mut rank, &plan).map(|()| own.results())
        })
    };
    let o = Options::new;
    let asked = o().circulate_forward(Circulate::Queries);
    let results = |options| -> Vec<_> { run(options).into_iter().map(|r| r.unwrap()).collect() };
    assert_eq!(results(o()), results(asked.pack_inputs(true)));
    results(o().circulate_forward(Circulate::Keys));
    refused(run(asked).remove(0).map(drop), &["q.token_stride", "sent as it lies", "pack_inputs"]);
}

#[test]
fn margins_where_there_are_no_multiprocessors() {
    let mut rank = Rank::new(local::group(1, Duration::from_secs(9)).unwrap().remove(0));
    refused(rank.set_sm_margin(2), &["multiprocessors is 2", "0 on the CPU"]);
    rank.set_sm_margin(0).unwrap();
}

#[test]
fn workspaces() {
    let plan = Plan::new(&problem(), ring(2), Layout::Zigzag).unwrap();
    let mut rank = Rank::new(local::group(2, Duration::from_secs(9)).unwrap().remove(0));
    let needed = rank.workspace().bytes(&plan, Direction::Forward).unwrap();
    let mut memory = vec![0u8; needed as usize + 2 * Schedule::ALIGNMENT as usize];
    let start = memory.as_mut_ptr().wrapping_add(memory.as_ptr().align_offset(Schedule::ALIGNMENT as usize));
    // SAFETY: nothing runs on what is lent here, and `memory` outlives the rank's use of it.
    refused(unsafe { rank.workspace().lend(start.wrapping_add(8), 8) }, &["workspace", "multiple of 256"]);
    // SAFETY: as above.
    unsafe { rank.workspace().lend(start, needed as usize - 1) }.unwrap();
    let mut own = Own::new(&plan, &Data::<f32>::random(&problem(), 5), 0, compact);
    let words = [format!("workspace is {} bytes", needed - 1), format!("at least {needed} bytes")];
    let words = [&*words[0], &*words[1], "for its workspace, and lend the largest"];
    refused(own.forward(&mut rank, &plan), &words);
    refused(rank.prepare(&plan, Direction::Forward), &words);
    assert!(own.is_untouched() && memory.iter().all(|&b| b == 0));

    // A tensor in the part of the workspace that the run uses would be lost, or read as something else.
    let alone = Plan::new(&problem(), Mesh::single(), Layout::Contiguous).unwrap();
    let mut rank = Rank::new(local::group(1, Duration::from_secs(9)).unwrap().remove(0));
    let needed = rank.workspace().bytes(&alone, Direction::Backward).unwrap() as usize;
    let mut memory = vec![0f32; (needed + Schedule::ALIGNMENT as usize) / 4 + 11 * 6 * 8];
    let start = memory.as_mut_ptr().cast::<u8>();
    let start = start.wrapping_add(start.align_offset(Schedule::ALIGNMENT as usize));
    // SAFETY: `memory` outlives the rank; where a tensor lies in it, the run is refused or does not work there.
    unsafe { rank.workspace().lend(start, needed) }.unwrap();
    let mut buffers = vec![vec![0f32; 11 * 6 * 8]; 9];
    let mut tensor =
        |i: usize, heads, dim| RawTensor::compact(buffers[i].as_mut_ptr().cast(), Dtype::F32, 11, heads, dim);
    let good = Bindings::default()
        .with(TensorId::Q, tensor(0, 6, 8))
        .with(TensorId::K, tensor(1, 3, 8))
        .with(TensorId::V, tensor(2, 3, 8))
        .with(TensorId::O, tensor(3, 6, 8))
        .with(TensorId::DO, tensor(4, 6, 8))
        .with(TensorId::Lse, tensor(5, 6, 1))
        .with(TensorId::Dq, tensor(6, 6, 8))
        .with(TensorId::Dk, tensor(7, 3, 8))
        .with(TensorId::Dv, tensor(8, 3, 8));
    for (tensor, name) in [(TensorId::DO, "d_o"), (TensorId::Dq, "dq")] {
        let inside = good.with(tensor, RawTensor { ptr: start.wrapping_add(needed - 4), ..*good.get(tensor) });
        let words = ["workspace", "overlaps", name];
        // SAFETY: refused, or all of it is valid memory of this thread's.
        refused(unsafe { rank.run(&alone, Direction::Backward, &inside) }, &words);
        let behind = good.with(tensor, RawTensor { ptr: start.wrapping_add(needed), ..*good.get(tensor) });
        // SAFETY: as above.
        unsafe { rank.run(&alone, Direction::Backward, &behind) }.unwrap();
    }
}

#[test]
fn a_tensor_that_is_not_given_is_named() {
    let mut bench = Bench::new(&problem(), Options::new());
    // SAFETY: refused before anything is touched.
    let result = unsafe { bench.rank.run(&bench.plan, Direction::Forward, &Bindings::default()) };
    refused(result, &["q is not given, expected f32 of shape [11, 6, 8]", "tensor of 0 rows"]);
}

#[test]
fn tensors_of_the_wrong_length_say_what_a_rank_brings() {
    // cu_seqlens that end elsewhere than the tensors: 11 tokens planned, 12 brought.
    let mut bench = Bench::new(&problem(), Options::new());
    let longer = Plan::new(
        &Problem::new(Batch::from_lengths(&[7, 5]).unwrap(), 6, 3, 8, Dtype::F32),
        Mesh::single(),
        Layout::Contiguous,
    );
    let longer = longer.unwrap();
    let mut own = Own::new(&longer, &Data::<f32>::random(longer.problem(), 1), 0, compact);
    refused(
        own.forward(&mut bench.rank, &bench.plan),
        &["q.tokens is 12, expected 11", "cu_seqlens", "its shard of the plan"],
    );
    own.q = bench.own.q.clone();
    refused(own.forward(&mut bench.rank, &bench.plan), &["k.tokens is 12, expected 11"]);
    refused(
        bench.plan.local_tokens(Side::Q, 0).shard(&[0f32; 12], 1),
        &["full is of length 12, expected 11: 1 for each of 11 tokens"],
    );
}
