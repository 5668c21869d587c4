// SPDX-License-Identifier: MIT OR Apache-2.0
//! Streams, events, modules and launches.

use super::{N, PTX, Raw, event, passes, reports, stream};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg, result, sys};
use cudarc::nvrtc::Ptx;

pub fn case(name: &str, cx: &std::sync::Arc<CudaContext>) -> bool {
    match name {
        "safe" => safe(cx),
        "events" => two_streams(true),
        "missing event" => two_streams(false),
        "late" => late(),
        "elapsed" => elapsed(),
        "default stream" => default_stream(),
        "sticky" => sticky(),
        "bad modules" => bad_modules(),
        "limits" => limits(),
        "clusters" => clusters(),
        "unloaded" => unloaded(),
        _ => return false,
    }
    true
}

fn safe(cx: &std::sync::Arc<CudaContext>) {
    let stream = cx.default_stream();
    let module = cx.load_module(Ptx::from_src(PTX)).unwrap();
    let f = module.load_function("add_one").unwrap();
    let n = 1000u32;
    let mut x = stream.clone_htod(&(0..n).collect::<Vec<u32>>()).unwrap();
    let mut launch = stream.launch_builder(&f);
    launch.arg(&mut x).arg(&n);
    // SAFETY: the arguments are those of the kernel.
    unsafe { launch.launch(LaunchConfig::for_num_elems(n)) }.unwrap();
    assert_eq!(stream.clone_dtoh(&x).unwrap(), (1..=n).collect::<Vec<u32>>());
    assert_eq!(cx.compute_capability().unwrap(), (8, 0));
    assert!(cx.name().unwrap().contains("emulator"));
    cx.synchronize().unwrap();
}

fn two_streams(with_event: bool) {
    let raw = Raw::new();
    let (a, b, e) = (stream(), stream(), event());
    raw.launch(a, raw.x, N).unwrap();
    // SAFETY: handles that were just made.
    unsafe {
        result::event::record(e, a).unwrap();
        if with_event {
            result::stream::wait_event(b, e, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT).unwrap();
        }
        raw.launch(b, raw.x, N).unwrap();
        let done = result::stream::synchronize(b).and_then(|()| result::stream::synchronize(a));
        assert_eq!(done.is_ok(), with_event);
        if with_event {
            assert_eq!(raw.read(), [2; N as usize]);
            result::stream::destroy(a).unwrap();
            result::event::destroy(e).unwrap();
        }
    }
}

fn late() {
    let raw = Raw::new();
    let s = stream();
    raw.launch(s, raw.x, N).unwrap();
    // SAFETY: a stream that was just made.
    unsafe {
        let first = sys::cuStreamQuery(s);
        assert!(matches!(first, sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_NOT_READY));
        let mut asked = 0;
        while sys::cuStreamQuery(s) == sys::CUresult::CUDA_ERROR_NOT_READY {
            asked += 1;
            assert!(asked < 1000, "asking makes progress");
        }
    }
    assert_eq!(raw.read(), [1; N as usize]);
}

/// A module that is unloaded while a launch of it is in flight.
fn unloaded() {
    let image = std::ffi::CString::new(PTX).unwrap();
    let s = stream();
    // SAFETY: a context is current; the image ends in a zero byte; handles that were just made.
    unsafe {
        let module = result::module::load_data(image.as_ptr().cast()).unwrap();
        let function = result::module::get_function(module, c"add_one".to_owned()).unwrap();
        let raw = Raw { function, ..Raw::new() };
        raw.launch(s, raw.x, N).unwrap();
        result::module::unload(module).unwrap();
        assert!(result::stream::synchronize(s).is_err());
    }
}

