// SPDX-License-Identifier: MIT OR Apache-2.0
//! The PTX of `ptx/compiled`, as `build.rs` packs it (`ptx_format.rs`): a thirtieth of its size (release builds),
//! inflated when a kernel is first asked for.
//!
//! There is one text for both element types, that of bf16. The kernel for f16 has the same instructions with the other
//! type in their names, so it is made here. Two texts would double the library for what one replacement gives;
//! `ptx/compile --check` compiles the sources for f16 too and compares.

use super::ptx_format::{MARK, Predictor, read, read_difference};
use alloc::ffi::CString;
use alloc::string::String;
use alloc::vec::Vec;
use std::io::Write;
use std::sync::OnceLock;

include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// Kernels that no library has, and how to come by them: they run only where a variable asks for them, since no device
/// has shown yet that they are faster (`replaced.rs`).
const APART: [(&str, &str); 3] = [
    (
        "hopper_cluster_bf16_128",
        "run ptx/compile --with CLUSTER FOLDER and set CPATTN_CUDA_KERNELS=FOLDER, or unset CPATTN_CUDA_CLUSTER",
    ),
    ("hopper_forward_bf16_192", FORWARD_96_192),
    ("hopper_forward_bf16_96", FORWARD_96_192),
];

const FORWARD_96_192: &str = "run ptx/compile --with FORWARD_96_192 FOLDER and set CPATTN_CUDA_KERNELS=FOLDER, or unset CPATTN_CUDA_FAMILY and name no family";

/// How to come by the module `name`, if no library has it.
pub(super) fn apart(name: &str) -> Option<&'static str> {
    let name = name.replace("_f16_", "_bf16_");
    APART.into_iter().find_map(|(apart, way_out)| (apart == name).then_some(way_out))
}

/// The text of the module `name`: `ptx/compiled/{name}.ptx`, or for f16 the text made from that of bf16.
pub(super) fn find(name: &str) -> Option<CString> {
    if name.contains("_f16_") {
        let text = String::from_utf8(text(&name.replace("_f16_", "_bf16_"))?).ok()?;
        return CString::new(for_f16(&text)).ok();
    }
    CString::new(text(name)?).ok()
}

/// The text for f16 that one for bf16 gives.
pub(super) fn for_f16(text: &str) -> String {
    text.replace("bf16", "f16")
}

/// What tells the texts of this library from those of another.
pub(super) fn checksum() -> u32 {
    CHECKSUM
}

/// Whether `{name}.ptx` is a text of `ptx/compiled`, or of a set apart.
pub(super) fn is_text(name: &str) -> bool {
    PTX.binary_search_by(|entry| entry.0.cmp(name)).is_ok() || APART.iter().any(|(apart, _)| *apart == name)
}

/// `ptx/compiled/{name}.ptx`.
fn text(name: &str) -> Option<Vec<u8>> {
    static ALL: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    let at = PTX.binary_search_by(|entry| entry.0.cmp(name)).ok()?;
    let (_, bytes, lines, numbers) = PTX[at];
    // The build wrote this data; zlib's checksum detects a defect. All texts are inflated together, since they are
    // alike: one by one they would take a quarter more of the library.
    let inflate = || miniz_oxide::inflate::decompress_to_vec_zlib_with_limit(PACKED, UNPACKED).ok();
    let all = ALL.get_or_init(inflate).as_deref()?;
    let templates: Vec<&[u8]> = all.get(..TEMPLATES)?.split(|&byte| byte == b'\n').collect();
    let (mut lines, mut numbers) = (all.get(lines..)?, all.get(numbers..)?);
    let (mut text, mut predictor, mut before) = (Vec::with_capacity(bytes + 1), Predictor::default(), 0);
    while text.len() < bytes {
        let index = read(&mut lines)?;
        let template = *templates.get(index as usize)?;
        let mut slot = 0;
        for (i, &byte) in template.iter().enumerate() {
            if byte != MARK {
                text.push(byte);
                continue;
            }
            let (place, class) = ((before, index, slot), *template.get(i.wrapping_sub(1))?);
            let number = read_difference(&mut numbers, predictor.expected(place, class))?;
            predictor.note(place, class, number);
            write!(text, "{number}").ok()?;
            slot += 1;
        }
        text.push(b'\n');
        before = index;
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use alloc::string::String;

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
        for (name, _) in super::APART {
            assert!(super::find(name).is_none() && super::is_text(name), "{name}");
            assert!(super::apart(&name.replace("_bf16_", "_f16_")).is_some(), "{name}");
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

    /// `ptx/compile` writes what `cksum` prints to folders of kernels (`replaced.rs`).
    #[test]
    #[cfg(unix)]
    fn the_checksum_is_that_of_the_command() {
        let mut shell = std::process::Command::new("sh");
        let shell = shell.args(["-c", "cat ptx/compiled/*.ptx | cksum"]).env("LC_ALL", "C");
        let done = shell.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("a shell");
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        assert_eq!(said.split(' ').next(), Some(alloc::format!("{}", super::checksum()).as_str()), "{said}");
    }

    #[test]
    fn what_is_embedded_is_the_file() {
        let all: usize = super::PTX.iter().map(|entry| entry.1).sum();
        assert!(super::PACKED.len() * 12 < all, "{} of {all} bytes", super::PACKED.len());
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("ptx/compiled");
        for &(name, ..) in super::PTX {
            let text = std::fs::read(folder.join(name).with_extension("ptx")).unwrap();
            assert!(super::find(name).unwrap().as_bytes() == text, "{name}");
        }
    }
}
