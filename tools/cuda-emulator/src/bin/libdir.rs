// SPDX-License-Identifier: MIT OR Apache-2.0
//! Prints the folder that holds the stand-in driver as `libcuda.so.1`, for `LD_LIBRARY_PATH`.

fn main() -> std::process::ExitCode {
    match cuda_emulator::driver::library_dir() {
        Ok(folder) => {
            println!("{}", folder.display());
            std::process::ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("{e}");
            std::process::ExitCode::FAILURE
        }
    }
}
