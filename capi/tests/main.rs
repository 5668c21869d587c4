// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C library as its users meet it: built and installed by `capi/build`, found by pkg-config, linked by a C and a
//! C++ compiler, loaded by Python. The examples are the tests; each program says by its exit status whether it is
//! right.
//!
//! The library is a debug build, which knows destroyed handles for certain. `CPATTN_PREFIX` names an installed one to
//! test instead. What needs NumPy or PyTorch says so when it has to be skipped; `CPATTN_PYTHON` names the interpreter.

mod header;
mod library;

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use library::{Library, REFUSED, root, run};

/// The library, built once.
fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| Library::named("CPATTN_PREFIX").unwrap_or_else(|| Library::build("capi-prefix", &[])))
}

/// One for the CPU alone, with its archive: the same, unless `CPATTN_CPU_PREFIX` names another.
fn library_for_the_cpu() -> &'static Library {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(|| Library::named("CPATTN_CPU_PREFIX")).as_ref().unwrap_or_else(library)
}

fn pkg_config(what: &[&str]) -> Vec<String> {
    library().pkg_config(what)
}

fn compile(source: &str, standard: &str) -> PathBuf {
    library().compile(source, standard)
}

#[test]
fn the_header_is_c99_c11_and_cpp17() {
    for (compiler, language, standard) in [("cc", "c", "c99"), ("cc", "c", "c11"), ("c++", "c++", "c++17")] {
        for file in ["capi/tests/inits.c", "capi/tests/dlpack_first.c"] {
            run(Command::new(compiler)
                .args(["-x", language, &format!("-std={standard}")])
                .args(["-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only", "-Iinclude", file])
                .current_dir(root()));
        }
    }
}

#[test]
fn nothing_but_the_snapshot_is_exported() {
    library().check_symbols();
    let dynamic = run(Command::new("readelf").arg("-d").arg(library().shared()));
    // While the major version is 0, a minor one may break programs.
    let soname = match (env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR")) {
        ("0", minor) => format!("libcpattn.so.0.{minor}"),
        (major, _) => format!("libcpattn.so.{major}"),
    };
    assert!(dynamic.lines().any(|l| l.contains("SONAME") && l.contains(&format!("[{soname}]"))), "{dynamic}");
}

#[test]
fn hello() {
    run(&mut Command::new(compile("examples/c/hello.c", "c99")));
    assert_eq!(pkg_config(&["--modversion"]), [env!("CARGO_PKG_VERSION")]);
}

#[test]
fn hello_linked_statically() {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hello-static");
    let library = library_for_the_cpu();
    let flags = library.pkg_config(&["--cflags", "--libs", "--static"]);
    let archive = library.prefix.join("lib/libcpattn.a");
    run(Command::new(env::var("CC").unwrap_or("cc".into()))
        .args(["-std=c99", "-Wall", "-Wextra", "-Werror"])
        .arg(root().join("examples/c/hello.c"))
        .args(flags.iter().map(|f| if f == "-lcpattn" { archive.to_str().unwrap() } else { f }))
        .arg("-o")
        .arg(&program));
    let needed = run(Command::new("readelf").arg("-d").arg(&program));
    assert!(!needed.contains("libcpattn"), "{needed}");
    run(&mut Command::new(program));
}

#[test]
fn the_main_job_on_eight_threads() {
    let text = run(
        Command::new(compile("examples/c/main_job.c", "c99")).arg(root().join("tests/data/minilm_263.safetensors"))
    );
    assert!(text.contains("ok: 8 ranks agree"), "{text}");
}

#[test]
fn kernels_written_in_c() {
    let text = run(&mut Command::new(compile("examples/c/own_kernels.c", "c99")));
    assert!(text.contains("failed: rank 1, attend"), "{text}");
}

#[test]
fn a_transport_written_in_cpp() {
    run(&mut Command::new(compile("examples/c/own_transport.cpp", "c++17")));
}

#[test]
fn handles_and_errors_of_cpp() {
    run(&mut Command::new(compile("capi/tests/wrapper.cpp", "c++17")));
}

#[test]
fn cmake_finds_the_library() {
    let has_cmake = Command::new("cmake").arg("--version").output().is_ok_and(|o| o.status.success());
    if !has_cmake {
        eprintln!("SKIPPED: no cmake here");
        return;
    }
    let build = library().prefix.join("cmake-build");
    run(Command::new("cmake")
        .arg("-S")
        .arg(root().join("capi/tests/cmake"))
        .arg("-B")
        .arg(&build)
        .arg(format!("-DCMAKE_PREFIX_PATH={}", library().prefix.display())));
    run(Command::new("cmake").arg("--build").arg(&build));
    run(&mut Command::new(build.join("own_transport")));
    run(&mut Command::new(build.join("wrapper")));
    if library().prefix.join("lib/libcpattn.a").exists() {
        run(&mut Command::new(build.join("hello_static")));
    }
}

