// SPDX-License-Identifier: MIT OR Apache-2.0
//! The forward kernels for `sm_90a` in clusters of two blocks: whether clusters are asked for, and which calls can use
//! them.
//!
//! Two q heads of one kv head read the same k and v under any mask. The two blocks of a cluster multiply a tile of one
//! head each, and each block copies half of every tile of keys to both: k and v come from L2 once for two heads. The
//! bits are those of the kernels without clusters, which do all other calls. The speed has not been measured, so
//! clusters are off unless they are asked for.

use crate::call::Attend;
use crate::error::{Error, Result};
use crate::kernel::cuda::abi::shapes::SHAPES;
use alloc::string::String;
use std::ffi::OsString;

/// The environment variable that asks for clusters.
pub(in crate::kernel::cuda) const VARIABLE: &str = "CPATTN_CUDA_CLUSTER";

/// Its module, which no library has.
pub(in crate::kernel::cuda) const MODULE: &str = "hopper_cluster_bf16_128";

/// Whether there is such a kernel, by the index of [`SHAPES`].
pub(in crate::kernel::cuda) const HAS_KERNEL: [bool; SHAPES.len()] = [false, false, true, false, false, false, false];

/// Whether the environment asks for clusters.
pub(in crate::kernel::cuda) fn of_environment() -> Result<bool> {
    from_variable(std::env::var_os(VARIABLE))
}

/// The meaning of a value of the environment variable.
fn from_variable(value: Option<OsString>) -> Result<bool> {
    match value {
        Some(value) if value == "1" => Ok(true),
        Some(value) if !value.is_empty() && value != "0" => {
            Err(Error::invalid(VARIABLE, std::format!("{value:?}"), "0 or 1")
                .hint("or unset it: there are no clusters then"))
        }
        _ => Ok(false),
    }
}

/// The refusal of clusters: `why` the device cannot run kernels for `sm_90a`, or none if other kernels are forced.
pub(in crate::kernel::cuda) fn refused(why: Option<String>) -> Error {
    let (why, way_out) = match why {
        Some(why) => (why, "unset CPATTN_CUDA_CLUSTER, or set it to 0"),
        None => (
            "they are kernels for sm_90a, and those for sm_80 are forced".into(),
            "unset CPATTN_CUDA_CLUSTER, or CPATTN_CUDA_FAMILY, or name the family sm_90a",
        ),
    };
    Error::unsupported("clusters of two blocks (CPATTN_CUDA_CLUSTER=1)", why, way_out)
}

/// Whether the q heads of a call are pairs, each of one kv head.
pub(in crate::kernel::cuda) fn are_pairs(call: &Attend) -> bool {
    call.heads.group.is_multiple_of(2) && call.heads.q_offset.is_multiple_of(2) && call.q.heads.is_multiple_of(2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn values_of_the_variable() {
        for (value, asked) in [(None, false), (Some(""), false), (Some("0"), false), (Some("1"), true)] {
            assert_eq!(from_variable(value.map(OsString::from)), Ok(asked));
        }
        for wrong in ["2", "on", " 1", "true"] {
            let error = from_variable(Some(wrong.into())).unwrap_err().to_string();
            assert!(error.starts_with(&std::format!("CPATTN_CUDA_CLUSTER is {wrong:?}, expected 0 or 1")), "{error}");
        }
    }
}
