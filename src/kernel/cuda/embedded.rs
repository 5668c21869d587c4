// SPDX-License-Identifier: MIT OR Apache-2.0
//! The PTX of `ptx/`, as `build.rs` packs it: a sixth of its size (release builds), inflated when a kernel is first asked for.

use alloc::ffi::CString;

include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// The text of `ptx/{name}.ptx`.
pub(super) fn find(name: &str) -> Option<CString> {
    let at = PTX.binary_search_by(|entry| entry.0.cmp(name)).ok()?;
    let (_, bytes, packed) = PTX[at];
    // What the build packed can be unpacked; zlib's checksum would tell if it could not.
    let text = miniz_oxide::inflate::decompress_to_vec_zlib_with_limit(packed, bytes).ok()?;
    CString::from_vec_with_nul(text).ok()
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    #[test]
    fn every_shape_is_embedded() {
        for shape in crate::kernel::cuda::shapes::SHAPES {
            for element in ["f16", "bf16"] {
                for kernel in ["forward", "backward", "fused"] {
                    let name = alloc::format!("{kernel}_{element}_{}", shape.name);
                    assert!(super::find(&name).is_some(), "{name}");
                }
            }
        }
        assert!(super::find("transform").is_some() && super::find("forward").is_none());
    }

    #[test]
    fn what_is_inflated_is_the_file() {
        let (all, packed): (Vec<usize>, Vec<usize>) =
            super::PTX.iter().map(|&(_, bytes, packed)| (bytes, packed.len())).unzip();
        let (all, packed) = (all.iter().sum::<usize>(), packed.iter().sum::<usize>());
        assert!(packed * 4 < all, "{packed} of {all} bytes");
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("ptx");
        for &(name, ..) in super::PTX {
            let text = std::fs::read(folder.join(name).with_extension("ptx")).unwrap();
            assert!(super::find(name).unwrap().as_bytes() == text, "{name}");
        }
    }
}
