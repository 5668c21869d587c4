// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which instruction set the kernels use.
//!
//! It is the fastest one of this machine, unless the caller sets another: with [`super::Scratch::with_isa`], or for the
//! whole program with the environment variable [`Isa::VARIABLE`]. An instruction set that the machine lacks is refused
//! before anything runs. [`Isa::Amx`] is the fastest wherever it is available. Bf16 dot products are not:
//! the processor's vendor and family choose between [`Isa::Avx512Bf16`] and [`Isa::Avx512`] (`benches/NOTES.md`).
//!
//! | | time with dot products, of that without |
//! |---|---|
//! | Intel Xeon with AMX, whose `vdpbf16ps` does half as many operations a second as f32 multiply-adds | 1.2 to 1.6 |
//! | Zen 5 | 0.5 to 0.6 |

use crate::element::Dtype;
use crate::error::{Error, Result};
use std::{ffi::OsString, sync::OnceLock};

/// An instruction set of the CPU kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Isa {
    /// Plain arrays, vectorised by the compiler for the target.
    Portable,
    /// NEON, on every AArch64.
    Neon,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F and DQ.
    Avx512,
    /// AVX-512 with BF16 dot products, for bf16; AVX-512 for the other types, and for the backward of aligned calls.
    /// The instruction takes subnormal bf16 for 0, as matrix units do.
    Avx512Bf16,
    /// AMX tiles. bf16 is used as it is; f16 as the sum of two bf16, or as it is if the machine has AMX-FP16; f32 as
    /// the sum of three bf16. AVX-512 is used for f64, for the backward of aligned calls, for f32 and f16 in parts in
    /// aligned calls and for short documents, and in the backward for very short documents of every type. Matrix units
    /// take subnormal numbers for 0, and so f32 tensors with nothing but numbers below 1e-30 lose digits: force
    /// [`Isa::Avx512`] for those.
    Amx,
}

impl Isa {
    /// The environment variable that forces an instruction set for the whole program: a name, as from [`Isa::name`].
    pub const VARIABLE: &'static str = "CPATTN_CPU_ISA";

    /// All instruction sets, from the simplest on.
    pub const ALL: [Self; 6] = [Self::Portable, Self::Neon, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// As the environment variable and tables spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
        }
    }

    /// Whether this machine has the instruction set, and the system permits its use.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            static AMX: OnceLock<bool> = OnceLock::new();
            match self {
                Self::Portable => true,
                Self::Neon => false,
                Self::Avx2 => super::vector::x86::has_avx2(),
                Self::Avx512 => super::vector::x86::has_avx512(),
                Self::Avx512Bf16 => super::vector::x86::has_avx512_bf16(),
                Self::Amx => *AMX.get_or_init(super::product::amx::available),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable || (cfg!(target_arch = "aarch64") && self == Self::Neon)
        }
    }

    /// The fastest instruction set of this machine.
    pub fn best() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_available() && isa.pays()).unwrap_or(Self::Portable)
    }

    /// Whether it is faster on this machine than those before it in [`Isa::ALL`], if it is available.
    fn pays(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self == Self::Avx512Bf16 {
            return super::vector::x86::dots_pay();
        }
        true
    }

    /// The instruction set that the environment variable names; if it is empty or unset, the fastest.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the variable holds no name, [`Error::Unsupported`] when the machine lacks it.
    pub fn chosen() -> Result<Self> {
        static CHOSEN: OnceLock<Result<Isa>> = OnceLock::new();
        CHOSEN.get_or_init(|| Self::from_variable(std::env::var_os(Self::VARIABLE))).clone()
    }

    /// The instruction set for a value of the environment variable.
    fn from_variable(value: Option<OsString>) -> Result<Self> {
        match value.filter(|name| !name.is_empty()) {
            None => Ok(Self::best()),
            Some(name) => {
                let isa = Self::named(&name.to_string_lossy())?;
                isa.required().map_err(|_| {
                    Error::unsupported(
                        std::format!("{}={isa}", Self::VARIABLE),
                        std::format!("this machine has {} at best", Self::best()),
                        "name another instruction set in the variable, or unset it: the best is taken",
                    )
                })
            }
        }
    }

    fn named(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::invalid(Self::VARIABLE, std::format!("{name:?}"), std::format!("one of {names}"))
                .hint("or unset it: the best instruction set of the machine is taken")
        })
    }

    /// Returns `self`, or an error if the machine lacks it.
    pub(crate) fn required(self) -> Result<Self> {
        if self.is_available() {
            return Ok(self);
        }
        Err(Error::unsupported(
            std::format!("instruction set {}", self.name()),
            std::format!("this machine has {} at best", Self::best().name()),
            "choose another one, or none: the best is taken",
        ))
    }

    /// The relative error of the roundings that this instruction set makes in addition to those of the sums: it rounds
    /// p, and in the backward ds, to the element type, as every flash attention of half precision does, and an f16 in
    /// two parts of bf16 to 16 bits. 0 if it makes none.
    pub fn roundoff(self, dtype: Dtype) -> f64 {
        match dtype {
            Dtype::F16 if self.has_tiles(dtype) && !self.has_tiles_of(dtype) => 1.0 / 65_536.0,
            _ if self.has_tiles_of(dtype) => dtype.unit_roundoff(),
            _ => 0.0,
        }
    }

    /// The vectors of this instruction set, without its tiles.
    pub(super) fn vectors(self) -> Self {
        if matches!(self, Self::Amx | Self::Avx512Bf16) { Self::Avx512 } else { self }
    }

    /// Whether products of this type go through matrix units.
    pub(super) fn has_tiles(self, dtype: Dtype) -> bool {
        match self {
            Self::Amx => dtype != Dtype::F64,
            Self::Avx512Bf16 => dtype == Dtype::Bf16,
            _ => false,
        }
    }

    /// Whether matrix units take elements of this type without a division into parts.
    pub(super) fn has_tiles_of(self, dtype: Dtype) -> bool {
        match dtype {
            Dtype::Bf16 => matches!(self, Self::Amx | Self::Avx512Bf16),
            #[cfg(target_arch = "x86_64")]
            Dtype::F16 => self == Self::Amx && super::product::amx::has_f16(),
            _ => false,
        }
    }
}

impl core::fmt::Display for Isa {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn names_and_refusals() {
        for isa in Isa::ALL {
            assert_eq!(Isa::named(isa.name()), Ok(isa));
            match isa.required() {
                Ok(found) => assert_eq!(found, isa),
                Err(error) => {
                    assert!(error.to_string().contains(isa.name()) && !isa.is_available(), "{error}");
                    let forced = Isa::from_variable(Some(isa.name().into())).unwrap_err().to_string();
                    assert!(forced.starts_with(&std::format!("CPATTN_CPU_ISA={isa} is not supported: ")), "{forced}");
                }
            }
        }
        let error = Isa::named("sse9").unwrap_err().to_string();
        assert!(
            error.starts_with(
                "CPATTN_CPU_ISA is \"sse9\", expected one of portable, neon, avx2, avx512, avx512bf16, amx"
            ),
            "{error}"
        );
        assert!(Isa::best().is_available());
        assert_eq!(Isa::from_variable(None), Ok(Isa::best()));
        assert_eq!(Isa::from_variable(Some("".into())), Ok(Isa::best()), "set but empty is unset");
        assert_eq!(Isa::from_variable(Some("portable".into())), Ok(Isa::Portable));
        assert!(Isa::from_variable(Some(" ".into())).is_err());
    }
}
