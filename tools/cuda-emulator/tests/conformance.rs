// SPDX-License-Identifier: MIT OR Apache-2.0
//! The program `conformance` on the emulated driver: it has to agree entirely, and say so in its record.

use std::path::PathBuf;
use std::process::{Command, Output};

fn conformance(sm: &str, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_conformance"))
        .args(args)
        .env("LD_LIBRARY_PATH", cuda_emulator::driver::library_dir().unwrap())
        .env("CPATTN_EMU_SM", sm)
        .output()
        .unwrap()
}

fn file(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("cpattn-conformance-{}-{name}", std::process::id()))
}

#[test]
fn agrees_entirely_on_a_device_that_can_do_all() {
    let json = file("all.json");
    let out = conformance("90", &["--json", json.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert!(said.contains(" 0 differ, 0 need a later device"), "{said}");
    let record = std::fs::read_to_string(&json).unwrap();
    std::fs::remove_file(&json).unwrap();
    let cases = record.matches("\"agrees\": true").count();
    assert!(
        cases > 1000 && record.contains(&format!("\"cases\": {cases}, \"agree\": {cases}, \"skipped\": 0,")),
        "{said}"
    );
    // One entry to the letter: a record is for others to read.
    let entry = record.lines().find(|l| l.contains("\"redux.sync.max.s32\"")).unwrap();
    let values = vec!["\"1b\""; 32].join(",");
    let digest = entry.split("\"digest\": \"").nth(1).unwrap().split('"').next().unwrap();
    assert_eq!(digest.len(), 16, "{entry}");
    assert_eq!(
        entry.trim_end_matches(','),
        format!(
            "{{\"family\": \"exchange\", \"name\": \"redux.sync.max.s32\", \"sm\": 80, \"digest\": \"{digest}\", \
             \"expected\": [{values}], \"emulated\": [{values}], \"device\": [{values}], \"agrees\": true}}"
        )
    );
    for key in [
        "\"date\": \"20",
        "\"version\": ",
        "\"device\": \"cpattn CUDA emulator (sm_90)\"",
        "\"compute_capability\": \"9.0\"",
    ] {
        assert!(record.contains(key), "{key}");
    }
}

#[test]
fn says_what_an_older_device_cannot_do() {
    let json = file("some.json");
    let kept = file("kept");
    let (path, folder) = (json.to_str().unwrap(), kept.to_str().unwrap());
    let out = conformance("80", &["--only", "matrix", "--json", path, "--keep", folder]);
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    let warned = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!kept.exists() && warned.contains("an emulated device proves nothing: not kept"), "{warned}");
    assert!(out.status.success() && said.contains(" 0 differ, 6 need a later device"), "{said}");
    let record = std::fs::read_to_string(&json).unwrap();
    std::fs::remove_file(&json).unwrap();
    assert_eq!(record.matches("\"skipped\": \"needs compute capability 9.0\"").count(), 6);
}

#[test]
fn refuses_what_it_does_not_understand() {
    for (args, what) in [
        (&["--only", "no such thing"][..], "no case is called that"),
        (&["--json"], "--json needs a value"),
        (&["--quick"], "`--quick`: usage"),
        (&["--json", "/nowhere/at/all.json", "--only", "bfe"], "/nowhere/at/all.json: "),
    ] {
        let out = conformance("80", args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && said.contains(what), "{args:?}: {said}");
    }
    let out = Command::new(env!("CARGO_BIN_EXE_conformance"))
        .env("LD_LIBRARY_PATH", "")
        .args(["--only", "bfe"])
        .output()
        .unwrap();
    // With a driver of its own the machine runs it; without one it is said what is missing.
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success() || said.contains("there is no libcuda.so.1"), "{said}");
}
