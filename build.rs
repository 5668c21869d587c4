// SPDX-License-Identifier: MIT OR Apache-2.0
//! Embeds the texts of `ptx/compiled`, compressed. It compiles nothing and needs no CUDA toolkit: the PTX is checked
//! in.
//!
//! With `CPATTN_PTX` set, the texts in that folder take the place of those of the same name: alternatives of kernels,
//! as `ptx/compile --with` makes them (`ptx/HARDWARE.md`).

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=ptx/compiled");
    println!("cargo::rerun-if-env-changed=CPATTN_PTX");
    #[cfg(feature = "cuda")]
    embed();
}

/// Writes each text as a file of zlib's format, with a zero byte at its end for the driver, and a table that names
/// them.
#[cfg(feature = "cuda")]
fn embed() {
    use std::path::{Path, PathBuf};
    use std::{env, fs};

    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let folder = Path::new(&env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("ptx/compiled");
    // Build scripts are not optimised: the best level takes seconds.
    let level = if env::var_os("PROFILE").is_some_and(|profile| profile == "release") { 9 } else { 1 };
    let texts = |folder: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let paths = entries.map(|entry| entry.expect("a readable folder").path());
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "ptx")).collect()
    };
    let mut files = texts(&folder);
    files.sort();
    if let Some(others) = env::var_os("CPATTN_PTX") {
        println!("cargo::rerun-if-changed={}", Path::new(&others).display());
        for other in texts(Path::new(&others)) {
            let same = files.iter_mut().find(|file| file.file_name() == other.file_name());
            let Some(same) = same else { panic!("CPATTN_PTX: {} is no text of ptx/compiled", other.display()) };
            *same = other;
        }
    }
    let mut table = String::from(
        "/// Name, bytes of the text, and the text compressed, in the order of names.\nstatic PTX: &[(&str, usize, &[u8])] = &[\n",
    );
    for path in files {
        let name = path.file_stem().expect("a file").to_str().expect("names are ASCII");
        let mut text = fs::read(&path).expect("a readable file");
        text.push(0);
        let packed = out.join(format!("{name}.z"));
        fs::write(&packed, miniz_oxide::deflate::compress_to_vec_zlib(&text, level)).expect("OUT_DIR");
        let packed = packed.to_str().expect("the path of OUT_DIR is UTF-8");
        table += &format!("    ({name:?}, {}, include_bytes!({packed:?})),\n", text.len());
    }
    table += "];\n";
    fs::write(out.join("ptx.rs"), table).expect("OUT_DIR");
}
