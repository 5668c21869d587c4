// SPDX-License-Identifier: MIT OR Apache-2.0
//! The two families of attention kernels, and how one of them is forced.

use crate::error::{Error, Result};
use std::ffi::OsString;

/// The compute capability that the attention kernels of a device were compiled for. The other kernels are always those
/// for `sm_80`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Family {
    /// For compute capability 8.0 and every later one.
    Sm80,
    /// For compute capability 9.0 only. Calls whose tensors cannot be described by tensor maps still use those for
    /// `sm_80`.
    Sm90a,
}

impl Family {
    /// The environment variable that forces one on every device of the program: a name as [`Family::name`] gives it.
    pub const VARIABLE: &'static str = "CPATTN_CUDA_FAMILY";

    /// All families.
    pub const ALL: [Self; 2] = [Self::Sm80, Self::Sm90a];

    /// The name, as in the environment variable.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm90a => "sm_90a",
        }
    }

    /// The family that the environment variable names; `None` if it is unset or empty.
    pub(super) fn of_environment() -> Result<Option<Self>> {
        Self::from_variable(std::env::var_os(Self::VARIABLE))
    }

    /// The family for a value of the environment variable.
    fn from_variable(value: Option<OsString>) -> Result<Option<Self>> {
        let Some(name) = value.filter(|name| !name.is_empty()) else { return Ok(None) };
        let named = Self::ALL.into_iter().find(|family| name == family.name());
        named.map(Some).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::invalid(Self::VARIABLE, std::format!("{name:?}"), std::format!("one of {names}"))
                .hint("or unset it: the family follows the device")
        })
    }

    /// The refusal of a device that lacks `sm_90a`.
    pub(super) fn refused(why: std::string::String) -> Error {
        Error::unsupported(
            std::format!("the kernels for {}", Self::Sm90a.name()),
            why,
            "take sm_80, or leave the choice to the device: unset CPATTN_CUDA_FAMILY and name none",
        )
    }

    /// The driver's refusal of a text for `sm_90a`, with the way out.
    pub(super) fn with_way_out(error: Error) -> Error {
        match error {
            Error::Device { call, code, message } => Error::Device {
                call,
                code,
                message: std::format!(
                    "{message}; {}={} (or Cuda::with_family) takes the kernels for it instead",
                    Self::VARIABLE,
                    Self::Sm80.name()
                ),
            },
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn names_and_refusals() {
        for family in Family::ALL {
            assert_eq!(Family::from_variable(Some(family.name().into())), Ok(Some(family)));
        }
        assert_eq!(Family::from_variable(None), Ok(None));
        assert_eq!(Family::from_variable(Some("".into())), Ok(None), "set but empty is unset");
        for wrong in ["sm_90", "SM_80", " sm_80", "80"] {
            let error = Family::from_variable(Some(wrong.into())).unwrap_err().to_string();
            let expected = std::format!("CPATTN_CUDA_FAMILY is {wrong:?}, expected one of sm_80, sm_90a");
            assert!(error.starts_with(&expected), "{error}");
        }
    }
}
