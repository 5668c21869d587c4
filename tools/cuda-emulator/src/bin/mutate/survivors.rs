// SPDX-License-Identifier: MIT OR Apache-2.0
//! The shipped kernels by file, and which of their mutants may survive.

use crate::{Key, Mutant};
use std::collections::BTreeMap;
use std::path::Path;

/// Entries of `equivalent.txt`: file pattern, kernel, instruction, how many survive in each such kernel, reason.
pub struct Equivalent {
    file: String,
    kernel: String,
    text: String,
    pub count: usize,
    pub reason: String,
}

pub fn equivalents() -> Result<Vec<Equivalent>, String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("equivalent.txt");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut out = Vec::new();
    for line in text.lines().filter(|l| !l.trim().is_empty() && !l.starts_with('#')) {
        let [file, kernel, text, count, reason] = &line.split('|').map(str::trim).collect::<Vec<_>>()[..] else {
            return Err(format!("equivalent.txt: `{line}` is not `file | kernel | instruction | count | reason`"));
        };
        let count = count.parse().map_err(|_| format!("equivalent.txt: count `{count}`"))?;
        let [file, kernel, text, reason] = [file, kernel, text, reason].map(|s| (*s).to_owned());
        out.push(Equivalent { file, kernel, text, count, reason });
    }
    Ok(out)
}

/// The shipped texts by file, in no order, and those of the folder that `CPATTN_CUDA_KERNELS` names. A file for bf16
/// stands for two modules: the host makes that for f16 from it (`src/kernel/cuda/embedded.rs`), which is listed under
/// the name that its file would have.
fn texts() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ptx/compiled");
    let apart = std::env::var_os("CPATTN_CUDA_KERNELS").map(std::path::PathBuf::from);
    let mut out = Vec::new();
    for e in apart.into_iter().chain([folder]).filter_map(|of| std::fs::read_dir(of).ok()).flatten().flatten() {
        let name = e.file_name().to_string_lossy().into_owned();
        let (true, Ok(text)) = (name.ends_with(".ptx"), std::fs::read_to_string(e.path())) else { continue };
        if name.contains("_bf16_") {
            out.push((name.replace("_bf16_", "_f16_"), text.replace("bf16", "f16")));
        }
        out.push((name, text));
    }
    out
}

/// Hash of a module's text → its file.
pub fn files() -> BTreeMap<String, String> {
    let hashed = |(file, text): (String, String)| {
        let module = cuda_emulator::Module::parse(&text).ok()?;
        Some((format!("{:016x}", module.hash()), file))
    };
    texts().into_iter().filter_map(hashed).collect()
}

/// What `--only` asks for.
pub struct Only {
    /// The kernels, as the driver is told of them: module and name, with commas in between.
    pub kernels: String,
    /// Their files.
    pub files: Vec<String>,
}

/// The shipped kernels whose file and name contain the text, but for those that have no mutants.
pub fn matching(text: &str) -> Result<Only, String> {
    let (mut kernels, mut chosen) = (Vec::new(), Vec::new());
    for (file, source) in texts() {
        let entries = source.split(".entry ").skip(1).filter_map(|t| t.split(['(', ' ', '\n']).next());
        let mut wanted: Vec<&str> = entries.filter(|name| format!("{file} {name}").contains(text)).collect();
        if wanted.is_empty() {
            continue;
        }
        let module = cuda_emulator::Module::parse(&source).map_err(|e| format!("{file}: {e}"))?;
        let loaded = module.load(&mut cuda_emulator::Memory::new()).map_err(|e| format!("{file}: {e}"))?;
        wanted.retain(|name| loaded.kernel(name).is_some_and(|kernel| !kernel.mutants().is_empty()));
        let hash = module.hash();
        kernels.extend(wanted.iter().map(|name| format!("{hash:016x} {name}")));
        chosen.push(file);
    }
    if kernels.is_empty() {
        return Err(format!("--only {text}: no file and kernel of ptx/compiled that has mutants contains that"));
    }
    Ok(Only { kernels: kernels.join(","), files: chosen })
}

/// Mutants that were not caught: file, kernel and text, and their lines.
pub type Survivors<'a> = BTreeMap<(String, &'a str, String), Vec<u32>>;

pub fn survivors<'a>(mutants: &'a BTreeMap<Key, Mutant>, files: &BTreeMap<String, String>) -> Survivors<'a> {
    let mut out = Survivors::new();
    for ((module, kernel, (line, change)), m) in mutants.iter().filter(|(_, m)| m.caught.is_none()) {
        let file = files.get(module).cloned().unwrap_or_else(|| module.clone());
        // What is wrong stands before the text, where it is not that the instruction is gone.
        let text = if change.is_empty() { m.text.clone() } else { format!("{change} {}", m.text) };
        out.entry((file, kernel, text)).or_default().push(*line);
    }
    out
}

/// The entry that excuses a survivor.
pub fn excuse<'a>(
    known: &'a [Equivalent],
    (file, kernel, text): &(String, &str, String),
    n: usize,
) -> Option<&'a Equivalent> {
    known
        .iter()
        .find(|k| file.contains(&k.file) && kernel.contains(&k.kernel) && text.starts_with(&k.text) && n <= k.count)
}

/// The kernels that were asked for, have mutants, and were launched by no workload: their files and names.
pub fn never_launched(only: &Only, mutants: &BTreeMap<Key, Mutant>, files: &BTreeMap<String, String>) -> Vec<String> {
    let launched = |k: &str| mutants.keys().any(|(module, kernel, _)| k == format!("{module} {kernel}"));
    let named = |k: &str| {
        let (module, kernel) = k.split_once(' ').unwrap_or((k, ""));
        format!("{} {kernel}", files.get(module).map_or(module, |file| file))
    };
    only.kernels.split(',').filter(|k| !launched(k)).map(named).collect()
}

/// Whether every kernel that was asked for was launched and nothing survives that is not listed.
pub fn is_settled(
    only: &Only,
    mutants: &BTreeMap<Key, Mutant>,
    known: &[Equivalent],
    files: &BTreeMap<String, String>,
) -> bool {
    never_launched(only, mutants, files).is_empty()
        && survivors(mutants, files).iter().all(|(which, lines)| excuse(known, which, lines.len()).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kernel that no workload launches is named, whatever happens to the others.
    #[test]
    fn what_was_never_launched_is_named() {
        let (only, files) = (matching("_bf16_128.ptx cpattn_hopper").unwrap(), files());
        let mut left = never_launched(&only, &BTreeMap::new(), &files);
        left.sort();
        let expected = ["backward", "forward"].map(|k| format!("hopper_{k}_bf16_128.ptx cpattn_hopper_{k}"));
        assert_eq!(left, expected);
        let mutant = || Mutant { text: String::new(), caught: Some("OtherResult".to_owned()) };
        let key = |of: &str| {
            let (module, kernel) = of.split_once(' ').unwrap();
            (module.to_owned(), kernel.to_owned(), (1, String::new()))
        };
        let all: BTreeMap<Key, Mutant> = only.kernels.split(',').map(|of| (key(of), mutant())).collect();
        assert!(never_launched(&only, &all, &files).is_empty() && is_settled(&only, &all, &[], &files));
        let without = all.into_iter().filter(|((_, kernel, _), _)| kernel != "cpattn_hopper_forward").collect();
        assert_eq!(never_launched(&only, &without, &files), expected[1..2]);
        assert!(!is_settled(&only, &without, &[], &files));
    }
}
