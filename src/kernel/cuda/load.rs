// SPDX-License-Identifier: MIT OR Apache-2.0
//! How each kernel is loaded: when a call first needs it.
//!
//! If the driver refuses a text for `sm_90a`, the call fails. To use the kernel for `sm_80` instead would be slower,
//! and never noticed.

use super::Cuda;
use super::embedded;
use super::family::Family;
use super::hopper::FORWARD;
use super::hopper_backward::BACKWARD;
use super::loaded::{Blocks, ByShape, ELEMENTS, Loaded, LoadedKernels, Sides};
use super::loaded_kernel::LoadedKernel;
use super::shapes::{SHAPES, Shape, Shaped};
use crate::device::driver::Module;
use crate::error::{Error, Result};
use alloc::format;
use core::ffi::CStr;

impl Cuda {
    pub(super) fn module(&self, name: &str) -> Result<Module> {
        let text = embedded::find(name).ok_or_else(|| {
            Error::unsupported(format!("kernel {name}"), "it is not embedded in this build", "build from a whole tree")
        })?;
        Module::new(&self.context, name, &text)
    }

    pub(super) fn function(&self, module: &Module, name: &CStr, launch: Shaped) -> Result<LoadedKernel> {
        if launch.shared > self.shared_limit {
            return Err(Error::unsupported(
                format!("{} bytes of shared memory for {name:?}", launch.shared),
                format!("device {} has {}", self.context.ordinal(), self.shared_limit),
                "use the CPU kernels",
            ));
        }
        let function = module.function(name, launch.shared)?;
        let _entered = self.enter()?;
        let each = function.blocks_per_multiprocessor(launch.threads, launch.shared)?;
        Ok(LoadedKernel { function, launch, each })
    }

    /// The kernel in a slot, loaded if it is not: `make` finds it in the module `{name}_{element}_{shape}`.
    fn load(
        &self,
        kernels: &mut ByShape<Loaded>,
        (name, element, shape): (&str, usize, usize),
        make: impl FnOnce(&Module) -> Result<LoadedKernel>,
    ) -> Result<LoadedKernel> {
        let slot = &mut kernels[element][shape];
        if let Some(kernel) = slot {
            return Ok(kernel.ready);
        }
        let module = self.module(&format!("{name}_{}_{}", ELEMENTS[element], SHAPES[shape].name))?;
        let ready = make(&module)?;
        *slot = Some(Loaded { ready, _module: module });
        Ok(ready)
    }

    /// The forward for `sm_80`.
    pub(super) fn load_forward(
        &self,
        kernels: &mut LoadedKernels,
        element: usize,
        shape: usize,
    ) -> Result<LoadedKernel> {
        let make = |module: &Module| self.forward_of(module, &SHAPES[shape]);
        self.load(&mut kernels.forward, ("forward", element, shape), make)
    }

    /// The fused backward for `sm_80` of a shape for which the device has the shared memory.
    pub(super) fn load_fused(&self, kernels: &mut LoadedKernels, element: usize, shape: usize) -> Result<LoadedKernel> {
        let fused = self.fused(&SHAPES[shape]).expect("asked before");
        let (file, kernel) = match fused == SHAPES[shape].fused {
            true => ("fused", c"cpattn_backward_fused"),
            false => ("fused_narrow", c"cpattn_backward_fused_narrow"),
        };
        self.load(&mut kernels.fused, (file, element, shape), |module| self.function(module, kernel, fused.launch))
    }

    /// The forward for `sm_90a` of a shape that has one.
    pub(super) fn load_hopper(
        &self,
        kernels: &mut LoadedKernels,
        element: usize,
        shape: usize,
    ) -> Result<LoadedKernel> {
        self.load_hopper_forward(&mut kernels.hopper, c"cpattn_hopper_forward", ("hopper_forward", element, shape))
    }

    /// The forward for `sm_90a` in clusters of two blocks, of a shape that has one.
    pub(super) fn load_hopper_cluster(
        &self,
        kernels: &mut LoadedKernels,
        element: usize,
        shape: usize,
    ) -> Result<LoadedKernel> {
        self.load_hopper_forward(
            &mut kernels.hopper_cluster,
            c"cpattn_hopper_cluster",
            ("hopper_cluster", element, shape),
        )
    }

    fn load_hopper_forward(
        &self,
        kernels: &mut ByShape<Loaded>,
        kernel: &CStr,
        name: (&str, usize, usize),
    ) -> Result<LoadedKernel> {
        let launch = FORWARD[name.2].expect("asked before").launch;
        self.load(kernels, name, |module| self.function(module, kernel, launch)).map_err(Family::with_way_out)
    }

    /// The backward for `sm_90a` of a shape that has one.
    pub(super) fn load_hopper_backward(
        &self,
        kernels: &mut LoadedKernels,
        element: usize,
        shape: usize,
    ) -> Result<LoadedKernel> {
        let launch = BACKWARD[shape].expect("asked before").launch;
        let make = |module: &Module| self.function(module, c"cpattn_hopper_backward", launch);
        let name = ("hopper_backward", element, shape);
        self.load(&mut kernels.hopper_backward, name, make).map_err(Family::with_way_out)
    }

    /// The backward kernels that each make the gradients of one side.
    pub(super) fn load_sides<'a>(
        &self,
        kernels: &'a mut LoadedKernels,
        element: usize,
        shape: usize,
    ) -> Result<&'a Sides> {
        let slot = &mut kernels.sides[element][shape];
        if slot.is_none() {
            let s = &SHAPES[shape];
            let module = self.module(&format!("backward_{}_{}", ELEMENTS[element], s.name))?;
            *slot = Some(Sides {
                queries: self.function(&module, c"cpattn_backward_queries", s.queries)?,
                keys: self.function(&module, c"cpattn_backward_keys", s.keys)?,
                values: match s.split {
                    true => Some(self.function(&module, c"cpattn_backward_values", s.keys)?),
                    false => None,
                },
                _module: module,
            });
        }
        Ok(slot.as_ref().expect("filled above"))
    }

    pub(super) fn blocks<'a>(&self, kernels: &'a mut LoadedKernels) -> Result<&'a Blocks> {
        if kernels.blocks.is_none() {
            let module = self.module("transform")?;
            let sinks = self.module("sinks")?;
            let tags = self.module("tags")?;
            kernels.blocks = Some(Blocks {
                transform: module.function(c"cpattn_transform", 0)?,
                delta: module.function(c"cpattn_delta", 0)?,
                finish: module.function(c"cpattn_finish", 0)?,
                merge: module.function(c"cpattn_merge", 0)?,
                sinks: sinks.function(c"cpattn_sinks", 0)?,
                begin_run: tags.function(c"cpattn_begin_run", 0)?,
                arrived: tags.function(c"cpattn_arrived", 0)?,
                _modules: [module, sinks, tags],
            });
        }
        Ok(kernels.blocks.as_ref().expect("filled above"))
    }

    /// The forward of the shape: the wide tiles if two blocks of them share a multiprocessor, otherwise the narrow
    /// ones, if there are any.
    fn forward_of(&self, module: &Module, shape: &Shape) -> Result<LoadedKernel> {
        let Some(narrow) = shape.narrow else { return self.function(module, c"cpattn_forward", shape.forward) };
        if shape.forward.shared <= self.shared_limit {
            let wide = self.function(module, c"cpattn_forward", shape.forward)?;
            if wide.each >= 2 {
                return Ok(wide);
            }
        }
        self.function(module, c"cpattn_forward_narrow", narrow)
    }
}
