// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs a case on the interpreter, without a driver.

use super::case::Case;
use cuda_emulator::{Launch, Memory, Module, Options, launch};

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
    let given = std::iter::once(buffer.to_le_bytes().to_vec()).chain(case.extra.iter().map(|e| e.bytes.clone()));
    for (p, bytes) in kernel.params().iter().zip(given) {
        params[p.offset..p.offset + p.size].copy_from_slice(&bytes);
    }
    let how = Launch {
        grid: [case.blocks, 1, 1],
        block: [case.threads, 1, 1],
        dynamic_shared: 0,
        params: &params,
        options: Options { seed, eager, spin_limit: 2_000_000, ..Options::default() },
    };
    launch(kernel, &mut mem, &how).map_err(|e| e.to_string())?;
    mem.read(buffer, before.len()).map_err(|e| e.1)
}
