// SPDX-License-Identifier: MIT OR Apache-2.0
//! The committed header against the library, from both sides.
//!
//! Both texts are read: every prototype, struct and member of `include/cpattn.h` must be in `capi/src`, of the same
//! name, type and order, and nothing else may be exported there. Then a C compiler is asked for sizes and offsets,
//! because two texts that agree could still be laid out differently.

use std::{collections::BTreeMap, fmt::Write as _, fs, mem::offset_of, path::Path, process::Command};

use cpattn_capi::*;

use crate::library::root;

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn header() -> String {
    let (mut out, mut rest) = (String::new(), read("include/cpattn.h"));
    while let Some(at) = rest.find("/*") {
        out.push_str(&rest[..at]);
        rest = rest[at..].split_once("*/").expect("an open comment").1.into();
    }
    out + &rest
}

/// One C declaration as Rust writes it: name and type.
fn declaration(c: &str) -> (String, String) {
    if let Some((result, rest)) = c.split_once("(*") {
        let (name, arguments) = rest.split_once(")(").expect("a function pointer");
        let (_, result) = declaration(&format!("{result} x"));
        let arrow = if result == "c_void" { String::new() } else { format!(" -> {result}") };
        let arguments = list(arguments.trim_end_matches(')'));
        return (name.into(), format!("Option<unsafe extern \"C\" fn({arguments}){arrow}>"));
    }
    let spaced = c.replace('*', " * ");
    let mut words: Vec<&str> = spaced.split_whitespace().collect();
    let name = words.pop().expect("a name");
    let (mut kind, mut is_const) = (String::new(), false);
    for word in words {
        match word {
            "const" => is_const = true,
            "struct" => {}
            "*" => {
                kind = format!("*{} {kind}", if is_const { "const" } else { "mut" });
                is_const = false;
            }
            base => {
                kind = match base {
                    "void" => "c_void",
                    "char" => "c_char",
                    "float" => "f32",
                    "double" => "f64",
                    "size_t" => "usize",
                    other => other.strip_suffix("_t").filter(|s| s.contains("int")).map_or(other, |s| match s {
                        "int32" => "i32",
                        "int64" => "i64",
                        "uint8" => "u8",
                        "uint16" => "u16",
                        "uint32" => "u32",
                        "uint64" => "u64",
                        _ => panic!("{c}"),
                    }),
                }
                .into();
            }
        }
    }
    match name.split_once('[') {
        Some((name, count)) => (name.into(), format!("[{kind}; {}]", count.trim_end_matches(']'))),
        None => (name.into(), kind),
    }
}

fn list(arguments: &str) -> String {
    let named = arguments.split(',').map(str::trim).filter(|a| *a != "void" && !a.is_empty()).map(|a| {
        let (name, kind) = declaration(a);
        format!("{name}: {kind}")
    });
    named.collect::<Vec<_>>().join(", ")
}

fn one_line(text: &str) -> String {
    let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for (from, to) in [("( ", "("), ("< ", "<"), (", )", ")"), (",)", ")"), (", >", ">")] {
        line = line.replace(from, to);
    }
    line
}

/// Struct name → members, in order, as Rust writes them.
fn header_structs() -> BTreeMap<String, Vec<(String, String)>> {
    let text = header();
    let mut out = BTreeMap::new();
    for part in text.split("typedef struct ").skip(1) {
        let Some((name, rest)) = part.split_once('{').filter(|(name, _)| !name.contains(';')) else { continue };
        let body = rest.split_once("\n}").expect("an end").0;
        let members = body.split(';').map(one_line).filter(|m| !m.is_empty()).map(|m| declaration(&m));
        out.insert(name.trim().to_string(), members.collect());
    }
    out
}

fn header_functions() -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    // A macro is one line then; members of structs are indented by two, the rest of a prototype by four.
    let text = header().replace("\\\n", "");
    let is_code = |l: &&str| !l.starts_with('#') && (!l.starts_with(' ') || l.starts_with("    "));
    let code = text.lines().filter(is_code).collect::<Vec<_>>().join("\n");
    for statement in code.split(';').map(one_line) {
        let Some((head, arguments)) = statement.split_once('(').filter(|(h, _)| h.contains("cpattn_")) else {
            continue;
        };
        if head.contains("typedef") || head.contains('}') {
            continue;
        }
        let (name, result) = declaration(head);
        out.insert(name, format!("({}) -> {result}", list(arguments.trim_end_matches(')'))));
    }
    out
}

