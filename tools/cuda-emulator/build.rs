// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names the shared library as the driver's is named, so that a process which has loaded it finds it under that name.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
}