/// Milliseconds between two events with timing, once both are over; every other pair is refused as the manual says.
fn elapsed() {
    let raw = Raw::new();
    let timed = || result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).unwrap();
    let (stream, first, last, untimed, never) = (stream(), timed(), timed(), event(), timed());
    // SAFETY: handles that were just made.
    unsafe {
        result::event::record(first, stream).unwrap();
        raw.launch(stream, raw.x, N).unwrap();
        result::event::record(untimed, stream).unwrap();
        result::event::record(last, stream).unwrap();
        let between = |a, b| result::event::elapsed(a, b).map_err(|error| error.0);
        let invalid = Err(sys::CUresult::CUDA_ERROR_INVALID_HANDLE);
        assert_eq!(between(first, never), invalid);
        assert_eq!(between(first, untimed), invalid);
        assert_eq!(between(untimed, last), invalid);
        // Nothing has waited: the work is not done yet, or it is.
        let early = between(first, last);
        assert!(early == Err(sys::CUresult::CUDA_ERROR_NOT_READY) || early.is_ok_and(|ms| ms > 0.0), "{early:?}");
        result::stream::synchronize(stream).unwrap();
        let ms = between(first, last).unwrap();
        assert!(ms > 0.0 && between(last, first) == Ok(-ms) && between(first, first) == Ok(0.0), "{ms}");
        // Recorded anew, it is not ready for what comes now.
        raw.launch(stream, raw.x, N).unwrap();
        result::event::record(last, stream).unwrap();
        result::stream::synchronize(stream).unwrap();
        assert!(between(first, last).unwrap() > ms);
        for event in [first, last, untimed, never] {
            result::event::destroy(event).unwrap();
        }
        assert_eq!(between(first, last), invalid);
    }
}

fn default_stream() {
    let raw = Raw::new();
    // SAFETY: plain creation.
    let blocking = result::stream::create(result::stream::StreamKind::Default).unwrap();
    // A stream that is not independent and the default stream order each other without events.
    raw.launch(blocking, raw.x, N).unwrap();
    raw.launch(std::ptr::null_mut(), raw.x, N).unwrap();
    raw.launch(blocking, raw.x, N).unwrap();
    assert_eq!(raw.read(), [3; N as usize]);
}