#[test]
fn an_engine_written_in_c() {
    run(&mut Command::new(compile("capi/tests/engine.c", "c99")));
}

#[test]
fn misuse_is_refused() {
    let text = run(&mut Command::new(compile("capi/tests/misuse.c", "c99")));
    let said = text.lines().filter(|line| line.starts_with(REFUSED)).count();
    assert!(said > 60, "the words of {said} messages were checked");
}

#[test]
fn a_kernel_of_the_callers_between_two_all_to_alls() {
    run(&mut Command::new(compile("capi/tests/all_to_all.c", "c99")));
}

#[test]
fn keys_in_pages_and_partial_results_of_two_ranks() {
    run(&mut Command::new(compile("capi/tests/serving.c", "c99")));
}

#[test]
fn documents_over_groups_that_change_size() {
    run(&mut Command::new(compile("capi/tests/groups.c", "c99")));
}

#[test]
fn states_passed_on_along_documents() {
    run(&mut Command::new(compile("capi/tests/scan.c", "c99")));
}

#[test]
fn listed_keys_in_c() {
    run(&mut Command::new(compile("capi/tests/listed.c", "c99")));
}

#[test]
fn instruction_sets_are_forced_and_parts_of_documents_err_as_the_whole() {
    run(&mut Command::new(compile("capi/tests/isa.c", "c99")));
}

#[test]
fn shifts_and_traces_of_a_group() {
    run(&mut Command::new(compile("capi/tests/between_runs.c", "c99")));
}

#[test]
fn schedules_executed_by_a_program() {
    run(&mut Command::new(compile("capi/tests/schedule.c", "c99")));
}

#[test]
fn links_of_a_ring() {
    run(&mut Command::new(compile("capi/tests/ring.c", "c99")));
}

#[test]
fn a_transport_that_failed_once_is_not_used_again() {
    run(&mut Command::new(compile("capi/tests/failed_transport.c", "c99")));
}

#[test]
fn programs_of_other_headers_run() {
    run(&mut Command::new(compile("capi/tests/older_header.c", "c99")));
}

#[test]
fn devices_are_refused_without_cuda() {
    let program = library_for_the_cpu().compile("capi/tests/cuda_refusals.c", "c99");
    run(Command::new(program).args(["without", "2", "this build serves the CPU only"]));
}

/// An interpreter that has `module`, if there is one.
fn python(module: &str) -> Option<PathBuf> {
    let venv = root().join("target/venv/bin/python");
    let named = env::var_os("CPATTN_PYTHON").map(PathBuf::from);
    let has = |python: &PathBuf| {
        Command::new(python).args(["-c", &format!("import {module}")]).output().is_ok_and(|o| o.status.success())
    };
    named.into_iter().chain(["python3".into(), venv, "/usr/bin/python3".into()]).find(has)
}

fn script(python: &Path, name: &str) -> String {
    run(Command::new(python)
        .arg(root().join("examples/python").join(name))
        .env("CPATTN_LIBRARY", library().shared())
        .env("PYTHONPATH", root().join("python"))
        .env("PYTHONDONTWRITEBYTECODE", "1"))
}

#[test]
fn numpy_over_six_ranks() {
    // A first run without NumPy gets it into a folder of the target directory, if pip can.
    if python("numpy").is_none() && env::var_os("CPATTN_OFFLINE").is_none() {
        let venv = root().join("target/venv");
        let made = Command::new("python3").args(["-m", "venv"]).arg(&venv).status().is_ok_and(|s| s.success());
        if made {
            // Whether it worked is asked below.
            let _ = Command::new(venv.join("bin/pip")).args(["install", "-q", "numpy"]).status();
        }
    }
    match python("numpy") {
        Some(python) => assert!(script(&python, "numpy_ranks.py").ends_with("ok\n")),
        None => eprintln!("SKIPPED: no Python with NumPy here; name one with CPATTN_PYTHON"),
    }
}

#[test]
fn torch_gradcheck() {
    match python("torch") {
        Some(python) => assert!(script(&python, "torch_function.py").ends_with("ok\n")),
        None => eprintln!("SKIPPED: no Python with PyTorch here; name one with CPATTN_PYTHON"),
    }
}
