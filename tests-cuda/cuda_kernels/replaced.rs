// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels of a folder (`CPATTN_CUDA_KERNELS`) in the place of embedded ones: as text, as an image that is not compiled
//! again, and what is said of folders and files that are no good.

use crate::device::{Device, emulated_count};
use crate::hopper::{alone_with, launch_lse};
use cpattn::Dtype;
use cpattn::kernel::cuda::{Cuda, Family};
use std::path::{Path, PathBuf};

const VARIABLE: &str = "CPATTN_CUDA_KERNELS";
const KERNEL: &str = "hopper_forward_bf16_64";

fn is_hopper() -> bool {
    emulated_count(c"boxes").is_some() && std::env::var("CPATTN_EMU_SM").is_ok_and(|sm| sm == "90")
}

/// The text of the library's own kernel.
fn embedded() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ptx/compiled").join(KERNEL).with_extension("ptx");
    std::fs::read_to_string(path).expect("a text")
}

/// The same kernel with another factor where it takes lse to base e: ln 2 becomes 2 ln 2.
fn other() -> String {
    let (ln_2, twice) = ("0f3F317218", "0f3FB17218");
    let text = embedded();
    assert!(text.contains(ln_2));
    text.replace(ln_2, twice)
}

/// An ELF image with PTX, as the stand-in driver takes it for a cubin: a header, a section's entry, the text.
fn image(text: &str) -> Vec<u8> {
    let mut image = vec![0; 128];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"\x7fELF\x02\x01");
    put(18, &190u16.to_le_bytes());
    put(40, &64u64.to_le_bytes());
    put(58, &64u16.to_le_bytes());
    put(60, &1u16.to_le_bytes());
    put(64 + 4, &0x8000_4350_u32.to_le_bytes());
    put(64 + 24, &128u64.to_le_bytes());
    put(64 + 32, &(text.len() as u64).to_le_bytes());
    image.extend(text.bytes());
    image
}

/// A folder with these files.
fn folder(name: &str, files: &[(String, Vec<u8>)]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("replaced-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    for (file, bytes) in files {
        std::fs::write(folder.join(file), bytes).expect("a file");
    }
    folder
}

/// Runs the test of this name alone, with a folder of these files; whether this process is that one.
fn alone_with_folder(test: &str, files: impl FnOnce() -> Vec<(String, Vec<u8>)>) -> bool {
    if std::env::var_os("CPATTN_COUNTS_ALONE").is_some() {
        return true;
    }
    let folder = folder(test, &files());
    alone_with(&format!("replaced::{test}"), &[(VARIABLE, folder.to_str().expect("UTF-8"))]);
    std::fs::remove_dir_all(folder).expect("the folder");
    false
}

/// The forward of this program gives the same o as the library's own kernel, and another lse.
fn runs_the_other() {
    let Some(device) = Device::open() else { return };
    if !is_hopper() {
        return;
    }
    let (o, lse) = launch_lse(&device);
    let own = Device::of(Cuda::with_family(0, Family::Sm80)).expect("a device");
    let (expected, own_lse) = launch_lse(&own);
    for (i, (a, b)) in o.iter().zip(&expected).enumerate() {
        assert!((a - b).abs() <= 0.02, "element {i} of o is {a}, not {b}");
    }
    let differ = lse.iter().zip(&own_lse).filter(|(a, b)| (*a - *b).abs() > 0.5).count();
    assert!(differ * 2 > lse.len(), "{differ} of {} lse differ: {lse:?} beside {own_lse:?}", lse.len());
    let shown = format!("{:?}", device.cuda);
    assert!(shown.contains(&format!("\"{KERNEL}.")) && shown.contains("WAIT_ALL"), "{shown}");
}

fn with_switches(files: Vec<(String, Vec<u8>)>) -> Vec<(String, Vec<u8>)> {
    [files, vec![("switches".into(), b"WAIT_ALL\n".to_vec())]].concat()
}

