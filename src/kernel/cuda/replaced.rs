// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels from a folder in the place of embedded ones: the alternatives of `ptx/HARDWARE.md` and cubins, as
//! `ptx/compile` makes them.
//!
//! The environment variable [`VARIABLE`] names the folder. It is read once, when the program opens its first device,
//! and holds for all devices of the program, so that host and kernels agree. The folder has
//! - `NAME.ptx`, with the name of a text of `ptx/compiled`, or of a set that no library has (`embedded.rs`); as of
//!   those, that for f16 is made from that of bf16;
//! - `NAME.cubin`, an image that no driver compiles again, for one element type: of both or of none;
//! - `switches`, the switches of the compiler that the kernels were made with, one a line. Some change what the host
//!   does too: it asks [`switched`];
//! - `library`, the checksum of `ptx/compiled` as it was when they were made: a library with other kernels refuses
//!   them, whose parameters may be others. Folders that were made by hand need none.
//!
//! Kernels that the folder has not are the embedded ones.

use super::embedded;
use crate::device::driver::Image;
use crate::error::{Error, Result};
use alloc::borrow::ToOwned;
use alloc::ffi::CString;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The environment variable that names the folder: an absolute path. Unset or empty: all kernels are embedded ones.
pub(super) const VARIABLE: &str = "CPATTN_CUDA_KERNELS";

/// The file that names the switches.
const SWITCHES: &str = "switches";

/// The file that says whose kernels these are alternatives of.
const LIBRARY: &str = "library";

const WAY_OUT: &str =
    "make the folder with ptx/compile, or unset the variable: the kernels are then those of the library";

/// What a folder has.
pub(super) struct Replaced {
    folder: PathBuf,
    /// By the names of files.
    files: Vec<(String, Vec<u8>)>,
    switches: Vec<String>,
}

/// The value of the variable that was read, and what it names.
static READ: OnceLock<(Option<OsString>, Option<Replaced>)> = OnceLock::new();

/// What the environment variable names; none if it is unset or empty.
pub(super) fn of_environment() -> Result<Option<&'static Replaced>> {
    let value = std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
    let (read, replaced) = match READ.get() {
        Some(read) => read,
        None => {
            let replaced = value.as_ref().map(|folder| Replaced::read(Path::new(folder))).transpose()?;
            READ.get_or_init(|| (value.clone(), replaced))
        }
    };
    if value != *read {
        let said = |value: &Option<OsString>| value.as_ref().map_or_else(|| "unset".to_owned(), |v| format!("{v:?}"));
        let expected = format!("{}, as when the program opened its first device", said(read));
        return Err(Error::invalid(VARIABLE, said(&value), expected).hint("set it before the program starts"));
    }
    Ok(replaced.as_ref())
}

/// Whether the kernels in use were compiled with this switch of the compiler.
pub(super) fn switched(name: &str) -> bool {
    // Where the variable is refused there is no device to launch on.
    of_environment().is_ok_and(|replaced| replaced.is_some_and(|replaced| replaced.has_switch(name)))
}

/// Refuses the module `name` if no library has it, and the folder has not either.
pub(super) fn check_set(replaced: Option<&Replaced>, name: &str) -> Result<()> {
    let Some(way_out) = embedded::apart(name) else { return Ok(()) };
    let why = match replaced {
        Some(replaced) if replaced.has(name) => return Ok(()),
        Some(Replaced { folder, .. }) => format!("no library has it, and {VARIABLE} names {folder:?}, which has not"),
        None => format!("no library has it, and {VARIABLE} names no folder"),
    };
    Err(Error::unsupported(format!("kernel {name}"), why, way_out))
}

