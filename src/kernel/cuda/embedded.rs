// SPDX-License-Identifier: MIT OR Apache-2.0
//! The PTX of `ptx/`, as `build.rs` lists it.

use core::ffi::CStr;

include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// The text of `ptx/{name}.ptx`.
pub(super) fn find(name: &str) -> Option<&'static CStr> {
    let at = PTX.binary_search_by(|entry| entry.0.cmp(name)).ok()?;
    CStr::from_bytes_with_nul(PTX[at].1.as_bytes()).ok()
}

#[cfg(test)]
mod tests {
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
}