#[test]
fn a_text_takes_the_place_of_the_embedded_one() {
    let files = || with_switches(vec![(format!("{KERNEL}.ptx"), other().into())]);
    if alone_with_folder("a_text_takes_the_place_of_the_embedded_one", files) {
        runs_the_other();
    }
}

#[test]
fn an_image_goes_to_the_driver_as_it_is() {
    let files = || {
        let f16 = KERNEL.replace("_bf16_", "_f16_");
        with_switches(vec![
            (format!("{KERNEL}.cubin"), image(&other())),
            (format!("{f16}.cubin"), image(&other().replace("bf16", "f16"))),
        ])
    };
    if alone_with_folder("an_image_goes_to_the_driver_as_it_is", files) {
        runs_the_other();
    }
}

/// What is wrong with a kernel of the folder is said with its path: a text without the kernel, an image that the
/// driver refuses.
#[test]
fn a_kernel_that_fails_is_named() {
    let files = || {
        let mut cubin = image("");
        // A section of an ordinary type.
        cubin[68..72].copy_from_slice(&1u32.to_le_bytes());
        vec![
            (format!("{KERNEL}.ptx"), embedded().replace("cpattn_hopper_forward", "another").into()),
            ("hopper_backward_bf16_128.ptx".into(), b".version 8.0\n.target sm_90a\n.entry nothing".to_vec()),
            ("hopper_forward_bf16_256.cubin".into(), cubin.clone()),
            ("hopper_forward_f16_256.cubin".into(), cubin),
        ]
    };
    if alone_with_folder("a_kernel_that_fails_is_named", files) {
        let Some(device) = Device::open() else { return };
        if !is_hopper() {
            return;
        }
        let said = |dtype, dim| device.cuda.prepare(dtype, dim, dim).expect_err("refused").to_string();
        let folder = std::env::var(VARIABLE).expect("set");
        let own = " (without CPATTN_CUDA_KERNELS the kernel is the library's own)";
        let cases = [
            (Dtype::Bf16, 64, format!("{folder}/{KERNEL}.ptx{own}, \"cpattn_hopper_forward\"")),
            (Dtype::F16, 64, format!("{folder}/{KERNEL}.ptx, made f16{own}, \"cpattn_hopper_forward\"")),
            (Dtype::Bf16, 128, format!("{folder}/hopper_backward_bf16_128.ptx{own}: ")),
            (Dtype::F16, 256, format!("{folder}/hopper_forward_f16_256.cubin{own}: ")),
        ];
        for (dtype, dim, expected) in cases {
            let said = said(dtype, dim);
            assert!(said.contains(&expected), "{said}");
        }
        // Other kernels are the library's.
        device.cuda.prepare(Dtype::Bf16, 192, 128).expect("the embedded kernels");
    }
}

/// A folder that is no good is refused by every open, and one that was changed since the first one too.
#[test]
fn what_is_no_folder_of_kernels_is_refused() {
    let test = "replaced::what_is_no_folder_of_kernels_is_refused";
    if alone_with(test, &[(VARIABLE, "kernels")]) {
        for _ in 0..2 {
            let error = Cuda::new(0).map(|_| ()).expect_err("a relative path").to_string();
            let expected = "CPATTN_CUDA_KERNELS is \"kernels\", expected an absolute path";
            assert!(error.starts_with(expected) && error.contains("unset the variable"), "{error}");
        }
        assert!(Cuda::with_family(0, Family::Sm80).is_err() && Cuda::shared(0).is_err());
        // SAFETY: this process has no other thread that reads the environment: its one test is this one.
        unsafe { std::env::remove_var(VARIABLE) };
        if Device::open().is_none() {
            return;
        }
        // SAFETY: as above.
        unsafe { std::env::set_var(VARIABLE, "/other") };
        let error = Cuda::new(0).map(|_| ()).expect_err("changed").to_string();
        assert!(error.contains("expected unset, as when the program opened its first device"), "{error}");
    }
}
