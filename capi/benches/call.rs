// SPDX-License-Identifier: MIT OR Apache-2.0
//! The overhead of a call through C over the same call in Rust.
//!
//! The smallest forward (one rank, one token, one head) is run through `cpattn_forward` and through `Rank::run`, in
//! batches that take turns, so that both see the same machine. The median of the differences is the overhead: reading
//! five DLPack tensors, two handles and a struct. A query of the plan is timed by itself.
//!
//! ```text
//! cargo bench -p cpattn-capi
//! ```

use std::{hint::black_box, ptr::null_mut, time::Instant};

use cpattn::schedule::{Direction, TensorId};
use cpattn::transport::local;
use cpattn::{Batch, Dtype, Layout, Mesh, Plan, Problem, Rank, call::RawTensor, runtime::Bindings};
use cpattn_capi::*;

const CALLS: u32 = 2000;
const ROUNDS: usize = 101;
const DIM: usize = 8;

fn batch(mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..CALLS {
        call();
    }
    start.elapsed().as_nanos() as f64 / f64::from(CALLS)
}

fn median(mut list: Vec<f64>) -> f64 {
    list.sort_by(f64::total_cmp);
    list[list.len() / 2]
}

fn main() {
    let mut memory = [[0.5f32; DIM]; 5];
    let cu = [0, 1];
    let problem = Problem::new(Batch::new(&cu).unwrap(), 1, 1, DIM, Dtype::F32);
    let plan = Plan::new(&problem, Mesh::single(), Layout::Contiguous).unwrap();
    let deadline = std::time::Duration::from_secs(1);
    let mut rank = Rank::new(local::group(1, deadline).unwrap().remove(0));
    let raw: Vec<RawTensor> = memory
        .iter_mut()
        .enumerate()
        .map(|(i, m)| RawTensor::compact(m.as_mut_ptr().cast(), Dtype::F32, 1, 1, if i == 4 { 1 } else { DIM as u32 }))
        .collect();
    let names = [TensorId::Q, TensorId::K, TensorId::V, TensorId::O, TensorId::Lse];

    let mut shapes = [[1i64, 1, DIM as i64]; 5];
    let tensors: Vec<cpattn_tensor> = (0..5)
        .map(|i| cpattn_tensor {
            data: raw[i].ptr.cast(),
            device: cpattn_dl_device { device_type: 1, device_id: 0 },
            ndim: if i == 4 { 2 } else { 3 },
            dtype: cpattn_dl_dtype { code: 2, bits: 32, lanes: 1 },
            shape: shapes[i].as_mut_ptr(),
            strides: null_mut(),
            byte_offset: 0,
        })
        .collect();
    let args = cpattn_forward_args {
        struct_size: size_of::<cpattn_forward_args>(),
        q: &tensors[0],
        k: &tensors[1],
        v: &tensors[2],
        o: &tensors[3],
        lse: &tensors[4],
        // SAFETY: what else the struct has are addresses, which may be null.
        ..unsafe { core::mem::zeroed() }
    };
    let problem = cpattn_problem {
        struct_size: size_of::<cpattn_problem>(),
        cu_seqlens_q: cu.as_ptr(),
        cu_seqlens_k: null_mut(),
        q_start: null_mut(),
        documents: 1,
        heads: 1,
        kv_heads: 0,
        head_dim: DIM as u32,
        value_dim: 0,
        dtype: 2,
        kind: 0,
        window_left: i64::MAX,
        window_right: 0,
        scale: 0.0,
        softcap: 0.0,
        alibi_slopes: null_mut(),
        sinks: 0,
        alibi_rows: 0,
        slices: null_mut(),
        slice_count: 0,
        dropout: 0.0,
    };
    let options = cpattn_options {
        struct_size: size_of::<cpattn_options>(),
        world: 1,
        ulysses: 1,
        ring: 1,
        layout: 1,
        layout_parameter: 0,
        passes: 1,
        circulate: 0,
        wire: 0,
        gather: 0,
        reproducible: 0,
        pack_inputs: 0,
        ranks_per_node: 0,
        circulate_forward: 0,
        key_rows: 0,
    };
    let (mut c_plan, mut c_transport, mut c_rank) = (null_mut(), null_mut(), null_mut());
    // SAFETY: structs of their own sizes; places for results.
    unsafe {
        assert_eq!(cpattn_plan_create(&problem, &options, &mut c_plan), CPATTN_OK);
        assert_eq!(cpattn_local_group(1, 1000, &mut c_transport), CPATTN_OK);
        assert_eq!(cpattn_rank_create(c_transport, null_mut(), &mut c_rank), CPATTN_OK);
    }

    let (mut c, mut rust, mut differences, mut queries) = (vec![], vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        let through_rust = batch(|| {
            let bindings =
                names.iter().zip(&raw).fold(Bindings::default(), |b, (&name, &raw)| b.with(name, black_box(raw)));
            // SAFETY: five arrays of their own, as long as the shapes say.
            unsafe { rank.run(&plan, Direction::Forward, &bindings) }.unwrap();
        });
        let through_c = batch(|| {
            // SAFETY: live handles and the same arrays.
            let status = unsafe { cpattn_forward(c_rank, c_plan, black_box(&args)) };
            assert_eq!(status, CPATTN_OK);
        });
        queries.push(batch(|| {
            let mut info = cpattn_share { struct_size: size_of::<cpattn_share>(), ..Default::default() };
            // SAFETY: a live handle and a struct of its size.
            assert_eq!(unsafe { cpattn_plan_share(c_plan, 0, black_box(&mut info)) }, CPATTN_OK);
        }));
        rust.push(through_rust);
        c.push(through_c);
        differences.push(through_c - through_rust);
    }
    let overhead = median(differences);
    println!(
        "smallest forward: {:.0} ns through C, {:.0} ns in Rust; overhead {overhead:.0} ns",
        median(c),
        median(rust)
    );
    println!("cpattn_plan_share: {:.0} ns", median(queries));
    // SAFETY: live handles, destroyed once.
    unsafe {
        cpattn_rank_destroy(c_rank);
        cpattn_plan_destroy(c_plan);
    }
    let limit = if cfg!(debug_assertions) { 10_000.0 } else { 1000.0 };
    assert!(overhead < limit, "a call through C costs {overhead:.0} ns more, the limit is {limit} ns");
}