impl Replaced {
    /// Reads all files of a folder.
    fn read(folder: &Path) -> Result<Self> {
        let refused = |found: String, expected: &str| Err(Error::invalid(VARIABLE, found, expected).hint(WAY_OUT));
        if !folder.is_absolute() {
            return refused(format!("{folder:?}"), "an absolute path");
        }
        let entries = match fs::read_dir(folder).and_then(Iterator::collect::<std::io::Result<Vec<_>>>) {
            Ok(entries) => entries,
            Err(error) => return refused(format!("{folder:?} ({error})"), "a folder that can be read"),
        };
        let mut replaced = Self { folder: folder.to_owned(), files: Vec::new(), switches: Vec::new() };
        for entry in entries {
            let bytes = match fs::read(entry.path()) {
                Ok(bytes) => bytes,
                Err(error) => return refused(format!("{:?} ({error})", entry.path()), "files that can be read"),
            };
            let of = |what: &str| format!("a folder whose {:?} {what}", entry.file_name());
            if bytes.is_empty() {
                return refused(of("is empty"), "files that are not");
            }
            // A name that is not UTF-8 is no kernel's.
            let name = entry.file_name().into_string().unwrap_or_default();
            if name == SWITCHES {
                let is_name =
                    |line: &str| line.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_');
                match String::from_utf8(bytes) {
                    Ok(text) if text.lines().all(|line| !line.is_empty() && is_name(line)) => {
                        replaced.switches = text.lines().map(ToOwned::to_owned).collect();
                    }
                    _ => return refused(of("has other lines than names of switches"), "one name a line, as in FENCES"),
                }
                continue;
            }
            if name == LIBRARY {
                let own = embedded::checksum();
                if core::str::from_utf8(&bytes).ok().and_then(|text| text.trim().parse().ok()) != Some(own) {
                    let found = of("names a library with other kernels than this one");
                    return refused(found, &format!("{own} there: kernels of the same sources"));
                }
                continue;
            }
            let kernel = name.rsplit_once('.').is_some_and(|(kernel, extension)| match extension {
                "ptx" => embedded::is_text(kernel),
                "cubin" => embedded::is_text(&kernel.replace("_f16_", "_bf16_")),
                _ => false,
            });
            if !kernel {
                return refused(
                    of("is no file of a kernel"),
                    "NAME.ptx for names of ptx/compiled, NAME.cubin for the same (or with f16 for bf16), switches and library",
                );
            }
            let (whole, expected) = match name.ends_with(".ptx") {
                true => (is_text(&bytes), "PTX: text with a .version and an .entry, without zero bytes"),
                false => (is_cubin(&bytes), "a whole ELF image of 64 bits for CUDA devices"),
            };
            if !whole {
                return refused(of("is something else"), expected);
            }
            replaced.files.push((name, bytes));
        }
        replaced.files.sort();
        replaced.check()?;
        Ok(replaced)
    }

    /// Refuses files that contradict or lack each other.
    fn check(&self) -> Result<()> {
        let refused = |found: String, expected: String| {
            Err(Error::invalid(VARIABLE, format!("a folder with {found}"), expected).hint(WAY_OUT))
        };
        if self.files.is_empty() {
            return refused("no kernel".into(), "one kernel or more, NAME.ptx or NAME.cubin".into());
        }
        for (file, _) in &self.files {
            let Some(kernel) = file.strip_suffix(".cubin") else { continue };
            let text = format!("{}.ptx", kernel.replace("_f16_", "_bf16_"));
            if self.file(&text).is_some() {
                return refused(format!("{file} and {text}"), "one of them".into());
            }
            // The kernels of the other type would be the embedded ones, whatever these were compiled with.
            let other = match kernel.contains("_bf16_") {
                true => file.replace("_bf16_", "_f16_"),
                false => file.replace("_f16_", "_bf16_"),
            };
            if self.file(&other).is_none() {
                return refused(format!("{file} and no {other}"), "cubins for both element types".into());
            }
        }
        Ok(())
    }

    fn file(&self, name: &str) -> Option<&[u8]> {
        let at = self.files.binary_search_by(|file| file.0.as_str().cmp(name)).ok()?;
        Some(&self.files[at].1)
    }

    /// Whether the folder has the module `name`, as a text or as an image.
    pub(super) fn has(&self, name: &str) -> bool {
        self.file(&format!("{name}.cubin"))
            .or_else(|| self.file(&format!("{}.ptx", name.replace("_f16_", "_bf16_"))))
            .is_some()
    }

    /// The kernels of the module `name`, and what errors say of where they come from; none if the embedded ones stay.
    pub(super) fn find(&self, name: &str) -> Option<(String, Image)> {
        let of = |file: &str, made: &str| {
            let path = self.folder.join(file);
            format!("{}{made} (without {VARIABLE} the kernel is the library's own)", path.display())
        };
        let cubin = format!("{name}.cubin");
        if let Some(bytes) = self.file(&cubin) {
            return Some((of(&cubin, ""), Image::Cubin(bytes.to_vec())));
        }
        let file = format!("{}.ptx", name.replace("_f16_", "_bf16_"));
        // As `read` has checked, it is text.
        let text = String::from_utf8(self.file(&file)?.to_vec()).ok()?;
        let (text, made) = match name.contains("_f16_") {
            true => (embedded::for_f16(&text), ", made f16"),
            false => (text, ""),
        };
        Some((of(&file, made), Image::Text(CString::new(text).ok()?)))
    }

