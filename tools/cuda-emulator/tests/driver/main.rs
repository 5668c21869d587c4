// SPDX-License-Identifier: MIT OR Apache-2.0
//! The stand-in driver through cudarc, unmodified: each case in a process of its own, because a driver is one per
//! process and its errors stick.

mod counts;
mod graphs;
mod memory;
mod peers;
mod streams;

use cuda_emulator::driver;
use cudarc::driver::{CudaContext, result, sys};
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
    let known = streams::case(&case, &cx)
        || memory::case(&case)
        || graphs::case(&case)
        || peers::case(&case)
        || counts::case(&case);
    assert!(known, "no case {case}");
}

/// A kernel that adds 1 to each of N numbers, and N numbers that are 0.
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
            result::ctx::synchronize().unwrap();
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
