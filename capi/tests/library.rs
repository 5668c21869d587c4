// SPDX-License-Identifier: MIT OR Apache-2.0
//! An installed library, and programs that are compiled against it.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// The repository, or where `CPATTN_ROOT` says a folder with what of it these tests read: on a machine that has neither
/// the sources nor a compiler. Their programs are then compiled already.
pub fn root() -> &'static Path {
    named_root().unwrap_or(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")))
}

fn named_root() -> Option<&'static Path> {
    static NAMED: OnceLock<Option<PathBuf>> = OnceLock::new();
    NAMED.get_or_init(|| env::var_os("CPATTN_ROOT").map(PathBuf::from)).as_deref()
}

/// What a program wrote; it has to succeed.
pub fn run(command: &mut Command) -> String {
    let out = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{command:?}: {}\n{text}", out.status);
    let refusals = text.lines().filter_map(|line| line.strip_prefix(REFUSED));
    refusals.for_each(speaks_the_header);
    text
}

/// How a program begins a line that repeats what a refusal said.
pub const REFUSED: &str = "refused: ";

/// A message is of use to a program in C only if the header knows its words: it names no path, call or type of Rust,
/// and whatever has an underscore is a member, a macro or a function there.
fn speaks_the_header(message: &str) {
    static HEADER: OnceLock<String> = OnceLock::new();
    let header = HEADER.get_or_init(|| fs::read_to_string(root().join("include/cpattn.h")).unwrap());
    let words = |text: &'static str| text.split(|c: char| !c.is_alphanumeric() && c != '_');
    static WORDS: OnceLock<BTreeSet<&str>> = OnceLock::new();
    let known = WORDS.get_or_init(|| words(header).collect());
    assert!(!["::", "()", "`"].iter().any(|mark| message.contains(mark)), "{message:?} speaks Rust");
    for word in message.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| w.contains('_')) {
        assert!(known.contains(word), "{message:?} says {word}, which the header does not know");
    }
}

pub struct Library {
    pub prefix: PathBuf,
}

impl Library {
    /// One that is installed already, where the variable says.
    pub fn named(variable: &str) -> Option<Self> {
        env::var_os(variable).map(|prefix| Self { prefix: prefix.into() })
    }

    /// A debug build, installed by `capi/build` with these options.
    pub fn build(name: &str, options: &[&str]) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        // A folder of its own: this process may hold the lock of the usual one.
        let target = folder.join("capi-target");
        let mut build = Command::new(root().join("capi/build"));
        // The prefix is relative to where the caller stands, as with any installer.
        run(build.current_dir(folder).arg("--debug").args(options).arg(name).env("CARGO_TARGET_DIR", target));
        Self { prefix: folder.join(name) }
    }

    pub fn shared(&self) -> PathBuf {
        self.prefix.join("lib/libcpattn.so")
    }

    pub fn pkg_config(&self, what: &[&str]) -> Vec<String> {
        let path = self.prefix.join("lib/pkgconfig");
        let text = run(Command::new("pkg-config").args(what).arg("cpattn").env("PKG_CONFIG_PATH", path));
        text.split_whitespace().map(String::from).collect()
    }

    /// Compiles a program against the shared library and says where it is.
    pub fn compile(&self, source: &str, standard: &str) -> PathBuf {
        let source = root().join(source);
        let cpp = standard.starts_with("c++");
        let (variable, default) = if cpp { ("CXX", "c++") } else { ("CC", "cc") };
        let folder = self.prefix.join("programs");
        fs::create_dir_all(&folder).unwrap();
        let program = folder.join(format!("{}-{standard}", source.file_stem().unwrap().to_str().unwrap()));
        if named_root().is_some() {
            assert!(
                program.exists(),
                "with CPATTN_ROOT no program is compiled, and {} is not there",
                program.display()
            );
            return program;
        }
        run(Command::new(env::var(variable).unwrap_or(default.into()))
            .arg(format!("-std={standard}"))
            .args(["-O1", "-g", "-Wall", "-Wextra", "-pedantic", "-Werror"])
            .arg(&source)
            .args(self.pkg_config(&["--cflags", "--libs"]))
            .arg(format!("-Wl,-rpath,{}", self.prefix.join("lib").display()))
            .args(["-lpthread", "-lm", "-ldl", "-o"])
            .arg(&program));
        program
    }

    /// Exported is what `capi/symbols.txt` promises, in every build.
    pub fn check_symbols(&self) {
        let text = run(Command::new("nm").args(["-D", "--defined-only"]).arg(self.shared()));
        let mut found: Vec<&str> = text.lines().filter_map(|l| l.split_whitespace().last()).collect();
        found.sort_unstable();
        let wanted = fs::read_to_string(root().join("capi/symbols.txt")).unwrap();
        assert_eq!(found, wanted.lines().collect::<Vec<_>>(), "capi/symbols.txt is the list that was promised");
        assert!(found.iter().all(|s| s.starts_with("cpattn_")));
    }
}
