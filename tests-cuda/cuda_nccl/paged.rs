// SPDX-License-Identifier: MIT OR Apache-2.0
//! New queries over caches in pages on several devices: q circulates over NCCL, and pages stay where they are.

use crate::{
    common::Data,
    group::{LONG, devices, threads},
    paged_on_device::{check, of_all, of_rank},
};
use cpattn::{Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem, Rank, plan::Circulate};
use half::bf16;

#[test]
fn rings_over_pages() {
    let Some(devices) = devices(3) else { return };
    let batch = Batch::cross(&[0, 40, 41, 43], &[0, 120, 133, 210], None).unwrap();
    let p = Problem::new(batch, 4, 2, 64, Dtype::Bf16).with_mask(Mask::sliding(90)).with_sinks_per_head(2);
    let data = Data::<bf16>::random(&p, 3);
    let plan = Plan::builder(&p)
        .mesh(Mesh::ring(3).unwrap())
        .layout(Layout::Striped { stripe: 8 })
        .options(Options::new().circulate_forward(Circulate::Queries))
        .build()
        .unwrap();
    let run = |pages| {
        let parts = threads(&devices, LONG, |end| of_rank(Rank::on_device(end)?, &plan, &data, pages));
        of_all(&plan, &parts.into_iter().map(|part| part.unwrap().unwrap()).collect::<Vec<_>>())
    };
    let plain = run(None);
    for (size, stride) in [(16, 16), (5, 7)] {
        check(&format!("pages of {size}"), &p, &data, &run(Some((size, stride))), &plain);
    }
}