fn sticky() {
    let raw = Raw::new();
    let s = stream();
    raw.launch(s, raw.x + 4, N).unwrap();
    // SAFETY: a stream that was just made.
    unsafe {
        let e = result::stream::synchronize(s).unwrap_err();
        assert_eq!(e.0, sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        let again = result::malloc_sync(16).unwrap_err();
        assert_eq!(again.0, sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(sys::cuDevicePrimaryCtxReset_v2(0), sys::CUresult::CUDA_SUCCESS);
        result::malloc_sync(16).unwrap();
    }
}

fn bad_modules() {
    use sys::CUresult::{CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_PTX, CUDA_ERROR_NO_BINARY_FOR_GPU};
    let load = |text: &str| {
        let image = std::ffi::CString::new(text).unwrap();
        // SAFETY: the image ends in a zero byte.
        unsafe { result::module::load_data(image.as_ptr().cast()) }
    };
    assert_eq!(load("not ptx").unwrap_err().0, CUDA_ERROR_INVALID_IMAGE);
    assert_eq!(load(&PTX.replace("mad.lo.s32", "mad.lo.s33")).unwrap_err().0, CUDA_ERROR_INVALID_PTX);
    assert_eq!(load(&PTX.replace("sm_80", "sm_90a")).unwrap_err().0, CUDA_ERROR_NO_BINARY_FOR_GPU);
    assert_eq!(load(&PTX[..PTX.len() / 2]).unwrap_err().0, CUDA_ERROR_INVALID_PTX);
    // SAFETY: a module that was just loaded.
    let missing = unsafe { result::module::get_function(load(PTX).unwrap(), c"nothing".to_owned()) };
    assert_eq!(missing.unwrap_err().0, sys::CUresult::CUDA_ERROR_NOT_FOUND);
}

fn limits() {
    let raw = Raw::new();
    let (mut x, mut n) = (raw.x, N);
    let params = &mut [(&raw mut x).cast(), (&raw mut n).cast()];
    let mut launch = |grid, block, shared| {
        // SAFETY: the parameters are those of the kernel.
        unsafe { result::launch_kernel(raw.function, grid, block, shared, std::ptr::null_mut(), params) }
    };
    let invalid = Err(result::DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(launch((1, 1, 1), (1025, 1, 1), 0), invalid);
    assert_eq!(launch((0, 1, 1), (32, 1, 1), 0), invalid);
    assert_eq!(launch((1, 65536, 1), (32, 1, 1), 0), invalid);
    assert_eq!(launch((1, 1, 1), (32, 1, 1), 50_000), invalid);
    let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: a function that was just loaded.
    unsafe {
        result::function::set_function_attribute(raw.function, attribute, 163 << 10).unwrap();
        assert!(result::function::set_function_attribute(raw.function, attribute, (163 << 10) + 1).is_err());
    }
    assert_eq!(launch((1, 1, 1), (32, 1, 1), 50_000), Ok(()));
    result::ctx::synchronize().unwrap();
}

/// Clusters that a launch asks for: only where the device has them, of no more than eight blocks, such as the grid is
/// made of, and such as the device holds at a time.
fn clusters() {
    let raw = Raw::new();
    let (mut x, mut n) = (raw.x, N);
    let mut params = [(&raw mut x).cast(), (&raw mut n).cast()];
    let mut launch = |grid: u32, cluster: u32, threads: u32| {
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            // SAFETY: all of it may be 0.
            value: unsafe { std::mem::zeroed() },
        };
        attribute.value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 };
        let config = sys::CUlaunchConfig {
            gridDimX: grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: std::ptr::null_mut(),
            attrs: &raw mut attribute,
            numAttrs: 1,
        };
        // SAFETY: the parameters are those of the kernel; the configuration lives until the call returns.
        unsafe { sys::cuLaunchKernelEx(&raw const config, raw.function, params.as_mut_ptr(), std::ptr::null_mut()) }
    };
    let refused = sys::CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE;
    let has_clusters = std::env::var("CPATTN_EMU_SM").is_ok_and(|sm| sm == "90");
    let if_it = |can| if can { sys::CUresult::CUDA_SUCCESS } else { refused };
    assert_eq!(launch(4, 2, 32), if_it(has_clusters));
    assert_eq!(launch(4, 1, 32), sys::CUresult::CUDA_SUCCESS);
    for (grid, cluster) in [(3, 2), (16, 16), (4, 0)] {
        assert_eq!(launch(grid, cluster, 32), refused);
    }
    // A multiprocessor holds eight of these blocks, but not of those.
    let one = std::env::var("CPATTN_EMU_SMS").is_ok_and(|n| n == "1");
    assert_eq!(launch(8, 8, 32), if_it(has_clusters));
    assert_eq!(launch(8, 8, 1024), if_it(has_clusters && !one));
    result::ctx::synchronize().unwrap();
}

#[test]
fn through_the_safe_interface() {
    passes("safe");
}

#[test]
fn events_order_streams() {
    passes("events");
}

#[test]
fn a_missing_event_is_reported_for_every_seed() {
    reports("missing event", "StreamRace");
}

#[test]
fn launches_of_an_unloaded_module_fail() {
    reports("unloaded", "UseAfterFree in `kernel `add_one``: its module was unloaded before it ran");
}

#[test]
fn streams_run_late_and_queries_make_progress() {
    passes("late");
}

#[test]
fn times_between_events() {
    passes("elapsed");
}

#[test]
fn the_default_stream_orders_blocking_streams() {
    passes("default stream");
}

#[test]
fn errors_stick_until_a_reset() {
    reports("sticky", "OutOfBounds in `add_one`, line 18: `ld.global.u32 %r5, [%rd1];`");
}

#[test]
fn modules_that_cannot_be_loaded() {
    reports("bad modules", "`mad.lo.s33` in kernel `add_one`: this instruction is not known to the emulator");
}

#[test]
fn launch_limits() {
    reports("limits", "launch refused");
}

#[test]
fn launches_of_clusters() {
    for (sm, multiprocessors) in [("80", "8"), ("90", "8"), ("90", "1")] {
        let variables = [("CPATTN_EMU_SM", sm), ("CPATTN_EMU_SMS", multiprocessors)];
        let (ok, text) = super::child("clusters", &variables);
        assert!(ok, "{text}");
    }
}
