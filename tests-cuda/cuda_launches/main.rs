// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a run on a device does once its plan is prepared: it sets addresses and launches.
//!
//! - `counts`: neither the host nor the device allocates, nothing is uploaded or waited for, and the driver is asked
//!   one thing about each tensor and one about the stream, whatever strides the tensors have;
//! - `bits`: plans that a rank remembers, run in turn on memory of other addresses and strides, in workspaces that are
//!   lent, give the bits that a new rank gives;
//! - `graphs`: runs that are captured and replayed with new data give the bits of runs;
//! - `beside`: calls during a capture are refused where they would end it, and leave it valid;
//! - `all_to_all`: the two all-to-alls as calls of their own, in all of these ways; `combine`: combines in graphs,
//!   `paged`: forwards over pages;
//! - `traces`: what a run records is what a rank on the CPU records, and costs no wait;
//! - `agreement`: hosts meet for first runs only, and ranks that run different things find out in later ones;
//! - `failures`: what is refused or fails leaves a rank as it was, or refused;
//! - `single_calls`: dropping what makes single calls waits for those alone, and leaves captures of others valid.
//!
//! The driver's counters and the allocator count for the whole process, so this is a program of its own, which runs its
//! parts one after the other. It needs the stand-in driver for the counts, and any driver for the rest.

mod agreement;
mod all_to_all;
mod beside;
mod bits;
#[path = "../../tests/common/all_to_all.rs"]
mod cases;
mod combine;
mod counts;
mod device;
#[path = "../../tests/common/driver.rs"]
mod driver;
mod failures;
mod graphs;
mod paged;
mod plans;
#[path = "../../tests/common/refused.rs"]
mod refused;
mod single_calls;
mod tensors;
#[allow(dead_code, reason = "each test program uses its part")]
#[path = "../../tests/common/through.rs"]
mod through;
mod traces;
mod wrapped;

use cpattn::kernel::cuda::Cuda;
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: counts::Counting = counts::Counting;

type Part = (&'static str, fn(&Arc<Cuda>));

fn main() {
    let parts: [Part; 11] = [
        ("counts", counts::run),
        ("bits", bits::run),
        ("graphs", graphs::run),
        ("beside", beside::all),
        ("all_to_all", all_to_all::run),
        ("combine", combine::run),
        ("paged", paged::run),
        ("traces", traces::run),
        ("agreement", agreement::run),
        ("failures", failures::run),
        ("single_calls", single_calls::run),
    ];
    // As the harness of other tests says it.
    if std::env::args().any(|a| a == "--list") {
        parts.iter().for_each(|(name, _)| println!("{name}: test"));
        return;
    }
    let Some(cuda) = driver::device() else { return };
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    for (name, part) in parts {
        if wanted.is_empty() || wanted.iter().any(|w| w == name) {
            let begin = std::time::Instant::now();
            part(&cuda);
            println!("cuda_launches {name}: ok, {:.1} s", begin.elapsed().as_secs_f64());
        }
    }
}