fn sources() -> String {
    fs::read_dir(root().join("capi/src")).unwrap().map(|e| fs::read_to_string(e.unwrap().path()).unwrap()).collect()
}

/// Messages name constants from lists in the order of their numbers; the header has the same numbers.
#[test]
fn constants_in_messages_have_the_numbers_of_the_header() {
    let header = header();
    let number = |name: &str| {
        let line = header
            .lines()
            .find_map(|l| l.strip_prefix(&format!("#define {name} ")))
            .unwrap_or_else(|| panic!("no {name}"));
        line.trim().parse::<usize>().unwrap()
    };
    let mut lists = 0;
    for file in fs::read_dir(root().join("capi/src")).unwrap() {
        let text = fs::read_to_string(file.unwrap().path()).unwrap();
        for list in text.split(']').filter_map(|part| part.rsplit_once('[')) {
            let begins = list.1.trim_start().trim_start_matches('(').starts_with("\"CPATTN_");
            let names: Vec<_> = list.1.split('"').filter(|word| begins && word.starts_with("CPATTN_")).collect();
            names.iter().enumerate().for_each(|(i, name)| assert_eq!(number(name), i, "{name}"));
            lists += usize::from(names.len() > 1);
        }
    }
    assert_eq!(lists, 18);
}

#[test]
fn functions_agree() {
    let mut ours = BTreeMap::new();
    for part in sources().split("#[unsafe(no_mangle)]").skip(1) {
        let signature = one_line(part.split_once('{').unwrap().0);
        let (head, rest) = signature.split_once('(').unwrap();
        assert!(head.starts_with("pub unsafe extern \"C\" fn ") || head.starts_with("pub extern \"C\" fn "), "{head}");
        ours.insert(head.rsplit(' ').next().unwrap().to_string(), format!("({rest}"));
    }
    assert_eq!(ours.keys().collect::<Vec<_>>(), header_functions().keys().collect::<Vec<_>>());
    for (name, theirs) in header_functions() {
        assert_eq!(ours[&name], theirs, "{name}");
    }
    assert!(ours.len() > 30);
}

#[test]
fn structs_agree() {
    let with_core = sources() + &read("src/call/mod.rs") + &read("src/call/range.rs") + &read("src/slice.rs");
    let sources: String = with_core.split_inclusive('\n').filter(|l| !l.trim_start().starts_with("///")).collect();
    for (name, members) in header_structs() {
        // Some are structs of the core under another name.
        let of_core =
            sources.split_once(&format!(" as {name}")).and_then(|(before, _)| before.rsplit([' ', '{', ':']).next());
        let ours = of_core.unwrap_or(&name);
        let at =
            sources.split(&format!("pub struct {ours} {{")).nth(1).unwrap_or_else(|| panic!("no {name} in sources"));
        let body = one_line(at.split_once("\n}").unwrap().0);
        let ours: Vec<(String, String)> = body
            .split("pub ")
            .filter(|m| !m.is_empty())
            .map(|m| m.trim().trim_end_matches(',').split_once(": ").unwrap())
            .map(|(n, t)| (n.to_string(), t.to_string()))
            .collect();
        assert_eq!(ours, members, "{name}");
    }
}

