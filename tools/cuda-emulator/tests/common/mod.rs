// SPDX-License-Identifier: MIT OR Apache-2.0
//! What tests of kernels with a defect share: a launch, that the defect is reported in every order, and the text with
//! it.
#![allow(dead_code, reason = "each test binary uses its part")]

use cuda_emulator::{Fault, Launch, Memory, Module, Options, Report, Stats, launch};

/// How many orders a kernel is tried in.
pub const SEEDS: u64 = 24;

/// The bytes that the parameter of kernel `k` points to, of which these are the first values, after blocks of that many
/// threads have run.
pub fn run(
    ptx: &str,
    [blocks, threads]: [u32; 2],
    bytes: &[u8],
    seed: u64,
    eager: bool,
) -> Result<(Vec<u8>, Stats), Box<Report>> {
    let mut mem = Memory::new();
    let loaded = Module::parse(ptx).and_then(|m| m.load(&mut mem)).unwrap_or_else(|e| panic!("{e}\n{ptx}"));
    let p = mem.alloc(bytes.len());
    mem.write(p, bytes).unwrap();
    let options = Options { seed, eager, spin_limit: 200_000, ..Options::default() };
    let how = Launch {
        grid: [blocks, 1, 1],
        block: [threads, 1, 1],
        cluster: [1; 3],
        dynamic_shared: 0,
        params: &p.to_le_bytes(),
        options,
    };
    let stats = launch(loaded.kernel("k").unwrap(), &mut mem, &how)?;
    Ok((mem.read(p, bytes.len()).unwrap(), stats))
}

/// 4096 bytes: words that count from 0.
pub fn counting() -> Vec<u8> {
    (0..1024u32).flat_map(u32::to_le_bytes).collect()
}

pub fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|c| u32::from_le_bytes(*c)).collect()
}

/// Is reported in every order that `run` takes, as one of these; the last report.
#[track_caller]
pub fn fires<T>(ptx: &str, faults: &[Fault], run: impl Fn(u64) -> Result<T, Box<Report>>) -> Box<Report> {
    let reports = (0..SEEDS).map(|seed| match run(seed) {
        Err(report) => {
            assert!(faults.contains(&report.fault), "seed {seed}: {report}");
            report
        }
        Ok(_) => panic!("seed {seed}: none of {faults:?} in\n{ptx}"),
    });
    reports.last().unwrap()
}

/// Text without one of its parts, which has to be there once.
#[track_caller]
pub fn without(text: &str, part: &str) -> String {
    replaced(text, part, "")
}

/// Text with something else in the place of a part that is there once.
#[track_caller]
pub fn replaced(text: &str, part: &str, by: &str) -> String {
    assert_eq!(text.matches(part).count(), 1, "`{part}` in\n{text}");
    text.replace(part, by)
}
