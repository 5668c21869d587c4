// SPDX-License-Identifier: MIT OR Apache-2.0
//! Descriptions are parsed as written, and refusals name the line.

use cpattn::{
    Dtype, Machine,
    machine::{KernelRate, KernelShape, LinkRate},
};

const WHOLE: &str = "# a comment
name = two nodes
estimate = yes
ranks_per_node = 4
cards_per_node = 2

memory = 8e9
operation = 2e-6   # seconds
copy = 1e10
inside.latency = 4e-6
inside.rate = 8e9
between.latency = 3e-5
between.rate = 1.25e9
kernel f32 64/32 forward = rate 6e10, row 2e-7, key 0, edge 2e-8, call 3e-6
kernel f32 64/32 backward = call 3e-6, rate 5e10, row 2e-7, key 1e-8, edge 4e-8
kernel f32 128/128 forward = rate 7e10, row 2e-7, key 0, edge 2e-8, call 3e-6
";

fn refusal(from: &str, to: &str) -> String {
    assert!(WHOLE.contains(from));
    Machine::parse(&WHOLE.replacen(from, to, 1)).unwrap_err().to_string()
}

#[test]
fn a_description_is_read_as_it_was_written() {
    let m = Machine::parse(WHOLE).unwrap();
    assert_eq!((m.name.as_str(), m.estimate, m.cores), ("two nodes", true, None));
    assert_eq!((m.memory, m.copy, m.between), (8e9, 1e10, LinkRate { latency: 3e-5, rate: 1.25e9 }));
    assert_eq!(m.kernels.len(), 3);
    assert_eq!(
        (m.kernels[1].rate, m.kernels[1].key, m.kernels[1].edge, m.kernels[1].shape.value_dim),
        (5e10, 1e-8, 4e-8, 32)
    );
    let again = Machine::parse(&m.to_string()).unwrap();
    assert_eq!(m, again);
    let mut with_cores = m;
    (with_cores.cores, with_cores.name) = (Some(2), "a # b".into());
    assert_eq!(Machine::parse(&with_cores.to_string()).unwrap().cores, Some(2));
    let mut limited = with_cores;
    (limited.nodes_share_cores, limited.between_burst, limited.between_work) = (true, 2.6e5, 4e-10);
    limited.name = "a".into();
    assert_eq!(Machine::parse(&limited.to_string()).unwrap(), limited);
    assert_eq!((limited.ranks_at_once(8), limited.pool(7)), (2.0, 0));
    let mut apart = limited;
    apart.nodes_share_cores = false;
    assert_eq!((apart.ranks_at_once(8), apart.pool(7)), (4.0, 1));
}

/// With a byte order mark, line ends of other systems, and tabs.
#[test]
fn a_mark_at_the_start_other_line_ends_and_tabs_are_read() {
    let odd = WHOLE.replace("kernel ", "kernel\t").replace("rate 6e10", "rate\t6e10").replace('\n', "\r\n");
    assert_eq!(Machine::parse(&format!("\u{feff}{odd}")).unwrap(), Machine::parse(WHOLE).unwrap());
}

#[test]
fn a_long_file_is_refused_at_once() {
    let long: String = (0..200_000).map(|i| format!("figure{i} = 1\n")).collect();
    let start = std::time::Instant::now();
    let refusal = Machine::parse(&long).unwrap_err().to_string();
    assert!(refusal.starts_with("line 1 of the machine description is \"figure0\", expected name"), "{refusal}");
    // A second at most; comparing each key with all others takes a minute.
    assert!(start.elapsed().as_secs() < 10);
}

#[test]
fn a_path_is_refused_with_a_request_for_the_text() {
    assert_eq!(
        Machine::parse("machines/cpu_host.machine").unwrap_err().to_string(),
        "line 1 of the machine description is \"machines/cpu_host.machine\", expected key = value; give the text of the \
         file, not its path"
    );
    assert!(!Machine::parse("copy\nmemory = 1").unwrap_err().to_string().contains("path"));
}

