// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which family of forward kernels a device takes, how one is forced, and what is said of a driver that refuses it.

use crate::device::{Device, emulated_count, has_kernel};
use crate::hopper::{alone_with, launch, try_launch};
use cpattn::kernel::cuda::{Cuda, Family};
use cpattn::{Dtype, Error};

/// Head dims, and whether devices of compute capability 9.0 take the kernel for `sm_90a` by themselves.
const DIMS: [((u32, u32), bool); 10] = [
    ((64, 64), true),
    ((72, 64), false),
    ((64, 96), false),
    ((96, 96), false),
    ((104, 96), true),
    ((128, 128), true),
    ((192, 128), true),
    ((192, 136), false),
    ((128, 192), false),
    ((256, 192), true),
];

/// Whether the stand-in driver is there with a device of compute capability 9.0; none without the stand-in driver.
fn is_hopper() -> Option<bool> {
    emulated_count(c"boxes")?;
    Some(std::env::var("CPATTN_EMU_SM").is_ok_and(|sm| sm == "90"))
}

fn families(cuda: &Cuda) -> Vec<Family> {
    DIMS.iter().map(|&((d, dv), _)| cuda.family(Dtype::Bf16, d, dv).expect("a shape")).collect()
}

#[test]
fn families_follow_device_and_head_dims() {
    let Some(device) = Device::open() else { return };
    let Some(is_hopper) = is_hopper() else { return };
    let expected = DIMS.map(|(_, taken)| if taken && is_hopper { Family::Sm90a } else { Family::Sm80 });
    assert_eq!(families(&device.cuda), expected);
    let forced = Cuda::with_family(0, Family::Sm80).expect("every device runs them");
    assert_eq!(families(&forced), [Family::Sm80; DIMS.len()]);
    match Cuda::with_family(0, Family::Sm90a) {
        Ok(forced) => {
            assert!(is_hopper);
            assert_eq!(families(&forced), [Family::Sm90a; DIMS.len()]);
            // There is none above 256.
            assert_eq!(forced.family(Dtype::F16, 576, 512), Ok(Family::Sm80));
        }
        Err(error) => {
            assert!(!is_hopper && matches!(error, Error::Unsupported { .. }), "{error}");
            let said = error.to_string();
            assert!(said.contains("sm_90a") && said.contains("9.0") && said.contains("CPATTN_CUDA_FAMILY"), "{said}");
        }
    }
    assert!(device.cuda.family(Dtype::F32, 64, 64).is_err() && device.cuda.family(Dtype::F16, 584, 64).is_err());
}

/// Launches of both forward kernels by a small call.
fn launched(device: &Device) -> [u64; 2] {
    let counts =
        || [c"cpattn_hopper_forward", c"cpattn_forward"].map(|name| emulated_count(name).expect("asked before"));
    let before = counts();
    launch(device, |_| ());
    let after = counts();
    [after[0] - before[0], after[1] - before[1]]
}

#[test]
fn the_variable_forces_sm_80() {
    if alone_with("family::the_variable_forces_sm_80", &[(Family::VARIABLE, "sm_80")]) {
        let Some(device) = Device::open() else { return };
        assert_eq!(families(&device.cuda), [Family::Sm80; DIMS.len()]);
        if is_hopper().is_some() {
            assert_eq!(launched(&device), [0, 1]);
        }
        // What a program says itself comes before what its environment says.
        if is_hopper() == Some(true) {
            let device = Device::of(Cuda::with_family(0, Family::Sm90a)).expect("a device");
            assert_eq!(launched(&device), [1, 0]);
        }
    }
}

#[test]
fn the_variable_forces_sm_90a_or_is_refused() {
    if alone_with("family::the_variable_forces_sm_90a_or_is_refused", &[(Family::VARIABLE, "sm_90a")]) {
        let Some(is_hopper) = is_hopper() else { return };
        match Cuda::new(0) {
            Ok(cuda) => assert_eq!((families(&cuda), is_hopper), (vec![Family::Sm90a; DIMS.len()], true)),
            Err(error) => assert!(!is_hopper && matches!(error, Error::Unsupported { .. }), "{error}"),
        }
    }
}

