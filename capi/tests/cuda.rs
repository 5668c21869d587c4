// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C library with CUDA, as its users meet it: programs in C and Python that bring their own device memory and
//! streams.
//!
//! They run on whatever driver is found; an emulated one on `LD_LIBRARY_PATH` serves as well as a real one
//! (`.ci/cuda`). Without any, they say so and pass; with `CPATTN_REQUIRE_CUDA` set, that is a failure.
//! `CPATTN_CUDA_PREFIX` names an installed library to test instead of one built here.

#[path = "library.rs"]
mod library;

use std::{
    env, fs,
    process::{Command, Stdio},
    ptr::{null, null_mut},
    sync::OnceLock,
};

use cpattn::kernel::cuda::Cuda;
use cpattn_capi::*;

use library::{Library, root, run};

/// The library, built once. Without its archive: programs that link it are those of `capi.rs`.
fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        Library::named("CPATTN_CUDA_PREFIX")
            .unwrap_or_else(|| Library::build("capi-cuda-prefix", &["--cuda", "--shared"]))
    })
}

/// Whether the driver on `LD_LIBRARY_PATH` is the stand-in, which can be told what to be.
fn is_emulated() -> bool {
    let paths = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    env::split_paths(&paths).filter_map(|folder| fs::read(folder.join("libcuda.so.1")).ok()).next().is_some_and(
        |driver| {
            let name = b"cuEmuLastReport";
            driver.windows(name.len()).any(|w| w == name)
        },
    )
}

/// Compiles a program and runs it on two devices, if the driver lets itself be told so.
fn program(source: &str, arguments: &[&str]) {
    let text = run(Command::new(library().compile(source, "c99")).args(arguments).env("CPATTN_EMU_DEVICES", "2"));
    report(source, &text);
}

/// Says what was not run, which is a failure where a device has to be.
fn report(what: &str, text: &str) {
    if text.starts_with("not run") {
        eprintln!("{what}: {text}");
        assert!(env::var_os("CPATTN_REQUIRE_CUDA").is_none(), "{what}: {text}");
    } else {
        assert!(text.lines().any(|line| line.starts_with("ok")), "{what}: {text}");
    }
}

#[test]
fn the_symbols_are_those_of_the_other_build() {
    library().check_symbols();
    let needed = run(Command::new("readelf").arg("-d").arg(library().shared()));
    assert!(!needed.contains("libcuda"), "{needed}");
}

#[test]
fn four_ranks_on_a_device() {
    program("examples/c/cuda_ranks.c", &[]);
}

#[test]
fn keys_in_pages_on_a_device() {
    program("capi/tests/cuda_pages.c", &[]);
}

/// Two processes, each with a device as on a host of its own.
#[test]
fn ranks_over_nccl() {
    // SAFETY: a library by its fixed name, whose constructors are its own.
    if let Err(e) = unsafe { libloading::Library::new("libnccl.so.2") } {
        return report("nccl_ranks.c", &format!("not run: {e}"));
    }
    let program = library().compile("examples/c/nccl_ranks.c", "c99");
    let id = library().prefix.join("programs/nccl_ranks.id");
    // A file of an earlier test is no id of this one.
    let _ = fs::remove_file(&id);
    let start = |rank: &str| {
        let mut command = Command::new(&program);
        command.args([rank, "2"]).arg(&id).arg("0").env("NCCL_HOSTID", rank).stdout(Stdio::piped());
        command.spawn().unwrap()
    };
    for child in ["0", "1"].map(start) {
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success());
        report("nccl_ranks.c", &String::from_utf8_lossy(&out.stdout));
    }
}

/// The same from Python.
#[test]
fn python_over_nccl() {
    // SAFETY: a library by its fixed name, whose constructors are its own.
    if let Err(e) = unsafe { libloading::Library::new("libnccl.so.2") } {
        return report("nccl_ranks.py", &format!("not run: {e}"));
    }
    fs::create_dir_all(library().prefix.join("programs")).unwrap();
    let id = library().prefix.join("programs/nccl_ranks.py.id");
    // A file of an earlier test is no id of this one.
    let _ = fs::remove_file(&id);
    let start = |rank: &str| {
        let mut command = Command::new("python3");
        command.arg(root().join("examples/python/nccl_ranks.py")).args([rank, "2"]).arg(&id);
        command.env("CPATTN_LIBRARY", library().shared()).env("PYTHONPATH", root().join("python"));
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("NCCL_HOSTID", rank).stdout(Stdio::piped());
        command.spawn().unwrap()
    };
    for child in ["0", "1"].map(start) {
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success());
        report("nccl_ranks.py", &String::from_utf8_lossy(&out.stdout));
    }
}

#[test]
fn python_with_memory_of_the_driver() {
    let text = run(Command::new("python3")
        .arg(root().join("examples/python/cuda_ranks.py"))
        .env("CPATTN_LIBRARY", library().shared())
        .env("PYTHONPATH", root().join("python"))
        .env("PYTHONDONTWRITEBYTECODE", "1"));
    report("cuda_ranks.py", &text);
}

#[test]
fn misuse_is_refused() {
    program("capi/tests/cuda_refusals.c", &[]);
}

