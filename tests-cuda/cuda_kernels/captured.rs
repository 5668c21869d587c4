// SPDX-License-Identifier: MIT OR Apache-2.0
//! Single calls on a stream that is being captured are refused: the ring's metadata would not last for replays.

use crate::device::{Device, ok};
use crate::repeated::{Tensors, long};
use core::ptr::null_mut;
use cpattn::Error;
use cudarc::driver::sys;

/// With lists among the parameters and lists on the device. The capture goes on, and the ring serves the next call.
#[test]
fn a_captured_stream_is_refused_and_nothing_is_spoilt() {
    let Some(device) = Device::open() else { return };
    let tensors = Tensors::new(&device);
    for lens in [vec![40, 50], long(&[40, 50])] {
        let mut kernels = device.kernels(64 << 10, 2);
        let mut forward = || tensors.try_forward(&device, &mut kernels, device.stream, &lens, |_| ());
        forward().expect("a legal call");
        let expected = tensors.take_o(&device);

        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        ok!(cuStreamBeginCapture_v2(device.stream.cast(), relaxed));
        for _ in 0..3 {
            let error = forward().expect_err("a stream that is being captured");
            let is_named =
                matches!(&error, Error::Unsupported { option, .. } if option == "a stream that is being captured");
            assert!(is_named, "{error}");
        }
        let mut graph = null_mut();
        ok!(cuStreamEndCapture(device.stream.cast(), &raw mut graph));
        let mut nodes = 0;
        ok!(cuGraphGetNodes(graph, null_mut(), &raw mut nodes));
        assert_eq!(nodes, 0, "something was captured");
        ok!(cuGraphDestroy(graph));

        // More calls than the ring has events.
        for _ in 0..3 {
            forward().expect("the ring is as it was");
            assert_eq!(tensors.take_o(&device), expected);
        }
    }
}
