// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensor maps: what a tensor copy knows of its tensor.
//!
//! A map says where a tensor of up to five dimensions lies, how large a box a copy moves, and how the box lies in
//! shared memory: rows of the innermost dimension one after another, their pieces of 16 bytes exchanged by a swizzle.
//! What is in the box and not in the tensor reads as zeros (or NaN) and is not written.
//!
//! The 128 bytes of a map are opaque on a device. Here they hold the fields of [`TensorMap`] in the order in which
//! [`TensorMap::encode`] writes them, and a sum by which anything else is told apart.

/// Exchange of 16-byte pieces within rows of so many bytes, repeated every eight rows of 128 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swizzle {
    /// Rows as they are.
    None,
    /// Rows of 32 bytes.
    B32,
    /// Rows of 64 bytes.
    B64,
    /// Rows of 128 bytes.
    B128,
}

impl Swizzle {
    /// By the number that `CUtensorMapSwizzle` has for it.
    pub fn of(code: u32) -> Option<Self> {
        [Self::None, Self::B32, Self::B64, Self::B128].get(code as usize).copied()
    }

    /// Bytes of a row; 16 without a swizzle.
    pub(crate) fn width(self) -> u32 {
        16 << self as u32
    }

    /// Where a byte of shared memory lies: address bits 4 to 6 are changed by bits 7 to 9.
    #[inline]
    pub(crate) fn place(self, address: u32) -> u32 {
        address ^ (address >> 3 & (self.width() - 16))
    }
}

/// A tensor and the box that its copies move; dimensions from the innermost on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Bytes of an element.
    pub element: u32,
    /// Whether elements are f32, which is what reductions add.
    pub f32: bool,
    /// Address of the first element. It need not be inside an allocation: only what a copy touches has to be.
    pub address: u64,
    /// Elements in each dimension.
    pub dims: Vec<u64>,
    /// Bytes from one element to the next, in each dimension but the innermost.
    pub strides: Vec<u64>,
    /// Elements of the box in each dimension.
    pub shape: Vec<u32>,
    /// How rows lie in shared memory.
    pub swizzle: Swizzle,
    /// Elements outside of the tensor read as NaN, not as zero.
    pub fill_nan: bool,
}

const MAGIC: u64 = 0x7061_6d2d_736e_6574;

impl TensorMap {
    /// What the driver refuses: the argument and its limit.
    pub fn check(&self) -> Result<(), String> {
        let rank = self.dims.len();
        if !(1..=5).contains(&rank) || self.strides.len() + 1 != rank || self.shape.len() != rank {
            return Err(format!(
                "rank {rank}: 1 to 5 dimensions, with a stride for all but the first and a box for each"
            ));
        }
        if !self.address.is_multiple_of(16) {
            return Err(format!("address {:#x} is not a multiple of 16", self.address));
        }
        if let Some(d) = self.dims.iter().find(|d| !(1..=1 << 32).contains(*d)) {
            return Err(format!("dimension of {d} elements: 1 to 2^32"));
        }
        if let Some(s) = self.strides.iter().find(|s| !s.is_multiple_of(16) || **s >= 1 << 40) {
            return Err(format!("stride of {s} bytes: a multiple of 16 below 2^40"));
        }
        if let Some(b) = self.shape.iter().find(|b| !(1..=256).contains(*b)) {
            return Err(format!("box of {b} elements: 1 to 256"));
        }
        let inner = self.shape[0] * self.element;
        if !inner.is_multiple_of(16) {
            return Err(format!("the box's rows have {inner} bytes: a multiple of 16"));
        }
        if self.swizzle != Swizzle::None && inner > self.swizzle.width() {
            return Err(format!(
                "the box's rows have {inner} bytes: {:?} allows {}",
                self.swizzle,
                self.swizzle.width()
            ));
        }
        Ok(())
    }

    /// Bytes of a box.
    pub fn bytes(&self) -> u32 {
        self.element * self.shape.iter().product::<u32>()
    }

    /// What the device reads.
    pub fn encode(&self) -> [u8; 128] {
        let mut out = Vec::with_capacity(128);
        out.extend(MAGIC.to_le_bytes());
        out.extend(self.address.to_le_bytes());
        let flags = u8::from(self.fill_nan) | u8::from(self.f32) << 1;
        out.extend([self.dims.len() as u8, self.element as u8, self.swizzle as u8, flags]);
        for k in 0..5 {
            // Up to 2^32 elements, less one to fit into four bytes.
            out.extend((self.dims.get(k).map_or(0, |d| d - 1) as u32).to_le_bytes());
            out.extend((self.shape.get(k).map_or(0, |b| *b) as u16).to_le_bytes());
        }
        for k in 0..4 {
            out.extend(self.strides.get(k).copied().unwrap_or(0).to_le_bytes());
        }
        out.extend(sum(&out).to_le_bytes());
        out.resize(128, 0);
        let mut map = [0; 128];
        map.copy_from_slice(&out);
        map
    }

