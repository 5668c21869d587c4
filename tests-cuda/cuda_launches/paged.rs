// SPDX-License-Identifier: MIT OR Apache-2.0
//! A forward over k and v in pages in a graph: refused before the call was made once; then replays read the table anew
//! and give the bits of the call without a graph. A later run of the plan allocates nothing on the device.

use crate::{
    device::{Counters, Stream, enter},
    graphs::{begin, end},
    ok,
    refused::refused,
};
use cpattn::{
    Batch, DeviceView, DeviceViewMut, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, Result,
    kernel::cuda::{Cuda, DeviceMemory},
    runtime::{BlockTable, Keys, Pages},
    transport::peer,
};
use half::bf16;
use std::{sync::Arc, time::Duration};

const HEADS: usize = 2;
const DIM: usize = 32;
const PAGE: usize = 4;
const PAGES: usize = 12;
/// New tokens of two sequences, and their cached ones.
const NEW: [i32; 3] = [0, 1, 3];
const CACHED: [i32; 3] = [0, 18, 27];
const EACH: usize = 5;

/// Tables that name other pages; −1 is not read.
const TABLES: [[i32; 2 * EACH]; 2] = [[3, 0, 7, 1, 11, 2, 4, 5, -1, -1], [8, 9, 10, 6, 0, 7, 1, 3, -1, -1]];

struct Case {
    rank: Rank,
    plan: Plan,
    q: DeviceMemory,
    k: DeviceMemory,
    v: DeviceMemory,
    o: DeviceMemory,
    lse: DeviceMemory,
    table: DeviceMemory,
}

impl Case {
    fn new(cuda: &Arc<Cuda>) -> Self {
        let batch = Batch::cross(&NEW, &CACHED, None).unwrap();
        let plan = Plan::new(&Problem::new(batch, HEADS, HEADS, DIM, Dtype::Bf16), Mesh::single(), Layout::Contiguous);
        let mut random = fastrand::Rng::with_seed(5);
        let mut held = |rows: usize| {
            let values: Vec<bf16> = (0..rows * HEADS * DIM).map(|_| bf16::from_f64(random.f64() - 0.5)).collect();
            let memory = cuda.allocate(2 * values.len()).unwrap();
            memory.upload(bytemuck::cast_slice(&values)).unwrap();
            memory
        };
        let (q, k, v, o) = (held(3), held(PAGE * PAGES), held(PAGE * PAGES), held(3));
        let end = peer::group(&[Arc::clone(cuda)], Duration::from_secs(60)).unwrap().remove(0);
        let (lse, table) = (cuda.allocate(3 * HEADS * 4).unwrap(), cuda.allocate(2 * EACH * 4).unwrap());
        Self { rank: Rank::on_device(end).unwrap(), plan: plan.unwrap(), q, k, v, o, lse, table }
    }

    fn set(&self, table: usize) {
        self.table.upload(bytemuck::cast_slice(&TABLES[table])).unwrap();
        self.o.upload(&vec![0xff; self.o.bytes()]).unwrap();
    }

    fn read(&self) -> Vec<u16> {
        let mut out = vec![0u16; 3 * HEADS * DIM];
        self.o.download(bytemuck::cast_slice_mut(&mut out)).unwrap();
        out
    }

    fn forward(&mut self, stream: Stream) -> Result<()> {
        let at = self.rank.device();
        let pages = Pages {
            // SAFETY: the table lives as long as the case, and its entries are pages of k and v.
            block_table: unsafe { BlockTable::on_device(self.table.ptr().cast()) },
            pages_per_document: EACH,
            page_size: PAGE,
            page_stride: PAGE,
        };
        let of = |memory: &DeviceMemory, rows| {
            // SAFETY: the memory lives as long as the case, whose stream is waited for before it goes.
            unsafe { DeviceView::<bf16>::compact(at, memory.ptr().cast(), [rows, HEADS, DIM]) }
        };
        // SAFETY: as above; the entries of the tables are pages, and the stream is live.
        unsafe {
            let tensors = Forward::new(
                of(&self.q, 3)?,
                of(&self.k, PAGE * PAGES)?,
                of(&self.v, PAGE * PAGES)?,
                DeviceViewMut::compact(at, self.o.ptr().cast(), [3, HEADS, DIM])?,
                DeviceViewMut::compact(at, self.lse.ptr().cast(), [3, HEADS, 1])?,
            );
            self.rank.forward(&self.plan, tensors.keys(Keys::Pages(pages)).on(stream.raw()))
        }
    }
}

pub fn run(cuda: &Arc<Cuda>) {
    enter();
    let (mut case, stream) = (Case::new(cuda), Stream::new());
    case.rank.prepare(&case.plan.clone(), cpattn::schedule::Direction::Forward).unwrap();
    begin(stream);
    refused(case.forward(stream), &["not prepared for k and v in pages", "make the same call once"]);
    ok!(cuGraphExecDestroy(end(stream)));
    let want = [0, 1].map(|table| {
        case.set(table);
        case.forward(stream).unwrap();
        stream.wait();
        case.read()
    });
    assert!(want[0] != want[1], "the tables name other pages");
    if let Some(counters) = Counters::find() {
        counters.reset();
        case.forward(stream).unwrap();
        assert_eq!(counters.get("launches"), 1);
        for what in ["allocations", "host-to-device copies", "host waits"] {
            assert_eq!(counters.get(what), 0, "{what} in a run of a prepared plan");
        }
        stream.wait();
    }
    begin(stream);
    case.forward(stream).unwrap();
    let graph = end(stream);
    for table in [1, 0, 1] {
        case.set(table);
        ok!(cuGraphLaunch(graph, stream.0));
        stream.wait();
        assert!(case.read() == want[table], "a replay over table {table}");
    }
    ok!(cuGraphExecDestroy(graph));
    case.rank.synchronize().unwrap();
}
