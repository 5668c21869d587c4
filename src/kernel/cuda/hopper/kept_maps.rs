// SPDX-License-Identifier: MIT OR Apache-2.0
//! A cache of encoded tensor maps. A map depends on numbers alone (type, dims, strides, box, address), so it serves
//! every launch with the same numbers.

use crate::error::Result;
use crate::kernel::cuda::abi::params::Tensor;
use crate::kernel::cuda::hopper::maps::{Map, MapShape};
use alloc::boxed::Box;
use alloc::vec;
use std::sync::{Mutex, PoisonError};

/// Entries of a set, and the number of sets.
const WAYS: usize = 4;
const SETS: usize = 64;

type Key = (MapShape, Tensor);

/// The maps of one device. A full set replaces its oldest entry.
#[derive(Debug)]
pub(in crate::kernel::cuda) struct KeptMaps(Mutex<Box<[Set]>>);

#[derive(Clone, Debug, Default)]
struct Set {
    maps: [Option<(Key, Map)>; WAYS],
    oldest: usize,
}

impl KeptMaps {
    /// An empty cache; without entries on devices that use no maps.
    pub(in crate::kernel::cuda) fn new(is_used: bool) -> Self {
        Self(Mutex::new(vec![Set::default(); if is_used { SETS } else { 0 }].into_boxed_slice()))
    }

    /// The map of a tensor: from the cache, or made by `encode` and then cached. A result of `None` is not cached.
    pub(in crate::kernel::cuda) fn find(
        &self,
        shape: MapShape,
        t: Tensor,
        encode: impl FnOnce() -> Result<Option<Map>>,
    ) -> Result<Option<Map>> {
        // A panic leaves every map complete, since a map is written in one assignment.
        let mut sets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (shape, t);
        let Some(set) = sets.get_mut(number(&key) % SETS) else { return encode() };
        if let Some((_, map)) = set.maps.iter().flatten().find(|(kept, _)| *kept == key) {
            return Ok(Some(*map));
        }
        let Some(map) = encode()? else { return Ok(None) };
        set.maps[set.oldest] = Some((key, map));
        set.oldest = (set.oldest + 1) % WAYS;
        Ok(Some(map))
    }
}

/// Hash of a key.
fn number((shape, t): &Key) -> usize {
    let words = [t.ptr, t.token as u64, t.head as u64, shape.tokens, shape.span.into(), shape.rows.into()];
    let mixed = words.iter().fold(0u64, |x, w| (x.rotate_left(5) ^ w).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (mixed >> 32) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Dtype;
    use core::cell::Cell;

    const SHAPE: MapShape =
        MapShape { dtype: Dtype::F16, dim: 64, heads: 2, tokens: 10, span: 4, rows: 128, box_heads: 1 };
    const TENSOR: Tensor = Tensor { ptr: 1 << 20, token: 256, head: 128 };

    #[test]
    fn maps_are_made_once_for_the_same_numbers() {
        let (kept, made) = (KeptMaps::new(true), Cell::new(0u8));
        let map = |shape, t| {
            let map = kept.find(shape, t, || {
                made.set(made.get() + 1);
                Ok(Some(Map([made.get(); 128])))
            });
            map.expect("no refusal").expect("made").0[0]
        };
        assert_eq!([map(SHAPE, TENSOR), map(SHAPE, TENSOR)], [1, 1]);
        // Another address, stride, length, box or type is another map, and the first one stays.
        let others = [
            (SHAPE, Tensor { ptr: 1 << 21, ..TENSOR }),
            (SHAPE, Tensor { token: 512, ..TENSOR }),
            (SHAPE, Tensor { head: 512, ..TENSOR }),
            (MapShape { span: 5, ..SHAPE }, TENSOR),
            (MapShape { rows: 64, ..SHAPE }, TENSOR),
            (MapShape { box_heads: 2, ..SHAPE }, TENSOR),
            (MapShape { dtype: Dtype::Bf16, ..SHAPE }, TENSOR),
        ];
        for (i, (shape, t)) in (2..).zip(others) {
            assert_eq!([map(shape, t), map(shape, t)], [i, i]);
        }
        // If more keys fall into a set than it holds, maps may be encoded again; no map is taken for another.
        assert!(kept.find(MapShape { tokens: 11, ..SHAPE }, TENSOR, || Ok(None)).expect("no refusal").is_none());
        let before = made.get();
        assert_eq!(map(MapShape { tokens: 11, ..SHAPE }, TENSOR), before + 1);
    }

    #[test]
    fn the_oldest_of_a_set_goes() {
        let (kept, made) = (KeptMaps::new(true), Cell::new(0u32));
        let rows = |ptr: u64| Tensor { ptr: ptr << 8, ..TENSOR };
        for round in 0..2 {
            for ptr in 0..10 * (SETS * WAYS) as u64 {
                let map = kept.find(SHAPE, rows(ptr), || {
                    made.set(made.get() + 1);
                    Ok(Some(Map([ptr as u8; 128])))
                });
                assert_eq!(map.expect("no refusal").expect("made").0[5], ptr as u8, "{round}");
            }
        }
        assert!(made.get() > 10 * (SETS * WAYS) as u32);
        // Without room every map is made.
        let none = KeptMaps::new(false);
        assert!((0..3).all(|i| {
            none.find(SHAPE, TENSOR, || Ok(Some(Map([i; 128])))).is_ok_and(|m| m.is_some_and(|m| m.0[0] == i))
        }));
    }
}
