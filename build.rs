//! Embeds what `ptx/` holds. It compiles nothing and needs no CUDA toolkit: the PTX is checked in.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
