// SPDX-License-Identifier: MIT OR Apache-2.0
//! Embeds what `ptx/` holds. It compiles nothing and needs no CUDA toolkit: the PTX is checked in.

use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=ptx");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let folder = Path::new(&env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("ptx");
    let mut files: Vec<PathBuf> = fs::read_dir(&folder)
        .expect("ptx/ is part of the crate")
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "ptx"))
        .collect();
    files.sort();
    let mut table =
        String::from("/// Name and zero-terminated text, in the order of names.\nstatic PTX: &[(&str, &str)] = &[\n");
    for path in files {
        let name = path.file_stem().expect("a file").to_str().expect("names are ASCII");
        let path = path.to_str().expect("the crate's path is UTF-8");
        table += &format!("    ({name:?}, concat!(include_str!({path:?}), \"\\0\")),\n");
    }
    table += "];\n";
    fs::write(Path::new(&env::var_os("OUT_DIR").expect("cargo sets it")).join("ptx.rs"), table).expect("OUT_DIR");
}
