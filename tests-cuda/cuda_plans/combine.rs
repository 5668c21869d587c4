// SPDX-License-Identifier: MIT OR Apache-2.0
//! Partial results merged over the ring on a device: against f64, with strides, sinks, rows without keys and NaN where
//! nothing must be read; and what is refused.

use super::{Held, device};
use crate::combined_on_device::of_rank;
use crate::common::combined::{Parts, Shares, parts, right};
use cpattn::{
    Batch, Dtype, Element, Layout, Mesh, Plan, Problem, Rank, Result,
    call::RawTensor,
    kernel::cuda::Cuda,
    runtime::Bindings,
    schedule::{Combine, CombineTo, TensorId},
    transport::peer,
};
use half::{bf16, f16};
use std::{sync::Arc, time::Duration};

/// One run, a thread for each rank, all on one device.
fn run<P: Element, T: Element<Acc = P::Acc>>(
    cuda: &Arc<Cuda>,
    plan: &Plan,
    to: CombineTo,
    parts: &Parts<P>,
) -> Result<Shares<T>> {
    let peers = peer::group(&vec![Arc::clone(cuda); plan.mesh().world()], Duration::from_secs(120))?;
    std::thread::scope(|scope| {
        let one = |peer| of_rank(Rank::on_device(peer)?, plan, to, parts);
        let threads: Vec<_> = peers.into_iter().map(|peer| scope.spawn(move || one(peer))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn on_device<P: Element<Acc = f32>, T: Element<Acc = f32>>(dtype: Dtype, epsilon: f64, meshes: &[(usize, usize)]) {
    let Some(cuda) = device() else { return };
    right::<P, T>(dtype, [epsilon, 4e-7], meshes, |plan, to, parts| run(&cuda, plan, to, parts).unwrap());
}

#[test]
fn parts_of_f32() {
    on_device::<f32, f32>(Dtype::F32, 3e-6, &[(1, 1), (1, 2), (1, 6), (2, 3)]);
}

#[test]
fn parts_of_halves() {
    on_device::<bf16, bf16>(Dtype::Bf16, 5e-3, &[(1, 3)]);
    on_device::<f32, f16>(Dtype::F16, 6e-4, &[(2, 2)]);
    on_device::<f16, f32>(Dtype::F32, 3e-6, &[(1, 4)]);
}

#[test]
fn what_is_refused() {
    let Some(cuda) = device() else { return };
    let of = |dtype, dim| {
        let p = Problem::new(Batch::from_lengths(&[4]).unwrap(), 2, 2, 16, dtype).with_value_dim(dim);
        Plan::new(&p, Mesh::single(), Layout::Contiguous).unwrap()
    };
    let plan = of(Dtype::F64, 16);
    let error = run::<f64, f64>(&cuda, &plan, CombineTo::All, &parts(&plan, 1)).unwrap_err().to_string();
    assert!(error.contains("a combine of f64 on a device") && error.contains("use a rank on the CPU"), "{error}");
    let plan = of(Dtype::F32, 20);
    let error = run::<f32, f32>(&cuda, &plan, CombineTo::All, &parts(&plan, 1)).unwrap_err().to_string();
    assert!(error.contains("value_dim 20") && error.contains("multiples of 8"), "{error}");

    // Rows of o that begin at no multiple of 16 bytes, of any of the two.
    let plan = of(Dtype::F32, 16);
    let refused = |row: i64, written: i64| {
        let mut rank =
            Rank::on_device(peer::group(&[Arc::clone(&cuda)], Duration::from_secs(9)).unwrap().remove(0)).unwrap();
        let (part, o) = (Held::nan::<f32>(&cuda, 4, 2, 32), Held::nan::<f32>(&cuda, 4, 2, 32));
        let lse = [Held::nan::<f32>(&cuda, 4, 2, 1), Held::nan::<f32>(&cuda, 4, 2, 1)];
        let rows = |held: &Held, row| RawTensor { dim: 16, token_stride: row, head_stride: 16, ..held.1 };
        let bindings = Bindings::default()
            .with(TensorId::PartialO, rows(&part, row))
            .with(TensorId::PartialLse, lse[0].1)
            .with(TensorId::O, rows(&o, written))
            .with(TensorId::Lse, lse[1].1);
        let combine = Combine { to: CombineTo::All, partial: Dtype::F32 };
        // SAFETY: the memory lives until the rank is gone, and nothing else uses it.
        let outcome = unsafe { rank.run(&plan, combine, &bindings) };
        rank.synchronize().unwrap();
        outcome.err().map(|error| error.to_string())
    };
    assert_eq!(refused(36, 40), None);
    for (row, written, name) in [(33, 40, "partial_o"), (36, 34, "o")] {
        let error = refused(row, written).unwrap();
        assert!(error.starts_with(&format!("{name}.")) && error.contains("16"), "{error}");
    }
}
