// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reductions, in rank order, in the elements' own type. Floats of 16 and 8 bits are not reduced here.

use crate::codes::{Failure, INVALID_ARGUMENT, Outcome, Type};
use std::ffi::c_int;

/// The operation, by its number in `nccl.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Sum,
    Product,
    Max,
    Min,
    Average,
}

/// An operation on elements of a type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction {
    operation: Operation,
    element: Type,
}

macro_rules! fold {
    ($t:ty, $terms:expr, $op:expr, $add:expr, $mul:expr, $average:expr) => {{
        let size = size_of::<$t>();
        let element = |bytes: &[u8], i: usize| {
            let mut raw = [0; size_of::<$t>()];
            raw.copy_from_slice(&bytes[i * size..][..size]);
            <$t>::from_le_bytes(raw)
        };
        let (first, rest) = ($terms[0], &$terms[1..]);
        (0..first.len() / size)
            .flat_map(|i| {
                let sum = rest.iter().fold(element(first, i), |a, other| {
                    let b = element(other, i);
                    match $op {
                        Operation::Sum | Operation::Average => $add(a, b),
                        Operation::Product => $mul(a, b),
                        Operation::Max => a.max(b),
                        Operation::Min => a.min(b),
                    }
                });
                let sum = if $op == Operation::Average { $average(sum) } else { sum };
                sum.to_le_bytes()
            })
            .collect()
    }};
}

macro_rules! integers {
    ($t:ty, $terms:expr, $op:expr) => {
        fold!($t, $terms, $op, <$t>::wrapping_add, <$t>::wrapping_mul, |s: $t| s / $terms.len() as $t)
    };
}

macro_rules! floats {
    ($t:ty, $terms:expr, $op:expr) => {
        fold!($t, $terms, $op, |a: $t, b| a + b, |a: $t, b| a * b, |s: $t| s / $terms.len() as $t)
    };
}

impl Reduction {
    pub(crate) fn new(operation: c_int, element: Type) -> Outcome<Self> {
        let operation = match operation {
            0 => Operation::Sum,
            1 => Operation::Product,
            2 => Operation::Max,
            3 => Operation::Min,
            4 => Operation::Average,
            _ => return Err(Failure::new(INVALID_ARGUMENT, format!("op is {operation}, expected one below 5"))),
        };
        if matches!(element, Type::F16 | Type::Bf16 | Type::F8) {
            let why = format!("the stand-in for NCCL does not reduce {element:?}: use 32 bits");
            return Err(Failure::new(INVALID_ARGUMENT, why));
        }
        Ok(Self { operation, element })
    }

    /// Of as many terms as there are ranks, of the same length.
    pub(crate) fn of(self, terms: &[&[u8]]) -> Vec<u8> {
        match self.element {
            Type::I8 => integers!(i8, terms, self.operation),
            Type::U8 | Type::F8 | Type::F16 | Type::Bf16 => integers!(u8, terms, self.operation),
            Type::I32 => integers!(i32, terms, self.operation),
            Type::U32 => integers!(u32, terms, self.operation),
            Type::I64 => integers!(i64, terms, self.operation),
            Type::U64 => integers!(u64, terms, self.operation),
            Type::F32 => floats!(f32, terms, self.operation),
            Type::F64 => floats!(f64, terms, self.operation),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_extremes() {
        let bytes = |x: [u64; 2]| x.map(u64::to_le_bytes).concat();
        let (a, b, c) = (bytes([1, u64::MAX]), bytes([5, 2]), bytes([3, 3]));
        let terms = [&a[..], &b, &c];
        for (op, expected) in [(0, [9, 4]), (1, [15, u64::MAX - 5]), (2, [5, u64::MAX]), (3, [1, 2])] {
            let reduction = Reduction::new(op, Type::U64).unwrap();
            assert_eq!(reduction.of(&terms), bytes(expected), "{op}");
        }
        let halves = [1.5f32, -2.0].map(f32::to_le_bytes).concat();
        let average = Reduction::new(4, Type::F32).unwrap().of(&[&halves, &[0; 8]]);
        assert_eq!(average, [0.75f32, -1.0].map(f32::to_le_bytes).concat());
        assert!(Reduction::new(5, Type::F32).is_err());
        assert!(Reduction::new(0, Type::Bf16).is_err());
    }
}
