// SPDX-License-Identifier: MIT OR Apache-2.0
//! Loads PTX files and lists what each kernel needs: a quick answer to "does the emulator know these instructions?"

use cuda_emulator::Module;

fn main() -> std::process::ExitCode {
    let mut bad = 0;
    for path in std::env::args().skip(1) {
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) => {
                println!("{path}: {e}");
                bad += 1;
                continue;
            }
        };
        let mut mem = cuda_emulator::Memory::new();
        match Module::parse(&text).and_then(|m| m.load(&mut mem)) {
            Ok(loaded) => {
                for k in loaded.kernels() {
                    println!(
                        "{path}: `{}`: {} bytes of parameters, {} of static shared and {} of local memory, {} threads",
                        k.name(),
                        k.param_bytes(),
                        k.static_shared(),
                        k.local_bytes(),
                        k.max_threads()
                    );
                }
            }
            Err(e) => {
                println!("{path}: {e}");
                bad += 1;
            }
        }
    }
    if bad == 0 { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
}