/// A forward that no library has is refused where it is forced, and the message says how to make it; the kernels of a
/// folder that has it run.
#[test]
fn a_forward_that_no_library_has_is_named() {
    let test = "family::a_forward_that_no_library_has_is_named";
    if alone_with(test, &[(Family::VARIABLE, "sm_90a")]) && is_hopper() == Some(true) {
        let cuda = Cuda::new(0).expect("a device");
        for (dim, shape) in [(96, "96"), (136, "192"), (192, "192")] {
            for (dtype, element) in [(Dtype::Bf16, "bf16"), (Dtype::F16, "f16")] {
                let prepared = cuda.prepare(dtype, dim, dim);
                if has_kernel(&format!("hopper_forward_bf16_{shape}")) {
                    prepared.expect("the kernels of the folder");
                    continue;
                }
                let error = prepared.expect_err("no kernel");
                assert!(matches!(error, Error::Unsupported { .. }), "{error}");
                let said = error.to_string();
                for part in [
                    &format!("kernel hopper_forward_{element}_{shape}"),
                    "ptx/compile --with FORWARD_96_192 FOLDER and set CPATTN_CUDA_KERNELS=FOLDER",
                    "unset CPATTN_CUDA_FAMILY",
                ] {
                    assert!(said.contains(part), "{said}: no `{part}`");
                }
            }
        }
        cuda.prepare(Dtype::Bf16, 128, 128).expect("the library's own");
    }
}

#[test]
fn a_variable_that_names_nothing_is_refused() {
    if alone_with("family::a_variable_that_names_nothing_is_refused", &[(Family::VARIABLE, "sm_90")]) {
        let error = Cuda::new(0).map(|_| ()).expect_err("no family").to_string();
        assert!(error.starts_with("CPATTN_CUDA_FAMILY is \"sm_90\", expected one of sm_80, sm_90a"), "{error}");
        assert!(Cuda::shared(0).is_err());
    }
}

/// A driver that refuses tensor maps: calls whose tensors need them fail, and say what to do; no other kernel takes
/// them.
#[test]
fn a_driver_that_refuses_maps_is_not_hidden() {
    let test = "family::a_driver_that_refuses_maps_is_not_hidden";
    if alone_with(test, &[("CPATTN_EMU_REFUSE", "tensor_map")]) && is_hopper() == Some(true) {
        let device = Device::open().expect("a device");
        for _ in 0..2 {
            let error = try_launch(&device, |_| ()).map(|_| ()).expect_err("refused").to_string();
            assert!(error.contains("cuTensorMapEncodeTiled") && error.contains("CPATTN_CUDA_FAMILY=sm_80"), "{error}");
        }
        // Tensors that no map describes need none.
        let before = emulated_count(c"cpattn_forward");
        launch(&device, |call| {
            for t in [&mut call.q, &mut call.k, &mut call.v] {
                t.ptr = t.ptr.wrapping_add(64 * 2);
                t.head_stride = -64;
            }
        });
        assert_eq!(emulated_count(c"cpattn_forward"), before.map(|n| n + 1));
        let device = Device::of(Cuda::with_family(0, Family::Sm80)).expect("a device");
        assert_eq!(launched(&device), [0, 1]);
    }
}

/// The forward for `sm_80` is loaded when a call needs it: not where the other one takes all calls.
#[test]
fn the_other_forward_is_loaded_when_it_is_needed() {
    if alone_with("family::the_other_forward_is_loaded_when_it_is_needed", &[]) && is_hopper() == Some(true) {
        let modules = || emulated_count(c"cuModuleLoadData").expect("asked before");
        let device = Device::open().expect("a device");
        let before = modules();
        device.cuda.prepare(Dtype::Bf16, 64, 64).expect("the kernels");
        launch(&device, |_| ());
        // The forward, the backward, and the three that no head dim changes.
        assert_eq!(modules() - before, 5);
        for _ in 0..2 {
            launch(&device, |call| [&mut call.k, &mut call.v].into_iter().for_each(|t| t.head_stride = 0));
            assert_eq!(modules() - before, 6);
        }
    }
}

/// A driver whose compiler fails on the text for `sm_90a`: every call that takes it fails, and says what to do.
#[test]
fn a_driver_that_refuses_the_text_is_not_hidden() {
    let test = "family::a_driver_that_refuses_the_text_is_not_hidden";
    if alone_with(test, &[("CPATTN_EMU_REFUSE", "sm_90a")]) && is_hopper() == Some(true) {
        let device = Device::open().expect("a device");
        for _ in 0..2 {
            let error = device.cuda.prepare(Dtype::Bf16, 64, 64).expect_err("refused").to_string();
            assert!(error.contains("hopper_forward_bf16_64.ptx") && error.contains("218"), "{error}");
            assert!(error.contains("CPATTN_CUDA_FAMILY=sm_80"), "{error}");
        }
        // Head dims that take the other kernels are not concerned, nor is a device that is told to.
        device.cuda.prepare(Dtype::Bf16, 96, 96).expect("the kernels for sm_80");
        let device = Device::of(Cuda::with_family(0, Family::Sm80)).expect("a device");
        assert_eq!(launched(&device), [0, 1]);
    }
}
