// SPDX-License-Identifier: MIT OR Apache-2.0
//! Modules: PTX read and decoded, and kernels ready to run.

use crate::mem::{Memory, Owner};
use crate::op::table::Table;
use crate::op::{Code, decode};
use crate::ptx::ast::Ast;
use crate::ptx::{self, Param, Space};
use crate::report::LoadError;
use std::sync::Arc;

/// A module, not yet in any memory.
pub struct Module {
    ast: Ast,
    codes: Vec<Arc<Code>>,
    text: Arc<Vec<String>>,
    hash: u64,
}

/// A module whose variables have addresses.
pub struct Loaded {
    /// (name, address, bytes) of each variable in global or constant memory.
    pub variables: Vec<(String, u64, u64)>,
    kernels: Vec<Kernel>,
}

/// A kernel of a loaded module.
#[derive(Clone)]
pub struct Kernel {
    pub(crate) code: Arc<Code>,
    /// Address of each variable of the module, 0 for those in shared memory.
    pub(crate) globals: Arc<Vec<u64>>,
    pub(crate) text: Arc<Vec<String>>,
    pub(crate) hash: u64,
}

impl Module {
    /// Reads PTX. An instruction or modifier that is not understood is an error that names it.
    pub fn parse(text: &str) -> Result<Self, LoadError> {
        let ast = ptx::parse(text)?;
        let table = Table::new();
        let codes =
            ast.entries.iter().map(|e| decode::decode(e, &ast.vars, &table).map(Arc::new)).collect::<Result<_, _>>()?;
        // FNV-1a: only to tell modules apart.
        let hash = text
            .trim_end()
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        Ok(Self { ast, codes, text: Arc::new(text.lines().map(str::to_owned).collect()), hash })
    }

    /// The architecture it was compiled for: 80 for `sm_80`; and whether it only runs there (`sm_90a`).
    pub fn target(&self) -> Option<(u32, bool)> {
        let t = self.ast.target.strip_prefix("sm_")?;
        let digits = t.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        Some((digits.parse().ok()?, digits.len() != t.len()))
    }

    /// Names the text: equal for equal text.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The PTX version: major and minor.
    pub fn version(&self) -> (u32, u32) {
        self.ast.version
    }

    /// Gives its variables memory.
    pub fn load(&self, mem: &mut Memory) -> Result<Loaded, LoadError> {
        let mut globals = Vec::new();
        let mut variables = Vec::new();
        for v in &self.ast.vars {
            let address = match v.space {
                Space::Global => mem.alloc_as(v.size as usize, Owner::Device, &v.name),
                Space::Const => mem.alloc_as(v.size as usize, Owner::Constant, &v.name),
                _ => 0,
            };
            if address != 0 {
                variables.push((v.name.clone(), address, v.size));
            }
            globals.push(address);
        }
        for (v, &address) in self.ast.vars.iter().zip(&globals).filter(|(_, a)| **a != 0) {
            let mut bytes = v.init.clone();
            bytes.resize(v.size as usize, 0);
            for (at, name, addend) in &v.init_addresses {
                let Some(k) = self.ast.vars.iter().position(|o| o.name == *name) else {
                    return Err(LoadError::new(0, format!("`{}` is initialised with unknown `{name}`", v.name)));
                };
                let value = globals[k].wrapping_add_signed(*addend);
                bytes[*at as usize..*at as usize + 8].copy_from_slice(&value.to_le_bytes());
            }
            if mem.write(address, &bytes).is_err() {
                return Err(LoadError::new(0, format!("no memory for `{}`", v.name)));
            }
        }
        let globals = Arc::new(globals);
        let kernels = self
            .codes
            .iter()
            .map(|c| Kernel { code: c.clone(), globals: globals.clone(), text: self.text.clone(), hash: self.hash })
            .collect();
        Ok(Loaded { variables, kernels })
    }
}

impl Loaded {
    /// A kernel by its name.
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|k| k.code.name == name)
    }

    /// All kernels.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }
}

impl Kernel {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.code.name
    }

    /// Its parameters.
    pub fn params(&self) -> &[Param] {
        &self.code.params
    }

    /// Bytes of the parameter buffer.
    pub fn param_bytes(&self) -> usize {
        self.code.param_bytes
    }

    /// Bytes of static shared memory.
    pub fn static_shared(&self) -> u32 {
        self.code.static_shared
    }

    /// Bytes of local memory per thread.
    pub fn local_bytes(&self) -> u32 {
        self.code.local_bytes
    }

    /// The most threads a block may have.
    pub fn max_threads(&self) -> u32 {
        let most = self.code.max_threads.or(self.code.required_threads);
        most.map_or(1024, |m| m.iter().product::<u32>().min(1024))
    }

    /// The block it has to be launched with, where it says so.
    pub fn required_threads(&self) -> Option<[u32; 3]> {
        self.code.required_threads
    }

    /// The blocks of its clusters, where it says so.
    pub fn required_cluster(&self) -> Option<[u32; 3]> {
        self.code.required_cluster
    }

    /// Names the text of its module.
    pub(crate) fn module_hash(&self) -> u64 {
        self.hash
    }

    /// A line of the PTX, from 1.
    pub fn text(&self, line: u32) -> &str {
        self.text.get(line.wrapping_sub(1) as usize).map_or("", |t| t.trim())
    }
}
