// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finding the shared library and putting it where programs look for a driver.
//!
//! Cargo builds the library as `libcuda_emulator.so` beside everything else of this crate. There are two ways to use
//! it:
//!
//! - [`library_dir`] makes a folder that holds it as `libcuda.so.1` (and `libcuda.so`), for `LD_LIBRARY_PATH` of a
//!   child;
//! - [`install`] loads it into this very process. Its name, as the loader knows it, is `libcuda.so`: a program that
//!   loads that afterwards gets it.

use std::ffi::{CString, OsStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Why the stand-in driver cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InstallError {
    /// No library was found beside the running program; the folders that were searched.
    NotBuilt(Vec<PathBuf>),
    /// The folder or a link in it could not be made.
    Folder(PathBuf, String),
    /// The loader refused the library.
    Load(String),
}

impl std::fmt::Display for InstallError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotBuilt(at) => {
                write!(f, "no libcuda_emulator.so in {at:?}: build it with `cargo build -p cuda-emulator`")
            }
            Self::Folder(path, why) => write!(f, "{}: {why}", path.display()),
            Self::Load(why) => write!(f, "{why}"),
        }
    }
}

impl std::error::Error for InstallError {}

/// The newest library beside the running program, in its folder, the one above, or their `deps`.
pub fn library() -> Result<PathBuf, InstallError> {
    newest("libcuda_emulator")
}

fn newest(prefix: &str) -> Result<PathBuf, InstallError> {
    let program = std::env::current_exe().unwrap_or_default();
    let mut folders = Vec::new();
    for up in program.ancestors().skip(1).take(2) {
        folders.push(up.to_owned());
        folders.push(up.join("deps"));
    }
    let ours = |name: &OsStr| {
        let name = name.to_string_lossy();
        name.starts_with(prefix) && name.ends_with(".so")
    };
    let newest = folders
        .iter()
        .filter_map(|f| std::fs::read_dir(f).ok())
        .flatten()
        .flatten()
        .filter(|e| ours(&e.file_name()))
        .max_by_key(|e| e.metadata().and_then(|m| m.modified()).ok());
    newest.map(|e| e.path()).ok_or(InstallError::NotBuilt(folders))
}

/// Makes `folder` (if need be) with links of these names to a library.
fn link(folder: &Path, library: &Path, names: &[&str]) -> Result<(), String> {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    std::fs::create_dir_all(folder).map_err(|e| e.to_string())?;
    for name in names {
        let to = folder.join(name);
        if std::fs::read_link(&to).is_ok_and(|t| t == *library) {
            continue;
        }
        // Made under a name of this call's own and renamed: a process that looks meanwhile finds the old one or the new
        // one, and tests that run at the same time, in this process or another, do not take each other's away.
        let fresh = folder.join(format!(".{name}.{}.{call}", std::process::id()));
        let _ = std::fs::remove_file(&fresh);
        std::os::unix::fs::symlink(library, &fresh).map_err(|e| e.to_string())?;
        std::fs::rename(&fresh, &to).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// A folder for `LD_LIBRARY_PATH` that holds the stand-in as `libcuda.so.1`, and the stand-in for NCCL as
/// `libnccl.so.2` where that is built.
pub fn library_dir() -> Result<PathBuf, InstallError> {
    let library = library()?;
    let folder = library.parent().unwrap_or(Path::new(".")).join("cuda-emulator-lib");
    let failed = |why| InstallError::Folder(folder.clone(), why);
    link(&folder, &library, &["libcuda.so.1", "libcuda.so"]).map_err(failed)?;
    if let Ok(nccl) = newest("libnccl_stand_in") {
        link(&folder, &nccl, &["libnccl.so.2", "libnccl.so"]).map_err(failed)?;
    }
    Ok(folder)
}

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
}

/// Loads the stand-in into this process, so that a later `dlopen("libcuda.so")` finds it. Returns its path.
pub fn install() -> Result<PathBuf, InstallError> {
    let library = library()?;
    let name = CString::new(library.as_os_str().as_encoded_bytes()).map_err(|e| InstallError::Load(e.to_string()))?;
    // SAFETY: a path that ends in a zero byte; RTLD_NOW | RTLD_LOCAL. The library's initialisers are Rust's own.
    if unsafe { dlopen(name.as_ptr(), 2) }.is_null() {
        return Err(InstallError::Load(format!("the loader refuses {}", library.display())));
    }
    Ok(library)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests of one binary run on several threads, and each asks for the folder.
    #[test]
    fn many_threads_make_the_same_folder_at_once() {
        let folder = std::env::temp_dir().join(format!("cpattn-link-{}", std::process::id()));
        let library = folder.join("library.so");
        for _ in 0..50 {
            let begin = std::sync::Barrier::new(8);
            std::thread::scope(|s| {
                for _ in 0..8 {
                    s.spawn(|| {
                        begin.wait();
                        link(&folder, &library, &["libcuda.so.1", "libcuda.so"]).unwrap();
                    });
                }
            });
            let mut left: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name()).collect();
            left.sort();
            assert_eq!(left, ["libcuda.so", "libcuda.so.1"]);
            assert_eq!(std::fs::read_link(folder.join("libcuda.so.1")).unwrap(), library);
            std::fs::remove_dir_all(&folder).unwrap();
        }
    }
}
