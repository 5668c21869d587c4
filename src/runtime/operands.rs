// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a typed call takes as a tensor: views of host memory or of a device, and slices of the host for tables by head.
//!
//! A call keeps the address and the device of each, not its type, so that one call serves both kinds of memory. The
//! lifetime of the views stays with the call.

use core::fmt::Debug;
use std::vec::Vec;

#[cfg(feature = "cuda")]
use crate::tensor::{DeviceView, DeviceViewMut};
use crate::{
    call::RawTensor,
    device::Device,
    element::Element,
    tensor::{View, ViewMut},
};

mod sealed {
    use super::{Debug, Device, RawTensor};

    /// A tensor without its type, and where it lies; `None` for one that is left out.
    pub trait Operand: Debug + Sized {
        fn operand(self) -> Option<(Device, RawTensor)>;
    }
}
pub(super) use sealed::Operand;

/// A tensor that a call reads: a [`View`] of host memory, or a `DeviceView`; for a table with an entry for each q head
/// also a slice, a vector or an array of the host, by reference. An `Option` of one leaves out a tensor that is
/// optional.
pub trait InputTensor<'a>: Operand {
    /// The type of its elements.
    type Element: Element;
}

/// A tensor that a call writes: a [`ViewMut`] of host memory, or a `DeviceViewMut`; for a table with an entry for each
/// q head also a slice, a vector or an array of the host, by exclusive reference. An `Option` of one leaves out a
/// tensor that is optional.
pub trait OutputTensor<'a>: Operand {
    /// The type of its elements.
    type Element: Element;
}

macro_rules! views {
    ($($role:ident: $view:ident on $device:expr;)*) => {$(
        impl<T: Element> Operand for $view<'_, T> {
            fn operand(self) -> Option<(Device, RawTensor)> {
                let device: fn(&Self) -> Device = $device;
                Some((device(&self), self.raw()))
            }
        }

        impl<'a, T: Element> $role<'a> for $view<'a, T> {
            type Element = T;
        }
    )*};
}

views! {
    InputTensor: View on |_| Device::Cpu;
    OutputTensor: ViewMut on |_| Device::Cpu;
}

#[cfg(feature = "cuda")]
views! {
    InputTensor: DeviceView on Self::device;
    OutputTensor: DeviceViewMut on Self::device;
}

/// An entry for each q head.
fn table<T: Element>(first: *const T, len: usize) -> Option<(Device, RawTensor)> {
    Some((Device::Cpu, RawTensor::compact(first.cast_mut().cast(), T::DTYPE, 1, len as u32, 1)))
}

macro_rules! tables {
    ($([$($length:tt)*] $table:ty;)*) => {$(
        impl<T: Element, $($length)*> Operand for &$table {
            fn operand(self) -> Option<(Device, RawTensor)> {
                table(self.as_ptr(), self.len())
            }
        }

        impl<T: Element, $($length)*> Operand for &mut $table {
            fn operand(self) -> Option<(Device, RawTensor)> {
                table(self.as_mut_ptr(), self.len())
            }
        }

        impl<'a, T: Element, $($length)*> InputTensor<'a> for &'a $table {
            type Element = T;
        }

        impl<'a, T: Element, $($length)*> OutputTensor<'a> for &'a mut $table {
            type Element = T;
        }
    )*};
}

tables! {
    [] [T];
    [] Vec<T>;
    [const N: usize] [T; N];
}

impl<X: Operand> Operand for Option<X> {
    fn operand(self) -> Option<(Device, RawTensor)> {
        self.and_then(Operand::operand)
    }
}

impl<'a, X: InputTensor<'a>> InputTensor<'a> for Option<X> {
    type Element = X::Element;
}

impl<'a, X: OutputTensor<'a>> OutputTensor<'a> for Option<X> {
    type Element = X::Element;
}
