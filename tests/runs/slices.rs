// SPDX-License-Identifier: MIT OR Apache-2.0
//! Masks made of slices: drawn ones on drawn meshes, those that people train on every form, and bits that do not depend
//! on the mesh.

use crate::common::{Data, Random, any_slopes, check_within, one_rank, reference, run};
use crate::context_parallel::{LAYOUTS, every_way, forms, mesh};
use cpattn::{Batch, Dtype, Element, Layout, Mask, Options, Plan, Problem, Side, Slice, slices};
use half::bf16;

/// Documents with up to `most` slices of every sort; one that overlaps another is left out.
fn any_batch(r: &mut Random, most: usize) -> Batch {
    let lengths = |r: &mut Random, n: usize| (0..n).map(|_| r.below(3) * r.below(20)).collect::<Vec<_>>();
    let documents = 1 + r.below(4);
    let q = lengths(r, documents);
    let batch = match r.below(3) {
        0 => {
            let k = lengths(r, documents);
            let starts: Vec<i64> = (0..documents).map(|_| r.below(30) as i64 - 10).collect();
            let cu = |l: &[usize]| {
                l.iter().fold(vec![0i32], |mut c, &n| {
                    c.push(c.last().unwrap() + n as i32);
                    c
                })
            };
            Batch::cross(&cu(&q), &cu(&k), Some(&starts)).unwrap()
        }
        _ => Batch::from_lengths(&q).unwrap(),
    };
    let mut list: Vec<Slice> = Vec::new();
    let wanted = r.below(most + 1);
    for _ in 0..4 * wanted {
        if list.len() == wanted {
            break;
        }
        // Long runs, and short ones, of which many are apart; some are empty.
        let run = |r: &mut Random, side| {
            let n = batch.tokens(side);
            let a = r.below(n + 1);
            let b = if r.below(2) == 0 { r.below(n + 1) } else { n.min(a + r.below(9)) };
            a.min(b)..a.max(b)
        };
        let mut slice = Slice::new(run(r, Side::Q), run(r, Side::K));
        if r.below(2) == 0 {
            let far = [1 << 40, -(1 << 40), r.below(40) as i64 - 15];
            slice = slice.q_start(far[r.below(12).min(2)]);
        }
        let near = r.below(40) as i64 - 20 - slice.q_start;
        slice = match r.below(6) {
            0 => slice,
            1 => slice.causal(),
            2 => slice.band(near, i64::MAX),
            3 => slice.band(i64::MIN, near),
            // Possibly no distance at all.
            4 => slice.band(near, near + r.below(12) as i64 - 1),
            _ => slice.band(1, i64::MAX),
        };
        list.push(slice);
        if batch.clone().with_slices(&list).is_err() {
            list.pop();
        }
    }
    batch.with_slices(&list).unwrap()
}

pub fn any_problem(r: &mut Random, dtype: Dtype) -> Problem {
    let batch = any_batch(r, 40);
    // Now and then MLA in its latent form.
    let latent = r.below(24) == 0;
    let kv_heads = if latent { 1 } else { 1 + r.below(3) };
    let heads = kv_heads * (1 + r.below(3));
    let (dim, value_dim) = if latent { (576, 512) } else { (1 + r.below(24), 1 + r.below(24)) };
    let mut p = Problem::new(batch, heads, kv_heads, dim, dtype).with_value_dim(value_dim);
    p = match r.below(4) {
        0 => p.with_mask(Mask::sliding(1 + r.below(20) as u32)),
        1 => p.with_mask(Mask::window(r.below(9) as u32, r.below(9) as u32)),
        _ => p,
    };
    if r.below(3) == 0 {
        p = p.with_softcap(1.0 + r.uniform());
    }
    // Distances of slices at ±2^40 leave nothing of a score in f32.
    let near = p.batch().slices().unwrap().iter().all(|s| s.q_start.abs() < 1 << 20);
    if near && r.below(3) == 0 {
        p = any_slopes(r, p);
    }
    if r.below(3) == 0 {
        p = p.with_dropout(0.9 * r.uniform());
    }
    p.with_sinks_per_head([0, 1, 0, 3, 0, 2][r.below(6)])
}

