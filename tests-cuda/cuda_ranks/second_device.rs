// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks on two devices: the bits of one, direct copies where the driver can make them, and refusals of what belongs to
//! the other device.

use std::{sync::Arc, thread, time::Duration};

use cpattn::{
    Batch, Dtype, Layout, Mesh, Plan, Problem, Rank,
    call::{Block, RawTensor, Transform},
    kernel::cuda::{Cuda, DeviceMemory, StreamKernels},
    schedule::Direction,
    transport::{DeviceTransport, peer},
};

use crate::{
    driver::{device, emulated_count},
    refused::refused,
    tensors, wait,
};

/// Device 0 and another, where there are two.
fn two_devices() -> Option<[Arc<Cuda>; 2]> {
    let first = device()?;
    match Cuda::new(1) {
        Ok(second) => Some([first, Arc::new(second)]),
        Err(e) => {
            eprintln!("not run: {e}");
            None
        }
    }
}

/// A stream of another device is none that a call here can be put on.
#[test]
fn streams_of_another_device_are_refused() {
    let Some([first, second]) = two_devices() else { return };
    let memory = first.allocate(64).unwrap();
    let fill =
        [Block { dst: RawTensor::compact(memory.ptr(), Dtype::F32, 1, 1, 16), sources_begin: 0, sources_end: 0 }];
    let call = Transform { blocks: &fill, sources: &[] };
    let elsewhere = peer::group(&[second], Duration::from_secs(60)).unwrap();
    let mut kernels = StreamKernels::new(Arc::clone(&first)).unwrap();
    // SAFETY: refused before anything is launched.
    refused(unsafe { kernels.transform(&call, elsewhere[0].stream()) }, &["stream is ", "expected one of device 0"]);
    // SAFETY: the memory lives until the call was waited for.
    unsafe { kernels.transform(&call, std::ptr::null_mut()) }.unwrap();
    kernels.wait().unwrap();
}

/// Whether the machine lets device 0 use memory of device 1.
fn can_access() -> bool {
    let mut can = -1;
    // SAFETY: the driver is initialised and has two devices; a pointer to a local.
    let code = unsafe { cudarc::driver::sys::cuDeviceCanAccessPeer(&raw mut can, 0, 1) };
    assert_eq!(code as u32, 0);
    can != 0
}

/// Copies between devices are direct where the driver can make them so, and the transport knows.
#[test]
fn access_between_devices() {
    let Some([first, second]) = two_devices() else { return };
    let ends = peer::group(&[Arc::clone(&first), second, first], Duration::from_secs(60)).unwrap();
    let direct: Vec<bool> = (0..3).map(|peer| ends[0].is_direct(peer)).collect();
    assert_eq!(direct, [true, can_access(), true]);
    // Made again, with access that is there already.
    let devices = [Arc::clone(ends[0].device()), Arc::clone(ends[1].device())];
    let again = peer::group(&devices, Duration::from_secs(60)).unwrap();
    assert_eq!(again[1].is_direct(0), can_access());
}

/// The same bits, wherever the ranks are.
#[test]
fn ranks_on_two_devices() {
    let Some([first, second]) = two_devices() else { return };
    let p = Problem::new(Batch::from_lengths(&[9, 0, 23]).unwrap(), 2, 2, 16, Dtype::F16);
    for (ulysses, ring) in [(1, 2), (2, 1)] {
        let plan = Plan::new(&p, Mesh { replicas: 1, ring, ulysses }.in_world(2).unwrap(), Layout::Zigzag).unwrap();
        let results = |devices: [&Arc<Cuda>; 2]| -> Vec<Vec<Vec<u8>>> {
            let ends = peer::group(&devices.map(Arc::clone), Duration::from_secs(60)).unwrap();
            let run = |end: peer::Peer| {
                let mut rank = Rank::on_device(end).unwrap();
                let cuda = Arc::clone(rank.cuda().unwrap());
                let (tensors, memory) = tensors(&cuda, &plan, rank.rank());
                for (i, m) in memory.iter().enumerate() {
                    // Halves of moderate size, for the inputs of both directions; the rest is overwritten.
                    let values: Vec<u8> = (0..m.bytes()).map(|b| [(b * 7 + i) as u8, 0x34][b % 2]).collect();
                    m.upload(&values).unwrap();
                }
                for direction in [Direction::Forward, Direction::Backward] {
                    // SAFETY: the tensors live until the end; the default stream.
                    unsafe { rank.run(&plan, direction, &tensors) }.unwrap();
                }
                wait(&cuda);
                let read = |m: &DeviceMemory| {
                    let mut bytes = vec![0; m.bytes()];
                    m.download(&mut bytes).unwrap();
                    bytes
                };
                memory.iter().map(read).collect()
            };
            thread::scope(|scope| {
                let threads: Vec<_> = ends
                    .into_iter()
                    .map(|end| {
                        let run = &run;
                        scope.spawn(move || run(end))
                    })
                    .collect();
                threads.into_iter().map(|t| t.join().unwrap()).collect()
            })
        };
        let (together, apart) = (results([&first, &first]), results([&first, &second]));
        assert!(together == apart, "ulysses {ulysses} × ring {ring}");
        let kinds = [c"peer copies", c"staged copies"].map(emulated_count);
        if let [Some(direct), Some(staged)] = kinds {
            let expected = (can_access(), !can_access());
            assert_eq!((direct > 0, staged > 0), expected, "{direct} direct copies, {staged} staged");
        }
        assert!(together[0][6].iter().any(|&b| b != 0), "dq is something");
    }
}
