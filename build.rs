// SPDX-License-Identifier: MIT OR Apache-2.0
//! Embeds the texts of `ptx/compiled`, compressed. It compiles nothing and needs no CUDA toolkit: the PTX is checked
//! in.

#[cfg(feature = "cuda")]
#[path = "src/kernel/cuda/ptx_format.rs"]
mod ptx_format;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=ptx/compiled");
    #[cfg(feature = "mpi")]
    look_for_mpi();
    #[cfg(feature = "cuda")]
    {
        println!("cargo::rerun-if-changed=src/kernel/cuda/ptx_format.rs");
        embed();
    }
}

/// Says what is missing before the build script of another crate (`mpi-sys`) panics about it without the name.
#[cfg(feature = "mpi")]
fn look_for_mpi() {
    use std::{env, process::Command};

    println!("cargo::rerun-if-env-changed=MPICC");
    let compiler = env::var("MPICC").unwrap_or_else(|_| "mpicc".into());
    let runs = |program: &str, argument: &str| Command::new(program).arg(argument).output().is_ok();
    let known = || {
        ["mpich", "ompi", "cray-mpich"].into_iter().any(|name| {
            Command::new("pkg-config").args(["--exists", name]).status().is_ok_and(|status| status.success())
        })
    };
    if !runs(&compiler, "--version") && !known() {
        println!(
            "cargo::warning=feature mpi: no MPI was found ({compiler} does not run). Install Open MPI or MPICH with its headers, \
             such as libopenmpi-dev, or set MPICC; libclang is needed too. Without them the build of mpi-sys fails."
        );
    }
}

/// Writes all texts as one file of zlib's format, `ptx.z`, and a table that says where each is in it.
#[cfg(feature = "cuda")]
fn embed() {
    use std::path::{Path, PathBuf};
    use std::{env, fs};

    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let folder = Path::new(&env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("ptx/compiled");
    // Build scripts are not optimised: the best level takes seconds.
    let level = if env::var_os("PROFILE").is_some_and(|profile| profile == "release") { 9 } else { 1 };
    let entries = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let paths = entries.map(|entry| entry.expect("a readable folder").path());
    let mut files: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "ptx")).collect();
    files.sort();
    let text = |path: &PathBuf| {
        let text = fs::read_to_string(path).expect("a readable file");
        assert!(!text.is_empty(), "{} is empty: compile it again", path.display());
        text
    };
    let texts: Vec<String> = files.iter().map(text).collect();
    let lines: Vec<Vec<Line>> = texts.iter().map(|text| parse(text)).collect();
    let templates = by_frequency(&lines);
    let mut all: Vec<u8> = templates.join(&b'\n');
    let end_of_templates = all.len();
    let index = (0..).zip(&templates).map(|(i, &template)| (template, i)).collect();
    let (mut places, mut numbers) = (Vec::new(), Vec::new());
    for lines in &lines {
        places.push((all.len(), numbers.len()));
        encode(lines, &index, &mut all, &mut numbers);
    }
    let first_number = all.len();
    all.extend(numbers);
    let checksum = checksum(&texts);
    let mut table = format!(
        "/// Of all texts, in the order of names: what\n/// `cat ptx/compiled/*.ptx | cksum` prints first.\nconst CHECKSUM: u32 = {checksum};\n\
         /// Bytes of the templates.\nconst TEMPLATES: usize = {end_of_templates};\n\
         /// Name, bytes of the text, and where its lines and its numbers begin, in the order of names.\n\
         static PTX: &[(&str, usize, usize, usize)] = &[\n",
    );
    for ((path, text), (lines, numbers)) in files.iter().zip(&texts).zip(places) {
        let name = path.file_stem().expect("a file").to_str().expect("names are ASCII");
        table += &format!("    ({name:?}, {}, {lines}, {}),\n", text.len(), first_number + numbers);
    }
    let packed = out.join("ptx.z");
    fs::write(&packed, miniz_oxide::deflate::compress_to_vec_zlib(&all, level)).expect("OUT_DIR");
    let packed = packed.to_str().expect("the path of OUT_DIR is UTF-8");
    table +=
        &format!("];\nconst UNPACKED: usize = {};\nstatic PACKED: &[u8] = include_bytes!({packed:?});\n", all.len());
    fs::write(out.join("ptx.rs"), table).expect("OUT_DIR");
}

