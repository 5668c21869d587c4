// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a child process does: one rank of the case that its environment names.

use std::path::PathBuf;

use cpattn::{kernel::cuda::Cuda, transport::nccl::Nccl};

use crate::{group, work};

/// Does nothing unless it is the child of another test.
#[test]
fn one_process() {
    let Ok(case) = std::env::var("CPATTN_CASE") else { return };
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let (rank, world) = (number("CPATTN_RANK"), number("CPATTN_WORLD"));
    let folder = PathBuf::from(std::env::var("CPATTN_FOLDER").unwrap());
    let id = group::id(rank, &folder);
    let device = Cuda::shared(0).unwrap();
    if let Some(name) = case.strip_prefix("plan ") {
        let plan = work::plan(name);
        let end = Nccl::new(&id, rank, world, &device, group::LONG).unwrap();
        let part = work::forward_and_backward(end, &plan).unwrap();
        for (k, bytes) in part.iter().enumerate() {
            std::fs::write(folder.join(format!("{rank}.{k}")), bytes).unwrap();
        }
    } else {
        crate::processes::one_process(&case, &id, rank, world, &device, &folder);
    }
}