#[test]
fn refusals_name_the_line_the_key_and_both_values() {
    for (from, to, expected) in [
        ("8e9\ninside", "8e9\n", "the machine description is without inside.latency"),
        ("copy = 1e10", "copy = -1e10", "line 9 of the machine description, copy is -1e10, expected a number above 0"),
        ("copy = 1e10", "copy =", "line 9 of the machine description, copy is empty, expected a number above 0"),
        ("copy = 1e10", "copy = inf", "line 9 of the machine description, copy is inf, expected a number above 0"),
        ("copy = 1e10", "copy = fast", "line 9 of the machine description, copy is fast, expected a number above 0"),
        ("copy = 1e10", "copy", "line 9 of the machine description is \"copy\", expected key = value"),
        ("copy = 1e10\n", "", "the machine description is without copy in its 15 lines, expected a line copy = …"),
        ("copy = 1e10", "copi = 1e10", "line 9 of the machine description is \"copi\", expected name, estimate,"),
        (
            "copy = 1e10",
            "memory = 1",
            "line 9 of the machine description is memory again, expected one line for memory: line 7 has it",
        ),
        (
            "operation = 2e-6",
            "operation = -2e-6",
            "line 8 of the machine description, operation is -2e-6, expected a number from 0",
        ),
        (
            "cards_per_node = 2",
            "cards_per_node = 0",
            "line 5 of the machine description, cards_per_node is 0, expected a whole number above 0",
        ),
        (
            "copy = 1e10",
            "copy = 1e10\nbetween.work = 1e-9",
            "line 10 of the machine description, between.work is 1e-9, without cores, expected a line cores = … beside it",
        ),
        (
            "copy = 1e10",
            "copy = 1e10\nnodes_share_cores = no",
            "line 10 of the machine description, nodes_share_cores is no, without cores, expected a line cores",
        ),
        (
            "copy = 1e10",
            "copy = 1e10\nbetween.burst = -1",
            "line 10 of the machine description, between.burst is -1, expected a number from 0",
        ),
        (
            "estimate = yes",
            "estimate = maybe",
            "line 3 of the machine description, estimate is maybe, expected yes or no",
        ),
        ("name = two nodes", "name =", "line 2 of the machine description, name is empty, expected a name"),
        (
            "kernel f32 64/32 backward",
            "kernel  f32\t064/32 forward",
            "line 15 of the machine description is kernel f32 64/32 forward again, expected one line for kernel f32 64/32 forward: line 14 has it",
        ),
        (
            "row 2e-7",
            "row -2e-7",
            "line 14 of the machine description, kernel f32 64/32 forward: row is -2e-7, expected a number from 0",
        ),
        (
            "rate 6e10",
            "rate 0",
            "line 14 of the machine description, kernel f32 64/32 forward: rate is 0, expected a number above 0",
        ),
        (
            ", key 0",
            "",
            "line 14 of the machine description, kernel f32 64/32 forward is rate 6e10, row 2e-7, edge 2e-8, call 3e-6, expected key with a number",
        ),
        (
            "key 0",
            "kez 0",
            "line 14 of the machine description, kernel f32 64/32 forward is kez 0, expected rate, row, key, edge and call",
        ),
        (
            "key 0",
            "row 0",
            "line 14 of the machine description, kernel f32 64/32 forward is row 0, expected each of rate",
        ),
        (
            "f32 64/32 forward",
            "f31 64/32 forward",
            "line 14 of the machine description is \"kernel f31 64/32 forward\", expected kernel DTYPE",
        ),
        ("f32 64/32 forward", "f32 64 forward", "line 14 of the machine description is \"kernel f32 64 forward\""),
    ] {
        let text = if to == "8e9\n" { refusal("inside.latency = 4e-6\n", "") } else { refusal(from, to) };
        assert!(text.starts_with(expected), "{text}\n{expected}");
    }
    let none: String = WHOLE.lines().filter(|l| !l.starts_with("kernel")).flat_map(|l| [l, "\n"]).collect();
    assert!(Machine::parse(&none).unwrap_err().to_string().starts_with("the machine description is without a kernel"));
}