#[test]
fn streams_memory_and_failures() {
    program("capi/tests/cuda_streams.c", &[]);
    if is_emulated() {
        program("capi/tests/cuda_streams.c", &["fault"]);
    }
}

#[test]
fn single_calls() {
    program("capi/tests/cuda_single_calls.c", &[]);
}

/// The blocks of each attention launch of `cuda_single_calls` on an emulated device of 4 multiprocessors.
fn blocks(arguments: &[&str]) -> Vec<u64> {
    let program = library().compile("capi/tests/cuda_single_calls.c", "c99");
    let text = run(Command::new(program).args(arguments).envs([("CPATTN_EMU_COUNT", "1"), ("CPATTN_EMU_SMS", "4")]));
    let kernels = ["cpattn_forward", "cpattn_hopper_forward"].map(|name| format!("cuda-emulator: `{name}`: "));
    let count = |line: &str| {
        let rest = kernels.iter().find_map(|kernel| line.strip_prefix(kernel.as_str()))?;
        rest.split(' ').next()?.parse().ok()
    };
    text.lines().filter_map(count).collect()
}

#[test]
fn an_sm_margin_bounds_the_blocks() {
    if is_emulated() {
        let (all, one) = (blocks(&[]), blocks(&["3"]));
        assert_eq!(all.len(), one.len());
        assert!(all.iter().zip(&one).all(|(all, one)| one <= all), "{all:?}, {one:?}");
        // A multiprocessor holds several blocks of the narrow kernels: all of a short call may fit one.
        assert!(one.iter().sum::<u64>() < all.iter().sum::<u64>(), "{all:?}, {one:?}");
    }
}

/// A rank's number holds while it lives, and of two the larger.
#[test]
fn ranks_leave_multiprocessors_free_while_they_live() {
    let Ok(cuda) = Cuda::shared(0) else { return report("sm_margin", "not run: no CUDA driver or no device") };
    let rank = |sm_margin| {
        let options = cpattn_rank_options {
            struct_size: size_of::<cpattn_rank_options>(),
            workers: 1,
            device_type: 2,
            device_id: 0,
            sm_margin,
            isa: 0,
            reserved: 0,
            kernel: null(),
        };
        let (mut transport, mut rank) = (null_mut(), null_mut());
        // SAFETY: arrays of one entry, handles that were made just before, a struct of its own size.
        unsafe {
            assert_eq!(cpattn_peer_group(1, &0, 1000, &mut transport), CPATTN_OK);
            assert_eq!(cpattn_rank_create(transport, &options, &mut rank), CPATTN_OK);
        }
        rank
    };
    let (one, two) = (rank(1), rank(2));
    assert_eq!(cuda.sm_margin(), 2);
    // SAFETY: handles of this test, each destroyed once.
    unsafe {
        assert_eq!(cpattn_rank_destroy(two), CPATTN_OK);
        assert_eq!(cuda.sm_margin(), 1);
        let none = rank(0);
        assert_eq!(cuda.sm_margin(), 1);
        assert_eq!(cpattn_rank_destroy(one), CPATTN_OK);
        assert_eq!(cuda.sm_margin(), 0);
        assert_eq!(cpattn_rank_destroy(none), CPATTN_OK);
    }
}

#[test]
fn no_driver_and_devices_too_old() {
    let refusals = library().compile("capi/tests/cuda_refusals.c", "c99");
    let alone = |arguments: &[&str]| run(Command::new(&refusals).args(arguments).env_remove("LD_LIBRARY_PATH"));
    if alone(&[]).starts_with("not run") {
        alone(&["without", "2", "no CUDA driver is installed"]);
    }
    if is_emulated() {
        let older = ["without", "2", "= 0: device 0 of compute capability 7.5 is not supported"];
        run(Command::new(&refusals).args(older).env("CPATTN_EMU_SM", "75"));
        run(Command::new(&refusals).args(["without", "6", "cuInit"]).env("CPATTN_EMU_DEVICES", "0"));
    }
}

#[test]
fn links_of_a_ring_on_devices() {
    if Cuda::shared(0).is_err() {
        return report("ring_check", "not run: no CUDA driver or no device");
    }
    let mut ends = [null_mut(); 2];
    // SAFETY: two devices of which each is there, and room for two handles.
    assert_eq!(unsafe { cpattn_peer_group(2, [0, 0].as_ptr(), 60_000, ends.as_mut_ptr()) }, 0);
    let ends = ends.map(<*mut _>::expose_provenance);
    std::thread::scope(|scope| {
        for (rank, end) in ends.into_iter().enumerate() {
            scope.spawn(move || {
                let end = std::ptr::with_exposed_provenance_mut(end);
                let mut links = Vec::with_capacity(4);
                let mut count = 0;
                // SAFETY: a live handle that this thread alone uses, and room for four links.
                let status = unsafe { cpattn_ring_check(end, 5000, links.as_mut_ptr(), 4, &raw mut count) };
                assert_eq!((status, count), (0, if rank == 0 { 4 } else { count }));
                assert!(count >= 3);
                // SAFETY: written by the call; the handle is not used after this.
                unsafe {
                    links.set_len(count);
                    assert_eq!(cpattn_transport_destroy(end), 0);
                }
                assert_eq!((links[0].from, links[0].to, links[1].from, links[1].to), (0, 1, 1, 0));
            });
        }
    });
}