    /// Reads a map back; `None` when the bytes are none.
    pub fn decode(map: &[u8; 128]) -> Option<Self> {
        const END: usize = 20 + 5 * 6 + 4 * 8;
        let number = |at: usize, n: usize| map[at..at + n].iter().rev().fold(0u64, |v, &b| v << 8 | u64::from(b));
        if number(0, 8) != MAGIC || number(END, 8) != sum(&map[..END]) {
            return None;
        }
        let rank = usize::from(map[16]);
        Some(Self {
            address: number(8, 8),
            element: map[17].into(),
            swizzle: Swizzle::of(map[18].into())?,
            fill_nan: map[19] & 1 == 1,
            f32: map[19] & 2 == 2,
            dims: (0..rank).map(|k| number(20 + 6 * k, 4) + 1).collect(),
            shape: (0..rank).map(|k| number(24 + 6 * k, 2) as u32).collect(),
            strides: (0..rank - 1).map(|k| number(50 + 8 * k, 8)).collect(),
        })
    }

    /// Calls `f` for each row of the box at these coordinates: its number, the address of its first element (which may
    /// lie outside of the tensor), and which of its bytes are in the tensor.
    pub(crate) fn rows(&self, at: &[i32], mut f: impl FnMut(u32, u64, std::ops::Range<u32>)) {
        let inner = self.shape[0] * self.element;
        let (x, size) = (i64::from(at[0]), self.dims[0] as i64);
        let inside = |e: i64| (e.clamp(0, i64::from(self.shape[0])) as u32) * self.element;
        let columns = inside(-x)..inside(size - x);
        let rows: u32 = self.shape[1..].iter().product();
        for row in 0..rows {
            let (mut rest, mut address, mut within) = (row, self.address, !columns.is_empty());
            for (d, &n) in self.shape.iter().enumerate().skip(1) {
                let c = i64::from(at[d]) + i64::from(rest % n);
                rest /= n;
                within &= (0..self.dims[d] as i64).contains(&c);
                address = address.wrapping_add((c as u64).wrapping_mul(self.strides[d - 1]));
            }
            address = address.wrapping_add((x * i64::from(self.element)) as u64);
            f(row, address, if within { columns.clone() } else { inner..inner });
        }
    }

    /// Sixteen bytes of what is not in the tensor.
    pub(crate) fn filling(&self) -> [u8; 16] {
        if self.fill_nan { [0xff; 16] } else { [0; 16] }
    }
}

/// FNV-1a: tells a map from other bytes.
fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> TensorMap {
        TensorMap {
            element: 2,
            f32: false,
            address: 0x1000,
            dims: vec![100, 1 << 32, 3],
            strides: vec![256, 0],
            shape: vec![64, 4, 2],
            swizzle: Swizzle::B128,
            fill_nan: true,
        }
    }

    #[test]
    fn survives_its_bytes() {
        let m = map();
        assert_eq!(TensorMap::decode(&m.encode()), Some(m.clone()));
        let mut bytes = m.encode();
        bytes[30] ^= 1;
        assert_eq!(TensorMap::decode(&bytes), None);
        assert_eq!(m.check(), Ok(()));
        assert_eq!(m.bytes(), 64 * 4 * 2 * 2);
    }

    #[test]
    fn says_what_is_wrong() {
        for (change, what) in [
            ((|m| m.address = 8) as fn(&mut TensorMap), "address 0x8"),
            (|m| m.strides[0] = 8, "stride of 8"),
            (|m| m.strides[1] = 1 << 40, "stride of 1099511627776"),
            (|m| m.dims[2] = 0, "dimension of 0"),
            (|m| m.shape[1] = 257, "box of 257"),
            (|m| m.shape[0] = 4, "rows have 8 bytes"),
            (|m| m.shape[0] = 72, "B128 allows 128"),
            (|m| m.dims = vec![1; 6], "rank 6"),
        ] {
            let mut m = map();
            change(&mut m);
            let said = m.check().unwrap_err();
            assert!(said.contains(what), "{said}");
        }
    }

    #[test]
    fn rows_of_a_box() {
        let mut seen = Vec::new();
        map().rows(&[60, -1, 2], |row, address, inside| seen.push((row, address, inside)));
        // 40 of 64 columns are left; row -1 and part 3 are outside.
        assert_eq!(seen.len(), 8);
        assert_eq!(seen[0], (0, 0x1000 + 120 - 256, 128..128));
        assert_eq!(seen[1], (1, 0x1000 + 120, 0..80));
        assert_eq!(seen[3], (3, 0x1000 + 120 + 512, 0..80));
        assert!(seen[4..].iter().all(|s| s.2.is_empty()));
        let mut seen = Vec::new();
        map().rows(&[-8, 5, 0], |_, address, inside| seen.push((address, inside)));
        assert_eq!(seen[0], (0x1000 - 16 + 5 * 256, 16..128));
    }

    #[test]
    fn swizzles_exchange_pieces() {
        // Row 3 of 128 bytes, piece 5.
        assert_eq!(Swizzle::B128.place(3 * 128 + 5 * 16 + 7), 3 * 128 + (5 ^ 3) * 16 + 7);
        // Rows of 64 bytes: two share 128 bytes and the same exchange.
        assert_eq!(Swizzle::B64.place(7 * 64 + 16), 7 * 64 + (1 ^ 3) * 16);
        assert_eq!(Swizzle::B32.place(3 * 32 + 16), 3 * 32 + 16);
        assert_eq!(Swizzle::B32.place(4 * 32 + 16), 4 * 32);
        assert_eq!(Swizzle::None.place(999), 999);
    }
}
