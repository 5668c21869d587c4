// SPDX-License-Identifier: MIT OR Apache-2.0
//! The stand-in driver through cudarc, unmodified: each case in a process of its own, because a driver is one per
//! process and its errors stick.

use cuda_emulator::driver;
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg, result, sys};
use cudarc::nvrtc::Ptx;
use std::process::Command;

const PTX: &str = r#"
.version 8.0
.target sm_80
.address_size 64
.global .align 4 .u32 counter;
.visible .entry add_one(.param .u64 p, .param .u32 n) {
    .reg .pred %p<2>; .reg .b32 %r<6>; .reg .b64 %rd<4>;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.s32 %r1, %r2, %r3, %r1;
    ld.param.u32 %r4, [n];
    setp.ge.u32 %p1, %r1, %r4;
    @%p1 bra DONE;
    ld.param.u64 %rd1, [p];
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd1, %rd1, %rd2;
    ld.global.u32 %r5, [%rd1];
    add.u32 %r5, %r5, 1;
    st.global.u32 [%rd1], %r5;
DONE:
    ret;
}
"#;

/// Runs `case` in a child process with these variables; gives its output and whether it ended well.
fn child(case: &str, env: &[(&str, &str)]) -> (bool, String) {
    let me = std::env::current_exe().unwrap();
    let out = Command::new(me)
        .args(["--exact", "run_case", "--nocapture"])
        .env("EMULATOR_CASE", case)
        .envs(env.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    (out.status.success(), text)
}

fn passes(case: &str) {
    for seed in ["0", "1", "2", "3", "4", "5", "6", "7"] {
        let (ok, text) = child(case, &[("CPATTN_EMU_SEED", seed)]);
        assert!(ok, "seed {seed}: {text}");
        assert!(!text.contains("cuda-emulator:"), "seed {seed}: {text}");
    }
}

fn reports(case: &str, what: &str) {
    for seed in ["0", "1", "2", "3", "4", "5", "6", "7"] {
        let (ok, text) = child(case, &[("CPATTN_EMU_SEED", seed)]);
        assert!(ok, "seed {seed}: {text}");
        assert!(text.contains(what), "seed {seed}: `{what}` is not in: {text}");
    }
}

/// Does nothing unless it is the child of another test.
#[test]
fn run_case() {
    let Ok(case) = std::env::var("EMULATOR_CASE") else { return };
    driver::install().unwrap();
    let cx = CudaContext::new(0).unwrap();
    match case.as_str() {
        "safe" => safe(&cx),
        "events" => two_streams(true),
        "missing event" => two_streams(false),
        "late" => late(),
        "default stream" => default_stream(),
        "sticky" => sticky(),
        "bad modules" => bad_modules(),
        "limits" => limits(),
        "pointers" => pointers(),
        "pinned" => pinned(),
        _ => panic!("no case {case}"),
    }
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

struct Raw {
    function: sys::CUfunction,
    x: sys::CUdeviceptr,
}

const N: u32 = 4096;

impl Raw {
    fn new() -> Self {
        let image = std::ffi::CString::new(PTX).unwrap();
        // SAFETY: a context is current; the image ends in a zero byte; sizes are those of the allocation.
        unsafe {
            let module = result::module::load_data(image.as_ptr().cast()).unwrap();
            let function = result::module::get_function(module, c"add_one".to_owned()).unwrap();
            let x = result::malloc_sync(N as usize * 4).unwrap();
            result::memset_d8_sync(x, 0, N as usize * 4).unwrap();
            Self { function, x }
        }
    }

    fn launch(&self, stream: sys::CUstream, x: u64, n: u32) -> Result<(), result::DriverError> {
        let (mut x, mut n) = (x, n);
        let params = &mut [(&raw mut x).cast(), (&raw mut n).cast()];
        // SAFETY: the parameters are those of the kernel.
        unsafe { result::launch_kernel(self.function, (N / 256, 1, 1), (256, 1, 1), 0, stream, params) }
    }

    fn read(&self) -> Vec<u32> {
        let mut out = vec![0u32; N as usize];
        // SAFETY: the allocation has N elements.
        unsafe { result::memcpy_dtoh_sync(&mut out, self.x) }.unwrap();
        out
    }
}

fn stream() -> sys::CUstream {
    result::stream::create(result::stream::StreamKind::NonBlocking).unwrap()
}

fn event() -> sys::CUevent {
    result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).unwrap()
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

fn pointers() {
    let raw = Raw::new();
    let mut ordinal = -1i32;
    let which = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    // SAFETY: the result has the attribute's type.
    unsafe {
        let p = (&raw mut ordinal).cast();
        assert_eq!(sys::cuPointerGetAttribute(p, which, raw.x + 100), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(ordinal, 0);
        let host = 0u32;
        let unknown = sys::cuPointerGetAttribute(p, which, (&raw const host) as u64);
        assert_eq!(unknown, sys::CUresult::CUDA_ERROR_INVALID_VALUE);
        let mut f = std::ptr::null_mut();
        let mut status = sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        let found = sys::cuGetProcAddress_v2(c"cuMemAlloc".as_ptr(), &mut f, 13000, 0, &mut status);
        assert_eq!(found, sys::CUresult::CUDA_SUCCESS);
        assert!(!f.is_null());
    }
}

fn pinned() {
    let raw = Raw::new();
    let s = stream();
    // SAFETY: allocations of the sizes that are copied.
    unsafe {
        let p = result::malloc_host(N as usize * 4, 0).unwrap().cast::<u32>();
        let host = std::slice::from_raw_parts_mut(p, N as usize);
        host.fill(7);
        sys::cuMemcpyHtoDAsync_v2(raw.x, p.cast(), N as usize * 4, s).result().unwrap();
        // The copy runs when something waits for it: what is written until then is what arrives.
        host.fill(8);
        result::stream::synchronize(s).unwrap();
        assert_eq!(raw.read(), [8; N as usize]);
        // From pageable memory it is the value at the call.
        let mut plain = vec![5u32; N as usize];
        sys::cuMemcpyHtoDAsync_v2(raw.x, plain.as_ptr().cast(), N as usize * 4, s).result().unwrap();
        plain.fill(6);
        result::stream::synchronize(s).unwrap();
        assert_eq!(raw.read(), [5; N as usize]);
        result::free_host(p.cast()).unwrap();
    }
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
fn streams_run_late_and_queries_make_progress() {
    passes("late");
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
fn what_a_pointer_is() {
    passes("pointers");
}

#[test]
fn pinned_memory_is_read_late() {
    passes("pinned");
}
