// SPDX-License-Identifier: MIT OR Apache-2.0
//! How each kernel is loaded: when a call first needs it.
//!
//! If the driver refuses a text for `sm_90a`, the call fails. To use the kernel for `sm_80` instead would be slower,
//! and never noticed.

use super::abi::shapes::{Shape, Shaped};
use super::family::Family;
use super::hopper::hopper_backward::BACKWARD;
use super::hopper::kernel_of;
use super::modules::{AttentionModule, Blocks, ELEMENTS, Instance, Loaded, LoadedKernel, LoadedModule};
use super::{Cuda, embedded, replaced};
use crate::device::driver::{Image, Module};
use crate::element::Dtype;
use crate::error::{Error, Result};
use alloc::format;
use core::ffi::CStr;

impl Cuda {
    /// The modules that forwards and backwards of all gradients run.
    fn modules(&self, instance: Instance) -> impl Iterator<Item = AttentionModule> {
        let forward = match self.hopper_shape(instance.index) {
            Some(_) => AttentionModule::HopperForward,
            None => AttentionModule::Forward,
        };
        let backward = match (self.hopper_backward(instance.index), self.fused(instance.shape())) {
            (Some(_), _) => AttentionModule::HopperBackward,
            (None, Some(_)) => AttentionModule::Fused,
            (None, None) => AttentionModule::Sides,
        };
        let cluster = self.has_clusters(instance.index).then_some(AttentionModule::HopperCluster);
        [Some(forward), cluster, Some(backward)].into_iter().flatten()
    }

    /// Loads the kernels for an element type and head dims, which can take the driver seconds. Call it when you make
    /// the plan; otherwise the first call loads its kernels. If the device runs the backward as one kernel, the kernels
    /// for one side's gradients are not loaded here, but by the first call that needs only one side; if it runs a
    /// kernel for `sm_90a`, the one for `sm_80` is loaded by the first launch whose tensors need it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for types and dims there is no kernel for, [`Error::Device`] when the driver refuses the
    /// PTX.
    pub fn prepare(&self, dtype: Dtype, head_dim: u32, value_dim: u32) -> Result<()> {
        let instance = Instance::find(dtype, head_dim, value_dim)?;
        self.modules(instance).try_for_each(|module| self.load_all(module, instance).map(|_| ()))?;
        self.prepare_blocks()
    }

    /// Loads the kernels that do not depend on head dims: transforms, delta, finish, merge, the sinks' gradient.
    ///
    /// # Errors
    /// [`Error::Device`] when the driver refuses the PTX.
    pub fn prepare_blocks(&self) -> Result<()> {
        self.blocks().map(|_| ())
    }

    /// Whether the kernels for this type and these dims are loaded.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for types and dims there is no kernel for.
    pub fn is_prepared(&self, dtype: Dtype, head_dim: u32, value_dim: u32) -> Result<bool> {
        let instance = Instance::find(dtype, head_dim, value_dim)?;
        let mut kernels = self.kernels();
        Ok(self.modules(instance).all(|module| kernels.slot(module, instance).is_some()))
    }

    /// The kernel of a module that has one, loaded if it is not.
    pub(super) fn load(&self, module: AttentionModule, instance: Instance) -> Result<LoadedKernel> {
        Ok(self.load_all(module, instance)?[0].expect("every module has a kernel"))
    }

    /// The kernels of a module, loaded if they are not.
    pub(super) fn load_all(&self, module: AttentionModule, instance: Instance) -> Result<[Option<LoadedKernel>; 3]> {
        let mut kernels = self.kernels();
        let slot = kernels.slot(module, instance);
        let loaded = match slot {
            Some(loaded) => loaded,
            None => slot.insert(self.load_module(module, instance)?),
        };
        Ok(loaded.kernels)
    }