    fn has_switch(&self, name: &str) -> bool {
        self.switches.iter().any(|switch| switch == name)
    }
}

/// The folder, the names of its files, and the switches.
impl fmt::Debug for Replaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files: Vec<&String> = self.files.iter().map(|file| &file.0).collect();
        let mut shown = f.debug_struct("Replaced");
        shown.field("folder", &self.folder).field("files", &files).field("switches", &self.switches).finish()
    }
}

/// Whether this may be PTX.
fn is_text(bytes: &[u8]) -> bool {
    let has = |word: &str| core::str::from_utf8(bytes).is_ok_and(|text| text.contains(word));
    has(".version") && has(".entry") && !bytes.contains(&0)
}

/// Whether this is an ELF image of 64 bits for CUDA devices which is not cut off: the driver is told no length.
fn is_cubin(bytes: &[u8]) -> bool {
    let number = |at: usize, bytes_of: usize| {
        let found = bytes.get(at..at + bytes_of)?;
        Some(found.iter().rev().fold(0u64, |number, &byte| number << 8 | u64::from(byte)))
    };
    // Bytes from `start` on, `count` times `each`, are there.
    let holds = |start: Option<u64>, count: Option<u64>, each: Option<u64>| {
        let end = || start?.checked_add(count?.checked_mul(each?)?);
        end().is_some_and(|end| end <= bytes.len() as u64)
    };
    const CUDA: u64 = 190;
    // Class, order of bytes and machine; the tables of segments and of sections; what each section has in the file.
    let sections = number(60, 2).unwrap_or(0);
    let section = |i: u64| {
        let at = usize::try_from(number(40, 8)? + i * number(58, 2)?).ok()?;
        // SHT_NOBITS takes no place in the file.
        Some(number(at + 4, 4)? == 8 || holds(number(at + 24, 8), number(at + 32, 8), Some(1)))
    };
    bytes.starts_with(b"\x7fELF\x02\x01")
        && number(18, 2) == Some(CUDA)
        && sections > 0
        && holds(number(32, 8), number(56, 2), number(54, 2))
        && holds(number(40, 8), Some(sections), number(58, 2))
        && (0..sections).all(|i| section(i).unwrap_or(false))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    const TEXT: &[u8] = b".version 8.0\n.visible .entry hopper(bf16)\n";

    /// An ELF image with one section, of 8 bytes at its end.
    fn cubin() -> Vec<u8> {
        let mut image = alloc::vec![0; 136];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"\x7fELF\x02\x01");
        put(18, &190u16.to_le_bytes());
        put(40, &64u64.to_le_bytes());
        put(58, &64u16.to_le_bytes());
        put(60, &1u16.to_le_bytes());
        put(64 + 24, &128u64.to_le_bytes());
        put(64 + 32, &8u64.to_le_bytes());
        image
    }

    /// The name of a file, and its bytes.
    type File<'a> = (&'a str, &'a [u8]);

    /// What is read of a folder with these files.
    fn read(name: &str, files: &[File<'_>]) -> Result<Replaced> {
        let folder = std::env::temp_dir().join(format!("cpattn-replaced-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        for (file, bytes) in files {
            fs::write(folder.join(file), bytes).expect("a file");
        }
        let read = Replaced::read(&folder);
        fs::remove_dir_all(&folder).expect("the folder");
        read
    }

    #[test]
    fn texts_and_cubins_take_the_place_of_the_same_name() {
        let (image, other) = (cubin(), [cubin(), b"more".to_vec()].concat());
        let own = format!("{}\n", embedded::checksum());
        let files: [File<'_>; 5] = [
            ("hopper_forward_bf16_64.ptx", TEXT),
            ("hopper_backward_bf16_64.cubin", &image),
            ("hopper_backward_f16_64.cubin", &other),
            ("switches", b"FENCES\nROUND_BASE\n"),
            ("library", own.as_bytes()),
        ];
        let replaced = read("both", &files).expect("a good folder");
        let found = |name: &str| match replaced.find(name) {
            Some((file, Image::Text(text))) => Some((file, text.into_bytes())),
            Some((file, Image::Cubin(bytes))) => Some((file, bytes)),
            None => None,
        };
        let (file, text) = found("hopper_forward_bf16_64").expect("there");
        assert!(file.contains("both/hopper_forward_bf16_64.ptx (") && text == TEXT, "{file}");
        let (file, text) = found("hopper_forward_f16_64").expect("made");
        assert!(file.contains("both/hopper_forward_bf16_64.ptx, made f16 ("), "{file}");
        assert_eq!(text, b".version 8.0\n.visible .entry hopper(f16)\n");
        for (name, expected) in [("bf16", files[1].1), ("f16", files[2].1)] {
            let (file, bytes) = found(&format!("hopper_backward_{name}_64")).expect("there");
            assert!(file.contains(&format!("both/hopper_backward_{name}_64.cubin (")) && bytes == expected, "{file}");
        }
        assert!(found("hopper_forward_bf16_128").is_none() && found("transform").is_none());
        assert_eq!(
            ["FENCES", "ROUND_BASE", "ROUND", ""].map(|name| replaced.has_switch(name)),
            [true, true, false, false]
        );
        let shown = format!("{replaced:?}");
        assert!(shown.contains("hopper_backward_f16_64.cubin") && shown.contains("FENCES"), "{shown}");
        assert!(!shown.contains(".entry"), "contents are not shown: {shown}");
    }

    #[test]
    fn what_is_no_folder_of_kernels_is_refused() {
        let (image, cut) = (cubin(), cubin()[..135].to_vec());
        let mut other_machine = cubin();
        other_machine[18] = 62;
        let kernel = ("transform.ptx", TEXT);
        let cases: [(&str, &[File<'_>], &str); 15] = [
            ("nothing", &[], "a folder with no kernel"),
            ("switches-alone", &[("switches", b"FENCES\n")], "a folder with no kernel"),
            ("stranger", &[kernel, ("notes.txt", b"x")], "\"notes.txt\" is no file of a kernel"),
            (
                "unknown",
                &[("hopper_forward_bf16_65.ptx", TEXT)],
                "\"hopper_forward_bf16_65.ptx\" is no file of a kernel",
            ),
            ("f16", &[("hopper_forward_f16_64.ptx", TEXT)], "\"hopper_forward_f16_64.ptx\" is no file of a kernel"),
            ("cubin-of-none", &[("hopper.cubin", &image)], "\"hopper.cubin\" is no file of a kernel"),
            ("empty", &[("transform.ptx", b"")], "\"transform.ptx\" is empty"),
            ("no-text", &[("transform.ptx", &image)], "\"transform.ptx\" is something else"),
            ("text-as-image", &[("transform.cubin", TEXT)], "\"transform.cubin\" is something else"),
            ("cut", &[("transform.cubin", &cut)], "\"transform.cubin\" is something else"),
            ("other-machine", &[("transform.cubin", &other_machine)], "\"transform.cubin\" is something else"),
            (
                "library",
                &[kernel, ("library", b"123\n")],
                "\"library\" names a library with other kernels than this one",
            ),
            ("one-type", &[("forward_bf16_64.cubin", &image)], "forward_bf16_64.cubin and no forward_f16_64.cubin"),
            (
                "twice",
                &[("forward_f16_64.cubin", &image), ("forward_bf16_64.cubin", &image), ("forward_bf16_64.ptx", TEXT)],
                "forward_bf16_64.cubin and forward_bf16_64.ptx",
            ),
            (
                "lines",
                &[kernel, ("switches", b"FENCES, PAUSE\n")],
                "\"switches\" has other lines than names of switches",
            ),
        ];
        let said = |error: Error| {
            let said = error.to_string();
            assert!(said.starts_with("CPATTN_CUDA_KERNELS is ") && said.contains("unset the variable"), "{said}");
            said
        };
        for (name, files, expected) in cases {
            let said = said(read(name, files).expect_err(name));
            assert!(said.contains(expected), "{name}: {said}");
        }
        // What cannot be read as a file.
        let folder = std::env::temp_dir().join(format!("cpattn-replaced-{}-nested", std::process::id()));
        fs::create_dir_all(folder.join("transform.ptx")).expect("a folder");
        let nested = said(Replaced::read(&folder).expect_err("nested"));
        assert!(nested.contains("nested/transform.ptx") && nested.contains("files that can be read"), "{nested}");
        fs::remove_dir_all(folder).expect("the folder");
        for (folder, expected) in [("target", "an absolute path"), ("/nowhere/at/all", "a folder that can be read")] {
            let said = said(Replaced::read(Path::new(folder)).expect_err(folder));
            assert!(said.contains(folder) && said.contains(expected), "{said}");
        }
    }

    #[test]
    fn without_the_variable_nothing_is_switched() {
        if std::env::var_os(VARIABLE).is_none() {
            assert!(of_environment().expect("unset").is_none() && !switched("FENCES"));
        }
    }
}