/// A mesh, a layout and a form.
pub fn any_plan(r: &mut Random, p: &Problem) -> Plan {
    let (nodes, per_node) = if r.below(3) == 0 { (2 + r.below(2), 1 + r.below(3)) } else { (1, 1 + r.below(5)) };
    let mesh = mesh(1 + r.below(p.heads()), nodes * per_node);
    let layout = [
        Layout::Contiguous,
        Layout::Zigzag,
        Layout::ZigzagPack,
        Layout::Striped { stripe: 1 + r.below(6) as u32 },
        Layout::Balanced { chunks: 1 + r.below(5) as u32 },
    ][r.below(5)];
    let option = forms()[r.below(10)];
    let option = if p.kv_heads() < option.passes { option.passes(1) } else { option };
    let option = if nodes > 1 { option.ranks_per_node(per_node * mesh.ulysses) } else { option };
    Plan::builder(p).mesh(mesh).layout(layout).options(option).build().unwrap()
}

/// A number from the environment.
pub fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |n| n.parse().unwrap_or_else(|_| panic!("{variable} is {n}")))
}

/// One drawn problem on a drawn mesh, twice: as drawn, and with NaN in the rows of k and v that no query may read.
/// Every result against f64; returns the number of slices.
fn drawn<T: Element>(seed: u64, dtype: Dtype) -> usize {
    let mut r = Random::new(seed);
    let p = any_problem(&mut r, dtype);
    let plan = any_plan(&mut r, &p);
    // Every second one has a gradient of lse; all have their largest scores compared.
    let mut data = Data::<T>::random(&p, seed);
    let (want, one) = (reference(&p, &data), one_rank(&p, &data));
    let what = format!("seed {seed}: {p:?} {} {} {:?}", plan.mesh(), plan.layout(), plan.options());
    check_within(16.0, &what, &run(&plan, &data).unwrap(), &one, &want);
    poison(&p, &mut data);
    check_within(16.0, &format!("NaN, {what}"), &run(&plan, &data).unwrap(), &one, &want);
    p.batch().slices().unwrap().len()
}

/// `CPATTN_DRAWN_SLICES` problems from seed `CPATTN_DRAWN_SEED` on: each is found again by its seed alone, with a
/// number of 1. `.ci/long` draws 20,000.
#[test]
fn any_slices_on_any_mesh() {
    let (first, count) = (number("CPATTN_DRAWN_SEED", 1), number("CPATTN_DRAWN_SLICES", 250));
    let (began, mut most, mut many) = (std::time::Instant::now(), 0, 0);
    for seed in first..first + count {
        // A problem that fails says its seed.
        let slices = if seed % 8 == 0 { drawn::<f64>(seed, Dtype::F64) } else { drawn::<f32>(seed, Dtype::F32) };
        most = most.max(slices);
        many += usize::from(slices > 12);
    }
    println!(
        "{count} problems from seed {first} on in {:.0?}: up to {most} slices, {many} of them with more than 12",
        began.elapsed()
    );
}

/// Puts NaN into the rows of k and v that no query reads.
pub fn poison<T: Element>(p: &Problem, data: &mut Data<T>) {
    let (q, k) = (p.batch().tokens(Side::Q), p.batch().tokens(Side::K));
    for key in 0..k {
        let read = |s: &Slice, q: usize| {
            let distance = (key as i64 - i64::from(s.k_begin)) - (q as i64 - i64::from(s.q_begin) + s.q_start);
            s.allows(q, key) && p.mask().allows(0, distance)
        };
        if !p.batch().slices().unwrap().iter().any(|s| (0..q).any(|q| read(s, q))) {
            let (k_row, v_row) = (p.kv_heads() * p.head_dim(), p.kv_heads() * p.value_dim());
            data.k[key * k_row..(key + 1) * k_row].fill(T::from_f64(f64::NAN));
            data.v[key * v_row..(key + 1) * v_row].fill(T::from_f64(f64::NAN));
        }
    }
}