    fn load_module(&self, module: AttentionModule, instance: Instance) -> Result<LoadedModule> {
        let shape = instance.shape();
        let fused = self.fused(shape).or(shape.fused);
        let open = |file| self.module(&format!("{file}_{}_{}", ELEMENTS[instance.element], shape.name));
        let one = |file, name, launch| {
            let text = open(file)?;
            Ok(Loaded { kernels: [Some(self.function(&text, name, launch)?), None, None], _modules: [text] })
        };
        match module {
            AttentionModule::Forward => {
                let text = open("forward")?;
                Ok(Loaded { kernels: [Some(self.forward_of(&text, shape)?), None, None], _modules: [text] })
            }
            AttentionModule::Fused if fused != shape.fused => {
                one("fused_narrow", c"cpattn_backward_fused_narrow", fused.expect("asked before").launch)
            }
            AttentionModule::Fused => one("fused", c"cpattn_backward_fused", fused.expect("asked before").launch),
            AttentionModule::Sides => {
                let text = open("backward")?;
                let kernel = |name, launch| self.function(&text, name, launch).map(Some);
                let queries = kernel(c"cpattn_backward_queries", shape.queries)?;
                let keys = kernel(c"cpattn_backward_keys", shape.keys)?;
                let values = if shape.split { kernel(c"cpattn_backward_values", shape.keys)? } else { None };
                Ok(Loaded { kernels: [queries, keys, values], _modules: [text] })
            }
            AttentionModule::DroppedForward => {
                one("dropped_forward", c"cpattn_dropped_forward", shape.dropped.expect("as found").forward)
            }
            AttentionModule::DroppedSides => {
                let (text, dropped) = (open("dropped_backward")?, shape.dropped.expect("as found"));
                let queries = self.function(&text, c"cpattn_dropped_queries", dropped.queries)?;
                let keys = self.function(&text, c"cpattn_dropped_keys", dropped.keys)?;
                Ok(Loaded { kernels: [Some(queries), Some(keys), None], _modules: [text] })
            }
            AttentionModule::PagedForward => {
                one("paged_forward", c"cpattn_paged_forward", shape.dropped.expect("as found").forward)
            }
            AttentionModule::HopperForward => {
                one("hopper_forward", c"cpattn_hopper_forward", kernel_of(instance.index).launch)
                    .map_err(Family::with_way_out)
            }
            AttentionModule::HopperCluster => {
                one("hopper_cluster", c"cpattn_hopper_cluster", kernel_of(instance.index).launch)
                    .map_err(Family::with_way_out)
            }
            AttentionModule::HopperBackward => {
                let launch = BACKWARD[instance.index].expect("asked before").launch;
                one("hopper_backward", c"cpattn_hopper_backward", launch).map_err(Family::with_way_out)
            }
        }
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

    /// The kernels that do not depend on head dims, loaded if they are not.
    pub(super) fn blocks(&self) -> Result<Blocks> {
        let slot = &mut self.kernels().blocks;
        if let Some(loaded) = slot {
            return Ok(loaded.kernels);
        }
        let modules = [self.module("transform")?, self.module("sinks")?, self.module("tags")?];
        let [transform, sinks, tags] = &modules;
        let kernels = Blocks {
            transform: transform.function(c"cpattn_transform", 0)?,
            delta: transform.function(c"cpattn_delta", 0)?,
            finish: transform.function(c"cpattn_finish", 0)?,
            merge: transform.function(c"cpattn_merge", 0)?,
            combine: transform.function(c"cpattn_combine", 0)?,
            sinks: sinks.function(c"cpattn_sinks", 0)?,
            begin_run: tags.function(c"cpattn_begin_run", 0)?,
            arrived: tags.function(c"cpattn_arrived", 0)?,
        };
        Ok(slot.insert(Loaded { kernels, _modules: modules }).kernels)
    }

    fn module(&self, name: &str) -> Result<Module> {
        if let Some((file, image)) = self.replaced.and_then(|replaced| replaced.find(name)) {
            return Module::new(&self.context, &file, &image);
        }
        replaced::check_set(self.replaced, name)?;
        let text = embedded::find(name).ok_or_else(|| {
            Error::unsupported(format!("kernel {name}"), "it is not embedded in this build", "build from a whole tree")
        })?;
        Module::new(&self.context, &format!("{name}.ptx"), &Image::Text(text))
    }

    fn function(&self, module: &Module, name: &CStr, launch: Shaped) -> Result<LoadedKernel> {
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
}
