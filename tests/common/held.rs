// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensors on a device, made of values of the host and read back.

use bytemuck::Pod;
use cpattn::{
    Element,
    call::RawTensor,
    kernel::cuda::{Cuda, DeviceMemory},
    runtime::Bindings,
    schedule::TensorId,
};

/// A tensor on the device, and how it is shaped.
pub struct Held(pub DeviceMemory, pub RawTensor);

impl Held {
    pub fn new<T: Element>(cuda: &Cuda, values: &[T], tokens: usize, heads: usize, dim: usize) -> Self {
        let memory = cuda.allocate(size_of_val(values)).unwrap();
        memory.upload(bytemuck::cast_slice(values)).unwrap();
        let raw = RawTensor::compact(memory.ptr(), T::DTYPE, tokens as u64, heads as u32, dim as u32);
        Self(memory, raw)
    }

    pub fn nan<T: Element>(cuda: &Cuda, tokens: usize, heads: usize, dim: usize) -> Self {
        Self::new(cuda, &vec![T::from_f64(f64::NAN); tokens * heads * dim], tokens, heads, dim)
    }

    /// All elements, or all bytes.
    pub fn read<T: Pod>(&self) -> Vec<T> {
        let mut out = vec![T::zeroed(); self.0.bytes() / size_of::<T>()];
        self.0.download(bytemuck::cast_slice_mut(&mut out)).unwrap();
        out
    }
}

/// The tensors q, k, v, o and lse of a forward.
pub fn of_forward(tensors: [&Held; 5]) -> Bindings {
    let ids = [TensorId::Q, TensorId::K, TensorId::V, TensorId::O, TensorId::Lse];
    ids.into_iter().zip(tensors).fold(Bindings::default(), |bindings, (id, held)| bindings.with(id, held.1))
}