/// The masks that people train, by name, with the documents of each.
fn trained() -> Vec<(&'static str, Batch, Vec<Slice>)> {
    let one = |n| Batch::from_lengths(&[n]).unwrap();
    vec![
        ("a shared prefix", one(96), slices::shared_prefix(40, &[17, 9, 30])),
        (
            "a prompt and answers that are documents",
            Batch::from_lengths(&[40, 17, 9, 30]).unwrap(),
            slices::shared_prefix(40, &[17, 9, 30]),
        ),
        ("a tree", one(90), slices::tree(&[None, Some(0), Some(0), Some(1), Some(1)], &[30, 20, 11, 16, 13]).unwrap()),
        ("prefix-LM", Batch::from_lengths(&[50, 31]).unwrap(), slices::prefix_lm(&[0, 50, 81], &[20, 31]).unwrap()),
        ("chunks", Batch::from_lengths(&[70, 15]).unwrap(), slices::chunks(&[0, 70, 85], 32).unwrap()),
        ("block-causal", one(75), slices::block_causal(&[0, 75], 16).unwrap()),
        ("images", one(80), slices::spans(&[0, 80], &[5..30, 44..61]).unwrap()),
        ("block diffusion", one(72), slices::block_diffusion(36, 8).unwrap()),
        ("pairs", Batch::from_lengths(&[33, 40]).unwrap(), slices::pairs(&[(0..33, 33..73), (33..73, 0..33)])),
    ]
}

fn on_every_form<T: Element>(dtype: Dtype, layouts: &[Layout]) {
    for (name, batch, slices) in trained() {
        let p = Problem::new(batch.with_slices(&slices).unwrap(), 4, 2, 16, dtype).with_value_dim(24).with_sinks(true);
        let p = p.with_alibi_slopes(&[0.02, 0.0, 0.1, 0.05]);
        every_way::<T>(name, &p, &[mesh(2, 3), mesh(4, 1), mesh(1, 4)], layouts, &forms());
    }
}

#[test]
fn trained_masks_on_every_form_f32() {
    on_every_form::<f32>(Dtype::F32, &LAYOUTS[..2]);
}

#[test]
fn trained_masks_on_every_form_bf16() {
    on_every_form::<bf16>(Dtype::Bf16, &[Layout::ZigzagPack, Layout::Striped { stripe: 5 }]);
}

/// A reproducible plan has the bits of one rank on every mesh.
#[test]
fn bits_do_not_depend_on_the_mesh() {
    let mut r = Random::new(29);
    for i in 0..40 {
        let p = any_problem(&mut r, Dtype::F32);
        let data = Data::<f32>::random(&p, i);
        let plan = |mesh, layout| {
            Plan::builder(&p).mesh(mesh).layout(layout).options(Options::new().reproducible(true)).build().unwrap()
        };
        let one = run(&plan(mesh(1, 1), Layout::Contiguous), &data).unwrap();
        for layout in
            [Layout::Contiguous, Layout::Zigzag, Layout::Striped { stripe: 3 }, Layout::Balanced { chunks: 2 }]
        {
            for (ulysses, ring) in [(1, 3), (p.heads().min(2), 2)] {
                let got = run(&plan(mesh(ulysses, ring), layout), &data).unwrap();
                assert!(got == one, "{i}: {p:?} {layout} ulysses {ulysses} ring {ring}");
            }
        }
    }
}

/// Each token of a shared prefix is sent to a rank once, however many of its answers read it.
#[test]
fn a_prompt_is_sent_once_to_each_rank() {
    use cpattn::schedule::Direction;
    let (prompt, answer, answers) = (8192, 512, 16);
    let list = slices::shared_prefix(prompt, &vec![answer; answers]);
    let batch = Batch::from_lengths(&[prompt + answer * answers]).unwrap().with_slices(&list).unwrap();
    let p = Problem::new(batch, 8, 8, 128, Dtype::Bf16);
    let plan = Plan::new(&p, mesh(1, 4), Layout::Contiguous).unwrap();
    let row = 8 * 256 * 2;
    // Ranks 0 and 1 hold the prompt, ranks 2 and 3 eight answers each, which need the prompt alone.
    let received: Vec<u64> = (0..4).map(|r| plan.costs(r, Direction::Forward).unwrap().bytes_received()).collect();
    assert_eq!(received, [0, 4096 * row, 8192 * row, 8192 * row]);
    // Less than a fifth of the pairs that sixteen copies of the prompt would have.
    let copies = answers as u128 * (prompt + answer) as u128 * (prompt + answer + 1) as u128 / 2;
    assert!(p.area() * 5 < copies, "{} of {copies}", p.area());
}
