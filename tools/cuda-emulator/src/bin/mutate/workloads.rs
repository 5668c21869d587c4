// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is run: the tests that launch the shipped kernels, or a program of the caller's.

use std::path::Path;
use std::process::{Command, Stdio};

/// A program that launches kernels and checks what they compute.
pub trait Workload {
    /// What the progress bar calls it.
    fn name(&self) -> String;
    /// The command, ready to run, where there is something to run for these files of `ptx/` (all where none are named).
    /// A slice is built as tests are, and is nothing but tests for files.
    fn command(&self, only: Option<&[String]>, is_slice: bool) -> Result<Option<Command>, String>;
    /// The compute capability of the device, as `CPATTN_EMU_SM` has it.
    fn device(&self) -> &str {
        "90"
    }
}

/// An integration test of this workspace.
pub struct Test {
    name: &'static str,
    device: &'static str,
    /// Which of its tests; all where there is none.
    filters: &'static [&'static str],
    /// Where `filters` is a module of tests that are for one file each: what the names of such files begin with. The
    /// rest of a name is that of the test.
    of: Option<&'static str>,
}

impl Test {
    /// Arguments that choose the tests; none where there are no tests for these files.
    fn chosen(&self, only: Option<&[String]>) -> Option<Vec<String>> {
        let (Some(prefix), Some(files)) = (self.of, only) else {
            return Some(self.filters.iter().map(|&f| f.to_owned()).collect());
        };
        let of_file = |f: &String| Some(f.strip_prefix(prefix)?.strip_suffix(".ptx")?.to_owned());
        let rests: Vec<String> = files.iter().filter_map(of_file).collect();
        let tests = self.filters.iter().flat_map(|m| rests.iter().map(move |rest| format!("{m}::{rest}")));
        let tests: Vec<String> = std::iter::once("--exact".to_owned()).chain(tests).collect();
        (tests.len() > 1).then_some(tests)
    }
}

/// The tests that launch every shipped kernel: on a device with shared memory for all of them; on one with little, for
/// those that take the place of others there (only those with long walks first: a mutant is tried at so many launches
/// only); on devices where kernels for `sm_80` run that those for `sm_90a` replace on the first. Then those that run
/// whole plans on a device.
pub const REGISTRY: &[Test] = &[
    Test { name: "cuda_kernels", device: "90", filters: &["hopper_walks"], of: Some("hopper_forward_") },
    // Each of these starts a process that asks for clusters, and logs what this one would.
    Test { name: "cuda_kernels", device: "90", filters: &["clusters"], of: Some("hopper_cluster_") },
    Test { name: "cuda_kernels", device: "90", filters: &["hopper_backward"], of: Some("hopper_backward_") },
    Test { name: "cuda_kernels", device: "90", filters: &[], of: None },
    Test { name: "cuda_kernels", device: "86", filters: &["long_walks", "ranges", "shapes", "turns"], of: None },
    // Kernels in whose place those for `sm_90a` run on the first one.
    Test {
        name: "cuda_kernels",
        device: "80",
        filters: &["every_kernel_takes_turns", "runs_repeat", "turns", "wide_ranges"],
        of: None,
    },
    // And the fused backward at head dim 256, for which a block of 8.0 has too little shared memory.
    Test {
        name: "cuda_kernels",
        device: "100",
        filters: &["--exact", "every_kernel_takes_turns", "shapes", "turns::pairs_may_repeat"],
        of: None,
    },
    Test { name: "cuda_plans", device: "90", filters: &[], of: None },
];

impl Workload for Test {
    fn name(&self) -> String {
        format!("{} on sm_{}", self.name, self.device)
    }

    fn device(&self) -> &str {
        self.device
    }

    fn command(&self, only: Option<&[String]>, is_slice: bool) -> Result<Option<Command>, String> {
        let chosen = self.chosen(only).filter(|_| self.of.is_some() || !is_slice);
        let Some(chosen) = chosen else { return Ok(None) };
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let out = Command::new(cargo)
            .current_dir(root)
            .args(["test", "--no-run", "--message-format", "json", "-p", "cpattn-tests-cuda"])
            .args(if is_slice { &[][..] } else { &["--release"] })
            .args(["--test", self.name])
            .stderr(Stdio::inherit())
            .output()
            .map_err(|e| format!("cargo: {e}"))?;
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let path = text.lines().filter(|l| l.contains(&format!("\"name\":\"{}\"", self.name))).find_map(|l| {
            let after = l.split_once("\"executable\":\"")?.1;
            Some(after.split_once('"')?.0.to_owned())
        });
        let mut c = Command::new(path.ok_or_else(|| format!("test `{}` was not built", self.name))?);
        c.args(["--test-threads", "1"]).args(chosen);
        Ok(Some(c))
    }
}

/// A program named on the command line.
pub struct Program(pub Vec<String>);

impl Workload for Program {
    fn name(&self) -> String {
        self.0[0].clone()
    }

    fn command(&self, _: Option<&[String]>, _: bool) -> Result<Option<Command>, String> {
        let mut c = Command::new(&self.0[0]);
        c.args(&self.0[1..]);
        Ok(Some(c))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(of: Option<&'static str>, files: Option<&[&str]>) -> Option<Vec<String>> {
        let test = Test { name: "t", device: "90", filters: &["walks"], of };
        let files: Option<Vec<String>> = files.map(|files| files.iter().map(|&f| f.to_owned()).collect());
        test.chosen(files.as_deref())
    }

    #[test]
    fn tests_are_chosen_by_file() {
        let of = Some("hopper_forward_");
        let files = ["hopper_forward_bf16_192.ptx", "hopper_forward_bf16_192128.ptx", "forward_bf16_64.ptx"];
        assert_eq!(chosen(of, Some(&files)).unwrap(), ["--exact", "walks::bf16_192", "walks::bf16_192128"]);
        assert_eq!(chosen(of, Some(&files[2..])), None, "no test is for that file");
        assert_eq!(chosen(of, None).unwrap(), ["walks"]);
        assert_eq!(chosen(None, Some(&files)).unwrap(), ["walks"]);
    }

    /// Each file that a registered test is for by name has a test of that name.
    #[test]
    fn walks_are_named_as_their_files() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for (test, of) in REGISTRY.iter().filter_map(|t| Some((t, t.of?))) {
            let file = |module| root.join(format!("tests-cuda/cuda_kernels/{module}.rs"));
            let walks: String = test.filters.iter().map(|m| std::fs::read_to_string(file(m)).unwrap()).collect();
            let names = std::fs::read_dir(root.join("ptx/compiled"))
                .unwrap()
                .map(|e| e.unwrap().file_name().into_string().unwrap());
            let rests: Vec<String> =
                names.filter_map(|n| Some(n.strip_prefix(of)?.strip_suffix(".ptx")?.to_owned())).collect();
            // The kernels in clusters are in no library.
            assert!(
                rests.is_empty() == (of == "hopper_cluster_") && rests.iter().all(|r| r.starts_with("bf16_")),
                "{of}: {rests:?}"
            );
            for rest in rests {
                assert!(walks.contains(&format!("fn {rest}()")), "{rest}");
            }
        }
    }
}
