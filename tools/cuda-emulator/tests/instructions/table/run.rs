// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs a case on the interpreter, without a driver.

use super::case::{Case, Map};
use cuda_emulator::{Launch, Memory, Module, Options, Swizzle, TensorMap, launch};

/// What the emulator's device reads.
fn encode(m: &Map, address: u64) -> Result<[u8; 128], String> {
    let map = TensorMap {
        element: if m.element == 7 { 4 } else { 2 },
        f32: m.element == 7,
        address,
        dims: m.dims.clone(),
        strides: m.strides.clone(),
        shape: m.shape.clone(),
        swizzle: Swizzle::of(m.swizzle).ok_or("no such swizzle")?,
        fill_nan: m.fill_nan,
    };
    map.check()?;
    Ok(map.encode())
}

/// The buffer after the launch.
pub fn interpret(case: &Case, seed: u64, eager: bool) -> Result<Vec<u8>, String> {
    let mut mem = Memory::new();
    let module = Module::parse(&case.ptx()).map_err(|e| e.to_string())?;
    let loaded = module.load(&mut mem).map_err(|e| e.to_string())?;
    let kernel = loaded.kernel("k").ok_or("no kernel `k`")?;
    let before = case.buffer();
    let buffer = mem.alloc(before.len());
    mem.write(buffer, &before).map_err(|e| e.1)?;
    let mut params = vec![0; kernel.param_bytes()];
    let given = std::iter::once(buffer.to_le_bytes().to_vec()).chain(case.parameters(buffer, encode)?);
    for (p, bytes) in kernel.params().iter().zip(given) {
        params[p.offset..p.offset + p.size].copy_from_slice(&bytes);
    }
    let how = Launch {
        grid: [case.blocks, 1, 1],
        block: [case.threads, 1, 1],
        cluster: [1; 3],
        dynamic_shared: 0,
        params: &params,
        options: Options { seed, eager, spin_limit: 2_000_000, ..Options::default() },
    };
    launch(kernel, &mut mem, &how).map_err(|e| e.to_string())?;
    mem.read(buffer, before.len()).map_err(|e| e.1)
}
