// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names the shared library as NCCL's is named, so that a process which has loaded it finds it under that name.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
}