#[test]
fn cards_follow_the_ranks_of_a_node() {
    let m = Machine::parse(WHOLE).unwrap();
    let cards: Vec<usize> = (0..8).map(|r| m.card(r)).collect();
    assert_eq!((cards, m.ranks_per_card()), (vec![0, 0, 1, 1, 2, 2, 3, 3], 2));
}

#[test]
fn a_kernel_is_that_of_the_shape_or_the_nearest() {
    let m = Machine::parse(WHOLE).unwrap();
    let shape = |head_dim, value_dim, backward| KernelShape { dtype: Dtype::F32, head_dim, value_dim, backward };
    let of = |s| m.kernel(s).map(|(k, exact)| (k.rate, exact)).unwrap();
    assert_eq!(of(shape(64, 32, false)), (6e10, true));
    assert_eq!(of(shape(96, 96, false)), (7e10, false));
    assert_eq!(of(shape(128, 128, true)), (5e10, false));
    // A type that has no line: the rate is inverse to the bytes of an element; the call is the same.
    for (dtype, bytes) in [(Dtype::F64, 2.0), (Dtype::Bf16, 0.5), (Dtype::F16, 0.5)] {
        let (derived, exact) = m.kernel(KernelShape { dtype, ..shape(64, 32, true) }).unwrap();
        let line = m.kernels[1];
        let figures = |k: KernelRate| [k.rate, k.row, k.key, k.edge, k.call];
        let want = KernelRate {
            rate: line.rate / bytes,
            row: line.row * bytes,
            key: line.key * bytes,
            edge: line.edge * bytes,
            ..line
        };
        assert_eq!((figures(derived), derived.shape.dtype, exact), (figures(want), Dtype::F32, false));
    }
    // The nearest in size first, then the nearest dims.
    let mut two = m.clone();
    two.kernels[0].shape.dtype = Dtype::Bf16;
    let half = KernelShape { dtype: Dtype::F16, ..shape(128, 128, false) };
    assert_eq!(two.kernel(half).map(|(k, exact)| (k.rate, k.shape.dtype, exact)).unwrap(), (6e10, Dtype::Bf16, false));
    two.kernels.retain(|k| !k.shape.backward);
    let text = two.kernel(shape(64, 32, true)).unwrap_err().to_string();
    assert!(text.starts_with("machine is two nodes without a backward kernel, expected one for both"), "{text}");
    assert_eq!(m.kernels[0].seconds(6e10, 10.0, 5.0, 4.0), 3e-6 + 1.0 + 10.0 * 2e-7 + 4.0 * 2e-8);
}

/// The descriptions in the repository.
#[test]
fn the_descriptions_of_the_repository_are_read() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/machines");
    let mut count = 0;
    for file in
        std::fs::read_dir(folder).unwrap().flatten().filter(|f| f.path().extension().is_some_and(|e| e == "machine"))
    {
        let text = std::fs::read_to_string(file.path()).unwrap();
        let m = Machine::parse(&text).unwrap_or_else(|e| panic!("{}: {e}", file.path().display()));
        assert_eq!(Machine::parse(&m.to_string()).unwrap(), m);
        // Kernels of every type, as a user of any type expects.
        for (dtype, backward) in
            [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64].into_iter().flat_map(|d| [(d, false), (d, true)])
        {
            let shape = KernelShape { dtype, head_dim: 128, value_dim: 128, backward };
            assert!(m.kernel(shape).unwrap().1, "{}: {shape}", file.path().display());
        }
        count += 1;
    }
    assert!(count >= 3, "{count}");
    // The page's example is read, and the page's table has every key that a refusal lists.
    let page = include_str!("../../machines/README.md");
    let example = page.split("```").nth(1).unwrap().strip_prefix("text").unwrap();
    assert_eq!(Machine::parse(example).unwrap().kernels.len(), 2);
    let text = Machine::parse("x = 1").unwrap_err().to_string();
    let keys = text.split("expected ").nth(1).unwrap().replace(" or ", ", ");
    for key in keys.split(", ").map(str::trim).filter(|key| *key != "kernel") {
        assert!(page.contains(&format!("\n| `{key}` | ")), "{key}");
    }
}