/// The checksum of POSIX's `cksum`: a CRC of all bytes, and of their number.
#[cfg(feature = "cuda")]
fn checksum(texts: &[String]) -> u32 {
    let table: Vec<u32> = (0..256u32)
        .map(|i| (0..8).fold(i << 24, |crc, _| if crc >> 31 == 1 { crc << 1 ^ 0x04c1_1db7 } else { crc << 1 }))
        .collect();
    let step = |crc: u32, byte: u8| crc << 8 ^ table[usize::from((crc >> 24) as u8 ^ byte)];
    let (mut crc, mut bytes) = (0, texts.iter().map(String::len).sum::<usize>());
    for byte in texts.iter().flat_map(|text| text.bytes()) {
        crc = step(crc, byte);
    }
    while bytes > 0 {
        crc = step(crc, bytes as u8);
        bytes >>= 8;
    }
    !crc
}

/// A line: its template and its numbers.
#[cfg(feature = "cuda")]
struct Line {
    template: Vec<u8>,
    numbers: Vec<u32>,
}

/// The lines of a text. Numbers of registers (`%rd12`) and of labels (`$L__BB0_12`) leave the template.
#[cfg(feature = "cuda")]
fn parse(text: &str) -> Vec<Line> {
    assert!(text.ends_with('\n') && !text.as_bytes().contains(&ptx_format::MARK));
    let line = |line: &str| {
        let bytes = line.as_bytes();
        let mut of = Line { template: Vec::with_capacity(bytes.len()), numbers: Vec::new() };
        let mut at = 0;
        while at < bytes.len() {
            let many = |from: usize, is: fn(&u8) -> bool| bytes[from..].iter().take_while(|byte| is(byte)).count();
            let name = if bytes[at] == b'%' {
                1 + many(at + 1, u8::is_ascii_lowercase)
            } else if bytes[at..].starts_with(b"$L__BB") {
                6 + many(at + 6, u8::is_ascii_digit) + 1
            } else {
                of.template.push(bytes[at]);
                at += 1;
                continue;
            };
            of.template.extend(&bytes[at..at + name]);
            at += name;
            let digits = many(at, u8::is_ascii_digit);
            if digits > 0 {
                let number: u32 = line[at..at + digits].parse().expect("PTX numbers its registers in 32 bits");
                assert_eq!(number.to_string().len(), digits, "{line}: a number is written without zeros before it");
                of.template.push(ptx_format::MARK);
                of.numbers.push(number);
                at += digits;
            }
        }
        of
    };
    text.lines().map(line).collect()
}

/// All templates, the most frequent first.
#[cfg(feature = "cuda")]
fn by_frequency(lines: &[Vec<Line>]) -> Vec<&[u8]> {
    let mut counts = std::collections::BTreeMap::<&[u8], usize>::new();
    for line in lines.iter().flatten() {
        *counts.entry(&line.template).or_default() += 1;
    }
    let mut templates: Vec<_> = counts.into_iter().collect();
    templates.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
    templates.into_iter().map(|(template, _)| template).collect()
}

/// Appends the lines' templates to `of_lines`, and their numbers to `numbers`.
#[cfg(feature = "cuda")]
fn encode(
    lines: &[Line],
    index: &std::collections::HashMap<&[u8], u32>,
    of_lines: &mut Vec<u8>,
    numbers: &mut Vec<u8>,
) {
    let mut predictor = ptx_format::Predictor::default();
    let mut before = 0;
    for line in lines {
        let template = index[line.template.as_slice()];
        ptx_format::write(of_lines, template);
        let marks = (0..line.template.len()).filter(|&i| line.template[i] == ptx_format::MARK);
        for ((slot, mark), &number) in (0..).zip(marks).zip(&line.numbers) {
            let (place, class) = ((before, template, slot), line.template[mark - 1]);
            ptx_format::write_difference(numbers, number, predictor.expected(place, class));
            predictor.note(place, class, number);
        }
        before = template;
    }
}