#[test]
fn statuses_and_version_agree() {
    let text = header();
    let define = |name: &str| -> i64 {
        let line = text.lines().find(|l| l.starts_with(&format!("#define {name} "))).expect(name);
        line.rsplit(' ').next().unwrap().parse().expect(name)
    };
    for (name, value) in [
        ("CPATTN_OK", CPATTN_OK),
        ("CPATTN_INVALID", CPATTN_INVALID),
        ("CPATTN_UNSUPPORTED", CPATTN_UNSUPPORTED),
        ("CPATTN_DISAGREEMENT", CPATTN_DISAGREEMENT),
        ("CPATTN_PEER", CPATTN_PEER),
        ("CPATTN_SCHEDULE", CPATTN_SCHEDULE),
        ("CPATTN_DEVICE", CPATTN_DEVICE),
        ("CPATTN_INVALID_HANDLE", CPATTN_INVALID_HANDLE),
        ("CPATTN_BUSY", CPATTN_BUSY),
        ("CPATTN_PANIC", CPATTN_PANIC),
        ("CPATTN_FEATURE_KERNELS", CPATTN_FEATURE_KERNELS as i32),
        ("CPATTN_FEATURE_RAYON", CPATTN_FEATURE_RAYON as i32),
        ("CPATTN_FEATURE_CUDA", CPATTN_FEATURE_CUDA as i32),
        ("CPATTN_FEATURE_NCCL", CPATTN_FEATURE_NCCL as i32),
        ("CPATTN_FEATURE_MPI", CPATTN_FEATURE_MPI as i32),
    ] {
        assert_eq!(define(name), i64::from(value), "{name}");
    }
    let [major, minor, patch] = ["MAJOR", "MINOR", "PATCH"].map(|p| define(&format!("CPATTN_VERSION_{p}")));
    assert_eq!(format!("{major}.{minor}.{patch}"), env!("CARGO_PKG_VERSION"));
    assert_eq!(i64::from(cpattn_version()), 10_000 * major + 100 * minor + patch);
    for (feature, built) in [
        (CPATTN_FEATURE_KERNELS, cfg!(feature = "kernels")),
        (CPATTN_FEATURE_RAYON, cfg!(feature = "rayon")),
        (CPATTN_FEATURE_CUDA, cfg!(feature = "cuda")),
        (CPATTN_FEATURE_NCCL, cfg!(feature = "nccl")),
        (CPATTN_FEATURE_MPI, cfg!(feature = "mpi")),
    ] {
        assert_eq!(cpattn_features() & feature != 0, built, "feature {feature}");
    }
    assert_eq!(define("CPATTN_WORKSPACE_ALIGNMENT") as u64, cpattn::schedule::Schedule::ALIGNMENT);
}

macro_rules! layouts {
    ($($name:ident: $($field:ident),*;)*) => {
        vec![$((stringify!($name), size_of::<$name>(), vec![$((stringify!($field), offset_of!($name, $field))),*])),*]
    };
}

/// Name, size, and the name and offset of each field.
type Struct = (&'static str, usize, Vec<(&'static str, usize)>);

