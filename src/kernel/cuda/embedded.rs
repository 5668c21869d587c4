// SPDX-License-Identifier: MIT OR Apache-2.0
//! The PTX of `ptx/compiled`, as `build.rs` packs it: a sixth of its size (release builds), inflated when a kernel is
//! first asked for.
//!
//! There is one text for both element types, that of bf16. The kernel for f16 has the same instructions with the other
//! type in their names, so it is made here. Two texts would double the library for what one replacement gives;
//! `ptx/compile --check` compiles the sources for f16 too and compares.

use alloc::ffi::CString;
use alloc::string::String;
use alloc::vec::Vec;

include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// The text of the module `name`: `ptx/compiled/{name}.ptx`, or for f16 the text made from that of bf16.
pub(super) fn find(name: &str) -> Option<CString> {
    if name.contains("_f16_") {
        let text = String::from_utf8(inflate(&name.replace("_f16_", "_bf16_"))?).ok()?;
        return CString::from_vec_with_nul(text.replace("bf16", "f16").into_bytes()).ok();
    }
    CString::from_vec_with_nul(inflate(name)?).ok()
}

/// `ptx/compiled/{name}.ptx`, with a zero byte at its end.
fn inflate(name: &str) -> Option<Vec<u8>> {
    let at = PTX.binary_search_by(|entry| entry.0.cmp(name)).ok()?;
    let (_, bytes, packed) = PTX[at];
    // The build wrote this data; zlib's checksum detects a defect.
    miniz_oxide::inflate::decompress_to_vec_zlib_with_limit(packed, bytes).ok()
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    #[test]
    fn every_shape_is_embedded() {
        for shape in crate::kernel::cuda::shapes::SHAPES {
            for element in ["f16", "bf16"] {
                let fused = shape.fused.map(|_| "fused");
                for kernel in ["forward", "backward"].into_iter().chain(fused) {
                    let name = alloc::format!("{kernel}_{element}_{}", shape.name);
                    assert!(super::find(&name).is_some(), "{name}");
                }
            }
        }
        assert!(super::find("transform").is_some() && super::find("forward").is_none());
        assert!(super::find("forward_f16_1").is_none());
    }

    /// Products and conversions name the requested type; nothing else differs.
    #[test]
    fn each_element_type_has_its_text() {
        for (name, ..) in super::PTX.iter().filter(|entry| entry.0.contains("_bf16_")) {
            let text = |name: &str| super::find(name).expect("embedded").into_string().expect("text");
            let (bf16, f16) = (text(name), text(&name.replace("_bf16_", "_f16_")));
            let products = |text: &str, ty: &str| text.matches(&alloc::format!("f32.{ty}.{ty}")).count();
            assert!(products(&bf16, "bf16") > 0 && products(&bf16, "bf16") == products(&f16, "f16"), "{name}");
            assert!(!f16.contains("bf16") && !bf16.contains(".f16"), "{name}");
            assert_eq!(bf16.lines().count(), f16.lines().count(), "{name}");
        }
    }

    #[test]
    fn what_is_inflated_is_the_file() {
        let (all, packed): (Vec<usize>, Vec<usize>) =
            super::PTX.iter().map(|&(_, bytes, packed)| (bytes, packed.len())).unzip();
        let (all, packed) = (all.iter().sum::<usize>(), packed.iter().sum::<usize>());
        assert!(packed * 4 < all, "{packed} of {all} bytes");
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("ptx/compiled");
        for &(name, ..) in super::PTX {
            let text = std::fs::read(folder.join(name).with_extension("ptx")).unwrap();
            assert!(super::find(name).unwrap().as_bytes() == text, "{name}");
        }
    }
}