#[test]
fn the_c_compiler_lays_structs_out_alike() {
    let ours: Vec<Struct> = layouts! {
    cpattn_dl_device: device_type, device_id;
    cpattn_dl_dtype: code, bits, lanes;
    cpattn_tensor: data, device, ndim, dtype, shape, strides, byte_offset;
    cpattn_slice: q_begin, q_end, k_begin, k_end, q_start, low, high;
    cpattn_problem: struct_size, cu_seqlens_q, cu_seqlens_k, q_start, documents, heads, kv_heads, head_dim, value_dim, dtype, kind, window_left, window_right, scale, softcap, alibi_slopes, sinks, alibi_rows, slices, slice_count, dropout;
    cpattn_options: struct_size, world, ulysses, ring, layout, layout_parameter, passes, circulate, wire, gather, reproducible, pack_inputs, ranks_per_node, circulate_forward, key_rows;
    cpattn_plan_info: struct_size, replicas, ring, ulysses, layout, layout_parameter, ranks_per_node, q_tokens, k_tokens, fingerprint;
    cpattn_group_limits: struct_size, sizes, size_count, room, token_flops, world, passes, ranks_per_node, reserved;
    cpattn_groups_info: struct_size, makespan, bound, passes, reserved;
    cpattn_share: struct_size, replica, ring, ulysses, reserved, q_tokens, k_tokens, q_head_begin, q_head_end, kv_head_begin, kv_head_end;
    cpattn_message: peer, data, bytes;
    cpattn_transport_table: struct_size, context, rank, world, agree, exchange, poll, abort, release;
    cpattn_engine_table: struct_size, context, rank, world, open, connect, post, wait, close, put, get, wait_for, release;
    cpattn_link: from, to, latency, bytes_per_second;
    cpattn_kernel_call: struct_size, cu_seqlens_q, cu_seqlens_k, sequences, heads, kv_heads, head_dim, value_dim, dtype, window_left, window_right, scale, softcap, alibi_slopes, corners, q, k, v, o, lse, d_o, delta, dq, dk, dv;
    cpattn_kernel_table: struct_size, context, name, dtypes, head_dim, honours, reserved, forward, backward, release;
    cpattn_rank_options: struct_size, workers, device_type, device_id, sm_margin, isa, reserved, kernel;
    cpattn_purpose: struct_size, side, dim, dtype, to;
    cpattn_keys: struct_size, kind, reserved, block_table, documents, pages_per_document, page_size, page_stride, key_indices, tokens, heads, entries;
    cpattn_forward_args: struct_size, q, k, v, sinks, o, lse, stream, max_logit, dropout_seed, keys, lse_base, reserved;
    cpattn_backward_args: struct_size, q, k, v, sinks, o, lse, d_o, dq, dk, dv, dsinks, stream, d_lse, dropout_seed, keys, lse_base, reserved;
    cpattn_combine_args: struct_size, partial_o, partial_lse, sinks, o, lse, stream, lse_base, reserved;
    cpattn_scan: struct_size, decay, heads, key_dim, value_dim, dtype, reverse, form, reserved;
    cpattn_segment: row, token, tokens, document, position;
    cpattn_event: name, phase, start_ns, end_ns, bytes, rank, step, lane, reserved;
    cpattn_range: row, pos, len, block, period, doc;
    cpattn_q_range: range, document, keys_begin, keys_end, mode, reserved;
    cpattn_band: q_begin, q_end, k_begin, k_end, low, high, shift;
    cpattn_pair: k, band;
    cpattn_ranges: q, q_count, k, k_count, pairs, pair_count, bands, band_count;
    cpattn_head_map: q_offset, kv_offset, group;
    cpattn_score: scale, softcap, window_left, window_right;
    cpattn_attend_args: struct_size, q, k, v, running, o, lse, alibi_slopes, sinks, heads, aligned, score, ranges, stream, running_lse, q_range_size, pair_size, max_logit;
    cpattn_attend_backward_args: struct_size, q, k, v, d_o, lse, delta, dq, dk, dv, alibi_slopes, heads, accumulate_keys, per_q_head, gradients, aligned, reserved, score, ranges, stream, q_range_size, pair_size;
    cpattn_buffer: name, tensor, dtype, rows, heads, dim, offset, written, reserved;
    cpattn_schedule_info: struct_size, buffers, buffer_count, op_count, workspace_bytes, rank, direction;
    cpattn_view: row, rows, buffer, head, heads, reserved;
    cpattn_op_message: view, offset, bytes, peer, tag, send, reserved;
    cpattn_sum: dst, sources_begin, sources_end, part, reserved;
    cpattn_op: struct_size, kind, lane, after, name, phase, step, reserved, messages, message_count, sums, sum_count, sources, source_count, q, k, v, running, running_lse, o, lse, d_o, delta, dq, dk, dv, sinks, dsinks, heads, aligned, accumulate_keys, per_q_head, gradients, reserved_2, score, ranges, q_range_size, pair_size;
    };
    let named: BTreeMap<String, Vec<String>> = ours
        .iter()
        .map(|(name, _, fields)| (name.to_string(), fields.iter().map(|(f, _)| f.to_string()).collect()))
        .collect();
    let theirs: BTreeMap<String, Vec<String>> =
        header_structs().into_iter().map(|(n, m)| (n, m.into_iter().map(|(f, _)| f).collect())).collect();
    assert_eq!(named, theirs, "the list above misses something");

    let mut c = String::from("#include \"cpattn.h\"\n");
    for (name, size, fields) in &ours {
        writeln!(c, "typedef char size_of_{name}[sizeof({name}) == {size} ? 1 : -1];").unwrap();
        for (field, offset) in fields {
            writeln!(c, "typedef char {name}_{field}[offsetof({name}, {field}) == {offset} ? 1 : -1];").unwrap();
        }
    }
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let file = dir.join("layout.c");
    fs::write(&file, c).unwrap();
    let include = root().join("include");
    let out = Command::new(std::env::var("CC").unwrap_or("cc".into()))
        .args(["-std=c99", "-fsyntax-only", "-I"])
        .arg(include)
        .arg(file)
        .output()
        .expect("a C compiler");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// The table of tensors against the header: which member of a struct each is, what may be NULL, what is written, and
/// the numbers of tensors in schedules.
#[test]
fn tensors_are_those_of_the_table() {
    use cpattn::schedule::{Direction, TensorId};
    let (structs, text, defines) = (header_structs(), read("include/cpattn.h"), header());
    for (name, direction) in
        [("cpattn_forward_args", Direction::Forward), ("cpattn_backward_args", Direction::Backward)]
    {
        let members = &structs[name];
        let ids: Vec<_> = TensorId::ALL.into_iter().filter(|id| id.is_written(direction, true).is_some()).collect();
        for id in &ids {
            let place = id.member(direction).unwrap_or_else(|| panic!("{id:?} has no place in {name}"));
            assert_eq!(members[place], (id.name().into(), "*const cpattn_tensor".into()), "{name}");
        }
        let tensors = members.iter().filter(|(_, kind)| kind == "*const cpattn_tensor").count();
        assert_eq!(tensors, ids.len(), "{name} has tensors without a row");
        // The comment of a member says whether it is read or written, and whether it may be left out.
        let body = text.split_once(&format!("typedef struct {name} {{")).unwrap().1.split_once("\n}").unwrap().0;
        for id in ids {
            let declaration = format!("const cpattn_tensor *{};", id.name());
            let (before, after) = body.split_once(&declaration).unwrap();
            let beside = after.split('\n').next().unwrap();
            let comment = if beside.contains("/*") {
                after.split_once("/*").unwrap().1
            } else {
                before.rsplit("/*").next().unwrap()
            };
            let comment = one_line(&comment.split_once("*/").unwrap().0.replace(" * ", " "));
            let written = id.is_written(direction, true).unwrap();
            assert!(comment.starts_with(if written { "written" } else { "read" }), "{name}.{}: {comment}", id.name());
            let optional = id.is_optional() || id.is_of_sinks();
            assert_eq!(comment.contains("NULL"), optional, "{name}.{}: {comment}", id.name());
        }
    }
    for id in TensorId::ALL {
        let name = format!("#define CPATTN_TENSOR_{} {}", id.name().to_uppercase().replace(' ', "_"), id as usize);
        assert!(defines.lines().any(|line| line.trim_end() == name), "{name}");
    }
}

/// The string literals of the call that begins at `text`, up to its closing parenthesis.
fn literals(text: &str) -> Vec<&str> {
    let (mut depth, mut open, mut out) = (0, None, Vec::new());
    let mut bytes = text.bytes().enumerate();
    while let Some((i, b)) = bytes.next() {
        match (b, open) {
            (b'\\', Some(_)) => drop(bytes.next()),
            (b'"', Some(from)) => {
                out.push(&text[from..i]);
                open = None;
            }
            (_, Some(_)) => {}
            (b'"', None) => open = Some(i + 1),
            (b'(', None) => depth += 1,
            (b')', None) if depth == 1 => break,
            (b')', None) => depth -= 1,
            _ => {}
        }
    }
    out
}

fn each_source(folder: &Path, each: &mut impl FnMut(&Path, &str)) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            each_source(&path, each);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            each(&path, text.split("#[cfg(test)]\nmod tests").next().unwrap());
        }
    }
}

/// One text serves callers in Rust and in C, so it names arguments and options, which both have, and no function or
/// type of either: what a refusal says is read in all of `src` and `capi/src`, whether or not a test provokes it.
#[test]
fn refusals_name_no_rust() {
    let mut seen = 0;
    let mut each = |path: &Path, text: &str| {
        for call in ["Error::invalid(", "Error::unsupported(", ".hint(", "let hint ="] {
            for (at, _) in text.match_indices(call) {
                let text = &text[at..];
                let whole = if call.ends_with('(') { text } else { &text[..text.find(';').unwrap()] };
                for literal in literals(whole) {
                    let rust = ["::", "()", "`"].iter().any(|mark| literal.contains(mark));
                    assert!(!rust, "{}: {literal:?} speaks Rust", path.display());
                    seen += 1;
                }
            }
        }
    };
    for sources in ["src", "capi/src"] {
        each_source(&root().join(sources), &mut each);
    }
    assert!(seen > 400, "{seen} texts were read");
}
